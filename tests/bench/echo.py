"""The other end of a bare socket: what a round trip of so many bytes must cost."""

from __future__ import annotations

import multiprocessing
import socket
from typing import Self


class Echo:
    """A process to exchange messages of fixed sizes with."""

    def __init__(self, request_bytes: int, reply_bytes: int) -> None:
        self._request = bytes(request_bytes)
        self._reply_bytes = reply_bytes
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        context = multiprocessing.get_context("spawn")
        arguments = theirs, request_bytes, reply_bytes
        with theirs:
            self._child = context.Process(target=_answer, args=arguments, daemon=True)
            self._child.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._sock.close()  # which ends the child
        self._child.join()

    def round_trip(self) -> None:
        """Send a request and wait for the whole reply."""
        self._sock.sendall(self._request)
        _take(self._sock, self._reply_bytes)


def _take(sock: socket.socket, count: int) -> bool:
    """Receive exactly count bytes; False when the other end has closed."""
    while count > 0:
        data = sock.recv(count)
        if not data:
            return False
        count -= len(data)
    return True


def _answer(sock: socket.socket, request_bytes: int, reply_bytes: int) -> None:
    """Answer until the socket closes."""
    reply = bytes(reply_bytes)
    while _take(sock, request_bytes):
        sock.sendall(reply)
