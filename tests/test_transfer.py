"""Hand-over parameters, and what the scheduler half makes of them."""

from __future__ import annotations

import pytest

from connectors.transfer import NO_REMOTE, Remote, Transfer, is_handed_over, parameters, source_of
from kvstore import protocol as p
from kvstore.errors import ConfigError
from tests.script import Request, Script

GIVEN = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine",
    "remote_request_id": "r-1",
    "remote_host": "10.0.0.7",
    "remote_port": 9500,
    "remote_block_ids": [[1, 2]],
}


def test_parameters_say_where_a_prompt_is() -> None:
    assert source_of(GIVEN) == Remote("10.0.0.7:9500", "r-1")
    assert source_of({**GIVEN, "remote_host": "::1"}) == Remote("[::1]:9500", "r-1")
    assert source_of(None) == source_of({}) == NO_REMOTE
    assert source_of({"do_remote_prefill": False}) == NO_REMOTE


def test_what_is_handed_back_can_be_passed_along() -> None:
    made = parameters("engine", "r-1", "[::1]:9500", [[3, 4], []], 64, 2)
    assert source_of(made) == Remote("[::1]:9500", "r-1", tokens=64)
    assert not is_handed_over(made)
    assert made["remote_block_ids"] == [[3, 4], []]
    assert (made["remote_num_tokens"], made["tp_size"]) == (64, 2)


@pytest.mark.parametrize(
    "name", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
)
@pytest.mark.parametrize("value", [None, "", 0, True, [], 1.5, {"a": 1}])
def test_what_is_missing_or_wrong_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected a .*, found "):
        source_of({**GIVEN, name: value})


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_is_in_range(port: int) -> None:
    with pytest.raises(
        ConfigError, match=f"remote_port: expected a port up to 65535, found {port}"
    ):
        source_of({**GIVEN, "remote_port": port})


HANDED = {"do_remote_decode": True}
SIDE_CHANNEL = "127.0.0.1:9500"


def attached() -> Script:
    script = Script()
    script.client.side_channel = SIDE_CHANNEL
    script.half._hands._transfer = Transfer("engine")
    return script


def handings(script: Script) -> list[p.Handing]:
    return [handing for step in script.steps() for handing in step.handing]


def test_a_decode_requests_question_names_the_peer_once() -> None:
    script, wanted = attached(), Request("d", 49)
    script.half.on_new_request(wanted, GIVEN)
    (lookup,) = script.lookups()
    assert (lookup.peer, lookup.request, lookup.push) == ("10.0.0.7:9500", "r-1", False)
    script.answer(lookup.ask, [0, 1, 2], sources={"peer": 3})
    assert script.matched(wanted) == (48, True)


def test_L5_a_request_that_runs_again_is_not_fetched_again() -> None:
    script, wanted = attached(), Request("d", 49)
    script.half.on_new_request(wanted, GIVEN)
    script.answer(script.lookups()[0].ask, [0, 1, 2])
    script.load(wanted, [[1, 2, 3]])
    script.half.on_output({}, ["d"], [])
    script.half.update_state_after_alloc("d", [[1, 2, 3, 4]], 0)
    script.step(wanted, 1, [[1, 2, 3, 4]])
    wanted.num_computed_tokens = 0
    script.matched(wanted)
    assert [lookup.peer for lookup in script.lookups()] == [""]


def test_wrong_parameters_are_counted_and_the_prompt_is_computed() -> None:
    script, wanted = attached(), Request("d", 49)
    script.half.on_new_request(wanted, {**GIVEN, "remote_port": None})
    (step,) = script.steps()
    assert [lookup.peer for lookup in step.lookups] == [""]
    assert step.counts == {"transfer_refused": 1}


def test_a_prefill_request_is_announced_and_its_blocks_are_held() -> None:
    script, wanted = attached(), Request("p", 32)
    script.half.on_new_request(wanted, HANDED)
    assert handings(script) == [p.Handing("p", "running")]
    script.admit(wanted)
    script.step(wanted, 32, [[5, 6]])
    wanted.num_tokens += 1
    params = script.half.hand_over("p", [[5, 6]])
    assert params is not None
    assert source_of(params) == Remote(SIDE_CHANNEL, "p", tokens=32)
    assert not script.half.request_finished("p", [[5, 6]])
    assert script.half.has_pending_work()
    held = p.Handing("p", "done", b"".join(wanted.block_hashes), 32, b"", 30_000)
    assert handings(script) == [held]


def test_any_other_end_hands_back_nothing_and_holds_nothing() -> None:
    script, wanted = attached(), Request("p", 40)
    script.half.on_new_request(wanted, HANDED)
    script.admit(wanted)
    script.step(wanted, 40, [[5, 6, 7]])
    script.half.request_finished("p", [[5, 6, 7]])
    assert [handing.state for handing in handings(script)] == ["running", "gone"]
    assert script.half.hand_over("p", [[5, 6, 7]]) is None


def test_a_request_that_nobody_goes_on_with_is_not_handed_over() -> None:
    script, wanted = attached(), Request("p", 40)
    script.half.on_new_request(wanted)
    script.admit(wanted)
    script.step(wanted, 40, [[5, 6, 7]])
    assert script.half.hand_over("p", [[5, 6, 7]]) is None
    script.half.request_finished("p", [[5, 6, 7]])
    assert handings(script) == []


def test_without_a_side_channel_nothing_is_handed_over() -> None:
    script, wanted = Script(), Request("p", 40)
    script.half.on_new_request(wanted, HANDED)
    script.admit(wanted)
    script.step(wanted, 40, [[5, 6, 7]])
    assert script.half.hand_over("p", [[5, 6, 7]]) is None
