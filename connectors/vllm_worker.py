"""The worker's side of the vLLM connector: tensors and their geometry, and the worker half."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from connectors import vllm_version  # noqa: F401 - the first, see there

# isort: split
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, group_kernel_blocks

from connectors import worker
from connectors.copies.host import LayerCache, pieces_of
from connectors.engine_interface import Geometry
from connectors.vllm_identity import identity
from connectors.vllm_pages import layer_geometry
from kvstore.core.errors import NotSupported
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry

if TYPE_CHECKING:
    from connectors.config import ExtraConfig


def start_worker(
    config: Any,
    cache: Any,
    tensors: dict[str, torch.Tensor],
    tokens: Geometry,
    settings: ExtraConfig,
    find_store: Callable[[], str],
) -> worker.WorkerHalf:
    """Read the tensors' strides and start attaching to the store. find_store(): its address."""
    caches = layer_caches(cache, tensors)
    return worker.WorkerHalf(
        str(config.kv_transfer_config.engine_id),
        config.parallel_config.rank,
        config.parallel_config.world_size,
        rank_geometry(config, cache, tensors, caches, tokens),
        caches,
        find_store,
        direct=settings.direct_way,
        store_user=settings.store_user,
    )


def layer_caches(cache: Any, tensors: dict[str, torch.Tensor]) -> dict[str, LayerCache]:
    """Describe the engine's tensors by their strides. Raises NotSupported for other layouts."""
    caches = {}
    for name, tensor in tensors.items():
        blocks = group_kernel_blocks(tensor, cache.num_blocks)
        size = blocks.element_size()
        page = blocks[0]
        cut = pieces_of(page.shape, [stride * size for stride in page.stride()], size)
        if cut is None:
            raise NotSupported(
                f"layer {name}: a block is neither one piece of memory nor pieces at equal"
                f" distances (shape {tuple(blocks.shape)}, strides {blocks.stride()}); use a"
                " layer-compact KV cache layout such as LBHNC"
            )
        pieces, piece_stride, piece_bytes = cut
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        caches[name] = LayerCache(
            storage.set_(tensor.untyped_storage()),
            blocks.storage_offset() * size,
            blocks.stride(0) * size,
            pieces * piece_bytes,
            pieces,
            piece_stride,
        )
    return caches


def rank_geometry(
    config: Any,
    cache: Any,
    tensors: dict[str, torch.Tensor],
    caches: dict[str, LayerCache],
    tokens: Geometry,
) -> RankGeometry:
    """Describe this rank's part of a block."""
    groups = []
    for group, rule in zip(cache.kv_cache_groups, tokens.rules, strict=True):
        layers: list[LayerGeometry] = []
        seen: set[tuple[int, int]] = set()
        for name in group.layer_names:
            held = caches.get(name)
            if held is None or (held.storage.data_ptr(), held.offset) in seen:
                continue  # shares the KV of another layer
            seen.add((held.storage.data_ptr(), held.offset))
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            blocks = group_kernel_blocks(tensors[name], cache.num_blocks)
            layers.append(layer_geometry(config, name, spec, held.page_bytes, blocks))
        groups.append(GroupGeometry(rule, tuple(layers)))
    named, traits, unnamed = identity(config)
    return RankGeometry(
        named, tokens.block_tokens, tokens.blocks_per_chunk, tuple(groups), traits, unnamed
    )
