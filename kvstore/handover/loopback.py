"""Who is at the other end of a TCP connection that stays on this machine.

TCP has no peer credentials, but the kernel lists every socket with the uid that made it. So where
there is no key, a side channel that stays on loopback still tells this user's stores from others'.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from kvstore.config import may_be_host
from kvstore.core.errors import ConfigError
from kvstore.core.limits import PORT_MAX

_TABLES: dict[int, Path] = {
    socket.AF_INET: Path("/proc/net/tcp"),
    socket.AF_INET6: Path("/proc/net/tcp6"),
}
_OPEN, _LISTENS = b"01", b"0A"
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7  # columns


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine's loopback, without looking a name up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_and_port(address: str) -> tuple[str, int]:
    """Split "host:port" or "[host]:port". Raises ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    written = bare.isprintable() and not set(bare) & set(" []/") and may_be_host(bare)
    if not written or not port.isascii() or not port.isdigit():
        raise ConfigError(f"{address[:100]!r} is no host:port")
    if len(port) > len(str(PORT_MAX)) or not 0 < int(port) <= PORT_MAX:
        raise ConfigError(f"{address[:100]!r} has no port of 1 to {PORT_MAX}")
    return bare, int(port)


def may_dial(address: str, *, open_to_all: bool) -> tuple[str, int]:
    """Return host and port to connect to; open_to_all: not only on this machine.

    Raises ConfigError for what is none, or may not be connected to.
    """
    host, port = host_and_port(address)
    if not open_to_all and not is_loopback(host):
        raise ConfigError(f"{address[:100]!r} is not a loopback address and no cluster key")
    return ("127.0.0.1" if host == "localhost" and not open_to_all else host), port


def _shown(family: int, name: tuple[str, int]) -> bytes:
    """Write an address as the kernel's tables do: words in the machine's order, in hexadecimal."""
    packed = socket.inet_pton(family, name[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return b"".join(b"%08X" % word for word in words) + b":%04X" % name[1]


def may_ask(sock: socket.socket) -> bool:
    """Tell whether whoever connected over loopback is this user, or root, and is still there.

    A socket that its process has closed is nobody's any more, which reads as root's.
    """
    name, peer = sock.getsockname()[:2], sock.getpeername()[:2]
    local, remote = _shown(sock.family, peer), _shown(sock.family, name)
    wanted = [local, remote, _OPEN]
    return _found(sock.family, local, lambda row: row[_LOCAL : _STATE + 1] == wanted)


def may_answer(sock: socket.socket) -> bool:
    """Tell whether who listens where this connected to, over loopback, is this user, or root.

    Not what the other end of the connection is: until it is accepted that is nobody's.
    """
    peer = sock.getpeername()[:2]
    shown, anywhere = _shown(sock.family, peer), b"0" * (8 if sock.family == socket.AF_INET else 32)
    places = {shown, anywhere + shown[-5:]}
    port = shown[-5:]
    return _found(sock.family, port, lambda row: row[_STATE] == _LISTENS and row[_LOCAL] in places)


def _found(family: int, text: bytes, fits: Callable[[list[bytes]], bool]) -> bool:
    """Tell whether there are sockets that fit, all of users that are trusted.

    text: what their lines have; the table has one for each socket of the machine.
    """
    try:
        lines = _TABLES[family].read_bytes().splitlines()[1:]
    except OSError:
        return False
    rows = [line.split(None, _UID + 1) for line in lines if text in line]
    users = {int(row[_UID]) for row in rows if len(row) > _UID and fits(row)}
    return bool(users) and users <= {os.getuid(), 0}
