"""The garbage collector of a process that keeps millions of blocks.

A full collection walks every block: 0.2 s with a million of them, and it comes again each time
that a quarter has been added. Blocks are freed by their reference counts (what leaves the index
hangs in no circle), so only young objects are collected. Of these the middle generation, too, is
collected every second time, and not after ten: 7,000 blocks would take a call 1 ms.
"""

from __future__ import annotations

import gc

_NEVER = 1 << 30


def collect_young_only() -> None:
    """Leave what is here now, and what gets old from now on, out of all collections."""
    gc.collect()
    gc.freeze()
    first, _, _ = gc.get_threshold()
    gc.set_threshold(first, 0, _NEVER)
