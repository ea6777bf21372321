"""How often each of an engine's blocks got other content, in memory that its store can see.

The store compares numbers before and after a peer has read a block where it lies: no message could
be fast enough, since the next step overwrites it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence

import numpy as np

from kvstore.wire.framing import WORD


class Board:
    """Written by the scheduler half only."""

    def __init__(self, fd: int, blocks: int) -> None:
        """Map a store's memory of one number for each block; takes over the descriptor."""
        try:
            memory = mmap.mmap(fd, blocks * WORD)
        finally:
            os.close(fd)
        self.blocks = blocks
        self._words = np.frombuffer(memory, np.uint32)

    def generations(self, blocks: Sequence[int]) -> bytes:
        """Return these blocks' numbers, u32."""
        found: bytes = self._words[np.asarray(blocks)].tobytes()
        return found

    def add(self, blocks: Iterable[int]) -> None:
        """These get other content at once."""
        found = np.fromiter(blocks, np.int64)
        self._words[found[found < self.blocks]] += 1

    def close(self) -> None:
        """From now on nobody is told: what was shown is not to be used any more."""
        self._words += 1
