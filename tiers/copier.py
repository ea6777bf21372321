"""Copies between an engine's KV tensors and slots, for engines whose tensors are in host memory.

A page is copied as it lies: `layout.py` says where each layer's bytes go, the tensor's own
strides say where they come from. Layers at equal distances are copied as one strided block, and
so are engine blocks at equal distances; torch does the copy with the GIL released.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.errors import TierError
from kvstore.layout import GroupLayout, LayerRun, Move, RankLayout


class LayerCache(msgspec.Struct, frozen=True):
    """One layer's pages: block b starts at offset + b * block_stride of storage (uint8, 1-D)."""

    storage: torch.Tensor
    offset: int
    block_stride: int
    page_bytes: int


class _Stack(msgspec.Struct, frozen=True):
    """Layers at equal distances on both sides."""

    cache: LayerCache
    layers: int
    layer_stride: int
    slot_offset: int
    slot_stride: int
    writes: bool


class MappedExtent:
    """A store's extent in this process."""

    def __init__(
        self, fd: int, first: int, count: int, slot_bytes: int, size: int, gens: int
    ) -> None:
        """Map the descriptor and close it. gens: offset of the generations."""
        self.first, self.count, self.slot_bytes = first, count, slot_bytes
        try:
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        self.data[:: mmap.PAGESIZE].sum()  # fault the pages in now, not in the first copy
        self.generations = np.frombuffer(self._map, np.uint32, count, gens)


class SlotMap:
    """Finds slots in the extents that are mapped."""

    def __init__(self) -> None:
        """Start without memory."""
        self._extents: dict[int, MappedExtent] = {}
        self._by_first: dict[int, MappedExtent] = {}
        self._per_extent = 1

    def add(self, number: int, extent: MappedExtent) -> None:
        """Make an extent's slots known; all extents of a store's namespace are equal."""
        self._extents[number] = extent
        self._per_extent = extent.count
        self._by_first[extent.first // extent.count] = extent

    def remove(self, number: int) -> None:
        """Forget an extent; the memory is unmapped with the last copy that uses it."""
        extent = self._extents.pop(number, None)
        if extent is not None:
            del self._by_first[extent.first // extent.count]

    def clear(self) -> None:
        """Forget everything."""
        self._extents.clear()
        self._by_first.clear()

    def place(self, slot: int) -> tuple[MappedExtent, int]:
        """Return the extent of a slot and the slot's offset. Raises TierError if unknown."""
        number, position = divmod(slot, self._per_extent)
        extent = self._by_first.get(number)
        if extent is None:
            raise TierError(f"slot {slot} is not mapped here")
        return extent, position * extent.slot_bytes

    def generations(self, slots: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return slots' generations as they are now. Raises TierError for one not mapped here."""
        found = np.empty(len(slots), np.uint32)
        numbers, positions = np.divmod(slots, self._per_extent)
        for number in np.unique(numbers):
            extent = self._by_first.get(int(number))
            if extent is None:
                raise TierError(f"slot {number * self._per_extent} is not mapped here")
            here = numbers == number
            found[here] = extent.generations[positions[here]]
        return found


class HostCopier:
    """Moves pages between host KV tensors and slots."""

    def __init__(self, caches: dict[str, LayerCache], layout: RankLayout) -> None:
        """Find the layers at equal distances. Raises TierError for a layer that is not there."""
        self._layout = layout
        self._stacks = [_stacks(group, caches) for group in layout.groups]

    def copy(self, moves: Iterable[Move], slots: SlotMap, *, store: bool) -> int:
        """Copy engine -> slots (store) or slots -> engine; return the bytes copied."""
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
        return copied


class _Run(msgspec.Struct):
    group: int
    extent: MappedExtent
    block_first: int
    offset_first: int
    block_step: int = 1
    offset_step: int = 1
    count: int = 1


def _runs(moves: Iterable[Move], slots: SlotMap, groups: Sequence[GroupLayout]) -> Iterable[_Run]:
    """Join moves whose blocks and places are at equal, growing distances."""
    run: _Run | None = None
    for move in moves:
        extent, base = slots.place(move.slot)
        offset = base + move.part * groups[move.group].stride
        if run is not None and run.group == move.group and run.extent is extent:
            if run.count == 1:
                block_step = move.block_id - run.block_first
                offset_step = offset - run.offset_first
                if block_step > 0 and offset_step > 0:
                    run.block_step, run.offset_step, run.count = block_step, offset_step, 2
                    continue
            elif (
                move.block_id == run.block_first + run.count * run.block_step
                and offset == run.offset_first + run.count * run.offset_step
            ):
                run.count += 1
                continue
        if run is not None:
            yield run
        run = _Run(move.group, extent, move.block_id, offset)
    if run is not None:
        yield run


def _views(stack: _Stack, run: _Run) -> tuple[torch.Tensor, torch.Tensor]:
    cache, shape = stack.cache, (run.count, stack.layers, stack.cache.page_bytes)
    engine = cache.storage.as_strided(
        shape,
        (run.block_step * cache.block_stride, stack.layer_stride, 1),
        cache.offset + run.block_first * cache.block_stride,
    )
    slot = run.extent.data.as_strided(
        shape, (run.offset_step, stack.slot_stride, 1), run.offset_first + stack.slot_offset
    )
    return engine, slot


def _stacks(group: GroupLayout, caches: dict[str, LayerCache]) -> list[_Stack]:
    stacks: list[_Stack] = []
    pending: list[tuple[LayerRun, LayerCache]] = []
    for run in group.runs:
        cache = caches.get(run.name)
        if cache is None or cache.page_bytes != run.length:
            raise TierError(f"layer {run.name}: cache {cache}, layout says {run.length} bytes")
        if pending and not _fits(pending, run, cache):
            stacks.append(_stack(pending))
            pending = []
        pending.append((run, cache))
    if pending:
        stacks.append(_stack(pending))
    return stacks


def _fits(pending: list[tuple[LayerRun, LayerCache]], run: LayerRun, cache: LayerCache) -> bool:
    last_run, last = pending[-1]
    if (
        cache.storage.data_ptr() != last.storage.data_ptr()
        or cache.block_stride != last.block_stride
        or run.length != last_run.length
        or run.writes != last_run.writes
        or cache.offset <= last.offset
    ):
        return False
    if len(pending) == 1:
        return True
    before_run, before = pending[-2]
    return (
        cache.offset - last.offset == last.offset - before.offset
        and run.offset - last_run.offset == last_run.offset - before_run.offset
    )


def _stack(pending: list[tuple[LayerRun, LayerCache]]) -> _Stack:
    first_run, first = pending[0]
    layer_stride = slot_stride = first.page_bytes
    if len(pending) > 1:
        layer_stride = pending[1][1].offset - first.offset
        slot_stride = pending[1][0].offset - first_run.offset
    return _Stack(
        first, len(pending), layer_stride, first_run.offset, slot_stride, first_run.writes
    )
