"""Prompts that are handed over, and of which not all had found a slot when they ended."""

from __future__ import annotations

from connectors.engine_interface import Geometry
from connectors.pd_scheduler import STORE_LIMIT_NS
from connectors.request_lookups import IDLE_WAIT_S
from kvstore.core.types import make_key
from kvstore.wire import engine as p
from tests.harness.prefill_rig import HANDED, WINDOW, prefill, tail_hash
from tests.harness.script import MS, ONE_GROUP, Request, Script

TOKENS, TABLE, TABLES = 40, [[5, 6, 7]], [[1, 2, 3], [4, 5, 6]]


def ended(slots: int, geometry: Geometry = ONE_GROUP) -> tuple[Script, Request]:
    """A prompt with so many slots for its blocks has ended; nothing of that was sent."""
    table = TABLE if geometry is ONE_GROUP else TABLES
    script, request = prefill(TOKENS, table, geometry, slots=slots)
    params = script.half.hand_over("p", table)
    assert params is not None
    assert params["remote_num_tokens"] == TOKENS
    assert script.half.request_finished("p", table), "its blocks are kept"
    return script, request


def test_B10_P5_what_found_no_slot_keeps_its_engine_blocks_until_it_has_one() -> None:
    script, request = ended(slots=1)
    (step,) = script.steps()
    tail = tail_hash(ONE_GROUP, request, TOKENS)
    held = b"".join([*request.block_hashes, tail])
    assert step.handed_over == (p.HandedOver("p", "done", held, 32, b"", 30_000),)
    meta = script.step()
    assert (meta.early, meta.stores, meta.sent) == ((), (), ())
    for slots, keys, sent in (
        (1, [script.key(request, 1)], ()),
        (0, [], ()),
        (1, [make_key(tail, 0)], ("p",)),
        (5, [], ()),
    ):
        assert script.half.has_pending_work() == bool(slots < 5)
        script.grant_credits(slots)
        meta = script.step()
        assert [key for job in meta.stores for key in job.keys] == keys
        assert meta.sent == sent
    assert len(script.client.credits) == 5


def test_B10_a_prompt_all_of_which_has_a_slot_gives_its_engine_blocks_back_at_once() -> None:
    script, _ = prefill(TOKENS, TABLE)
    assert script.half.hand_over("p", TABLE)
    assert not script.half.request_finished("p", TABLE)
    assert script.step().sent == ()


def test_O23_a_block_takes_its_slots_in_all_groups_at_once() -> None:
    script, _ = ended(slots=5, geometry=WINDOW)
    assert len(script.client.credits) == 1
    declined = script.half.take_stats()["store_declined"]
    for _ in range(3):
        meta = script.step()
        assert (meta.stores, meta.sent) == ((), ())
    assert script.half.take_stats().get("store_declined", 0) == 0, f"told before: {declined}"
    script.grant_credits(1)
    meta = script.step()
    assert [job.engine.block_ids for job in meta.stores] == [(3, 6)]
    assert meta.sent == ("p",)


def test_B10_they_come_before_what_is_still_being_computed() -> None:
    script, _ = ended(slots=2)
    other = Request("other", 16, "other")
    script.half.on_new_request(other)
    script.admit(other)
    script.grant_credits(1)
    meta = script.step(other, 16, [[9]])
    assert [job.engine.block_ids for job in meta.stores] == [(7,)]
    assert meta.sent == ("p",)


def test_O13_the_fence_covers_what_was_stored_late() -> None:
    script, _ = ended(slots=2)
    script.grant_credits(1)
    meta = script.step(written=[8])
    (job,) = meta.stores
    assert script.step(written=[7]).flush == (job.job_id,)
    script.half.on_output({job.job_id: 1}, [], [])
    assert script.step(written=[7]).flush == ()


def test_O23_without_a_slot_for_too_long_the_engine_gets_its_blocks_back() -> None:
    script, _ = ended(slots=0)
    script.now_ns += STORE_LIMIT_NS - 10 * MS
    script.grant_credits(1)
    assert script.step().sent == (), "that one helped"
    script.now_ns += STORE_LIMIT_NS - 10 * MS
    assert script.step().sent == ()
    script.now_ns += 10 * MS
    assert script.step().sent == ("p",)
    assert script.half.take_stats()["hand_over_unstored"] == 1
    assert not script.half.has_pending_work()
    script.grant_credits(5)
    meta = script.step()
    assert (meta.stores, meta.sent) == ((), ()), "the engine may have given them to others"


def test_without_a_store_nothing_is_handed_over_or_kept() -> None:
    script, _ = prefill(TOKENS, TABLE, slots=1)
    script.cut = True
    script.step()
    assert script.half.hand_over("p", TABLE) is None
    assert not script.half.request_finished("p", TABLE)


def test_they_do_not_outlast_their_store() -> None:
    script, _ = ended(slots=1)
    script.cut = True
    assert script.step().sent == ("p",)
    script.attach()
    meta = script.step()
    assert (meta.stores, meta.sent) == ((), ())


def test_O17_they_do_not_outlast_a_reset() -> None:
    script, _ = ended(slots=1)
    script.half.reset_cache(b"epoch")
    script.grant_credits(5)
    meta = script.step()
    assert (meta.stores, meta.sent) == ((), ("p",))


def test_an_engine_with_nothing_else_to_do_waits_for_slots_a_moment_in_each_step() -> None:
    script, _ = ended(slots=1)
    before = script.waited_ns
    script.step()
    assert script.waited_ns - before == IDLE_WAIT_S * 1e9
    other = Request("other", 64, "other")
    script.half.on_new_request(other, HANDED)
    script.admit(other)
    before = script.waited_ns
    script.step(other, 16, [[9]])
    assert script.waited_ns == before
