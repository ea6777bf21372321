"""Which engine blocks a load fills, and from which slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from connectors.engine_interface import BlockTable, Geometry
from connectors.step_meta import EngineSpec
from connectors.store_client import Places


class Plan(NamedTuple):
    """What a load copies; whole: the answer has all that it needs."""

    engine: EngineSpec
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    whole: bool


def plan_of(
    geometry: Geometry, hits: Sequence[Places], table: BlockTable, local: int, total: int
) -> Plan:
    """Pair a request's engine blocks with slots, from token `local` up to token `total`.

    hits: what was found, by group; none if nothing was. Of each group only what a hit of so many
    tokens needs; what is not in its answer stands as slot 0.
    """
    size = geometry.block_tokens
    blocks, inside = -(-total // size), total % size
    ids: list[int] = []
    sizes: list[int] = []
    firsts: list[int] = []
    slots: list[int] = []
    generations: list[int] = []
    whole = True
    for group, tokens in enumerate(geometry.engine_block_tokens):
        per, end = size // tokens, -(-total // tokens)
        needed = geometry.rules[group].first_of(blocks, inside=inside) * per
        first = max(local // tokens, needed)
        wanted = table[group][first:end]
        skip = next((i for i, block in enumerate(wanted) if block), len(wanted))
        wanted = wanted[skip:]
        ids.extend(wanted)
        sizes.append(len(wanted))
        firsts.append(first + skip)
        if wanted:
            chunks = ((first + skip) // per, (end - 1) // per + 1)
            places = hits[group].run(*chunks) if hits else None
            if places is None:
                whole = False
                places = ((0,) * (chunks[1] - chunks[0]),) * 2
            slots.extend(places[0])
            generations.extend(places[1])
    engine = EngineSpec(tuple(ids), tuple(sizes), tuple(firsts))
    return Plan(engine, tuple(slots), tuple(generations), whole)
