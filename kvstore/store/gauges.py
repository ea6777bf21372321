"""The numbers that are not counted where they arise: read off the store's state, or told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from kvstore.core.errors import ProtocolError
from kvstore.metrics import MEMORY, NVME, Numbers
from kvstore.store.namespace import Namespace
from kvstore.store.session import Phase, Session
from kvstore.store.tier_guard import Plugin
from kvstore.wire.engine import EVENTS, Step
from tiers.cpu import CpuMemory
from tiers.nvme import NvmeDisk

DISK_STATES = ("ok", "loading", "read_only", "off")


def count_step(numbers: Numbers, step: Step, tiers: Collection[str]) -> None:
    """Add what a scheduler half has counted. Raises ProtocolError for unknown names."""
    if step.lookup_tokens:
        numbers.add("kvstore_lookup_tokens", by=step.lookup_tokens)
    for tier, tokens in step.hit_tokens.items():
        if tier not in tiers:
            raise ProtocolError(f"tier {tier!r}, expected one of {tiers}")
        numbers.add("kvstore_hit_tokens", tier, by=tokens)
    for event, count in step.counts.items():
        if event not in EVENTS:
            raise ProtocolError(f"event {event!r}, expected one of {sorted(EVENTS)}")
        numbers.add("kvstore_engine_events", event, by=count)


def gauges(
    pool: CpuMemory,
    sessions: Iterable[Session],
    namespaces: Mapping[str, Namespace],
    numbers: Numbers,
) -> dict[tuple[str, ...], float]:
    """Return gauges, and counters kept elsewhere, by metric name and label values."""
    found: dict[tuple[str, ...], float] = {}
    found["kvstore_capacity_bytes", MEMORY] = pool.capacity_bytes
    found["kvstore_memory_bytes", MEMORY] = pool.used_bytes
    for phase in Phase:
        found["kvstore_sessions", phase.value] = 0
    for session in sessions:
        found["kvstore_sessions", session.phase.value] += 1
    for digest, namespace in namespaces.items():
        manager, label = namespace.manager, digest[:12]
        found["kvstore_slots", label, "free"] = len(manager.slots.free)
        found["kvstore_slots", label, "granted"] = len(manager.slots.granted)
        found["kvstore_slots", label, "used"] = manager.slots.used
        leaving = namespace.extents.values()
        found["kvstore_slots", label, "retiring"] = sum(mapping.held for mapping in leaving)
        found["kvstore_leases", label] = len(manager.leases)
        found["kvstore_jobs_open", label] = namespace.tiering.jobs_open
    for reason, count in numbers.evicted.items():
        found["kvstore_evicted_blocks", reason] = count
    for (tier, what), count in numbers.moved.items():
        found["kvstore_tier_blocks", tier, what] = count
    return found


def disk_gauges(disk: NvmeDisk) -> dict[tuple[str, ...], float]:
    """Return gauges, and counters kept there, of the NVMe tier."""
    found: dict[tuple[str, ...], float] = {}
    found["kvstore_capacity_bytes", NVME] = disk.capacity_bytes
    found["kvstore_memory_bytes", NVME] = disk.used_bytes
    for state in DISK_STATES:
        found["kvstore_tiers", NVME, state] = float(disk.state == state)
    for what, seconds in disk.stalled_s.items():
        found["kvstore_tier_stalled_seconds", NVME, what] = seconds
    counts: Counter[str] = Counter()
    for space in disk.spaces:
        counts.update(space.counts)
        if not space.total:
            continue  # nothing of it is here, and there may have been many
        label = space.digest[:12]
        found["kvstore_tier_slots", NVME, label, "free"] = space.free
        found["kvstore_tier_slots", NVME, label, "used"] = space.total - space.free
    for event, count in counts.items():
        found["kvstore_tier_blocks", NVME, event] = count
    return found


def plugin_gauges(plugins: Iterable[Plugin]) -> dict[tuple[str, ...], float]:
    """Return the state of each tier of others."""
    return {
        ("kvstore_tiers", plugin.name, state): float(plugin.off == off)
        for plugin in plugins
        for state, off in (("ok", False), ("off", True))
    }
