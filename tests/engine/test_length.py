"""Engines that differ in max_model_len alone share blocks, except where their bytes differ."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from connectors.vllm_length import AS_LONG, FITTING, LLAMA_4_TUNED, TRANSFORMERS
from tests.engine.facts import (
    IMPORTS_VLLM,
    facts,
    hf_config,
    identity,
    model,
    real,
    registry,
    speculation,
    stand_in,
    with_weights,
)

pytestmark = [*IMPORTS_VLLM, pytest.mark.usefixtures("home")]

SHORT, LONG = 64, 128  # the first is what models of "longrope" were trained with
THETA = {"rope_theta": 1e4}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic-alpha": {"rope_type": "dynamic", "alpha": 8.0, "factor": 1.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": SHORT,
    },
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": SHORT},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": SHORT,
    },
    "mrope": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    "mrope-yarn": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": SHORT,
        "mrope_section": [4, 6, 6],
    },
}


def digest(config: Any) -> str:
    found, _, unnamed = identity(config)
    assert unnamed == ""
    return found


def rotated(config: Any) -> list[float]:
    """Keys at the first positions, as vLLM's own class for this configuration turns them."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()
    model = config.model_config.hf_config
    with set_current_vllm_config(config):
        rope = rotary_embedding.get_rope(
            model.head_dim, model.max_position_embeddings, rope_parameters=model.rope_parameters
        )
    keys = torch.ones(SHORT, model.head_dim)
    _, turned = getattr(rope, "forward_native", rope.forward)(
        torch.arange(SHORT), keys.clone(), keys.clone()
    )
    return [float(value) for value in turned.flatten()]


@pytest.mark.parametrize("kind", list(ROPES))
def test_B3_engines_of_other_lengths_share_where_keys_are_turned_alike(
    tmp_path: Path, kind: str
) -> None:
    config = {"rope_parameters": ROPES[kind] | THETA}
    short, long = (real(tmp_path, config, max_model_len=length) for length in (SHORT, LONG))
    alike = rotated(short) == rotated(long)
    assert (digest(short) == digest(long)) == alike
    assert alike == (kind != "longrope")


def test_B3_a_drafter_may_be_made_for_its_own_length_or_for_its_targets(tmp_path: Path) -> None:
    """vLLM makes some drafters under the target's configuration, others under one of their own."""
    folder = with_weights(tmp_path / "model")
    longrope = hf_config(rope_parameters=ROPES["longrope"])

    def found(target: int, own: int) -> str:
        drafter = model(folder, hf_config=longrope, max_model_len=own)
        speculative = speculation("eagle", draft_model_config=drafter)
        return digest(facts(folder, max_model_len=target, speculative_config=speculative))

    assert len({found(target, own) for target in (SHORT, LONG) for own in (SHORT, LONG)}) == 4
    assert found(LONG, LONG) == found(LONG + 1, LONG + 1)


def test_B3_what_a_model_notes_of_its_length_while_it_loads_does_not_count(tmp_path: Path) -> None:
    folder = with_weights(tmp_path)
    noted = [facts(folder, hf_config=hf_config(max_model_len=length)) for length in (SHORT, LONG)]
    assert digest(noted[0]) == digest(noted[1])


# Llama 4

TEXT = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "no_rope_layers": [0],
    "pad_token_id": 0,
    "max_position_embeddings": 1 << 16,
    "rope_parameters": {"rope_type": "default"} | THETA,
}


@pytest.mark.parametrize(
    ("told", "settings", "tuned"),
    [
        ({}, {}, (False, True)),
        ({"attn_temperature_tuning": True}, {}, (True, True)),
        ({"attn_temperature_tuning": False}, {}, (False, False)),
        (
            {"attn_temperature_tuning": False},
            {"override_generation_config": {"attn_temperature_tuning": True}},
            (True, True),
        ),
    ],
)
@pytest.mark.parametrize("images", [False, True])
def test_B3_engines_of_llama_4_share_where_it_scales_queries_alike(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: dict[str, Any],
    settings: dict[str, Any],
    tuned: tuple[bool, bool],
    *,
    images: bool,
) -> None:
    """With images vLLM's model notes it in a copy of the configuration that the engine has."""
    from vllm.model_executor.models import llama4

    monkeypatch.setattr(llama4.LlamaForCausalLM, "__init__", lambda _self, **_: None)
    monkeypatch.setattr(llama4.Llama4ForCausalLM, "set_moe_parameters", lambda _self: None)
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    found, digests = [], []
    for length in (LLAMA_4_TUNED, LLAMA_4_TUNED + 1):
        here = whole = real(tmp_path, TEXT, max_model_len=length, **settings)
        if images:
            text = whole.model_config.hf_config  # of a model with images a part
            here = whole.with_hf_config(text, ["LlamaForCausalLM"])
        llama4.Llama4ForCausalLM.__init__(
            object.__new__(llama4.Llama4ForCausalLM), vllm_config=here
        )
        found.append(here.model_config.hf_config.attn_temperature_tuning)
        digests.append(digest(whole))
    assert tuple(found) == tuned
    assert (digests[0] == digests[1]) == (tuned[0] == tuned[1])


# Models whose code takes max_model_len for something else


@pytest.mark.parametrize(
    ("module", "kind", "shared"),
    [
        ("llama", "dynamic", True),
        *((module.rpartition(".")[2], "dynamic", False) for module in AS_LONG),
        *((module.rpartition(".")[2], "default", True) for module in AS_LONG),
        *((module.rpartition(".")[2], "default", False) for module in FITTING),
    ],
)
def test_B3_models_that_compute_with_their_length_share_with_others_of_it(
    tmp_path: Path, module: str, kind: str, *, shared: bool
) -> None:
    modules = {name.rpartition(".")[2]: name for name in (*AS_LONG, *FITTING)}
    base = type("Base", (), {"__module__": modules.get(module, module) + ".inside"})
    code = registry(stand_in("Model", base))
    config = hf_config(rope_parameters=ROPES[kind] | THETA)
    folder = with_weights(tmp_path)
    short, long, same = (
        digest(facts(folder, hf_config=config, registry=code, max_model_len=length))
        for length in (SHORT, LONG, LONG)
    )
    assert long == same
    assert (short == long) == shared


@pytest.mark.parametrize(
    ("kind", "limit"), [("dynamic", LONG), ("longrope", SHORT), ("default", None), ("yarn", None)]
)
def test_B3_keys_that_depend_on_other_requests_have_no_name(
    tmp_path: Path, kind: str, limit: int | None
) -> None:
    """Transformers' own code scales by the longest request of a batch, and vLLM runs it."""
    folder = with_weights(tmp_path)
    config = {"rope_parameters": {"full_attention": ROPES[kind] | THETA}}
    theirs = registry(type("Model", (), {"__module__": f"{TRANSFORMERS[0]}.causal"}))
    found = {}
    for length in (SHORT, LONG, LONG + 1):
        whole = hf_config(text_config=config | {"max_position_embeddings": LONG})
        engine = facts(folder, hf_config=whole, registry=theirs, max_model_len=length)
        _, _, found[length] = identity(engine)
    named = [length for length, unnamed in found.items() if not unnamed]
    assert named == [length for length in found if limit is None or length <= limit]
    if limit is not None:
        assert found[LONG + 1] == (
            f"max_model_len is {LONG + 1}, expected up to {limit}: with '{kind}' scaling,"
            " Transformers' code rotates keys by the longest request of a batch"
        )


# All that reads it

PLACES = (
    *("model_executor/layers", "model_executor/models", "models", "multimodal"),
    *("transformers_utils/configs", "transformers_utils/processors"),
)
READERS = {
    "decides, and is in the digest": (
        *("model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py",),
        *("model_executor/models/cohere_compass.py", "model_executor/models/llama4.py"),
        *("model_executor/models/minimax_m2.py", "model_executor/models/plamo3.py"),
        *("model_executor/models/nano_nemotron_vl.py", "models/dots3_note/"),
        *("transformers_utils/processors/nano_nemotron_vl.py", "models/step5/"),
    ),
    "sizes of buffers and tables": (
        *("model_executor/layers/attention/", "model_executor/layers/quantization/"),
        *("model_executor/layers/rocm_paged_mxfp4_indexer.py", "models/deepseek_v32/"),
        *("model_executor/layers/sparse_attn_indexer.py", "model_executor/models/deepseek_v2.py"),
        *("models/deepseek_v4/", "models/deepseek_v41/", "models/glm5next/", "models/hy_v4/"),
        *("models/inkling/", "models/kimi_k3/", "models/minimax_m3/", "models/muse_spark/"),
        # of an audio encoder: its positions are relative
        *("model_executor/models/parakeet.py", "transformers_utils/configs/parakeet.py"),
    ),
    "how much of an encoder's work is captured in CUDA graphs, or tried out at start": (
        *(f"model_executor/models/{name}.py" for name in ("deepseek_ocr", "deepseek_vl2")),
        *(f"model_executor/models/{name}.py" for name in ("ernie45_vl", "gemma3_mm", "gemma4_mm")),
        *(f"model_executor/models/{name}.py" for name in ("glm4_1v", "idefics3", "internvl")),
        *(f"model_executor/models/{name}.py" for name in ("kimi_k25", "kimi_vl", "lfm2_vl")),
        *(f"model_executor/models/{name}.py" for name in ("minicpmv", "mllama4", "qwen2_5_vl")),
        *(f"model_executor/models/{name}.py" for name in ("qwen2_vl", "qwen3_vl", "step3_vl")),
        *("model_executor/models/voxtral.py", "multimodal/encoder_budget.py"),
        "multimodal/processing/processor.py",
    ),
    "how long a prompt may be": (
        *("model_executor/models/voxtral_realtime.py", "multimodal/processing/context.py"),
        "model_executor/models/diffusion_gemma.py",
    ),
    "models without a KV cache": (
        "model_executor/models/embedding_gemma2.py",
        "model_executor/models/config.py",  # NomicBERT's; Mamba's block size is in the geometry
    ),
    "whether Transformers' scaling ever changes, and whether it is compiled": (
        "model_executor/models/transformers/utils.py",
    ),
}


def test_B3_every_place_that_reads_max_model_len_is_known() -> None:
    """A version of vLLM with another one fails here. Kernels get lengths of requests instead."""
    import vllm

    root = Path(vllm.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for place in PLACES
        for path in (root / place).rglob("*.py")
        if reads(path.read_text(encoding="utf-8"))
    }
    known = tuple(name for names in READERS.values() for name in names)
    assert len(found) > 40
    assert {name for name in found if not name.startswith(known)} == set()


def reads(code: str) -> bool:
    return "max_model_len" in code and any(
        isinstance(node, ast.Attribute) and node.attr == "max_model_len"
        for node in ast.walk(ast.parse(code))
    )
