"""What kind of engine it is: KV groups, sizes and limits."""

from __future__ import annotations

import math
from functools import cached_property

import msgspec

from connectors.engine_interface import Geometry
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule, window_rule

WORD_BYTES = 4
HASH_BYTES = 16  # of a block's hash


class Group(msgspec.Struct, frozen=True):
    """One KV group. tokens: of an engine block.

    window: tokens that attention looks back on, itself included; None: all. state: a recurrent
    state; its block stands for all tokens before the block's end, and is whole only where a
    step ends at a block's end.
    """

    tokens: int
    window: int | None = None
    state: bool = False

    def first_block(self, position: int) -> int:
        """Return the first engine block that the token at this position reads."""
        if self.state:
            return max(0, position - 1) // self.tokens
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.tokens


class Shape(msgspec.Struct, frozen=True, dict=True):
    """An engine's settings.

    block_tokens: of one offload block. blocks: in the engine's memory, the null block included.
    budget: tokens of a step. lookahead: tokens beyond the computed ones that get blocks. batches:
    steps under way at one time. drafts: speculated tokens of each decode. defer_frees: blocks
    that a step under way may still write are freed after it. reuse_newest: blocks freed last are
    given out first. With state groups there are no drafts, and there is a prefix cache.
    """

    groups: tuple[Group, ...]
    block_tokens: int
    blocks: int
    world: int = 1
    budget: int = 64
    running_max: int = 8
    lookahead: int = 0
    batches: int = 1
    drafts: int = 0
    by_priority: bool = False
    prefix_cache: bool = True
    defer_frees: bool = False
    reuse_newest: bool = False
    hash_tokens: int = 4
    token_bytes: int = WORD_BYTES

    @cached_property
    def has_state(self) -> bool:
        return any(group.state for group in self.groups)

    @cached_property
    def group_tokens(self) -> tuple[int, ...]:
        """Tokens of an engine block, by group."""
        return tuple(group.tokens for group in self.groups)

    @cached_property
    def token_words(self) -> int:
        """Words of a token's KV in one group on one rank."""
        return self.token_bytes // WORD_BYTES

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of an engine block on one rank; groups share the pool."""
        return max(self.group_tokens) * self.token_bytes

    @cached_property
    def alignment(self) -> int:
        """Tokens that a hit in the prefix cache is a multiple of."""
        return math.lcm(*self.group_tokens)

    @cached_property
    def state_tokens(self) -> int:
        """Tokens at whose multiples prefill stops for the states' sake; 1: no matter where."""
        return math.lcm(*(group.tokens for group in self.groups if group.state))

    @cached_property
    def rules(self) -> tuple[GroupRule, ...]:
        return tuple(
            GroupRule(1, exact=True)
            if group.state
            else GroupRule()
            if group.window is None
            else window_rule(group.window, self.block_tokens)
            for group in self.groups
        )

    @cached_property
    def geometry(self) -> Geometry:
        """What the scheduler half knows of it."""
        sizes, width = self.group_tokens, HASH_BYTES
        return Geometry(self.block_tokens, self.hash_tokens, sizes, self.rules, width)

    def rank_geometry(self, identity: str, rank: int) -> RankGeometry:
        """Return a rank's part of a block: in the layer of each group it has one head."""
        groups = []
        for group, (rule, tokens) in enumerate(zip(self.rules, self.group_tokens, strict=True)):
            size = tokens * self.token_bytes
            layer = LayerGeometry(f"{group}.0", size, 1, rank, self.world)
            groups.append(GroupGeometry(rule, (layer,)))
        per = self.geometry.blocks_per_chunk
        return RankGeometry(identity, self.block_tokens, per, tuple(groups))
