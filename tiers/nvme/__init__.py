"""The NVMe tier: blocks in preallocated extent files, found through an index in LMDB.

disk.py              one directory: brings its parts together; shared by all namespaces
tier.py              one namespace's blocks: the Tier protocol
namespace.py         one namespace's records and slots, and what is durable of them
index.py             which blocks there are, as a tree, and which of them goes next
block_io.py          the threads: they move blocks, do what has to sync, look at the directory
files.py             extent files: direct I/O between slots and disk
directory.py         the directory: its lock, its identity, its files through a descriptor
startup.py           what a start finds there, its records in slices; the same after a failure
health.py            the state of the disk, from what its calls come back with
extent_allocator.py  which namespace gets which extent within the cap
commits.py           what becomes durable when
index_client.py      what is durable: the index, committed after the data, in a process of its own
index_server.py      that process, and the LMDB file
index_load.py        checks and sorts the records that a start finds
messages.py          what is said to it
fsck.py              `kvstore fsck`; fsck_report.py: what it reports
drive_check.py       `kvstore check --disk`
refusals.py          what keeps a store from using a directory, for `kvstore check`
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
