"""Between memory and the tiers below: what is copied down, in which order, and what comes up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.core import copy_queue
from kvstore.core.errors import BlockCorrupt
from kvstore.core.leases import Lease
from kvstore.core.manager import Manager
from kvstore.core.tiering import JOB_BLOCKS_MAX, Found, Tiering
from kvstore.core.types import (
    BlockKey,
    Chain,
    GroupRule,
    JobId,
    JobKind,
    JobResult,
    LookupResult,
    Slot,
    StoreOutcome,
    TransferJob,
)
from kvstore.core.write_budget import WriteBudget
from kvstore.metrics import Numbers
from kvstore.store.drain import Drain
from kvstore.store.namespaces import Namespaces
from tests.harness.fakes import generations_of


class SlowTier:
    """Ends jobs when told to."""

    name = "slow"

    def __init__(self) -> None:
        self.keys: set[BlockKey] = set()
        self.jobs: list[TransferJob] = []
        self.touched: list[BlockKey] = []
        self.knows = True
        self.asked = 0
        self._results: list[JobResult] = []
        self._of_before: set[JobId] = set()  # jobs that were under way at a clear

    def end(self, job: TransferJob, done: int | None = None, *, corrupt: bool = False) -> None:
        self.jobs.remove(job)
        done = len(job.keys) if done is None else done
        if job.kind is JobKind.STORE:
            self.keys.update(job.keys[:done])
        error = BlockCorrupt("made up") if corrupt else None
        self._results.append(JobResult(job.job_id, done, error))

    def lookup(self, key: BlockKey) -> LookupResult:
        self.asked += 1
        if not self.knows:
            return LookupResult.RETRY
        if key in self.keys:
            return LookupResult.HIT
        stores = [job for job in self.jobs if job.kind is JobKind.STORE]
        writing = any(key in job.keys for job in stores if job.job_id not in self._of_before)
        return LookupResult.PENDING if writing else LookupResult.MISS

    def touch(self, key: BlockKey) -> None:
        self.touched.append(key)

    def submit(self, job: TransferJob) -> None:
        self.jobs.append(job)

    def poll(self) -> Sequence[JobResult]:
        results, self._results = self._results, []
        return results

    def discard(self, keys: Collection[BlockKey]) -> None:
        self.keys.difference_update(keys)

    def clear(self) -> None:
        self.keys.clear()
        self._of_before.update(job.job_id for job in self.jobs)

    def drain(self) -> None:
        for job in list(self.jobs):
            self.end(job)

    def close(self) -> None:
        pass


class OneNamespace(dict[str, object]):
    """All namespaces of a store."""

    def wake(self, namespace: object) -> None:
        assert namespace in self.values()


class Rig:
    """Memory with one chain and a slow tier below it."""

    def __init__(
        self, slots: int, backlog_ns: int = 10**10, slot_bytes: int = 1, budget: int | None = None
    ) -> None:
        self.generations = generations_of(slots)
        self.manager = Manager((GroupRule(None),), self.generations)
        self.manager.slots.add([Slot(slot) for slot in range(slots)])
        self.tier = SlowTier()
        budgets = {"slow": WriteBudget(budget)}
        limits = {"slow": backlog_ns}
        self.tiering = Tiering(self.manager, [self.tier], slot_bytes, limits, budgets)
        self.now_ns = 0

    def poll(self, ns: int = 0) -> None:
        """Let time pass, and take what has ended."""
        self.now_ns += ns
        self.tiering.poll(self.now_ns)

    def end(self, job: TransferJob, done: int | None = None, *, corrupt: bool = False) -> None:
        """End a job, and take its result."""
        self.tier.end(job, done, corrupt=corrupt)
        self.poll()

    def drain(self) -> None:
        self.tier.drain()
        self.poll()

    def lease(self, chain: Chain, blocks: int) -> Lease:
        lease = self.manager.prepare_load(chain, blocks, owner=1, deadline_ns=1)
        assert lease is not None
        return lease

    def chain(self, name: str, blocks: int) -> Chain:
        width = 32
        hashes = b"".join(f"{name}/{index}".encode().ljust(width) for index in range(blocks))
        return Chain(hashes, width, 1, b"")

    def store(self, chain: Chain, first: int = 0, end: int | None = None) -> None:
        """Blocks first..end-1 of a chain become ready in memory."""
        for index in range(first, chain.blocks if end is None else end):
            (slot,) = self.manager.prepare_store(1)
            above = chain.key(0, index - 1) if index else None
            self.manager.begin_store(chain.key(0, index), above, slot)
            self.manager.complete_store(slot, ok=True)
        self.tiering.cascade(self.manager.take_changes().added)

    @property
    def walk(self) -> Drain:
        """What walks through memory in a store that drains or ends."""
        parts = SimpleNamespace(
            manager=self.manager, tiering=self.tiering, around_tiers=nullcontext()
        )
        namespaces = cast("Namespaces", OneNamespace(one=parts))
        return Drain(namespaces, (), Numbers())

    def look(self) -> int:
        """Queue what the tier lacks, as a store does that ends."""
        return sum(self.walk.look_anew())

    def ready(self, chain: Chain) -> int:
        """Count the leading blocks that can be read now."""
        return self.manager.lookup(chain, chain.blocks, coming=False).blocks

    def below(self, chain: Chain, blocks: int) -> list[Found]:
        """Say which of the leading blocks memory lacks and the tier has."""
        keys = self.keys(chain)[:blocks]
        missing = [self.manager.index.probe(key) is LookupResult.MISS for key in keys]
        return [
            Found(0, index, index + 1, self.tier, self.tier.name)
            for index, key in enumerate(keys)
            if missing[index] and key in self.tier.keys
        ]

    def promote(self, chain: Chain, blocks: int) -> None:
        """Read leading blocks of a chain that the tier has."""
        self.tier.keys.update(self.keys(chain))
        self.tiering.promote(chain, blocks, self.below(chain, blocks))

    def keys(self, chain: Chain) -> list[BlockKey]:
        return [chain.key(0, index) for index in range(chain.blocks)]


@pytest.mark.parametrize(
    "places",
    [
        [(0, 4, 6, "b"), (1, 0, 3, "a"), (1, 3, 6, "b")],  # a window's blocks come first
        [(0, 4, 6, "b"), (1, 0, 2, "b"), (1, 2, 4, "a"), (1, 4, 6, "b")],  # by turns
    ],
)
def test_L1_blocks_of_several_places_all_come(places: list[tuple[int, int, int, str]]) -> None:
    """A block that began before its parent would be turned away, and the hit end there."""
    rig = Rig(slots=10)
    rules = GroupRule(2), GroupRule(None)
    rig.manager = Manager(rules, rig.generations)
    rig.manager.slots.add([Slot(slot) for slot in range(10)])
    tiering = Tiering(rig.manager, [rig.tier], 1)
    chain = Chain(b"".join(bytes([n]) * 32 for n in range(6)), 32, 2, b"")
    found = [Found(group, first, end, rig.tier, place) for group, first, end, place in places]
    assert tiering.promote(chain, 6, found)
    assert sum(len(job.keys) for job in rig.tier.jobs) == 8
    for job in list(rig.tier.jobs):
        rig.tier.keys.update(job.keys)
        rig.tier.end(job)
    tiering.poll(0)
    assert rig.manager.lookup(chain, 6, coming=False).blocks == 6


@pytest.mark.parametrize("remote", [False, True])
def test_only_jobs_of_our_own_tiers_have_to_be_polled_for(remote: bool) -> None:
    rig = Rig(slots=10)
    own, other = ((), (rig.tier,)) if remote else ((rig.tier,), ())
    tiering, chain = Tiering(rig.manager, own, 1, remote=other), rig.chain("a", 3)
    rig.tier.keys.update(rig.keys(chain))
    tiering.promote(chain, 3, rig.below(chain, 3))
    assert tiering.jobs_open
    assert tiering.to_poll is not remote
    for job in list(rig.tier.jobs):
        rig.tier.end(job)
    tiering.poll(0)
    assert not tiering.jobs_open
    assert not tiering.to_poll


def test_a_chain_is_copied_down_parents_first_and_named() -> None:
    rig = Rig(slots=40)
    chain = rig.chain("a", 5)
    rig.store(chain)
    (job,) = rig.tier.jobs
    assert list(job.keys) == rig.keys(chain)
    assert list(job.parents) == [None, *rig.keys(chain)[:-1]]
    assert rig.tiering.queued == 5
    rig.end(job)
    assert rig.tiering.queued == 0
    assert rig.tiering.counts["slow", "stored"] == 5


def test_copies_pin_a_part_of_memory_only_and_the_rest_waits_its_turn() -> None:
    rig = Rig(slots=40)
    chain = rig.chain("a", 30)
    rig.store(chain)
    assert sum(len(job.keys) for job in rig.tier.jobs) == 10, "a quarter of the slots"
    while rig.tier.jobs:
        rig.end(rig.tier.jobs[0])
    assert rig.tier.keys == set(rig.keys(chain))


def test_what_has_left_memory_before_its_turn_is_counted() -> None:
    rig = Rig(slots=8)
    first = rig.chain("a", 4)
    rig.store(first)  # two of them may be pinned
    rig.store(rig.chain("b", 6))
    (job,) = rig.tier.jobs
    rig.end(job)
    assert rig.tiering.counts["slow", "late"]


def test_what_would_wait_for_too_long_is_skipped_and_counted() -> None:
    """A tier that writes 64 blocks in a second may have 640 waiting for it, at 10 s."""
    rig = Rig(slots=2000)
    rig.poll()
    rig.store(rig.chain("a", 200))
    for _ in range(3):
        rig.poll(ns=10**9)
        rig.end(rig.tier.jobs[0])
    rig.store(rig.chain("b", 1500))
    assert rig.tiering.counts["slow", "skipped"] == 1500 - 640


def test_a_tier_that_writes_nothing_gets_a_short_queue() -> None:
    rig = Rig(slots=4000)
    rig.store(rig.chain("a", 100))
    rig.poll(ns=10**9)
    rig.poll(ns=10**9)
    rig.store(rig.chain("b", 2000))
    assert rig.tiering.counts["slow", "skipped"] > 500
    assert rig.tiering.queued < 1500


def test_beyond_the_write_budget_only_what_is_used_again_is_written_with_its_path() -> None:
    rig = Rig(slots=100, slot_bytes=100, budget=24 * 500)  # an hour's: 5 blocks
    first, second = rig.chain("a", 5), rig.chain("b", 4)
    rig.store(first)
    rig.drain()
    assert len(rig.tier.keys) == 5
    rig.store(second)
    assert not rig.tier.jobs
    assert rig.tiering.counts["slow", "over_budget"] == 4
    rig.tiering.used(second, rig.lease(second, 3))
    rig.poll()
    (job,) = rig.tier.jobs
    assert list(job.keys) == rig.keys(second)[:3]
    rig.poll(ns=3600 * 10**9)  # the 300 bytes are paid for, and 200 may be spent
    rig.store(rig.chain("c", 2))
    assert len(rig.tier.jobs) == 2


def test_a_store_that_ends_queues_what_was_left_out() -> None:
    rig = Rig(slots=100, slot_bytes=100, budget=24)
    chain = rig.chain("a", 5)
    rig.store(chain, 0, 3)
    rig.drain()
    rig.store(chain, 3, 5)
    assert rig.tiering.counts["slow", "over_budget"] == 2
    rig.look()
    rig.drain()
    assert rig.tier.keys == set(rig.keys(chain))


def test_a_tier_that_does_not_know_what_it_has_is_written_to_later() -> None:
    rig = Rig(slots=40)
    chain = rig.chain("a", 3)
    rig.tier.knows = False
    rig.store(chain)
    assert not rig.tier.jobs
    assert rig.tiering.queued == 3
    rig.tier.knows = True
    rig.poll()
    (job,) = rig.tier.jobs
    assert list(job.keys) == rig.keys(chain)


def test_a_store_that_ends_while_a_tier_loads_copies_what_the_tier_turns_out_to_lack() -> None:
    rig = Rig(slots=40)
    chain = rig.chain("a", 3)
    rig.tier.knows = False
    rig.store(chain)
    rig.look()
    rig.tier.knows = True
    rig.poll()
    rig.drain()
    assert rig.tier.keys == set(rig.keys(chain))


def test_Q25_a_drain_that_is_cancelled_has_forgotten_nothing_that_waits() -> None:
    rig = Rig(slots=40)
    rig.tier.knows = False
    rig.store(rig.chain("a", 3))
    next(rig.walk.look())
    assert rig.tiering.queued >= 3


class HalfLoaded(SlowTier):
    """Does not know yet of some blocks whether it has them."""

    def lookup(self, key: BlockKey) -> LookupResult:
        return LookupResult.RETRY if key.startswith(b"unknown") else super().lookup(key)


def test_Q25_what_a_tier_does_not_know_of_yet_holds_up_nothing_else() -> None:
    rig = Rig(slots=20)
    rig.tier = HalfLoaded()
    rig.tiering = Tiering(rig.manager, [rig.tier], 1)
    for name in ("unknown", "new"):
        rig.store(rig.chain(name, 4))
    assert not rig.tier.jobs
    assert rig.look() == 16, "twice all blocks"
    assert {key for job in rig.tier.jobs for key in job.keys} == set(rig.keys(rig.chain("new", 4)))


def test_a_long_path_that_was_missed_is_copied_in_parts_each_block_looked_at_once() -> None:
    rig = Rig(slots=4000, slot_bytes=100, budget=24)
    chain = rig.chain("a", 1000)
    rig.store(chain, 0, 999)
    rig.drain()
    rig.tier.keys.clear()
    lease = rig.lease(chain, 999)
    rig.tier.asked = 0
    rig.tiering.used(chain, lease)
    for _ in range(40):
        rig.poll()
        rig.drain()
    assert rig.tier.keys == set(rig.keys(chain)[:999])
    assert rig.tier.asked < 6 * 999


def test_a_very_long_path_is_walked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_queue, "_WALK_MAX", 100)
    rig = Rig(slots=4000)
    chain = rig.chain("a", 450)
    rig.store(chain, 0, 449)
    rig.drain()
    rig.tiering.queues["slow"].clear()
    rig.tier.drain()
    rig.tier.keys.clear()
    rig.store(chain, 449, 450)
    for _ in range(40):
        rig.poll()
        for job in list(rig.tier.jobs):
            assert rig.tier.keys.issuperset(set(filter(None, job.parents)) - set(job.keys))
            rig.tier.end(job)
    assert rig.tier.keys == set(rig.keys(chain))


def test_a_path_whose_tier_fails_is_given_up() -> None:
    """Found by seed 3: it was queued again and again."""
    rig = Rig(slots=40)
    chain = rig.chain("a", 30)
    rig.store(chain)
    for _ in range(100):
        for job in list(rig.tier.jobs):
            rig.end(job, done=0)
    assert not rig.tiering.jobs_open


def test_a_dropped_parents_new_copy_is_the_one_that_is_pinned() -> None:
    """Found by seed 23: the child still pointed at the copy that had been dropped."""
    rig = Rig(slots=40)
    chain = rig.chain("a", 2)
    rig.store(chain)
    rig.end(rig.tier.jobs[0], done=0)
    rig.manager.drop(chain.key(0, 0), "damaged")
    rig.manager.take_changes()
    rig.store(chain, 0, 1)
    rig.tiering.cascade([chain.key(0, 1)])
    rig.drain()
    assert all(entry.pins == 0 for entry in rig.manager.index)


def test_blocks_land_in_their_order_whichever_job_ends_first() -> None:
    """Found by the demo: the second job's blocks came before their parents and were dropped."""
    rig = Rig(slots=200)
    chain = rig.chain("a", 2 * JOB_BLOCKS_MAX + 5)
    rig.promote(chain, chain.blocks)
    assert len(rig.tier.jobs) == 3
    for job in rig.tier.jobs[::-1]:
        assert rig.ready(chain) == 0
        rig.end(job)
    assert rig.ready(chain) == chain.blocks


def test_a_job_waits_for_the_one_that_brings_its_parents_for_another_request() -> None:
    rig = Rig(slots=200)
    chain = rig.chain("a", 2 * JOB_BLOCKS_MAX)
    rig.promote(chain, JOB_BLOCKS_MAX)
    rig.promote(chain, chain.blocks)
    first, second = rig.tier.jobs
    rig.end(second)
    assert rig.ready(chain) == 0
    rig.end(first)
    assert rig.ready(chain) == chain.blocks


def test_O15_a_damaged_block_cuts_what_comes_after_it() -> None:
    rig = Rig(slots=200)
    chain = rig.chain("a", 2 * JOB_BLOCKS_MAX)
    rig.promote(chain, chain.blocks)
    first, second = rig.tier.jobs
    rig.tier.end(second)
    rig.end(first, done=10, corrupt=True)
    assert rig.manager.lookup(chain, chain.blocks).blocks == rig.ready(chain) == 10
    assert chain.key(0, 10) not in rig.tier.keys
    assert len(rig.manager.slots.granted) == 0
    assert rig.tiering.counts["slow", "orphan"] == JOB_BLOCKS_MAX


def test_what_is_coming_can_be_leased_and_is_named_by_its_source() -> None:
    rig = Rig(slots=20)
    chain = rig.chain("a", 5)
    rig.promote(chain, chain.blocks)
    lease = rig.lease(chain, 5)
    assert list(lease.groups[0].indices) == list(range(5))
    assert rig.tiering.sources_of(rig.keys(chain)) == ["slow"] * 5
    assert rig.manager.prepare_load(chain, 5, owner=1, deadline_ns=1, coming=False) is None
    found = [rig.generations[slot] for slot in lease.groups[0].slots]
    assert [leased - 1 for leased in lease.groups[0].generations] == found
    rig.end(rig.tier.jobs[0])
    found = [rig.generations[slot] for slot in lease.groups[0].slots]
    assert found == lease.groups[0].generations
    assert rig.tiering.sources_of(rig.keys(chain)[:1]) == [None]


def test_O15_O20_a_slot_that_will_not_be_filled_says_so_and_rests_until_its_lease_ends() -> None:
    rig = Rig(slots=5)
    chain = rig.chain("a", 5)
    rig.promote(chain, chain.blocks)
    lease = rig.lease(chain, 5)
    rig.end(rig.tier.jobs[0], done=2)
    found = [rig.generations[slot] for slot in lease.groups[0].slots]
    wanted = lease.groups[0].generations
    assert found == [*wanted[:2], *(generation + 1 for generation in wanted[2:])]
    assert rig.manager.prepare_store(5) == [], "nothing is free while the lease lasts"
    rig.manager.complete_load(lease.lease_id)
    assert len(rig.manager.prepare_store(5)) == 5


def test_O11_O20_an_engines_copy_does_not_take_the_place_of_a_leased_slot_that_is_coming() -> None:
    rig = Rig(slots=5)
    chain = rig.chain("a", 1)
    rig.promote(chain, 1)
    lease = rig.lease(chain, 1)
    (slot,) = rig.manager.prepare_store(1)
    rig.manager.begin_store(chain.key(0, 0), None, slot)
    assert rig.manager.complete_store(slot, ok=True) is StoreOutcome.DUPLICATE
    rig.end(rig.tier.jobs[0])
    entry = rig.manager.ready(chain.key(0, 0))
    assert entry is not None
    assert [entry.slot] == lease.groups[0].slots


def test_jobs_that_read_are_small_enough_to_be_used_one_by_one() -> None:
    rig = Rig(slots=40, slot_bytes=2 << 20)
    chain = rig.chain("a", 10)
    rig.promote(chain, 10)
    assert [len(job.keys) for job in rig.tier.jobs] == [4, 4, 2]
    rig.end(rig.tier.jobs[0])
    assert rig.ready(chain) == 4


def test_what_memory_serves_is_touched_below() -> None:
    rig = Rig(slots=40)
    chain = rig.chain("a", 5)
    rig.store(chain)
    rig.tiering.used(chain, rig.lease(chain, 5))
    assert rig.tier.touched == [chain.key(0, 4)]


def test_a_cleared_read_that_ends_leaves_the_one_that_came_after_it_alone() -> None:
    rig = Rig(slots=8)
    chain = rig.chain("a", 1)
    for _ in range(2):
        rig.promote(chain, 1)
        if len(rig.tier.jobs) == 1:
            rig.manager.clear()
            rig.tiering.clear()
    before, after = rig.tier.jobs
    rig.end(before)
    assert (rig.ready(chain), rig.tiering.sources_of(rig.keys(chain)[:1])) == (0, ["slow"])
    rig.end(after)
    assert (rig.ready(chain), len(rig.manager.slots.free)) == (1, 7)


def test_O17_a_cleared_copy_that_ends_leaves_the_one_that_came_after_it_alone() -> None:
    """Found by killing stores: a block that was durable again went with the copy of before."""
    rig = Rig(slots=8)
    chain = rig.chain("a", 1)
    rig.store(chain)
    rig.manager.clear()
    rig.tiering.clear()
    rig.manager.clear_some()
    rig.store(chain)
    before, after = rig.tier.jobs
    rig.end(after)
    assert rig.tier.keys == set(rig.keys(chain))
    rig.end(before)
    assert rig.tier.keys == set(rig.keys(chain))


class Rows:
    """A tier that lacks all blocks, says so of some at once, and counts how many it looked at."""

    def __init__(self, name: str, at_once: int) -> None:
        self.name, self.at_once, self.read = name, at_once, 0

    def leading(self, keys: Sequence[BlockKey], first: int) -> tuple[LookupResult, int]:
        count = min(self.at_once, len(keys) - first)
        self.read += count
        return LookupResult.MISS, count


def test_what_tiers_say_of_many_blocks_is_asked_for_in_linear_time() -> None:
    """One that knows of all of them, and one that tells of each, made lookups quadratic."""
    rig, count = Rig(slots=1), 2048
    many, one = Rows("many", count), Rows("one", 1)
    sources: Any = (many, one)
    found = Tiering(rig.manager, [], 1, remote=sources)
    keys, at = rig.keys(rig.chain("a", count)), 0
    while at < count:
        result, tier, alike = found.leading(keys, at)
        assert (result, tier) == (LookupResult.MISS, None)
        at += alike
    assert many.read <= 64 * count
