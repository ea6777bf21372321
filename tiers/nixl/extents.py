"""Memory of the store that this process has mapped, and NIXL knows."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from tiers.cpu import touch
from tiers.nixl.agent import Agent, Blocks
from tiers.nixl.errors import MoveError


class Extent:
    """One extent: mapped and registered as one region, read-only unless writable."""

    def __init__(self, agent: Agent, fd: int, size: int, *, writable: bool) -> None:
        """Map the first `size` bytes of a descriptor, which is not kept. Raises MoveError."""
        self.bytes = size
        self.writable = writable
        self.flights = 0  # transfers under way that use it
        self.leaving = False
        self._agent = agent
        self._blocks: dict[int, Blocks] = {}
        _check(fd, size)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, access)
        except OSError as exc:
            raise MoveError(f"cannot map {size} bytes: {exc}", "failed") from exc
        touch(self._map)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        try:
            self._region = agent.register(self.address, size)
        except MoveError:
            self._map.close()
            raise

    def blocks(self, block_bytes: int) -> Blocks:
        """Return it as a list of equal blocks. Raises MoveError."""
        found = self._blocks.get(block_bytes)
        if found is None:
            found = self._agent.blocks(None, self.address, block_bytes, self.bytes // block_bytes)
            self._blocks[block_bytes] = found
        return found

    def close(self) -> None:
        """Unmap it; nothing is under way."""
        for blocks in self._blocks.values():
            self._agent.drop(blocks)
        self._agent.deregister(self._region)
        self._map.close()


def _check(fd: int, size: int) -> None:
    """Refuse what whoever else has it could make shorter: touching the rest would end us."""
    try:
        found = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise MoveError(f"expected a memfd, found none: {exc}", "refused") from exc
    if not 0 < size <= found:
        raise MoveError(f"{size} bytes to map, expected 1 to {found}, its size", "refused")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise MoveError(f"seals {seals:#x}, expected F_SEAL_SHRINK among them", "refused")
