"""This store's hand-overs: side channel, exporter and both state machines, tied together.

    store --> Peers --> Consumer --> Links -------> Channel <--> other stores
                |           +------> Transfers
                +-----> Producer --> Transfers, Channel
                +-----> Requests --> Links, RequestLeases

Calls go along the arrows. Messages and lost connections come back from Channel to Peers, which
passes them on to whom they are for; so do the ends of transfers, from Transfers.poll().

When the exporter is started again, it has another name and memory: all connections end, and a peer
with an open request sends Hello again.
"""

from __future__ import annotations

import logging
import math
import select
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial

from kvstore.barrier import Barrier
from kvstore.core.errors import ProtocolError
from kvstore.handover.cluster_key import ClusterKey
from kvstore.handover.consumer import STALL_NS, WAITS, Consumer, Waits
from kvstore.handover.direct_fetches import Send
from kvstore.handover.exported import ExportedMemory
from kvstore.handover.fetches import Fetched
from kvstore.handover.heartbeats import Requests
from kvstore.handover.jobs import Source
from kvstore.handover.links import Link, Links
from kvstore.handover.producer import Producer
from kvstore.handover.side_channel import LOGGED_MAX, MET_A_BUG, Channel
from kvstore.handover.transfers import (
    BUSY_S,
    Arrived,
    Checked,
    Event,
    PeerAgents,
    Quarantine,
    Summed,
    Transfers,
    Written,
)
from kvstore.logs import RateLog
from kvstore.metrics import HAND_OVERS, Numbers
from kvstore.wire import peer as m
from kvstore.wire.engine import Extent, Step
from kvstore.wire.framing import Message
from tiers.nixl import messages as nixl
from tiers.nixl.supervisor import Down

log = logging.getLogger(__name__)

EXPORTER = -1  # the exporter's number among the store's connections: it maps extents, too
SWEEP_NS = 500_000_000


class Peers:
    """All hand-overs of one store."""

    def __init__(
        self, key: ClusterKey | None, mover: Transfers, held_bytes_max: int, waits: Waits = WAITS
    ) -> None:
        """held_bytes_max: of what is held for one peer at one time. waits: for blocks of peers."""
        self.channel = Channel(key, self._on_message, self._on_lost)
        self.links = Links(self.channel, self._hello)
        self.exported = ExportedMemory(mover.exporter)
        self._agents = PeerAgents(mover.exporter)
        self._send: Send = lambda *_: None  # until serve()
        self.producer = Producer(
            lambda: self._namespaces,
            self.exported.introduce,
            mover,
            self.channel.send,
            held_bytes_max,
            self._agents.meet,
        )
        self.requests = Requests(
            self.producer.request_leases, mover.exporter.wake, self.links, self.channel.refusal
        )
        self._mover, self.waits = mover, waits
        self._namespaces: Mapping[str, Source] = {}
        self._numbers = Numbers()
        self._counts: Counter[str] = Counter()
        self._inlets: dict[str, Consumer] = {}
        self._used: dict[str, Consumer] = {}  # of these: with a fetch, or a landing slot in use
        self.fetched = Fetched()
        self._now_ns = 0
        self._said = RateLog(log)
        self._barrier = Barrier(self._said, lambda: self._counts.update(internal=1))
        self.refuses = ""  # peers that have not said Hello yet, and why
        self.off = False  # nothing is handed over any more
        self._off: set[str] = set()  # namespaces that nothing is fetched for any more
        self._closed = False
        self._swept_ns = 0
        self._quarantine = Quarantine()
        self._epoll = select.epoll()
        for fd in (self.channel.fileno(), *mover.fds()):
            self._epoll.register(fd, select.EPOLLIN)

    def serve(self, namespaces: Mapping[str, Source], numbers: Numbers, send: Send) -> None:
        """Hand over blocks of these namespaces, which come and go.

        numbers: of the store. send(connection, message, None): to one of its engines' workers.
        """
        self._namespaces, self._numbers, self._send = namespaces, numbers, send

    def _to_worker(self, connection: int, message: Message, fd: int | None) -> None:
        self._send(connection, message, fd)

    # What the store asks for

    def inlet(self, namespace: Source) -> Consumer:
        """Return the remote tier of a namespace."""
        digest = namespace.layout.digest
        if digest not in self._inlets:
            self._inlets[digest] = Consumer(
                self.links, namespace, self._mover, self._to_worker, self.fetched, self.waits
            )
        return self._inlets[digest]

    def forget(self, namespace: Source) -> bool:
        """Forget a namespace; False if somebody may still ask for its blocks, or send some."""
        digest = namespace.layout.digest
        inlet, asked = self._inlets.get(digest), self.links.serves(digest)
        if asked or self.producer.serves(namespace) or (inlet is not None and inlet.in_use):
            return False
        self._inlets.pop(digest, None)
        self._used.pop(digest, None)
        return True

    def fetch(
        self,
        namespace: Source,
        address: str,
        want: m.Want,
        now_ns: int,
        *,
        direct: bool = False,
        hinted: bool = False,
    ) -> int | None:
        """Ask a peer for blocks; return the fetch's number in the namespace's consumer.

        direct: for workers to read. hinted: as in Consumer.want(). None: it is ourselves, too many
        others are being asked, or nothing could arrive here.
        """
        digest = namespace.layout.digest
        if self.off or digest in self._off or address == self.channel.address:
            return None
        consumer = self.inlet(namespace)
        landing = consumer.arrivals.landing
        if not direct:
            landing.open()
        if self._mover.exporter.broken or (landing.failed and not direct):
            return None
        number = self.links.connect(address, digest)
        if number is None:
            return None
        self._mover.exporter.wake()
        self._used[digest] = consumer
        fetch = consumer.want(number, want, now_ns, direct=direct, hinted=hinted)
        if self.exported.up is None:
            consumer.heard(number, now_ns, STALL_NS)
        return fetch

    @property
    def devices(self) -> str:
        """Network devices that bytes travel over, as UCX names them."""
        return self._mover.devices

    def pushes(self, address: str) -> bool:
        """Tell whether a peer had better write its blocks than have them read: over TCP."""
        return self._mover.over_tcp(address.rpartition(":")[0].strip("[]"))

    def on_step(self, namespace: Source, session: int, step: Step, now_ns: int) -> None:
        """Act on what an engine says of requests. Raises ProtocolError."""
        if self.off:
            return
        for gone in step.unwanted:
            if not gone.request:
                raise ProtocolError("Unwanted of a request without a name")
        for request in self.requests.on_step(namespace, session, step, now_ns):
            self.inlet(namespace).withdraw(request)

    def end_of(self, session: int) -> None:
        """An engine is gone."""
        self.requests.end_of(session)

    def on_memory(self, message: Message, fd: int | None) -> None:
        """Do with an extent what workers are told to do. Nobody waits for it to be mapped."""
        if not self.off:
            with self._barrier.around("memory that peers can read", self._switch_off):
                self.exported.change(message, fd)
                if isinstance(message, Extent) and fd is None:
                    self.producer.on_unmapped(message.extent)
        if self.off and isinstance(message, Extent):
            self.exported.settled.append(message.extent)

    def _hello(self, digest: str) -> m.Hello | None:
        """Return what is said first to a peer; None while our exporter does not run."""
        up, namespace = self.exported.up, self._namespaces.get(digest)
        if up is None or namespace is None:
            return None
        return m.Hello(m.VERSION, digest, namespace.layout.traits, up.name, up.metadata)

    # What comes over the side channel

    def _on_message(self, number: int, message: Message) -> None:
        link = self.links.all.get(number)
        self._quarantine.stir()
        up = self.exported.up
        if up is not None and isinstance(message, m.Hello | m.Welcome) and message.agent == up.name:
            self.channel.drop(number, "it names our exporter: this store, under another address")
            return
        if link is not None:
            self._on_answer(number, link, message)
            return
        why = self.refuses or self._mover.exporter.broken
        if isinstance(message, m.Hello) and why:
            self._counts["refused"] += 1
            self.channel.send(number, m.Refused(why[: m.TEXT_MAX], retry=True))
            return
        if isinstance(message, m.Land) and message.metadata:
            self._agents.update(number, message.metadata)
        self.producer.on_message(number, message, self._now_ns)

    def _on_answer(self, number: int, link: Link, message: Message) -> None:
        consumer = self._inlets[link.digest]
        match message:
            case m.Welcome(agent, metadata):
                self.links.welcome(link, message)
                self._agents.meet(number, agent, metadata)
                consumer.heard(number, self._now_ns, 0 if agent else STALL_NS)
            case m.Refused(reason):
                self._said.warn(
                    "peers that refuse", "peer %s: %s", link.address, reason[:LOGGED_MAX]
                )
                self.channel.drop(number)
            case m.Noted(request, state):
                log.debug("peer %r: %r: %s", link.address, request[:LOGGED_MAX], state)
            case _ if link.stage != "welcome":
                raise ProtocolError(f"{type(message).__name__} before Welcome")
            case _:
                if isinstance(message, m.Have) and message.metadata:
                    link.metadata = message.metadata
                    self._agents.update(number, message.metadata)
                consumer.on_message(number, message, self._now_ns)

    def _on_lost(self, number: int, reason: str) -> None:
        self._agents.leave(number)
        link = self.links.forget(number)
        if link is None:
            self.producer.on_closed(number)
            return
        self._said.info("peers lost", "peer %s: %s", link.address, reason)
        inlet = self._inlets.get(link.digest)
        if inlet is not None:
            inlet.on_peer_lost(number)

    # Turns

    def fileno(self) -> int:
        """Return a descriptor that is readable when poll() has something to do."""
        return self._epoll.fileno()

    def wait_s(self, now_ns: int) -> float:
        """Return when to call poll() at the latest; infinity: when the descriptor says so."""
        waiting = self.channel.waiting or self.producer.looking
        if self.exported.settled or (waiting and not self.off):
            return 0.0
        if self.off:
            return math.inf
        wait_s = self._mover.exporter.wait_s(now_ns)
        if self.producer.jobs or (self._used and any(i.open for i in self._used.values())):
            return min(BUSY_S, wait_s)
        return wait_s

    @property
    def busy(self) -> bool:
        """Tell whether poll() has something to do in each turn: what is handed over, or held."""
        held = len(self.producer.request_leases)  # their blocks are pinned as they become ready
        return bool(held or self._used or self.producer.jobs)

    def gauges(self) -> dict[tuple[str, ...], float]:
        """Return gauges, and counters kept here."""
        counts = self.channel.counts + self.producer.counts
        for more in (self.requests.counts, self.fetched.events, self._counts):
            counts.update(more)
        quarantined = landing = fetches = 0
        for inlet in self._inlets.values():
            quarantined += inlet.arrivals.quarantined_bytes
            landing += inlet.arrivals.landing_bytes
            fetches += inlet.open
        found: dict[tuple[str, ...], float] = {
            ("kvstore_hand_over_bytes", "held"): self.producer.held.bytes
            + self.producer.request_leases.held_bytes,
            ("kvstore_hand_over_bytes", "quarantined"): quarantined,
            ("kvstore_hand_over_bytes", "landing"): landing,
        }
        open_now = {
            "fetches": fetches,
            "jobs": len(self.producer.jobs),
            "serving": sum(n.engines.serving for n in self._namespaces.values()),
            "requests": len(self.producer.request_leases),
            "asked": len(self.links.all),
            "asking": len(self.channel.lines.came()),
            "exporters": len(self._agents),
        }
        found |= {("kvstore_hand_over_open", what): count for what, count in open_now.items()}
        exporter = self._mover.exporter
        found["kvstore_exporter_up",] = float(exporter.is_up)
        found["kvstore_exporter_starts",] = exporter.starts
        for name, events in HAND_OVERS.items():
            found |= {(name, event): counts[event] for event in events}
        blocks = self.fetched.blocks
        found |= {("kvstore_fetched_blocks", tier): count for tier, count in blocks.items()}
        moved = {**self._mover.moved_bytes, "direct": self.fetched.direct_bytes}
        found |= {("kvstore_hand_over_moved_bytes", way): size for way, size in moved.items()}
        return found

    def close(self) -> None:
        """End all hand-overs; fileno() stays, for the loop that watches it."""
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
        self.links.tick(now_ns)
        if not self.off:
            with self._barrier.around("hand-overs", self._switch_off):
                self._poll(now_ns)
        elif self.producer.jobs:  # a lower tier had not read all blocks
            with self._barrier.around("what is held for peers"):
                self.producer.take_staged(self._guard)
                self.producer.end()
        settled, self.exported.settled = self.exported.settled, []
        for extent in settled:
            for namespace in self._namespaces.values():
                namespace.settle(extent, EXPORTER)
        self._said.tick()

    def _poll(self, now_ns: int) -> None:
        for event in self._mover.poll(now_ns):
            with self._barrier.around("the end of a transfer", partial(self._fail_event, event)):
                self._on_event(event)
        self.channel.poll(now_ns)
        self.producer.take_staged(self._guard)
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

    def _guard(self, number: int) -> AbstractContextManager[None]:
        return self._barrier.around(f"the jobs of peer {number}", partial(self._fail_peer, number))

    def _fail_peer(self, number: int) -> None:
        """Hang up on a peer; what is held for it stays held if it cannot be let go of."""
        self.channel.drop(number, MET_A_BUG)
        self.producer.forget(number)

    def _fail_inlet(self, digest: str) -> None:
        """Fetch nothing for a namespace any more; what was to come does not."""
        self._off.add(digest)
        log.error("fetches for namespace %s are off until the store is started again", digest[:12])
        self.links.drop(digest)
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
        self.exported.end()
        with self._barrier.around("what is held for requests"):
            self.producer.request_leases.clear()
        with self._barrier.around("what is held for peers"):
            self.producer.end()
        with self._barrier.around("the end of hand-overs"):
            self.close()
        self.channel.address = ""

    def _sweep(self) -> None:
        """Let go of connections that nobody uses, and of a quarantine that is in the way."""
        self.channel.forget_silent(self._now_ns)
        self.links.drop_idle()
        inlets = self._used.values()
        crowded = self._mover.crowded or any(inlet.arrivals.crowded for inlet in inlets)
        late = self._mover.exporter.quarantined_bytes or any(i.arrivals.quarantined for i in inlets)
        used = any(not job.released for job in self.producer.jobs) or any(i.open for i in inlets)
        if self._quarantine.lasts(self._now_ns, crowded=crowded, quiet=bool(late) and not used):
            landing = sum(inlet.arrivals.quarantined_bytes for inlet in inlets)
            own = self._mover.exporter.quarantined_bytes
            self._mover.exporter.restart(
                f"in quarantine: {landing} bytes to land in, {own} bytes moving"
            )

    def _on_event(self, event: Event) -> None:
        match event:
            case nixl.Ready():
                started = self.exported.up is None
                self.exported.ready(event)
                for link in self.links.all.values() if started else ():
                    self._inlets[link.digest].heard(link.number, self._now_ns)
                    self.links.greet(link)
            case Down(reason):
                self._on_down(reason)
            case nixl.Mapped():
                self.exported.mapped(event)
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
        self.exported.down()
        self._agents.clear()
        self.producer.on_exporter_lost(f"the exporter has ended: {reason}")
        self.links.drop()
        for inlet in self._inlets.values():
            inlet.on_exporter_lost()
