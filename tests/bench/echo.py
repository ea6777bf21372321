"""The other end of a bare socket: takes so many bytes, sends so many. What a round trip must cost.

python -m tests.bench.echo <fd> <bytes taken> <bytes sent>
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Self


class Echo:
    """A process to exchange messages of fixed sizes with."""

    def __init__(self, request_bytes: int, reply_bytes: int) -> None:
        self._request = bytes(request_bytes)
        self._reply_bytes = reply_bytes
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        sizes = [str(theirs.fileno()), str(request_bytes), str(reply_bytes)]
        command = [sys.executable, "-P", "-m", "tests.bench.echo", *sizes]
        with theirs:
            self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._sock.close()  # which ends the child
        self._child.wait()

    def round_trip(self) -> None:
        """Send a request and wait for the whole reply."""
        self._sock.sendall(self._request)
        take(self._sock, self._reply_bytes)


def take(sock: socket.socket, count: int) -> bool:
    """Receive exactly count bytes; False when the other end has closed."""
    while count > 0:
        data = sock.recv(count)
        if not data:
            return False
        count -= len(data)
    return True


def main() -> None:
    """Answer until the socket closes."""
    fd, request_bytes, reply_bytes = (int(argument) for argument in sys.argv[1:])
    reply = bytes(reply_bytes)
    with socket.socket(fileno=fd) as sock:
        while take(sock, request_bytes):
            sock.sendall(reply)


if __name__ == "__main__":
    main()
