"""The store's side of its exporter: keeps one running, the socket to it, and what is open with it.

down --poll(), after a pause--> starting --Ready--> up
  ^                                |                 |  it ended, or restart(): too much in
  |                                v                 v  quarantine, no answer, or close()
  +-----------its end------------ ending <-----------+

When a process has ended, each of its transfers ends with an error: not earlier, since it could
still write until then. The next process gets the same extents, and no peers: they come by
themselves. Metadata that a process ended with pauses, so that others get on.

Peers can overwrite its memory, so it may send anything; an impossible message ends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import msgspec

from kvstore.core.errors import ProtocolError, TierIOError, check
from kvstore.logs import RateLog
from kvstore.wire.framing import Decoder, Message, Outbox, encode
from tiers.nixl import messages as m
from tiers.nixl.ucx import environment

log = logging.getLogger(__name__)

OUTBOX_BYTES_MAX = 64 << 20
ROOM_BYTES = 4 << 20  # not read: with more, what can wait is not sent
_START_NS = 60_000_000_000
_PAUSE_MIN_NS = 100_000_000
_PAUSE_MAX_NS = 10_000_000_000
_STEADY_NS = 30_000_000_000  # after a life this long it starts again without a pause
_HOLD_MIN_NS = 10_000_000_000  # of metadata that a process has ended with; then twice as long
_HOLD_MAX_NS = 3600_000_000_000
_HELD_MAX = 256  # pieces of such metadata that are remembered
_ASK_NS = 2_000_000_000  # without a message, then a Ping
SILENT_NS = 10_000_000_000  # without a message, then it is killed
_TEXT_MAX = 500
MAP_AGAIN_NS = 10_000_000_000  # between two attempts to map memory
_END_S = 0.2
_KILLED_S = 2.0  # the memory of a killed process goes first, which takes time on a busy machine
_READ_BYTES = 1 << 18
_READS_MAX = 16  # of one receive(): it may send faster than the store reads
_SHARED = 2  # standard error: what it prints belongs in the store's log

State = Literal["down", "starting", "up", "ending"]


class Down(msgspec.Struct, frozen=True):
    """The process has ended; its name, and all addresses, mean nothing any more."""

    reason: str


Event = m.Ready | m.Mapped | m.Ended | Down


class Child:
    """One exporter process, from its start to its end, and the socket to it. Nothing blocks."""

    def __init__(
        self, epoll: select.epoll, service: str, devices: str, transports: str | None
    ) -> None:
        """Start it. epoll: readable when there is something to do. Others as of an Exporter.

        Raises TierIOError.
        """
        try:
            ours, its = socket.socketpair()
        except OSError as exc:
            raise TierIOError(f"cannot start the exporter: {exc}") from exc
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "tiers.nixl.exporter", service],
                stdin=its.fileno(),
                stdout=_SHARED,
                env=environment(devices, transports),
                start_new_session=True,
            )
        except OSError as exc:
            ours.close()
            raise TierIOError(f"cannot start the exporter: {exc}") from exc
        finally:
            its.close()
        try:
            self._end = os.pidfd_open(self._process.pid)
        except OSError as exc:
            self._process.kill()
            self._process.wait()
            ours.close()
            raise TierIOError(f"cannot watch the exporter: {exc}") from exc
        ours.setblocking(False)
        self._sock = ours
        self._decoder = Decoder(m.ToStore)
        self.outbox = Outbox()
        self._open = True  # its end of the socket
        self._writing = False
        self._epoll = epoll
        epoll.register(self._sock, select.EPOLLIN)
        epoll.register(self._end, select.EPOLLIN)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message as soon as it fits; fd: sent along, and has to stay open until then."""
        self.outbox.put(encode(message), fd)
        self.flush()

    def flush(self) -> None:
        """Send as much as fits."""
        if not self._open:
            return
        try:
            self.outbox.flush(self._sock)
        except OSError:  # it is ending; ended() tells when it has
            return
        writing = bool(self.outbox)
        if writing is not self._writing:
            self._writing = writing
            events = select.EPOLLIN | (select.EPOLLOUT if writing else 0)
            self._epoll.modify(self._sock, events)

    def receive(self) -> Iterator[Message]:
        """Yield its messages. Raises ProtocolError for invalid ones."""
        for _ in range(_READS_MAX if self._open else 0):
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._open = False
                self._epoll.unregister(self._sock)
                self.kill()  # without the socket it is of no use
                return
            yield from self._decoder.feed(data)

    def kill(self) -> None:
        """Kill it; until ended() tells that it has, it may still write to memory."""
        self._process.kill()

    def hang_up(self) -> None:
        """Close the sending side: the process ends by itself, unless it is stopped."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def ended(self, wait_s: float = 0.0) -> str | None:
        """Return why it has ended; None while it runs. wait_s: how long to wait for its end."""
        try:
            code = self._process.wait(wait_s) if wait_s else self._process.poll()
        except subprocess.TimeoutExpired:
            return None
        if code is None:
            return None
        if code >= 0:
            return f"it ended with {code}"
        return f"it was ended by {signal.Signals(-code).name}"

    def close(self) -> None:
        """Close the descriptors, after its end."""
        if self._open:
            self._epoll.unregister(self._sock)
        self._epoll.unregister(self._end)
        self._sock.close()
        os.close(self._end)


class _Extent(msgspec.Struct):
    fd: int
    bytes: int
    writable: bool
    leaving: bool = False
    failed: bool = False  # the last attempt to map it has
    again_ns: int | None = None  # when to try again; None: it is mapped, or asked for


class _Introductions:
    """Which peers a process knows, and metadata that processes have ended with."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}  # peers, and a hash of their metadata
        self.waiting: dict[str, bytes] = {}  # peers whose metadata pauses
        self.meets: str | None = None  # the peer whose metadata is being read
        self._held: dict[bytes, tuple[int, int]] = {}  # by its hash: for how long, until when

    def add(self, peer: str, metadata: bytes, now_ns: int) -> bool:
        """Tell whether a peer's metadata may be read now; else the peer waits."""
        found = hashlib.sha256(metadata).digest()
        _, until_ns = self._held.get(found, (0, 0))
        if now_ns < until_ns:
            self.waiting[peer] = metadata
            return False
        self.waiting.pop(peer, None)
        self.known[peer] = found
        return True

    def end(self, now_ns: int) -> None:
        """Forget the peers of a process that has ended; the one that it was meeting pauses."""
        found = None if self.meets is None else self.known.get(self.meets)
        if found is not None:
            pause_ns = 2 * self._held.pop(found, (0, 0))[0]
            pause_ns = min(max(_HOLD_MIN_NS, pause_ns), _HOLD_MAX_NS)
            self._held[found] = pause_ns, now_ns + pause_ns
            if len(self._held) > _HELD_MAX:
                del self._held[next(iter(self._held))]
            text = "the exporter has ended while it read how to reach %r: not for %.0f s again"
            log.warning(text, self.meets, pause_ns / 1e9)
        self.meets = None
        self.known.clear()
        self.waiting.clear()


class Exporter:
    """Called from one thread, which lives as long as the store. Nothing blocks but close().

    Results come from poll(), each transfer's exactly once.
    """

    def __init__(
        self,
        service: str,
        devices: str = "lo",
        transports: str | None = None,
        *,
        asleep: bool = False,
    ) -> None:
        """The first poll() starts the process. asleep: the first one after wake().

        service: what its names begin with. devices: network devices that UCX uses; every host that
        reaches one can read and write its memory. transports: UCX_TLS; None: UCX chooses.
        """
        self._how = service, devices, transports
        self._asleep = asleep
        self._epoll = select.epoll()
        self._child: Child | None = None
        self._state: State = "down"
        self.starts = 0
        self._closed = False
        self._why = ""  # the process is being ended
        self.broken = ""  # why the last one ended before it was up; empty: it did not
        self._extents: dict[int, _Extent] = {}
        self._peers = _Introductions()
        self._open: dict[int, int] = {}  # transfers, and the bytes that they move
        self._abandoned: dict[int, int] = {}  # those of them that nothing waits for
        self._events: list[Event] = []
        self._next_id = 1
        self._start_ns = 0  # when to start, or when it was started
        self._pause_ns = 0
        self._silent_ns = 0  # how long it has said nothing, as far as we have looked
        self._looked_ns = 0
        self._asked = False  # it owes a Ping
        self._said = RateLog(log)

    def fileno(self) -> int:
        """Return a descriptor that is readable when poll() has something to do."""
        return self._epoll.fileno()

    def wait_s(self, now_ns: int) -> float:
        """Return when to call poll() at the latest; infinity: when the descriptor says so."""
        if self._events:
            return 0.0
        if self._state == "ending" or (self._state == "down" and (self._closed or self._asleep)):
            return math.inf
        due = {
            "down": self._start_ns,
            "starting": self._start_ns + _START_NS,
            "up": self._looked_ns + _ASK_NS,
        }
        return max(0, due[self._state] - now_ns) / 1e9

    def wake(self) -> None:
        """Run the process from now on."""
        self._asleep = False

    @property
    def pid(self) -> int | None:
        """Id of the process."""
        return None if self._child is None else self._child.pid

    @property
    def is_up(self) -> bool:
        """Tell whether its process can be used."""
        return self._state == "up"

    @property
    def has_room(self) -> bool:
        """Tell whether its process reads what it is sent."""
        return self._child is None or self._child.outbox.bytes < ROOM_BYTES

    @property
    def quarantined_bytes(self) -> int:
        """Memory of abandoned transfers that have not ended."""
        return sum(self._abandoned.values())

    # Requests of the store

    def map(self, extent: int, fd: int, size: int, *, writable: bool) -> None:
        """Let peers reach the first `size` bytes of a sealed memfd, in this process and the next.

        Mapped comes for each process anew: addresses differ; with a text: it cannot be mapped, and
        is tried again. The descriptor stays open until one with neither has come.
        """
        check(extent not in self._extents, f"extent {extent} is mapped already")
        self._extents[extent] = _Extent(fd, size, writable)
        self._send_extent(extent)

    def unmap(self, extent: int) -> None:
        """Unmap an extent once no transfer uses it; Mapped says when. Open transfers fail."""
        check(extent in self._extents, f"extent {extent} is not mapped")
        found = self._extents[extent]
        found.leaving = True
        if found.again_ns is not None or self._state == "down":
            self._gone(extent)
        elif self._running:
            self._send(m.Map(extent))

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Learn how to reach a peer now, in this process."""
        if self._running and self._peers.add(peer, metadata, self._looked_ns):
            self._send(m.Peer(peer, metadata))

    def remove_peer(self, peer: str) -> None:
        """Forget a peer; open transfers with it fail once nothing of them is under way."""
        self._peers.waiting.pop(peer, None)
        if self._peers.known.pop(peer, None) is not None and self._running:
            self._send(m.Peer(peer, None))

    def start(self, move: m.Transfer | m.Fill) -> int:
        """Start a transfer; returns its id, which the Ended will have."""
        number = self._next_id
        self._next_id += 1
        if self._running:
            if move.peer in self._peers.waiting:
                self.add_peer(move.peer, self._peers.waiting[move.peer])
            self._open[number] = move.moved_bytes
            self._send(msgspec.structs.replace(move, id=number))
        else:
            self._events.append(m.Ended(number, 0, "failed", "the exporter is not running"))
        return number

    def abandon(self, number: int) -> None:
        """Stop waiting for a transfer: our side's blocks are in quarantine until it ends."""
        if number in self._open and number not in self._abandoned:
            self._abandoned[number] = self._open[number]
            if self._running:
                self._send(m.Abandon(number))

    def restart(self, why: str) -> None:
        """Start a new process: open transfers and quarantines end, peers need the new name."""
        if self._child is not None and self._running:
            log.warning("ending the exporter: %s", why)
            self.broken = self.broken or (why if self._state == "starting" else "")
            self._state = "ending"
            self._why = why
            self._child.kill()

    def close(self) -> list[Event]:
        """End the process, within three seconds; returns the last events. Safe to call twice."""
        self._closed = True
        child = self._child
        if child is not None:
            self._why = self._why or "the store closes it"
            child.hang_up()
            if child.ended(_END_S) is None:
                child.kill()
            if child.ended(_KILLED_S) is None:
                log.error("the exporter, process %d, does not end", child.pid)
            self._on_process_end(child)
        for extent in list(self._extents):
            self._gone(extent)
        self._epoll.close()
        events, self._events = self._events, []
        return events

    # Messages of the process

    def poll(self, now_ns: int) -> list[Event]:
        """Drive the process; returns what has happened."""
        if self._closed:
            return []
        if self._child is None and now_ns >= self._start_ns and not self._asleep:
            self._start(now_ns)
        self._said.tick()
        child = self._child
        if child is not None:
            # A machine that stood still has not been silent.
            self._silent_ns += min(now_ns - self._looked_ns, _ASK_NS)
            self._looked_ns = now_ns
            told = bool(self._epoll.poll(0))  # by its socket, or of its end
            if told and self._hear(child):
                self._silent_ns, self._asked = 0, False
            if told and child.ended() is not None:
                self._on_process_end(child)
                self._pause(now_ns)
            else:
                child.flush()
                self._map_again(now_ns)
                self._watch(child, now_ns)
        events, self._events = self._events, []
        return events

    def _start(self, now_ns: int) -> None:
        try:
            child = Child(self._epoll, *self._how)
        except TierIOError as exc:
            self.broken = str(exc)
            self._events.append(Down(self.broken))
            self._pause(now_ns)
            return
        self.starts += 1
        self._child, self._state, self._start_ns = child, "starting", now_ns
        self._why = ""
        self._silent_ns, self._looked_ns, self._asked = 0, now_ns, False
        for extent in self._extents:
            self._send_extent(extent)

    def _pause(self, now_ns: int) -> None:
        steady = now_ns - self._start_ns > _STEADY_NS
        self._pause_ns = 0 if steady else min(
            max(_PAUSE_MIN_NS, 2 * self._pause_ns), _PAUSE_MAX_NS
        )  # fmt: skip
        self._start_ns = now_ns + self._pause_ns

    def _map_again(self, now_ns: int) -> None:
        """The limit of locked memory may have been raised, or others may need less."""
        for number, extent in self._extents.items():
            if extent.again_ns is not None and now_ns >= extent.again_ns:
                self._send_extent(number)

    def _watch(self, child: Child, now_ns: int) -> None:
        """End a process that does not work."""
        if self._state == "starting" and now_ns - self._start_ns > _START_NS:
            self.restart(f"it has not started within {_START_NS / 1e9:.0f} s")
        if self._asked and self._silent_ns >= SILENT_NS:
            self.restart(f"it has not answered for {SILENT_NS / 1e9:.0f} s")
        elif self._state == "up" and not self._asked and self._silent_ns >= _ASK_NS:
            self._asked = True
            self._send(m.Ping())
        if child.outbox.bytes > OUTBOX_BYTES_MAX:
            self.restart("it does not read")

    @property
    def _running(self) -> bool:
        return self._state in {"starting", "up"}

    def _send(self, message: Message, fd: int | None = None) -> None:
        if self._child is not None:
            self._child.send(message, fd)

    def _send_extent(self, number: int) -> None:
        if self._running:
            extent = self._extents[number]
            extent.again_ns = None
            self._send(m.Map(number, extent.bytes, extent.writable), extent.fd)

    def _hear(self, child: Child) -> bool:
        heard = False
        try:
            for message in child.receive():
                heard = True
                self._on(message)
        except ProtocolError as exc:
            self.restart(f"invalid message: {exc}")
        return heard

    def _on(self, message: Message) -> None:
        """Act on a message; a Ping needs nothing more, since any message shows that it works."""
        match message:
            case m.Ended(_, _, error, text):
                self._on_ended(message)
                if error in {"refused", "failed"}:  # the side channel tells of a peer that is gone
                    line = "the exporter could not move blocks from or to another store: %r"
                    self._said.warn("transfers that failed", line, text[:_TEXT_MAX])
            case m.Ready():
                if self._running:
                    self._state, self.broken = "up", ""
                self._events.append(message)
            case m.Mapped():
                self._on_extent(message)
            case m.Meets(peer):
                self._peers.meets = peer
            case m.Fatal(text):
                self._why = text[:_TEXT_MAX]

    def _on_extent(self, message: m.Mapped) -> None:
        number, mapped = message.extent, message.address is not None
        extent = self._extents.get(number)
        if extent is None or not (mapped or message.text or extent.leaving):
            what = "mapped" if mapped else "unmapped"
            raise ProtocolError(f"extent {number} {what}, which was not asked for")
        if extent.leaving and not mapped:  # or it could not be mapped
            self._gone(number)
            return
        if not mapped:
            if not extent.failed:
                log.error("peers cannot reach extent %d: %r", number, message.text[:_TEXT_MAX])
            extent.again_ns = self._looked_ns + MAP_AGAIN_NS
        extent.failed = not mapped
        self._events.append(message)

    def _on_ended(self, message: m.Ended) -> None:
        if self._open.pop(message.id, None) is None:
            raise ProtocolError(f"the end of transfer {message.id}, which is not open")
        self._abandoned.pop(message.id, None)
        self._events.append(message)

    def _on_process_end(self, child: Child) -> None:
        """End all that was open."""
        self._hear(child)  # its last messages
        reason = ": ".join(filter(None, (self._why, child.ended())))
        if not self._closed:
            log.warning("the exporter is down: %s", reason)
        if self._state == "starting":
            self.broken = f"the exporter does not start: {reason}"
        child.close()
        self._child, self._state = None, "down"
        self._peers.end(self._looked_ns)
        for number in list(self._open):
            self._on_ended(m.Ended(number, 0, "failed", f"the exporter is down: {reason}"))
        for extent in [number for number, found in self._extents.items() if found.leaving]:
            self._gone(extent)
        self._events.append(Down(reason))

    def _gone(self, extent: int) -> None:
        del self._extents[extent]
        self._events.append(m.Mapped(extent))
