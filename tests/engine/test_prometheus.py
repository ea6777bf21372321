"""The queries on vLLM's own counters in the documentation, answered by a real Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.api import ApiServer, complete
from tests.bench.models import prompt
from tests.engine.support import attach
from tests.harness.live import eventually
from tests.harness.prometheus import prometheus, queries

TOKENS = 8000
POOL_BYTES = 36 << 20  # two prompts, and what vLLM asks for


@pytest.mark.long
@pytest.mark.vllm
def test_M1_every_query_on_the_engine_in_the_docs_returns_data(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    server = ApiServer(
        "served", model("llama_s"), tmp_path, connector=attach(), kv_cache_bytes=POOL_BYTES
    )
    with server:
        eventually(server.ready)
        with prometheus(tmp_path, [server.port]) as watch:
            watch.seen()
            for seed in (1, 2, 3, 1):
                complete(server.port, {"prompt": prompt(seed, TOKENS), "max_tokens": 2})
            watch.seen()
            of_engine = [query for query in queries() if "vllm:" in query]
            assert of_engine
            for query in of_engine:
                assert watch.ask(query), f"no data: {query}"
            ((_, rate),) = watch.ask(of_engine[0])
            assert 0 < rate <= 1
