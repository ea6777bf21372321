"""What vLLM's own code makes of tiny models' KV: `python -m tests.engine.sizes` prints JSON.

Each model is made without weights, its groups are vLLM's, and its tensors are laid out by vLLM and
read as the connector reads those of an engine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BASE: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
}  # fmt: skip
YARN = {
    "rope_theta": 150000.0, "rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 2048,
}  # fmt: skip


def _model(architecture: str, model_type: str, **more: object) -> dict[str, Any]:
    return BASE | {"architectures": [architecture], "model_type": model_type} | more


MODELS: dict[str, dict[str, Any]] = {
    # The first one has experts: their group of processes is made once.
    "gated delta net": _model(
        "Qwen3NextForCausalLM", "qwen3_next",
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=16, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, num_experts=2, decoder_sparse_step=1,
        mlp_only_layers=[], shared_expert_intermediate_size=32, num_experts_per_tok=1,
        moe_intermediate_size=32, norm_topk_prob=True, partial_rotary_factor=0.5,
    ),
    "grouped heads": _model("LlamaForCausalLM", "llama"),
    "windows": _model(
        "Gemma3ForCausalLM", "gemma3_text", num_hidden_layers=14, sliding_window=128,
        layer_types=((["sliding_attention"] * 5 + ["full_attention"]) * 3)[:14],
    ),
    "windows and sinks": _model(
        "GptOssForCausalLM", "gpt_oss", sliding_window=128, num_local_experts=2,
        num_hidden_layers=9, layer_types=(["sliding_attention", "full_attention"] * 5)[:9],
        num_experts_per_tok=1,
        rope_parameters=YARN,
    ),
    "latent": _model(
        "DeepseekV2ForCausalLM", "deepseek_v2", num_key_value_heads=4, kv_lora_rank=64,
        q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        n_routed_experts=4, first_k_dense_replace=4, moe_layer_freq=1,
    ),
    "mamba 1": _model(
        "JambaForCausalLM", "jamba", head_dim=16, attn_layer_period=4, attn_layer_offset=2,
        expert_layer_period=2, expert_layer_offset=1, num_experts=1, num_experts_per_tok=1,
        mamba_d_conv=4, mamba_d_state=16, mamba_expand=2, mamba_dt_rank=4,
    ),
    "mamba 2": _model(
        "NemotronHForCausalLM", "nemotron_h", num_hidden_layers=6, hybrid_override_pattern="M-M*M-",
        mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, conv_kernel=4,
        mamba_hidden_act="silu", mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, expand=2,
    ),
    "mamba 2 by layer_types": _model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", head_dim=16,
        layer_types=["mamba", "mamba", "attention", "mamba"], num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=64, position_embedding_type="nope",
        embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
        logits_scaling=1.0, **MAMBA2,
    ),
    "both in each layer": _model(
        "FalconH1ForCausalLM", "falcon_h1", mamba_d_ssm=128, mamba_rms_norm=False,
        mamba_norm_before_gate=False, **MAMBA2,
    ),
}  # fmt: skip
BLOCKS = 2


def main() -> None:
    """Print block tokens, slot bytes, and layers by group, of each model."""
    from vllm.model_executor.models import registry

    # vLLM looks at a model in a process of its own, so that this one need not import it.
    # This one imports it in any case.
    registry._run_in_subprocess = lambda look: look()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            found[name] = _sizes(Path(folder) / name, config)
    sys.stdout.write(json.dumps(found) + "\n")


def _sizes(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    made = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=2048)
    config = made.create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
            initialize_model_parallel(1, 1)
        with torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        groups = get_kv_cache_groups(config, {name: s for name, s in specs.items() if s})
    return _registered(config, groups)


def _registered(config: Any, groups: Any) -> dict[str, Any]:
    """What the connector tells a store of such groups."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from connectors.vllm_compat import geometry
    from connectors.vllm_worker import layer_caches
    from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry, slot_layout
    from tests.engine.views import laid_out

    tokens = geometry(config, KVCacheConfig(BLOCKS, [], groups), None)
    parts = []
    for group, rule in zip(groups, tokens.rules, strict=True):
        count = len(group.layer_names)
        _, views = laid_out(group.kv_cache_spec, "LBHNC", count, BLOCKS, None)
        cache = SimpleNamespace(num_blocks=BLOCKS)
        caches = layer_caches(cache, dict(zip(group.layer_names, views, strict=True)))
        pages = (LayerGeometry(name, held.page_bytes) for name, held in caches.items())
        parts.append(GroupGeometry(rule, tuple(pages)))
    rank = RankGeometry("model", tokens.block_tokens, tokens.blocks_per_chunk, tuple(parts))
    return {
        "block_tokens": tokens.block_tokens,
        "slot_bytes": slot_layout([rank]).slot_bytes,
        "groups": [
            [len(part.layers), rule.trailing]
            for part, rule in zip(parts, tokens.rules, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
