"""Engines of one model whose KV tensors vLLM itself lays out, with known content in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from connectors.copies.host import LayerCache
from connectors.engine_interface import Geometry
from kvstore.core.layout import RankGeometry, SlotLayout, slot_layout
from kvstore.core.types import GroupRule
from tests.engine.facts import facts

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LAYERS, HEADS, TOKENS, HEAD_SIZE = 2, 4, 32, 16


def laid_out(
    spec: Any, layout: str, layers: int, blocks: int, kernel: int | None
) -> tuple[torch.Tensor, list[Any]]:
    """Raw memory of any content, and one tensor for each layer, made by vLLM.

    kernel: tokens of a block that kernels see, if they see several in one of the engine's.
    """
    from vllm.v1.kv_cache_interface import (
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    order = KVCacheLayout[layout]
    strides = compute_layout_strides(spec, blocks, layers, order)
    size = max(strides[0] * layers, strides[1] * blocks)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8).view(torch.int8)
    names = [f"layer.{i}" for i in range(layers)]
    tensor = KVCacheTensor(size, names, strides[0], strides[1])
    return raw, create_kv_cache_views(raw, spec, blocks, order, tensor, kernel)


class Rank:
    """One rank's tensors."""

    def __init__(self, config: Any, spec: Any, layout: str, kernel: int, blocks: int) -> None:
        from connectors import vllm_worker

        _, views = laid_out(spec, layout, LAYERS, blocks, kernel)
        names = [f"layer.{i}" for i in range(LAYERS)]
        self.tensors = dict(zip(names, views, strict=True))
        self.parts = [view.unflatten(0, (blocks, -1)) for view in views]  # [B, K, H, N, C]
        cache = SimpleNamespace(
            num_blocks=blocks,
            kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec)],
        )
        self.caches: dict[str, LayerCache] = vllm_worker.layer_caches(cache, self.tensors)
        tokens = Geometry(TOKENS, TOKENS, (TOKENS,), (GroupRule(),))
        self.geometry: RankGeometry = vllm_worker.rank_geometry(
            config, cache, self.tensors, self.caches, tokens
        )


class Engine:
    """All ranks of an engine. Raises ValueError for what vLLM does not lay out."""

    def __init__(
        self,
        folder: Path,
        layout: str,
        kernel: int = TOKENS,
        ranks: int = 1,
        blocks: int = 3,
        *,
        heads: int = HEADS,
        backend: type | None = None,
        **changes: object,
    ) -> None:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self.name = f"{layout}, kernel blocks of {kernel}, {ranks} ranks"
        facts_of_spec: dict[str, Any] = {
            "block_size": TOKENS,
            "num_kv_heads": max(1, heads // ranks),
            "head_size": HEAD_SIZE,
            "dtype": torch.bfloat16,
        }
        made = changes.pop("spec", FullAttentionSpec)
        assert callable(made)
        facts_of_spec |= {k: changes.pop(k) for k in list(changes) if k in SPEC_FIELDS}
        spec = made(**facts_of_spec)
        layer = SimpleNamespace(get_attn_backend=lambda: backend or TritonAttentionBackend)
        self.ranks = []
        for rank in range(ranks):
            config = facts(folder, **changes)
            config.parallel_config = SimpleNamespace(tensor_parallel_size=ranks, rank=rank)
            config.model_config.get_total_num_kv_heads = lambda: heads
            config.compilation_config = SimpleNamespace(
                static_forward_context={f"layer.{i}": layer for i in range(LAYERS)}
            )
            self.ranks.append(Rank(config, spec, layout, kernel, blocks))
        self.layout: SlotLayout = slot_layout([rank.geometry for rank in self.ranks])

    def fill(self, content: torch.Tensor, block: int) -> None:
        """content: [layers, heads, tokens, elements] over all ranks."""
        for part, here in self._parts(content, block):
            part.copy_(here)

    def holds(self, content: torch.Tensor, block: int) -> bool:
        parts = self._parts(content, block)
        return all(
            torch.equal(part.view(torch.uint8), here.view(torch.uint8)) for part, here in parts
        )

    def _parts(
        self, content: torch.Tensor, block: int
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for number, rank in enumerate(self.ranks):
            for layer, parts in enumerate(rank.parts):
                part = parts[block].transpose(0, 1)  # [H, K, N, C]
                heads, kernel_blocks = part.shape[:2]
                first = number * content.shape[1] // len(self.ranks)
                here = content[layer, first : first + heads].reshape(
                    heads, kernel_blocks, -1, content.shape[-1]
                )
                found.append((part, here))
        return found

    def stored(self, block: int) -> bytes:
        """What a slot has of a block: each rank's pages as they lie in memory, gaps left out."""
        slot = bytearray(self.layout.slot_bytes)
        for rank, placed in zip(self.ranks, self.layout.ranks, strict=True):
            for run, parts in zip(placed.groups[0].runs, rank.parts, strict=True):
                page = as_it_lies(parts[block]).contiguous().view(torch.uint8)
                slot[run.offset : run.offset + run.length] = page.numpy().tobytes()
        return bytes(slot)

    def load(self, slot: bytes, block: int) -> None:
        for rank, placed in zip(self.ranks, self.layout.ranks, strict=True):
            for run, parts in zip(placed.groups[0].runs, rank.parts, strict=True):
                page = as_it_lies(parts[block])
                data = np.frombuffer(slot, np.uint8, run.length, run.offset).copy()
                page.copy_(torch.from_numpy(data).view(page.dtype).view(page.shape))


SPEC_FIELDS = (
    *("head_size", "dtype", "head_size_v", "state_content_bytes", "num_head_slots"),
    *("cache_dtype_str", "kv_quant_mode"),
)


def as_it_lies(page: torch.Tensor) -> torch.Tensor:
    """Its dimensions in the order of memory."""
    strides = page.stride()
    return page.permute(sorted(range(page.dim()), key=lambda dim: -strides[dim]))
