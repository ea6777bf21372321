"""The gate: every byte of the side channel passes here, between TCP and ZeroMQ in this process.

    peers <--TCP--> gate <--unix sockets--> ZeroMQ's thread <--queues--> the store's turns

ZeroMQ reads what comes as fast as it can, into queues whose limit counts messages, and one that
is full when its peer ends aborts the process. So peers do not reach it. The gate lets in as much
as the store takes: a little in one go, and no more before the queues are empty. It hangs up on
whoever leaves too much unfinished, or unread, and ends a connection towards ZeroMQ in a way that
it survives: half of it first, the rest when ZeroMQ has closed its end.

Nothing here waits; a name is looked up by a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.handover.loopback import host_and_port, is_loopback, may_answer, may_ask

CHUNK_BYTES = 64 << 10  # of one connection in one go
LET_IN_BYTES = 256 << 10  # of all of them, before the queues are empty again
UNFINISHED_BYTES_MAX = 64 << 20  # of messages of which not all has come, in sum
UNREAD_BYTES_MAX = 256 << 20  # of what peers do not read, in sum
CONNECTIONS_MAX = 1024
CONNECT_NS = 2_000_000_000
LINGER_NS = 5_000_000_000  # for what was said to a peer before ZeroMQ closed its end
LOOKUPS_MAX = 8  # names looked up at one time
_ACCEPTS = 16  # in one go
_SENDS = 16  # of one connection in one go
_RECHECK_NS = 200_000_000  # after there was no descriptor to accept with
_DESCRIPTORS_EACH = 3  # TCP, and two ends of a unix socket
_BROKEN = select.EPOLLERR | select.EPOLLHUP
_KNOCKS = 128  # at a door, in one go: any process can find it
_NAMES = 8  # tries
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end: pid, uid, gid
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is not sent is forgotten

Addresses = Sequence[tuple[int, int, int, str, Any]]  # as getaddrinfo returns them


class _Line(msgspec.Struct, eq=False):
    """One connection. Inward is towards ZeroMQ."""

    number: int
    name: str = ""  # of its end towards ZeroMQ
    tcp: socket.socket | None = None
    inner: socket.socket | None = None
    door: socket.socket | None = None  # where ZeroMQ will connect to
    connected: bool = False
    due_ns: int = 0  # when it has to be connected, or gone
    ended: str = ""  # of TCP, and why
    inward: memoryview = memoryview(b"")
    outward: memoryview = memoryview(b"")
    unfinished: int = 0  # bytes let in since a message of it was taken
    unread: int = 0  # bytes of messages to it that have not gone out


class Gate:
    """All connections, by number. Called from one thread."""

    def __init__(self, *, keyed: bool) -> None:
        """keyed: there is a key, so who is at the other end is for ZeroMQ to find out.

        Without one only loopback is listened on and dialled, and only this user's processes, and
        root's, are spoken to.
        """
        self._keyed = keyed
        self._epoll = select.epoll()
        self._name = f"\0kvstore-gate-{secrets.token_hex(8)}"
        self._listener: socket.socket | None = None
        self._listening = False
        self._paused_ns = 0
        self._lines: dict[int, _Line] = {}
        self._by_fd: dict[int, _Line] = {}
        self._by_name: dict[str, int] = {}  # of those that came
        self._asked: dict[int, int] = {}  # of epoll, by descriptor
        self._last = 0  # who was let in last
        self._due: set[int] = set()
        self._let_in = 0
        self._unfinished = self._unread = 0
        self._next = 1
        self._now_ns = 0
        self._ends: list[tuple[int, str]] = []
        self._found: deque[tuple[int, Addresses | str]] = deque()  # by lookups of names
        self._lookups = 0
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._lines_max = max(4, min(CONNECTIONS_MAX, soft // 2 // _DESCRIPTORS_EACH))
        self.trouble: list[tuple[str, str]] = []  # kind and text, since it was last looked at

    def fileno(self) -> int:
        """Return a descriptor that can be read when poll() has something to do."""
        return self._epoll.fileno()

    def __len__(self) -> int:
        """Count the connections."""
        return len(self._lines)

    @property
    def inside(self) -> str:
        """Where ZeroMQ listens, for the gate alone."""
        return f"ipc://@{self._name[1:]}"

    def number_of(self, descriptor: int) -> int | None:
        """Return which connection a descriptor of ZeroMQ's leads to, as long as it is open."""
        try:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                name = end.getpeername()
        except OSError:
            return None
        return self._by_name.get(name.decode(errors="replace") if isinstance(name, bytes) else name)

    # Listening

    def listen(self, host: str, port: int) -> str:
        """Bind, and return host:port. Raises ConfigError."""
        what = f"peer listen {host}:{port}"
        try:
            family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if not self._keyed and not is_loopback(str(name[0])):
                raise ConfigError(f"{what}: {host} is {name[0]}, not a loopback address")
            listener = socket.create_server((name[0], port), family=family, backlog=128)
        except (OSError, UnicodeError) as exc:
            found = exc.errno if isinstance(exc, OSError) else None
            known = found is not None and found > 0
            raise ConfigError(f"{what}: {os.strerror(found) if known else exc}") from exc  # type: ignore[arg-type]
        listener.setblocking(False)
        self._listener = listener
        at, port = listener.getsockname()[:2]
        return f"[{at}]:{port}" if family == socket.AF_INET6 else f"{at}:{port}"

    def _accept(self) -> None:
        if self._listener is None:
            return
        room = self._now_ns >= self._paused_ns and len(self._lines) < self._lines_max
        if room is not self._listening:
            self._listening = room
            if room:
                self._epoll.register(self._listener, select.EPOLLIN)
            else:
                self._epoll.unregister(self._listener)
        for _ in range(_ACCEPTS if room else 0):
            try:
                tcp, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._pause(f"accept: {exc.strerror}")
                return
            if not self._keyed and not _is_ours(tcp, may_ask):
                text = "another user's process connected, and there is no cluster key: refused"
                self.trouble.append(("stranger", text))
                tcp.close()
            elif not self._pass_on(tcp):
                return

    def _pass_on(self, tcp: socket.socket) -> bool:
        line = self._add(_Line(self._next, tcp=tcp, connected=True))
        try:
            line.inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            line.inner.setblocking(False)
            line.name = self._bind(line.inner)
            line.inner.connect(self._name)
            self._watch(line, tcp)
            self._watch(line, line.inner)
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as exc:  # ZeroMQ is behind, or there are no descriptors
            self._bury(line)
            self._pause(f"a connection could not be passed on: {exc.strerror}")
            return False
        self._by_name[line.name] = line.number
        self._ask(line)
        return True

    def _bind(self, sock: socket.socket) -> str:
        """Name a socket. All users see the names that there are: this one follows from none.

        Raises OSError.
        """
        for left in reversed(range(_NAMES)):
            name = f"{self._name}-{secrets.token_hex(8)}"
            try:
                sock.bind(name)
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE or not left:
                    raise
            else:
                break
        return name

    def _pause(self, why: str) -> None:
        self._paused_ns = self._now_ns + _RECHECK_NS
        self.trouble.append(("full", why))

    def _add(self, line: _Line) -> _Line:
        self._next = line.number + 1
        self._lines[line.number] = line
        return line

    # Dialling

    def dial(self, address: str) -> tuple[int, str]:
        """Begin to connect; return a number, and where ZeroMQ has to connect to.

        Raises ConfigError for what is no address or may not be dialled, OSError.
        """
        host, port = self.may_dial(address)
        line = self._add(_Line(self._next))
        try:
            line.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            line.name = self._bind(line.door)
            line.door.listen(_KNOCKS)
            self._watch(line, line.door)
            self._resolve(line, host, port)
        except BaseException:
            self._bury(line)
            raise
        return line.number, f"ipc://@{line.name[1:]}"

    def may_dial(self, address: str) -> tuple[str, int]:
        """Return host and port. Raises ConfigError for what is none, or may not be dialled."""
        host, port = host_and_port(address)
        if not self._keyed and not is_loopback(host):
            raise ConfigError(f"{address[:100]!r} is not a loopback address and no cluster key")
        return ("127.0.0.1" if host == "localhost" and not self._keyed else host), port

    def _resolve(self, line: _Line, host: str, port: int) -> None:
        """Find what a host is; only a name takes time."""
        self._delay(line, CONNECT_NS)
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except socket.gaierror:
            pass
        except ValueError as exc:
            self._end(line, f"name: {exc}")
            return
        else:
            self._connect(line, found)
            return
        if self._lookups >= LOOKUPS_MAX:
            self._end(line, "too many names are being looked up")
            return
        arguments = (line.number, host, port)
        try:
            threading.Thread(
                target=self._look_up, args=arguments, name="kvstore-name", daemon=True
            ).start()
        except RuntimeError as exc:  # the machine has no more threads
            self._end(line, f"name: {exc}")
            return
        self._lookups += 1

    def _look_up(self, number: int, host: str, port: int) -> None:
        """Run as a thread."""
        try:
            found: Addresses | str = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as exc:
            found = f"name: {exc}"
        self._found.append((number, found))

    def _connect(self, line: _Line, found: Addresses) -> None:
        family, _, _, _, name = found[0]
        line.tcp = socket.socket(family, socket.SOCK_STREAM)
        line.tcp.setblocking(False)
        self._watch(line, line.tcp)
        error = line.tcp.connect_ex(name)
        if error not in {0, errno.EINPROGRESS}:
            self._end(line, os.strerror(error).lower())
        self._ask(line)

    def _on_connected(self, line: _Line, tcp: socket.socket) -> None:
        error = tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._end(line, os.strerror(error).lower())
        elif not self._keyed and not _is_ours(tcp, may_answer):
            self._end(line, "another user's process listens there, and there is no cluster key")
        else:
            line.connected = True
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._in_time(line)

    def _on_knock(self, line: _Line, door: socket.socket) -> None:
        """ZeroMQ has connected; nobody else of this process would. Others are sent away."""
        for _ in range(_KNOCKS):
            try:
                inner, _ = door.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                self._end(line, os.strerror(exc.errno or 0).lower())
                return
            credentials = inner.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, _, _ = _CREDENTIALS.unpack(credentials)
            if pid == os.getpid():
                self._unwatch(door)
                line.door, line.inner = None, inner
                self._watch(line, inner)
                return
            inner.close()

    # What passes

    def sending(self, number: int, size: int) -> None:
        """A message of this many bytes is handed to ZeroMQ for a connection."""
        line = self._lines.get(number)
        if line is not None and line.inner is not None:
            line.unread += size
            self._unread += size

    def took(self, number: int) -> None:
        """A message of a connection has been taken from ZeroMQ."""
        line = self._lines.get(number)
        if line is not None:
            self._unfinished -= line.unfinished
            line.unfinished = 0

    def drained(self) -> None:
        """ZeroMQ's queues are empty: more may be let in."""
        self._let_in = 0

    def poll(self, now_ns: int) -> list[tuple[int, str]]:
        """Pass on what may pass; return who is gone, and why.

        All that ZeroMQ will have of them is in its queues then.
        """
        self._now_ns = now_ns
        ready: set[int] = set()
        for fd, events in self._epoll.poll(0):
            line = self._by_fd.get(fd)
            if line is not None:
                self._on_event(line, fd, events)
                ready.add(line.number)
        self._accept()
        self._take_found()
        for number in [n for n in self._due if now_ns >= self._lines[n].due_ns]:
            self._overdue(self._lines[number])
        self._pass(ready)
        self._keep_bounds()
        ends, self._ends = self._ends, []
        return ends

    def _pass(self, ready: set[int]) -> None:
        """Pass on what connections have to say, each in its turn."""
        for number in ready & self._lines.keys():
            self._pass_out(self._lines[number])
        for number in sorted(ready, key=lambda number: (number <= self._last, number)):
            if self._let_in >= LET_IN_BYTES:
                break
            if (line := self._lines.get(number)) is not None:
                self._last = number
                self._pass_in(line)
        for number in ready & self._lines.keys():
            self._ask(self._lines[number])

    def _on_event(self, line: _Line, fd: int, events: int) -> None:
        if line.door is not None and fd == line.door.fileno():
            self._on_knock(line, line.door)
        elif line.tcp is not None and fd == line.tcp.fileno():
            if not line.connected:
                self._on_connected(line, line.tcp)
            elif events & _BROKEN and (line.inward or not events & select.EPOLLIN):
                self._end(line, "disconnected")
        elif line.inner is not None and events & _BROKEN and line.outward:
            self._last_words(line, line.inner)

    def _last_words(self, line: _Line, inner: socket.socket) -> None:
        """Take what ZeroMQ said before it closed its end, though the peer does not read now."""
        words = [bytes(line.outward)]
        with contextlib.suppress(OSError):
            while data := inner.recv(CHUNK_BYTES):
                words.append(data)
        line.outward = memoryview(b"".join(words))
        self._inner_gone(line)

    def _take_found(self) -> None:
        while self._found:
            number, found = self._found.popleft()
            self._lookups -= 1
            line = self._lines.get(number)
            if line is None or line.ended:
                continue
            if isinstance(found, str):
                self._end(line, found)
                continue
            try:
                self._connect(line, found)
            except OSError as exc:
                self._end(line, exc.strerror or "no socket")

    def _pass_in(self, line: _Line) -> None:
        """Let a connection's bytes in, one chunk of them."""
        if line.inner is None:
            return
        if line.inward:
            self._to_inner(line, line.inner)
        if line.inward or line.tcp is None or not line.connected:
            return
        try:
            data = line.tcp.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(line, "disconnected")
            return
        self._let_in += len(data)
        self._unfinished += len(data)
        line.unfinished += len(data)
        line.inward = memoryview(data)
        self._to_inner(line, line.inner)

    def _to_inner(self, line: _Line, inner: socket.socket) -> None:
        try:
            line.inward = line.inward[inner.send(line.inward) :]
        except BlockingIOError:
            return
        except OSError:  # ZeroMQ has closed its end; what it said before is passed out
            line.inward = memoryview(b"")
        if line.ended and not line.inward:
            self._half_close(line)

    def _pass_out(self, line: _Line) -> None:
        """Send what ZeroMQ says, as far as the peer reads."""
        for _ in range(_SENDS):
            if not self._flush(line) or line.inner is None or not (line.connected or line.ended):
                return
            try:
                data = line.inner.recv(CHUNK_BYTES)
            except BlockingIOError:
                self._unread -= line.unread  # all of it has gone
                line.unread = 0
                return
            except OSError:
                data = b""
            if not data:
                self._inner_gone(line)
                return
            if not line.ended:
                line.outward = memoryview(data)

    def _flush(self, line: _Line) -> bool:
        """Send what is to go out; tell whether all of it has."""
        if not line.outward or line.tcp is None:
            return True
        try:
            sent = line.tcp.send(line.outward)
        except BlockingIOError:
            return False
        except OSError:
            self._end(line, "disconnected")
            return True
        line.outward = line.outward[sent:]
        gone = min(sent, line.unread)
        line.unread -= gone
        self._unread -= gone
        if line.inner is None and line.door is None and not line.outward:
            self._bury(line)
        return not line.outward

    def _ask(self, line: _Line) -> None:
        """Have epoll tell what is waited for."""
        if line.tcp is not None:
            reads = line.connected and line.inner is not None and not line.inward
            writes = bool(line.outward) or not line.connected
            self._want(line.tcp, select.EPOLLIN * reads | select.EPOLLOUT * writes)
        if line.inner is not None:
            reads = (line.connected or bool(line.ended)) and not line.outward
            self._want(line.inner, select.EPOLLIN * reads | select.EPOLLOUT * bool(line.inward))

    # Ends

    def _end(self, line: _Line, why: str) -> None:
        """TCP has ended; ZeroMQ is told by half, and this is over when it has closed its end."""
        line.ended = line.ended or why
        line.outward = memoryview(b"")
        if line.tcp is not None:
            self._unwatch(line.tcp)
            line.tcp = None
        self._in_time(line)
        if line.inner is None:
            self._bury(line)
        elif not line.inward:
            self._half_close(line)
        else:
            self._ask(line)

    def _half_close(self, line: _Line) -> None:
        if line.inner is not None:
            with contextlib.suppress(OSError):
                line.inner.shutdown(socket.SHUT_WR)
            self._ask(line)

    def _inner_gone(self, line: _Line) -> None:
        """ZeroMQ has closed its end: what it has said is still sent."""
        if line.inner is not None:
            self._unwatch(line.inner)
            line.inner = None
        line.inward = memoryview(b"")
        if line.outward and line.tcp is not None:
            self._delay(line, LINGER_NS)
        else:
            self._bury(line)

    def _bury(self, line: _Line) -> None:
        if self._lines.pop(line.number, None) is None:
            return
        for sock in (line.tcp, line.inner, line.door):
            if sock is not None:
                self._unwatch(sock)
        self._by_name.pop(line.name, None)
        self._due.discard(line.number)
        self._unfinished -= line.unfinished
        self._unread -= line.unread
        self._ends.append((line.number, line.ended or "closed"))

    def drop(self, number: int) -> None:
        """Hang up; the end of it is told later."""
        line = self._lines.get(number)
        if line is not None:
            if line.tcp is not None:
                line.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._end(line, "hung up")

    def _keep_bounds(self) -> None:
        if self._unfinished > UNFINISHED_BYTES_MAX:
            self._hang_up(max(self._lines.values(), key=lambda line: line.unfinished), "unfinished")
        if self._unread > UNREAD_BYTES_MAX:
            self._hang_up(max(self._lines.values(), key=lambda line: line.unread), "unread")

    def _hang_up(self, line: _Line, kind: str) -> None:
        size = line.unread if kind == "unread" else line.unfinished
        self.trouble.append((kind, f"connection {line.number} is closed: {size} bytes {kind}"))
        self.drop(line.number)

    def _delay(self, line: _Line, wait_ns: int) -> None:
        line.due_ns = self._now_ns + wait_ns
        self._due.add(line.number)

    def _in_time(self, line: _Line) -> None:
        self._due.discard(line.number)

    def _overdue(self, line: _Line) -> None:
        if line.inner is None and line.connected:
            self._bury(line)
        else:
            self._end(line, "timed out")

    def _watch(self, line: _Line, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._epoll.register(sock, select.EPOLLIN)
        self._by_fd[sock.fileno()] = line
        self._asked[sock.fileno()] = select.EPOLLIN

    def _want(self, sock: socket.socket, events: int) -> None:
        if self._asked[sock.fileno()] != events:
            self._asked[sock.fileno()] = events
            self._epoll.modify(sock, events)

    def _unwatch(self, sock: socket.socket) -> None:
        if self._by_fd.pop(sock.fileno(), None) is not None:
            del self._asked[sock.fileno()]
            self._epoll.unregister(sock)
        sock.close()

    def close(self) -> None:
        """Close everything, at once. ZeroMQ's sockets were closed before."""
        for line in list(self._lines.values()):
            self._bury(line)
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()


def _is_ours(tcp: socket.socket, may: Callable[[socket.socket], bool]) -> bool:
    try:
        return may(tcp)
    except OSError:  # it is gone
        return False
