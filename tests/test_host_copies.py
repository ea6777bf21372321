"""Copies in host memory: which bytes, in how few pieces, and at how few calls."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connectors.copies.host import HostCopier, LayerCache, MappedExtent, SlotMap, _runs
from connectors.load_progress import LoadDeadline, SlotLoad
from connectors.step_meta import EngineSpec, LoadJob
from kvstore.core.errors import TierError
from kvstore.core.layout import GroupLayout, LayerRun, Move, RankLayout
from kvstore.wire import engine as p
from tests.harness.moves import rows

PAGE, PARTS, SLOTS, BLOCKS = 64, 2, 64, 256
LAYOUT = RankLayout(
    PARTS * PAGE, tuple(GroupLayout(PAGE, (LayerRun(name, 0, PAGE, True),)) for name in "ab")
)


def mapped(extents: int = 2) -> SlotMap:
    """Slots in extents of SLOTS each; a slot's first byte is its number."""
    slots, size = SlotMap(), PARTS * PAGE * SLOTS
    for number in range(extents):
        fd = os.memfd_create("slots")
        os.truncate(fd, size + 4 * SLOTS)
        first = number * SLOTS
        extent = MappedExtent(fd, p.Extent(0, first, SLOTS, PARTS * PAGE, size, size + 4 * SLOTS))
        extent.data[: size : PARTS * PAGE] = torch.arange(first, first + SLOTS, dtype=torch.uint8)
        slots.add(number, extent)
    return slots


def engine() -> tuple[HostCopier, torch.Tensor]:
    """An engine with a layer in each of two groups."""
    storage = torch.zeros(2 * BLOCKS * PAGE, dtype=torch.uint8)
    caches = {
        name: LayerCache(storage, number * BLOCKS * PAGE, PAGE, PAGE)
        for number, name in enumerate("ab")
    }
    return HostCopier(caches, LAYOUT), storage


@given(
    st.lists(
        st.builds(
            Move,
            group=st.integers(0, 1),
            block_id=st.integers(0, BLOCKS - 1),
            slot=st.integers(0, 2 * SLOTS - 1),
            part=st.integers(0, PARTS - 1),
        )
    )
)
def test_runs_are_the_moves_in_their_order(moves: Sequence[Move]) -> None:
    slots, found = mapped(), []
    for run in _runs(rows(moves), slots, LAYOUT.groups):
        assert run.count == 1 or (run.block_step > 0 and run.offset_step > 0)
        for index in range(run.count):
            slot, offset = divmod(run.offset_first + index * run.offset_step, PARTS * PAGE)
            block = run.block_first + index * run.block_step
            found.append(Move(run.group, block, run.extent.first + slot, offset // PAGE))
    assert found == list(moves)


def test_neighbours_at_equal_distances_are_one_run() -> None:
    """Also where distances change, blocks go backwards, and another extent or group goes on."""
    blocks = [1, 2, 3, 5, 7, 9, 200, 100, 101, 102, 150, 151]
    slots = [10, 11, 12, 14, 16, 18, 30, 62, 63, 64, 5, SLOTS + 6]
    moves = rows(
        [Move(0, block, slot, 0) for block, slot in zip(blocks, slots, strict=True)]
        + [Move(1, 152, SLOTS + 7, 0)]
    )
    counts = [run.count for run in _runs(moves, mapped(), LAYOUT.groups)]
    assert counts == [3, 3, 1, 2, 1, 1, 1, 1]


def test_a_slot_that_is_not_mapped_leaves_the_engine_as_it_is() -> None:
    copier, storage = engine()
    moves = rows([Move(0, 1, 5, 0), Move(0, 2, 6, 0), Move(0, 9, 2 * SLOTS, 0)])
    with pytest.raises(TierError, match=f"slot {2 * SLOTS} is not mapped"):
        copier.copy(moves, mapped(), store=False)
    assert not storage.any()


def calls_of_a_load(blocks: int) -> int:
    """Count the Python calls of planning a load of consecutive blocks, and of copying it."""
    copier, storage = engine()
    slots, calls = mapped(1), 0
    spec = EngineSpec(tuple(range(1, 1 + blocks)), (blocks, 0), (0, 0))
    job = LoadJob("r", 1, 1, spec, tuple(range(blocks)), (0,) * blocks)

    def count_calls(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event == "call"

    gc.collect()
    gc.disable()  # else what other tests left is finalized meanwhile, in calls that count
    sys.setprofile(count_calls)
    try:
        load = SlotLoad(job, (1, 1), LoadDeadline(0, 0, 0))
        copy = copier.copy
        over = load.advance(lambda moves: copy(moves, slots, store=False), slots.generations, 0)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert over
    assert load.ok
    assert storage[PAGE : (1 + blocks) * PAGE : PAGE].tolist() == list(range(blocks))
    return calls


def test_a_load_takes_as_many_calls_for_many_blocks_as_for_few() -> None:
    assert calls_of_a_load(60) == calls_of_a_load(8) <= 150
