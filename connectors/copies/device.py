"""Copies for the device that an engine's KV tensors are on: one interface, two devices.

    step thread    mark() ---- what the engine has been asked to compute up to here
    copy thread    copier.copy(moves, after=mark) -> Copying ---- over()?
    copy thread    passed(mark)? ... for what the device does not move itself
    step thread    fence(copies) ---- what the engine computes from here on waits for them
    link thread    pin(extent) ... unpin(extent) ---- slot memory comes and goes

In host memory (host.py) a copy is made by the call that asks for it, so there is nothing to wait
for. On a GPU (gpu/) everything is queued, and the device itself keeps the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from connectors.copies.host import HostDevice, LayerCache, MappedExtent, SlotMap
from kvstore.core.errors import NotSupported
from kvstore.core.layout import Move, RankLayout


class Copying(Protocol):
    """A copy that was asked for. bytes: how many it moves."""

    @property
    def bytes(self) -> int:
        """Count what it moves."""
        ...

    def over(self) -> bool:
        """Return True if it has ended; called from the copy thread. Raises TierError if it failed.

        Once it has raised, nothing of it is under way any more.
        """
        ...


class Copier(Protocol):
    """Moves pages between KV tensors and slots; called from the copy thread."""

    def copy(
        self, moves: Iterable[Move], slots: SlotMap, *, store: bool, after: int = 0
    ) -> Copying:
        """Begin copying engine -> slots (store) or slots -> engine, once mark `after` is passed.

        Raises TierError, and copies nothing, for a slot that is not mapped or a block that the
        engine does not have.
        """
        ...


class Device(Protocol):
    """The memory that an engine's KV tensors are in."""

    def copier(self, layout: RankLayout) -> Copier:
        """Plan copies after a store's layout. Raises TierError for a layer that is not there."""
        ...

    def mark(self) -> int:
        """Name this point in what the engine computes; called from its step thread."""
        ...

    def passed(self, mark: int) -> bool:
        """Return True if the engine has computed up to a mark; called from the copy thread.

        Raises TierError if it never will.
        """
        ...

    def fence(self, copies: Iterable[Any]) -> None:
        """Let what the engine computes from here on wait for copies; from its step thread."""
        ...

    def pin(self, extent: MappedExtent, stopped: Callable[[], bool]) -> None:
        """Make slot memory usable for copies; gives up when stopped(). Raises TierError."""
        ...

    def unpin(self, extent: MappedExtent) -> None:
        """Release slot memory that no copy uses, whether it was pinned or not."""
        ...

    def close(self) -> None:
        """Release everything; no copy is under way."""
        ...


def device_of(caches: dict[str, LayerCache]) -> Device:
    """Return the device that KV tensors are on; a rank may have none.

    Raises NotSupported for one that is not served, for tensors on several, and where a package
    is missing that the device needs.
    """
    names = sorted({str(cache.storage.device) for cache in caches.values()}) or ["cpu"]
    if len(names) != 1:
        raise NotSupported(f"KV tensors are on {names}, expected one device")
    kind = names[0].partition(":")[0]
    if kind == "cpu":
        return HostDevice(caches)
    if kind == "cuda":
        from connectors.copies.gpu.device import CudaDevice  # noqa: PLC0415 - it loads cupy

        return CudaDevice(caches)
    raise NotSupported(f"KV tensors are on {names[0]}, served are ['cpu', 'cuda']")
