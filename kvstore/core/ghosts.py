"""Which blocks have left, and when: a table of fixed size, without the blocks' names.

An entry takes 8 bytes: 32 bits of its key's hash, and a time in seconds. A row has the last ROW
keys whose hashes end alike, the newest first. So both calls cost the same however full it is, and
nothing ever grows. What was added first makes room, roughly: of the last keys, half as many as
there are entries, 9 of 10 are found. One key in 10^9 is taken for another.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from kvstore.core.types import BlockKey

ROW = 2
ENTRY_BYTES = 8
_LOW = 0xFFFFFFFF


class Ghosts:
    """Keys with the time at which each was last added."""

    def __init__(self, memory: memoryview) -> None:
        """memory: a power of two of entries, all 0, written here only."""
        self._table = memory.cast("Q")
        self.entries = len(self._table)
        if self.entries < ROW or self.entries & self.entries - 1:
            raise ValueError(f"{self.entries} entries, expected a power of two")
        self._mask = self.entries - ROW
        self._empty = True

    def add(self, keys: Iterable[BlockKey], now_s: int) -> None:
        """Note that these have left now."""
        self._empty = False
        table, mask, time = self._table, self._mask, now_s + 1 << 32
        for key in keys:
            hashed = xxh3_64_intdigest(key)
            at = hashed & mask
            table[at + 1] = table[at]
            table[at] = time | hashed >> 32 & _LOW

    def left_s(self, key: BlockKey) -> int | None:
        """Return when a key was last added; None if that is not known, or any more."""
        if self._empty:
            return None
        hashed = xxh3_64_intdigest(key)
        at, tag = hashed & self._mask, hashed >> 32 & _LOW
        for entry in (self._table[at], self._table[at + 1]):
            if entry and entry & _LOW == tag:
                return (entry >> 32) - 1
        return None
