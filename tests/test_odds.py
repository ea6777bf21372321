"""How likely a block is to be used, by its age and by whether it has been used."""

from __future__ import annotations

import pytest

from kvstore.core.odds import Odds
from kvstore.core.types import BlockKey
from tests.harness.fakes import hashes

KNOWN = 64


def keys(count: int, name: str = "") -> list[BlockKey]:
    return [BlockKey(key) for key in hashes(count, name)]


def test_Q64_a_kind_of_block_is_as_likely_to_be_used_as_those_before_it_were() -> None:
    """Of four two are used, and of these one again, for longer."""
    odds, some = Odds(KNOWN, fades=64), keys(4)
    odds.note(some, 0)
    odds.note(some[:2], 10)
    odds.note(some[:1], 50)
    assert odds.of(0, used=False) == pytest.approx(0.5, rel=0.1)
    assert odds.of(0, used=True) == pytest.approx(1 / 3, rel=0.1)
    assert odds.of(15, used=False) == pytest.approx(0.5 / 3, rel=0.1), "one of three took so long"
    assert odds.of(15, used=True) == pytest.approx(1 / 9, rel=0.1)
    assert odds.of(40, used=True) == pytest.approx(1 / 9, rel=0.1), "it is due"
    assert odds.of(70, used=True) == odds.of(1e9, used=False) == 0


def test_Q64_nothing_is_likely_before_anything_was_used() -> None:
    odds = Odds(KNOWN, fades=64)
    assert odds.of(0, used=False) == 0
    odds.note(keys(8), 0)
    assert odds.of(0, used=False) == odds.of(0, used=True) == 0


def test_Q64_what_was_counted_fades() -> None:
    odds, one = Odds(KNOWN, fades=64), keys(1)
    for number in range(400):
        odds.note(one, 10 * number)
    assert odds.of(5, used=True) == pytest.approx(1, rel=0.1)
    for number in range(400):
        odds.note(one, 4000 + number)
    assert odds.of(5, used=True) < 0.05, "it comes back after a second now"
    for number in range(400):
        odds.note(keys(1, f"once {number}"), 5000)
    assert odds.of(0, used=False) < 0.001, "none comes back now"


def test_Q64_a_part_that_is_used_is_one_at_most() -> None:
    """What was counted of the first times fades before that of the second."""
    odds = Odds(KNOWN, fades=64)
    for number in range(16):
        odds.note(keys(1, f"{number}"), 0)
    for number in range(16):
        odds.note(keys(1, f"{number}"), 1)
    assert odds.of(0, used=False) == 1
