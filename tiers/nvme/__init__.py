"""The NVMe tier: blocks in preallocated extent files, found through an index in LMDB.

disk.py       one directory: brings its parts together; shared by all namespaces
volume.py     the directory: its lock, its identity, its files through a descriptor
health.py     the state of the disk, from what its calls come back with
watch.py      looks at the directory now and then
room.py       who gets which extent within the cap
commits.py    what becomes durable when
purge.py      what means nothing any more leaves the index
recovery.py   letting go of a directory, and coming back
chores.py     the thread for what has to sync
shared.py     what these have in common
mover.py      moves blocks between memory and extents
opening.py    what a start finds there, and its records in slices
tier.py       one namespace's blocks: the Tier protocol
space.py      one namespace's records and slots
index.py      which blocks there are, as a tree, and which of them goes next
files.py      extent files: direct I/O between slots and disk
journal.py    what is durable: the LMDB index, committed after the data, in a process of its own
child.py      starts that process
messages.py   what is said to it
indexer.py    what it does
indexfile.py  the LMDB file, as it uses it
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
