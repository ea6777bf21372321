"""An engine of one request at a time around a paged model, with both real halves of the connector.

A step is planned while the device computes the one before, as engines do that schedule ahead: what
is waited for is the end of the step before that, and the first token. Blocks of ended requests stay
in the engine's own cache until that is dropped.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from connectors.copies.host import LayerCache
from connectors.engine_interface import BlockTable, Geometry, Step
from connectors.scheduler import SchedulerHalf
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher
from connectors.worker import WorkerHalf
from kvstore.config import parse_socket
from kvstore.core.errors import KVStoreError
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule
from kvstore.wire import engine as p
from tests.bench.paged import PagedModel, Shape

OWN = "gpu"  # the source of what the engine's cache has
HASH_BYTES = 32
ATTACH_S = 60.0  # pins memory, and measures what copies it fastest
LOAD_S = 120.0
STEPS_AHEAD = 2
_Event: Any = torch.cuda.Event  # which has no types
_NAME = "bench-gpu-ttft"


class Prompt:
    """Tokens that follow from a number, and the hashes of their blocks, each with all before it."""

    def __init__(self, shape: Shape, number: int) -> None:
        """Tokens fill whole blocks, and one is left over."""
        made = torch.Generator().manual_seed(number)
        drawn = torch.randint(shape.vocabulary, (shape.whole_tokens + 1,), generator=made)
        self.tokens: list[int] = drawn.tolist()
        self.hashes: list[bytes] = []
        above = b""
        for block in drawn[:-1].view(shape.prompt_blocks, -1).numpy():
            above = hashlib.blake2b(above + block.tobytes(), digest_size=HASH_BYTES).digest()
            self.hashes.append(above)


class Request:
    """A prompt on its way; what the scheduler half asks of requests, and its blocks."""

    def __init__(self, request_id: str, prompt: Prompt) -> None:
        self.request_id = request_id
        self.block_hashes: Sequence[bytes] = prompt.hashes
        self.all_token_ids: Sequence[int] = prompt.tokens
        self.num_tokens = len(prompt.tokens)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.table: list[int] = []


class Answer(msgspec.Struct, frozen=True):
    """A prompt's first token, how long it took, and where its KV came from.

    fingerprint: a number for each of its blocks, as they were when the token was there.
    sources: tokens that were not computed, by the tier that had them; the engine's is "gpu".
    """

    token: int
    fingerprint: tuple[int, ...]
    seconds: float
    sources: dict[str, int]


class PagedEngine:
    """Attached to a store on entering the context."""

    def __init__(self, address: str, shape: Shape, device: torch.device) -> None:
        """Its own cache has room for one prompt, and for another one that runs."""
        self.shape = shape
        self.client: StoreClient
        self.half: SchedulerHalf
        self._path = parse_socket(address)
        count = 2 * (shape.prompt_blocks + 1)
        self._model = PagedModel(shape, count + 1, device)
        self._free = deque(range(1, count + 1))
        self._cached: dict[bytes, int] = {}
        self._request: Request | None = None
        self._written: list[int] = []
        self._storing: set[int] = set()
        self._requests = 0
        self._computing: deque[Any] = deque()  # events behind the last steps, on a GPU

    def __enter__(self) -> Self:
        shape, rules = self.shape, (GroupRule(None),)
        caches = {f"layer.{i}": _cache(pages) for i, pages in enumerate(self._model.pages)}
        layers = tuple(LayerGeometry(name, shape.page_bytes) for name in caches)
        group = GroupGeometry(rules[0], layers)
        geometry = RankGeometry(_NAME, shape.block_tokens, (1,), (group,))
        self.worker = WorkerHalf(_NAME, 0, 1, geometry, caches, lambda: self._path)
        credit = credit_blocks(shape)
        hello = p.Hello(p.VERSION, _NAME, "scheduler", 0, 1, credit_slots=credit)
        self.client = StoreClient(Attacher(lambda: self._path, hello), monotonic_ns)
        tokens = Geometry(shape.block_tokens, shape.block_tokens, (shape.block_tokens,), rules)
        self.half = SchedulerHalf(tokens, self.client)
        try:
            self._attach()
        except BaseException:
            self.close()
            raise
        return self

    def _attach(self) -> None:
        if not self.client.wait_attached(ATTACH_S):
            raise KVStoreError(f"not attached to the store in {ATTACH_S:.0f} s")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Detach."""
        self.half.shutdown()
        self.worker.shutdown()

    @property
    def storing(self) -> bool:
        """Tell whether copies of the engine's blocks are under way, or still to be asked for."""
        return bool(self._storing) or self.half.has_pending_work()

    def run(self, prompt: Prompt) -> Answer:
        """Compute a prompt's first token and what nobody has of its KV; then comes end()."""
        tokens = self._model.upload(prompt.tokens)
        self._requests += 1
        request = self._request = Request(f"request {self._requests}", prompt)
        begun = time.perf_counter()
        self.half.on_new_request(request)
        sources = self._admit(request)
        logits = None
        while request.num_computed_tokens < request.num_tokens:
            logits = self._compute(request, tokens)
        if logits is None:
            raise KVStoreError("a prompt was there as a whole, its last token included")
        token = int(logits.argmax())  # waits for the device
        seconds = time.perf_counter() - begun
        table = self._model.upload(request.table[: self.shape.prompt_blocks])
        return Answer(token, tuple(self._model.fingerprint(table).tolist()), seconds, sources)

    def _admit(self, request: Request) -> dict[str, int]:
        """Give a request the blocks that are here, and load what the store has."""
        for block_hash in request.block_hashes:
            if block_hash not in self._cached:
                break
            request.table.append(self._cached[block_hash])
        local = len(request.table) * self.shape.block_tokens
        name = request.request_id
        external, _ = self.half.get_num_new_matched_tokens(name, local)
        while external is None:
            self.idle()
            external, _ = self.half.get_num_new_matched_tokens(name, local)
        self._allocate(request, local + external)
        self.half.update_state_after_alloc(name, (request.table,), external)
        sources = {OWN: local} if local else {}
        if external:
            sources |= self.half.hit_sources(name, external)
            self._load(request)
        request.num_computed_tokens = local + external
        return sources

    def _load(self, request: Request) -> None:
        name, limit_s = request.request_id, time.monotonic() + LOAD_S
        ended, failed = self.idle()
        while name not in ended:
            if time.monotonic() > limit_s:
                raise KVStoreError(f"the load for {name} has not ended in {LOAD_S:.0f} s")
            ended, failed = self.idle()
        if failed:
            raise KVStoreError(f"the load for {name} failed")
        self.half.update_state_after_alloc(name, (request.table,), 0)

    def _compute(self, request: Request, tokens: Tensor) -> Tensor:
        """Compute a chunk; the last token by itself, since a hit leaves that one only.

        Computed among others, it might differ from there in its last bits.
        """
        if len(self._computing) == STEPS_AHEAD:
            self._computing.popleft().synchronize()
        first = request.num_computed_tokens
        count = min(self.shape.whole_tokens - first, self.shape.step_tokens) or 1
        self._allocate(request, first + count)
        table = self._model.upload(request.table)
        chunk = tokens[first : first + count]
        logits: list[Tensor] = []
        scheduled = {request.request_id: count}
        self._step(scheduled, lambda: logits.append(self._model.forward(chunk, first, table)))
        if self._model.device.type == "cuda":  # in host memory a step has ended here
            self._computing.append(_Event())
            self._computing[-1].record()
        request.num_computed_tokens += count
        return logits[0]

    def idle(self) -> tuple[set[str], set[str]]:
        """Take a step that computes nothing; return loads that ended, and which failed."""
        return self._step({}, lambda: None)

    def _step(
        self, scheduled: dict[str, int], forward: Callable[[], None]
    ) -> tuple[set[str], set[str]]:
        """Take an engine step, in the order that engines call a connector."""
        written, self._written = self._written, []
        meta = self.half.build_meta(Step(scheduled, written, self._table))
        self._storing.update(job.job_id for job in (*meta.early, *meta.stores))
        self.worker.before_step(meta)
        self.worker.start_loads(meta)
        forward()
        self.worker.after_forward(meta)
        ended, failed = self.worker.finished_loads(meta)
        over = self.worker.take_stores_over()
        self._storing.difference_update(over)
        self.half.on_output(Counter(over), ended, failed)
        return ended, failed

    def _table(self, _request_id: str) -> BlockTable | None:
        return None if self._request is None else (self._request.table,)

    def _allocate(self, request: Request, tokens: int) -> None:
        count = -(-tokens // self.shape.block_tokens) - len(request.table)
        if count > len(self._free):
            raise KVStoreError(f"{count} engine blocks wanted, {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        request.table += blocks
        self._written += blocks

    def end(self) -> None:
        """End the request: its blocks stay in the cache. Raises KVStoreError if there is none."""
        request, self._request = self._request, None
        if request is None:
            raise KVStoreError("no request to end")
        self.half.request_finished(request.request_id, (request.table,))
        whole = request.table[: len(request.block_hashes)]
        self._cached.update(zip(request.block_hashes, whole, strict=True))
        self._free.extend(request.table[len(whole) :])

    def drop_cache(self) -> None:
        """Forget all blocks, and what is in them. Raises KVStoreError while some are read."""
        if self.storing:
            raise KVStoreError("engine blocks are still being copied to the store")
        self._free.extend(self._cached.values())
        self._cached.clear()
        self._model.poison()


def credit_blocks(shape: Shape) -> int:
    """Count the slots to have in advance: half a prompt, two large steps.

    A store fills credits up when an eighth is gone, so a bit more.
    """
    return shape.prompt_blocks * 3 // 5


def _cache(pages: Tensor) -> LayerCache:
    storage = pages.view(torch.uint8).view(-1)
    size = len(storage) // len(pages)
    return LayerCache(storage, 0, size, size)
