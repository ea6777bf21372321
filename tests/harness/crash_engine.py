"""Engines for the crash campaign: real halves, real tensors, and bytes that follow from the tokens.

The engine is the reference engine. Here it runs on a thread of its own, its blocks are of a size
that fills a disk, and what each block must hold is written down where the campaign reads it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from time import monotonic_ns
from typing import NamedTuple

import xxhash

from connectors.scheduler import SchedulerHalf
from connectors.step_loads import StepLoads
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher
from kvstore.core.types import BlockKey, make_key
from kvstore.wire import engine as p
from tests.reference import (
    VOCABULARY,
    Engine,
    Group,
    Output,
    Rank,
    Request,
    Shape,
    TieredWorker,
)
from tests.reference.connector import attached
from tests.reference.text import slot_bytes

OPEN_MAX = 4  # requests of an engine at one time
FORWARD_S = 0.002
IDLE_S = 0.005
PROMPT_TOKENS = (24, 160)
HEADS, DOCUMENTS, RETURNING = 5, 30, 40
DRAIN_S = 300.0
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
        groups=tuple(Group(t, window) for t, window in zip(groups, windows, strict=True)),
        block_tokens=8,
        world=world,
        blocks=110 * len(groups),
        running_max=3,
        batches=2 if world > 1 else 1,
        token_bytes=token_bytes,
    )


class Truth(NamedTuple):
    """What a block must be: the key of the block before it, its bytes' size and checksum."""

    above: BlockKey | None
    size: int
    digest: bytes


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
        self._learned: dict[str, int] = {}  # blocks of a request that are in `truth`
        self._loaded: Counter[str] = Counter()
        shape = layout.shape
        self._geometry = shape.geometry
        memory = [bytearray(shape.blocks * shape.page_bytes) for _ in range(shape.world)]
        self.workers = [
            attached(name, layout.identity, shape, rank, pages, path, layout.layers)
            for rank, pages in enumerate(memory)
        ]
        hello = p.Hello(p.VERSION, name, "scheduler", 0, shape.world, credit_slots=CREDITS)
        self.client = StoreClient(Attacher(lambda: path, hello), monotonic_ns)
        block_bytes = shape.page_bytes * self._geometry.blocks_per_chunk[0]
        self._half = half = SchedulerHalf(
            self._geometry, self.client, world=shape.world, shares_prefixes=True,
            step_loads=StepLoads(block_bytes) if shape.batches == 1 else None,
        )  # fmt: skip
        self.ranks = [
            Rank(shape, rank, TieredWorker(worker), memory[rank])
            for rank, worker in enumerate(self.workers)
        ]
        self.engine = Engine(shape, half, self.ranks, rng)
        self.engine.book.ending = self._learn
        # Engines of one layout have the same heads and documents: they hit each other's blocks.
        common = random.Random(layout.identity)
        heads = [_tokens(common, 48) for _ in range(HEADS)]
        self._documents = [
            heads[number % HEADS] + _tokens(common, 150) for number in range(DOCUMENTS)
        ]
        self._returning: deque[list[int]] = deque(maxlen=RETURNING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}")

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
        self._half.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def raise_error(self) -> None:
        if self.error is not None:
            raise AssertionError(f"engine {self.name}: {self.error}") from self.error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._arrive()
                if self.engine.idle:
                    time.sleep(IDLE_S)
                    continue
                for output in self.engine.step():
                    self._count(output)
                for request in list(self.engine.requests.values()):
                    self._learn(request)
                time.sleep(FORWARD_S)
        except BaseException as exc:  # noqa: BLE001 - told to the campaign's thread
            self.error = exc

    def _count(self, output: Output) -> None:
        for tier, tokens in output.hits.sources.items():
            self._loaded[f"loaded from {tier}"] += tokens // self.layout.shape.block_tokens

    def _arrive(self) -> None:
        rng, engine = self._rng, self.engine
        if self.busy and len(engine.requests) < OPEN_MAX and rng.random() < 0.3:
            self._next += 1
            name = f"{self.name}r{self._next}"
            request = Request(name, self._prompt(), rng.choice((1, 4, 12)), self.layout.shape)
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
        shape, layers = self.layout.shape, self.layout.layers
        size = shape.block_tokens
        blocks = len(request.block_hashes) * shape.hash_tokens // size
        for index in range(self._learned.get(request.request_id, 0), blocks):
            above_hash = request.hash_at(index * size) if index else None
            for group, rule in enumerate(self._geometry.rules):
                key = make_key(request.hash_at((index + 1) * size), group)
                if key not in self._truth:
                    data = slot_bytes(shape, request.text, group, index, layers)
                    rooted = above_hash is None or rule.trailing is not None
                    above = None if rooted else make_key(above_hash or b"", group)
                    digest = xxhash.xxh3_128_digest(data)
                    self._truth[key] = Truth(above, len(data), digest)
        self._learned[request.request_id] = blocks

    @property
    def counts(self) -> Counter[str]:
        """What the engine did; blocks loaded, by tier, and of those read; tokens read in all."""
        blocks = self.engine.counts["loaded_tokens"] // self.layout.shape.block_tokens
        read = Counter({"loaded and read": blocks, "reads": sum(r.reads for r in self.ranks)})
        return self.engine.counts + self._loaded + read


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]
