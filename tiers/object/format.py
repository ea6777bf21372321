"""How an object is named, and what is in it: a run of blocks that lie one after the other.

    name     v1/<space>/<run>
    space    the namespace (all that decides the bytes of a block) and the blocks of a run
    run      the key of the run's last block: all tokens up to its end, the group, and the scope,
             which a reset of the engine and a tenant make another one

    object   head | a checksum for each block, 8 bytes each | blocks
    head     magic, bytes and number of the blocks, bytes of a key; space; keys

With a cluster key the names are hashed with it, and an object is 12 bytes of nonce, followed by
all of that encrypted for this name (AES-256-GCM).

A reader knows what the head of an object has to be: it compares, and takes no number from it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Iterator, Sequence

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.core.errors import BlockCorrupt
from kvstore.core.types import BlockKey, GroupRule

VERSION = "v1"
_MAGIC = b"kvstobj1"
_HEAD = struct.Struct("<8sQII")
_SUM = struct.Struct("<Q")
_SUM_ALIGN = 8  # of what a checksum begins with
_NONCE_BYTES, _TAG_BYTES = 12, 16


class Run:
    """Blocks of one group that are one object. The last one names it."""

    __slots__ = ("keys", "name", "seen_ns")

    def __init__(self, name: str, keys: Sequence[BlockKey], seen_ns: int = 0) -> None:
        """seen_ns: when the object was known to be there."""
        self.name, self.keys, self.seen_ns = name, tuple(keys), seen_ns


class Format:
    """Names and objects of one namespace."""

    def __init__(
        self, namespace: str, slot_bytes: int, run_bytes: int, secret: bytes | None = None
    ) -> None:
        """run_bytes: an object has at least so many. secret: 32 bytes, to encrypt with."""
        self.slot_bytes = slot_bytes
        self.run_blocks = max(1, -(-run_bytes // slot_bytes))
        self._space = f"{namespace}.{self.run_blocks}"
        self._secret = secret
        self._cipher = None if secret is None else AESGCM(secret)
        self._folder = f"{VERSION}/{self._named(self._space.encode(), self._space)}"

    def _named(self, data: bytes, plain: str) -> str:
        if self._secret is None:
            return plain
        return hmac.new(self._secret, data, hashlib.sha256).hexdigest()

    def name_of(self, last: BlockKey) -> str:
        """Name the run that ends with a block."""
        return f"{self._folder}/{self._named(last, last.hex())}"

    def kept(self, rule: GroupRule, run: int) -> range:
        """Return which blocks of a group's path are in a run: those that a hit may need.

        A hit ends with a run. So of a window or a state it needs the last blocks only.
        """
        end = (run + 1) * self.run_blocks
        count = self.run_blocks if rule.trailing is None else min(self.run_blocks, rule.trailing)
        return range(end - count, end)

    def head(self, keys: Sequence[BlockKey]) -> bytes:
        """Return how the object of these blocks begins."""
        width = len(keys[0])
        lengths = _HEAD.pack(_MAGIC, self.slot_bytes, len(keys), width)
        space = self._space.encode()
        return b"".join((lengths, len(space).to_bytes(2, "little"), space, *keys))

    def size(self, run: Run) -> int:
        """Return how many bytes its object has."""
        count = len(run.keys)
        plain = len(self.head(run.keys)) + count * (_SUM.size + self.slot_bytes)
        return plain if self._cipher is None else plain + _NONCE_BYTES + _TAG_BYTES

    def pack(self, run: Run, blocks: Sequence[memoryview]) -> tuple[bytes, ...]:
        """Make the object of a run, in parts: to join them would take as long as to encrypt it."""
        sums = [_SUM.pack(self._sum(k, b)) for k, b in zip(run.keys, blocks, strict=True)]
        plain = b"".join((self.head(run.keys), *sums, *blocks))
        if self._cipher is None:
            return (plain,)
        nonce = os.urandom(_NONCE_BYTES)
        return nonce, self._cipher.encrypt(nonce, plain, run.name.encode())

    def unpack(self, run: Run, data: memoryview) -> memoryview:
        """Return an object after its head. Raises BlockCorrupt for any that is not this run's."""
        if len(data) != self.size(run):
            raise BlockCorrupt(f"{run.name}: {len(data)} bytes, expected {self.size(run)}")
        if self._cipher is not None:
            nonce = bytes(data[:_NONCE_BYTES])
            try:
                plain = self._cipher.decrypt(nonce, data[_NONCE_BYTES:], run.name.encode())
            except InvalidTag:
                raise BlockCorrupt(f"{run.name}: not what this cluster's key encrypted") from None
            data = memoryview(plain)
        head = self.head(run.keys)
        if data[: len(head)] != head:
            raise BlockCorrupt(f"{run.name}: another head")
        return data[len(head) :]

    def copy(
        self, run: Run, rest: memoryview, wanted: Sequence[tuple[int, memoryview]]
    ) -> Iterator[bool]:
        """Copy blocks of a run to where they are wanted; tell of each whether it was whole.

        rest: of unpack(). wanted: positions in the run, and places.
        """
        first, size = len(run.keys) * _SUM.size, self.slot_bytes
        for position, place in wanted:
            block = rest[first + position * size : first + (position + 1) * size]
            (expected,) = _SUM.unpack_from(rest, position * _SUM.size)
            whole = self._sum(run.keys[position], block) == expected
            if whole:
                place[:] = block
            yield whole

    def _sum(self, key: BlockKey, block: memoryview) -> int:
        """Sum over namespace, key and bytes; releases the GIL."""
        head = b"".join((self._space.encode(), b"\0", key))
        state = xxhash.xxh3_64(head.ljust(-(-len(head) // _SUM_ALIGN) * _SUM_ALIGN, b"\0"))
        state.update(block)
        return state.intdigest()
