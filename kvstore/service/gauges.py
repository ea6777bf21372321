"""The numbers that are not counted where they arise, but read off the store's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstore.metrics import MEMORY
from kvstore.service.namespace import MemoryPool, Namespace
from kvstore.service.session import Phase, Session


def gauges(
    pool: MemoryPool, sessions: Iterable[Session], namespaces: Mapping[str, Namespace]
) -> dict[tuple[str, ...], float]:
    """Return gauges, and counters kept elsewhere, by metric name and label values."""
    found: dict[tuple[str, ...], float] = {}
    found["kvstore_capacity_bytes", MEMORY] = pool.capacity_bytes
    found["kvstore_memory_bytes", MEMORY] = pool.used_bytes
    for phase in Phase:
        found["kvstore_sessions", phase.value] = 0
    for session in sessions:
        found["kvstore_sessions", session.phase.value] += 1
    evicted: dict[str, int] = {}
    moved: dict[tuple[str, str], int] = {}
    for digest, namespace in namespaces.items():
        manager, label = namespace.manager, digest[:12]
        found["kvstore_slots", label, "free"] = manager.slots_free
        found["kvstore_slots", label, "granted"] = manager.slots_granted
        found["kvstore_slots", label, "used"] = manager.slots_used
        found["kvstore_leases", label] = len(manager.leases)
        found["kvstore_jobs_open", label] = namespace.tiering.jobs_open
        for reason, count in manager.evictions.items():
            evicted[reason] = evicted.get(reason, 0) + count
        for move, count in namespace.tiering.counts.items():
            moved[move] = moved.get(move, 0) + count
    for reason, count in evicted.items():
        found["kvstore_evicted_blocks", reason] = count
    for (tier, what), count in moved.items():
        found["kvstore_tier_blocks", tier, what] = count
    return found
