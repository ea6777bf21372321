"""What the connector reads of vLLM's configuration to name an engine's blocks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Of files that import vLLM and start no engine.
IMPORTS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]
WEIGHTS = "model.safetensors"
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}


def model(folder: Path | str, **changes: object) -> Any:
    known: dict[str, object] = {
        "model": str(folder),
        "revision": None,
        "model_weights": "",
        "multimodal_config": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "quantization_config": None,
        "code_revision": None,
        "trust_remote_code": False,
        "max_model_len": 4096,
        "try_get_generation_config": dict,
        "override_generation_config": {},
        "architectures": ["Model"],
        "registry": registry(stand_in("Model")),
        "hf_config": hf_config(layers=4, _name_or_path=str(folder)),
    }
    return SimpleNamespace(**known | changes)


def images(**changes: object) -> SimpleNamespace:
    """Stands for MultiModalConfig."""
    known: dict[str, object] = {
        "media_io_kwargs": {},
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "mm_processor_kwargs": None,
        "video_pruning_method": "evs",
        "video_pruning_rate": None,
    }
    return SimpleNamespace(**known | changes)


def stand_in(name: str, *bases: type) -> type:
    """Stands for the class of one of vLLM's own models: its code is not read."""
    return type(name, bases, {"__module__": "vllm.of_a_test"})


def registry(code: type) -> SimpleNamespace:
    """Of one class for all architectures."""
    return SimpleNamespace(resolve_model_cls=lambda _names, _model: (code, "Model"))


def hf_config(**values: object) -> SimpleNamespace:
    return SimpleNamespace(to_dict=lambda: dict(values))


def speculation(method: str, **changes: object) -> SimpleNamespace:
    """Stands for SpeculativeConfig."""
    known: dict[str, object] = {
        "draft_model_config": None,
        "draft_load_config": None,
        "num_speculative_tokens": 3,
        "index_share_for_mtp_iteration": None,
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
    }
    return SimpleNamespace(method=method, **known | changes)


def facts(folder: Path | str, **changes: object) -> Any:
    """changes: by the name of a field of the model, the cache, how it is loaded, or the whole."""
    cache: dict[str, object] = {
        "cache_dtype": "auto",
        "prefix_caching_hash_algo": "sha256",
        "swa_bounded_replay": True,
    }
    attention: dict[str, object] = {
        "disable_flashinfer_q_quantization": False,
        "use_non_causal": False,
        "use_prefill_query_quantization": False,
    }
    load: dict[str, object] = {
        "load_format": "auto",
        "model_loader_extra_config": {},
        "download_dir": None,
    }
    of_model = {k: v for k, v in changes.items() if k in vars(model(folder))}
    return SimpleNamespace(
        model_config=model(folder, **of_model),
        cache_config=SimpleNamespace(**cache | {k: v for k, v in changes.items() if k in cache}),
        load_config=SimpleNamespace(**load | {k: v for k, v in changes.items() if k in load}),
        attention_config=SimpleNamespace(
            **attention | {k: v for k, v in changes.items() if k in attention}
        ),
        diffusion_config=changes.get("diffusion_config"),
        speculative_config=changes.get("speculative_config"),
        lora_config=changes.get("lora_config"),
    )


def with_weights(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(content)
    return folder


def real(folder: Path, config: dict[str, Any], **settings: object) -> Any:
    """vLLM's own configuration of a tiny model. config: of the model; settings: of the engine."""
    from vllm.engine.arg_utils import EngineArgs

    with_weights(folder)
    (folder / "config.json").write_text(json.dumps(TINY | config))
    before = dict(os.environ)
    try:
        arguments = {"model": str(folder), "skip_tokenizer_init": True} | settings
        return EngineArgs(**arguments).create_engine_config()
    finally:  # other engines of these tests get none of what it has set
        os.environ.clear()
        os.environ.update(before)


def identity(config: Any) -> tuple[str, dict[str, str], str]:
    from connectors.vllm_identity import identity

    return identity(config)
