"""What a worker writes to a peer's engine, without NIXL; and which bytes these are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from connectors.copies.host import Device, HostCopier
from connectors.direct_reads import CANCEL_NS, LATE_MAX, WRITE_NS, DirectTransfers
from connectors.engine_agent import AgentTransfer, overlaps_of
from connectors.store_connection import Link
from connectors.worker import WorkerHalf
from connectors.worker_copies import Copies, Session, WriteTask
from kvstore.core.errors import TierError
from kvstore.core.layout import PageRun, RankLayout, RankPages
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.fakes import u32
from tests.test_direct_worker import Reader

# The worker


NOWHERE = cast("Session", None)


class Writer(Reader):
    """Writes take as long as the test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = self.clean = False
        self.written: list[tuple[int, Sequence[int], Sequence[int]]] = []

    def write(
        self, ranks: Sequence[RankPages], group: int, blocks: Sequence[int], there: Sequence[int]
    ) -> AgentTransfer:
        if self.refuses:
            raise TierError("a test")
        assert [rank.agent for rank in ranks] == ["theirs"]
        self.written.append((group, blocks, there))
        return AgentTransfer(64, 1, [], clean=self.clean)


def worker() -> tuple[DirectTransfers, Writer, WriteTask]:
    made, writer = DirectTransfers.__new__(DirectTransfers), Writer()
    made._agent, made._send, made._late = writer, lambda _: None, []
    asked = p.WriteBlocks(7, 0, (RankPages("theirs", b"md", ((),)),), u32([1, 2]), u32([3, 4]))
    return made, writer, WriteTask(asked, NOWHERE)


def test_L1_direct_a_worker_writes_engine_blocks_to_a_peers() -> None:
    made, writer, giving = worker()
    writer.hangs = True
    assert made.advance_write(giving, 0, session_over=False) is None
    assert made.advance_write(giving, 1, session_over=False) is None
    assert writer.written == [(0, [1, 2], [3, 4])], "once"
    writer.hangs = False
    assert made.advance_write(giving, 2, session_over=False) == "all"
    assert giving.transfer is not None
    assert giving.transfer.bytes == 64


@pytest.mark.parametrize("how", ["session", "refused", "numbers", "clean", "failed"])
def test_B20_direct_a_worker_says_whether_something_may_still_come(how: str) -> None:
    made, writer, giving = worker()
    writer.refuses, writer.clean, writer.fails = (
        how == "refused",
        how == "clean",
        how in {"failed", "clean"},
    )
    if how == "numbers":
        giving.message = p.WriteBlocks(7, 0, (), b"abc", b"")
    end = made.advance_write(giving, 0, session_over=how == "session")
    assert end == ("failed" if how == "failed" else "none")
    assert writer.restarts == 0


@pytest.mark.parametrize("over", [False, True])
def test_B20_direct_a_write_that_does_not_end_may_still_come(*, over: bool) -> None:
    """What else goes through the agent goes on: the peer ends the one that is written."""
    made, writer, giving = worker()
    writer.hangs = True
    assert made.advance_write(giving, 0, session_over=False) is None
    limit_ns = CANCEL_NS if over else WRITE_NS
    for now_ns in (1, limit_ns - 1):
        assert made.advance_write(giving, now_ns, session_over=over) is None
    assert writer.restarts == 0
    assert made.advance_write(giving, limit_ns + 1, session_over=over) == "failed"
    assert writer.restarts == 0


def test_B20_direct_many_writes_that_do_not_end_end_with_the_agent() -> None:
    made, writer, giving = worker()

    def lost(count: int) -> None:
        writer.hangs = True
        for _ in range(count):
            late = WriteTask(giving.message, NOWHERE)
            assert made.advance_write(late, 0, session_over=False) is None
            assert made.advance_write(late, WRITE_NS, session_over=False) == "failed"

    lost(LATE_MAX)
    writer.hangs = False
    assert made.advance_write(WriteTask(giving.message, NOWHERE), 0, session_over=False) == "all"
    assert not made._late, "what has ended is no trouble"
    lost(LATE_MAX + 1)
    assert writer.restarts == 0
    assert made.advance_write(WriteTask(giving.message, NOWHERE), 0, session_over=False) is None
    assert writer.restarts == 1
    assert not made._late


@contextmanager
def copies_of(made: DirectTransfers) -> Iterator[tuple[Copies, Session, list[framing.Message]]]:
    """A worker's copies, its session, and what it says."""
    said: list[framing.Message] = []
    link = Link.__new__(Link)
    link.send = said.append  # type: ignore[method-assign, assignment]
    session = Session(link, p.Welcome(1), HostCopier({}, RankLayout(0, ())))
    copies = Copies(Device({}), (1,), made)
    copies.session = session
    yield copies, session, said
    copies.runner.close()


def test_O14_direct_a_write_of_a_session_that_is_over_is_not_begun_and_says_so() -> None:
    made, writer, giving = worker()
    with copies_of(made) as (copies, session, said):
        copies.session = None
        copies.write(giving.message, session)
        copies.runner.drain()
        assert said == [p.BlocksWritten(7, "none", 0)]
        assert not writer.written
        copies.session = session
        copies.write(giving.message, session)
        copies.runner.drain()
        assert said[1:] == [p.BlocksWritten(7, "all", 64)]
        assert not copies._writes_open


def test_B15_direct_a_store_hears_of_a_write_whatever_has_happened() -> None:
    made, _, giving = worker()
    made.advance_write = dict[int, str]().pop  # type: ignore[method-assign, assignment]
    with copies_of(made) as (copies, session, said):
        copies.write(giving.message, session)
    assert said == [p.BlocksWritten(7, "failed", 0)]
    assert not copies._writes_open


def test_P8_direct_memory_is_unmapped_whatever_is_written_to_peers() -> None:
    """The link thread waits for nobody else: peers' words on loads come through it."""
    made, writer, giving = worker()
    writer.hangs = True
    half = WorkerHalf.__new__(WorkerHalf)
    with copies_of(made) as (half._copies, session, said):
        assert half._handle(session, [giving.message, p.Extent(3)])
        assert said == [p.Mapped(3, gone=True)]
        writer.hangs = False
        half._copies.runner.drain()
        assert said[1:] == [p.BlocksWritten(7, "all", 64)]


# Which bytes both have


@pytest.mark.parametrize("seed", range(20))
def test_O20_ranks_write_together_all_of_each_rank_of_a_peers_once(seed: int) -> None:
    """Heads that several ranks of the peer's have go to each of them."""
    rng = random.Random(seed)
    part = 64 * rng.randint(1, 8)

    def pages(world: int, base: int, *, same: bool) -> list[tuple[PageRun, ...]]:
        size = part if same else part // world
        found: list[tuple[PageRun, ...]] = []
        for rank in range(world):
            pieces = rng.choice([n for n in (1, 2, 4) if size % n == 0])
            offset = 0 if same else rank * size
            cut = size // pieces, pieces, base + (rank << 20), 4096, size // pieces + 8
            found.append((PageRun(offset, *cut),))
        return found

    mine = pages(rng.choice([1, 2, 4]), 1 << 32, same=False)
    theirs = pages(rng.choice([1, 2, 4]), 1 << 40, same=rng.random() < 0.3)
    for rank in theirs:
        found = sorted(
            (each.base_there, each.size, each.base)
            for own in mine
            for each in overlaps_of(own, [rank], reads=False)
        )
        reached = torch.zeros(part, dtype=torch.int32)
        for there, size, here in found:
            begin = _offset(rank, there)
            assert begin == _offset(mine[(here - (1 << 32)) >> 20], here)
            reached[begin : begin + size] += 1
        begin = rank[0].offset
        end = begin + rank[0].pieces * rank[0].piece_bytes
        assert reached[begin:end].tolist() == [1] * (end - begin)
        assert int(reached.sum()) == end - begin


def _offset(pages: tuple[PageRun, ...], address: int) -> int:
    """Where in a part the byte at an address belongs."""
    (run,) = pages
    piece, inside = divmod(address - run.base, run.piece_stride)
    return run.offset + piece * run.piece_bytes + inside


def test_O20_pages_that_lie_one_over_another_are_an_error() -> None:
    own = [PageRun(16 * n, 16, 1, 4096, 512, 0) for n in range(8)]
    over = [PageRun(0, 128, 1, 4096, 512, 0) for _ in range(8)]
    with pytest.raises(TierError, match="one over another"):
        overlaps_of(own, [over], reads=False)
