"""What a rank does in a step, as messages; and a rank in this process.

A rank knows no request and no scheduler: what it writes, and what it must find where it reads,
is in the message. So a rank may as well be a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.jobs import StepMeta
from connectors.reference.connector import WorkerSide
from connectors.reference.shape import Group, Shape
from connectors.reference.text import JUNK, Words, page_words, state_of, words_of
from kvstore.errors import InvariantBroken

POISON = 0xEEEEEEEE


class Span(msgspec.Struct, frozen=True):
    """Tokens first..end-1 of a request are computed into the engine blocks of `table`.

    marks: u32 of the tokens up to `valid`, see text; those from there to end are rejected drafts.
    """

    request_id: str
    first: int
    end: int
    valid: int
    marks: bytes
    table: list[list[int]]


class RankStep(msgspec.Struct, frozen=True):
    """One step of a rank. fresh: blocks that have a new owner, and no content."""

    meta: StepMeta
    fresh: list[int]
    spans: list[Span]


class RankReport(msgspec.Struct, frozen=True):
    """What a rank says after a step; see WorkerResults.

    unread: requests that read blocks which a load left wrong.
    """

    ended: set[str] = set()
    failed: set[str] = set()
    sent: set[str] = set()
    invalid: set[int] = set()
    over: frozenset[int] = frozenset()
    stats: Mapping[str, int] = {}
    unread: set[str] = set()


class Rank(Protocol):
    """One worker of the engine. Steps are submitted and collected in turn."""

    def submit(self, step: RankStep) -> None:
        """Start a step."""
        ...

    def collect(self) -> RankReport:
        """Wait for the step's end. Raises InvariantBroken if an attention read was wrong."""
        ...


class LocalRank:
    """A rank in this process; its memory is a buffer of `blocks` pages."""

    def __init__(
        self, shape: Shape, rank: int, side: WorkerSide, memory: bytearray | None = None
    ) -> None:
        """memory: shape.blocks pages of shape.page_bytes; None: its own. Raises ValueError."""
        size = shape.blocks * shape.page_bytes
        self.memory = bytearray(size) if memory is None else memory
        if len(self.memory) != size:
            raise ValueError(f"memory of {len(self.memory)} bytes, expected {size}")
        self.between: Callable[[], None] = lambda: None  # other threads' turn
        self.reads = 0  # tokens whose KV was read and found right, over groups
        self.number = rank
        self._side = side
        self._groups = shape.groups
        self._token_words = shape.token_words
        self._pages = np.frombuffer(self.memory, dtype=np.uint32).reshape(-1, page_words(shape))
        self._tokens = [
            self._pages[:, : kind.tokens * shape.token_words].reshape(
                shape.blocks, kind.tokens, shape.token_words
            )
            for kind in shape.groups
        ]
        self._bad: set[int] = set()  # blocks that a load left wrong
        self._step: RankStep | None = None

    def submit(self, step: RankStep) -> None:
        """Keep the step until it is collected."""
        if self._step is not None:
            raise InvariantBroken("a step is submitted before the last one was collected")
        self._step = step

    def collect(self) -> RankReport:
        """Run the step in the order of a vLLM worker."""
        step, self._step = self._step, None
        if step is None:
            raise InvariantBroken("a step is collected that was not submitted")
        self.between()
        self._side.before_step(step.meta)
        self._pages[step.fresh] = POISON
        self._bad.difference_update(step.fresh)
        self._side.start_loads(step.meta)
        self.between()
        marks = [np.frombuffer(span.marks, dtype=np.uint32) for span in step.spans]
        for span, known in zip(step.spans, marks, strict=True):
            self._read_states(span, known)
        for span, known in zip(step.spans, marks, strict=True):
            self._write(span, known)
        self._side.after_forward(step.meta)
        results = self._side.results(step.meta)
        self._bad |= results.invalid
        for span in step.spans:
            self._clear(span)
        unread = set()
        for span, known in zip(step.spans, marks, strict=True):
            if self._bad and self._reads_bad(span):
                unread.add(span.request_id)
            else:
                self._read(span, known)
        self.between()
        return RankReport(
            results.ended, results.failed, results.sent, results.invalid,
            results.over, results.stats, unread,
        )  # fmt: skip

    # The model

    def _write(self, span: Span, marks: Words) -> None:
        valid = max(span.first, span.valid)
        new = np.full(span.end - span.first, JUNK, dtype=np.uint32)
        new[: valid - span.first] = marks[span.first : valid]
        at = np.arange(span.first, span.end)
        for group, kind in enumerate(self._groups):
            if kind.state:
                block = span.table[group][(span.end - 1) // kind.tokens]
                self._tokens[group][block] = state_of(
                    int(new[-1]), kind.tokens, group, self.number, self._token_words
                )
                continue
            blocks, offsets = self._place(span, group, kind, at)
            words = words_of(new, group, self.number, self._token_words)
            self._tokens[group][blocks, offsets] = words

    def _place(
        self, span: Span, group: int, kind: Group, at: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        index, offsets = np.divmod(at, kind.tokens)
        blocks = np.array(span.table[group], dtype=np.int64)[index]
        if not blocks.all():
            raise InvariantBroken(f"{span.request_id} group {group}: tokens in the null block")
        return blocks, offsets

    def _read(self, span: Span, marks: Words) -> None:
        """Find what the computed tokens attend to: it must be what follows from the tokens."""
        for group, kind in enumerate(self._groups):
            first = 0
            if kind.state:
                continue
            if kind.window is not None:
                first = max(0, span.first - kind.window + 1)
            if first >= span.valid:
                continue
            blocks, offsets = self._place(span, group, kind, np.arange(first, span.valid))
            found = self._tokens[group][blocks, offsets]
            words = words_of(marks[first:], group, self.number, self._token_words)
            self._compare(span, group, first, found, words)

    def _read_states(self, span: Span, marks: Words) -> None:
        """Find the states that the step goes on from; it overwrites them."""
        if not span.first or span.first > span.valid:
            return
        for group, kind in enumerate(self._groups):
            if kind.state:
                block = span.table[group][(span.first - 1) // kind.tokens]
                mark = int(marks[span.first - 1])
                words = state_of(mark, kind.tokens, group, self.number, self._token_words)
                found = self._tokens[group][block]
                self._compare(span, group, span.first - 1, found, words)

    def _compare(self, span: Span, group: int, first: int, found: Words, words: Words) -> None:
        self.reads += len(words)
        if np.array_equal(found, words):
            return
        token = first + int(np.flatnonzero((found != words).any(axis=1))[0])
        size = self._groups[group].tokens
        raise InvariantBroken(
            f"wrong bytes: {span.request_id} rank {self.number} group {group} token {token}, engine"
            f" block {token // size} ({span.table[group][token // size]}), in a step of tokens"
            f" {span.first}..{span.end}"
        )

    def _clear(self, span: Span) -> None:
        """Blocks that were written from their first token on are right again."""
        for group, kind in enumerate(self._groups):
            first, end = -(-span.first // kind.tokens), -(-span.end // kind.tokens)
            self._bad.difference_update(span.table[group][first:end])

    def _reads_bad(self, span: Span) -> bool:
        ends = [-(-span.end // kind.tokens) for kind in self._groups]
        return any(
            not self._bad.isdisjoint(table[:end])
            for table, end in zip(span.table, ends, strict=True)
        )


class Report(msgspec.Struct):
    """What all ranks said after a step, added up as vLLM does."""

    over: Counter[int] = msgspec.field(default_factory=Counter)
    loaded: set[str] = set()
    failed: set[str] = set()
    sent: set[str] = set()
    invalid: set[int] = set()
    stats: Counter[str] = msgspec.field(default_factory=Counter)
    unread: set[str] = set()


class Aggregator:
    """Adds the ranks' reports up: what is reported by each counts when the last one has said so.

    Raises InvariantBroken for a report that nobody waits for; vLLM dies of it, too.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._loads: dict[str, set[int]] = {}  # ranks that have not reported
        self._sends: dict[str, set[int]] = {}
        self._failing: set[str] = set()

    def expect_load(self, request_id: str) -> None:
        """Wait for a load's end on every rank."""
        self._loads[request_id] = set(range(self._world))

    def expect_send(self, request_id: str) -> None:
        """Wait until every rank has sent a finished request's blocks."""
        self._sends[request_id] = set(range(self._world))

    def add_up(self, reports: list[RankReport]) -> Report:
        """Take a step's reports, in the order of the ranks."""
        total = Report()
        for rank, report in enumerate(reports):
            if not report.failed <= report.ended:
                raise InvariantBroken(f"{report.failed} failed, and only {report.ended} ended")
            self._failing |= report.failed
            self._count(self._loads, rank, report.ended, total.loaded, "load ended")
            self._count(self._sends, rank, report.sent, total.sent, "blocks were sent")
            total.over.update(report.over)
            total.stats.update(report.stats)
            total.invalid |= report.invalid
            total.unread |= report.unread
        total.failed = self._failing & total.loaded
        self._failing -= total.failed
        return total

    def _count(
        self, left: dict[str, set[int]], rank: int, ids: set[str], done: set[str], what: str
    ) -> None:
        for request_id in sorted(ids):
            ranks = left.get(request_id)
            if ranks is None or rank not in ranks:
                raise InvariantBroken(
                    f"rank {rank} reports of {request_id} that its {what}; nobody waits for it"
                )
            ranks.remove(rank)
            if not ranks:
                del left[request_id]
                done.add(request_id)
