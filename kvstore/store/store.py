"""The store's decisions: messages in, messages out. No socket, clock or thread.

The server feeds it (on_message, on_closed, on_tick); it answers through `send`. The simulation
does the same with connections of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvstore.barrier import Barrier
from kvstore.config import Config, ConfigFile, EngineConfig, TenantConfig
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.core.types import BlockKey, Changes, LeaseId, Slot, StoreOutcome
from kvstore.handover.jobs import check_ranks
from kvstore.handover.peers import EXPORTER, Peers
from kvstore.logs import RateLog, set_level
from kvstore.metrics import MEMORY, NVME, OBJECT, PEER, Numbers
from kvstore.store import key_news
from kvstore.store.asked import Asked, note_stored
from kvstore.store.drain import DRAIN_CANCEL, DRAIN_NOW, DRAIN_STATE, DRAINS, REFUSAL, Drain
from kvstore.store.extents import Memory
from kvstore.store.gauges import (
    count_requests,
    count_step,
    curve_gauges,
    disk_gauges,
    gauges,
    queue_gauges,
    state_gauges,
)
from kvstore.store.live_settings import LiveSettings
from kvstore.store.lookups import Lookups
from kvstore.store.namespace import Namespace
from kvstore.store.namespaces import MakeTiers, Namespaces, Send, StoreContext
from kvstore.store.pins import Pins
from kvstore.store.plugins import Plugin
from kvstore.store.recorder import Recorder
from kvstore.store.session import Phase, Session, Writing
from kvstore.store.sessions import Sessions
from kvstore.store.status import EngineStatus, History, Status, engines_of, status_of
from kvstore.store.tenants import Tenants
from kvstore.store.token_ids import TokenIds
from kvstore.wire import engine as p
from kvstore.wire import framing
from tiers.cpu import CpuMemory
from tiers.nvme.disk import NvmeDisk

if TYPE_CHECKING:
    from tiers.object.bucket import Bucket

log = logging.getLogger(__name__)

BUG = "a bug of the store"
QUERIES = (
    *("stats", "status", "clear", "resize", "reload", "source", "log-level", "quota"),
    *("pin", "unpin", "warm", "record"),
    *DRAINS,
)
SELDOM_NS = 10_000_000  # between two looks at what is not known to have changed
FORGET_NS = 60_000_000_000  # after its last engine's end, of a namespace without blocks

OfPeers = p.Arrived | p.Target | p.Serves


class Store:
    """All sessions and namespaces of one store process."""

    def __init__(
        self,
        config: Config,
        pool: CpuMemory,
        make_tiers: MakeTiers,
        send: Send,
        first_session: int = 1,
        disk: NvmeDisk | None = None,
        peers: Peers | None = None,
    ) -> None:
        """send(connection, message, descriptor): queue a message; never raises.

        disk: what all NVMe tiers of make_tiers share. peers: other stores.
        first_session: sessions are numbered from here. It differs between store processes, so
        that work of another store's session is recognised.
        """
        self.numbers = Numbers()
        self.settings = LiveSettings(config, pool.extent_bytes, self._use)
        self._tier_names = (
            MEMORY,
            *((NVME,) if config.nvme else ()),
            *(tier.name for tier in config.tiers),
            *((OBJECT,) if config.bucket else ()),
            *((PEER,) if config.peer else ()),
        )
        self.numbers.start(self._tier_names)
        self._history = History(self.numbers)
        self._engines: list[EngineStatus] = []  # as gauges: never changed, but replaced
        self.not_ready: Callable[[], Sequence[str]] = tuple  # says why not
        self._send = send
        self._now_ns = self._seldom_ns = 0
        self._said = RateLog(log, lambda: self._now_ns)
        self._barrier = Barrier(self._said, self.met_a_bug)
        self._around_extents = self._barrier.around("the extents of namespaces")
        self._clearing: list[int] = []  # connections that wait for the end of a clear
        self.tokens = TokenIds(config.engine.event_tokens_bytes)
        context = StoreContext(self.settings, self.numbers, send, peers, self._barrier, self.tokens)
        self.namespaces = Namespaces(context, pool.extent_bytes, make_tiers)
        readers = set() if peers is None else {EXPORTER}
        self._memory = Memory(pool, send, readers, self.namespaces.wake)
        self._lookups = Lookups(context, self._memory.can_grow)
        self.sessions = Sessions(
            context, first_session, self.namespaces, self._memory, self._lookups
        )
        self.drain = Drain(self.namespaces, self.sessions, self.numbers)
        self._around_drain = self._barrier.around("a drain", lambda: self._drain(DRAIN_CANCEL))
        self._peers = peers
        if peers is not None:
            peers.serve(self.namespaces, self.numbers, send)
        self._pool, self._disk = pool, disk
        self.tenants = Tenants(disk=disk is not None)
        if disk is not None:
            disk.tenants = self.tenants.shares[NVME]
        self.tenants.use(_capacities(config), config.tenants)
        self.pins = Pins(self.namespaces, self._lookups, self.tenants, self._said)
        self.pins.use(config.engine.pinned_bytes)
        self._recorder = Recorder()
        self.asked = Asked()
        self._around_pins = self._barrier.around("pins")
        self.plugins: Sequence[Plugin] = ()  # whose tiers are in make_tiers
        self.bucket: Bucket | None = None  # likewise
        self.source: ConfigFile | None = None  # where the settings are from
        self.reload: Callable[[int], None] = _no_file  # reads it, and answers this connection

    @property
    def _engine(self) -> EngineConfig:
        return self.settings.running.engine

    def _use(self, config: Config, tenants: Sequence[TenantConfig] | None) -> None:
        """Run with other settings, of which those that are live have changed.

        tenants: those of a file that was read again; None: the limits that they have stay.
        """
        self.tenants.use(_capacities(config), tenants)  # first: it may refuse them
        self._seldom_ns = 0
        self.namespaces.use(config)
        self._memory.resize(config.cpu.capacity_bytes)
        self.pins.use(config.engine.pinned_bytes)
        self._look_at_quotas()
        disk, nvme, peer = self._disk, config.nvme, config.peer
        if disk is not None and nvme is not None and nvme.capacity_bytes != disk.capacity_bytes:
            disk.resize(nvme.capacity_bytes)
        if self._peers is not None and peer is not None:
            waits, producer = self._peers.waits, self._peers.producer
            waits.quiet_ns = config.engine.promote_ns
            waits.limit_ns = config.engine.promote_limit_ns
            producer.held.bytes_max = producer.request_leases.held_bytes_max = peer.held_bytes

    # Input from the server

    def on_message(self, connection: int, message: framing.Message, now_ns: int) -> None:
        """Act on one message; a wrong one ends its session, and nothing else."""
        self._now_ns = now_ns
        session = self.sessions.of(connection)
        if self.sessions.was_detached(connection):
            return
        try:
            if isinstance(message, p.Detach):
                self.sessions.leave(connection, message.reason)
            elif session is not None and session.phase is Phase.ENDING:
                self._on_late(session, connection, message)
            elif isinstance(message, p.Hello):
                self.sessions.hello(connection, message, now_ns)
            elif isinstance(message, p.Query):
                self._query(connection, message)
            elif session is None:
                raise ProtocolError(f"{type(message).__name__} before Hello")
            else:
                self._dispatch(session, connection, message)
        except ProtocolError as exc:
            who = self.sessions.subject(connection)
            self._said.warn("wrong messages of engines", "%s: %s", who, exc)
            self.numbers.add("kvstore_refused", "protocol")
            self.sessions.turn_away(connection, "protocol", str(exc))
        except Exception:  # noqa: BLE001 - the barrier of a connection: a bug costs no other
            what = f"a bug of the store in {type(message).__name__}"
            self._said.bug("bugs of the store", "%s: %s", self.sessions.subject(connection), what)
            self.numbers.add("kvstore_refused", "internal")
            self.sessions.turn_away(connection, "internal", what)

    def _on_late(self, session: Session, connection: int, message: framing.Message) -> None:
        """Act on a message in a session that ends: an engine may not have heard of that yet.

        What its workers have copied until then is stored.
        """
        if isinstance(message, p.Hello | p.Query):
            raise ProtocolError(f"{type(message).__name__} in a session that ends")
        if isinstance(message, p.Stored):
            self._dispatch(session, connection, message)

    def _dispatch(self, session: Session, connection: int, message: framing.Message) -> None:
        namespace, session.stirred = session.namespace, True
        if namespace is None:
            raise ProtocolError(f"{type(message).__name__} before Welcome")
        if isinstance(message, p.Step):
            if session.scheduler != connection:
                raise ProtocolError("Step from a worker")
            self._step(session, namespace, message)
        elif isinstance(message, p.Stored):
            self._stored(session, namespace, session.rank_of(connection), message)
        elif isinstance(message, p.Loading):
            session.rank_of(connection)
            lease_id = LeaseId(message.lease)
            coming = self._lookups.loading(session, namespace, lease_id, self._now_ns)
            if coming is not None:
                self._send(connection, coming, None)
        elif isinstance(message, p.Loaded):
            self._loaded(session, namespace, session.rank_of(connection), message)
        elif isinstance(message, OfPeers):
            self._of_peers(session, namespace, session.rank_of(connection), message)
        elif isinstance(message, p.Mapped):
            namespace.settle(message.extent, connection, unmapped=message.gone)
            self.sessions.activate(session)
        else:
            raise ProtocolError(f"{type(message).__name__} is not for the store")

    def on_closed(self, connection: int, now_ns: int, end: int | None = None) -> None:
        """A connection is gone; its session ends, and with the last worker its slots come back.

        end: a pidfd of its process, which is closed.
        """
        self._now_ns = now_ns
        self.sessions.closed(connection, now_ns, end)

    def on_tick(self, now_ns: int) -> None:
        """After every batch of messages, and at least a few times a second."""
        self._now_ns = now_ns
        seldom = now_ns >= self._seldom_ns
        visited = self.namespaces.visited(now_ns)
        with self._around_extents:
            for connection in self._memory.tick(self.namespaces, visited, now_ns):
                session = self.sessions.of(connection)
                if session is not None:
                    why = "its memory is needed, or was not mapped in time"
                    self.sessions.end(session, "memory", why)
        self._barrier.each(visited, self._tick_namespace, self._give_up, _named)
        some = [s for s in self.sessions.values() if s.stirred or seldom]
        sessions = [session for session in some if session.phase is not Phase.ENDING]
        self._barrier.each(sessions, self._tick_session, self._end_of_bug, _turns_of)
        if self.pins.due_ns <= now_ns:
            with self._around_pins:
                self.pins.tick(now_ns)
        if self.drain.active:
            with self._around_drain:
                self.drain.tick()
        if self._clearing and not any(n.manager.clearing for n in self.namespaces.awake):
            waiting, self._clearing = self._clearing, []
            for connection in waiting:
                self._report(connection, p.Query("clear"))
        self.sessions.bury_ended(now_ns)
        if seldom:
            self._seldom_ns = now_ns + SELDOM_NS
            self._history.tick(now_ns)
            self._said.tick()
            self.sessions.tick()

    def met_a_bug(self) -> None:
        """Count a bug that cost something."""
        self.numbers.add("kvstore_refused", "internal")

    def _give_up(self, namespace: Namespace) -> None:
        """A bug was met in a namespace: serve it no more."""
        self.namespaces.give_up(namespace)
        for session in namespace.sessions.values():
            self._end_of_bug(session)

    def _end_of_bug(self, session: Session) -> None:
        self.sessions.end(session, "internal", BUG)

    def _tick_session(self, session: Session) -> None:
        session.stirred = session.phase is Phase.JOINING
        if session.phase is Phase.JOINING:
            self.sessions.activate(session)
        if session.phase is Phase.ACTIVE:
            if session.asks:
                session.news.granted += self._lookups.retry(session, self._now_ns)
                session.stirred = True
            if session.namespace is not None:
                self._grant_credits(session, session.namespace)
        for asked_ns in session.answered_ns:
            self.numbers.observe("kvstore_lookup_seconds", (self._now_ns - asked_ns) / 1e9)
        session.answered_ns.clear()
        session.turn_page()
        session.stirred |= session.page_due
        answers = session.take_news()
        if answers is not None and session.scheduler is not None:
            self._send(session.scheduler, answers, None)

    @property
    def busy(self) -> bool:
        """Tell whether something is under way that no message will announce."""
        if self._memory.emptying or self.drain.looking:
            return True
        for session in self.sessions.values():
            if session.asks or session.page_due:  # for a deadline, say
                return True
        for namespace in self.namespaces.awake:
            if namespace.tiering.to_poll or namespace.growing or namespace.manager.clearing:
                return True
            if namespace.over_quota:
                return True
        return False

    def _tick_namespace(self, namespace: Namespace) -> None:
        manager = namespace.manager
        manager.now_s = self._now_ns / 1e9
        for lease_id in manager.expire(self._now_ns):
            self.numbers.add("kvstore_lookups", "expired")
            for session in namespace.sessions.values():
                self._lookups.lease_ended(session, namespace, lease_id)
        on_disk = Changes()
        if namespace.tiering.sources:
            with namespace.around_tiers:
                namespace.tiering.poll(self._now_ns)
                on_disk = namespace.tiering.take_changes()
        manager.clear_some()
        shares = self.tenants.shares[MEMORY]
        if shares:
            slot_bytes = namespace.layout.slot_bytes
            namespace.over_quota = manager.tend_tenants(shares, slot_bytes)
        changes = manager.take_changes()
        if any((changes.added, changes.removed, on_disk.added, on_disk.removed)):
            _tell(namespace, self.pins, changes, on_disk)
        if not namespace.sessions:  # with one it is awake, and used
            if namespace.unused and self._now_ns - namespace.used_ns >= FORGET_NS:
                self._forget(namespace)
            self.namespaces.settle(namespace)

    def _forget(self, namespace: Namespace) -> None:
        """Give an unused namespace's memory back, and forget it once that has happened."""
        if namespace.extents:
            self._memory.give_back(namespace)
        else:
            self.namespaces.forget(namespace)

    def _grant_credits(self, session: Session, namespace: Namespace) -> None:
        manager = namespace.manager
        cap = self._engine.credit_bytes // namespace.layout.slot_bytes
        least = len(namespace.layout.rules)  # with fewer than one for each group nothing is stored
        # What comes from lower tiers needs slots, too.
        target = max(least, min(session.credit_slots, cap, manager.slots.total // 2))
        if (target - len(session.granted)) * 8 < target:
            return
        growing = self._memory.can_grow(namespace)
        if not growing:
            target = max(least, min(target, manager.slots.total // 4))
        short = target - len(session.granted)
        if short * 8 >= target:
            # Nothing is evicted for credits while the cap has room: memory is on its way.
            slots = manager.prepare_store(min(short, len(manager.slots.free)) if growing else short)
            session.granted.update(slots)
            session.news.credits.extend(slots)
            session.stirred |= len(slots) < short

    # Lookups

    def _step(self, session: Session, namespace: Namespace, step: p.Step) -> None:
        if session.phase is Phase.JOINING:
            raise ProtocolError("Step before Welcome")
        session.of_events(namespace, step, self.tokens)
        for lease_id in step.release:
            self._lookups.end_lease(session, namespace, LeaseId(lease_id))
        if step.lookup_tokens or step.hit_tokens or step.missed_tokens or step.counts:
            count_step(self.numbers, namespace.label, step, self._tier_names)
        if step.tenants or step.pins:
            self._name(namespace, step)
        for shown in step.engine_blocks:
            namespace.engines.announce(session.number, shown, session.granted)
        if self._peers is not None and not namespace.layout.unnamed:
            self._peers.on_step(namespace, session.number, step, self._now_ns)
        if step.unstored:
            namespace.unstored.add(map(BlockKey, step.unstored), namespace.manager.now_s)
        for lookup in step.lookups:
            self._recorder.note(namespace, lookup, self._now_ns)
            answer = self._lookups.ask(session, namespace, lookup, self._now_ns)
            self.asked.note(namespace, lookup)
            if answer is not None:
                session.news.granted.append(answer)

    def _name(self, namespace: Namespace, step: p.Step) -> None:
        """Know the tenants that a step names, and pin prefixes where their names will last."""
        if self.tenants.join(step.tenants):
            self._look_at_quotas()
        for prefix in () if namespace.layout.unnamed else step.pins:
            try:
                self.pins.hold(namespace.layout.digest, prefix, self._now_ns)
            except ConfigError as exc:
                self._said.warn("pins that are refused", "%s", exc)

    # Reports of workers

    def _stored(self, session: Session, namespace: Namespace, rank: int, message: p.Stored) -> None:
        slots = framing.from_u32(message.slots)
        if not len(slots) == len(message.keys) == len(message.parents):
            raise ProtocolError(f"{len(message.keys)} keys for {len(slots)} slots")
        manager = namespace.manager
        size = namespace.layout.slot_bytes // session.world
        numbers, label, outcomes = self.numbers, namespace.label, Counter[str]()
        session.keys.follow(map(BlockKey, message.keys))
        numbers.add("kvstore_copied_bytes", label, "store", by=len(slots) * size)
        numbers.add("kvstore_copy_seconds", label, "store", by=message.seconds)
        for number, key, parent in zip(slots, message.keys, message.parents, strict=True):
            slot = Slot(number)
            if slot not in session.granted:
                raise ProtocolError(f"slot {slot} was written without a credit")
            writing = session.writing.get(slot)
            if writing is None:
                writing = session.writing[slot] = Writing(key)
                manager.begin_store(BlockKey(key), BlockKey(parent) if parent else None, slot)
            if rank in writing.ranks or key != writing.key:
                raise ProtocolError(f"rank {rank} reported slot {slot} twice, or with another key")
            writing.ranks.add(rank)
            writing.ok = writing.ok and message.ok
            if len(writing.ranks) == session.world:
                del session.writing[slot]
                session.granted.discard(slot)
                outcome = session.written(namespace, slot, writing)
                outcomes[outcome.value] += 1
                if message.off_disk and outcome is StoreOutcome.STORED:
                    namespace.tiering.off_disk.add(BlockKey(key))
        for name, count in outcomes.items():
            numbers.add("kvstore_stored_blocks", label, name, by=count)

    def _loaded(self, session: Session, namespace: Namespace, rank: int, message: p.Loaded) -> None:
        self.numbers.add("kvstore_copied_bytes", namespace.label, "load", by=message.copied_bytes)
        self.numbers.add("kvstore_copy_seconds", namespace.label, "load", by=message.seconds)
        if message.copied_bytes:
            self.numbers.observe("kvstore_load_seconds", message.seconds)
        lease_id = LeaseId(message.lease)
        damaged = framing.from_u32(message.damaged)
        found = session.loaded(lease_id, rank, damaged, late=message.late > 0)
        if found is not None:
            self.numbers.add("kvstore_engine_events", "load_given_up", by=found.late)
            self._lookups.end_lease(session, namespace, lease_id, found.damaged)

    def _of_peers(
        self, session: Session, namespace: Namespace, rank: int, message: OfPeers
    ) -> None:
        number, peers = session.number, self._peers
        if isinstance(message, p.Serves):
            check_ranks(namespace.layout, [message.rank])
            namespace.engines.serves(number, session.world, rank, message)
            self.sessions.send_block_versions(session, namespace)
        elif peers is not None:
            peers.inlet(namespace).of_worker(number, rank, message, self._now_ns)

    # Admin

    def _query(self, connection: int, query: p.Query) -> None:
        if query.what == "clear":
            if connection in self._clearing:
                raise ProtocolError("a clear before the last one is answered")
            self.namespaces.clear_blocks()
            self.tokens.clear()
            if self._disk is not None:  # it has more than what was attached since the start
                self._disk.clear()
            if self.bucket is not None:
                self.bucket.cleared = True  # for namespaces that come later
            self._clearing.append(connection)  # it hears when all slots are free
            return
        if query.what == "reload":
            self.reload(connection)
            return
        if query.what not in QUERIES:
            raise ProtocolError(f"query {query.what!r}, expected one of {', '.join(QUERIES)}")
        try:
            self._change(query)
            self._report(connection, query)
        except ConfigError as exc:
            raise ProtocolError(str(exc)) from None

    def _change(self, query: p.Query) -> None:
        """Do what a query asks for. Raises ConfigError."""
        if query.what in DRAINS:
            self._drain(query.what)
        elif query.what == "resize":
            self.settings.resize(query.tier, query.capacity_bytes)
        elif query.what == "log-level":
            set_level(query.level)
        elif query.what == "quota" and query.tenant:
            self.tenants.limit(query.tenant, query.tier, query.quota_bytes, query.floor_bytes)
            self._look_at_quotas()
        elif query.what == "unpin" and query.prefix is not None:
            self.pins.let_go(query.prefix.name)
        elif query.what == "pin" and query.prefix is not None:
            self.pins.hold(query.namespace, query.prefix, self._now_ns)

    def _look_at_quotas(self) -> None:
        """Have all namespaces look at what tenants may have, idle ones too."""
        self.pins.look_again()
        for namespace in self.namespaces.values():
            self.namespaces.wake(namespace)
        if self._disk is not None:
            self._disk.wake()

    def _drain(self, what: str) -> None:
        if what == DRAIN_CANCEL:
            self.drain.cancel()
        elif what != DRAIN_STATE:
            self.drain.start()
        self.sessions.refuses = REFUSAL if self.drain.active else ""
        if self._peers is not None:
            self._peers.refuses = self.sessions.refuses
        if what == DRAIN_NOW:
            for session in self.sessions.values():
                self.sessions.end(session, "drain", REFUSAL, calm=True)

    def _report(self, connection: int, query: p.Query) -> None:
        """Answer a query. Raises ConfigError."""
        answer: object
        if query.what in DRAINS:
            answer = self.drain.state()
        elif query.what == "source":
            answer = self.source
        elif query.what == "quota":
            answer = list(self.tenants.every())
        elif query.what in ("pin", "unpin"):
            answer = list(self.pins.every())
        elif query.what == "warm" and query.prefix is not None:
            lease_ns = self._engine.lease_ns
            answer = self.pins.warm(query.namespace, query.prefix, self._now_ns, lease_ns)
        elif query.what == "record":
            answer = self._recorder.take(query.recording, self._now_ns, ends=query.ends)
        elif query.what == "status":
            self.refresh_gauges()
            answer = self.status()
        else:
            self.refresh_gauges()
            answer = [[*key, value] for key, value in sorted(self.numbers.values().items())]
        self._send(connection, p.Report(msgspec.json.encode(answer)), None)

    def refresh_gauges(self) -> None:
        """Bring the gauges, and counters kept elsewhere, up to date."""
        with self._barrier.around("gauges"):
            found = gauges(self._pool, self.sessions.values(), self.namespaces)
            lower = [name for name in self._tier_names if name not in (MEMORY, PEER)]
            found |= queue_gauges(self.sessions.values(), self.namespaces, lower, self._now_ns)
            if self._disk is not None:
                found |= disk_gauges(self._disk, self.numbers)
            states = self.tier_states()
            if self.bucket is not None:
                count_requests(self.bucket, self.numbers)
                states[OBJECT] = self.bucket.health.state
            found |= state_gauges(states)
            found |= curve_gauges(self.namespaces, self._pool, self._disk)
            found |= self.tenants.gauges()
            found["kvstore_draining",] = float(self.drain.active)
            if self._peers is not None:
                found |= self._peers.gauges()
            self.numbers.gauges = found
            self._engines = engines_of(self.sessions.values(), self.sessions.processes)

    def tier_states(self) -> dict[str, str]:
        """Return the state of each lower tier that is this store's alone, by its name."""
        states = {} if self._disk is None else {NVME: self._disk.state}
        return states | {plugin.name: "off" if plugin.off else "ok" for plugin in self.plugins}

    def status(self) -> Status:
        """Describe the store as of the last look at its gauges; on any thread."""
        uptime_s = self._history.uptime_s(self._now_ns)
        values, samples = self.numbers.values(), self._history.samples
        reasons, names, lacks = self.not_ready(), self._tier_names, self._memory.shortages
        return status_of(values, names, self._engines, reasons, samples, uptime_s, lacks)

    def end_sessions(self) -> None:
        """Tell every engine that the store is shutting down."""
        for session in self.sessions.values():
            self.sessions.end(session, "shutdown", "the store is shutting down", calm=True)


def _tell(namespace: Namespace, pins: Pins, changes: Changes, on_disk: Changes) -> None:
    """Blocks have entered and left memory and the disk: tell whom it concerns."""
    net = key_news.net_of(changes), key_news.net_of(on_disk)
    for session in namespace.sessions.values():
        if session.phase is Phase.ACTIVE:
            session.heard(*net)
    if changes.removed:
        pins.removed(changes.removed)
    if changes.added:
        note_stored(namespace, changes.added)
    with namespace.around_tiers:
        namespace.tiering.changed(changes)


def _capacities(config: Config) -> dict[str, int]:
    disk = {} if config.nvme is None else {NVME: config.nvme.capacity_bytes}
    return {MEMORY: config.cpu.capacity_bytes, **disk}


def _no_file(_connection: int) -> None:
    raise ProtocolError("reload: this store has no file of settings; it is an engine's own")


def _named(namespace: Namespace) -> str:
    return f"namespace {namespace.layout.digest[:12]}"


def _turns_of(session: Session) -> str:
    return f"the turns of engine {session.engine!r}"
