"""One simulated engine with its real halves, and the shapes that engines come in."""

from __future__ import annotations

import random
from collections.abc import Sequence

from connectors.client import StoreClient
from connectors.requests import Geometry
from connectors.scheduler import SchedulerHalf
from kvstore import protocol as p
from kvstore.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.types import GroupRule, window_rule
from tests.sim_engine import Engine
from tests.sim_model import TOKEN_BYTES, Request, Shape
from tests.sim_store import Joiner, Net, Worker

_SHAPES = (
    ((4,), (None,), 4),
    ((4,), (None,), 8),
    ((4, 4), (None, 9), 4),
    ((4, 4), (None, 6), 8),
    ((8, 4), (None, 10), 8),
    ((4, 8), (None, 20), 16),
)


def make_shape(rng: random.Random) -> Shape:
    groups, windows, block_tokens = rng.choice(_SHAPES)
    return Shape(
        group_tokens=groups,
        windows=windows,
        block_tokens=block_tokens,
        world=rng.choice((1, 1, 2)),
        blocks=rng.choice((40, 50, 120)) * len(groups),
        budget=rng.choice((8, 24, 64)),
        running_max=rng.choice((2, 6)),
        lookahead=rng.choice((0, 0, 3)),
        prefix_cache=rng.random() < 0.6,
        ahead=rng.random() < 0.3,
        reuse_newest=rng.random() < 0.5,
    )


class Host:
    """One engine with its two halves."""

    def __init__(self, net: Net, rng: random.Random, name: str, shape: Shape) -> None:
        self.name, self.shape, self.scope = name, shape, b""
        rules = tuple(
            GroupRule() if window is None else window_rule(window, shape.block_tokens)
            for window in shape.windows
        )
        self.geometry = Geometry(shape.block_tokens, 4, shape.group_tokens, rules)
        self.memory = [bytearray(shape.blocks * shape.page_bytes) for _ in range(shape.world)]
        self.workers = [
            Worker(net, self._hello(name, rank, rules), shape, memory, rng)
            for rank, memory in enumerate(self.memory)
        ]
        credit = rng.choice((2, 6, 20))
        hello = p.Hello(p.VERSION, name, "scheduler", 0, shape.world, credit_slots=credit)
        self.client = StoreClient(Joiner(net, hello), lambda: net.now)
        self.half = SchedulerHalf(
            self.geometry,
            self.client,
            lambda: net.now,
            world=shape.world,
            shares_prefixes=shape.prefix_cache,
        )
        self.engine = Engine(shape, self.half, self.workers, self.memory, rng)

    def _hello(self, name: str, rank: int, rules: Sequence[GroupRule]) -> p.Hello:
        shape = self.shape
        groups = tuple(
            GroupGeometry(
                rule,
                (LayerGeometry(f"g{group}", tokens * TOKEN_BYTES, 1, rank, shape.world),),
            )
            for group, (rule, tokens) in enumerate(zip(rules, shape.group_tokens, strict=True))
        )
        per = tuple(shape.block_tokens // tokens for tokens in shape.group_tokens)
        geometry = RankGeometry(f"sim{shape.world}", shape.block_tokens, per, groups)
        return p.Hello(p.VERSION, name, "worker", rank, shape.world, geometry=geometry)

    def content(self, request: Request, group: int, index: int) -> bytes:
        """What a slot holds for one of the request's blocks: engine block, then rank."""
        tokens, first = self.shape.group_tokens[group], index * self.shape.block_tokens
        return b"".join(
            request.page(group, rank, at, at + tokens)
            for at in range(first, first + self.shape.block_tokens, tokens)
            for rank in range(self.shape.world)
        )
