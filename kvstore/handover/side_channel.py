"""The side channel: connections to other stores, with TLS where there is a cluster key.

Who has no key is not heard, and sees a certificate at most. Without a key only loopback is listened
on and dialled, and only this user's processes, and root's, are spoken to.

All of it is polled from the store's loop and nothing here waits; a name is looked up by a thread.
Each poll reads a little of each connection in its turn. What peers leave unfinished, or unread, is
bounded in sum: the connection with most of it is hung up on. A message that cannot be read is
counted, and answered now and then. A peer that sends too much in a second loses its connection; the
listener goes on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.barrier import Barrier
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.handover.cluster_key import ClusterKey
from kvstore.handover.line import CHUNK_BYTES, Line
from kvstore.handover.loopback import host_and_port, is_loopback, may_answer, may_ask
from kvstore.logs import RateLog
from kvstore.wire import peer as m
from kvstore.wire.framing import Message, framed

log = logging.getLogger(__name__)

RATE_MAX = 10_000  # messages of one peer in a second
READ_NS = 5_000_000  # of one poll: engines wait meanwhile
READ_BYTES = 4 * CHUNK_BYTES  # of one connection in one poll
ANSWERS_MAX = 10  # to wrong messages of one peer in a second
LOGGED_MAX = 300  # characters of a wrong message's error
FORGET_NS = 600_000_000_000  # a peer that has said nothing
CAME_MAX = 1024  # peers that came; one more takes the place of that which was silent longest
GREETINGS_MAX = 64  # connections that came and have not proved the key yet
GREETING_NS = 2_000_000_000  # to connect, and to prove the key
UNFINISHED_BYTES_MAX = 64 << 20  # of messages of which not all has come, in sum
UNREAD_BYTES_MAX = 256 << 20  # of what peers do not read, in sum
LOOKUPS_MAX = 8  # names looked up at one time
_ACCEPTS = 16  # in one poll
_RECHECK_NS = 200_000_000  # after there was no descriptor to accept with
_LISTENER = 0  # as the number of a connection

Addresses = Sequence[tuple[int, int, int, str, Any]]
"""As getaddrinfo returns them."""


class Channel:
    """Connections to other stores, by number: those that came, and those that were made."""

    def __init__(
        self,
        key: ClusterKey | None,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        """Raises ConfigError where a key is of no use.

        on_message may raise ProtocolError, which is counted and answered with Refused.

        on_lost(number, reason): an asked peer is gone; a new connect() is a new connection.
        """
        self.counts: Counter[str] = Counter()
        self.address = ""  # host:port, once it listens
        self._key = key
        # Of connections that came, and that were made.
        self._tls = {} if key is None else {came: key.tls(accepts=came) for came in (True, False)}
        self._on_message = on_message
        self._on_lost = on_lost
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        self._listening = False
        self._paused_ns = 0
        self._lines: dict[int, Line] = {}
        self._by_fd: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # of epoll, by descriptor
        self._young: dict[int, int] = {}  # not open yet; until when they have to be
        self._ready: set[int] = set()  # more can be read, though epoll may not tell
        self._last = 0  # the connection that was read last
        self._doomed: list[tuple[int, str]] = []  # to be lost at the next poll
        self._next = _LISTENER + 1
        self._unfinished = self._unread = 0
        self._now_ns = time.monotonic_ns()
        self._found: deque[tuple[int, Addresses | str]] = deque()  # by lookups of names
        self._lookups = 0
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._lines_max = max(4, min(2 * CAME_MAX, soft // 2))
        self._said = RateLog(log)
        self._barrier = Barrier(self._said, self._met_a_bug)

    def __len__(self) -> int:
        """Count the connections, those that are not open yet included."""
        return len(self._lines)

    # Listening and dialling

    def listen(self, host: str, port: int) -> None:
        """Let others ask. Raises ConfigError for a port in use, or an open host without a key."""
        what = f"peer listen {host}:{port}"
        if self._key is None and not is_loopback(host):
            raise ConfigError(
                f"{what}: not a loopback address and no cluster key; "
                "make one with kvstore keygen, or listen on 127.0.0.1"
            )
        try:
            family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if self._key is None and not is_loopback(str(name[0])):
                raise ConfigError(f"{what}: {host} is {name[0]}, not a loopback address")
            listener = socket.create_server((name[0], port), family=family, backlog=128)
        except (OSError, UnicodeError) as exc:
            found = exc.errno if isinstance(exc, OSError) else None
            text = os.strerror(found) if found is not None and found > 0 else exc
            raise ConfigError(f"{what}: {text}") from exc
        listener.setblocking(False)
        self._listener = listener
        at, port = listener.getsockname()[:2]
        self.address = f"[{at}]:{port}" if family == socket.AF_INET6 else f"{at}:{port}"
        self._listen_on(time.monotonic_ns())

    def _listen_on(self, now_ns: int) -> None:
        """Watch the listener while there is room."""
        if self._listener is None:
            return
        room = len(self._lines) < self._lines_max and now_ns >= self._paused_ns
        if room is not self._listening:
            self._listening = room
            change = self._epoll.register if room else self._epoll.unregister
            change(self._listener)

    def _came_young(self) -> list[int]:
        return [number for number in self._young if self._lines[number].came]

    def may_dial(self, address: str) -> str:
        """Say why an address must not be connected to; nothing if it may be."""
        try:
            self._place(address)
        except ConfigError as exc:
            return str(exc)
        return ""

    def _place(self, address: str) -> tuple[str, int]:
        """Return host and port. Raises ConfigError for what is none, or may not be dialled."""
        host, port = host_and_port(address)
        if self._key is None and not is_loopback(host):
            raise ConfigError(f"{address[:100]!r} is not a loopback address and no cluster key")
        return ("127.0.0.1" if host == "localhost" and self._key is None else host), port

    def connect(self, address: str) -> int:
        """Begin to connect to a peer; return its number."""
        line = self._add(came=False)
        try:
            self._resolve(line, *self._place(address))
        except (ConfigError, OSError, ValueError, RuntimeError) as exc:
            reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
            self._doomed.append((line.number, f"{address[:100]!r}: {reason}"))
        return line.number

    def _add(self, *, came: bool) -> Line:
        line = self._lines[self._next] = Line(self._next, came=came)
        self._young[self._next] = time.monotonic_ns() + GREETING_NS
        self._next += 1
        return line

    def _resolve(self, line: Line, host: str, port: int) -> None:
        """Find what a host is; only a name takes time. Raises OSError, ValueError, RuntimeError."""
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except socket.gaierror:
            if self._lookups >= LOOKUPS_MAX:
                raise RuntimeError("too many names are being looked up") from None
            arguments = (line.number, host, port)
            threading.Thread(
                target=self._look_up, args=arguments, name="kvstore-name", daemon=True
            ).start()
            self._lookups += 1
        else:
            self._dial(line, found)

    def _look_up(self, number: int, host: str, port: int) -> None:
        """Run as a thread."""
        try:
            found: Addresses | str = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as exc:
            found = f"name: {exc}"
        self._found.append((number, found))

    def _take_found(self) -> None:
        while self._found:
            number, found = self._found.popleft()
            self._lookups -= 1
            line = self._lines.get(number)
            if line is None:
                continue
            if isinstance(found, str):
                self._lose(number, found)
                continue
            try:
                self._dial(line, found)
            except OSError as exc:
                self._lose(number, f"connection: {exc.strerror}")

    def _dial(self, line: Line, found: Addresses) -> None:
        """Connect to the first of some addresses. Raises OSError."""
        family, _, _, _, name = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        line.use(sock)
        error = sock.connect_ex(name)
        if error not in {0, errno.EINPROGRESS}:
            raise OSError(error, os.strerror(error).lower())
        self._watch(line)

    def _accept(self, now_ns: int) -> None:
        until_ns = time.monotonic_ns() + READ_NS
        for _ in range(_ACCEPTS):
            self._listen_on(now_ns)
            if self._listener is None or not self._listening or time.monotonic_ns() > until_ns:
                return
            try:
                tcp, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._paused_ns = now_ns + _RECHECK_NS
                self._trouble("too_many", f"accept: {exc.strerror}")
                continue
            try:
                self._came(tcp)
            except OSError:  # it is gone
                tcp.close()

    def _came(self, tcp: socket.socket) -> None:
        """Take a connection. Raises OSError."""
        if self._key is None and not may_ask(tcp):
            text = "another user's process connected, and there is no cluster key: refused"
            self._trouble("unauthorised", text)
            tcp.close()
            return
        young = self._came_young()
        if len(young) >= GREETINGS_MAX:
            self._ended(self._lines[young[0]], "others came")
        line = self._add(came=True)
        try:
            line.use(tcp)
            self._greet(line)
            self._watch(line)
        except OSError:
            self._lose(line.number, "connection: gone")
            raise

    def _trouble(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self._said.warn(f"side channel, {kind}", "side channel: %s", text)

    # Stages

    def _greet(self, line: Line) -> None:
        """Begin TLS, if there is a key."""
        if self._key is None:
            line.agree()
            self._opened(line)
        else:
            line.greet(self._tls[line.came])

    def _opened(self, line: Line) -> None:
        """Both ends may speak."""
        del self._young[line.number]
        line.heard_s = self._now_ns // 1_000_000_000
        came = [other for other in self._lines.values() if other.came and other.stage == "open"]
        if line.came and len(came) > min(CAME_MAX, self._lines_max // 2):
            silent = min((other for other in came if other is not line), key=lambda o: o.heard_s)
            self._lose(silent.number, "others came")
        self._flush(line)

    def _advance(self, line: Line) -> bool:
        """Go on until a connection is open; True once it is. Raises OSError."""
        if line.stage == "connecting":
            sock = line.check_connected()
            if self._key is None and not may_answer(sock):
                text = "another user's process listens there, and there is no cluster key"
                raise OSError(0, text)
            self._young[line.number] = time.monotonic_ns() + GREETING_NS
            self._greet(line)
        if line.stage == "greeting" and line.agree():
            self._opened(line)
        return line.stage == "open"

    def _watch(self, line: Line) -> None:
        """Have epoll tell what is waited for."""
        if line.sock is None or line.number not in self._lines:
            return
        fd, events = line.sock.fileno(), line.events
        if fd not in self._asked:
            self._epoll.register(fd, events)
            self._by_fd[fd] = line.number
        elif self._asked[fd] != events:
            self._epoll.modify(fd, events)
        self._asked[fd] = events

    # Turns

    def fds(self) -> Iterator[int]:
        """Go through the descriptors that become readable when poll() has something to do."""
        yield self._epoll.fileno()

    @property
    def waiting(self) -> bool:
        """Tell whether poll() has something to do that no descriptor tells."""
        return bool(self._doomed or self._ready or self._found)

    def send(self, number: int, message: Message) -> None:
        """Send, or drop for a peer that is gone: poll() says that it is lost.

        Nobody is told in here: whoever sends may be going through what would change.
        """
        line = self._lines.get(number)
        if line is None:
            return
        data = framed(m.encode(message))
        line.send(data)
        self._unread += len(data)
        try:
            self._flush(line)
            self._watch(line)
        except OSError as exc:
            self.counts["unsent"] += 1
            self._doomed.append((number, exc.strerror or "send failed"))

    def _flush(self, line: Line) -> None:
        """Send what a peer takes now. Raises OSError."""
        before = line.unread
        try:
            line.flush()
        finally:
            self._unread += line.unread - before

    def poll(self, now_ns: int) -> None:
        """Hand over what has arrived, and say who is gone."""
        self._now_ns = now_ns
        doomed, self._doomed = self._doomed, []
        for number, reason in doomed:
            self._lose(number, reason)
        ready, self._ready = self._ready, set()
        for fd, _ in self._epoll.poll(0):
            ready.add(self._by_fd.get(fd, _LISTENER))
        if _LISTENER in ready or (not self._listening and self._listener is not None):
            self._accept(now_ns)
        ready.discard(_LISTENER)
        self._take_found()
        self._serve(ready, now_ns)
        late_ns = time.monotonic_ns()
        for number in [number for number, due_ns in self._young.items() if late_ns >= due_ns]:
            self._ended(self._lines[number], "timed out")
        self._keep_bounds()
        self._said.tick()

    def _serve(self, ready: set[int], now_ns: int) -> None:
        """Read what connections say, each in its turn."""
        until_ns = time.monotonic_ns() + READ_NS
        for number in sorted(ready, key=lambda number: (number <= self._last, number)):
            if time.monotonic_ns() > until_ns:
                self._ready.add(number)
                continue
            line = self._lines.get(number)
            if line is None:
                continue
            self._last = number
            try:
                if self._advance(line):
                    self._read(line, now_ns, until_ns)  # first: what it said before it closed
                    self._flush(line)
            except OSError as exc:
                self._ended(line, (exc.strerror or str(exc) or "disconnected").lower())
            else:
                self._watch(line)

    def _read(self, line: Line, now_ns: int, until_ns: int) -> None:
        """Take some of what a peer says. Raises OSError."""
        read, number = 0, line.number
        data: bytes | None = b""  # at first, what it has said before
        while data is not None:
            read += len(data)
            try:
                for body in line.frames.feed(data):
                    decode = m.decode_for_producer if line.came else m.decode_for_consumer
                    self._take(line, body, decode, now_ns)
                    if number not in self._lines:
                        return
                    if time.monotonic_ns() > until_ns:
                        break
            except ProtocolError as exc:  # where its next message begins is not known
                self._wrong(line, str(exc))
                self._lose(number, "connection: it sends no messages")
                return
            self._unfinished += line.frames.unfinished_bytes - line.unfinished
            line.unfinished = line.frames.unfinished_bytes
            if read >= READ_BYTES or time.monotonic_ns() > until_ns:
                self._ready.add(number)
                return
            data = line.receive()
            if data == b"":
                raise OSError(0, "disconnected")

    def _take(
        self, line: Line, body: bytes, decode: Callable[[bytes], Message], now_ns: int
    ) -> None:
        second = now_ns // 1_000_000_000
        if line.heard_s != second:
            line.heard_s, line.messages, line.wrong = second, 0, 0
        line.met = True
        line.messages += 1
        if line.messages > RATE_MAX:
            self.counts["too_many"] += 1
            self._said.warn(
                "peers that send too many messages",
                "peer %d: over %d messages in a second",
                line.number,
                RATE_MAX,
            )
            self._lose(line.number, "it sent too many messages")
            return
        with self._barrier.around(
            f"a message of peer {line.number}", lambda: self.give_up(line.number)
        ):
            try:
                self._on_message(line.number, decode(body))
            except ProtocolError as exc:
                self._wrong(line, str(exc))

    def _wrong(self, line: Line, text: str) -> None:
        """Count a wrong message; not all of them are answered."""
        self.counts["malformed"] += 1
        self._said.warn("wrong messages of peers", "peer %d: %r", line.number, text[:LOGGED_MAX])
        line.wrong += 1
        if line.came and line.wrong <= ANSWERS_MAX:
            self.send(line.number, m.Refused(f"not understood: {text}"[: m.TEXT_MAX]))

    def _keep_bounds(self) -> None:
        lines = self._lines.values()
        while self._unfinished > UNFINISHED_BYTES_MAX:
            most = max(lines, key=lambda line: line.unfinished)
            self._hang_up(most, f"{most.unfinished} bytes unfinished")
        while self._unread > UNREAD_BYTES_MAX:
            most = max(lines, key=lambda line: line.unread)
            self._hang_up(most, f"{most.unread} bytes unread")

    def _hang_up(self, line: Line, why: str) -> None:
        self._trouble("too_many", f"connection {line.number} is closed: {why}")
        self._lose(line.number, f"connection: {why}")

    # Ends

    def _ended(self, line: Line, why: str) -> None:
        """A connection has ended by itself; one that came and proved nothing is a stranger's."""
        if line.came and line.stage == "greeting":
            self._trouble("unauthorised", f"connection {line.number} has not proved the key: {why}")
        self._lose(line.number, f"connection: {why}")

    def _lose(self, number: int, reason: str) -> None:
        line = self._lines.pop(number, None)
        if line is None:
            return
        self._young.pop(number, None)
        self._unfinished -= line.unfinished
        self._unread -= line.unread
        if self._by_fd.get(line.fd) == number:
            del self._by_fd[line.fd]
            del self._asked[line.fd]
            with contextlib.suppress(OSError):  # TLS that cannot begin has closed it
                self._epoll.unregister(line.fd)
        line.close()
        if line.met:
            with self._barrier.around(f"the end of peer {number}"):
                self._on_lost(number, reason)

    def give_up(self, number: int) -> None:
        """Hang up on a peer that has met a bug of ours."""
        self._lose(number, "its messages met a bug of the store")

    def drop(self, number: int) -> None:
        """Close a connection."""
        self._lose(number, "dropped")

    def forget_silent(self, now_ns: int) -> None:
        """Forget who came and has said nothing for long."""
        limit_s = (now_ns - FORGET_NS) // 1_000_000_000
        came = [line for line in self._lines.values() if line.came and line.stage == "open"]
        for line in came:
            if line.heard_s < limit_s:
                self._lose(line.number, "silent")

    @property
    def came(self) -> int:
        """Count the connections of peers that came."""
        return sum(line.came and line.stage == "open" for line in self._lines.values())

    def _met_a_bug(self) -> None:
        self.counts["internal"] += 1

    def close(self) -> None:
        """End everything, at once."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()
