"""The connector's counts in vLLM's own log lines and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

EVENTS = frozenset((
    "deferred", "deferred_steps", "detached", "events_untold", "failed_loads", "failed_stores",
    "given_up_loads", "hand_over_unstored", "load_bytes", "load_failed", "load_tokens",
    "store_blocks", "store_bytes", "store_declined", "timed_out", "transfer_refused",
))  # fmt: skip


class TieredStats(KVConnectorStats):
    """Counts since the last report, by name."""

    def reset(self) -> None:
        """Start from nothing."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another report's counts to these."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the sums, for vLLM's log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return True if nothing was counted."""
        return not self.data


class TieredPromMetrics(KVConnectorPromMetrics):
    """One counter, vllm:kvstore_events_total, with the name of what was counted as label."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the counter, with every event at 0 for every engine."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._events = self._counter_cls(
            name="vllm:kvstore_events",
            documentation="Events of the kvstore connector; in bytes where the name says so.",
            labelnames=[*labelnames, "event"],
        )
        for labels in per_engine_labelvalues.values():
            for event in EVENTS:
                self._events.labels(*labels, event)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for event, count in transfer_stats_data.items():
            if event in EVENTS:
                self._events.labels(*labels, event).inc(count)
