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
