"""Two stores and a hand-over between them, in one thread: real managers, tierings and messages."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from kvstore.core.layout import RankPages
from kvstore.core.tier import Tier, TierContext
from kvstore.core.types import BlockKey, GroupRule, Slot
from kvstore.handover import consumer as c
from kvstore.handover import producer as o
from kvstore.handover import transfers as t
from kvstore.handover.arrivals import Arrivals
from kvstore.handover.fetches import Fetch, Fetched
from kvstore.handover.jobs import OwnExporter
from kvstore.store.namespace import Namespace
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.fakes import (
    SLOT_BYTES,
    HeapPool,
    Town,
    from_u32,
    hashes,
    keys_of,
    u32,
)
from tests.harness.handover_moves import LandingSlots, Moves
from tests.reference.memory_tier import MemoryTier
from tiers.nixl.messages import Fill

LANDING = 6


def content(key: bytes) -> bytes:
    return (key * (SLOT_BYTES // len(key) + 1))[:SLOT_BYTES]


class Wire:
    """Messages on their way, encoded; all that is done elsewhere ends at a time of its own."""

    def __init__(self, seed: int = 0, delays: int = 0) -> None:
        self.random = random.Random(seed)
        self.delays = delays
        self.least = 0  # turns that anything takes
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.turn = 0

    def do(self, work: Callable[[], None]) -> None:
        turns = self.least + self.random.randint(0, self.delays)
        self.later.append((self.turn + turns, work))

    def step(self) -> None:
        self.turn += 1
        due = [work for turn, work in self.later if turn < self.turn]
        self.later = [(turn, work) for turn, work in self.later if turn >= self.turn]
        for work in due:
            work()


class Line:
    """One direction of a connection: in order, each message some turns later."""

    def __init__(self, wire: Wire, take: Callable[[framing.Message], None], kinds: object) -> None:
        self.wire, self.take = wire, take
        self.queue: deque[bytes] = deque()
        self.decoder = framing.Decoder(kinds)
        self.sent: list[framing.Message] = []
        self.cut = False

    def send(self, _peer: int, message: framing.Message) -> None:
        self.sent.append(message)
        self.queue.append(framing.encode(message))
        self.wire.do(self.deliver)

    def deliver(self) -> None:
        frame = self.queue.popleft()
        if not self.cut:
            for message in self.decoder.feed(frame):
                self.take(message)


class Pair:
    """A prefill store with a shelf below its memory, and a decode store."""

    def __init__(self, seed: int = 0, delays: int = 0, held: int = 64) -> None:
        self.wire = Wire(seed, delays)
        self.peer = 7  # this connection's number
        self.giver = Town(pool=HeapPool(4, 8), tiers=[("shelf", MemoryTier)])
        self.taker = Town(pool=HeapPool(4, 8), tiers=[("peer", self._consumer)])
        self.prefill = self.giver.attach(credit_slots=4)
        self.landing = LandingSlots(900, LANDING)
        self.moves = _PairMoves(self)
        self.decode = self.taker.attach(credit_slots=4)
        self.passed_on: list[tuple[int, int]] = []  # fetch, position
        self.passed: dict[tuple[int, int], bool] = {}  # verdicts of direct fetches, as sent
        self.in_engines: list[p.Places] = []
        self.ranks: Sequence[RankPages] = (RankPages("rank 0", b"md", ()),)  # of the decode engine
        self.pushing: list[int] = []  # fetches whose workers are to say where
        self.unsafe: set[tuple[int, int]] = set()  # passed, and may still be written
        self.met: list[str] = []  # agents that the prefill store's exporter was told of
        self.filled: list[Fill] = []
        self.producer = o.Producer(
            lambda: self.giver.store.namespaces,
            self._exporter,
            cast("Any", self.moves),
            self._to_consumer,
            held * SLOT_BYTES,
            lambda _, agent, __: self.met.append(agent),
        )
        self.welcome: list[framing.Message] = []
        self.connect()
        self.run(8)

    def connect(self) -> None:
        """Be another connection; what is still on its way in the old one is lost."""
        self.peer += 1
        peer = self.peer

        def to_producer(message: framing.Message) -> None:
            if peer == self.peer:
                self.producer.on_message(peer, message, self.giver.now_ns)

        def to_consumer(message: framing.Message) -> None:
            if isinstance(message, m.Welcome | m.Refused | m.Noted):
                self.welcome.append(message)
            elif peer == self.peer:
                self.consumer.on_message(peer, message, self.taker.now_ns)

        self.down = Line(self.wire, to_consumer, m.ToConsumer)
        self.up = Line(self.wire, to_producer, m.ToProducer)
        layout = self.source.layout
        self.up.send(peer, m.Hello(m.VERSION, layout.digest, layout.traits, "other", b"md"))

    @property
    def source(self) -> Namespace:
        return next(iter(self.giver.store.namespaces.values()))

    @property
    def target(self) -> Namespace:
        return next(iter(self.taker.store.namespaces.values()))

    def _consumer(self, context: TierContext) -> Tier:
        target: Any = _Target(self, context)
        transfers: Any = self.moves
        connections: Any = _Connections(self)
        self.consumer = c.Consumer(connections, target, transfers, self._to_worker, Fetched())
        return self.consumer

    def _to_consumer(self, peer: int, message: framing.Message) -> None:
        if peer == self.peer:
            self.down.send(peer, message)

    # Workers of the decode engine: they read what they are told at once

    def claim(self, number: int, positions: Iterable[int]) -> None:
        workers = {rank: 10 + rank for rank in range(len(self.ranks))}
        self.consumer.claim(number, 1, workers, [*positions])

    def read(self, number: int, positions: Iterable[int], *, ok: bool = True) -> None:
        """All ranks have read these blocks, or could not."""
        for rank in range(len(self.ranks)):
            arrived = p.Arrived(number, u32([*positions]), 0, ok)
            self.consumer.of_worker(1, rank, arrived, self.taker.now_ns)

    def name(self, number: int, targets: Mapping[int, list[int]]) -> None:
        """All ranks name the engine blocks that the peer may write."""
        blocks = u32([block for found in targets.values() for block in found])
        for number_of, rank in enumerate(self.ranks):
            target = p.Target(number, rank.agent, u32([*targets]), blocks)
            self.consumer.of_worker(1, number_of, target, self.taker.now_ns)

    def _to_worker(self, connection: int, message: framing.Message, _fd: int | None) -> None:
        if connection != 10:
            return
        match message:
            case p.Places(fetch=fetch, push=True):
                self.pushing.append(fetch)
            case p.Places(fetch=fetch, positions=positions):
                self.passed_on += [(fetch, at) for at in from_u32(positions)]
                if message.engine is not None:
                    self.in_engines.append(message)
            case p.Passed(fetch, positions, ok, written):
                for at in from_u32(positions):
                    self.passed[fetch, at] = ok
                    (self.unsafe.add if written else self.unsafe.discard)((fetch, at))

    # The producer's work

    def _exporter(self) -> OwnExporter:
        return OwnExporter(
            "agent", b"md", {extent: self.region(extent) for extent in self.source.extents}
        )

    def region(self, extent: int) -> m.Region:
        return m.Region(extent, 4096 * extent, self.source.extents[extent].memory.count)

    def lose(self) -> None:
        """The connection breaks, and is made again."""
        peer = self.peer
        self.connect()
        self.consumer.on_peer_lost(peer)
        self.producer.on_closed(peer)

    # Time

    def run(self, turns: int, ms: int = 1) -> None:
        for _ in range(turns):
            self.wire.step()
            for town, engine in ((self.giver, self.prefill), (self.taker, self.decode)):
                town.tick(ms)
                engine.pump()
            self.producer.take_staged()
            self.producer.tick(self.giver.now_ns)
            self.consumer.tick(self.taker.now_ns)

    def put(self, chain: Sequence[bytes]) -> None:
        for index, key in enumerate(keys_of(chain)):
            self.source.view(Slot(self.prefill.credits[0]))[:] = content(key)
            self.prefill.put(chain[: index + 1], first=index)

    def hand(self, request: str) -> None:
        self.producer.request_leases.running(request, self.source.manager, SLOT_BYTES, 1)

    def want(
        self,
        chain: Sequence[bytes],
        *,
        push: bool = False,
        request: str = "",
        block_ns: int | None = None,
    ) -> int:
        indices, how = (u32(range(len(chain))),), {"push": push, "block_ns": block_ns}
        want = replace(m.Want(1, b"".join(chain), 32, indices, b"", request), **how)
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

    def check_nothing_left(self, turns: int = 0) -> None:
        """Run so many turns; then nothing is held for a hand-over, or known of it."""
        self.run(turns)
        assert not any(peer.jobs for peer in self.producer._peers.values())
        assert len(self.producer._peers) == 1, "closed ones are forgotten"
        assert all(peer.held_bytes == 0 for peer in self.producer._peers.values())
        assert all(entry.pins == 0 for entry in self.source.manager.index)
        on_credit = set(self.source.manager.slots.granted)
        assert on_credit == set(self.prefill.credits), "staging slots that nobody gave back"
        assert set(self.target.manager.slots.granted) == set(self.decode.credits)
        assert not self.consumer._fetches
        assert not self.consumer._located
        assert not self.consumer._also
        assert self.consumer.arrivals.quarantined == 0
        self.landing.check_all_free()


def stored(blocks: int, **how: int) -> tuple[Pair, list[bytes]]:
    """A pair whose prefill store has a chain of so many blocks."""
    pair, chain = Pair(**how), hashes(blocks)
    pair.put(chain)
    return pair, chain


def bare_fetch(arrivals: Arrivals, peer: int, keys: list[BlockKey], *, push: bool = False) -> Fetch:
    """A fetch that no consumer knows; its number is the peer's."""
    return Fetch(
        connection=peer,
        number=peer,
        keys=keys,
        push=push,
        say=lambda _: None,
        fetched=Fetched(),
        located={},
        also={},
        into=arrivals,
        heard_ns=0,
        extend_ns=0,
    )


class _Connections:
    """The consumer's connection."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def say(self, peer: int, message: framing.Message) -> None:
        if peer == self._pair.peer:
            self._pair.up.send(peer, message)

    def address_of(self, _peer: int) -> str:
        return "there"

    def reached_at(self, peer: int) -> tuple[str, bytes]:
        assert peer <= self._pair.peer
        return "agent", b"md"


class _Target:
    """The consumer's namespace, which is made after its tiers."""

    def __init__(self, pair: Pair, context: TierContext) -> None:
        self._pair = pair
        self.engines = SimpleNamespace(ranks=lambda _: pair.ranks)
        group = SimpleNamespace(stride=context.slot_bytes)
        self.layout = SimpleNamespace(
            digest=context.namespace,
            rules=(GroupRule(),),
            slot_bytes=context.slot_bytes,
            ranks=(SimpleNamespace(groups=(group,)),),
        )

    @property
    def peer_block_ns(self) -> int:
        return getattr(self._pair.target, "peer_block_ns", 0)  # a bare memory has none

    @peer_block_ns.setter
    def peer_block_ns(self, block_ns: int) -> None:
        self._pair.target.peer_block_ns = block_ns

    def view(self, slot: Slot) -> memoryview:
        return self._pair.target.view(slot)


class _PairMoves(Moves):
    """What both stores have moved, summed and checked."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self._pair = pair
        self.fails = 0.0  # of all reads and writes

    def do(self, work: Callable[[], t.Event]) -> None:
        self._pair.wire.do(lambda: self._end(work()))

    def _end(self, event: t.Event) -> None:
        match event:
            case t.Summed(part, sums):
                self._pair.producer.summed(part, sums)
            case t.Written(part, ok):
                self._pair.producer.written(part, ok=ok)
            case t.Arrived(_, part, ok):
                self._pair.consumer.moved(part, ok=ok)
            case t.Checked(_, part, right):
                self._pair.consumer.checked(part, right)

    def _fails(self) -> bool:
        return self._pair.wire.random.random() < self.fails

    def slot(self, agent: str, extent: int, number: int) -> bytes | None:
        assert agent in {"", "agent"}
        memory = self._pair.source.extents[extent].memory
        return None if self._fails() else bytes(memory.slot(number))

    def landing_at(self, agent: str, _address: int) -> LandingSlots:
        assert agent == "other"
        return self._pair.landing

    def landing(self, _digest: str, _slot_bytes: int) -> LandingSlots:
        return self._pair.landing

    def filled(self, fill: Fill) -> bool:
        self._pair.filled += [fill] * (ok := not self._fails())
        return ok
