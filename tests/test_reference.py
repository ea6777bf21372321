"""The reference engine's scheduling: each test is named after its row of contract E."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.core.errors import InvariantBroken
from tests.harness.reference_rig import Rig, but, loading
from tests.reference import Group, Request, State, WorkerResults, block_bytes

LATER = (None, False)


STATES = but(groups=(Group(4), Group(8, state=True)), block_tokens=8, blocks=81)


def test_E1_a_deferred_request_is_skipped_and_keeps_its_place() -> None:
    rig = Rig(but(running_max=2))
    rig.add("a", 8, 9, LATER, LATER)
    rig.add("b", 8, 9)
    rig.step(expect={"b": 8})
    assert rig.waiting == ["a"]
    rig.add("c", 8, 9)
    rig.step(expect={"b": 1, "c": 8})  # "a" was asked first, and deferred
    assert [name for name, _ in rig.script.asked] == ["a", "b", "a", "c"]
    assert rig.waiting == ["a"]
    rig.engine.abort("b")
    rig.add("d", 8, 9)
    rig.step(expect={"c": 1, "a": 8})
    assert rig.waiting == ["d"]


def test_E2_a_load_takes_no_budget_and_no_place_among_the_running() -> None:
    rig = Rig(but(budget=8, running_max=1))
    request = rig.add("a", 41, 1, (40, True))
    rig.add("b", 8, 2)
    rig.step(expect={"b": 8})
    assert rig.states() == {"a": State.LOADING, "b": State.RUNNING}
    assert len(request.table[0]) == 10  # at once
    assert rig.script.allocated[0] == ("a", 40)


def test_E2_a_load_that_does_not_fit_stays_at_the_head_and_is_asked_again() -> None:
    rig = Rig(but(budget=200))  # 40 blocks
    rig.add("a", 120, 20)
    rig.step()
    rig.add("b", 41, 1, (40, True), (36, True))
    rig.add("c", 4, 1)
    rig.step(expect={"a": 1})  # nobody behind it comes in either
    assert rig.waiting == ["b", "c"]
    assert ("b", 40) not in rig.script.allocated
    rig.engine.abort("a")
    rig.step()
    assert ("b", 36) in rig.script.allocated
    assert rig.states()["b"] is State.LOADING


def test_E2_loads_leave_room_for_each_other_to_end() -> None:
    """None of them can be preempted: two that fit now, and not with what they generate, lock."""
    rig = Rig(but(blocks=29))  # 28: each needs 16 in the end
    rig.add("a", 41, 20, (40, True))
    rig.add("b", [9] * 41, 20, (40, True))
    rig.step()
    assert rig.states() == {"a": State.LOADING, "b": State.WAITING}


def test_E3_a_load_enters_the_prefix_cache_only_when_it_is_over() -> None:
    rig = Rig()
    prompt = list(range(17))
    rig.add("a", prompt, 1, (16, True))
    rig.step()
    rig.add("b", prompt, 1, LATER)
    rig.fill()
    rig.load_over("a")
    rig.step()
    assert rig.script.asked[-1] == ("b", 0)
    rig.step(expect={"a": 1, "b": 1})
    assert rig.script.asked[-1] == ("b", 16)


def test_E3_the_last_token_of_a_prompt_that_was_loaded_whole_is_computed() -> None:
    rig = Rig()
    rig.add("a", 16, 3, (16, True))
    rig.step(expect={})
    rig.fill()
    rig.load_over("a")
    rig.step()
    rig.step(expect={"a": 1})
    assert rig.engine.requests["a"].num_computed_tokens == 16
    rig.run()
    assert len(rig.tokens["a"]) == 3
    assert rig.script.asked == [("a", 0)], "it is not looked up again"
    assert rig.script.allocated == [("a", 16), ("a", 0)]


def test_E3_wrong_bytes_of_a_load_are_seen() -> None:
    rig = loading()
    rig.load_over("a")  # and nothing was copied
    rig.step()
    with pytest.raises(InvariantBroken, match="wrong bytes: a rank 0 group 0 token 0"):
        rig.step()


def test_E5_preemption_frees_resets_and_goes_back_to_the_head() -> None:
    rig = Rig(but(blocks=11))  # 10
    rig.add("a", 20, 12)
    rig.add("b", 20, 12)
    rig.step(expect={"a": 20, "b": 20})
    rig.add("c", 4, 1)
    rig.step()
    assert rig.running == ["a"]
    victim = rig.engine.requests["b"]
    assert rig.waiting == ["b", "c"]
    assert (victim.state, victim.num_computed_tokens) == (State.WAITING, 0)
    assert not victim.holds_blocks
    assert rig.script.steps[-1].preempted == {"b"}


def test_E5_a_step_that_preempted_admits_nobody() -> None:
    rig = Rig(but(blocks=11, budget=12, prefix_cache=False))
    rig.add("a", 20, 12)
    rig.add("b", 20, 12)
    for expected in ({"a": 12}, {"a": 8, "b": 4}, {"a": 1, "b": 11}):
        rig.step(expect=expected)
    rig.step(expect={"a": 1})  # "b" found no room, and a first part of it would fit again
    rig.step(expect={"a": 1, "b": 11})


def test_E5_by_priority_the_victim_is_the_least_important_one() -> None:
    rig = Rig(but(blocks=16, by_priority=True))  # 15 blocks
    rig.add("urgent", 20, 12, priority=0)
    rig.add("least", 20, 12, priority=2)
    rig.add("later", 20, 12, priority=1)
    rig.step()
    assert rig.running == ["urgent", "later", "least"]
    rig.engine.book.running.sort(key=lambda request: request.arrival)  # as after other arrivals
    rig.step(expect={"urgent": 1, "later": 1})
    assert rig.script.steps[-1].preempted == {"least"}


def test_E6_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_report() -> None:
    rig = loading()
    rig.engine.abort("a")
    rig.step()
    assert rig.engine.free_blocks == 36
    rig.load_over("a")
    rig.step()
    assert rig.all_free
    assert rig.engine.idle


def test_E6_blocks_that_the_connector_delays_are_kept_until_they_are_sent() -> None:
    rig = Rig(but(world=2))
    rig.script.delays.add("a")
    rig.add("a", 17, 1)
    rig.step()
    assert rig.script.ended["a"][0][:4] == [1, 2, 3, 4]
    rig.report(WorkerResults(sent={"a"}), 0)
    rig.step()
    assert rig.engine.free_blocks == 35
    rig.report(WorkerResults(sent={"a"}), 1)
    rig.step()
    assert rig.all_free


@pytest.mark.parametrize(
    "results",
    [
        WorkerResults({"nobody"}),
        WorkerResults(sent={"nobody"}),
        WorkerResults({"a"}),
        WorkerResults(sent={"a"}),
        WorkerResults(failed={"a"}),
    ],
)
def test_E6_reports_that_nobody_waits_for_end_the_engine(results: WorkerResults) -> None:
    rig = Rig()
    rig.add("a", 17, 5)
    rig.step()
    rig.report(results)
    with pytest.raises(InvariantBroken):
        rig.step()


def test_E6_a_load_is_reported_once_by_each_rank() -> None:
    rig = loading(but(world=2))
    rig.report(WorkerResults({"a"}), 0)
    rig.step()
    assert rig.states() == {"a": State.LOADING}
    rig.report(WorkerResults({"a"}), 0)
    with pytest.raises(InvariantBroken, match="rank 0"):
        rig.step()


def test_E7_first_come_first_served_with_chunks_a_budget_and_a_limit() -> None:
    rig = Rig(but(budget=10, running_max=2))
    rig.add("a", 14, 3)
    rig.add("b", 8, 3)
    rig.add("c", 8, 3)
    rig.step(expect={"a": 10})
    rig.step(expect={"a": 4, "b": 6})
    rig.step(expect={"a": 1, "b": 2})  # budget is left, but two are running
    rig.step(expect={"a": 1, "b": 1})
    rig.step(expect={"b": 1, "c": 8})


def test_E7_priorities_decide_who_comes_in() -> None:
    rig = Rig(but(by_priority=True, running_max=1))
    rig.add("a", 8, 1, priority=3)
    rig.add("b", 8, 1, priority=1)
    rig.add("c", 8, 1, priority=1)
    order: list[str] = []
    while not rig.engine.idle:
        rig.step()
        order.append(*rig.script.steps[-1].scheduled)
    assert order == ["b", "c", "a"]


@pytest.mark.parametrize("window", [5, 6, 9])
def test_E7_blocks_that_a_window_has_passed_are_let_go(window: int) -> None:
    rig = Rig(but(groups=(Group(4), Group(4, window=window))))
    request = rig.add("a", 12, 20)
    rig.step()
    while request.num_computed_tokens < 24:
        rig.step()
    needed = (24 - 1 - window + 1) // 4
    assert request.table[1][:needed] == [0] * needed
    assert all(request.table[1][needed:])
    assert all(request.table[0])
    rig.run()
    assert rig.all_free


def test_E7_a_state_is_kept_where_a_step_ends_at_a_block() -> None:
    rig = Rig(STATES)
    prompt = list(range(29))
    request = rig.add("a", prompt, 12)
    rig.step(expect={"a": 24})  # it stops at the last whole block
    assert [bool(block) for block in request.table[1]] == [False, False, True]
    shown = rig.script.steps[-1].table("a")
    assert shown is not None
    assert shown[1] == request.table[1]
    rig.step(expect={"a": 5})
    shown = rig.script.steps[-1].table("a")
    assert shown is not None
    assert not any(shown[1])  # no state is whole after this step
    rig.add("b", prompt, 1)
    rig.step(expect={"a": 1, "b": 5})
    rig.run()
    assert rig.all_free


def test_B5_the_state_of_a_request_that_ended_is_that_of_its_last_token() -> None:
    rig = Rig(STATES)
    rig.add("a", 29, 1)
    rig.run()
    assert [bool(block) for block in rig.script.ended["a"][1]] == [False, False, False, True]
    ahead = Rig(msgspec.structs.replace(STATES, batches=2), stopped=1.0)
    ahead.add("a", 29, 12)
    ahead.run()
    assert not any(ahead.script.ended["a"][1]), "the next step is under way and goes on from it"


def test_E7_a_state_that_is_wrong_is_seen() -> None:
    rig = Rig(STATES)
    request = rig.add("a", 29, 12)
    rig.step()
    at = request.table[1][2] * rig.shape.page_bytes
    rig.ranks[0].memory[at] ^= 1
    with pytest.raises(InvariantBroken, match="wrong bytes: a rank 0 group 1"):
        rig.step()


def test_E10_bytes_follow_from_tokens_position_group_rank_and_weights() -> None:
    shape = but(groups=(Group(4), Group(4), Group(4, state=True)), token_bytes=8)
    one = Request("a", [1, 2, 3, 4] * 3, 1, shape)
    other = Request("b", [9, 2, 3, 4, 1, 2, 3, 4], 1, shape)
    heavy = Request("c", [1, 2, 3, 4], 1, shape)
    heavy.text.weigh(5)
    found = {
        block_bytes(shape, request.text, group, rank, index)
        for request, indices in ((one, 3), (other, 2), (heavy, 1))
        for group in range(3)
        for rank in range(2)
        for index in range(indices)
    }
    assert len(found) == 6 * 6
    assert {len(data) for data in found} == {32}
    tokens = {data[at : at + 8] for data in found for at in range(0, 32, 8)}
    words = {token[at : at + 4] for token in tokens for at in (0, 4)}
    assert len(words) == 2 * len(tokens) == 2 * (6 * 2 * 2 * 4 + 6 * 2)
