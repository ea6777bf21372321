"""The reference tier: blocks in a dict, copied when polled. For tests and as an example."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from kvstore.core.errors import TierError, TierFull, TierIOError
from kvstore.core.tier import TierContext
from kvstore.core.types import BlockKey, JobKind, JobResult, LookupResult, TransferJob


class MemoryTier:
    """Keeps up to options["blocks"] blocks (default 1024); refuses more with TierFull."""

    def __init__(self, context: TierContext) -> None:
        """Start empty."""
        self.name = context.name
        self._memory = context.memory
        self._blocks_max = int(context.options.get("blocks", 1024))
        self._blocks: dict[BlockKey, bytes] = {}
        self._writing: set[BlockKey] = set()
        self._jobs: deque[TransferJob] = deque()
        self._results: list[JobResult] = []
        self._closed = False

    def lookup(self, key: BlockKey) -> LookupResult:
        """HIT when whole, PENDING while a store is queued."""
        if key in self._blocks:
            return LookupResult.HIT
        return LookupResult.PENDING if key in self._writing else LookupResult.MISS

    def touch(self, key: BlockKey) -> None:
        """Do nothing: this tier evicts no block."""

    def submit(self, job: TransferJob) -> None:
        """Queue a job until the next poll."""
        if self._closed:
            raise TierError("tier is closed")
        if job.kind is JobKind.STORE:
            self._writing.update(job.keys)
        self._jobs.append(job)

    def poll(self) -> Sequence[JobResult]:
        """Run the queued jobs and return their results."""
        while self._jobs:
            self._results.append(self._do(self._jobs.popleft()))
        results, self._results = self._results, []
        return results

    def _do(self, job: TransferJob) -> JobResult:
        error: TierError | None = None
        done = 0
        for key, slot in zip(job.keys, job.slots, strict=True):
            view = self._memory.view(slot)
            if job.kind is JobKind.LOAD:
                if key not in self._blocks:
                    error = TierIOError("block is not here any more")
                    break
                view[:] = self._blocks[key]
            elif len(self._blocks) >= self._blocks_max and key not in self._blocks:
                error = TierFull(f"{self._blocks_max} blocks are all this tier may keep")
                break
            else:
                self._blocks[key] = bytes(view)
            done += 1
        if job.kind is JobKind.STORE:
            self._writing.difference_update(job.keys)
        return JobResult(job.job_id, done, error)

    def discard(self, keys: Collection[BlockKey]) -> None:
        """Forget blocks."""
        for key in keys:
            self._blocks.pop(key, None)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()

    def drain(self) -> None:
        """Run the queued jobs; poll fetches their results."""
        while self._jobs:
            self._results.append(self._do(self._jobs.popleft()))

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self._jobs.clear()
        self._blocks.clear()
