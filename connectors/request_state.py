"""What the scheduler half knows about the engine and its requests."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from connectors.kv_transfer_params import NO_REMOTE
from connectors.store_client import NOWHERE, Grant, Places
from kvstore.core.types import GroupRule

NEVER = 1 << 62  # more tokens than a request can have

BlockTable = Sequence[Sequence[int]]
"""Engine block ids by group; 0 is the null block."""


class EngineRequest(Protocol):
    """What a request must have; vLLM's Request does."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int

    @property
    def num_in_flight_tokens(self) -> int:
        """How many of the computed ones are of steps whose output is not there yet."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Its tokens, `num_tokens` of them or more."""
        ...


class Geometry(msgspec.Struct, frozen=True):
    """Token counts: per block, per hash, and per engine block of each group.

    hash_bytes: how long the engine's block hashes are.
    """

    block_tokens: int
    hash_tokens: int
    engine_block_tokens: tuple[int, ...]
    rules: tuple[GroupRule, ...]
    hash_bytes: int = 32

    @property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        """Engine blocks in one block, per group."""
        return tuple(self.block_tokens // tokens for tokens in self.engine_block_tokens)

    @property
    def exact(self) -> bool:
        """Tell whether a group's blocks stand for all tokens up to their end, and no fewer."""
        return any(rule.exact for rule in self.rules)

    def loadable(self, tokens: int) -> int:
        """Count the tokens of a prompt that an engine can be given.

        It computes the last one again in any case. Given that one, too, it would leave out what
        only the last one's window reaches; a state cannot be taken back by a token.
        """
        return tokens - any(rule.trailing is not None for rule in self.rules)

    def block_hash(self, request: EngineRequest, block: int) -> bytes:
        """Return the hash that names a block: the last of the engine's hashes in it."""
        return request.block_hashes[(block + 1) * (self.block_tokens // self.hash_tokens) - 1]


class Question(NamedTuple):
    """What is asked about a request's blocks.

    hashes: one for each block. The first `own` of them are the engine's; one more may be a tail's.
    blocks: of these, how many may be loaded; they stand for the first `end` tokens. inside: tokens
    of the last of these, 0: all.
    """

    hashes: Sequence[bytes] = ()
    own: int = 0
    blocks: int = 0
    end: int = 0
    inside: int = 0


NO_QUESTION = Question()


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
        "ask", "begun", "capped", "cursor", "deferred_ns", "failures", "grant", "key_hash", "local",
        "number", "phase", "present", "question", "reads", "remote", "request", "waited",
    )  # fmt: skip

    def __init__(
        self, request: EngineRequest, groups: int, number: int = 0, *, reads: bool = True
    ) -> None:
        self.request = request
        self.number = number  # the higher, the later it came
        self.reads = reads  # it may be given what others have computed
        self.phase = Phase.NEW
        self.ask: int | None = None
        self.capped = False  # it found something, and had to give its lease back, or got none
        self.waited = False  # a busy engine waits for first asks only
        self.deferred_ns: int | None = None
        self.failures = 0
        self.grant: Grant | None = None
        self.local = 0
        self.begun: int | None = None  # what it had computed before a step that can be taken back
        self.present: tuple[Places, ...] = (NOWHERE,) * groups
        self.cursor = 0  # blocks before it were offered, or need not be
        self.key_hash: bytes | None = None  # first block being loaded, see O7
        self.remote = NO_REMOTE  # where its prompt was computed, until it was loaded
        self.question = NO_QUESTION  # the last one
