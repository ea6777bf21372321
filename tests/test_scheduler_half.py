"""The scheduler half, asking and loading: each test is named after its row of the contract."""

from __future__ import annotations

import pytest

from connectors.engine_interface import Geometry
from connectors.request_lookups import (
    ANSWER_LIMIT_NS,
    LOADING_LIMIT_NS,
    OVERDUE_NS,
    OVERDUE_STEP_NS,
)
from connectors.scheduler import REFUSED_MAX
from connectors.step_meta import pieces
from kvstore.core.layout import Move
from kvstore.core.types import GroupRule
from tests.harness.moves import listed
from tests.harness.script import BLOCK, MS, US, Request, Script, found, hashes, running

PARTS = Geometry(BLOCK, 8, (8,), (GroupRule(),))  # two engine blocks in a block
WINDOW = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule(2)))


def waiting() -> tuple[Script, Request]:
    """A request of two blocks whose question was not answered yet."""
    script, request = Script(), Request("r", 33)
    script.half.on_new_request(request)
    return script, request


def loading() -> tuple[Script, Request]:
    """A request of two blocks and a half whose load is under way."""
    script, request = found(40, [0, 1])
    script.load(request, [[1, 2]])
    return script, request


def loading_for_two(
    text: str = "a", *, shares_prefixes: bool = True
) -> tuple[Script, Request, Request]:
    """A load is under way; another request, of this text, has found the same blocks."""
    script = Script(shares_prefixes=shares_prefixes)
    first, second = Request("a", 33), Request("b", 40, text)
    script.arrive(first, [0, 1])
    script.load(first, [[1, 2]])
    script.arrive(second, [0, 1])
    return script, first, second


def finish(script: Script, request: Request, *, failed: bool = False) -> None:
    """Every rank has reported the request's load."""
    names = [request.request_id]
    script.half.on_output({}, names, names if failed else [])


# Asking


def test_O4_less_than_a_block_beyond_what_the_engine_has_is_none() -> None:
    script, request = found(41, [0, 1], script=Script(PARTS), hash_tokens=8)
    assert script.matched(request, 24) == (0, False)
    assert script.matched(request, 16) == (16, True)
    longer = Request("longer", 65, "b", hash_tokens=8)
    script.arrive(longer, [0, 1])
    assert script.matched(longer, 24) == (0, False), "the answer is short, not the request"


def test_O4_it_is_none_at_once_even_before_the_answer() -> None:
    script, request = Script(), Request("r", 20)
    script.half.on_new_request(request)
    assert script.matched(request, 16) == (0, False)
    assert script.waited_ns == 0


def test_O4_the_last_token_is_left_to_the_engine() -> None:
    script, request = found(32, [0, 1])
    assert script.matched(request) == (16, True)


def test_O6_a_request_that_computes_all_its_prompt_asks_nothing_and_is_stored() -> None:
    script, request = Script(), Request("r", 48)
    script.half.on_new_request(request, reads=False)
    assert script.lookups() == []
    for _ in range(2):  # the second time: preempted, and back
        assert script.matched(request) == (0, False)
        assert script.lookups() == []
        script.half.update_state_after_alloc("r", [[1, 2, 3]], 0)
        meta = script.step(request, 48, [[1, 2, 3]])
        assert script.indices(request, meta) == [0, 1, 2]
        request.num_computed_tokens = 0
    assert not any(step.lookup_tokens for step in script.steps()), "it could not hit"
    assert script.waited_ns == 0
    assert not script.half.take_stats().get("deferred")


def test_O4_all_groups_must_serve_the_hit() -> None:
    script, request = found(81, [0, 1, 2, 3, 4], [1, 2, 4], script=Script(WINDOW))
    assert script.matched(request) == (48, True)


def test_O4_a_short_window_counts_if_it_reaches_what_the_engine_has() -> None:
    script, request = found(81, [0, 1, 2, 3], [3], script=Script(WINDOW))
    assert script.matched(request, 48) == (16, True)
    assert script.matched(request, 16) == (0, False)


def test_O4_a_resumed_request_is_asked_about_with_what_it_generated() -> None:
    script, request = found(20, [])
    script.admit(request)
    request.num_tokens, request.block_hashes = 50, hashes(3)
    request.num_computed_tokens = 0  # preempted
    script.matched(request)
    (lookup,) = script.lookups()
    assert lookup.hashes == b"".join(hashes(3))
    script.answer(lookup.ask, [0, 1, 2])
    assert script.matched(request) == (48, True)


def test_O5_asking_again_says_the_same() -> None:
    script, request = found(33, [0, 1])
    assert [script.matched(request) for _ in range(3)] == [(32, True)] * 3


def test_O5_polling_a_deferred_request_is_one_lookup() -> None:
    script, request = waiting()
    for _ in range(5):
        assert script.matched(request) == (None, False)
        script.step()
    assert len(script.lookups()) == 1


@pytest.mark.parametrize(
    ("present", "said"), [(None, (None, False)), ([0, 1], (32, True)), ([], (0, False))]
)
def test_O6_the_three_answers(present: list[int] | None, said: tuple[int | None, bool]) -> None:
    script, request = waiting()
    if present is not None:
        (lookup,) = script.lookups()
        script.answer(lookup.ask, present)
    assert script.matched(request) == said


def test_O6_a_request_nobody_announced_is_a_miss() -> None:
    assert Script().matched(Request("adapter", 33)) == (0, False)


# One load, many requests


def test_O7_a_second_request_waits_for_the_first_ones_load() -> None:
    script, first, second = loading_for_two()
    assert script.matched(second) == (None, False)
    finish(script, first)
    assert script.matched(second) == (32, True)
    assert script.matched(second, 32) == (0, False)


def test_O7_with_other_tokens_or_without_prefix_caching_each_loads_its_own() -> None:
    for text, shares_prefixes in (("other", True), ("a", False)):
        script, _, second = loading_for_two(text, shares_prefixes=shares_prefixes)
        assert script.matched(second) == (32, True)


def test_O7_the_wait_is_bounded() -> None:
    script, _, second = loading_for_two()
    assert script.matched(second) == (None, False)
    script.now_ns += LOADING_LIMIT_NS
    assert script.matched(second) == (None, False)
    script.now_ns += 1
    assert script.matched(second) == (0, False)
    assert script.client.session, "the store has answered, it is not to blame"


@pytest.mark.parametrize("aborted", [True, False])
def test_O7_a_load_that_failed_or_was_aborted_delays_no_other(*, aborted: bool) -> None:
    script, first, second = loading_for_two()
    assert script.matched(second) == (None, False)
    if aborted:
        script.half.request_finished("a", [[1, 2]])
    else:
        finish(script, first, failed=True)
    assert script.matched(second) == (32, True)


# Waiting for the answer


def test_O8_an_engine_is_idle_once_its_last_request_has_finished() -> None:
    script, running, request = Script(), Request("running", 8), Request("r", 33)
    script.half.on_new_request(running)
    script.step(running, 8, [[1]])
    script.half.request_finished("running", [[1]])
    script.half.on_new_request(request)
    script.matched(request)
    assert script.waited_ns == pytest.approx(MS, rel=0.01)


def test_O8_a_busy_engine_waits_200_us_in_a_step() -> None:
    script, running = Script(), Request("running", 8)
    script.half.on_new_request(running)
    script.step(running, 8, [[1]])
    for name in "ab":
        script.half.on_new_request(Request(name, 33))
        script.half.get_num_new_matched_tokens(name, 0)
    assert script.waited_ns == pytest.approx(200 * US, rel=0.01)
    script.step(running, 1, [[1]])
    script.half.on_new_request(Request("c", 33))
    script.half.get_num_new_matched_tokens("c", 0)
    assert script.waited_ns == pytest.approx(400 * US, rel=0.01), "a new step, a new budget"


def busy_waits(script: Script, running: Request, names: str) -> list[int]:
    """How long a busy engine waits for each of these new requests, in ns."""
    waits = []
    for name in names:
        script.step(running, 1, [[1]])
        before = script.waited_ns
        script.half.on_new_request(Request(name, 33, name))
        script.half.get_num_new_matched_tokens(name, 0)
        waits.append(script.waited_ns - before)
    return waits


def test_O8_waiting_is_off_after_three_time_outs_until_an_answer_comes_in_time() -> None:
    script, running = Script(), Request("running", 8)
    script.half.on_new_request(running)
    waits = busy_waits(script, running, "abcde")
    assert all(waits[:3])
    assert waits[3:] == [0, 0]
    late = Request("late", 33, "late")
    script.arrive(late, [0, 1])
    assert script.matched(late) == (32, True)
    assert busy_waits(script, running, "f") != [0]


def test_O8_a_store_that_does_not_answer_is_given_up() -> None:
    script, request = waiting()
    assert script.matched(request) == (None, False)
    script.now_ns += ANSWER_LIMIT_NS + 101 * MS  # the store may defer for 100 ms
    steps = OVERDUE_NS // OVERDUE_STEP_NS + 1
    for _ in range(steps):  # the engine may have stood still as well
        assert script.matched(request) == (None, False)
        script.step()
        script.now_ns += OVERDUE_STEP_NS
    assert script.matched(request) == (0, False)
    assert not script.client.session
    stats = script.half.take_stats()
    assert (stats["deferred"], stats["timed_out"]) == (1, 1)
    assert stats["deferred_steps"] == 1 + steps


def test_O8_an_engine_of_long_steps_gives_up_a_store_that_does_not_answer() -> None:
    """It looks a few times only in which a request may wait, and would wait with each request."""
    script, request = waiting()
    assert script.matched(request) == (None, False)
    for _ in range(2):
        script.step()
        script.now_ns += LOADING_LIMIT_NS * 2 // 5
        assert script.matched(request) == (None, False)
    script.step()
    script.now_ns += LOADING_LIMIT_NS * 2 // 5
    assert script.matched(request) == (0, False)
    assert not script.client.session


def test_O8_a_store_whose_answer_came_late_is_not_given_up_for_another_wait() -> None:
    """Another request's load of the same blocks takes too long."""
    script, _ = loading()
    request = Request("late", 40)
    script.half.on_new_request(request)
    (lookup,) = script.lookups()
    script.now_ns += ANSWER_LIMIT_NS + 101 * MS
    for _ in range(3):
        assert script.matched(request) == (None, False)
        script.step()
        script.now_ns += MS
    script.answer(lookup.ask, [0, 1], lease_ms=60_000)
    assert script.matched(request) == (None, False)
    script.step()
    script.now_ns += LOADING_LIMIT_NS
    assert script.matched(request) == (0, False)
    assert script.client.session


@pytest.mark.parametrize("times", [1, 2])
def test_O8_a_store_is_not_given_up_because_the_machine_stood_still(times: int) -> None:
    """Its answer comes when both run again: an idle engine's steps are short."""
    script, request = waiting()
    assert script.matched(request) == (None, False)
    (lookup,) = script.lookups()
    for _ in range(times):
        script.now_ns += 4 * ANSWER_LIMIT_NS
        assert script.matched(request) == (None, False)
        script.step()
    for _ in range(50):
        script.now_ns += MS
        assert script.matched(request) == (None, False)
        script.step()
    script.answer(lookup.ask, [0, 1], lease_ms=60_000)
    assert script.matched(request) == (32, True)
    assert script.client.session


def test_O8_questions_asked_anew_do_not_prolong_the_wait() -> None:
    """Leases so short that each answer has expired when it is read."""
    script, request = found(33, [0, 1], lease_ms=10)
    said: list[tuple[int | None, bool]] = []
    for _ in range(1_000):
        script.now_ns += 20 * MS
        said.append(script.matched(request))
        if said[-1] != (None, False):
            break
        for lookup in script.lookups():
            script.answer(lookup.ask, [0, 1], lease_ms=10)
    assert said[-1] == (0, False)


def test_O8_the_limit_starts_anew_when_a_request_comes_back() -> None:
    script, request = waiting()
    script.matched(request)
    (lookup,) = script.lookups()
    script.answer(lookup.ask, [])
    script.admit(request)
    script.now_ns += 10 * LOADING_LIMIT_NS
    assert script.matched(request) == (None, False), "preempted, and asked about again"


def test_O8_while_the_engine_has_no_place_for_a_request_it_does_not_wait_for_the_store() -> None:
    """Its answer came and expired unread: it is asked about once more, and not computed."""
    script, request = waiting()
    assert script.matched(request) == (None, False)
    (lookup,) = script.lookups()
    script.answer(lookup.ask, [0, 1], lease_ms=10_000)
    for _ in range(2):  # steps that admit no request
        script.now_ns += 2 * LOADING_LIMIT_NS
        script.step()
    assert script.matched(request) == (None, False)
    (again,) = script.lookups()
    script.answer(again.ask, [0, 1])
    assert script.matched(request) == (32, True)
    assert "timed_out" not in script.half.take_stats()


def test_O8_a_wait_goes_on_from_step_to_step() -> None:
    script, _, second = loading_for_two()
    for _ in range(5):
        assert script.matched(second) == (None, False)
        script.step()
        script.now_ns += LOADING_LIMIT_NS // 5
    script.now_ns += 1
    assert script.matched(second) == (0, False)


# Planning the load


def test_O9_lookahead_blocks_are_left_alone() -> None:
    script, request = found(40, [0, 1])
    (job,) = script.load(request, [[5, 6, 7, 8]]).loads
    assert job.engine.block_ids == (5, 6)


def test_O9_the_first_block_is_entered_part_way() -> None:
    script, request = found(66, [0, 1, 2, 3], script=Script(PARTS), hash_tokens=8)
    (job,) = script.load(request, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], computed=24).loads
    assert job.engine.block_ids == (4, 5, 6, 7, 8)
    assert job.engine.block_indices == (3,)
    assert job.slots == (1, 2, 3)
    assert listed(pieces(job.engine, job.slots, (2,)))[0] == Move(0, 4, 1, 1)


def test_O9_only_the_window_is_loaded() -> None:
    script, request = found(81, [0, 1, 2, 3, 4], [3, 4], script=Script(WINDOW))
    (job,) = script.load(request, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]).loads
    assert job.engine.group_sizes == (5, 2)
    assert job.engine.block_ids[5:] == (9, 10)


def test_O9_the_second_allocation_after_a_load_starts_nothing() -> None:
    script, request = loading()
    finish(script, request)
    script.steps()
    script.half.update_state_after_alloc("r", (), 0)
    meta = script.step(request, 8, [[1, 2, 3]])
    assert (meta.loads, meta.stores) == ((), ())
    assert not any(step.lookup_tokens for step in script.steps()), "the request was counted twice"


def test_O9_an_allocation_while_loading_changes_no_load() -> None:
    script, request = found(40, [0, 1])
    assert len(script.load(request, [[1, 2]]).loads) == 1
    script.half.update_state_after_alloc("r", (), 0)
    assert script.step().loads == ()
    steps = script.steps()
    assert [lease for step in steps for lease in step.release] == [], "it is being loaded from"
    assert [(step.lookup_tokens, step.hit_tokens) for step in steps] == [(40, {"cpu": 32})], (
        "counted once"
    )
    finish(script, request)
    script.half.update_state_after_alloc("r", (), 0)
    assert script.step(request, 8, [[1, 2, 3]]).stores == (), "what was loaded is not stored"


def test_O9_a_promise_without_its_blocks_is_a_load_that_fails() -> None:
    script, request = found(40, [0, 1])
    assert script.matched(request) == (32, True)
    script.client.detach("between the answer and the allocation")
    script.attach()
    script.half.update_state_after_alloc("r", [[1, 2]], 32)
    (job,) = script.step().loads
    assert job.session == 0
    assert job.engine.block_ids == (1, 2)


def test_O19_groups_are_listed_in_order_with_0_for_nothing() -> None:
    rules = (GroupRule(), GroupRule(2), GroupRule())
    script = Script(Geometry(BLOCK, BLOCK, (BLOCK,) * 3, rules))
    request = Request("r", 40)
    script.arrive(request, [0, 1], [0, 1], [0, 1])
    (job,) = script.load(request, [[1, 2], [0, 0], [3, 4]]).loads
    assert job.engine.group_sizes == (2, 0, 2)
    assert len(job.engine.block_indices) == 3
    assert job.engine.block_ids == (1, 2, 3, 4)
    assert job.slots == (0, 1, 2000, 2001)
    assert job.generations == (7,) * 4
    moves = listed(pieces(job.engine, job.slots, script.geometry.blocks_per_chunk))
    assert moves == [Move(0, 1, 0, 0), Move(0, 2, 1, 0), Move(2, 3, 2000, 0), Move(2, 4, 2001, 0)]


@pytest.mark.parametrize(
    ("sources", "tokens"),
    [({"nvme": 1}, {"nvme": 16, "cpu": 48}), ({"nvme": 3, "peer": 3}, {"nvme": 48, "peer": 16})],
)
def test_M1_M2_hits_are_counted_by_the_tier_they_come_from_each_token_once(
    sources: dict[str, int], tokens: dict[str, int]
) -> None:
    script, request = Script(), Request("r", 65)
    script.half.on_new_request(request)
    (lookup,) = script.lookups()
    script.answer(lookup.ask, [0, 1, 2, 3], sources=sources)
    script.load(request, [[1, 2, 3, 4]])
    usage = [(step.lookup_tokens, step.hit_tokens) for step in script.steps() if step.hit_tokens]
    assert usage == [(65, tokens)]
    assert script.half.hit_sources("r", 64) == tokens


# Leases


def test_O14_a_request_aborted_during_its_load_leaves_nothing() -> None:
    script, request = loading()
    script.half.request_finished("r", [[1, 2]])
    meta = script.step()
    assert (meta.early, meta.stores, meta.loads) == ((), (), ())
    finish(script, request)
    assert not script.half.has_pending_work()
    assert script.released() == [], "its lease ends when the workers report it"


def test_O15_a_failed_load_is_tried_once_more_and_then_computed() -> None:
    script, request = loading()
    finish(script, request, failed=True)
    request.num_computed_tokens = 0
    assert script.matched(request) == (None, False)
    (lookup,) = script.lookups()
    script.answer(lookup.ask, [0])
    (job,) = script.load(request, [[3, 4]]).loads
    assert job.engine.block_ids == (3,)
    finish(script, request, failed=True)
    assert script.matched(request) == (0, False)
    assert script.lookups() == []
    assert script.half.take_stats()["load_failed"] == 2


@pytest.mark.parametrize("again", [True, False])
def test_O15_after_a_failed_load_others_that_may_hold_blocks_come_first(*, again: bool) -> None:
    """vLLM tries a failed request first, and no other if it finds no room for it."""
    script, request = loading()
    script.arrive(Request("other", 40, "b"))
    script.half._requests["r"].failures = 0 if again else 1
    finish(script, request, failed=True)
    request.num_computed_tokens = 0
    if again:
        script.half._lookups.ask(script.half._requests["r"])
        (lookup,) = script.lookups()
        script.answer(lookup.ask, [0])
    assert script.matched(request) == (None, False)
    assert script.matched(request) == ((16, True) if again else (0, False)), "once"


def test_O15_a_load_that_an_engine_with_nothing_to_run_has_no_room_for_is_computed() -> None:
    """vLLM reserves room for a failed request's tokens, from its next load, too, but no other."""
    script, request = found(40, [0, 1])
    answers = [script.matched(request) for _ in range(REFUSED_MAX + 1) if not script.step().loads]
    assert answers == [(32, True)] * REFUSED_MAX + [(0, False)]


def test_O15_an_engine_that_has_no_room_while_others_hold_blocks_is_waited_for() -> None:
    script, request = running(40)
    script.step(request, 40, [[1, 2, 3]])
    other = Request("other", 40, "b")
    script.arrive(other, [0, 1])
    for _ in range(3 * REFUSED_MAX):
        script.step()
        assert script.matched(other) == (32, True)


def test_O15_what_a_failed_load_promised_is_stored_when_it_is_computed() -> None:
    script, request = loading()
    finish(script, request, failed=True)
    request.num_computed_tokens = 0
    script.admit(request)
    assert script.indices(request, script.step(request, 40, [[3, 4, 5]])) == [0, 1]


def test_O15_what_failed_to_load_is_stored_before_the_store_has_said_that_it_is_gone() -> None:
    script, request = found(49, [0, 1, 2])
    script.changed([script.key(request, index) for index in range(3)])
    script.load(request, [[1, 2, 3]], 16)
    finish(script, request, failed=True)
    request.num_computed_tokens = 16
    script.admit(request, 16)
    assert script.indices(request, script.step(request, 33, [[1, 4, 5, 6]])) == [1, 2]


def test_O20_an_expired_answer_is_asked_afresh() -> None:
    script, request = Script(), Request("r", 33)
    ask = script.arrive(request, [0, 1], lease_ms=1_000)
    assert script.matched(request) == (32, True)
    script.now_ns += 800 * MS  # before the store lets the lease end
    assert script.matched(request) == (None, False)
    (step,) = script.steps()
    assert step.release == (ask,)
    assert [lookup.hashes for lookup in step.lookups] == [b"".join(hashes(2))]


def test_O20_a_lease_is_given_back_at_abort() -> None:
    script, request = Script(), Request("r", 33)
    ask = script.arrive(request, [0, 1])
    script.matched(request)
    script.half.request_finished("r", [[]])
    assert script.released() == [ask]


def test_O20_an_answer_after_the_abort_is_given_back() -> None:
    script, _ = waiting()
    (lookup,) = script.lookups()
    script.half.request_finished("r", [[]])
    script.answer(lookup.ask, [0, 1], lease=99)
    script.step()
    assert script.released() == [99]


def test_O20_a_lease_is_given_back_when_the_engine_takes_no_token_of_it() -> None:
    script, request = Script(), Request("r", 33)
    ask = script.arrive(request, [0, 1])
    script.matched(request)
    script.half.update_state_after_alloc("r", [[1, 2, 3]], 0)
    assert script.step().loads == ()
    assert script.released() == [ask]


def test_O20_at_the_cap_later_requests_give_their_leases_back() -> None:
    script, head = Script(), Request("a", 33)
    other, last = Request("b", 33, "b"), Request("c", 33, "c")
    first = script.arrive(head, [0, 1])
    script.arrive(other, capped=True)
    late = script.arrive(last, [0, 1])
    assert script.matched(head) == (32, True)
    assert script.matched(other) == (None, False)
    step, *_ = script.steps()
    assert step.release == (late,), "the head of the queue keeps its own"
    (again,) = step.lookups
    script.answer(again.ask, [0, 1])
    assert script.matched(other) == (32, True)
    assert script.client.grant(first) is not None


def test_a_question_lost_with_its_session_is_asked_again() -> None:
    script, request = waiting()
    assert script.matched(request) == (None, False)
    script.client.detach("the store went")
    assert script.matched(request) == (0, False), "without a store it is computed"
    script.attach()
    assert script.matched(request) == (None, False)
    assert [lookup.hashes for lookup in script.lookups()][-1] == b"".join(hashes(2))


def test_without_a_store_every_answer_is_a_miss_and_nothing_is_stored() -> None:
    script, request = Script(), Request("r", 40)
    script.cut = True
    script.client.receive()
    script.half.on_new_request(request)
    assert script.matched(request) == (0, False)
    assert script.waited_ns == 0
    script.admit(request)
    assert script.step(request, 40, [[1, 2, 3]]).stores == ()


def test_shutdown_is_idempotent() -> None:
    script = Script()
    script.half.shutdown()
    script.half.shutdown()
    assert not script.client.session
