"""With the connector every token is what it is without, whatever the engine goes through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.bench.engine import Request
from tests.bench.models import prompt
from tests.engine.ahead import ENDS_IN_STEP
from tests.engine.identity import aborted, assert_same, assert_survivors_same, divergences
from tests.engine.served import Served
from tests.engine.support import (
    TOKENS_OUT,
    Reference,
    Trouble,
    Troubled,
    families,
    forget,
    grown,
    numbers,
    servable,
    settled,
    since,
    together,
)

pytestmark = pytest.mark.vllm

LONG_OUT = 50  # growing by this much is what makes a small KV cache preempt
# A cache that holds a few of the prompts, and a small token budget.
TIGHT: dict[str, Any] = {
    "kv_cache_bytes": 4 << 20,
    "max_num_batched_tokens": 256,
    "extra": {"max_model_len": 1024},
}
HITS = "external_prefix_cache_hits"


@pytest.fixture(scope="session")
def tight(
    model_name: str, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Troubled]:
    """Nothing fits, prompts come in pieces, copies take several steps; blocks of 64 tokens."""
    folder = tmp_path_factory.mktemp("tight")
    one = Troubled(model(model_name), folder, settings=TIGHT, block_tokens=64)
    with contextlib.closing(one):
        yield one


def pressure(seed: int) -> list[Request]:
    """Some prompts that hardly fit, and some short ones that grow to many times their size."""
    return families(count=12, seed=seed, longest=900) + families(
        count=16, seed=seed + 1, longest=160
    )


def test_cold_and_from_our_tier(reference: Reference, served: Served) -> None:
    requests, roomy = families(), served.engine
    expected = reference(served.name, requests, TOKENS_OUT)
    assert_same(expected, roomy.run(requests, max_tokens=TOKENS_OUT))
    for again in (requests, together(requests)):  # the second: all of them at once
        forget(roomy)
        before = roomy.metrics()
        got = roomy.run(again, max_tokens=TOKENS_OUT)
        assert_same(expected, got)
        assert grown(roomy, before, HITS) > sum(len(r.tokens) for r in again) / 2
        for request, result in zip(again, got, strict=True):
            assert result.cached_tokens == servable(len(request.tokens))
    forget(roomy)


def test_what_was_generated_is_kept_too(reference: Reference, served: Served) -> None:
    """A second turn: the prompt, what was answered to it, and a new question."""
    roomy = served.engine
    first = [Request(id=f"t{i}", tokens=prompt(7000 + i, 150 + 61 * i)) for i in range(6)]
    answers = roomy.run(first, max_tokens=90)
    turns = [
        Request(id=one.id, tokens=[*one.tokens, *answer.tokens, *prompt(7100 + index, 40)])
        for index, (one, answer) in enumerate(zip(first, answers, strict=True))
    ]
    expected = reference(served.name, turns, TOKENS_OUT)
    forget(roomy)
    got = roomy.run(turns, max_tokens=TOKENS_OUT)
    assert_same(expected, got)
    for one, result in zip(first, got, strict=True):
        assert result.cached_tokens == (len(one.tokens) + 90 - 1) // 32 * 32
    forget(roomy)


def test_under_pressure(reference: Reference, model_name: str, tight: Troubled) -> None:
    """Chunked prefill, preemption, loads into blocks whose old bytes are still being stored."""
    requests, engine = pressure(1), tight.engine
    expected = reference(model_name, requests, LONG_OUT)
    before = engine.metrics()
    with tight.trouble(Trouble.PAUSES):
        assert_same(expected, engine.run(requests, max_tokens=LONG_OUT))
        assert grown(engine, before, "num_preemptions") > 0
        forget(engine)
        before = engine.metrics()
        assert_same(expected, engine.run(together(requests), max_tokens=LONG_OUT))
        assert grown(engine, before, "num_preemptions") > 0
        assert grown(engine, before, HITS) > sum(len(r.tokens) for r in requests) / 3
        forget(engine)


def test_aborts_at_every_stage(reference: Reference, model_name: str, tight: Troubled) -> None:
    """Before the first schedule, during a load, in the middle of a prompt, while generating."""
    requests, engine = pressure(3), tight.engine
    expected = reference(model_name, requests, LONG_OUT)
    with tight.trouble(Trouble.PAUSES):
        for round_, span in enumerate((6, 30, 150)):  # cold, then with hits
            mixed = aborted(requests, round_, span)
            got = engine.run(mixed, max_tokens=LONG_OUT)
            assert_survivors_same(expected, got)
            assert any(result.aborted and not result.tokens for result in got)
            assert any(result.finished for result in got)
            forget(engine)
    assert any(result.aborted and result.tokens for result in got)


def test_an_abort_while_its_load_runs(
    reference: Reference, model_name: str, tight: Troubled
) -> None:
    """The blocks stay the load's until it ends, whoever waits for them meanwhile."""
    engine, shared = tight.engine, prompt(8000, 500)
    requests = [Request(id=f"a{i}", tokens=shared + prompt(8001 + i, 60)) for i in range(3)]
    expected = reference(model_name, requests, TOKENS_OUT)
    assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
    forget(engine)
    first, *others = requests
    mixed = [msgspec.structs.replace(first, abort_step=2), *others]
    with tight.trouble(Trouble.SLOW_LOAD, Trouble.OUTSIDE):
        got = engine.run(mixed, max_tokens=TOKENS_OUT)
        assert tight.has_begun(Trouble.SLOW_LOAD)
    assert got[0].aborted
    assert got[0].tokens == []
    assert_same(expected[1:], got[1:])
    # What the first of the others has loaded, the second has; less than a block more is no hit.
    assert all(result.cached_tokens in {480, 512} for result in got[1:])
    forget(engine)


def test_one_lost_block_is_noticed(troubled: Callable[[str], Troubled], model_name: str) -> None:
    """The comparison has teeth: leave one block of each load empty, and it fails."""
    one, requests = troubled(model_name), together(families(count=12, seed=30))
    expected = one.engine.run(requests, max_tokens=TOKENS_OUT)
    forget(one.engine)
    with one.trouble(Trouble.FORGETFUL):
        got = one.engine.run(requests, max_tokens=TOKENS_OUT)
        forget(one.engine)
    assert len(divergences(expected, got)) > len(requests) / 2
    with pytest.raises(AssertionError, match="prompts differ"):
        assert_same(expected, got)


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


@ENDS_IN_STEP
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


@pytest.mark.long
@pytest.mark.parametrize("fence", [True, False])
def test_O13_without_the_fence_wrong_bytes_are_kept(
    reference: Reference, model_name: str, tight: Troubled, fence: bool
) -> None:
    """Stores that take long, in a cache so small that their sources have new owners by then."""
    requests, engine = pressure(5 if fence else 7), tight.engine
    expected = reference(model_name, requests, 2 * LONG_OUT)
    kinds = [Trouble.LONG_PAUSES] if fence else [Trouble.LONG_PAUSES, Trouble.NO_FENCE]
    with tight.trouble(*kinds):
        engine.run(requests, max_tokens=2 * LONG_OUT)
        forget(engine)
        got = engine.run(requests, max_tokens=2 * LONG_OUT)
        forget(engine)
    if fence:
        assert_same(expected, got)
    else:
        with pytest.raises(AssertionError, match="prompts differ"):
            assert_same(expected, got)
