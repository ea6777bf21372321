"""The device: runs scheduled steps in order, samples, and tells the ranks what to compute.

Tokens are sampled here once for all ranks. What the scheduler did not know when it planned a step
(drafts rejected in a step before it) moves the step's tokens back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from connectors.step_meta import StepMeta
from kvstore.core.errors import InvariantBroken
from tests.reference.ranks import Aggregator, Rank, RankStep, Report, Span
from tests.reference.requests import HitStats, Work


class Batch(msgspec.Struct, eq=False):
    """One scheduled step. fresh: blocks whose old bytes are gone when it runs.

    report: set once it has run.
    """

    meta: StepMeta
    works: list[Work]
    fresh: list[int]
    hits: HitStats
    report: Report | None = None


class Device:
    """All ranks."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        aggregator: Aggregator,
        rng: random.Random,
        accepted: float,
        stopped: float,
    ) -> None:
        """accepted: share of drafts that turn out right. stopped: share of tokens that end."""
        self.ranks = ranks
        self._aggregator = aggregator
        self._rng = rng
        self._accepted = accepted
        self._stopped = stopped

    def run(self, batch: Batch) -> Report:
        """Run a step, if that has not happened, and return what the ranks reported."""
        if batch.report is None:
            spans = [self._span(work) for work in batch.works]
            step = RankStep(batch.meta, batch.fresh, spans)
            batch.report = self._aggregator.add_up([rank.run(step) for rank in self.ranks])
        return batch.report

    def _span(self, work: Work) -> Span:
        request, text = work.request, work.request.text
        back = sum(before.rejected for before in work.before)
        first, end = work.first - back, work.end - back
        valid = min(end, len(text))
        if work.samples and not work.dropped:
            if len(text) != end - work.drafts:
                raise InvariantBroken(
                    f"{request.request_id}: a step samples after token {end - work.drafts},"
                    f" {len(text)} are known"
                )
            self._sample(work)
            valid = end - work.rejected
        return Span(request.request_id, first, end, valid, text.marks(0, valid), work.table)

    def _sample(self, work: Work) -> None:
        """Accept leading drafts, and add the token after them."""
        text, right = work.request.text, 0
        while right < work.drafts and self._rng.random() < self._accepted:
            right += 1
        work.rejected = work.drafts - right
        work.tokens = [text.sample() for _ in range(right + 1)]
        for number in range(right + 1):
            if self._rng.random() < self._stopped:
                work.tokens, work.stopped = work.tokens[: number + 1], True
                break
