"""Asking a running store something from outside: one question, one answer, no session."""

from __future__ import annotations

import socket
import time

import msgspec

from kvstore import protocol as p
from kvstore.config import parse_socket
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.metrics import TABLE

TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16


class StoreUnreachable(KVStoreError):
    """Nobody answers at that address."""


class Stat(msgspec.Struct, frozen=True):
    """One number of the store, as its metrics endpoint shows it."""

    name: str
    labels: dict[str, str]
    value: float


def stats(address: str, timeout_s: float = TIMEOUT_S) -> list[Stat]:
    """Read the store's numbers. Raises StoreUnreachable."""
    return _ask(address, "stats", timeout_s)


def clear(address: str, timeout_s: float = TIMEOUT_S) -> list[Stat]:
    """Drop all blocks that nobody is reading, and read the numbers after it."""
    return _ask(address, "clear", timeout_s)


def _ask(address: str, what: str, timeout_s: float) -> list[Stat]:
    path = parse_socket(address)
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.sendall(p.encode(p.Query(what)))
            body = _receive(sock, deadline_s)
        except OSError as exc:
            reason = exc.strerror or f"no answer in {timeout_s:.0f} s"
            raise StoreUnreachable(f"no store answers at unix://{path}: {reason}") from exc
        except ProtocolError as exc:
            raise StoreUnreachable(f"unix://{path} is no kvstore: {exc}") from exc
    return [_stat(row) for row in msgspec.json.decode(body, type=list[list[str | float]])]


def _receive(sock: socket.socket, deadline_s: float) -> bytes:
    decoder = p.Decoder(p.ToEngine)
    while data := sock.recv(_READ_BYTES):
        for message in decoder.feed(data):
            if isinstance(message, p.Report):
                return message.body
            raise ProtocolError(f"{type(message).__name__} instead of Report")
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
    raise ProtocolError("it closed the connection")


def _stat(row: list[str | float]) -> Stat:
    name, *labels, value = row
    names = next((spec.labels for spec in TABLE if spec.name == name), ())
    pairs = {key: str(label) for key, label in zip(names, labels, strict=False)}
    return Stat(str(name), pairs, float(value))
