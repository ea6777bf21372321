"""Who is at the other end of a local socket: the kernel knows, and the settings say who may be.

Both ends look. A store that let anybody in would show one user's KV to another; an engine that
takes whoever listens at its store's address would send it there itself.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.units import shown, wrong

USERS_MAX = 1000
UID_MAX = (1 << 32) - 2  # and of groups
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PEER_PIDFD = 77  # SO_PEERPIDFD, which Python does not name
_AGAIN_S = 0.05


class OtherUserError(KVStoreError):
    """A user listens there whom nobody has named."""


class Process(NamedTuple):
    """The process at the other end of a socket; pid 0: of another container, not seen from ours."""

    pid: int
    uid: int


def peer_process(sock: socket.socket) -> Process:
    """Return who connected, or who listened there; the user is the effective one."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return Process(pid, uid & 0xFFFFFFFF)


def process_end(sock: socket.socket) -> int | None:
    """Return a pidfd of the process that connected; None for our own, and one that has ended.

    On a kernel before Linux 6.5 also for a process that cannot be seen from here.
    """
    pid = peer_process(sock).pid
    if pid == os.getpid():
        return None
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    with contextlib.suppress(OSError, ValueError):  # ValueError: pid 0
        return os.pidfd_open(pid)
    return None


def trusted(uid: int, named: Collection[int]) -> bool:
    """Tell whether a user may be at the other end: ourselves, root, or one of those named."""
    return uid in (os.geteuid(), 0) or uid in named


def connect(path: str, timeout_s: float, user: int | None = None) -> socket.socket:
    """Connect to a store's unix socket, and see whose it is, before a byte is sent.

    user: who may listen there beside us and root. Raises OSError, TimeoutError when nobody
    accepts in time, and OtherUserError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:  # as many wait as may wait; there is no waiting for this
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no answer within {timeout_s:g} s") from None
                time.sleep(_AGAIN_S)
        uid, named = peer_process(sock).uid, () if user is None else (user,)
        if not trusted(uid, named):
            expected = " or ".join(map(str, sorted({os.geteuid(), 0, *named})))
            raise OtherUserError(f"uid {uid} listens at {path}, expected uid {expected}")
    except BaseException:
        sock.close()
        raise
    return sock


def read_user(value: object, _found: Mapping[str, Any]) -> int:
    """Turn a user's name or number into the number. Raises ConfigError."""
    return _read_number(value, "user", "uid", lambda name: pwd.getpwnam(name).pw_uid)


def read_group(value: object, _found: Mapping[str, Any]) -> int:
    """Turn a group's name or number into the number. Raises ConfigError."""
    return _read_number(value, "group", "gid", lambda name: grp.getgrnam(name).gr_gid)


def _read_number(value: object, kind: str, number: str, named: Callable[[str], int]) -> int:
    expected = f"the name of a {kind} of this machine or a {number} up to {UID_MAX}"
    if isinstance(value, str):
        try:
            return named(value)
        except (KeyError, ValueError):  # ValueError: a zero byte
            raise wrong(expected, value) from None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= UID_MAX:
        raise wrong(expected, value)
    return value


def read_users(value: object, found: Mapping[str, Any]) -> tuple[int, ...]:
    """Turn a list of names and numbers into numbers. Raises ConfigError."""
    if not isinstance(value, list) or len(value) > USERS_MAX:
        count = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise ConfigError(
            f'expected a list of at most {USERS_MAX} users, such as ["vllm", 1001], found {count}'
        )
    return tuple(read_user(user, found) for user in value)
