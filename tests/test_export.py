"""Both sides of a hand-over against each other, with real managers and tierings between them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec
import pytest

from kvstore import protocol as p
from kvstore.errors import ProtocolError
from kvstore.export import consumer as c
from kvstore.export import messages as m
from kvstore.export import producer as o
from kvstore.export.sums import block_sum
from kvstore.service.namespace import Namespace
from kvstore.tier import Tier, TierContext
from kvstore.types import BlockKey, Slot
from tests.fakes import SLOT_BYTES, HeapPool, Town, blocks, hashes, keys_of, u32
from tiers.memory import MemoryTier

LANDING = 6


def content(key: bytes) -> bytes:
    return (key * (SLOT_BYTES // len(key) + 1))[:SLOT_BYTES]


class Wire:
    """Messages on their way, encoded; all that is done elsewhere ends at a time of its own."""

    def __init__(self, seed: int = 0, delays: int = 0) -> None:
        self.random = random.Random(seed)
        self.delays = delays
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.turn = 0

    def do(self, work: Callable[[], None]) -> None:
        self.later.append((self.turn + self.random.randint(0, self.delays), work))

    def step(self) -> None:
        self.turn += 1
        due = [work for turn, work in self.later if turn < self.turn]
        self.later = [(turn, work) for turn, work in self.later if turn >= self.turn]
        for work in due:
            work()


class Line:
    """One direction of a connection: in order, each message some turns later."""

    def __init__(self, wire: Wire, take: Callable[[p.Message], None], kinds: object) -> None:
        self.wire, self.take = wire, take
        self.queue: deque[bytes] = deque()
        self.decoder = p.Decoder(kinds)
        self.sent: list[p.Message] = []
        self.cut = False

    def send(self, _peer: int, message: p.Message) -> None:
        self.sent.append(message)
        self.queue.append(p.encode(message))
        self.wire.do(self.deliver)

    def deliver(self) -> None:
        frame = self.queue.popleft()
        if not self.cut:
            for message in self.decoder.feed(frame):
                self.take(message)


class LandingSlots:
    def __init__(self) -> None:
        self.memory = [bytearray(SLOT_BYTES) for _ in range(LANDING)]
        self.free = list(range(LANDING))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, slots: Collection[int]) -> None:
        assert not set(slots) & set(self.free)
        self.free += slots

    def region(self) -> m.Region:
        return m.Region(900, 0, LANDING)


class Pair:
    """A prefill store with a shelf below its memory, and a decode store."""

    def __init__(self, seed: int = 0, delays: int = 0, held: int = 64) -> None:
        self.wire = Wire(seed, delays)
        self.peer = 7  # this connection's number
        self.giver = Town(pool=HeapPool(4, 8), tiers=[("shelf", MemoryTier)])
        self.taker = Town(pool=HeapPool(4, 8), tiers=[("peer", self._consumer)])
        self.prefill = self.giver.attach(credit_slots=4)
        self.landing = LandingSlots()
        self.decode = self.taker.attach(credit_slots=4)
        self.damage: set[BlockKey] = set()
        self.fail = 0.0
        self.producer = o.Producer(
            self._find, lambda: ("agent", b"md"), self, self._to_consumer, held * SLOT_BYTES
        )
        self.welcome: list[p.Message] = []
        self.connect()
        self.run(8)

    def connect(self) -> None:
        """Be another connection; what is still on its way in the old one is lost."""
        self.peer += 1
        peer = self.peer

        def to_producer(message: p.Message) -> None:
            if peer == self.peer:
                self.producer.on_message(peer, message, self.giver.now_ns)

        def to_consumer(message: p.Message) -> None:
            if isinstance(message, m.Welcome | m.Refused):
                self.welcome.append(message)
            elif peer == self.peer:
                self.consumer.on_message(peer, message, self.taker.now_ns)

        self.down = Line(self.wire, to_consumer, m.ToConsumer)
        self.up = Line(self.wire, to_producer, m.ToProducer)
        digest = self.source.layout.digest
        self.up.send(peer, m.Hello(m.VERSION, digest, {"model": "m"}, "other", b"md"))

    @property
    def source(self) -> Namespace:
        return next(iter(self.giver.store.namespaces.values()))

    @property
    def target(self) -> Namespace:
        return next(iter(self.taker.store.namespaces.values()))

    def _consumer(self, _context: TierContext) -> Tier:
        self.consumer = c.Consumer(_Moves(self), _Room(self), self._to_producer, 1)
        return self.consumer

    def _find(self, digest: str) -> tuple[Namespace, dict[str, str]] | None:
        return (self.source, {"model": "m"}) if digest == self.source.layout.digest else None

    def _to_consumer(self, peer: int, message: p.Message) -> None:
        if peer == self.peer:
            self.down.send(peer, message)

    def _to_producer(self, peer: int, message: p.Message) -> None:
        if peer == self.peer:
            self.up.send(peer, message)

    # The producer's work

    def sum(self, tags: list[o.Tag], source: o.Source, named: list[tuple[BlockKey, Slot]]) -> None:
        def work() -> None:
            sums = [block_sum("n", key, self.source.view(slot)) for key, slot in named]
            self.producer.summed(tags, sums)

        assert source is self.source
        self.wire.do(work)

    def write(self, tags: list[o.Tag], agent: str, write: o.Write) -> None:
        def work() -> None:
            ok = self.wire.random.random() >= self.fail
            for number, slot in zip(write.numbers, write.landing_slots, strict=True):
                if ok:
                    self.landing.memory[slot][:] = self._slot(write.extent, number)
            self.producer.written(tags, ok=ok)

        assert agent == "other"
        self.wire.do(work)

    def region(self, extent: int) -> m.Region:
        return m.Region(extent, 4096 * extent, self.source.extents[extent].memory.count)

    def _slot(self, extent: int, number: int) -> bytes:
        return bytes(self.source.extents[extent].memory.slot(number))

    def lose(self) -> None:
        """The connection breaks, and is made again."""
        peer = self.peer
        self.connect()
        self.consumer.on_peer_lost(peer, "gone")
        self.producer.on_closed(peer)

    # Time

    def run(self, turns: int, ms: int = 1) -> None:
        for _ in range(turns):
            self.wire.step()
            for town, engine in ((self.giver, self.prefill), (self.taker, self.decode)):
                town.tick(ms)
                engine.pump()
            for tag, ok in self.source.tiering.take_staged():
                self.producer.staged(tag, ok=ok)
            self.producer.tick(self.giver.now_ns)
            self.consumer.tick(self.taker.now_ns)

    def put(self, chain: Sequence[bytes]) -> None:
        for index, key in enumerate(keys_of(chain)):
            self.source.view(Slot(self.prefill.credits[0]))[:] = content(key)
            self.prefill.put(chain[: index + 1], first=index)

    def want(self, chain: Sequence[bytes], *, push: bool = False, request: str = "") -> int:
        want = m.Want(1, b"".join(chain), 32, (u32(range(len(chain))),), b"", request, push=push)
        return self.consumer.want(self.peer, want, self.taker.now_ns)

    def arrived(self, chain: Sequence[bytes]) -> int:
        """Count the leading blocks that the decode store has, all of them with the right bytes."""
        count = 0
        for key in keys_of(chain):
            entry = self.target.manager.ready(key)
            if entry is None:
                break
            assert self.target.view(entry.slot) == content(key), "wrong bytes"
            count += 1
        return count

    def check_nothing_left(self) -> None:
        assert not any(peer.jobs for peer in self.producer._peers.values())
        assert len(self.producer._peers) == 1, "closed ones are forgotten"
        assert all(peer.held_bytes == 0 for peer in self.producer._peers.values())
        assert all(entry.pins == 0 for entry in self.source.manager.index)
        on_credit = set(self.source.manager.granted())
        assert on_credit == set(self.prefill.credits), "staging slots that nobody gave back"
        assert set(self.target.manager.granted()) == set(self.decode.credits)
        assert not self.consumer._fetches
        assert not self.consumer._located
        assert self.consumer.quarantined == 0
        assert sorted(self.landing.free) == list(range(LANDING))


class _Moves:
    """The consumer's work."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def read(self, tags: list[c.Tag], peer: int, read: c.Read) -> None:
        def work() -> None:
            pair = self._pair
            ok = pair.wire.random.random() >= pair.fail
            for number, slot in zip(read.numbers, read.landing, strict=True):
                if ok:
                    pair.landing.memory[slot][:] = pair._slot(read.region.extent, number)
            pair.consumer.moved(tags, ok=ok)

        assert peer <= self._pair.peer
        self._pair.wire.do(work)

    def check(self, tags: list[c.Tag], checks: list[c.Check]) -> None:
        def work() -> None:
            right = []
            for check in checks:
                landed = memoryview(self._pair.landing.memory[check.landing])
                if check.key in self._pair.damage:
                    landed[5] ^= 1
                right.append(block_sum("n", check.key, landed) == check.sum)
                if right[-1]:
                    self._pair.target.view(check.slot)[:] = landed
            self._pair.consumer.checked(tags, right)

        self._pair.wire.do(work)


class _Room:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def take(self, count: int) -> list[int]:
        return self._pair.landing.take(count)

    def give(self, slots: Collection[int]) -> None:
        self._pair.landing.give(slots)

    def region(self) -> m.Region:
        return self._pair.landing.region()


@pytest.mark.parametrize("push", [False, True])
def test_L1_blocks_come_from_memory_and_from_below_it(push: bool) -> None:
    pair, chain = Pair(), hashes(12)
    pair.put(chain)
    for key in keys_of(chain)[:4:-1]:
        pair.source.manager.drop(key, "test")
    pair.want(chain, push=push)
    pair.run(3)
    ask = pair.decode.ask(chain)
    pair.run(40)
    assert blocks(pair.decode.granted[ask]) == list(range(12))
    assert pair.decode.granted[ask].sources == {"peer": 12}
    assert pair.arrived(chain) == 12
    offer = next(x for x in pair.down.sent if isinstance(x, m.Offer))
    assert dict(zip(offer.tiers, map(offer.which.count, range(2)), strict=True)) == {
        "cpu": 5,
        "shelf": 7,
    }
    pair.run(3)
    pair.check_nothing_left()


def test_B15_what_a_peer_does_not_answer_in_time_is_a_miss() -> None:
    pair, chain = Pair(), hashes(3)
    pair.put(chain)
    pair.up.cut = True
    pair.want(chain)
    ask = pair.decode.ask(chain)
    pair.run(20, ms=10)
    assert ask not in pair.decode.granted, "it is waited for"
    pair.run(20, ms=100)
    assert blocks(pair.decode.granted[ask]) == []
    assert pair.consumer.counts["late"] == 1


def test_B3_namespaces_that_differ_are_refused_with_both_values() -> None:
    pair, said = Pair(), list[p.Message]()
    pair.producer._send = lambda _peer, message: said.append(message)
    hello = m.Hello(m.VERSION, pair.source.layout.digest, {"model": "x", "dtype": "int8"})
    for change in ({}, {"version": 9}, {"namespace": "other"}):
        pair.producer.on_message(99, msgspec.structs.replace(hello, **change), 0)
    assert said == [
        m.Refused("dtype is int8, expected nothing, model is x, expected m"),
        m.Refused("side channel 9, expected 1"),
        m.Refused("namespace other is not served here yet", retry=True),
    ]


@pytest.mark.parametrize("push", [False, True])
def test_B19_a_block_with_another_sum_is_not_ready_and_ends_the_load_there(push: bool) -> None:
    pair, chain = Pair(), hashes(6)
    pair.put(chain)
    pair.damage.add(keys_of(chain)[3])
    pair.want(chain, push=push)
    ask = pair.decode.ask(chain)
    pair.run(60)
    assert len(blocks(pair.decode.granted[ask])) == 6
    assert pair.arrived(chain) == 3
    assert pair.consumer.counts["corrupt"] == 1
    pair.check_nothing_left()


def test_B16_a_block_confirmed_after_its_lease_is_not_ready() -> None:
    pair, chain = Pair(), hashes(2)
    pair.put(chain)
    pair.want(chain)
    ask = pair.decode.ask(chain)
    pair.run(4)
    assert pair.decode.granted.get(ask)
    pair.producer.tick(pair.giver.now_ns + 31 * 10**9)
    pair.run(30)
    assert pair.arrived(chain) == 0
    pair.producer.tick(pair.giver.now_ns + 60 * 10**9)
    pair.run(10)
    pair.check_nothing_left()


def test_P7_what_a_running_request_computes_comes_as_it_is_computed() -> None:
    pair, chain = Pair(), hashes(6)
    pair.producer.computing("r")
    pair.put(chain[:2])
    pair.want(chain, request="r")
    ask = pair.decode.ask(chain)
    pair.run(20)
    assert len(blocks(pair.decode.granted[ask])) == 6
    assert pair.arrived(chain) == 0, "a load is ready as a whole"
    pair.put(chain)
    pair.producer.computed("r")
    pair.run(20)
    assert pair.arrived(chain) == 6
    pair.check_nothing_left()


def test_B18_what_a_request_did_not_compute_is_gone_once_it_has_ended() -> None:
    pair, chain = Pair(), hashes(6)
    pair.producer.computing("r")
    pair.put(chain[:4])
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(20)
    pair.producer.computed("r")
    pair.run(20)
    assert pair.producer.counts["gone"] == 2
    assert pair.arrived(chain) == 4
    pair.check_nothing_left()


@pytest.mark.parametrize("push", [False, True])
def test_B20_a_landing_slot_is_not_used_again_while_something_may_write_it(
    monkeypatch: pytest.MonkeyPatch, push: bool
) -> None:
    pair, chain = Pair(), hashes(3)
    pair.put(chain)
    moving: list[Callable[[], None]] = []
    target, name = (pair, "write") if push else (pair.consumer._work, "read")
    move = getattr(target, name)
    monkeypatch.setattr(target, name, lambda *job: moving.append(partial(move, *job)))
    number = pair.want(chain, push=push)
    pair.decode.ask(chain)
    while len(pair.landing.free) > LANDING - 3 or not moving:
        pair.run(1)
    fetch = pair.consumer._fetches[number]
    pair.consumer._fail(fetch, "test")
    pair.consumer._settle(fetch)
    assert pair.consumer.quarantined == 3
    pair.run(3)
    assert len(pair.landing.free) == LANDING - 3
    for work in moving:
        work()
    pair.run(10)
    assert pair.consumer.quarantined == 0
    pair.check_nothing_left()


def test_B16_blocks_are_held_for_a_while_after_the_lease_and_confirmed_no_more() -> None:
    pair, chain = Pair(), hashes(2)
    pair.put(chain)
    pair.want(chain)
    pair.run(3)
    pair.up.cut = True
    end_ns = pair.giver.now_ns + 30 * 10**9
    pair.producer.tick(end_ns)
    assert pair.producer.counts["expired"] == 1
    said: list[p.Message] = []
    pair.producer._send = lambda _peer, message: said.append(message)
    pair.producer.on_message(pair.peer, m.Confirm(1, u32([0, 1])), end_ns)
    assert said == [m.Valid(1, b"")]
    assert pair.producer.counts["stale"] == 2
    pinned = [entry.pins for entry in pair.source.manager.index]
    assert pinned == [1, 1]
    pair.producer.tick(end_ns + o.GRACE_NS - 1_000_000_000)
    assert [entry.pins for entry in pair.source.manager.index] == [1, 1]
    pair.producer.tick(end_ns + o.GRACE_NS)
    assert [entry.pins for entry in pair.source.manager.index] == [0, 0]


def test_B11_heartbeats_keep_a_lease_and_never_shorten_it() -> None:
    pair, chain = Pair(), hashes(3)
    pair.producer.computing("r")
    pair.put(chain[:2])
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(6)
    for _ in range(9):  # nothing else is said for longer than a lease
        pair.run(9, ms=1000)
        pair.put(hashes(1, "other"))
        pair.consumer._fetches[1].heard_ns = pair.taker.now_ns
    pair.put(chain)
    pair.run(20)
    assert pair.arrived(chain) == 3
    pair.want(chain)
    pair.run(2)
    (job,) = pair.producer._peers[pair.peer].jobs.values()
    before = job.deadline_ns
    pair.producer.on_message(pair.peer, m.Extend(job.number, 1), pair.giver.now_ns)
    assert job.deadline_ns == before


def test_a_peer_speaks_for_its_own_jobs_only() -> None:
    pair, chain = Pair(), hashes(2)
    pair.put(chain)
    number = pair.want(chain)
    with pytest.raises(ProtocolError, match="is not this peer's"):
        pair.consumer.on_message(pair.peer + 1, m.Offer(number, b"", (), b""), 0)


def test_what_was_checked_after_its_peer_was_lost_is_not_waited_for() -> None:
    pair, chain = Pair(), hashes(2)
    pair.put(chain)
    number = pair.want(chain)
    pair.decode.ask(chain)
    while any(b.state is not c.State.LANDED for b in pair.consumer._fetches[number].blocks):
        pair.run(1)
    pair.lose()
    pair.run(3)
    assert not pair.consumer._fetches
    assert pair.arrived(chain) == 0


def test_O17_what_is_staged_at_a_clear_is_not_handed_over() -> None:
    pair, chain = Pair(), hashes(2)
    pair.put(chain)
    for key in keys_of(chain)[::-1]:
        pair.source.manager.drop(key, "test")
    want = m.Want(1, b"".join(chain), 32, (u32([0, 1]),))
    pair.producer.on_message(pair.peer, want, pair.giver.now_ns)
    pair.source.tiering.clear()
    pair.run(4)
    assert pair.producer.counts["failed"] == 2
    pair.check_nothing_left()


class Chance:
    """One of the things that can happen to a pair."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair, self.rng = pair, random.Random(seed)
        self.chains = [hashes(self.rng.randint(1, 10), f"r{number}") for number in range(4)]
        self.acts = [self.put, self.want, self.want, self.ask, self.drop, self.lose, self.damage]
        self.acts += [self.clear, self.compute]

    def act(self) -> None:
        self.rng.choice(self.acts)(self.rng.choice(self.chains))

    def put(self, chain: Sequence[bytes]) -> None:
        self.pair.put(chain)

    def want(self, chain: Sequence[bytes]) -> None:
        some = chain[: self.rng.randint(1, len(chain))]
        request = self.rng.choice(["", "r"])
        self.pair.want(some, push=self.rng.random() < 0.5, request=request)
        self.ask(chain)

    def ask(self, chain: Sequence[bytes]) -> None:
        self.pair.decode.ask(chain)

    def drop(self, chain: Sequence[bytes]) -> None:
        manager = self.rng.choice([self.pair.source, self.pair.target]).manager
        for key in keys_of(chain)[::-1]:
            manager.drop(key, "test")

    def damage(self, chain: Sequence[bytes]) -> None:
        self.pair.damage = {self.rng.choice(keys_of(chain))} if self.rng.random() < 0.5 else set()

    def clear(self, _chain: Sequence[bytes]) -> None:
        if self.rng.random() < 0.3:
            self.rng.choice([self.pair.source, self.pair.target]).tiering.clear()

    def lose(self, _chain: Sequence[bytes]) -> None:
        if self.rng.random() < 0.3:
            self.rng.choice([self.pair.consumer.on_exporter_lost, self.pair.lose])()

    def compute(self, _chain: Sequence[bytes]) -> None:
        self.rng.choice([self.pair.producer.computing, self.pair.producer.computed])("r")


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_bytes_are_right_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(seed, delays=rng.choice([0, 1, 4]), held=rng.choice([1, 3, 64]))
    chance = Chance(pair, seed)
    pair.fail = rng.choice([0, 0, 0.2])
    for _ in range(40):
        chance.act()
        pair.run(rng.randint(1, 8), ms=rng.choice([1, 1, 1, 400]))
        for chain in chance.chains:
            pair.arrived(chain)
    pair.fail, pair.damage = 0, set()
    pair.producer.computed("r")
    pair.run(80, ms=1000)
    pair.consumer.on_exporter_lost()  # the end of a quarantine whose peer was lost
    pair.check_nothing_left()
