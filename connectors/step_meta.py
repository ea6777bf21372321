"""What the scheduler half hands to the worker half, inside the engine's own step messages."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Moves: TypeAlias = NDArray[np.int64]
"""A row for each engine block of a copy: BLOCK of GROUP <-> PART of SLOT, which are columns."""
GROUP, BLOCK, SLOT, PART = range(4)


class EngineSpec(msgspec.Struct, frozen=True):
    """Engine blocks of a transfer, by group in group order.

    group_sizes: ids listed per group, 0 for a group with nothing. block_indices: logical index
    of each group's first listed engine block, so that a block can be entered part-way. In a
    store they are 0: its blocks are of several requests and whole; the last of a group may lack
    its end.
    """

    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]


class StoreJob(msgspec.Struct, frozen=True):
    """Copy engine blocks into granted slots, in the same order. keys and parents go with these.

    off_disk: they go to no tier below memory.
    """

    job_id: int
    session: int
    engine: EngineSpec
    slots: tuple[int, ...]
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    off_disk: bool = False


class LoadJob(msgspec.Struct, frozen=True):
    """Copy leased slots into a request's engine blocks, in the same order.

    generations: of the slots.

    source: where the bytes come from, for log lines.
    in_step: the step's forward pass reads the blocks, so the load ends, or fails, before it.
    """

    request_id: str
    session: int
    lease: int
    engine: EngineSpec
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    source: str = ""
    in_step: bool = False


class StepMeta(msgspec.Struct, frozen=True):
    """One engine step's work.

    early: stores whose sources are complete already, submitted before anything else.
    stores: stores whose sources this step's forward completes.
    flush: store jobs that must be over before this step overwrites their sources.
    idle: the step computes nothing, so waiting for loads delays no request.
    sent: requests that ended earlier and whose engine blocks may be freed now.
    """

    early: tuple[StoreJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    flush: tuple[int, ...] = ()
    idle: bool = False
    sent: tuple[str, ...] = ()


def pieces(engine: EngineSpec, slots: tuple[int, ...], blocks_per_chunk: tuple[int, ...]) -> Moves:
    """Pair engine blocks with slots. Raises ValueError if these do not fit."""
    moves = np.empty((len(engine.block_ids), 4), np.int64)
    moves[:, BLOCK] = engine.block_ids
    own = np.array(slots, np.int64)
    at = slot_at = 0
    for group, size in enumerate(engine.group_sizes):
        if size == 0:
            continue
        first, per = engine.block_indices[group], blocks_per_chunk[group]
        chunk_first = first // per
        chunks = (first + size - 1) // per - chunk_first + 1
        if len(own) < slot_at + chunks:
            left = len(own) - slot_at
            raise ValueError(f"group {group} needs {chunks} slots, {left} are left")
        rows, indices = moves[at : at + size], np.arange(first, first + size)
        rows[:, GROUP] = group
        rows[:, SLOT] = own[indices // per - chunk_first + slot_at]
        rows[:, PART] = indices % per
        at += size
        slot_at += chunks
    if slot_at != len(own) or at != len(moves):
        raise ValueError(f"{len(own)} slots, {slot_at} of them used")
    return moves
