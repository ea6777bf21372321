"""Names for the values that every part of the system passes around."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NewType, cast

import msgspec
import numpy as np

from kvstore.core.limits import Count, Trailing

BlockKey = NewType("BlockKey", bytes)
"""Chained content hash of a block and all before it, the KV group as u16, the scope (make_key)."""

Slot = NewType("Slot", int)
"""Index of one block's place in a namespace's memory pool."""

TAG_BYTES = 8

JobId = NewType("JobId", int)
LeaseId = NewType("LeaseId", int)


def make_key(block_hash: bytes, group: int, scope: bytes = b"") -> BlockKey:
    """Name one block of one KV group.

    scope separates engines that must not see each other's blocks although their layouts are
    equal: an engine takes a fresh one when its cache is reset (new weights, same namespace).
    """
    return BlockKey(block_hash + group.to_bytes(2, "big") + scope)


def tag_of(tenant: str) -> bytes:
    """Return what the scopes of a tenant's blocks end with."""
    return hashlib.blake2b(tenant.encode(), digest_size=TAG_BYTES).digest()


class Chain:
    """The keys of one request's blocks, in all groups, from its packed block hashes."""

    __slots__ = ("_leading", "blocks", "inside", "packed", "suffixes", "width")

    def __init__(
        self, packed: bytes, width: int, groups: int, scope: bytes = b"", *, inside: int = 0
    ) -> None:
        """packed: one hash of `width` bytes per block, first block first.

        inside: how many tokens of the last block are used, if not all are.
        """
        self.blocks = len(packed) // width
        self.inside = inside
        self.packed = packed
        self.width = width
        self.suffixes = [make_key(b"", group, scope) for group in range(groups)]
        self._leading: list[list[BlockKey]] = [[] for _ in range(groups)]  # named before

    def key(self, group: int, index: int) -> BlockKey:
        """Name block `index` in one group."""
        start = index * self.width
        return BlockKey(self.packed[start : start + self.width] + self.suffixes[group])

    def keys(self, group: int, count: int) -> list[BlockKey]:
        """Name the first `count` blocks in one group."""
        return self._named(group, count)[:count]

    def _named(self, group: int, count: int) -> list[BlockKey]:
        """Return the list of all that were named from the first on, at least `count`."""
        named = self._leading[group]
        if count > len(named):
            width, suffix = self.width, self.suffixes[group]
            more = self.packed[len(named) * width : count * width]
            hashes = struct.iter_unpack(f"{width}s", more)
            named += [BlockKey(name + suffix) for (name,) in hashes]
        return named

    def starts_with(self, group: int, keys: Sequence[BlockKey]) -> bool:
        """Return True if these are the names of its first blocks; faster than to make them."""
        width, suffix, count = self.width, self.suffixes[group], len(keys)
        size = width + len(suffix)
        if count > self.blocks or set(map(len, keys)) != {size}:
            return False
        rows = np.empty((count, size), np.uint8)
        rows[:, :width] = np.frombuffer(self.packed, np.uint8, count * width).reshape(count, width)
        rows[:, width:] = np.frombuffer(suffix, np.uint8)
        return rows.tobytes() == b"".join(keys)

    def keys_at(self, group: int, indices: Iterable[int]) -> list[BlockKey]:
        """Name some blocks in one group."""
        if isinstance(indices, range) and indices.start <= len(self._leading[group]):
            named = self._named(group, indices.stop)
            return named[indices.start : indices.stop : indices.step]
        packed, width, suffix = self.packed, self.width, self.suffixes[group]
        starts = [index * width for index in indices]
        return cast("list[BlockKey]", [packed[at : at + width] + suffix for at in starts])

    def inside_of(self, blocks: int) -> int:
        """Return how many tokens a hit of this many blocks uses of its last one; 0: all."""
        return self.inside if blocks == self.blocks else 0

    def first_of(self, rule: GroupRule, blocks: int) -> int:
        """Return the first block that a hit of this many blocks needs of a group."""
        return rule.first_of(blocks, inside=self.inside_of(blocks))


class LookupResult(enum.Enum):
    """What a tier knows about one key."""

    HIT = "hit"
    PENDING = "pending"  # being written
    MISS = "miss"
    RETRY = "retry"  # a remote tier has not answered yet


class StoreOutcome(enum.Enum):
    """What became of a written slot."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # another copy was complete first
    ORPHAN = "orphan"  # its parent is not in memory, so no lookup would reach it
    FAILED = "failed"


class Changes(msgspec.Struct):
    """Keys that became ready or left since the last take_changes, in order."""

    added: list[BlockKey] = []
    removed: list[BlockKey] = []


class GroupRule(msgspec.Struct, frozen=True):
    """Which blocks of a KV group a hit needs, as data; no other code knows model kinds.

    trailing: number of blocks that must be present right before the hit's end; None when the
        whole prefix must be (full attention). A sliding window of w tokens needs
        max(1, ceil((w - 1) / block_tokens)), a recurrent state 1.
    reach: how many tokens of the first of these blocks are needed, if the hit ends with a block.
    exact: recurrent state: a block stands for all tokens up to its end, and cannot serve fewer.
    """

    trailing: Trailing | None = None
    reach: Count = 0
    exact: bool = False

    def first_of(self, blocks: int, *, inside: int) -> int:
        """Return the first block that a hit of this many blocks needs.

        inside: tokens that it uses of the last one, 0: all. A window begins as much earlier as
        the hit ends earlier, which may be in the block before.
        """
        if self.trailing is None:
            return 0
        return max(0, blocks - self.trailing - (0 < inside < self.reach))


def window_rule(window_tokens: int, block_tokens: int) -> GroupRule:
    """Sliding window: enough trailing blocks to cover what the next token attends to."""
    before = window_tokens - 1
    blocks = max(1, -(-before // block_tokens))
    return GroupRule(blocks, reach=before - (blocks - 1) * block_tokens)


class JobKind(enum.Enum):
    """Direction of a transfer between the memory pool and a lower tier."""

    STORE = "store"  # slots -> tier
    LOAD = "load"  # tier -> slots


class TransferJob(msgspec.Struct, frozen=True):
    """Move keys[i] to or from slots[i]; the slots stay pinned until the result.

    parents: keys of the blocks before them, None for a first block and where a group has no
    chain. A tier that keeps only what can be reached goes by them. Empty: no chains.
    """

    job_id: JobId
    kind: JobKind
    keys: tuple[BlockKey, ...]
    slots: tuple[Slot, ...]
    parents: tuple[BlockKey | None, ...] = ()

    def parent(self, position: int) -> BlockKey | None:
        """Return the key of the block before keys[position]."""
        return self.parents[position] if self.parents else None


class JobResult(msgspec.Struct, frozen=True):
    """The one report of a job: keys[:done] arrived whole; error says why not all did."""

    job_id: JobId
    done: int
    error: Exception | None = None
