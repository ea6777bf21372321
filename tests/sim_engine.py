"""A tiny engine for the simulation. Its KV bytes follow from the tokens, so a wrong one is seen.

What it shares with vLLM: a block pool with a prefix cache, null blocks outside of a sliding
window, chunked prefill under a token budget, preemption, asynchronous loads, block tables that
are freed at once, and (`ahead`) a step that is scheduled before the last one's tokens are known.
It asserts what vLLM asserts about reported loads.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from connectors.jobs import StepMeta
from connectors.requests import Step
from connectors.scheduler import SchedulerHalf
from tests.sim_model import POISON, BlockPool, Request, Shape, State


class Worker(Protocol):
    """A rank's worker half, as the engine calls it."""

    def before_step(self, meta: StepMeta) -> None: ...
    def start_loads(self, meta: StepMeta) -> None: ...
    def after_forward(self, meta: StepMeta) -> None: ...
    def finished_loads(self, meta: StepMeta) -> tuple[set[str], set[str]]: ...
    def take_stores_over(self) -> frozenset[int]: ...


class Report(msgspec.Struct, frozen=True):
    """What the ranks said after a step, added up as vLLM does."""

    over: Counter[int]
    loaded: set[str]
    failed: set[str]


class Work(msgspec.Struct, frozen=True):
    """Tokens first..end-1 of a request are computed, into the blocks of `table`."""

    request: Request
    epoch: int
    first: int
    end: int
    samples: bool
    table: list[list[int]]


class Batch(msgspec.Struct, eq=False):
    """One scheduled step. fresh: blocks whose old bytes are gone when it runs."""

    meta: StepMeta
    work: list[Work]
    fresh: list[int]
    report: Report | None = None


class Engine:
    """Scheduler and model of one engine; workers are called as vLLM's model runner does."""

    def __init__(
        self,
        shape: Shape,
        half: SchedulerHalf,
        workers: Sequence[Worker],
        memory: Sequence[bytearray],
        rng: random.Random,
    ) -> None:
        """memory: per rank, the pages of all blocks."""
        self.shape = shape
        self.half = half
        self.counts: Counter[str] = Counter()
        self.requests: dict[str, Request] = {}
        self.pool = BlockPool(shape.blocks, reuse_newest=shape.reuse_newest)
        self.weights = 0
        self.between: Callable[[], None] = lambda: None  # other threads' turn
        self.ending: Callable[[Request], None] = lambda _: None
        self._page_bytes = shape.page_bytes
        self._workers = workers
        self._memory = memory
        self._rng = rng
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._reports_left: dict[str, int] = {}
        self._failing: set[str] = set()
        self._unwritten: set[int] = set()
        self._in_flight: deque[Batch] = deque()

    # Requests come and go

    def add(self, request: Request) -> None:
        request.weigh(self.weights)
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self.half.on_new_request(request)

    def abort(self, request_id: str) -> None:
        request = self.requests[request_id]
        if request.state is not State.DONE:
            self.counts["aborted"] += 1
            self._finish(request)

    def _finish(self, request: Request) -> None:
        loading = request.state is State.LOADING and request.request_id not in self._received
        self.counts["aborted_loading"] += loading
        self.ending(request)
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        self._received.discard(request.request_id)
        self._failed.discard(request.request_id)
        request.state = State.DONE
        self.half.request_finished(request.request_id, request.table)
        if not loading:
            self._free(request)
            del self.requests[request.request_id]

    def _free(self, request: Request) -> None:
        for group, blocks in enumerate(request.table):
            self.pool.release(blocks)
            request.table[group] = []

    def _preempt(self, request: Request) -> None:
        self.counts["preempted"] += 1
        self._free(request)
        self._restart(request)
        self._waiting.insert(0, request)

    def _restart(self, request: Request) -> None:
        request.state, request.num_computed_tokens = State.WAITING, 0
        request.placeholders, request.epoch = 0, request.epoch + 1

    def reset(self, weights: int, nonce: bytes) -> bool:
        """Change the weights and empty all caches; False while blocks are being loaded."""
        held = any(r.state is State.DONE for r in self.requests.values())
        if held or self._in_flight or any(any(request.table) for request in self._waiting):
            return False
        for request in reversed(list(self._running)):
            self._running.remove(request)
            self._preempt(request)
        self.pool.forget_all()
        self.weights = weights
        for request in self.requests.values():
            request.weigh(weights)
        assert self.half.reset_cache(nonce), "reset_cache refused although nothing loads"
        return True

    # A step

    def step(self) -> None:
        batch = self._schedule()
        self._in_flight.append(batch)
        if not self.shape.ahead or self._rng.random() < 0.5:
            while self._in_flight and (not self.shape.ahead or len(self._in_flight) > 1):
                self._complete(self._in_flight.popleft())
            return
        oldest = self._in_flight[0]
        oldest.report = oldest.report or self._execute(oldest)  # executed, its tokens not known
        while len(self._in_flight) > 1:
            self._complete(self._in_flight.popleft())

    @property
    def idle(self) -> bool:
        work = any(batch.work for batch in self._in_flight)
        return not self.requests and not work and not self.half.has_pending_work()

    def _schedule(self) -> Batch:
        self._fresh: list[int] = []
        self._written: list[int] = []
        self._targets: dict[str, set[int]] = {}  # blocks that loads may fill
        self._budget = self.shape.budget
        scheduled: list[Work] = []
        preempted = self._schedule_running(scheduled)
        if not preempted:
            self._schedule_waiting(scheduled)
        tables = {work.request.request_id: work.request.table for work in scheduled}
        counts = {work.request.request_id: work.end - work.first for work in scheduled}
        meta = self.half.build_meta(Step(counts, self._written, tables.get, preempted))
        for job in meta.loads:
            assert self._targets[job.request_id].issuperset(job.engine.block_ids), "not asked for"
        for work in scheduled:
            work.request.num_computed_tokens = work.end
            work.request.placeholders += work.samples
        return Batch(meta, scheduled, self._fresh)

    def _schedule_running(self, scheduled: list[Work]) -> set[str]:
        preempted: set[str] = set()
        for request in list(self._running):
            if request.state is not State.RUNNING:
                continue
            want = min(self._left(request), self._budget)
            while want > 0:
                fresh = self._allocate(request, request.num_computed_tokens, want)
                if fresh is not None:
                    self._write(fresh, fresh)
                    self._plan(request, want, scheduled)
                    break
                victim = self._running.pop()
                preempted.add(victim.request_id)
                self._preempt(victim)
                if victim is request:
                    break
        return preempted

    def _left(self, request: Request) -> int:
        if request.num_tokens + request.placeholders >= request.tokens_max:
            return 0
        return request.num_tokens + request.placeholders - request.num_computed_tokens

    def _plan(self, request: Request, count: int, scheduled: list[Work]) -> None:
        first, end = request.num_computed_tokens, request.num_computed_tokens + count
        samples = end == request.num_tokens + request.placeholders
        table = [list(blocks) for blocks in request.table]
        scheduled.append(Work(request, request.epoch, first, end, samples, table))
        self._budget -= count
        self._publish(request, min(end, request.num_tokens))

    def _write(self, blocks: Iterable[int], fresh: Iterable[int]) -> None:
        self._written.extend(blocks)
        new = [block for block in fresh if block in self._unwritten]
        self._unwritten.difference_update(new)
        self._fresh.extend(new)

    def _schedule_waiting(self, scheduled: list[Work]) -> None:
        holding = [r for r in self._waiting if any(r.table)]
        for request in [*holding, *(r for r in self._waiting if not any(r.table))]:
            if self._budget <= 0 or len(self._running) >= self.shape.running_max:
                return
            if request.state is State.LOADING and not self._promote(request):
                continue
            external: int | None = 0
            hit: list[list[int]] | None = None
            start = request.num_computed_tokens
            if start == 0:
                start, hit = self._local_hit(request)
                external, is_async = self.half.get_num_new_matched_tokens(request.request_id, start)
                if external is None:
                    assert not is_async
                    self.counts["deferred"] += 1
                    continue
                assert is_async == (external > 0)
                assert start + external < request.num_tokens
            if not self._admit(request, start, external or 0, hit, scheduled):
                return

    def _admit(
        self,
        request: Request,
        start: int,
        external: int,
        hit: list[list[int]] | None,
        scheduled: list[Work],
    ) -> bool:
        count = 0 if external else min(request.num_tokens - start, self._budget)
        fresh = self._allocate(request, start + external, count, hit, loading=external > 0)
        if fresh is None:
            return False
        table = request.table if external else ()
        self.half.update_state_after_alloc(request.request_id, table, external)
        request.num_computed_tokens = start + external
        if external:
            self.counts["loads"] += 1
            request.state, request.local = State.LOADING, start
            targets: set[int] = set()
            for blocks, tokens in zip(request.table, self.shape.group_tokens, strict=True):
                targets.update(blocks[start // tokens : (start + external) // tokens])
            self._targets[request.request_id] = targets
            self._write((), targets)
            self._reports_left[request.request_id] = self.shape.world
            return True
        self._waiting.remove(request)
        self._running.append(request)
        request.state = State.RUNNING
        for blocks, tokens in zip(request.table, self.shape.group_tokens, strict=True):
            self._write(blocks[start // tokens :], blocks)
        self._plan(request, count, scheduled)
        return True

    def _promote(self, request: Request) -> bool:
        if request.request_id not in self._received:
            return False
        self._received.remove(request.request_id)
        if request.request_id in self._failed:
            self._failed.remove(request.request_id)
            self._free(request)
            self._restart(request)
            return True
        request.state = State.WAITING
        self._publish(request, request.num_computed_tokens)
        return True

    # Blocks

    def _local_hit(self, request: Request) -> tuple[int, list[list[int]]]:
        align = math.lcm(*self.shape.group_tokens)
        end = (request.num_tokens - 1) // align * align if self.shape.prefix_cache else 0
        while end:
            found = [self._cached_blocks(request, g, end) for g in range(len(request.table))]
            if all(blocks is not None for blocks in found):
                return end, [blocks or [] for blocks in found]
            end -= align
        return 0, [[] for _ in request.table]

    def _cached_blocks(self, request: Request, group: int, end: int) -> list[int] | None:
        tokens = self.shape.group_tokens[group]
        first = self._window_start(group, end)
        blocks = [0] * first
        for index in range(first, end // tokens):
            block = self.pool.cached.get((group, request.hash_at((index + 1) * tokens)))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _window_start(self, group: int, tokens: int) -> int:
        """First engine block that a token at this position attends to."""
        window = self.shape.windows[group]
        return (
            0 if window is None else max(0, tokens - window + 1) // self.shape.group_tokens[group]
        )

    def _allocate(
        self,
        request: Request,
        computed: int,
        count: int,
        hit: list[list[int]] | None = None,
        *,
        loading: bool = False,
    ) -> list[int] | None:
        """Give a request blocks for `count` tokens beyond `computed`; None if too few are free."""
        tables: list[list[int]] = []
        needs: list[int] = []
        shared: list[int] = []
        for group, tokens in enumerate(self.shape.group_tokens):
            skipped = self._window_start(group, computed)
            old = request.table[group] if hit is None else hit[group]
            if hit is None:
                self.pool.release(old[:skipped])
                old[:skipped] = [0] * min(skipped, len(old))
            table = [0] * min(skipped, len(old)) + old[skipped:]
            table += [0] * (skipped - len(table))
            total = -(-(computed + count + self.shape.lookahead) // tokens)
            tables.append(table)
            needs.append(max(0, total - len(table)))
            if hit is not None:
                shared.extend(block for block in table if block)
        used = sum(1 for block in shared if block in self.pool.free)
        reserve = self._reserved(request) if loading else 0
        if sum(needs) + used + reserve > len(self.pool.free):
            return None
        self.pool.share(shared)
        fresh: list[int] = []
        for group, need in enumerate(needs):
            taken = self.pool.take(need)
            request.table[group] = tables[group] + taken
            fresh.extend(taken)
        self._unwritten.update(fresh)
        return fresh

    def _reserved(self, request: Request) -> int:
        """Blocks that requests holding loaded ones still need: they cannot be preempted."""
        others = [r for r in self._waiting if any(r.table) or r is request]
        return sum(
            -(-(r.tokens_max + self.shape.lookahead) // tokens) - len(r.table[group])
            for r in others
            for group, tokens in enumerate(self.shape.group_tokens)
        )

    def _publish(self, request: Request, tokens: int) -> None:
        if not self.shape.prefix_cache:
            return
        for group, size in enumerate(self.shape.group_tokens):
            for index in range(tokens // size):
                block_hash = request.hash_at((index + 1) * size)
                self.pool.publish(request.table[group][index], group, block_hash)

    # The model

    def _place(self, block: int, offset: int = 0) -> int:
        return block * self._page_bytes + offset * self.shape.token_bytes

    def _execute(self, batch: Batch) -> Report:
        self.between()
        for worker in self._workers:
            worker.before_step(batch.meta)
        page = POISON * self._page_bytes
        for memory in self._memory:
            for block in batch.fresh:
                memory[self._place(block) : self._place(block + 1)] = page
        for worker in self._workers:
            worker.start_loads(batch.meta)
        self.between()
        for work in batch.work:
            self._compute(work)
        for work in batch.work:
            if work.epoch == work.request.epoch:
                first = 0 if self._rng.random() < 0.2 else work.first
                self.check(work.request, work.table, first, work.end)
        for worker in self._workers:
            worker.after_forward(batch.meta)
        self.between()
        return self._collect(batch.meta)

    def _compute(self, work: Work) -> None:
        request = work.request
        for group, tokens in enumerate(self.shape.group_tokens):
            position = work.first
            while position < work.end:
                until = min(work.end, (position // tokens + 1) * tokens)
                at = self._place(work.table[group][position // tokens], position % tokens)
                for rank, memory in enumerate(self._memory):
                    page = request.page(group, rank, position, until)
                    memory[at : at + len(page)] = page
                position = until
        if work.samples and len(request.device) == work.end:
            request.sample()

    def check(self, request: Request, table: Sequence[Sequence[int]], first: int, end: int) -> None:
        """What the next token attends to must be what the model computes from the tokens."""
        for group, tokens in enumerate(self.shape.group_tokens):
            start = max(first // tokens, self._window_start(group, end))
            for index in range(start, -(-end // tokens)):
                block, until = table[group][index], min(end, (index + 1) * tokens)
                size = (until - index * tokens) * self.shape.token_bytes
                for rank, memory in enumerate(self._memory):
                    found = memory[self._place(block) : self._place(block) + size]
                    assert found == request.page(group, rank, index * tokens, until), (
                        f"wrong bytes: {request.request_id} group {group} engine block {index}"
                        f" ({block}) rank {rank}, tokens ..{end}, local {request.local}"
                    )

    def _collect(self, meta: StepMeta) -> Report:
        report = Report(Counter(), set(), set())
        for worker in self._workers:
            ended, failed = worker.finished_loads(meta)
            report.over.update(worker.take_stores_over())
            assert failed <= ended, "a failed load that is not reported as ended"
            self._failing |= failed
            for request_id in sorted(ended):
                left = self._reports_left.get(request_id, 0) - 1
                assert left >= 0, f"{request_id}: a load reported that is not under way"
                self._reports_left[request_id] = left
                if left == 0:
                    del self._reports_left[request_id]
                    report.loaded.add(request_id)
        report.failed.update(self._failing & report.loaded)
        self._failing -= report.failed
        return report

    def _complete(self, batch: Batch) -> None:
        """Execute a step, if that has not happened, and take in what came out."""
        report = batch.report or self._execute(batch)
        for request_id in report.failed:
            request = self.requests.get(request_id)
            if request is not None and request.state is State.LOADING:
                request.num_computed_tokens = 0
                self._failed.add(request_id)
        for work in batch.work:
            request = work.request
            stale = request.state is State.DONE or request.epoch != work.epoch
            if work.samples and not stale:
                request.placeholders -= 1
                request.know(request.num_tokens + 1)
                stopped = self._rng.random() < 0.02
                if request.num_tokens >= request.tokens_max or stopped:
                    self.counts["finished"] += 1
                    self._finish(request)
        loaded = sorted(report.loaded)  # the order of a set of strings is not a seed's
        self.half.on_output(report.over, loaded, report.failed)
        for request_id in loaded:
            self._loaded(self.requests[request_id], failed=request_id in report.failed)

    def _loaded(self, request: Request, *, failed: bool) -> None:
        self.counts["loads_failed"] += failed
        if request.state is State.LOADING:
            assert request.request_id not in self._received, "reported twice"
            self._received.add(request.request_id)
            if not failed:
                self.check(request, request.table, request.local, request.num_computed_tokens)
            return
        assert request.state is State.DONE, f"a load reported for a request {request.state}"
        self._free(request)
        del self.requests[request.request_id]
