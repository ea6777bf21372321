"""How long a hit is: the prefix rule, the trailing rule, and where all groups meet.

Pure functions over a probe. The store uses them to decide what to pin, the scheduler half to
decide with what the engine already has; both must say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from kvstore.core.types import GroupRule, LookupResult

Probe = Callable[[int, int], LookupResult]
"""(group, block index) -> what is known about that block."""

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS  # a member of an enum takes 0.1 us to read


class Below(Protocol):
    """What lower tiers have of a chain, asked for what is not in memory."""

    def probe(self, group: int, index: int, /) -> LookupResult:
        """Say what is known about a block."""

    def prefix(self, group: int, first: int, limit: int, /) -> Answer:
        """Count the blocks from `first` on that are present, as prefix_hit does."""


class Answer(msgspec.Struct, frozen=True):
    """Blocks that can be served, and whether waiting could change the number."""

    blocks: int
    pending: bool = False


def prefix_hit(probe: Probe, group: int, limit: int) -> Answer:
    """Count the blocks before the first definite miss; a pending one counts, and sets `pending`."""
    pending = False
    for index in range(limit):
        result = probe(group, index)
        if result is _MISS:
            return Answer(index, pending)
        pending = pending or result is not _HIT
    return Answer(limit, pending)


def trailing_hit(
    probe: Probe, group: int, limit: int, need: int, local: int, at_limit: int | None = None
) -> Answer:
    """Find the last run of `need` present blocks ending at or before limit.

    local: leading blocks that the engine has computed itself; a shorter run counts when it
        reaches them. A pending block counts as absent, but is told.
    at_limit: how many blocks a run that ends at limit needs, if not `need`.
    """
    run, end, pending, wanted = 0, local, False, need
    for index in range(limit - 1, local - 1, -1):
        result = probe(group, index)
        if result is _HIT:
            if run == 0:
                end = index + 1
                wanted = need if at_limit is None or end < limit else at_limit
            run += 1
            if run == wanted:
                return Answer(end, pending)
        else:
            run = 0
            pending = pending or result is not _MISS
    return Answer(end if run else local, pending)


def common_hit(
    rules: Sequence[GroupRule],
    probe: Probe,
    limit: int,
    local: int = 0,
    prefix: Callable[[int, int], Answer] | None = None,
    *,
    inside: int = 0,
) -> Answer:
    """Find the largest number of blocks that every group can serve.

    Groups shrink one another until the number is stable. No more than `local` blocks is no
    hit: Answer(local). Pending is told only where it matters: with all pending blocks missing the
    number would be another than with all of them present.

    prefix(group, limit): a faster way than scanning to the answer of prefix_hit, if there is one.
    inside: tokens that a hit of `limit` blocks uses of its last one, 0: all, as shorter ones do.
    """
    answer, counted = _shrunk(rules, probe, limit, local, prefix, inside=inside)
    if not answer.pending or (counted and answer.blocks > local):
        return answer

    def hopeful(group: int, index: int) -> LookupResult:
        result = probe(group, index)
        return result if result is _MISS else _HIT

    coming, _ = _shrunk(rules, hopeful, limit, local, prefix, inside=inside)
    return Answer(answer.blocks, pending=coming.blocks > answer.blocks)


def _shrunk(
    rules: Sequence[GroupRule],
    probe: Probe,
    limit: int,
    local: int,
    prefix: Callable[[int, int], Answer] | None,
    *,
    inside: int,
) -> tuple[Answer, bool]:
    """Return also whether a pending block is among those that the answer counts."""
    if prefix is None:
        prefix = partial(prefix_hit, probe)
    blocks, waiting = limit, False
    while True:
        before, pending = blocks, False
        for group, rule in enumerate(rules):
            if rule.trailing is None:
                answer = prefix(group, blocks)
                pending = pending or answer.pending
                blocks = max(local, answer.blocks)
        for group, rule in enumerate(rules):
            if rule.trailing is not None:
                at_limit = blocks - rule.first_of(blocks, inside=inside if blocks == limit else 0)
                answer = trailing_hit(probe, group, blocks, rule.trailing, local, at_limit)
                waiting = waiting or answer.pending
                blocks = answer.blocks
        if blocks == before or len(rules) == 1:
            return Answer(blocks, pending or waiting), pending
