"""Which engine blocks a load fills, and from which slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from connectors.engine_interface import BlockTable, Geometry
from connectors.step_meta import EngineSpec
from connectors.store_client import GroupHits


class LoadPlan(NamedTuple):
    """What a load copies; complete: the answer has all that it needs."""

    engine: EngineSpec
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    complete: bool


def plan_load(
    geometry: Geometry, hits: Sequence[GroupHits], table: BlockTable, local: int, total: int
) -> LoadPlan:
    """Pair a request's engine blocks with slots, from token `local` up to token `total`.

    hits: the blocks found, by group; empty if there was no answer. Of each group only what a hit
    of so many tokens needs. Blocks missing from the answer get slot 0.
    """
    size = geometry.block_tokens
    blocks, inside = -(-total // size), total % size
    ids: list[int] = []
    sizes: list[int] = []
    firsts: list[int] = []
    slots: list[int] = []
    generations: list[int] = []
    complete = True
    for group, tokens in enumerate(geometry.engine_block_tokens):
        per_block, end = size // tokens, -(-total // tokens)
        needed = geometry.rules[group].first_of(blocks, inside=inside) * per_block
        first = max(local // tokens, needed)
        wanted = table[group][first:end]
        skipped = next((i for i, block in enumerate(wanted) if block), len(wanted))
        wanted = wanted[skipped:]
        first += skipped
        ids.extend(wanted)
        sizes.append(len(wanted))
        firsts.append(first)
        if not wanted:
            continue
        block_first, block_end = first // per_block, (end - 1) // per_block + 1
        found = hits[group].run(block_first, block_end) if hits else None
        if found is None:
            complete = False
            nothing = (0,) * (block_end - block_first)
            found = nothing, nothing
        slots.extend(found[0])
        generations.extend(found[1])
    engine = EngineSpec(tuple(ids), tuple(sizes), tuple(firsts))
    return LoadPlan(engine, tuple(slots), tuple(generations), complete)
