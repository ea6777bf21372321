"""Worlds and fleets of the simulation; `python -m tests.sim [--fleet] SEED` replays one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from connectors.step_meta import StepMeta
from tests.sim import worker
from tests.sim.runs import FLEET, STORE, attempt, attempts, cut_short, replay
from tests.sim.world import STEPS, Cut

SEEDS = 300
# Pairs of fault and state that so many worlds may miss: a few are rare, and `make sim` misses none.
MISSED_MAX = 5  # fewer than any state or fault has
# What so many worlds must have met, or their promises were not put to the test.
MET = (
    *("loads", "loads_failed", "aborted_loading", "preempted", "resets", "store_declined"),
    *("timed_out", "load_failed", "waits", "late", "hits_compared"),
    *("delayed_frees", "deferred_frees", "resets_refused", "in_step", "in_step_failed"),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are logged, thousands of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.mark.slow
def test_no_seed_breaks_a_promise_and_every_fault_and_every_state_is_met() -> None:
    counts, met = Counter[str](), Counter[tuple[str, str]]()
    broken = []
    for outcome in attempts(range(SEEDS)):
        counts.update(outcome.counts)
        met.update(outcome.met)
        if outcome.error:
            broken.append(f"seed {outcome.seed}: {outcome.error}")
        else:
            assert outcome.steps >= STEPS, outcome.seed
    assert not broken
    assert len(STORE.never_met(met)) <= MISSED_MAX, STORE.never_met(met)
    assert not [event for event in MET if not counts[event]], counts


def test_a_seed_is_the_same_world_in_another_process() -> None:
    """The order of a set is no part of it: the runs' processes and a replay hash alike."""
    shown = [
        subprocess.run(
            [sys.executable, "-m", "tests.sim", "7", "--cut", '{"steps": 150}'],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert shown[0] == shown[1]
    assert b"finished" in shown[0]


def _unfenced(monkeypatch: pytest.MonkeyPatch) -> int:
    """The fence is left out; return a seed that finds that."""

    def before_step(self: worker.Worker, meta: StepMeta) -> None:
        for job in meta.early:
            self._submit(job)

    monkeypatch.setattr(worker.Worker, "before_step", before_step)
    return next(seed for seed in range(40) if attempt(seed).error)


def test_a_seed_that_breaks_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = _unfenced(monkeypatch)
    broken = []
    for _ in range(2):
        with pytest.raises(BaseException, match=r".") as caught:
            replay(seed)
        broken.append((str(caught.value), caught.value.__notes__))
    assert broken[0] == broken[1]
    note = caught.value.__notes__[0]
    assert note.endswith(f"seed {seed}: replay with python -m tests.sim {seed}")
    assert 1 < len(note.splitlines()) <= 42


@pytest.mark.slow
def test_a_world_that_breaks_is_cut_as_long_as_it_breaks_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = _unfenced(monkeypatch)
    whole = attempt(seed)
    cut, told = cut_short(seed)
    assert attempt(seed, cut).where == whole.where
    assert cut.steps < STEPS / 2
    assert cut.requests <= 64
    assert len(cut.off) >= 2
    assert f"python -m tests.sim {seed} --cut" in told
    smaller = partial(attempt, seed)
    assert smaller(Cut(max(0, cut.steps - 1), cut.requests, cut.skipped, cut.off)).where in (
        "",
        whole.where,
    )


# Fleets of 2 to 4 stores

FLEETS_FIRST, FLEETS = 24, 24
# What so many fleets must have met, or their promises were not put to the test.
MET_BY_FLEETS = (
    *("handed", "sent twice", "left alone", "fetched", "confirmed", "late", "lost", "gone"),
    *("lapsed", "released", "restarts", "loads", "loads_failed"),
)
# States that faults meet in so few fleets; the others are `make sim-fleet`'s to meet.
STATES = {
    *("no hand-over", "link greets", "no answer yet", "claimed", "request runs", "request held"),
    *("exporter down", "store down"),
}


@pytest.mark.slow
def test_no_fleet_breaks_a_promise_and_every_fault_and_every_state_is_met() -> None:
    counts, met = Counter[str](), Counter[tuple[str, str]]()
    broken = []
    for outcome in attempts(range(FLEETS_FIRST, FLEETS_FIRST + FLEETS), FLEET):
        counts.update(outcome.counts)
        met.update(outcome.met)
        if outcome.error:
            broken.append(f"seed {outcome.seed}: {outcome.error}")
    assert not broken
    assert not [event for event in MET_BY_FLEETS if not counts[event]], counts
    assert len({fault for fault, _ in met}) >= len(FLEET.faults) - 2
    assert {state for _, state in met} >= STATES
