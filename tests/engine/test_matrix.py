"""The long matrix: every kind of engine and store through cold runs, hits, pressure, aborts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.bench.engine import Engine, Request, Result
from tests.bench.store import StoreProcess
from tests.engine.identity import aborted, assert_same, assert_survivors_same
from tests.engine.support import (
    CAPACITY,
    Reference,
    Trouble,
    Troubled,
    attach,
    families,
    forget,
    grown,
    servable,
    together,
)

pytestmark = [pytest.mark.vllm, pytest.mark.long]

TOKENS_OUT = 80
MODEL_LEN = 1024
ABORT_SPAN = 120  # steps
EXTERNAL = "external_prefix_cache_hits"
SMALL_STORE = "16MiB"  # a quarter of what the prompts need: blocks leave while others wait for them
Expected = Callable[[str], list[Result]]


def prompts(seed: int) -> list[Request]:
    return families(count=16, seed=seed, longest=900) + families(12, seed + 100, longest=160)


@pytest.fixture(scope="module")
def expected_of(reference: Reference) -> Expected:
    """Results without connector, by model, computed once."""
    return cache(lambda name: reference(name, prompts(1), TOKENS_OUT))


class Kind(NamedTuple):
    """One engine of the matrix."""

    name: str
    chunk: int
    block_tokens: int
    cache_mib: int
    copies: str  # slow or fast


# Each triple of model, chunk and block size once; small and large caches and slow copies alternate,
# so that each pair of any two settings occurs.
KINDS = [
    Kind(*settings, cache_mib, copies)
    for settings, cache_mib, copies in zip(
        product(["llama_s", "gemma3"], [256, 2048], [32, 64, 128]),
        [6, 64, 6, 64, 6, 64, 64, 6, 64, 6, 64, 6],
        ["slow", "fast", "fast", "slow"] * 3,
        strict=True,
    )
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(part) for part in kind))
def test_every_kind_of_engine(
    model: Callable[[str], Path], expected_of: Expected, tmp_path: Path, kind: Kind
) -> None:
    name, chunk, block_tokens, cache_mib, copies = kind
    expected = expected_of(name)
    settings: dict[str, Any] = {
        "kv_cache_bytes": cache_mib << 20,
        "max_num_batched_tokens": chunk,
        "extra": {"max_model_len": MODEL_LEN},
    }
    one = Troubled(model(name), tmp_path, settings=settings, block_tokens=block_tokens)
    kinds = [Trouble.PAUSES] if copies == "slow" else []
    with closing(one), one.trouble(*kinds):
        engine = one.engine
        assert_same(expected, engine.run(prompts(1), max_tokens=TOKENS_OUT))
        forget(engine)
        before = engine.metrics()
        again = engine.run(together(prompts(1)), max_tokens=TOKENS_OUT)
        assert_same(expected, again)
        assert grown(engine, before, EXTERNAL) > 0
        if cache_mib >= 64:
            for request, result in zip(prompts(1), again, strict=True):
                whole = servable(len(request.tokens), block_tokens)
                seen = {k: v for k, v in engine.metrics().items() if v and k.startswith("kvstore_")}
                assert result.cached_tokens > whole - block_tokens, seen  # less than one is no hit
                assert result.cached_tokens <= servable(len(request.tokens))
        for seed in range(3):
            got = engine.run(aborted(prompts(1), seed, ABORT_SPAN), max_tokens=TOKENS_OUT)
            assert_survivors_same(expected, got)
            assert any(result.finished for result in got)
        forget(engine)


@pytest.mark.parametrize("name", ["llama_s", "gemma3"])
def test_a_store_too_small_for_what_it_is_asked(
    model: Callable[[str], Path], expected_of: Expected, tmp_path: Path, name: str
) -> None:
    expected = expected_of(name)
    with (
        StoreProcess(tmp_path, SMALL_STORE) as store,
        Engine(model(name), connector=attach(store), extra={"max_model_len": MODEL_LEN}) as engine,
    ):
        for _ in range(4):
            assert_same(expected, engine.run(prompts(1), max_tokens=TOKENS_OUT))
            forget(engine)
        assert store.metrics()['kvstore_evicted_blocks_total{reason="capacity"}'] > 0


@pytest.mark.parametrize("name", ["llama_s", "gemma3"])
def test_two_engines_at_once_on_one_store(
    model: Callable[[str], Path], expected_of: Expected, tmp_path: Path, name: str
) -> None:
    """What one stores the other loads, while both are at it."""
    expected = expected_of(name)
    results: list[list[Result]] = []
    settings: dict[str, Any] = {"kv_cache_bytes": 8 << 20, "extra": {"max_model_len": MODEL_LEN}}
    with ExitStack() as stack:
        store = stack.enter_context(StoreProcess(tmp_path, CAPACITY))
        engines = [
            stack.enter_context(Engine(model(name), connector=attach(store), **settings))
            for _ in range(2)
        ]

        def work(engine: Engine, requests: list[Request]) -> None:
            for _ in range(3):
                results.append(engine.run(requests, max_tokens=TOKENS_OUT))
                forget(engine)

        orders = [prompts(1), prompts(1)[::-1]]
        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(engines, orders, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 6
        for got in results:
            assert_same(expected, got)
        assert all(engine.metrics()[EXTERNAL] > 0 for engine in engines)


@pytest.mark.parametrize("name", ["llama_s", "gemma3"])
def test_as_processes(
    model: Callable[[str], Path], expected_of: Expected, tmp_path: Path, name: str
) -> None:
    """Scheduler and worker apart, as in production; a shared store."""
    expected = expected_of(name)
    with (
        StoreProcess(tmp_path, CAPACITY) as store,
        Engine(
            model(name),
            connector=attach(store),
            in_process=False,
            kv_cache_bytes=8 << 20,
            max_num_batched_tokens=512,
            extra={"max_model_len": MODEL_LEN},
        ) as engine,
    ):
        for _ in range(2):
            before = engine.metrics()
            assert_same(expected, engine.run(prompts(1), max_tokens=TOKENS_OUT))
            got = engine.run(aborted(prompts(1), 1, ABORT_SPAN), max_tokens=TOKENS_OUT)
            assert_survivors_same(expected, got)
            assert any(result.finished for result in got)
            forget(engine)
        assert grown(engine, before, EXTERNAL) > 0
