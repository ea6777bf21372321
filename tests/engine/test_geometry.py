"""What the engine's KV groups are to the store, with the engine's own descriptions of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.core.errors import ConfigError, NotSupported
from kvstore.core.types import GroupRule
from tests.engine.facts import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM

BLOCK = 16


def spec(kind: str, **fields: object) -> Any:
    """One of vLLM's descriptions of a KV group."""
    import torch
    from vllm.v1 import kv_cache_interface as theirs

    if kind == "MambaSpec":
        made: dict[str, Any] = {"shapes": ((4,),), "dtypes": (torch.float32,)}
    else:
        made = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return getattr(theirs, kind)(**({"block_size": BLOCK} | made | fields))


def window(tokens: int, extra: int) -> Any:
    return spec("SlidingWindowSpec", sliding_window=tokens, extra_retained_tokens=extra)


# O1, O9: which blocks of a window the engine wants filled


@pytest.mark.parametrize("extra", [0, 1, 2, 15, 16, 40])
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 18, 33, 100])
def test_O9_a_hit_has_every_block_of_a_window_that_the_engine_makes_room_for(
    tokens: int, extra: int
) -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    from connectors.vllm_compat import group_rule

    engine = SlidingWindowManager(
        window(tokens, extra),
        block_pool=BlockPool(128, enable_caching=True, hash_block_size=BLOCK),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )
    rule = group_rule(window(tokens, extra), BLOCK)
    for hit in range(1, 10):
        name = str(hit)
        engine.add_local_computed_blocks(name, [], 0, hit * BLOCK)
        engine.allocate_external_computed_blocks(name, 0, hit * BLOCK)
        table = engine.req_to_blocks[name]
        kept = sum(block is not engine.block_pool.null_block for block in table)
        assert len(table) == hit
        assert hit - rule.first_of(hit, inside=0) == max(1, kept)


def test_O1_what_a_hit_needs_of_a_window_is_the_same_in_blocks_of_several() -> None:
    from connectors.vllm_compat import group_rule

    assert group_rule(window(17, 0), 2 * BLOCK) == GroupRule(1, reach=16)
    assert group_rule(window(33, 0), 2 * BLOCK) == GroupRule(1, reach=32)
    assert group_rule(window(33, 1), 2 * BLOCK) == GroupRule(2, reach=1)


# O1, O22: kinds of groups


@pytest.mark.parametrize(
    ("kind", "fields", "rule"),
    [
        ("FullAttentionSpec", {}, GroupRule(None)),
        ("MLAAttentionSpec", {}, GroupRule(None)),
        ("SlidingWindowSpec", {"sliding_window": 18}, GroupRule(2, reach=1)),
        ("MambaSpec", {"mamba_cache_mode": "align"}, GroupRule(1, exact=True)),
    ],
)
def test_O1_a_kind_of_group_is_a_rule(kind: str, fields: dict[str, Any], rule: GroupRule) -> None:
    from connectors.vllm_compat import group_rule

    one = spec(kind, **fields)
    assert group_rule(one, BLOCK) == rule
    several = spec_of_several({"a": one, "b": one})
    assert group_rule(several, BLOCK) == rule


def spec_of_several(layers: dict[str, Any]) -> Any:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=layers)


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("CrossAttentionSpec", {}, "does not serve KV groups of kind CrossAttentionSpec"),
        ("EncoderOnlyAttentionSpec", {}, "serve KV groups of kind EncoderOnlyAttentionSpec"),
        (
            "ChunkedLocalAttentionSpec",
            {"attention_chunk_size": 32},
            "serve KV groups of kind ChunkedLocalAttentionSpec",
        ),
        ("CircularBufferSpec", {}, "serve KV groups of kind CircularBufferSpec"),
        ("MambaSpec", {"mamba_cache_mode": "none"}, "mamba_cache_mode 'none', expected 'align'"),
        ("MambaSpec", {"mamba_cache_mode": "all"}, "mamba_cache_mode 'all', expected 'align'"),
    ],
)
def test_O22_a_group_of_another_kind_is_refused_by_name(
    kind: str, fields: dict[str, Any], told: str
) -> None:
    from connectors.vllm_compat import group_rule

    with pytest.raises(NotSupported, match=told):
        group_rule(spec(kind, **fields), BLOCK)
    with pytest.raises(NotSupported, match=told):
        group_rule(spec_of_several({"a": spec(kind, **fields)}), BLOCK)


# O22: an engine's groups together


def cache_of(*specs: Any, **fields: object) -> Any:
    """vLLM's description of a KV cache; fields: of its last group."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec([str(index)], one) for index, one in enumerate(specs)]
    for name, value in fields.items():
        setattr(groups[-1], name, value)
    return KVCacheConfig(8, [], groups)


def engine(**fields: object) -> Any:
    cache: dict[str, Any] = {
        "block_size": BLOCK,
        "prefix_match_unit": None,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
    }
    return SimpleNamespace(
        cache_config=SimpleNamespace(**(cache | fields)),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=SimpleNamespace(),
        use_v2_model_runner=False,
    )


def test_O13_a_runner_that_zeroes_blocks_before_they_are_copied_is_refused() -> None:
    """Read in vLLM 0.32: its blocks are zeroed before the connector's step begins."""
    from connectors.vllm_compat import geometry

    config = engine(mamba_cache_mode="align")
    recurrent = cache_of(spec("FullAttentionSpec"), spec("MambaSpec"))
    assert recurrent.needs_kv_cache_zeroing
    config.use_v2_model_runner = True
    with pytest.raises(NotSupported, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        geometry(config, recurrent, None)
    plain = cache_of(spec("FullAttentionSpec"))
    assert geometry(config, plain, None).rules == (GroupRule(None),)


def test_O1_a_geometry_is_read_from_the_engines_own_groups() -> None:
    from connectors.vllm_compat import geometry

    full = spec("FullAttentionSpec", block_size=2 * BLOCK)
    found = geometry(engine(), cache_of(full, window(18, 0)), 4 * BLOCK)
    assert found.block_tokens == 4 * BLOCK
    assert found.hash_tokens == BLOCK
    assert found.engine_block_tokens == (2 * BLOCK, BLOCK)
    assert found.rules == (GroupRule(None), GroupRule(1, reach=17))
    assert geometry(engine(), cache_of(full, window(18, 0)), None).block_tokens == 2 * BLOCK


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, "CircularBufferSpec"),  # of no prefix
        ({"enable_kv_transfer": False}, "FullAttentionSpec"),  # the engine keeps it to itself
    ],
)
def test_O22_an_engine_with_a_group_that_no_prefix_names_is_refused(
    fields: dict[str, Any], last: str
) -> None:
    from connectors.vllm_compat import geometry

    cache = cache_of(spec("FullAttentionSpec"), spec(last), **fields)
    with pytest.raises(NotSupported, match="KV groups that cannot be cached"):
        geometry(engine(), cache, None)


@pytest.mark.parametrize("tokens", [BLOCK, 3 * BLOCK])
def test_O22_a_block_is_a_multiple_of_the_engines(tokens: int) -> None:
    from connectors.vllm_compat import geometry

    cache = cache_of(spec("FullAttentionSpec", block_size=2 * BLOCK), window(18, 0))
    told = f"block_tokens is {tokens}, expected a multiple of the engine's block size, 32"
    with pytest.raises(ConfigError, match=told):
        geometry(engine(), cache, tokens)


def test_O22_a_block_of_several_states_is_refused() -> None:
    """The engine keeps the last state of several blocks only: such a block was never whole."""
    from connectors.vllm_compat import geometry

    cache = cache_of(spec("FullAttentionSpec"), spec("MambaSpec", mamba_cache_mode="align"))
    assert geometry(engine(), cache, BLOCK) == geometry(engine(), cache, None)
    with pytest.raises(NotSupported, match=f"block_tokens is 32, expected {BLOCK}: a state"):
        geometry(engine(), cache, 2 * BLOCK)
