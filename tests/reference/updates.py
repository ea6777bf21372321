"""Takes in what came out of a step: tokens, failed loads, ended loads, blocks that were sent."""

from __future__ import annotations

from connectors.events import BlockEvent
from kvstore.core.errors import InvariantBroken
from tests.reference.book import Book
from tests.reference.device import Batch
from tests.reference.ranks import Report
from tests.reference.requests import HitStats, Output, Request, State, Work


class Updates:
    """One call of `take` for each step, in the order in which they were scheduled."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def take(self, batch: Batch, report: Report) -> Output:
        """Book a step's results, and return what it gives to the user."""
        book, tokens = self._book, {}
        for work in batch.works:
            work.request.in_flight.remove(work)
        self._fail_loads(report.failed)
        skipped = self._take_invalid(report.invalid, batch)
        for work in batch.works:
            request = work.request
            if request.request_id in skipped or work.dropped or request.state is State.DONE:
                continue
            if request.request_id in report.unread:
                raise InvariantBroken(
                    f"{request.request_id} goes on with what was read from a failed load"
                )
            book.counts["loaded_tokens"] += work.loaded
            if work.samples:
                tokens[request.request_id] = self._deliver(request, work)
        book.ran(batch.works)
        if report.invalid:
            book.tables.unpublish(book.connector.step_loads_failed(report.invalid))
        loaded = sorted(report.loaded)  # the order of a set of strings is not a seed's
        book.connector.on_output(report.over, loaded, report.failed)
        for request_id in loaded:
            self._end_load(request_id)
        for request_id in sorted(report.sent):
            book.let_go(request_id, "blocks sent")
        finished, book.finished = book.finished, []
        events: list[tuple[bool, bytes, int] | BlockEvent] = [*book.tables.pool.events]
        book.tables.pool.events = []
        stats = report.stats
        for name, number in book.connector.take_stats().items():
            stats[name] = stats.get(name, 0) + number
        events += book.connector.take_events()
        return Output(tokens, finished, batch.hits, stats, events)

    # Loads

    def _fail_loads(self, failed: set[str]) -> None:
        for request_id in failed:
            request = self._book.requests.get(request_id)
            if request is not None and request.state is State.LOADING:
                request.num_computed_tokens = 0
                self._book.failed.add(request_id)

    def _end_load(self, request_id: str) -> None:
        book = self._book
        request = book.requests.get(request_id)
        if request is None or request.state is not State.LOADING:
            book.let_go(request_id, "load ended")
            return
        if request_id in book.received:
            raise InvariantBroken(f"a load reported twice for {request_id}")
        book.received.add(request_id)

    def _take_invalid(self, invalid: set[int], batch: Batch) -> set[str]:
        """Take requests back to the first of these blocks; return those whose output is void.

        A request that loads goes on from there once its load has ended. One that runs resumes
        from there; of several that share a block, the first computes it again.
        """
        if not invalid:
            return set()
        if len(self._book.shape.groups) > 1:
            raise InvariantBroken("blocks were reported as failed in an engine of several groups")
        for request in self._book.waiting:
            if request.state is State.LOADING:
                end = request.num_computed_tokens
                if self._cut(request, end, invalid, set()):
                    self._book.failed.add(request.request_id)
        works = {work.request.request_id: work for work in batch.works}
        void, taken = set(), set[int]()
        for request in self._book.running:
            own = [works[request.request_id]] if request.request_id in works else []
            under_way = [work for work in [*own, *request.in_flight] if not work.stale]
            computed = request.num_computed_tokens
            if under_way:
                computed = under_way[0].first - sum(w.rejected for w in under_way[0].before)
            found = request.hit.local + request.hit.external
            if self._cut(request, computed, invalid, taken):
                lost = found - max(request.hit.local, request.num_computed_tokens)
                self._lose(request, batch.hits, lost)
                void.add(request.request_id)
        return void

    def _cut(self, request: Request, computed: int, invalid: set[int], taken: set[int]) -> bool:
        """Set progress back to the first bad block that nobody else computes; False if unhurt."""
        size = self._book.shape.groups[0].tokens
        blocks = request.table[0][: -(-computed // size)]
        bad = [index for index, block in enumerate(blocks) if block in invalid]
        if not bad:
            return False
        own = [index for index in bad if blocks[index] not in taken]
        taken.update(blocks[index] for index in own)
        request.num_computed_tokens = min(computed, own[0] * size) if own else computed
        return True

    def _lose(self, request: Request, hits: HitStats, lost: int) -> None:
        """Void a running request's output, of steps under way too; shrink what was counted.

        Its blocks from there on are no longer found by others, who would read what is wrong if
        it were preempted or ended now.
        """
        self._book.counts["sync_failed"] += 1
        index = request.num_computed_tokens // self._book.shape.groups[0].tokens
        self._book.tables.unpublish(request.table[0][index:])
        request.published[0] = min(request.published[0], index)
        request.placeholders = request.drafts = 0
        request.disown(drop=True)
        lost = min(request.hit.external, max(0, lost))
        request.hit.external -= lost
        if request.preemptions:
            hits.hit_again -= lost
        else:
            hits.external -= lost

    # Tokens

    def _deliver(self, request: Request, work: Work) -> list[int]:
        """Give a request its tokens; it may end with them."""
        if not work.stale:
            request.num_computed_tokens -= work.rejected
            request.placeholders -= 1 + work.drafts
            if request.placeholders < 0:
                raise InvariantBroken(f"{request.request_id}: more tokens than were scheduled")
        tokens = work.tokens[: request.tokens_max - request.num_tokens]
        request.know(request.num_tokens + len(tokens))
        if not work.stale:
            settled = min(request.num_tokens, request.num_computed_tokens - request.placeholders)
            self._book.tables.publish(request, settled, 0)
        if work.stopped or request.num_tokens >= request.tokens_max:
            self._book.counts["finished"] += 1
            self._book.finish(request)
        return tokens
