"""Two hundred worlds of the simulation; `python -m tests.sim SEED` replays one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests import sim_store
from tests.sim_runs import attempt, replay

SEEDS = 200
CHUNK = 100
# What every chunk of seeds must have met, or its promises were not put to the test.
MET = (
    *("loads", "loads_failed", "aborted_loading", "preempted", "resets", "store_declined"),
    *("kill", "worker", "stall", "timed_out", "load_failed", "waits", "late"),
    *("delayed_frees", "deferred_frees", "resets_refused"),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are logged, thousands of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_breaks_a_promise(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts.update(replay(seed))
    assert not [event for event in MET if not counts[event]], counts


def test_a_seed_is_a_world() -> None:
    assert replay(7) == replay(7)


def test_a_seed_that_breaks_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence is left out: the same wrong bytes are found each time, at the same moment."""
    monkeypatch.setattr(sim_store.Worker, "before_step", lambda self, meta: None)  # noqa: ARG005
    seed = next(seed for seed in range(40) if attempt(seed)[1])
    broken = []
    for _ in range(2):
        with pytest.raises(BaseException, match=r".") as caught:
            replay(seed)
        broken.append((str(caught.value), caught.value.__notes__))
    assert broken[0] == broken[1]
    (note,) = caught.value.__notes__
    assert note.endswith(f"seed {seed}: replay with python -m tests.sim {seed}")
    assert 1 < len(note.splitlines()) <= 42
