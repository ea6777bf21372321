"""From jobs to numbers: which bytes of which block go where. Arithmetic on arrays, no device.

    runs     one row for each run of bytes of an engine block: a layer's page, or a piece of it
    tiles    runs cut into what one thread block moves at a time; they lie on the device
    places   one row for each engine block of a job: where its part of a slot is, and its id
    copies   runs x places written out, for the copy engines, which take addresses

A kernel works with tiles and places, so a job of any size is 16 bytes a block and one launch. The
item with number i moves tile i % tiles of place i // tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.copies.host import LayerCache, SlotMap, cache_of
from connectors.step_meta import BLOCK, GROUP, PART, SLOT, Moves
from kvstore.core.errors import TierError
from kvstore.core.layout import GroupLayout, RankLayout

Words = NDArray[np.uint64]

RUN = ("engine", "stride", "slot", "bytes")
"""Columns of runs and tiles. engine: address in block 0; stride: from one block to the next;
slot: offset in the block's part of a slot."""

PLACE = ("slot", "block")
"""Columns of places. slot: address of the block's part of a slot; block: the engine's id of it."""

TILE_BYTES = 32 << 10
_ANY = 1 << 62  # blocks of a group of which this rank has no layer, as under pipeline parallelism
COPIES_MAX = 256  # in one batch: it moves while the processor makes the next


class GroupPlan(msgspec.Struct, frozen=True):
    """One KV group in one direction; part_bytes: an engine block's part of a slot."""

    runs: Words  # [runs, 4]
    tiles: Words  # [tiles, 4]
    part_bytes: int
    blocks: int  # engine blocks that every tensor of the group has

    @property
    def block_bytes(self) -> int:
        """Bytes that move for each engine block."""
        return int(self.runs[:, 3].sum())

    @property
    def run_bytes(self) -> int:
        """Bytes of a run, on average."""
        return self.block_bytes // max(1, len(self.runs))


def plans(
    layout: RankLayout, caches: dict[str, LayerCache], *, store: bool
) -> tuple[GroupPlan, ...]:
    """Plan all groups. Raises TierError for a layer that is not there."""
    return tuple(_group_plan(group, caches, store=store) for group in layout.groups)


def _group_plan(group: GroupLayout, caches: dict[str, LayerCache], *, store: bool) -> GroupPlan:
    rows: list[tuple[int, int, int, int]] = []
    blocks = 0
    for run in group.runs:
        cache = cache_of(run, caches)
        here = _blocks(cache)
        blocks = min(blocks, here) if blocks else here
        if store and not run.writes:
            continue  # another rank holds the same heads
        base = cache.storage.data_ptr() + cache.offset
        size = cache.piece_bytes
        rows.extend(
            (base + piece * cache.piece_stride, cache.block_stride, run.offset + piece * size, size)
            for piece in range(cache.pieces)
        )
    runs = joined(np.array(rows, np.uint64).reshape(len(rows), len(RUN)))
    return GroupPlan(runs, tiles_of(runs), group.stride, blocks if group.runs else _ANY)


def _blocks(cache: LayerCache) -> int:
    """Count the blocks that lie within a tensor's memory whole."""
    last = (cache.pieces - 1) * cache.piece_stride + cache.piece_bytes
    room = cache.storage.numel() - cache.offset - last
    return room // cache.block_stride + 1 if room >= 0 else 0


def joined(runs: Words) -> Words:
    """Make one run of neighbours: what follows in the engine's block and in the slot as well."""
    kept: list[list[int]] = []
    for engine, stride, slot, size in runs.tolist():
        if kept:
            last = kept[-1]
            end = (last[0] + last[3], last[1], last[2] + last[3])
            if end == (engine, stride, slot):
                last[3] += size
                continue
        kept.append([engine, stride, slot, size])
    return np.array(kept, np.uint64).reshape(len(kept), len(RUN))


def tiles_of(runs: Words, tile_bytes: int = TILE_BYTES) -> Words:
    """Cut runs into tiles of at most tile_bytes, which 16 divides."""
    rows = [
        (engine + at, stride, slot + at, min(tile_bytes, size - at))
        for engine, stride, slot, size in runs.tolist()
        for at in range(0, size, tile_bytes)
    ]
    return np.array(rows, np.uint64).reshape(len(rows), len(RUN))


def places_of(moves: Moves, slots: SlotMap, groups: Sequence[GroupPlan]) -> list[tuple[int, Words]]:
    """Return the places of a job by group, blocks in the job's order.

    Raises TierError for a slot that is not mapped and a block that the engine does not have: an
    address made of one would be somebody else's memory, or the end of the process.
    """
    found = []
    for group in np.unique(moves[:, GROUP]).tolist():
        if not 0 <= group < len(groups):
            raise TierError(f"a job is for group {group}, the engine has {len(groups)}")
        rows = moves[moves[:, GROUP] == group]
        plan, blocks = groups[group], rows[:, BLOCK]
        if blocks.min() < 0 or blocks.max() >= plan.blocks:
            wrong = blocks[(blocks < 0) | (blocks >= plan.blocks)][0]
            raise TierError(f"a job is for engine block {wrong}, the engine has {plan.blocks}")
        places = np.empty((len(rows), len(PLACE)), np.uint64)
        parts = rows[:, PART].astype(np.uint64) * np.uint64(plan.part_bytes)
        places[:, 0] = slots.addresses(rows[:, SLOT]) + parts
        places[:, 1] = blocks
        found.append((group, places))
    return found


def batches_of(runs: Words, places: Words, *, store: bool) -> Iterator[tuple[Words, Words, Words]]:
    """Write out places for the copy engines, in batches of at most COPIES_MAX, or of one place.

    Each is addresses to write to, addresses to read, and bytes.
    """
    step = max(1, COPIES_MAX // len(runs))
    for first in range(0, len(places), step):
        engine, slot, sizes = copies_of(runs, places[first : first + step])
        yield (slot, engine, sizes) if store else (engine, slot, sizes)


def copies_of(runs: Words, places: Words) -> tuple[Words, Words, Words]:
    """Write out every run of every place: addresses in the engine, in slots, and bytes."""
    engine = runs[:, 0] + places[:, 1:2] * runs[:, 1]
    slot = places[:, 0:1] + runs[:, 2]
    sizes = np.broadcast_to(runs[:, 3], slot.shape)
    return engine.reshape(-1), slot.reshape(-1), sizes.reshape(-1)
