"""KV tensors as engines on GPUs lay them out, with an oracle for each of their bytes.

A tensor is [layers, blocks, heads, tokens, content] bytes in some order of strides; the oracle
reads it through NumPy's strides and knows nothing of pieces, runs, tiles or places.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from connectors.copies.gpu.measure import Choice
from connectors.copies.host import LayerCache, MappedExtent, pieces_of
from kvstore.core.layout import (
    GroupGeometry,
    LayerGeometry,
    Move,
    RankGeometry,
    RankLayout,
    slot_layout,
)
from kvstore.core.types import GroupRule
from kvstore.wire import engine as p

Bytes = NDArray[np.uint8]

PAGE, POISON = 4096, 0xEE
CHOICES = {"kernel": Choice(((1, 8),), ((1, 8),)), "engines": Choice(((1, 0),), ((1, 0),))}
ORDERS = {
    "layer-major, heads inside tokens": "LBNHC",
    "layer-major, tokens inside heads": "LBHNC",
    "block-major: layers inside blocks": "BLHNC",
    "block-major, heads inside tokens": "BLNHC",
    "layers inside heads": "BHLNC",
    "K and V apart": "LHBNC",  # the two are the outermost dimension, as heads are here
}
AXES = "LBHNC"


@dataclass
class Group:
    """One KV group: a tensor and what its layers are called."""

    storage: torch.Tensor
    view: Bytes  # [layers, blocks, heads, tokens, content]
    names: list[str]
    order: str
    caches: dict[str, LayerCache] = field(default_factory=dict)

    def _as_it_lies(self, layer: int, block: int) -> Bytes:
        inner = [AXES[2:].index(axis) for axis in self.order if axis in AXES[2:]]
        page: Bytes = self.view[layer, block].transpose(inner)
        return page

    def page(self, layer: int, block: int) -> Bytes:
        """A page's bytes as the slot has them: as they lie in memory, gaps left out."""
        return np.array(self._as_it_lies(layer, block), order="C").reshape(-1)

    def put(self, layer: int, block: int, data: Bytes) -> None:
        page = self._as_it_lies(layer, block)
        page[...] = data.reshape(page.shape)


@dataclass
class Engine:
    """One rank's KV tensors, and the layout of the slots they go to."""

    groups: list[Group]
    caches: dict[str, LayerCache]
    geometry: RankGeometry
    layout: RankLayout

    @property
    def storages(self) -> list[torch.Tensor]:
        return [group.storage for group in self.groups]

    def slot_part(self, group: int, block: int) -> dict[int, Bytes]:
        """What an engine block's part of a slot must hold: bytes by offset."""
        here = self.groups[group]
        return {
            run.offset: here.page(here.names.index(run.name), block)
            for run in self.layout.groups[group].runs
        }


def make_group(
    shape: Sequence[int],
    order: str,
    first_layer: int = 0,
    *,
    pad: int = 0,
    device: str = "cpu",
    lead: int = 0,
) -> Group:
    """Lay out a tensor of layers, blocks, heads, tokens, content bytes.

    pad: bytes after each page, where pages are one run. lead: bytes before the tensor.
    """
    strides, step = {}, 1
    for place in range(len(order) - 1, -1, -1):
        axis = order[place]
        if pad and set(order[place + 1 :]) == set("HNC"):
            step += pad
        strides[axis] = step
        step *= shape[AXES.index(axis)]
    storage = torch.empty(lead + step, dtype=torch.uint8, device=device)
    by_axis = [strides[axis] for axis in AXES]
    group = Group(
        storage,
        np.empty(0, np.uint8),
        [f"layer.{first_layer + i}" for i in range(shape[0])],
        order,
    )
    if device == "cpu":
        group.view = as_strided(storage.numpy()[lead:], tuple(shape), by_axis)
    cut = pieces_of(shape[2:], by_axis[2:], 1)
    assert cut is not None
    pieces, piece_stride, piece_bytes = cut
    for number, name in enumerate(group.names):
        group.caches[name] = LayerCache(
            storage,
            lead + number * by_axis[0],
            by_axis[1],
            pieces * piece_bytes,
            pieces,
            piece_stride,
        )
    return group


def make_engine(groups: list[Group], per: Sequence[int]) -> Engine:
    caches = {name: cache for group in groups for name, cache in group.caches.items()}
    geometry = RankGeometry(
        "model",
        16,
        tuple(per),
        tuple(
            GroupGeometry(
                GroupRule(),
                tuple(LayerGeometry(name, caches[name].page_bytes) for name in group.names),
            )
            for group in groups
        ),
    )
    return Engine(groups, caches, geometry, slot_layout([geometry]).ranks[0])


SHAPES: dict[str, tuple[int, int, int, int]] = {  # layers, heads, tokens, content bytes
    "bf16": (4, 2, 16, 512),
    "fp8": (3, 4, 16, 256),
    "fp4 packed, with scales": (3, 2, 16, 72 + 72),
    "MLA": (5, 1, 16, 1152),
    "MLA fp8": (2, 1, 64, 656),
    "odd sizes": (3, 1, 5, 13),
    "one layer": (1, 8, 16, 256),
}


def cases() -> dict[str, tuple[str, str, int]]:
    """Name -> (shape, order, pad)."""
    found = {
        f"{shape}, {order}": (shape, order, 0) for shape in SHAPES for order in ORDERS.values()
    }
    for shape in ("bf16", "MLA", "odd sizes"):
        found[f"{shape}, LBNHC, padded pages"] = (shape, "LBNHC", 96)
        found[f"{shape}, BLHNC, padded pages"] = (shape, "BLHNC", 48)
    return found


def engine_of(name: str, blocks: int, per: int = 1, device: str = "cpu") -> Engine:
    shape, order, pad = cases()[name]
    layers, heads, tokens, content = SHAPES[shape]
    group = make_group((layers, blocks, heads, tokens, content), order, pad=pad, device=device)
    return make_engine([group], [per])


def random_engine(rng: random.Random, blocks: int, device: str = "cpu") -> Engine:
    """One to three groups of any shapes and orders, each with its own blocks in a block."""
    groups: list[Group] = []
    layers_so_far = 0
    for _ in range(rng.randint(1, 3)):
        layers = rng.randint(1, 4)
        shape = (layers, blocks, rng.choice([1, 2, 4]), rng.randint(1, 16), rng.choice(
            [1, 8, 13, 16, 64, 144, 656]
        ))  # fmt: skip
        order = rng.choice(list(ORDERS.values()))
        dense = order[:2] in {"LB", "BL"}
        pad = rng.choice([0, 0, 16, 7]) if dense else 0
        lead = rng.choice([0, 16, 1])
        groups.append(make_group(shape, order, layers_so_far, pad=pad, device=device, lead=lead))
        layers_so_far += layers
    return make_engine(groups, [rng.choice([1, 2, 3]) for _ in groups])


def extent_of(count: int, slot_bytes: int, first: int = 0) -> MappedExtent:
    """Map poisoned slots, and their generations."""
    size = count * slot_bytes
    total = size + -(-4 * count // PAGE) * PAGE
    fd = os.memfd_create("slots")
    os.truncate(fd, total)
    made = MappedExtent(fd, p.Extent(0, first, count, slot_bytes, size, total))
    made.data.fill_(POISON)
    return made


def some_moves(
    engine: Engine, rng: random.Random, blocks: int, slots: int, least: int = 0
) -> list[Move]:
    """Engine blocks of all groups in any order, each with a part of a slot to itself."""
    moves = []
    for group, per in enumerate(engine.geometry.blocks_per_chunk):
        own = range(group, slots, len(engine.groups))  # slots are of one group
        parts = [(slot, part) for slot in own for part in range(per)]
        chosen = rng.sample(range(blocks), rng.randint(least, blocks))
        places = rng.sample(parts, min(len(chosen), len(parts)))
        moves += [Move(group, b, s, p) for b, (s, p) in zip(chosen, places, strict=False)]
    return moves


def fill_random(engine: Engine, seed: int) -> None:
    for number, storage in enumerate(engine.storages):
        made = torch.Generator().manual_seed(1000 * seed + number)
        storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=made))
