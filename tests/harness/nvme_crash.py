"""What a disk must still have after a crash, and a start that looks at what it has.

A process that is killed (test_nvme_kills.py) and a power cut (test_nvme_power.py) are two ways to
the same question. The account is kept from what a disk under load says; a start on a copy of the
directory is compared with it, and every block is read.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvstore.config import NvmeConfig
from kvstore.core.types import BlockKey
from tests.harness import nvme_blocks
from tests.harness.nvme_load import CHAINS, Load, Name, names_of, path_to
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.index import DiskIndex, Record
from tiers.nvme.messages import Commit
from tiers.nvme.namespace import DiskNamespace

MIB = 1 << 20
SLOT_BYTES = (4096, 5000)  # of each namespace
WINDOW_S = 0.02
GO_ON_SHARE = 0.1
GOES_S = 30.0
# Why a start may drop blocks: the cap is smaller now. What hangs below one goes with it.
HARMLESS = {"evicted", "resize", "unlinked"}
NEVER = float("inf")
NAMES = {key: name for n in range(len(SLOT_BYTES)) for key, name in names_of(n).items()}


def settings_for(path: Path, capacity_bytes: int) -> NvmeConfig:
    return replace(
        nvme_blocks.settings_for(path, capacity_bytes),
        extent_bytes=MIB // 4,
        durability_ns=int(WINDOW_S * 1e9),
        threads=3,
    )


def names_in(changes: Commit) -> list[Name]:
    """Name the blocks that a commit writes to the index."""
    return [NAMES[BlockKey(key)] for rows in changes.puts.values() for key, _ in rows]


def watch_leaving(
    patch: pytest.MonkeyPatch, gone: Callable[[list[Name]], None], cleared: Callable[[int], None]
) -> None:
    """Have each block that leaves told before that can become durable; cleared: a namespace's."""
    take_subtree, clear = DiskIndex.take_subtree, DiskNamespace.clear

    def watched(index: DiskIndex, record: Record) -> Iterator[Record]:
        leaving = list(take_subtree(index, record))
        gone([NAMES[each.key] for each in leaving])
        return iter(leaving)

    def watched_clear(space: DiskNamespace) -> None:
        cleared(int(space.digest, 16))
        clear(space)

    patch.setattr(DiskIndex, "take_subtree", watched)
    patch.setattr(DiskNamespace, "clear", watched_clear)


class Ledger:
    """The blocks that the next start must find: what was said of them, and when."""

    def __init__(self, label: str) -> None:
        self.committed: set[Name] = set()
        self._label = label
        self._stored: dict[Name, float] = {}
        self._gone_s: dict[Name, float] = {}
        self._cleared_s: dict[int, float] = {}  # by namespace

    def begin(self, found: set[Name]) -> None:
        """A start has found these: from here on they must stay."""
        self._stored, self.committed = dict.fromkeys(found, 0.0), set(found)

    def store(self, names: Iterable[Name], now_s: float) -> None:
        """They are acknowledged, and can be read."""
        for name in names:
            self._stored.setdefault(name, now_s)

    def lose(self, names: Iterable[Name], now_s: float) -> None:
        """They have begun to leave."""
        for name in names:
            self._gone_s[name] = now_s
            self._stored.pop(name, None)
            self.committed.discard(name)

    def clear(self, number: int, now_s: float) -> None:
        """All blocks of a namespace have begun to leave."""
        self._cleared_s[number] = now_s
        known = self._stored.keys() | self.committed
        self.lose([name for name in known if name.chain // CHAINS == number], now_s)

    def commit(self, names: Iterable[Name], planned_s: float) -> None:
        """It is on disk; what has begun to leave since the commit was planned counts as gone."""
        here = {name for name in names if self._left_s(name) < planned_s}
        self.committed |= here
        late = self.stored_before(planned_s) - self.committed
        if here and late:
            pytest.fail(f"{self._label}: stored before, not in the commit: {sorted(late)[:5]}")

    def _left_s(self, name: Name) -> float:
        """When it last began to leave; a clear also takes blocks that were not reported yet."""
        cleared_s = self._cleared_s.get(name.chain // CHAINS, 0.0)
        return max(self._gone_s.get(name, 0.0), cleared_s)

    def stored_before(self, time_s: float) -> set[Name]:
        """Blocks that were there by then, with all that is above them."""
        return {
            name
            for name in self._stored
            if max(self._stored.get(each, NEVER) for each in path_to(name)) < time_s
        }


class Campaign:
    """One seed: a disk that dies again and again, and looks at what it leaves."""

    def __init__(self, label: str, capacity_bytes: int) -> None:
        self.label = label
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger(label)
        self.seen: Counter[str] = Counter()
        self.left: set[Name] = set()  # in a start that is looked at

    def look(
        self, folder: Path, rng: random.Random, required: set[Name], *, honest: bool = True
    ) -> set[Name]:
        """Start on what a crash has left, check it, and remove it; return what was there.

        honest: the disk kept what it had synced. Otherwise blocks may be lost, never wrong.
        """
        self.left.clear()
        disk = NvmeDisk(settings_for(folder, self.capacity_bytes))
        loads = [Load(disk, n, size, rng) for n, size in enumerate(SLOT_BYTES)]
        while disk.state == "loading":
            disk.poll()
            time.sleep(0.0002)  # for the keeper
        assert not list(folder.glob("index.damaged*")), f"{self.label}: the index was set aside"
        found = {name for load in loads for name in load.records()}
        for load in loads:
            load.check_closed()
            load.read_all(lambda: time.sleep(0.0001))
        bad = {each for space in disk.spaces for each in space.counts} - HARMLESS
        self.seen["damaged"] += sum(space.counts["damaged"] for space in disk.spaces)
        self.seen["read"] += len(found)
        if honest:
            assert not bad, f"{self.label}: {bad}"
            lost = sorted(required - found - self.left)
            if lost:
                pytest.fail(f"{self.label}: {len(lost)} durable blocks are lost: {lost[:5]}")
            self.seen["required"] += len(required)
        there = found | self.left
        self._await_known_extents(disk, folder)
        if rng.random() < GO_ON_SHARE:
            _go_on(loads)
        disk.close()
        shutil.rmtree(folder)
        return there

    def _await_known_extents(self, disk: NvmeDisk, folder: Path) -> None:
        """Extents that no record names take space for nothing; of a smaller cap, some go now."""
        end_s = time.monotonic() + GOES_S
        while unknown := {path.name for path in folder.glob("*.extent")} - {
            file.path.name for space in disk.spaces for file in space.extents.values()
        }:
            assert time.monotonic() < end_s, f"{self.label}: nothing is in {unknown}"
            disk.flush()


def _go_on(loads: list[Load]) -> None:
    """Work a little on what a crash has left."""
    for _ in range(30):
        for load in loads:
            load.step()
    for load in loads:
        load.tier.drain()
        load.poll()
        load.check_closed()
