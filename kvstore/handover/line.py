"""TCP connections of the side channel: their stages, what they read and what they have to send.

    connecting --TCP is there--> greeting --TLS is agreed on--> open
        ^                           |
        +--failed: the next address-+
    accepted ------------------> greeting

Without a key there is no TLS, and no greeting. Nothing here waits. What a peer does not read and
what it leaves unfinished is kept, and counted for the channel to bound.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
from collections import deque
from typing import Literal

from kvstore.handover.name_lookups import Address
from kvstore.wire import peer as m
from kvstore.wire.framing import Frames

CHUNK_BYTES = 64 << 10  # read from, or sent to, one connection in one go
_SENDS = 16  # in one go
_SILENT_MS = 5000  # until a peer whose machine is gone is lost
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

Stage = Literal["connecting", "greeting", "open"]


class Line:
    """One connection, by its number. Methods raise OSError when it has ended."""

    def __init__(self, number: int, due_ns: int, *, came: bool) -> None:
        """came: it was accepted, not made. due_ns: when it has to be open."""
        self.number = number
        self.due_ns = due_ns
        self.came = came
        self.stage: Stage = "greeting" if came else "connecting"
        self.sock: socket.socket | None = None
        self.fd = -1  # of the socket, also once TLS that could not begin has closed it
        self.addresses: deque[Address] = deque()  # of the peer, not tried yet
        self.failed = ""  # why it cannot be made
        self.frames = Frames(m.MESSAGE_BYTES_MAX)
        self.unread = 0  # bytes to send
        self.met = not came  # the channel's user knows of it
        self.heard_s = 0  # the second in which it last said something,
        self.messages = 0  # how much in that second,
        self.wrong = 0  # and how much of it was wrong
        self.watched = 0  # events that epoll waits for
        self.counted = 0, 0  # bytes unread and unfinished, as the sums of all lines have them
        self._chunk = memoryview(b"")  # being sent: TLS wants the same bytes again
        self._outbox: deque[bytes] = deque()
        self._wants_write = False

    def use(self, sock: socket.socket) -> None:
        """Take a socket that is connected, or connecting."""
        self.sock, self.fd = sock, sock.fileno()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)

    def dial(self) -> None:
        """Begin to connect to the next address. Raises OSError."""
        family, name = self.addresses.popleft()
        self.stage = "connecting"
        sock = socket.socket(family, socket.SOCK_STREAM)
        self.use(sock)
        error = sock.connect_ex(name)
        if error not in {0, errno.EINPROGRESS}:
            raise OSError(error, os.strerror(error))

    @property
    def events(self) -> int:
        """What epoll is to tell of it."""
        writes = self.stage == "connecting" or self._wants_write
        writes = writes or (self.stage == "open" and self.unread > 0)
        return select.EPOLLIN | (select.EPOLLOUT if writes else 0)

    def check_connected(self) -> socket.socket:
        """Return the socket, once it is connected."""
        if self.sock is None:
            raise OSError(0, "no socket")
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        return self.sock

    def greet(self, tls: ssl.SSLContext) -> None:
        """Begin TLS."""
        if self.sock is not None:
            self.stage = "greeting"
            self.sock = tls.wrap_socket(
                self.sock, server_side=self.came, do_handshake_on_connect=False
            )

    def agree(self) -> bool:
        """Go on with TLS; True once both ends have proved the key."""
        self._wants_write = False
        if isinstance(self.sock, ssl.SSLSocket):
            try:
                self.sock.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLWantWriteError:
                self._wants_write = True
                return False
        self.stage = "open"
        return True

    def receive(self) -> bytes | None:
        """Read some bytes; empty: it has ended. None: there are none now."""
        self._wants_write = False
        if self.sock is None:
            return None
        try:
            return self.sock.recv(CHUNK_BYTES)
        except ssl.SSLWantWriteError:
            self._wants_write = True
        except _NOT_NOW:
            pass
        except ssl.SSLError as exc:
            raise OSError(0, f"TLS: {exc.reason or exc}") from exc
        except OSError:
            return b""
        return None

    def send(self, data: bytes) -> None:
        """Queue bytes."""
        self._outbox.append(data)
        self.unread += len(data)

    def flush(self) -> None:
        """Send what the peer takes now."""
        if self.sock is None or self.stage != "open":
            return
        for _ in range(_SENDS):
            if not self._chunk:
                parts, size = [], 0
                while self._outbox and size < CHUNK_BYTES:
                    parts.append(self._outbox.popleft())
                    size += len(parts[-1])
                self._chunk = memoryview(b"".join(parts))
            if not self._chunk:
                return
            try:
                sent = self.sock.send(self._chunk)
            except _NOT_NOW:
                return
            self._chunk = self._chunk[sent:]
            self.unread -= sent

    def close(self) -> None:
        """Close it; what was to be sent is sent as far as that goes at once."""
        with contextlib.suppress(OSError):
            self.flush()
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.close()
        self.sock, self.fd, self.watched = None, -1, 0


class Lines:
    """The connections of a channel, by number, and what epoll waits for.

    unread, unfinished: bytes in sum, of what peers do not read, and of messages of which not all
    has come.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.all: dict[int, Line] = {}
        self.young: dict[int, Line] = {}  # of these, those that are not open yet
        self.unread = self.unfinished = 0
        self._next = 1
        self._by_fd: dict[int, Line] = {}

    def add(self, due_ns: int, *, came: bool) -> Line:
        """Make one that is not open yet."""
        line = Line(self._next, due_ns, came=came)
        self.all[self._next] = self.young[self._next] = line
        self._next += 1
        return line

    def ready(self) -> set[int]:
        """Return the numbers of those that can go on; 0 for any other descriptor of epoll's."""
        found = (self._by_fd.get(fd) for fd, _ in self.epoll.poll(0))
        return {0 if line is None else line.number for line in found}

    def update(self, line: Line) -> None:
        """Have epoll wait for what a line waits for now, and count the bytes that it keeps."""
        if line.number not in self.all:
            return
        kept = line.unread, line.frames.unfinished_bytes
        self.unread += kept[0] - line.counted[0]
        self.unfinished += kept[1] - line.counted[1]
        line.counted = kept
        events = line.events
        if line.sock is not None and line.watched != events:
            change = self.epoll.modify if line.watched else self.epoll.register
            change(line.fd, events)
            line.watched = events
            self._by_fd[line.fd] = line

    def came(self) -> list[Line]:
        """List those that were accepted and are open."""
        return [line for line in self.all.values() if line.came and line.stage == "open"]

    def hang_up(self, line: Line) -> None:
        """Close a line's socket."""
        if self._by_fd.get(line.fd) is line:
            del self._by_fd[line.fd]
            with contextlib.suppress(OSError):  # closed already
                self.epoll.unregister(line.fd)
        line.close()

    def remove(self, line: Line) -> None:
        """Close a line and forget it."""
        del self.all[line.number]
        self.young.pop(line.number, None)
        self.unread -= line.counted[0]
        self.unfinished -= line.counted[1]
        self.hang_up(line)

    def close(self) -> None:
        """Close all of them."""
        for line in self.all.values():
            line.close()
        self.all.clear()
        self.young.clear()
        self.epoll.close()
