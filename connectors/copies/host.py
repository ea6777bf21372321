"""Copies between an engine's KV tensors and slots, for engines whose tensors are in host memory.

A page is copied as it lies: `layout.py` says where each layer's bytes go, the tensor's own
strides say where they come from. Layers at equal distances are copied as one strided block, and
so are engine blocks at equal distances; torch does the copy with the GIL released.

gpu/ does the same for tensors on a GPU. Device, Copier and Copying are the interface of both.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from connectors.step_meta import BLOCK, GROUP, PART, SLOT, Moves
from kvstore.core.errors import NotSupported, TierError
from kvstore.core.layout import GroupLayout, LayerRun, RankLayout
from kvstore.wire.engine import Extent


class LayerCache(msgspec.Struct, frozen=True):
    """One layer's pages: block b starts at offset + b * block_stride of storage (uint8, 1-D).

    A page is `pieces` equal runs of bytes, each piece_stride after the one before: one run for
    most engines, two where K and V are kept apart, one for each head where layers lie inside heads.
    """

    storage: torch.Tensor
    offset: int
    block_stride: int
    page_bytes: int
    pieces: int = 1
    piece_stride: int = 0

    @property
    def piece_bytes(self) -> int:
        """Bytes of one run."""
        return self.page_bytes // self.pieces


def pieces_of(
    shape: Sequence[int], strides: Sequence[int], item_bytes: int
) -> tuple[int, int, int] | None:
    """Cut a page into equal runs of bytes at equal distances: pieces, piece_stride, piece_bytes.

    strides: in bytes. None if it takes more than one distance, or bytes overlap.
    """
    run, pieces, step = item_bytes, 1, 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if pieces == 1 and stride == run:
            run *= size
        elif pieces == 1 and stride > run:
            pieces, step = size, stride
        elif stride == pieces * step:
            pieces *= size
        else:
            return None
    return pieces, step, run


class _Stack(msgspec.Struct):
    """Layers at equal distances on both sides."""

    cache: LayerCache  # of the first
    slot_offset: int
    writes: bool
    layers: int = 1
    layer_stride: int = 0
    slot_stride: int = 0

    def join(self, run: LayerRun, cache: LayerCache) -> bool:
        """Take in the next layer; False if it is of another form, or at another distance."""
        first = self.cache
        if (
            cache.storage.data_ptr() != first.storage.data_ptr()
            or (cache.block_stride, cache.pieces, cache.piece_stride, cache.page_bytes)
            != (first.block_stride, first.pieces, first.piece_stride, first.page_bytes)
            or run.writes != self.writes
        ):
            return False
        layer_stride = cache.offset - first.offset - (self.layers - 1) * self.layer_stride
        slot_stride = run.offset - self.slot_offset - (self.layers - 1) * self.slot_stride
        strides = self.layer_stride, self.slot_stride
        if layer_stride <= 0 or (self.layers > 1 and strides != (layer_stride, slot_stride)):
            return False
        self.layer_stride, self.slot_stride = layer_stride, slot_stride
        self.layers += 1
        return True


class MappedExtent:
    """A store's extent in this process."""

    def __init__(self, fd: int, extent: Extent) -> None:
        """Map the descriptor and close it."""
        self.first, self.count, self.slot_bytes = extent.first, extent.count, extent.slot_bytes
        try:
            self._map = mmap.mmap(fd, extent.bytes)
        finally:
            os.close(fd)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address, self.bytes = self.data.data_ptr(), extent.bytes
        self.data[:: mmap.PAGESIZE].sum()  # fault the pages in now, not in the first copy
        at = extent.generations_offset
        self.generations = np.frombuffer(self._map, np.uint32, extent.count, at)


class SlotMap:
    """Finds slots in the extents that are mapped."""

    def __init__(self) -> None:
        self._extents: dict[int, MappedExtent] = {}
        self._by_first: dict[int, MappedExtent] = {}
        self._per_extent = 1

    def add(self, number: int, extent: MappedExtent) -> None:
        """Make an extent's slots known; all extents of a store's namespace are equal."""
        self._extents[number] = extent
        self._per_extent = extent.count
        self._by_first[extent.first // extent.count] = extent

    def remove(self, number: int) -> MappedExtent | None:
        """Forget an extent and return it; it is unmapped with the last copy that uses it."""
        extent = self._extents.pop(number, None)
        if extent is not None:
            del self._by_first[extent.first // extent.count]
        return extent

    def clear(self) -> list[MappedExtent]:
        """Forget everything; return what was there."""
        extents = list(self._extents.values())
        self._extents.clear()
        self._by_first.clear()
        return extents

    def generations(self, slots: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return slots' generations as they are now. Raises TierError for one not mapped here."""
        found = np.empty(len(slots), np.uint32)
        for extent, here, positions in self.places(slots):
            found[here] = extent.generations[positions]
        return found

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return where slots begin in this process. Raises TierError for one not mapped here."""
        found = np.empty(len(slots), np.uint64)
        for extent, here, positions in self.places(slots):
            found[here] = extent.address + positions * extent.slot_bytes
        return found

    def places(
        self, slots: NDArray[np.int64]
    ) -> Iterable[tuple[MappedExtent, NDArray[np.bool_], NDArray[np.int64]]]:
        """Yield each extent that has some of the slots: which ones, and their positions in it.

        Raises TierError for a slot that is not mapped here.
        """
        numbers, positions = np.divmod(slots, self._per_extent)
        for number in np.unique(numbers):
            extent = self._by_first.get(int(number))
            if extent is None:
                raise TierError(f"slot {number * self._per_extent} is not mapped here")
            here = numbers == number
            yield extent, here, positions[here]


class Copying(msgspec.Struct):
    """A copy that was asked for. bytes: how many it moves. In host memory it has ended by then."""

    bytes: int

    def over(self) -> bool:
        """Return True if it has ended; called from the copy thread. Raises TierError if it failed.

        Once it has raised, nothing of it is under way any more.
        """
        return True


class Copier(Protocol):
    """Moves pages between KV tensors and slots; called from the copy thread."""

    def copy(self, moves: Moves, slots: SlotMap, *, store: bool, after: int = 0) -> Copying:
        """Begin copying engine -> slots (store) or slots -> engine, once mark `after` is passed.

        Raises TierError, and copies nothing, for a slot that is not mapped or a block that the
        engine does not have.
        """


class Device:
    """The memory that an engine's KV tensors are in.

    step thread    mark() ---- what the engine has been asked to compute up to here
    copy thread    copier.copy(moves, after=mark) -> Copying ---- over()?
    copy thread    passed(mark)? ... for what the device does not move itself
    step thread    fence(copies) ---- what the engine computes from here on waits for them
    link, copy     enter_thread() ---- first of all
    link thread    pin(extent) ... unpin(extent) ---- slot memory comes and goes

    What a device does not define itself is for host memory: the engine has computed a step, and a
    copy has ended, when the call returns.
    """

    def __init__(self, caches: dict[str, LayerCache]) -> None:
        self._caches = caches

    def enter_thread(self) -> None:
        """Make the calling thread ready, which is never the engine's; safe to call twice."""

    def copier(self, layout: RankLayout) -> Copier:
        """Plan copies after a store's layout. Raises TierError for a layer that is not there."""
        return HostCopier(self._caches, layout)

    def mark(self) -> int:
        """Name this point in what the engine computes; called from its step thread."""
        return 0

    def passed(self, _mark: int) -> bool:
        """Return True if the engine has computed up to a mark; called from the copy thread.

        Raises TierError if it never will.
        """
        return True

    def fence(self, copies: Iterable[Any]) -> None:
        """Let what the engine computes from here on wait for copies; from its step thread."""

    def pin(self, extent: MappedExtent, stopped: Callable[[], bool]) -> None:
        """Make slot memory usable for copies; gives up when stopped(). Raises TierError."""

    def unpin(self, extent: MappedExtent) -> None:
        """Release slot memory that no copy uses, whether it was pinned or not."""

    def close(self) -> None:
        """Release everything; no copy is under way."""


class HostCopier:
    """Moves pages between host KV tensors and slots."""

    def __init__(self, caches: dict[str, LayerCache], layout: RankLayout) -> None:
        """Find the layers at equal distances. Raises TierError for a layer that is not there."""
        self._layout = layout
        self._stacks = [_stacks(group, caches) for group in layout.groups]

    def copy(
        self,
        moves: Moves,
        slots: SlotMap,
        *,
        store: bool,
        after: int = 0,  # noqa: ARG002 - nothing is under way
    ) -> Copying:
        """Copy engine -> slots (store) or slots -> engine."""
        copied = 0
        for run in _runs(moves, slots, self._layout.groups):
            for stack in self._stacks[run.group]:
                if store and not stack.writes:
                    continue
                engine, slot = _views(stack, run)
                if store:
                    slot.copy_(engine)
                else:
                    engine.copy_(slot)
                copied += engine.numel()
        return Copying(copied)


class _Run(msgspec.Struct, frozen=True):
    """Engine blocks at equal distances, whose places are at equal distances in one extent."""

    group: int
    extent: MappedExtent
    block_first: int
    offset_first: int
    block_step: int
    offset_step: int
    count: int


def _runs(moves: Moves, slots: SlotMap, groups: Sequence[GroupLayout]) -> Iterator[_Run]:
    """Join moves whose blocks and places are at equal, growing distances.

    Raises TierError, before the first run, for a slot that is not mapped.
    """
    count, group, block = len(moves), moves[:, GROUP], moves[:, BLOCK]
    offset, number = np.empty(count, np.int64), np.empty(count, np.int64)
    extents: list[MappedExtent] = []
    for extent, here, positions in slots.places(moves[:, SLOT]):
        offset[here], number[here] = positions * extent.slot_bytes, len(extents)
        extents.append(extent)
    offset += moves[:, PART] * np.array([layout.stride for layout in groups], np.int64)[group]
    # Steps from each move to the next, and whether both may be in one run.
    blocks, offsets = np.diff(block), np.diff(offset)
    joins = (np.diff(group) == 0) & (np.diff(number) == 0) & (blocks > 0) & (offsets > 0)
    # Where a run that has taken a step does not take the next one.
    goes_on = joins[:-1] & joins[1:] & (np.diff(blocks) == 0) & (np.diff(offsets) == 0)
    breaks = [*np.flatnonzero(~goes_on).tolist(), count]
    first = position = 0
    while first < count:
        while breaks[position] < first:
            position += 1
        end = min(breaks[position] + 2, count)
        if first + 1 == count or not joins[first]:
            end = first + 1
        yield _Run(
            group=int(group[first]),
            extent=extents[number[first]],
            block_first=int(block[first]),
            offset_first=int(offset[first]),
            block_step=int(blocks[first]) if end > first + 1 else 1,
            offset_step=int(offsets[first]) if end > first + 1 else 1,
            count=end - first,
        )
        first = end


def _views(stack: _Stack, run: _Run) -> tuple[torch.Tensor, torch.Tensor]:
    cache = stack.cache
    shape = (run.count, stack.layers, cache.pieces, cache.piece_bytes)
    engine = cache.storage.as_strided(
        shape,
        (run.block_step * cache.block_stride, stack.layer_stride, cache.piece_stride, 1),
        cache.offset + run.block_first * cache.block_stride,
    )
    slot = run.extent.data.as_strided(
        shape,
        (run.offset_step, stack.slot_stride, cache.piece_bytes, 1),
        run.offset_first + stack.slot_offset,
    )
    return engine, slot


def cache_of(run: LayerRun, caches: dict[str, LayerCache]) -> LayerCache:
    """Return the pages of a layer. Raises TierError if they are not what the layout says."""
    cache = caches.get(run.name)
    if cache is None:
        raise TierError(f"layer {run.name} of the layout is not among {sorted(caches)}")
    if cache.page_bytes != run.length:
        raise TierError(
            f"layer {run.name} has pages of {cache.page_bytes} bytes, the layout says {run.length}"
        )
    return cache


def _stacks(group: GroupLayout, caches: dict[str, LayerCache]) -> list[_Stack]:
    stacks: list[_Stack] = []
    for run in group.runs:
        cache = cache_of(run, caches)
        if not stacks or not stacks[-1].join(run, cache):
            stacks.append(_Stack(cache, run.offset, run.writes))
    return stacks


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
        return Device(caches)
    if kind == "cuda":
        from connectors.copies.gpu.device import CudaDevice  # noqa: PLC0415 - it loads cupy

        return CudaDevice(caches)
    raise NotSupported(f"KV tensors are on {names[0]}, served are ['cpu', 'cuda']")
