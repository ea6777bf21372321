"""What the scheduler half knows about the engine and its requests."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from connectors.client import NOWHERE, Grant, Places
from connectors.transfer import NO_REMOTE
from kvstore.types import GroupRule

NEVER = 1 << 62  # more tokens than a request can have

BlockTable = Sequence[Sequence[int]]
"""Engine block ids by group; 0 is the null block."""


class EngineRequest(Protocol):
    """What a request must have; vLLM's Request does."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int


class Geometry(msgspec.Struct, frozen=True):
    """Token counts: per block, per hash, and per engine block of each group."""

    block_tokens: int
    hash_tokens: int
    engine_block_tokens: tuple[int, ...]
    rules: tuple[GroupRule, ...]

    @property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        """Engine blocks in one block, per group."""
        return tuple(self.block_tokens // tokens for tokens in self.engine_block_tokens)

    def block_hash(self, request: EngineRequest, block: int) -> bytes:
        """Return the hash that names a block: the last of the engine's hashes in it."""
        return request.block_hashes[(block + 1) * (self.block_tokens // self.hash_tokens) - 1]


class Phase(enum.Enum):
    """Where a request is; see the module's picture."""

    NEW = "new"
    ASKED = "asked"
    LOADING = "loading"
    LOADED = "loaded"  # the engine allocates once more before the request runs
    RUNNING = "running"


class Step(msgspec.Struct, frozen=True):
    """What the engine scheduled: tokens per request, blocks about to be written, tables.

    written: engine blocks that get a new owner or content in this step. table(request_id):
    the request's block ids by group, valid during the call.
    """

    scheduled: Mapping[str, int]
    written: Iterable[int]
    table: Callable[[str], BlockTable | None]
    preempted: Iterable[str] = ()


class Tracked:
    """One request."""

    __slots__ = (
        "ask", "asked_blocks", "cursor", "deferred_ns", "failures", "grant",
        "key_hash", "local", "phase", "present", "remote", "request", "waited",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, groups: int) -> None:
        self.request = request
        self.phase = Phase.NEW
        self.ask: int | None = None
        self.asked_blocks = 0
        self.waited = False  # a busy engine waits for first asks only
        self.deferred_ns: int | None = None
        self.failures = 0
        self.grant: Grant | None = None
        self.local = 0
        self.present: tuple[Places, ...] = (NOWHERE,) * groups
        self.cursor = 0  # blocks before it were offered, or need not be
        self.key_hash: bytes | None = None  # first block being loaded, see O7
        self.remote = NO_REMOTE  # where its prompt was computed, until it was loaded
