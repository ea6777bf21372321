"""Requests of one engine that wait for room for a lease: who came first has it first."""

from __future__ import annotations

import pytest

from connectors.request_lookups import LOADING_LIMIT_NS, LeaseQueue
from connectors.request_state import TrackedRequest
from tests.harness.script import Request, Script


def at_the_cap() -> tuple[Script, Request, Request, int]:
    """The first asks anew; the last is known to want a lease, and has just given its own back."""
    script, first = Script(), Request("a", 33)
    last = Request("b", 33, "b")
    script.arrive(first, capped=True)
    script.arrive(last, [0, 1])
    assert script.matched(first) == (None, False)
    step, *_ = script.steps()
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
    step, *others = script.steps()
    assert step.release == (theirs,)
    assert len(step.lookups) == 1, "the first one's"
    assert not any(other.lookups for other in others)


def test_O20_whoever_has_not_asked_yet_may() -> None:
    """Most find nothing, and need no room."""
    script, *_ = at_the_cap()
    fresh = Request("c", 33, "c")
    script.half.on_new_request(fresh)
    assert len(script.lookups()) == 1


def test_O20_who_finds_nothing_waits_for_nobody() -> None:
    script, first, *_ = at_the_cap()
    fresh = Request("c", 33, "c")
    script.arrive(fresh)  # the answer names no block
    assert script.matched(first) == (None, False)
    assert script.matched(fresh) == (0, False)


def test_O20_who_comes_later_gives_a_lease_back_while_an_earlier_one_has_none() -> None:
    """`bench load`: those that came took the room as it came, and overtook half of the queue."""
    script, first, last, asked = at_the_cap()
    fresh = Request("c", 33, "c")
    theirs = script.arrive(fresh, [0, 1])
    script.step()
    assert script.released() == [theirs]
    script.answer(asked, [0, 1])
    script.step()
    (next_asked,) = script.lookups()
    assert script.matched(fresh) == (None, False)
    assert script.lookups() == [], "the other one comes before it"
    script.answer(next_asked.ask, [0, 1])
    assert tried(script, [first, last, fresh]) == [(32, True), (32, True), (None, False)]


def test_O20_what_a_peer_sends_is_not_given_back() -> None:
    script, first, _, _ = at_the_cap()
    fresh = Request("c", 33, "c")
    where = {
        "do_remote_prefill": True,
        "remote_host": "10.0.0.1",
        "remote_port": 1,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_block_ids": [[1, 2]],
    }
    script.half.on_new_request(fresh, where)
    (theirs,) = script.lookups()
    assert theirs.peer
    script.answer(theirs.ask, [0, 1])
    script.step()
    assert script.released() == []
    assert tried(script, [first, fresh]) == [(None, False), (32, True)]


def test_O20_the_first_has_its_lease_before_the_engine_has_room_for_it() -> None:
    """It asked when its turn came, and the next in the queue ran in its place."""
    script, loading, waiting = Script(), Request("a", 33), Request("b", 33, "b")
    script.arrive(loading, [0, 1])
    script.load(loading, [[1, 2]])
    script.arrive(waiting, [0, 1])
    first, second = requests = [Request(name, 33, name) for name in "cd"]
    for request in requests:
        script.arrive(request, capped=True)
    script.step()
    assert script.lookups() == [], "no lease has ended since"
    script.half.on_output({}, ["a"], [])
    script.step()
    (again,) = script.lookups()
    script.answer(again.ask, capped=True)
    script.step()
    assert script.lookups() == [], "there was too little room; it waits for more"
    script.half.request_finished("b", ())
    for _ in requests:
        script.step()
        (again,) = script.lookups()
        script.answer(again.ask, [0, 1])
    assert tried(script, [first, second]) == [(32, True)] * 2


@pytest.mark.parametrize("how", ["ended", "out of reach", "admitted"])
def test_O20_nobody_waits_for_one_that_wants_no_lease_any_more(how: str) -> None:
    script, _, last, _ = at_the_cap()
    if how == "ended":
        script.half.request_finished("a", ())
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


def in_line(count: int) -> tuple[Script, list[Request]]:
    """So many requests, none of which got a lease."""
    script, requests = Script(), [Request(str(n), 33, str(n)) for n in range(count)]
    for request in requests:
        script.arrive(request, capped=True)
    return script, requests


def tried(script: Script, requests: list[Request]) -> list[tuple[int | None, bool]]:
    """One step of the engine, in which it tries to admit all of them."""
    answers = [script.matched(request) for request in requests]
    script.step()
    return answers


def test_O20_those_in_line_ask_one_at_a_time() -> None:
    script, requests = in_line(5)
    tried(script, requests)
    for number in range(5):
        (again,) = script.lookups()
        script.answer(again.ask, capped=True)
        tried(script, requests[number:])
        (again,) = script.lookups()
        script.answer(again.ask, [0, 1])
        assert tried(script, requests[number:])[0] == (32, True)
        script.half.update_state_after_alloc(str(number), (), 0)


def test_O8_O20_a_line_is_waited_in_as_long_as_it_moves() -> None:
    """Four hundred prompts on disk: those whose turn came after five seconds were computed."""
    script, requests = in_line(5)
    tried(script, requests)
    for number in range(4):
        script.now_ns += LOADING_LIMIT_NS * 2 // 3
        (again,) = script.lookups()
        script.answer(again.ask, [0, 1])
        expected = [(32, True)] + [(None, False)] * (4 - number)
        assert tried(script, requests[number:]) == expected
        script.half.update_state_after_alloc(str(number), (), 0)
    assert "timed_out" not in script.half.take_stats()


def test_O8_O20_a_line_that_does_not_move_is_left() -> None:
    script, requests = in_line(3)
    assert tried(script, requests) == [(None, False)] * 3
    script.now_ns += LOADING_LIMIT_NS * 2 // 3
    (again,) = script.lookups()
    script.answer(again.ask, capped=True)
    assert tried(script, requests) == [(None, False)] * 3
    script.now_ns += LOADING_LIMIT_NS // 2
    (again,) = script.lookups()
    script.answer(again.ask, capped=True)
    assert tried(script, requests) == [(0, False)] * 3


def test_O8_O20_while_the_engine_admits_nobody_no_time_passes_in_line() -> None:
    """The engine runs as many requests as it may, and tries to admit none for a long time."""
    script, requests = in_line(3)
    tried(script, requests)
    (again,) = script.lookups()
    script.answer(again.ask, capped=True)
    script.step()
    script.now_ns += 3 * LOADING_LIMIT_NS
    assert tried(script, requests) == [(None, False)] * 3


def test_O20_who_left_the_line_and_came_back_has_his_place_again() -> None:
    line, requests = LeaseQueue(), [TrackedRequest(Request("r", 33), (), n) for n in range(3)]
    for tracked in (*requests, requests[1]):
        line.add(tracked)
    line.remove(requests[1])
    line.add(requests[1])
    for tracked in requests:
        assert line.first is tracked
        line.remove(tracked)
    assert line.first is None


def test_O20_who_hears_of_the_cap_while_the_engine_waits_for_the_answer_is_not_computed() -> None:
    script, request = Script(), Request("a", 33)
    script.half.on_new_request(request)
    (asked,) = script.lookups()
    script.answer(asked.ask, capped=True)
    script.on_its_way, script.inbox = script.inbox, []
    assert script.matched(request) == (None, False)
    (again,) = script.lookups()
    script.answer(again.ask, [0, 1])
    assert script.matched(request) == (32, True)


def test_Q61_Q62_whoever_asks_again_says_so() -> None:
    """Else each question of a request that waits for a lease would be a use of its blocks."""
    script, request = Script(), Request("a", 33)
    script.half.on_new_request(request)
    (first,) = script.lookups()
    script.answer(first.ask, capped=True)
    assert script.matched(request) == (None, False)
    (again,) = script.lookups()
    script.half.on_new_request(Request("b", 33, "b"))
    (other,) = script.lookups()
    assert again.hashes == first.hashes
    assert (first.again, again.again, other.again) == (False, True, False)
