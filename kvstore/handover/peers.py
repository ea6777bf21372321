"""This store's hand-overs: side channel, exporter and both state machines, tied together.

    lookups that name a peer --> fetch() --> Consumer --messages--> Channel <--> other stores
                                                |                     |
                                                +------ Mover --------+--> Producer
                             reads into landing slots, checks, sums, writes

A connection that was made says Hello once there is something to fetch, and the exporter runs;
until Welcome what else is to be said waits, but for what is said of requests by name. When the
exporter is started again, it has another name and memory: all connections end, and whoever still
wants something says Hello again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

import msgspec

from kvstore.barrier import Barrier
from kvstore.core.errors import ProtocolError
from kvstore.handover.cluster_key import ClusterKey
from kvstore.handover.consumer import STALL_NS, WAITS, Consumer, Fetched, Waits
from kvstore.handover.direct_fetches import Send, no_workers
from kvstore.handover.engine_writes import EngineWrites
from kvstore.handover.heartbeats import Held, Requests
from kvstore.handover.jobs import OwnExporter, Source
from kvstore.handover.producer import OfJob, Producer
from kvstore.handover.runs import Part
from kvstore.handover.side_channel import LOGGED_MAX, Channel
from kvstore.handover.transfers import (
    BUSY_S,
    Arrived,
    Checked,
    Event,
    PeerAgents,
    Quarantine,
    Reachable,
    Summed,
    Transfers,
    Written,
)
from kvstore.logs import RateLog
from kvstore.metrics import HAND_OVER_EVENTS, Numbers
from kvstore.wire import peer as m
from kvstore.wire.engine import Extent
from kvstore.wire.framing import Message
from tiers.nixl import messages as nixl
from tiers.nixl.supervisor import Down

log = logging.getLogger(__name__)

EXPORTER = -1  # the exporter's number among the store's connections: it maps extents, too
LINKS_MAX = 128  # peers that are asked at one time; each takes some descriptors
RESTING_NS = 1_000_000_000  # of a connection that may make room for another
IDLE_NS = 300_000_000_000  # a connection that nothing was asked on; its peer forgets it later
SWEEP_NS = 500_000_000


class _Link(msgspec.Struct, eq=False):
    """A connection that was made, for one namespace."""

    address: str
    digest: str
    used_ns: int
    greeted: bool = False
    agent: str | None = None  # once it is welcome
    metadata: bytes = b""  # of its exporter
    waiting: list[Message] = []


def _job_of(message: Message) -> int | None:
    """Return the fetch that a message to a producer is about."""
    return message.job if isinstance(message, m.Want | OfJob) else None


class Peers:
    """All hand-overs of one store."""

    def __init__(
        self,
        key: ClusterKey | None,
        mover: Transfers,
        held_bytes_max: int,
        waits: Waits = WAITS,
    ) -> None:
        """held_bytes_max: of what is held for one peer at one time. waits: for blocks of peers."""
        self.channel = Channel(key, self._on_message, self._on_lost)
        send = self.channel.send
        self._agents = PeerAgents(mover)
        self._send: Send = no_workers
        self.engine_writes = EngineWrites(self._to_worker, self._agents.metadata)
        self.producer = Producer(
            lambda: self._namespaces,
            self._introduce,
            mover,
            self.engine_writes,
            send,
            held_bytes_max,
            self._agents.meet,
        )
        self._mover, self._waits = mover, waits
        self._namespaces: Mapping[str, Source] = {}
        self._numbers = Numbers()
        self._up: nixl.Ready | None = None
        self._noted: list[int] = []
        self._counts: Counter[str] = Counter()
        self._slots: dict[int, int] = {}  # of the extents that workers map
        self._unmapping: set[int] = set()
        self._regions: dict[int, m.Region] = {}
        self._links: dict[int, _Link] = {}
        self._by_address: dict[tuple[str, str], int] = {}
        self._inlets: dict[str, Consumer] = {}
        self._used: dict[str, Consumer] = {}  # of these: with a fetch, or a landing slot in use
        self.fetched = Fetched()
        self._now_ns = 0
        self.requests = Requests(
            self.producer.request_leases,
            self._wake,
            lambda namespace, request: self.inlet(namespace).withdraw(request),
            self._tell,
            lambda address: not self.channel.may_dial(address),
        )
        self._said = RateLog(log)
        self._barrier = Barrier(self._said, self._met_a_bug)
        self.off = False  # nothing is handed over any more
        self._off: set[str] = set()  # namespaces that nothing is fetched for any more
        self._closed = False
        self._swept_ns = 0
        self._quarantine = Quarantine()

    def serve(
        self, namespaces: Mapping[str, Source], numbers: Numbers, send: Send = no_workers
    ) -> None:
        """Hand over blocks of these namespaces, which come and go.

        numbers: of the store. send(connection, message, None): to one of its engines' workers.
        """
        self._namespaces, self._numbers, self._send = namespaces, numbers, send

    def _to_worker(self, connection: int, message: Message, fd: int | None) -> None:
        self._send(connection, message, fd)

    def _mapped(self, extent: int) -> None:
        """Nobody who waits for all to map or unmap an extent waits for the exporter."""
        self._unmapping.discard(extent)
        for namespace in self._namespaces.values():
            namespace.settle(extent, EXPORTER)

    # What the store asks for

    def inlet(self, namespace: Source) -> Consumer:
        """Return the remote tier of a namespace."""
        digest = namespace.layout.digest
        if digest not in self._inlets:
            self._inlets[digest] = Consumer(
                self, namespace, self._mover, self._to_worker, self._waits
            )
        return self._inlets[digest]

    def forget(self, namespace: Source) -> bool:
        """Forget a namespace; False if somebody may still ask for its blocks, or send some."""
        digest = namespace.layout.digest
        asked = any(link.digest == digest for link in self._links.values())
        inlet = self._inlets.get(digest)
        if asked or self.producer.serves(namespace) or (inlet is not None and inlet.in_use):
            return False
        self._inlets.pop(digest, None)
        self._used.pop(digest, None)
        return True

    def fetch(
        self, namespace: Source, address: str, want: m.Want, now_ns: int, *, direct: bool = False
    ) -> int | None:
        """Ask a peer for blocks; return the fetch's number in the namespace's consumer.

        direct: for workers to read. None: it is ourselves, or too many others are being asked.
        """
        number, digest = None, namespace.layout.digest
        if address != self.channel.address and digest not in self._off:
            number = self._connected(address, digest, now_ns)
        if number is None:
            return None
        self._wake()
        consumer = self._used[digest] = self.inlet(namespace)
        fetch = consumer.want(number, want, now_ns, direct=direct)
        if self._up is None:
            consumer.heard(number, now_ns, STALL_NS)
        return fetch

    @property
    def devices(self) -> str:
        """Network devices that bytes travel over, as UCX names them."""
        return self._mover.devices

    def pushes(self, address: str) -> bool:
        """Tell whether a peer had better write its blocks than have them read: over TCP."""
        return self._mover.over_tcp(address.rpartition(":")[0].strip("[]"))

    def _wake(self) -> None:
        """Have the exporter run: somebody may ask soon, or is asked."""
        if not self.off:
            self._mover.wake()

    def _connected(self, address: str, digest: str, now_ns: int) -> int | None:
        if self.off:
            return None
        number = self._by_address.get((address, digest))
        if number is None:
            why = self.channel.may_dial(address)
            if not why and not self._room_for_link():
                why = f"{address[:100]!r} is one more than {LINKS_MAX} peers that are in use"
            if why:
                self.channel.counts["undialled"] += 1
                self._said.warn("addresses that are not dialled", "%s", why)
                return None
            number = self.channel.connect(address)
            self._by_address[address, digest] = number
            self._links[number] = _Link(address, digest, now_ns)
        self._links[number].used_ns = now_ns
        return number

    def _room_for_link(self) -> bool:
        """Tell whether one more peer can be asked; the one unused longest makes room.

        None that was used a moment ago does: what names thousands of peers at once dials a few.
        """
        idle = self._idle_links() if len(self._links) >= LINKS_MAX else []
        oldest = min(idle, key=lambda number: self._links[number].used_ns, default=None)
        if oldest is not None and self._now_ns - self._links[oldest].used_ns >= RESTING_NS:
            self.channel.drop(oldest)
        return len(self._links) < LINKS_MAX

    def _idle_links(self) -> list[int]:
        """List the connections on which nothing is wanted."""
        wanted = {peer for inlet in self._used.values() for peer in inlet.asked}
        return [number for number in self._links if number not in wanted]

    def _tell(self, held: Held, message: Message) -> bool:
        """Say what needs no Hello; not to too many peers at one time."""
        number = self._connected(held.address, held.namespace, self._now_ns)
        if number is not None:
            self.channel.send(number, message)
        return number is not None

    def end_of(self, session: int) -> None:
        """An engine is gone."""
        self.requests.end_of(session)
        self.engine_writes.end_of(session)

    def on_memory(self, message: Message, fd: int | None) -> None:
        """Do with an extent what workers are told to do. Nobody waits for it to be mapped."""
        if not self.off:
            with self._barrier.around("memory that peers can read", self._switch_off):
                self._on_memory(message, fd)
        if self.off and isinstance(message, Extent):
            self._noted.append(message.extent)

    def _on_memory(self, message: Message, fd: int | None) -> None:
        if isinstance(message, Extent) and fd is not None:
            self._mover.export(message.extent, fd, message.count * message.slot_bytes)
            self._noted.append(message.extent)
            self._slots[message.extent] = message.count
        elif isinstance(message, Extent):
            self._unmapping.add(message.extent)
            self._slots.pop(message.extent, None)
            self._regions.pop(message.extent, None)
            self.producer.on_unmapped(message.extent)
            self._mover.unexport(message.extent)

    def say(self, number: int, message: Message) -> None:
        """Send on a connection that was made, once it is welcome."""
        link = self._links.get(number)
        if link is None:
            return
        if link.agent is not None:
            self.channel.send(number, message)
            return
        if isinstance(message, m.Release):  # what it asked for was never sent
            link.waiting = [one for one in link.waiting if _job_of(one) != message.job]
            return
        link.waiting.append(message)
        self._greet(number)

    def reached_at(self, number: int) -> tuple[str, bytes]:
        """Name the exporter at the other end, and how to reach it; none if it is gone."""
        link = self._links.get(number)
        return ("", b"") if link is None else (link.agent or "", link.metadata)

    def _greet(self, number: int) -> None:
        """Say Hello, once, if there is something to say after it."""
        link, up = self._links[number], self._up
        namespace = self._namespaces.get(link.digest)
        if up is not None and namespace is not None and link.waiting and not link.greeted:
            link.greeted = True
            traits = namespace.layout.traits
            hello = m.Hello(m.VERSION, link.digest, traits, up.name, up.metadata)
            self.channel.send(number, hello)

    # What comes over the side channel

    def _on_message(self, number: int, message: Message) -> None:
        link = self._links.get(number)
        self._quarantine.stir()
        if link is not None:
            self._on_answer(number, link, message)
            return
        if isinstance(message, m.Land) and message.metadata:
            self._agents.update(number, message.metadata)
        self.producer.on_message(number, message, self._now_ns)

    def _on_answer(self, number: int, link: _Link, message: Message) -> None:
        consumer = self._inlets[link.digest]
        match message:
            case m.Welcome(agent, metadata):
                if link.agent is not None:
                    raise ProtocolError("a second Welcome")
                link.agent, link.metadata = agent, metadata
                consumer.heard(number, self._now_ns)
                self._agents.meet(number, agent, metadata)
                waiting, link.waiting = link.waiting, []
                for one in waiting:
                    self.channel.send(number, one)
            case m.Starting():
                consumer.heard(number, self._now_ns, STALL_NS)
            case m.Refused(reason):
                self._said.warn(
                    "peers that refuse", "peer %s: %s", link.address, reason[:LOGGED_MAX]
                )
                self.channel.drop(number)
            case m.Noted(request, state):
                log.debug("peer %r: %r: %s", link.address, request[:LOGGED_MAX], state)
            case _ if link.agent is None:
                raise ProtocolError(f"{type(message).__name__} before Welcome")
            case _:
                if isinstance(message, m.Have) and message.metadata:
                    link.metadata = message.metadata
                    self._agents.update(number, message.metadata)
                consumer.on_message(number, message, self._now_ns)

    def _on_lost(self, number: int, reason: str) -> None:
        self._agents.leave(number)
        link = self._links.pop(number, None)
        if link is None:
            self.producer.on_closed(number)
            return
        self._said.info("peers lost", "peer %s: %s", link.address, reason)
        self._by_address.pop((link.address, link.digest), None)
        inlet = self._inlets.get(link.digest)
        if inlet is not None:
            inlet.on_peer_lost(number)

    # Turns

    def fds(self) -> Iterator[int]:
        """Go through the descriptors that become readable when poll() has something to do."""
        if not self.off:
            yield from self.channel.fds()
            yield from self._mover.fds()

    def wait_s(self, now_ns: int) -> float | None:
        """Return when to call poll() at the latest; None: when a descriptor says so."""
        if self._noted or (not self.off and self.channel.waiting):
            return 0.0
        if self.off:
            return None
        wait_s = self._mover.wait_s(now_ns)
        if self.producer.busy or any(inlet.open for inlet in self._used.values()):
            return BUSY_S if wait_s is None else min(BUSY_S, wait_s)
        return wait_s

    @property
    def busy(self) -> bool:
        """Tell whether poll() has something to do in each turn: what is handed over, or held."""
        held = len(self.producer.request_leases)  # their blocks are pinned as they become ready
        return bool(held or self._used or self.engine_writes.open or self.producer.busy)

    def gauges(self) -> dict[tuple[str, ...], float]:
        """Return gauges, and counters kept here."""
        counts = self.channel.counts + self.producer.counts
        for more in (self.requests.counts, self.fetched.events, self._counts):
            counts.update(more)
        quarantined = landing = fetches = 0
        for inlet in self._inlets.values():
            quarantined += inlet.quarantined_bytes
            landing += inlet.landing_bytes
            fetches += inlet.open
        found: dict[tuple[str, ...], float] = {
            ("kvstore_hand_over_bytes", "held"): self.producer.held_bytes
            + self.producer.request_leases.held_bytes,
            ("kvstore_hand_over_bytes", "quarantined"): quarantined,
            ("kvstore_hand_over_bytes", "landing"): landing,
        }
        open_now = {
            "fetches": fetches,
            "jobs": len(self.producer.jobs),
            "engine_writes": self.engine_writes.open,
            "serving": sum(n.engines.serving for n in self._namespaces.values()),
            "requests": len(self.producer.request_leases),
            "asked": len(self._links),
            "asking": self.channel.came,
            "exporters": len(self._agents),
        }
        found |= {("kvstore_hand_over_open", what): count for what, count in open_now.items()}
        found |= {("kvstore_hand_over_events", event): counts[event] for event in HAND_OVER_EVENTS}
        blocks = self.fetched.blocks
        found |= {("kvstore_fetched_blocks", tier): count for tier, count in blocks.items()}
        direct = {"direct": self.fetched.direct_bytes, "engine": self.engine_writes.moved_bytes}
        moved = {**self._mover.moved_bytes, **direct}
        found |= {("kvstore_hand_over_moved_bytes", way): size for way, size in moved.items()}
        return found

    def close(self) -> None:
        """End all hand-overs."""
        if not self._closed:
            self._closed = True
            self.channel.close()
            self._mover.close()

    def poll(self, now_ns: int) -> None:
        """Do what there is to do.

        A bug costs the peer that it is met by, or the namespace that something is fetched for, or,
        where it is neither's, all hand-overs; never the store.
        """
        self._now_ns = now_ns
        noted, self._noted = self._noted, []
        for extent in noted:
            self._mapped(extent)
        if not self.off:
            with self._barrier.around("hand-overs", self._switch_off):
                self._poll(now_ns)
        self._said.tick()

    def _poll(self, now_ns: int) -> None:
        for event in (*self._mover.poll(now_ns), *self.engine_writes.take(now_ns)):
            with self._barrier.around("the end of a transfer", partial(self._fail_event, event)):
                self._on_event(event)
        self.channel.poll(now_ns)
        for source in self.producer.sources():
            staged: dict[tuple[int, int, bool], list[int]] = {}
            for part, ok in source.tiering.take_staged():
                staged.setdefault((part.peer, part.job, ok), []).extend(part.positions)
            for (peer, job, ok), positions in staged.items():
                with self._guard(peer):
                    self.producer.staged(Part(peer, job, positions), ok=ok)
        self.producer.tick(now_ns, self._guard)
        for stored_ns in self.producer.request_leases.take_stored_ns():
            self._numbers.observe("kvstore_hand_over_held_seconds", stored_ns / 1e9)
        self.requests.tick(now_ns)
        for digest, inlet in list(self._used.items()):
            if digest not in self._off:
                with self._barrier.around("fetches", partial(self._fail_inlet, digest)):
                    inlet.tick(now_ns)
            if not inlet.in_use:
                del self._used[digest]
        if now_ns - self._swept_ns >= SWEEP_NS:
            self._swept_ns = now_ns
            self._sweep()

    # Bugs, and what they cost

    def _met_a_bug(self) -> None:
        self._counts["internal"] += 1

    def _guard(self, number: int) -> AbstractContextManager[None]:
        return self._barrier.around(f"the jobs of peer {number}", partial(self._fail_peer, number))

    def _fail_peer(self, number: int) -> None:
        """Hang up on a peer; what is held for it stays held if it cannot be let go of."""
        self.channel.give_up(number)
        self.producer.forget(number)

    def _fail_inlet(self, digest: str) -> None:
        """Fetch nothing for a namespace any more; what was to come does not."""
        self._off.add(digest)
        log.error("fetches for namespace %s are off until the store is started again", digest[:12])
        for number in [n for n, link in self._links.items() if link.digest == digest]:
            self.channel.drop(number)
        with self._barrier.around("the end of fetches"):
            self._inlets[digest].clear()

    def _fail_event(self, event: Event) -> None:
        match event:
            case Summed(part) | Written(part):
                self._fail_peer(part.peer)
            case Arrived(digest) | Checked(digest):
                self._fail_inlet(digest)
            case _:
                self._switch_off()

    def _switch_off(self) -> None:
        """Hand nothing over any more, until the store is started again; nothing waits for it."""
        if self.off:
            return
        self.off = True
        log.error("hand-overs are off until the store is started again")
        for inlet in self._inlets.values():
            with self._barrier.around("the end of fetches"):
                inlet.clear()
        self._noted += [*self._slots, *self._unmapping]
        with self._barrier.around("the end of hand-overs"):
            self.close()
        self.channel.address = ""

    def _sweep(self) -> None:
        """Let go of connections that nobody uses, and of a quarantine that is in the way."""
        self.channel.forget_silent(self._now_ns)
        for number in self._idle_links():
            if self._now_ns - self._links[number].used_ns >= IDLE_NS:
                self.channel.drop(number)
        inlets = self._used.values()
        crowded = any(inlet.crowded for inlet in inlets)
        late = self._mover.abandoned_bytes or any(i.quarantined for i in inlets)
        used = any(not job.released for job in self.producer.jobs) or any(i.open for i in inlets)
        if self._quarantine.lasts(self._now_ns, crowded=crowded, quiet=bool(late) and not used):
            landing = sum(inlet.quarantined_bytes for inlet in inlets)
            own = self._mover.abandoned_bytes
            self._mover.restart(f"in quarantine: {landing} bytes to land in, {own} bytes moving")

    def _on_event(self, event: Event) -> None:
        match event:
            case nixl.Ready():
                self._up = event
                for number, link in self._links.items():
                    self._inlets[link.digest].heard(number, self._now_ns)
                    self._greet(number)
            case Down(reason):
                self._on_down(reason)
            case Reachable(extent, base, metadata):
                self._reachable(extent, base, metadata)
            case nixl.Unmapped(extent):
                self._mapped(extent)
            case Summed(part, sums):
                self.producer.summed(part, sums)
            case Written(part, ok, stopped):
                self.producer.written(part, ok=ok, stopped=stopped)
            case Arrived(digest, part, ok):
                self._inlets[digest].moved(part, ok=ok)
            case Checked(digest, part, right):
                self._inlets[digest].checked(part, right)

    def _on_down(self, reason: str) -> None:
        """Whatever was moving has ended before: now its addresses mean nothing any more."""
        self._up = None
        self._regions.clear()
        self.producer.on_exporter_lost(f"the exporter has ended: {reason}")
        for number in list(self._links):
            self.channel.drop(number)
        for inlet in self._inlets.values():
            inlet.on_exporter_lost()

    def _reachable(self, extent: int, base: int, metadata: bytes) -> None:
        if self._up is not None:
            self._up = msgspec.structs.replace(self._up, metadata=metadata)
        if extent in self._slots:
            self._regions[extent] = m.Region(extent, base, self._slots[extent])

    def _introduce(self) -> OwnExporter | None:
        """Name our exporter, which somebody needs now; None while there is none."""
        self._mover.wake()
        up = self._up
        return None if up is None else OwnExporter(up.name, up.metadata, self._regions)
