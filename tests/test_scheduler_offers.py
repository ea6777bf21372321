"""The scheduler half, storing and fencing: each test is named after its row of the contract."""

from __future__ import annotations

import gc
import sys

import pytest

from connectors.engine_interface import Geometry, Step
from connectors.request_state import NO_QUERY
from kvstore.core.types import GroupRule
from tests.harness.script import BLOCK, Request, Script, found, hashes, running

PARTS = Geometry(BLOCK, 8, (8,), (GroupRule(),))
TWO_FULL = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule()))
WINDOW = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule(2)))
TABLE = [[1, 2, 3, 4, 5, 6]]


def run(script: Script, request: Request) -> None:
    """Let a request run that finds nothing."""
    script.arrive(request)
    script.admit(request)


# What is offered


def test_a_long_hit_costs_the_next_step_nothing() -> None:
    script, request = found(16 * 1000 + 1, range(1000))
    script.load(request, [list(range(1, 1001))])
    looked = []

    def table(name: str) -> list[list[int]]:
        looked.append(name)
        return [list(range(1, 1002))]

    request.num_computed_tokens = 16_000
    assert script.half.build_meta(Step({"r": 1}, [], table)).stores == ()
    assert not looked


def test_O10_a_block_is_offered_in_the_step_that_completes_it() -> None:
    script, request = running(64)
    offered = [script.indices(request, script.step(request, n, TABLE)) for n in (20, 11, 1, 32)]
    assert offered == [[0], [], [1], [2, 3]]


def test_O15_beside_others_nothing_is_offered_before_the_first_steps_output_is_there() -> None:
    """Until then another connector may call bad what that step has used."""
    script, request = running(96, Script(beside=True))
    request.num_computed_tokens = 32  # of another connector's
    assert not script.step(request, 16, TABLE).stores
    request.num_in_flight_tokens = 32  # of this step and of the next one
    assert not script.step(request, 16, TABLE).stores
    request.num_in_flight_tokens = 16
    assert script.indices(request, script.step(request, 16, TABLE)) == [0, 1, 2, 3, 4]


def test_O15_beside_others_what_is_called_bad_is_computed_again_before_it_is_offered() -> None:
    script, request = running(96, Script(beside=True))
    request.num_computed_tokens = 32
    assert not script.step(request, 16, TABLE).stores
    request.num_computed_tokens = 0  # all of it was bad
    assert not script.step(request, 32, TABLE).stores
    assert not script.step(request, 16, TABLE).stores
    assert script.indices(request, script.step(request, 16, TABLE)) == [0, 1, 2, 3]


def test_O15_beside_others_a_request_that_ends_within_its_first_step_leaves_nothing() -> None:
    script, request = running(96, Script(beside=True))
    request.num_computed_tokens = 32
    script.step(request, 16, TABLE)
    request.num_in_flight_tokens = 16
    assert not script.half.request_finished("r", TABLE)
    assert not script.step().early


def test_O10_never_more_than_is_hashed() -> None:
    """Asynchronous scheduling counts tokens as computed whose values nobody knows yet."""
    script, request = running(31)
    script.step(request, 31, TABLE)
    assert script.step(request, 1, TABLE).stores == ()
    assert script.step(request, 1, TABLE).stores == (), "33 computed, 31 of them known"
    request.num_tokens, request.block_hashes = 32, hashes(2)
    assert script.indices(request, script.step(request, 1, TABLE)) == [1]


def test_O10_what_was_not_offered_is_offered_at_the_end() -> None:
    script, request = running(32)
    script.step(request, 16, TABLE)
    request.num_computed_tokens = 32  # the last step's output completed it
    script.half.request_finished("r", TABLE)
    assert script.half.has_pending_work()
    meta = script.step()
    assert [job.engine.block_ids for job in meta.early] == [(2,)]
    assert not script.half.has_pending_work()


def test_O10_a_null_block_is_skipped_and_the_rest_goes_on() -> None:
    script, request = running(64, Script(WINDOW))
    meta = script.step(request, 64, [[1, 2, 3, 4], [0, 0, 7, 8]])
    assert script.indices(request, meta, 0) == [0, 1, 2, 3]
    assert script.indices(request, meta, 1) == [2, 3]
    assert script.step(request, 0, [[1, 2, 3, 4], [0, 0, 7, 8]]).stores == ()


def test_O11_a_declined_block_keeps_the_cursor() -> None:
    script, request = running(48, Script(credits=1))
    assert script.indices(request, script.step(request, 48, TABLE)) == [0]
    assert script.half.take_stats()["store_declined"] == 1
    script.grant_credits(5)
    assert script.indices(request, script.step(request, 1, TABLE)) == [1, 2]


def test_O11_a_partly_accepted_batch_is_a_leading_run_per_group() -> None:
    script, request = running(48, Script(TWO_FULL, credits=3))
    table = [[1, 2, 3], [4, 5, 6]]
    (job,) = script.step(request, 48, table).stores
    assert job.engine.group_sizes == (1, 1)
    assert job.engine.block_ids == (1, 4)
    script.grant_credits(10)
    (rest,) = script.step(request, 1, table).stores
    assert rest.engine.block_ids == (2, 3, 5, 6)
    assert rest.engine.group_sizes == (2, 2)


def test_O11_while_a_copy_is_unfinished_another_request_writes_its_own() -> None:
    script, first, second = Script(), Request("a", 16), Request("b", 16)
    run(script, first)
    run(script, second)
    assert script.indices(first, script.step(first, 16, [[1]])) == [0]
    assert script.indices(second, script.step(second, 16, [[2]])) == [0]


def test_O12_what_was_loaded_is_not_stored() -> None:
    script, request = found(64, [0, 1])
    script.load(request, [[1, 2, 3, 4]])
    script.half.on_output({}, ["r"], [])
    script.half.update_state_after_alloc("r", (), 0)
    assert script.indices(request, script.step(request, 32, [[1, 2, 3, 4]])) == [2, 3]


def test_O12_what_was_a_hit_in_the_engine_only_is_stored() -> None:
    script, request = found(64, [])
    script.admit(request, 32)
    assert script.indices(request, script.step(request, 32, TABLE)) == [0, 1, 2, 3]


def test_O12_what_was_present_but_not_loaded_is_not_stored() -> None:
    script, request = found(64, [0, 1])
    script.admit(request, 32)
    assert script.indices(request, script.step(request, 32, TABLE)) == [2, 3]


def test_O12_the_first_blocks_before_a_load_are_stored_if_the_store_lacks_them() -> None:
    """A window group has only what lies before the hit's end."""
    script, request = found(81, [0, 1, 2, 3, 4], [3, 4], script=Script(WINDOW))
    script.load(request, [[1, 2, 3, 4, 5], [0, 0, 11, 12, 13]], computed=16)
    script.half.on_output({}, ["r"], [])
    script.half.update_state_after_alloc("r", (), 0)
    meta = script.step(request, 1, [[1, 2, 3, 4, 5, 6], [0, 0, 11, 12, 13, 14]])
    assert script.indices(request, meta, 0) == []
    assert script.indices(request, meta, 1) == [2]


def test_a_preempted_request_is_offered_from_its_new_blocks() -> None:
    script, request = running(48)
    script.step(request, 16, [[1]])
    request.num_computed_tokens = 0
    script.matched(request)
    (lookup,) = script.lookups()
    script.answer(lookup.ask, [])
    script.admit(request)
    (job,) = script.step(request, 48, [[7, 8, 9]]).stores
    assert job.engine.block_ids == (7, 8, 9)


# Keys


@pytest.mark.parametrize("size", [8, 16])
def test_a_blocks_key_is_the_last_hash_in_it(size: int) -> None:
    script = Script(Geometry(BLOCK, 8, (size,), (GroupRule(),)))
    request = Request("r", 32, hash_tokens=8)
    run(script, request)
    (job,) = script.step(request, 32, [[1, 2, 3, 4]]).stores
    assert [key[:32] for key in job.keys] == [request.block_hashes[1], request.block_hashes[3]]


# The fence


def test_O13_a_load_into_a_source_flushes_it() -> None:
    script, request, other = Script(), Request("r", 32), Request("other", 33, "other")
    run(script, request)
    (job,) = script.step(request, 32, TABLE).stores
    script.arrive(other, [0, 1])
    assert script.load(other, [[9, 1]]).flush == (job.job_id,)


def test_O13_blocks_of_a_request_left_out_may_be_filled_by_another_connector() -> None:
    """One with an adapter is nothing to us, but its blocks may be what we still read."""
    script, request = running(32)
    (job,) = script.step(request, 32, TABLE).stores
    for number, (local, flush) in enumerate([(48, ()), (32, (job.job_id,))]):
        name = f"adapter{number}"
        assert script.half.get_num_new_matched_tokens(name, local) == (0, False)
        script.half.update_state_after_alloc(name, [[9, 8, 1]], 0)
        assert script.step().flush == flush
    script.half.get_num_new_matched_tokens("gone", 16)
    assert not script.half.request_finished("gone", ())
    assert script.half._untracked == {}


def test_O13_what_another_connector_still_loads_is_not_stored_when_its_request_ends() -> None:
    """The engine counts it as computed from the moment at which the load is planned."""
    script, request = found(33)
    script.matched(request)
    script.half.update_state_after_alloc("r", [[1, 2, 3]], 0)
    request.num_computed_tokens = 32
    assert not script.step().stores
    script.half.request_finished("r", [[1, 2, 3]])
    assert not script.step().early


def test_O13_a_block_that_two_requests_store_in_one_step_stays_fenced() -> None:
    """They share it in the engine's cache; an earlier copy of it is unfinished."""
    script, first, second, third = Script(), *(Request(name, 16) for name in "abc")
    for request in (first, second, third):
        run(script, request)
    (early,) = script.step(first, 16, [[1]]).stores
    tables = {"b": [[1]], "c": [[1]]}
    jobs = script.half.build_meta(Step({"b": 16, "c": 16}, [], tables.__getitem__)).stores
    assert [block for job in jobs for block in job.engine.block_ids] == [1, 1]
    script.half.on_output({job.job_id: 1 for job in jobs}, [], [])
    assert script.step(written=[1]).flush == (early.job_id,)
    script.half.on_output({early.job_id: 1}, [], [])
    assert script.step(written=[1]).flush == ()


def test_O13_what_a_step_itself_completes_is_not_flushed_in_it() -> None:
    script, request = running(16)
    meta = script.step(request, 16, TABLE, written=[1])
    assert len(meta.stores) == 1
    assert meta.flush == ()


def test_O14_nothing_is_remembered_of_copies_that_ended() -> None:
    script, request = running(48)
    (job,) = script.step(request, 48, TABLE).stores
    script.half.request_finished("r", TABLE)
    script.half.on_output({job.job_id: 1}, [], [])
    assert not script.half._stores._sources
    assert not script.half._stores._jobs
    assert not script.half._tokens_left
    assert not script.half._requests


# Reset


def test_O17_after_a_reset_nothing_from_before_is_asked_about_or_stored_under() -> None:
    script, request, waiting = Script(), Request("r", 33), Request("waiting", 33)
    run(script, request)
    old = script.arrive(waiting, [0, 1])
    assert script.matched(waiting) == (32, True)
    script.half.on_new_request(Request("unanswered", 33))
    script.lookups()
    assert script.half.reset_cache(b"new epoch")
    assert script.released() == [old]
    assert script.matched(waiting) == (None, False)
    assert [lookup.scope for lookup in script.lookups()] == [b"new epoch"]
    assert script.step(request, 16, TABLE).stores == (), "its blocks may be of before the reset"
    request.num_computed_tokens = 0
    script.admit(request)  # preempted, and admitted again
    (job,) = script.step(request, 16, TABLE).stores
    assert job.keys == (script.key(request, 0, scope=b"new epoch"),)


def test_O17_answers_to_questions_from_before_a_reset_are_not_used() -> None:
    script, request = Script(), Request("r", 33)
    script.half.on_new_request(request)
    (lookup,) = script.lookups()
    script.half.reset_cache(b"new epoch")
    script.answer(lookup.ask, [0, 1], lease=5)
    assert script.matched(request) == (None, False)
    assert 5 in script.released()


def test_O17_what_is_ready_in_the_old_epoch_is_stored_in_the_new_one() -> None:
    script, request = running(16)
    script.changed(added=[script.key(request, 0)])
    script.step()
    script.half.reset_cache(b"new epoch")
    script.admit(request)
    assert len(script.step(request, 16, TABLE).stores) == 1


def test_O17_what_a_running_request_computed_before_a_reset_is_not_stored_after_it() -> None:
    script, request = running(48, Script(credits=0))
    script.step(request, 40, TABLE)
    script.half.reset_cache(b"new epoch")
    script.grant_credits(9)
    assert script.step(request, 8, TABLE).stores == ()
    script.half.request_finished("r", TABLE)
    assert not script.half.has_pending_work()


def test_O11_what_another_connector_has_loaded_is_stored_where_it_is_missing() -> None:
    script, request = found(70, [0, 1], script=Script(beside=True))
    assert script.matched(request) == (32, True)
    script.half.update_state_after_alloc("r", TABLE, 0)
    request.num_computed_tokens = 64
    script.step()
    script.half.update_state_after_alloc("r", TABLE, 0)
    script.step(request, 6, TABLE)
    assert script.indices(request, script.step(request, 1, TABLE)) == [2, 3]


def test_O17_a_later_turn_of_a_session_stores_nothing_from_before_a_reset() -> None:
    """vLLM keeps its blocks between turns, and allocates again what the next one needs."""
    script, request = running(40)
    script.step(request, 40, TABLE)
    script.half.reset_cache(b"new epoch")
    request.num_tokens, request.block_hashes = 64, hashes(4)
    script.half.update_state_after_alloc("r", TABLE, 0)
    assert script.step(request, 24, TABLE).stores == ()


def test_O17_a_reset_during_a_load_says_so() -> None:
    script, request = found(33, [0, 1])
    script.load(request, [[1, 2]])
    assert not script.half.reset_cache(b"new epoch")


def test_O16_events_are_those_of_the_own_scope() -> None:
    script, request = Script(), Request("r", 40)
    script.client.collect_events = True
    script.arrive(request)
    ours, theirs = script.key(request, 0), script.key(request, 0, scope=b"another")
    script.changed(added=[ours, theirs])
    script.changed(removed=[ours, theirs])
    script.step()
    hashes = [request.block_hashes[0]]
    told = [(event.stored, event.hashes) for event in script.half.take_events()]
    assert told == [(True, hashes), (False, hashes)]
    assert script.half.take_events() == []


# Credits


def test_O23_each_slot_is_used_once() -> None:
    script, first, second = Script(), Request("a", 48), Request("b", 48, "b")
    run(script, first)
    run(script, second)
    jobs = [*script.step(first, 48, TABLE).stores, *script.step(second, 48, TABLE).stores]
    slots = [slot for job in jobs for slot in job.slots]
    assert len(slots) == len(set(slots)) == 6


def test_O23_slots_of_a_session_end_with_it() -> None:
    script, request = running(48)
    script.client.detach("the store went")
    assert script.step(request, 16, TABLE).stores == ()
    script.attach(credits=0)
    assert script.step(request, 16, TABLE).stores == ()
    slots = script.grant_credits(9)
    (job,) = script.step(request, 16, TABLE).stores
    assert set(job.slots) <= set(slots)
    assert job.session == script.client.session
    assert script.indices(request, script.step(request, 0, TABLE)) == []


def test_a_request_is_not_looked_at_before_it_can_have_a_block() -> None:
    """What a step spends is proportional to what changed in it."""
    script, request = running(64)
    asked: list[str] = []

    def table(request_id: str) -> list[list[int]]:
        asked.append(request_id)
        return TABLE

    for computed in range(40):
        request.num_computed_tokens = computed
        script.half.build_meta(Step({"r": 1}, [], table))
    assert len(asked) == 2


def calls_of_a_step(blocks: dict[str, int]) -> int:
    """Count the Python calls of a step that completes so many blocks of each request."""
    script = Script(credits=200)
    requests = [Request(name, 16 * (1 + count), name) for name, count in blocks.items()]
    for request in requests:
        run(script, request)
        script.step(request, 16, [[1]])
    tables = {name: [list(range(1, count + 2))] for name, count in blocks.items()}
    step = Step({name: 16 * count for name, count in blocks.items()}, [], tables.__getitem__)
    script.grant_credits(100)
    calls = 0

    def count_calls(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event == "call"

    gc.collect()
    gc.disable()  # else what other tests left is finalized meanwhile, in calls that count
    sys.setprofile(count_calls)
    try:
        meta = script.half.build_meta(step)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert sum(len(job.slots) for job in meta.stores) == sum(blocks.values())
    return calls


def test_a_step_takes_few_calls_for_a_block_and_none_for_one_of_a_run() -> None:
    """Most steps complete a block of some requests, or a long run of one."""
    few, many = (calls_of_a_step({f"r{n}": 1 for n in range(count)}) for count in (10, 30))
    assert many - few <= 6 * 20
    assert calls_of_a_step({"r": 20}) == calls_of_a_step({"r": 60})


def test_a_request_that_runs_keeps_no_copy_of_its_hashes() -> None:
    """The garbage collector would go through all of them."""
    script, request = running(16 * 100)
    assert script.half._requests[request.request_id].query is NO_QUERY


# The store comes back


def test_O8_the_first_request_after_the_store_came_back_is_asked_about() -> None:
    script = Script()
    script.client.detach("for a test")
    script.welcomes = True
    script.half.on_new_request(Request("r", 33))
    assert len(script.lookups()) == 1
