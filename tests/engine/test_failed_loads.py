"""Loads that fail: counted, the damaged copy dropped, the tokens computed instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.bench.engine import Request
from tests.bench.models import prompt
from tests.engine.identity import assert_same
from tests.engine.support import (
    TOKENS_OUT,
    Trouble,
    Troubled,
    families,
    forget,
    grown,
    numbers,
    settled,
    since,
)

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("how", [Trouble.REUSED, Trouble.FAILING])
def test_O15_what_a_failed_load_should_have_brought_is_computed(
    troubled: Callable[[str], Troubled], model_name: str, how: Trouble
) -> None:
    requests = families(count=12, seed=20 + [Trouble.REUSED, Trouble.FAILING].index(how))
    one = troubled(model_name)
    engine, store = one.engine, one.store
    assert store is not None

    def store_numbers() -> dict[str, float]:
        return numbers(store.address)

    expected = engine.run(requests, max_tokens=TOKENS_OUT)
    forget(engine)
    for _ in range(2):
        told, counted = settled(store_numbers), engine.metrics()
        with one.trouble(how):
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


@pytest.mark.parametrize("how", [Trouble.REUSED, Trouble.FAILING])
def test_O15_what_a_failed_load_in_a_step_should_have_brought_is_computed(
    troubled: Callable[[str], Troubled], how: Trouble
) -> None:
    """The step has run by the time that the load is known to have failed."""
    one = troubled("llama_s")
    engine, store = one.engine, one.store
    assert store is not None
    seed = 700 + [Trouble.REUSED, Trouble.FAILING].index(how)
    requests = [Request(id="alone", tokens=prompt(seed, 1000))]
    expected = engine.run(requests, max_tokens=TOKENS_OUT)
    forget(engine)
    settled(lambda: numbers(store.address))
    counted, told = engine.metrics(), numbers(store.address)
    with one.trouble(how):
        assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
    assert grown(engine, counted, "kvstore_events{event=load_failed}") == 1
    assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))  # of what it has itself
    forget(engine)
    settled(lambda: numbers(store.address))
    assert since(store.address, told)["kvstore_stored_blocks{stored}"] > 0
    hits = engine.metrics()
    assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
    assert grown(engine, hits, "external_prefix_cache_hits") == 992
    forget(engine)
    assert "kvstore_leases" not in settled(lambda: numbers(store.address))
