"""The demos: what they expect, what they find wrong, and what they print."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from rich.console import Console

from tests.bench.api import Answer
from tests.bench.engine import Result
from tests.demo.offload import COLD, FROM_CPU, FROM_GPU, FROM_NVME, REUSABLE, Offload, Pass
from tests.demo.pd import BLOCK_TOKENS, HandOver, Run, Served, expected
from tests.demo.stage import Demo

LEGS = {"prefill ok": 6.0, "decode ok": 6.0}
HITS = {
    'kvstore_hit_tokens_total{tier="cpu"}': 2.0 * REUSABLE,
    'kvstore_hit_tokens_total{tier="nvme"}': 1.0 * REUSABLE,
}
D = TypeVar("D", bound=Demo)


def silent(kind: type[D]) -> D:
    return kind(Console(file=io.StringIO(), width=80, highlight=False), Path())


# An engine that loses its blocks


def offloaded(last: Pass, hits: dict[str, float]) -> Offload:
    demo = silent(Offload)
    tiers = (COLD, FROM_GPU, FROM_CPU, FROM_CPU)
    results = [Result("p", [1, 2], ttft_s=1.2345)]
    demo.passes = [*(Pass("after engine restart", tier, tier, results) for tier in tiers), last]
    demo.metrics = hits
    return demo


def test_offload_fails_for_tokens_from_elsewhere_other_outputs_and_wrong_metrics() -> None:
    last = Pass("last", FROM_NVME, FROM_NVME, [Result("p", [1, 2])])
    assert offloaded(last, HITS).problems() == []
    assert len(offloaded(last, {}).problems()) == 2
    elsewhere = msgspec.structs.replace(last, served=FROM_CPU)
    assert len(offloaded(elsewhere, HITS).problems()) == 1
    other = msgspec.structs.replace(last, results=[Result("p", [1, 3])])
    assert offloaded(other, HITS).problems() == ["last: outputs differ from the cold run's"]


# A hand-over


def handed_over(legs: dict[str, float] = LEGS, **changes: object) -> HandOver:
    has = expected(4000)
    answer, alone = Answer([1, 2], 0.0471), Answer([1, 2], 1.0)
    run = Run("cold", "pull", has, has, -(-4000 // BLOCK_TOKENS), answer, alone)
    demo = silent(HandOver)
    demo.runs, demo.legs = [msgspec.structs.replace(run, **changes)], legs
    return demo


@pytest.mark.parametrize("field", Served.__struct_fields__)
def test_one_block_from_elsewhere_is_a_failure(field: str) -> None:
    has = expected(4000)
    served = msgspec.structs.replace(has, **{field: getattr(has, field) + BLOCK_TOKENS})
    said = handed_over(served=served).problems()
    assert said[0].startswith("pull, cold: tokens came from Served(")
    assert len(said) == 1 + field.startswith("peer"), "the store says how many it fetched"


def test_a_hand_over_fails_for_other_outputs_blocks_that_were_not_used_and_failed_legs() -> None:
    assert handed_over().problems() == []
    other = handed_over(answer=Answer([1, 3], 0.1)).problems()
    assert other == ["pull, cold: [1, 3] instead of [1, 2]"]
    for fetched in (62, 64):
        (said,) = handed_over(fetched=fetched).problems()
        assert said == f"pull, cold: {fetched} blocks were fetched, 4000 tokens used"
    (said,) = handed_over(LEGS | {"prefill failed": 1}).problems()
    assert said == "the router counted 1 of 'prefill failed', expected 0"
