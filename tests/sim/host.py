"""One simulated engine with its real halves, and the shapes that engines come in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from connectors.engine_interface import BlockTable, EngineRequest, is_one_full_group
from connectors.kv_transfer_params import NO_TRANSFER, Transfer, is_handed_over
from connectors.request_policy import NO_LIMITS, RequestPolicy
from connectors.request_state import Phase
from connectors.scheduler import SchedulerHalf
from connectors.step_loads import StepLoads
from connectors.step_meta import StepMeta
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher
from connectors.worker import WorkerHalf
from kvstore.wire import engine as p
from tests.reference import (
    Engine,
    Group,
    Rank,
    Request,
    Shape,
    TieredWorker,
    WorkerResults,
)
from tests.sim.store import Joiner, Net
from tests.sim.worker import Worker

_GROUPS = (
    ((Group(4),), 4),
    ((Group(4),), 8),
    ((Group(4), Group(4, window=9)), 4),
    ((Group(4), Group(4, window=6)), 8),
    ((Group(8), Group(4, window=10)), 8),
    ((Group(4), Group(8, window=20)), 16),
    ((Group(4), Group(8, state=True)), 8),
    ((Group(8), Group(8, window=10), Group(8, state=True)), 8),
)
PLAIN = 0.2  # share of worlds whose engines can load in a step, whatever the others are
PRIORITIES = 3
SENT = 0.2  # chance that a rank has sent a request's blocks, in each step


def make_shape(rng: random.Random) -> Shape:
    plain = rng.random() < PLAIN
    groups, block_tokens = rng.choice(_GROUPS[:2] if plain else _GROUPS)
    state = groups[-1].state
    batches = 1 if plain else rng.choice((1, 1, 2, 3))
    return Shape(
        groups=groups,
        block_tokens=block_tokens,
        world=rng.choice((1, 1, 2)),
        blocks=rng.choice((40, 50, 120)) * len(groups),
        budget=rng.choice((8, 8, 24) if state else (8, 24, 64)),  # states at more steps' ends
        running_max=rng.choice((2, 6)),
        lookahead=rng.choice((0, 0, 3)),
        prefix_cache=state or rng.random() < 0.6,
        batches=batches,
        drafts=0 if state else rng.choice((0, 0, 1, 3)),
        by_priority=rng.random() < 0.3,
        defer_frees=batches > 1 and rng.random() < 0.5,
        reuse_newest=rng.random() < 0.5,
    )


Handed = Callable[[str, Mapping[str, Any] | None], None]


class Half(SchedulerHalf):
    """A scheduler half that sometimes keeps a request's blocks, as another connector would.

    given: parameters of requests that are handed over. handed(request, params): one that another
    engine goes on with has ended, with these for it.
    """

    rng = random.Random(0)
    delays = 0.0
    sends: Sequence[list[str]] = ()  # what each rank has still to report as sent
    given: dict[str, Mapping[str, Any]]
    handed: Handed = staticmethod(lambda _, __: None)

    def on_new_request(
        self,
        request: EngineRequest,
        transfer: Mapping[str, Any] | None = None,
        cached: int = 0,
        *,
        reads: bool = True,
        repeatable: bool = True,
        policy: RequestPolicy = NO_LIMITS,
    ) -> None:
        transfer = self.given.get(request.request_id, transfer)
        super().on_new_request(
            request, transfer, cached, reads=reads, repeatable=repeatable, policy=policy
        )

    def request_finished(self, request_id: str, table: BlockTable) -> bool:
        tracked = self._requests.get(request_id)
        loading = tracked is not None and tracked.phase is Phase.LOADING
        given = self.given.pop(request_id, None)
        if is_handed_over(given):
            request = None if tracked is None else cast("Request", tracked.request)
            ended = request is not None and request.num_tokens >= request.tokens_max
            self.handed(request_id, self.hand_over(request_id, table) if ended else None)
        delay = super().request_finished(request_id, table)
        if delay or loading or self.rng.random() >= self.delays:
            return delay
        for rank in self.sends:
            rank.append(request_id)
        return True


class Sender(TieredWorker):
    """A worker that reports blocks as sent, some time after their request has ended."""

    def __init__(self, worker: Worker, rng: random.Random) -> None:
        super().__init__(cast("WorkerHalf", worker))
        self.left: list[str] = []
        self._rng = rng

    def results(self, meta: StepMeta) -> WorkerResults:
        results = super().results(meta)
        sent = {name for name in self.left if self._rng.random() < SENT}
        self.left[:] = [name for name in self.left if name not in sent]
        return msgspec.structs.replace(results, sent=results.sent | sent)


class Host:
    """One engine with its two halves."""

    def __init__(
        self,
        net: Net,
        rng: random.Random,
        name: str,
        shape: Shape,
        model: str,
        *,
        in_step: bool = False,
        transfer: Transfer = NO_TRANSFER,
    ) -> None:
        """in_step: loads may end in the step that admits their request."""
        self.name, self.shape, self.scope = name, shape, b""
        self.geometry = shape.geometry
        self._model = model
        memory = [bytearray(shape.blocks * shape.page_bytes) for _ in range(shape.world)]
        self.workers = [
            Worker(net, self._hello(name, rank), shape, pages, rng)
            for rank, pages in enumerate(memory)
        ]
        credit = rng.choice((2, 6, 20))
        hello = p.Hello(p.VERSION, name, "scheduler", 0, shape.world, credit_slots=credit)
        self.client = StoreClient(cast("Attacher", Joiner(net, hello)), lambda: net.now)
        self.half = Half(
            self.geometry,
            self.client,
            world=shape.world,
            shares_prefixes=shape.prefix_cache,
            transfer=transfer,
            step_loads=StepLoads(0) if in_step and shape.batches == 1 else None,
        )
        self.half.given = {}
        senders = [Sender(worker, rng) for worker in self.workers]
        self.half.rng, self.half.delays = rng, rng.choice((0.0, 0.0, 0.3))
        self.half.sends = [sender.left for sender in senders]
        self.ranks = [
            Rank(shape, rank, sender, self.workers[rank].memory)
            for rank, sender in enumerate(senders)
        ]
        self.engine = Engine(shape, self.half, self.ranks, rng)
        self.counts: Counter[str] = Counter()  # of the halves

    def store_late(self) -> None:
        """Store a block when the engine is about to reuse its own, if it is an engine for that."""
        shape = self.shape
        if is_one_full_group(shape.rules) and shape.prefix_cache:
            ahead = shape.lookahead + shape.batches * (shape.drafts + 1)
            tokens = shape.budget + shape.running_max * ahead
            step_blocks = tokens // shape.group_tokens[0] + shape.running_max
            self.half.store_late(self.engine.book.tables.pool, step_blocks)

    def step(self) -> None:
        for output in self.engine.step():
            for event, number in output.connector.items():
                self.counts[event] += number

    def _hello(self, name: str, rank: int) -> p.Hello:
        geometry = self.shape.rank_geometry(self._model, rank)
        return p.Hello(p.VERSION, name, "worker", rank, self.shape.world, geometry=geometry)
