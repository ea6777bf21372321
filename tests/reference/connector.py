"""A connector's worker halves under the engine's names, and real ones on real stores."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from connectors.copies.host import LayerCache
from connectors.step_meta import StepMeta
from connectors.worker import WorkerHalf
from tests.reference.shape import Shape


class WorkerResults(msgspec.Struct, frozen=True):
    """What a rank's side has to say after a step; each fact once.

    ended: requests whose load is over; failed: which of them brought nothing. sent: finished
    requests whose blocks may go. invalid: engine blocks that a load left wrong, reported no
    later than the load's end. over: store jobs that ended.
    """

    ended: set[str] = set()
    failed: set[str] = set()
    sent: set[str] = set()
    invalid: set[int] = set()
    over: frozenset[int] = frozenset()
    stats: Mapping[str, int] = {}


class TieredWorker:
    """A rank's side: what a worker half does in every step, in this order, and what it reports."""

    def __init__(self, half: WorkerHalf) -> None:
        self.half = half
        self.before_step = half.before_step
        self.start_loads = half.start_loads
        self.after_forward = half.after_forward

    def results(self, meta: StepMeta) -> WorkerResults:
        """Report what ended since the last call; a load that fails does so as a whole."""
        ended, failed = self.half.finished_loads(meta)
        stats = {name: number for name, number in self.half.take_stats().items() if number}
        return WorkerResults(
            ended,
            failed,
            set(meta.sent),
            self.half.take_bad_blocks(),
            self.half.take_stores_over(),
            stats,
        )


def attached(
    engine: str, identity: str, shape: Shape, rank: int, memory: bytearray, path: str
) -> WorkerHalf:
    """Make a rank's half. memory: shape.blocks pages. path: the socket of its store."""
    geometry = shape.rank_geometry(identity, rank)
    storage = torch.frombuffer(memory, dtype=torch.uint8)
    caches = {
        layer.name: LayerCache(storage, 0, shape.page_bytes, layer.page_bytes)
        for group in geometry.groups
        for layer in group.layers
    }
    return WorkerHalf(engine, rank, shape.world, geometry, caches, lambda: path)
