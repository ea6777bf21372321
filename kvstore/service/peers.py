"""This store's hand-overs: side channel, exporter and both state machines, tied together.

    lookups that name a peer --> fetch() --> Consumer --messages--> Channel <--> other stores
                                                |                     |
                                                +------ Mover --------+--> Producer
                             reads into landing slots, checks, sums, writes

A connection that was made waits for Welcome; what is said on it until then waits, too. When the
exporter is started again, it has another name and memory: all connections end, and whoever still
wants something says Hello again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from kvstore.errors import ProtocolError
from kvstore.export import messages as m
from kvstore.export.consumer import Check, Consumer, Read
from kvstore.export.consumer import Tag as Part
from kvstore.export.jobs import Source, Tag, Write
from kvstore.export.producer import Producer
from kvstore.protocol import Extent, Handing, Message, Unmap
from kvstore.service.channel import Channel, ClusterKey
from kvstore.service.namespace import Namespace
from kvstore.types import BlockKey, Chain, Slot

log = logging.getLogger(__name__)

BUSY_S = 0.001
EVENTS = (
    *("fetched", "corrupt", "late", "ended", "lost", "exporter", "cleared"),  # as a consumer
    *("confirmed", "stale", "expired", "failed", "gone", "refused"),  # as a producer
    *("unauthorised", "malformed", "too_many", "unsent"),  # of the side channel
)
EXPORTER = -1  # the exporter's number among the store's connections: it maps extents, too


class Up(msgspec.Struct, frozen=True):
    """The exporter runs: its agent's name, and how peers reach it."""

    agent: str
    metadata: bytes


class Down(msgspec.Struct, frozen=True):
    """The exporter has ended; so has every transfer."""

    reason: str


class Reachable(msgspec.Struct, frozen=True):
    """Peers can reach an extent; metadata says how."""

    extent: int
    base: int
    metadata: bytes


class Unreachable(msgspec.Struct, frozen=True):
    """The exporter does not use an extent any more."""

    extent: int


class Summed(msgspec.Struct, frozen=True):
    """Checksums of blocks that are handed over."""

    tags: list[Tag]
    sums: list[int]


class Checked(msgspec.Struct, frozen=True):
    """Which landed blocks of a namespace had the right sum, and are in their slots now."""

    digest: str
    tags: list[Part]
    right: list[bool]


class Written(msgspec.Struct, frozen=True):
    """A push has ended."""

    tags: list[Tag]
    ok: bool


class Arrived(msgspec.Struct, frozen=True):
    """A pull into a namespace has ended."""

    digest: str
    tags: list[Part]
    ok: bool


Event = Up | Down | Reachable | Unreachable | Summed | Checked | Written | Arrived


class Mover(Protocol):
    """Threads and an exporter process; nothing waits."""

    def poll(self, now_ns: int) -> Sequence[Event]:
        """Return what has happened; each piece of work ends exactly once."""
        ...

    def export(self, extent: int, fd: int, size: int) -> None:
        """Let peers read an extent."""
        ...

    def unexport(self, extent: int) -> None:
        """Have Unreachable come once no transfer uses an extent."""
        ...

    def fds(self) -> Iterator[int]:
        """Go through the descriptors that become readable when poll() has something to do."""
        ...

    def wait_s(self, now_ns: int) -> float | None:
        """Return when to call poll() at the latest; None: when a descriptor says so."""
        ...

    def landing(self, namespace: str, slot_bytes: int) -> Landing:
        """Return a namespace's landing slots."""
        ...

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Learn how to reach a peer's exporter now."""
        ...

    def sum(
        self, tags: list[Tag], namespace: str, blocks: list[tuple[BlockKey, memoryview]]
    ) -> None:
        """Take checksums; ends as Summed."""
        ...

    def check(
        self, tags: list[Part], namespace: str, blocks: list[tuple[Check, memoryview, memoryview]]
    ) -> None:
        """Take landed blocks' checksums and copy them if these are right; ends as Checked."""
        ...

    def write(self, tags: list[Tag], agent: str, write: Write) -> None:
        """Write to a peer; ends as Written."""
        ...

    def read(self, tags: list[Part], agent: str, digest: str, read: Read) -> None:
        """Read from a peer into a namespace's landing slots; ends as Arrived."""
        ...

    def close(self) -> None:
        """End all of it."""
        ...


class Landing(Protocol):
    """Landing slots of one namespace."""

    extent: int

    def take(self, count: int) -> list[int]:
        """Take up to count free ones."""
        ...

    def give(self, slots: Collection[int]) -> None:
        """Give some back."""
        ...

    def region(self) -> tuple[m.Region, bytes]:
        """Say where the exporter has them, and its metadata since then."""
        ...

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes."""
        ...


class _Link(msgspec.Struct, eq=False):
    """A connection that was made, for one namespace."""

    address: str
    digest: str
    agent: str | None = None  # once it is welcome
    waiting: list[Message] = []


class _Inlet:
    """The work of one namespace's consumer, and what it sends."""

    def __init__(self, peers: Peers, namespace: Namespace, mover: Mover) -> None:
        self._peers = peers
        self._namespace = namespace
        self._mover = mover
        layout = namespace.layout
        self._landing = mover.landing(layout.digest, layout.slot_bytes)
        self.consumer = Consumer(self, self._landing, peers.say, len(layout.rules))

    @property
    def quarantined_bytes(self) -> int:
        """Landing memory that something may still write though nobody waits for it."""
        return self.consumer.quarantined * self._namespace.layout.slot_bytes

    def read(self, tags: list[Part], peer: int, read: Read) -> None:
        """Read a peer's slots; a peer that is gone by now has told the consumer so."""
        agent = self._peers.agent_of(peer)
        self._mover.read(tags, agent, self._namespace.layout.digest, read)

    def check(self, tags: list[Part], blocks: list[Check]) -> None:
        """Check and copy landed blocks."""
        work = [
            (block, self._landing.view(block.landing), self._namespace.view(block.slot))
            for block in blocks
        ]
        self._mover.check(tags, self._namespace.layout.digest, work)


class Peers:
    """All hand-overs of one store."""

    def __init__(self, key: ClusterKey | None, mover: Mover, held_bytes_max: int) -> None:
        """held_bytes_max: of what is held for one peer at one time."""
        self.channel = Channel(key, self._on_message, self._on_lost)
        send = self.channel.send
        self.producer = Producer(self._find, self._introduce, self, send, held_bytes_max)
        self._mover = mover
        self._namespaces: Mapping[str, Namespace] = {}
        self._up: Up | None = None
        self._noted: list[int] = []
        self._regions: dict[int, m.Region] = {}
        self._links: dict[int, _Link] = {}
        self._by_address: dict[tuple[str, str], int] = {}
        self._inlets: dict[str, _Inlet] = {}
        self._now_ns = 0

    def serve(self, namespaces: Mapping[str, Namespace]) -> None:
        """Hand over blocks of these namespaces, which come and go."""
        self._namespaces = namespaces

    def _mapped(self, extent: int) -> None:
        """Nobody who waits for all to map or unmap an extent waits for the exporter."""
        for namespace in self._namespaces.values():
            namespace.settle(extent, EXPORTER)

    @property
    def up(self) -> bool:
        """Tell whether the exporter runs: before, nobody can be asked."""
        return self._up is not None

    # What the store asks for

    def inlet(self, namespace: Namespace) -> Consumer:
        """Return the remote tier of a namespace."""
        digest = namespace.layout.digest
        if digest not in self._inlets:
            self._inlets[digest] = _Inlet(self, namespace, self._mover)
        return self._inlets[digest].consumer

    def fetch(self, namespace: Namespace, address: str, want: m.Want, now_ns: int) -> int:
        """Ask a peer for blocks; return the fetch's number in the namespace's consumer."""
        digest = namespace.layout.digest
        number = self._by_address.get((address, digest))
        if number is None:
            number = self.channel.connect(address)
            self._by_address[address, digest] = number
            self._links[number] = _Link(address, digest)
            if self._up is not None:
                self._greet(number)
        return self.inlet(namespace).want(number, want, now_ns)

    def hand(
        self, namespace: Namespace, session: int, handings: Sequence[Handing], now_ns: int
    ) -> None:
        """Take note of requests whose blocks other stores will ask for. Raises ProtocolError."""
        hands, rules = self.producer.hands, namespace.layout.rules
        for handing in handings:
            if handing.state == "running":
                size = namespace.layout.slot_bytes
                hands.running(handing.request, namespace.manager, size, session)
            elif handing.state == "gone" or not handing.hashes:
                hands.gone(handing.request)
            elif handing.width <= 0 or len(handing.hashes) % handing.width:
                raise ProtocolError(f"{len(handing.hashes)} bytes of hashes, {handing.width} each")
            else:
                chain = Chain(handing.hashes, handing.width, len(rules), handing.scope)
                keys = [
                    chain.key(group, index)
                    for group, rule in enumerate(rules)
                    for index in m.clip(rule, chain.blocks)
                ]
                end_ns = now_ns + handing.lease_ms * 1_000_000
                hands.done(handing.request, keys, end_ns, now_ns)

    def claimed(self, namespace: Namespace, fetch: int) -> None:
        """Nothing more will be loaded of a fetch."""
        self.inlet(namespace).claimed(fetch)

    def on_memory(self, message: Message, fd: int | None) -> None:
        """Do with an extent what workers are told to do. Nobody waits for it to be mapped."""
        if isinstance(message, Extent) and fd is not None:
            self._mover.export(message.extent, fd, message.count * message.slot_bytes)
            self._noted.append(message.extent)
        elif isinstance(message, Unmap):
            self._regions.pop(message.extent, None)
            self.producer.on_unmapped(message.extent)
            self._mover.unexport(message.extent)

    def say(self, number: int, message: Message) -> None:
        """Send on a connection that was made, once it is welcome."""
        link = self._links.get(number)
        if link is None:
            return
        if link.agent is None:
            link.waiting.append(message)
        else:
            self.channel.send(number, message)

    def agent_of(self, number: int) -> str:
        """Name the exporter at the other end; none if the connection is gone."""
        link = self._links.get(number)
        return (link and link.agent) or ""

    def _greet(self, number: int) -> None:
        link, up = self._links[number], self._up
        namespace = self._namespaces.get(link.digest)
        if up is not None and namespace is not None:
            hello = m.Hello(m.VERSION, link.digest, namespace.traits, up.agent, up.metadata)
            self.channel.send(number, hello)

    # What comes over the side channel

    def _on_message(self, number: int, message: Message) -> None:
        link = self._links.get(number)
        if link is None:
            if isinstance(message, m.Hello) and message.agent:
                self._mover.add_peer(message.agent, message.metadata)
            elif isinstance(message, m.Land) and message.metadata:
                self._mover.add_peer(self.producer.agent_of(number), message.metadata)
            self.producer.on_message(number, message, self._now_ns)
        elif isinstance(message, m.Welcome):
            if link.agent is not None:
                raise ProtocolError("a second Welcome")
            link.agent = message.agent
            self._mover.add_peer(message.agent, message.metadata)
            waiting, link.waiting = link.waiting, []
            for one in waiting:
                self.channel.send(number, one)
        elif isinstance(message, m.Refused):
            log.warning("peer %s: %s", link.address, message.reason)
            self.channel.drop(number)
        elif link.agent is None:
            raise ProtocolError(f"{type(message).__name__} before Welcome")
        else:
            if isinstance(message, m.Have) and message.metadata:
                self._mover.add_peer(link.agent, message.metadata)
            self._inlets[link.digest].consumer.on_message(number, message, self._now_ns)

    def _on_lost(self, number: int, reason: str) -> None:
        link = self._links.pop(number, None)
        if link is None:
            self.producer.on_closed(number)
            return
        log.info("peer %s: %s", link.address, reason)
        self._by_address.pop((link.address, link.digest), None)
        inlet = self._inlets.get(link.digest)
        if inlet is not None:
            inlet.consumer.on_peer_lost(number)

    # Turns

    def fds(self) -> Iterator[int]:
        """Go through the descriptors that become readable when poll() has something to do."""
        yield from self.channel.fds()
        yield from self._mover.fds()

    def wait_s(self, now_ns: int) -> float | None:
        """Return when to call poll() at the latest; None: when a descriptor says so."""
        if self._noted or self.producer.busy or any(i.consumer.busy for i in self._inlets.values()):
            return BUSY_S
        return self._mover.wait_s(now_ns)

    def gauges(self) -> dict[tuple[str, ...], float]:
        """Return gauges, and counters kept here."""
        counts = self.channel.counts + self.producer.counts
        quarantined = 0
        fetched: Counter[str] = Counter()
        for inlet in self._inlets.values():
            counts.update(inlet.consumer.counts)
            fetched.update(inlet.consumer.fetched)
            quarantined += inlet.quarantined_bytes
        found: dict[tuple[str, ...], float] = {
            ("kvstore_hand_over_bytes", "held"): self.producer.held_bytes
            + self.producer.hands.held_bytes,
            ("kvstore_hand_over_bytes", "quarantined"): quarantined,
        }
        found |= {("kvstore_hand_over_events", event): counts[event] for event in EVENTS}
        found |= {("kvstore_fetched_blocks", tier): count for tier, count in fetched.items()}
        return found

    def close(self) -> None:
        """End all hand-overs."""
        self.channel.close()
        self._mover.close()

    def poll(self, now_ns: int) -> None:
        """Do what there is to do."""
        self._now_ns = now_ns
        noted, self._noted = self._noted, []
        for extent in noted:
            self._mapped(extent)
        for event in self._mover.poll(now_ns):
            self._on_event(event)
        self.channel.poll(now_ns)
        for namespace in self._namespaces.values():
            for tag, ok in namespace.tiering.take_staged():
                self.producer.staged(tag, ok=ok)
        self.producer.tick(now_ns)
        for inlet in self._inlets.values():
            inlet.consumer.tick(now_ns)

    def _on_event(self, event: Event) -> None:
        match event:
            case Up():
                self._up = event
                for number in self._links:
                    self._greet(number)
            case Down(reason):
                self._on_down(reason)
            case Reachable(extent, base, metadata):
                self._reachable(extent, base, metadata)
            case Unreachable(extent):
                self._mapped(extent)
            case Summed(tags, sums):
                self.producer.summed(tags, sums)
            case Written(tags, ok):
                self.producer.written(tags, ok=ok)
            case Arrived(digest, parts, ok):
                self._inlets[digest].consumer.moved(parts, ok=ok)
            case Checked(digest, parts, right):
                self._inlets[digest].consumer.checked(parts, right)

    def _on_down(self, reason: str) -> None:
        """Whatever was moving has ended before: now its addresses mean nothing any more."""
        self._up = None
        self._regions.clear()
        self.producer.on_exporter_lost(f"the exporter has ended: {reason}")
        for number in list(self._links):
            self.channel.drop(number)
        for inlet in self._inlets.values():
            inlet.consumer.on_exporter_lost()

    def _reachable(self, extent: int, base: int, metadata: bytes) -> None:
        if self._up is not None:
            self._up = msgspec.structs.replace(self._up, metadata=metadata)
        for namespace in self._namespaces.values():
            mapping = namespace.extents.get(extent)
            if mapping is not None:
                self._regions[extent] = m.Region(extent, base, mapping.memory.count)

    # The producer's work

    def sum(self, tags: list[Tag], source: Source, blocks: list[tuple[BlockKey, Slot]]) -> None:
        """Take blocks' checksums."""
        views = [(key, source.view(slot)) for key, slot in blocks]
        self._mover.sum(tags, source.layout.digest, views)

    def write(self, tags: list[Tag], agent: str, write: Write) -> None:
        """Write slots of one of our extents to a peer."""
        self._mover.write(tags, agent, write)

    def region(self, extent: int) -> tuple[m.Region, bytes] | None:
        """Say where the exporter has an extent, and how to reach it; None: not yet."""
        region, up = self._regions.get(extent), self._up
        return None if region is None or up is None else (region, up.metadata)

    def _introduce(self) -> tuple[str, bytes] | None:
        """Name our exporter; None while there is none."""
        return None if self._up is None else (self._up.agent, self._up.metadata)

    def _find(self, digest: str) -> tuple[Source, dict[str, str]] | None:
        namespace = self._namespaces.get(digest)
        return None if namespace is None else (namespace, namespace.traits)
