"""What cannot be served is said once, at start; a store that is not there stops nothing."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.engine import Engine, EngineFailed, Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import attach, broken, eventually, forget, servable

pytestmark = pytest.mark.vllm

REFUSED_S = 300.0  # an engine that fails at once takes about 8 s on two idle cores


def refusal(model: Path, connector: dict[str, Any], **settings: Any) -> str:
    """Start an engine that must not start, and return what it said."""
    started_s = time.monotonic()
    engine = Engine(model, connector=connector, **settings)
    with pytest.raises(EngineFailed) as caught, contextlib.closing(engine):
        engine.__enter__()
    assert time.monotonic() - started_s < REFUSED_S
    return str(caught.value).splitlines()[0]


def mla_model(folder: Path) -> Path:
    """A tiny model with multi-head latent attention: a configuration, weights are made up."""
    settings = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "dtype": "bfloat16",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_O22_a_model_that_cannot_go_on_from_loaded_kv_is_refused(tmp_path: Path) -> None:
    """On a CPU vLLM switches off what would need it."""
    model = mla_model(tmp_path)
    said = refusal(model, attach(), extra={"load_format": "dummy"})
    assert "prefix caching and chunked prefill are both off, expected one of them on" in said, said


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
