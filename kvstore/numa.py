"""Which NUMA node memory is on, and which one it is to be on.

On a machine with several nodes, a GPU reads the memory of its own faster than another's, through
the link between the processors. By default the kernel takes the node of the thread that touches
memory first, which is anybody's for a store.

The calls go to the kernel by number: the C library has no functions for them, and libnuma, which
has, is on few machines.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections import Counter
from pathlib import Path

from kvstore.core.errors import ConfigError

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci")
NODE_MAX = 1023
SAMPLES = 16  # pages of a range that are looked at
_CALLS = {  # mbind, move_pages
    "x86_64": (237, 279),
    "aarch64": (235, 239),
}
_REASONS = {
    errno.EPERM: "Sandboxes do, and containers without the capability SYS_NICE: give it that, or"
    " leave the setting out",
    errno.EINVAL: "The cpuset of the store's container or service excludes the node",
}
_PREFERRED = 1  # MPOL_PREFERRED: elsewhere once the node is full, where MPOL_BIND would kill
_WORD_BITS = 64
_kernel = ctypes.CDLL(None, use_errno=True).syscall


def nodes() -> list[int]:
    """Return the nodes that have memory; none where the kernel does not know of nodes."""
    try:
        return _numbers((NODES / "has_memory").read_text(encoding="ascii"))
    except OSError:
        return []


def node_of_gpu(bus_id: str) -> int | None:
    """Return the node that a PCI device is at, None if the machine does not say."""
    try:
        found = int((PCI / "devices" / bus_id.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if found < 0 else found


def nodes_of_gpus() -> list[int]:
    """Return the nodes that NVIDIA's GPUs are at, as far as the machine says."""
    found = {node_of_gpu(path.parent.name) for path in PCI.glob("drivers/nvidia/*/numa_node")}
    return sorted(node for node in found if node is not None)


def check(node: int) -> None:
    """See whether memory can be placed on a node. Raises ConfigError, saying why not."""
    there = nodes()
    if node not in there:
        shown = " or ".join(map(str, there)) or "none, the kernel knows of no nodes"
        raise ConfigError(f"[cpu] numa: expected a node with memory ({shown}), found {node}")
    trial = os.memfd_create("kvstore-numa", os.MFD_CLOEXEC)
    try:
        os.ftruncate(trial, mmap.PAGESIZE)
        prefer(trial, mmap.PAGESIZE, node)
    except OSError as exc:
        raise ConfigError(
            f"[cpu] numa: expected to place memory on node {node}, found that the system refuses"
            f" it ({exc.strerror}). {_REASONS.get(exc.errno or 0, 'Leave the setting out')}"
        ) from exc
    finally:
        os.close(trial)


def prefer(descriptor: int, size: int, node: int) -> None:
    """Let pages of a memfd be taken from a node while it has room; before they are first touched.

    The preference is the file's, in whichever process a page is touched. Raises OSError.
    """
    mask = (ctypes.c_ulong * (NODE_MAX // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    with mmap.mmap(descriptor, size) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        try:
            # The kernel takes one bit less than the count that it is given.
            _call(0, ctypes.addressof(first), size, _PREFERRED, mask, NODE_MAX + 2, 0)
        finally:
            del first  # the mapping cannot be closed before


def nodes_of(address: int, size: int) -> Counter[int]:
    """Count some pages that this process has touched, by their node. Raises OSError."""
    step = -(-size // (SAMPLES * mmap.PAGESIZE)) * mmap.PAGESIZE
    pages = range(address, address + size, step)
    found = (ctypes.c_int * len(pages))()
    # Given no nodes to move to, it moves nothing and tells where they are.
    _call(1, 0, len(pages), (ctypes.c_void_p * len(pages))(*pages), None, found, 0)
    return Counter(node for node in found if node >= 0)


def _call(which: int, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if _kernel(ctypes.c_long(numbers[which]), *wide) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _numbers(text: str) -> list[int]:
    """Read what the kernel writes, as 0-1,4."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
