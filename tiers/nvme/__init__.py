"""The NVMe tier: blocks in preallocated extent files, found through an index in LMDB.

disk.py     one directory: brings its parts together; shared by all namespaces
volume.py   the directory: its lock, its identity, its files through a descriptor
health.py   the state of the disk, from what its calls come back with
watch.py    looks at the directory now and then
room.py     who gets which extent within the cap
commits.py  what becomes durable when
recovery.py letting go of a directory, and coming back
chores.py   the thread for what has to sync
shared.py   what these have in common
mover.py    moves blocks between memory and extents
opening.py  what a start finds there, and its records in slices
tier.py     one namespace's blocks: the Tier protocol
index.py    which blocks there are, as a tree, and which of them goes next
files.py    extent files: direct I/O between slots and disk
journal.py  what is durable: the LMDB index, committed after the data
loader.py   reads that index at start, in a process of its own
"""

from tiers.nvme.disk import NvmeDisk

__all__ = ["NvmeDisk"]
