"""The harness itself: it starts, sees and ends engines."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.bench.engine import Engine, EngineFailed, Request
from tests.bench.models import prompt
from tests.bench.native import native_config
from tests.engine.identity import assert_same
from tests.engine.support import eventually, forget, grown
from tests.harness.handover_nodes import gone

pytestmark = pytest.mark.vllm

HOST_BYTES = 64 << 20
TOKENS_OUT = 24


def requests() -> list[Request]:
    """Prompts of many lengths, none of which ends with a block."""
    return [Request(id=f"p{i}", tokens=prompt(i, 300 + 97 * i)) for i in range(8)]


@pytest.fixture
def engine(plain: Callable[[str], Engine]) -> Engine:
    """One without a connector, and with nothing in its cache."""
    return plain("llama_s")


def test_a_prefix_hit_shows_in_result_and_metrics(engine: Engine) -> None:
    long = Request(id="long", tokens=prompt(50, 5000))
    before = engine.metrics()
    cold, hit = (engine.run([long], max_tokens=4)[0] for _ in range(2))
    after = engine.metrics()
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 4992)
    assert cold.steps_to_first_token == 3  # 5000 tokens, 2048 at a time
    assert hit.steps_to_first_token == 1
    assert cold.ttft_s is not None
    assert hit.ttft_s is not None
    assert hit.ttft_s < cold.ttft_s
    source = "prompt_tokens_cached_by_source{source=device}"
    assert after[source] - before[source] == 4992


def test_aborts_land_on_their_step(engine: Engine) -> None:
    never = Request(id="never", tokens=prompt(60, 4096), abort_step=0)
    prefill = Request(id="prefill", tokens=prompt(61, 6000), abort_step=1)
    decode = Request(id="decode", tokens=prompt(62, 100), arrive_step=4, abort_step=10)
    stays = Request(id="stays", tokens=prompt(63, 100), max_tokens=7)
    results = engine.run([never, prefill, decode, stays], max_tokens=100)
    assert [result.id for result in results] == ["never", "prefill", "decode", "stays"]
    assert [result.aborted for result in results] == [True, True, True, False]
    assert [len(result.tokens) for result in results] == [0, 0, 6, 7]
    forget(engine)


@pytest.mark.parametrize("name", ["llama_s", pytest.param("gemma3", marks=pytest.mark.long)])
def test_the_native_peer_loads_what_it_stored(model: Callable[[str], Path], name: str) -> None:
    with Engine(model(name), connector=native_config(HOST_BYTES)) as engine:
        reference = engine.run(requests(), max_tokens=TOKENS_OUT)
        forget(engine)
        before = engine.metrics()
        again = engine.run(requests(), max_tokens=TOKENS_OUT)
        hits = grown(engine, before, "external_prefix_cache_hits")
    assert_same(reference, again)
    whole = [len(request.tokens) // 32 * 32 for request in requests()]
    assert [result.cached_tokens for result in again] == whole
    assert hits == sum(whole)


def test_a_hung_engine_is_ended(model: Callable[[str], Path]) -> None:
    with Engine(model("llama_s")) as engine:
        driver = psutil.Process(engine.pids()["driver"])
        engine.kill("driver", signal.SIGSTOP)
        with pytest.raises(EngineFailed, match="not answered in 1 s"):
            engine.run(requests(), max_tokens=1, timeout_s=1)
        eventually(lambda: gone(driver))
