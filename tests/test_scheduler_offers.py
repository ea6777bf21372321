"""The scheduler half, storing and fencing: each test is named after its row of the contract."""

from __future__ import annotations

import pytest

from connectors.requests import Geometry, Step
from kvstore.types import GroupRule
from tests.desk import BLOCK, Desk, Request, hashes

PARTS = Geometry(BLOCK, 8, (8,), (GroupRule(),))
TWO_FULL = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule()))
WINDOW = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule(2)))
TABLE = [[1, 2, 3, 4, 5, 6]]


def run(desk: Desk, request: Request, present: list[int] | None = None) -> None:
    """Let a request run that finds nothing, or nothing that it can use."""
    groups = len(desk.geometry.rules)
    desk.arrive(request, *([present or []] * groups))
    desk.admit(request)


# What is offered


def test_O10_a_block_is_offered_in_the_step_that_completes_it() -> None:
    desk, request = Desk(), Request("r", 64)
    run(desk, request)
    offered = [desk.indices(request, desk.step(request, n, TABLE)) for n in (20, 11, 1, 32)]
    assert offered == [[0], [], [1], [2, 3]]


def test_O10_running_requests_offer_what_they_generate() -> None:
    desk, request = Desk(), Request("r", 31)
    run(desk, request)
    assert desk.indices(request, desk.step(request, 31, TABLE)) == [0]
    request.num_tokens, request.block_hashes = 32, hashes(2)
    assert desk.indices(request, desk.step(request, 1, TABLE)) == [1]


def test_O10_never_more_than_is_hashed() -> None:
    """Asynchronous scheduling counts tokens as computed whose values nobody knows yet."""
    desk, request = Desk(), Request("r", 31)
    run(desk, request)
    desk.step(request, 31, TABLE)
    assert desk.step(request, 1, TABLE).stores == ()
    assert desk.step(request, 1, TABLE).stores == (), "33 computed, 31 of them known"
    request.num_tokens, request.block_hashes = 32, hashes(2)
    assert desk.indices(request, desk.step(request, 1, TABLE)) == [1]


def test_O10_never_more_than_is_computed() -> None:
    """All of a prompt's hashes are there before it is computed."""
    desk, request = Desk(), Request("r", 64)
    run(desk, request)
    assert desk.step(request, 15, TABLE).stores == ()


def test_O10_what_was_not_offered_is_offered_at_the_end() -> None:
    desk, request = Desk(), Request("r", 32)
    run(desk, request)
    desk.step(request, 16, TABLE)
    request.num_computed_tokens = 32  # the last step's output completed it
    desk.half.request_finished("r", TABLE)
    assert desk.half.has_pending_work()
    meta = desk.step()
    assert [job.engine.block_ids for job in meta.early] == [(2,)]
    assert not desk.half.has_pending_work()


def test_O10_a_null_block_is_skipped_and_the_rest_goes_on() -> None:
    desk, request = Desk(WINDOW), Request("r", 64)
    run(desk, request)
    meta = desk.step(request, 64, [[1, 2, 3, 4], [0, 0, 7, 8]])
    assert desk.indices(request, meta, 0) == [0, 1, 2, 3]
    assert desk.indices(request, meta, 1) == [2, 3]
    assert desk.step(request, 0, [[1, 2, 3, 4], [0, 0, 7, 8]]).stores == ()


def test_O10_a_block_that_begins_with_null_is_not_stored() -> None:
    desk, request = Desk(PARTS), Request("r", 32, hash_tokens=8)
    run(desk, request)
    assert desk.indices(request, desk.step(request, 32, [[0, 1, 2, 3]])) == [1]


def test_O11_a_declined_block_keeps_the_cursor() -> None:
    desk, request = Desk(credits=1), Request("r", 48)
    run(desk, request)
    assert desk.indices(request, desk.step(request, 48, TABLE)) == [0]
    assert desk.half.take_stats()["store_declined"] == 1
    desk.grant_credits(5)
    assert desk.indices(request, desk.step(request, 1, TABLE)) == [1, 2]


def test_O11_a_partly_accepted_batch_is_a_leading_run_per_group() -> None:
    desk, request = Desk(TWO_FULL, credits=3), Request("r", 48)
    run(desk, request)
    table = [[1, 2, 3], [4, 5, 6]]
    (job,) = desk.step(request, 48, table).stores
    assert job.engine.group_sizes == (2, 1)
    assert job.engine.block_ids == (1, 2, 4)
    desk.grant_credits(10)
    (rest,) = desk.step(request, 1, table).stores
    assert rest.engine.block_ids == (3, 5, 6)
    assert rest.engine.block_indices == (2, 1)


def test_O11_what_is_ready_is_not_stored_again() -> None:
    desk, request = Desk(), Request("r", 48)
    run(desk, request)
    desk.changed(added=[desk.key(request, 1)])
    meta = desk.step(request, 48, TABLE)
    assert desk.indices(request, meta) == [0, 2]
    assert [job.engine.block_indices for job in meta.stores] == [(0,), (2,)]


def test_O11_what_has_left_is_stored_again() -> None:
    desk, request = Desk(), Request("r", 16)
    run(desk, request)
    desk.changed(added=[desk.key(request, 0)])
    desk.changed(removed=[desk.key(request, 0)])
    assert desk.indices(request, desk.step(request, 16, TABLE)) == [0]


def test_O11_while_a_copy_is_unfinished_another_request_writes_its_own() -> None:
    desk, first, second = Desk(), Request("a", 16), Request("b", 16)
    run(desk, first)
    run(desk, second)
    assert desk.indices(first, desk.step(first, 16, [[1]])) == [0]
    assert desk.indices(second, desk.step(second, 16, [[2]])) == [0]


def test_O12_what_was_loaded_is_not_stored() -> None:
    desk, request = Desk(), Request("r", 64)
    desk.arrive(request, [0, 1])
    desk.load(request, [[1, 2, 3, 4]])
    desk.half.on_output({}, ["r"], [])
    desk.half.update_state_after_alloc("r", (), 0)
    assert desk.indices(request, desk.step(request, 32, [[1, 2, 3, 4]])) == [2, 3]


def test_O12_what_was_a_hit_in_the_engine_only_is_stored() -> None:
    desk, request = Desk(), Request("r", 64)
    desk.arrive(request, [])
    desk.admit(request, 32)
    assert desk.indices(request, desk.step(request, 32, TABLE)) == [0, 1, 2, 3]


def test_O12_what_was_present_but_not_loaded_is_not_stored() -> None:
    desk, request = Desk(), Request("r", 64)
    desk.arrive(request, [0, 1])
    desk.admit(request, 32)
    assert desk.indices(request, desk.step(request, 32, TABLE)) == [2, 3]


def test_O12_the_first_blocks_before_a_load_are_stored_if_the_store_lacks_them() -> None:
    """A window group has only what lies before the hit's end."""
    desk, request = Desk(WINDOW), Request("r", 81)
    desk.arrive(request, [0, 1, 2, 3, 4], [3, 4])
    desk.load(request, [[1, 2, 3, 4, 5], [0, 0, 11, 12, 13]], computed=16)
    desk.half.on_output({}, ["r"], [])
    desk.half.update_state_after_alloc("r", (), 0)
    meta = desk.step(request, 1, [[1, 2, 3, 4, 5, 6], [0, 0, 11, 12, 13, 14]])
    assert desk.indices(request, meta, 0) == []
    assert desk.indices(request, meta, 1) == [2]


def test_a_preempted_request_is_offered_from_its_new_blocks() -> None:
    desk, request = Desk(), Request("r", 48)
    run(desk, request)
    desk.step(request, 16, [[1]])
    request.num_computed_tokens = 0
    desk.matched(request)
    (lookup,) = desk.lookups()
    desk.answer(lookup.ask, [])
    desk.admit(request)
    (job,) = desk.step(request, 48, [[7, 8, 9]]).stores
    assert job.engine.block_ids == (7, 8, 9)


# Keys


def test_a_block_hangs_below_the_one_before_it() -> None:
    desk, request = Desk(WINDOW), Request("r", 48)
    run(desk, request)
    (job,) = desk.step(request, 48, [[1, 2, 3], [4, 5, 6]]).stores
    full, window = ([desk.key(request, index, group) for index in range(3)] for group in (0, 1))
    assert job.keys == (*full, *window)
    assert job.parents == (b"", *full[:-1], b"", b"", b"")


def test_a_later_job_names_the_block_before_it() -> None:
    desk, request = Desk(), Request("r", 32)
    run(desk, request)
    desk.step(request, 16, TABLE)
    (job,) = desk.step(request, 16, TABLE).stores
    assert job.parents == (desk.key(request, 0),)


@pytest.mark.parametrize("size", [8, 16])
def test_a_blocks_key_is_the_last_hash_in_it(size: int) -> None:
    desk = Desk(Geometry(BLOCK, 8, (size,), (GroupRule(),)))
    request = Request("r", 32, hash_tokens=8)
    run(desk, request)
    (job,) = desk.step(request, 32, [[1, 2, 3, 4]]).stores
    assert [key[:32] for key in job.keys] == [request.block_hashes[1], request.block_hashes[3]]


# The fence


def test_O13_a_source_that_is_overwritten_is_flushed_first() -> None:
    desk, request = Desk(), Request("r", 32)
    run(desk, request)
    (job,) = desk.step(request, 32, TABLE).stores
    assert desk.step(written=[3, 4]).flush == ()
    assert desk.step(written=[4, 2]).flush == (job.job_id,)


def test_O13_a_load_into_a_source_flushes_it() -> None:
    desk, request, other = Desk(), Request("r", 32), Request("other", 33, "other")
    run(desk, request)
    (job,) = desk.step(request, 32, TABLE).stores
    desk.arrive(other, [0, 1])
    assert desk.load(other, [[9, 1]]).flush == (job.job_id,)


def test_O13_a_copy_that_is_over_is_not_flushed() -> None:
    desk, request = Desk(world=2), Request("r", 16)
    run(desk, request)
    (job,) = desk.step(request, 16, TABLE).stores
    desk.half.on_output({job.job_id: 1}, [], [])
    assert desk.step(written=[1]).flush == (job.job_id,), "one rank still reads"
    desk.half.on_output({job.job_id: 1}, [], [])
    assert desk.step(written=[1]).flush == ()


def test_O13_two_copies_of_one_block_are_both_flushed() -> None:
    desk, first, second = Desk(), Request("a", 16), Request("b", 16)
    run(desk, first)
    run(desk, second)
    jobs = [*desk.step(first, 16, [[1]]).stores, *desk.step(second, 16, [[1]]).stores]
    assert sorted(desk.step(written=[1]).flush) == [job.job_id for job in jobs]
    desk.half.on_output({jobs[0].job_id: 1}, [], [])
    assert desk.step(written=[1]).flush == (jobs[1].job_id,)


def test_O13_a_store_of_the_end_is_submitted_and_flushed_in_one_step() -> None:
    desk, request = Desk(), Request("r", 16)
    run(desk, request)
    request.num_computed_tokens = 16
    desk.half.request_finished("r", TABLE)
    meta = desk.step(written=[1])
    assert meta.flush == tuple(job.job_id for job in meta.early)


def test_O13_what_a_step_itself_completes_is_not_flushed_in_it() -> None:
    desk, request = Desk(), Request("r", 16)
    run(desk, request)
    meta = desk.step(request, 16, TABLE, written=[1])
    assert len(meta.stores) == 1
    assert meta.flush == ()


def test_O14_nothing_is_remembered_of_copies_that_ended() -> None:
    desk, request = Desk(), Request("r", 48)
    run(desk, request)
    (job,) = desk.step(request, 48, TABLE).stores
    desk.half.request_finished("r", TABLE)
    desk.half.on_output({job.job_id: 1}, [], [])
    assert not desk.half._offers._sources
    assert not desk.half._offers._jobs
    assert not desk.half._requests


# Reset


def test_O17_after_a_reset_nothing_from_before_is_asked_about_or_stored_under() -> None:
    desk, request, waiting = Desk(), Request("r", 33), Request("waiting", 33)
    run(desk, request)
    old = desk.arrive(waiting, [0, 1])
    assert desk.matched(waiting) == (32, True)
    desk.half.on_new_request(Request("unanswered", 33))
    desk.lookups()
    assert desk.half.reset_cache(b"new epoch")
    assert desk.released() == [old]
    assert desk.matched(waiting) == (None, False)
    assert [lookup.scope for lookup in desk.lookups()] == [b"new epoch"]
    (job,) = desk.step(request, 16, TABLE).stores
    assert job.keys == (desk.key(request, 0, scope=b"new epoch"),)


def test_O17_answers_to_questions_from_before_a_reset_are_not_used() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.half.on_new_request(request)
    (lookup,) = desk.lookups()
    desk.half.reset_cache(b"new epoch")
    desk.answer(lookup.ask, [0, 1], lease=5)
    assert desk.matched(request) == (None, False)
    assert 5 in desk.released()


def test_O17_what_is_ready_in_the_old_epoch_is_stored_in_the_new_one() -> None:
    desk, request = Desk(), Request("r", 16)
    run(desk, request)
    desk.changed(added=[desk.key(request, 0)])
    desk.step()
    desk.half.reset_cache(b"new epoch")
    assert len(desk.step(request, 16, TABLE).stores) == 1


def test_O17_a_reset_during_a_load_says_so() -> None:
    desk, request = Desk(), Request("r", 33)
    desk.arrive(request, [0, 1])
    desk.load(request, [[1, 2]])
    assert not desk.half.reset_cache(b"new epoch")


def test_O16_events_are_those_of_the_own_scope() -> None:
    desk, request = Desk(), Request("r", 16)
    desk.arrive(request)
    desk.client.collect_events = True
    ours, theirs = desk.key(request, 0), desk.key(request, 0, scope=b"another")
    desk.changed(added=[ours, theirs])
    desk.changed(removed=[ours])
    desk.step()
    block = request.block_hashes[0]
    assert desk.half.take_events() == [(True, block, 0), (False, block, 0)]
    assert desk.half.take_events() == []


# Credits


def test_O23_no_block_is_stored_without_a_slot() -> None:
    desk, request = Desk(credits=0), Request("r", 48)
    run(desk, request)
    assert desk.step(request, 48, TABLE).stores == ()
    (slot,) = desk.grant_credits(1)
    (job,) = desk.step(request, 1, TABLE).stores
    assert job.store.slots == (slot,)


def test_O23_each_slot_is_used_once() -> None:
    desk, first, second = Desk(), Request("a", 48), Request("b", 48, "b")
    run(desk, first)
    run(desk, second)
    jobs = [*desk.step(first, 48, TABLE).stores, *desk.step(second, 48, TABLE).stores]
    slots = [slot for job in jobs for slot in job.store.slots]
    assert len(slots) == len(set(slots)) == 6


def test_O23_slots_of_a_session_end_with_it() -> None:
    desk, request = Desk(), Request("r", 48)
    run(desk, request)
    desk.client.detach("the store went")
    assert desk.step(request, 16, TABLE).stores == ()
    desk.attach(credits=0)
    assert desk.step(request, 16, TABLE).stores == ()
    slots = desk.grant_credits(9)
    (job,) = desk.step(request, 16, TABLE).stores
    assert set(job.store.slots) <= set(slots)
    assert job.session == desk.client.session
    assert desk.indices(request, desk.step(request, 0, TABLE)) == []


def test_a_request_is_not_looked_at_before_it_can_have_a_block() -> None:
    """What a step spends is proportional to what changed in it."""
    desk, request = Desk(), Request("r", 64)
    run(desk, request)
    asked: list[str] = []

    def table(request_id: str) -> list[list[int]]:
        asked.append(request_id)
        return TABLE

    for computed in range(40):
        request.num_computed_tokens = computed
        desk.half.build_meta(Step({"r": 1}, [], table))
    assert len(asked) == 2
