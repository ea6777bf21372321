"""What comes from the tiers, counted exactly: by the engine, by the connector, by the store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.store import admin
from tests.bench.engine import Request, Result
from tests.bench.models import prompt
from tests.engine.ahead import ENDS_IN_STEP
from tests.engine.identity import assert_same
from tests.engine.served import Served
from tests.engine.support import (
    BLOCK_BYTES,
    ENGINE_BLOCK,
    TOKENS_OUT,
    blocks_kept,
    families,
    forget,
    grown,
    numbers,
    servable,
)
from tests.harness.live import eventually

pytestmark = pytest.mark.vllm

EXTERNAL = "external_prefix_cache_hits"
ASKED = "external_prefix_cache_queries"
FROM_HOST = "prompt_tokens_cached_by_source{source=host}"
LOCAL = "prompt_tokens_cached_by_source{source=device}"
STORED = "kvstore_stored_blocks{stored}"
COPIED = "kvstore_copied_bytes{store}"


def unique(seed: int, count: int = 6) -> list[Request]:
    """Prompts that share nothing, some of them whole blocks long."""
    return [
        Request(id=f"u{seed}.{i}", tokens=prompt(10_000 * seed + i, 128 + 77 * i - i % 2))
        for i in range(count)
    ]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    differ = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differ, min(len(one), len(other)))


def local_hits(requests: Sequence[Request]) -> int:
    """Tokens that an engine has from earlier prompts of the same run, one after the other."""
    total = 0
    for index, request in enumerate(requests):
        shared = [common_prefix(request.tokens, earlier.tokens) for earlier in requests[:index]]
        whole = max(shared, default=0) // ENGINE_BLOCK * ENGINE_BLOCK
        total += min(whole, servable(len(request.tokens)))
    return total


def assert_exact(served: Served, requests: Sequence[Request], reference: list[Result]) -> None:
    """Run prompts whose blocks are all in the store, and compare every count with the formula."""
    before, before_store = served.engine.metrics(), served.stats()
    got = served.one_by_one(requests)
    after = served.since(before_store)
    assert_same(reference, got)
    assert [result.cached_tokens for result in got] == [servable(len(r.tokens)) for r in requests]
    own = grown(served.engine, before, LOCAL)
    if served.groups == 1:  # with windows, an engine that loaded the last one cannot branch off
        assert own == local_hits(requests)
    expected = sum(servable(len(request.tokens)) for request in requests) - own
    assert grown(served.engine, before, EXTERNAL) == expected
    assert grown(served.engine, before, FROM_HOST) == expected
    assert after["kvstore_hit_tokens{cpu}"] == expected
    asked = sum(len(request.tokens) for request in requests) - own
    assert grown(served.engine, before, ASKED) == asked
    assert after["kvstore_lookup_tokens"] == asked
    assert "kvstore_evicted_blocks{capacity}" not in after


def test_M1_M2_hits_are_exact_after_a_reset(served: Served) -> None:
    requests = families(count=12, seed=1)
    reference = served.one_by_one(requests)
    forget(served.engine)
    assert_exact(served, requests, reference)
    forget(served.engine)
    assert_exact(served, requests, reference)
    endpoint, told = served.store.metrics(), numbers(served.store.address)
    assert endpoint['kvstore_hit_tokens_total{tier="cpu"}'] == told["kvstore_hit_tokens{cpu}"]
    assert endpoint["kvstore_lookup_tokens_total"] == told["kvstore_lookup_tokens"]
    forget(served.engine)


@ENDS_IN_STEP
def test_O6_with_nothing_else_to_run_a_hit_takes_one_step(served: Served) -> None:
    """Once at least: a slow store's answer comes a step later."""
    one = Request(id="alone", tokens=prompt(77, 1000))
    reference = served.one_by_one([one])

    def steps() -> int | None:
        served.stats()
        forget(served.engine)
        before = served.engine.metrics()
        got = served.one_by_one([one])
        assert_same(reference, got)
        assert grown(served.engine, before, EXTERNAL) == servable(1000)
        return got[0].steps_to_first_token

    expected = 1 if served.groups == 1 else 2  # of one group blocks can fail
    eventually(lambda: steps() == expected)
    forget(served.engine)


def test_Q34_Q35_a_requests_own_limits_count(served: Served) -> None:
    tokens = prompt(78, 1000)

    def run(**limits: object) -> tuple[Result, float]:
        before = served.stats()
        request = Request(id="limited", tokens=tokens, kv_transfer_params=limits)
        (result,) = served.one_by_one([request])
        forget(served.engine)
        return result, served.since(before).get(STORED, 0)

    reference, stored = run(max_offload_tokens=0)
    assert stored == 0
    _, stored = run(kv_store_tiers="nowhere")
    assert stored == 0, "it is not known what it wants kept from where"
    _, stored = run(offload_prompt_only=True)
    assert stored == servable(1000) // ENGINE_BLOCK * served.groups
    result, _ = run(max_load_tokens=0)
    assert result.cached_tokens == 0
    assert_same([reference], [result])
    result, _ = run(max_load_tokens=5 * ENGINE_BLOCK + 1)
    assert result.cached_tokens == 5 * ENGINE_BLOCK
    assert_same([reference], [result])
    result, _ = run(kv_load_tiers=[{"medium": "CPU"}], kv_store_tiers=[])
    assert result.cached_tokens == servable(1000)
    assert_same([reference], [result])


def test_Q40_tenants_of_one_engine_share_nothing(served: Served) -> None:
    tokens, cached = prompt(79, 1000), []
    for tenant in ("one", "two", "one", ""):
        params = {"tenant": tenant} if tenant else None
        request = Request(id="tenant", tokens=tokens, kv_transfer_params=params)
        cached.append(served.one_by_one([request])[0].cached_tokens)
        served.stats()
        forget(served.engine)
    assert cached == [0, 0, servable(1000), 0]


def test_Q50_a_request_pins_its_prompt_and_another_lets_go_of_it(served: Served) -> None:
    whole = 600 // ENGINE_BLOCK

    def run(**params: object) -> None:
        served.one_by_one([Request(id="pin", tokens=prompt(80, 600), kv_transfer_params=params)])

    def pins() -> list[tuple[str, int, int]]:
        return [(pin.name, pin.blocks, pin.asked) for pin in admin.pins(served.store.path)]

    run(kv_pin="system")
    eventually(lambda: pins() == [("system", whole, whole)])
    run(kv_unpin="system")
    eventually(lambda: pins() == [])


def test_O11_what_is_stored_is_not_stored_again(served: Served) -> None:
    requests = unique(seed=2)
    expected = blocks_kept(requests, TOKENS_OUT) * served.groups
    before = served.stats()
    reference = served.engine.run(requests, max_tokens=TOKENS_OUT)
    forget(served.engine)
    cold = served.since(before)
    assert cold[STORED] == expected
    assert cold[COPIED] == expected * BLOCK_BYTES[served.name]
    assert cold["kvstore_slots{used}"] == expected
    assert "kvstore_copied_bytes{load}" not in cold
    before = served.stats()
    again = served.engine.run(requests, max_tokens=TOKENS_OUT)
    forget(served.engine)
    assert_same(reference, again)
    hot = served.since(before)
    assert STORED not in hot
    assert COPIED not in hot
    assert hot["kvstore_hit_tokens{cpu}"] == sum(servable(len(r.tokens)) for r in requests)


def test_O12_what_only_the_engine_still_has_is_offered_again(served: Served) -> None:
    requests = unique(seed=3)
    served.engine.run(requests, max_tokens=TOKENS_OUT)
    served.engine.go_idle()
    served.stats()
    admin.clear(served.store.address)
    served.events()  # the engine hears of that in its steps, of a limited number of blocks in each
    before, metrics = served.stats(), served.engine.metrics()
    assert "kvstore_slots{used}" not in before
    served.engine.run(requests, max_tokens=TOKENS_OUT)
    own = sum(servable(len(request.tokens)) for request in requests)
    assert grown(served.engine, metrics, LOCAL) == own
    forget(served.engine)
    stored = served.since(before)[STORED]
    if served.groups == 1:
        assert stored == blocks_kept(requests, TOKENS_OUT)
    before, metrics = served.stats(), served.engine.metrics()
    served.engine.run(requests, max_tokens=TOKENS_OUT)
    assert grown(served.engine, metrics, EXTERNAL) == own
    forget(served.engine)


def test_O17_a_connector_reset_is_for_one_engine_only(served: Served) -> None:
    """And, on the way, hits are exact after a restart: the new engine was never reset."""
    requests = families(count=8, seed=4)
    metrics = served.engine.metrics()
    reference = served.one_by_one(requests)
    cold = grown(served.engine, metrics, EXTERNAL)  # windows: shared prefixes come from the store
    forget(served.engine, connector_too=True)
    metrics = served.engine.metrics()
    assert_same(reference, served.one_by_one(requests))
    assert grown(served.engine, metrics, EXTERNAL) == cold
    forget(served.engine)
    assert_exact(served, requests, reference)  # what it has stored since
    served.restart()
    assert_exact(served, requests, reference)
    forget(served.engine)
