"""The engine: requests in, steps, tokens out; up to `batches` steps are under way at one time.

A step is scheduled before the one before it is known, as vLLM does with asynchronous scheduling:

    schedule 1 | schedule 2, run 1, update 1 | schedule 3, run 2, update 2 | ...
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

from connectors.scheduler import SchedulerHalf
from tests.reference.book import Book
from tests.reference.device import Batch, Device
from tests.reference.ranks import Aggregator, Rank
from tests.reference.requests import Output, Request, State
from tests.reference.scheduler import Scheduler
from tests.reference.shape import Shape
from tests.reference.updates import Updates

DEVICE_AHEAD = 0.5  # share of steps that have run before anybody asks for their tokens


class Engine:
    """One engine. What its connector and ranks do wrong ends in InvariantBroken."""

    def __init__(
        self,
        shape: Shape,
        connector: SchedulerHalf,
        ranks: Sequence[Rank],
        rng: random.Random,
        *,
        accepted: float = 0.6,
        stopped: float = 0.02,
    ) -> None:
        """rng decides what a model would: drafts accepted, tokens that end a request."""
        self.shape = shape
        self.connector = connector
        self.weights = 0
        self._rng = rng
        self._in_flight: deque[Batch] = deque()
        aggregator = Aggregator(shape.world)
        self.book = Book(shape, connector, aggregator)
        self._scheduler = Scheduler(self.book)
        self._updates = Updates(self.book)
        self._device = Device(ranks, aggregator, rng, accepted, stopped)

    @property
    def requests(self) -> dict[str, Request]:
        """Requests that are there, ended ones whose blocks are kept included."""
        return self.book.requests

    @property
    def counts(self) -> Counter[str]:
        return self.book.counts

    @property
    def free_blocks(self) -> int:
        return len(self.book.tables.pool.free)

    @property
    def idle(self) -> bool:
        return not (self.requests or self._in_flight or self.connector.has_pending_work())

    def add(self, request: Request) -> None:
        request.text.weigh(self.weights)
        self.book.add(request)

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; one that has ended stays as it is."""
        request = self.requests[request_id]
        if request.state is not State.DONE:
            self.counts["aborted"] += 1
            self.book.finish(request)

    def step(self) -> list[Output]:
        """Schedule a step, and finish those that are not to stay under way."""
        batch = self._scheduler.schedule()
        self._in_flight.append(batch)
        keep = self.shape.batches - 1 if batch.works else 0
        if keep and self._rng.random() < DEVICE_AHEAD:
            self._device.run(self._in_flight[0])
        outputs = []
        while len(self._in_flight) > keep:
            oldest = self._in_flight.popleft()
            outputs.append(self._updates.take(oldest, self._device.run(oldest)))
        return outputs

    def reset(self, weights: int, nonce: bytes) -> None:
        """Change the weights and empty all caches; who runs starts over, in the same order.

        Raises RuntimeError while blocks are being loaded, or kept for the connector: those
        who ran start over all the same.
        """
        for batch in self._in_flight:
            self._device.run(batch)
        book = self.book
        while book.running:
            book.preempt(book.running[-1], drop=True)
        book.free_deferred()
        held = self.shape.blocks - 1 - self.free_blocks
        if held or not self.connector.reset_cache(nonce):
            raise RuntimeError(f"no reset: {held} engine blocks are being loaded or sent")
        book.tables.forget_all()
        self.weights = weights
        for request in self.requests.values():
            request.text.weigh(weights)
