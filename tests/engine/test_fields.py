"""Every setting of vLLM is in an engine's identity, or here with the reason why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.core.errors import NotSupported
from tests.engine.facts import (
    IMPORTS_VLLM,
    facts,
    identity,
    images,
    model,
    speculation,
    with_weights,
)

pytestmark = [*IMPORTS_VLLM, pytest.mark.usefixtures("home")]

IN = "read for what it decides"
WORDS = "decides which tokens a prompt has, and tokens are what is hashed"
OUTPUT = "decides what is made of the last hidden states"
ROUNDING = "changes rounding only"
PLACE = "where and when something is done, or how much memory there is for it"
PAGE = "in the description of a page, which is compared"
WRITTEN = "noted by vLLM, follows from the others"
RANKS = "how work and weights are spread over ranks: rounding, or in the layout of a slot"

# By vLLM's class, then by reason; what is in the digest as it is stands in FIELDS.
OTHERS: dict[str, dict[str, str]] = {
    "vllm_config": {
        "has a table here": """
            model_config cache_config parallel_config load_config attention_config mamba_config
            diffusion_config speculative_config
        """,
        # additional_config: names of kernels; device_config: the platform
        ROUNDING: """
            kernel_config compilation_config optimization_level performance_mode additional_config
            device_config
        """,
        PLACE: """
            scheduler_config offload_config engram_config ec_manager_config instance_id
            shutdown_timeout watchdog_config
        """,
        OUTPUT: "aux_output_config structured_outputs_config watermark_config reasoning_config",
        "watches": "observability_config logging_config profiler_config",
        "requests with an adapter are not stored; where vLLM mixes them up there is no name": """
            lora_config
        """,
        "the same as model_config's quantization, and files beside the weights": "quant_config",
        "moves blocks, embeddings of the same model, or weights; new weights forget all blocks": """
            kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config
        """,
    },
    "model_config": {
        IN: """
            model model_weights revision hf_config max_model_len generation_config
            override_generation_config multimodal_config
        """,
        "in hf_config": """
            hf_text_config hf_overrides hf_config_path config_format disable_sliding_window
        """,
        "in the class that computes": """
            runner convert model_impl model_class_overrides trust_remote_code
        """,
        WORDS: """
            tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin
        """,
        OUTPUT: """
            return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
            logits_processors pooler_config
        """,
        ROUNDING: "enforce_eager disable_cascade_attn",
        PLACE: """
            enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
            sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator
            renderer_num_workers
        """,
        "what is accepted, or what it is called": """
            allowed_local_media_path allowed_media_domains allow_deprecated_quantization
            served_model_name hf_token enable_prompt_embeds spec_target_max_model_len
        """,
        "random numbers; weights that are made up have no name": "seed",
        WRITTEN: "is_submodel_config word_embeddings_untied_by_checkpoint",
    },
    "multimodal_config": {
        IN: "mm_encoder_fp8_scale_path video_pruning_method video_pruning_rate",
        "what is accepted": """
            language_model_only limit_per_prompt enable_mm_embeds allow_missing_mm_embeddings
        """,
        ROUNDING: "mm_device_do_normalize mm_encoder_attn_backend mm_encoder_tp_mode",
        PLACE: """
            mm_processor_cache_gb mm_processor_cache_type mm_tensor_ipc
            mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb skip_mm_profiling
        """,
        "other algorithms give other hashes": "mm_hasher_algorithm",
        "such an engine has no KV": "mm_encoder_only",
        WORDS: "interleave_mm_strings",
        "written for another start": """
            mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        """,
    },
    "cache_config": {
        IN: "cache_dtype prefix_caching_hash_algo",
        PAGE: """
            block_size mamba_block_size kv_cache_layout kv_cache_dtype_skip_layers mamba_cache_dtype
            mamba_ssm_cache_dtype mamba_page_size_padded skip_page_size_padded use_replayssm
            replayssm_buffer_len
        """,
        "in the rules of groups": "sliding_window mamba_cache_mode",
        "which blocks are kept, and what hits land on": """
            enable_prefix_caching prefix_match_unit prefix_cache_retention_interval
            enable_mamba_shared_prefix_checkpoint
        """,
        PLACE: """
            gpu_memory_utilization num_gpu_blocks_override kv_cache_memory_bytes kv_offloading_size
            kv_offloading_backend simple_cpu_offload_num_blocks
        """,
        "leaves out tokens in layers that have no KV of their own": "kv_sharing_fast_prefill",
        "how drafts are checked": "use_kda_recoverssm",
        WRITTEN: """
            user_specified_block_size is_attention_free num_gpu_blocks num_cpu_blocks
            effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency
            hash_block_size cache_hit_alignment_tokens _block_size_resolved
        """,
    },
    "parallel_config": {
        RANKS: """
            pipeline_parallel_size tensor_parallel_size world_size rank enable_hc_sp
            enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb
            eplb_config is_moe_model expert_placement_strategy all2all_backend
            disable_custom_all_reduce enable_elastic_ep elastic_ep_max_dp_size dcp_q_replicate
            enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
        """,
        "other sizes than 1 are refused": """
            prefill_context_parallel_size decode_context_parallel_size nnodes
            dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dcp_comm_backend
            _allow_auto_resolve_cp_interleave_size
        """,
        "replicas compute the same": """
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
            data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port
            data_parallel_backend data_parallel_index data_parallel_external_lb
            data_parallel_hybrid_lb dp_sync_interval disable_nccl_for_dp_synchronization
            _data_parallel_master_port_list
        """,
        PLACE: """
            max_parallel_loading_workers enable_shm_tensor_arena ray_runtime_env
            ray_workers_use_nsight placement_group distributed_executor_backend master_addr
            master_port node_rank numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
            distributed_timeout_seconds cpu_distributed_timeout_seconds _coord_store_port
            _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config
        """,
        "runs a model; what a model is, its class and weights say": """
            worker_cls worker_extension_cls
        """,
    },
    "load_config": {
        PLACE: """
            safetensors_load_strategy safetensors_prefetch_num_threads device
            safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location
        """,
        IN: "download_dir",
        "which files are fetched; the digest is of those that are there": "ignore_patterns",
    },
    "attention_config": {
        ROUNDING: """
            backend backend_per_kind minimax_m3_msa_decode_backend flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend
            indexer_sparse_logits sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
            flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size
            trtllm_ragged_backend indexer_tp_shard_min_rows minimax_m3_indexer_cp
        """,
        PAGE: "indexer_kv_dtype",
        PLACE: "hisparse_config",
    },
    "mamba_config": {
        ROUNDING: """
            backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm
        """,
    },
    "diffusion_config": {
        OUTPUT: "max_denoising_steps",
    },
    "speculative_config": {
        IN: "draft_model_config draft_load_config num_speculative_tokens",
        "in draft_model_config": "model quantization max_model_len revision code_revision",
        PAGE: "kv_cache_dtype",
        ROUNDING: "enforce_eager moe_backend attention_backend",
        RANKS: """
            draft_tensor_parallel_size tensor_parallel_size draft_parallel_config
            target_parallel_config use_local_argmax_reduction
        """,
        "which drafts are made and taken; drafts that are not taken leave no KV": """
            num_speculative_tokens_per_batch_size disable_padded_drafter_batch
            rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
            enable_adaptive_verification draft_sample_method dspark_draft_topk prompt_lookup_max
            prompt_lookup_min suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
            suffix_decoding_max_spec_factor suffix_decoding_min_token_prob disable_eagle_block_drop
            draft_lm_head_quantization fly_entropy_threshold fly_entropy_top_k fly_window_size
            xpress_topc
        """,
        "gives other hashes": "disable_lookahead_block_hashes",
        "has a table here": "target_model_config",
    },
}
ADDED_BY_0_33 = {
    "disable_lookahead_block_hashes",
    "draft_lm_head_quantization",
    "fly_entropy_threshold",
    "fly_entropy_top_k",
    "fly_window_size",
    "indexer_tp_shard_min_rows",
    "minimax_m3_indexer_cp",
    "simple_cpu_offload_num_blocks",
    "trtllm_ragged_backend",
    "watchdog_config",
    "xpress_topc",
}

# Where vLLM's models, their layers, kernels and processors of images read the environment.
PLACES = (
    *("model_executor", "models", "multimodal", "transformers_utils", "v1/attention"),
    *("distributed/device_communicators", "_aiter_ops.py", "utils/deep_gemm.py"),
    "utils/flashinfer.py",
)
REASONS: dict[str, str] = {
    ROUNDING: """
        *_AITER* *_DEEP_GEMM* *_FLASHINFER* *_FUSION *_MOE_PADDING *_STREAM
        *_EMULATION_DEQUANT_AT_LOAD *_STREAM_TOKEN_THRESHOLD VLLM_ROCM_*PADDING VLLM_BATCH_INVARIANT
        VLLM_CPU_ATTN_SPLIT_KV VLLM_DISABLED_KERNELS VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE
        VLLM_ENABLE_HPC_OPS VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_MOE_GEMM_TYPE
        VLLM_HUMMING_USE_F16_ACCUM VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MOE_SKIP_PADDING
        VLLM_MULTI_STREAM_GEMM_* VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_SKINNY_GEMM VLLM_TRITON_USE_TD
        VLLM_TUNED_CONFIG_FOLDER VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_XPU_*
        VLLM_ZENTORCH_* VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE
    """,
    RANKS: """
        VLLM_ALLREDUCE_* VLLM_DEEPEP* VLLM_DISABLE_PYNCCL VLLM_ENABLE_GEMM_RS VLLM_KIMI_K3_*
        VLLM_REPLICATE_EMBED VLLM_ROCM_QUICK_REDUCE_* VLLM_SKIP_P2P_CHECK
        VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_USE_NCCL_SYMM_MEM
    """,
    "context parallelism is refused": "*_DCP_*",
    PLACE: """
        *CACHE_ROOT *_WARMUP* *_OFFLOADING_* *_TIMEOUT* VLLM_ASSETS_* VLLM_CUDART_SO_PATH
        VLLM_FASTSAFETENSORS_* VLLM_MEDIA_* VLLM_USE_SPINLOOP_EXT
        VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
        VLLM_RINGBUFFER_WARNING_INTERVAL
    """,
    "what is accepted": "VLLM_MAX_*",
    "watches": "VLLM_LOG_MODEL_INSPECTION",
    PAGE: "VLLM_KV_CACHE_LAYOUT VLLM_MLA_DISABLE VLLM_SSM_CONV_STATE_LAYOUT",
    "in the model's path": "VLLM_MODEL_REDIRECT_PATH",
    "weights from there have no name": "VLLM_USE_MODELSCOPE",
}


def fields(name: str) -> set[str]:
    """Of one of vLLM's configurations."""
    module = import_module(f"vllm.config.{name.removesuffix('_config')}")
    kind = next(
        kind for text, kind in vars(module).items() if text.lower() == name.replace("_", "")
    )
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", list(OTHERS))
def test_B3_every_field_of_a_configuration_is_in_the_identity_or_has_a_reason(name: str) -> None:
    """A version of vLLM with another one fails here: find out what it decides."""
    from connectors.vllm_identity import FIELDS

    told = list(FIELDS.get(name, ()))
    told += " ".join(OTHERS[name].values()).split()
    assert len(told) == len(set(told))
    assert fields(name) - set(told) == set(), "not known"
    assert set(told) - fields(name) <= ADDED_BY_0_33


def test_B3_every_configuration_with_fields_in_the_identity_has_a_table() -> None:
    from connectors.vllm_identity import FIELDS

    assert set(FIELDS) <= set(OTHERS)
    inside = {"vllm_config", "multimodal_config"}
    assert set(OTHERS["vllm_config"]["has a table here"].split()) == set(OTHERS) - inside


def read_by_models() -> Iterator[str]:
    """Variables of the environment that vLLM's code for computing reads."""
    import vllm

    root = Path(vllm.__file__).parent
    for place in PLACES:
        here = root / place
        for path in [here] if here.is_file() else here.rglob("*.py"):
            yield from re.findall(r"\benvs\.(VLLM_[A-Z0-9_]+)", path.read_text(encoding="utf-8"))


def test_B3_every_variable_that_models_read_is_in_the_identity_or_has_a_reason() -> None:
    from connectors import vllm_identity

    told = {*vllm_identity.VARIABLES, *vllm_identity.ADDED_VARIABLES}
    reasons = " ".join(REASONS.values()).split()
    found = set(read_by_models())
    assert set(vllm_identity.VARIABLES) <= found
    assert {
        name for name in found - told if not any(fnmatch(name, pattern) for pattern in reasons)
    } == set()


# What is in it


def changed(folder: Path, part: str, field: str) -> tuple[Any, Any]:
    """Two configurations that differ in one field."""
    before, after = (
        facts(
            folder,
            multimodal_config=images(),
            diffusion_config=SimpleNamespace(canvas_length=8),
            speculative_config=speculation("eagle", draft_model_config=model(folder)),
        )
        for _ in range(2)
    )
    owner = after.model_config if part == "multimodal_config" else after
    setattr(getattr(owner, part), field, "changed")
    return before, after


def test_B3_each_of_them_changes_the_identity_and_a_trait(tmp_path: Path) -> None:
    from connectors.vllm_identity import FIELDS

    folder = with_weights(tmp_path)
    for part, field in ((part, field) for part, names in FIELDS.items() for field in names):
        before, after = (identity(one) for one in changed(folder, part, field))
        if field != "load_format":  # an unknown one
            assert before[2] == after[2] == "", field
        assert before[0] != after[0], field
        assert before[1] != after[1], field


@pytest.mark.parametrize("part", ["cache_config", "model_config", "speculative_config"])
def test_O22_a_setting_that_is_gone_is_one_message(tmp_path: Path, part: str) -> None:
    from connectors.vllm_identity import FIELDS

    config, _ = changed(with_weights(tmp_path), part, "other")
    gone = FIELDS[part][0]
    delattr(getattr(config, part), gone)
    with pytest.raises(NotSupported, match=rf" has no {part}\.{gone}, expected"):
        identity(config)


def test_B3_variables_change_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    from connectors.vllm_identity import ADDED_VARIABLES, VARIABLES

    config = facts(with_weights(tmp_path))
    found = {identity(config)[0]}
    for name in (*VARIABLES, *ADDED_VARIABLES):
        with monkeypatch.context() as patch:
            patch.setitem(vars(envs), name, "changed")
            found.add(identity(config)[0])
    assert len(found) == 1 + len(VARIABLES) + len(ADDED_VARIABLES)


# Images


def test_B3_pruned_videos_and_quantized_encoders_are_others(tmp_path: Path) -> None:
    """vLLM's hash of an image or a video has none of this."""
    folder, scales = with_weights(tmp_path / "model"), tmp_path / "scales.json"
    scales.write_text("{}")

    def digest(**settings: object) -> str:
        found, _, unnamed = identity(facts(folder, multimodal_config=images(**settings)))
        assert unnamed == ""
        return found

    fp8 = {"mm_encoder_attn_dtype": "fp8"}
    plain = digest()
    found = [
        plain,
        digest(video_pruning_rate=0.5),
        digest(video_pruning_rate=0.75),
        digest(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
        digest(**fp8),
        digest(**fp8, mm_encoder_fp8_scale_path=str(scales)),
    ]
    scales.write_text("{ }")
    found.append(digest(**fp8, mm_encoder_fp8_scale_path=str(scales)))
    assert len(set(found)) == len(found)
    assert digest(video_pruning_rate=0.0, video_pruning_method="vidcom2") == plain
    other = scales.rename(tmp_path / "other.json")
    assert digest(**fp8, mm_encoder_fp8_scale_path=str(other)) == found[-1]


def test_B3_scales_that_cannot_be_read_have_no_name(tmp_path: Path) -> None:
    lost = str(tmp_path / "scales.json")
    config = facts(
        with_weights(tmp_path / "model"),
        multimodal_config=images(mm_encoder_fp8_scale_path=lost),
    )
    assert identity(config)[2] == f"{lost}: No such file or directory"
