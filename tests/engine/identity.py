"""When two engines' outputs count as the same, although bfloat16 sums depend on the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from tests.bench.engine import Request, Result

NEAR_TIE = 0.13
"""Logits between 8 and 16 are 1/16 apart in bfloat16; two of these can be rounding."""

NEAR_TIES_RATIO_MAX = 0.5 if torch.cpu._is_avx512_bf16_supported() else 0.75
"""Rounding turns one prompt in eight; one lost block turns nine in ten, many at near ties.

Without AVX-512 instructions for bfloat16 it turns one in four, and two in three where failed loads
change what runs beside a prompt (in float32 none).
"""


class Divergence(NamedTuple):
    """Where one prompt's tokens first differ."""

    id: str
    position: int
    expected: int | None  # None: no token there
    got: int | None
    margin: float | None  # the reference's, at this position

    @property
    def counts(self) -> bool:
        return self.margin is None or self.margin > NEAR_TIE

    def __str__(self) -> str:
        margin = "" if self.margin is None else f", margin {self.margin:.3f}"
        return f"{self.id}: token {self.position} is {self.got}, expected {self.expected}{margin}"


def divergences(reference: Sequence[Result], got: Sequence[Result]) -> list[Divergence]:
    """First difference of each prompt that has one; prompts are matched by id."""
    by_id = {result.id: result for result in got}
    found = []
    for expected in reference:
        actual = by_id.get(expected.id)
        first = _first_difference(expected.tokens, actual.tokens if actual else [])
        if first is None:
            continue
        position, one, other = first
        both = one is not None and other is not None
        margin = expected.margins[position] if both else None
        found.append(Divergence(expected.id, position, one, other, margin))
    return found


def assert_same(reference: Sequence[Result], got: Sequence[Result]) -> None:
    """Fail unless got has the reference's tokens, near ties apart.

    After a near tie the rest of that prompt says nothing, so too many of them fail as well.
    """
    found = divergences(reference, got)
    wrong = [str(divergence) for divergence in found if divergence.counts]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(reference)} prompts differ:", *wrong])
    near = [str(divergence) for divergence in found]
    assert len(near) <= max(1, NEAR_TIES_RATIO_MAX * len(reference)), "\n".join(
        [f"{len(near)} of {len(reference)} prompts differ at near ties, too many:", *near]
    )


def aborted(requests: Sequence[Request], seed: int, span: int) -> list[Request]:
    """The same, but one in two is aborted up to span steps after it came, some at once."""
    rng = random.Random(seed)
    return [
        msgspec.structs.replace(r, abort_step=r.arrive_step + max(0, rng.randrange(-3, span)))
        if rng.random() < 1 / 2
        else r
        for r in requests
    ]


def assert_survivors_same(reference: Sequence[Result], got: Sequence[Result]) -> None:
    """Those that ended have the reference's tokens, those that were aborted the first of them."""
    by_id = {result.id: result for result in reference}
    cut = []
    for result in got:
        whole, count = by_id[result.id], len(result.tokens)
        tokens, margins = whole.tokens[:count], whole.margins[:count]
        expected = whole if result.finished else msgspec.structs.replace(whole, tokens=tokens)
        cut.append(msgspec.structs.replace(expected, margins=margins))
    assert_same(cut, got)


def _first_difference(
    expected: Sequence[int], got: Sequence[int]
) -> tuple[int, int | None, int | None] | None:
    for position, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return position, one, other
    if len(expected) == len(got):
        return None
    shared = min(len(expected), len(got))
    rest: list[int | None] = [None, None]
    for index, tokens in enumerate((expected, got)):
        if len(tokens) > shared:
            rest[index] = tokens[shared]
    return shared, rest[0], rest[1]
