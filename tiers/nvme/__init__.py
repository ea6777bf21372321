"""The NVMe tier: blocks in preallocated extent files, found through an index in LMDB.

disk.py       one directory: its lock, extents, threads and cap; shared by all namespaces
opening.py    what a start finds there, and its records in slices
tier.py       one namespace's blocks: the Tier protocol
space.py      one namespace's records and slots
index.py      which blocks there are, as a tree, and which of them goes next
files.py      extent files: direct I/O between slots and disk
journal.py    what is durable: the LMDB index, committed after the data, in a process of its own
messages.py   what is said to that process
indexer.py    that process
indexfile.py  the LMDB file, as that process uses it
sorting.py    checks and sorts the records that a start finds
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiers.nvme.disk import NvmeDisk

__all__ = ["NvmeDisk"]


def __getattr__(name: str) -> object:
    """Load the tier when it is asked for: the index's process needs a few files only."""
    if name != "NvmeDisk":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tiers.nvme.disk import NvmeDisk  # noqa: PLC0415

    return NvmeDisk
