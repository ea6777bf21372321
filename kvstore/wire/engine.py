"""The local protocol between a store and the engines on its node: its messages.

A length-prefixed stream of msgpack messages over a unix socket; memory is passed as file
descriptors beside Extent messages. The scheduler half and every worker of an engine have a
connection each; together they are a session, which lives and dies as one: when any of them
closes, the others are told to Detach, finish their copies, close and come back. Slots a session
was granted are reused only after all its workers' connections have closed.
docs/reference/protocol.md draws it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvstore.core import limits
from kvstore.core.layout import RankGeometry, RankLayout, RankPages
from kvstore.core.limits import Count, Hash, LeaseMs, Name, Number, Rank, Seconds, Text, Words
from kvstore.wire.framing import Message

VERSION = 8

Requests = msgspec.Meta(max_length=limits.STEP_ITEMS_MAX)
Keys = Annotated[tuple[Hash, ...], msgspec.Meta(max_length=limits.STORED_MAX)]
Hashes = Annotated[bytes, msgspec.Meta(max_length=limits.FRAME_BYTES_MAX)]
Slots = Annotated[int, msgspec.Meta(ge=0, le=limits.SLOTS_MAX)]
Numbers = Annotated[tuple[Number, ...], Requests]
Counts = Annotated[dict[Name, Count], msgspec.Meta(max_length=limits.KINDS_MAX)]

NEWS_MAX = 1024
"""Keys that a scheduler half is told of before it has heard the first of them (Step.heard)."""


# Engine to store


class Hello(Message, frozen=True):
    """First message of every connection. engine names the session; uid is checked by the OS.

    direct: this worker can read a peer's slots into its engine's memory. events: the scheduler half
    wants to hear of what is on disk, too. model: as the engine's users call it, for people to read.
    """

    version: Number
    engine: Name
    role: Name  # "scheduler" or "worker"
    rank: Rank
    world: Annotated[int, msgspec.Meta(ge=1, le=limits.RANKS_MAX)]
    credit_slots: Slots = 0  # scheduler half: empty slots it can use in two steps
    geometry: RankGeometry | None = None  # workers
    direct: bool = False
    events: bool = False
    model: Name = ""  # scheduler half


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Ask which leading blocks of a request are present; answered exactly once.

    hashes: one hash of `width` bytes per block, first block first. memory_only: leave lower tiers
    out, and what is coming from them. peer: host:port of a store that may have what is not here;
    request: the hand-over, which may still be computing it there; push: have it
    written; None: if that is faster. inside: tokens used of the last block, 0: all.
    loadable: how many may be loaded, which lower tiers and peers are asked for; None: all.
    direct: workers read themselves what a peer has, into the engine's memory. off_disk: what comes
    up for it is not copied to lower tiers. block_ns: how long the engine computes a block; what
    takes longer to read from a lower tier or a peer is left out of the answer. 0: it does not know
    yet, and what another engine has told counts; None: nothing is left out. hinted: how many
    leading blocks a router says that the peer has; 0: the peer is of a hand-over. again: the engine
    has asked for this request before, so its blocks are not counted as used once more.
    """

    ask: Number
    hashes: Hashes
    width: Annotated[int, msgspec.Meta(ge=1, le=limits.HASH_BYTES_MAX)]
    scope: Hash = b""
    memory_only: bool = False
    peer: Name = ""
    request: Text = ""
    push: bool | None = None
    inside: Count = 0
    loadable: Count | None = None
    direct: bool = False
    off_disk: bool = False
    block_ns: Annotated[int, msgspec.Meta(ge=0, le=limits.BLOCK_NS_MAX)] | None = None
    hinted: Count = 0
    again: bool = False


class HandedOver(msgspec.Struct, frozen=True, array_like=True):
    """A request whose blocks another store will ask for.

    state: "running", it computes them; "done", these are all, held for lease_ms even if no store
    asks; "gone", it ended otherwise. common: the name of a router, for engines that do not know
    its id. fixed: no heartbeat extends lease_ms.
    """

    request: Text
    state: Literal["running", "done", "gone"]
    hashes: Hashes = b""
    width: Annotated[int, msgspec.Meta(ge=0, le=limits.HASH_BYTES_MAX)] = 0
    scope: Hash = b""
    lease_ms: LeaseMs = 0
    common: Text = ""
    fixed: bool = False


class Unwanted(msgspec.Struct, frozen=True, array_like=True):
    """A request no longer needs its blocks at the store at host:port, under this name."""

    peer: Name
    request: Text


class EngineBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Engine blocks that are copied to slots, and stay readable after that: see BlockVersions.

    slots: u32; keys[i] is what is in slots[i] once that is stored. blocks, generations: u32, as
    many for each slot.
    """

    slots: Words
    keys: Keys
    blocks: Words
    generations: Words


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """Leading blocks of a prompt, to be kept in memory under a name; without hashes: no more."""

    name: Name
    hashes: Annotated[bytes, msgspec.Meta(max_length=limits.PIN_BYTES_MAX)] = b""
    width: Annotated[int, msgspec.Meta(ge=0, le=limits.HASH_BYTES_MAX)] = 0
    scope: Hash = b""


class BlockTokens(msgspec.Struct, frozen=True, array_like=True):
    """Token ids of blocks, for the snapshot of another engine: u32, as many for each hash."""

    hashes: Hashes
    width: Annotated[int, msgspec.Meta(ge=1, le=limits.HASH_BYTES_MAX)]
    tokens: Words


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """Ask for the next Page of what the tiers have in a scope, with hashes of `width` bytes."""

    width: Annotated[int, msgspec.Meta(ge=1, le=limits.HASH_BYTES_MAX)]
    scope: Hash = b""


class Step(Message, frozen=True):
    """One batch per engine step from the scheduler half.

    release: leases that were not used. lookup_tokens, hit_tokens, missed_tokens: of requests
    admitted since the last step, asked for; of these served, by tier, and not, by reason (MISSES).
    counts: events since then, by name (EVENTS). unstored: keys of blocks that found no slot.
    tenants: whose blocks are asked for or stored from now on, each named once.
    pins: prefixes to be kept, or not any more. heard: keys of Answers that it has dealt with.
    tokens: of blocks that are stored, or brought up, if Welcome says so. snapshot: answered once.
    """

    lookups: Annotated[tuple[Lookup, ...], Requests] = ()
    release: Numbers = ()
    lookup_tokens: Count = 0
    hit_tokens: Counts = msgspec.field(default_factory=dict)
    counts: Counts = msgspec.field(default_factory=dict)
    handed_over: Annotated[tuple[HandedOver, ...], Requests] = ()
    unwanted: Annotated[tuple[Unwanted, ...], Requests] = ()
    engine_blocks: Annotated[tuple[EngineBlocks, ...], Requests] = ()
    missed_tokens: Counts = msgspec.field(default_factory=dict)
    unstored: Keys = ()
    tenants: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.TENANTS_MAX)] = ()
    pins: Annotated[tuple[Prefix, ...], msgspec.Meta(max_length=limits.PINS_MAX)] = ()
    heard: Count = 0
    tokens: Annotated[tuple[BlockTokens, ...], Requests] = ()
    snapshot: Snapshot | None = None


class Mapped(Message, frozen=True):
    """The answer to Extent: the worker has mapped it, and may use its slots; gone: it uses none."""

    extent: Number
    gone: bool = False


class Stored(Message, frozen=True):
    """A worker finished writing slots. keys[i] is in slots[i]; parents[i] may be empty.

    off_disk: they are not copied to lower tiers.
    """

    slots: Words
    keys: Keys
    parents: Keys
    ok: bool
    seconds: Seconds
    off_disk: bool = False


class Loaded(Message, frozen=True):
    """A worker finished reading under a lease; damaged: slots whose bytes were not right.

    late: blocks that had not arrived when it gave up.
    """

    lease: Number
    copied_bytes: Count
    seconds: Seconds
    damaged: Words = b""
    late: Count = 0


class Loading(Message, frozen=True):
    """A worker still waits for blocks of a lease; the lease is extended. Coming may answer."""

    lease: Number


class Arrived(Message, frozen=True):
    """A worker has read these positions of a fetch (u32) into its engine's memory, or could not."""

    fetch: Number
    positions: Words
    copied_bytes: Count
    ok: bool


class Target(Message, frozen=True):
    """Where blocks of a pushed fetch (u32 positions) may be written: this worker's engine blocks.

    agent: of the worker, which ends before they are used otherwise. blocks: u32, equally many for
    each position; 0: that part is not wanted.
    """

    fetch: Number
    agent: Name
    positions: Words
    blocks: Words


class Serves(Message, frozen=True):
    """This worker's KV tensors can be read by peers, and written; blocks: so many engine blocks.

    Said once it is welcome, and again when its agent is another one.
    """

    rank: RankPages
    blocks: Number


class Query(Message, frozen=True):
    """Admin: what, as kvstore.store.store.QUERIES; "resize" has a tier and its new capacity.

    level: of "log-level". tenant, tier, quota_bytes, floor_bytes: of "quota"; without a tenant it
    changes nothing. prefix: of "pin", which lists all without one, "unpin" and "warm", in a
    namespace. recording: its number, of "record"; ends: it is over.
    """

    what: Name
    tier: Name = ""
    capacity_bytes: Count = 0
    level: Name = ""
    tenant: Name = ""
    quota_bytes: Count | None = None
    floor_bytes: Count = 0
    prefix: Prefix | None = None
    namespace: Name = ""
    recording: Number = 0
    ends: bool = False


# Store to engine


class Welcome(Message, frozen=True):
    """The connection is part of a session; the scheduler half's may ask and store from now on.

    Workers are welcome once all of them are there. layout: what to copy where. wait_ms, limit_ms:
    how long a load may wait for slots that are coming without an arrival, and in all. devices:
    those to read from peers with, as UCX names them.
    The scheduler half is once they have mapped the memory. side_channel: host:port where other
    stores ask this one. defer_ms: how long a lookup may wait for blocks that are pending. warning:
    for the engine's log, such as why it shares no blocks with others of its model. tokens: the
    store keeps token ids (Step.tokens), and has a snapshot. there: blocks in memory before.
    """

    session: int
    namespace: str = ""
    layout: RankLayout | None = None
    wait_ms: int = 0
    limit_ms: int = 0
    devices: str = ""
    side_channel: str = ""
    defer_ms: int = 0
    warning: Text = ""
    tokens: bool = False
    there: Count = 0


class Refused(Message, frozen=True):
    """The store will not serve this engine; retry says whether asking again can help."""

    reason: str
    retry: bool


class Extent(Message, frozen=True):
    """Slots first..first+count-1 live in the memory whose descriptor comes along.

    Slot i starts at (i - first) * slot_bytes; from generations_offset on there is a u32
    generation per slot. count 0: the store takes the memory back, and no descriptor comes.
    """

    extent: int
    first: int = 0
    count: int = 0
    slot_bytes: int = 0
    generations_offset: int = 0
    bytes: int = 0


DIRECT = 1 << 31
"""From here on a slot's number is none of a slot: see Hit."""


class Hit(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group: u32 arrays of block indices, slots and generations.

    A slot that is being filled from a lower tier has one generation less until it can be read,
    and never gets the leased one if that fails. Of a block that workers read from a peer the slot
    is DIRECT + its position in a fetch, and the generation is the fetch's number.
    """

    indices: bytes
    slots: bytes
    generations: bytes


class Granted(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a lookup. lease 0: nothing is present. Valid for lease_ms from the asking.

    sources: tiers by name -> how many of the blocks are being read from there.
    capped: the engine's leases are at their limit, or leases have the memory that this takes: ask
    again when some have ended.
    kept: how many leading blocks the store has itself by then; None: all of them.
    missed: why the hit ends where it does (MISSES), "" for at the end, and up to which block.
    """

    ask: int
    lease: int
    lease_ms: int
    hits: tuple[Hit, ...]
    sources: dict[str, int] = msgspec.field(default_factory=dict)
    capped: bool = False
    kept: Count | None = None
    missed: tuple[str, int] = ("", 0)


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A block that was there before: its key, its parent's or b"", token ids (u32), and where."""

    key: bytes
    parent: bytes
    tokens: bytes
    memory: bool
    disk: bool


class Page(msgspec.Struct, frozen=True, array_like=True):
    """Some blocks of a snapshot, parents first. last: there are no more."""

    blocks: tuple[Held, ...] = ()
    last: bool = False


class Answers(Message, frozen=True):
    """One batch from the store to a scheduler half.

    Of the keys it names those that this engine stored, asked for, or was told of before, each once
    in a message, and up to NEWS_MAX that are not heard. lost: more were waiting than the store
    keeps for an engine; these are not told. page: of its snapshot, what there is after all that.
    """

    granted: tuple[Granted, ...] = ()
    credits: bytes = b""  # u32 array of slots
    added: tuple[bytes, ...] = ()  # keys that became ready in the namespace's memory
    removed: tuple[bytes, ...] = ()  # keys that left it
    disk_added: tuple[bytes, ...] = ()  # keys that can be read on disk now, for who wants events
    disk_removed: tuple[bytes, ...] = ()  # keys that cannot any more
    lost: int = 0
    page: Page | None = None


class Places(Message, frozen=True):
    """Blocks of a fetch that can be read now: u32 positions, and where each is at the peer.

    numbers: u32 slots of its exporter's region that begins at base. agent: the exporter; metadata:
    how to reach it, unless the fetch was told before. Or, as in the side channel's Have, engine
    blocks, as many for each position: engine: its number there; ranks: its memory, unless the
    fetch has named it before. push: none, as the peer writes them: say where (Target), once they
    may be written.
    """

    fetch: int
    positions: bytes = b""
    numbers: bytes = b""
    agent: str = ""
    metadata: bytes = b""
    base: int = 0
    engine: int | None = None
    ranks: tuple[RankPages, ...] = ()
    push: bool = False


class Passed(Message, frozen=True):
    """Verdict on blocks of a fetch (u32 positions) that all ranks have: valid or not.

    written: not valid, and the peer may still write there.
    """

    fetch: int
    positions: bytes
    ok: bool
    written: bool = False


class Coming(Message, frozen=True):
    """Blocks of a lease are still arriving from a peer.

    quiet_ms: time since a block arrived, or the peer reported computing. computed_ms: time since
    that report; None: there was none.
    """

    lease: int
    quiet_ms: Count
    computed_ms: Count | None = None


class BlockVersions(Message, frozen=True):
    """A u32 for each of an engine's blocks, in the memory whose descriptor comes along.

    The scheduler half adds one before a block gets other content: whoever has read it meanwhile
    finds another number than before, and uses nothing of it.
    """

    blocks: int


class Detach(Message, frozen=True):
    """The session is over: finish copies, close, connect again.

    Of an engine: this part of it closes the connection; reason "": it ends in order.
    """

    reason: Text


class Report(Message, frozen=True):
    """Answer to a Query, as JSON."""

    body: bytes


ToStore = (Hello | Step | Mapped | Stored | Loading | Loaded) | (
    Arrived | Target | Serves | Query | Detach
)
ToWorker = Extent | Coming | Places | Passed
ToEngine = ToWorker | Welcome | Refused | Answers | BlockVersions | Detach | Report

MISSES = (
    *("never_seen", "evicted", "not_stored", "pending", "too_late", "too_slow"),
    *("no_slot", "lease_limit", "load_failed", "no_store", "tail"),
)
EVENTS = frozenset(
    {
        *("deferred", "deferred_steps", "timed_out", "load_failed", "detached", "store_declined"),
        *("transfer_refused", "hand_over_unstored", "load_given_up", "events_untold"),
        "hint_refused",
    }
)
