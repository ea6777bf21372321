"""Reads a peer's slots straight into an engine's tensors in host memory, by an agent of its own.

Only for engines that asked for it: whoever reaches an agent can read and write all memory of its
process. A read is over, or the agent is: once that is made anew, nothing of before is written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvstore.errors import NotSupported, TierError, TierIOError
from kvstore.layout import Move, RankLayout
from tiers.copier import LayerCache, cache_of
from tiers.exporter.child import ucx_settings
from tiers.exporter.errors import MoveError

if TYPE_CHECKING:
    from tiers.exporter.agent import Agent, Flight, Places

READ_BYTES = 16 << 20  # of one read; in shared memory it is made by the call that starts it


class Reading(msgspec.Struct, eq=False):
    """One that was started; bytes: how many it reads. agent: the number of who reads it."""

    bytes: int
    agent: int
    flight: Flight | None  # None: it is over


class EngineReader:
    """One worker's; called from one thread at a time."""

    def __init__(self, caches: dict[str, LayerCache]) -> None:
        """caches: by layer name. Raises NotSupported where they cannot be read into."""
        kinds = {str(cache.storage.device) for cache in caches.values()}
        if kinds != {"cpu"}:
            raise NotSupported(f"direct = true: KV tensors are on {sorted(kinds)}, expected 'cpu'")
        try:  # not every engine has it
            self._make: Callable[[str], Agent] = import_module("tiers.exporter.agent").Agent
        except ImportError as exc:
            raise NotSupported(f"direct = true needs the package nixl: {exc}") from exc
        self._caches = caches
        self._layout: RankLayout | None = None
        self._agent: Agent | None = None
        self._agents = 0  # that there have been
        self._peers: dict[str, bytes] = {}  # and how to reach them
        self._met: set[str] = set()  # those that the agent knows

    def open(self, layout: RankLayout, devices: str) -> None:
        """Read by a store's layout, over these network devices. Raises TierError."""
        for group in layout.groups:
            for run in group.runs:
                cache_of(run, self._caches)
        for name, value in ucx_settings(devices).items():
            os.putenv(name, value)  # UCX reads them when the first agent is made
        self._layout = layout
        self._peers.clear()
        self._met.clear()
        if self._agent is None:
            self.restart()

    def restart(self) -> None:
        """Forget all reads, and have them end. Raises TierError."""
        self._agent, self._agents = None, self._agents + 1  # the only reference: that ends it
        self._met.clear()
        try:
            self._agent = self._make(f"kvstore-engine-{secrets.token_hex(8)}")
            for address, size in self._memory():
                self._agent.register(address, size)
        except MoveError as exc:
            raise TierIOError(f"direct = true: {exc}") from exc

    def _memory(self) -> Iterable[tuple[int, int]]:
        storages = (cache.storage for cache in self._caches.values())
        return {(storage.data_ptr(), storage.nbytes) for storage in storages}

    def meet(self, peer: str, metadata: bytes) -> None:
        """Know how to reach a peer's exporter, or how to reach it now."""
        self._peers[peer] = metadata
        self._met.discard(peer)

    def read(self, peer: str, moves: Sequence[tuple[Move, int]]) -> Reading:
        """Start reading slots, from these addresses on, into engine blocks. Raises TierError."""
        if self._agent is None:
            raise TierIOError("no agent")
        local, remote = self._places(moves)
        try:
            if peer not in self._met:  # one that cannot be reached is nobody else's trouble
                if self._agent.add_peer(self._peers.get(peer, b"")) != peer:
                    raise TierIOError(f"metadata of another exporter than {peer!r}")
                self._met.add(peer)
            flight, over = self._agent.read(peer, local, remote)
            if over:
                self._agent.let_go(flight)
        except MoveError as exc:
            raise TierIOError(str(exc)) from exc
        return Reading(int(local[:, 1].sum()), self._agents, None if over else flight)

    def over(self, reading: Reading) -> bool:
        """Tell whether a read has ended. Raises TierError if it failed; it has ended then, too."""
        flight = reading.flight
        if flight is None:
            return True
        if self._agent is None or reading.agent != self._agents:
            raise TierIOError("its agent has ended")
        try:
            if not self._agent.over(flight):
                return False
        except MoveError as exc:
            reading.flight = None
            self._agent.let_go(flight)
            raise TierIOError(str(exc)) from exc
        reading.flight = None
        self._agent.let_go(flight)
        return True

    def _places(self, moves: Sequence[tuple[Move, int]]) -> tuple[Places, Places]:
        """Return where pages' pieces are in the engine, and in the peer's slots."""
        if self._layout is None:
            raise TierError("no layout")
        local, remote = [], []
        for group, layout in enumerate(self._layout.groups):
            own = [(move, address) for move, address in moves if move.group == group]
            if not own:
                continue
            blocks = np.array([move.block_id for move, _ in own], np.uint64)
            starts = np.array([at + move.part * layout.stride for move, at in own], np.uint64)
            for run in layout.runs:
                cache = cache_of(run, self._caches)
                size = np.uint64(cache.piece_bytes)
                pieces = np.arange(cache.pieces, dtype=np.uint64)
                first = np.uint64(cache.storage.data_ptr() + cache.offset)
                pages = first + blocks * np.uint64(cache.block_stride)
                here = pages[:, None] + pieces * np.uint64(cache.piece_stride)
                there = (starts + np.uint64(run.offset))[:, None] + pieces * size
                local.append(_rows(here, size))
                remote.append(_rows(there, size))
        return np.concatenate(local), np.concatenate(remote)


def _rows(addresses: Places, size: np.uint64) -> Places:
    rows = np.zeros((addresses.size, 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses.ravel(), size
    return rows
