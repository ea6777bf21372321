"""One exporter process, as its store sees it, and the socket to it. Nothing here blocks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

from kvstore.core.errors import TierIOError
from kvstore.wire.framing import Decoder, Message, encode
from tiers.nixl.messages import ToStore
from tiers.nixl.ucx import environment

_READ_BYTES = 1 << 18
_READS_MAX = 16  # of one receive(): it may send faster than the store reads
_SHARED = 2  # standard error: what it prints belongs in the store's log


class Child:
    """One process, from its start to its end."""

    def __init__(self, service: str, devices: str, transports: str | None) -> None:
        """Start it. Arguments as in tiers.nixl.supervisor. Raises TierIOError."""
        ours, its = socket.socketpair()
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
        self._end = os.pidfd_open(self._process.pid)
        ours.setblocking(False)
        self._sock = ours
        self._decoder = Decoder(ToStore)
        self._outbox: deque[tuple[memoryview, int | None]] = deque()
        self.outbox_bytes = 0
        self._open = True  # its end of the socket
        self._writing = False
        self._epoll: select.epoll | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def watch(self, epoll: select.epoll) -> None:
        """Register with an epoll object, which is readable when there is something to do."""
        self._epoll = epoll
        epoll.register(self._sock, select.EPOLLIN)
        epoll.register(self._end, select.EPOLLIN)

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message as soon as it fits; fd: sent along, and has to stay open until then."""
        data = encode(message)
        self._outbox.append((memoryview(data), fd))
        self.outbox_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Send as much as fits."""
        while self._outbox and self._open:
            data, fd = self._outbox[0]
            try:
                if fd is None:
                    sent = self._sock.send(data)
                else:
                    sent = socket.send_fds(self._sock, [data], [fd])
            except BlockingIOError:
                break
            except OSError:  # it is ending; ended() tells when it has
                return
            self.outbox_bytes -= sent
            if sent < len(data):
                self._outbox[0] = (data[sent:], None)
            else:
                self._outbox.popleft()
        writing = bool(self._outbox)
        if writing is not self._writing and self._epoll is not None and self._open:
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
                if self._epoll is not None:
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
        if self._epoll is not None:
            if self._open:
                self._epoll.unregister(self._sock)
            self._epoll.unregister(self._end)
        self._sock.close()
        os.close(self._end)
