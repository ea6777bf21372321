"""Which blocks a full tier is given only once memory is about to lose them.

While a tier has room it is given each block as soon as that can be read. A full one evicts a block
for each that it is given; so a block that memory has, too, takes the place of one that only the
tier has. Blocks are held back then, those that were used last for longest, and as many as memory
has shown to keep: each that is written in time adds a little to that number, and each that has left
memory unwritten takes more away (so that few are lost whatever policy, quotas and pins do).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvstore.core.types import BlockKey

_IN_TIME = 1 / 16
_TOO_LATE = 4


class LateWrites:
    """Blocks in memory that a tier is to be given later."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, bool] = {}  # whether it was used again; the coldest first
        self._most = 0.0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, keys: Iterable[BlockKey], *, again: bool = False) -> None:
        """Hold blocks that were stored, or used again."""
        for key in keys:
            self._blocks.pop(key, None)
            self._blocks[key] = again

    def ripe(self, limit: int) -> list[tuple[BlockKey, bool]]:
        """Take what is not to be held any longer, and whether it was used again.

        limit: most blocks to hold; 0 for a tier that has room.
        """
        self._most = min(self._most, limit)
        found = list(islice(self._blocks.items(), max(0, len(self._blocks) - int(self._most))))
        for key, _ in found:
            del self._blocks[key]
        return found

    def written(self, count: int) -> None:
        """So many were in memory when they were to be written."""
        self._most += count * _IN_TIME

    def lost(self, count: int) -> None:
        """So many were not."""
        self._most = max(0.0, self._most - count * _TOO_LATE)

    def clear(self) -> None:
        """Hold none."""
        self._blocks.clear()
