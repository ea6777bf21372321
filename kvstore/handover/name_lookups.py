"""Addresses of hosts that are named: each name is looked up by a thread, since that takes time."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

LOOKUPS_MAX = 8  # at one time
ADDRESSES_MAX = 4  # of one host; the others are not tried

Address = tuple[int, Any]
"""A family, and what a socket of it connects to."""


class NameLookups:
    """Lookups under way, by the number of the connection that each is for."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, list[Address] | str]] = deque()  # filled by threads
        self._open = 0

    @property
    def waiting(self) -> bool:
        """Tell whether take() has something to return."""
        return bool(self._found)

    def find(self, number: int, host: str, port: int) -> list[Address]:
        """Return a numeric host's address; none: take() returns the name's addresses later.

        Raises OSError, ValueError, RuntimeError.
        """
        try:
            return _addresses(host, port, socket.AI_NUMERICHOST)
        except socket.gaierror:
            if self._open >= LOOKUPS_MAX:
                raise RuntimeError("too many names are being looked up") from None
        arguments = (number, host, port)
        threading.Thread(
            target=self._look_up, args=arguments, name="kvstore-name", daemon=True
        ).start()
        self._open += 1
        return []

    def _look_up(self, number: int, host: str, port: int) -> None:
        """Run as a thread."""
        try:
            found: list[Address] | str = _addresses(host, port)
        except (OSError, ValueError) as exc:
            found = f"name: {exc}"
        self._found.append((number, found))

    def take(self) -> Iterator[tuple[int, list[Address] | str]]:
        """Yield what has been found since the last call, or why nothing was."""
        while self._found:
            self._open -= 1
            yield self._found.popleft()


def _addresses(host: str, port: int, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, name) for family, _, _, _, name in found[:ADDRESSES_MAX]]
