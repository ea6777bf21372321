"""A tier as a third party would write it: one file per block, in a package of its own.

[[tier]]
class = "directory_tier:DirectoryTier"
name = "directory"
options = { path = "/some/directory" }
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvstore.core.errors import BlockCorrupt, TierError, TierIOError
from kvstore.core.tier import TierContext
from kvstore.core.types import BlockKey, JobKind, JobResult, LookupResult, TransferJob


class DirectoryTier:
    """Blocks as files with a checksum in front, written aside and renamed."""

    def __init__(self, context: TierContext) -> None:
        self.name = context.name
        self._memory = context.memory
        self._folder = Path(context.options["path"]) / context.namespace
        self._folder.mkdir(parents=True, exist_ok=True)
        self._names = {path.name for path in self._folder.iterdir() if not path.suffix}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix=self.name)
        self._jobs: list[tuple[TransferJob, Future[JobResult]]] = []
        self._closed = False

    def _file(self, key: BlockKey) -> Path:
        return self._folder / hashlib.sha256(key).hexdigest()

    def lookup(self, key: BlockKey) -> LookupResult:
        return LookupResult.HIT if self._file(key).name in self._names else LookupResult.MISS

    def touch(self, key: BlockKey) -> None:
        pass  # nothing is evicted here

    def submit(self, job: TransferJob) -> None:
        if self._closed:
            raise TierError("tier is closed")
        self._jobs.append((job, self._threads.submit(self._run, job)))

    def _run(self, job: TransferJob) -> JobResult:
        for done, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            try:
                if job.kind is JobKind.STORE:
                    self._write(self._file(key), self._memory.view(slot), job.job_id)
                else:
                    self._read(self._file(key), self._memory.view(slot))
            except TierError as exc:
                return JobResult(job.job_id, done, exc)
            except OSError as exc:
                return JobResult(job.job_id, done, TierIOError(str(exc)))
        return JobResult(job.job_id, len(job.keys))

    def _write(self, path: Path, block: memoryview, job: int) -> None:
        aside = path.with_suffix(f".{job}")  # two jobs may write the same block at a time
        aside.write_bytes(hashlib.sha256(block).digest() + block)
        aside.rename(path)

    def _read(self, path: Path, block: memoryview) -> None:
        found = path.read_bytes()
        if len(found) != 32 + len(block) or hashlib.sha256(found[32:]).digest() != found[:32]:
            raise BlockCorrupt(f"{path.name}: {len(found)} bytes, or checksum")
        block[:] = found[32:]

    def poll(self) -> Sequence[JobResult]:
        ended = [(job, future.result()) for job, future in self._jobs if future.done()]
        results = [result for _, result in ended]
        over = {result.job_id for result in results}
        self._jobs = [(job, future) for job, future in self._jobs if job.job_id not in over]
        for job, result in ended:
            if job.kind is JobKind.STORE:
                self._names.update(self._file(key).name for key in job.keys[: result.done])
        return results

    def discard(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            self._names.discard(self._file(key).name)
            self._file(key).unlink(missing_ok=True)

    def clear(self) -> None:
        for name in self._names:
            (self._folder / name).unlink(missing_ok=True)
        self._names.clear()

    def drain(self) -> None:
        for _, future in self._jobs:
            future.exception()

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown()
        self._jobs.clear()
