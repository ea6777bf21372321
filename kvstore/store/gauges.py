"""The numbers that are not counted where they arise: read off the store's state, or told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from kvstore import __version__
from kvstore.core.errors import ProtocolError
from kvstore.core.hit_curve import SAMPLES
from kvstore.core.layout import SlotLayout
from kvstore.core.leases import PINS
from kvstore.metrics import DEFERRED_STEPS, LABEL_DIGITS, MEMORY, NVME, Numbers
from kvstore.store.namespace import Namespace
from kvstore.store.namespaces import Namespaces
from kvstore.store.session import Phase, Session
from kvstore.store.status import told
from kvstore.wire.engine import EVENTS, MISSES, VERSION, Step
from tiers.cpu import CpuMemory
from tiers.nvme.disk import NvmeDisk

if TYPE_CHECKING:
    from tiers.object.bucket import Bucket

TIER_STATES = ("ok", "loading", "read_only", "off")
SIZES = {"0.5": 0.5, "1": 1.0, "2": 2.0, "4": 4.0}  # of a tier: times what it has
COVERED = 8  # times what it has, to which the curve need be known


def count_step(numbers: Numbers, label: str, step: Step, tiers: Collection[str]) -> None:
    """Add what a scheduler half has counted; label: its namespace's.

    Raises ProtocolError for unknown names, and where tokens hit and missed are not all.
    """
    for what, found, allowed in (
        ("tier", step.hit_tokens, tiers),
        ("reason", step.missed_tokens, MISSES),
        ("event", step.counts, EVENTS),
    ):
        for name in found:
            if name not in allowed:
                raise ProtocolError(f"{what} {name!r}, expected one of {sorted(allowed)}")
    told = sum(step.hit_tokens.values()) + sum(step.missed_tokens.values())
    if told != step.lookup_tokens:
        raise ProtocolError(f"{told} tokens hit and missed, expected {step.lookup_tokens}")
    if told:
        numbers.add("kvstore_lookup_tokens", label, by=told)
    for tier, tokens in step.hit_tokens.items():
        numbers.add("kvstore_hit_tokens", label, tier, by=tokens)
    for reason, tokens in step.missed_tokens.items():
        numbers.add("kvstore_missed_tokens", label, reason, by=tokens)
    for event, count in step.counts.items():
        if event == DEFERRED_STEPS:
            numbers.add("kvstore_deferred_steps", by=count)
        else:
            numbers.add("kvstore_engine_events", event, by=count)


def gauges(
    pool: CpuMemory, sessions: Iterable[Session], namespaces: Mapping[str, Namespace]
) -> dict[tuple[str, ...], float]:
    """Return gauges by metric name and label values, and have namespaces add what they count."""
    found: dict[tuple[str, ...], float] = {}
    found["kvstore_build_info", __version__, str(VERSION)] = 1
    found["kvstore_capacity_bytes", MEMORY] = pool.capacity_bytes
    found["kvstore_memory_bytes", MEMORY] = pool.used_bytes
    for phase in Phase:
        found["kvstore_sessions", phase.value] = 0
    for session in sessions:
        found["kvstore_sessions", session.phase.value] += 1
    for digest, namespace in namespaces.items():
        namespace.count()
        manager, label = namespace.manager, digest[:LABEL_DIGITS]
        found["kvstore_namespace_info", label, *_described(namespace.layout)] = 1
        found["kvstore_slots", label, "free"] = len(manager.slots.free)
        found["kvstore_slots", label, "granted"] = len(manager.slots.granted)
        found["kvstore_slots", label, "used"] = manager.slots.used
        leaving = namespace.extents.values()
        found["kvstore_slots", label, "retiring"] = sum(mapping.held for mapping in leaving)
        found["kvstore_leases", label] = len(manager.leases)
        found["kvstore_jobs_open", label] = namespace.tiering.jobs_open
        arriving = len(namespace.tiering.coming)
        for cause, count in (
            ("lease", manager.leases.by_engines),
            ("pin", manager.leases.blocks_of(PINS)),
            ("copy", namespace.tiering.storing),
            ("coming", arriving),
            ("credit", max(0, len(manager.slots.granted) - arriving)),
        ):
            found["kvstore_pinned_bytes", label, cause] = count * namespace.layout.slot_bytes
    return found


def queue_gauges(
    sessions: Iterable[Session], namespaces: Namespaces, tiers: Iterable[str], now_ns: int
) -> dict[tuple[str, ...], float]:
    """Return what waits, for how long the oldest of it, and what is left of write budgets.

    tiers: those that blocks are copied to.
    """
    found: dict[tuple[str, ...], float] = {}
    asked_ns = (ask.asked_ns for session in sessions for ask in session.asks.values())
    found["kvstore_queue_seconds", "lookups"] = (now_ns - min(asked_ns, default=now_ns)) / 1e9
    for tier in tiers:
        found["kvstore_queued_blocks", tier] = found["kvstore_queue_seconds", tier] = 0
        found["kvstore_held_blocks", tier] = 0
    for namespace in namespaces.values():
        for tier, queue in namespace.tiering.queues.items():
            found["kvstore_held_blocks", tier] += queue.held
            if len(queue):
                seconds = "kvstore_queue_seconds", tier
                found["kvstore_queued_blocks", tier] += len(queue)
                found[seconds] = max(found[seconds], (now_ns - queue.first.since_ns) / 1e9)
        for shared in namespace.tiering.shared:
            found["kvstore_queued_blocks", shared.tier.name] += shared.sharing.waiting
    for tier, budget in namespaces.budgets.items():
        if budget.day_bytes is not None:
            found["kvstore_write_budget_bytes", tier, "day"] = budget.day_bytes
            found["kvstore_write_budget_bytes", tier, "left"] = budget.left_bytes
    return found


def _described(layout: SlotLayout) -> tuple[str, str, str, str]:
    """Return model, data type, tokens of a block and its bytes, as an engine has told them."""
    model, dtype, tokens = (
        told(layout.traits.get(name, "")) for name in ("model", "dtype", "block tokens")
    )
    return model, dtype, tokens, str(layout.slot_bytes)


def disk_gauges(disk: NvmeDisk, numbers: Numbers) -> dict[tuple[str, ...], float]:
    """Return the gauges of the NVMe tier, and take over what it has counted."""
    found: dict[tuple[str, ...], float] = {}
    found["kvstore_capacity_bytes", NVME] = disk.capacity_bytes
    found["kvstore_memory_bytes", NVME] = disk.used_bytes
    for what, seconds in disk.stalled_s.items():
        found["kvstore_tier_stalled_seconds", NVME, what] = seconds
    for (digest, event), count in disk.attached.take_counts().items():
        numbers.add("kvstore_tier_blocks", numbers.label_of(digest), NVME, event, by=count)
    for space in disk.spaces:
        if not space.total:
            continue  # nothing of it is here, and there may have been many
        label = space.digest[:LABEL_DIGITS]
        found["kvstore_tier_slots", NVME, label, "free"] = space.free
        found["kvstore_tier_slots", NVME, label, "used"] = space.total - space.free
    return found


def count_requests(bucket: Bucket, numbers: Numbers) -> None:
    """Take over what the bucket has counted."""
    for event, count in bucket.counts.items():
        numbers.add("kvstore_object_requests", event, by=count)
    bucket.counts.clear()


def curve_gauges(
    namespaces: Mapping[str, Namespace], pool: CpuMemory, disk: NvmeDisk | None
) -> dict[tuple[str, ...], float]:
    """Return what namespaces would hit with tiers of other sizes, which they share as now.

    The disk has what memory has, too.
    """
    memory = {d: n.manager.slots.total * n.layout.slot_bytes for d, n in namespaces.items()}
    tiers = [(MEMORY, pool.capacity_bytes, memory, sum(memory.values()))]
    if disk is not None:
        on_disk = {space.digest: space.total * space.slot_bytes for space in disk.spaces}
        tiers.append((NVME, disk.capacity_bytes, on_disk, sum(on_disk.values())))
    found: dict[tuple[str, ...], float] = {}
    for digest, namespace in namespaces.items():
        most = 0.0
        for tier, capacity_bytes, has, every in tiers if namespace.curve.uses else ():
            part = has.get(digest, 0) / (every or 1)
            blocks = part * capacity_bytes / namespace.layout.slot_bytes
            wanted = [max(most, times * blocks) for times in SIZES.values()]
            most = max(most, blocks)
            for size, ratio in zip(SIZES, namespace.curve.ratios(wanted), strict=True):
                found["kvstore_predicted_hit_ratio", digest[:LABEL_DIGITS], tier, size] = ratio
        namespace.curve.covered = max(SAMPLES, COVERED * most)
    return found


def state_gauges(states: Mapping[str, str]) -> dict[tuple[str, ...], float]:
    """Return the states of lower tiers. states: by the tier's name."""
    return {
        ("kvstore_tiers", tier, each): float(state == each)
        for tier, state in states.items()
        for each in TIER_STATES
    }
