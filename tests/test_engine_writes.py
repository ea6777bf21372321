"""What engines write to engines of peers: what the stores do, and the worker, without NIXL."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from connectors.direct_reads import WriteEnd
from kvstore.core.errors import ProtocolError
from kvstore.core.layout import METADATA_MAX, PageRun, RankPages
from kvstore.handover import engine_writes as under_test
from kvstore.handover import jobs, moves
from kvstore.handover.engine_blocks import Resident
from kvstore.handover.engine_writes import AT_ONCE, LOST_NS, OF_PEER, SLOW_NS, WAIT_NS, EngineWrites
from kvstore.handover.peers import Peers
from kvstore.handover.runs import Part
from kvstore.handover.transfers import EngineWrite
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.fakes import from_u32, keys_of, u32
from tests.harness.handover_pair import Pair, stored
from tests.test_direct_push import RANKS, TARGETS, claimed, filled, job_of
from tests.test_residents import Announced
from tiers.nixl.messages import Fill

# The store that has the blocks


def given(pair: Pair, **how: bool) -> None:
    """All that engines were told to write has ended."""
    told, pair.engine_writes = pair.engine_writes, []
    for part, _ in told:
        pair.producer.written(part, **how)
    pair.run(5)


def shown(*positions: int) -> tuple[Pair, list[bytes], Announced, int]:
    """A pushed fetch of three blocks, of which an engine has some; all are to be written."""
    pair, chain = stored(3)
    memory = Announced(pair)
    memory.add(chain, *positions)
    number = claimed(pair, chain)
    pair.name(number, TARGETS)
    pair.run(5)
    return pair, chain, memory, number


def test_L1_direct_an_engine_writes_what_it_has_and_the_exporter_the_rest() -> None:
    pair, _, _, number = shown(0, 2)
    ((part, give),) = pair.engine_writes
    assert list(part.positions) == [0, 2]
    assert (give.engine, give.group, give.blocks, give.targets) == (1, 0, [0, 20], [10, 12])
    assert [(rank.agent, rank.metadata) for rank in give.ranks] == [
        ("rank 0", b""),
        ("rank 1", b""),
    ]
    assert [blocks for _, _, _, blocks in filled(pair)] == [[11], [11]]
    assert pair.passed == {(number, 1): True}, "the others are being written"
    given(pair, ok=True)
    assert pair.passed == {(number, position): True for position in range(3)}
    assert pair.consumer.fetched == {"gpu": 2, "cpu": 1}
    assert not pair.unsafe
    pair.check_nothing_left()


def test_B19_direct_what_an_engine_overwrote_meanwhile_is_written_from_its_slot() -> None:
    pair, chain, memory, number = shown(0, 1, 2)
    memory.here[keys_of(chain)[1]] = Resident(2, (7, 8), (0, 0))  # another engine computed it
    given(pair, ok=True)
    assert [blocks for _, _, _, blocks in filled(pair)] == [[11], [11]]
    assert not pair.engine_writes, "an engine that has it is not asked twice"
    assert pair.passed == {(number, position): True for position in range(3)}
    assert pair.consumer.fetched == {"gpu": 2, "cpu": 1}
    pair.check_nothing_left()


def test_B15_direct_what_an_engine_could_not_begin_is_written_from_slots() -> None:
    pair, _, _, number = shown(0, 1, 2)
    given(pair, ok=False, stopped=True)
    assert sorted(block for _, _, _, blocks in filled(pair) for block in blocks) == [
        *(10, 10, 11, 11, 12, 12)
    ]
    assert pair.passed == {(number, position): True for position in range(3)}
    assert pair.consumer.fetched == {"cpu": 3}
    pair.check_nothing_left()


def test_B20_direct_what_an_engine_has_half_written_fails() -> None:
    """Some of it may still come, so it is written by nobody else, and not used."""
    pair, _, _, number = shown(0)
    given(pair, ok=False)
    assert pair.passed[number, 0] is False
    assert (number, 0) in pair.unsafe
    assert not any(10 in blocks for _, _, _, blocks in filled(pair))
    pair.check_nothing_left()


def test_P3_direct_what_an_engine_has_written_is_good_whatever_it_overwrites_then() -> None:
    """It is the peer's own by then."""
    pair, _, memory, number = shown(0)
    ((part, _),) = pair.engine_writes
    pair.producer.written(part, ok=True)
    memory.here.clear()
    pair.run(5)
    assert pair.passed[number, 0]
    assert not pair.producer.counts["stale"]
    pair.check_nothing_left()


def test_B19_direct_a_write_that_stopped_though_it_was_wanted_has_not_been_made() -> None:
    """By an exporter whose memory a peer has written over, say."""
    pair, chain = stored(1)
    held: list[Part] = []
    pair.moves.start = lambda part, *_: held.append(part)  # type: ignore[method-assign]
    number = claimed(pair, chain)
    pair.name(number, {0: [10]})
    pair.run(5)
    for part in held:
        pair.producer.written(part, ok=False, stopped=True)
    pair.run(5)
    assert pair.passed == {(number, 0): False}
    pair.check_nothing_left()


@pytest.mark.parametrize("how", [{"ok": True}, {"ok": False, "stopped": True}])
def test_B20_direct_what_nobody_waits_for_is_not_written_once_more(how: dict[str, bool]) -> None:
    pair, _, memory, number = shown(0, 1, 2)
    assert job_of(pair).states[0] == moves.MOVING
    pair.read(number, [0, 1, 2], ok=False)
    pair.run(5)
    assert len(pair.unsafe) == 3
    assert [[*part.positions] for part in pair.abandoned] == [[0, 1, 2]], "or they begin later"
    memory.here.clear()
    given(pair, **how)
    assert not pair.filled
    assert not pair.unsafe, "its peer has said that nothing more comes"
    pair.check_nothing_left()


def test_L1_direct_an_engine_of_smaller_blocks_than_were_named_writes_none() -> None:
    """Its block has two engine blocks, and the peer has named three of its own."""
    pair, chain = stored(1)
    Announced(pair).add(chain, 0)
    claimed(pair, chain)
    pair.run(5)
    job = job_of(pair)
    job.ranks, job.targets[0] = RANKS, [10, 11, 12]
    written = [write for _, write in job.direct_writes([0])]
    fills = [from_u32(write.blocks) for write in written if isinstance(write, Fill)]
    assert fills == [[10, 11, 12]] * len(RANKS)
    assert len(fills) == len(written)


def test_B13_direct_an_engine_writes_wanted_parts_to_ranks_that_have_the_group() -> None:
    pair, chain = stored(1)
    Announced(pair).add(chain, 0)
    claimed(pair, chain)
    pair.run(5)
    job = job_of(pair)
    theirs = replace(RANKS[1], gpu=3)
    job.ranks, job.targets[0] = (RankPages("none", b"", ((),)), theirs), [0, 31]
    ((part, give),) = job.direct_writes([0])
    assert isinstance(give, EngineWrite)
    assert (give.blocks, give.targets, part.positions) == ([1], [31], [0])
    assert [(rank.agent, rank.gpu) for rank in give.ranks] == [("rank 1", 3)]
    job.writes.clear()


def test_many_blocks_of_an_engine_are_written_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "FILL_BYTES", 1)
    pair, _, _, number = shown(0, 1, 2)
    assert [give.targets for _, give in pair.engine_writes] == [[10], [11], [12]]
    given(pair, ok=True)
    assert pair.passed == {(number, position): True for position in range(3)}


def test_B2_direct_what_is_written_at_once_is_not_too_many_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is an address; all of a rank's are made before the first is written."""
    pair, chain, memory, _ = shown(0, 1, 2)
    assert [len(part.positions) for part, _ in pair.engine_writes] == [3]
    pair.engine_writes.clear()
    job = job_of(pair)

    def batches(kind: type) -> list[int]:
        writes = job.direct_writes([0, 1, 2])
        return [len(part.positions) for part, write in writes if isinstance(write, kind)]

    pieces = jobs.FILL_PIECES // 2
    pages = (PageRun(0, 1, pieces // 2, 4096, 4096, 1), PageRun(pieces, 1, pieces // 2, 1, 4096, 1))
    job.ranks = (RankPages("theirs", b"", (pages,)),)
    assert batches(EngineWrite) == [2, 1]
    for position, key in enumerate(keys_of(chain)):
        job.targets[position], memory.here[key] = [5, 6], Resident(1, (1, 2), (0, 0))
    assert batches(EngineWrite) == [1, 1, 1]
    monkeypatch.setattr(jobs, "FILL_PIECES", jobs.FILL_PIECES - 1)
    assert not batches(EngineWrite), "an exporter cuts blocks into parts"
    assert sum(batches(Fill)) == 3
    many = tuple(RankPages(f"r{n}", b"", (pages,)) for n in range(5))
    with pytest.raises(ProtocolError, match="81920 pieces of a block, expected up to 65536"):
        jobs.check_ranks(pair.source.layout, many)


def test_B2_direct_a_pull_is_not_counted_as_written_by_an_engine() -> None:
    pair, chain = stored(1)
    number = pair.want(chain)
    have = m.Have(number, b"", b"", given=u32([0]))
    pair.consumer.on_message(pair.peer, have, pair.taker.now_ns)
    assert not pair.consumer._fetches[number].by_engine
    have = m.Have(number, b"", b"", given=u32([1]))
    with pytest.raises(ProtocolError, match="expected different ones below 1"):
        pair.consumer.on_message(pair.peer, have, pair.taker.now_ns)


# Between the store and its engine's workers


class Sent:
    """Gives of one store; what its workers were told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, p.WriteBlocks]] = []
        self.known = {"theirs": b"md"}
        self.now_ns, self.peers = 1, 100
        self.engine_writes = EngineWrites(self._take, lambda agent: self.known.get(agent, b""))

    def _take(self, connection: int, message: framing.Message, fd: int | None) -> None:
        assert isinstance(message, p.WriteBlocks)
        assert fd is None
        self.told.append((connection, message))

    def start(self, *positions: int, engine: int = 1, world: int = 1, peer: int = 0) -> None:
        """Of a peer of its own, if not said otherwise."""
        give = EngineWrite(engine, 0, (RankPages("theirs", b"", ((),)),), [5], [6])
        self.peers += 1
        part = Part(peer or self.peers, 1, positions)
        self.engine_writes.start(
            part, give, {rank: 10 + rank for rank in range(world)}, self.now_ns
        )

    def start_each(self, count: int) -> None:
        for position in range(count):
            self.start(position)

    def end_all(self) -> None:
        for _, told in list(self.told):
            self.engine_writes.written(1, 0, p.BlocksWritten(told.write, "all"))

    def ended(self) -> list[tuple[list[int], bool, bool]]:
        ended = self.engine_writes.take(self.now_ns)
        return [(list(each.part.positions), each.ok, each.stopped) for each in ended]


def test_a_write_is_over_when_all_ranks_of_the_engine_have_written() -> None:
    sent = Sent()
    sent.start(0, 1, world=2)
    assert [connection for connection, _ in sent.told] == [10, 11]
    message = sent.told[0][1]
    assert (from_u32(message.blocks), from_u32(message.targets)) == ([5], [6])
    assert message.ranks[0].metadata == b"md"
    sent.engine_writes.written(1, 1, p.BlocksWritten(message.write, "all", 64))
    assert not sent.ended()
    assert sent.engine_writes.open == 1
    sent.engine_writes.written(1, 0, p.BlocksWritten(message.write, "all", 32))
    assert sent.engine_writes.open == 0
    assert sent.ended() == [([0, 1], True, False)]
    assert not sent.ended()
    assert sent.engine_writes.moved_bytes == 96


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (["all", "none"], (False, True)),
        (["none", "none"], (False, True)),
        (["failed", "all"], (False, False)),
        (["none", "failed"], (False, False)),
    ],
)
def test_B20_direct_a_write_that_one_rank_has_not_made_is_not_made(
    ends: list[WriteEnd], expected: tuple[bool, bool]
) -> None:
    sent = Sent()
    sent.start(0, world=2)
    for rank, end in enumerate(ends):
        sent.engine_writes.written(1, rank, p.BlocksWritten(sent.told[0][1].write, end))
    assert sent.ended() == [([0], *expected)]


def test_a_write_is_over_when_all_have_written_that_were_there_when_it_was_wanted() -> None:
    """An engine that has lost a worker is about to go; what is left of it is not all of it."""
    sent, workers = Sent(), {0: 10, 1: 11}
    for _ in range(AT_ONCE):
        sent.start(0)
    give = EngineWrite(1, 0, (), [5], [6])
    sent.engine_writes.start(Part(1, 1, [9]), give, workers, sent.now_ns)
    del workers[1]
    sent.engine_writes.written(1, 0, p.BlocksWritten(1, "all"))
    assert len(sent.ended()) == 1
    assert [connection for connection, _ in sent.told[AT_ONCE:]] == [10, 11]


def test_workers_are_told_once_how_a_peer_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent()
    sent.known.clear()
    sent.start(0)
    sent.known["theirs"] = b"md"
    for position in range(1, AT_ONCE):
        sent.start(position)
    assert [told.ranks[0].metadata for _, told in sent.told] == [b"", b"md", b"", b""]
    monkeypatch.setattr(under_test, "TOLD_MAX", 0)
    sent.end_all()
    del sent.told[:]
    sent.start_each(2)
    assert [told.ranks[0].metadata for _, told in sent.told] == [b"", b"md"], "it may be forgotten"


def test_how_a_peer_is_reached_is_told_again_to_workers_that_could_not_begin() -> None:
    sent = Sent()
    for end, metadata in (("all", b"md"), ("none", b""), ("all", b"md"), ("all", b"")):
        sent.start(0)
        _, told = sent.told[-1]
        assert told.ranks[0].metadata == metadata
        sent.engine_writes.written(1, 0, p.BlocksWritten(told.write, end))  # type: ignore[arg-type]
        sent.ended()


def test_a_few_writes_of_an_engine_are_under_way_and_others_do_not_wait_for_it() -> None:
    sent = Sent()
    sent.start_each(AT_ONCE + 2)
    sent.start(9, engine=2)
    assert len(sent.told) == AT_ONCE + 1
    sent.engine_writes.written(1, 0, p.BlocksWritten(sent.told[1][1].write, "all"))
    assert sent.ended() == [([1], True, False)]
    assert len(sent.told) == AT_ONCE + 2


def test_B15_direct_a_peer_that_hangs_takes_a_part_of_an_engines_turns_only() -> None:
    sent = Sent()
    for position in range(OF_PEER + 2):
        sent.start(position, peer=1)
    sent.start(50, peer=2)
    assert len(sent.told) == OF_PEER + 1
    sent.now_ns += WAIT_NS
    assert sent.ended() == [([OF_PEER], False, True), ([OF_PEER + 1], False, True)], "from slots"
    assert len(sent.told) == OF_PEER + 1
    sent.now_ns += SLOW_NS
    sent.start(60, peer=3)
    assert sent.ended() == [([60], False, True)], "nor is a slow engine asked"
    sent.end_all()
    sent.start(70, peer=3)
    assert len(sent.told) == OF_PEER + 2
    sent.now_ns += SLOW_NS - 1
    sent.start(80, peer=4)
    assert len(sent.told) == OF_PEER + 3, "it has had the first one since it was told of it"


def test_S2_direct_many_writes_of_a_peer_are_queued_and_dropped_promptly() -> None:
    """What each costs does not grow with how many there are: all of this is one turn or two."""
    sent, count, begun_s = Sent(), 40_000, time.process_time()
    for position in range(count):
        sent.start(position, peer=1)
    sent.engine_writes.abandon(Part(1, 1, range(count)))
    assert time.process_time() - begun_s < 8
    assert len(sent.ended()) == count - OF_PEER


def test_B15_direct_an_engine_that_is_about_to_go_begins_no_write() -> None:
    sent = Sent()
    sent.start_each(AT_ONCE + 1)
    sent.engine_writes.leave(2)
    sent.engine_writes.leave(1)
    assert sent.ended() == [([AT_ONCE], False, True)]
    sent.engine_writes.written(1, 0, p.BlocksWritten(sent.told[0][1].write, "all"))
    assert sent.ended() == [([0], True, False)], "what it has begun it ends"


def test_B2_direct_no_worker_is_told_more_than_a_message_can_have() -> None:
    """An exporter's metadata may be longer, and a peer can name that."""
    sent = Sent()
    sent.known["theirs"] = bytes(METADATA_MAX + 1)
    sent.start(0)
    frame = framing.encode(sent.told[0][1])
    assert list(framing.Decoder(p.ToEngine).feed(frame)) == [sent.told[0][1]]


def test_B20_direct_what_nobody_waits_for_and_no_worker_was_told_is_not_begun() -> None:
    sent = Sent()
    sent.start_each(AT_ONCE)
    sent.start(20, 21)
    for part in (Part(101, 1, [0]), Part(9, 9, [9]), Part(105, 1, [0])):
        sent.engine_writes.abandon(part)
    assert not sent.ended(), "it is under way"
    for position in (20, 21):
        sent.engine_writes.abandon(Part(105, 1, [position]))
    assert sent.ended() == [([20, 21], False, True)]
    sent.end_all()
    assert len(sent.told) == AT_ONCE
    assert len(sent.ended()) == AT_ONCE


def test_B15_direct_a_write_that_a_frozen_engine_does_not_end_is_lost_and_still_its() -> None:
    """Its blocks' slots are not held for as long as it is frozen."""
    sent = Sent()
    sent.start_each(AT_ONCE)
    sent.now_ns += LOST_NS - 1
    assert not sent.ended()
    sent.now_ns += 1
    assert sent.ended() == [([position], False, False) for position in range(AT_ONCE)]
    assert not sent.ended(), "once"
    sent.start(20)
    assert sent.ended() == [([20], False, True)], "it is told no others"
    for _, told in list(sent.told):
        sent.engine_writes.written(1, 0, p.BlocksWritten(told.write, "all", 1))
    assert not sent.ended()
    assert (sent.engine_writes.open, sent.engine_writes.moved_bytes) == (0, AT_ONCE)
    sent.start(21)
    assert len(sent.told) == AT_ONCE + 1, "it goes on"
    sent.engine_writes.end_of(1)
    assert sent.ended() == [([21], False, False)]


def test_B15_direct_writes_of_an_engine_that_is_gone_end() -> None:
    sent = Sent()
    sent.start_each(AT_ONCE + 1)
    sent.engine_writes.end_of(2)
    assert not sent.ended()
    sent.engine_writes.end_of(1)
    ended = sent.ended()
    assert ended[0] == ([AT_ONCE], False, True)
    assert [how for _, *how in ended[1:]] == [[False, False]] * AT_ONCE, "some may still come"


@pytest.mark.parametrize(("session", "rank", "number"), [(2, 0, 1), (1, 1, 1), (1, 0, 2)])
def test_B2_direct_the_end_of_what_a_worker_was_not_told_is_refused(
    session: int, rank: int, number: int
) -> None:
    sent = Sent()
    sent.start(0)
    with pytest.raises(
        ProtocolError, match=f"the end of write {number}, which rank {rank} was not"
    ):
        sent.engine_writes.written(session, rank, p.BlocksWritten(number, "all"))
    sent.engine_writes.written(1, 0, p.BlocksWritten(1, "all"))
    with pytest.raises(ProtocolError, match="the end of write 1"):
        sent.engine_writes.written(1, 0, p.BlocksWritten(1, "all"))


def test_B20_direct_an_engines_end_is_passed_on() -> None:
    peers, sent = Peers.__new__(Peers), Sent()
    requests = SimpleNamespace(end_of=lambda _: None)
    peers.__dict__ |= {"engine_writes": sent.engine_writes, "requests": requests}
    sent.start_each(AT_ONCE)
    peers.end_of(1)
    assert len(sent.ended()) == AT_ONCE
