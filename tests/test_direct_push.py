"""Blocks that a peer writes straight into an engine's memory: both sides, without processes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import GroupLayout, PageRun, RankLayout, RankPages
from kvstore.handover import jobs, moves, transfers
from kvstore.handover.consumer import ANSWER_NS, STALL_NS
from kvstore.handover.jobs import Job
from kvstore.handover.runs import Part
from kvstore.handover.transfers import PeerAgents
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.fakes import SLOT_BYTES, from_u32, hashes, u32
from tests.harness.handover_pair import Pair, stored
from tests.test_peer_limits import Place, Told
from tiers.nixl.messages import Fill
from tiers.nixl.supervisor import Exporter

HALF = SLOT_BYTES // 2


def page(offset: int, size: int) -> PageRun:
    return PageRun(offset, size, 1, 1 << 20, 2 * size, 0)


RANKS = tuple(
    RankPages(f"rank {n}", b"md", ((page(n * HALF, HALF),),)) for n in range(2)
)  # of an engine whose ranks have half a block each
TARGETS = {0: [10], 1: [11], 2: [12]}


def claimed(
    pair: Pair, chain: list[bytes], request: str = "", ranks: Sequence[RankPages] = RANKS
) -> int:
    """A pushed fetch of all of a chain, which workers wait for."""
    pair.ranks = ranks
    indices = (u32(range(len(chain))),)
    want = m.Want(1, b"".join(chain), 32, indices, b"", request, push=True)
    number = pair.consumer.want(pair.peer, want, pair.taker.now_ns, direct=True)
    while pair.consumer.offered(number) is None:
        pair.run(1)
    pair.claim(number, range(len(chain)))
    assert pair.pushing == [number]
    return number


def pushed(blocks: int, ranks: Sequence[RankPages] = RANKS) -> tuple[Pair, int]:
    """A claimed fetch of a chain that the prefill store has."""
    pair, chain = stored(blocks)
    return pair, claimed(pair, chain, ranks=ranks)


def job_of(pair: Pair) -> Job:
    (peer,) = pair.producer._peers.values()
    (job,) = peer.jobs.values()
    return job


def offsets_of(fill: Fill) -> list[int]:
    return array("Q", fill.parts).tolist()


def filled(pair: Pair) -> list[tuple[str, int, list[int], list[int]]]:
    found = [
        (fill.peer, fill.extent, offsets_of(fill), from_u32(fill.blocks)) for fill in pair.filled
    ]
    return sorted(found)


def test_L1_direct_a_peer_writes_blocks_to_all_ranks_once_it_is_told_where() -> None:
    pair, number = pushed(3)
    pair.run(20)
    assert not pair.filled, "it does not know where"
    pair.name(number, {0: [10], 2: [12]})
    pair.name(number, {1: [11]})
    pair.run(20)
    assert pair.met[1:] == ["rank 0", "rank 1"], "after the exporter, once each"
    slots = [job[2] for job in filled(pair)]
    assert all(offset % SLOT_BYTES == 0 for offsets in slots for offset in offsets)
    assert sorted(block for job in filled(pair) for block in job[3]) == [10, 10, 11, 11, 12, 12]
    assert pair.passed == {(number, position): True for position in range(3)}
    assert not pair.unsafe
    assert pair.consumer.fetched == {"cpu": 3}
    pair.check_nothing_left(5)


def test_B13_direct_a_rank_without_a_groups_layers_is_not_written() -> None:
    pair, chain = stored(1)
    ranks = (RankPages("none", b"md", ((),)), RankPages("all", b"md", ((page(0, SLOT_BYTES),),), 2))
    number = claimed(pair, chain, ranks=ranks)
    pair.name(number, {0: [10]})
    pair.run(20)
    assert [(fill.peer, fill.pages, fill.gpu) for fill in pair.filled] == [
        ("all", ranks[1].pages[0], 2)
    ]
    assert pair.passed == {(number, 0): True}


def test_B14_direct_a_place_is_named_to_a_peer_once() -> None:
    pair, number = pushed(2)
    pair.run(5)
    for targets in ({0: [10]}, {0: [10]}, {1: [11]}):
        pair.name(number, targets)
    pair.run(20)
    told = [message for message in pair.up.sent if isinstance(message, m.Land)]
    assert [(from_u32(message.positions), len(message.ranks)) for message in told] == [
        ([0], 2),
        ([1], 0),
    ]
    assert pair.passed == {(number, 0): True, (number, 1): True}


def test_B19_direct_a_peer_that_says_too_early_that_it_has_written_is_not_believed() -> None:
    pair, number = pushed(1)
    regions = (pair.region(1),)
    have = m.Have(number, u32([0]), u32([1, 0]), bytes(8), regions)
    pair.consumer.on_message(pair.peer, have, pair.taker.now_ns)
    pair.run(5)
    assert not pair.passed_on, "nor is it read there"
    assert not pair.passed
    assert not any(isinstance(message, m.Settle) and message.arrived for message in pair.up.sent)


def test_P7_direct_blocks_are_written_as_a_prefill_computes_them() -> None:
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    number = claimed(pair, chain, "r")
    pair.name(number, TARGETS)
    pair.run(5)
    assert not pair.passed
    pair.put(chain[:2])
    pair.run(10)
    assert pair.passed == {(number, 0): True, (number, 1): True}
    pair.producer.request_leases.gone("r", pair.source.manager, 1)
    pair.run(10)
    assert pair.passed[number, 2] is False
    assert not pair.unsafe, "its peer has said that nothing more comes"
    pair.check_nothing_left()


def test_B13_direct_parts_that_are_not_wanted_are_not_written() -> None:
    """Blocks of two engine blocks: the second one of the last is not wanted."""
    pair, chain = Pair(), hashes(2)
    rank = RankLayout(SLOT_BYTES, (GroupLayout(HALF, ()),))
    pair.source.layout = msgspec.structs.replace(pair.source.layout, ranks=(rank,))
    pair.put(chain)
    ranks = (RankPages("rank", b"md", ((page(0, HALF),),)),)
    number = claimed(pair, chain, ranks=ranks)
    pair.name(number, {0: [20, 21], 1: [22, 0]})
    pair.run(20)
    parts = {
        block: offset % SLOT_BYTES
        for fill in pair.filled
        for offset, block in zip(offsets_of(fill), from_u32(fill.blocks), strict=True)
    }
    assert parts == {20: 0, 21: HALF, 22: 0}
    pair.check_nothing_left(5)


def test_B20_direct_a_slot_is_let_go_of_when_the_last_of_its_writes_has_ended() -> None:
    pair, chain = stored(1)
    held: list[tuple[Part, Fill]] = []
    pair.moves.start = lambda part, fill, *_: held.append((part, fill))  # type: ignore[method-assign]
    number = claimed(pair, chain)
    pair.name(number, {0: [10]})
    pair.run(5)
    assert len(held) == 2
    part = held[0][0]
    pair.producer.written(part, ok=False)
    pair.run(5)
    assert job_of(pair).states[0] == moves.MOVING, "the other rank's half is being written"
    assert not pair.passed
    pair.producer.written(part, ok=True)
    pair.run(5)
    assert pair.passed == {(number, 0): False}
    assert pair.unsafe == {(number, 0)}, "what NIXL had sent may still come"
    pair.check_nothing_left()


def test_B20_direct_a_write_that_fails_ends_all_of_its_want() -> None:
    """Its load has failed, and nobody says where its other blocks go."""
    pair, chain = stored(3)
    pair.moves.fails = 1.0
    number = claimed(pair, chain)
    pair.name(number, {0: [10]})
    pair.run(10)
    assert pair.passed == {(number, position): False for position in range(3)}
    assert pair.unsafe == {(number, 0)}
    pair.consumer.end(number)
    assert not pair.consumer._late
    pair.check_nothing_left()


@pytest.mark.parametrize("how", [{"ok": True}, {"ok": False, "stopped": True}])
def test_B20_direct_a_peer_that_was_told_to_stop_says_when_it_writes_no_more(
    how: dict[str, bool],
) -> None:
    """It was not told where the third block goes, and keeps that neither."""
    pair, chain = stored(3)
    held: list[Part] = []
    pair.moves.start = lambda part, *_: held.append(part)  # type: ignore[method-assign]
    number = claimed(pair, chain)
    pair.name(number, {0: [10], 1: [11]})
    pair.run(5)
    assert not any(rank.metadata for rank in job_of(pair).ranks), "each job would keep its own"
    pair.read(number, [0, 1], ok=False)
    pair.run(5)
    assert pair.unsafe == {(number, 0), (number, 1)}
    for part in held:
        pair.producer.written(part, **how)
    assert not pair.producer.counts["failed"]
    pair.run(5)
    assert not pair.unsafe
    assert pair.passed == {(number, position): False for position in range(3)}
    pair.check_nothing_left()


def test_B20_direct_what_is_let_go_of_before_it_is_begun_is_not_written() -> None:
    pair, _ = pushed(1)
    pair.run(5)
    fill = m.Land(1, u32([0]), u32([10]), ranks=RANKS)
    pair.producer.on_message(pair.peer, fill, pair.giver.now_ns)
    pair.producer.on_message(pair.peer, m.Settle(1, 0), pair.giver.now_ns)
    pair.run(5)
    assert not pair.filled
    assert all(peer.held_bytes == 0 for peer in pair.producer._peers.values())


def test_L1_direct_many_blocks_are_written_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "FILL_BYTES", 2 * SLOT_BYTES)
    pair, number = pushed(3)
    pair.run(5)
    pair.name(number, TARGETS)
    pair.run(20)
    assert max(len(from_u32(fill.blocks)) for fill in pair.filled) <= 2
    assert sum(len(from_u32(fill.blocks)) for fill in pair.filled) == 6
    assert pair.passed == {(number, position): True for position in range(3)}


def test_S2_direct_a_large_push_is_begun_as_earlier_writes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its messages alone are more than the exporter may leave unread, and it is ended."""
    monkeypatch.setattr(jobs, "FILL_BYTES", 1)
    monkeypatch.setattr(jobs, "WRITING_BYTES", 2 * SLOT_BYTES)
    pair, chain = stored(6)
    begun: list[Part] = []
    pair.moves.start = lambda part, *_: begun.append(part)  # type: ignore[method-assign]
    number = claimed(pair, chain)
    pair.moves.has_room = False
    pair.name(number, {position: [10 + position] for position in range(6)})
    pair.run(5)
    assert not begun, "the exporter has not read what it was sent"
    pair.moves.has_room = True
    for _ in range(3):
        pair.run(5)
        ended = begun[:]
        begun.clear()
        assert len(ended) == 2 * len(RANKS)
        for part in ended:
            pair.producer.written(part, ok=True)
    pair.run(5)
    assert pair.passed == {(number, position): True for position in range(6)}
    pair.check_nothing_left()


@pytest.mark.parametrize("how", ["lost", "late", "let go", "lease", "exporter"])
def test_B20_direct_what_a_peer_may_still_write_is_told_so(how: str) -> None:
    pair, chain = stored(3)
    pair.moves.start = lambda *_: None  # type: ignore[method-assign] # its writes do not end
    number = claimed(pair, chain)
    pair.name(number, {0: [10], 1: [11]})
    pair.run(5)
    match how:
        case "lost":
            pair.lose()
        case "late":
            pair.down.cut = True
            pair.consumer.tick(pair.taker.now_ns + STALL_NS + ANSWER_NS)
        case "let go":
            pair.consumer.cancel(number)
        case "lease":
            end = m.Settled(number, end=m.LEASE_OVER)
            pair.consumer.on_message(pair.peer, end, pair.taker.now_ns)
        case _:
            pair.consumer.on_exporter_lost()
    pair.run(1)
    assert pair.passed == {(number, position): False for position in range(3)}
    assert pair.unsafe == {(number, 0), (number, 1)}, "the third was not told"


def test_B20_direct_what_was_written_and_is_not_good_is_written_no_more() -> None:
    pair, number = pushed(1)
    pair.name(number, {0: [10]})
    while not any(isinstance(message, m.Settle) and message.arrived for message in pair.up.sent):
        pair.run(1)
    pair.lose()
    pair.run(1)
    assert pair.passed == {(number, 0): False}
    assert not pair.unsafe


def test_B20_direct_a_late_end_of_writes_is_told_though_nothing_else_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, told, held = Place(), list[p.Passed](), list[Part]()
    chain = hashes(2)
    place.good.put(chain)
    place.turns(5)
    peers, namespace = place.decode.peers, place.decode.namespace(place.good.taker)
    want = m.Want(1, b"".join(chain), 32, (u32(range(2)),), push=True)
    address, now_ns = place.prefill.peers.channel.address, place.decode.now_ns
    number = peers.fetch(namespace, address, want, now_ns, direct=True)
    assert number is not None
    inlet = peers.inlet(namespace)

    def send(_connection: int, message: framing.Message, _fd: int | None) -> None:
        if isinstance(message, p.Passed):
            told.append(message)

    inlet._send = send
    while not inlet.offered(number):
        place.turns(1)
    inlet.claim(number, 1, {0: 10}, [0, 1])
    ranks = [RankPages("other", b"md", ((page(0, SLOT_BYTES),),))]
    monkeypatch.setattr(namespace.engines, "ranks", lambda _: ranks)
    place.prefill.mover.start = lambda part, *_: held.append(part)  # type: ignore[method-assign]
    target = p.Target(number, "other", u32([0, 1]), u32([10, 11]))
    inlet.of_worker(1, 0, target, place.decode.now_ns)
    place.turns(10)
    failed = p.Arrived(number, u32([0, 1]), 0, False)
    inlet.of_worker(1, 0, failed, place.decode.now_ns)
    place.turns(5)
    assert [(each.ok, each.written) for each in told] == [(False, True)]
    assert not peers._used
    for part in held:
        place.prefill.peers.producer.written(part, ok=False, stopped=True)
    place.turns(5)
    assert [(each.ok, each.written) for each in told] == [(False, True), (False, False)]
    assert from_u32(told[1].positions) == [0, 1]


ENOUGH = u32([0]), u32([10])


@pytest.mark.parametrize(
    ("positions", "blocks", "ranks", "expected"),
    [
        (*ENOUGH, (), "0 ranks for job 1, expected them once"),
        (*ENOUGH, (RankPages("r", b"", ()),), "pages of 0 groups of rank 0, expected 1"),
        (
            *ENOUGH,
            (RANKS[0], RankPages("r", b"", ((page(HALF, HALF + 1),),))),
            "pages of rank 1 up to byte 4097 of a part of group 0, expected up to 4096",
        ),
        (
            *ENOUGH,
            (RankPages("r", b"", ((page(0, 1),) * (jobs.RUNS_MAX + 1),)),),
            f"{jobs.RUNS_MAX + 1} runs of pages, expected up to {jobs.RUNS_MAX}",
        ),
        (*ENOUGH, (RankPages("r", b"", ((),)),), "no pages of group 0, which position 0 is of"),
        (u32([0]), u32([1, 2]), RANKS, r"engine blocks \[1, 2\] for position 0, expected up to 1"),
        (u32([0]), u32([0]), RANKS, r"engine blocks \[0\] for position 0, .* one that is not 0"),
        (u32([0, 7]), u32([1, 2]), RANKS, "positions"),
    ],
)
def test_B2_direct_a_place_that_cannot_be_written_is_refused(
    positions: bytes, blocks: bytes, ranks: tuple[RankPages, ...], expected: str
) -> None:
    pair, _ = pushed(2)
    pair.run(5)
    fill = m.Land(1, positions, blocks, ranks=ranks)
    with pytest.raises(ProtocolError, match=expected):
        pair.producer.on_message(pair.peer, fill, pair.giver.now_ns)
    pair.run(5)
    assert not pair.filled


def test_B2_direct_a_place_is_told_once() -> None:
    pair, _ = pushed(2)
    pair.run(5)
    first = m.Land(1, u32([0]), u32([10]), ranks=RANKS)
    pair.producer.on_message(pair.peer, first, pair.giver.now_ns)
    for again, expected in (
        (first, "2 ranks for job 1"),
        (m.Land(1, u32([0]), u32([10])), "a second place for position 0"),
    ):
        with pytest.raises(ProtocolError, match=expected):
            pair.producer.on_message(pair.peer, again, pair.giver.now_ns)


@pytest.mark.parametrize(("push", "direct"), [(True, False), (False, True)])
def test_B2_direct_places_are_for_a_direct_push_only(push: bool, direct: bool) -> None:
    pair, chain = stored(1)
    want = m.Want(1, chain[0], 32, (u32([0]),), push=push)
    pair.consumer.want(pair.peer, want, pair.taker.now_ns, direct=direct)
    pair.run(5)
    fill = m.Land(1, u32([0]), u32([10]), ranks=RANKS)
    with pytest.raises(ProtocolError, match="engine blocks for job 1, expected a push"):
        pair.producer.on_message(pair.peer, fill, pair.giver.now_ns)


def test_B2_direct_landing_slots_are_not_for_a_direct_push() -> None:
    pair, _ = pushed(1)
    pair.run(5)
    land = m.Land(1, u32([0]), u32([0]), m.Region(900, 4096, 6), metadata=b"md")
    with pytest.raises(
        ProtocolError, match="landing slots for job 1, expected a push: engine blocks if"
    ):
        pair.producer.on_message(pair.peer, land, pair.giver.now_ns)


def test_B2_direct_a_peer_that_writes_does_not_say_what_to_read_in_an_engine() -> None:
    pair, number = pushed(1)
    message = m.Have(number, u32([0]), u32([1]), engine=3, ranks=RANKS)
    with pytest.raises(ProtocolError, match="was not asked to be read in an engine"):
        pair.consumer.on_message(pair.peer, message, pair.taker.now_ns)


# The exporter's peers


def test_the_workers_of_a_peers_engine_are_known_as_long_as_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "NAMED_MAX", 3)
    monkeypatch.setattr(transfers, "AGENTS_MAX", 3)
    told = Told()
    known = PeerAgents(cast("Exporter", told))
    for name in ("exporter", "a", "b"):
        known.meet(1, name, b"md")
    known.meet(1, "a", b"again")
    assert told.known == {"exporter": b"md", "a": b"again", "b": b"md"}
    known.update(1, b"more")
    assert told.known["exporter"] == b"more", "a connection's first"
    known.meet(1, "c", b"md")
    assert told.known.keys() == {"exporter", "b", "c"}, "the longest known makes room"
    known.leave(1)
    known.meet(2, "d", b"md")
    assert len(known) == len(told.known) == 3


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


def test_B2_direct_what_is_written_at_once_is_not_too_many_pieces() -> None:
    """Each is an address; the exporter makes all of a chunk's before the first is written."""
    pair, _ = pushed(3)
    pair.run(5)
    job = job_of(pair)
    pieces = jobs.FILL_PIECES // 2
    pages = (PageRun(0, 1, pieces // 2, 4096, 4096, 1), PageRun(pieces, 1, pieces // 2, 1, 4096, 1))
    job.ranks = (RankPages("theirs", b"", (pages,)),)
    job.targets = {position: [5] for position in range(3)}
    writes = job.direct_writes([0, 1, 2])
    assert [len(part.positions) for part, _ in writes] == [2, 1]
    many = tuple(RankPages(f"r{n}", b"", (pages,)) for n in range(5))
    with pytest.raises(ProtocolError, match="81920 pieces of a block, expected up to 65536"):
        jobs.check_ranks(pair.source.layout, many)
