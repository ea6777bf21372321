"""How many files this process may have open, and how many of them extents of its tiers may be.

Each extent is one. A process that has no descriptor left takes no connection, so some are left
for these, whatever the capacities are.
"""

from __future__ import annotations

import contextlib
import resource

DISK_PART, MEMORY_PART = 2, 4  # of the limit: a half, a quarter
_ENDLESS = 1 << 62
WAY_OUT = "raise it (ulimit -n, LimitNOFILE), or use larger extents"


def files_max() -> int:
    """Let this process open as many files as the system allows it; return how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENDLESS if soft == resource.RLIM_INFINITY else soft


def extents_max(part: int) -> int:
    """Return how many extents a tier may have; part: DISK_PART or MEMORY_PART."""
    return max(1, files_max() // part)
