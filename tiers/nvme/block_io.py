"""The threads of a disk: those that move blocks; the keeper and the watch.

Moves between memory and extent files go in, and results are polled. Reads go before writes, which
wait for them a moment at most. Checksums are made here, right after a read and right before a
write. A move ends exactly once, and its memory is not touched after that.

The keeper does whatever has to sync, one thing after the other. The index is touched on it alone,
and so is the directory's descriptor. The watch looks at the directory. All calls can hang with the
disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from kvstore import clock
from kvstore.core.errors import KVStoreError, TierError
from tiers.nvme.files import ExtentFile
from tiers.nvme.health import Pace
from tiers.runner import NOTHING, Nothing, Runner

READS_FIRST_S = 0.05  # a write waits no longer for reads
SUMMERS = 2  # threads for the checksums of writes; one takes some 8 GB/s


class Move(msgspec.Struct, eq=False):
    """Neighbouring slots of one extent, read or written in one go, and what became of it."""

    store: bool
    file: ExtentFile
    position: int
    blocks: list[memoryview]
    sums: list[int] = []  # of the blocks, once they were read or are to be written
    error: Exception | None = None  # why they were not moved

    def checksums(self) -> list[int]:
        """Return the checksum of each block as it is in memory; without checksums, nothing."""
        return []


R = TypeVar("R", bound=Move)
T = TypeVar("T")


def writers_of(threads: int) -> int:
    """Return how many writes are under way at one time, where so many reads are.

    Half as many: a write does not wait for the disk's own memory, so fewer of them fill it, and
    reads are what a request waits for.
    """
    return max(2, threads // 2)


class ThreadMover(Generic[R]):
    """Threads for reads and threads for writes; a run is one vectored call.

    Checksums of what is read are taken by the thread that has read it. Those of what is to be
    written are taken ahead, by threads of their own: a thread that has written takes the next run
    at once, so the disk never waits for a sum (5 % more than with threads that do both).
    """

    def __init__(self, readers: int, writers: int) -> None:
        """Start the threads; readers, writers: calls under way at one time."""
        self._reads: Runner[R, R] = Runner("kvstore-nvme-read", self._read, _failed, readers)
        self._sums: Runner[R, R] = Runner("kvstore-nvme-sum", self._sum, _failed, SUMMERS)
        self._writes: Runner[R, R] = Runner("kvstore-nvme-write", self._write, _failed, writers)

    @property
    def open(self) -> int:
        """Count the moves whose result is not there yet."""
        return self._reads.open + self._sums.open + self._writes.open

    def start(self, run: R) -> None:
        """Move a run on a thread."""
        (self._sums if run.store else self._reads).submit(run)

    def _read(self, run: R) -> R:
        try:
            run.file.read(run.position, run.blocks)
        except (OSError, TierError) as exc:
            return _failed(run, exc)
        run.sums = run.checksums()
        return run

    def _sum(self, run: R) -> Nothing:
        run.sums = run.checksums()
        self._writes.submit(run)
        return NOTHING

    def _write(self, run: R) -> R:
        if self._reads.open:
            self._reads.wait(lambda: self._reads.open == 0, READS_FIRST_S)
        try:
            run.file.write(run.position, run.blocks)
        except (OSError, TierError) as exc:
            return _failed(run, exc)
        return run

    def poll(self) -> list[R]:
        """Take the runs that have ended."""
        return self._reads.poll() + self._writes.poll() + self._sums.poll()

    def close(self) -> None:
        """Finish what was started and end the threads."""
        for runner in (self._reads, self._sums, self._writes):
            runner.close()


def _failed(run: R, error: Exception) -> R:
    run.error = error.with_traceback(None)  # whose frames would keep the blocks in memory
    return run


class Task(msgspec.Struct, eq=False):
    """Something for the thread, and what happens here with what it returned or raised."""

    work: Callable[[], object]
    done: Callable[[Any, float], None]
    result: object = None


class TaskThread:
    """Does tasks in their order; called from one thread, which never waits, except in close."""

    def __init__(self, name: str) -> None:
        self.pace = Pace(1)
        self._runner: Runner[Task, Task] = Runner(f"kvstore-nvme-{name}", _do, _undone)

    @property
    def open(self) -> int:
        """Count the tasks that are not done."""
        return self.pace.open

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception, float], None]) -> None:
        """Do work() on the thread, then done(what it returned or raised, now_s) here, in poll."""
        self.pace.began(clock.now_s())
        self._runner.submit(Task(work, done))

    def poll(self, now_s: float) -> None:
        """Take what is done."""
        for task in self._runner.poll():
            self.pace.ended(now_s)
            task.done(task.result, now_s)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._runner.close()


def _do(task: Task) -> Task:
    try:
        task.result = task.work()
    except (OSError, KVStoreError) as exc:
        task.result = exc
    return task


def _undone(task: Task, error: Exception) -> Task:
    task.result = error
    return task
