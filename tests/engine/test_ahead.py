"""Real engines that schedule a step before they have the last one's tokens, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.bench.engine import Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.ahead import AHEAD
from tests.engine.identity import aborted, assert_same, assert_survivors_same
from tests.engine.support import (
    CAPACITY,
    Reference,
    Trouble,
    Troubled,
    eventually,
    families,
    forget,
    grown,
    is_attached,
    numbers,
    only_long,
    servable,
)

pytestmark = pytest.mark.vllm

TOKENS_OUT = 40
HITS = "external_prefix_cache_hits"
FAILED = "kvstore_events{event=load_failed}"


@pytest.fixture(scope="module", params=["llama_s", only_long("gemma3")])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ahead(
    name: str, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Troubled]:
    """A few prompts fit, which come in pieces; the store has a disk."""
    folder = tmp_path_factory.mktemp("ahead")
    disk = f'[nvme]\npath = "{folder / "kv"}"\ncapacity = "1GiB"\n'
    settings = {
        "kv_cache_bytes": 6 << 20,
        "max_num_batched_tokens": 256,
        "extra": {"max_model_len": 1024},
    }
    with pytest.MonkeyPatch.context() as patch, StoreProcess(folder, CAPACITY, disk) as store:
        patch.setenv(AHEAD, "1")
        with closing(Troubled(model(name), folder, store, settings=settings)) as one:
            yield one


def test_two_steps_are_under_way(ahead: Troubled) -> None:
    (got,) = ahead.engine.run([Request(id="one", tokens=prompt(9500, 20))], max_tokens=4)
    assert got.steps_to_first_token == 2, "the second is scheduled before the first one's output"
    forget(ahead.engine)


def test_tokens_are_the_same_cold_from_memory_and_from_disk(
    ahead: Troubled, name: str, reference: Reference
) -> None:
    requests, engine, store = families(12, 95, longest=900), ahead.engine, ahead.store
    expected = reference(name, requests, TOKENS_OUT)
    assert store is not None
    assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
    for tier in ("cpu", "nvme"):
        forget(engine)
        if tier == "nvme":
            store.stop()
            store.__enter__()
            eventually(lambda: is_attached(engine, store.address))
        got = engine.run(requests, max_tokens=TOKENS_OUT)
        assert_same(expected, got)
        assert [r.cached_tokens for r in got] == [servable(len(r.tokens)) for r in requests]
        assert numbers(store.address)[f"kvstore_hit_tokens{{{tier}}}"] > 0
    forget(engine)


def test_O13_tokens_are_the_same_under_pressure_and_when_some_are_aborted(
    ahead: Troubled, name: str, reference: Reference
) -> None:
    requests = families(12, 96, longest=900) + families(12, 97, longest=160)
    engine, expected = ahead.engine, reference(name, requests, TOKENS_OUT)
    before = engine.metrics()
    with ahead.trouble(Trouble.PAUSES):
        for round_ in range(3):
            mixed = aborted(requests, round_, 40) if round_ else requests
            got = engine.run(mixed, max_tokens=TOKENS_OUT)
            assert_survivors_same(expected, got)
            forget(engine)
    assert grown(engine, before, "num_preemptions") > 0
    assert grown(engine, before, HITS) > 0


def test_O15_a_load_that_fails_is_computed(
    ahead: Troubled, name: str, reference: Reference
) -> None:
    """None of them ends in its step: the next one is scheduled before a failure is known."""
    requests, engine = families(12, 98, longest=900), ahead.engine
    expected = reference(name, requests, TOKENS_OUT)
    assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
    forget(engine)
    before = engine.metrics()
    with ahead.trouble(Trouble.FAILING):
        assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
        forget(engine)
    assert grown(engine, before, FAILED) > 0
    assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
    forget(engine)
