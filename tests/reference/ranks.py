"""What a rank does in a step, and how the ranks' reports add up.

A rank knows no request and no scheduler: what it writes, and what it must find where it reads,
is in the step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from connectors.step_meta import StepMeta
from kvstore.core.errors import InvariantBroken
from tests.reference.connector import TieredWorker, WorkerResults
from tests.reference.shape import WORD_BYTES, Shape
from tests.reference.text import JUNK, words_of

POISON = b"\xee"


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


class RankReport(WorkerResults, frozen=True):
    """What a rank says after a step. unread: requests that read blocks which a load left wrong."""

    unread: set[str] = set()  # noqa: RUF012 - a struct copies its defaults


class Rank:
    """One worker of the engine; its memory is a buffer of `blocks` pages."""

    def __init__(
        self, shape: Shape, rank: int, side: TieredWorker, memory: bytearray | None = None
    ) -> None:
        """memory: shape.blocks pages of shape.page_bytes; None: its own."""
        self.memory = bytearray(shape.blocks * shape.page_bytes) if memory is None else memory
        self.between: Callable[[], None] = lambda: None  # other threads' turn
        self.reads = 0  # tokens whose KV was read and found right, over groups
        self.number = rank
        self._side = side
        self._groups = shape.groups
        self._states = [group for group, kind in enumerate(shape.groups) if kind.state]
        self._page_bytes = shape.page_bytes
        self._poisoned = POISON * shape.page_bytes
        self._token_bytes = shape.token_bytes
        self._token_words = shape.token_words
        self._bad: set[int] = set()  # blocks that a load left wrong

    def run(self, step: RankStep) -> RankReport:
        """Run a step in the order of a vLLM worker. Raises InvariantBroken for a wrong read."""
        self.between()
        self._side.before_step(step.meta)
        self._poison(step.fresh)
        for job in step.meta.loads:
            self._bad.difference_update(job.engine.block_ids)
        self._side.start_loads(step.meta)
        self.between()
        for span in step.spans if self._states else ():
            self._read_states(span)
        expected = [self._write(span) for span in step.spans]
        spoiled = self._spoil(step.spans, expected)
        self._side.after_forward(step.meta)
        results = self._side.results(step.meta)
        self._bad |= results.invalid
        if self._bad:
            for span in step.spans:
                self._clear(span)
        unread = {span.request_id for span in step.spans if self._bad and self._reads_bad(span)}
        for request_id, error in spoiled.items():
            if request_id not in unread:
                raise error
        self.between()
        return RankReport(**msgspec.structs.asdict(results), unread=unread)

    # The model

    def _poison(self, blocks: list[int]) -> None:
        size = self._page_bytes
        for block in blocks:
            self.memory[block * size : (block + 1) * size] = self._poisoned

    def _write(self, span: Span) -> list[bytes]:
        """Compute a span; return, by group, the words that it reads and then writes."""
        marks, size, expected = span.marks + JUNK * (span.end - span.valid), self._token_bytes, []
        for group, kind in enumerate(self._groups):
            if kind.state:
                words = self._state(group, marks[-WORD_BYTES:])
                at = span.table[group][(span.end - 1) // kind.tokens] * self._page_bytes
                self.memory[at : at + len(words)] = words
                expected.append(b"")
                continue
            first = self._first_read(group, span)
            words = words_of(marks[first * WORD_BYTES :], group, self.number, self._token_words)
            expected.append(words)
            self._fill(span, group, words[(span.first - first) * size :])
        return expected

    def _spoil(self, spans: list[Span], expected: list[list[bytes]]) -> dict[str, InvariantBroken]:
        """Let those who read what is wrong write what is wrong. Return what each has read."""
        spoiled = {}
        for span, words in zip(spans, expected, strict=True):
            error = self._read(span, words)
            if error is not None:
                spoiled[span.request_id] = error
                junk = POISON * (self._token_bytes * (span.end - span.first))
                for group, kind in enumerate(self._groups):
                    if not kind.state:
                        self._fill(span, group, junk)
        return spoiled

    def _state(self, group: int, mark: bytes) -> bytes:
        marks = mark * self._groups[group].tokens
        return words_of(marks, group, self.number, self._token_words)

    def _first_read(self, group: int, span: Span) -> int:
        """Return the first token that a span's first one attends to."""
        window = self._groups[group].window
        return 0 if window is None else max(0, span.first - window + 1)

    def _blocks(self, span: Span, group: int, first: int, end: int) -> list[int]:
        tokens = self._groups[group].tokens
        start, stop = first // tokens, -(-end // tokens)
        blocks = span.table[group][start:stop]
        if 0 in blocks or len(blocks) < stop - start:
            raise InvariantBroken(f"{span.request_id} group {group}: tokens in the null block")
        return blocks

    def _fill(self, span: Span, group: int, words: bytes) -> None:
        """Write a span's words into its blocks."""
        tokens, size, at = self._groups[group].tokens, self._token_bytes, 0
        start = span.first % tokens * size  # in the first block; the others are entered at 0
        for block in self._blocks(span, group, span.first, span.end):
            part = words[at : at + tokens * size - start]
            place = block * self._page_bytes + start
            self.memory[place : place + len(part)] = part
            at, start = at + len(part), 0

    def _read(self, span: Span, expected: list[bytes]) -> InvariantBroken | None:
        """Find what the computed tokens attend to. None: it is what follows from the tokens."""
        memory, page, size = self.memory, self._page_bytes, self._token_bytes
        for group, words in enumerate(expected):
            first = self._first_read(group, span)
            if not words or first >= span.valid:
                continue
            tokens = self._groups[group].tokens
            starts = [block * page for block in self._blocks(span, group, first, span.valid)]
            found = b"".join([memory[at : at + tokens * size] for at in starts])
            skip, length = first % tokens * size, (span.valid - first) * size
            self.reads += span.valid - first
            if found[skip : skip + length] != words[:length]:
                pairs = zip(found[skip:], words, strict=False)
                wrong = next(at for at, (one, other) in enumerate(pairs) if one != other)
                return self._wrong(span, group, first + wrong // size)
        return None

    def _read_states(self, span: Span) -> None:
        """Find the states that the step goes on from; it overwrites them."""
        if not span.first or span.first > span.valid:
            return
        end = span.first * WORD_BYTES
        for group in self._states:
            words = self._state(group, span.marks[end - WORD_BYTES : end])
            block = span.table[group][(span.first - 1) // self._groups[group].tokens]
            at = block * self._page_bytes
            self.reads += 1
            if self.memory[at : at + len(words)] != words:
                raise self._wrong(span, group, span.first - 1)

    def _wrong(self, span: Span, group: int, token: int) -> InvariantBroken:
        index = token // self._groups[group].tokens
        return InvariantBroken(
            f"wrong bytes: {span.request_id} rank {self.number} group {group} token {token}, engine"
            f" block {index} ({span.table[group][index]}), in a step of tokens"
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

    over: dict[int, int] = {}  # by job, the ranks on which it ended
    loaded: set[str] = set()
    failed: set[str] = set()
    sent: set[str] = set()
    invalid: set[int] = set()
    stats: dict[str, int] = {}
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
            for job in report.over:
                total.over[job] = total.over.get(job, 0) + 1
            for name, number in report.stats.items():
                total.stats[name] = total.stats.get(name, 0) + number
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
