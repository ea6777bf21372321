"""The scheduler half, asking and loading: each test is named after its row of the contract."""

from __future__ import annotations

import pytest

from connectors.jobs import pieces
from connectors.requests import Geometry
from connectors.scheduler import ANSWER_LIMIT_NS, LOADING_LIMIT_NS
from kvstore import protocol as p
from kvstore.layout import Move
from kvstore.types import GroupRule
from tests.desk import BLOCK, MS, US, Desk, Request, hashes

PARTS = Geometry(BLOCK, 8, (8,), (GroupRule(),))  # two engine blocks in a block
WINDOW = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule(2)))


def finish(desk: Desk, request: Request, *, failed: bool = False) -> None:
    """Every rank has reported the request's load."""
    names = [request.request_id]
    desk.half.on_output({}, names, names if failed else [])


# Asking


def test_O4_less_than_a_block_beyond_what_the_engine_has_is_none() -> None:
    desk, request = Desk(PARTS), Request("r", 41, hash_tokens=8)
    desk.arrive(request, [0, 1])
    assert desk.matched(request, 24) == (0, False)
    assert desk.matched(request, 16) == (16, True)


def test_O4_it_is_none_at_once_even_before_the_answer() -> None:
    desk, request = Desk(), Request("r", 20)
    desk.half.on_new_request(request)
    assert desk.matched(request, 16) == (0, False)
    assert desk.waited_ns == 0


def test_O4_the_last_token_is_left_to_the_engine() -> None:
    desk, request = Desk(), Request("r", 32)
    desk.arrive(request, [0, 1])
    assert desk.matched(request) == (16, True)


def test_O4_all_groups_must_serve_the_hit() -> None:
    desk, request = Desk(WINDOW), Request("r", 81)
    desk.arrive(request, [0, 1, 2, 3, 4], [1, 2, 4])
    assert desk.matched(request) == (48, True)


def test_O4_a_short_window_counts_if_it_reaches_what_the_engine_has() -> None:
    desk, request = Desk(WINDOW), Request("r", 81)
    desk.arrive(request, [0, 1, 2, 3], [3])
    assert desk.matched(request, 48) == (16, True)
    assert desk.matched(request, 16) == (0, False)


def test_O4_a_resumed_request_is_asked_about_with_what_it_generated() -> None:
    desk, request = Desk(), Request("r", 20)
    desk.arrive(request, [])
    desk.admit(request)
    request.num_tokens, request.block_hashes = 50, hashes(3)
    request.num_computed_tokens = 0  # preempted
    desk.matched(request)
    (lookup,) = desk.lookups()
    assert lookup.hashes == b"".join(hashes(3))
    desk.answer(lookup.ask, [0, 1, 2])
    assert desk.matched(request) == (48, True)


def test_O5_asking_again_says_the_same() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.arrive(request, [0, 1])
    assert [desk.matched(request) for _ in range(3)] == [(32, True)] * 3


def test_O5_polling_a_deferred_request_is_one_lookup() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    for _ in range(5):
        assert desk.matched(request) == (None, False)
        desk.step()
    assert len(desk.lookups()) == 1


@pytest.mark.parametrize(
    ("present", "said"), [(None, (None, False)), ([0, 1], (32, True)), ([], (0, False))]
)
def test_O6_the_three_answers(present: list[int] | None, said: tuple[int | None, bool]) -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    if present is not None:
        (lookup,) = desk.lookups()
        desk.answer(lookup.ask, present)
    assert desk.matched(request) == said


def test_O6_a_request_nobody_announced_is_a_miss() -> None:
    assert Desk().matched(Request("adapter", 33)) == (0, False)


# One load, many requests


def test_O7_a_second_request_waits_for_the_first_ones_load() -> None:
    desk, first, second = Desk(), Request("a", 33), Request("b", 40)
    desk.arrive(first, [0, 1])
    desk.load(first, [[1, 2]])
    desk.arrive(second, [0, 1])
    assert desk.matched(second) == (None, False)
    finish(desk, first)
    assert desk.matched(second) == (32, True)
    assert desk.matched(second, 32) == (0, False)


def test_O7_a_request_with_other_tokens_does_not_wait() -> None:
    desk, first, second = Desk(), Request("a", 33), Request("b", 33, "other")
    desk.arrive(first, [0, 1])
    desk.load(first, [[1, 2]])
    desk.arrive(second, [0, 1])
    assert desk.matched(second) == (32, True)


def test_O7_without_prefix_caching_each_loads_its_own() -> None:
    desk, first, second = Desk(shares_prefixes=False), Request("a", 33), Request("b", 33)
    desk.arrive(first, [0, 1])
    desk.load(first, [[1, 2]])
    desk.arrive(second, [0, 1])
    assert desk.matched(second) == (32, True)


def test_O7_the_wait_is_bounded() -> None:
    desk, first, second = Desk(), Request("a", 33), Request("b", 33)
    desk.arrive(first, [0, 1])
    desk.load(first, [[1, 2]])
    desk.arrive(second, [0, 1])
    assert desk.matched(second) == (None, False)
    desk.now_ns += LOADING_LIMIT_NS
    assert desk.matched(second) == (None, False)
    desk.now_ns += 1
    assert desk.matched(second) == (0, False)
    assert desk.client.session, "the store has answered, it is not to blame"


def test_O7_an_aborted_load_holds_nobody_back() -> None:
    desk, first, second = Desk(), Request("a", 33), Request("b", 33)
    desk.arrive(first, [0, 1])
    desk.load(first, [[1, 2]])
    desk.half.request_finished("a", [[1, 2]])
    desk.arrive(second, [0, 1])
    assert desk.matched(second) == (32, True)


# Waiting for the answer


def test_O8_an_idle_engine_waits_a_millisecond() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    desk.matched(request)
    assert desk.waited_ns == pytest.approx(MS, rel=0.01)


def test_O8_a_busy_engine_waits_200_us_in_a_step() -> None:
    desk, running = Desk(), Request("running", 8)
    desk.half.on_new_request(running)
    desk.step(running, 8, [[1]])
    for name in "ab":
        desk.half.on_new_request(Request(name, 33))
        desk.half.get_num_new_matched_tokens(name, 0)
    assert desk.waited_ns == pytest.approx(200 * US, rel=0.01)
    desk.step(running, 1, [[1]])
    desk.half.on_new_request(Request("c", 33))
    desk.half.get_num_new_matched_tokens("c", 0)
    assert desk.waited_ns == pytest.approx(400 * US, rel=0.01), "a new step, a new budget"


def test_O8_only_the_first_ask_waits() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    desk.matched(request)
    before = desk.waited_ns
    for _ in range(3):
        desk.step()
        desk.matched(request)
    assert desk.waited_ns == before


def busy_waits(desk: Desk, running: Request, names: str) -> list[int]:
    """How long a busy engine waits for each of these new requests, in ns."""
    waits = []
    for name in names:
        desk.step(running, 1, [[1]])
        before = desk.waited_ns
        desk.half.on_new_request(Request(name, 33, name))
        desk.half.get_num_new_matched_tokens(name, 0)
        waits.append(desk.waited_ns - before)
    return waits


def test_O8_waiting_is_off_after_three_time_outs_in_a_row() -> None:
    desk, running = Desk(), Request("running", 8)
    desk.half.on_new_request(running)
    waits = busy_waits(desk, running, "abcde")
    assert all(waits[:3])
    assert waits[3:] == [0, 0]


def test_O8_an_answer_in_time_turns_waiting_on_again() -> None:
    desk, running = Desk(), Request("running", 8)
    desk.half.on_new_request(running)
    busy_waits(desk, running, "abc")
    late = Request("late", 33, "late")
    desk.arrive(late, [0, 1])
    assert desk.matched(late) == (32, True)
    assert busy_waits(desk, running, "d") != [0]


def test_O8_a_store_that_does_not_answer_is_given_up() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    assert desk.matched(request) == (None, False)
    desk.now_ns += ANSWER_LIMIT_NS + 101 * MS  # the store may defer for 100 ms
    assert desk.matched(request) == (0, False)
    assert not desk.client.session
    stats = desk.half.take_stats()
    assert (stats["deferred"], stats["deferred_steps"], stats["timed_out"]) == (1, 1, 1)


def test_O8_questions_asked_anew_do_not_prolong_the_wait() -> None:
    """Leases so short that each answer has expired when it is read."""
    desk, request = Desk(), Request("r", 33)
    desk.arrive(request, [0, 1], lease_ms=10)
    said: list[tuple[int | None, bool]] = []
    for _ in range(1_000):
        desk.now_ns += 20 * MS
        said.append(desk.matched(request))
        if said[-1] != (None, False):
            break
        for lookup in desk.lookups():
            desk.answer(lookup.ask, [0, 1], lease_ms=10)
    assert said[-1] == (0, False)


def test_O8_the_limit_starts_anew_when_a_request_comes_back() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    desk.matched(request)
    (lookup,) = desk.lookups()
    desk.answer(lookup.ask, [])
    desk.admit(request)
    desk.now_ns += 10 * LOADING_LIMIT_NS
    assert desk.matched(request) == (None, False), "preempted, and asked about again"


# Planning the load


def test_O9_lookahead_blocks_are_left_alone() -> None:
    desk, request = Desk(), Request("r", 40)
    desk.arrive(request, [0, 1])
    (job,) = desk.load(request, [[5, 6, 7, 8]]).loads
    assert job.engine.block_ids == (5, 6)


def test_O9_the_first_block_is_entered_part_way() -> None:
    desk, request = Desk(PARTS), Request("r", 66, hash_tokens=8)
    desk.arrive(request, [0, 1, 2, 3])
    (job,) = desk.load(request, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], computed=24).loads
    assert job.engine.block_ids == (4, 5, 6, 7, 8)
    assert job.engine.block_indices == (3,)
    assert job.store.slots == (1, 2, 3)
    assert next(pieces(job.engine, job.store, (2,))) == Move(0, 4, 1, 1)


def test_O9_null_blocks_are_skipped() -> None:
    desk, request = Desk(WINDOW), Request("r", 81)
    desk.arrive(request, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    (job,) = desk.load(request, [[1, 2, 3, 4, 5], [0, 0, 0, 0, 6]]).loads
    assert job.engine.group_sizes == (5, 1)
    assert job.engine.block_indices == (0, 4)
    assert job.store.slots == (0, 1, 2, 3, 4, 1004)


def test_O9_only_the_window_is_loaded() -> None:
    desk, request = Desk(WINDOW), Request("r", 81)
    desk.arrive(request, [0, 1, 2, 3, 4], [3, 4])
    (job,) = desk.load(request, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]).loads
    assert job.engine.group_sizes == (5, 2)
    assert job.engine.block_ids[5:] == (9, 10)


def test_O9_the_second_allocation_after_a_load_starts_nothing() -> None:
    desk, request = Desk(), Request("r", 40)
    desk.arrive(request, [0, 1])
    desk.load(request, [[1, 2]])
    finish(desk, request)
    desk.steps()
    desk.half.update_state_after_alloc("r", (), 0)
    meta = desk.step(request, 8, [[1, 2, 3]])
    assert (meta.loads, meta.stores) == ((), ())
    assert all(step.usage is None for step in desk.steps()), "the request was counted twice"


def test_O9_an_allocation_while_loading_changes_no_load() -> None:
    desk, request = Desk(), Request("r", 40)
    desk.arrive(request, [0, 1])
    assert len(desk.load(request, [[1, 2]]).loads) == 1
    desk.half.update_state_after_alloc("r", (), 0)
    assert desk.step().loads == ()
    assert desk.released() == [], "the lease was given back under the load"


def test_O9_a_promise_without_its_blocks_is_a_load_that_fails() -> None:
    desk, request = Desk(), Request("r", 40)
    desk.arrive(request, [0, 1])
    assert desk.matched(request) == (32, True)
    desk.client.detach("between the answer and the allocation")
    desk.half.update_state_after_alloc("r", [[1, 2]], 32)
    (job,) = desk.step().loads
    assert job.session == 0
    assert job.engine.block_ids == (1, 2)


def test_O19_groups_are_listed_in_order_with_0_for_nothing() -> None:
    rules = (GroupRule(), GroupRule(2), GroupRule())
    desk = Desk(Geometry(BLOCK, BLOCK, (BLOCK,) * 3, rules))
    request = Request("r", 40)
    desk.arrive(request, [0, 1], [0, 1], [0, 1])
    (job,) = desk.load(request, [[1, 2], [0, 0], [3, 4]]).loads
    assert job.engine.group_sizes == (2, 0, 2)
    assert len(job.engine.block_indices) == 3
    assert job.engine.block_ids == (1, 2, 3, 4)
    assert job.store.medium == "cpu"
    assert job.store.slots == (0, 1, 2000, 2001)
    assert job.generations == (7,) * 4
    moves = list(pieces(job.engine, job.store, desk.geometry.blocks_per_chunk))
    assert moves == [Move(0, 1, 0, 0), Move(0, 2, 1, 0), Move(2, 3, 2000, 0), Move(2, 4, 2001, 0)]


def test_hits_are_counted_by_the_tier_they_come_from() -> None:
    desk, request = Desk(), Request("r", 65)
    desk.half.on_new_request(request)
    (lookup,) = desk.lookups()
    desk.answer(lookup.ask, [0, 1, 2, 3], sources={"nvme": 1})
    desk.load(request, [[1, 2, 3, 4]])
    usage = [step.usage for step in desk.steps() if step.usage is not None]
    assert usage == [p.Usage(65, {"nvme": 16, "cpu": 48})]
    assert desk.half.hit_sources("r", 64) == {"nvme": 16, "cpu": 48}


# Leases


def test_O14_a_request_aborted_during_its_load_leaves_nothing() -> None:
    desk, request = Desk(), Request("r", 40)
    desk.arrive(request, [0, 1])
    desk.load(request, [[1, 2]])
    desk.half.request_finished("r", [[1, 2]])
    meta = desk.step()
    assert (meta.early, meta.stores, meta.loads) == ((), (), ())
    finish(desk, request)
    assert not desk.half.has_pending_work()
    assert desk.released() == [], "its lease ends when the workers report it"


def test_O15_a_failed_load_is_tried_once_more_and_then_computed() -> None:
    desk, request = Desk(), Request("r", 40)
    desk.arrive(request, [0, 1])
    desk.load(request, [[1, 2]])
    finish(desk, request, failed=True)
    request.num_computed_tokens = 0
    assert desk.matched(request) == (None, False)
    (lookup,) = desk.lookups()
    desk.answer(lookup.ask, [0])
    (job,) = desk.load(request, [[3, 4]]).loads
    assert job.engine.block_ids == (3,)
    finish(desk, request, failed=True)
    assert desk.matched(request) == (0, False)
    assert desk.lookups() == []
    assert desk.half.take_stats()["load_failed"] == 2


def test_O15_what_a_failed_load_promised_is_stored_when_it_is_computed() -> None:
    desk, request = Desk(), Request("r", 40)
    desk.arrive(request, [0, 1])
    desk.load(request, [[1, 2]])
    finish(desk, request, failed=True)
    request.num_computed_tokens = 0
    desk.admit(request)
    assert desk.indices(request, desk.step(request, 40, [[3, 4, 5]])) == [0, 1]


def test_O20_an_expired_answer_is_asked_afresh() -> None:
    desk, request = Desk(), Request("r", 33)
    ask = desk.arrive(request, [0, 1], lease_ms=1_000)
    assert desk.matched(request) == (32, True)
    desk.now_ns += 1_000 * MS
    assert desk.matched(request) == (None, False)
    (step,) = desk.steps()
    assert step.release == (ask,)
    assert [lookup.hashes for lookup in step.lookups] == [b"".join(hashes(2))]


def test_O20_the_half_lets_go_before_the_store_does() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.arrive(request, [0, 1], lease_ms=1_000)
    desk.now_ns += 800 * MS
    assert desk.matched(request) == (None, False)


def test_O20_a_lease_is_given_back_at_abort() -> None:
    desk, request = Desk(), Request("r", 33)
    ask = desk.arrive(request, [0, 1])
    desk.matched(request)
    desk.half.request_finished("r", [[]])
    assert desk.released() == [ask]


def test_O20_an_answer_after_the_abort_is_given_back() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    (lookup,) = desk.lookups()
    desk.half.request_finished("r", [[]])
    desk.answer(lookup.ask, [0, 1], lease=99)
    desk.step()
    assert desk.released() == [99]


def test_O20_a_lease_is_given_back_when_the_engine_takes_no_token_of_it() -> None:
    desk, request = Desk(), Request("r", 33)
    ask = desk.arrive(request, [0, 1])
    desk.matched(request)
    desk.half.update_state_after_alloc("r", (), 0)
    assert desk.released() == [ask]


def test_O20_at_the_cap_later_requests_give_their_leases_back() -> None:
    desk, head, other, last = Desk(), Request("a", 33), Request("b", 33, "b"), Request("c", 33, "c")
    first = desk.arrive(head, [0, 1])
    desk.arrive(other, capped=True)
    late = desk.arrive(last, [0, 1])
    assert desk.matched(head) == (32, True)
    assert desk.matched(other) == (None, False)
    (step,) = desk.steps()
    assert step.release == (late,), "the head of the queue keeps its own"
    (again,) = step.lookups
    desk.answer(again.ask, [0, 1])
    assert desk.matched(other) == (32, True)
    assert desk.client.grant(first) is not None


def test_a_question_lost_with_its_session_is_asked_again() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    assert desk.matched(request) == (None, False)
    desk.client.detach("the store went")
    assert desk.matched(request) == (0, False), "without a store it is computed"
    desk.attach()
    assert desk.matched(request) == (None, False)
    assert [lookup.hashes for lookup in desk.lookups()][-1] == b"".join(hashes(2))


def test_without_a_store_every_answer_is_a_miss_and_nothing_is_stored() -> None:
    desk, request = Desk(), Request("r", 40)
    desk.cut = True
    desk.client.receive()
    desk.half.on_new_request(request)
    assert desk.matched(request) == (0, False)
    assert desk.waited_ns == 0
    desk.admit(request)
    assert desk.step(request, 40, [[1, 2, 3]]).stores == ()


def test_shutdown_is_idempotent() -> None:
    desk = Desk()
    desk.half.shutdown()
    desk.half.shutdown()
    assert not desk.client.session
