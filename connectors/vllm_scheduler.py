"""The scheduler's side of the vLLM connector: vLLM's requests, tables and events for our half."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from connectors import vllm_version  # noqa: F401 - the first, see there

# isort: split
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from connectors.compute_pace import ComputePace
from connectors.engine_interface import Geometry, Step, is_one_full_group
from connectors.events import BlockEvent, Extra, NextHash, joined
from connectors.kv_hints import PARAMETER as HINT
from connectors.kv_transfer_params import Transfer, is_handed_over
from connectors.late_stores import PastRequest
from connectors.request_policy import NO_LIMITS, NOTHING, RequestPolicy, policy_of
from connectors.scheduler import SchedulerHalf
from connectors.step_loads import StepLoads
from connectors.step_meta import StepMeta
from connectors.store_client import DISK, MEMORY, StoreClient
from connectors.store_connection import Attacher
from connectors.vllm_private import OwnCache, check_private, values_of
from kvstore.core.errors import ConfigError, NotSupported
from kvstore.core.limits import NAME_MAX, SLOTS_MAX
from kvstore.logs import RateLog
from kvstore.units import one_line
from kvstore.wire import engine as p

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from connectors.config import ExtraConfig

log = logging.getLogger("vllm.kvstore")

ATTACH_S = 60.0
_LOGGED_MAX = 200  # characters of a request's id
_HANDED_OVER = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_SOURCES = {"cpu": CacheHitSource.HOST, "nvme": CacheHitSource.DISK, "peer": CacheHitSource.P2P}


def start_scheduler(
    connector: KVConnectorBase_V1,
    config: VllmConfig,
    cache: KVCacheConfig,
    tokens: Geometry,
    settings: ExtraConfig,
    find_store: Callable[[], str],
) -> SchedulerSide:
    """Attach to the store, and have vLLM compute what fails to load. find_store(): its address."""
    own = config.kv_transfer_config
    of_engine = transfer_of_engine(connector)
    if of_engine.kv_load_failure_policy != "recompute":
        log.warning(
            "kv_load_failure_policy of %s is %r: set to 'recompute', so that a failed load is"
            " computed instead of failing its request",
            of_engine.kv_connector,
            of_engine.kv_load_failure_policy,
        )
        of_engine.kv_load_failure_policy = "recompute"
    beside = of_engine is not own
    hands_over = "transfer" in own.kv_connector_extra_config or not beside
    if not hands_over:
        log.info(
            "kvstore: hand-overs are left to the other connectors of %s, since"
            " kv_connector_extra_config has no transfer",
            of_engine.kv_connector,
        )
    half = start_half(config, cache, tokens, settings, find_store, beside=beside)
    return SchedulerSide(
        half,
        cache,
        tokens,
        hands_over=hands_over,
        policy=settings.policy,
        step_blocks=late_step_blocks(config, tokens, settings.storing),
    )


def start_half(
    config: VllmConfig,
    cache: KVCacheConfig,
    tokens: Geometry,
    settings: ExtraConfig,
    find_store: Callable[[], str],
    *,
    beside: bool,
) -> SchedulerHalf:
    """Wait for the store, at most ATTACH_S; without it the engine serves, and the half goes on.

    Raises NotSupported when the store refuses the engine.
    """
    engine = str(config.kv_transfer_config.engine_id)
    world = config.parallel_config.world_size
    limits, events = config.scheduler_config, config.kv_events_config
    blocks_per_step = 2 * limits.max_num_batched_tokens // tokens.block_tokens
    publishes = events is not None and bool(events.enable_kv_cache_events)
    credit = (blocks_per_step + limits.max_num_seqs) * len(tokens.rules)
    hello = p.Hello(
        p.VERSION,
        engine,
        "scheduler",
        rank=0,
        world=world,
        credit_slots=min(credit, SLOTS_MAX),
        events=publishes,
        model=one_line(str(config.model_config.served_model_name), NAME_MAX)[:NAME_MAX],
    )
    client = StoreClient(Attacher(find_store, hello, settings.store_user), monotonic_ns)
    client.collect_events = publishes
    try:
        attached = client.wait_attached(ATTACH_S)
    except BaseException:
        client.close()
        raise
    if attached:
        log.info("kvstore: attached, blocks of %d tokens", tokens.block_tokens)
    else:
        log.error("kvstore: no store after %d s; serving without it, and trying again", ATTACH_S)
    half = SchedulerHalf(
        tokens,
        client,
        world=world,
        shares_prefixes=bool(config.cache_config.enable_prefix_caching),
        transfer=Transfer(
            engine,
            push={"pull": False, "push": True}.get(settings.transfer),
            lease_ms=settings.lease_ns // 1_000_000,
            two_way=settings.two_way,
            recompute_threshold=settings.recompute_threshold,
            decode_ttl_ms=settings.decode_ttl_ns // 1_000_000,
            direct=settings.direct,
        ),
        beside=beside,
        step_loads=loads_in_steps(config, cache, tokens),
    )
    if not settings.always_load:
        half.prefer_computing(ComputePace(monotonic_ns))
    half.tag = settings.policy.tag
    half.events.next_hash = next_hash_of(config.cache_config.prefix_caching_hash_algo)
    half.events.extra_of = extra_of
    return half


def loads_in_steps(config: VllmConfig, cache: KVCacheConfig, tokens: Geometry) -> StepLoads | None:
    """Return how much may be loaded in a step; None if vLLM has several steps under way.

    It does not take back the output of those that read what a load in an earlier step left wrong.
    """
    steps = values_of(config, "VllmConfig", ("max_concurrent_batches", "use_v2_model_runner"))
    # Model runner V2 keeps its own count of computed tokens, and takes none back.
    ahead = steps["max_concurrent_batches"] > 1 or steps["use_v2_model_runner"]
    if ahead or config.scheduler_config.async_scheduling is not False:
        return None
    engine_block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
    return StepLoads(engine_block_bytes * tokens.blocks_per_chunk[0])


def late_step_blocks(config: VllmConfig, tokens: Geometry, storing: str) -> int:
    """Return how many blocks vLLM allocates in a step at most, loads aside; 0: store eagerly."""
    if storing != "late":
        return 0
    if not is_one_full_group(tokens.rules) or not config.cache_config.enable_prefix_caching:
        log.warning(
            "kvstore: storing = late is for engines with one KV group, full attention and prefix"
            " caching: this one stores blocks when they are complete"
        )
        return 0
    limits = config.scheduler_config
    new_blocks = int(limits.max_num_batched_tokens) // tokens.engine_block_tokens[0]
    return new_blocks + int(limits.max_num_seqs)


def transfer_of_engine(child: KVConnectorBase_V1) -> Any:
    """Return the kv_transfer_config that vLLM's scheduler reads.

    It is that of the outermost connector under construction. A MultiConnector gives its children
    copies of the configuration, and the call that makes them is the only way from there to its own.
    """
    frame, outermost = sys._getframe(1), child  # noqa: SLF001 - there is no other way
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, KVConnectorBase_V1):
            outermost = maker
        frame = frame.f_back  # type: ignore[assignment]
    try:
        return outermost._vllm_config.kv_transfer_config  # noqa: SLF001 - vLLM's base class has it
    except AttributeError:
        raise NotSupported(
            f"kvstore cannot see the kv_load_failure_policy of {type(outermost).__name__}, which"
            " makes this connector: expected a connector that calls vLLM's base class before it"
            " makes others"
        ) from None


class SchedulerSide:
    """Translates between vLLM's scheduler and the scheduler half."""

    def __init__(
        self,
        half: SchedulerHalf,
        cache: Any,
        tokens: Geometry,
        *,
        hands_over: bool = True,
        policy: RequestPolicy = NO_LIMITS,
        step_blocks: int = 0,
    ) -> None:
        """hands_over: requests' hand-over parameters count. policy: the engine's limits.

        step_blocks: that vLLM allocates in a step at most; blocks are stored late. 0: eagerly.
        """
        self.half = half
        self.manager: Any = None
        self._cache = cache
        self._tokens = tokens
        # Recurrent states are whole at hand-over points only.
        self._states = frozenset(n for n, rule in enumerate(tokens.rules) if rule.exact)
        self._hands_over = hands_over
        self._policy = policy
        self._step_blocks = step_blocks
        self._said = RateLog(log)
        self._warned_of_adapters = False

    def bind(self, manager: Any) -> None:
        """Remember where block tables are, and check that all names used are there."""
        check_private(manager)
        self.manager = manager
        if self._step_blocks:
            self.half.store_late(OwnCache(manager), self._step_blocks)

    def on_new_request(self, request: Request) -> None:
        """Send a request's keys. Adapters are named by path, not content: they stay out."""
        if request.lora_request is not None:
            if not self._warned_of_adapters:
                log.warning("kvstore: requests with LoRA adapters are neither stored nor loaded")
                self._warned_of_adapters = True
            return
        policy = self._policy_of(request)
        handed = self._hands_over and policy is not NOTHING  # not without its tenant or its tiers
        transfer = transfer_of(request) if handed else None
        if self._states and is_handed_over(transfer):
            leave_out_last(request, self._tokens.hash_tokens)
        # For a hint alone that is not worth looking for: it takes long in a long prompt.
        handed_over = transfer is not None and set(transfer) != {HINT}
        cached = cached_tokens(self.manager, request) if handed_over else 0
        reads = not request.skip_reading_prefix_cache
        self.half.on_new_request(
            request, transfer, cached, reads=reads, repeatable=is_repeatable(request), policy=policy
        )

    def _policy_of(self, request: Request) -> RequestPolicy:
        """Return a request's limits; with wrong ones nothing is loaded, stored or handed over."""
        try:
            return policy_of(request.kv_transfer_params, self._policy)
        except ConfigError as exc:
            name = one_line(request.request_id, _LOGGED_MAX)
            self._said.warn(
                "wrong limits", "request %s is neither loaded nor stored: %s", name, exc
            )
            self.half.limits_refused()
            return NOTHING

    def on_allocated(self, request: Request, blocks: Any, external: int) -> None:
        """vLLM has allocated a request's blocks; external: tokens that we load into them."""
        table = ids_of(blocks.blocks)
        self.half.update_state_after_alloc(request.request_id, table, external)

    def on_step_loads_failed(self, blocks: AbstractSet[int]) -> None:
        """Have vLLM forget what it computed from blocks that were not loaded.

        With the policy 'recompute' it leaves them in its prefix cache until they are computed
        again, which they are not if the request is aborted before.
        """
        self.manager.evict_blocks(self.half.step_loads_failed(blocks))

    def hit_sources(self, request_id: str, tokens: int) -> dict[CacheHitSource, int]:
        """Split the loaded tokens by the tier they come from."""
        split: Counter[CacheHitSource] = Counter()
        for tier, count in self.half.hit_sources(request_id, tokens).items():
            split[_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
        return dict(split)

    def build_meta(self, output: SchedulerOutput) -> StepMeta:
        """Plan a step's copies."""
        self._said.tick()
        preempted = output.preempted_req_ids or ()
        handed_over: list[Any] = self.half.handed_over(preempted)
        for request in handed_over:
            # Scheduling may be steps ahead of the output. A hand-over's last output would end the
            # request after its blocks are freed; sampled again, it does not. vLLM drops such output
            # by itself for connectors that do nothing else.
            request.drop_stale_output = True
        state = output.kv_connector_block_state
        boundaries = {} if state is None else state.boundary_state_offloads

        def table(request_id: str) -> Any:
            blocks = block_table(self.manager, request_id)
            return table_of(blocks, self._states, boundaries.get(request_id, ()), self._tokens)

        step = Step(output.num_scheduled_tokens, self.written(output), table, preempted)
        return self.half.build_meta(step)

    def written(self, output: SchedulerOutput) -> list[int]:
        """List the engine blocks that this step gives new content."""
        written: list[int] = []
        sizes = self._tokens.engine_block_tokens
        for new in output.scheduled_new_reqs:
            for ids, tokens in zip(new.block_ids, sizes, strict=True):
                written.extend(ids[new.num_computed_tokens // tokens :])
        cached = output.scheduled_cached_reqs
        for request_id, groups, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            resumed = request_id in cached.resumed_req_ids
            for ids, tokens in zip(groups or (), sizes, strict=False):
                written.extend(ids[computed // tokens :] if resumed else ids)
        written.extend(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        # Some are of requests preempted in this very schedule, which are in none of the lists.
        written.extend(output.new_block_ids_to_zero or ())
        return written

    def finish(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; True: vLLM keeps its blocks until the workers report it as sent."""
        table = last_table(request, block_ids, self._states, self._tokens)
        parameters = None
        if request.status in _HANDED_OVER:
            parameters = self.half.hand_over(request.request_id, table)
        return self.half.request_finished(request.request_id, table), parameters

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return blocks that entered or left the tiers since the last call, as vLLM's events."""
        return kv_events(self.half.take_events(), self._tokens, self._cache)


def is_repeatable(request: Any) -> bool:
    """Return True if a request's first step may be taken back and computed from its start.

    A seed would draw other numbers the second time, and vLLM has already returned logprobs of the
    prompt. vLLM does not send its workers images whose tokens are loaded: a worker that has to
    compute these tokens after all raises, and the engine ends.
    """
    wanted = request.sampling_params
    drawn = wanted is not None and (wanted.seed is not None or wanted.prompt_logprobs is not None)
    return not drawn and not request.mm_features


SHORTENED = "prompt_shortened"  # among the hand-over parameters


def transfer_of(request: Any) -> dict[str, Any] | None:
    """Return a request's hand-over parameters and hint; None if its prompt is not all token ids.

    Images have no place in the name of a partly filled block: with them whole blocks are fetched.
    """
    params: dict[str, Any] | None = request.kv_transfer_params
    if request.kv_hints is not None and (not params or isinstance(params, dict)):
        params = (params or {}) | {HINT: request.kv_hints}
    if not params or request.prompt_token_ids is None or request.prompt_is_token_ids is not None:
        return None
    if request.mm_features and params.get("do_remote_prefill"):
        return params | {"remote_num_tokens": 0}
    return params


def leave_out_last(request: Any, hash_tokens: int) -> None:
    """Let a prefill request end one token before its prompt does, and sample one.

    A recurrent state cannot be taken back by a token, and the next engine computes the last one.
    The request's parameters say so, so that it happens once. A prompt of one token stays as it is,
    and so does one that ends with an image.
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


def next_hash_of(algorithm: str) -> NextHash:
    """Return the hash by which vLLM names tokens that have neither images nor a salt."""
    hashed = get_hash_fn_by_name(algorithm)

    def next_hash(parent: bytes | None, tokens: Sequence[int]) -> bytes:
        name: bytes = hash_block_tokens(hashed, parent and BlockHash(parent), tokens)
        return name

    return next_hash


def extra_of(request: Any) -> Extra | None:
    """Return what vLLM hashes of a request besides tokens, in the form of its own events."""
    if isinstance(past := request, PastRequest):
        return past.extra
    if not request.mm_features and not request.cache_salt and request.prompt_embeds is None:
        return None
    hashed = copy(request)  # this may live longer than the request does: without its images
    hashed.mm_features = [copy(feature) for feature in request.mm_features]
    for feature in hashed.mm_features:
        feature.data = None

    def extra(first: int, end: int, step: int) -> Sequence[object]:
        starts = range(first, end, step)
        keys = [generate_block_hash_extra_keys(hashed, at, at + step, 0)[0] for at in starts]
        return (to_event_extra_keys(keys) or ()) if any(keys) else ()

    return extra


_MEDIA = {MEMORY: MEDIUM_CPU, DISK: MEDIUM_STORAGE}
_LOCALITY = "LOCAL"  # blocks are on the node that publishes the event


def kv_events(events: Iterable[BlockEvent], tokens: Geometry, cache: Any) -> Iterator[KVCacheEvent]:
    """Make vLLM's events, with hashes in the form in which the engine publishes its own."""
    for event in joined(events):
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
            extra_keys=list(event.extra) or None,
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

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [block.block_id for block in self._blocks[index]]
        return int(self._blocks[index].block_id)


def ids_of(groups: Sequence[Sequence[Any]]) -> Sequence[Sequence[int]]:
    """Return the ids of vLLM's blocks by group without copying them."""
    return [_Ids(blocks) for blocks in groups]


def block_table(kv_cache_manager: Any, request_id: str) -> Sequence[Sequence[int]]:
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
    blocks: Sequence[Sequence[int]],
    states: frozenset[int],
    hand_overs: Sequence[tuple[int, int, int]],
    tokens: Geometry,
) -> Sequence[Sequence[int]]:
    """Return a block table that shows recurrent states only where they are whole.

    hand_overs: (group, block id, tokens the state stands for), valid in this step.
    """
    if not states:
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
) -> Sequence[Sequence[int]]:
    """Return the block table of a request that has ended.

    A recurrent state is whole at its last token, unless a step is under way that goes on from it.
    """
    end, whole = request.num_computed_tokens, []
    for group in states if end and not request.num_in_flight_tokens else ():
        size = tokens.engine_block_tokens[group]  # that of a block, too
        index = (end - 1) // size
        whole += [(group, block, (index + 1) * size) for block in blocks[group][index : index + 1]]
    return table_of(blocks, states, whole, tokens)
