"""How vLLM lays out a layer's page, in the terms of core/layout: what decides its bytes' order.

A page is copied as it lies, so two engines may share it only if they read it in the same way.
That depends on the layout that an engine chose (its tensors' strides say it), on the blocks that
its kernels work with, and on what a backend makes of one block: most keep K and V of a token side
by side in each head, others pack them in ways of their own.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from connectors import vllm_version  # noqa: F401 - the first, see there

# isort: split
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

from kvstore.core.errors import NotSupported
from kvstore.core.layout import LayerGeometry, PageForm

_AXES = ("kernel blocks", "heads", "tokens", "bytes")
_HEADS, _BYTES = 1, 3  # among the axes
_LATENT = (MLAAttentionSpec, SlidingWindowMLASpec)  # every rank holds all of it
# These keep K, then V, of each head and token, unless the spec says that they pack them.
PLAIN = {
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend"),
    ("vllm.v1.attention.backends.flashinfer", "FlashInferBackend"),
    ("vllm.v1.attention.backends.triton_attn", "TritonAttentionBackend"),
    ("vllm.v1.attention.backends.flex_attention", "FlexAttentionBackend"),
}


def layer_geometry(
    config: Any, name: str, spec: Any, page_bytes: int, blocks: torch.Tensor
) -> LayerGeometry:
    """Describe one layer's page on this rank.

    blocks: the layer's tensor, [engine blocks, heads, tokens, content], with kernel blocks before
    heads where an engine block is several. Raises NotSupported for other tensors.
    """
    if blocks.dim() not in (4, 5):
        raise NotSupported(
            f"layer {name}: a tensor of shape {tuple(blocks.shape)}, expected 4 dimensions:"
            " blocks, heads, tokens, content"
        )
    sizes = [*blocks.shape[1:-1], blocks.shape[-1] * blocks.element_size()]
    strides = list(blocks.stride()[1:])
    if len(sizes) < len(_AXES):
        sizes, strides = [1, *sizes], [0, *strides]
    if blocks.shape[-1] > 1 and strides[_BYTES] != 1:
        raise NotSupported(f"layer {name}: content has stride {strides[_BYTES]}, expected 1")
    order = sorted(
        (axis for axis in range(_BYTES) if sizes[axis] > 1), key=lambda axis: -strides[axis]
    )
    heads_first = sizes[_HEADS] == 1 or order[0] == _HEADS

    def form(heads: int) -> PageForm:
        """heads: how many there are, where they are outermost. One alone is so, at any stride."""
        inner = [f"{sizes[axis]} {_AXES[axis]}" for axis in order if axis != _HEADS]
        if heads_first:
            told = [f"{heads} heads", *inner]
        else:
            told = [f"{sizes[axis]} {_AXES[axis]}" for axis in order]
        text = ", ".join([*told, f"{sizes[_BYTES]} bytes"])
        # Of a kernel block; states stand for all tokens before them.
        tokens = 0 if isinstance(spec, MambaSpec) else spec.block_size // sizes[0]
        return PageForm(text, tokens, _content(config, name, spec))

    parallel = config.parallel_config
    ranks, rank = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size
    states = isinstance(spec, MambaSpec)
    whole = spec.tp_replicated if states else isinstance(spec, _LATENT)
    if whole or ranks == 1:
        return LayerGeometry(name, page_bytes, form=form(sizes[_HEADS]))
    total = config.model_config.get_total_num_kv_heads()
    heads = sizes[_HEADS]
    sliced = not states and spec.num_head_slots is None  # else "heads" are K and V, say
    by_head = sliced and heads == spec.num_kv_heads == max(1, total // ranks)
    if by_head and heads_first:
        return LayerGeometry(
            name, page_bytes, heads, rank * total // ranks, total, form=form(total)
        )
    return LayerGeometry(name, page_bytes, 1, rank, ranks, head_major=False, form=form(heads))


def _content(config: Any, name: str, spec: Any) -> str:
    """Say what is innermost in a page, and who packs it where that is not the plain way."""
    backend = config.compilation_config.static_forward_context[name].get_attn_backend()
    module, writer = backend.full_cls_name()
    if isinstance(spec, MambaSpec):
        shapes = zip(spec.shapes, spec.dtypes, strict=True)
        states = (f"{_text(dtype)} {list(shape)}" for shape, dtype in shapes)
        return f"states {' '.join(states)} by {writer}"
    facts = [f"K {spec.head_size}", f"V {spec.head_size_v}", _text(spec.dtype)]
    latent = isinstance(spec, _LATENT)
    if spec.num_head_slots is not None:
        facts.append("in slots")
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None
    if spec.kv_quant_mode:
        facts += [spec.kv_quant_mode.name, _text(current_platform.fp8_dtype())]
    if latent:
        facts += [f"{spec.cache_dtype_str}", f"{spec.model_version}"]
    if spec.tokens_per_state != 1:
        facts.append(f"{spec.tokens_per_state} tokens a state")
    if packed or latent or (module, writer) not in PLAIN:
        facts.append(f"by {module.removeprefix('vllm.')}.{writer}")
        if current_platform.is_cpu():  # it packs for the instructions that this processor has
            facts += [platform.machine(), torch.backends.cpu.get_cpu_capability()]
            facts += ["AMX"] * torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - vLLM asks so
    return " ".join(facts)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
