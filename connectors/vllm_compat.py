"""What differs between the vLLM versions that are served, and reading vLLM's configuration.

vLLM's names stay in this file and in vllm.py. Checked against 0.32 (runs in the tests) and 0.33
(its source; what it adds is optional here).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch

from connectors import vllm_version  # noqa: F401 - the first, see there

# isort: split
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    group_kernel_blocks,
)

from connectors.copies.host import LayerCache, pieces_of
from connectors.events import BlockEvent
from connectors.request_state import Geometry
from connectors.store_client import DISK, MEMORY
from connectors.vllm_identity import identity
from connectors.vllm_pages import layer_geometry
from kvstore.core.errors import ConfigError, NotSupported
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule, window_rule

NO_CONTEXT = (
    "expected one of them on: vLLM switches both off where a model cannot go on from loaded KV,"
    " such as MLA on a CPU"
)
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
            transfer.kv_role != "kv_both",
            f"kv_role {transfer.kv_role!r}, expected 'kv_both'",
        ),
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
    if isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec | ChunkedLocalAttentionSpec):
        raise NotSupported(f"kvstore does not serve KV groups of kind {type(spec).__name__}")
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
    raise NotSupported(f"kvstore does not know KV groups of kind {type(spec).__name__}")


def geometry(config: Any, cache: Any, wanted: int | None) -> Geometry:
    """Read token counts from vLLM's configuration; wanted: the block_tokens setting."""
    groups = cache.kv_cache_groups
    if set(cache.prefix_cacheable_group_ids) != set(range(len(groups))):
        raise NotSupported("kvstore does not serve models with KV groups that cannot be cached")
    scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(cache, config)
    block_tokens = wanted or scheduler_tokens
    if block_tokens % scheduler_tokens:
        raise ConfigError(
            f"block_tokens is {block_tokens}, expected a multiple of the engine's block size,"
            f" {scheduler_tokens}"
        )
    sizes = tuple(group.kv_cache_spec.block_size for group in groups)
    rules = tuple(group_rule(group.kv_cache_spec, block_tokens) for group in groups)
    return Geometry(block_tokens, hash_tokens, sizes, rules)


def state_groups(cache: Any) -> frozenset[int]:
    """Name the groups whose blocks are recurrent states, whole at hand-over points only."""
    return frozenset(
        index
        for index, group in enumerate(cache.kv_cache_groups)
        if isinstance(group.kv_cache_spec, MambaSpec)
    )


def layer_caches(
    cache: Any,
    tensors: dict[str, torch.Tensor],
) -> dict[str, LayerCache]:
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


SHORTENED = "prompt_shortened"  # a hand-over parameter of ours


def transfer_of(request: Any) -> dict[str, Any] | None:
    """Return a request's hand-over parameters; None if its prompt is not all token ids.

    Images have no place in the name of a partly filled block: with them whole blocks are fetched.
    """
    params: dict[str, Any] | None = request.kv_transfer_params
    if not params or request.prompt_token_ids is None or request.prompt_is_token_ids is not None:
        return None
    if request.mm_features and params.get("do_remote_prefill"):
        return params | {"remote_num_tokens": 0}
    return params


def compute_again(request: Any) -> None:
    """Have a preempted request's output that is under way dropped, and sampled again.

    Scheduling may be steps ahead of the output. A hand-over's last output would end the request
    after its blocks have gone; vLLM drops it by itself for connectors that do nothing else.
    """
    request.drop_stale_output = True


def leave_out_last(request: Any, hash_tokens: int) -> None:
    """Let a prefill request end one token before its prompt does, and sample one.

    A recurrent state cannot be taken back by a token, and who goes on computes the last one. It is
    noted in the request's parameters, so that it happens once. A prompt of one token stays as it
    is, and so does one that ends with an image.
    """
    last = request.num_prompt_tokens - 1
    images = (feature.mm_position for feature in request.mm_features)
    if any(place.offset + place.length > last for place in images):
        return
    params = request.kv_transfer_params
    if last < 1 or request.num_tokens > last + 1 or params.get(SHORTENED):
        return
    params[SHORTENED] = True
    request.prompt_token_ids = request.prompt_token_ids[:last]  # the front end has the same list
    del request._all_token_ids[last:]  # noqa: SLF001 - vLLM's connectors do so, too
    del request.block_hashes[last // hash_tokens :]
    request.num_prompt_tokens = last
    request.max_tokens = 1


_MEDIA = {MEMORY: MEDIUM_CPU, DISK: MEDIUM_STORAGE}
_LOCALITY = "LOCAL"  # a block's place, seen from who publishes it: on the same node


def kv_events(events: Iterable[BlockEvent], tokens: Geometry, cache: Any) -> Iterator[KVCacheEvent]:
    """Make vLLM's events, with hashes in the form in which the engine publishes its own."""
    for event in events:
        hashes = [maybe_convert_block_hash(BlockHash(name)) for name in event.hashes]
        medium, group = _MEDIA[event.medium], event.group
        if not event.stored:
            yield BlockRemoved(
                block_hashes=hashes, medium=medium, group_idx=group, locality=_LOCALITY
            )
            continue
        spec, parent = cache.kv_cache_groups[group].kv_cache_spec, event.parent
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent and maybe_convert_block_hash(BlockHash(parent)),
            token_ids=list(event.tokens),
            block_size=tokens.engine_block_tokens[group],
            lora_id=None,
            medium=medium,
            lora_name=None,
            group_idx=group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            locality=_LOCALITY,
        )


class _Ids(Sequence[int]):
    """Ids of one group's blocks, read when asked for: a long table is never walked whole."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [block.block_id for block in self._blocks[index]]
        return int(self._blocks[index].block_id)


def ids_of(groups: Sequence[Sequence[Any]]) -> Sequence[Sequence[int]]:
    """Return the ids of vLLM's blocks by group without copying them."""
    return [_Ids(blocks) for blocks in groups]


def block_table(
    kv_cache_manager: Any,
    request_id: str,
) -> Sequence[Sequence[int]]:
    """Return a request's block ids by group without copying them."""
    managers = kv_cache_manager.coordinator.single_type_managers
    return ids_of([manager.req_to_blocks.get(request_id, ()) for manager in managers])


def cached_tokens(kv_cache_manager: Any, request: Any) -> int:
    """Count the tokens that a new request finds in the engine's own cache."""
    if not kv_cache_manager.prefix_cache_lookup_enabled(request):
        return 0
    coordinator = kv_cache_manager.coordinator
    return int(coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])


def table_of(
    blocks: Sequence[Sequence[int]] | None,
    states: frozenset[int],
    hand_overs: Sequence[tuple[int, int, int]],
    tokens: Geometry,
) -> Sequence[Sequence[int]] | None:
    """Return a block table that shows recurrent states only where they are whole.

    hand_overs: (group, block id, tokens the state stands for), valid in this step.
    """
    if blocks is None or not states:
        return blocks
    table = [list(ids) for ids in blocks]
    for group in states:
        table[group] = [0] * len(table[group])
    for group, block_id, boundary in hand_overs:
        index = boundary // tokens.engine_block_tokens[group] - 1
        if group in states and boundary % tokens.block_tokens == 0 and index < len(table[group]):
            table[group][index] = block_id
    return table


def last_table(
    request: Any, blocks: Sequence[Sequence[int]], states: frozenset[int], tokens: Geometry
) -> Sequence[Sequence[int]] | None:
    """Return the block table of a request that has ended.

    A recurrent state is whole at its last token, unless a step is under way that goes on from it.
    """
    table = table_of(blocks, states, (), tokens)
    end = request.num_computed_tokens
    if table is None or not states or request.num_in_flight_tokens or not end:
        return table
    shown = [list(ids) for ids in table]
    for group in states:
        index = (end - 1) // tokens.engine_block_tokens[group]
        if index < len(shown[group]):
            shown[group][index] = blocks[group][index]
    return shown
