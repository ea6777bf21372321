"""Which blocks have left, and when: a table of fixed size, without the blocks' names.

An entry takes 16 bytes: 31 bits of its key's hash, two times in ticks, whether the block was used,
and the number of blocks that had left before. A row has the last ROW keys whose hashes end alike,
the newest first. So all calls cost the same however full it is, and nothing ever grows. What was
added first makes room, roughly: of the last keys, half as many as there are entries, 9 of 10 are
found. One key in 10^9 is taken for another.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.core.types import BlockKey

ROW = 2
ENTRY_BYTES = 16
TICKS = 32
"""In a second: four years have 32 bits of them."""
_TAG = 0xFFFFFFFE
_USED = 1
_COUNT = 0xFFFFFFFF


class Left(NamedTuple):
    """When a block left, how many have left since, and whether it had been used.

    last_s: when it was used or stored last.
    """

    left_s: float
    since: int
    used: bool
    last_s: float


class Ghosts:
    """Keys with the time at which each was last added."""

    def __init__(self, memory: memoryview) -> None:
        """memory: a power of two of entries, all 0, written here only."""
        self.entries = len(memory) // ENTRY_BYTES
        end = self.entries * 8
        self._table, rest = memory[:end].cast("Q"), memory[end:].cast("I")
        self._before, self._last = rest[: self.entries], rest[self.entries :]
        self._mask = self.entries - ROW
        self._count = 0  # of all that were added

    def add(
        self,
        keys: Iterable[BlockKey],
        now_s: float,
        used: Iterable[int] = repeat(0),
        last_s: float = 0.0,
    ) -> None:
        """Note that these have left now.

        used: 1 for each that was used before, else 0. last_s: when they were used or stored last.
        """
        table, before, last, mask = self._table, self._before, self._last, self._mask
        time, at_last = _ticks(now_s) << 32, _ticks(last_s)
        for key, flag in zip(keys, used, strict=False):
            hashed = xxh3_64_intdigest(key)
            at = hashed & mask
            table[at + 1], before[at + 1], last[at + 1] = table[at], before[at], last[at]
            table[at], before[at] = time | hashed >> 32 & _TAG | flag, self._count & _COUNT
            last[at] = at_last
            self._count += 1

    def find(self, key: BlockKey) -> Left | None:
        """Return how a key was last added; None if that is not known, or any more."""
        if not self._count:
            return None
        hashed = xxh3_64_intdigest(key)
        at, tag = hashed & self._mask, hashed >> 32 & _TAG
        for place in (at, at + 1):
            entry = self._table[place]
            if entry and entry & _TAG == tag:
                since = self._count - 1 - self._before[place] & _COUNT
                left_s, last_s = _seconds(entry >> 32), _seconds(self._last[place])
                return Left(left_s, since, bool(entry & _USED), last_s)
        return None

    def left_s(self, key: BlockKey) -> float | None:
        """Return when a key was last added; None if that is not known, or any more."""
        found = self.find(key)
        return None if found is None else found.left_s


def _ticks(time_s: float) -> int:
    return min(int(time_s * TICKS) + 1, _COUNT)


def _seconds(ticks: int) -> float:
    return (ticks - 1) / TICKS
