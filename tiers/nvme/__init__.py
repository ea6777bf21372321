"""The NVMe tier: blocks in preallocated extent files, found through an index in LMDB."""
