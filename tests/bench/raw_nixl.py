"""NIXL between two processes, without a store: what a hand-over is measured against.

Each of the two has memory of the kind that stores have, and does what the parent says: a transfer
of blocks at positions in no order, and sums of all its blocks at the same time where these are
wanted.
"""

from __future__ import annotations

import secrets
import threading
import time

import numpy as np
import xxhash

from tests.harness.child import Child
from tiers.cpu import CpuExtent
from tiers.nixl.agent import Agent, Indices
from tiers.nixl.ucx import MUTEX, ucx_settings

SUM_BYTES = 1 << 20  # of one call, so that neither thread waits long for the other
NAP_S = 0.0001


class _Half:
    """This process: an agent, its memory, and the other one."""

    def __init__(self, block_bytes: int, blocks: int) -> None:
        size = blocks * (block_bytes + 64)  # with room for what an extent adds
        self._block_bytes, self._blocks = block_bytes, blocks
        self._memory = CpuExtent(size, block_bytes)
        whole = np.frombuffer(self._memory.slot(0), np.uint8)
        self._address = int(whole.ctypes.data)
        self._agent = Agent(f"kvstore-bench-{secrets.token_hex(8)}")
        self._agent.register(self._address, blocks * block_bytes)
        self._local = self._agent.blocks(None, self._address, block_bytes, blocks)

    def describe(self) -> tuple[bytes, int]:
        """Return what the other process has to know."""
        return self._agent.metadata(), self._address

    def meet(self, metadata: bytes, address: int) -> None:
        """Take in the other process's description."""
        peer = self._agent.add_peer(metadata)
        self._remote = self._agent.blocks(peer, address, self._block_bytes, self._blocks)

    def move(self, seed: int, *, write: bool, summed: bool) -> None:
        """Move all blocks, between positions shuffled by a seed; summed: take sums meanwhile."""
        adding = threading.Thread(target=self.sum) if summed else None
        if adding is not None:
            adding.start()
        self._move(seed, write=write)
        if adding is not None:
            adding.join()

    def _move(self, seed: int, *, write: bool) -> None:
        rng = np.random.default_rng(seed)
        local, remote = (self._shuffled(rng) for _ in range(2))
        flight, over = self._agent.start(self._local, local, self._remote, remote, write=write)
        while not over:
            time.sleep(NAP_S)
            over = self._agent.over(flight)
        self._agent.let_go(flight)

    def _shuffled(self, rng: np.random.Generator) -> Indices:
        return rng.permutation(self._blocks).astype(np.int32)

    def sum(self) -> None:
        """Take the sums of all blocks."""
        for position in range(self._blocks):
            state, block = xxhash.xxh3_64(), self._memory.slot(position)
            for at in range(0, len(block), SUM_BYTES):
                state.update(block[at : at + SUM_BYTES])


def half(block_bytes: int, blocks: int, transports: str | None, *, mutex: bool = False) -> Child:
    """Start one such process. transports: UCX_TLS; None: UCX chooses.

    mutex: its threads sleep for UCX's lock.
    """
    settings = ucx_settings("lo", transports) | {MUTEX: "y" if mutex else "n"}
    return Child(_Half, block_bytes, blocks, environment=settings)
