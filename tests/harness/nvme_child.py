"""A disk under load in a process that is killed: it tells what it does, so that others know.

    forked([STDERR], [FOLDER, LOG, SEED, CAPACITY, POINT, NUMBER])  # point and number, or neither

Lines are appended to LOG, each with the time. A block is told as CHAIN/BLOCK:

    loading | serving          the index is being read | all of it is known
    stored BLOCK...            acknowledged, and can be read
    gone BLOCK...              said before it can be durable
    cleared NAMESPACE
    planned                    a commit
    committed TIME BLOCK...    durable; when it was planned
    resize BYTES
    within BYTES               the directory takes no more than this again
    killed POINT               the last line, when it was this process that killed itself

With POINT, it sends itself a SIGKILL when it gets there for the NUMBERth time. SIGTERM ends it in
order.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.nvme_blocks import disk_bytes
from tests.harness.nvme_crash import (
    HARMLESS,
    MIB,
    NEVER,
    SLOT_BYTES,
    names_in,
    settings_for,
    watch_leaving,
)
from tests.harness.nvme_load import Load, Name
from tiers.nvme.commits import Commits
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.files import ExtentFile
from tiers.nvme.index_client import IndexClient
from tiers.nvme.messages import Commit

POINTS = (
    "load",  # a turn while the index is read
    "loaded",
    "read",
    "half-written",  # of several blocks that one call writes
    "written",
    "sync",  # data written, not synced
    "commit",  # data synced, the index not written
    "amid",  # at any time while the index is written
    "committed",  # and nobody told
    "made",  # an extent file is there, the index does not know it
    "known",  # it does
    "forgotten",  # the index has forgotten an extent, the file is there
    "gone",
    "resize",
    "clear",
)
CAPS = (5 * MIB, 6 * MIB, 8 * MIB)
AMID_S = 0.004
CLEAR_SHARE = 0.001
COMMIT_S = (0.0, 0.02)  # a process's commits take so much longer than they need here
STEP_S = 0.0005
CHANGE_S = (0.1, 0.4)  # when the cap changes, or all is cleared
_EXPECTED = HARMLESS | {"discarded", "cleared", "unplaced"}  # why a block may leave


class Watch:
    """Where lines go, and where the process ends."""

    def __init__(self, log: Path, point: str, number: int) -> None:
        self.point = point
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._left = number
        self._lock = threading.Lock()
        self._planned_s = 0.0
        self.commit_s = 0.0

    def say(self, word: str, *more: object) -> None:
        os.write(self._log, (" ".join(map(str, (time.monotonic(), word, *more))) + "\n").encode())

    def say_blocks(self, word: str, names: Iterable[Name], *before: object) -> None:
        self.say(word, *before, *(f"{name.chain}/{name.block}" for name in names))

    def reach(self, point: str) -> None:
        if self.passes(point):
            self.die()

    def passes(self, point: str) -> bool:
        """True at the NUMBERth time that POINT is reached."""
        if point != self.point:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0

    def die(self) -> None:
        self.say("killed", self.point)
        os.kill(os.getpid(), signal.SIGKILL)

    # What happens

    def gone(self, names: list[Name]) -> None:
        self.say_blocks("gone", names)
        self.reach("gone")

    def planned(self, *_: object) -> None:
        self._planned_s = time.monotonic()
        self.say("planned")

    def half_written(self, file: ExtentFile, position: int, blocks: Sequence[memoryview]) -> None:
        if self.passes("half-written"):
            whole = len(blocks) // 2
            half = bytearray(blocks[whole][: file.stride // 2])  # a call writes whole pages
            file.write(position, [*blocks[:whole], memoryview(half.ljust(file.slot_bytes, b"\0"))])
            self.die()

    def commits(self, _client: IndexClient, changes: Commit) -> None:
        time.sleep(self.commit_s)
        if changes.extents:
            self.reach("made")
        if changes.puts:
            self.reach("commit")
            if self.passes("amid"):
                delay_s = AMID_S * (time.monotonic_ns() % 1000) / 1000
                threading.Timer(delay_s, self.die).start()

    def committed(self, _client: IndexClient, changes: Commit) -> None:
        if changes.extents:
            self.reach("known")
        if changes.extents_gone:
            self.reach("forgotten")
        if changes.puts:
            self.reach("committed")
            self.say_blocks("committed", names_in(changes), self._planned_s)


def _nothing(*_: object) -> None:
    """Stand for what is not done before or after a call."""


def _watch(
    owner: type,
    name: str,
    before: Callable[..., object] = _nothing,
    after: Callable[..., object] = _nothing,
) -> None:
    """Have a method's arguments seen before and after each call; this process is ours alone."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any) -> object:  # noqa: ANN401 - as the original
        before(*arguments)
        result: object = original(*arguments)
        after(*arguments)
        return result

    setattr(owner, name, wrapped)


def _watch_all(watch: Watch) -> None:
    watch_leaving(pytest.MonkeyPatch(), watch.gone, lambda number: watch.say("cleared", number))
    _watch(ExtentFile, "write", watch.half_written, lambda *_: watch.reach("written"))
    _watch(ExtentFile, "read", after=lambda *_: watch.reach("read"))
    _watch(ExtentFile, "sync", lambda *_: watch.reach("sync"))
    _watch(IndexClient, "commit", watch.commits, watch.committed)
    _watch(Commits, "_begin", watch.planned)


class Cap:
    """What a directory may take: after a change to less, as much as before until it takes less."""

    def __init__(self, folder: Path, disk: NvmeDisk, watch: Watch) -> None:
        self._folder, self._disk, self._watch = folder, disk, watch
        self._limit_bytes = max(CAPS)  # of the process before

    def check(self) -> None:
        capacity_bytes, used = self._disk.capacity_bytes, disk_bytes(self._folder)
        self._limit_bytes = max(self._limit_bytes, capacity_bytes)
        if used > self._limit_bytes:  # one file may have gone, and another come, meanwhile
            used = min(used, disk_bytes(self._folder))
        assert used <= self._limit_bytes, f"{used} bytes on disk, the cap is {self._limit_bytes}"
        # An extent may be under way that was begun before the change.
        if used <= capacity_bytes < self._limit_bytes and not self._disk.attached.room.making:
            self._limit_bytes = capacity_bytes
            self._watch.say("within", capacity_bytes)


class Life:
    """The disk and its load, until the process is killed or told to end."""

    def __init__(self, folder: Path, watch: Watch, rng: random.Random, capacity_bytes: int) -> None:
        self._watch, self._rng = watch, rng
        self._told = ""
        self._ends = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._ends.set())
        self._disk = NvmeDisk(settings_for(folder, capacity_bytes))
        self._cap = Cap(folder, self._disk, watch)
        self._loads = [
            Load(self._disk, number, size, rng, lambda names: watch.say_blocks("stored", names))
            for number, size in enumerate(SLOT_BYTES)
        ]
        for load in self._loads:
            load.clear_share = CLEAR_SHARE

    def run(self) -> None:
        changes_s = time.monotonic() + self._rng.uniform(*CHANGE_S)
        while not self._ends.is_set():
            self._tell()
            for load in self._loads:
                load.step()
                assert not load.corrupt
            self._cap.check()
            reasons = {each for space in self._disk.spaces for each in space.counts}
            assert reasons <= _EXPECTED, f"blocks left for {reasons - _EXPECTED}"
            if time.monotonic() > changes_s and self._told == "serving":
                aims = bool(self._watch.point)  # then it goes on until it is there
                changes_s = time.monotonic() + self._rng.uniform(*CHANGE_S) if aims else NEVER
                self._change()
            time.sleep(STEP_S)
        for load in self._loads:
            load.tier.drain()
            load.poll()
            load.tier.close()
        self._disk.close()

    def _tell(self) -> None:
        """Say whether the index is read."""
        self._disk.poll()
        now = "loading" if self._disk.state == "loading" else "serving"
        if now != self._told:
            self._told = now
            self._watch.say(now)
            if now == "serving":
                self._watch.reach("loaded")
        if now == "loading":
            self._watch.reach("load")

    def _change(self) -> None:
        if self._watch.point == "clear":
            self._loads[0].tier.clear()
            self._watch.reach("clear")
            return
        others = [cap for cap in CAPS if cap != self._disk.capacity_bytes]
        capacity_bytes = self._rng.choice(others)
        self._watch.say("resize", capacity_bytes)
        self._disk.resize(capacity_bytes)
        self._watch.reach("resize")


def forked(fds: list[int], arguments: list[str]) -> None:
    """Be such a process; stderr is a file that is open already."""
    os.dup2(fds[0], 2)
    folder, log, seed, capacity_bytes, *point = arguments
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    watch = Watch(Path(log), point[0] if point else "", int(point[1]) if point else 0)
    _watch_all(watch)
    rng = random.Random(seed)
    watch.commit_s = rng.choice(COMMIT_S)
    Life(Path(folder), watch, rng, int(capacity_bytes)).run()
