"""From jobs to numbers: every byte that layout.py names moves once, and no other."""

from __future__ import annotations

import ctypes
import random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.copies.gpu.plan import (
    GroupPlan,
    Words,
    copies_of,
    joined,
    places_of,
    plans,
    tiles_of,
)
from connectors.copies.host import HostCopier, LayerCache, MappedExtent, SlotMap, pieces_of
from kvstore.core.errors import TierError
from kvstore.core.layout import GroupLayout, LayerRun, Move, RankLayout
from tests.harness.gpu_layouts import (
    PAGE,
    POISON,
    Bytes,
    Engine,
    cases,
    engine_of,
    extent_of,
    fill_random,
    random_engine,
    some_moves,
)
from tests.harness.gpu_twin import items
from tests.harness.moves import rows

BLOCKS, SLOTS = 7, 6


def slots_for(engine: Engine, extents: int = 2) -> tuple[SlotMap, list[MappedExtent]]:
    """Slots in extents that are anywhere in memory."""
    made, size = SlotMap(), engine.layout.slot_bytes
    parts = [extent_of(SLOTS, size, number * SLOTS) for number in range(extents)]
    for number, part in enumerate(parts):
        made.add(number, part)
    return made, parts


def memory(address: int, size: int) -> Bytes:
    """View bytes at an address that one of our tensors or extents has."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def move_all(engine: Words, slot: Words, sizes: Words, *, store: bool) -> None:
    for e, s, n in zip(engine.tolist(), slot.tolist(), sizes.tolist(), strict=True):
        to, source = (memory(s, n), memory(e, n)) if store else (memory(e, n), memory(s, n))
        to[:] = source


def run(
    groups: tuple[GroupPlan, ...], moves: list[Move], slots: SlotMap, *, how: str, store: bool
) -> None:
    for group, places in places_of(rows(moves), slots, groups):
        plan = groups[group]
        table = items(plan.tiles, places) if how == "kernel" else copies_of(plan.runs, places)
        move_all(*table, store=store)


def check(engine: Engine, rng: random.Random, how: str) -> None:
    fill_random(engine, rng.randrange(1000))
    slots, extents = slots_for(engine)
    moves = some_moves(engine, rng, BLOCKS, 2 * SLOTS)
    run(plans(engine.layout, engine.caches, store=True), moves, slots, how=how, store=True)
    size = engine.layout.slot_bytes
    expected = np.full((2 * SLOTS, size), POISON, np.uint8)
    for move in moves:
        base = move.part * engine.layout.groups[move.group].stride
        for offset, data in engine.slot_part(move.group, move.block_id).items():
            expected[move.slot, base + offset : base + offset + len(data)] = data
    for number, extent in enumerate(extents):
        found = extent.data[: SLOTS * size].numpy().reshape(SLOTS, size)
        np.testing.assert_array_equal(found, expected[number * SLOTS : (number + 1) * SLOTS])
    pages = {
        (m.group, layer, m.block_id): engine.groups[m.group].page(layer, m.block_id)
        for m in moves
        for layer in range(len(engine.groups[m.group].names))
    }
    for storage in engine.storages:
        storage.fill_(POISON)
    run(plans(engine.layout, engine.caches, store=False), moves, slots, how=how, store=False)
    for number, group in enumerate(engine.groups):
        now = group.storage.clone()
        group.storage.fill_(POISON)
        for (of, layer, block), page in pages.items():
            if of == number:
                group.put(layer, block, page)
        assert torch.equal(now, group.storage), "bytes beside the pages, or not all of them"


@pytest.mark.parametrize("how", ["kernel", "engines"])
@pytest.mark.parametrize("name", cases())
def test_each_layout_goes_to_slots_and_back(name: str, how: str) -> None:
    rng = random.Random(name + how)
    check(engine_of(name, BLOCKS, per=rng.choice([1, 2])), rng, how)


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.sampled_from(["kernel", "engines"]))
def test_any_layout_goes_to_slots_and_back(seed: int, how: str) -> None:
    rng = random.Random(seed)
    check(random_engine(rng, BLOCKS), rng, how)


@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_the_copier_for_host_memory_fills_slots_with_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    engine = random_engine(rng, BLOCKS)
    fill_random(engine, seed % 1000)
    ours, one = slots_for(engine)
    theirs, two = slots_for(engine)
    moves = some_moves(engine, rng, BLOCKS, 2 * SLOTS)
    run(plans(engine.layout, engine.caches, store=True), moves, ours, how="kernel", store=True)
    HostCopier(engine.caches, engine.layout).copy(rows(moves), theirs, store=True)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.data, b.data)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    st.sampled_from([16, 64, 4096]),
)
def test_tiles_cover_each_run_once_and_begin_where_16_divides(sizes: list[int], tile: int) -> None:
    runs = np.array(
        [[4096 * 10 * i, 7, 8192 * i, size] for i, size in enumerate(sizes)], np.uint64
    )  # fmt: skip
    tiles = tiles_of(runs, tile)
    covered = sorted((int(e) + i, int(s) + i) for e, _, s, n in tiles for i in range(int(n)))
    assert covered == sorted((int(e) + i, int(s) + i) for e, _, s, n in runs for i in range(int(n)))
    assert int(tiles[:, 3].max()) <= tile
    assert all((int(t[0]) % 4096) % 16 == 0 for t in tiles)


def test_neighbours_in_block_and_slot_become_one_run() -> None:
    rows = [[0, 100, 0, 10], [10, 100, 10, 10], [20, 100, 21, 5], [30, 100, 26, 5], [35, 90, 31, 5]]
    expected = [[0, 100, 0, 20], [20, 100, 21, 5], [30, 100, 26, 5], [35, 90, 31, 5]]
    assert joined(np.array(rows, np.uint64)).tolist() == expected


def test_a_block_of_a_block_major_engine_is_one_run() -> None:
    engine = engine_of("bf16, BLHNC", BLOCKS)
    (plan,) = plans(engine.layout, engine.caches, store=True)
    assert plan.runs[:, 3].tolist() == [4 * 2 * 16 * 512]


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_that_the_engine_has_not_is_refused(block: int) -> None:
    engine = engine_of("bf16, LBHNC", BLOCKS)
    slots, _ = slots_for(engine)
    groups = plans(engine.layout, engine.caches, store=False)
    with pytest.raises(TierError, match=f"engine block {block}, the engine has {BLOCKS}"):
        places_of(rows([Move(0, 1, 0, 0), Move(0, block, 1, 0)]), slots, groups)


def test_a_slot_that_is_not_mapped_and_a_group_that_is_not_there_are_refused() -> None:
    engine = engine_of("bf16, LBHNC", BLOCKS)
    slots, _ = slots_for(engine)
    groups = plans(engine.layout, engine.caches, store=False)
    with pytest.raises(TierError, match="not mapped"):
        places_of(rows([Move(0, 1, 2 * SLOTS, 0)]), slots, groups)
    with pytest.raises(TierError, match="group 1, the engine has 1"):
        places_of(rows([Move(1, 1, 0, 0)]), slots, groups)


def test_a_layer_of_other_size_or_none_is_refused() -> None:
    layout = RankLayout(PAGE, (GroupLayout(64, (LayerRun("layer", 0, 64, writes=True),)),))
    storage = torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(TierError, match="pages of 32 bytes, the layout says 64"):
        plans(layout, {"layer": LayerCache(storage, 0, 32, 32)}, store=True)
    with pytest.raises(TierError, match="layer layer of the layout is not among"):
        plans(layout, {}, store=True)


def test_B13_heads_that_another_rank_writes_are_not_stored() -> None:
    runs = (LayerRun("mine", 0, 64, writes=True), LayerRun("theirs", 64, 64, writes=False))
    layout = RankLayout(PAGE, (GroupLayout(128, runs),))
    storage = torch.zeros(512, dtype=torch.uint8)
    caches = {
        "mine": LayerCache(storage, 0, 128, 64),
        "theirs": LayerCache(storage, 64, 128, 64),
    }
    (stores,), (loads,) = (plans(layout, caches, store=store) for store in (True, False))
    assert (stores.block_bytes, loads.block_bytes) == (64, 128)


def test_a_rank_without_layers_in_a_group_moves_nothing_of_it() -> None:
    """As under pipeline parallelism; the jobs name blocks of that group all the same."""
    engine = engine_of("bf16, LBHNC", BLOCKS)
    slots, _ = slots_for(engine)
    (group,) = engine.layout.groups
    layout = msgspec.structs.replace(engine.layout, groups=(group, GroupLayout(group.stride, ())))
    groups = plans(layout, engine.caches, store=True)
    assert [len(plan.runs) > 0 for plan in groups] == [True, False]
    found = places_of(rows([Move(0, 1, 0, 0), Move(1, BLOCKS + 9, 1, 0)]), slots, groups)
    assert [number for number, _ in found] == [0, 1]


@pytest.mark.parametrize(
    ("shape", "strides", "cut"),
    [
        ((2, 16, 64), (1024, 64, 1), (1, 0, 2048)),
        ((16, 2, 64), (64, 1024, 1), (1, 0, 2048)),
        ((2, 16, 64), (4096, 64, 1), (2, 4096, 1024)),
        ((2, 4, 16, 64), (16384, 4096, 64, 1), (8, 4096, 1024)),
        ((2, 4, 16, 64), (20000, 4096, 64, 1), None),
        ((2, 64), (32, 1), None),
        ((1, 1, 64), (7, 9, 1), (1, 0, 64)),
    ],
)
def test_a_page_is_cut_into_equal_runs(
    shape: tuple[int, ...], strides: tuple[int, ...], cut: tuple[int, int, int] | None
) -> None:
    assert pieces_of(shape, strides, 1) == cut
