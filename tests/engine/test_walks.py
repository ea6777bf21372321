"""Random requests under vLLM's own scheduler: no wrong byte is read, and nothing stays behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from connectors import worker_copies
from tests.engine.facts import IMPORTS_VLLM
from tests.engine.walks import STATE, WalkedEngine, prompt
from tests.harness.live import LiveStore, store_settings
from tests.harness.patience import WAIT_S

pytestmark = IMPORTS_VLLM

LENGTHS = (5, 16, 17, 32, 48, 49, 64, 100, 128, 160)


def walk(engine: WalkedEngine, rng: random.Random, round_: int) -> None:
    """Requests come, some go, and the engine's own cache is emptied now and then."""
    names = [f"{round_}.{number}" for number in range(10)]
    for turn in range(60):
        if names and rng.random() < 0.4:
            name, tokens = names.pop(), prompt(rng.randrange(4), rng.choice(LENGTHS))
            tokens += prompt(name, rng.choice((0, 3, 30)))
            engine.add(name, tokens, rng.choice((1, 5, 20)), rng.randrange(3))
        alive = [r.request_id for r in engine.scheduler.requests.values() if not r.is_finished()]
        if alive and rng.random() < 0.05:
            engine.abort(rng.choice(alive))
        if turn % 20 == 0:
            engine.scheduler.reset_prefix_cache()
        engine.step()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("windows", "extra"),
    [
        *product([(None,), (None, 40, 16)], [{}, {"block_tokens": 32}]),
        ((None,), {"storing": "late"}),  # with windows it is stored at once, as without
        ((None, STATE, 40), {}),
    ],
)
def test_O9_O13_O14_no_wrong_byte_is_read_and_no_block_stays(
    model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int | None, ...],
    extra: dict[str, Any],
    *,
    ahead: bool,
) -> None:
    rng = random.Random(f"{windows} {extra} {ahead}")
    pauses, copy = random.Random(1), worker_copies.Copies._store

    def slow(*args: Any) -> Any:
        time.sleep(pauses.random() * 0.01)
        return copy(*args)

    loads, load = [], worker_copies.Copies._load

    def counted(*args: Any) -> Any:
        loads.append(args)
        return load(*args)

    monkeypatch.setattr(worker_copies.Copies, "_store", slow)
    monkeypatch.setattr(worker_copies.Copies, "_load", counted)
    settings: dict[str, Any] = {"blocks": 24 * len(windows), "budget": 33, "running": 4}
    with (
        LiveStore(store_settings(tmp_path / "store")) as store,
        WalkedEngine(
            model("llama_s"),
            f"unix://{store.path}",
            windows,
            ahead=ahead,
            policy="priority",
            extra=extra,
            **settings,
        ) as engine,
    ):
        for round_ in range(3):
            walk(engine, rng, round_)
            engine.finish()
            assert engine.scheduler.reset_prefix_cache()
        assert loads
        held = [space.manager for space in store.server.store.namespaces.values()]
        deadline = time.monotonic() + WAIT_S
        while any(len(manager.leases) for manager in held):
            assert time.monotonic() < deadline, "a lease stays"
