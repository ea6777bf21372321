"""The harness itself: it starts, sees and ends engines, and has vLLM's managers beside ours."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from tests.bench import __main__ as bench
from tests.bench import index
from tests.bench.engine import Engine, EngineFailed, Request
from tests.bench.models import prompt
from tests.bench.native import native_config
from tests.conftest import ByFile
from tests.engine.facts import IMPORTS_VLLM
from tests.engine.identity import assert_same
from tests.engine.support import eventually, forget, grown, only_long
from tests.harness.handover_nodes import gone

pytestmark = IMPORTS_VLLM

HOST_BYTES = 64 << 20
TOKENS_OUT = 24


def requests() -> list[Request]:
    """Prompts of many lengths, none of which ends with a block."""
    return [Request(id=f"p{i}", tokens=prompt(i, 300 + 97 * i)) for i in range(8)]


@pytest.fixture(scope="module", params=["llama_s", only_long("gemma3")])
def native(request: pytest.FixtureRequest, model: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(model(request.param), connector=native_config(HOST_BYTES)) as engine:
        yield engine


def test_the_native_peer_loads_what_it_stored(native: Engine) -> None:
    reference = native.run(requests(), max_tokens=TOKENS_OUT)
    forget(native)
    before = native.metrics()
    again = native.run(requests(), max_tokens=TOKENS_OUT)
    hits = grown(native, before, "external_prefix_cache_hits")
    assert_same(reference, again)
    whole = [len(request.tokens) // 32 * 32 for request in requests()]
    assert [result.cached_tokens for result in again] == whole
    assert hits == sum(whole)


def test_a_hung_engine_is_ended(native: Engine) -> None:
    driver = psutil.Process(native.pids()["driver"])
    native.kill("driver", signal.SIGSTOP)
    with pytest.raises(EngineFailed, match="not answered in 1 s"):
        native.run(requests(), max_tokens=1, timeout_s=1)
    eventually(lambda: gone(driver))


def test_vllms_managers_run_beside_ours_in_the_same_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "collect_young_only", lambda: None)
    monkeypatch.setattr(index, "LOOKUPS", 5)
    monkeypatch.setattr(index, "ROUNDS", 6)
    assert bench.main(["index", "--blocks", "4000", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert {row["against"] for row in rows} == {"LRU", "ARC"}
    for row in rows:
        if row["name"] != "store_evict":  # that is a median of pairs
            assert row["ratio"] == pytest.approx(row["value"] / row["reference"])
        if row["name"] == "lookup_full_hit":
            assert row["ratio"] < 0.5, "one search against a thousand calls"


def test_all_engines_are_given_to_the_process_that_can_start_them_whichever_is_ready_first() -> (
    None
):
    config = Mock(option=Mock(loadscopereorder=False))
    config.getvalue.return_value = ["popen", "popen"]
    scheduler = ByFile(config, None)
    second, first = (Mock(gateway=Mock(id=name), shutting_down=False) for name in ("gw1", "gw0"))
    tests = [
        "tests/engine/test_a.py::test",
        "tests/engine/test_b.py::test",
        "tests/test_c.py::test",
    ]
    for node in (second, first):
        scheduler.add_node(node)
    for node in (second, first):
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    first.send_runtest_some.assert_called_once_with([0, 1])
    second.send_runtest_some.assert_called_once_with([2])
