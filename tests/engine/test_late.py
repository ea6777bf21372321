"""A real engine that stores late: what it holds itself is not stored, what it reuses is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench.engine import Engine, Request
from tests.bench.handover import HANDED
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    CAPACITY,
    ENGINE_BLOCK,
    LLAMA_BLOCK_BYTES,
    TOKENS_OUT,
    Reference,
    Trouble,
    Troubled,
    attach,
    families,
    forget,
    numbers,
    servable,
    settled,
)

pytestmark = pytest.mark.vllm

STORED = "kvstore_stored_blocks{stored}"
PROMPT = 500


def unique(first: int, count: int) -> list[Request]:
    """Prompts that share nothing, of 15 whole blocks, and of 16 with their answers."""
    return [Request(id=f"l{n}", tokens=prompt(n, PROMPT)) for n in range(first, first + count)]


@pytest.fixture(scope="module")
def shared(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, StoreProcess]]:
    """12 blocks in a step, of 160; and its store."""
    with (
        StoreProcess(tmp_path_factory.mktemp("late"), CAPACITY, "[peer]\n") as store,
        Engine(
            model("llama_s"),
            connector=attach(store, storing="late"),
            kv_cache_bytes=160 * LLAMA_BLOCK_BYTES,
            max_num_batched_tokens=256,
            extra={"max_num_seqs": 4, "max_model_len": 2048},
        ) as engine,
    ):
        yield engine, store


@pytest.fixture
def late(shared: tuple[Engine, StoreProcess]) -> tuple[Engine, StoreProcess]:
    """Both, with nothing in the engine's own cache."""
    forget(shared[0])
    return shared


def run(engine: Engine, requests: list[Request]) -> list[int]:
    """Run prompts one after the other; return how many of their tokens were cached."""
    got = [engine.run([one], max_tokens=TOKENS_OUT)[0] for one in requests]
    engine.go_idle()
    return [result.cached_tokens for result in got]


def stored(store: StoreProcess) -> int:
    return int(settled(lambda: numbers(store.address).get(STORED, 0)))


def test_O28_blocks_are_stored_when_the_engine_needs_room_and_the_next_turn_hits(
    late: tuple[Engine, StoreProcess], reference: Reference
) -> None:
    (engine, store), prompts = late, unique(700_000, 6)
    before = stored(store)
    first = engine.run(prompts, max_tokens=TOKENS_OUT)
    engine.go_idle()
    assert stored(store) == before, "there is room: the engine has them all"
    assert run(engine, prompts) == [servable(PROMPT)] * 6
    assert stored(store) == before
    run(engine, unique(701_000, 12))
    assert stored(store) - before >= 6 * 15, "these had to leave"
    turns = [
        Request(id=one.id, tokens=[*one.tokens, *answer.tokens, *prompt(702_000 + n, 300)])
        for n, (one, answer) in enumerate(zip(prompts, first, strict=True))
    ]
    expected = reference("llama_s", turns, TOKENS_OUT)
    got = engine.run(turns, max_tokens=TOKENS_OUT)
    assert_same(expected, got)
    assert [result.cached_tokens for result in got] == [servable(PROMPT + TOKENS_OUT)] * 6


def test_O28_with_slow_copies_and_little_memory_outputs_are_those_of_an_empty_cache(
    model: Callable[[str], Path], tmp_path: Path, store: StoreProcess, reference: Reference
) -> None:
    """Sources of copies get new owners before they are copied; requests are preempted."""
    requests = families(count=16, seed=28, longest=1200)
    expected = reference("llama_s", requests, TOKENS_OUT)
    settings = {
        "kv_cache_bytes": 100 * LLAMA_BLOCK_BYTES,
        "max_num_batched_tokens": 256,
        "extra": {"max_model_len": 2048},
    }
    troubled = Troubled(model("llama_s"), tmp_path, store, settings=settings, storing="late")
    try:
        with troubled.trouble(Trouble.PAUSES):
            assert_same(expected, troubled.engine.run(requests, max_tokens=TOKENS_OUT))
        assert_same(expected, troubled.engine.run(requests, max_tokens=TOKENS_OUT))
    finally:
        troubled.close()
    assert stored(store) > 100, "not only what had room in the engine"


def test_O28_a_reset_of_the_engines_cache_loses_what_was_not_stored(
    late: tuple[Engine, StoreProcess],
) -> None:
    (engine, _), prompts = late, unique(710_000, 3)
    run(engine, prompts)
    forget(engine)
    run(engine, unique(711_000, 12))
    assert run(engine, prompts) == [0, 0, 0]


def test_O28_what_another_engine_continues_is_stored_at_once(
    late: tuple[Engine, StoreProcess],
) -> None:
    (engine, store), before = late, stored(late[1])
    (one,) = unique(720_000, 1)
    engine.run([one], max_tokens=1)
    engine.go_idle()
    assert stored(store) == before
    handed = Request(id="h", tokens=prompt(720_001, PROMPT), kv_transfer_params=HANDED)
    (result,) = engine.run([handed], max_tokens=1)
    engine.go_idle()
    assert result.kv_transfer_params is not None
    assert stored(store) - before == PROMPT // ENGINE_BLOCK + 1, "with the partly filled one"


def test_O28_a_model_with_windows_is_stored_eagerly_and_the_log_says_so(
    model: Callable[[str], Path], store: StoreProcess
) -> None:
    connector = attach(store, storing="late")
    with Engine(model("gemma3"), connector=connector) as engine:
        run(engine, unique(730_000, 1))
        assert stored(store) > 0
        assert "storing = late is for engines with one KV group" in engine.log_path.read_text()
