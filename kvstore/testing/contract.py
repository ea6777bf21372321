"""What a tier owes the store, one test for each promise.

A tier that the store writes to inherits TierContract. A tier that the store only reads, as it
reads its peers, inherits ReadOnlyTierContract: the store submits no STORE job to it, and a block
may be loaded from it once only.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvstore.core.errors import TierError
from kvstore.core.tier import SlotMemory, Tier, TierContext
from kvstore.core.types import BlockKey, JobId, JobKind, JobResult, LookupResult, Slot, TransferJob

SLOT_BYTES = 4096
SLOTS = 32
WAIT_S = 60.0
_PAUSE_S = 0.0005
_STOCK_JOB = 1000


class ArrayMemory:
    """Memory of SLOTS slots, in one array."""

    def __init__(self) -> None:
        self._data = memoryview(bytearray(SLOTS * SLOT_BYTES))

    def view(self, slot: Slot) -> memoryview:
        """Return the slot's bytes."""
        return self._data[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]


def key(number: int) -> BlockKey:
    """Return the key of block `number`."""
    return BlockKey(number.to_bytes(32, "big") + b"\0\0")


def content(number: int) -> bytes:
    """Return the bytes of block `number`, different for each."""
    return hashlib.shake_128(key(number)).digest(SLOT_BYTES)


def finish(tier: Tier, count: int, wait_s: float = WAIT_S) -> list[JobResult]:
    """Poll until `count` results are there, and fail after wait_s."""
    results: list[JobResult] = []
    end = time.monotonic() + wait_s
    while len(results) < count:
        results.extend(tier.poll())
        assert time.monotonic() < end, f"{len(results)} of {count} results after {wait_s} s"
        time.sleep(_PAUSE_S)
    assert len(results) == count, f"expected {count} results, found {results}"
    return results


class ReadOnlyTierContract:
    """What a tier owes that the store only reads. A subclass gives a `tier`, and `stock`s it."""

    kinds: tuple[JobKind, ...] = (JobKind.LOAD,)

    @pytest.fixture
    def memory(self) -> SlotMemory:
        """Memory of SLOTS slots of SLOT_BYTES bytes, all zero."""
        return ArrayMemory()

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """The `options` of the tier's configuration."""
        return {}

    @pytest.fixture
    def context(self, memory: SlotMemory, options: Mapping[str, Any]) -> TierContext:
        """What the store makes a tier from."""
        return TierContext("shelf", "0123456789abcdef", SLOT_BYTES, memory, options)

    @pytest.fixture
    def tier(self, context: TierContext) -> Tier:
        """Make the tier to test; empty."""
        raise NotImplementedError

    def stock(self, tier: Tier, memory: SlotMemory, numbers: Sequence[int]) -> None:
        """Bring these blocks into the tier, with their content(); all slots are zero afterwards."""
        raise NotImplementedError

    def job(
        self, number: int, kind: JobKind, numbers: Sequence[int], slots: Sequence[int]
    ) -> TransferJob:
        """Make a job for blocks by their numbers."""
        keys = tuple(key(name) for name in numbers)
        return TransferJob(JobId(number), kind, keys, tuple(Slot(slot) for slot in slots))

    def load(self, tier: Tier, numbers: Sequence[int], slots: Sequence[int]) -> JobResult:
        """Load blocks and return the job's result."""
        tier.submit(self.job(1, JobKind.LOAD, numbers, slots))
        (result,) = finish(tier, 1)
        assert result.job_id == 1
        return result

    def test_the_name_is_a_metric_label(self, tier: Tier) -> None:
        """Lower-case letters, digits and _, a letter first."""
        assert re.fullmatch(r"[a-z][a-z0-9_]*", tier.name)

    def test_a_block_that_never_came_is_a_miss(self, tier: Tier) -> None:
        """And a tier without jobs has no results."""
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert list(tier.poll()) == []

    def test_a_block_that_is_here_is_a_hit_and_comes_back_byte_for_byte(
        self, tier: Tier, memory: SlotMemory
    ) -> None:
        """In any order, into the slots that the job names."""
        self.stock(tier, memory, [1, 2, 3])
        assert {tier.lookup(key(name)) for name in (1, 2, 3)} == {LookupResult.HIT}
        result = self.load(tier, [3, 1], [10, 11])
        assert (result.done, result.error) == (2, None)
        assert memory.view(Slot(10)) == content(3)
        assert memory.view(Slot(11)) == content(1)

    def test_a_load_touches_no_other_slot(self, tier: Tier, memory: SlotMemory) -> None:
        """Only the job's slots are the tier's."""
        self.stock(tier, memory, [1])
        self.load(tier, [1], [5])
        others = [slot for slot in range(SLOTS) if slot != 5]
        assert all(memory.view(Slot(slot)) == bytes(SLOT_BYTES) for slot in others)

    def test_O5_a_lookup_changes_no_answer(self, tier: Tier, memory: SlotMemory) -> None:
        """A lookup can be repeated, and so can a touch, of unknown keys too."""
        self.stock(tier, memory, [1])
        for _ in range(3):
            assert tier.lookup(key(1)) is LookupResult.HIT
            assert tier.lookup(key(2)) is LookupResult.MISS
            tier.touch(key(1))
            tier.touch(key(2))

    def test_O15_a_load_of_an_unknown_block_fails_in_its_result(self, tier: Tier) -> None:
        """The tier does not raise: the result has the error."""
        result = self.load(tier, [7], [0])
        assert result.done == 0
        assert isinstance(result.error, TierError)

    def test_O15_blocks_before_the_one_that_failed_are_whole(
        self, tier: Tier, memory: SlotMemory
    ) -> None:
        """keys[:done] arrived; what is after them does not count."""
        self.stock(tier, memory, [1, 2, 4])
        result = self.load(tier, [1, 2, 3, 4], [10, 11, 12, 13])
        assert isinstance(result.error, TierError)
        assert result.done <= 2
        for place in range(result.done):
            assert memory.view(Slot(10 + place)) == content(1 + place)

    def test_discarded_blocks_are_gone_and_unknown_ones_ignored(
        self, tier: Tier, memory: SlotMemory
    ) -> None:
        """A discard names blocks that the store knows to be damaged."""
        self.stock(tier, memory, [1, 2])
        tier.discard([key(1), key(99)])
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert tier.lookup(key(2)) is LookupResult.HIT

    def test_O17_clear_forgets_every_block(self, tier: Tier, memory: SlotMemory) -> None:
        """And the tier goes on."""
        self.stock(tier, memory, [1, 2])
        tier.clear()
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert tier.lookup(key(2)) is LookupResult.MISS
        self.stock(tier, memory, [1])
        assert tier.lookup(key(1)) is LookupResult.HIT

    def test_each_job_is_reported_exactly_once(self, tier: Tier, memory: SlotMemory) -> None:
        """Those that fail, too: a slot stays pinned until its job's result."""
        self.stock(tier, memory, range(8))
        numbers = range(60)
        for number in numbers:
            kind = self.kinds[number % 3 % len(self.kinds)]
            name = number % 12  # blocks 8 to 11 are not there
            tier.submit(self.job(number, kind, [name], [number % SLOTS]))
        results = finish(tier, len(numbers))
        tier.drain()
        results.extend(tier.poll())
        assert sorted(result.job_id for result in results) == list(numbers)

    def test_after_drain_every_result_can_be_fetched(self, tier: Tier, memory: SlotMemory) -> None:
        """Drain waits for the jobs; poll returns their results, in one call or several."""
        self.stock(tier, memory, range(5))
        for number in range(5):
            tier.submit(self.job(number, JobKind.LOAD, [number], [number]))
        tier.drain()
        assert sorted(result.job_id for result in finish(tier, 5)) == list(range(5))

    def test_O17_a_closed_tier_moves_no_bytes(self, tier: Tier, memory: SlotMemory) -> None:
        """A job is refused: submit raises TierError, or the result has one. Close may be repeated.

        After close() returned, the store reuses the memory.
        """
        self.stock(tier, memory, [1])
        tier.close()
        tier.close()
        try:
            tier.submit(self.job(1, JobKind.LOAD, [1], [0]))
        except TierError:
            pass
        else:
            (result,) = finish(tier, 1)
            assert result.done == 0
            assert isinstance(result.error, TierError)
        assert memory.view(Slot(0)) == bytes(SLOT_BYTES)

    def test_O17_close_ends_jobs_under_way(self, tier: Tier, memory: SlotMemory) -> None:
        """A slot does not change after close() has returned."""
        self.stock(tier, memory, range(5))
        for number in range(5):
            tier.submit(self.job(number, JobKind.LOAD, [number], [number]))
        tier.close()
        found = [bytes(memory.view(Slot(slot))) for slot in range(5)]
        time.sleep(20 * _PAUSE_S)
        assert found == [memory.view(Slot(slot)) for slot in range(5)]


class TierContract(ReadOnlyTierContract):
    """What a tier owes that the store writes to and reads. A subclass gives a `tier`."""

    kinds = (JobKind.LOAD, JobKind.STORE)

    def stock(self, tier: Tier, memory: SlotMemory, numbers: Sequence[int]) -> None:
        """Store blocks through the first slots, and wipe those."""
        for slot, name in enumerate(numbers):
            memory.view(Slot(slot))[:] = content(name)
        tier.submit(self.job(_STOCK_JOB, JobKind.STORE, numbers, range(len(numbers))))
        (result,) = finish(tier, 1)
        assert (result.job_id, result.done, result.error) == (_STOCK_JOB, len(numbers), None)
        for slot in range(len(numbers)):
            memory.view(Slot(slot))[:] = bytes(SLOT_BYTES)

    def test_a_block_is_visible_whole_or_not_at_all(self, tier: Tier, memory: SlotMemory) -> None:
        """A lookup may answer HIT before the store's result only if a load works by then."""
        memory.view(Slot(0))[:] = content(1)
        jobs = 1
        tier.submit(self.job(1, JobKind.STORE, [1], [0]))
        if tier.lookup(key(1)) is LookupResult.HIT:
            jobs = 2
            tier.submit(self.job(2, JobKind.LOAD, [1], [1]))
        assert [result.error for result in finish(tier, jobs)] == [None] * jobs
        assert tier.lookup(key(1)) is LookupResult.HIT
        assert memory.view(Slot(1)) == (content(1) if jobs > 1 else bytes(SLOT_BYTES))

    def test_a_block_stored_twice_is_here_once(self, tier: Tier, memory: SlotMemory) -> None:
        """One discard is enough."""
        self.stock(tier, memory, [1])
        self.stock(tier, memory, [1])
        assert self.load(tier, [1], [0]).done == 1
        assert memory.view(Slot(0)) == content(1)
        tier.discard([key(1)])
        assert tier.lookup(key(1)) is LookupResult.MISS

    def test_a_block_can_be_loaded_many_times(self, tier: Tier, memory: SlotMemory) -> None:
        """A load is a copy."""
        self.stock(tier, memory, [1])
        for slot in range(3):
            assert self.load(tier, [1], [slot]).done == 1
            assert memory.view(Slot(slot)) == content(1)

    def test_after_drain_every_block_is_stored(self, tier: Tier, memory: SlotMemory) -> None:
        """The store drains a tier before it ends."""
        memory.view(Slot(0))[:] = content(1)
        for number in range(5):
            tier.submit(self.job(number, JobKind.STORE, [number], [0]))
        tier.drain()
        assert sorted(result.job_id for result in finish(tier, 5)) == list(range(5))
        assert {tier.lookup(key(number)) for number in range(5)} == {LookupResult.HIT}

    def test_O17_close_ends_stores_under_way(self, tier: Tier) -> None:
        """Their results are lost."""
        for number in range(5):
            tier.submit(self.job(number, JobKind.STORE, [number], [number]))
        tier.close()
