"""All metrics in one table, and what the store has counted of them.

Labels are tier, outcome, reason, event and namespace; never a key or a request. Up to
NAMESPACES_MAX namespaces have series of their own. One that is forgotten keeps them until a new one
needs the room.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvstore.core.types import StoreOutcome
from kvstore.wire.engine import EVENTS, MISSES

MEMORY = "cpu"  # the memory pool's tier label
NVME = "nvme"
PEER = "peer"
OBJECT = "object"

SUM = "sum"
NAMESPACES_MAX = 64
LABEL_DIGITS = 12  # of a digest
OTHER = "other"  # label of namespaces beyond these
SHORT_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # bounds of waits
LONG_S = (1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0, 172800.0, 604800.0)  # of ages
WAYS = ("store", "load")
DEFERRED_STEPS = "deferred_steps"  # of EVENTS the one that is counted in steps
EVICTIONS = ("capacity", "quota", "resize", "clear", "damaged")
# Of a tier that is only read from, of every other one, and of the disk.
READ_EVENTS = ("loaded", "loaded_failed", "corrupt", "orphan")
TIER_EVENTS = (*READ_EVENTS, "stored", "stored_failed", "skipped", "over_budget", "late",
               "held_too_long")  # fmt: skip
DISK_EVENTS = (
    *("unplaced", "io_error"),
    *("evicted", "damaged", "unreadable", "unlinked", "failed", "resize"),
    *("cleared", "discarded", "quota", "unreachable", "foreign"),
)
# Memory has counters of its own; a tier of others has TIER_EVENTS.
_EVENTS_OF = {MEMORY: (), NVME: (*TIER_EVENTS, *DISK_EVENTS), PEER: READ_EVENTS}
# Of requests to a bucket: what was asked for, and how that ended.
OBJECT_EVENTS = tuple(
    f"{verb}_{outcome}"
    for verb in ("head", "get", "put")
    for outcome in ("ok", "missing", "refused", "corrupt", "timeout", "error", "unsent")
)
FETCHED_TIERS = ("gpu", "cpu", "nvme", "prefill", "other")
HAND_OVERS = {  # by metric, what hand-overs count
    "kvstore_hand_over_blocks": ("fetched", "corrupt", "confirmed", "stale", "failed", "gone"),
    "kvstore_hand_over_fetches_ended": ("late", "ended", "lost", "exporter", "cleared"),
    "kvstore_hand_over_requests": (
        *("done", "heartbeats", "expired"),
        *("released", "lapsed", "extended", "unknown", "ambiguous"),
    ),
    "kvstore_side_channel_refused": (
        *("refused", "unauthorised", "malformed", "too_many", "unsent", "undialled"),
    ),
    "kvstore_hand_over_bugs": ("internal",),
}
HINTS = ("offered", "nothing", "late", "resting", "refused", "needless")


class Spec(NamedTuple):
    """One metric. Counters get "_total" appended by the exposition format.

    values: of a counter's last label; they are there from the start, at 0. A label "tier" without
    any has the names of the store's tiers. of_peers: only where other stores are asked or served.
    A histogram's label is "le", with the sum under SUM; bounds: upper ones of its buckets.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    of_peers: bool = False
    bounds: tuple[float, ...] = ()


# fmt: off
TABLE = (
    Spec("kvstore_lookup_tokens", "counter",
         "Tokens of admitted requests that were not in their engine's own cache.",
         ("namespace",)),
    Spec("kvstore_hit_tokens", "counter",
         "Tokens served from the store, by the tier that held them first.",
         ("namespace", "tier")),
    Spec("kvstore_missed_tokens", "counter",
         "Tokens looked up and not served, by reason; hits and these are all that was looked up.",
         ("namespace", "reason"), MISSES),
    Spec("kvstore_lookups", "counter",
         "Lookups answered, by outcome: hit, miss, capped, expired.",
         ("outcome",), ("hit", "miss", "capped", "expired")),
    Spec("kvstore_stored_blocks", "counter",
         "Blocks that engines wrote into slots, by outcome.",
         ("namespace", "outcome"), tuple(outcome.value for outcome in StoreOutcome)),
    Spec("kvstore_copied_bytes", "counter",
         "Bytes copied between engines and slots, by direction.",
         ("namespace", "direction"), WAYS),
    Spec("kvstore_copy_seconds", "counter",
         "Time that workers spent copying, by direction.", ("namespace", "direction"), WAYS),
    Spec("kvstore_evicted_blocks", "counter",
         "Blocks removed from CPU memory, by reason.", ("namespace", "reason"), EVICTIONS),
    Spec("kvstore_policy_bugs", "counter",
         "Policies of others that failed; memory goes on by least recent use."),
    Spec("kvstore_tier_blocks", "counter",
         "Blocks copied to, read from or removed from a lower tier, by event.",
         ("namespace", "tier", "event")),
    Spec("kvstore_tier_bytes", "counter",
         "Bytes copied to and read from a lower tier, by direction.",
         ("namespace", "tier", "direction"), WAYS),
    Spec("kvstore_engine_events", "counter",
         "Events that engines report, such as deferrals, time-outs and failed loads.",
         ("event",), tuple(sorted(EVENTS - {DEFERRED_STEPS}))),
    Spec("kvstore_deferred_steps", "counter",
         "Engine steps in which a request had to ask again later."),
    Spec("kvstore_hand_over_blocks", "counter",
         "Blocks fetched from other stores and handed to them, by what became of them.",
         ("event",), HAND_OVERS["kvstore_hand_over_blocks"], of_peers=True),
    Spec("kvstore_hand_over_fetches_ended", "counter",
         "Fetches from other stores that ended early, by reason.",
         ("reason",), HAND_OVERS["kvstore_hand_over_fetches_ended"], of_peers=True),
    Spec("kvstore_hand_over_requests", "counter",
         "Messages and ends of handed-over requests and their leases, by event.",
         ("event",), HAND_OVERS["kvstore_hand_over_requests"], of_peers=True),
    Spec("kvstore_side_channel_refused", "counter",
         "Connections and messages of other stores refused or not made, by reason.",
         ("reason",), HAND_OVERS["kvstore_side_channel_refused"], of_peers=True),
    Spec("kvstore_hand_over_bugs", "counter",
         "Bugs of the store that ended a connection, or hand-overs; the log has the traceback.",
         ("event",), HAND_OVERS["kvstore_hand_over_bugs"], of_peers=True),
    Spec("kvstore_hints", "counter",
         "Hints that named another store as a request's source, by what came of them.",
         ("outcome",), HINTS, of_peers=True),
    Spec("kvstore_exporter_starts", "counter",
         "Starts of the exporter, the process that moves blocks to and from other stores.",
         of_peers=True),
    Spec("kvstore_fetched_blocks", "counter",
         "Blocks fetched from other stores, by the tier that held them there.",
         ("tier",), FETCHED_TIERS, of_peers=True),
    Spec("kvstore_hand_over_moved_bytes", "counter",
         "Bytes that NIXL moved: pulled from or pushed to other stores, or read into engine"
         " memory here (direct).",
         ("direction",), ("pulled", "pushed", "direct"), of_peers=True),
    Spec("kvstore_hand_over_held_seconds", "histogram",
         "Time from the end of a handed-over request until all its blocks are in slots.",
         ("le",), bounds=SHORT_S),
    Spec("kvstore_object_requests", "counter",
         "Requests to the bucket, by what was asked for and how that ended.",
         ("event",), OBJECT_EVENTS),
    Spec("kvstore_evicted_idle_seconds", "histogram",
         "Time since the last use of blocks that are evicted, sampled once per batch.",
         ("le",), bounds=LONG_S),
    Spec("kvstore_evicted_age_seconds", "histogram",
         "Time in memory of blocks that are evicted, sampled once per batch.",
         ("le",), bounds=LONG_S),
    Spec("kvstore_evicted_gap_seconds", "histogram",
         "Time from a block's eviction from memory to the next lookup of it, once per lookup.",
         ("le",), bounds=LONG_S),
    Spec("kvstore_lookup_seconds", "histogram",
         "Time from a lookup's arrival to its answer.", ("le",), bounds=SHORT_S),
    Spec("kvstore_promotion_seconds", "histogram",
         "Time to read blocks from a lower tier or a peer into slots, by job of up to 64 blocks.",
         ("le",), bounds=SHORT_S),
    Spec("kvstore_load_seconds", "histogram",
         "Time that one worker copied for one load from slots into the engine.",
         ("le",), bounds=SHORT_S),
    Spec("kvstore_turn_seconds", "histogram",
         "Time that one turn of the store's loop took, without its wait for events.",
         ("le",), bounds=SHORT_S),
    Spec("kvstore_sessions_started", "counter",
         "Engine sessions that became active."),
    Spec("kvstore_sessions_ended", "counter",
         "Engine sessions that ended, by reason.",
         ("reason",),
         ("left", "died", "protocol", "memory", "refused", "drain", "shutdown", "internal")),
    Spec("kvstore_refused", "counter",
         "Connections and messages refused, by reason.",
         ("reason",), ("protocol", "malformed", "outbox", "input", "internal", "user", "silent")),
    Spec("kvstore_hand_over_bytes", "gauge",
         "Memory that hand-overs hold, by state: held (for other stores), landing, quarantined.",
         ("state",)),
    Spec("kvstore_hand_over_open", "gauge",
         "Open hand-over objects by kind, such as fetches, jobs, requests and connections.",
         ("what",)),
    Spec("kvstore_exporter_up", "gauge",
         "Whether the exporter can be used (1, or 0); until the first hand-over it may not be"
         " started.",
         of_peers=True),
    Spec("kvstore_draining", "gauge",
         "Whether the store drains (1, or 0): it takes no new engines."),
    Spec("kvstore_namespace_info", "gauge",
         "Always 1: what a namespace is, by the name of the first engine that brought it.",
         ("namespace", "model", "dtype", "block_tokens", "block_bytes")),
    Spec("kvstore_build_info", "gauge",
         "Always 1: the version of the store, and of its protocol with engines.",
         ("version", "protocol")),
    Spec("kvstore_predicted_hit_ratio", "gauge",
         "Part of the blocks asked for that would be hit if a tier had a multiple of its size, by"
         " least recent use.",
         ("namespace", "tier", "size")),
    Spec("kvstore_pinned_bytes", "gauge",
         "Slots of a namespace that cannot be evicted, by cause: lease, pin, copy, coming,"
         " credit.",
         ("namespace", "cause")),
    Spec("kvstore_queue_seconds", "gauge",
         "Age of the oldest lookup without an answer, or block to be copied to a lower tier.",
         ("queue",)),
    Spec("kvstore_queued_blocks", "gauge",
         "Blocks that wait to be copied to a lower tier.", ("tier",)),
    Spec("kvstore_held_blocks", "gauge",
         "Blocks in memory that a full tier is given later.", ("tier",)),
    Spec("kvstore_write_budget_bytes", "gauge",
         "Bytes that a tier may be written in a day, and what is left of them now.",
         ("tier", "state")),
    Spec("kvstore_tenant_bytes", "gauge",
         "What a tenant has in a tier, may have (quota) and keeps (floor).",
         ("tenant", "tier", "state")),
    Spec("kvstore_capacity_bytes", "gauge",
         "Capacity of the tier on this node.", ("tier",)),
    Spec("kvstore_memory_bytes", "gauge",
         "Memory or disk space that the tier takes.", ("tier",)),
    Spec("kvstore_tiers", "gauge",
         "Lower tiers, by state: ok, loading, read_only, off.", ("tier", "state")),
    Spec("kvstore_tier_stalled_seconds", "gauge",
         "Time since a disk call of this kind last returned, while all its threads are busy.",
         ("tier", "call")),
    Spec("kvstore_tier_slots", "gauge",
         "Slots of a namespace on disk, by state: free, used.", ("tier", "namespace", "state")),
    Spec("kvstore_slots", "gauge",
         "Slots of a namespace in CPU memory, by state: free, granted, used, retiring (in use in"
         " memory that is to be given back).",
         ("namespace", "state")),
    Spec("kvstore_leases", "gauge",
         "Answered lookups whose blocks are pinned now, and pins.", ("namespace",)),
    Spec("kvstore_jobs_open", "gauge",
         "Transfers to and from lower tiers in progress.", ("namespace",)),
    Spec("kvstore_sessions", "gauge",
         "Engine sessions, by phase.", ("phase",)),
)
# fmt: on
LABELS = {spec.name: spec.labels for spec in TABLE}


def zeros(tiers: Sequence[str], namespace: str | None = None) -> Iterator[tuple[str, ...]]:
    """Go through the counters of a store with these tiers, by metric name and label values.

    namespace: those of one namespace, by its label; None: those that no namespace has.
    """
    for spec in TABLE:
        of_namespace = spec.labels[:1] == ("namespace",)
        if spec.kind != "counter" or (spec.of_peers and PEER not in tiers):
            continue
        if spec.values is OBJECT_EVENTS and OBJECT not in tiers:
            continue
        if of_namespace != (namespace is not None):
            continue
        head = (spec.name,) if namespace is None else (spec.name, namespace)
        labels = spec.labels[1:] if of_namespace else spec.labels
        if not labels:
            yield head
        elif len(labels) == 1:
            yield from ((*head, value) for value in spec.values or tiers)
        else:
            yield from ((*head, tier, event) for tier in tiers for event in _events(spec, tier))


def _events(spec: Spec, tier: str) -> Sequence[str]:
    if spec.values == WAYS:
        return {MEMORY: (), PEER: WAYS[1:]}.get(tier, WAYS)
    return _EVENTS_OF.get(tier, TIER_EVENTS)


class Histogram:
    """How many values are in each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the largest value of each bucket, ascending; one more has all that is larger."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, by: int = 1) -> None:
        """Count a value, or as many as `by` that are alike."""
        self._counts[bisect_left(self._bounds, value)] += by
        self._sum += value * by

    def rows(self) -> Iterator[tuple[str, float]]:
        """Go through its buckets: the bound, and how many values are not above; then SUM."""
        names = [*map(str, self._bounds), "+Inf"]
        yield from zip(names, accumulate(self._counts), strict=True)
        yield SUM, self._sum


class Numbers:
    """What the store has counted, by metric name and label values; plain and cheap to add to."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.gauges: dict[tuple[str, ...], float] = {}
        self.histograms = {
            spec.name: Histogram(spec.bounds) for spec in TABLE if spec.kind == "histogram"
        }
        self._tiers: Sequence[str] = ()
        self._served: dict[str, bool] = {}  # label of a namespace -> it has not been forgotten

    def start(self, tiers: Sequence[str]) -> None:
        """Have every counter of a store with these tiers at 0.

        A counter that began with its first event would hide this event from rate() and increase().
        """
        self._tiers = tiers
        self.counts.update(dict.fromkeys(zeros(tiers), 0))
        self.counts.update(dict.fromkeys(zeros(tiers, OTHER), 0))

    def open_namespace(self, digest: str) -> str:
        """Return the label of a namespace that is served from now on; its counters are at 0.

        Or where they were, if it had been forgotten and its series were not. Those that were
        forgotten first make room; while there is none the label is OTHER.
        """
        label = digest[:LABEL_DIGITS]
        known = self._served.pop(label, None) is not None
        if not known and len(self._served) >= NAMESPACES_MAX:
            gone = next((each for each, served in self._served.items() if not served), None)
            if gone is None:
                return OTHER
            del self._served[gone]
            for key in zeros(self._tiers, gone):
                self.counts.pop(key, None)
        self._served[label] = True
        if not known:
            self.counts.update(dict.fromkeys(zeros(self._tiers, label), 0))
        return label

    def close_namespace(self, label: str) -> None:
        """A namespace is forgotten: its series stay until others need the room."""
        if self._served.pop(label, None) is not None:
            self._served[label] = False  # behind those that went before

    def label_of(self, digest: str) -> str:
        """Return the label of a namespace that need not be served."""
        label = digest[:LABEL_DIGITS]
        return label if label in self._served else OTHER

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """Count up."""
        self.counts[(name, *labels)] += by  # type: ignore[assignment]

    def observe(self, name: str, value: float, by: int = 1) -> None:
        """Count a value in a histogram, or as many as `by` that are alike."""
        self.histograms[name].observe(value, by)

    def values(self) -> Mapping[tuple[str, ...], float]:
        """Return everything, by metric name and label values."""
        found: dict[tuple[str, ...], float] = {**self.counts, **self.gauges}
        for name, histogram in self.histograms.items():
            found |= {(name, most): count for most, count in histogram.rows()}
        return found
