"""One rank of an engine, in a process of its own: stores its heads, or loads and compares them.

python -m tests.gpu.rank FD RANK WORLD store|load
"""

from __future__ import annotations

import sys
import time

import torch

from connectors.copies.gpu.device import CudaDevice
from connectors.copies.host import LayerCache, MappedExtent, SlotMap
from kvstore.core.layout import GroupGeometry, LayerGeometry, Move, RankGeometry, slot_layout
from kvstore.core.types import GroupRule
from kvstore.wire import engine as p
from tests.harness.gpu_layouts import CHOICES
from tests.harness.moves import rows

LAYERS, BLOCKS, HEADS, HEAD_BYTES = 4, 32, 8, 4096
PAGE = 4096
LIMIT_S = 60.0
SLOT_BYTES = LAYERS * HEADS * HEAD_BYTES


def extent_bytes() -> int:
    """Bytes of the memory that ranks share: a slot for each block, and their generations."""
    return BLOCKS * SLOT_BYTES + PAGE


def truth(layer: int, block: int) -> torch.Tensor:
    """What a block holds in one layer, [heads, bytes]."""
    made = torch.Generator().manual_seed(1000 * layer + block)
    return torch.randint(0, 256, (HEADS, HEAD_BYTES), dtype=torch.uint8, generator=made)


def geometry(rank: int, world: int) -> RankGeometry:
    """A rank's heads in every layer."""
    heads = HEADS // world
    layers = tuple(
        LayerGeometry(f"layer.{i}", heads * HEAD_BYTES, heads, rank * heads, HEADS)
        for i in range(LAYERS)
    )
    return RankGeometry("model", 16, (1,), (GroupGeometry(GroupRule(), layers),))


def run(fd: int, rank: int, world: int, *, store: bool, device: str = "cuda") -> bool:
    """Copy all blocks; for a load, tell whether they are what they should be."""
    heads = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    shape = (LAYERS, BLOCKS, HEADS // world, HEAD_BYTES)
    memory = torch.full(shape, 0xEE, dtype=torch.uint8, device=device)
    right = torch.stack(
        [torch.stack([truth(i, b)[heads] for b in range(BLOCKS)]) for i in range(LAYERS)]
    )
    if store:
        memory.copy_(right)
    page = memory[0, 0].numel()
    storage = memory.view(-1)
    caches = {
        f"layer.{i}": LayerCache(storage, i * BLOCKS * page, page, page) for i in range(LAYERS)
    }
    layout = slot_layout([geometry(number, world) for number in range(world)]).ranks[rank]
    extent = MappedExtent(
        fd, p.Extent(0, 0, BLOCKS, layout.slot_bytes, BLOCKS * SLOT_BYTES, extent_bytes())
    )
    slots = SlotMap()
    slots.add(0, extent)
    gpu = CudaDevice(caches, choice=CHOICES["kernel"])
    gpu.pin(extent, lambda: False)
    moves = [Move(0, block, block, 0) for block in range(BLOCKS)]
    queued = gpu.copier(layout).copy(rows(moves), slots, store=store, after=gpu.mark())
    limit = time.monotonic() + LIMIT_S
    while not queued.over():
        if time.monotonic() > limit:
            return False
    gpu.unpin(extent)
    gpu.close()
    return bool((memory.cpu() == right).all())


if __name__ == "__main__":
    number, of_rank, ranks = (int(text) for text in sys.argv[1:4])
    sys.exit(not run(number, of_rank, ranks, store=sys.argv[4] == "store"))
