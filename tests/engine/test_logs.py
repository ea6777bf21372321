"""The connector's lines in a real engine's log, and engines whose hashes differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.engine import Engine
from tests.engine.facts import IMPORTS_VLLM, facts, identity, with_weights
from tests.engine.support import Troubled, attach, eventually

pytestmark = IMPORTS_VLLM

OF_VLLM = r"\(EngineCore pid=\d+\) (INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[\S+:\d+\] kvstore: .+"


def test_Q31_Q32_Q33_an_engine_with_another_seed_says_so_in_vllms_log_and_the_stores(
    model: Callable[[str], Path], troubled: Callable[[str], Troubled]
) -> None:
    store = troubled("llama_s").store
    assert store is not None
    connector = attach(store) | {"engine_id": "odd"}
    env = {"PYTHONHASHSEED": "7", "NO_COLOR": "1"}
    with Engine(model("llama_s"), connector=connector, in_process=False, env=env) as odd:
        said = [line for line in odd.log_path.read_text().splitlines() if "kvstore: " in line]
    assert not [line for line in said if not re.fullmatch(OF_VLLM, line)]
    (warning,) = [line for line in said if "shares no blocks" in line]
    assert " WARNING " in warning
    assert "set the same PYTHONHASHSEED" in warning
    (attached,) = [line for line in said if "kvstore: attached" in line]
    assert " INFO " in attached

    def told() -> list[str]:
        lines = store.log_path.read_text().splitlines()
        return [line for line in lines if "engine 'odd' (" in line]

    eventually(lambda: len(told()) >= 3, within_s=60)  # the engine has ended, its store goes on
    lines = told()
    assert ["WARNING" in line for line in lines[:3]] == [False, True, False], lines
    assert "model llama_s" in lines[0] or "model /" in lines[0]
    assert "set the same PYTHONHASHSEED" in lines[1]
    assert lines[2].endswith("detached: the engine ends")
    # vLLM kills a process that takes long to end: its scheduler may be back by then.
    assert not [line for line in lines[3:] if "its scheduler" not in line], lines


@pytest.mark.usefixtures("home")
def test_Q33_another_seed_or_algorithm_of_hashes_is_another_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    folder = with_weights(tmp_path / "m")

    def named(seed: str | None = None, algorithm: str = "sha256") -> str:
        with monkeypatch.context() as patch:
            if seed is not None:
                patch.setenv("PYTHONHASHSEED", seed)
            return identity(facts(folder, prefix_caching_hash_algo=algorithm))[0]

    assert named() == named()
    assert named("7") == named("7")
    assert len({named(), named("7"), named("8"), named("7", "sha256_cbor")}) == 4
