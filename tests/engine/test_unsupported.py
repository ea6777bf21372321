"""What cannot be served is said once, at start; a store that is not there stops nothing."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench.engine import Engine, EngineFailed, Request
from kvstore.bench.models import prompt
from kvstore.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import attach, broken, eventually, forget, servable

pytestmark = pytest.mark.vllm

REFUSED_S = 300.0  # an engine that fails at once takes about 8 s on two idle cores


def refusal(model: Path, connector: dict[str, Any]) -> str:
    """Start an engine that must not start, and return what it said."""
    started_s = time.monotonic()
    engine = Engine(model, connector=connector)
    with pytest.raises(EngineFailed) as caught, contextlib.closing(engine):
        engine.__enter__()
    assert time.monotonic() - started_s < REFUSED_S
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("change", "extra", "message"),
    [
        pytest.param(
            {"kv_role": "kv_producer"},
            {},
            r"kvstore does not serve this engine: kv_role 'kv_producer', expected 'kv_both'",
            id="role",
        ),
        pytest.param(
            {},
            {"block_token": 64},
            r"kv_connector_extra_config: unknown block_token; did you mean block_tokens\?",
            id="unknown-setting",
            marks=pytest.mark.e2e,
        ),
        pytest.param(
            {},
            {"block_tokens": 48},
            r"block_tokens is 48, expected a multiple of the engine's block size, 32",
            id="block-size",
            marks=pytest.mark.e2e,
        ),
    ],
)
def test_O22_an_engine_that_is_not_served_says_why(
    model: Callable[[str], Path], change: dict[str, Any], extra: dict[str, Any], message: str
) -> None:
    connector = attach() | change
    connector["kv_connector_extra_config"] |= extra
    said = refusal(model("llama_s"), connector)
    assert re.search(message, said), said


def test_O22_a_store_that_refuses_is_an_error_at_start(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    with StoreProcess(tmp_path, "16MiB") as store:
        said = refusal(model("llama_s"), attach(store, block_tokens=16384))
    assert "the store refused this engine: a block takes 33554432 bytes" in said


def test_without_its_store_an_engine_serves_and_waits_for_it(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    requests = [Request(id=f"p{i}", tokens=prompt(i, 100 + 150 * i)) for i in range(4)]
    store = StoreProcess(tmp_path, "64MiB")
    connector = attach(store, by=broken("ImpatientConnector"))
    with Engine(model("llama_s"), connector=connector) as engine:
        expected = engine.run(requests, max_tokens=8)
        log = engine.log_path.read_text()
        assert log.count("kvstore: no store after") == 1
        assert log.count("serving without it, and trying") < 4
        with store:

            def hits() -> bool:
                forget(engine)
                got = engine.run(requests, max_tokens=8)
                assert_same(expected, got)
                return [r.cached_tokens for r in got] == [servable(len(r.tokens)) for r in requests]

            eventually(hits, within_s=600)
