"""An engine's processes are killed: its private store goes, a shared one gets its slots back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.bench.engine import Engine, EngineFailed, Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.support import (
    assert_given_back,
    attach,
    eventually,
    has_private_address,
    holders,
    memory_of,
    numbers,
    private_store_of,
    shared_memory_files,
)
from tests.harness.handover_nodes import gone

pytestmark = pytest.mark.vllm

GONE_S = 600.0
MID_RUN_S = 1.0
STAYS_S = 2.0


@contextlib.contextmanager
def killed_in_a_run(engine: Engine, which: Sequence[str]) -> Iterator[None]:
    """Kill processes of an engine while it stores and generates."""
    long = [Request(id=f"k{i}", tokens=prompt(500 + i, 900)) for i in range(8)]

    def kill() -> None:
        for name in which:
            engine.kill(name)

    timer = threading.Timer(MID_RUN_S, kill)
    timer.start()
    with pytest.raises(EngineFailed, match=r"(?i)died|dead"):
        engine.run(long, max_tokens=5000, timeout_s=600)
    timer.join()
    yield
    engine.close()


@pytest.mark.parametrize(
    "which",
    [
        ["core", "worker0"],
        pytest.param(["core"], marks=pytest.mark.long),
        pytest.param(["worker0"], marks=pytest.mark.long),
    ],
    ids="+".join,
)
def test_nothing_is_left_of_a_private_store(model: Callable[[str], Path], which: list[str]) -> None:
    before, name = shared_memory_files(), f"killed-{'-'.join(which)}-{os.getpid()}"
    connector = attach() | {"engine_id": name}
    with Engine(model("llama_s"), connector=connector, in_process=False) as engine:
        store = private_store_of(engine)
        memory = memory_of(store.pid)
        assert memory
        assert store.pid in holders(memory)
        assert has_private_address(name)
        with killed_in_a_run(engine, which):
            eventually(lambda: gone(store), GONE_S)
    assert eventually(lambda: not holders(memory), GONE_S)
    assert not has_private_address(name)
    assert shared_memory_files() <= before


def engine_processes(engine: Engine) -> dict[str, psutil.Process]:
    return {name: psutil.Process(pid) for name, pid in engine.pids().items()}


def slots(store: StoreProcess) -> float:
    return numbers(store.address).get("kvstore_slots{granted}", 0)


@pytest.mark.long
@pytest.mark.parametrize("which", [["core"], ["worker0"], ["core", "worker0"]], ids="+".join)
def test_a_shared_store_gets_its_slots_back(
    model: Callable[[str], Path], store: StoreProcess, which: list[str]
) -> None:
    connector = attach(store)
    with Engine(model("llama_s"), connector=connector, in_process=False) as engine:
        assert slots(store) > 0
        with killed_in_a_run(engine, which):
            assert_given_back(store.address)


def test_O23_slots_come_back_only_once_the_worker_is_gone(
    model: Callable[[str], Path], store: StoreProcess
) -> None:
    """A worker that hangs might still write, whatever became of its engine."""
    with Engine(model("llama_s"), connector=attach(store), in_process=False) as engine:
        engine.run([Request(id="a", tokens=prompt(600, 500))], max_tokens=4)
        processes = engine_processes(engine)
        granted = slots(store)
        assert granted > 0
        engine.kill("worker0", signal.SIGSTOP)
        engine.kill("core")
        eventually(lambda: gone(processes["core"]), GONE_S)
        eventually(lambda: "kvstore_sessions{ending}" in numbers(store.address), GONE_S)
        time.sleep(STAYS_S)
        assert not gone(processes["worker0"])
        assert slots(store) == granted
        engine.kill("worker0")
        eventually(lambda: gone(processes["worker0"]), GONE_S)
        assert_given_back(store.address)
