"""The CPU tier's memory: sealed memfd extents, populated before anybody else maps them.

The store populates (so that its own cgroup is charged), seals against shrinking and growing (a
client could otherwise crash every other by truncating), and passes descriptors over its sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from kvstore import numa
from kvstore.core.errors import TierFull
from kvstore.memory_limits import MARGIN_BYTES, Left, memory_left
from kvstore.open_files import MEMORY_PART, extents_max
from kvstore.units import sized
from tiers.runner import Runner

log = logging.getLogger(__name__)

_SLICE = 32 << 20
_PAGE = mmap.PAGESIZE
GENERATION_BYTES = 4


def touch(mapped: mmap.mmap) -> None:
    """Read each page of a mapping, so that nobody has to wait for it later.

    The kernel maps 16 pages at a page that is read, 1 at one that is written: 64 KiB that arrive
    from a disk or a peer in memory not touched before took it 40 us.
    """
    np.frombuffer(mapped, np.uint8)[::_PAGE].sum()


def _refuse_beyond(left: Left, wanted: int) -> None:
    """Raise TierFull for memory that is not there: to take it is to be killed."""
    if wanted + MARGIN_BYTES > left.bytes:
        raise TierFull(
            f"an extent takes {sized(wanted)} more, and {sized(MARGIN_BYTES)} are to stay free;"
            f" {left.of} leaves {sized(left.bytes)}"
        )


class CpuExtent:
    """count slots of slot_bytes, then a u32 generation per slot, in one sealed memfd."""

    def __init__(
        self,
        extent_bytes: int,
        slot_bytes: int,
        node: int | None = None,
        look: Callable[[], Left] = memory_left,
    ) -> None:
        """Allocate and populate; takes about a second per GiB. Raises TierFull without memory.

        node: the NUMA node that it is taken from while that has room; None: the kernel decides.
        look(): memory that can be had. It is asked again and again: others take some meanwhile.
        """
        self.count = extent_bytes // (slot_bytes + GENERATION_BYTES)
        if self.count < 1:
            raise TierFull(f"a block takes {slot_bytes} bytes, an extent has {extent_bytes}")
        self.slot_bytes = slot_bytes
        self.generations_offset = self.count * slot_bytes
        used = self.generations_offset + self.count * GENERATION_BYTES
        self.bytes = -(-used // _PAGE) * _PAGE
        self.fd = os.memfd_create("kvstore-extent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.bytes)
            if node is not None:
                numa.prefer(self.fd, self.bytes, node)
            for start in range(0, self.bytes, _SLICE):
                _refuse_beyond(look(), self.bytes - start)
                os.posix_fallocate(self.fd, start, min(_SLICE, self.bytes - start))
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._map = mmap.mmap(self.fd, self.bytes)
        except TierFull:
            os.close(self.fd)
            raise
        except OSError as exc:
            os.close(self.fd)
            raise TierFull(f"no memory for an extent of {self.bytes} bytes: {exc}") from exc
        self._map.madvise(mmap.MADV_DONTFORK)
        touch(self._map)
        self._view = memoryview(self._map)
        self.generations = self._view[self.generations_offset : used].cast("I")

    def slot(self, position: int) -> memoryview:
        """Return one slot's bytes, writable."""
        start = position * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def nodes(self) -> dict[int, int]:
        """Count some of its pages by NUMA node. Raises OSError where the system does not tell."""
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        return numa.nodes_of(address, self.bytes)

    def close(self) -> None:
        """Unmap here, or once the last view is gone that somebody keeps of a slot.

        The memory goes when every process has unmapped.
        """
        self.generations.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # there is such a view: the map goes with it
            self._map.close()
        os.close(self.fd)


class CpuMemory:
    """Makes extents on a helper thread and never holds more than capacity_bytes.

    No method blocks, except close.
    """

    def __init__(self, capacity_bytes: int, extent_bytes: int, node: int | None = None) -> None:
        """extent_bytes: size of each extent; the unit of growth. node: NUMA node, see CpuExtent.

        Raises ConfigError if memory cannot be placed on the node.
        """
        if node is not None:
            numa.check(node)
        self.capacity_bytes = capacity_bytes
        self.extent_bytes = extent_bytes
        self.extents_max = extents_max(MEMORY_PART)
        self._node = node
        self.used_bytes = 0  # of all extents made or being made and not released
        self._runner: Runner[tuple[str, int], tuple[str, CpuExtent | Exception]] = Runner(
            "kvstore-extents", self._make, lambda job, exc: (job[0], exc)
        )

    @property
    def has_room(self) -> bool:
        """Tell whether the cap has room for another extent, and so has the limit of open files."""
        used = self.used_bytes + self.extent_bytes
        return used <= min(self.capacity_bytes, self.extents_max * self.extent_bytes)

    def request(self, tag: str, slot_bytes: int) -> bool:
        """Start making an extent; False if there is no room for it."""
        if not self.has_room:
            return False
        self.used_bytes += self.extent_bytes
        self._runner.submit((tag, slot_bytes))
        return True

    def _make(self, job: tuple[str, int]) -> tuple[str, CpuExtent | Exception]:
        try:
            made = CpuExtent(self.extent_bytes, job[1], self._node)
        except TierFull as exc:
            return job[0], exc
        self._say_where(made)
        return job[0], made

    def _say_where(self, extent: CpuExtent) -> None:
        """Log memory that is not on the node it was to be on."""
        if self._node is None:
            return
        with contextlib.suppress(OSError):  # the system does not tell
            if elsewhere := sorted(extent.nodes().keys() - {self._node}):
                shown = " and ".join(map(str, elsewhere))
                text = "NUMA node %d has no room: an extent is on node %s, in part or whole"
                log.warning(text, self._node, shown)

    def poll(self) -> Sequence[tuple[str, CpuExtent | Exception]]:
        """Return what the helper thread has finished."""
        results = self._runner.poll()
        for _, extent in results:
            if isinstance(extent, Exception):
                self.used_bytes -= self.extent_bytes
        return results

    def release(self, extent: CpuExtent) -> None:
        """Give an extent's memory back."""
        extent.close()
        self.used_bytes -= self.extent_bytes

    def close(self) -> None:
        """End the helper thread."""
        self._runner.close()
        for _, extent in self.poll():
            if isinstance(extent, CpuExtent):
                self.release(extent)
