"""Random requests under vLLM's own scheduler: no wrong byte is read, and nothing stays behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connectors import worker_copies
from tests.engine.facts import IMPORTS_VLLM
from tests.engine.walks import STATE, WalkedEngine, prompt
from tests.harness.live import LiveStore, store_settings
from tests.harness.patience import WAIT_S

pytestmark = IMPORTS_VLLM

UNMAPPED_SLOT = 1 << 30
LENGTHS = (5, 16, 17, 32, 48, 49, 64, 100, 128, 160)


def abort_one(engine: WalkedEngine, rng: random.Random, chance: float) -> None:
    alive = [r.request_id for r in engine.scheduler.requests.values() if not r.is_finished()]
    if alive and rng.random() < chance:
        engine.abort(rng.choice(alive))


def walk(engine: WalkedEngine, rng: random.Random, round_: int) -> None:
    """Requests come, some go, and the engine's own cache is emptied now and then."""
    names = [f"{round_}.{number}" for number in range(10)]
    for turn in range(60):
        if names and rng.random() < 0.4:
            name, tokens = names.pop(), prompt(rng.randrange(4), rng.choice(LENGTHS))
            tokens += prompt(name, rng.choice((0, 3, 30)))
            engine.add(name, tokens, rng.choice((1, 5, 20)), rng.randrange(3))
        abort_one(engine, rng, 0.05)
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


@pytest.mark.parametrize("extra", [{}, {"block_tokens": 32}, {"storing": "late"}])
def test_O15_what_a_load_in_a_step_left_wrong_is_neither_shared_nor_kept(
    model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
) -> None:
    """Also where several requests that begin alike come in one step, and some go while it runs."""
    rng, load = random.Random(f"{extra}"), worker_copies.Copies._load

    def failing(copies: Any, task: Any) -> Any:
        job = task.job
        if job.in_step and rng.random() < 0.5:
            task.job = msgspec.structs.replace(job, slots=(*job.slots[:-1], UNMAPPED_SLOT))
        over = load(copies, task)
        task.job = job
        return over

    monkeypatch.setattr(worker_copies.Copies, "_load", failing)
    settings: dict[str, Any] = {"blocks": 40, "budget": 100, "running": 4, "policy": "fcfs"}
    with (
        LiveStore(store_settings(tmp_path / "store")) as store,
        WalkedEngine(
            model("llama_s"), f"unix://{store.path}", (None,), ahead=False, extra=extra, **settings
        ) as engine,
    ):
        engine.amid = lambda: abort_one(engine, rng, 0.2)
        for wave in range(100):
            for number in range(4):  # some tails are new, some of the waves before
                tokens = prompt(rng.randrange(2), rng.choice((48, 64, 100)))
                tokens += prompt((wave // 5, rng.randrange(3)), rng.choice((3, 60)))
                engine.add(f"{wave}.{number}", tokens, rng.choice((1, 20)))
            engine.finish()
            assert wave % 2 or engine.scheduler.reset_prefix_cache()
        assert engine.spoiled
