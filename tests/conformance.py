"""The Tier contract as tests: a tier's tests subclass TierContract and give it a `tier`.

class TestMyTier(TierContract):
    @pytest.fixture
    def tier(self, context: TierContext) -> Iterator[Tier]:
        made = MyTier(context)
        yield made
        made.close()
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvstore.core.errors import TierError
from kvstore.core.tier import Tier, TierContext
from kvstore.core.types import BlockKey, JobId, JobKind, JobResult, LookupResult, Slot, TransferJob
from tests.harness.patience import WAIT_S

SLOT_BYTES = 4096
SLOTS = 32


class ArrayMemory:
    """SlotMemory in one array."""

    def __init__(self) -> None:
        self._data = memoryview(bytearray(SLOTS * SLOT_BYTES))

    def view(self, slot: Slot) -> memoryview:
        return self._data[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big") + b"\0\0")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SLOT_BYTES)


def finish(tier: Tier, count: int) -> list[JobResult]:
    """Poll until `count` results are there."""
    results: list[JobResult] = []
    end = time.monotonic() + WAIT_S
    while len(results) < count and time.monotonic() < end:
        results.extend(tier.poll())
    return results


class TierContract:
    """What every tier owes its caller."""

    @pytest.fixture
    def memory(self) -> ArrayMemory:
        return ArrayMemory()

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        return {}

    @pytest.fixture
    def context(self, memory: ArrayMemory, options: Mapping[str, Any]) -> TierContext:
        return TierContext("shelf", "0123456789abcdef", SLOT_BYTES, memory, options)

    @pytest.fixture
    def tier(self, context: TierContext) -> Tier:
        raise NotImplementedError

    # Helpers

    def job(
        self, number: int, kind: JobKind, keys: Sequence[int], slots: Sequence[int]
    ) -> TransferJob:
        names = tuple(key(name) for name in keys)
        return TransferJob(JobId(number), kind, names, tuple(Slot(slot) for slot in slots))

    def put(self, tier: Tier, memory: ArrayMemory, keys: Sequence[int]) -> None:
        """Store blocks through the first slots, and wipe those."""
        for slot, name in enumerate(keys):
            memory.view(Slot(slot))[:] = content(name)
        tier.submit(self.job(1000, JobKind.STORE, keys, range(len(keys))))
        (result,) = finish(tier, 1)
        assert (result.job_id, result.done, result.error) == (1000, len(keys), None)
        for slot in range(len(keys)):
            memory.view(Slot(slot))[:] = bytes(SLOT_BYTES)

    # What holds

    def test_the_name_is_a_label(self, tier: Tier) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", tier.name)

    def test_what_was_never_stored_is_a_miss(self, tier: Tier) -> None:
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert list(tier.poll()) == []

    def test_what_was_stored_is_a_hit_and_comes_back_byte_for_byte(
        self, tier: Tier, memory: ArrayMemory
    ) -> None:
        self.put(tier, memory, [1, 2, 3])
        assert {tier.lookup(key(name)) for name in (1, 2, 3)} == {LookupResult.HIT}
        tier.submit(self.job(1, JobKind.LOAD, [3, 1], [10, 11]))
        (result,) = finish(tier, 1)
        assert (result.done, result.error) == (2, None)
        assert memory.view(Slot(10)) == content(3)
        assert memory.view(Slot(11)) == content(1)

    def test_a_load_touches_no_other_slot(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, [1])
        tier.submit(self.job(1, JobKind.LOAD, [1], [5]))
        finish(tier, 1)
        others = [slot for slot in range(SLOTS) if slot != 5]
        assert all(memory.view(Slot(slot)) == bytes(SLOT_BYTES) for slot in others)

    def test_a_store_is_seen_whole_or_not_at_all(self, tier: Tier, memory: ArrayMemory) -> None:
        memory.view(Slot(0))[:] = content(1)
        tier.submit(self.job(1, JobKind.STORE, [1], [0]))
        assert tier.lookup(key(1)) in (LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT)
        finish(tier, 1)
        assert tier.lookup(key(1)) is LookupResult.HIT

    def test_a_block_stored_twice_is_there_once(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, [1])
        self.put(tier, memory, [1])
        tier.submit(self.job(1, JobKind.LOAD, [1], [0]))
        assert finish(tier, 1)[0].done == 1
        assert memory.view(Slot(0)) == content(1)
        tier.discard([key(1)])
        assert tier.lookup(key(1)) is LookupResult.MISS

    def test_O5_asking_changes_no_answer(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, [1])
        assert [tier.lookup(key(1)) for _ in range(3)] == [LookupResult.HIT] * 3
        assert [tier.lookup(key(2)) for _ in range(3)] == [LookupResult.MISS] * 3

    def test_O15_a_load_of_what_is_not_there_fails_in_its_result(self, tier: Tier) -> None:
        tier.submit(self.job(1, JobKind.LOAD, [7], [0]))
        (result,) = finish(tier, 1)
        assert (result.job_id, result.done) == (1, 0)
        assert isinstance(result.error, TierError)

    def test_O15_what_arrived_before_a_failure_is_whole(
        self, tier: Tier, memory: ArrayMemory
    ) -> None:
        self.put(tier, memory, [1, 2, 4])
        tier.submit(self.job(1, JobKind.LOAD, [1, 2, 3, 4], [10, 11, 12, 13]))
        (result,) = finish(tier, 1)
        assert isinstance(result.error, TierError)
        assert result.done <= 2
        for place in range(result.done):
            assert memory.view(Slot(10 + place)) == content(1 + place)

    def test_discarded_blocks_are_gone_and_unknown_ones_ignored(
        self, tier: Tier, memory: ArrayMemory
    ) -> None:
        self.put(tier, memory, [1, 2])
        tier.discard([key(1), key(99)])
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert tier.lookup(key(2)) is LookupResult.HIT

    def test_O17_clear_forgets_every_block(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, [1, 2])
        tier.clear()
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert tier.lookup(key(2)) is LookupResult.MISS
        self.put(tier, memory, [1])
        assert tier.lookup(key(1)) is LookupResult.HIT

    def test_each_job_is_reported_exactly_once(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, range(8))
        for number in range(60):
            kind = JobKind.STORE if number % 3 == 0 else JobKind.LOAD
            name = number % 12  # some are not there
            tier.submit(self.job(number, kind, [name], [number % SLOTS]))
        results = finish(tier, 60)
        tier.drain()
        results.extend(tier.poll())
        assert sorted(result.job_id for result in results) == list(range(60))

    def test_after_drain_every_result_can_be_fetched(self, tier: Tier, memory: ArrayMemory) -> None:
        memory.view(Slot(0))[:] = content(1)
        for number in range(5):
            tier.submit(self.job(number, JobKind.STORE, [number], [0]))
        tier.drain()
        assert sorted(result.job_id for result in finish(tier, 5)) == list(range(5))

    def test_O17_closing_twice_is_harmless_and_a_closed_tier_takes_no_job(
        self, tier: Tier, memory: ArrayMemory
    ) -> None:
        self.put(tier, memory, [1])
        tier.close()
        tier.close()
        with pytest.raises(TierError):
            tier.submit(self.job(1, JobKind.STORE, [1], [0]))

    def test_O17_closing_with_jobs_under_way_ends(self, tier: Tier) -> None:
        for number in range(5):
            tier.submit(self.job(number, JobKind.STORE, [number], [number]))
        tier.close()
