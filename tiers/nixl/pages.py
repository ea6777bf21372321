"""Where the bytes of blocks lie on both sides: in slots, and in an engine's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.layout import PageRun

if TYPE_CHECKING:
    from tiers.nixl.agent import Places


def rows(addresses: Places, size: int) -> Places:
    """Return these places, of `size` bytes each."""
    found = np.zeros((addresses.size, 3), np.uint64)
    found[:, 0], found[:, 1] = addresses.ravel(), size
    return found


def in_slots(page: PageRun, parts: Places) -> Places:
    """Return the places of a run in slots whose parts begin at these addresses, piece by piece."""
    pieces = np.arange(page.pieces, dtype=np.uint64) * np.uint64(page.piece_bytes)
    return rows((parts + np.uint64(page.offset))[:, None] + pieces, page.piece_bytes)


def in_pages(page: PageRun, blocks: Places) -> Places:
    """Return the places of a run in these engine blocks, piece by piece."""
    pieces = np.arange(page.pieces, dtype=np.uint64) * np.uint64(page.piece_stride)
    starts = blocks * np.uint64(page.block_stride) + np.uint64(page.base)
    return rows(starts[:, None] + pieces, page.piece_bytes)
