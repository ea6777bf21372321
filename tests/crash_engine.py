"""Engines for the crash campaign: real halves, real tensors, and bytes that follow from the tokens.

The engine itself is the simulation's. Here it runs on a thread of its own, its blocks are of a
size that fills a disk, and what each block must hold is written down where the campaign reads it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from connectors.client import StoreClient
from connectors.link import Attacher, monotonic_ns
from connectors.requests import Geometry
from connectors.scheduler import SchedulerHalf
from connectors.worker import WorkerHalf
from kvstore import protocol as p
from kvstore.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.types import BlockKey, GroupRule, make_key, window_rule
from tests.sim_engine import Engine, Work
from tests.sim_model import HASH_TOKENS, VOCABULARY, Request, Shape, State
from tiers.copier import LayerCache

OPEN_MAX = 4  # requests of an engine at one time
FORWARD_S = 0.002
IDLE_S = 0.005
PROMPT_TOKENS = (24, 160)
HEADS, DOCUMENTS, RETURNING = 5, 30, 40
DRAIN_S = 60.0
CREDITS = 48


class Layout(NamedTuple):
    """What kind of engine it is; layouts differ in all that decides a slot's bytes."""

    identity: str
    shape: Shape
    layers: int  # of each group


def shape(
    groups: Sequence[int], windows: Sequence[int | None], *, world: int, token_bytes: int
) -> Shape:
    """A small engine with blocks of 8 tokens. groups: tokens of an engine block, per group."""
    return Shape(
        group_tokens=tuple(groups),
        windows=tuple(windows),
        block_tokens=8,
        world=world,
        blocks=110 * len(groups),
        budget=64,
        running_max=3,
        lookahead=0,
        prefix_cache=True,
        ahead=world > 1,
        reuse_newest=False,
        token_bytes=token_bytes,
    )


class Truth(NamedTuple):
    """What a block must be: the key of the block before it, its bytes' size and checksum."""

    above: BlockKey | None
    size: int
    digest: bytes


@cache
def _pattern(words: int) -> np.ndarray:
    return np.arange(words, dtype=np.uint32) * np.uint32(0x9E3779B1)


class BigRequest(Request):
    """A request whose tokens have token_bytes each, none of which equal another's."""

    def page(self, group: int, rank: int, first: int, end: int) -> bytes:
        marks = np.array(self.kv[group][rank][first:end], dtype=np.uint32)
        words = marks[:, None] ^ _pattern(self._shape.token_bytes // 4)
        return bytes(words.tobytes())


class CheckingEngine(Engine):
    """Counts what it loads, by tier, and what it checks."""

    def _admit(
        self,
        request: Request,
        start: int,
        external: int,
        hit: list[list[int]] | None,
        scheduled: list[Work],
    ) -> bool:
        admitted = super()._admit(request, start, external, hit, scheduled)
        if admitted and external:
            sources = self.half.hit_sources(request.request_id, external)
            for tier, tokens in sources.items():
                self.counts[f"loaded from {tier}"] += tokens // self.shape.block_tokens
        return admitted

    def check(self, request: Request, table: Sequence[Sequence[int]], first: int, end: int) -> None:
        super().check(request, table, first, end)
        self.counts["checks"] += 1
        if request.state is State.LOADING:
            self.counts["loaded and checked"] += (end - first) // self.shape.block_tokens


class CrashEngine:
    """One engine on a thread: requests come and go until it is told to stop."""

    def __init__(
        self, name: str, layout: Layout, seed: int, path: str, truth: dict[BlockKey, Truth]
    ) -> None:
        """path: the store's socket. truth: every block that may be stored is entered in it."""
        self.name, self.layout = name, layout
        self.error: BaseException | None = None
        self.busy = True  # new requests come
        self._truth = truth
        self._rng = rng = random.Random(seed)
        self._next = 0
        shape = layout.shape
        rules = tuple(
            GroupRule() if window is None else window_rule(window, shape.block_tokens)
            for window in shape.windows
        )
        self._geometry = Geometry(shape.block_tokens, HASH_TOKENS, shape.group_tokens, rules)
        memory = [bytearray(shape.blocks * shape.page_bytes) for _ in range(shape.world)]
        self.workers = [
            WorkerHalf(
                name,
                rank,
                shape.world,
                self._rank_geometry(rank),
                self._caches(torch.frombuffer(memory[rank], dtype=torch.uint8)),
                lambda: path,
            )
            for rank in range(shape.world)
        ]
        hello = p.Hello(p.VERSION, name, "scheduler", 0, shape.world, credit_slots=CREDITS)
        self.client = StoreClient(Attacher(lambda: path, hello), monotonic_ns)
        half = SchedulerHalf(
            self._geometry, self.client, monotonic_ns, world=shape.world, shares_prefixes=True
        )
        self.engine = CheckingEngine(shape, half, self.workers, memory, rng)
        self.engine.ending = self._learn
        # Engines of one layout have the same heads and documents: they hit each other's blocks.
        common = random.Random(layout.identity)
        heads = [_tokens(common, 48) for _ in range(HEADS)]
        self._documents = [
            heads[number % HEADS] + _tokens(common, 150) for number in range(DOCUMENTS)
        ]
        self._returning: deque[list[int]] = deque(maxlen=RETURNING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}")

    # Geometry

    def _layer_bytes(self, group: int) -> int:
        shape = self.layout.shape
        return shape.group_tokens[group] * shape.token_bytes // self.layout.layers

    def _rank_geometry(self, rank: int) -> RankGeometry:
        shape = self.layout.shape
        groups = tuple(
            GroupGeometry(
                rule,
                tuple(
                    LayerGeometry(f"{g}.{n}", self._layer_bytes(g), 1, rank, shape.world)
                    for n in range(self.layout.layers)
                ),
            )
            for g, rule in enumerate(self._geometry.rules)
        )
        per = self._geometry.blocks_per_chunk
        return RankGeometry(self.layout.identity, shape.block_tokens, per, groups)

    def _caches(self, storage: torch.Tensor) -> dict[str, LayerCache]:
        """A block's layers lie one after the other in its page."""
        page = self.layout.shape.page_bytes
        return {
            f"{g}.{n}": LayerCache(storage, n * size, page, size)
            for g in range(len(self._geometry.rules))
            for size in (self._layer_bytes(g),)
            for n in range(self.layout.layers)
        }

    def content(self, request: Request, group: int, index: int) -> bytes:
        """What a slot holds: engine block after engine block, in it layers, in these ranks."""
        shape = self.layout.shape
        tokens, size = shape.group_tokens[group], self._layer_bytes(group)
        first = index * shape.block_tokens
        parts = []
        for at in range(first, first + shape.block_tokens, tokens):
            pages = [request.page(group, rank, at, at + tokens) for rank in range(shape.world)]
            for layer in range(self.layout.layers):
                parts += [page[layer * size : (layer + 1) * size] for page in pages]
        return b"".join(parts)

    # The thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the requests that are there, and detach. Raises what went wrong on the thread."""
        self.busy = False
        end_s = time.monotonic() + DRAIN_S
        while self._thread.is_alive() and not self.engine.idle and time.monotonic() < end_s:
            time.sleep(0.01)
        self.abandon()
        self.raise_error()
        assert self.engine.idle, f"{self.name}: requests did not end: {self.engine.requests}"

    def abandon(self) -> None:
        """End the threads, whatever is under way; safe to call twice."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.engine.half.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def raise_error(self) -> None:
        if self.error is not None:
            raise AssertionError(f"engine {self.name}: {self.error}") from self.error

    @property
    def session(self) -> int:
        """Its number, which no other store gives; 0: not attached."""
        return self.client.session

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._arrive()
                if self.engine.idle:
                    time.sleep(IDLE_S)
                    continue
                self.engine.step()
                for request in list(self.engine.requests.values()):
                    self._learn(request)
                time.sleep(FORWARD_S)
        except BaseException as exc:  # noqa: BLE001 - told to the campaign's thread
            self.error = exc

    def _arrive(self) -> None:
        rng, engine = self._rng, self.engine
        if self.busy and len(engine.requests) < OPEN_MAX and rng.random() < 0.3:
            self._next += 1
            name = f"{self.name}r{self._next}"
            request = BigRequest(name, self._prompt(), rng.choice((1, 4, 12)), self.layout.shape)
            engine.add(request)
            self._learn(request)
        if engine.requests and rng.random() < 0.01:
            engine.abort(rng.choice(sorted(engine.requests)))

    def _prompt(self) -> list[int]:
        """A new prompt, a shared beginning with a new end, or one that was there before."""
        rng = self._rng
        if self._returning and rng.random() < 0.4:
            return list(rng.choice(self._returning))
        if rng.random() < 0.02:  # documents come and go
            at = rng.randrange(DOCUMENTS)
            self._documents[at] = self._documents[at][:48] + _tokens(rng, 150)
        kept = rng.randint(*PROMPT_TOKENS)
        prompt = rng.choice(self._documents)[:kept] + _tokens(rng, rng.choice((0, 7, 25)))
        self._returning.append(prompt)
        return prompt

    def _learn(self, request: Request) -> None:
        """Write down what each block of a request must hold."""
        size = self.layout.shape.block_tokens
        blocks = len(request.block_hashes) * HASH_TOKENS // size
        for index in range(request.learned, blocks):
            above_hash = request.hash_at(index * size) if index else None
            for group, rule in enumerate(self._geometry.rules):
                key = make_key(request.hash_at((index + 1) * size), group)
                if key not in self._truth:
                    data = self.content(request, group, index)
                    rooted = above_hash is None or rule.trailing is not None
                    above = None if rooted else make_key(above_hash or b"", group)
                    digest = xxhash.xxh3_128_digest(data)
                    self._truth[key] = Truth(above, len(data), digest)
        request.learned = blocks

    @property
    def counts(self) -> Counter[str]:
        return self.engine.counts


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]
