"""The NVMe tier: blocks in preallocated extent files, found through an index in LMDB.

disk.py     one directory: its lock, extents, threads and cap; shared by all namespaces
opening.py  what a start finds there, and its records in slices
tier.py     one namespace's blocks: the Tier protocol
index.py    which blocks there are, as a tree, and which of them goes next
files.py    extent files: direct I/O between slots and disk
journal.py  what is durable: the LMDB index, committed after the data
loader.py   reads that index at start, in a process of its own
"""

from tiers.nvme.disk import NvmeDisk

__all__ = ["NvmeDisk"]
