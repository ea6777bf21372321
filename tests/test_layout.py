"""Slot geometry: whatever topology writes, any other reads the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import limits
from kvstore.core.errors import ConfigError
from kvstore.core.layout import (
    ALIGNMENT,
    GroupGeometry,
    LayerGeometry,
    RankGeometry,
    slot_layout,
)
from kvstore.core.types import GroupRule

HEAD_BYTES = 96
LAYERS = ("model.0", "model.1", "model.2")


def ranks_of(
    tp: int,
    *,
    heads: int = 8,
    layers: Sequence[str] = LAYERS,
    head_major: bool = True,
    head_bytes: int = HEAD_BYTES,
    chunk: int = 2,
    rule: GroupRule | None = None,
) -> list[RankGeometry]:
    """All ranks of one engine; KV heads are replicated beyond tp."""
    mine = max(1, heads // tp)
    ranks = []
    for rank in range(tp):
        shape = (mine * head_bytes, mine, rank * heads // tp, heads, head_major)
        pages = tuple(LayerGeometry(name, *shape) for name in layers)
        group = GroupGeometry(rule or GroupRule(), pages)
        ranks.append(RankGeometry("model", 16 * chunk, (chunk,), (group,)))
    return ranks


def content(layer: str, block: int, head: int) -> bytes:
    """What the engine keeps for one head of one layer of one engine block."""
    seed = hashlib.sha256(f"{layer}/{block}/{head}".encode()).digest()
    return seed * (HEAD_BYTES // len(seed))


@pytest.mark.parametrize(("heads", "tp"), [(1, 4), (2, 8), (4, 8)])
def test_B13_replicated_heads_are_written_by_one_rank_and_read_by_all(heads: int, tp: int) -> None:
    layout = slot_layout(ranks_of(tp, heads=heads))
    first = [rank.groups[0].runs[0] for rank in layout.ranks]
    assert sum(run.writes for run in first) == heads
    assert len({run.offset for run in first}) == heads
    assert [rank.groups[0].stride for rank in layout.ranks] == [3 * heads * HEAD_BYTES] * tp


def test_pages_that_cannot_be_cut_by_head_keep_the_tensor_parallel_size_in_the_digest() -> None:
    digests = {tp: slot_layout(ranks_of(tp, head_major=False)).digest for tp in (1, 2, 4, 8)}
    assert len(set(digests.values())) == 4


def test_pages_that_cannot_be_cut_by_head_follow_one_another() -> None:
    layout = slot_layout(ranks_of(4, head_major=False, layers=["only"]))
    page = 2 * HEAD_BYTES
    assert [rank.groups[0].runs[0].offset for rank in layout.ranks] == [0, page, 2 * page, 3 * page]


def test_slots_are_aligned_for_direct_io() -> None:
    layout = slot_layout(ranks_of(1))
    assert layout.slot_bytes % ALIGNMENT == 0
    assert 0 <= layout.slot_bytes - 2 * 3 * 8 * HEAD_BYTES < ALIGNMENT


def test_the_largest_group_decides_the_size_of_a_slot() -> None:
    one = ranks_of(1)[0]
    small = msgspec.structs.replace(one.groups[0], layers=one.groups[0].layers[:1])
    both = msgspec.structs.replace(one, groups=(small, one.groups[0]), blocks_per_chunk=(2, 2))
    layout = slot_layout([both])
    assert layout.slot_bytes == slot_layout([one]).slot_bytes
    assert [group.stride for group in layout.ranks[0].groups] == [
        8 * HEAD_BYTES,
        3 * 8 * HEAD_BYTES,
    ]


# What decides the bytes decides the digest


def changed(name: str, value: object) -> RankGeometry:
    rank = ranks_of(1)[0]
    if name in LayerGeometry.__struct_fields__:
        first, *rest = rank.groups[0].layers
        layers = (msgspec.structs.replace(first, **{name: value}), *rest)
        return msgspec.structs.replace(rank, groups=(GroupGeometry(GroupRule(), layers),))
    if name == "rule":
        assert isinstance(value, GroupRule)
        return ranks_of(1, rule=value)[0]
    return msgspec.structs.replace(rank, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("identity", "another model"),
        ("block_tokens", 64),
        ("blocks_per_chunk", (4,)),
        ("rule", GroupRule(3)),
        ("name", "another.layer"),
        ("page_bytes", 8 * HEAD_BYTES * 2),
        ("head_major", False),
    ],
)
def test_B3_each_fact_changes_the_digest_and_a_trait(name: str, value: object) -> None:
    found, before = slot_layout([changed(name, value)]), slot_layout(ranks_of(1))
    assert found.digest != before.digest
    # What the identity is made of is for the engine to say.
    assert name == "identity" or found.traits != before.traits


def test_B3_the_order_of_the_layers_changes_the_digest() -> None:
    turned = ranks_of(1, layers=LAYERS[::-1])
    assert slot_layout(turned).digest != slot_layout(ranks_of(1)).digest


def test_B3_traits_are_those_of_the_engine_and_what_follows_from_its_ranks() -> None:
    ranks = [
        msgspec.structs.replace(rank, traits={"model": "m"})
        for rank in ranks_of(2, rule=GroupRule(3))
    ]
    layout = slot_layout(ranks)
    assert layout.traits == {
        "model": "m",
        "block tokens": "32",
        "engine blocks": "2",
        "groups": "last 3",
        "slot bytes": str(layout.slot_bytes),
        "layout": layout.traits["layout"],
    }
    assert slot_layout(ranks_of(4, rule=GroupRule(3))).traits == {
        name: trait for name, trait in layout.traits.items() if name != "model"
    }


# Ranks that do not fit together


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("identity", "another model", ["rank 1", "'another model'", "'model'"]),
        ("block_tokens", 64, ["rank 1", "64", "32"]),
        ("blocks_per_chunk", (4,), ["rank 1", "(4,)", "(2,)"]),
        ("rule", GroupRule(3), ["rank 1", "trailing=3", "trailing=None"]),
        ("page_bytes", 960, ["model.0", "960", "768"]),
        ("head_major", False, ["model.0", "head_major=False", "head_major=True"]),
    ],
)
def test_B3_ranks_that_differ_are_refused_naming_both_values(
    name: str, value: object, told: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        slot_layout([ranks_of(1)[0], changed(name, value)])
    assert [word for word in told if word not in str(caught.value)] == []


def test_a_missing_rank_is_refused_naming_its_heads() -> None:
    with pytest.raises(ConfigError, match=r"hold heads \[0, 1, 4, 5, 6, 7\], expected 0..7"):
        slot_layout([rank for number, rank in enumerate(ranks_of(4)) if number != 1])


def test_a_group_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layers"):
        slot_layout(ranks_of(1, layers=[]))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: LayerGeometry("x", 0),
        lambda: LayerGeometry("x", 64, 0),
        lambda: LayerGeometry("x", 64, 3, 0, 8),
        lambda: LayerGeometry("x", 64, 2, 1, 8),
        lambda: LayerGeometry("x", 64, 2, 8, 8),
        lambda: LayerGeometry("x", 64, 2, -2, 8),
        lambda: GroupGeometry(GroupRule(), (LayerGeometry("x", 64), LayerGeometry("x", 64))),
        lambda: RankGeometry("model", 16, (), ()),
        lambda: RankGeometry("model", 16, (1, 1), ranks_of(1)[0].groups),
    ],
)
def test_geometry_that_makes_no_sense_cannot_be_made(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"heads|twice|blocks"):
        wrong()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_run_is_a_page_and_an_engine_block_is_in_one_piece(tp: int) -> None:
    """docs/decisions/001-slot-order.md: engine block, layer, head."""
    page, whole = 8 // tp * HEAD_BYTES, 8 * HEAD_BYTES
    for rank, layout in enumerate(slot_layout(ranks_of(tp)).ranks):
        (group,) = layout.groups
        places = [(run.offset, run.length) for run in group.runs]
        assert places == [(layer * whole + rank * page, page) for layer in range(3)]
        assert group.stride == 3 * whole


# Any topology that divides the model


class Shape(NamedTuple):
    """A model: KV groups with so many layers each, and how a block is cut."""

    groups: tuple[tuple[int, int | None], ...]  # layers, trailing
    heads: int
    chunks: tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kinds = st.tuples(st.integers(1, 6), st.one_of(st.none(), st.integers(1, 3)))
    groups = tuple(draw(st.lists(kinds, min_size=1, max_size=3)))
    chunks = tuple(draw(st.integers(1, 3)) for _ in groups)
    return Shape(groups, draw(st.sampled_from([1, 2, 4, 8])), chunks)


def cut(shape: Shape, tp: int, pp: int) -> list[RankGeometry]:
    """All ranks of an engine: stages take layers in turn of their order, some perhaps none."""
    mine = max(1, shape.heads // tp)
    ranks = []
    for stage in range(pp):
        for rank in range(tp):
            groups = []
            for number, (layers, trailing) in enumerate(shape.groups):
                own = range(stage * layers // pp, (stage + 1) * layers // pp)
                first = rank * shape.heads // tp // mine * mine
                page = (mine * HEAD_BYTES, mine, first, shape.heads, True)
                pages = tuple(LayerGeometry(f"g{number}.{layer}", *page) for layer in own)
                groups.append(GroupGeometry(GroupRule(trailing), pages))
            ranks.append(RankGeometry("model", 16, shape.chunks, tuple(groups)))
    return ranks


def copies(
    ranks: Sequence[RankGeometry], group: int, *, writing: bool
) -> Iterator[tuple[int, bytes, int]]:
    """Yield place in the slot, bytes of the engine, and rank, of every copy of a block."""
    for number, (rank, layout) in enumerate(zip(ranks, slot_layout(ranks).ranks, strict=True)):
        mine = layout.groups[group]
        for layer, run in zip(rank.groups[group].layers, mine.runs, strict=True):
            assert (run.name, run.length) == (layer.name, layer.page_bytes)
            heads = range(layer.head_first, layer.head_first + layer.heads)
            for block in range(rank.blocks_per_chunk[group]):
                page = b"".join(content(layer.name, block, head) for head in heads)
                if run.writes or not writing:
                    yield block * mine.stride + run.offset, page, number


@given(shapes(), *[st.sampled_from([1, 2, 4, 8, 16])] * 2, *[st.integers(1, 4)] * 2)
@settings(max_examples=150, deadline=None)
def test_B13_O18_any_topology_reads_what_any_other_wrote(
    shape: Shape, tp: int, other_tp: int, pp: int, other_pp: int
) -> None:
    writers, readers = cut(shape, tp, pp), cut(shape, other_tp, other_pp)
    layout = slot_layout(writers)
    assert slot_layout(readers).digest == layout.digest
    for group, (layers, _) in enumerate(shape.groups):
        slot = bytearray(layout.slot_bytes)
        owners: list[int | None] = [None] * layout.slot_bytes
        for at, page, rank in copies(writers, group, writing=True):
            assert not any(owner is not None for owner in owners[at : at + len(page)])
            owners[at : at + len(page)] = [rank] * len(page)
            slot[at : at + len(page)] = page
        written = sum(owner is not None for owner in owners)
        assert written == layers * shape.heads * HEAD_BYTES * shape.chunks[group]
        for at, page, _ in copies(readers, group, writing=False):
            assert slot[at : at + len(page)] == page


def test_S2_layers_of_all_ranks_of_an_engine_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENGINE_LAYERS_MAX", 2)
    ranks = ranks_of(2)
    layers = sum(rank.layers for rank in ranks)
    assert layers > 2
    with pytest.raises(ConfigError, match=f"{layers} layers on 2 ranks, expected up to 2"):
        slot_layout(ranks)
