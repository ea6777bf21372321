"""A wrapper that delays, reorders and fails another tier's results; for simulation."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from kvstore.core.errors import BlockCorrupt, TierIOError
from kvstore.core.tier import Tier
from kvstore.core.types import BlockKey, JobId, JobKind, JobResult, LookupResult, TransferJob


class FaultyTier:
    """Each result waits for a random number of polls; some jobs fail, whole or in part."""

    def __init__(self, inner: Tier, rng: random.Random, fail_ratio: float = 0.2) -> None:
        """fail_ratio: share of jobs whose result says they failed from some block on."""
        self.name = inner.name
        self._inner = inner
        self._rng = rng
        self._fail_ratio = fail_ratio
        self._kinds: dict[JobId, tuple[JobKind, tuple[BlockKey, ...]]] = {}
        self._held: list[JobResult] = []

    def lookup(self, key: BlockKey) -> LookupResult:
        return self._inner.lookup(key)

    def touch(self, key: BlockKey) -> None:
        self._inner.touch(key)

    def submit(self, job: TransferJob) -> None:
        self._kinds[job.job_id] = (job.kind, job.keys)
        self._inner.submit(job)

    def poll(self) -> Sequence[JobResult]:
        """Return some of the finished jobs, in random order."""
        self._held.extend(map(self._maybe_fail, self._inner.poll()))
        if not self._held:
            return []
        self._rng.shuffle(self._held)
        ready = self._rng.randint(0, len(self._held))
        results, self._held = self._held[:ready], self._held[ready:]
        return results

    def _maybe_fail(self, result: JobResult) -> JobResult:
        kind, keys = self._kinds.pop(result.job_id)
        if result.done == 0 or self._rng.random() >= self._fail_ratio:
            return result
        done = self._rng.randrange(result.done)
        if kind is JobKind.STORE:
            self._inner.discard(keys[done:])
            return JobResult(result.job_id, done, TierIOError("injected"))
        return JobResult(result.job_id, done, BlockCorrupt("injected"))

    def discard(self, keys: Collection[BlockKey]) -> None:
        self._inner.discard(keys)

    def clear(self) -> None:
        self._inner.clear()

    def drain(self) -> None:
        """Let everything finish; nothing is held back any more."""
        self._inner.drain()
        self._held.extend(map(self._maybe_fail, self._inner.poll()))

    def close(self) -> None:
        self._inner.close()
