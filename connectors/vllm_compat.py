"""What both sides read of vLLM's configuration: whether it is served, and its token counts.

vLLM's names stay in the files of this name. Checked against 0.32 (runs in the tests) and 0.33 (its
source; what it adds is optional here).
"""

from __future__ import annotations

from typing import Any

from connectors import vllm_version  # noqa: F401 - the first, see there

# isort: split
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connectors.config import block_tokens_of
from connectors.engine_interface import Geometry
from connectors.vllm_private import values_of
from kvstore.core.errors import NotSupported
from kvstore.core.types import GroupRule, window_rule

NO_CONTEXT = (
    "expected one of them on: vLLM switches both off where a model cannot continue from loaded KV,"
    " such as MLA on a CPU"
)
ASLEEP = "an engine that falls asleep unmaps memory that copies still read"
HASH_ALGORITHMS = ("sha256", "sha256_cbor")


def check_supported(config: Any) -> None:
    """Raise NotSupported, in one message, for what this version does not serve.

    Roles: under kv_producer an engine frees preempted blocks while they are still written.
    Hash algorithms: with one that is not cryptographic, prompts can be made to collide.
    """
    parallel = config.parallel_config
    transfer = config.kv_transfer_config
    algorithm = config.cache_config.prefix_caching_hash_algo
    for wrong, text in (
        (
            config.model_config.is_encoder_decoder,
            "an encoder-decoder model, served are decoder-only models",
        ),
        (
            config.model_config.enable_sleep_mode,
            f"enable_sleep_mode {config.model_config.enable_sleep_mode}, expected False: {ASLEEP}",
        ),
        (transfer.kv_role != "kv_both", f"kv_role {transfer.kv_role!r}, expected 'kv_both'"),
        (
            algorithm not in HASH_ALGORITHMS,
            f"prefix_caching_hash_algo {algorithm!r}, expected one of {HASH_ALGORITHMS}",
        ),
        (
            parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray",
            "an engine on several nodes, expected one node",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism, expected context parallel sizes of 1",
        ),
        (
            not config.cache_config.enable_prefix_caching
            and not config.scheduler_config.enable_chunked_prefill,
            f"prefix caching and chunked prefill are both off, {NO_CONTEXT}",
        ),
    ):
        if wrong:
            raise NotSupported(f"kvstore does not serve this engine: {text}")


def group_rule(spec: Any, block_tokens: int) -> GroupRule:
    """Say which blocks of a group a hit needs. Raises NotSupported for other kinds."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, SlidingWindowSpec):
        # Below its window the engine keeps tokens that a drafter of several modules goes back to.
        return window_rule(spec.sliding_window + spec.extra_retained_tokens, block_tokens)
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "align":
            raise NotSupported(
                f"mamba_cache_mode {spec.mamba_cache_mode!r}, expected 'align'"
                " (--enable-prefix-caching)"
            )
        return GroupRule(1, exact=True)
    if isinstance(spec, FullAttentionSpec):
        return GroupRule(None)
    raise NotSupported(f"kvstore does not serve KV groups of kind {type(spec).__name__}")


def geometry(config: Any, cache: Any, wanted: int | None) -> Geometry:
    """Read token counts from vLLM's configuration; wanted: the block_tokens setting."""
    groups = cache.kv_cache_groups
    runner = values_of(config, "VllmConfig", ("use_v2_model_runner",))
    blocks = values_of(cache, "KVCacheConfig", ("needs_kv_cache_zeroing",))
    if all((*runner.values(), *blocks.values())):
        raise NotSupported(
            "kvstore does not serve models with recurrent state, or KV of several precisions,"
            " under vLLM's model runner V2: it zeroes blocks before their last content is copied;"
            " expected VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if set(cache.prefix_cacheable_group_ids) != set(range(len(groups))):
        raise NotSupported("kvstore does not serve models with KV groups that cannot be cached")
    scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(cache, config)
    block_tokens = block_tokens_of(wanted, scheduler_tokens)
    sizes = tuple(group.kv_cache_spec.block_size for group in groups)
    rules = tuple(group_rule(group.kv_cache_spec, block_tokens) for group in groups)
    for size, rule in zip(sizes, rules, strict=True):
        if rule.exact and size != block_tokens:  # it has one state, and no whole blocks before it
            raise NotSupported(
                f"kvstore does not serve this engine: block_tokens is {block_tokens}, expected"
                f" {size}: a state is stored only in a block of the engine's own size"
            )
    return Geometry(block_tokens, hash_tokens, sizes, rules)
