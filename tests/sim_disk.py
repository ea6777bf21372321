"""The simulation's disk: a tier whose reads take their time, and leave rubbish until they end."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from kvstore.tier import SlotMemory, Tier
from kvstore.types import BlockKey, JobId, JobKind, JobResult, LookupResult, TransferJob

MS = 1_000_000
RUBBISH = b"\xbb"


class SlowTier:
    """Gives the results of loads late; until then, and for what failed, slots hold rubbish."""

    def __init__(
        self, inner: Tier, memory: SlotMemory, rng: random.Random, clock: Callable[[], int]
    ) -> None:
        self.name = inner.name
        self.frozen_until = 0
        self._inner = inner
        self._memory = memory
        self._rng = rng
        self._clock = clock
        self._slowness_ms = rng.choice((0, 20, 200))
        self._loads: dict[JobId, TransferJob] = {}
        self._late: list[tuple[int, JobResult, list[bytes]]] = []  # with when, and the bytes

    def thaw(self) -> None:
        self.frozen_until = self._slowness_ms = 0

    def submit(self, job: TransferJob) -> None:
        if job.kind is JobKind.LOAD:
            self._loads[job.job_id] = job
            self._spoil(job)
        self._inner.submit(job)

    def _spoil(self, job: TransferJob, first: int = 0) -> None:
        for slot in job.slots[first:]:
            view = self._memory.view(slot)
            view[:] = RUBBISH * len(view)

    def poll(self) -> Sequence[JobResult]:
        over: list[JobResult] = []
        for result in self._inner.poll():
            job = self._loads.get(result.job_id)
            if job is None:
                over.append(result)
                continue
            due = self._clock() + self._rng.randrange(self._slowness_ms + 1) * MS
            blocks = [bytes(self._memory.view(slot)) for slot in job.slots[: result.done]]
            self._spoil(job)
            self._late.append((due, result, blocks))
        return [*over, *self._due()]

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
        return self._inner.lookup(key)

    def touch(self, key: BlockKey) -> None:
        self._inner.touch(key)

    def discard(self, keys: Collection[BlockKey]) -> None:
        self._inner.discard(keys)

    def clear(self) -> None:
        self._inner.clear()

    def drain(self) -> None:
        self._inner.drain()

    def close(self) -> None:
        self._inner.close()
