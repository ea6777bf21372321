"""The process that the crash campaign kills: checks what it finds, then stores and loads.

Says on standard output, a line each, with the time: `have NAMES` (found at start), `serving` (all
of it was read and is right), `stored NAMES`, `gone NAMES` (said before it can be durable),
`commit` and `committed`, `slow SECONDS` between two polls. A failed check ends it with a traceback.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.core.types import BlockKey
from tests.harness.nvme_blocks import MIB, settings_for
from tests.harness.nvme_load import Load, Name
from tiers.nvme import NvmeDisk
from tiers.nvme.commits import Commits
from tiers.nvme.index import DiskIndex, Record
from tiers.nvme.namespace import Space

CAPACITY_BYTES = 16 * MIB
SLOT_BYTES = (8192, 5000, 16384)  # of each namespace; 5000 cannot go straight from memory
IDLE_S = 0.0001  # lets the other threads have the interpreter
HARMLESS = {"evicted", "discarded", "cleared", "unlinked", "resize", "unplaced"}


def say(line: str) -> None:
    os.write(1, f"{time.monotonic():.6f} {line}\n".encode())


def say_names(word: str, names: list[Name]) -> None:
    if names:
        say(" ".join([word, *map(str, names)]))


class Child:
    """A disk under load, on one thread."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names: dict[BlockKey, Name] = {}
        self._watch()
        self.disk = NvmeDisk(settings_for(folder, CAPACITY_BYTES))
        self.loads = [
            Load(self.disk, number, size, self._rng, lambda names: say_names("stored", names))
            for number, size in enumerate(SLOT_BYTES)
        ]
        for load in self.loads:
            self._names |= load.names
        self._polled_s = time.monotonic()
        self._slowest_s = 0.005

    def _watch(self) -> None:
        """Have every block that leaves, and every commit, told to the parent."""
        take_subtree, begin, ended = DiskIndex.take_subtree, Commits._begin, Commits._ended

        def told_subtree(index: DiskIndex, record: Record) -> Iterator[Record]:
            gone = list(take_subtree(index, record))
            say_names("gone", [self._names[each.key] for each in gone])
            return iter(gone)

        clear = Space.clear

        def told_clear(space: Space, number: int) -> None:
            say_names("gone", [self._names[each.key] for each in space.index])
            clear(space, number)

        def told_begin(commits: Commits) -> None:
            say("commit")
            begin(commits)

        def told_ended(commits: Commits, *result: Any) -> None:  # noqa: ANN401 - as it comes
            ended(commits, *result)
            say("committed")

        # Plain assignments: this process is ours alone.
        for kind, name, told in (
            (DiskIndex, "take_subtree", told_subtree),
            (Space, "clear", told_clear),
            (Commits, "_begin", told_begin),
            (Commits, "_ended", told_ended),
        ):
            setattr(kind, name, told)

    def start(self) -> None:
        """Read the index; load what is there already meanwhile."""
        while self.disk.state == "loading":
            self._tick()
            for load in self.loads:
                load.load_some()
                load.poll()
            time.sleep(IDLE_S)
        say(" ".join(["have", *(str(name) for load in self.loads for name in load.records())]))
        for load in self.loads:
            load.check_closed()
            load.read_all(lambda: time.sleep(IDLE_S))
        self._check()
        say("serving")

    def run(self) -> None:
        """Work until killed; some namespaces are not in use, and make room for the others."""
        for load in self._rng.sample(self.loads, self._rng.randrange(len(self.loads))):
            load.tier.close()
            self.loads.remove(load)
        self._polled_s = time.monotonic()
        while True:
            for load in self.loads:
                self._tick()
                if not load.step():
                    time.sleep(IDLE_S)
            self._check()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._polled_s > self._slowest_s:
            self._slowest_s = now - self._polled_s
            say(f"slow {self._slowest_s:.6f}")
        self._polled_s = now

    def _check(self) -> None:
        for space in self.disk.spaces:
            assert not set(space.counts) - HARMLESS, f"{space.digest}: {space.counts}"
        assert self.disk.state == "ok"


def main() -> None:
    child = Child(Path(sys.argv[1]), int(sys.argv[2]))
    child.start()
    child.run()


if __name__ == "__main__":
    main()
