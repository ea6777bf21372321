"""Real engines get their KV back from disk: after the store's restart, and after their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.bench.engine import Engine, Request, Result
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    CAPACITY,
    ENGINE_BLOCK,
    TOKENS_OUT,
    attach,
    eventually,
    forget,
    grown,
    is_attached,
    numbers,
    only_long,
    private_store_of,
    servable,
    settled,
)
from tests.harness.handover_nodes import gone

pytestmark = pytest.mark.vllm

EXTERNAL = "external_prefix_cache_hits"
FROM_DISK = "prompt_tokens_cached_by_source{source=disk}"
STORED = "kvstore_tier_blocks{nvme,stored}"
LOADED = "kvstore_tier_blocks{nvme,loaded}"


def unique(count: int = 6) -> list[Request]:
    """Prompts that share nothing, some of them whole blocks long."""
    return [
        Request(id=f"n{i}", tokens=prompt(77_000 + i, 128 + 177 * i - i % 2)) for i in range(count)
    ]


def one_by_one(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    return [engine.run([one], max_tokens=TOKENS_OUT)[0] for one in requests]


def assert_all_from_disk(
    engine: Engine, requests: Sequence[Request], reference: list[Result]
) -> None:
    before = engine.metrics()
    got = one_by_one(engine, requests)
    assert_same(reference, got)
    expected = sum(servable(len(request.tokens)) for request in requests)
    assert [result.cached_tokens for result in got] == [servable(len(r.tokens)) for r in requests]
    assert grown(engine, before, EXTERNAL) == expected
    assert grown(engine, before, FROM_DISK) == expected


@pytest.mark.parametrize("name", ["llama_s", pytest.param("gemma3", marks=pytest.mark.long)])
def test_hits_come_from_disk_after_a_restart_of_the_store(
    name: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    requests = unique()
    settings = f'\n[nvme]\npath = "{tmp_path / "kv"}"\ncapacity = "256MiB"\n'
    store = StoreProcess(tmp_path, CAPACITY, settings)
    with store, Engine(model(name), connector=attach(store)) as engine:
        reference = one_by_one(engine, requests)
        forget(engine)
        stored = settled(lambda: numbers(store.address).get(STORED, 0))
        assert stored == numbers(store.address)["kvstore_stored_blocks{stored}"]
        store.stop()
        store.__enter__()
        eventually(lambda: is_attached(engine, store.address))
        assert_all_from_disk(engine, requests, reference)
        forget(engine)
        assert "kvstore_tier_blocks{nvme,damaged}" not in numbers(store.address)


@pytest.mark.parametrize("name", ["llama_s", pytest.param("gemma3", marks=pytest.mark.long)])
def test_hits_come_from_disk_after_a_restart_of_an_engine_with_a_private_store(
    name: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    requests = unique()
    connector = attach(nvme={"path": str(tmp_path / "kv"), "capacity": "256MiB"})
    with Engine(model(name), connector=connector) as engine:
        reference = one_by_one(engine, requests)
        store = private_store_of(engine)
    eventually(lambda: gone(store), within_s=600)
    with Engine(model(name), connector=connector) as engine:
        assert_all_from_disk(engine, requests, reference)


@pytest.mark.parametrize("leased", [only_long("25%"), "90%"])
def test_O20_a_queue_of_prompts_longer_than_memory_reads_each_block_once(
    leased: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """What waits in the engine's queue pushes nothing out of memory that is to be loaded sooner."""
    requests = [Request(id=f"q{i}", tokens=prompt(78_000 + i, 1001)) for i in range(24)]
    settings = (
        f'\n[nvme]\npath = "{tmp_path / "kv"}"\ncapacity = "256MiB"\n'
        f'[engine]\npromote = "60s"\nleased = "{leased}"\n'
    )
    with (
        StoreProcess(tmp_path, "16MiB", settings) as store,  # eight prompts
        Engine(model("llama_s"), connector=attach(store)) as engine,
    ):
        reference = one_by_one(engine, requests)
        forget(engine)
        settled(lambda: numbers(store.address).get(STORED, 0))
        before = engine.metrics()
        got = engine.run(requests, max_tokens=TOKENS_OUT)
        assert_same(reference, got)
        expected = sum(servable(len(request.tokens)) for request in requests)
        assert grown(engine, before, EXTERNAL) == expected
        assert numbers(store.address)[LOADED] <= expected // ENGINE_BLOCK
