"""One NIXL agent with UCX. No other module calls NIXL.

NIXL's bindings are used directly. With its Python agent UCX's thread polls without a pause: an
idle exporter would take a whole core, and so would each of its peers. And its package loads torch
to learn which CUDA there is: five times the memory, and a second at each start. Every build of
NIXL moves host memory; GPU memory takes one that was built with CUDA.

All calls come from one thread. NIXL protects nothing, so requests have to be checked before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from tiers.nixl.messages import ErrorClass, MoveError

try:
    from nixl_cu13 import _bindings
except ModuleNotFoundError:
    from nixl_cu12 import _bindings

BACKEND = "UCX"
PROGRESS_US = 1000  # UCX's thread sleeps until something arrives, this long at most
ERRORS: tuple[type[Exception], ...] = tuple(
    kind for name, kind in vars(_bindings).items() if name.endswith("Error")
)
LOAD_ERRORS: tuple[type[Exception], ...] = (RuntimeError, *ERRORS)
_REFUSED: tuple[type[Exception], ...] = (
    _bindings.nixlInvalidParamError,
    _bindings.nixlMismatchError,
    _bindings.nixlNotAllowedError,
    _bindings.nixlNotFoundError,
    _bindings.nixlNotSupportedError,
)

Indices = npt.NDArray[np.int32]
Places = npt.NDArray[np.uint64]
"""Rows of address, bytes and 0."""
Blocks = NewType("Blocks", int)
"""A prepared list of equal blocks side by side, on one side of a transfer."""
Flight = NewType("Flight", int)
"""A transfer that has been started, and not been released."""
Region = Any
"""Memory that has been registered."""


def failed(what: str, exc: Exception) -> MoveError:
    """Return a NIXL error as a MoveError of its class."""
    if isinstance(exc, _bindings.nixlRemoteDisconnectError):
        return MoveError(f"{what}: the peer is gone", "gone")
    error: ErrorClass = "refused" if isinstance(exc, _REFUSED) else "failed"
    return MoveError(f"{what}: {exc}", error)


def _segment(gpu: int | None) -> Any:  # noqa: ANN401 - the bindings have no types
    return _bindings.DRAM_SEG if gpu is None else _bindings.VRAM_SEG


def _places(places: Places, gpu: int | None) -> Any:  # noqa: ANN401 - the same
    if gpu is not None:
        places = places.copy()
        places[:, 2] = gpu
    return _bindings.nixlXferDList(_segment(gpu), places)


class Agent:
    """Registers memory, knows peers, and moves blocks between own memory and theirs."""

    def __init__(self, name: str) -> None:
        """name: never used before. Raises MoveError where UCX does not load."""
        config = _bindings.nixlAgentConfig()
        config.useProgThread = True  # as a target over TCP, UCX's thread copies
        config.pthrDelay = PROGRESS_US
        config.syncMode = _bindings.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = True
        self.name = name
        try:
            self._agent = _bindings.nixlAgent(name, config)
            self._backends = [self._agent.createBackend(BACKEND, {})]
        except LOAD_ERRORS as exc:
            raise failed(f"NIXL's {BACKEND} plugin does not load", exc) from exc

    def metadata(self) -> bytes:
        """Return what peers need to reach all registered memory. Raises MoveError."""
        try:
            found: bytes = self._agent.getLocalMD()
        except LOAD_ERRORS as exc:
            raise failed("no metadata", exc) from exc
        return found

    def register(self, address: int, size: int, gpu: int | None = None) -> Region:
        """Make memory known; one region, since no block may span two. Raises MoveError.

        gpu: number of its GPU; None: host memory.
        """
        places = np.array([[address, size, gpu or 0]], dtype=np.uint64)
        region = _bindings.nixlRegDList(_segment(gpu), places)
        try:
            self._agent.registerMem(region, self._backends)
        except LOAD_ERRORS as exc:
            raise failed(f"cannot register {size} bytes", exc) from exc
        return region

    def deregister(self, region: Region) -> None:
        """Forget memory. Peers that know where it is can still reach it while it is mapped."""
        self._agent.deregisterMem(region, self._backends)

    def add_peer(self, metadata: bytes) -> str:
        """Learn of a peer, or more of one; returns its name. Raises MoveError."""
        try:
            name: bytes = self._agent.loadRemoteMD(metadata)
        except ERRORS as exc:
            raise failed("the peer's metadata cannot be used", exc) from exc
        return name.decode(errors="replace")

    def remove_peer(self, name: str) -> None:
        """Forget a peer, and close the connection to it. Raises MoveError."""
        try:
            self._agent.invalidateRemoteMD(name)
        except ERRORS as exc:
            raise failed(f"cannot forget {name}", exc) from exc

    def blocks(self, peer: str | None, address: int, block_bytes: int, count: int) -> Blocks:
        """Prepare `count` blocks from an address on; peer: whose memory, None for own memory.

        Raises MoveError.
        """
        places = np.array([[address, block_bytes, 0, block_bytes, count]], dtype=np.uint64)
        whose = _bindings.NIXL_INIT_AGENT if peer is None else peer
        try:
            found = self._agent.prepXferDlist(whose, _bindings.DRAM_SEG, places, self._backends)
        except ERRORS as exc:
            where = f"{count} blocks of {block_bytes} bytes at {address:#x}"
            raise failed(f"{where} are not registered memory of {peer or 'ours'}", exc) from exc
        return Blocks(found)

    def drop(self, blocks: Blocks) -> None:
        """Release a prepared list."""
        self._agent.releasedDlistH(blocks)

    def start(
        self,
        local: Blocks,
        local_indices: Indices,
        remote: Blocks,
        remote_indices: Indices,
        *,
        write: bool,
    ) -> tuple[Flight, bool]:
        """Start moving blocks; the second is True when it is over already, as in shared memory.

        Indices are int32, and within their lists. Raises MoveError; nothing is under way then.
        """
        sides = local, local_indices, remote, remote_indices
        return self._start(self._agent.makeXferReq, sides, write=write)

    def _start(
        self, make: Callable[..., int], sides: tuple[Any, ...], *, write: bool
    ) -> tuple[Flight, bool]:
        operation = _bindings.NIXL_WRITE if write else _bindings.NIXL_READ
        try:
            flight = make(operation, *sides, "", self._backends)
        except ERRORS as exc:
            raise failed("not started", exc) from exc
        try:
            status = self._agent.postXferReq(flight, "")
        except ERRORS as exc:
            self._agent.releaseXferReq(flight)
            raise failed("ended", exc) from exc
        return Flight(flight), status == _bindings.NIXL_SUCCESS

    def move(
        self,
        peer: str,
        local: Places,
        remote: Places,
        *,
        write: bool,
        gpu: int | None = None,
        peer_gpu: int | None = None,
    ) -> tuple[Flight, bool]:
        """Start moving between places of ours and of a peer's, one by one; else like start().

        gpu, peer_gpu: numbers of their GPUs; None: host memory.
        """
        sides = _places(local, gpu), _places(remote, peer_gpu), peer
        return self._start(self._agent.createXferReq, sides, write=write)

    def over(self, flight: Flight) -> bool:
        """Tell whether a transfer is over. Raises MoveError when it is, and failed."""
        try:
            return bool(self._agent.getXferStatus(flight) == _bindings.NIXL_SUCCESS)
        except ERRORS as exc:
            raise failed("ended", exc) from exc

    def moved_bytes(self, flight: Flight) -> int:
        """Return how many bytes NIXL has moved in a transfer that is over."""
        return int(self._agent.getXferTelemetry(flight).totalBytes)

    def let_go(self, flight: Flight) -> None:
        """Release a transfer that is over."""
        self._agent.releaseXferReq(flight)
