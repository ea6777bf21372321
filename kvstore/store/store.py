"""The store's decisions about sessions: messages in, messages out. No socket, clock or thread.

The server feeds it (on_message, on_closed, on_tick); it answers through `send`. The simulation
does the same with connections of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvstore.barrier import Barrier, Ended
from kvstore.config import Config
from kvstore.core import limits
from kvstore.core.errors import ConfigError, KVStoreError, ProtocolError
from kvstore.core.layout import slot_layout
from kvstore.core.tier import SlotMemory, Tier
from kvstore.core.tiering import Tiering
from kvstore.core.types import BlockKey, Changes, LeaseId, Slot
from kvstore.core.write_budget import WriteBudget
from kvstore.handover.jobs import check_ranks
from kvstore.handover.peers import EXPORTER, Peers
from kvstore.logs import RateLog
from kvstore.metrics import MEMORY, NVME, PEER, Numbers
from kvstore.store.extents import Memory
from kvstore.store.gauges import count_step, disk_gauges, gauges, plugin_gauges, resize
from kvstore.store.lookups import Lookups
from kvstore.store.namespace import Namespace
from kvstore.store.session import Phase, Session, Writing
from kvstore.store.tier_guard import Plugin
from kvstore.visits import Visits
from kvstore.wire import engine as p
from kvstore.wire import framing
from tiers.cpu import CpuMemory
from tiers.nvme import NvmeDisk

log = logging.getLogger(__name__)

FORGET_NS = 60_000_000_000  # after its last engine's end, of a namespace without blocks
LIVES_MAX = 50  # lines of engines that attach, or detach, in one window: a large node has fewer

OfPeers = p.Arrived | p.Target | p.BlocksWritten | p.Serves
Send = Callable[[int, framing.Message, int | None], None]
MakeTiers = Callable[[str, int, SlotMemory], Sequence[Tier]]


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
        that work left over from another store's session is told apart.
        """
        self.numbers = Numbers()
        self.sessions: dict[str, Session] = {}
        self.namespaces: dict[str, Namespace] = {}
        self._config = config
        self._tier_names = (
            MEMORY,
            *((NVME,) if config.nvme else ()),
            *(tier.name for tier in config.tiers),
            *((PEER,) if config.peer else ()),
        )
        self.numbers.start(self._tier_names)
        self._make_tiers = make_tiers
        self._backlog_ns = {tier.name: tier.backlog_ns for tier in config.tiers}
        self._budgets: dict[str, WriteBudget] = {}
        if config.nvme is not None:
            self._backlog_ns[NVME] = config.nvme.backlog_ns
            self._budgets[NVME] = WriteBudget(config.nvme.write_budget_bytes)
        self._send = send
        self._by_connection: dict[int, Session] = {}
        self._next_session = first_session
        self._now_ns = 0
        self._visits = Visits()  # of namespaces
        self._said = RateLog(log, lambda: self._now_ns)
        self._lives = RateLog(log, lambda: self._now_ns, LIVES_MAX)
        self._barrier = Barrier(self._said, self._met_a_bug)
        self._broken: set[str] = set()  # namespaces that have met a bug
        self._clearing: list[int] = []  # who waits for the end of a clear
        self._ended: set[int] = set()  # schedulers of buried sessions that did not close yet
        self._memory = Memory(pool, send, set() if peers is None else {EXPORTER}, self._wake)
        self._lookups = Lookups(config.engine, self.numbers, self._memory.can_grow, peers)
        self._peers = peers
        if peers is not None:
            peers.serve(self.namespaces, self.numbers, send)
        self._pool, self._disk = pool, disk
        self.plugins: Sequence[Plugin] = ()  # whose tiers are in make_tiers

    # Input from the server

    def on_message(self, connection: int, message: framing.Message, now_ns: int) -> None:
        """Act on one message; a wrong one ends its session, and nothing else."""
        self._now_ns = now_ns
        session = self._by_connection.get(connection)
        if connection in self._ended:
            return  # told to detach, had not read it yet
        try:
            if session is not None and session.phase is Phase.ENDING:
                self._on_late(session, connection, message)
            elif isinstance(message, p.Hello):
                self._hello(connection, message)
            elif isinstance(message, p.Query):
                self._query(connection, message)
            elif session is None:
                raise ProtocolError(f"{type(message).__name__} before Hello")
            else:
                self._dispatch(session, connection, message)
        except ProtocolError as exc:
            self._said.warn("wrong messages of engines", "connection %d: %s", connection, exc)
            self.numbers.add("kvstore_refused", "protocol")
            self.turn_away(connection, "protocol", str(exc))
        except Exception:  # noqa: BLE001 - the barrier of a connection: a bug costs no other
            what = f"a bug of the store in {type(message).__name__}"
            self._said.bug("bugs of the store", "connection %d: %s", connection, what)
            self.numbers.add("kvstore_refused", "internal")
            self.turn_away(connection, "internal", what)

    def _on_late(self, session: Session, connection: int, message: framing.Message) -> None:
        """Act on a message in a session that ends: an engine may not have heard of that yet."""
        if isinstance(message, p.Hello | p.Query):
            raise ProtocolError(f"{type(message).__name__} in a session that ends")
        if isinstance(message, p.BlocksWritten):
            self._dispatch(session, connection, message)

    def turn_away(self, connection: int, reason: str, text: str) -> None:
        """End the session of a connection; refuse one that is in none, or whose session ends."""
        session = self._by_connection.get(connection)
        if session is None or session.phase is Phase.ENDING:
            self._send(connection, p.Refused(text, retry=False), None)
        else:
            self._end(session, reason, text)

    def may_write(self, connection: int) -> bool:
        """Tell whether it is a worker's, which may write into slots until it has closed its end."""
        session = self._by_connection.get(connection)
        if session is None or session.namespace is None:
            return False
        return connection in session.workers.values()

    def knows(self, connection: int) -> bool:
        """Tell whether a connection is part of a session."""
        return connection in self._by_connection

    def _dispatch(self, session: Session, connection: int, message: framing.Message) -> None:
        namespace = session.namespace
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
            self._maybe_activate(session)
        else:
            raise ProtocolError(f"{type(message).__name__} is not for the store")

    def on_closed(self, connection: int, now_ns: int) -> None:
        """A connection is gone; its session ends, and with the last worker its slots come back."""
        self._now_ns = now_ns
        self._ended.discard(connection)
        session = self._by_connection.pop(connection, None)
        if session is None:
            return
        if session.scheduler == connection:
            session.scheduler = None
        session.workers = {r: c for r, c in session.workers.items() if c != connection}
        if session.namespace is not None:
            with self._barrier.around(f"the end of connection {connection}"):
                self._memory.forget(session.namespace, connection)
        self._end(session, "closed", "another connection of this engine closed")
        if not session.workers:
            self._bury(session)

    def on_tick(self, now_ns: int) -> None:
        """After every batch of messages, and at least a few times a second."""
        self._now_ns = now_ns
        if self._peers is not None:
            for source in self._peers.producer.sources():
                self._visits.wake(source.layout.digest)
        visited = self._visits.take(self.namespaces, now_ns)
        with self._barrier.around("the extents of namespaces"):
            for connection in self._memory.tick(self.namespaces, visited, now_ns):
                session = self._by_connection.get(connection)
                if session is not None:
                    self._end(session, "memory", "its memory is needed, or was not mapped in time")
        for namespace in visited:
            with self._barrier.around("a namespace", partial(self._give_up, namespace)):
                self._tick_namespace(namespace)
        for session in self.sessions.values():
            if session.phase is not Phase.ENDING:
                bug = "internal", "a bug of the store"
                what = f"the turns of engine {session.engine!r}"
                with self._barrier.around(what, partial(self._end, session, *bug)):
                    self._tick_session(session)
        if self._clearing and not any(n.manager.clearing for n in self._awake):
            waiting, self._clearing = self._clearing, []
            for connection in waiting:
                self._report(connection)

        self._said.tick()
        self._lives.tick()

    def _met_a_bug(self) -> None:
        self.numbers.add("kvstore_refused", "internal")

    def _give_up(self, namespace: Namespace) -> None:
        """Serve a namespace no more that a bug was met in; what it has of memory stays its own."""
        digest = namespace.layout.digest
        log.error("namespace %s is off until the store is started again", digest[:12])
        self._broken.add(digest)
        self.namespaces.pop(digest, None)
        for session in namespace.sessions.values():
            self._end(session, "internal", "a bug of the store")

    def _wake(self, namespace: Namespace) -> None:
        """Visit a namespace in every turn from now on, until it is at rest."""
        self._visits.wake(namespace.layout.digest)

    @property
    def _awake(self) -> list[Namespace]:
        """List the namespaces that an engine has, or where something goes on."""
        return self._visits.awake(self.namespaces)

    def _maybe_forget(self, namespace: Namespace) -> None:
        """Forget a namespace without engines and blocks, once its memory is given back.

        What lower tiers keep of it is there when an engine comes that has it.
        """
        if self._now_ns - namespace.used_ns < FORGET_NS or not namespace.unused:
            return
        if namespace.extents:
            self._memory.give_back(namespace, self._now_ns)
        elif self._peers is None or self._peers.forget(namespace):
            namespace.tiering.close()
            del self.namespaces[namespace.layout.digest]
            log.debug("namespace %s is forgotten", namespace.layout.digest[:12])

    def _tick_session(self, session: Session) -> None:
        if session.phase is Phase.JOINING:
            self._maybe_activate(session)
        if session.phase is Phase.ACTIVE:
            session.news.granted += self._lookups.retry(session, self._now_ns)
            if session.namespace is not None:
                self._grant_credits(session, session.namespace)
        answers = session.take_news()
        if answers is not None and session.scheduler is not None:
            self._send(session.scheduler, answers, None)

    @property
    def busy(self) -> bool:
        """Tell whether something is under way that no message will announce."""
        waiting = any(session.asks for session in self.sessions.values())  # for a deadline, say
        return waiting or any(
            n.tiering.to_poll or n.growing or n.manager.clearing for n in self._awake
        )

    def _tiers_of(self, namespace: Namespace) -> Ended:
        """For a bug in the block the lower tiers of a namespace are used no more, and its peers."""

        def leave() -> None:
            digest = namespace.layout.digest[:12]
            log.error("the tiers of namespace %s are off until the store is started again", digest)
            namespace.tiering.stop()

        return self._barrier.around("the tiers of a namespace", leave)

    def _tick_namespace(self, namespace: Namespace) -> None:
        manager = namespace.manager
        for lease_id in manager.expire(self._now_ns):
            self.numbers.add("kvstore_lookups", "expired")
            for session in namespace.sessions.values():
                self._lookups.lease_ended(session, namespace, lease_id)
        with self._tiers_of(namespace):
            namespace.tiering.poll(self._now_ns)
        manager.clear_some()
        changes, on_disk = manager.take_changes(), Changes()
        with self._tiers_of(namespace):
            on_disk = namespace.tiering.take_changes()
        if any((changes.added, changes.removed, on_disk.added, on_disk.removed)):
            for session in namespace.sessions.values():
                if session.phase is Phase.ACTIVE:
                    session.heard(changes, on_disk)
        if changes.added:
            with self._tiers_of(namespace):
                namespace.tiering.cascade(changes.added)
        self._maybe_forget(namespace)
        if namespace.at_rest:
            self._visits.rest(namespace.layout.digest)
        else:
            self._wake(namespace)

    # Sessions

    def _hello(self, connection: int, hello: p.Hello) -> None:
        if hello.version != p.VERSION:
            raise ProtocolError(f"protocol {hello.version}, ours is {p.VERSION}")
        if hello.world < 1:
            raise ProtocolError(f"world of {hello.world}, expected at least 1")
        if connection in self._by_connection:
            raise ProtocolError("a second Hello")
        self._check_layers(hello)
        session = self.sessions.get(hello.engine)
        if session is None:
            session = Session(self._next_session, hello.engine, hello.world)
        early = ""
        if session.phase is Phase.ENDING:
            early = "the engine's last session is ending"
        elif session.taken(hello.role, hello.rank):
            # An engine that came back under its id before its old processes were gone.
            early = f"{hello.role} {hello.rank} of engine {hello.engine!r} is attached already"
        if early:
            self._send(connection, p.Refused(early, retry=True), None)
            return
        session.join(connection, hello)
        if hello.engine not in self.sessions:
            self._next_session += 1
            self.sessions[hello.engine] = session
        self._by_connection[connection] = session
        if len(session.geometries) == session.world:
            self._welcome(session, connection)

    def _check_layers(self, hello: p.Hello) -> None:
        """Raise ProtocolError where a store would keep more of its engines' layers than it may."""
        if hello.geometry is None:
            return
        kept = [g.layers for session in self.sessions.values() for g in session.geometries.values()]
        if sum(kept) + hello.geometry.layers > limits.STORE_LAYERS_MAX:
            raise ProtocolError(
                f"{hello.geometry.layers} layers more than the {sum(kept)} of attached engines,"
                f" expected up to {limits.STORE_LAYERS_MAX} in sum"
            )

    def _welcome(self, session: Session, joined: int) -> None:
        """All ranks' geometries are known: find the namespace, and welcome the workers."""
        first_time = session.namespace is None
        if session.namespace is None:
            try:
                session.namespace = self._namespace(session)
            except KVStoreError as exc:
                self._said.warn("engines refused", "engine %r refused: %s", session.engine, exc)
                for connection in session.connections():
                    self._send(connection, p.Refused(str(exc), retry=False), None)
                self._end(session, "refused", str(exc))
                return
            session.namespace.sessions[session.number] = session
            self._wake(session.namespace)
        namespace = session.namespace
        for rank, worker in session.workers.items():
            if first_time or worker == joined:
                layout = session.layouts[rank]
                digest, engine = namespace.layout.digest, self._config.engine
                devices = "" if self._peers is None else self._peers.devices
                waits = engine.promote_ns // 1_000_000, engine.promote_limit_ns // 1_000_000
                welcome = p.Welcome(session.number, digest, layout, *waits, devices=devices)
                self._send(worker, welcome, None)
                self._memory.announce(namespace, worker, self._now_ns)

    def _namespace(self, session: Session) -> Namespace:
        layout = slot_layout([session.geometries[rank] for rank in range(session.world)])
        if layout.slot_bytes + 4 > self._pool.extent_bytes:
            raise ConfigError(
                f"a block takes {layout.slot_bytes} bytes, an extent has {self._pool.extent_bytes}:"
                " use a larger cpu capacity or extent, or a smaller block_tokens"
            )
        if layout.unnamed:
            layout = layout.of_session(session.number)
            kind = "engines whose blocks have no name"
            line = "engine %r: its blocks stay in memory, for itself only, until it detaches: %r"
            self._said.warn(kind, line, session.engine, layout.unnamed)
        disk = self._config.nvme
        if disk is not None and layout.slot_bytes > disk.extent_bytes:
            raise ConfigError(
                f"a block takes {layout.slot_bytes} bytes, an extent on disk has"
                f" {disk.extent_bytes}: use a larger [nvme] extent, or a smaller block_tokens"
            )
        if layout.digest in self._broken:
            raise ConfigError("a bug of the store: restart it to have this model served again")
        namespace = self.namespaces.get(layout.digest)
        if namespace is None:
            namespace = Namespace(layout, self.numbers, self._tiering)
            self.namespaces[layout.digest] = namespace
        session.layouts = layout.ranks  # the namespace may have been made for other ranks
        return namespace

    def _tiering(self, namespace: Namespace) -> Tiering:
        """Make its tiers; none for blocks without a name: they could not be found again."""
        layout, tiers, remote = namespace.layout, list[Tier](), list[Tier]()
        if not layout.unnamed:
            tiers += self._make_tiers(layout.digest, layout.slot_bytes, namespace)
            remote += [] if self._peers is None else [self._peers.inlet(namespace)]
        return Tiering(
            namespace.manager,
            tiers,
            layout.slot_bytes,
            backlog_ns=self._backlog_ns,
            budgets=self._budgets,
            remote=remote,
            counts=self.numbers.moved,
        )

    def _maybe_activate(self, session: Session) -> None:
        namespace = session.namespace
        if session.phase is not Phase.JOINING or namespace is None or not session.complete:
            return
        waiting = {worker for mapping in namespace.extents.values() for worker in mapping.waiting}
        if namespace.manager.slots.total and waiting.isdisjoint(session.workers.values()):
            session.phase = Phase.ACTIVE
            self.numbers.add("kvstore_sessions_started")
            if session.events:
                namespace.tiering.tell()
            slower_ns = self._config.engine.promote_ns if namespace.tiering.sources else 0
            limit_ms = max(self._config.engine.defer_ns, slower_ns) // 1_000_000
            peers = None if namespace.layout.unnamed else self._peers
            here = "" if peers is None else peers.channel.address
            digest = namespace.layout.digest
            welcome = p.Welcome(session.number, digest, side_channel=here, defer_ms=limit_ms)
            if session.scheduler is not None:
                self._send(session.scheduler, welcome, None)
            self._send_block_versions(session, namespace)
            line = "engine %r attached, session %d"
            self._lives.info("engines attached", line, session.engine, session.number)

    def _end(self, session: Session, reason: str, text: str) -> None:
        if session.phase is Phase.ENDING:
            return
        session.phase = Phase.ENDING
        with self._barrier.around(f"the end of engine {session.engine!r}"):
            self._lookups.end(session)
            if session.namespace is not None:
                session.namespace.engines.leave(session.number)
                self._memory.excuse(session.namespace, session.workers.values())
            if self._peers is not None:
                self._peers.engine_writes.leave(session.number)
        self.numbers.add("kvstore_sessions_ended", reason)
        for connection in session.connections():
            self._send(connection, p.Detach(text), None)

    def _bury(self, session: Session) -> None:
        """The last worker has closed: nobody writes the session's slots any more."""
        del self.sessions[session.engine]
        if session.scheduler is not None:
            del self._by_connection[session.scheduler]
            self._ended.add(session.scheduler)
        if session.namespace is not None:
            session.namespace.sessions.pop(session.number, None)
            with self._barrier.around(f"the leases and slots of engine {session.engine!r}"):
                self._give_back(session, session.namespace)

    def _give_back(self, session: Session, namespace: Namespace) -> None:
        namespace.engines.end_of(session.number)
        if self._peers is not None:
            self._peers.end_of(session.number)
        namespace.used_ns = self._now_ns
        namespace.manager.give_back(session.granted)
        for lease_id in namespace.manager.leases.of_owner(session.number):
            self._lookups.end_lease(session, namespace, lease_id)
        if namespace.layout.unnamed:
            namespace.manager.clear()  # nobody can ask for them any more
        line = "engine %r detached, session %d"
        self._lives.info("engines detached", line, session.engine, session.number)

    def _grant_credits(self, session: Session, namespace: Namespace) -> None:
        manager = namespace.manager
        cap = self._config.engine.credit_bytes // namespace.layout.slot_bytes
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

    # Lookups

    def _step(self, session: Session, namespace: Namespace, step: p.Step) -> None:
        if session.phase is Phase.JOINING:
            raise ProtocolError("Step before Welcome")
        for lease_id in step.release:
            self._lookups.end_lease(session, namespace, LeaseId(lease_id))
        count_step(self.numbers, step, self._tier_names)
        for shown in step.engine_blocks:
            namespace.engines.announce(session.number, shown, session.granted)
        if self._peers is not None and not namespace.layout.unnamed:
            self._peers.requests.on_step(namespace, session.number, step, self._now_ns)
        for lookup in step.lookups:
            answer = self._lookups.ask(session, namespace, lookup, self._now_ns)
            if answer is not None:
                session.news.granted.append(answer)

    # Reports of workers

    def _stored(self, session: Session, namespace: Namespace, rank: int, message: p.Stored) -> None:
        slots = framing.from_u32(message.slots)
        if not len(slots) == len(message.keys) == len(message.parents):
            raise ProtocolError(f"{len(message.keys)} keys for {len(slots)} slots")
        manager = namespace.manager
        size = namespace.layout.slot_bytes // session.world
        self.numbers.add("kvstore_copied_bytes", "store", by=len(slots) * size)
        self.numbers.add("kvstore_copy_seconds", "store", by=message.seconds)
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
                outcome = manager.complete_store(slot, ok=writing.ok)
                namespace.engines.stored(session.number, slot, BlockKey(key), ok=writing.ok)
                self.numbers.add("kvstore_stored_blocks", outcome.value)

    def _loaded(self, session: Session, namespace: Namespace, rank: int, message: p.Loaded) -> None:
        self.numbers.add("kvstore_copied_bytes", "load", by=message.copied_bytes)
        self.numbers.add("kvstore_copy_seconds", "load", by=message.seconds)
        lease_id = LeaseId(message.lease)
        damaged = framing.from_u32(message.damaged)
        found = session.loaded(lease_id, rank, damaged, late=message.late > 0)
        if found is not None:
            self.numbers.add("kvstore_engine_events", "load_given_up", by=found.late)
            self._lookups.end_lease(session, namespace, lease_id, found.damaged)

    def _send_block_versions(self, session: Session, namespace: Namespace) -> None:
        if session.phase is Phase.ACTIVE and session.scheduler is not None:
            board = namespace.engines.take_block_versions(session.number)
            if board is not None:
                self._send(session.scheduler, *board)

    def _of_peers(
        self, session: Session, namespace: Namespace, rank: int, message: OfPeers
    ) -> None:
        number, peers = session.number, self._peers
        if isinstance(message, p.Serves):
            check_ranks(namespace.layout, [message.rank])
            namespace.engines.serves(number, session.workers, session.world, rank, message)
            self._send_block_versions(session, namespace)
        elif peers is None:
            return
        elif isinstance(message, p.BlocksWritten):
            peers.engine_writes.written(number, rank, message)
        else:
            peers.inlet(namespace).of_worker(number, rank, message, self._now_ns)

    # Admin

    def _query(self, connection: int, query: p.Query) -> None:
        if query.what == "clear":
            if connection in self._clearing:
                raise ProtocolError("a clear before the last one is answered")
            for namespace in self.namespaces.values():
                namespace.manager.clear()
                namespace.tiering.clear()
                self._wake(namespace)
            if self._disk is not None:  # it has more than what was attached since the start
                self._disk.clear()
            self._clearing.append(connection)  # it hears when all slots are free
            return
        if query.what == "resize":
            resize(self._disk, query)
        elif query.what != "stats":
            raise ProtocolError(f"query {query.what!r}, expected stats, clear or resize")
        self._report(connection)

    def _report(self, connection: int) -> None:
        self.refresh_gauges()
        values = {**self.numbers.counts, **self.numbers.gauges}
        body = msgspec.json.encode([[*key, value] for key, value in sorted(values.items())])
        self._send(connection, p.Report(body), None)

    def refresh_gauges(self) -> None:
        """Bring the gauges, and counters kept elsewhere, up to date."""
        with self._barrier.around("gauges"):
            found = gauges(self._pool, self.sessions.values(), self.namespaces, self.numbers)
            if self._disk is not None:
                found |= disk_gauges(self._disk)
            found |= plugin_gauges(self.plugins)
            if self._peers is not None:
                found |= self._peers.gauges()
            self.numbers.gauges = found

    def enqueue_all(self) -> None:
        """Queue all that only memory has for the lower tiers; for a store that ends."""
        for namespace in self.namespaces.values():
            with self._tiers_of(namespace):
                namespace.tiering.enqueue_all()
                self._wake(namespace)

    @property
    def queued_blocks(self) -> int:
        """Count the blocks that are not in a lower tier yet and will be."""
        return sum(namespace.tiering.queued for namespace in self.namespaces.values())

    def end_sessions(self) -> None:
        """Tell every engine that the store is shutting down."""
        for session in self.sessions.values():
            self._end(session, "shutdown", "the store is shutting down")

    def close(self) -> None:
        """End the lower tiers in order."""
        for namespace in self.namespaces.values():
            with self._barrier.around("the end of a namespace's tiers"):
                namespace.tiering.close()
