"""The curve of hit ratios by size: near the true one on real traces, and small."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from kvstore.core import hit_curve
from kvstore.core.hit_curve import HitCurve
from tests.test_replay import PUBLISHED, trace_of

MASK = (1 << 64) - 1
ERROR_MAX, MEAN_ERROR_MAX = 0.04, 0.015


def mixed(number: int) -> int:
    """Return 64 bits that are as good as random (splitmix64, Steele et al., 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def hits_of(requests: Sequence[Sequence[int]], blocks: int) -> int:
    """Count what a cache of so many blocks hits that evicts by recency, leaf-first."""
    here: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in reversed(request):
            hits += block in here
            here[block] = None
            here.move_to_end(block)
            if len(here) > blocks:
                here.popitem(last=False)
    return hits


@pytest.mark.parametrize("name", PUBLISHED)
def test_Q62_the_curve_is_near_the_published_hit_ratios(name: str) -> None:
    trace, curve = trace_of(name), HitCurve()
    for request in trace.requests:
        curve.use([mixed(block) for block in request.hash_ids])
    assert curve.uses == trace.blocks
    sizes = [size for size in PUBLISHED[name] if size != "1%"]
    found = curve.ratios([trace.unique * float(size.rstrip("%")) / 100 for size in sizes])
    errors = [abs(one - PUBLISHED[name][size][0]) for one, size in zip(found, sizes, strict=True)]
    assert max(errors) < ERROR_MAX, dict(zip(sizes, errors, strict=True))
    assert sum(errors) / len(errors) < MEAN_ERROR_MAX


def test_Q62_without_a_sample_it_is_exact_but_for_the_width_of_its_steps() -> None:
    rng = random.Random(62)
    chains = [[mixed(100 * number + block) for block in range(60)] for number in range(30)]
    requests = [rng.choice(chains)[: rng.randrange(1, 60)] for _ in range(900)]
    curve = HitCurve()
    for request in requests:
        curve.use(request)
    every = sum(map(len, requests))
    for blocks in (1, 10, 100, 450, 900, 5000):
        true = hits_of(requests, blocks) / every
        assert curve.ratios([blocks])[0] == pytest.approx(true, abs=0.01), blocks


def test_Q62_a_request_uses_the_end_of_its_prompt_first() -> None:
    curve = HitCurve()
    curve.use([mixed(1), mixed(2)])
    curve.use([mixed(1)])
    assert curve.ratios([1]) == [pytest.approx(1 / 3)]


def test_Q62_a_block_of_every_prompt_is_counted_whether_it_is_in_the_sample_or_not() -> None:
    """A system prompt's: a sample has all of its uses or none, and here none."""
    curve, fresh = HitCurve(), iter(range(1, 1 << 30))
    shared = MASK - 1
    for _ in range(20_000):
        curve.use([shared, *(mixed(next(fresh)) for _ in range(9))])
    assert curve.ratios([4096])[0] == pytest.approx(0.1, abs=0.02)


def test_Q62_what_was_stored_is_used_and_not_asked_for() -> None:
    """What a model has generated is hit when the next prompt of its session asks for it."""
    curve = HitCurve()
    assert curve.ratios([9]) == [0.0]
    curve.use([mixed(1)])
    curve.stored([mixed(1), mixed(2)])
    assert curve.uses == 1
    curve.use([mixed(1), mixed(2)])
    assert curve.uses == 3
    assert curve.ratios([2]) == [pytest.approx(2 / 3)]
    assert curve.ratios([0.5]) == [0.0]


def test_Q62_a_sample_stands_for_what_tiers_can_hold_however_much_there_was() -> None:
    """After months the sample would stand for so much that no tier's size makes a difference."""
    curve, fresh = HitCurve(), iter(range(1 << 40))
    curve.covered = 10_000.0
    for _ in range(4_000):
        prompt = [mixed(next(fresh)) for _ in range(50)]
        curve.use(prompt)
        curve.use(prompt)
    assert len(curve._last) > hit_curve.SAMPLES // 2
    few, many = curve.ratios([20, 100])
    assert few < 0.02
    assert many == pytest.approx(0.5, abs=0.02)


def test_Q62_it_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    curve, fresh = HitCurve(), iter(range(1 << 40))
    for _ in range(600):
        curve.use([mixed(next(fresh)) for _ in range(500)])
    held = (curve._last, curve._hot, curve._window)
    assert max(map(len, held)) <= hit_curve.SAMPLES
    assert len(curve._times) == len(curve._last) <= hit_curve.SAMPLES
    parts = (*held, curve._times, curve._hot_times, curve._distances)
    numbers = len(curve._last) + len(curve._times) + 2 * len(curve._window)  # 64 bits each
    assert sum(map(sys.getsizeof, parts)) + 40 * numbers < 2 << 20
    monkeypatch.setattr(hit_curve, "_USES_MAX", 250_000)
    before = curve.ratios([1000])
    curve.use([mixed(next(fresh))])
    assert curve.uses <= 250_000
    assert curve.ratios([1000]) == [pytest.approx(before[0], abs=0.001)]
