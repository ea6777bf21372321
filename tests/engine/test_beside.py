"""Beside vLLM's own offloading in a MultiConnector: nothing of the other's is stored as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.store import admin
from tests.bench.engine import Engine, Request
from tests.bench.handover import HANDED, native, native_env
from tests.bench.models import prompt
from tests.bench.native import native_config
from tests.bench.store import StoreProcess
from tests.engine.ahead import ENDS_IN_STEP
from tests.engine.identity import assert_same
from tests.engine.support import (
    CAPACITY,
    ENGINE_BLOCK,
    LLAMA_BLOCK_BYTES,
    OURS,
    TOKENS_OUT,
    TROUBLES,
    Trouble,
    attach,
    broken,
    eventually,
    forget,
    grown,
    numbers,
    servable,
    settled,
    wanted_file,
)

pytestmark = pytest.mark.vllm

ENGINE_BLOCKS = 41  # a prompt and the next one do not fit together
TOKENS = 810
SMALL: dict[str, Any] = {
    "kv_cache_bytes": ENGINE_BLOCKS * LLAMA_BLOCK_BYTES,
    "extra": {"max_model_len": 1024},
}


def both(
    store: StoreProcess, *, ours_first: bool, by: str = broken("TroubledConnector")
) -> dict[str, Any]:
    """A MultiConnector of vLLM's own offloading and ours, with vLLM's default policy."""
    ours = attach(store, by=by)
    del ours["kv_load_failure_policy"]
    connectors = [native_config(64 << 20), ours]
    return children(*connectors[:: -1 if ours_first else 1]) | {"kv_load_failure_policy": "fail"}


@pytest.fixture(params=[False, True], ids=["ours-last", "ours-first"])
def beside(
    request: pytest.FixtureRequest, model: Callable[[str], Path], tmp_path: Path
) -> Iterator[tuple[Engine, StoreProcess]]:
    """An engine with both, small enough that prompts take each other's blocks."""
    with StoreProcess(tmp_path, CAPACITY) as store:
        connector = both(store, ours_first=request.param)
        env = {TROUBLES: str(tmp_path)}
        with Engine(model("llama_s"), connector=connector, env=env, **SMALL) as engine:
            yield engine, store


def test_O13_blocks_that_another_connector_loads_into_are_stored_before(
    beside: tuple[Engine, StoreProcess],
    model: Callable[[str], Path],
    plain: Callable[[str], Engine],
    tmp_path: Path,
) -> None:
    engine, store = beside
    firsts = [Request(id=f"a{i}", tokens=prompt(900 + i, TOKENS)) for i in range(4)]
    seconds = [Request(id=f"b{i}", tokens=prompt(950 + i, TOKENS), arrive_step=6) for i in range(4)]
    expected = plain("llama_s").run(firsts, max_tokens=TOKENS_OUT)
    for second in seconds:
        engine.run([second], max_tokens=2)  # so that the other one has it
    engine.go_idle()
    forget(engine)
    settled(lambda: numbers(store.address))
    admin.clear(store.address)  # and ours not
    before = engine.metrics()
    wanted_file(tmp_path, Trouble.LONG_PAUSES).touch()
    for first, second in zip(firsts, seconds, strict=True):
        engine.run([first, second], max_tokens=4)
    wanted_file(tmp_path, Trouble.LONG_PAUSES).unlink()
    loaded = grown(engine, before, "external_prefix_cache_hits")
    assert loaded == sum(servable(TOKENS) for _ in seconds)  # over their firsts' blocks
    engine.go_idle()
    settled(lambda: numbers(store.address))
    with Engine(model("llama_s"), connector=attach(store)) as other:
        got = other.run(firsts, max_tokens=TOKENS_OUT)
    assert [result.cached_tokens for result in got] == [servable(TOKENS) for _ in firsts]
    assert_same(expected, got)


def test_O15_a_load_that_fails_beside_another_connector_is_computed(
    model: Callable[[str], Path], plain: Callable[[str], Engine], tmp_path: Path
) -> None:
    requests = [Request(id=f"c{i}", tokens=prompt(970 + i, 300 + 90 * i)) for i in range(4)]
    expected = plain("llama_s").run(requests, max_tokens=TOKENS_OUT)
    with StoreProcess(tmp_path, CAPACITY) as store:
        connector = both(store, ours_first=True)
        with Engine(model("llama_s"), connector=connector, env={TROUBLES: str(tmp_path)}) as engine:
            assert (
                engine.log_path.read_text().count(
                    "kv_load_failure_policy of MultiConnector is 'fail': set to 'recompute'"
                )
                == 1
            )
            engine.run(requests, max_tokens=TOKENS_OUT)
            forget(engine)
            before = settled(engine.metrics)
            wanted_file(tmp_path, Trouble.FAILING).touch()
            got = engine.run(requests, max_tokens=TOKENS_OUT)
            failed = grown(engine, before, "kvstore_events{event=load_failed}")
    assert failed >= len(requests)
    assert {result.finish_reason for result in got} == {"length"}
    assert_same(expected, got)


@pytest.mark.parametrize("ours_first", [False, True])
def test_M1_what_is_counted_beside_another_connector_reaches_vllms_endpoint(
    model: Callable[[str], Path], tmp_path: Path, ours_first: bool
) -> None:
    requests = [Request(id=f"d{i}", tokens=prompt(980 + i, 300)) for i in range(2)]
    with StoreProcess(tmp_path, CAPACITY) as store:
        connector = both(store, ours_first=ours_first, by=OURS)
        with Engine(model("llama_s"), connector=connector) as engine:
            named = {name for name in engine.metrics() if name.startswith("kvstore_events{")}
            engine.run(requests, max_tokens=2)
            engine.go_idle()
            engine.run(requests, max_tokens=2)
            found = engine.metrics()
    whole = 2 * (300 // ENGINE_BLOCK)  # once more if the store was slow to say that it has them
    assert whole <= found["kvstore_planned_blocks{direction=store}"] <= 2 * whole
    assert {"kvstore_events{event=transfer_refused}"} <= named


def test_B10_beside_a_connector_that_hands_over_prompts_are_its_own_and_blocks_ours(
    model: Callable[[str], Path], plain: Callable[[str], Engine], tmp_path: Path
) -> None:
    """Two children that both hand over a request end a MultiConnector's engine."""
    tokens = prompt(990, 300)
    whole = Request(id="whole", tokens=tokens)

    def has_it(store: StoreProcess) -> bool:
        stored = numbers(store.address).get("kvstore_stored_blocks{stored}", 0)
        return stored >= len(tokens) // ENGINE_BLOCK

    expected = plain("llama_s").run([whole], max_tokens=TOKENS_OUT)
    folders = [tmp_path / name for name in "pd"]
    for folder in folders:
        folder.mkdir()
    with (
        StoreProcess(folders[0], CAPACITY, "[peer]\n") as left,
        StoreProcess(folders[1], CAPACITY, "[peer]\n") as right,
    ):
        prefill_by, decode_by = (
            children(native("kv_producer"), attach(left)),
            children(attach(right), native("kv_consumer")),
        )
        with Engine(model("llama_s"), connector=prefill_by, env=native_env()) as prefill:
            first = Request(id="first", tokens=tokens, kv_transfer_params=HANDED)
            (handed,) = prefill.run([first], max_tokens=1)
            assert handed.kv_transfer_params is not None
            with Engine(model("llama_s"), connector=decode_by, env=native_env()) as decode:
                params = handed.kv_transfer_params
                second = Request(id="whole", tokens=tokens, kv_transfer_params=params)
                assert_same(expected, decode.run([second], max_tokens=TOKENS_OUT))
                assert decode.metrics()["external_prefix_cache_hits"] == len(tokens)  # by its count
                for engine, store in ((prefill, left), (decode, right)):
                    engine.go_idle()
                    forget(engine)
                    eventually(partial(has_it, store))
                    (again,) = engine.run([whole], max_tokens=TOKENS_OUT)
                    assert again.cached_tokens == servable(len(tokens))
                    assert_same(expected, [again])


@ENDS_IN_STEP
@pytest.mark.parametrize("ours_first", [False, True])
def test_O15_what_another_connector_calls_bad_after_a_step_is_not_stored(
    model: Callable[[str], Path], plain: Callable[[str], Engine], tmp_path: Path, ours_first: bool
) -> None:
    """It loads within the step, which computes with the bytes; those are in other requests, too."""
    begin = prompt(995, 200)
    requests = [Request(id=f"e{i}", tokens=begin + prompt(996 + i, 100)) for i in range(4)]
    expected = plain("llama_s").run(requests, max_tokens=TOKENS_OUT)
    with StoreProcess(tmp_path, CAPACITY) as store:
        failing = {
            "kv_connector": "FailingConnector",
            "kv_connector_module_path": "tests.engine.neighbour",
            "kv_role": "kv_both",
        }
        connector = children(*[failing, attach(store)][:: -1 if ours_first else 1])
        with Engine(model("llama_s"), connector=connector) as engine:
            assert_same(expected, engine.run(requests, max_tokens=TOKENS_OUT))
            engine.go_idle()
        settled(lambda: numbers(store.address))
        with Engine(model("llama_s"), connector=attach(store)) as other:
            got = other.run(requests, max_tokens=TOKENS_OUT)
    assert [result.cached_tokens for result in got] == [servable(300)] * 4
    assert_same(expected, got)


def children(*connectors: dict[str, Any]) -> dict[str, Any]:
    """The kv_transfer_config of a MultiConnector."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }
