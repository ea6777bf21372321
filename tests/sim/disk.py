"""The simulation's disk: slow, with faults, and with rubbish in slots until a read ends.

What it writes it reads from memory when the write's time has come, not before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.core.errors import TierFull, TierIOError
from kvstore.core.tier import SlotMemory
from kvstore.core.types import BlockKey, JobId, JobKind, JobResult, LookupResult, TransferJob
from tests.reference.faulty_tier import FaultyTier
from tests.reference.memory_tier import MemoryTier

MS = 1_000_000
RUBBISH = b"\xbb"


class SlowTier(FaultyTier):
    """Takes its time; until a load's result, and for what failed, slots hold rubbish."""

    def __init__(
        self,
        blocks: MemoryTier,
        memory: SlotMemory,
        rng: random.Random,
        fail_ratio: float,
        clock: Callable[[], int],
    ) -> None:
        """blocks: what the disk has."""
        super().__init__(blocks, rng, fail_ratio)
        self.loading = False  # it does not know yet what it has
        self.frozen_until = 0
        self._failing_until = self._full_until = self._loading_until = 0
        self._blocks = blocks
        self._memory = memory
        self._clock = clock
        self._slowness_ms = rng.choice((0, 20, 200))
        self._evicts = rng.random() < 0.7  # else it refuses what does not fit
        self._loads: dict[JobId, TransferJob] = {}
        self._stores: deque[tuple[int, TransferJob]] = deque()  # with when they are written
        self._writing: set[BlockKey] = set()
        self._refused: list[JobResult] = []
        self._late: list[tuple[int, JobResult, list[bytes]]] = []  # with when, and the bytes

    def open(self, kept: dict[BlockKey, bytes], loading_ns: int) -> None:
        """Start with what an earlier store left; it is known after some time."""
        self._blocks._blocks.update(kept)
        self._loading_until = self._clock() + loading_ns
        self.loading = loading_ns > 0

    @property
    def full(self) -> bool:
        return self._evicts and len(self.kept) >= self._blocks._blocks_max

    @property
    def kept(self) -> dict[BlockKey, bytes]:
        """What a store that starts now would find."""
        return self._blocks._blocks

    def suffer(self, kind: str, for_ns: int) -> None:
        """Freeze, fail or fill up for some time, or turn out to have lied: blocks are gone."""
        until = self._clock() + for_ns
        if kind == "freezes":
            self.frozen_until = until
        elif kind == "fails":
            self._failing_until = until
        elif kind == "fills":
            self._full_until = until
        else:
            blocks = sorted(self._blocks._blocks)
            self._blocks.discard(self._rng.sample(blocks, len(blocks) // 2))

    def thaw(self) -> None:
        self.frozen_until = self._slowness_ms = 0
        self._failing_until = self._full_until = 0
        self._fail_ratio = 0.0

    def submit(self, job: TransferJob) -> None:
        now, load = self._clock(), job.kind is JobKind.LOAD
        if load:
            self._spoil(job)
        if now < self._failing_until:
            self._refused.append(JobResult(job.job_id, 0, TierIOError("injected")))
        elif now < self._full_until and not load:
            self._refused.append(JobResult(job.job_id, 0, TierFull("injected")))
        elif load:
            self._loads[job.job_id] = job
            super().submit(job)
        else:
            due = max(now + self._delay_ns() // 8, self._stores[-1][0] if self._stores else 0)
            self._stores.append((due, job))
            self._writing.update(job.keys)

    def _delay_ns(self) -> int:
        return self._rng.randrange(self._slowness_ms + 1) * MS

    def _write(self) -> None:
        """Read the slots of the stores whose time has come."""
        now = self._clock()
        while self._stores and self._stores[0][0] <= now and now >= self.frozen_until:
            job = self._stores.popleft()[1]
            self._writing.difference_update(job.keys)
            if self._evicts:
                self._make_room(job.keys)
            super().submit(job)

    def _make_room(self, keys: Sequence[BlockKey]) -> None:
        """Evict random blocks, but none that a load is reading."""
        new = sum(key not in self.kept for key in keys)
        excess = len(self.kept) + new - self._blocks._blocks_max
        if excess > 0:
            read = {key for job in self._loads.values() for key in job.keys}
            free = sorted(self.kept.keys() - read - set(keys))
            self._blocks.discard(self._rng.sample(free, min(excess, len(free))))

    def _spoil(self, job: TransferJob) -> None:
        for slot in job.slots:
            view = self._memory.view(slot)
            view[:] = RUBBISH * len(view)

    def poll(self) -> Sequence[JobResult]:
        over, self._refused = self._refused, []
        if self._stores:
            self._write()
        self.loading = self.loading and self._clock() < self._loading_until
        for result in super().poll():
            job = self._loads.get(result.job_id)
            if job is None:
                over.append(result)
                continue
            due = self._clock() + self._delay_ns()
            blocks = [bytes(self._memory.view(slot)) for slot in job.slots[: result.done]]
            self._spoil(job)
            self._late.append((due, result, blocks))
        return [*over, *self._due()] if self._late else over

    def _due(self) -> list[JobResult]:
        now = self._clock()
        if now < self.frozen_until:
            return []
        ended = [late for late in self._late if late[0] <= now]
        self._late = [late for late in self._late if late[0] > now]
        for _, result, blocks in ended:
            job = self._loads.pop(result.job_id)
            for slot, block in zip(job.slots, blocks, strict=False):
                self._memory.view(slot)[:] = block
        return [result for _, result, _ in ended]

    def lookup(self, key: BlockKey) -> LookupResult:
        if self.loading:
            return LookupResult.RETRY
        return LookupResult.PENDING if key in self._writing else super().lookup(key)

    def drain(self) -> None:
        while self._stores:
            super().submit(self._stores.popleft()[1])
        super().drain()
