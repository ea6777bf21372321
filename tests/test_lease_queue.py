"""Requests of one engine that wait for room for a lease: who came first has it first."""

from __future__ import annotations

import pytest

from connectors.request_lookups import LOADING_LIMIT_NS
from tests.harness.script import Request, Script


def at_the_cap() -> tuple[Script, Request, Request, int]:
    """The first asks anew; the last is known to want a lease, and has just given its own back."""
    script, first = Script(), Request("a", 33)
    last = Request("b", 33, "b")
    script.arrive(first, capped=True)
    script.arrive(last, [0, 1])
    assert script.matched(first) == (None, False)
    (step,) = script.steps()
    assert len(step.release) == 1
    return script, first, last, step.lookups[0].ask


def test_O20_whoever_gave_his_lease_back_does_not_ask_before_it_was_of_use() -> None:
    """`make sim`, seed 1394: asked at once again, he was answered first, again and again."""
    script, first, last, asked = at_the_cap()
    for _ in range(3):
        assert script.matched(first) == (None, False)
        assert script.matched(last) == (None, False)
        assert script.lookups() == []
        script.step()
    script.answer(asked, [0, 1])
    assert script.matched(first) == (32, True)
    assert script.matched(last) == (None, False)
    assert len(script.lookups()) == 1, "it asks now"


def test_O20_whoever_was_asked_for_on_the_way_has_to_give_it_back_too() -> None:
    script, first, last, asked = at_the_cap()
    third = Request("c", 33, "c")
    theirs = script.arrive(third, [0, 1])
    script.answer(asked, capped=True)
    assert script.matched(first) == (None, False)
    assert script.matched(last) == script.matched(third) == (None, False)
    (step,) = script.steps()
    assert step.release == (theirs,)
    assert len(step.lookups) == 1, "the first one's"


def test_O20_whoever_has_not_asked_yet_may() -> None:
    """Most find nothing, and need no room."""
    script, *_ = at_the_cap()
    fresh = Request("c", 33, "c")
    script.half.on_new_request(fresh)
    assert len(script.lookups()) == 1


@pytest.mark.parametrize("how", ["ended", "given up", "out of reach", "admitted"])
def test_O20_nobody_waits_for_one_that_wants_no_lease_any_more(how: str) -> None:
    script, first, last, asked = at_the_cap()
    if how == "ended":
        script.half.request_finished("a", ())
    elif how == "given up":
        script.now_ns += LOADING_LIMIT_NS + 1
        script.answer(asked, capped=True)
        script.half._requests["a"].deferred_ns = 0
        assert script.matched(first) == (0, False)
    elif how == "admitted":
        script.half.update_state_after_alloc("a", (), 0)
    else:
        script.step()
        assert script.matched(last) == (None, False)
        script.step()
    script.lookups()
    assert script.matched(last) == (None, False)
    assert len(script.lookups()) == 1


def test_O20_an_earlier_one_is_first_though_a_later_one_was_short_of_room_before() -> None:
    script, first = Script(), Request("a", 33)
    last = Request("b", 33, "b")
    script.half.on_new_request(first)
    (asked,) = script.lookups()
    script.arrive(last, capped=True)
    assert script.matched(last) == (None, False)
    (again,) = script.lookups()
    script.answer(asked.ask, capped=True)
    assert script.matched(first) == (None, False)
    assert len(script.lookups()) == 1
    script.answer(again.ask, capped=True)
    assert script.matched(last) == (None, False)
    assert script.lookups() == []
