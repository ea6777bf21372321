"""A version counter for each of an engine's blocks, in memory that its store can see.

The store compares versions before and after a peer has read a block in the engine's memory. A
message would come too late, since the next step overwrites the block.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence

import numpy as np

from kvstore.wire.framing import WORD


class BlockVersions:
    """Written by the scheduler half only."""

    def __init__(self, fd: int, blocks: int) -> None:
        """Map the store's memory, one u32 for each block; takes over the descriptor."""
        try:
            memory = mmap.mmap(fd, blocks * WORD)
        finally:
            os.close(fd)
        self.blocks = blocks
        self._versions = np.frombuffer(memory, np.uint32)

    def packed(self, blocks: Sequence[int]) -> bytes:
        """Return the versions of these blocks, u32."""
        found: bytes = self._versions[np.asarray(blocks)].tobytes()
        return found

    def advance(self, blocks: Iterable[int]) -> None:
        """Blocks get other content at once: what peers were offered of them is invalid."""
        found = np.fromiter(blocks, np.int64)
        self._versions[found[found < self.blocks]] += 1

    def invalidate_all(self) -> None:
        """End of the session: overwritten blocks advance no version from now on."""
        self._versions += 1
