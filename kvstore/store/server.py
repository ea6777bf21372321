"""The store process: one thread, one epoll loop, unix sockets.

A blocking loop instead of asyncio for the local protocol: 231 against 352 us per round trip
(docs/decisions). The metrics endpoint has a thread of its own and only reads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvstore import clock
from kvstore.barrier import Barrier
from kvstore.config import Config, ConfigFile, EngineConfig, ObjectConfig, PeerConfig
from kvstore.core import limits
from kvstore.core.errors import ConfigError, InvariantBroken, ProtocolError
from kvstore.core.tier import SlotMemory, Tier, TierContext
from kvstore.gc_tuning import collect_young_only
from kvstore.handover.cluster_key import ClusterKey
from kvstore.handover.consumer import Waits
from kvstore.handover.peers import EXPORTER, Peers
from kvstore.handover.transfers import Transfers
from kvstore.listener import Listener
from kvstore.logs import RateLog
from kvstore.metrics import NVME, OBJECT
from kvstore.store import metrics_endpoint
from kvstore.store.edge_thread import EdgeThread
from kvstore.store.health import Health
from kvstore.store.live_settings import Reloaded
from kvstore.store.metrics_endpoint import StoreCollector
from kvstore.store.plugins import Plugin
from kvstore.store.status import Status
from kvstore.store.store import SELDOM_NS, Store
from kvstore.systemd import Systemd
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.credentials import USERS_MAX, peer_process, process_end, trusted
from tiers.cpu import CpuMemory
from tiers.nvme.disk import NvmeDisk

if TYPE_CHECKING:
    from tiers.object.bucket import Bucket

log = logging.getLogger(__name__)

BROKEN_STATUS = 70  # of the process: EX_SOFTWARE
_READ_BYTES = 1 << 18
_TICK_S = 0.2
_SMALL_BYTES = limits.OUTBOXES_BYTES_MAX >> 12  # of one connection: all of them may have it
_BUSY_TICK_S = 0.001
_IDLE_NS = 5_000_000  # between two looks at a disk, or peers, of which nothing has come
_CLOSE_S = 0.5
_CLOSE_TICK_S = 0.05
_READ_S = 0.02  # for the messages of one connection in a turn; the others have their turn, too
_PAUSE_NS = 500_000_000  # after a connection could not be taken, for want of descriptors say
_SILENT_S = 5.0  # without a word of a connection that is no engine's, where descriptors are short
_FLUSH_S = 30.0  # without a block that was kept
_FLUSH_LIMIT_S = 600.0
_BACK_S = 7.0  # for a disk that fails meanwhile: it is tried again after 5 s
_PROGRESS_S = 2.0
_GAUGES_NS = 50_000_000  # between two looks at all gauges, however many scrapes there are
_GAUGES_S = 0.5  # that a scrape waits for the loop; then it shows gauges of before
_GOODBYE = framing.encode(p.Detach(""))


class _Connection:
    """Buffers of one client."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        self.decoder = framing.Decoder(p.ToStore, limits.HELLO_BYTES_MAX)
        self.outbox = framing.Outbox()
        self.known = False  # it is part of a session
        self.end: int | None = None  # a pidfd of its process, once it is known
        self.refused = False  # it hears why, and is dropped
        self.heard_s = clock.now_s()  # when something came last
        self.parted = False  # nothing more is taken of it, or said: its own end is waited for
        self.last = b""  # that it said then
        self.events = selectors.EVENT_READ

    def send(self, message: framing.Message, fd: int | None) -> None:
        if self.parted:
            return
        self.outbox.put(framing.encode(message), fd)
        self.refused = self.refused or isinstance(message, p.Refused)

    def receive(self, *, ended: bool) -> bytes | None:
        """Read some of what has come; None: nothing has, b"": and nothing more will.

        ended: its process has. What that forked may keep the socket open.
        """
        try:
            return self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return b"" if ended else None
        except OSError:
            return b""

    def know(self, selector: selectors.BaseSelector) -> None:
        """It has become part of a session: watch its process, too."""
        self.known = True
        self.decoder.frames.bytes_max = limits.FRAME_BYTES_MAX
        self.end = process_end(self.sock)
        if self.end is not None:
            selector.register(self.end, selectors.EVENT_READ, self)

    def part(self) -> None:
        """Close our end: nothing more is said, and what was not read is forgotten."""
        self.parted = True
        self.outbox = framing.Outbox()
        self.decoder = framing.Decoder(p.ToStore, limits.HELLO_BYTES_MAX)
        with contextlib.suppress(OSError):  # it has gone
            self.sock.shutdown(socket.SHUT_WR)


class Server:
    """Runs a Store on sockets until it is told to stop, or its last client has gone."""

    def __init__(
        self,
        config: Config,
        listener: Listener,
        linger_s: float | None = None,
        systemd: Systemd | None = None,
        source: ConfigFile | None = None,
    ) -> None:
        """linger_s: a private store ends this long after its last client; None: never.

        source: the file that reload() reads again.
        """
        self._config = config
        self._listener = listener
        self._linger_s = linger_s
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._more: dict[int, _Connection] = {}  # that have said what is not acted on yet
        self._read_s = _READ_S
        self._unsent: dict[int, _Connection] = {}  # that something is to be done for
        self._next = 1
        self._stopping = False
        self._gauges_ns = 0
        self._gauges_wanted = threading.Event()  # by a scrape
        self._gauges_fresh = threading.Event()
        self._unreachable = False  # the socket's file is gone, and cannot be made
        self._accept_ns = 0  # when connections are taken again, after one that could not be
        self._said = RateLog(log)
        self._strangers: set[int] = set()  # users refused, each of whom is logged once
        self._lonely_since = clock.now_s()
        cpu = config.cpu
        pool = CpuMemory(cpu.capacity_bytes, cpu.extent_bytes, cpu.numa)
        self._pool = pool
        self._disk = (
            None
            if config.nvme is None
            else NvmeDisk(config.nvme, tokens=config.engine.event_tokens_bytes > 0)
        )
        first = secrets.randbits(40) << 16
        self._peers = self._make_peers(config.peer, config.engine)
        self._plugins = [Plugin(tier) for tier in config.tiers]
        self._bucket = self._make_bucket(config.bucket)
        systemd = systemd or Systemd({})
        self._seldom_ns = 0
        self._disk_ns = self._peers_ns = 0  # when they are polled again though nothing has come
        self.store = Store(
            config, pool, self._make_tiers, self._send, first, self._disk, self._peers
        )
        self.store.plugins, self.store.bucket = self._plugins, self._bucket
        if self._bucket is not None:
            self.store.namespaces.budgets[OBJECT] = self._bucket.budget
            self._selector.register(self._bucket, selectors.EVENT_READ, self._bucket)
        sessions = self.store.sessions
        self.health = Health(self.store.tier_states, systemd, lambda: sessions.refuses)
        self.store.not_ready = self.health.not_ready
        self._edge = EdgeThread()
        self._hung_up = False  # SIGHUP came
        self._reloading = False
        self._reload_next: list[int | None] = []  # who wants one that begins after this one
        barrier = Barrier(self._said, self.store.met_a_bug)
        self._around_edge = barrier.around("a reload")
        self._around_curves = barrier.around("predicted hit rates")
        if source is not None:
            self.store.source, self.store.reload = source, self._reload

    @staticmethod
    def _make_peers(config: PeerConfig | None, engine: EngineConfig) -> Peers | None:
        """Listen for other stores, where that is wanted. Raises ConfigError."""
        if config is None:
            return None
        key = None if config.key is None else ClusterKey.read(Path(config.key))
        name = f"kvstore-{secrets.token_hex(4)}"
        mover = Transfers(name, config.devices, config.landing_bytes)
        if config.eager:
            mover.exporter.wake()
        waits = Waits(engine.promote_ns, engine.promote_limit_ns)
        peers = Peers(key, mover, config.held_bytes, waits)
        try:
            peers.channel.listen(config.listen.host, config.listen.port)
        except ConfigError:
            peers.close()
            raise
        log.info("side channel at %s", peers.channel.address)
        return peers

    @staticmethod
    def _make_bucket(config: ObjectConfig | None) -> Bucket | None:
        """Make the bucket, where there is one. Raises ConfigError."""
        if config is None:
            return None
        from tiers.object.bucket import Bucket  # noqa: PLC0415 - its client is optional

        key = None if config.key is None else ClusterKey.read(Path(config.key))
        return Bucket(config, None if key is None else key.derived("objects"))

    def _make_tiers(self, digest: str, slot_bytes: int, memory: SlotMemory) -> Sequence[Tier]:
        tiers: list[Tier] = []
        for plugin in self._plugins:
            plugin.await_end(digest)
        if self._disk is not None:
            tiers.append(self._disk.tier(TierContext(NVME, digest, slot_bytes, memory, {})))
        tiers += [plugin.guarded(digest, slot_bytes, memory) for plugin in self._plugins]
        if self._bucket is not None:
            from tiers.object.tier import ObjectTier  # noqa: PLC0415 - as above

            context = TierContext(OBJECT, digest, slot_bytes, memory, {})
            tiers.append(ObjectTier(context, self._bucket))
        return tiers

    def run(self) -> None:
        """Serve until stop(). Closes everything it opened."""
        self._listener.sock.setblocking(False)
        self._selector.register(self._listener.sock, selectors.EVENT_READ, None)
        if self._peers is not None:
            self._selector.register(self._peers, selectors.EVENT_READ, self._peers)
        address, endpoint = self._config.server.metrics, contextlib.ExitStack()
        try:
            if address is not None:
                collector = StoreCollector(self.store.numbers, self.await_gauges)
                health = self.health
                probes = {"/healthz": health.not_alive, "/readyz": health.not_ready}
                start = metrics_endpoint.start(address, collector, probes, self._status)
                endpoint.callback(start)
            self._listener.start()
            log.info("listening at unix://%s", self._listener.path)
            self.health.serves()
            while not self._stopping:
                self._turn()
                if not self._connections and self._linger_s is not None:
                    self._stopping |= clock.now_s() - self._lonely_since > self._linger_s
            self._shut_down()
        finally:
            endpoint.close()
            for connection in self._connections.values():
                connection.sock.close()
                if connection.end is not None:
                    os.close(connection.end)
            self._connections.clear()
            self.store.sessions.endings.close()
            self._selector.close()
            if self._peers is not None:
                self._peers.close()
            if self._disk is not None:
                self._disk.close()
            if self._bucket is not None:
                self._bucket.close()
            self._pool.close()
            self._listener.close()  # last: whoever comes next finds all of it free

    def stop(self, *_signal: object) -> None:
        """End the loop after this turn; a signal handler."""
        self._stopping = True

    def hang_up(self, *_signal: object) -> None:
        """Reload the settings in the next turn; a signal handler."""
        self._hung_up = True

    def _reload(self, *wanted: int | None) -> None:
        """Read the file of settings again, elsewhere; the answer goes to connections, and the log.

        What comes meanwhile is one more reading.
        """
        source = self.store.source
        if source is None:
            log.warning("SIGHUP: this store has no file of settings to read again")
        elif self._reloading:
            self._reload_next += wanted
        else:
            self._reloading = True
            self._edge.read_settings(Path(source.path), partial(self._reloaded, wanted))

    def _reloaded(
        self, wanted: Sequence[int | None], read: Future[tuple[ConfigFile, Config]]
    ) -> None:
        """A file of settings has been read: run with what can change."""
        self._reloading = False
        try:
            source, found = read.result()
            differing = self.store.settings.take_over(found)
        except ConfigError as exc:
            log.error("settings not reloaded, and nothing has changed: %s", exc)
            answer = Reloaded(error=str(exc))
        else:
            self.store.source = source
            for difference in differing:
                (log.info if difference.live else log.warning)("reload: %s", difference.text)
            log.info("settings reloaded: %d differ from those that ran", len(differing))
            answer = Reloaded(differing)
        for connection in wanted:
            if connection is None:
                continue
            self._send(connection, p.Report(msgspec.json.encode(answer)), None)
        waiting, self._reload_next = self._reload_next, []
        if waiting:
            self._reload(*waiting)

    def _status(self) -> Status:
        """On a thread of the metrics: describe the store."""
        self.await_gauges()
        return self.store.status()

    def await_gauges(self) -> None:
        """On a thread of the metrics: have the loop bring the gauges up to date."""
        self._gauges_fresh.clear()
        self._gauges_wanted.set()
        self._gauges_fresh.wait(_GAUGES_S)

    def _turn(self) -> None:
        disk, peers = self._disk, self._peers
        busy = self.store.busy or self.store.asked.waits
        timeout = _BUSY_TICK_S if busy else _TICK_S
        disk_s = _TICK_S if disk is None else disk.next_s
        peers_s = _TICK_S if peers is None else peers.wait_s(clock.now_ns())
        ready = self._selector.select(0 if self._more else min(timeout, disk_s, peers_s))
        began_ns = time.monotonic_ns()
        self._receive(ready)
        self._flush()  # engines wait for answers
        now_ns = clock.now_ns()
        if now_ns >= self._seldom_ns:
            self._seldom_ns = now_ns + SELDOM_NS
            self._accept_again(now_ns)
            self._renew_listener()
            self._said.tick()
        if disk is not None and (disk_s <= _BUSY_TICK_S or now_ns >= self._disk_ns):
            disk.poll()
            self._disk_ns = clock.now_ns() + _IDLE_NS
        peers_due = peers_s <= _BUSY_TICK_S or now_ns >= self._peers_ns
        if peers is not None and (peers_due or peers.busy):
            self._peers_ns = now_ns + _IDLE_NS
            peers.poll(now_ns)
        self.store.on_tick(now_ns)
        self._reload_some()
        self._flush()
        if not ready:  # no message has come
            with self._around_curves:
                self.store.asked.feed()
        self.health.turned(time.monotonic_ns())
        if self._gauges_wanted.is_set() and now_ns - self._gauges_ns > _GAUGES_NS:
            self._gauges_ns = now_ns
            self._gauges_wanted.clear()
            self.store.refresh_gauges()
            self._gauges_fresh.set()
        took_s = (time.monotonic_ns() - began_ns) / 1e9
        self.store.numbers.observe("kvstore_turn_seconds", took_s)

    def _receive(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        """Take in what has come: connections, messages, and what there is for hand-overs."""
        more, self._more = self._more, {}
        for connection in more.values():
            if connection.number in self._connections:
                self._read(connection, more=True)
        for key, events in ready:
            if key.data is self._peers and key.data is not None:
                self._peers_ns = 0
                continue
            if key.data is self._bucket and key.data is not None:
                key.data.ended.heard()
                continue
            came: _Connection | None = key.data
            if came is None:
                self._accept()
            elif events & selectors.EVENT_READ and came.number not in more:
                self._read(came, ended=key.fd == came.end)

    def _reload_some(self) -> None:
        """Begin to read the settings again, or run with what was read."""
        if self._hung_up:
            self._hung_up = False
            self._reload(None)
        if self._edge.ended:
            with self._around_edge:
                self._edge.poll()

    def _accept_again(self, now_ns: int) -> None:
        """Listen again, some time after a connection could not be taken."""
        if self._accept_ns and now_ns > self._accept_ns:
            self._accept_ns = 0
            self._selector.register(self._listener.sock, selectors.EVENT_READ, None)

    def _renew_listener(self) -> None:
        """Make a new socket if somebody has removed the file of ours."""
        path, before = self._listener.path, None
        try:
            before = self._listener.renew()
        except (OSError, ConfigError) as exc:
            if not self._unreachable:
                log.warning("%s was removed, and cannot be made again: %s", path, exc)
            self._unreachable = True
        if before is not None:
            self._unreachable = False
            self._listener.sock.setblocking(False)
            if not self._accept_ns:
                self._selector.unregister(before)
                self._selector.register(self._listener.sock, selectors.EVENT_READ, None)
            before.close()
            log.warning("%s was removed: listening there again", path)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.sock.accept()
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                self._said.warn("connections not taken", "a connection cannot be taken: %s", exc)
                self._drop_silent()
                self._selector.unregister(self._listener.sock)
                self._accept_ns = clock.now_ns() + _PAUSE_NS
            return
        sock.setblocking(False)
        process = peer_process(sock)
        if not trusted(process.uid, self.store.settings.running.server.allow):
            self._refuse(sock, process.uid)
            return
        connection = _Connection(self._next, sock)
        self.store.sessions.processes[connection.number] = process
        self._next += 1
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _drop_silent(self) -> None:
        """Descriptors are short: drop who is no engine's part, and has said nothing for a while."""
        until_s = clock.now_s() - _SILENT_S
        for connection in list(self._connections.values()):
            if not connection.known and connection.heard_s < until_s:
                self.store.numbers.add("kvstore_refused", "silent")
                self._drop(connection)

    def _refuse(self, sock: socket.socket, uid: int) -> None:
        reason = f"uid {uid} may not attach: [server] allow does not name it"
        self.store.numbers.add("kvstore_refused", "user")
        if uid not in self._strangers and len(self._strangers) < USERS_MAX:
            self._strangers.add(uid)
            log.warning("a process was refused: %s", reason)
        with sock, contextlib.suppress(OSError):
            sock.send(framing.encode(p.Refused(reason, retry=False)))

    def _read(self, connection: _Connection, *, ended: bool = False, more: bool = False) -> None:
        """Act on what a connection says. more: on what has come, of which some was left."""
        data = b"" if more else connection.receive(ended=ended)
        if data is None:
            return
        if not data and not more:
            self._drop(connection)
            return
        until_s = clock.now_s() + self._read_s
        connection.heard_s = clock.now_s()
        if connection.refused or connection.parted:
            connection.last = (connection.last + data)[-len(_GOODBYE) :]
            return
        try:
            for message in connection.decoder.feed(data):
                self.store.on_message(connection.number, message, clock.now_ns())
                if not connection.known and self.store.sessions.of(connection.number):
                    connection.know(self._selector)
                if connection.refused or connection.outbox.bytes > limits.OUTBOX_BYTES_MAX:
                    break
                if clock.now_s() > until_s:
                    self._more[connection.number] = connection
                    break
            if connection.decoder.frames.unfinished_bytes or connection.outbox.bytes > _SMALL_BYTES:
                self._shed()
        except ProtocolError as exc:
            who = self.store.sessions.subject(connection.number)
            self._said.warn("wrong messages", "%s: %s", who, exc)
            self.store.numbers.add("kvstore_refused", "malformed")
            connection.send(p.Refused(str(exc), retry=False), None)
            with contextlib.suppress(OSError):
                connection.outbox.flush(connection.sock)
            self._part(connection, "protocol", str(exc))

    def _shed(self) -> None:
        """Drop who takes most, while all connections together take more than they may."""
        found = list(self._connections.values())
        unfinished = attrgetter("decoder.frames.unfinished_bytes"), "messages that have not ended"
        unread = attrgetter("outbox.bytes"), "answers that are not read"
        for (bytes_of, what), most, reason in (
            (unfinished, limits.UNFINISHED_BYTES_MAX, "input"),
            (unread, limits.OUTBOXES_BYTES_MAX, "outbox"),
        ):
            while (total := sum(map(bytes_of, found))) > most:
                largest = max(found, key=bytes_of)
                text = f"it has {bytes_of(largest)} bytes of {what}, all have {total}"
                line = "%s dropped: %s, expected up to %d"
                who = self.store.sessions.subject(largest.number)
                self._said.warn("connections that take too much", line, who, text, most)
                self.store.numbers.add("kvstore_refused", reason)
                found.remove(largest)
                self._part(largest, "protocol", text)

    def _send(self, number: int, message: framing.Message, fd: int | None) -> None:
        if number == EXPORTER and self._peers is not None:
            self._peers.on_memory(message, fd)
        connection = self._connections.get(number)
        if connection is not None:
            connection.send(message, fd)
            self._unsent[number] = connection
            if isinstance(message, p.Detach) and not self.store.sessions.may_write(number):
                connection.refused = True  # an idle scheduler half reads nothing, but sees an end

    def _flush(self) -> None:
        reads = selectors.EVENT_READ
        for connection in list(self._unsent.values()):
            if connection.outbox:
                try:
                    connection.outbox.flush(connection.sock)
                except OSError:  # it has closed; what it said before that is read, then its end
                    connection.outbox = framing.Outbox()
            if connection.outbox.bytes > limits.OUTBOX_BYTES_MAX:
                who = self.store.sessions.subject(connection.number)
                self._said.warn("connections that do not read", "%s does not read: dropped", who)
                self.store.numbers.add("kvstore_refused", "outbox")
                self._part(connection, "protocol", "it does not read")
                continue
            if connection.refused and not connection.outbox and not connection.parted:
                self._part(connection, "protocol", "it was refused")
                continue
            events = reads | (selectors.EVENT_WRITE if connection.outbox else 0)
            if events != connection.events:
                connection.events = events
                self._selector.modify(connection.sock, events, connection)
            if not connection.outbox:
                self._unsent.pop(connection.number, None)

    def _part(self, connection: _Connection, reason: str, text: str) -> None:
        """Have nothing more to do with a connection.

        What a worker may still write is given to nobody else before it has closed its end: only
        ours is closed then, and what it says is not looked at.
        """
        if not self.store.sessions.may_write(connection.number):
            self._drop(connection)
        elif not connection.parted:
            connection.part()
            self._unsent[connection.number] = connection
            self.store.sessions.turn_away(connection.number, reason, text)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._unsent.pop(connection.number, None)
        self._more.pop(connection.number, None)
        self._selector.unregister(connection.sock)
        number = connection.number
        if connection.last == _GOODBYE:  # its last copy is over
            self.store.sessions.leave(number, "")
        if connection.end is not None:
            self._selector.unregister(connection.end)
        connection.sock.close()
        self.store.on_closed(number, clock.now_ns(), connection.end)
        self._lonely_since = clock.now_s()

    def _shut_down(self) -> None:
        """Tell the engines, give them a moment to close on their own, and keep what they stored."""
        self.health.ends()
        if self._bucket is not None:
            self._bucket.ends = True
        self.store.end_sessions()
        self._leave_all_but_engines()
        self._read_s = _CLOSE_S
        self._receive(())
        deadline = clock.now_s() + _CLOSE_S
        self._flush()
        while self._connections and clock.now_s() < deadline:
            for key, events in self._selector.select(_CLOSE_TICK_S):
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            self._flush()
        self._copy_down()
        self.store.namespaces.close()
        for plugin in self._plugins:
            plugin.close()

    def _leave_all_but_engines(self) -> None:
        """Watch the connections of engines alone: nothing else is answered any more."""
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.data, _Connection):
                self._selector.unregister(key.fileobj)

    def _copy_down(self) -> None:
        """Copy what only memory has to the lower tiers, within a time budget.

        A disk that fails meanwhile and recovers gets the blocks that it did not take once more.
        """
        namespaces, drain = self.store.namespaces, self.store.drain
        self._await_disk()
        started = told = kept = clock.now_s()
        self.store.on_tick(clock.now_ns())  # what has failed until now is not queued
        before, copied, failed = drain.stored(), 0, False
        for _ in drain.look_anew():
            self.health.turned(time.monotonic_ns())
        total = namespaces.queued_blocks
        while namespaces.queued_blocks:
            self.store.on_tick(clock.now_ns())
            self.health.turned(time.monotonic_ns())
            now, stored = clock.now_s(), drain.stored() - before
            kept, copied = (now, stored) if stored > copied else (kept, copied)
            if now - kept >= _FLUSH_S or now - started >= _FLUSH_LIMIT_S:
                break
            if now - told > _PROGRESS_S:
                told = now
                self.health.copied = f"{copied} of {total}"
                log.info("copying blocks that only memory has: %s", self.health.copied)
            failed |= self._disk is not None and self._disk.fails
            if failed and not namespaces.queued_blocks and self._await_disk():
                failed, kept = False, clock.now_s()
                for _ in drain.look_anew():
                    self.health.turned(time.monotonic_ns())
            time.sleep(_BUSY_TICK_S)
        if total:
            log.info("%d blocks were only in memory: copied %d", total, copied)

    def _await_disk(self) -> bool:
        """Wait for a disk that fails, if it is tried again soon; tell whether none fails now."""
        until = clock.now_s() + _BACK_S
        while self._disk is not None and self._disk.fails:
            now = clock.now_s()
            if now >= until or now + self._disk.retry_s > until:
                return False
            self._disk.poll()
            self.health.turned(time.monotonic_ns())
            time.sleep(_BUSY_TICK_S)
        return True


def serve(
    config: Config,
    listener: Listener,
    linger_s: float | None = None,
    systemd: Systemd | None = None,
    source: ConfigFile | None = None,
) -> None:
    """Run a store in this process until SIGTERM or SIGINT; SIGHUP reloads. Closes the listener."""
    with contextlib.closing(listener):
        server = Server(config, listener, linger_s, systemd, source)
        for end in (signal.SIGTERM, signal.SIGINT):
            signal.signal(end, server.stop)
        signal.signal(signal.SIGHUP, server.hang_up)
        collect_young_only()
        try:
            server.run()
        except InvariantBroken:
            # What it knows of its memory is wrong: nothing of it is served or kept any more.
            log.critical("broken invariant: the store ends, and copies nothing down", exc_info=True)
            raise SystemExit(BROKEN_STATUS) from None
