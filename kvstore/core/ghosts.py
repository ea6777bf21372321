"""Which blocks have left, and when: a table of fixed size, without the blocks' names.

An entry takes 12 bytes: 31 bits of its key's hash, a time in ticks, whether the block was used,
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
ENTRY_BYTES = 12
_TAG = 0xFFFFFFFE
_USED = 1
_COUNT = 0xFFFFFFFF
_TICKS = 32  # in a second: four years have 32 bits of them


class Left(NamedTuple):
    """When a block left, how many have left since, and whether it had been used."""

    left_s: float
    since: int
    used: bool


class Ghosts:
    """Keys with the time at which each was last added."""

    def __init__(self, memory: memoryview) -> None:
        """memory: a power of two of entries, all 0, written here only."""
        self.entries = len(memory) // ENTRY_BYTES
        end = self.entries * (ENTRY_BYTES - 4)
        self._table, self._before = memory[:end].cast("Q"), memory[end:].cast("I")
        self._mask = self.entries - ROW
        self._count = 0  # of all that were added

    def add(self, keys: Iterable[BlockKey], now_s: float, used: Iterable[int] = repeat(0)) -> None:
        """Note that these have left now; used: 1 for each that was used before, else 0."""
        table, before, mask = self._table, self._before, self._mask
        time = min(int(now_s * _TICKS) + 1, _COUNT) << 32
        for key, flag in zip(keys, used, strict=False):
            hashed = xxh3_64_intdigest(key)
            at = hashed & mask
            table[at + 1], before[at + 1] = table[at], before[at]
            table[at], before[at] = time | hashed >> 32 & _TAG | flag, self._count & _COUNT
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
                return Left(((entry >> 32) - 1) / _TICKS, since, bool(entry & _USED))
        return None

    def left_s(self, key: BlockKey) -> float | None:
        """Return when a key was last added; None if that is not known, or any more."""
        found = self.find(key)
        return None if found is None else found.left_s
