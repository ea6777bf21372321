"""Storing what the engine is about to reuse, and nothing else; its blocks are a pool's."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence

import pytest

from connectors import late_stores, store_client
from connectors.engine_interface import Geometry, is_one_full_group
from connectors.late_stores import DUE_MAX, PastRequest
from connectors.request_policy import RequestPolicy
from connectors.request_state import NEVER
from connectors.step_meta import StepMeta
from connectors.store_client import BlockVersions
from kvstore.core.types import GroupRule
from tests.harness.script import BLOCK, ONE_GROUP, Request, Script
from tests.reference.pool import BlockPool

STEP = 4  # blocks that this engine gives out in a step
PARTS = Geometry(2 * BLOCK, BLOCK, (BLOCK,), (GroupRule(),))  # two engine blocks each


class Desk:
    """A scheduler half that stores late, and what an engine does with its blocks."""

    def __init__(
        self, blocks: int = 40, geometry: Geometry = ONE_GROUP, slots: int = 100, step: int = STEP
    ) -> None:
        self.script = Script(geometry, credits=slots)
        self.half = self.script.half
        self.pool = BlockPool(blocks + 1, reuse_newest=False)
        self.half.store_late(self.pool, step)
        self.tables: dict[str, list[int]] = {}

    def begin(self, name: str, blocks: int, text: str = "", **policy: object) -> Request:
        """A request comes, finds nothing and is admitted, with what the engine has of it."""
        request = Request(name, blocks * BLOCK, text or name)
        self.script.lookups()
        self.half.on_new_request(request, policy=RequestPolicy(**policy))  # type: ignore[arg-type]
        for lookup in self.script.lookups():
            self.script.answer(lookup.ask)
        self.admit(request)
        return request

    def admit(self, request: Request) -> None:
        held = [self.pool.cached.get((0, name)) for name in request.block_hashes]
        own = held[: held.index(None)] if None in held else held[:-1]
        table = [block for block in own if block is not None]
        self.pool.share(table)
        self.tables[request.request_id] = table
        self.script.admit(request, len(table) * BLOCK)

    def compute(self, request: Request, blocks: int) -> StepMeta:
        """A step computes so many more blocks of a request; their hashes are known before."""
        table = self.tables[request.request_id]
        fresh = self.pool.take(blocks)
        for block in fresh:
            self.pool.publish(block, (0, request.block_hashes[len(table)]))
            table.append(block)
        return self.script.step(request, blocks * BLOCK, [table], written=fresh)

    def finish(self, request: Request) -> None:
        table = self.tables.pop(request.request_id)
        self.half.request_finished(request.request_id, [table])
        self.pool.release(table)

    def run(self, name: str, blocks: int, text: str = "", **policy: object) -> Request:
        """A prompt of so many blocks is computed, and ends."""
        request = self.begin(name, blocks, text, **policy)
        self.compute(request, blocks - len(self.tables[name]))
        self.finish(request)
        return request

    def stored(self, request: Request, *metas: StepMeta) -> list[int]:
        return [index for meta in metas for index in self.script.indices(request, meta)]

    def copied(self, meta: StepMeta) -> list[tuple[int, ...]]:
        return [job.engine.block_ids for job in meta.early]


def load(desk: Desk, blocks: int, *names: str) -> StepMeta:
    """A step loads a prompt of so many blocks, and a part of one; or some such prompts."""
    for name in names or ("l",):
        loaded = Request(name, (blocks + 1) * BLOCK, name)
        desk.script.arrive(loaded, range(blocks))
        external, _ = desk.script.matched(loaded)
        assert external == blocks * BLOCK
        table = desk.pool.take(blocks)
        desk.half.update_state_after_alloc(name, [table], external)
    return desk.script.step()


def end_all(desk: Desk, meta: StepMeta) -> None:
    """All copies of a step end."""
    desk.half.on_output({job.job_id: 1 for job in (*meta.early, *meta.stores)}, (), ())


# What is stored, and when


def test_O28_what_the_engine_keeps_is_not_stored() -> None:
    desk = Desk(blocks=40)
    first = desk.begin("a", 4)
    metas = [desk.compute(first, 2), desk.compute(first, 2)]
    desk.finish(first)
    assert not desk.half.has_pending_work()
    more = desk.begin("b", 4)
    metas += [desk.compute(more, 4), desk.script.step()]
    assert [meta for meta in metas if meta.early or meta.stores] == []


def test_O28_a_prompt_is_stored_whole_once_a_block_of_it_is_among_the_next_to_be_reused() -> None:
    desk = Desk(blocks=20)
    past = desk.run("a", 6)  # 14 blocks are free before its own
    filler = desk.begin("b", 12)
    assert not desk.stored(past, desk.compute(filler, 4)), "10 are left, 8 are looked at"
    meta = desk.compute(filler, 4)
    assert desk.stored(past, meta) == [0, 1, 2, 3, 4, 5]
    assert meta.early, "before the forward pass of this step"
    assert not meta.stores
    assert not meta.flush, "these are not given out yet"
    assert desk.copied(meta) == [(1, 2, 3, 4, 5, 6)]
    assert not desk.stored(past, desk.compute(filler, 4)), "once"


def test_O28_O13_the_fence_keeps_the_bytes_until_they_are_copied() -> None:
    desk = Desk(blocks=10)
    past = desk.run("a", 6)
    filler = desk.begin("b", 8)
    meta = desk.compute(filler, 4)
    (job,) = meta.early
    assert desk.stored(past, meta) == [0, 1, 2, 3, 4, 5]
    later = desk.compute(filler, 4)
    assert later.flush == (job.job_id,)


def test_O28_a_load_takes_blocks_at_once_which_are_stored_in_that_step_and_fenced() -> None:
    """A load may take more blocks than any step that computes."""
    desk = Desk(blocks=30)
    past = desk.run("a", 6)
    meta = load(desk, 28)
    assert desk.stored(past, meta) == [0, 1, 2, 3, 4, 5]
    assert meta.flush == tuple(job.job_id for job in meta.early), "copied before they are filled"


def test_O28_a_step_with_two_loads_stores_what_the_second_one_takes() -> None:
    desk = Desk(blocks=30)
    past = desk.run("a", 6)
    meta = load(desk, 14, "l", "m")  # 24 blocks are free before the prompt's own
    assert desk.stored(past, meta) == [0, 1, 2, 3, 4, 5]
    assert meta.flush == tuple(job.job_id for job in meta.early)


def test_O28_a_load_that_the_engine_has_no_room_for_stores_nothing() -> None:
    """It asks in every step until it has."""
    desk = Desk(blocks=30)
    past, runs = desk.run("a", 6), desk.begin("r", 4)
    desk.compute(runs, 4)
    loaded = Request("l", 28 * BLOCK, "l")
    desk.script.arrive(loaded, range(27))
    assert desk.script.matched(loaded) == (27 * BLOCK, True)
    assert not desk.stored(past, desk.script.step())


def test_O28_B16_peers_are_not_offered_blocks_that_the_same_step_overwrites() -> None:
    """With `direct` they read engine blocks while these have the version that they were told."""
    desk = Desk(blocks=30)
    memory = os.memfd_create("versions")
    os.ftruncate(memory, 4 * 31)
    desk.script.client._versions = versions = BlockVersions(memory, 31)
    past = desk.run("a", 6)
    assert desk.stored(past, load(desk, 28)) == [0, 1, 2, 3, 4, 5]
    (told,) = [blocks for step in desk.script.steps() for blocks in step.engine_blocks]
    assert told.generations != versions.packed([1, 2, 3, 4, 5, 6])


def test_O28_with_few_free_blocks_a_request_that_ends_is_stored_at_once() -> None:
    """Its blocks are the next to be reused, and may be in the very next step."""
    desk = Desk(blocks=12)
    one, other = desk.begin("a", 6), desk.begin("b", 6)
    for _ in range(3):
        desk.compute(one, 2)
        assert not desk.compute(other, 2).early
    desk.finish(one)
    assert desk.half.has_pending_work()
    assert desk.stored(one, desk.script.step()) == [0, 1, 2, 3, 4, 5]


def test_O28_what_the_engines_own_cache_had_is_stored_with_the_rest() -> None:
    """What the store had when a request came may have left it since; it knows what is there."""
    desk = Desk(blocks=20)
    desk.run("a", 4, "same")
    known = [desk.script.key(Request("a", 64, "same"), index) for index in (0, 1)]
    desk.script.changed(added=known)
    turn = desk.run("b", 6, "same")
    filler = desk.begin("c", 12)
    metas = [desk.compute(filler, 4) for _ in range(3)]
    assert desk.stored(turn, *metas) == [2, 3, 4, 5], "each once, and not what the store has"


def test_O28_what_is_known_to_be_there_is_the_last_to_be_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What an engine keeps using it stores once, and not whenever it makes way."""
    monkeypatch.setattr(store_client, "KNOWN_MAX", 8)
    desk = Desk(blocks=20)
    past = desk.run("a", 5)
    keys = [desk.script.key(past, index) for index in range(5)]
    desk.script.changed(added=keys)
    desk.script.changed(added=[b"%d" % number for number in range(8)])  # the newest are others
    filler = desk.begin("b", 12)
    metas = [desk.compute(filler, 4) for _ in range(3)]
    assert not desk.stored(past, *metas)
    desk.script.changed(added=[b"%d" % number for number in range(10, 18)])
    desk.script.step()
    assert all(key in desk.script.client.known for key in keys)


def test_O28_a_step_looks_at_a_limited_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_stores, "VISITS_MAX", 4)
    desk = Desk(blocks=14, slots=0)
    past = [desk.run(name, 4) for name in "abc"]
    late = desk.half._late
    assert late is not None
    late.make_way(10 * BLOCK)  # all three are due
    desk.script.grant_credits(100)
    metas = [desk.script.step() for _ in range(4)]
    assert [[len(desk.stored(one, meta)) for one in past] for meta in metas] == [
        [4, 0, 0],
        [0, 4, 0],
        [0, 0, 4],
        [0, 0, 0],
    ]


@pytest.mark.parametrize("events", [False, True])
def test_O28_token_ids_of_past_requests_are_kept_for_events_alone_and_packed(
    *, events: bool
) -> None:
    desk = Desk(blocks=40)
    desk.script.client.collect_events = events
    past = desk.run("a", 6)
    late = desk.half._late
    assert late is not None
    (path,) = {id(note): note for note in late._notes if note is not None}.values()
    kept = path.tracked.request.all_token_ids
    assert kept == (array("I", past.all_token_ids) if events else ())


def test_O16_O28_what_is_stored_late_is_told_with_what_else_is_in_its_hashes() -> None:
    desk, asked = Desk(blocks=8), list[object]()

    def extra_of(request: object) -> object:
        asked.append(request)
        if isinstance(request, PastRequest):
            return request.extra
        return lambda first, end, step: [first] * ((end - first) // step)

    desk.script.client.collect_events = True
    desk.half.events.extra_of = extra_of  # type: ignore[assignment]
    past = desk.run("a", 4)
    desk.run("b", 6)  # takes its blocks
    key = desk.script.key(past, 1)
    desk.script.changed(added=[key])
    desk.script.step()
    (event,) = desk.half.take_events()
    assert (event.hashes, event.extra) == ([past.block_hashes[1]], [BLOCK])
    assert past in asked


def test_O28_a_preempted_request_is_stored_as_far_as_its_blocks_are_there() -> None:
    desk = Desk(blocks=12)
    one, other = desk.begin("a", 6), desk.begin("b", 6)
    desk.compute(one, 4)
    for _ in range(3):
        desk.compute(other, 2)
    table = desk.tables.pop("a")
    desk.pool.release(table)  # preempted; two of its blocks go to another at once
    third = desk.begin("c", 4)
    meta = desk.compute(third, 4)
    assert desk.stored(one, meta) == [0, 1]
    one.num_computed_tokens = 0
    desk.admit(one)
    desk.finish(third)
    desk.compute(one, 6 - len(desk.tables["a"]))
    desk.finish(one)
    later = desk.script.step()
    assert desk.stored(one, later) == [0, 1, 2, 3, 4, 5], "in the blocks that it has now"


def test_O28_pinned_prompts_are_stored_at_once() -> None:
    desk = Desk()
    request = desk.begin("a", 4, kv_pin="p")
    meta = desk.compute(request, 4)
    assert desk.stored(request, meta) == [0, 1, 2, 3]
    assert meta.stores


def test_O28_larger_blocks_are_stored_with_all_their_parts() -> None:
    desk = Desk(blocks=20, geometry=PARTS)
    past = desk.run("a", 7)  # the last engine block is half of one
    filler = desk.begin("b", 12)
    metas = [desk.compute(filler, 4) for _ in range(3)]
    assert desk.stored(past, *metas) == [0, 1, 2]
    assert [ids for meta in metas for ids in desk.copied(meta)] == [(1, 2, 3, 4, 5, 6)]


def test_O28_limits_of_a_request_hold() -> None:
    desk = Desk(blocks=20)
    past = desk.run("a", 6, max_offload_tokens=3 * BLOCK)
    filler = desk.begin("b", 14)
    metas = [desk.compute(filler, count) for count in (4, 4, 4, 2)]
    assert desk.stored(past, *metas) == [0, 1, 2]


def test_O28_each_tenants_prompt_is_stored_although_they_share_engine_blocks() -> None:
    desk = Desk(blocks=20)
    one = desk.run("a", 4, "same", tenant="red")
    other = desk.run("b", 6, "same", tenant="blue")
    filler = desk.begin("c", 12)
    metas = [desk.compute(filler, 4) for _ in range(3)]
    keys = [key for meta in metas for job in meta.early for key in job.keys]
    tags = [RequestPolicy(tenant=name).tag for name in ("red", "blue")]
    expected = [
        {desk.script.key(request, n, scope=tag) for n in range(len(request.block_hashes))}
        for request, tag in zip((one, other), tags, strict=True)
    ]
    assert set(keys) == expected[0] | expected[1]


# What must not be stored


def test_O28_never_the_new_owners_bytes() -> None:
    """The same engine blocks get the same hashes again, and are computed in this very step."""
    desk = Desk(blocks=8, step=2, slots=0)
    past = desk.run("a", 4)
    desk.compute(desk.begin("f", 4), 4)  # now it is due, and there are no slots
    again = Request("b", 4 * BLOCK, "a")
    desk.script.arrive(again)
    desk.script.admit(again)
    table = sorted(desk.pool.take(4))
    for block, name in zip(table, again.block_hashes, strict=True):
        desk.pool.publish(block, (0, name))
    desk.script.grant_credits(10)
    assert not desk.stored(past, desk.script.step(again, 4 * BLOCK, [table], written=table))


def test_O28_a_block_that_holds_another_prompts_by_now_is_not_stored_for_the_first() -> None:
    desk = Desk(blocks=8, slots=0)
    past = desk.run("a", 4)
    other = desk.run("b", 6)
    desk.script.grant_credits(20)
    meta = desk.script.step()
    assert desk.stored(past, meta) == [0, 1], "two of its blocks are the other's by now"
    found = {
        key: block
        for job in meta.early
        for key, block in zip(job.keys, job.engine.block_ids, strict=True)
    }
    assert found[desk.script.key(past, 0)] == 1
    assert found[desk.script.key(past, 1)] == 2
    assert found[desk.script.key(other, 4)] == 4
    assert found[desk.script.key(other, 5)] == 3


def test_O28_what_the_engines_cache_has_forgotten_is_not_stored() -> None:
    """An engine that sleeps resets its prefix cache and throws its blocks away."""
    desk = Desk(blocks=20, slots=0)
    due, later = desk.run("a", 6), desk.run("b", 6)
    filler = desk.begin("c", 14)
    metas = [desk.compute(filler, 5)]  # the first one is due, and there are no slots
    desk.pool.forget_all()
    desk.script.grant_credits(20)
    metas += [desk.script.step(), *(desk.compute(filler, 4) for _ in range(2))]
    assert not desk.stored(due, *metas)
    assert not desk.stored(later, *metas)


def test_O28_O17_after_a_reset_nothing_from_before_is_stored() -> None:
    desk = Desk(blocks=20)
    past, runs = desk.run("a", 6), desk.begin("r", 2)
    desk.compute(runs, 1)
    assert desk.half.reset_cache(b"nonce")
    desk.compute(runs, 1)
    filler = desk.begin("b", 12)
    metas = [desk.compute(filler, 4) for _ in range(3)]
    desk.finish(runs)
    metas.append(desk.script.step())
    assert not desk.stored(past, *metas)
    assert not [job for meta in metas for job in meta.early]


# Slots


def test_O28_without_slots_what_is_due_waits_in_its_order() -> None:
    desk = Desk(blocks=20, slots=0)
    past = desk.run("a", 6)
    filler = desk.begin("b", 12)
    metas = [desk.compute(filler, 4) for _ in range(2)]
    assert not desk.stored(past, *metas)
    desk.script.grant_credits(4)
    meta = desk.script.step()
    assert desk.stored(past, meta) == [0, 1, 2, 3]
    desk.script.grant_credits(4)
    assert desk.stored(past, desk.script.step()) == [4, 5]


def test_O28_what_waits_for_slots_is_bounded() -> None:
    desk = Desk(blocks=2 * STEP + 2, slots=0)
    for number in range(DUE_MAX + 10):
        desk.run(f"r{number}", 2)
    late = desk.half._late
    assert late is not None
    assert len(late._due) == DUE_MAX
    desk.script.grant_credits(10)
    desk.script.step()
    assert len(late._due) < STEP


def test_O28_without_a_store_nothing_is_due_for_ever() -> None:
    desk = Desk(blocks=20)
    past = desk.run("a", 6)
    desk.script.cut = True
    filler = desk.begin("b", 12)
    metas = [desk.compute(filler, 4) for _ in range(3)]
    assert not desk.stored(past, *metas)


# Requests that wait


def waiting(desk: Desk) -> tuple[Request, Request]:
    """A prompt has run; its second turn was answered while the engine had its blocks, and waits."""
    past = desk.run("a", 6, "same")
    turn = Request("t", 8 * BLOCK, "same")
    desk.script.arrive(turn)
    assert desk.script.matched(turn, 6 * BLOCK) == (0, False)
    return past, turn


def test_O28_a_request_that_waits_asks_again_once_what_it_lacks_is_stored() -> None:
    desk = Desk(blocks=20)
    past, turn = waiting(desk)
    filler = desk.begin("b", 14)
    desk.compute(filler, 4)
    meta = desk.compute(filler, 4)
    assert desk.stored(past, meta) == [0, 1, 2, 3, 4, 5]
    desk.compute(filler, 4)
    desk.script.lookups()
    assert desk.script.matched(turn, 3 * BLOCK) == (None, False), "it is being copied"
    assert not desk.script.lookups()
    end_all(desk, meta)
    assert desk.script.matched(turn, 3 * BLOCK) == (None, False)
    (lookup,) = desk.script.lookups()
    desk.script.answer(lookup.ask, range(6))
    assert desk.script.matched(turn, 3 * BLOCK) == (3 * BLOCK, True)


def test_O28_a_request_that_waits_asks_again_when_it_is_told_that_the_block_is_there() -> None:
    desk = Desk(blocks=20)
    past, turn = waiting(desk)
    desk.script.changed(added=[desk.script.key(past, index) for index in range(6)])
    desk.script.lookups()
    assert desk.script.matched(turn, 3 * BLOCK) == (None, False)
    (lookup,) = desk.script.lookups()
    desk.script.answer(lookup.ask)
    assert desk.script.matched(turn, 3 * BLOCK) == (0, False), "once for each block"
    assert not desk.script.lookups()


def test_O28_a_request_does_not_ask_again_for_what_the_engine_has_itself() -> None:
    desk = Desk(blocks=20)
    past, turn = waiting(desk)
    desk.script.changed(added=[desk.script.key(past, index) for index in range(6)])
    desk.script.lookups()
    assert desk.script.matched(turn, 6 * BLOCK) == (0, False)
    assert not desk.script.lookups()


# Which engines


@pytest.mark.parametrize(
    ("rules", "served"),
    [
        ((GroupRule(),), True),
        ((GroupRule(2),), False),
        ((GroupRule(1, exact=True),), False),
        ((GroupRule(), GroupRule()), False),
    ],
)
def test_O28_only_engines_with_one_group_that_needs_all_blocks(
    rules: Sequence[GroupRule], *, served: bool
) -> None:
    assert is_one_full_group(rules) is served


def test_O28_what_is_noted_of_a_request_is_of_its_blocks_alone() -> None:
    """A block from before a reset is not taken for one that is complete."""
    desk = Desk()
    request = desk.begin("a", 2)
    desk.half.reset_cache(b"x")
    late = desk.half._late
    assert late is not None
    tracked = desk.half._requests["a"]
    assert late.store_complete(tracked, 32, lambda _: [[1, 2]]) == NEVER
    assert not any(late._notes)
    del request
