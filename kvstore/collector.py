"""The garbage collector of a process that keeps millions of blocks.

A full collection walks every block: 0.2 s with a million of them, and it comes again each time
that a quarter has been added. Blocks are freed by their reference counts (what leaves the index
hangs in no circle), so only young objects are collected.
"""

from __future__ import annotations

import gc

_NEVER = 1 << 30


def collect_young_only() -> None:
    """Leave what is here now, and what gets old from now on, out of all collections."""
    gc.collect()
    gc.freeze()
    first, second, _ = gc.get_threshold()
    gc.set_threshold(first, second, _NEVER)
