"""The names of vLLM that no interface promises, checked at start: a rename is one message then.

What the connector calls and overrides by contract is not here; a step that met another name would
end the engine, or, worse, store nothing for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy, get_block_hash
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connectors.vllm_version import VERSION
from kvstore.core.errors import NotSupported

REQUEST = (
    "_all_token_ids", "all_token_ids", "block_hashes", "cache_salt", "drop_stale_output",
    "kv_hints", "kv_transfer_params", "lora_request", "max_tokens", "mm_features",
    "num_computed_tokens", "num_in_flight_tokens", "num_prompt_tokens", "num_tokens",
    "prompt_embeds", "prompt_is_token_ids", "prompt_token_ids", "request_id", "sampling_params",
    "skip_reading_prefix_cache", "status",
)  # fmt: skip
CLASSES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (SchedulerOutput, (
        "kv_cache_block_copies", "kv_connector_block_state", "new_block_ids_to_zero",
        "num_scheduled_tokens", "preempted_req_ids", "scheduled_cached_reqs", "scheduled_new_reqs",
    )),
    (KVConnectorBlockState, ("boundary_state_offloads",)),
    (NewRequestData, ("block_ids", "num_computed_tokens")),
    (CachedRequestData, ("new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids")),
    (KVConnectorOutput, (
        "failed_recving", "finished_recving", "invalid_block_ids", "kv_connector_worker_meta",
    )),
    (KVCacheBlockCopy, ("dst_block_id",)),
    (KVCacheBlocks, ("blocks",)),
    (KVCacheBlock, ("block_id",)),
    (KVCacheConfig, ("kv_cache_groups",)),
    (KVCacheGroupSpec, ("kv_cache_spec",)),
    (CacheHitSource, ("DISK", "EXTERNAL_UNSPECIFIED", "HOST", "P2P")),
    (MultiModalFeatureSpec, ("data", "mm_position")),
    (PlaceholderRange, ("length", "offset")),
    (SamplingParams, ("prompt_logprobs", "seed")),
)  # fmt: skip
# What is made with which arguments: no more, no less.
BUILT: tuple[tuple[type, tuple[str, ...]], ...] = (
    (BlockRemoved, ("block_hashes", "group_idx", "locality", "medium")),
    (BlockStored, (
        "block_hashes", "block_size", "extra_keys", "group_idx", "kv_cache_spec_kind",
        "locality", "lora_id", "lora_name", "medium", "parent_block_hash", "token_ids",
    )),
    (KVConnectorTransferResults, ("failed_recving", "finished_recving", "finished_sending")),
)  # fmt: skip
MANAGER = ("coordinator", "evict_blocks", "prefix_cache_lookup_enabled")
COORDINATOR = ("find_longest_cache_hit", "single_type_managers")
GROUP = ("req_to_blocks",)


def check_private(kv_cache_manager: Any) -> None:
    """Raise NotSupported, in one message, for all names that are not there."""
    _refuse(list(_missing(kv_cache_manager)))


def values_of(part: Any, what: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Read settings of vLLM. Raises NotSupported, in one message, for all that are not there."""
    _refuse(list(_not_in(part, what, names)))
    return {name: getattr(part, name) for name in names}


class OwnCache:
    """The prefix cache of a vLLM with one KV group, as EngineCache.

    The free blocks are a linked list in the order of their reuse. vLLM has a method that lists all
    of it, for its tests; only the first ones are wanted.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        """Raises NotSupported, in one message, for names that are not there."""
        pool = values_of(kv_cache_manager, "KVCacheManager", ("block_pool",))["block_pool"]
        found = values_of(pool, "BlockPool", ("blocks", "free_block_queue"))
        self._queue = found["free_block_queue"]
        head, names = "fake_free_list_head", ("fake_free_list_head", "num_free_blocks")
        self._head = values_of(self._queue, "FreeKVCacheBlockQueue", names)[head]
        values_of(self._head, "KVCacheBlock", ("block_hash", "block_id", "next_free_block"))
        self._blocks = found["blocks"]

    @property
    def block_count(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    @property
    def free_count(self) -> int:
        """How many can be allocated."""
        count: int = self._queue.num_free_blocks
        return count

    def next_free(self, count: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield the blocks that are allocated next, up to so many, and what each holds."""
        block = self._head.next_free_block
        while count and block.next_free_block is not None:  # the last one stands for the end
            yield block.block_id, _hash_of(block)
            block, count = block.next_free_block, count - 1

    def held(self, block: int) -> bytes | None:
        """Return the hash by which requests find a block; None: they do not."""
        return _hash_of(self._blocks[block])


def _hash_of(block: Any) -> bytes | None:
    name = block.block_hash
    return None if name is None else get_block_hash(name)


def _refuse(missing: list[str]) -> None:
    if missing:
        raise NotSupported(
            f"kvstore does not serve this engine: vLLM {VERSION} has no {', '.join(missing)},"
            " expected as in its release; use a release, or a kvstore that supports this engine"
        )


def _missing(manager: Any) -> Iterator[str]:
    for owner, names in CLASSES:
        there = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
        yield from (f"{owner.__name__}.{name}" for name in names if name not in there)
    for owner, names in BUILT:
        try:
            owner(**dict.fromkeys(names))
        except TypeError as exc:
            yield f"{owner.__name__}({', '.join(names)}): {exc}"
    request = Request("", [0], SamplingParams(max_tokens=1), None)
    yield from (f"Request.{name}" for name in REQUEST if not hasattr(request, name))
    yield from _not_in(manager, "KVCacheManager", MANAGER)
    coordinator = getattr(manager, "coordinator", None)
    if coordinator is None:
        return
    yield from _not_in(coordinator, "KVCacheCoordinator", COORDINATOR)
    for group in getattr(coordinator, "single_type_managers", ()):
        yield from _not_in(group, type(group).__name__, GROUP)


def _not_in(thing: Any, what: str, names: tuple[str, ...]) -> Iterator[str]:
    return (f"{what}.{name}" for name in names if not hasattr(thing, name))
