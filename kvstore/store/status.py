"""What a store is and does, as one object: for `kvstore status`, `kvstore top` and the page.

It is read off the store's numbers, in its loop or on a thread of its endpoint.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvstore import __version__
from kvstore.metrics import LABELS, MEMORY, NAMESPACES_MAX, NVME, OBJECT, Numbers

if TYPE_CHECKING:
    from kvstore.store.session import Session

HISTORY_S = 3600
SAMPLE_S = 20
MINUTE_S = 60
OLD_S = 5.0  # of a queue; lookups wait for [engine] promote at most, 2 s by default
STALLED_S = 1.0  # of a disk call
TOLD_MAX = 100  # characters of a text that an engine has told
DIGITS_MAX = 18  # of a number that an engine has told


class Tokens(msgspec.Struct, frozen=True):
    """Tokens that engines looked up in some time, and those of them that hit, by tier."""

    seconds: float
    looked_up: int
    hit: dict[str, int]

    def since(self, before: Tokens) -> Tokens:
        """Return what has come since an earlier count."""
        hit = {tier: count - before.hit.get(tier, 0) for tier, count in self.hit.items()}
        return Tokens(self.seconds - before.seconds, self.looked_up - before.looked_up, hit)


class TierStatus(msgspec.Struct, frozen=True):
    """One tier. Bytes stored and loaded count from the store's start.

    used_bytes, capacity_bytes: None where the store does not know them. queued_blocks: to be copied
    there; queue_s: how long the oldest of them has waited. budget_bytes: may be written in a day.
    """

    name: str
    state: str
    used_bytes: int | None
    capacity_bytes: int | None
    stored_bytes: int
    loaded_bytes: int
    queued_blocks: int
    queue_s: float
    budget_bytes: int | None
    budget_left_bytes: int | None


class ModelStatus(msgspec.Struct, frozen=True):
    """One namespace: a model in one layout. Counts of tokens are from the store's start.

    model: "" for one that only the disk has. blocks: by tier. leases: lookups whose blocks are
    pinned now.
    """

    namespace: str
    model: str
    dtype: str
    block_tokens: int
    block_bytes: int
    blocks: dict[str, int]
    looked_up_tokens: int
    hit_tokens: int
    pinned_bytes: int
    leases: int


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine. pid: of its scheduler half; worker_pids: by rank; None: in another PID namespace.

    warning: why it shares no blocks with others of its model, as it was when it attached.
    """

    name: str
    model: str
    namespace: str
    phase: str
    pid: int | None
    uid: int | None
    ranks: int
    worker_pids: list[int | None]
    warning: str


class TenantStatus(msgspec.Struct, frozen=True):
    """What a tenant has in a tier, may have (None: no limit) and keeps."""

    tenant: str
    tier: str
    used_bytes: int
    quota_bytes: int | None
    floor_bytes: int


class Prediction(msgspec.Struct, frozen=True):
    """What would be hit of the blocks that a model's engines ask for, by the size of a tier.

    ratios: by times of the size that it has; what its engines have themselves is asked for, too.
    """

    namespace: str
    tier: str
    ratios: dict[str, float]


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong, and what to do. now: or it has happened since the start."""

    now: bool
    what: str
    todo: str


class Status(msgspec.Struct, frozen=True):
    """All of it. missed_tokens: by reason. lookups_s: age of the oldest without an answer.

    history: counts since the start, one for each SAMPLE_S of the last hour, the oldest first.
    """

    version: str
    uptime_s: float
    ready: bool
    findings: list[Finding]
    since_start: Tokens
    last_minute: Tokens
    missed_tokens: dict[str, int]
    stored_blocks: int
    evicted_blocks: int
    lookups_s: float
    tiers: list[TierStatus]
    models: list[ModelStatus]
    engines: list[EngineStatus]
    tenants: list[TenantStatus]
    predictions: list[Prediction]
    history: list[Tokens]


class History:
    """Samples of the tokens looked up and hit; written by the store's thread, any may read it."""

    def __init__(self, numbers: Numbers) -> None:
        self.samples: tuple[Tokens, ...] = ()
        self._numbers = numbers
        self._start_ns = self._next_ns = 0

    def tick(self, now_ns: int) -> None:
        """Take a sample when it is time."""
        if now_ns >= self._next_ns:
            self._start_ns = self._start_ns or now_ns
            self._next_ns = now_ns + SAMPLE_S * 1_000_000_000
            kept, seconds = HISTORY_S // SAMPLE_S, self.uptime_s(now_ns)
            self.samples = (*self.samples, _tokens(self._numbers.counts, seconds))[-kept:]

    def uptime_s(self, now_ns: int) -> float:
        """Return the time since the first tick."""
        return (now_ns - self._start_ns) / 1e9 if self._start_ns else 0.0


class _Read:
    """Sums of the store's numbers."""

    def __init__(self, values: Mapping[tuple[str, ...], float]) -> None:
        # By metric: label values, and the number.
        self.rows: dict[str, list[tuple[tuple[str, ...], float]]] = defaultdict(list)
        for (name, *labels), value in values.items():
            self.rows[name].append((tuple(labels), value))

    def by(self, label: str, name: str, **wanted: str) -> dict[str, int]:
        """Add up a metric's values by one of its labels; wanted: those of other labels."""
        at, found = LABELS[name].index(label), Counter[str]()
        where = [(LABELS[name].index(other), value) for other, value in wanted.items()]
        for labels, value in self.rows[name]:
            if all(labels[place] == expected for place, expected in where):
                found[labels[at]] += int(value)
        return found


def _tokens(values: Mapping[tuple[str, ...], float], seconds: float) -> Tokens:
    """Add up the tokens looked up and hit in so many seconds."""
    looked_up, hit = 0, Counter[str]()
    for key, value in values.items():
        if key[0] == "kvstore_lookup_tokens":
            looked_up += int(value)
        elif key[0] == "kvstore_hit_tokens":
            hit[key[2]] += int(value)
    return Tokens(seconds, looked_up, dict(hit))


def told(text: str) -> str:
    """Return what an engine has told as one short line without codes for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:TOLD_MAX])


def engines_of(
    sessions: Iterable[Session], processes: Mapping[int, tuple[int, int]]
) -> list[EngineStatus]:
    """Describe the engines of sessions; processes: pid and user, by connection."""
    found = []
    for session in sessions:
        pid, uid = session.process or (None, None)
        pids = [processes.get(session.workers[rank], (0,))[0] for rank in sorted(session.workers)]
        namespace = session.namespace
        digest = "" if namespace is None else namespace.layout.digest[:12]
        found.append(
            EngineStatus(
                told(session.engine), told(session.model), digest, session.phase.value, pid or None,
                uid, session.world, [worker or None for worker in pids], session.warning,
            )
        )  # fmt: skip
    return sorted(found, key=lambda engine: (engine.model, engine.pid or 0))


def status_of(
    values: Mapping[tuple[str, ...], float],
    tier_names: Sequence[str],
    engines: list[EngineStatus],
    reasons: Sequence[str],
    history: tuple[Tokens, ...],
    uptime_s: float,
    shortages: Sequence[str] = (),
) -> Status:
    """Put the object together. reasons: why the store is not ready; shortages: what it lacks."""
    read = _Read(values)
    now = _tokens(values, uptime_s)
    before = [each for each in history if each.seconds <= uptime_s - MINUTE_S]
    first = before[-1:] or history[:1] or (Tokens(0.0, 0, {}),)
    tiers = [_tier(read, name) for name in tier_names]
    waits = {labels[0]: value for labels, value in read.rows["kvstore_queue_seconds"]}
    return Status(
        version=__version__,
        uptime_s=uptime_s,
        ready=not reasons,
        findings=_findings(read, tiers, engines, (*reasons, *shortages), waits),
        since_start=now,
        last_minute=now.since(first[0]),
        missed_tokens=dict(read.by("reason", "kvstore_missed_tokens")),
        stored_blocks=read.by("outcome", "kvstore_stored_blocks")["stored"],
        evicted_blocks=sum(read.by("reason", "kvstore_evicted_blocks").values()),
        lookups_s=waits.get("lookups", 0.0),
        tiers=tiers,
        models=_models(read),
        engines=engines,
        tenants=_tenants(read),
        predictions=_predictions(read),
        history=list(history),
    )


def _tier(read: _Read, name: str) -> TierStatus:
    """Describe a tier; its bytes come from engines, if it is memory, or from memory."""
    copied = (
        read.by("direction", "kvstore_copied_bytes")
        if name == MEMORY
        else read.by("direction", "kvstore_tier_bytes", tier=name)
    )
    states = [
        state for state, is_so in read.by("state", "kvstore_tiers", tier=name).items() if is_so
    ]
    waits = [value for labels, value in read.rows["kvstore_queue_seconds"] if labels == (name,)]
    budget = read.by("state", "kvstore_write_budget_bytes", tier=name)
    return TierStatus(
        name=name,
        state=states[0] if states else "ok",
        used_bytes=read.by("tier", "kvstore_memory_bytes").get(name),
        capacity_bytes=read.by("tier", "kvstore_capacity_bytes").get(name),
        stored_bytes=copied["store"],
        loaded_bytes=copied["load"],
        queued_blocks=read.by("tier", "kvstore_queued_blocks")[name],
        queue_s=waits[0] if waits else 0.0,
        budget_bytes=budget.get("day"),
        budget_left_bytes=budget.get("left"),
    )


def _models(read: _Read) -> list[ModelStatus]:
    """Describe the namespaces; those with most blocks come first, and others may be left out."""
    info = {labels[0]: labels[1:] for labels, _ in read.rows["kvstore_namespace_info"]}
    in_memory = read.by("namespace", "kvstore_slots", state="used")
    on_disk = read.by("namespace", "kvstore_tier_slots", tier=NVME, state="used")
    looked_up, hit, pinned, leases = (
        read.by("namespace", f"kvstore_{name}")
        for name in ("lookup_tokens", "hit_tokens", "pinned_bytes", "leases")
    )
    found = []
    for namespace in info.keys() | on_disk.keys():
        model, dtype, tokens, size = info.get(namespace, ("", "", "", "0"))
        blocks = {MEMORY: in_memory[namespace]}
        if namespace in on_disk:
            blocks[NVME] = on_disk[namespace]
        found.append(
            ModelStatus(
                namespace, model, dtype, _number(tokens), int(size),
                blocks, looked_up[namespace], hit[namespace], pinned[namespace], leases[namespace],
            )
        )  # fmt: skip
    found.sort(key=lambda each: (-sum(each.blocks.values()), each.namespace))
    return found[:NAMESPACES_MAX]


def _tenants(read: _Read) -> list[TenantStatus]:
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for (tenant, tier, state), value in read.rows["kvstore_tenant_bytes"]:
        found[tenant, tier][state] = int(value)
    return [
        TenantStatus(tenant, tier, has["used"], has.get("quota"), has["floor"])
        for (tenant, tier), has in sorted(found.items())
    ]


def _predictions(read: _Read) -> list[Prediction]:
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for (namespace, tier, size), ratio in read.rows["kvstore_predicted_hit_ratio"]:
        found[namespace, tier][size] = ratio
    return [Prediction(*which, ratios) for which, ratios in sorted(found.items())]


def _number(text: str) -> int:
    """Read a number that an engine has told; 0 for what is none, or too large for JSON."""
    return int(text) if text.isdecimal() and len(text) < DIGITS_MAX else 0


_LOG = "see the store's log"
_BUG = "report it with the traceback in the store's log"
_TODO = {  # by a part of the reason
    "draining": "kvstore drain --cancel takes engines again",
    "loop has not": "look at the machine's load and plug-in tiers; a supervisor restarts the store",
    "is off": f"{_LOG}: a disk comes back by itself, a plug-in tier after a restart",
    "read_only": f"{_LOG} and at the drive: it is written again once that works",
    "no memory": f"{_LOG} for the limit; free memory, or raise it: the store looks again by itself",
    OBJECT: f"{_LOG}, and at the bucket: it is tried again by itself",
    "loading": "wait: blocks on disk are found once the index has been read",
    "slow": "look at the drive, or the peer; requests that wait too long are computed",
}
_NEVER = (  # counters that stay at 0 where all is well: label, its values, what, what to do
    ("kvstore_refused", "reason", ("user",), "connections of users without permission",
     "name the user in [server] allow, if it may read all blocks"),
    ("kvstore_refused", "reason", ("malformed", "protocol"), "wrong messages",
     f"{_LOG}, and compare the versions of engines and store"),
    ("kvstore_refused", "reason", ("outbox", "input"), "connections that took too much memory",
     "an engine hangs, or is starved of CPU"),
    ("kvstore_refused", "reason", ("internal",), "bugs of the store", _BUG),
    ("kvstore_sessions_ended", "reason", ("died",), "engines that were killed or crashed",
     "look at the engines' logs, and for the kernel's out-of-memory killer"),
    ("kvstore_sessions_ended", "reason", ("memory",), "engines that kept memory for too long",
     "an engine hangs, or is starved of CPU"),
    ("kvstore_tier_blocks", "event", ("corrupt", "damaged", "unreadable", "io_error"),
     "blocks that a lower tier lost", "look at the drive; kvstore fsck verifies all of it"),
    ("kvstore_tier_blocks", "event", ("skipped", "late"), "blocks too many for a lower tier",
     "it is slower than engines store: kvstore check --disk suggests threads"),
    ("kvstore_engine_events", "event", ("load_failed", "load_given_up"), "loads that failed",
     "look at the engines' logs; the requests were computed"),
)  # fmt: skip


def _findings(
    read: _Read,
    tiers: Iterable[TierStatus],
    engines: Iterable[EngineStatus],
    reasons: Iterable[str],
    waits: Mapping[str, float],
) -> list[Finding]:
    """Say what is wrong, and what to do: first what is so now."""
    found = [
        (reason, next((_TODO[word] for word in _TODO if word in reason), _LOG))
        for reason in reasons
    ]
    for tier in tiers:
        if tier.name == OBJECT and tier.state != "ok":  # others have theirs: the store is ready
            found.append((f"tier {tier.name} is {tier.state}", _TODO[OBJECT]))
        elif tier.state in ("read_only", "loading"):
            found.append((f"tier {tier.name} is {tier.state}", _TODO[tier.state]))
        if tier.budget_bytes and (tier.budget_left_bytes or 0) <= 0:
            what = (
                f"the write budget of tier {tier.name} is used up: blocks used once are not written"
            )
            found.append((what, "raise write_budget, if the drive is rated for more"))
    found += [
        (f"the oldest entry of queue {queue} has waited for {seconds:.0f} s", _TODO["slow"])
        for queue, seconds in waits.items()
        if seconds > OLD_S
    ]
    found += [
        (f"tier {tier}: no {call} has returned for {seconds:.0f} s", _TODO["slow"])
        for (tier, call), seconds in read.rows["kvstore_tier_stalled_seconds"]
        if seconds > STALLED_S
    ]
    for engine in engines:
        if engine.warning:
            who = f"engine {engine.model or engine.name} (pid {engine.pid or '?'})"
            found.append((f"{who} {engine.warning}", "see the engine's log"))
    was = []
    for name, label, values, what, todo in _NEVER:
        counts = read.by(label, name)
        if count := sum(counts.get(value, 0) for value in values):
            was.append(Finding(False, f"{what}: {count:,}", todo))
    return [Finding(True, what, todo) for what, todo in found] + was
