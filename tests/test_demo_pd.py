"""The demo of a hand-over: what it expects, what it finds wrong, and what it prints."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from tests.bench.api import Answer
from tests.demo import pd
from tests.demo.pd import BLOCK_TOKENS, Run, Served, expected

LEGS = {"prefill ok": 6.0, "decode ok": 6.0}


def run(**changes: object) -> Run:
    has = expected(4000)
    blocks = -(-4000 // BLOCK_TOKENS)
    answer, alone = Answer([1, 2], 0.0471), Answer([1, 2], 1.0)
    made = Run("cold", "pull", has, has, blocks, answer, alone)
    return msgspec.structs.replace(made, **changes)


def test_every_token_is_expected_from_one_place() -> None:
    assert expected(4000) == Served(4000, 0, 4000, 0, 0)
    assert expected(4000, on_disk=True) == Served(4000, 0, 0, 4000, 0)
    own = 4007 // BLOCK_TOKENS * BLOCK_TOKENS
    turn = expected(4508, prefill_has=4000, decode_has=4007)
    kept = 4000 // BLOCK_TOKENS * BLOCK_TOKENS
    assert turn == Served(4508 - kept, own, 4508 - own, 0, 0)
    assert expected(4000, decode_has=2000) == Served(4000, 1984, 2016, 0, 0)


def test_it_is_content_when_all_is_as_promised() -> None:
    assert pd.problems([run()], LEGS) == []


@pytest.mark.parametrize("field", Served.__struct_fields__)
def test_one_block_from_elsewhere_is_a_failure(field: str) -> None:
    has = expected(4000)
    served = msgspec.structs.replace(has, **{field: getattr(has, field) + BLOCK_TOKENS})
    said = pd.problems([run(served=served)], LEGS)
    assert said[0].startswith("pull, cold: tokens came from Served(")
    assert len(said) == 1 + field.startswith("peer"), "the store says how many it fetched"


@pytest.mark.parametrize("more", [-1, 1])
def test_what_the_store_fetched_has_to_be_what_was_used(more: int) -> None:
    made = run()
    (said,) = pd.problems([run(fetched=made.fetched + more)], LEGS)
    assert said.endswith("blocks were fetched, 4000 tokens used")


def test_another_output_is_a_failure() -> None:
    assert pd.problems([run(answer=Answer([1, 3], 0.1))], LEGS) == [
        "pull, cold: [1, 3] instead of [1, 2]"
    ]


def test_a_leg_that_failed_is_a_failure() -> None:
    (said,) = pd.problems([run()], LEGS | {"prefill failed": 1})
    assert said == "the router counted 1 of 'prefill failed', expected 0"


def test_what_it_prints_fits_80_columns() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    most = Served(4508, 4000, 4480, 4480, 4000)
    runs = [run(name="known start", way="push", served=most), run(answer=Answer([9], 10.0))]
    pd.show(console, runs, LEGS)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in out.getvalue(), "nothing is cut"
    assert any("DIFFERS" in line for line in lines)
    assert "the router's legs: 6 decode ok, 6 prefill ok" in lines
