"""Loads that fail: counted, the damaged copy dropped, the tokens computed instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.bench.engine import Engine
from kvstore.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    CAPACITY,
    TOKENS_OUT,
    attach,
    broken,
    families,
    forget,
    grown,
    numbers,
    settled,
    since,
)

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama_s", "ReusedConnector"),  # the slot has another generation
        ("gemma3", "FailingConnector"),  # the copy stops half-way; four KV groups
        pytest.param("llama_s", "FailingConnector", marks=pytest.mark.e2e),
        pytest.param("gemma3", "ReusedConnector", marks=pytest.mark.e2e),
    ],
)
def test_O15_what_a_failed_load_should_have_brought_is_computed(
    model: Callable[[str], Path], tmp_path: Path, name: str, how: str
) -> None:
    requests = families(count=12)
    with (
        StoreProcess(tmp_path, CAPACITY) as store,
        Engine(model(name), connector=attach(store, by=broken(how))) as engine,
    ):

        def store_numbers() -> dict[str, float]:
            return numbers(store.address)

        expected = engine.run(requests, max_tokens=TOKENS_OUT)
        forget(engine)
        for _ in range(2):
            told, counted = settled(store_numbers), engine.metrics()
            assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
            forget(engine)
            settled(store_numbers)
            after = since(store.address, told)
            failed = grown(engine, counted, "kvstore_events{event=load_failed}")
            assert 0 < failed <= 2 * len(requests)  # another copy is tried once
            assert after["kvstore_engine_events{load_failed}"] == failed
            assert after["kvstore_evicted_blocks{damaged}"] > 0
            assert after["kvstore_stored_blocks{stored}"] > 0  # computed, and kept again
            assert "kvstore_leases" not in numbers(store.address)
