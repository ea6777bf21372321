"""What the connector halves know about their engine: token counts, requests, tables, steps.

Engine-neutral, and light: each half loads this module and neither loads the other half's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvstore.core.types import GroupRule

BlockTable = Sequence[Sequence[int]]
"""Engine block ids by group; 0 is the null block."""


def is_one_full_group(rules: Sequence[GroupRule]) -> bool:
    """Return True for one group, which needs the whole prefix."""
    return len(rules) == 1 and rules[0].trailing is None and not rules[0].exact


class EngineRequest(Protocol):
    """What a request must have; vLLM's Request does."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int

    @property
    def num_in_flight_tokens(self) -> int:
        """How many of the computed tokens are of steps whose output is not there yet."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Its tokens, `num_tokens` of them or more."""


class EngineCache(Protocol):
    """The engine's own prefix cache, of an engine with one group."""

    @property
    def block_count(self) -> int:
        """How many engine blocks there are; their ids are smaller."""

    @property
    def free_count(self) -> int:
        """How many of them can be allocated."""

    def next_free(self, count: int) -> Iterable[tuple[int, bytes | None]]:
        """Yield the free blocks that get other content next, up to so many, and what each holds."""

    def held(self, block: int) -> bytes | None:
        """Return the hash by which requests find an engine block; None: they do not."""


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
        """True if a group's blocks stand for all tokens up to their end, and no fewer."""
        return any(rule.exact for rule in self.rules)

    def loadable(self, tokens: int) -> int:
        """Count the tokens of a prompt that an engine can be given.

        It computes the last one again in any case. Given that one, too, it would free what only
        the last one's window reaches; a state cannot be taken back by a token.
        """
        return tokens - any(rule.trailing is not None for rule in self.rules)

    def block_hash(self, request: EngineRequest, block: int) -> bytes:
        """Return the hash that names a block: the last of the engine's hashes in it."""
        return request.block_hashes[(block + 1) * (self.block_tokens // self.hash_tokens) - 1]


class Step(msgspec.Struct, frozen=True):
    """What the engine scheduled: tokens per request, blocks about to be written, tables.

    written: engine blocks that get a new owner or content in this step. table(request_id):
    the request's block ids by group, valid during the call.
    """

    scheduled: Mapping[str, int]
    written: Iterable[int]
    table: Callable[[str], BlockTable]
    preempted: Iterable[str] = ()
