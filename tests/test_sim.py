"""Two hundred worlds of the simulation; `python -m tests.sim SEED` replays one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim import World

SEEDS = 200
CHUNK = 40
# What every chunk of seeds must have met, or its promises were not put to the test.
MET = (
    *("loads", "loads_failed", "aborted_loading", "preempted", "resets", "store_declined"),
    *("kill", "worker", "stall", "timed_out", "load_failed", "waits", "late"),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are logged, thousands of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


def run(seed: int) -> Counter[str]:
    world = World(seed)
    try:
        world.run()
    except BaseException as error:
        trace = "\n".join(world.trace)
        error.add_note(f"{trace}\nseed {seed}: replay with python -m tests.sim {seed}")
        raise
    return world.counts


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_breaks_a_promise(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts.update(run(seed))
    assert not [event for event in MET if not counts[event]], counts


def test_a_seed_is_a_world() -> None:
    assert run(7) == run(7)
