"""The least engine that drives both halves: requests, block tables, steps, and no model.

Requests prefill in chunks, decode one token a step and end. Blocks have a few bytes, since what
is measured here is planning, not copying.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Self, TypeVar

import torch

from connectors.copies.host import LayerCache
from connectors.engine_interface import Geometry, Step
from connectors.scheduler import SchedulerHalf
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher
from connectors.worker import WorkerHalf
from kvstore.core.errors import KVStoreError
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule
from kvstore.settings import read_socket
from kvstore.wire import engine as p

BLOCK_TOKENS = 16
STEP_TOKENS = 2048
PAGE_BYTES = 64
# What a step's forward pass takes: faster than engines' are, yet the store has its turn.
FORWARD_S = 0.002
FORWARD_S_PER_TOKEN = 4e-6
HASH_BYTES = 32
ATTACH_S = 20.0
_R = TypeVar("_R")


class Request:
    """A prompt given by the hashes of its full blocks, the tokens after these, and the output."""

    def __init__(
        self, request_id: str, hashes: list[bytes], output_tokens: int, rest_tokens: int = 1
    ) -> None:
        self.request_id = request_id
        self.block_hashes = hashes
        self.all_token_ids: Sequence[int] = ()  # of no use: nothing is handed over
        self.num_tokens = len(hashes) * BLOCK_TOKENS + rest_tokens
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.tokens_max = self.num_tokens + output_tokens
        self.table: list[int] = []


class Cpu:
    """Adds up this thread's CPU time in chosen calls."""

    def __init__(self) -> None:
        self.ns = 0

    def of(self, call: Callable[..., _R], *arguments: object) -> _R:
        """Call and count."""
        started_ns = time.thread_time_ns()
        result = call(*arguments)
        self.ns += time.thread_time_ns() - started_ns
        return result


class BenchEngine:
    """Both halves attached to a store, and the loop that drives them."""

    def __init__(self, address: str, blocks: int, requests_max: int) -> None:
        """blocks: of the engine's own memory. requests_max: that run at one time."""
        self.client: StoreClient
        self.half: SchedulerHalf
        self.arrival_ns: list[int] = []
        self._path = read_socket(address, {})
        self._requests_max = requests_max
        self._free = deque(range(1, blocks + 1))
        self._memory = torch.zeros((blocks + 1) * PAGE_BYTES, dtype=torch.uint8)
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._rng = random.Random(20)

    def __enter__(self) -> Self:
        rules = (GroupRule(None),)
        layers = (LayerGeometry("layer", PAGE_BYTES),)
        geometry = RankGeometry("bench", BLOCK_TOKENS, (1,), (GroupGeometry(rules[0], layers),))
        caches = {"layer": LayerCache(self._memory, 0, PAGE_BYTES, PAGE_BYTES)}
        self.worker = WorkerHalf("bench", 0, 1, geometry, caches, lambda: self._path)
        credit = 2 * STEP_TOKENS // BLOCK_TOKENS + self._requests_max
        hello = p.Hello(p.VERSION, "bench", "scheduler", 0, 1, credit_slots=credit)
        self.client = StoreClient(Attacher(lambda: self._path, hello), monotonic_ns)
        tokens = Geometry(BLOCK_TOKENS, BLOCK_TOKENS, (BLOCK_TOKENS,), rules)
        self.half = SchedulerHalf(tokens, self.client)
        if not self.client.wait_attached(ATTACH_S):
            self.__exit__()
            raise KVStoreError(f"not attached to the store in {ATTACH_S:.0f} s")
        return self

    def __exit__(self, *_exc: object) -> None:
        self.half.shutdown()
        self.worker.shutdown()

    def new_hashes(self, prompt_tokens: int) -> list[bytes]:
        """Return the block hashes of a prompt that nobody has seen."""
        count = prompt_tokens // BLOCK_TOKENS
        return [self._rng.randbytes(HASH_BYTES) for _ in range(count)]

    def add(self, request: Request) -> None:
        """A request arrives."""
        cpu = Cpu()
        cpu.of(self.half.on_new_request, request)
        self.arrival_ns.append(cpu.ns)
        self._waiting.append(request)

    @property
    def waiting(self) -> int:
        """Count the requests that do not run yet."""
        return len(self._waiting) + len(self._loading)

    @property
    def busy(self) -> bool:
        """Tell whether there is a request."""
        return bool(self._waiting or self._loading or self._running)

    def step(self) -> int:
        """Take one engine step; return the scheduler half's CPU time in nanoseconds."""
        cpu = Cpu()
        written: list[int] = []
        self._admit(cpu, written)
        scheduled = self._schedule(written)
        step = Step(scheduled, written, lambda name: (self._running[name].table,))
        meta = cpu.of(self.half.build_meta, step)
        self.worker.before_step(meta)
        self.worker.start_loads(meta)
        time.sleep(FORWARD_S + FORWARD_S_PER_TOKEN * sum(scheduled.values()))
        finished = [self._running[name] for name in scheduled if self._advance(name, scheduled)]
        self.worker.after_forward(meta)
        loaded, failed = self.worker.finished_loads(meta)
        over = Counter(self.worker.take_stores_over())
        cpu.of(self.half.on_output, over, loaded, failed)
        if failed:
            raise KVStoreError(f"loads failed: {failed}")
        for name in loaded:
            self._running[name] = request = self._loading.pop(name)
            cpu.of(self.half.update_state_after_alloc, name, (request.table,), 0)
        for request in finished:
            del self._running[request.request_id]
            cpu.of(self.half.request_finished, request.request_id, (request.table,))
            self._free.extend(request.table)
        return cpu.ns

    def _admit(self, cpu: Cpu, written: list[int]) -> None:
        for _ in range(len(self._waiting)):
            if len(self._running) + len(self._loading) >= self._requests_max:
                return
            request = self._waiting.popleft()
            external, _ = cpu.of(self.half.get_num_new_matched_tokens, request.request_id, 0)
            if external is None:
                self._waiting.append(request)
                continue
            written += self._allocate(request, external)
            table = (request.table,)
            cpu.of(self.half.update_state_after_alloc, request.request_id, table, external)
            request.num_computed_tokens = external
            (self._loading if external else self._running)[request.request_id] = request

    def _allocate(self, request: Request, tokens: int) -> list[int]:
        count = -(-tokens // BLOCK_TOKENS) - len(request.table)
        blocks = [self._free.popleft() for _ in range(count)]
        request.table += blocks
        return blocks

    def _schedule(self, written: list[int]) -> dict[str, int]:
        """Decodes first, then chunks of prompts, within one step's tokens."""
        scheduled: dict[str, int] = {}
        left = STEP_TOKENS
        for name, request in self._running.items():
            tokens = min(left, request.num_tokens - request.num_computed_tokens)
            if tokens:
                scheduled[name] = tokens
                left -= tokens
                written += self._allocate(request, request.num_computed_tokens + tokens)
        return scheduled

    def _advance(self, name: str, scheduled: dict[str, int]) -> bool:
        """Add what the forward pass gave; True at a request's end."""
        request = self._running[name]
        request.num_computed_tokens += scheduled[name]
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1
            if request.num_tokens % BLOCK_TOKENS == 0:
                request.block_hashes.append(self._rng.randbytes(HASH_BYTES))
        return request.num_tokens >= request.tokens_max
