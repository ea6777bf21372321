"""The connector's counts in vLLM's own log lines and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# By metric of vLLM's endpoint: its label, and what is counted under which value of it.
COUNTERS: dict[str, tuple[str, dict[str, str]]] = {
    "vllm:kvstore_events": ("event", {name: name for name in (
        "deferred", "detached", "events_untold", "failed_loads", "failed_stores", "given_up_loads",
        "hand_over_unstored", "hint_refused", "load_failed", "store_declined", "timed_out",
        "transfer_refused",
    )}),
    "vllm:kvstore_steps": ("event", {"deferred_steps": "deferred"}),
    "vllm:kvstore_planned_blocks": ("direction", {"store_blocks": "store"}),
    "vllm:kvstore_planned_tokens": ("direction", {"load_tokens": "load"}),
    "vllm:kvstore_copied_bytes": ("direction", {"store_bytes": "store", "load_bytes": "load"}),
}  # fmt: skip


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
    """What COUNTERS names, one counter for each unit."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the counters, with every label value at 0 for every engine."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, tuple[Any, str]] = {}  # by what is counted, with its label
        for name, (label, values) in COUNTERS.items():
            unit = name.rpartition("_")[2]
            counter = self._counter_cls(
                name=name,
                documentation=f"Counts of the kvstore connector: {unit}, by {label}.",
                labelnames=[*labelnames, label],
            )
            for counted, value in values.items():
                self._counters[counted] = counter, value
                for labels in per_engine_labelvalues.values():
                    counter.labels(*labels, value)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for counted, count in transfer_stats_data.items():
            if counted in self._counters:
                counter, value = self._counters[counted]
                counter.labels(*labels, value).inc(count)
