"""Wrong input for a decoder: valid messages that something was done to, and random bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

NUMBERS = (
    *(0, 1, -1, 2, 255, 256, 65_535, 65_536),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, 1 << 60),
    *((1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1),
)
FLOATS = (0.0, -0.0, 1e-300, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "\0", "ä" * 40, "a" * 5000, "127.0.0.1:1", "../..", "%s%n", "\U0001f600")
BYTES = (b"", b"\0", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0" * 3, b"\xff" * 33, bytes(4096))
DEEP = b"\x91" * 2000


class Mutator:
    """Makes inputs from a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ways: tuple[Callable[[bytes], bytes], ...] = (
            *(self._field,) * 8,
            *(self._flip,) * 3,
            *(self._bytes, self._cut, self._cut, self._longer, self._spliced, self._renamed),
            *(self._retyped, self._random),
        )
        self.other: Sequence[bytes] = ()  # other messages, to splice with

    def __call__(self, body: bytes) -> bytes:
        """Do one or a few things to a message's bytes."""
        for _ in range(1 if self._rng.random() < 0.8 else self._rng.randint(2, 4)):
            body = self._rng.choice(self._ways)(body)
        return body

    def _flip(self, body: bytes) -> bytes:
        made = bytearray(body)
        for _ in range(self._rng.randint(1, 3) if made else 0):
            made[self._rng.randrange(len(made))] ^= 1 << self._rng.randrange(8)
        return bytes(made)

    def _bytes(self, body: bytes) -> bytes:
        made = bytearray(body)
        if made:
            at = self._rng.randrange(len(made))
            made[at : at + self._rng.randint(1, 8)] = self._rng.randbytes(self._rng.randint(0, 8))
        return bytes(made)

    def _cut(self, body: bytes) -> bytes:
        return body[: self._rng.randint(0, len(body))]

    def _longer(self, body: bytes) -> bytes:
        return body + self._rng.choice((body, DEEP, self._rng.randbytes(self._rng.randint(1, 64))))

    def _spliced(self, body: bytes) -> bytes:
        other = self._rng.choice(self.other) if self.other else body
        return body[: self._rng.randint(0, len(body))] + other[self._rng.randint(0, len(other)) :]

    def _random(self, _body: bytes) -> bytes:
        return self._rng.randbytes(self._rng.randint(0, 200))

    # Of a message's parts

    def _field(self, body: bytes) -> bytes:
        """Change one value, however deep it is."""
        found = _read(body)
        if not isinstance(found, list) or not found:
            return self._flip(body)
        return msgspec.msgpack.encode(self._changed(found, 0))

    def _changed(self, value: Any, depth: int) -> Any:  # noqa: ANN401 - what msgpack has
        if isinstance(value, list) and value and depth < 4 and self._rng.random() < 0.9:
            at = self._rng.randrange(min(1, len(value) - 1) if depth == 0 else 0, len(value))
            return [*value[:at], self._changed(value[at], depth + 1), *value[at + 1 :]]
        if isinstance(value, dict) and value and self._rng.random() < 0.7:
            key = self._rng.choice(list(value))
            return value | {key: self._changed(value[key], depth + 1)}
        return self._other(value)

    def _other(self, value: Any) -> Any:  # noqa: ANN401, PLR0911 - what msgpack has
        kind = self._rng.random()
        if kind < 0.1:
            return self._rng.choice((None, True, False, [], {}, [[]], 1.5, "", b"", {"a": [1]}))
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            near = (value + 1, value - 1, -value, value * 2)
            return min(max(self._rng.choice((*NUMBERS, *near)), -(1 << 63)), (1 << 64) - 1)
        if isinstance(value, float):
            return self._rng.choice(FLOATS)
        if isinstance(value, str):
            return self._rng.choice((*TEXTS, value + "x", value[:-1]))
        if isinstance(value, bytes):
            return self._rng.choice((*BYTES, value[:-1], value + b"\0", value * 2, value[::-1]))
        if isinstance(value, list):
            many = value * (300 if len(value) < 300 else 1)  # it may be changed several times
            return self._rng.choice(([], value * 2, value[:-1], [value], value[::-1], many))
        return self._rng.choice(NUMBERS)

    def _renamed(self, body: bytes) -> bytes:
        """Give a message another one's fields."""
        found, other = _read(body), _read(self._rng.choice(self.other) if self.other else body)
        if isinstance(found, list) and isinstance(other, list) and found and other:
            return msgspec.msgpack.encode([other[0], *found[1:]])
        return body

    def _retyped(self, body: bytes) -> bytes:
        """Drop fields, add some, or change their order."""
        found = _read(body)
        if not isinstance(found, list) or len(found) < 2:
            return body
        rest = found[1:]
        way = self._rng.randrange(3)
        if way == 0:
            del rest[self._rng.randrange(len(rest)) :]
        elif way == 1:
            rest.insert(self._rng.randint(0, len(rest)), self._rng.choice(NUMBERS))
        else:
            self._rng.shuffle(rest)
        return msgspec.msgpack.encode([found[0], *rest])


def _read(body: bytes) -> Any:  # noqa: ANN401 - what msgpack has
    try:
        return msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
        return None
