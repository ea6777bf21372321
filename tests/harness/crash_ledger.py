"""What a killed store's directory must hold, and what it does hold.

The account is kept from the log of store_child.py; the directory is read offline, as fsck does.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import xxhash

from kvstore.core.types import BlockKey
from tests.harness.crash_engine import Truth
from tiers.nvme.files import ExtentFile, stride_of
from tiers.nvme.messages import BLOCKS, EXTENTS, FOLDER, NOWHERE, NUMBER, VALUE

HARMLESS = {"evicted", "resize"}
SLACK_S = 0.1
RUN_BLOCKS = 16

Name = tuple[str, BlockKey]
"""A block: its namespace's digest, and its key."""


class Commits:
    """When the last one that has ended was planned, and how long one has taken at most."""

    def __init__(self) -> None:
        self.done_s = self.longest_s = 0.0
        self.planned_s: float | None = None  # of the one under way

    def take(self, word: str, now_s: float) -> None:
        if self.planned_s is not None:
            self.longest_s = max(self.longest_s, now_s - self.planned_s)
        if word == "commit":
            self.planned_s = now_s
        elif word == "committed" and self.planned_s is not None:
            self.done_s, self.planned_s = self.planned_s, None


class Life(NamedTuple):
    """How one process went, as its log has it."""

    words: Counter[str]
    killed_at: str  # the point at which it killed itself
    in_commit: bool
    in_load: bool


class Ledger:
    """The blocks that must be on disk: acknowledged long enough ago, and not said to be gone."""

    def __init__(self, window_s: float, truth: Mapping[BlockKey, Truth]) -> None:
        self.required = 0  # checked so far
        self.late_s = 0.0  # longest that was allowed
        self._window_s = window_s
        self._truth = truth
        self._stored: dict[Name, float] = {}  # when it was acknowledged; 0: found on disk

    def follow(self, lines: Sequence[str], end_s: float, *, orderly: bool = False) -> Life:
        """Read the log of one process, which was alive at end_s; then required() is known."""
        words: Counter[str] = Counter()
        commits, lag_s, killed_at = Commits(), 0.0, ""
        for line in lines:
            time_s, word, *rest = line.split(" ")
            now_s = float(time_s)
            words[word] += 1
            commits.take(word, now_s)
            if word == "stored":
                words["blocks stored"] += len(rest) - 1
                for key in rest[1:]:
                    self._stored.setdefault((rest[0], BlockKey(bytes.fromhex(key))), now_s)
            elif word == "gone":
                assert rest[1] in HARMLESS, f"{len(rest) - 2} blocks of {rest[0]} were {rest[1]}"
                words[rest[1]] += len(rest) - 2
                for key in rest[2:]:
                    self._stored.pop((rest[0], BlockKey(bytes.fromhex(key))), None)
            elif word == "cleared":
                gone = [name for name in self._stored if name[0] == rest[0]]
                words["blocks cleared"] += len(gone)
                for name in gone:
                    del self._stored[name]
            elif word == "lag":
                lag_s = float(rest[0])
            elif word == "killed":
                killed_at, end_s = rest[0], now_s
        commits.take("", end_s)
        # A block may just miss one commit, wait the window and take part in the next. What was
        # there when a commit was planned, is durable with it.
        late_s = self._window_s + SLACK_S + 2 * lag_s + 2 * commits.longest_s
        self.late_s = max(self.late_s, late_s)
        self._before_s = float("inf") if orderly else max(commits.done_s, end_s - late_s)
        in_load = "loading" in words and "serving" not in words
        return Life(words, killed_at, commits.planned_s is not None, in_load)

    def compare(self, found: Mapping[Name, object]) -> None:
        """Every block that must be there is; from here on, what was found must stay."""
        required = [name for name in self._stored if self._since(name) < self._before_s]
        missing = [name for name in required if name not in found]
        ages = [self._before_s - self._stored[name] for name in missing]
        assert not missing, (
            f"{len(missing)} of {len(required)} durable blocks are lost, acknowledged"
            f" {min(ages):.3f} s and more before they had to be durable"
        )
        self.required += len(required)
        self._stored = dict.fromkeys(found, 0.0)

    def _since(self, name: Name) -> float:
        """When the last block of the path to this one was acknowledged."""
        space, key = name
        since_s = 0.0
        above: BlockKey | None = key
        while above is not None:
            stored_s = self._stored.get((space, above), float("inf"))
            if stored_s == 0.0:
                break  # found on disk, with all above it
            since_s = max(since_s, stored_s)
            above = self._truth[above].above
        return since_s


class Place(NamedTuple):
    """Where a block lies."""

    extent: int
    position: int


def read_index(path: Path) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """Return the rows of each table."""
    with lmdb.open(str(path), readonly=True, max_dbs=64, lock=False) as env:
        with env.begin() as txn:
            names = [bytes(name) for name, _ in txn.cursor()]
        tables = {name: env.open_db(name, create=False) for name in names}
        with env.begin() as txn:
            return {
                name: [(bytes(key), bytes(value)) for key, value in txn.cursor(table)]
                for name, table in tables.items()
            }


def read_directory(folder: Path, truth: Mapping[BlockKey, Truth]) -> dict[Name, Place]:
    """Return the blocks on disk. Every one is one of ours, right, and has its path on disk."""
    if not (folder / FOLDER / "data.mdb").exists():
        return {}
    tables = read_index(folder / FOLDER)
    owners: dict[int, str] = {}  # of extents
    sizes: dict[int, int] = {}  # of their slots
    for row, value in tables[EXTENTS]:
        (number,), (sizes[number],) = NUMBER.unpack(row), NUMBER.unpack_from(value)
        owners[number] = value[NUMBER.size :].decode()
    places: dict[tuple[str, int], tuple[BlockKey, int]] = {}  # -> key, generation
    above_of: dict[Name, int] = {}
    found: dict[Name, Place] = {}
    of_blocks = [name for name in tables if name.startswith(BLOCKS)]
    for table, (row, value) in ((name, each) for name in of_blocks for each in tables[name]):
        digest, key = table.removeprefix(BLOCKS).decode(), BlockKey(row)
        place, above, generation, _, payload = VALUE.unpack(value)
        assert key in truth, f"a block that nobody has stored: {key.hex()}"
        assert payload == sizes[place >> 32]
        assert owners[place >> 32] == digest, "a block in another namespace's extent"
        assert (digest, place) not in places, "two blocks in one place"
        places[digest, place] = key, generation
        above_of[digest, key] = above
        found[digest, key] = Place(place >> 32, place & 0xFFFFFFFF)
    for (digest, key), above in above_of.items():
        expected = truth[key].above
        if expected is None:
            assert above == NOWHERE
        else:
            parent = places.get((digest, above))
            assert parent is not None, "unreachable: its parent is not on disk"
            assert parent[0] == expected, "it hangs below another block than its parent"
    check_bytes(folder, sizes, found, truth)
    return found


def check_bytes(
    folder: Path,
    sizes: Mapping[int, int],
    found: Mapping[Name, Place],
    truth: Mapping[BlockKey, Truth],
) -> None:
    """Read every block, and compare it with what its tokens make. sizes: of slots, by extent."""
    inside: dict[int, list[tuple[int, BlockKey]]] = {}
    for (_, key), place in found.items():
        inside.setdefault(place.extent, []).append((place.position, key))
    if not inside:
        return
    buffer = memoryview(mmap.mmap(-1, RUN_BLOCKS * max(map(stride_of, sizes.values()))))
    for number, blocks in inside.items():
        path = folder / f"{number:06d}.extent"
        file = ExtentFile(path, sizes[number], path.stat().st_size)
        keys = dict(blocks)
        for first in range(0, file.count, RUN_BLOCKS):
            here = [at for at in range(first, min(file.count, first + RUN_BLOCKS)) if at in keys]
            if not here:
                continue
            file.read(here[0], [buffer[: (here[-1] - here[0] + 1) * file.stride]])
            for at in here:
                true = truth[keys[at]]
                start = (at - here[0]) * file.stride
                digest = xxhash.xxh3_128_digest(buffer[start : start + true.size])
                assert digest == true.digest, f"wrong bytes on disk: {path.name}, slot {at}"
        file.close()
