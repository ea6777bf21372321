"""Who waits, who runs, and what is let go of when. Planning and updating both write here."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from operator import attrgetter

from connectors.scheduler import SchedulerHalf
from kvstore.core.errors import InvariantBroken
from tests.reference.ranks import Aggregator
from tests.reference.requests import Request, State, Work
from tests.reference.shape import Shape
from tests.reference.tables import Tables


class Book:
    """All requests of an engine, and their blocks."""

    def __init__(self, shape: Shape, connector: SchedulerHalf, aggregator: Aggregator) -> None:
        self.shape = shape
        self.connector = connector
        self.reports = aggregator
        self.tables = Tables(shape)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.received: set[str] = set()  # loads that are over, of requests that wait
        self.failed: set[str] = set()  # loads that lack something, over or not
        self.counts: Counter[str] = Counter()
        self.finished: list[str] = []
        self.ending: Callable[[Request], None] = lambda _: None  # a request is about to be let go
        self._arrivals = 0
        self._deferred: list[tuple[list[Work], list[list[int]]]] = []

    def add(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        self.requests[request.request_id] = request
        if self.shape.by_priority:
            insort(self.waiting, request, key=attrgetter("order"))
        else:
            self.waiting.append(request)
        self.connector.on_new_request(request)

    def queue(self) -> list[Request]:
        """Return who waits, in the order in which they are asked; who holds blocks goes first."""
        holding = [request for request in self.waiting if request.holds_blocks]
        return [*holding, *(r for r in self.waiting if not r.holds_blocks)]

    def preempt(self, request: Request, *, drop: bool = False) -> None:
        """Take a running request's blocks and let it start over, first of all.

        drop: output of steps under way is not wanted either.
        """
        self.counts["preempted"] += 1
        self.running.remove(request)
        self.free(request)
        request.rewind(drop=drop)
        request.state = State.WAITING
        request.preemptions += 1
        if self.shape.by_priority:
            insort(self.waiting, request, key=attrgetter("order"))
        else:
            self.waiting.insert(0, request)

    def freeable(self, request: Request) -> bool:
        """Tell whether a request's blocks are free at once when it lets go of them."""
        return not (self.shape.defer_frees and request.in_flight)

    def free(self, request: Request) -> None:
        """Free a request's blocks, or let them wait for the steps that may still write them."""
        blocks = self.tables.take_from(request)
        if self.freeable(request):
            self.tables.release(blocks)
        else:
            self.counts["deferred_frees"] += 1
            self._deferred.append((list(request.in_flight), blocks))

    def ran(self, works: list[Work]) -> None:
        gone = {id(work) for work in works}
        left = []
        for waits, blocks in self._deferred:
            still = [work for work in waits if id(work) not in gone]
            if still:
                left.append((still, blocks))
            else:
                self.tables.release(blocks)
        self._deferred = left

    def free_deferred(self) -> None:
        """Free what waits for steps that have all run."""
        for _, blocks in self._deferred:
            self.tables.release(blocks)
        self._deferred = []

    def finish(self, request: Request) -> None:
        """End a request; its blocks may be kept until the connector is through with them."""
        request_id = request.request_id
        loading = request.state is State.LOADING and request_id not in self.received
        self.counts["aborted_loading"] += loading
        self.ending(request)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.received.discard(request_id)
        self.failed.discard(request_id)
        request.state = State.DONE
        self.finished.append(request_id)
        end = 0 if request.in_flight else request.num_computed_tokens
        table = self.tables.shown(request, end, last=True)
        delay = self.connector.request_finished(request_id, table)
        if delay:
            self.counts["delayed_frees"] += 1
            self.reports.expect_send(request_id)
        if not loading and not delay:
            self.free(request)
            del self.requests[request_id]

    def let_go(self, request_id: str, what: str) -> None:
        """Free a request that has ended; its load is over, or its blocks were sent."""
        request = self.requests.get(request_id)
        if request is None or request.state is not State.DONE:
            state = "not there" if request is None else request.state.value
            raise InvariantBroken(f"{what} reported for {request_id}, which is {state}")
        self.free(request)
        del self.requests[request_id]
