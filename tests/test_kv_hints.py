"""Hints of a router: what is read of them, and what a request's lookup says then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.engine_interface import Geometry
from connectors.kv_hints import Hint, hint_of
from connectors.kv_transfer_params import Transfer
from connectors.step_loads import StepLoads
from kvstore.core import limits
from kvstore.core.errors import ConfigError
from kvstore.core.types import GroupRule
from tests.harness.script import BLOCK, Request, Script, hashes

PLACE = "10.0.0.7:9500"
CHAIN = hashes(5)


def named(block_hash: bytes) -> int:
    """As a router has it."""
    return int.from_bytes(block_hash, "big") & (1 << 64) - 1


def hint(**payload: object) -> dict[str, Any]:
    """A hint on the first three blocks of a request, or another one."""
    right = {
        "source_control_endpoint": PLACE,
        "mode": "copy",
        "block_hashes": [named(each) for each in CHAIN[:3]],
    }
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0"}
    actions = [action | {"payload": right | payload}]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


def changed(**envelope: object) -> dict[str, Any]:
    return hint() | envelope


def asked(envelope: object, *, direct: bool = False) -> tuple[Script, Request]:
    script, request = Script(transfer=Transfer("e", direct=direct)), Request("r", 80)
    script.half.on_new_request(request, {"kv_hint": envelope})
    return script, request


@pytest.mark.parametrize("scheme", ["", "tcp://"])
def test_O26_a_lookup_names_the_source_and_how_much_it_is_said_to_have(scheme: str) -> None:
    script, request = asked(hint(source_control_endpoint=scheme + PLACE), direct=True)
    (lookup,) = script.lookups()
    assert (lookup.peer, lookup.hinted, lookup.request) == (PLACE, 3, "")
    assert lookup.hashes == b"".join(request.block_hashes), "its own ones, all of them"
    script.answer(lookup.ask, [0, 1, 2], sources={"peer": 3})
    assert script.matched(request) == (48, True)
    script.half.request_finished("r", ())
    assert not [gone for step in script.steps() for gone in step.unwanted], "nobody holds anything"


def test_O26_vllms_objects_are_read_as_tables_are() -> None:
    (action,) = hint()["actions"]
    made = SimpleNamespace(protocol_version="0.1", actions=[SimpleNamespace(**action)])
    assert hint_of(made) == hint_of(hint()) == Hint(PLACE, CHAIN[2][-8:])


def test_O26_other_actions_are_passed_over() -> None:
    (action,) = hint()["actions"]
    other = {"action_id": "b", "action_type": "kv.demote", "action_version": "7.0", "payload": 1}
    assert hint_of(changed(actions=[other, action])) == hint_of(hint())
    script, _ = asked(changed(actions=[other]))
    (step,) = script.steps()
    assert (step.lookups[0].peer, step.counts) == ("", {})


WRONG: dict[str, object] = {
    "no table": "10.0.0.7:9500",
    "another protocol": changed(protocol_version="0.2"),
    "no actions": changed(actions=None),
    "too many actions": changed(actions=[{}] * 17),
    "another version": changed(actions=[hint()["actions"][0] | {"action_version": "2.0"}]),
    "no payload": changed(actions=[{"action_type": "kv.fetch", "action_version": "1.0"}]),
    "another mode": hint(mode="move"),
    "no source": hint(source_control_endpoint=None),
    "an empty source": hint(source_control_endpoint="tcp://"),
    "half of a pair": hint(source_control_endpoint="h\udc80:1"),
    "a long source": hint(source_control_endpoint="h" * limits.NAME_MAX + ":1"),
    "no blocks": hint(block_hashes=[]),
    "a text of blocks": hint(block_hashes="abc"),
    "a block that is none": hint(block_hashes=[True]),
    "a large number": hint(block_hashes=[1 << 64]),
    "a negative number": hint(block_hashes=[-1]),
    "blocks of another prompt": hint(block_hashes=[named(each) for each in hashes(3, "b")]),
}


@pytest.mark.parametrize("name", WRONG)
def test_O26_a_wrong_hint_is_counted_and_nothing_else(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, request = asked(WRONG[name])
    (step,) = script.steps()
    (lookup,) = step.lookups
    assert (lookup.peer, lookup.hinted) == ("", 0)
    assert step.counts == {"hint_refused": 1}
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    script.answer(lookup.ask, [0, 1])
    assert script.matched(request) == (32, True), "of what is here"


class Watched(list[int]):
    """A list that is asked for its length and its last item, and never gone through."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("gone through")


def test_O26_a_long_hint_is_not_gone_through() -> None:
    """Nor written to a log: a step of the engine has no time for that."""
    found = hint_of(hint(block_hashes=Watched([1, 2, named(CHAIN[4])])))
    assert found is not None
    assert found.covered(CHAIN) == 5
    with pytest.raises(ConfigError) as caught:
        hint_of(hint(block_hashes=[*range(65_000), -1]))
    assert len(str(caught.value)) < 300


def test_O26_a_block_is_found_where_a_hash_ends_alone() -> None:
    """The same bytes may be elsewhere in the hashes."""
    last = bytes(range(1, 9))
    inside, ends = bytes(20) + last + bytes(4), bytes(24) + last
    chain = [last + bytes(24), ends, bytes(32), inside, ends]
    assert Hint(PLACE, last).covered(chain[:1]) == 0
    assert Hint(PLACE, last).covered(chain[:4]) == 2
    assert Hint(PLACE, last).covered(chain) == 5
    assert Hint(PLACE, last).covered([]) == 0


def test_O26_whole_blocks_are_asked_for_of_several_engine_blocks_each() -> None:
    geometry = Geometry(2 * BLOCK, BLOCK, (BLOCK,), (GroupRule(),))
    for covered, blocks in ((1, 0), (2, 1), (3, 1), (4, 2)):
        script, request = Script(geometry), Request("r", 100)
        last = named(request.block_hashes[covered - 1])
        script.half.on_new_request(request, {"kv_hint": hint(block_hashes=[last])})
        assert [lookup.hinted for lookup in script.lookups()] == [blocks]


def test_O26_a_hand_over_comes_before_a_hint() -> None:
    script, request = Script(), Request("r", 80)
    given = {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_request_id": "r-1",
        "remote_host": "10.0.0.8",
        "remote_port": 9500,
        "remote_block_ids": [[1]],
    }
    script.half.on_new_request(request, given | {"kv_hint": hint()})
    assert [(lookup.peer, lookup.hinted) for lookup in script.lookups()] == [("10.0.0.8:9500", 0)]


def test_O26_a_prefill_that_is_handed_over_may_have_a_source_of_its_own() -> None:
    script, request = Script(), Request("r", 80)
    script.half.on_new_request(request, {"do_remote_decode": True, "kv_hint": hint()})
    (step,) = script.steps()
    assert [lookup.hinted for lookup in step.lookups] == [3]
    assert [handed.state for handed in step.handed_over] == ["running"]


def test_O26_a_source_is_asked_once_by_a_request() -> None:
    """After a failed load other copies are tried, and those are here."""
    script, request = asked(hint())
    (lookup,) = script.lookups()
    script.answer(lookup.ask, [0, 1, 2], sources={"peer": 3})
    script.load(request, [[1, 2, 3, 4, 5]])
    script.half.on_output({}, ["r"], ["r"])
    request.num_computed_tokens = 0
    script.matched(request)
    assert [(again.peer, again.hinted) for again in script.lookups()] == [("", 0)]


def test_O26_a_hint_whose_blocks_are_here_costs_no_step() -> None:
    script = Script(step_loads=StepLoads(1024))
    request = Request("r", 80)
    script.half.on_new_request(request, {"kv_hint": hint()})
    (lookup,) = script.lookups()
    script.answer(lookup.ask, [0, 1, 2])
    assert script.matched(request) == (48, False), "loaded in the step that admits it"
