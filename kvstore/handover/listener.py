"""The socket that peers connect to."""

from __future__ import annotations

import os
import select
import socket

from kvstore.core.errors import ConfigError
from kvstore.handover.loopback import is_loopback

RECHECK_NS = 200_000_000  # after there was no descriptor to accept with


class Listener:
    """Listens, and has epoll watch for connections while there is room for one more."""

    def __init__(self, epoll: select.epoll, host: str, port: int, *, open_to_all: bool) -> None:
        """open_to_all: not only to this machine. Raises ConfigError."""
        what = f"peer listen {host}:{port}"
        if not open_to_all and not is_loopback(host):
            raise ConfigError(
                f"{what}: not a loopback address and no cluster key; "
                "make one with kvstore keygen, or listen on 127.0.0.1"
            )
        try:
            family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if not open_to_all and not is_loopback(str(name[0])):
                raise ConfigError(f"{what}: {host} is {name[0]}, not a loopback address")
            self._sock = socket.create_server((name[0], port), family=family, backlog=128)
        except (OSError, UnicodeError) as exc:
            found = exc.errno if isinstance(exc, OSError) else None
            text = os.strerror(found) if found is not None and found > 0 else exc
            raise ConfigError(f"{what}: {text}") from exc
        self._sock.setblocking(False)
        at, port = self._sock.getsockname()[:2]
        self.address = f"[{at}]:{port}" if family == socket.AF_INET6 else f"{at}:{port}"
        self._epoll = epoll
        self._paused_ns = 0
        self.watched = False

    def watch(self, now_ns: int, *, room: bool) -> bool:
        """Watch for connections while there is room; tell whether it does."""
        room = room and now_ns >= self._paused_ns
        if room is not self.watched:
            self.watched = room
            change = self._epoll.register if room else self._epoll.unregister
            change(self._sock)
        return room

    def accept(self, now_ns: int) -> socket.socket | None:
        """Return the next connection; None: there is none now.

        Raises OSError where it cannot be accepted; it is tried again some time later.
        """
        try:
            return self._sock.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError:
            self._paused_ns = now_ns + RECHECK_NS
            raise

    def close(self) -> None:
        """Listen no more."""
        self._sock.close()
