"""How engines join, and leave: connections become sessions, which begin and end as one.

Hello from each part --> all ranks are there: a namespace is found, workers are welcome
all memory mapped ------> the session is active, and its scheduler half welcome
any connection closed, or something wrong said --> Detach to the others
the last worker's connection closed, and its process, if killed, ended --> its slots and leases are
                         free again
"""

from __future__ import annotations

import logging
import os

from kvstore.core import limits
from kvstore.core.errors import KVStoreError, NotYet, ProtocolError
from kvstore.core.layout import slot_layout
from kvstore.logs import RateLog, Subject
from kvstore.store.endings import Endings
from kvstore.store.extents import Memory
from kvstore.store.lookups import Lookups
from kvstore.store.namespace import Namespace
from kvstore.store.namespaces import Namespaces, StoreContext
from kvstore.store.session import Phase, Session
from kvstore.store.sharing import why_alone
from kvstore.units import sized
from kvstore.wire import engine as p
from kvstore.wire.credentials import Process

log = logging.getLogger(__name__)

LIVES_MAX = 50  # lines of engines that attach, or detach, in one window: a large node has fewer


class Sessions(dict[str, Session]):
    """Sessions by engine, and the session of each connection."""

    def __init__(
        self,
        context: StoreContext,
        first: int,
        namespaces: Namespaces,
        memory: Memory,
        lookups: Lookups,
    ) -> None:
        """first: sessions are numbered from here."""
        super().__init__()
        self._settings, self._numbers = context.settings, context.numbers
        self._send, self._peers, self._barrier = context.send, context.peers, context.barrier
        self._keeps_tokens = context.tokens.bytes_max > 0
        self._next = first
        self._namespaces, self._memory, self._lookups = namespaces, memory, lookups
        self.refuses = ""  # engines that have no session yet, and why
        self._said = RateLog(log)
        self._lives = RateLog(log, lines_max=LIVES_MAX)
        self.processes: dict[int, Process] = {}  # at the other end of connections
        self._by_connection: dict[int, Session] = {}
        self._parted: set[int] = set()  # connections that said goodbye
        self.endings = Endings()
        self._ended: set[int] = set()  # schedulers of buried sessions that did not close yet

    def of(self, connection: int) -> Session | None:
        """Return the session that a connection is part of."""
        return self._by_connection.get(connection)

    def subject(self, connection: int) -> Subject:
        """Name who has a connection, for a line of the log."""
        session = self._by_connection.get(connection)
        if session is not None:
            return session.subject
        pid, uid = self.processes.get(connection, (None, None))
        return Subject(connection=connection, pid=pid or None, uid=uid)

    def was_detached(self, connection: int) -> bool:
        """Tell whether a scheduler's session is gone, which it may not have read yet."""
        return connection in self._ended

    def may_write(self, connection: int) -> bool:
        """Tell whether it is a worker's, which may write into slots until it has closed its end."""
        session = self._by_connection.get(connection)
        if session is None or session.namespace is None:
            return False
        return connection in session.workers.values()

    # Joining

    def hello(self, connection: int, hello: p.Hello, now_ns: int) -> None:
        """A part of an engine joins its session. Raises ProtocolError for one that cannot."""
        if hello.version != p.VERSION:
            raise ProtocolError(f"protocol {hello.version}, ours is {p.VERSION}")
        if connection in self._by_connection:
            raise ProtocolError("a second Hello")
        self._check_layers(hello)
        session = self.get(hello.engine)
        early = self.refuses if session is None else ""
        if session is None:
            session = Session(self._next, hello.engine, hello.world)
        if session.phase is Phase.ENDING:
            early = "the engine's last session is ending"
        elif session.taken(hello.role, hello.rank):
            # An engine that came back under its id before its old processes were gone.
            early = f"{hello.role} {hello.rank} of engine {hello.engine!r} is attached already"
        if early:
            self._send(connection, p.Refused(early, retry=True), None)
            return
        session.join(connection, hello, self.processes.get(connection))
        if hello.engine not in self:
            self._next += 1
            self[hello.engine] = session
        self._by_connection[connection] = session
        if session.namespace is None and len(session.geometries) == session.world:
            self._welcome(session, now_ns)

    def _check_layers(self, hello: p.Hello) -> None:
        """Raise ProtocolError where a store would keep more of its engines' layers than it may."""
        if hello.geometry is None:
            return
        kept = [g.layers for session in self.values() for g in session.geometries.values()]
        if sum(kept) + hello.geometry.layers > limits.STORE_LAYERS_MAX:
            raise ProtocolError(
                f"{hello.geometry.layers} layers more than the {sum(kept)} of attached engines,"
                f" expected up to {limits.STORE_LAYERS_MAX} in sum"
            )

    def _welcome(self, session: Session, now_ns: int) -> None:
        """All ranks' geometries are known: find the namespace, and welcome the workers."""
        try:
            namespace = self._find_namespace(session)
        except KVStoreError as exc:
            self._said.warn("engines refused", "%s refused: %s", session.subject, exc)
            for connection in session.connections():
                retry = isinstance(exc, NotYet)
                self._send(connection, p.Refused(str(exc), retry=retry), None)
            self.end(session, "refused", str(exc))
            return
        session.namespace = namespace
        namespace.sessions[session.number] = session
        self._namespaces.wake(namespace)
        engine, digest = self._settings.running.engine, namespace.layout.digest
        devices = "" if self._peers is None else self._peers.devices
        waits = engine.promote_ns // 1_000_000, engine.promote_limit_ns // 1_000_000
        for rank, worker in session.workers.items():
            layout = session.layouts[rank]
            welcome = p.Welcome(session.number, digest, layout, *waits, devices=devices)
            self._send(worker, welcome, None)
            self._memory.announce(namespace, worker, now_ns)

    def _find_namespace(self, session: Session) -> Namespace:
        layout = slot_layout([session.geometries[rank] for rank in range(session.world)])
        if layout.unnamed:
            layout = layout.of_session(session.number)
        namespace = self._namespaces.find(layout)
        session.layouts = layout.ranks  # the namespace may have been made for other ranks
        return namespace

    def activate(self, session: Session) -> None:
        """Begin a session whose parts are all there, once its workers have mapped all memory."""
        namespace, scheduler = session.namespace, session.scheduler
        if session.phase is not Phase.JOINING or namespace is None or not session.complete:
            return
        waiting = {worker for mapping in namespace.extents.values() for worker in mapping.waiting}
        if not namespace.manager.slots.total or not waiting.isdisjoint(session.workers.values()):
            return
        session.phase = Phase.ACTIVE
        self._numbers.add("kvstore_sessions_started")
        if session.events:
            namespace.tiering.tell()
        engine = self._settings.running.engine
        slower_ns = engine.promote_ns if namespace.tiering.sources else 0
        defer_ms = max(engine.defer_ns, slower_ns) // 1_000_000
        peers = None if namespace.layout.unnamed else self._peers
        here = "" if peers is None else peers.channel.address
        digest = namespace.layout.digest
        warning = session.warning = why_alone(namespace, self._namespaces.values())
        welcome = p.Welcome(
            session.number,
            digest,
            side_channel=here,
            defer_ms=defer_ms,
            warning=warning,
            tokens=self._keeps_tokens,
            there=namespace.blocks,
        )
        if scheduler is not None:
            self._send(scheduler, welcome, None)
        self.send_block_versions(session, namespace)
        line = "%s attached: %d rank%s, blocks of %s tokens, %s"
        tokens, size = namespace.layout.traits["block tokens"], sized(namespace.layout.slot_bytes)
        plural = "s" * (session.world > 1)
        shape = session.world, plural, tokens, size
        self._lives.info("engines attached", line, session.subject, *shape)
        if warning:
            self._lives.warn("engines that share nothing", "%s %s", session.subject, warning)

    def send_block_versions(self, session: Session, namespace: Namespace) -> None:
        """Give an active scheduler half the memory for its blocks' versions, once."""
        if session.phase is Phase.ACTIVE and session.scheduler is not None:
            board = namespace.engines.take_block_versions(session.number)
            if board is not None:
                self._send(session.scheduler, *board)

    # Leaving

    def turn_away(self, connection: int, reason: str, text: str) -> None:
        """End the session of a connection; refuse one that is in none, or whose session ends."""
        session = self._by_connection.get(connection)
        if session is None or session.phase is Phase.ENDING:
            self._send(connection, p.Refused(text, retry=False), None)
        else:
            self.end(session, reason, text)

    def leave(self, connection: int, reason: str) -> None:
        """A part of an engine is about to close its connection; reason: its fault, "" for none."""
        session = self._by_connection.get(connection)
        self._parted.add(connection)
        if session is not None:
            text = f"its {session.part(connection)} closes the session: {reason}"
            self.end(session, "left", text if reason else "the engine ends", calm=not reason)

    def end(self, session: Session, reason: str, text: str, *, calm: bool = False) -> None:
        """Tell all parts of an engine to detach, once. calm: it is no reason for a warning."""
        if session.phase is Phase.ENDING:
            return
        joined, session.phase = session.phase is Phase.ACTIVE, Phase.ENDING
        with self._barrier.around(f"the end of engine {session.engine!r}"):
            self._lookups.end(session)
            session.page_due, session.snapshot = False, None
            if session.namespace is not None:
                session.namespace.engines.leave(session.number)
                self._memory.excuse(session.namespace, session.workers.values())
        self._numbers.add("kvstore_sessions_ended", reason)
        # A refusal has a line of its own; a half that comes back as the engine ends needs none.
        if reason != "refused" and (joined or not calm):
            say = self._lives.info if calm else self._lives.warn
            say("engines detached", "%s detached: %s", session.subject, text)
        for connection in session.connections():
            self._send(connection, p.Detach(text[: limits.TEXT_MAX]), None)

    def closed(self, connection: int, now_ns: int, end: int | None = None) -> None:
        """A connection is gone: its session ends, and with the last worker its slots come back.

        end: a pidfd of its process; a worker's that said no goodbye is waited for.
        """
        awaited = self.may_write(connection) and connection not in self._parted
        self._ended.discard(connection)
        self._parted.discard(connection)
        process = self.processes.pop(connection, None)
        session = self._by_connection.pop(connection, None)
        if end is not None and session is not None and awaited:
            self.endings.add(session, end)
        elif end is not None:
            os.close(end)
        if session is None:
            return
        part = session.part(connection) + (f" (pid {process.pid})" if process else "")
        if session.scheduler == connection:
            session.scheduler = None
        session.workers = {r: c for r, c in session.workers.items() if c != connection}
        if session.namespace is not None:
            with self._barrier.around(f"the end of connection {connection}"):
                self._memory.forget(session.namespace, connection)
        self.end(session, "died", f"its {part} closed without a goodbye: killed, or crashed")
        if not session.workers and not self.endings.waits_for(session):
            self._bury(session, now_ns)

    def _bury(self, session: Session, now_ns: int) -> None:
        """The last worker has gone: nothing writes the session's slots any more."""
        del self[session.engine]
        if session.scheduler is not None:
            del self._by_connection[session.scheduler]
            self._ended.add(session.scheduler)
        if session.namespace is not None:
            session.namespace.sessions.pop(session.number, None)
            session.namespace.used_ns = now_ns
            with self._barrier.around(f"the leases and slots of engine {session.engine!r}"):
                self._give_back(session, session.namespace)

    def _give_back(self, session: Session, namespace: Namespace) -> None:
        namespace.engines.end_of(session.number)
        if self._peers is not None:
            self._peers.end_of(session.number)
        namespace.manager.give_back(session.granted)
        for lease in namespace.manager.leases.of_owner(session.number):
            self._lookups.end_lease(session, namespace, lease.lease_id)
        if namespace.layout.unnamed:
            namespace.manager.clear()  # nothing can ask for them any more

    def bury_ended(self, now_ns: int) -> None:
        """Bury sessions whose processes have ended."""
        for session in self.endings.take() if self.endings else ():
            if not session.workers:
                self._bury(session, now_ns)

    def tick(self) -> None:
        """Say how many lines were left out of the log."""
        self._said.tick()
        self._lives.tick()
