"""Whatever peers do, what a store keeps for them, and of them, has limits (promises 3 and 4)."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import cast

import msgspec
import pytest

from kvstore.core.errors import ProtocolError
from kvstore.core.types import BlockKey
from kvstore.handover import jobs, links, moves, producer, side_channel, transfers
from kvstore.handover.side_channel import Channel
from kvstore.handover.transfers import PeerAgents
from kvstore.logs import LINES_MAX
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.fuzz.site import CROWD, HELD, End, Good, Net, Site
from tests.harness.fakes import SLOT_BYTES, from_u32, hashes, keys_of, u32
from tests.harness.handover_pair import bare_fetch
from tiers.nixl.supervisor import Exporter

TOO_MANY = bytes(4 * (m.JOB_BLOCKS_MAX + 1))  # of positions


class Place:
    """Two stores and their engines."""

    def __init__(self) -> None:
        self.net = Net(random.Random(1))
        self.prefill, self.decode = Site(self.net, "prefill"), Site(self.net, "decode")
        self.good = Good(self.prefill, self.decode)
        self.heard: list[framing.Message] = []

    def turns(self, count: int, ms: int = 1) -> None:
        for _ in range(count):
            self.good.turn(ms)

    def caller(self, hello: m.Hello | None = None) -> Callable[[framing.Message], None]:
        """Connect to the prefill store's side channel; returns what says something there."""

        def hear(frame: bytes) -> None:
            self.heard += [m.decode_for_consumer(frame)] if frame else []

        _, say = self.prefill.wire.accept(End(hear))
        if hello is not None:
            say(msgspec.msgpack.encode(hello))
        return lambda message: say(msgspec.msgpack.encode(message))

    def hello(self, agent: str = "") -> m.Hello:
        namespace = self.prefill.namespace(self.good.giver)
        return m.Hello(
            m.VERSION, namespace.layout.digest, namespace.layout.traits, agent, b"metadata"
        )

    def ask(self, address: str) -> None:
        """Have the decode engine ask somebody for what nobody has."""
        self.good.victim._asks += 1
        number = self.good.victim._asks
        chain = hashes(1, f"nowhere {number}")
        self.good.victim.step(lookups=(p.Lookup(number, chain[0], 32, peer=address),))


@pytest.fixture
def place() -> Place:
    return Place()


def wanted(chain: list[bytes], job: int = 1, **how: object) -> m.Want:
    want = m.Want(job, b"".join(chain), 32, (u32(range(len(chain))),))
    return msgspec.structs.replace(want, **how)


# Hand-overs that cannot be, or are two


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_B9_what_two_engines_were_given_the_parameters_of_is_held_for_the_second(
    place: Place, turns: int
) -> None:
    """A router may send a request to two of them, and abort the slower one's."""
    good, chain, address = place.good, hashes(3), place.prefill.wire.address
    good.giver.step(handed_over=(p.HandedOver("r", "running"),))
    good.put(chain)
    done = p.HandedOver("r", "done", b"".join(chain), 32, lease_ms=30_000)
    good.giver.step(handed_over=(done,))
    for engine in (good.victim, good.taker):
        lookup = p.Lookup(99, b"".join(chain), 32, peer=address, request="r", push=False)
        engine.step(lookups=(lookup,))
    place.turns(turns)
    good.victim.step(unwanted=(p.Unwanted(address, "r"),))
    place.turns(20)
    assert good.taker.granted[99].lease
    leases = place.prefill.peers.producer.request_leases
    assert [lease.request for lease in leases._leases.values()] == ["r"]
    good.taker.step(unwanted=(p.Unwanted(address, "r"),))
    place.turns(20)
    assert not len(leases)
    assert not place.decode.peers.requests._waiting


@pytest.mark.parametrize("lacks", ["landing memory", "an exporter", "an exporter there"])
def test_B14_nobody_waits_for_blocks_that_cannot_come(place: Place, lacks: str) -> None:
    """Each request waited for two seconds, as long as that lasted."""
    place.turns(10)
    chain, taker = hashes(3), place.good.taker
    place.good.put(chain)
    landing = place.decode.peers.inlet(place.decode.namespace(taker)).arrivals.landing
    for push in (False, True):
        landing.failed = lacks == "landing memory"
        place.decode.mover.broken = "a test" if lacks == "an exporter" else ""
        place.prefill.mover.broken = "a test" if lacks == "an exporter there" else ""
        taker._asks += 1
        address = place.prefill.wire.address
        taker.step(lookups=(p.Lookup(taker._asks, b"".join(chain), 32, peer=address, push=push),))
        place.turns(20)
        assert not taker.granted[taker._asks].lease
    landing.failed, place.decode.mover.broken, place.prefill.mover.broken = False, "", ""
    assert place.good._fetched(chain, push=False), "it comes again by itself"


# Peers that the exporter knows


class Told:
    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}

    def add_peer(self, agent: str, metadata: bytes) -> None:
        self.known[agent] = metadata

    def remove_peer(self, agent: str) -> None:
        del self.known[agent]


def test_exporters_that_are_known_are_limited_and_those_in_use_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "AGENTS_MAX", 3)
    told = Told()
    known = PeerAgents(cast("Exporter", told))
    known.meet(1, "used", b"1")
    known.meet(2, "used", b"2")
    for number in range(3, 9):
        known.meet(number, f"peer-{number}", b"m")
        known.leave(number)
    known.leave(2)
    assert list(told.known) == ["used", "peer-7", "peer-8"]
    assert told.known["used"] == b"2"
    known.meet(9, "peer-7", b"m")
    known.meet(10, "peer-10", b"m")
    assert list(told.known) == ["used", "peer-7", "peer-10"], "the longest unused goes"
    known.update(1, b"3")
    known.update(99, b"nobody's")
    assert told.known["used"] == b"3"
    known.leave(1)
    known.leave(1)
    assert len(known) == len(told.known) == 3


def test_S2_agents_of_peers_are_limited_while_their_connections_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who names most loses its oldest; a connection's exporter, which is its first, stays."""
    monkeypatch.setattr(transfers, "AGENTS_MAX", 8)
    told = Told()
    known = PeerAgents(cast("Exporter", told))
    for number in range(3):
        known.meet(number, f"exporter-{number}", b"m")
    known.meet(0, "worker", b"m")
    for number in range(20):
        known.meet(1, f"many-{number}", b"m")
    few = {"exporter-0", "exporter-1", "exporter-2", "worker"}
    assert told.known.keys() == few | {f"many-{number}" for number in range(16, 20)}


def test_only_who_is_welcome_is_told_to_the_exporter(place: Place) -> None:
    refused = msgspec.structs.replace(place.hello("refused"), version=m.VERSION + 1)
    elsewhere = msgspec.structs.replace(place.hello("elsewhere"), namespace="other")
    place.caller(refused)
    place.caller(elsewhere)
    place.caller()(m.Land(1, b"", b"", m.Region(1, 2, 3), metadata=b"metadata"))
    place.caller(place.hello("friend"))
    place.turns(2)
    assert place.prefill.mover.known == {"friend": b"metadata"}


def test_S2_peers_are_forgotten_with_the_exporter_and_come_again(place: Place) -> None:
    """Else what one of them has ended it with would end the next one, too."""
    agents = place.prefill.peers._agents
    say = place.caller(place.hello("friend"))
    place.turns(2)
    assert len(agents) == 1
    place.prefill.mover.restart("a test")
    place.turns(2)
    assert len(agents) == 0
    last = place.heard[-1]
    assert isinstance(last, m.Refused)
    assert last.retry
    say(place.hello("friend"))
    place.turns(2)
    assert len(agents) == 1


def test_a_peer_whose_connections_are_gone_is_forgotten_in_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "AGENTS_MAX", 2)
    for number in range(5):
        place.caller(place.hello(f"agent-{number}"))
        place.turns(2)
    assert len(place.prefill.mover.known) == 5, "all of them may be asked for something"
    place.turns(2, ms=700_000)
    assert len(place.prefill.mover.known) == 2


# Connections


def test_who_says_nothing_for_long_is_forgotten(place: Place) -> None:
    own = place.prefill.peers.producer
    place.caller(place.hello())
    place.turns(2)
    assert len(own._peers) == 1
    place.turns(2, ms=599_000 // 2)
    assert len(own._peers) == 1
    place.turns(2, ms=2000)
    assert not own._peers
    assert not place.prefill.wire.lines.came()


def test_one_more_connection_takes_the_place_of_the_one_silent_longest(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "CAME_MAX", 3)
    says = []
    for _ in range(3):
        says.append(place.caller(place.hello()))
        place.turns(1, ms=1000)
    says[0](m.Settle(1, 0))
    place.turns(1)
    place.caller(place.hello())
    place.turns(1)
    assert len(place.prefill.peers.producer._peers) == 3
    place.heard.clear()
    for say in (says[0], says[2], says[1]):
        say(m.Settle(9, 0))
    place.turns(1)
    assert place.heard == [m.Settled(9, end="unknown")] * 2


def test_peers_that_are_asked_are_limited_and_the_one_unused_longest_makes_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses come with requests: whoever may send one may name any."""
    monkeypatch.setattr(links, "LINKS_MAX", 3)
    own = place.decode.peers
    for number in range(4):
        place.net.places[f"p{number}:1"] = lambda _end: (0, lambda _: None)
    for number in range(3):
        place.ask(f"p{number}:1")
        place.turns(1)
    place.ask("p3:1")
    assert {link.address for link in own.links.all.values()} == {"p0:1", "p1:1", "p2:1"}, "all busy"
    place.turns(45, ms=100)
    place.ask("p3:1")
    assert {link.address for link in own.links.all.values()} == {"p1:1", "p2:1", "p3:1"}
    place.good.hand_over(hashes(3, "after it"), push=False)


def test_S2_what_names_many_peers_at_once_dials_a_few(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "LINKS_MAX", 3)
    place.turns(1)
    unwanted = [p.Unwanted(f"p{number}:1", f"r{number}") for number in range(50)]
    for each in unwanted:
        place.net.places[each.peer] = lambda _end: (0, lambda _: None)
    place.good.victim.step(unwanted=tuple(unwanted))
    place.turns(1)
    assert [link.address for link in place.decode.peers.links.all.values()] == [
        "p0:1",
        "p1:1",
        "p2:1",
    ]
    assert place.decode.peers.channel.counts["undialled"] == 47
    assert "'p3:1' is one more than 3 peers that are in use" in caplog.text
    assert caplog.text.count("one more than") <= LINES_MAX


def test_P4_what_a_peer_was_never_sent_does_not_wait_for_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Welcome of a peer whose exporter cannot start never names an agent."""
    monkeypatch.setattr(place.prefill.peers.producer, "_exporter", lambda: None)
    address = place.prefill.peers.channel.address
    for _ in range(5):
        place.ask(address)
        place.turns(1)
    (link,) = place.decode.peers.links.all.values()
    assert len(link.waiting) == 5
    place.turns(60, ms=1000)
    assert not any(inlet.open for inlet in place.decode.peers._inlets.values())
    assert not link.waiting


def test_a_connection_that_is_not_used_is_closed(place: Place) -> None:
    place.good.hand_over(hashes(2), push=False)
    assert len(place.decode.peers.links.all) == 1
    place.turns(2, ms=200_000)
    assert not place.decode.peers.links.all
    place.good.hand_over(hashes(2, "again"), push=False)


def test_without_descriptors_for_one_more_connection_its_peer_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[tuple[int, str]] = []
    made = Channel(None, lambda *_: None, lambda *how: lost.append(how))

    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", none_left)
    number = made.connect("127.0.0.1:9")
    made.send(number, m.Settle(1, 0))
    made.poll(1)
    assert lost == [(number, "connection: Too many open files")]
    made.close()


# What is held for peers


def test_what_is_held_for_all_peers_is_limited_and_each_gets_on(place: Place) -> None:
    chains = [hashes(12, f"c{number}") for number in range(6)]
    for chain in chains:
        place.good.put(chain)
    place.turns(10)
    own = place.prefill.peers.producer
    for chain in chains:
        place.caller(place.hello())(wanted(chain))
        place.turns(3)
    held = [peer.held_bytes // SLOT_BYTES for peer in own._peers.values()]
    assert held == [12, 12, 8, 1, 1, 1]
    assert own.held.bytes == sum(held) * SLOT_BYTES <= 2 * HELD + 3 * SLOT_BYTES
    place.turns(2, ms=40_000)
    place.turns(2)
    assert own.held.bytes == 0


def test_blocks_that_a_peer_waits_for_are_limited(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running request may still compute any block, so all of them are offered."""
    monkeypatch.setattr(jobs, "BLOCKS_MAX", 10)
    own, namespace = place.prefill.peers.producer, place.prefill.namespace(place.good.giver)
    own.request_leases.running("r", namespace.manager, SLOT_BYTES, 1)
    place.caller(place.hello())
    place.turns(1)
    (number,) = own._peers
    own.on_message(number, wanted(hashes(6), 1, request="r"), place.prefill.now_ns)
    with pytest.raises(ProtocolError, match="more than 10 blocks"):
        own.on_message(number, wanted(hashes(5, "y"), 2, request="r"), place.prefill.now_ns)
    own.on_message(number, m.Settle(1, 0), place.prefill.now_ns)
    own.on_message(number, wanted(hashes(5, "y"), 2, request="r"), place.prefill.now_ns)


@pytest.mark.parametrize(("limit", "most", "blocks"), [("WANTED_MAX", 10, 6), ("OPEN_MAX", 2, 1)])
def test_S2_jobs_of_all_peers_and_the_blocks_that_they_wait_for_are_limited(
    place: Place, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, blocks: int
) -> None:
    """Each turn of the loop goes through them: a hundred connections may have a thousand each."""
    monkeypatch.setattr(producer, limit, most)
    own, namespace = place.prefill.peers.producer, place.prefill.namespace(place.good.giver)
    own.request_leases.running("r", namespace.manager, SLOT_BYTES, 1)
    for number in range(3):
        place.caller(place.hello())(wanted(hashes(blocks, str(number)), request="r"))
    place.turns(1)
    assert [message for message in place.heard if isinstance(message, m.Settled)] == [
        m.Settled(1, end="busy")
    ]
    assert len(own.jobs) == 2


def test_S2_an_unknown_request_is_looked_for_when_it_comes_and_not_in_each_turn(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, namespace = place.prefill.peers.producer, place.prefill.namespace(place.good.giver)
    looked: list[int] = []
    find = jobs.Look._find

    def noted(look: jobs.Look, wanted: list[BlockKey]) -> list[str | None]:
        looked.append(look._job.number)
        return find(look, wanted)

    monkeypatch.setattr(jobs.Look, "_find", noted)
    for number in (1, 2):
        place.caller(place.hello())(wanted(hashes(6), number, request=f"r{number}"))
    place.turns(15)
    assert looked == [1, 2]
    own.request_leases.running("r1", namespace.manager, SLOT_BYTES, 1)
    place.turns(2)
    assert looked == [1, 2, 1]
    place.turns(33)
    assert looked == [1, 2, 1, 2, 2], "each 20 ms, and not each turn"
    place.turns(300)
    assert 15 <= looked.count(2) <= 17
    assert looked.count(1) == 2
    place.turns(50)
    assert looked.count(2) <= 17, "no more after the end"


def test_P7_blocks_that_come_while_their_request_is_unknown_are_offered_soon(
    place: Place,
) -> None:
    chain = hashes(2)
    place.caller(place.hello())(wanted(chain, request="r"))
    place.turns(5)
    assert not any(isinstance(message, m.Offer) for message in place.heard)
    place.good.put(chain)
    place.turns(40)
    (offer,) = [message for message in place.heard if isinstance(message, m.Offer)]
    assert from_u32(offer.positions) == [0, 1]


def test_regions_that_peers_name_are_limited(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "REGIONS_MAX", 4)
    own = place.decode.peers.inlet(place.decode.namespace(place.good.taker))
    for number in range(9):
        own.on_message(7, m.Have(1, b"", b"", b"", (m.Region(number, 4096, 1),)), 1)
    kept = [number for number in range(9) if (7, number) in own._regions._known]
    assert kept == [5, 6, 7, 8]


@pytest.mark.parametrize(
    "message",
    [
        m.Hello(1, "n", {}, "a" * 257),
        m.Hello(1, "n", {}, "", bytes((1 << 20) + 1)),
        m.Hello(1, "n" * 257, {}),
        m.Hello(1, "n", {str(number): "" for number in range(65)}),
        m.Hello(1, "n", {"t": "x" * 5000}),
        m.Land(1, b"", b"", metadata=bytes((1 << 20) + 1)),
        wanted(hashes(1), request="r" * 5000),
        m.Want(1, bytes(32), 32, (bytes(4 * (m.JOB_BLOCKS_MAX + 1)),)),
        m.Want(1, bytes(32), 32, (b"",) * 65),
        wanted(hashes(1), scope=bytes(257)),
        m.Land(1, TOO_MANY, b""),
        m.Land(1, b"", bytes((8 << 20) + 4)),
        m.Settle(1, 1000, TOO_MANY),
        m.Settle(1, 1000, b"", TOO_MANY),
    ],
)
def test_what_would_be_kept_and_is_large_is_no_message(message: framing.Message) -> None:
    with pytest.raises(ProtocolError, match="length <= "):
        m.decode_for_producer(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (m.Hello(1, "\u00e9" * 300, {}), "found 300, expected `str` of length <= 256"),
        (m.Land(1, b"", bytes((8 << 20) + 4)), "found 8388612, expected `bytes` of length <= 83"),
        (m.Want(1, b"", 1, (b"", TOO_MANY)), "found 262148, expected `bytes` of length <= 262144"),
        (m.Want(1, b"", 1, (b"",) * 65), "found 65, expected `array` of length <= 64"),
        (m.Hello(1, "n", {f"{n}": "" for n in range(70)}), "found 70, expected `object` of len"),
    ],
)
def test_a_limit_that_is_not_met_is_named_with_what_was_found(
    message: framing.Message, text: str
) -> None:
    with pytest.raises(ProtocolError, match=f"^not a message of side channel {m.VERSION}: {text}"):
        m.decode_for_producer(msgspec.msgpack.encode(message))
    engine = framing.Decoder(p.ToStore)
    with pytest.raises(ProtocolError, match="found 99, expected `int` <= 64"):
        list(engine.feed(framing.encode(p.Step((p.Lookup(1, b"", 99),)))))


def test_S2_what_was_found_is_not_searched_for_in_a_message_that_is_nested_too_deep() -> None:
    body = msgspec.msgpack.encode(m.Hello(1, "n" * 300, {}))[:-2] + b"\x91" * 5000 + b"\xc0"
    with pytest.raises(ProtocolError, match=": Expected `str` of length <= 256"):
        m.decode_for_producer(body)


def test_S2_what_was_found_is_not_searched_for_in_a_message_of_many_fields() -> None:
    """Fields that nothing names are skipped, and would be objects each."""
    fields = ["Keep", "n" * 300, "r", 1, *range(1 << 17)]
    with pytest.raises(ProtocolError, match=": Expected `str` of length <= 256"):
        m.decode_for_producer(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("width", [-1, 0, 65, 1 << 20])
def test_S2_hashes_have_a_width(width: int) -> None:
    with pytest.raises(ProtocolError, match=rf"^hashes of {width} bytes, expected 1 to 64$"):
        m.wanted_of(wanted(hashes(4), width=width), 1)


@pytest.mark.parametrize(
    "message",
    [
        m.Offer(1, TOO_MANY, (), b""),
        m.Offer(1, b"", (), TOO_MANY),
        m.Have(1, TOO_MANY, b""),
        m.Have(1, b"", bytes((8 << 20) + 4)),
        m.Have(1, b"", b"", TOO_MANY + TOO_MANY),
        m.Settled(1, TOO_MANY),
        m.Settled(1, b"", TOO_MANY),
    ],
)
def test_an_answer_speaks_of_as_many_blocks_as_a_job_can_have(message: framing.Message) -> None:
    """Else a message of 16 MiB would be four million numbers, in the loop that serves engines."""
    with pytest.raises(ProtocolError, match="length <= "):
        m.decode_for_consumer(msgspec.msgpack.encode(message))


# Quarantine


def stalled(place: Place, blocks: int) -> None:
    """Have a read be given up while it is under way."""
    peers, namespace = place.decode.peers, place.decode.namespace(place.good.taker)
    consumer = peers._used[namespace.layout.digest] = peers.inlet(namespace)  # as by a fetch
    arrivals = consumer.arrivals
    fetch = bare_fetch(arrivals, -1, keys_of(hashes(blocks)), push=True)
    fetch.landing = arrivals.landing.take(blocks)
    arrivals._leave_landing(fetch, (0, len(fetch.landing)), moves.MOVING)
    consumer._late[fetch.number] = fetch


def test_B20_much_in_quarantine_restarts_the_exporter_after_which_nothing_is(
    place: Place,
) -> None:
    place.good.hand_over(hashes(1), push=True)
    stalled(place, 17)
    place.turns(3, ms=300)
    assert place.decode.mover.restarts == 0, "what ends soon is given the time"
    place.turns(3, ms=500)
    assert place.decode.mover.restarts == 1
    assert not any(i.arrivals.quarantined for i in place.decode.peers._inlets.values())
    place.turns(10, ms=500)
    assert place.decode.mover.restarts == 1
    place.good.hand_over(hashes(3, "after it"), push=True)


def test_B20_much_that_is_moving_and_was_given_up_restarts_the_exporter(place: Place) -> None:
    place.decode.mover.abandoned = CROWD + 1
    place.turns(3, ms=300)
    assert place.decode.mover.restarts == 0, "what can end soon is given the time"
    place.turns(3, ms=500)
    assert place.decode.mover.restarts == 1


def test_B20_little_in_quarantine_stays_until_nothing_else_goes_on(place: Place) -> None:
    place.good.hand_over(hashes(1), push=True)
    stalled(place, 3)
    place.turns(110, ms=500)
    assert place.decode.mover.restarts == 0
    place.good.hand_over(hashes(3, "meanwhile"), push=True)
    place.turns(118, ms=500)
    assert place.decode.mover.restarts == 0, "it was in use a minute ago"
    place.turns(6, ms=500)
    assert place.decode.mover.restarts == 1


def test_B20_what_moves_for_nobody_does_not_for_ever(place: Place) -> None:
    """A write over a cable that was pulled ends when TCP says so, a quarter of an hour later."""
    place.good.hand_over(hashes(1), push=True)
    place.decode.mover.abandoned = 1
    place.turns(110, ms=500)
    assert place.decode.mover.restarts == 0
    place.turns(15, ms=500)
    assert place.decode.mover.restarts == 1
