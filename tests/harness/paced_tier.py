"""A tier that reads one block after another, each in a given time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.core.tier import TierContext
from kvstore.core.types import JobKind, JobResult, TransferJob
from tests.reference.memory_tier import MemoryTier


class PacedTier(MemoryTier):
    """Reads a block in options["block_ms"]; what it stores is stored at once."""

    clock: Callable[[], int] = staticmethod(time.monotonic_ns)

    def __init__(self, context: TierContext) -> None:
        """Start empty, with nothing to read."""
        super().__init__(context)
        self.block_ns = int(float(context.options.get("block_ms", 0)) * 1e6)
        self._loads: deque[tuple[int, TransferJob]] = deque()  # and when each ends
        self._free_ns = 0

    def submit(self, job: TransferJob) -> None:
        """Start a job; a load ends after all that began before."""
        if job.kind is JobKind.STORE:
            super().submit(job)
            return
        self._free_ns = max(self._free_ns, self.clock()) + self.block_ns * len(job.keys)
        self._loads.append((self._free_ns, job))

    def poll(self) -> Sequence[JobResult]:
        """Return the jobs whose time has come."""
        while self._loads and self._loads[0][0] <= self.clock():
            super().submit(self._loads.popleft()[1])
        return super().poll()

    def drain(self) -> None:
        """Wait for the last load."""
        while self._loads:
            time.sleep(0.001)
            self._results += self.poll()
        super().drain()
