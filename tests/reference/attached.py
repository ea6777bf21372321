"""Real worker halves on real stores, for ranks of the reference engine."""

from __future__ import annotations

import torch

from connectors.copies.host import LayerCache
from connectors.worker import WorkerHalf
from tests.reference.shape import Shape


def attached(
    engine: str,
    identity: str,
    shape: Shape,
    rank: int,
    memory: bytearray,
    path: str,
    layers: int = 1,
) -> WorkerHalf:
    """Make a rank's half. memory: shape.blocks pages, in each of which layer follows layer.

    path: the socket of its store. layers: of each group.
    """
    geometry = shape.rank_geometry(identity, rank, layers)
    storage = torch.frombuffer(memory, dtype=torch.uint8)
    caches = {
        layer.name: LayerCache(
            storage, number * layer.page_bytes, shape.page_bytes, layer.page_bytes
        )
        for group in geometry.groups
        for number, layer in enumerate(group.layers)
    }
    return WorkerHalf(engine, rank, shape.world, geometry, caches, lambda: path)
