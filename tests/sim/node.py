"""One store of a simulated fleet, with an engine: a world of its own, and its hand-overs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import msgspec

from connectors.kv_transfer_params import Transfer
from connectors.partial_block import partial_block_of
from kvstore.config import Config, parse
from kvstore.core.index import Entry
from kvstore.core.types import make_key
from kvstore.handover import peers as peers_module
from kvstore.handover.consumer import Consumer, Waits
from kvstore.handover.jobs import HELD, Job
from kvstore.handover.moves import DONE, LANDED, MOVING
from kvstore.handover.peers import EXPORTER, Peers
from kvstore.handover.transfers import Transfers
from kvstore.store.namespace import Namespace
from kvstore.store.store import Store
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.fuzz.site import Wire
from tests.harness.fakes import SLOT_BYTES
from tests.reference import Request
from tests.reference.text import block_bytes, words_of
from tests.sim.cables import Clock
from tests.sim.checks import Truth
from tests.sim.exporters import Exporter
from tests.sim.host import Host
from tests.sim.store import MS, Net
from tests.sim.world import Params, Shared, World

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet


class NodeNet(Net):
    """The wires of one node; its clock shows another time than others' do."""

    def __init__(self, node: Node, clock: Clock, skew_ns: int) -> None:
        self._node, self._clock, self._skew_ns = node, clock, skew_ns
        super().__init__(node.fleet.rng)

    @property
    def now(self) -> int:
        return self._clock.ns + self._skew_ns

    @now.setter
    def now(self, to_ns: int) -> None:
        self._clock.ns = max(self._clock.ns, to_ns - self._skew_ns)

    def send(self, number: int, message: framing.Message, fd: int | None) -> None:
        if number == EXPORTER:
            self._node.peers.on_memory(message, fd)
        else:
            super().send(number, message, fd)

    def pump(self) -> None:
        if self.store is not None and self.now >= self.frozen_until:
            self._node.peers.poll(self.now)
        super().pump()

    def kill(self) -> None:
        if self.store is not None:
            self._node.leave()
        super().kill()


class Tails(Truth):
    """Knows what the partly filled last blocks of hand-overs hold, too."""

    def learn_tail(self, host: Host, request: Request, end: int) -> None:
        geometry, shape, text = host.geometry, host.shape, request.text
        partial = partial_block_of(geometry, request, end, request.request_id)
        if partial is None:
            return
        for group, kind in enumerate(shape.groups):
            found: list[bytes] = []
            if not kind.state:
                first, whole = partial.block * shape.block_tokens, end // kind.tokens
                for block in range(first // kind.tokens, whole):
                    found += [block_bytes(shape, text, group, r, block) for r in range(shape.world)]
                if end > whole * kind.tokens:
                    marks = text.marks(whole * kind.tokens, end)
                    found.append(words_of(marks, group, 0, shape.token_words))
            self.bytes[make_key(partial.hash, group, host.scope)] = b"".join(found)


class Node(World):
    """A store that hands over, and its engine."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.name, self.address = fleet, f"n{number}", f"n{number}:1"
        rng = fleet.rng
        net = NodeNet(self, fleet.clock, rng.choice((0, 0, 7_000_000)) * MS)
        what = fleet.truth, fleet.shape, fleet.documents
        shared = Shared(self.name, net, *what, self._make_transfer, self.held)
        self.peers: Peers = None  # type: ignore[assignment]
        self.exporter: Exporter = None  # type: ignore[assignment]
        self._process = 0
        self._landing = rng.choice((2, 5, 24))
        self._held = rng.choice((1, 4, 100))
        self._prompts: dict[str, list[int]] = {}  # of requests that others go on with
        super().__init__(fleet.seed + 2_000_006 * number, fleet.node_cut, shared)
        self.trace = fleet.trace

    def note(self, text: str) -> None:
        self.trace.append(f"{self.fleet.clock.ns / MS:9.1f} ms  {self.name}: {text}")

    def _make_transfer(self, engine: str) -> Transfer:
        rng = self.fleet.rng
        return Transfer(engine, rng.choice((True, False, None)), rng.choice((40, 1_000, 30_000)))

    def _make_config(self) -> Config:
        config = super()._make_config()
        peer = parse({"cpu": {"capacity": "64MiB"}, "peer": {}}).peer
        assert peer is not None
        change, rng, engine = msgspec.structs.replace, self.fleet.rng, config.engine
        peer = change(peer, held_bytes=self._held * SLOT_BYTES)
        if rng.random() < 0.8:  # else many wait for no peer
            promote_ns, defer_ns = rng.choice((30, 2_000)) * MS, rng.choice((100, 500)) * MS
            engine = change(engine, promote_ns=promote_ns, defer_ns=defer_ns)
        return change(config, peer=peer, engine=engine)

    # Its process

    def _make_store(self) -> Store:
        self._process += 1
        fleet, engine = self.fleet, self._config.engine
        process = f"{self.name}.{self._process}"
        self.exporter = Exporter(fleet.cables, process, self.address, self._landing)
        self.exporter.frozen = fleet.is_frozen
        self.exporter.fails = fleet.transfer_failures
        self.exporter.slowness_ms = fleet.rng.choice((1, 5, 60))
        waits = Waits(engine.promote_ns, engine.promote_limit_ns)
        with patch.object(peers_module, "Channel", lambda *how: Wire(fleet.cables, *how)):
            mover = cast("Transfers", self.exporter)
            self.peers = Peers(None, mover, self._held * SLOT_BYTES, waits)
        self.wire.name(self.address)
        how = self._config, self.pool, self._make_tiers, self.net.send, self._sessions
        store = Store(*how, peers=self.peers)
        self.exporter.store = store
        return store

    def leave(self) -> None:
        """Its process is killed, and its exporter with it."""
        self.add_up_peers()
        self.fleet.cables.leave(self.address)
        self.exporter.die()
        self.peers.close()

    @property
    def wire(self) -> Wire:
        return cast("Wire", self.peers.channel)

    @property
    def is_frozen(self) -> bool:
        return self.net.now < self.net.frozen_until

    def add_up_peers(self) -> None:
        """Add what its hand-overs have counted."""
        peers = self.peers
        for counts in (self.wire.counts, peers.producer.counts, peers.fetched.events):
            self.fleet.counts.update(counts)
        self.fleet.counts["restarts"] += self.exporter.restarts

    # Hand-overs

    def reset(self, host: Host) -> None:
        """The engine takes the fleet's weights, which change now and then."""
        self._next_weights = self.fleet.weights()
        if host.scope != self._next_weights.to_bytes(8, "big"):
            super().reset(host)

    def begin_handed(self, host: Host, prompt: list[int]) -> str:
        """Have a request arrive that another engine goes on with; return its name."""
        name = f"{host.name}r{self._next_request}"
        self._prompts[name] = prompt
        self.begin(host, prompt, 1, {"do_remote_decode": True})
        return name

    def handed(self, host: Host, name: str, params: Params | None) -> None:
        """A request that another engine goes on with has ended."""
        if params is not None:
            request = host.engine.requests[name]
            self.fleet.truth.learn_tail(host, request, params["remote_num_tokens"])
        self.fleet.route(self, name, self._prompts.pop(name), params)

    def _make_host(self, number: int) -> Host:
        host = super()._make_host(number)
        host.half.handed = lambda name, params: self.handed(host, name, params)
        return host

    def _arrive(self, host: Host) -> None:
        if self._arrival_rng.random() < self._arrivals and self._has_room(host):
            self.fleet.begin(self, host, self._make_prompt())
        super()._arrive(host)

    def idle(self) -> None:
        """Its store, its engine's threads and its exporter have a turn, not its engine."""
        self._turn()

    def step_all(self) -> None:
        """Its engine makes a step, whether it has work or not."""
        for host in self.hosts:
            host.step()
        self.idle()

    def end_faults(self) -> None:
        self._fault_rate = self._arrivals = 0.0
        self._end_faults()
        self.exporter.fails, self.exporter.slowness_ms = 0.0, 1
        self.exporter.damage.clear()

    def check_end(self) -> None:
        """Nothing is left of what the world did, and nothing was counted that cannot be."""
        self._check_nothing_left()
        self.check_no_peers_left()
        for host in self.hosts:
            self._add_up(host)
        self.add_up_peers()
        self.fleet.counts.update(self.counts)
        self.fleet.counts["hits_compared"] += self.checks.hits
        if not self.fleet.faults:
            corrupt = self.peers.fetched.events["corrupt"]
            assert not corrupt, f"{corrupt} blocks are corrupt without a fault"

    # What must hold

    def jobs(self, namespace: Namespace) -> list[Job]:
        return [job for job in self.peers.producer.jobs if job.source is namespace]

    def consumers(self) -> list[Consumer]:
        return list(self.peers._inlets.values())

    def held(self, namespace: Namespace) -> tuple[Iterable[int], Iterable[Entry]]:
        """Return slots that hand-overs fill, and what they have pinned."""
        slots: list[int] = []
        pinned: list[Entry] = []
        for job in self.jobs(namespace):
            for at, (slot, entry) in enumerate(zip(job.slots, job.entries, strict=True)):
                if job.states[at] in HELD and entry is not None:
                    pinned.append(entry)
                elif job.states[at] in HELD:
                    slots.append(slot)
        for lease in self.peers.producer.request_leases._leases.values():
            if lease.manager is namespace.manager:
                pinned.extend(lease.pinned)
        return slots, pinned

    def check_peers(self) -> None:
        """What hand-overs hold is what they say that they hold, and within its bounds."""
        if self.net.store is None:
            return
        producer = self.peers.producer
        for peer in producer._peers.values():
            held = sum(job.states.count(state) for job in peer.jobs.values() for state in HELD)
            assert peer.held_bytes == held * peer.source.layout.slot_bytes, "held for a peer"
            assert peer.blocks == sum(len(job.keys) for job in peer.jobs.values())
        held_bytes = sum(peer.held_bytes for peer in producer._peers.values())
        assert producer.held.bytes == held_bytes, "held for all peers"
        for job in producer.jobs:
            assert job.left == len(job.keys) - job.states.count(DONE), "blocks of a job"
        for consumer in self.consumers():
            self._check_consumer(consumer)

    def _check_consumer(self, consumer: Consumer) -> None:
        fetches, arrivals = consumer._fetches, consumer.arrivals
        landing = 0
        for fetch in fetches.values():
            assert fetch.left == len(fetch.keys) - fetch.states.count(DONE), "blocks of a fetch"
            landing += fetch.states.count(MOVING) + fetch.states.count(LANDED)
        used = landing + arrivals.quarantined
        assert arrivals.landing.used == used, f"{arrivals.landing.used} landing slots, not {used}"
        for key, place in consumer._located.items():
            number, position = divmod(place, m.JOB_BLOCKS_MAX)
            assert fetches[number].keys[position] == key, "found under another key"
            assert fetches[number].states[position] != DONE, "found, though it has ended"

    def check_no_peers_left(self) -> None:
        """Nothing is held, fetched or awaited for other stores."""
        peers = self.peers
        producer = peers.producer
        assert not producer.jobs, (
            f"jobs: {[(j.number, bytes(j.states._states)) for j in producer.jobs]}"
        )
        assert producer.held.bytes == 0
        assert not producer._early
        leases = producer.request_leases
        assert not len(leases), f"requests that are held: {[*leases._leases]}"
        assert leases.held_bytes == 0
        assert not leases._common
        assert not len(peers.requests._waiting), "requests that wait"
        for consumer in self.consumers():
            assert not consumer._fetches
            assert not consumer._late
            assert not consumer._direct
            assert not consumer._located
            assert not consumer._also
            assert not consumer.arrivals.loads._open
            assert not consumer.arrivals.quarantined
            assert not consumer.arrivals._turns._waiting
            assert not any(consumer.arrivals._turns._used.values())
        for landing in self.exporter.landings.values():
            landing.check_all_free()
        for namespace in self.namespaces():
            assert all(entry.pins == 0 for entry in namespace.manager.index), "a pin is left"
            granted = {s for x in self.sessions() if x.namespace is namespace for s in x.granted}
            assert set(namespace.manager.slots.granted) == granted, "slots that are not given back"
        counts = self.wire.counts
        assert self.fleet.counts["echo"] or not counts["malformed"], "protocol errors"
