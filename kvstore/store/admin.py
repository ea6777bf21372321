"""Asking a running store something from outside: one question, one answer, no session.

A store is named by its socket, or as "engine:ID" when it is the private one of that engine.
It is asked only if it is ours or root's, or runs as one of the users named.
All calls raise StoreUnreachable, and StoreRefused where the store does not do it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import msgspec

from kvstore.config import ConfigFile
from kvstore.core.errors import ConfigError, KVStoreError, ProtocolError
from kvstore.launch import address_of
from kvstore.metrics import LABELS, MEMORY
from kvstore.settings import read_socket
from kvstore.store.drain import DRAIN, DRAIN_STATE, Drained
from kvstore.store.live_settings import Reloaded
from kvstore.store.pins import Pinned
from kvstore.store.recorder import Recording
from kvstore.store.status import Status, TenantStatus
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.credentials import OtherUserError, connect

TIMEOUT_S = 10.0
CLEAR_S = 120.0
"""What a clear of 10^7 blocks takes, with much to spare: it is answered when all slots are free."""
PRIVATE = "engine:"
_READ_BYTES = 1 << 16
_LOOK_S = 0.1
Rows = list[list[Any]]
T = TypeVar("T")


class StoreUnreachable(KVStoreError):
    """Nobody answers at that address."""


class StoreRefused(ConfigError):
    """The store does not do what it was asked for."""


class Stat(msgspec.Struct, frozen=True):
    """One number of the store, as its metrics endpoint shows it."""

    name: str
    labels: dict[str, str]
    value: float


def stats(address: str, timeout_s: float = TIMEOUT_S, user: int | None = None) -> list[Stat]:
    """Read the store's numbers."""
    return _stats_of(_ask(address, p.Query("stats"), user, Rows, timeout_s))


def status(address: str, timeout_s: float = TIMEOUT_S, user: int | None = None) -> Status:
    """Describe the store."""
    return _ask(address, p.Query("status"), user, Status, timeout_s)


def clear(address: str, timeout_s: float = CLEAR_S, user: int | None = None) -> list[Stat]:
    """Drop all blocks that nobody is reading, and read the numbers after it."""
    return _stats_of(_ask(address, p.Query("clear"), user, Rows, timeout_s))


def log_level(address: str, level: str, user: int | None = None) -> None:
    """Change the level of the store's log."""
    _ask(address, p.Query("log-level", level=level), user, msgspec.Raw)


def resize(
    address: str, tier: str, capacity_bytes: int, user: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Change a tier's cap; yield its bytes, its cap, and slots that keep it from giving back more.

    It ends once the tier is within its cap.
    """
    rows = _stats_of(_ask(address, p.Query("resize", tier, capacity_bytes), user, Rows))
    while True:
        found = {stat.name: int(stat.value) for stat in rows if stat.labels.get("tier") == tier}
        used, cap = found["kvstore_memory_bytes"], found["kvstore_capacity_bytes"]
        held = (s.value for s in rows if s.labels.get("state") == "retiring" and tier == MEMORY)
        yield used, cap, int(sum(held))
        if used <= cap:
            return
        time.sleep(_LOOK_S)
        rows = stats(address, user=user)


def quotas(address: str, user: int | None = None) -> list[TenantStatus]:
    """List what tenants have and may have."""
    return _ask(address, p.Query("quota"), user, list[TenantStatus])


def set_quota(
    address: str,
    tenant: str,
    tier: str,
    quota_bytes: int | None,
    floor_bytes: int = 0,
    user: int | None = None,
) -> list[TenantStatus]:
    """Change what a tenant may have in a tier, until the store ends; list all tenants."""
    query = p.Query("quota", tier, tenant=tenant, quota_bytes=quota_bytes, floor_bytes=floor_bytes)
    return _ask(address, query, user, list[TenantStatus])


def pins(address: str, user: int | None = None) -> list[Pinned]:
    """List the prefixes that stay in memory."""
    return _ask(address, p.Query("pin"), user, list[Pinned])


def pin(address: str, wanted: Pinned, user: int | None = None) -> list[Pinned]:
    """Pin a prefix again that a store has listed; list all. Raises ConfigError."""
    query = p.Query("pin", prefix=wanted.prefix, namespace=wanted.namespace)
    return _ask(address, query, user, list[Pinned])


def unpin(address: str, name: str, user: int | None = None) -> list[Pinned]:
    """Let go of the pins of a name; list the others."""
    query = p.Query("unpin", prefix=p.Prefix(name))
    return _ask(address, query, user, list[Pinned])


def warm(address: str, wanted: Pinned, user: int | None = None) -> int:
    """Bring a prefix from lower tiers into memory; count its blocks there. Raises ConfigError."""
    query = p.Query("warm", prefix=wanted.prefix, namespace=wanted.namespace)
    return _ask(address, query, user, int)


def record(address: str, number: int, user: int | None = None, *, ends: bool = False) -> Recording:
    """Return what engines have looked up since the last call with this number, the first one aside.

    ends: no other call follows. StoreRefused: another recording goes on.
    """
    query = p.Query("record", recording=number, ends=ends)
    return _ask(address, query, user, Recording)


def reload(address: str, user: int | None = None) -> Reloaded:
    """Have the store read its file of settings again. Raises ConfigError for a wrong file."""
    found = _ask(address, p.Query("reload"), user, Reloaded)
    if found.error:
        raise ConfigError(f"nothing has changed: {found.error}")
    return found


def drain(address: str, what: str = DRAIN, user: int | None = None) -> Iterator[Drained]:
    """Drain a store, or cancel that; yield how far it is until it is done, or cancelled."""
    while True:
        found = _ask(address, p.Query(what), user, Drained)
        yield found
        if found.done or not found.draining:
            return
        what = DRAIN_STATE  # another operator may cancel it
        time.sleep(_LOOK_S)


def source(address: str, user: int | None = None) -> ConfigFile | None:
    """Name the file of settings of a store; None: it has none."""
    kind = cast("type[ConfigFile | None]", ConfigFile | None)
    return _ask(address, p.Query("source"), user, kind)


def _ask(
    address: str, query: p.Query, user: int | None, kind: type[T], timeout_s: float = TIMEOUT_S
) -> T:
    engine = address.removeprefix(PRIVATE)
    private = engine != address
    path = address_of(engine) if private else read_socket(address, {})
    shown = address if private else f"unix://{path}"
    deadline_s = time.monotonic() + timeout_s
    try:
        with connect(path, timeout_s, user) as sock:
            with contextlib.suppress(BrokenPipeError):  # it has said why, and closed
                sock.sendall(framing.encode(query))
            return msgspec.json.decode(_receive(sock, deadline_s), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise StoreUnreachable(
            f"the store at {shown} is of another version: {exc}; use its own kvstore command"
        ) from exc
    except TimeoutError as exc:
        raise StoreUnreachable(
            f"the store at {shown} did not answer within {timeout_s:g} s"
        ) from exc
    except OSError as exc:
        raise StoreUnreachable(
            f"no store answers at {shown}: {exc.strerror}; --store names another one"
        ) from exc
    except OtherUserError as exc:
        raise StoreUnreachable(
            f"{shown} was sent nothing: {exc}; use --user to name another user"
        ) from exc
    except ProtocolError as exc:
        raise StoreUnreachable(f"{shown} is no kvstore: {exc}") from exc


def _stats_of(rows: Rows) -> list[Stat]:
    return [
        Stat(name, dict(zip(LABELS.get(name, ()), values, strict=False)), float(value))
        for name, *values, value in rows
    ]


def _receive(sock: socket.socket, deadline_s: float) -> bytes:
    decoder = framing.Decoder(p.ToEngine)
    while data := sock.recv(_READ_BYTES):
        for message in decoder.feed(data):
            if isinstance(message, p.Report):
                return message.body
            if isinstance(message, p.Refused):
                raise StoreRefused(f"the store refuses: {message.reason}")
            raise ProtocolError(f"{type(message).__name__}, expected Report")
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
    raise ProtocolError("it closed the connection")
