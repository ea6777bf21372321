"""Hand-over parameters, and what the scheduler half makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.kv_transfer_params import (
    NO_REMOTE,
    Remote,
    Transfer,
    common_id,
    is_handed_over,
    parameters,
    remote_of,
)
from kvstore.core import limits
from kvstore.core.errors import ConfigError
from kvstore.logs import LINES_MAX
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.script import Request, Script

GIVEN: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine",
    "remote_request_id": "r-1",
    "remote_host": "10.0.0.7",
    "remote_port": 9500,
    "remote_block_ids": [[1, 2]],
}
PUSHED = Transfer(push=True)
TWO_WAY = Transfer("engine", two_way=True)


def test_parameters_say_where_a_prompt_is() -> None:
    assert remote_of(GIVEN) == Remote("10.0.0.7:9500", "r-1")
    there = remote_of({**GIVEN, "remote_host": "::1", "remote_num_tokens": 50})
    assert there == Remote("[::1]:9500", "r-1", tokens=50)
    pushed = remote_of({**GIVEN, "remote_block_ids": None, "tp_size": 1}, PUSHED)
    assert pushed == Remote("10.0.0.7:9500", "r-1", push=True)
    assert remote_of({**GIVEN, "remote_block_ids": [3, 4]}) == remote_of(GIVEN)
    assert remote_of(None) == remote_of({}) == NO_REMOTE
    assert remote_of({"do_remote_prefill": False, "remote_port": "x"}) == NO_REMOTE


def test_B10_what_is_handed_back_can_be_passed_along() -> None:
    made = parameters(Transfer("engine"), "r-1", "[::1]:9500", [[3, 4], []], 64, 2)
    assert made == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine",
        "remote_request_id": "r-1",
        "remote_host": "::1",
        "remote_port": 9500,
        "remote_block_ids": [[3, 4], []],
        "remote_num_tokens": 64,
        "tp_size": 2,
    }
    for how in (Transfer(), Transfer(push=False), PUSHED):
        assert remote_of(made, how) == Remote("[::1]:9500", "r-1", how.push, 64)
    assert not is_handed_over(made)


def test_B10_a_prefill_that_left_nothing_is_asked_for_nothing() -> None:
    for how in (Transfer(), Transfer(push=False), PUSHED):
        nothing: tuple[object, ...] = ([], [[], []], None)
        for blocks in nothing:
            empty = {**GIVEN, "remote_block_ids": blocks, "remote_num_tokens": 0}
            assert remote_of(empty, how) == NO_REMOTE


NAMES = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [None, "", 0, True, [], 1.5, {"a": 1}])
def test_B7_what_is_missing_or_wrong_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected a .*, found "):
        remote_of({**GIVEN, name: value})


@pytest.mark.parametrize("name", [*GIVEN, "remote_num_tokens"])
def test_B7_a_number_that_python_does_not_write_is_refused(name: str) -> None:
    for value in (10**5000, -(10**5000), [[[10**5000]]]):
        change = {name: value, "tp_size": 1}
        if name == "remote_num_tokens" and isinstance(value, int) and value > 0:
            assert remote_of({**GIVEN, **change}).tokens == value, "as many as it likes"
            continue
        with pytest.raises(ConfigError, match=f"{name}: .* found .*a number of 16610 bits"):
            remote_of({**GIVEN, **change})


@pytest.mark.parametrize("blocks", [None, [], [[]], 5, "ids", [["1"]], {"0": [1]}])
@pytest.mark.parametrize("tokens", [None, 64])
def test_B7_a_pull_without_remote_blocks_is_refused(blocks: object, tokens: object) -> None:
    with pytest.raises(ConfigError, match=r"^remote_block_ids: expected lists of block ids, found"):
        remote_of({**GIVEN, "remote_block_ids": blocks, "remote_num_tokens": tokens})


def test_B7_parameters_of_a_router_that_pushes_will_do_where_our_store_chooses() -> None:
    """vLLM's proxy for pushing passes on where the prompt is, and not in which blocks."""
    made = parameters(Transfer("engine"), "r-1", "10.0.0.7:9500", [[3, 4]], 64, 2)
    dropped = {"remote_block_ids", "remote_num_tokens"}
    passed = {name: value for name, value in made.items() if name not in dropped}
    for how in (Transfer(), PUSHED):
        assert remote_of(passed, how) == Remote("10.0.0.7:9500", "r-1", how.push)
    with pytest.raises(ConfigError, match=r"^remote_block_ids: expected lists of block ids, found"):
        remote_of(passed, Transfer(push=False))
    with pytest.raises(ConfigError, match=r"^tp_size: expected a whole number from 1 on, found"):
        remote_of({**passed, "tp_size": 0})
    with pytest.raises(ConfigError, match=r"^remote_block_ids: expected lists of block ids, found"):
        remote_of({**passed, "remote_block_ids": []})


@pytest.mark.parametrize("size", [None, 0, -1, "1", True, 1.0])
def test_B7_a_push_without_the_others_size_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"^tp_size: expected a whole number from 1 on, found"):
        remote_of({**GIVEN, "tp_size": size}, PUSHED)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"do_remote_prefill": "yes"}, "do_remote_prefill: expected true or false, found 'yes'"),
        ({"do_remote_decode": 1}, "do_remote_decode: expected true or false, found 1"),
        ({"do_remote_decode": True}, "expected one of them, found both"),
        ({"remote_port": -1}, "remote_port: expected a port up to 65535, found -1"),
        ({"remote_port": 65536}, "remote_port: expected a port up to 65535, found 65536"),
        ({"remote_num_tokens": "40"}, "remote_num_tokens: expected a whole number"),
        ({"remote_num_tokens": 1.5}, "remote_num_tokens: expected a whole number"),
        ({"remote_num_tokens": -1}, "remote_num_tokens: expected a whole number from 0 on"),
        ({"tp_size": "two"}, "tp_size: expected a whole number from 1 on, found 'two'"),
        (
            {"remote_host": None, "remote_port": "x", "remote_block_ids": None},
            "remote_host: .*; remote_port: .*; remote_block_ids: ",
        ),
    ],
)
def test_B7_all_that_is_wrong_is_named_at_once(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        remote_of({**GIVEN, **change})


@pytest.mark.parametrize(
    ("name", "most"), [("remote_host", limits.NAME_MAX - 8), ("remote_request_id", limits.TEXT_MAX)]
)
def test_B7_S2_a_text_that_no_message_can_hold_is_refused(name: str, most: int) -> None:
    """A store that got one would end the session: each request of its engine."""
    there = remote_of({**GIVEN, name: "a" * most, "remote_port": 65535})
    asked = p.Step(
        (p.Lookup(1, b"h" * 32, 32, peer=there.address, request=there.request),),
        unwanted=(p.Unwanted(there.address, there.request),),
    )
    assert list(framing.Decoder(p.ToStore).feed(framing.encode(asked))) == [asked]
    with pytest.raises(ConfigError) as refused:
        remote_of({**GIVEN, name: "a" * 300_000})
    said = str(refused.value)
    assert said.startswith(f"{name}: expected a ")
    assert f" of up to {most} characters" in said
    assert "found 300000 characters" in said
    assert len(said) < 300
    for found in ("a" * (most + 1), "a\ud800"):
        with pytest.raises(ConfigError, match=f"^{name}: expected a .*, found {len(found)} char"):
            remote_of({**GIVEN, name: found})


def test_S2_what_is_wrong_is_shown_in_part() -> None:
    """Whoever sends a request can send megabytes of it."""
    for change in (
        {"remote_block_ids": ["x"] * 1_000_000},
        {"remote_engine_id": {"a": "b" * 1_000_000}},
        {"do_remote_decode": "y" * 1_000_000},
        {"tp_size": "z" * 1_000_000},
        {"remote_port": "\n" * 1_000_000},
    ):
        with pytest.raises(ConfigError) as refused:
            remote_of({**GIVEN, **change})
        assert len(str(refused.value)) < 400
        assert "\n" not in str(refused.value)


def test_B7_parameters_that_are_no_table_are_refused() -> None:
    params: Any = ["do_remote_prefill"]
    with pytest.raises(ConfigError, match="expected a table of parameters, found"):
        remote_of(params)
    assert not is_handed_over(params)


def test_L2_a_later_turn_is_pulled_from_its_decode_engine_only_where_that_is_wanted() -> None:
    turn = {**GIVEN, "do_remote_prefill": False, "do_remote_decode": True}
    assert remote_of(turn) == NO_REMOTE
    for push in (None, False, True):
        found = remote_of({**turn, "tp_size": 1}, Transfer(push=push, two_way=True))
        assert found == Remote("10.0.0.7:9500", "r-1", push, turn=True)
    first = dict.fromkeys(GIVEN, None) | {"do_remote_decode": True}
    assert remote_of(first, TWO_WAY) == NO_REMOTE, "nothing was decoded yet"
    with pytest.raises(ConfigError, match=r"remote_host: expected a host .*, found None"):
        remote_of({**turn, "remote_host": None}, TWO_WAY)


def test_P9_the_suffix_of_an_engine_is_no_part_of_a_common_id() -> None:
    assert common_id("cmpl-7-0-1a2b3c4d") == common_id("cmpl-7-0-deadbeef") == "cmpl-7-0"
    for name in ("cmpl-7-0", "r-1234567", "r-123456789", "r-ghijklmn", "12345678"):
        assert common_id(name) == name


UUID = "5f0c34a2-9d11-4f5e-8a39-0c6d2b1e7a90"


@pytest.mark.parametrize(
    ("given", "own", "named"),
    [
        (UUID, f"cmpl-{UUID}-0-1a2b3c4d", f"cmpl-{UUID}-0"),
        (UUID, f"cmpl-{UUID}-12-1a2b3c4d", f"cmpl-{UUID}-12"),
        (UUID, f"chatcmpl-{UUID}-1a2b3c4d", f"chatcmpl-{UUID}"),
        (UUID, f"1_chatcmpl-{UUID}-1a2b3c4d", f"1_chatcmpl-{UUID}"),
        (f"cmpl-{UUID}-0", f"cmpl-{UUID}-0-1a2b3c4d", f"cmpl-{UUID}-0"),
        (f"cmpl-{UUID}-0-deadbeef", f"cmpl-{UUID}-0-1a2b3c4d", f"cmpl-{UUID}-0-deadbeef"),
        (UUID, "cmpl-7-0-1a2b3c4d", UUID),
        ("7", "cmpl-17-0-1a2b3c4d", "7"),
        ("r-1", "r-1-1a2b3c4d", "r-1"),
        ("7", f"cmpl-7-{'x' * limits.TEXT_MAX}-0-1a2b3c4d", "7"),
        ("7", "cmpl-7-\ud800-0-1a2b3c4d", "7"),
    ],
)
def test_P9_a_request_that_a_router_names_by_its_header(given: str, own: str, named: str) -> None:
    """vLLM's proxy for pushing passes on the X-Request-Id of both legs, and no engine's id."""
    script = attached()
    script.half.on_new_request(Request(own, 49), {**GIVEN, "remote_request_id": given})
    (lookup,) = script.lookups()
    assert (lookup.peer, lookup.request) == (PEER, named)
    script.half.request_finished(own, ())
    assert let_go(script) == [p.Unwanted(PEER, named)]


HANDED = {"do_remote_decode": True}
SIDE_CHANNEL = "127.0.0.1:9500"
PEER = "10.0.0.7:9500"
LET_GO = [p.Unwanted(PEER, "r-1")]


def attached(transfer: Transfer = Transfer("engine"), **how: Any) -> Script:  # noqa: ANN401, B008
    script = Script(**how)
    script.client.side_channel = SIDE_CHANNEL
    script.half._hand_overs._transfer = transfer
    return script


def asking() -> tuple[Script, Request]:
    """A decode request has come, and its store was not asked yet."""
    script, wanted = attached(), Request("d", 49)
    script.half.on_new_request(wanted, GIVEN)
    return script, wanted


def fetching() -> tuple[Script, Request]:
    """The load of a decode request is under way."""
    script, wanted = asking()
    script.answer(script.lookups()[0].ask, [0, 1, 2])
    script.load(wanted, [[1, 2, 3]])
    return script, wanted


def compute(
    script: Script, request: Request, table: list[list[int]], params: dict[str, Any] | None = None
) -> None:
    """Let a request come and compute all of its prompt."""
    script.half.on_new_request(request, params)
    script.admit(request)
    script.step(request, request.num_tokens, table)


def end(script: Script, name: str, table: list[list[int]]) -> dict[str, Any] | None:
    """End a request whose blocks are all stored; what it hands back."""
    params = script.half.hand_over(name, table)
    assert not script.half.request_finished(name, table)
    return params


def let_go(script: Script) -> list[p.Unwanted]:
    return [gone for step in script.steps() for gone in step.unwanted]


def handed_over(script: Script) -> list[p.HandedOver]:
    return [handing for step in script.steps() for handing in step.handed_over]


def test_a_decode_requests_question_names_the_peer_once() -> None:
    script, wanted = asking()
    (lookup,) = script.lookups()
    assert (lookup.peer, lookup.request, lookup.push) == ("10.0.0.7:9500", "r-1", None)
    script.answer(lookup.ask, [0, 1, 2], sources={"peer": 3})
    assert script.matched(wanted) == (48, True)


def test_L5_a_request_that_runs_again_is_not_fetched_again() -> None:
    script, wanted = fetching()
    script.half.on_output({}, ["d"], [])
    script.half.update_state_after_alloc("d", [[1, 2, 3, 4]], 0)
    script.step(wanted, 1, [[1, 2, 3, 4]])
    wanted.num_computed_tokens = 0
    script.matched(wanted)
    assert [lookup.peer for lookup in script.lookups()] == [""]


@pytest.mark.parametrize(
    "change",
    [{"remote_port": None}, {"remote_host": "h" * 300}, {"remote_request_id": "r" * 5000}],
)
def test_B7_S2_wrong_parameters_are_counted_and_the_prompt_is_computed(
    change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    script, wanted = attached(), Request("d", 49)
    script.half.on_new_request(wanted, {**GIVEN, **change})
    (step,) = script.steps()
    assert [(lookup.peer, lookup.request) for lookup in step.lookups] == [("", "")]
    assert step.counts == {"transfer_refused": 1}
    (line,) = caplog.messages
    assert all(text in line for text in (*change, "expected", "found"))
    script.answer(1, [0, 1])
    assert script.matched(wanted) == (32, True), "of what is here"
    script.half.request_finished("d", ())
    assert let_go(script) == [], "no peer was named"


def test_S2_log_lines_that_requests_cause_are_few(caplog: pytest.LogCaptureFixture) -> None:
    script = attached()
    for number in range(50):
        script.half.on_new_request(Request(f"w{number}", 49), {**GIVEN, "remote_port": None})
        script.half.on_new_request(Request("x" * 5000 + str(number), 49), HANDED)
        script.steps()
    assert len(caplog.messages) == 2 * LINES_MAX


@pytest.mark.parametrize("name", ["x" * (limits.TEXT_MAX + 1), "x\udc80"])
@pytest.mark.parametrize("how", [HANDED, GIVEN])
def test_S2_a_request_whose_own_id_no_message_can_hold_is_not_handed_over(
    name: str, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It is the router's, or a client's header."""
    script, wanted = attached(TWO_WAY), Request(name, 49)
    compute(script, wanted, [[5, 6, 7, 8]], how)
    assert end(script, name, [[5, 6, 7, 8]]) is None
    assert handed_over(script) == []
    (line,) = caplog.messages
    assert f"expected an id of up to {limits.TEXT_MAX} characters, found {len(name)}" in line
    assert len(line) < 300
    assert script.half.take_stats()["transfer_refused"] == 1


def test_an_id_as_long_as_can_be_is_handed_over() -> None:
    name = "x" * limits.TEXT_MAX
    script, wanted = attached(), Request(name, 32)
    compute(script, wanted, [[5, 6]], HANDED)
    assert script.half.hand_over(name, [[5, 6]]) is not None
    script.half.request_finished(name, [[5, 6]])
    assert [handing.state for handing in handed_over(script)] == ["running", "done"]


def test_B10_a_prefill_request_is_announced_and_its_blocks_are_held() -> None:
    script, wanted = attached(), Request("p", 32)
    script.half.on_new_request(wanted, HANDED)
    assert handed_over(script) == [p.HandedOver("p", "running", common="p")]
    script.admit(wanted)
    script.step(wanted, 32, [[5, 6]])
    wanted.num_tokens += 1
    assert remote_of(end(script, "p", [[5, 6]])) == Remote(SIDE_CHANNEL, "p", tokens=32)
    assert script.half.has_pending_work()
    held = p.HandedOver("p", "done", b"".join(wanted.block_hashes), 32, b"", 30_000)
    assert handed_over(script) == [held]


def test_B10_any_other_end_hands_back_nothing_and_holds_nothing() -> None:
    script, wanted = attached(), Request("p", 40)
    compute(script, wanted, [[5, 6, 7]], HANDED)
    script.half.request_finished("p", [[5, 6, 7]])
    assert [handing.state for handing in handed_over(script)] == ["running", "gone"]
    assert script.half.hand_over("p", [[5, 6, 7]]) is None


def test_a_request_that_nobody_goes_on_with_is_not_handed_over() -> None:
    script, wanted = attached(), Request("p", 40)
    compute(script, wanted, [[5, 6, 7]])
    assert end(script, "p", [[5, 6, 7]]) is None
    assert handed_over(script) == []


def test_without_a_side_channel_nothing_is_handed_over() -> None:
    script, wanted = Script(), Request("p", 40)
    compute(script, wanted, [[5, 6, 7]], HANDED)
    assert script.half.hand_over("p", [[5, 6, 7]]) is None


def test_B10_a_prompt_that_left_nothing_hands_back_where_and_no_blocks() -> None:
    script, wanted = attached(), Request("p", 10)
    compute(script, wanted, [[]], HANDED)
    params = end(script, "p", [[]])
    assert params is not None
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (0, [[]])
    assert remote_of(params) == NO_REMOTE
    assert [handing.state for handing in handed_over(script)] == ["running", "gone"]


# The other side lets go


def test_B8_a_full_hit_asks_for_nothing_and_lets_go_once() -> None:
    script, wanted = attached(), Request("d", 49)
    script.half.on_new_request(wanted, GIVEN, cached=48)
    (step,) = script.steps()
    assert [lookup.peer for lookup in step.lookups] == [""]
    script.admit(wanted, computed=48)
    assert script.half.has_pending_work()
    assert let_go(script) == LET_GO
    assert not script.half.has_pending_work()
    script.step(wanted, 1, [[1, 2, 3, 4]])
    script.half.request_finished("d", [[1, 2, 3, 4]])
    assert let_go(script) == []


def test_B8_what_the_engine_lacks_is_asked_for() -> None:
    script = attached()
    script.half.on_new_request(Request("d", 49), GIVEN, cached=32)
    assert [lookup.peer for lookup in script.lookups()] == [PEER]
    assert let_go(script) == []


@pytest.mark.parametrize(("cached", "peer"), [(47, PEER), (48, "")])
def test_B8_with_a_tail_a_full_hit_is_all_but_the_last_token(cached: int, peer: str) -> None:
    script = attached()
    script.half.on_new_request(Request("d", 49), {**GIVEN, "remote_num_tokens": 49}, cached)
    assert [lookup.peer for lookup in script.lookups()] == [peer]


@pytest.mark.parametrize("answered", [False, True])
def test_B9_a_request_that_is_aborted_before_it_ran_lets_go(answered: bool) -> None:
    script, _ = asking()
    (lookup,) = script.lookups()
    if answered:
        script.answer(lookup.ask, [0, 1, 2])
        script.client.receive()
    script.half.request_finished("d", ())
    assert script.half.has_pending_work()
    (step,) = script.steps()
    assert list(step.unwanted) == LET_GO
    assert step.release == ((lookup.ask,) if answered else ())


def test_B9_a_question_that_was_not_sent_yet_is_not_asked() -> None:
    script, _ = asking()
    script.half.request_finished("d", ())
    (step,) = script.steps()
    assert (step.lookups, list(step.unwanted)) == ((), LET_GO)


@pytest.mark.parametrize("failed", [[], ["d"]])
def test_B8_a_transfer_that_is_over_lets_go_once(failed: list[str]) -> None:
    script, _ = fetching()
    assert let_go(script) == []
    script.half.on_output({}, ["d"], failed)
    assert let_go(script) == LET_GO
    script.half.request_finished("d", ())
    assert let_go(script) == []


def test_B9_a_request_that_is_aborted_while_it_loads_lets_go_once() -> None:
    script, _ = fetching()
    script.half.request_finished("d", [[1, 2, 3]])
    script.half.on_output({}, ["d"], [])
    assert let_go(script) == LET_GO


def test_B8_what_cannot_be_told_is_left_to_the_lease() -> None:
    script, _ = asking()
    script.steps()
    script.client.detach("test")
    script.half.request_finished("d", ())
    script.attach()
    assert let_go(script) == []


def test_L5_a_request_that_was_computed_here_is_not_fetched_later() -> None:
    script, wanted = asking()
    script.answer(script.lookups()[0].ask)
    script.admit(wanted)
    script.step(wanted, 49, [[1, 2, 3, 4]])
    wanted.num_computed_tokens = 0
    script.matched(wanted)
    assert [lookup.peer for lookup in script.lookups()] == [""]


def test_P5_an_engine_may_sleep_once_it_has_told_its_store() -> None:
    script, wanted = attached(), Request("p", 40)
    compute(script, wanted, [[5, 6, 7]], HANDED)
    end(script, "p", [[5, 6, 7]])
    assert script.half.has_pending_work()
    script.step()
    assert not script.half.has_pending_work(), "the stores do the rest"


# Two ways


TURN = {**GIVEN, "do_remote_prefill": False, "do_remote_decode": True}


def decoded(transfer: Transfer) -> tuple[Script, dict[str, Any] | None]:
    """A decode request that ends by length."""
    script, wanted = attached(transfer), Request("d", 49)
    compute(script, wanted, [[1, 2, 3, 4]], GIVEN)
    return script, end(script, "d", [[1, 2, 3, 4]])


def test_L2_a_decode_request_hands_back_nothing_by_default() -> None:
    script, back = decoded(Transfer("engine"))
    assert back is None
    assert handed_over(script) == []


def test_L2_L4_with_two_way_a_decode_request_is_held_for_a_time_of_its_own() -> None:
    script, back = decoded(TWO_WAY)
    assert back is not None
    assert (back["do_remote_prefill"], back["do_remote_decode"]) == (False, True)
    remote = Remote(SIDE_CHANNEL, "d", tokens=48, turn=True)
    assert remote_of(back, TWO_WAY) == remote
    running, held = handed_over(script)
    assert running.state == "running"
    assert (held.state, held.lease_ms, held.fixed) == ("done", 480_000, True)


def test_L4_only_requests_with_parameters_that_end_by_length_or_stop_are_held() -> None:
    script, wanted = attached(TWO_WAY), Request("d", 49)
    compute(script, wanted, [[1, 2, 3, 4]])
    assert script.half.hand_over("d", [[1, 2, 3, 4]]) is None
    script.half.on_new_request(aborted := Request("a", 49), GIVEN)
    script.admit(aborted)
    script.half.request_finished("a", ())
    assert [handing.state for handing in handed_over(script)] == ["running", "gone"]


def test_L2_a_prefill_asks_its_decode_engine_and_is_handed_over_itself() -> None:
    script = attached(TWO_WAY)
    script.half.on_new_request(Request("p", 49), {**TURN, "remote_num_tokens": 40})
    (step,) = script.steps()
    assert [(lookup.peer, lookup.push) for lookup in step.lookups] == [(PEER, None)]
    assert [(h.request, h.state) for h in step.handed_over] == [("p", "running")]


@pytest.mark.parametrize(
    ("remote", "cached", "threshold", "pulls"),
    [
        (40, 0, 40, True),  # exactly the threshold
        (40, 0, 41, False),
        (40, 16, 25, False),  # what is here counts
        (40, 16, 24, True),
        (400, 0, 50, False),  # no more than the prompt has
        (400, 0, 49, True),
        (40, 32, 0, True),  # 0 is off
        (32, 32, 0, False),  # it has nothing more than we do
    ],
)
def test_L3_below_the_threshold_it_is_computed_and_the_holder_told(
    remote: int, cached: int, threshold: int, pulls: bool
) -> None:
    script = attached(Transfer("engine", two_way=True, recompute_threshold=threshold))
    wanted = Request("p", 49)
    script.half.on_new_request(wanted, {**TURN, "remote_num_tokens": remote}, cached)
    assert [lookup.peer for lookup in script.lookups()] == [PEER if pulls else ""]
    script.admit(wanted, cached)
    assert let_go(script) == LET_GO


def test_L3_the_threshold_is_for_two_ways_only() -> None:
    script = attached(Transfer("engine", two_way=True, recompute_threshold=1000))
    script.half.on_new_request(Request("d", 49), {**GIVEN, "remote_num_tokens": 49})
    assert [lookup.peer for lookup in script.lookups()] == [PEER]
