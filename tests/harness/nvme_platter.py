"""A disk on which nothing is durable before it was synced, and the threads that use it, as one.

While it is live, the NVMe tier runs on one thread, on a clock of the test's: what the threads have
to do waits in queues, and a seed says what happens next. Each call to the disk is a moment at
which the power may fail. `cut` then makes the directory that the next start would find: of each
write since the last sync, all, some sectors or nothing, in any order.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import lmdb
import pytest

from kvstore import clock
from kvstore.core.errors import check
from tiers.nvme import attached, block_io, disk, files, index_client
from tiers.nvme.index_client import IndexClient, IndexProcess
from tiers.nvme.index_server import IndexServer
from tiers.nvme.messages import FOLDER, Answer, Commit, Request
from tiers.runner import NOTHING, Runner

J = TypeVar("J")
R = TypeVar("R")

DELAY_S = 0.024  # longest that the keeper takes to begin a chore
CALLS = ("open", "pwritev", "posix_fallocate", "fsync", "fdatasync")
SECTORS = (512, 4096)


class Write(NamedTuple):
    """Bytes on their way to the disk."""

    name: str
    at: int
    data: bytes


class Queue(Generic[J, R]):
    """Stands for a Runner: the same calls, but a job runs when the platter says so."""

    def __init__(
        self,
        platter: Platter,
        work: Callable[[J], R],
        failed: Callable[[J, Exception], R],
        width: int,
    ) -> None:
        self._platter = platter
        self._work = work
        self._failed = failed
        self._width = width
        self._jobs: deque[tuple[float, J]] = deque()
        self._results: list[R] = []
        self.open = 0
        self.since_s = 0.0  # when the job that runs was submitted

    def submit(self, job: J) -> None:
        self.open += 1
        self._jobs.append((self._platter.now_s, job))

    def poll(self) -> list[R]:
        results, self._results = self._results, []
        return results

    def wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        check(timeout_s is not None, "nobody else would run meanwhile")
        return done()

    @property
    def overdue(self) -> bool:
        return bool(self._jobs) and self._platter.now_s - self._jobs[0][0] > DELAY_S - 0.005

    def run_one(self, rng: random.Random) -> None:
        """Run one of those that a thread would have taken by now."""
        if not self._jobs:
            return
        number = rng.randrange(min(self._width, len(self._jobs)))
        self.since_s, job = self._jobs[number]
        del self._jobs[number]
        try:
            result = self._work(job)
        except OSError as exc:
            result = self._failed(job, exc)
        if result is not NOTHING:
            self._results.append(result)
        self.open -= 1


class ProcessHere:
    """The process that owns the index, in this one: it takes no time to start."""

    pid = 0
    ended = False

    def __init__(self, _lock_fd: int) -> None:
        self._server = IndexServer()

    def ask(self, request: Request) -> Answer:
        return self._server.answer(request)

    def close(self) -> None:
        if self._server.file is not None:
            self._server.file.close()
            os.close(self._server.lock_fd)
            self._server.file = None


class Platter:
    """What of a directory is durable, and all that can come between."""

    def __init__(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = False
        self.honest = True  # else a sync says that it is done, and nothing is
        self.now_s = 1000.0
        self.at_any_moment: Callable[[], None] = lambda: None
        self.at_commit: Callable[[Commit, float], None] = lambda *_: None  # and when planned
        self.process: type[ProcessHere | IndexProcess] = ProcessHere
        self._rng = rng
        self._in_keeper = False
        self._install(monkeypatch)

    def start(self, folder: Path) -> None:
        """Take this directory as what the disk holds."""
        self.folder = folder
        self._durable = {
            path.name: bytearray(path.read_bytes()) for path in folder.glob("*.extent")
        }
        self._pending: list[Write] = []
        self._made: dict[str, int] = {}  # size; the directory was not synced since
        self._queues: list[Queue[Any, Any]] = []
        self._read_index()
        self.live = True

    def _read_index(self) -> None:
        path = self.folder / FOLDER / "data.mdb"
        self._index = path.read_bytes() if path.exists() else None

    # Time and threads

    def pass_time(self) -> None:
        """Let the threads do a few things, and the clock go on."""
        self.now_s += self._rng.uniform(0.0, 0.004)
        readers, summers, writers, keeper, looker = self._queues
        for _ in range(self._rng.randrange(12)):
            self._rng.choice((readers, summers, writers)).run_one(self._rng)
        if self._rng.random() < 0.2:
            self._keep(keeper)
        while keeper.overdue:
            self._keep(keeper)
        looker.run_one(self._rng)

    def _keep(self, keeper: Queue[Any, Any]) -> None:
        self._in_keeper = True
        keeper.run_one(self._rng)
        self._in_keeper = False

    def _moment(self) -> None:
        """Something is about to happen, or has: the power may fail, other threads may run."""
        if self._in_keeper and self._rng.random() < 0.5:
            self._in_keeper = False
            for queue in self._queues[1:3]:  # the next run's sums, and a write
                queue.run_one(self._rng)
            self._in_keeper = True
        self.at_any_moment()

    def _runner(
        self,
        name: str,
        work: Callable[[J], R],
        failed: Callable[[J, Exception], R],
        threads: int = 1,
    ) -> Runner[J, R] | Queue[J, R]:
        if not self.live:
            return Runner(name, work, failed, threads)
        queue = Queue(self, work, failed, threads)
        self._queues.append(queue)
        return queue

    def _process(self, lock_fd: int) -> ProcessHere | IndexProcess:
        return self.process(lock_fd)

    # Calls to the disk

    def _monotonic(self) -> float:
        return self.now_s if self.live else time.monotonic()

    def _sleep(self, seconds: float) -> None:
        if self.live:
            self.now_s += seconds
            self.pass_time()
        else:
            time.sleep(seconds)

    def open(
        self, path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        """Without direct I/O: what the real disk does meanwhile costs time, and shows nothing."""
        return os.open(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)

    def pwritev(self, fd: int, pieces: Sequence[memoryview], at: int) -> int:
        if self.live:
            self._moment()
            self._pending.append(Write(_name(fd), at, b"".join(pieces)))
            self._moment()
        return os.pwritev(fd, pieces, at)

    def posix_fallocate(self, fd: int, at: int, size: int) -> None:
        os.posix_fallocate(fd, at, size)
        if self.live:
            self._made[_name(fd)] = size
            self._moment()

    def fsync(self, fd: int) -> None:
        if not self.live:
            return
        name = _name(fd)
        self._moment()
        if name == self.folder.name:
            self._made.clear()
            self._durable = {n: d for n, d in self._durable.items() if (self.folder / n).exists()}
        else:
            self._durable[name] = bytearray(self._made[name])
        self._moment()

    def fdatasync(self, fd: int) -> None:
        if not self.live:
            return
        name, before = _name(fd), list(self._pending)
        self._moment()  # what is written from now on is not part of this sync
        if self.honest:
            for write in before:
                if write.name == name:
                    _apply(self._durable[name], write)
                    self._pending.remove(write)
        self._moment()

    def _install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = IndexClient.commit

        def watched_commit(index: IndexClient, changes: Commit) -> None:
            if not self.live:
                commit(index, changes)
                return
            self._moment()
            commit(index, changes)
            self._read_index()
            self.at_commit(changes, self._queues[3].since_s)
            self._moment()

        monkeypatch.setattr(IndexClient, "commit", watched_commit)
        calls = {name: getattr(self, name) for name in CALLS}
        monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), **calls}))
        monkeypatch.setattr(clock, "now_s", self._monotonic)
        monkeypatch.setattr(disk, "time", SimpleNamespace(sleep=self._sleep))
        monkeypatch.setattr(attached, "time", SimpleNamespace(monotonic=self._monotonic))
        monkeypatch.setattr(index_client, "IndexProcess", self._process)
        monkeypatch.setattr(block_io, "Runner", self._runner)
        # By default a set of them is in the order of addresses, which no seed repeats.
        monkeypatch.setattr(files.ExtentFile, "__hash__", lambda file: int(file.path.stem))
        # LMDB's own syncs cost time and show nothing here: its commits are taken as a whole.
        opened = lmdb.open
        monkeypatch.setattr(lmdb, "open", lambda *a, **k: opened(*a, **{**k, "sync": False}))

    # Power

    def cut(self, folder: Path) -> None:
        """Make what a start would find if the power failed now."""
        folder.mkdir()
        if self._index is not None:
            (folder / FOLDER).mkdir()
            (folder / FOLDER / "data.mdb").write_bytes(self._index)
        found = {name: bytearray(data) for name, data in self._durable.items()}
        for name, size in self._made.items():
            found.setdefault(name, bytearray(self._rng.choice((0, size // 8192 * 4096, size))))
        for write in self._rng.sample(self._pending, len(self._pending)):
            if write.name in found:
                self._half_do(found[write.name], write)
        for name, data in found.items():
            unsure = name in self._made or not (self.folder / name).exists()
            if not unsure or self._rng.random() < 0.5:
                (folder / name).write_bytes(data)

    def _half_do(self, file: bytearray, write: Write) -> None:
        dice = self._rng.random()
        if dice < 0.3:
            return
        if dice < 0.6:
            _apply(file, write)
            return
        sector = self._rng.choice(SECTORS)
        pieces = range(0, len(write.data), sector)
        if dice < 0.8:  # up to some sector, else any of them
            chosen = set(pieces[: self._rng.randrange(len(pieces) + 1)])
        else:
            chosen = {piece for piece in pieces if self._rng.random() < 0.5}
        for piece in chosen:
            part = write.data[piece : piece + sector]
            _apply(file, Write(write.name, write.at + piece, part))


def _apply(file: bytearray, write: Write) -> None:
    if write.at < len(file):  # a file that was not whole yet
        file[write.at : write.at + len(write.data)] = write.data


def _name(fd: int) -> str:
    return Path(f"/proc/self/fd/{fd}").readlink().name
