"""The NVMe tier: blocks in preallocated extent files, found through an index in LMDB."""

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
