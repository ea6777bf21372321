"""Two workers, each with half of every block; and one that reads what the two have written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.engine import Engine, EngineFailed, Request, Result
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    BLOCK_BYTES,
    GROUPS,
    TOKENS_OUT,
    assert_given_back,
    attach,
    blocks_kept,
    forget,
    grown,
    numbers,
    servable,
    settled,
    since,
)

pytestmark = [pytest.mark.vllm, pytest.mark.long]

EXTERNAL = "external_prefix_cache_hits"


def prompts() -> list[Request]:
    return [Request(id=f"p{i}", tokens=prompt(900 + i, 100 + 83 * i)) for i in range(12)]


def grow(engine: Engine, store: StoreProcess) -> None:
    """Have the store make memory: what a window leaves behind before there is any is not stored."""
    others = [Request(id=f"g{i}", tokens=prompt(8900 + i, 500)) for i in range(12)]
    engine.run(others, max_tokens=1)
    settled(lambda: numbers(store.address))
    forget(engine)


def hit_again(engine: Engine, requests: list[Request]) -> list[Result]:
    """Run prompts that are all in the store; every token that can be is a hit."""
    before = engine.metrics()
    got = engine.run(requests, max_tokens=TOKENS_OUT)
    assert [result.cached_tokens for result in got] == [servable(len(r.tokens)) for r in requests]
    assert grown(engine, before, EXTERNAL) == sum(servable(len(r.tokens)) for r in requests)
    forget(engine)
    return got


@pytest.mark.parametrize("name", ["llama_s", "gemma3"])
def test_O18_blocks_are_the_sum_of_the_ranks_parts(
    model: Callable[[str], Path], store: StoreProcess, name: str
) -> None:
    requests = prompts()
    with Engine(model(name), in_process=False, tensor_parallel_size=2) as engine:
        expected = engine.run(requests, max_tokens=TOKENS_OUT)
    with Engine(
        model(name), connector=attach(store), in_process=False, tensor_parallel_size=2
    ) as engine:
        grow(engine, store)
        before = numbers(store.address)
        assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
        forget(engine)
        after = settled(lambda: since(store.address, before), quiet_s=2.0)  # two ranks report
        kept = blocks_kept(requests, TOKENS_OUT) * GROUPS[name]
        assert after["kvstore_stored_blocks{stored}"] == kept
        assert after["kvstore_copied_bytes{store}"] == kept * BLOCK_BYTES[name]
        assert_same(expected, hit_again(engine, requests))
        threading.Timer(0.5, engine.kill, ["worker1"]).start()
        with pytest.raises(EngineFailed, match=r"(?i)died|dead"):
            engine.run(requests, max_tokens=4000, timeout_s=600)
        assert_given_back(store.address)
    # Heads are the outermost part of a page, so it makes no difference how many ranks wrote it.
    with Engine(model(name), connector=attach(store)) as engine:
        # Hits are exact. Tokens are not compared: one rank rounds its sums differently from two,
        # with or without a connector; that the bytes are equal is shown in tests/test_layout.py.
        assert len(hit_again(engine, requests)) == len(requests)
