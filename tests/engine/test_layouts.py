"""Tensors as vLLM itself lays them out, for every layout it has: where the worker finds pages.

Its CUDA backends choose among these layouts. Here the tensors are on the host, with equal strides.
"""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from connectors.copies.gpu.plan import places_of, plans
from connectors.copies.host import LayerCache
from kvstore.core.errors import NotSupported
from kvstore.core.layout import GroupGeometry, LayerGeometry, Move, RankGeometry, slot_layout
from kvstore.core.types import GroupRule
from tests.engine.views import LAYOUTS, as_it_lies, laid_out
from tests.harness.gpu_layouts import Engine
from tests.harness.gpu_twin import items
from tests.harness.moves import rows
from tests.test_gpu_plan import SLOTS, memory, slots_for

pytestmark = pytest.mark.vllm

LAYERS, BLOCKS, BLOCK_TOKENS = 3, 5, 32
SPECS: dict[str, dict[str, Any]] = {
    "bf16": {"num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16},
    "fp8": {"num_kv_heads": 2, "head_size": 128, "dtype": torch.float8_e4m3fn},
    "fp4 packed": {
        "num_kv_heads": 2, "head_size": 128, "dtype": torch.uint8, "state_content_bytes": 144,
    },
    "padded": {"num_kv_heads": 1, "head_size": 40, "dtype": torch.bfloat16, "padded": 6144},
    "MLA": {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, "mla": True},
}  # fmt: skip


def views(
    kind: str, layout: str, kernel_tokens: int | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    facts = dict(SPECS[kind])
    made = MLAAttentionSpec if facts.pop("mla", False) else FullAttentionSpec
    padded = facts.pop("padded", None)
    spec = made(block_size=BLOCK_TOKENS, page_size_padded=padded, **facts)
    return laid_out(spec, layout, LAYERS, BLOCKS, kernel_tokens)


def caches_of(tensors: list[torch.Tensor]) -> dict[str, LayerCache]:
    from connectors.vllm_worker import layer_caches

    named = {f"layer.{i}": tensor for i, tensor in enumerate(tensors)}
    return layer_caches(SimpleNamespace(num_blocks=BLOCKS), named)


def in_memory_order(page: torch.Tensor) -> bytes:
    return as_it_lies(page).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SPECS)
def test_every_page_of_every_layout_is_found(kind: str, layout: str) -> None:
    raw, tensors = views(kind, layout)
    caches = caches_of(tensors)
    layers = tuple(LayerGeometry(name, cache.page_bytes) for name, cache in caches.items())
    geometry = RankGeometry("model", BLOCK_TOKENS, (1,), (GroupGeometry(GroupRule(), layers),))
    engine = Engine([], caches, geometry, slot_layout([geometry]).ranks[0])
    slots, (extent, _) = slots_for(engine)
    assert SLOTS >= BLOCKS
    groups = plans(engine.layout, caches, store=True)
    moves = [Move(0, block, block, 0) for block in range(BLOCKS)]
    ((_, places),) = places_of(rows(moves), slots, groups)
    table = items(groups[0].tiles, places)
    for e, s, n in zip(*(column.tolist() for column in table), strict=True):
        assert raw.data_ptr() <= e <= e + n <= raw.data_ptr() + raw.numel()
        memory(s, n)[:] = memory(e, n)
    size = engine.layout.slot_bytes
    for block in range(BLOCKS):
        held = extent.data[block * size : (block + 1) * size].numpy().tobytes()
        for run, tensor in zip(engine.layout.groups[0].runs, tensors, strict=True):
            expected = in_memory_order(tensor[block])
            assert len(expected) == run.length == prod(tensor.shape[1:]) * tensor.element_size()
            assert held[run.offset : run.offset + run.length] == expected


def test_blocks_that_kernels_see_as_several_are_one_to_us() -> None:
    _, whole = views("bf16", "LBHNC")
    _, split = views("bf16", "LBNHC", kernel_tokens=BLOCK_TOKENS // 2)
    assert split[0].shape[0] == 2 * BLOCKS
    one, two = caches_of(whole)["layer.0"], caches_of(split)["layer.0"]
    assert (two.page_bytes, two.block_stride, two.pieces) == (one.page_bytes, one.block_stride, 1)


def test_pages_at_more_than_one_distance_are_refused() -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8).as_strided((BLOCKS, 2, 2, 2), (64, 30, 11, 1))
    with pytest.raises(NotSupported, match=r"layer layer.0: .* strides \(64, 30, 11, 1\).*LBHNC"):
        caches_of([tensor])


def test_the_oracle_reads_what_numpy_reads() -> None:
    tensor = torch.arange(24, dtype=torch.uint8).view(2, 3, 4).permute(1, 0, 2)
    assert in_memory_order(tensor) == np.arange(24, dtype=np.uint8).tobytes()
