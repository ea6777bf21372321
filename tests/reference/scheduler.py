"""Plans a step: who runs, with how many tokens, in which blocks, and who goes back to the queue."""

from __future__ import annotations

from collections.abc import Iterable

from connectors.engine_interface import Step
from kvstore.core.errors import InvariantBroken
from tests.reference.book import Book
from tests.reference.device import Batch
from tests.reference.requests import Hit, HitStats, Request, State, Work


class Scheduler:
    """One call of `schedule` a step; running requests go first, then the queue."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._shape = book.shape
        self._tables = book.tables
        self._begin()

    def _begin(self) -> None:
        self._budget = self._shape.budget
        self._works: dict[str, Work] = {}
        self._fresh: list[int] = []
        self._written: list[int] = []
        self._targets: dict[str, set[int]] = {}  # blocks that loads may fill
        self._published: dict[str, list[int]] = {}
        self._preempted: set[str] = set()
        self._hits = HitStats()

    def schedule(self) -> Batch:
        """Plan the next step; its tokens count as computed from now on."""
        self._begin()
        self._tables.start_step()
        self._schedule_running()
        if not self._preempted:  # blocks were short: nobody new comes in
            self._schedule_waiting()
        works = list(self._works.values())
        counts = {work.request.request_id: work.end - work.first for work in works}
        meta = self._book.connector.build_meta(
            Step(counts, self._written, self._table, self._preempted)
        )
        for job in meta.loads:
            if not self._targets[job.request_id].issuperset(job.engine.block_ids):
                raise InvariantBroken(f"a load for {job.request_id} fills what was not asked for")
        for work in works:
            request = work.request
            request.num_computed_tokens = work.end
            request.in_flight.append(work)
            if work.samples:
                request.placeholders += 1 + work.drafts
                request.drafts = self._shape.drafts
        return Batch(meta, works, self._fresh, self._hits)

    def _table(self, request_id: str) -> list[list[int]]:
        work = self._works[request_id]
        return self._tables.shown(work.request, work.end)

    # Who runs

    def _schedule_running(self) -> None:
        running, index = self._book.running, 0
        while index < len(running) and self._budget > 0:
            request = running[index]
            count = self._clip(request, request.num_computed_tokens, self._wanted(request))
            if count > 0:
                fresh = self._make_room(request, count)
                if fresh is None:
                    return
                self._write(fresh, fresh)
                self._plan(request, request.num_computed_tokens, count)
                index = running.index(request)
            index += 1

    def _wanted(self, request: Request) -> int:
        """Count the tokens to compute, drafts included; 0 if its last step is under way."""
        waiting = request.placeholders
        if waiting and request.num_computed_tokens + 2 - waiting >= request.tokens_max:
            return 0  # even if all drafts are rejected, what is under way is the end
        return request.num_tokens + request.drafts + waiting - request.num_computed_tokens

    def _clip(self, request: Request, first: int, count: int) -> int:
        """Cut to the budget, and to where a state is to be kept."""
        count = min(count, self._budget)
        size = self._shape.state_tokens
        last = request.num_tokens // size * size
        if size > 1 and first < last < first + count:
            return last - first
        if size > 1 and first + count < last:
            return (first + count) // size * size - first
        return count

    def _make_room(self, request: Request, count: int) -> list[int] | None:
        """Allocate, preempting others for it; None if the request cannot run in this step."""
        running = self._book.running
        while True:
            end = request.num_computed_tokens + count
            fresh = self._tables.allocate(request, request.settled_tokens, end)
            if fresh is not None:
                return fresh
            if self._shape.by_priority:
                victim = max(running, key=lambda other: other.order)
            else:
                victim = running[-1]
            if not self._book.freeable(victim):
                return None  # its blocks would come too late
            work = self._works.pop(victim.request_id, None)
            if work is not None:
                self._budget += work.end - work.first
                self._tables.unpublish(self._published.pop(victim.request_id))
            self._preempted.add(victim.request_id)
            self._book.preempt(victim)
            if victim is request:
                return None

    def _plan(self, request: Request, first: int, count: int, loaded: int = 0) -> None:
        end, known = first + count, request.num_tokens + request.placeholders
        before = tuple(work for work in request.in_flight if not work.stale)
        table = [list(blocks) for blocks in request.table]
        drafts = max(0, end - known)
        self._works[request.request_id] = Work(
            request, first, end, drafts, end >= known, table, before, loaded
        )
        self._budget -= count
        verified = min(end, request.num_tokens)
        self._published[request.request_id] = self._tables.publish(request, verified, end)

    def _write(self, blocks: Iterable[int], fresh: Iterable[int]) -> None:
        self._written.extend(blocks)
        self._fresh.extend(self._tables.first_written(fresh))

    # Who comes in

    def _schedule_waiting(self) -> None:
        book = self._book
        for request in book.queue() if book.waiting else ():
            if self._budget <= 0 or len(book.running) >= self._shape.running_max:
                return
            if request.state is State.LOADING and not self._promote(request):
                continue
            if request.awaits_output:
                continue
            if not self._admit(request):
                return

    def _promote(self, request: Request) -> bool:
        """Let a request whose load is over go on; False if it is not."""
        book, request_id = self._book, request.request_id
        if request_id not in book.received:
            return False
        book.received.remove(request_id)
        request.state = State.WAITING
        if request_id in book.failed:
            book.failed.remove(request_id)
            book.counts["loads_failed"] += 1
            lost = request.hit.local + request.hit.external - request.num_computed_tokens
            request.hit.external -= lost
            if not request.num_computed_tokens:
                self._tables.release(self._tables.take_from(request))
                request.rewind(drop=False)
                return True
        computed = request.num_computed_tokens
        self._tables.publish(request, computed, computed)
        if computed == request.num_tokens:
            request.num_computed_tokens -= 1  # the next one can be sampled only after the last
        return True

    def _admit(self, request: Request) -> bool:
        """Let a request run or load, or ask again later; False: no room, nor for any behind it."""
        start, hit = request.num_computed_tokens, None
        external, loads = 0, False
        if start == 0 and not request.holds_blocks:
            start, hit = self._tables.local_hit(request)
            answer, loads = self._book.connector.get_num_new_matched_tokens(
                request.request_id, start
            )
            if answer is None:
                if loads:
                    raise InvariantBroken("'ask again later' with a load")
                self._book.counts["deferred"] += 1
                return True
            external = answer
            self._check_answer(request, start + external, external, loads=loads)
            request.hit = Hit(request.num_tokens - start, start, external)
        if loads:
            return self._load(request, start, external, hit)
        return self._run(request, start, external, hit)

    def _check_answer(self, request: Request, end: int, external: int, *, loads: bool) -> None:
        most = request.num_tokens - (not loads or self._shape.has_state)
        if external < 0 or (loads and not external) or (external and end > most):
            raise InvariantBroken(
                f"{request.request_id}: {external} tokens to load up to {end}, expected at most"
                f" {most}, and none without a load"
            )

    def _load(
        self, request: Request, start: int, external: int, hit: list[list[int]] | None
    ) -> bool:
        end, book = start + external, self._book
        held = [other for other in book.waiting if other.holds_blocks or other is request]
        # Who loads cannot be preempted, so all of them must be able to get to their ends.
        keep = sum(self._tables.blocks_left(other) for other in held)
        keep -= sum(-(-end // tokens) for tokens in self._shape.group_tokens)
        if self._tables.allocate(request, end, end, hit, max(0, keep)) is None:
            return False
        book.connector.update_state_after_alloc(request.request_id, request.table, external)
        book.counts["loads"] += 1
        targets = self._tables.from_token(request, start, end)
        self._targets[request.request_id] = set(targets)
        self._write((), targets)
        book.reports.expect_load(request.request_id)
        request.num_computed_tokens = end
        request.state = State.LOADING
        return True

    def _run(
        self, request: Request, start: int, external: int, hit: list[list[int]] | None
    ) -> bool:
        first, book = start + external, self._book
        count = self._clip(request, first, request.num_tokens - first)
        if count <= 0 or self._tables.allocate(request, first, first + count, hit) is None:
            return False
        table = request.table if external else ()
        book.connector.update_state_after_alloc(request.request_id, table, external)
        request.num_computed_tokens = first
        book.waiting.remove(request)
        book.running.append(request)
        request.state = State.RUNNING
        blocks = self._tables.from_token(request, 0)
        self._targets[request.request_id] = set(self._tables.from_token(request, start, first))
        self._write(self._tables.from_token(request, start), blocks)
        self._count(request)
        self._plan(request, first, count, request.hit.external)
        return True

    def _count(self, request: Request) -> None:
        """Count what was found for a request that starts to run."""
        hits, hit = self._hits, request.hit
        if request.preemptions:
            hits.asked_again += hit.asked
            hits.hit_again += hit.external
            return
        hits.asked += hit.asked
        hits.local += hit.local
        hits.external += hit.external
        if hit.external:
            sources = self._book.connector.hit_sources(request.request_id, hit.external)
            for tier, tokens in sources.items():
                hits.sources[tier] = hits.sources.get(tier, 0) + tokens
