"""TieredConnector: vLLM's names for the two halves, and nothing else.

--kv-transfer-config '{"kv_connector": "TieredConnector",
                       "kv_connector_module_path": "connectors.vllm", "kv_role": "kv_both",
                       "kv_load_failure_policy": "recompute",
                       "kv_connector_extra_config": {"store": "unix:///run/kvstore.sock"}}'

Each process of an engine is one side only. So each side is imported where the role is known: by
start_scheduler or register_kv_caches. What starts a private store is imported by its first use.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from connectors.vllm_version import log_as_vllm  # the first, see there

# isort: split
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
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

from connectors import vllm_compat as compat
from connectors.config import parse_extra, refuse_engine_id
from connectors.step_meta import StepMeta
from connectors.vllm_stats import TieredPromMetrics, TieredStats
from kvstore.core.errors import NotSupported

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from connectors.vllm_scheduler import SchedulerSide
    from connectors.worker import WorkerHalf


@dataclass
class TieredMetadata(KVConnectorMetadata):
    """One step's work, on its way to the workers."""

    step: StepMeta


@dataclass
class TieredWorkerMetadata(KVConnectorWorkerMetadata):
    """Store jobs that ended, and on how many ranks; what loads copied, in which time."""

    stores_over: Counter[int] = field(default_factory=Counter)
    copied_bytes: int = 0
    copied_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredWorkerMetadata:
        """Add up the ranks' reports."""
        if not isinstance(other, TieredWorkerMetadata):
            raise TypeError(f"{type(other).__name__} among the reports of TieredConnector")
        return TieredWorkerMetadata(
            self.stores_over + other.stores_over,
            self.copied_bytes + other.copied_bytes,
            self.copied_s + other.copied_s,
        )


class TieredConnector(KVConnectorBase_V1, SupportsHMA):
    """KV blocks in a kvstore: offload, and hand-over between engines."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Check that this engine is served; the scheduler's side waits for its store here."""
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        compat.check_supported(vllm_config)
        self._settings = parse_extra(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._tokens = compat.geometry(vllm_config, kv_cache_config, self._settings.block_tokens)
        self._config, self._cache = vllm_config, kv_cache_config
        engine_id = str(vllm_config.kv_transfer_config.engine_id)
        refuse_engine_id(engine_id)
        base = re.sub(r"_dp\d+$", "", engine_id)  # replicas of one engine share a private store
        self._find_store = partial(self._settings.find_store, base)
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            from connectors.vllm_scheduler import start_scheduler  # this process schedules

            self._scheduler = start_scheduler(
                self, vllm_config, kv_cache_config, self._tokens, self._settings, self._find_store
            )

    # Facts that vLLM asks for

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a preempted request need not be computed again for it."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Say no (asked by 0.33): it moves the tensors that copies are planned for."""
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
        from connectors.vllm_worker import start_worker  # this process computes

        self._worker = start_worker(
            self._config, self._cache, kv_caches, self._tokens, self._settings, self._find_store
        )

    def _worker_half(self) -> WorkerHalf:
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
            self._worker_half().before_step(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start this step's loads; those in the step end here.

        vLLM calls this before the forward pass, behind the fence and whatever zeroes blocks.
        """
        super().bind_connector_metadata(connector_metadata)
        self._worker_half().start_loads(self._step())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls this after the forward pass, and loads had lost that time."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: what a forward pass reads was loaded before it."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are stored after the forward."""

    def wait_for_save(self) -> None:
        """Start this step's stores, and do not wait for them."""
        self._worker_half().after_forward(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report loads that ended, each once; a failed one under both names."""
        step = self._step()
        ended, failed = self._worker_half().finished_loads(step)
        return KVConnectorTransferResults(
            finished_sending=set(step.sent), finished_recving=ended, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report blocks that a load in this step did not fill."""
        return self._worker_half().take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report store jobs that ended, and how fast loads were."""
        over = self._worker_half().take_stores_over()
        copied_bytes, copied_s = self._worker_half().take_copied()
        if not over and not copied_bytes:
            return None
        return TieredWorkerMetadata(Counter(over), copied_bytes, copied_s)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this side counted since the last call."""
        half = self._worker if self._scheduler is None else self._scheduler.half
        if half is None:
            return None
        counts = {name: count for name, count in half.take_stats().items() if count}
        return TieredStats(data=counts) if counts else None

    # The scheduler's side

    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise NotSupported("vLLM called the scheduler's side in a worker")
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Remember where block tables are, and check that all names used are there."""
        self._scheduler_side().bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Do nothing: stores shake hands. A MultiConnector passes on what is another child's.

        vLLM's own would raise if that child's pipeline has several stages.
        """

    def on_new_request(self, request: Request) -> None:
        """Send a request's keys."""
        self._scheduler_side().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer how many tokens can be loaded."""
        half = self._scheduler_side().half
        return half.get_num_new_matched_tokens(request.request_id, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks that were allocated, or note that they are another's.

        Beside other connectors (MultiConnector) these may load into them before a step names them.
        """
        self._scheduler_side().on_allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Split the loaded tokens by the tier they come from."""
        return self._scheduler_side().hit_sources(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan a step's copies."""
        return TieredMetadata(self._scheduler_side().build_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        side = self._scheduler_side()
        over: Counter[int] = Counter()
        if isinstance(meta, TieredWorkerMetadata):
            over = meta.stores_over
            side.half.copied(meta.copied_bytes, meta.copied_s)
        if connector_output.invalid_block_ids:
            side.on_step_loads_failed(connector_output.invalid_block_ids)
        side.half.on_output(
            over, connector_output.finished_recving or (), connector_output.failed_recving or ()
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a one-group engine."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; True: vLLM keeps its blocks until the workers report it as sent."""
        return self._scheduler_side().finish(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Ask for one more step while blocks wait to be stored, or a hand-over to be told of.

        The name is vLLM's: blocks in a push need no step.
        """
        return self._scheduler is not None and self._scheduler.half.has_pending_work()

    def take_events(self) -> Iterable[Any]:
        """Return blocks that entered or left the tiers since the last call, as the engine would."""
        return self._scheduler_side().take_events()

    def reset_cache(self) -> bool:
        """Forget everything stored so far, for this engine only."""
        return self._scheduler_side().half.reset_cache(secrets.token_bytes(8))

    def shutdown(self) -> None:
        """Finish copies and leave nothing behind; safe to call twice."""
        if self._scheduler is not None:
            self._scheduler.half.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


# A MultiConnector finds the classes of its children's reports by name, and an engine whose reports
# have no class ends. A module that is loaded twice registers once.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector("TieredConnector", __name__, "TieredConnector")
