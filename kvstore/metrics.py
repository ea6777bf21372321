"""All metrics in one table, and what the store has counted of them.

Labels are tier, outcome, reason, event and namespace; never a key or a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvstore.core.types import StoreOutcome
from kvstore.wire.engine import EVENTS

MEMORY = "cpu"  # the memory pool's tier label
NVME = "nvme"
PEER = "peer"

SUM = "sum"
BUCKETS = ("0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1.0", "3.0", "+Inf")  # seconds
EVICTIONS = ("capacity", "resize", "clear", "damaged")
# Of a tier that is only read from, of every other one, and of the disk.
READ_EVENTS = ("loaded", "loaded_failed", "corrupt", "orphan")
TIER_EVENTS = (*READ_EVENTS, "stored", "stored_failed", "skipped", "over_budget", "late")
DISK_EVENTS = (
    *("unplaced", "io_error"),
    *("evicted", "damaged", "unreadable", "unlinked", "failed", "resize"),
    *("cleared", "discarded", "unreachable", "foreign"),
)
# Memory has counters of its own; a tier of others has TIER_EVENTS.
_EVENTS_OF = {MEMORY: (), NVME: (*TIER_EVENTS, *DISK_EVENTS), PEER: READ_EVENTS}
FETCHED_TIERS = ("gpu", "cpu", "nvme", "prefill", "other")
HAND_OVER_EVENTS = (
    *("fetched", "corrupt", "late", "ended", "lost", "exporter", "cleared"),  # as a consumer
    *("done", "heartbeats"),
    *("confirmed", "stale", "expired", "failed", "gone", "refused"),  # as a producer
    *("released", "lapsed", "extended", "unknown", "ambiguous"),
    *("unauthorised", "malformed", "too_many", "unsent", "undialled"),  # of the side channel
    "internal",
)


class Spec(NamedTuple):
    """One metric. Counters get "_total" appended by the exposition format.

    values: of a counter's only label; they are there from the start, at 0. A label "tier" without
    any has the names of the store's tiers. of_peers: only where other stores are asked or served.
    A histogram's label is "le", with the sum under SUM.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    of_peers: bool = False


# fmt: off
TABLE = (
    Spec("kvstore_lookup_tokens", "counter",
         "Tokens of admitted requests that were not in their engine's own cache."),
    Spec("kvstore_hit_tokens", "counter",
         "Tokens served from the store, by the tier that held them first.", ("tier",)),
    Spec("kvstore_lookups", "counter",
         "Lookups answered, by outcome: hit, miss, capped, expired.",
         ("outcome",), ("hit", "miss", "capped", "expired")),
    Spec("kvstore_stored_blocks", "counter",
         "Blocks that engines wrote into slots, by outcome.",
         ("outcome",), tuple(outcome.value for outcome in StoreOutcome)),
    Spec("kvstore_copied_bytes", "counter",
         "Bytes copied between engines and slots, by direction.",
         ("direction",), ("store", "load")),
    Spec("kvstore_copy_seconds", "counter",
         "Time that workers spent copying, by direction.", ("direction",), ("store", "load")),
    Spec("kvstore_evicted_blocks", "counter",
         "Blocks removed from CPU memory, by reason.", ("reason",), EVICTIONS),
    Spec("kvstore_tier_blocks", "counter",
         "Blocks copied to, read from or removed from a lower tier, by event.", ("tier", "event")),
    Spec("kvstore_engine_events", "counter",
         "Events that engines report, such as deferrals, time-outs and failed loads.",
         ("event",), tuple(sorted(EVENTS))),
    Spec("kvstore_hand_over_events", "counter",
         "Events of hand-overs: blocks, leases, requests and connections.",
         ("event",), HAND_OVER_EVENTS, of_peers=True),
    Spec("kvstore_fetched_blocks", "counter",
         "Blocks fetched from other stores, by the tier that held them there.",
         ("tier",), FETCHED_TIERS, of_peers=True),
    Spec("kvstore_hand_over_moved_bytes", "counter",
         "Bytes that NIXL moved: pulled from or pushed to other stores, read into engine"
         " memory here (direct), or written from it to other engines (engine).",
         ("direction",), ("pulled", "pushed", "direct", "engine"), of_peers=True),
    Spec("kvstore_hand_over_held_seconds", "histogram",
         "Time from the end of a handed-over request until all its blocks are in slots.", ("le",)),
    Spec("kvstore_sessions_started", "counter",
         "Engine sessions that became active."),
    Spec("kvstore_sessions_ended", "counter",
         "Engine sessions that ended, by reason.",
         ("reason",),
         ("left", "died", "protocol", "memory", "refused", "drain", "shutdown", "internal")),
    Spec("kvstore_refused", "counter",
         "Connections and messages refused, by reason.",
         ("reason",), ("protocol", "malformed", "outbox", "input", "internal", "user")),
    Spec("kvstore_hand_over_bytes", "gauge",
         "Memory that hand-overs hold, by state: held (for other stores), landing, quarantined.",
         ("state",)),
    Spec("kvstore_hand_over_open", "gauge",
         "Open hand-over objects by kind, such as fetches, jobs, direct writes and connections.",
         ("what",)),
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
         "Answered lookups whose blocks are pinned now.", ("namespace",)),
    Spec("kvstore_jobs_open", "gauge",
         "Transfers to and from lower tiers in progress.", ("namespace",)),
    Spec("kvstore_sessions", "gauge",
         "Engine sessions, by phase.", ("phase",)),
)
# fmt: on


def zeros(tiers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Go through the counters of a store with these tiers, by metric name and label values."""
    for spec in TABLE:
        if spec.kind != "counter" or (spec.of_peers and PEER not in tiers):
            continue
        if spec.labels == ("tier", "event"):
            for tier in tiers:
                events = _EVENTS_OF.get(tier, TIER_EVENTS)
                yield from ((spec.name, tier, event) for event in events)
        elif spec.labels:
            yield from ((spec.name, value) for value in spec.values or tiers)
        else:
            yield (spec.name,)


class Numbers(msgspec.Struct):
    """What the store has counted, by metric name and label values; plain and cheap to add to.

    evicted, moved: what namespaces count together, by reason and by (tier, event): a namespace
    that is forgotten takes nothing along.
    """

    counts: Counter[tuple[str, ...]] = msgspec.field(default_factory=Counter)
    gauges: dict[tuple[str, ...], float] = msgspec.field(default_factory=dict)
    evicted: Counter[str] = msgspec.field(default_factory=Counter)
    moved: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)

    def start(self, tiers: Sequence[str]) -> None:
        """Have every counter of a store with these tiers at 0.

        A counter that began with its first event would hide this event from rate() and increase().
        """
        self.counts.update(dict.fromkeys(zeros(tiers), 0))

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """Count up."""
        self.counts[(name, *labels)] += by  # type: ignore[assignment]

    def observe(self, name: str, seconds: float) -> None:
        """Count a value in a histogram: in each bucket that it is not above, and in the sum."""
        for most in BUCKETS:
            if seconds <= float(most):
                self.add(name, most)
        self.add(name, SUM, by=seconds)

    def value(self, name: str, *labels: str) -> float:
        """Read one number back."""
        key = (name, *labels)
        return self.gauges.get(key, self.counts.get(key, 0))
