"""TieredConnector: vLLM's names for the two halves, and nothing else.

--kv-transfer-config '{"kv_connector": "TieredConnector",
                       "kv_connector_module_path": "connectors.vllm", "kv_role": "kv_both",
                       "kv_load_failure_policy": "recompute",
                       "kv_connector_extra_config": {"store": "unix:///run/kvstore.sock"}}'
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from connectors import vllm_version  # noqa: F401 - the first, see there

# isort: split
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from connectors import vllm_compat as compat
from connectors import vllm_multi as multi
from connectors.config import parse_extra, refuse_engine_id
from connectors.kv_transfer_params import Transfer, is_handed_over
from connectors.request_state import Step
from connectors.scheduler import SchedulerHalf
from connectors.step_meta import StepMeta
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher, monotonic_ns
from connectors.vllm_private import check_private
from connectors.vllm_stats import TieredPromMetrics, TieredStats
from connectors.worker import WorkerHalf
from kvstore.core.errors import NotSupported
from kvstore.core.limits import SLOTS_MAX
from kvstore.launch import ensure
from kvstore.wire import engine as p

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvstore")

ATTACH_S = 60.0
_WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_SOURCES = {"cpu": CacheHitSource.HOST, "nvme": CacheHitSource.DISK, "peer": CacheHitSource.P2P}


@dataclass
class TieredMetadata(KVConnectorMetadata):
    """One step's work, on its way to the workers."""

    step: StepMeta


@dataclass
class TieredWorkerMetadata(KVConnectorWorkerMetadata):
    """Store jobs that ended, and on how many ranks."""

    stores_over: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredWorkerMetadata:
        """Add up the ranks' reports."""
        if not isinstance(other, TieredWorkerMetadata):
            raise TypeError(f"{type(other).__name__} among the reports of TieredConnector")
        return TieredWorkerMetadata(self.stores_over + other.stores_over)


class TieredConnector(KVConnectorBase_V1, SupportsHMA):
    """KV blocks in a kvstore: offload now, hand-over between engines later."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Check that this engine is served; the scheduler's side waits for its store here."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        compat.check_supported(vllm_config)
        self._extra = parse_extra(transfer.kv_connector_extra_config)
        self._tokens = compat.geometry(vllm_config, kv_cache_config, self._extra.block_tokens)
        self._states = compat.state_groups(kv_cache_config)
        self._config, self._cache = vllm_config, kv_cache_config
        self._engine = str(transfer.engine_id)
        refuse_engine_id(self._engine)
        self._world = vllm_config.parallel_config.world_size
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        self._skipped_adapters = False
        self._hands_over, self._beside = True, False
        self._manager: Any = None
        if role is KVConnectorRole.SCHEDULER:
            of_engine = multi.transfer_of_engine(self)
            self._compute_what_fails(of_engine)
            asked = "transfer" in transfer.kv_connector_extra_config
            self._beside = of_engine is not transfer
            self._hands_over = asked or not self._beside
            if not self._hands_over:
                log.info(
                    "kvstore: hand-overs are left to the other connectors of %s, since"
                    " kv_connector_extra_config has no transfer",
                    of_engine.kv_connector,
                )
            self._scheduler = self._start_scheduler()

    def _compute_what_fails(self, read: Any) -> None:
        if read.kv_load_failure_policy != "recompute":
            log.warning(
                "kv_load_failure_policy of %s is %r: set to 'recompute', so that a failed load is"
                " computed instead of failing its request",
                read.kv_connector,
                read.kv_load_failure_policy,
            )
            read.kv_load_failure_policy = "recompute"

    def _find_store(self) -> str:
        if self._extra.store is not None:
            return self._extra.store
        base = re.sub(r"_dp\d+$", "", self._engine)  # replicas of one engine share a store
        extra = self._extra
        return ensure(base, extra.cpu_bytes or 0, extra.nvme, extra.listen, extra.engine)

    def _start_scheduler(self) -> SchedulerHalf:
        scheduler = self._config.scheduler_config
        per_step = 2 * scheduler.max_num_batched_tokens // self._tokens.block_tokens
        credit = (per_step + scheduler.max_num_seqs) * len(self._tokens.rules)
        config = self._config.kv_events_config
        events = config is not None and bool(config.enable_kv_cache_events)
        who = p.VERSION, self._engine, "scheduler", 0, self._world
        hello = p.Hello(*who, credit_slots=min(credit, SLOTS_MAX), events=events)
        attacher = Attacher(self._find_store, hello, self._extra.store_user)
        client = StoreClient(attacher, monotonic_ns)
        client.collect_events = events
        try:
            attached = client.wait_attached(ATTACH_S)
        except BaseException:
            client.close()
            raise
        if attached:
            log.info("kvstore: attached, blocks of %d tokens", self._tokens.block_tokens)
        else:
            log.error("kvstore: no store after %d s; serving without it, and trying on", ATTACH_S)
        return SchedulerHalf(
            self._tokens,
            client,
            monotonic_ns,
            world=self._world,
            shares_prefixes=bool(self._config.cache_config.enable_prefix_caching),
            transfer=Transfer(
                self._engine,
                {"pull": False, "push": True}.get(self._extra.transfer),
                self._extra.lease_ns // 1_000_000,
                self._extra.two_way,
                self._extra.recompute_threshold,
                self._extra.decode_ttl_ns // 1_000_000,
                self._extra.direct,
            ),
            beside=self._beside,
        )

    # Facts that vLLM asks for

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a preempted request need not be computed again for it."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Refuse sleep mode (asked by 0.33): it moves the tensors that copies are planned for."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Rebuild a report in the process that logs."""
        return TieredStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Show the reports on vLLM's own endpoint."""
        return TieredPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read the tensors' strides and start attaching to the store."""
        caches = compat.layer_caches(self._cache, kv_caches)
        rank = compat.rank_geometry(self._config, self._cache, kv_caches, caches, self._tokens)
        number = self._config.parallel_config.rank
        who, direct = (self._engine, number, self._world), self._extra.direct_way
        self._worker = WorkerHalf(
            *who,
            rank,
            caches,
            self._find_store,
            direct=direct,
            store_user=self._extra.store_user,
        )

    def _half(self) -> WorkerHalf:
        if self._worker is None:
            raise NotSupported("vLLM called the worker's side before register_kv_caches")
        return self._worker

    def _step(self) -> StepMeta:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, TieredMetadata):
            raise TypeError(f"metadata is {type(metadata).__name__}, expected TieredMetadata")
        return metadata.step

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First call of a step: the fence."""
        if isinstance(kv_connector_metadata, TieredMetadata):
            self._half().before_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads."""
        self._half().start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, their requests wait outside the running set."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        """Do nothing: whole blocks are stored after the forward."""

    def wait_for_save(self) -> None:
        """Start this step's stores; nobody waits for them here."""
        self._half().after_forward(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report loads that ended, each once; a failed one under both names."""
        step = self._step()
        ended, failed = self._half().finished_loads(step)
        return KVConnectorTransferResults(
            finished_sending=set(step.sent), finished_recving=ended, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report store jobs that ended."""
        over = self._half().take_stores_over()
        return TieredWorkerMetadata(Counter(over)) if over else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this side counted since the last call."""
        if self._scheduler is not None:
            counts = self._scheduler.take_stats()
        elif self._worker is not None:
            stats = self._worker.take_stats()
            counts = {name: getattr(stats, name) for name in stats.__struct_fields__}
        else:
            return None
        counts = {name: count for name, count in counts.items() if count}
        return TieredStats(data=counts) if counts else None

    # The scheduler's side

    def _plan(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise NotSupported("vLLM called the scheduler's side in a worker")
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Remember where block tables are, and check that all names used are there."""
        check_private(kv_cache_manager)
        self._manager = kv_cache_manager

    def on_new_request(self, request: Request) -> None:
        """Send a request's keys. Adapters are named by path, not content: they stay out."""
        if request.lora_request is not None:
            if not self._skipped_adapters:
                log.warning("kvstore: requests with LoRA adapters are neither stored nor loaded")
                self._skipped_adapters = True
            return
        transfer = compat.transfer_of(request) if self._hands_over else None
        if self._states and is_handed_over(transfer):
            compat.leave_out_last(request, self._tokens.hash_tokens)
        cached = compat.cached_tokens(self._manager, request) if transfer else 0
        reads = not request.skip_reading_prefix_cache
        self._plan().on_new_request(request, transfer, cached, reads=reads)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer how many tokens can be loaded."""
        return self._plan().get_num_new_matched_tokens(request.request_id, num_computed_tokens)

    def update_state_after_alloc(
        self,
        request: Request,
        blocks: Any,
        num_external_tokens: int,
    ) -> None:
        """Plan the load into the blocks that were allocated, or note that they are another's.

        Beside other connectors (MultiConnector) these may load into them before a step names them.
        """
        table = compat.ids_of(blocks.blocks)
        self._plan().update_state_after_alloc(request.request_id, table, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Split the loaded tokens by the tier they come from."""
        split: Counter[CacheHitSource] = Counter()
        sources = self._plan().hit_sources(request.request_id, num_external_tokens)
        for tier, tokens in sources.items():
            split[_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += tokens
        return dict(split)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan a step's copies."""
        preempted = scheduler_output.preempted_req_ids or ()
        for request in self._plan().handed_over(preempted):
            compat.compute_again(request)
        state = scheduler_output.kv_connector_block_state
        hand_overs = {} if state is None else state.boundary_state_offloads

        def table(request_id: str) -> Any:
            blocks = compat.block_table(self._manager, request_id)
            entries = hand_overs.get(request_id, ())
            return compat.table_of(blocks, self._states, entries, self._tokens)

        step = Step(
            scheduler_output.num_scheduled_tokens,
            self._written(scheduler_output),
            table,
            preempted,
        )
        return TieredMetadata(self._plan().build_meta(step))

    def _written(self, output: SchedulerOutput) -> list[int]:
        """List the engine blocks that this step gives new content."""
        written: list[int] = []
        for new in output.scheduled_new_reqs:
            for ids, tokens in zip(new.block_ids, self._tokens.engine_block_tokens, strict=True):
                written.extend(ids[new.num_computed_tokens // tokens :])
        cached = output.scheduled_cached_reqs
        for request_id, groups, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            resumed = request_id in cached.resumed_req_ids
            sizes = self._tokens.engine_block_tokens
            for ids, tokens in zip(groups or (), sizes, strict=False):
                written.extend(ids[computed // tokens :] if resumed else ids)
        written.extend(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        return written

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        over = meta.stores_over if isinstance(meta, TieredWorkerMetadata) else {}
        self._plan().on_output(
            over, connector_output.finished_recving or (), connector_output.failed_recving or ()
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let go of a request of a one-group engine."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let go of a request; True: not of its blocks, until the workers report it as sent."""
        table = compat.last_table(request, block_ids, self._states, self._tokens)
        handed = None
        if request.status in _WHOLE:
            handed = self._plan().hand_over(request.request_id, table or ())
        return self._plan().request_finished(request.request_id, table or ()), handed

    def has_pending_push_work(self) -> bool:
        """Ask for one more step while blocks of finished requests wait to be stored."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    def take_events(self) -> Iterable[Any]:
        """Return blocks that entered or left the tiers since the last call, as the engine would."""
        return compat.kv_events(self._plan().take_events(), self._tokens, self._cache)

    def reset_cache(self) -> bool:
        """Forget everything stored so far, for this engine only."""
        return self._plan().reset_cache(secrets.token_bytes(8))

    def shutdown(self) -> None:
        """Finish copies and leave nothing behind; safe to call twice."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


multi.register(TieredConnector.__name__, __name__)
