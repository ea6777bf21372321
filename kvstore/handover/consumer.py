"""The side of a hand-over that fetches blocks: into landing slots, checked, then into its own.

Of each wanted block:

    WANTED --offered--> OFFERED --a load claims it, with a slot of ours--> CLAIMED
    CLAIMED --readable there, a landing slot here; pulled--> MOVING --read----> LANDED
    CLAIMED --a landing slot here, told to the peer; pushed--> MOVING --written--> LANDED
    LANDED --its sum is right, copied to its slot--> CHECKED --the peer: lease held--> DONE, ready
    any --failed, late, lease over, peer gone--> DONE, not ready; its load fails there

Of a direct fetch, which is claimed by its number, and whose blocks workers read themselves:

    OFFERED --claimed--> CLAIMED --readable there--> MOVING --read by all ranks--> CHECKED --> DONE
    CHECKED --was to be read in an engine's memory, which has something else--> CLAIMED
    CLAIMED --pushed: writable at all ranks, the peer is told--> MOVING --written--> CHECKED

Landing slots are never visible outside: bytes that arrive late, or from a peer that should not
write, land there. One that may still be written when its block is given up is quarantined.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvstore.core.errors import ProtocolError, TierIOError
from kvstore.core.layout import RankPages
from kvstore.core.types import BlockKey, Chain, JobId, JobResult, LookupResult, Slot, TransferJob
from kvstore.handover.direct_fetches import DirectFetches
from kvstore.handover.jobs import Source
from kvstore.handover.transfers import (
    Check,
    EngineRead,
    LandingTurns,
    Regions,
    SlotRead,
    Tag,
    Transfers,
)
from kvstore.wire import peer as m
from kvstore.wire.framing import Message, u32

ANSWER_NS = 1_000_000_000
STALL_NS = 10_000_000_000
LEASE_MS = 30_000
EXTEND_NS = 1_000_000_000  # between heartbeats; the answer says that the peer still computes
EXTEND_NS_MIN = 10_000_000
ENGINE, OTHER = "gpu", "other"
TIERS = ("cpu", "nvme", "prefill", ENGINE)  # of a peer's, and how they are counted

FromProducer = m.Offer | m.Have | m.Resident | m.Computing | m.Valid | m.End


class Waits(NamedTuple):
    """How long a fetch may take: without an arrival, and while its peer computes."""

    quiet_ns: int = 2_000_000_000
    limit_ns: int = 60_000_000_000


WAITS = Waits()


class State(enum.Enum):
    """State of a wanted block; see the top of this module."""

    WANTED = "wanted"
    OFFERED = "offered"
    CLAIMED = "claimed"
    MOVING = "moving"
    LANDED = "landed"
    CHECKED = "checked"
    DONE = "done"


UNCLAIMED = frozenset({State.WANTED, State.OFFERED})
OPEN = frozenset(State) - {State.DONE}
LANDING = frozenset({State.LANDED, State.CHECKED})
PULLED = LANDING | {State.MOVING}


class Block(msgspec.Struct, eq=False):
    """One wanted block."""

    key: BlockKey
    state: State = State.WANTED
    slot: Slot | None = None
    load: tuple[JobId, int] | None = None  # and its number in there
    landing: int | None = None
    place: tuple[m.Region, int] | None = None  # and its number there, once it can be read
    resident: tuple[int, list[int]] | None = None  # or an engine of the peer's, and its blocks
    by_engine: bool = False  # written from the memory of the peer's engine
    sum: int = 0


class Fetched(msgspec.Struct):
    """Counts of fetches: events by name, and blocks by the tier in which their peer had them."""

    events: Counter[str] = msgspec.field(default_factory=Counter)
    blocks: Counter[str] = msgspec.field(default_factory=Counter)


class Fetch(msgspec.Struct, eq=False):
    """Blocks wanted from one peer by one Want; direct: by workers, into engine memory."""

    number: int
    peer: int
    blocks: list[Block]
    heard_ns: int  # its start, then when its peer last answered
    extend_ns: int
    request: str
    push: bool
    direct: bool
    arrived_ns: int = 0  # the last block
    waited_ns: int = 0  # when a load was last known to wait for it
    left: int = 0  # blocks that are not DONE
    offered: bool = False
    computed_ns: int | None = None  # when its peer said that it still computes
    released: bool = False
    tiers: dict[int, str] = {}  # position -> the peer's tier
    ranks_told: bool = False  # to the peer: where it writes
    ended: bool = False  # the peer writes nothing any more
    engines: dict[int, Sequence[RankPages]] = {}  # of the peer's, whose memory is known

    def __post_init__(self) -> None:
        """Start with all blocks open."""
        self.arrived_ns = self.waited_ns = self.heard_ns
        self.left = len(self.blocks)

    def tag(self, position: int) -> Tag:
        """Name one block in the store."""
        return Tag(self.peer, self.number, position)

    def take(self, offer: m.Offer) -> None:
        """Note which blocks the peer has. Raises ProtocolError for a second or invalid offer."""
        offered = m.positions_of(offer.positions, len(self.blocks))
        if self.offered or len(offer.which) != len(offered):
            raise ProtocolError(
                f"a second offer, or {len(offer.which)} tiers of {len(offered)} blocks"
            )
        self.offered = True
        for position, tier in zip(offered, offer.which, strict=True):
            if tier >= len(offer.tiers):
                raise ProtocolError(f"tier {tier}, expected below {len(offer.tiers)}")
            self.tiers[position] = offer.tiers[tier]
            if self.blocks[position].state is State.WANTED:  # else it was given up before
                self.blocks[position].state = State.OFFERED

    def learn(self, message: m.Resident) -> Collection[int]:
        """Note which blocks are in an engine's memory, and return their positions.

        Raises ProtocolError for an unknown engine, too many, or a fetch that workers do not read.
        """
        if not self.direct or self.push:
            raise ProtocolError(f"job {self.number} was not asked to be read in an engine")
        if message.ranks and len(self.engines) < m.ENGINES_MAX:
            self.engines[message.engine] = message.ranks
        if message.engine not in self.engines:
            raise ProtocolError(
                f"engine {message.engine} without its memory, or more than {m.ENGINES_MAX} of them"
            )
        found = m.residents_of(message, len(self.blocks))
        for position, blocks in found.items():
            self.blocks[position].resident = message.engine, blocks
        return found

    def written(self, have: m.Have, positions: Sequence[int]) -> None:
        """Note that the peer has written blocks, some from an engine. Raises ProtocolError."""
        for position in m.positions_of(have.given, len(self.blocks)):
            self.blocks[position].by_engine = self.push
        for position in positions:
            self.blocks[position].state = State.CHECKED

    def tier_of(self, position: int) -> str:
        """Name the peer's tier that a block came from, as it is counted."""
        block = self.blocks[position]
        if block.by_engine or block.resident is not None:
            return ENGINE
        return self.tiers[position] if self.tiers[position] in TIERS else OTHER

    def slot_reads(self, positions: Iterable[int]) -> Iterator[tuple[list[int], SlotRead]]:
        """Gather reads of the peer's slots by its extent: positions, and a read of them."""
        reads: dict[m.Region, tuple[list[int], SlotRead]] = {}
        for position in positions:
            block = self.blocks[position]
            if block.place is not None:
                region, slot = block.place
                found, read = reads.setdefault(region, ([], SlotRead(region, [], [])))
                found.append(position)
                read.numbers.append(slot)
                if block.landing is not None:
                    read.landing.append(block.landing)
        yield from reads.values()

    def engine_reads(self, positions: Iterable[int]) -> Iterator[EngineRead]:
        """Gather reads of engines' memory, by engine and how many engine blocks a block has."""
        reads: dict[tuple[int, int], EngineRead] = {}
        for position in positions:
            resident = self.blocks[position].resident
            if resident is not None:
                engine, found = resident
                read = EngineRead(engine, self.engines[engine], {})
                reads.setdefault((engine, len(found)), read).blocks[position] = found
        yield from reads.values()

    def fills(
        self, targets: Mapping[int, list[int]], ranks: Sequence[RankPages]
    ) -> Iterator[m.Fill]:
        """Name the engine blocks to write to, by how many of them a block has; the ranks once."""
        sizes: dict[int, list[int]] = {}
        for position, found in targets.items():
            if self.blocks[position].state is State.CLAIMED:
                self.blocks[position].state = State.MOVING
                sizes.setdefault(len(found), []).append(position)
        for positions in sizes.values():
            blocks = u32([block for position in positions for block in targets[position]])
            new = () if self.ranks_told else tuple(ranks)
            self.ranks_told = True
            yield m.Fill(self.number, u32(positions), blocks, new)


class _Load(msgspec.Struct, eq=False):
    left: int
    done: list[bool]


class Loads:
    """Jobs that blocks are fetched for; one ends with the last of its blocks."""

    def __init__(self) -> None:
        """Start without any."""
        self._open: dict[JobId, _Load] = {}
        self._results: list[JobResult] = []

    def begin(self, job: TransferJob) -> None:
        """Open a job; it has a result once all its blocks have ended."""
        self._open[job.job_id] = _Load(len(job.keys), [False] * len(job.keys))

    def ended(self, part: tuple[JobId, int], *, ok: bool) -> None:
        """Record the end of one of a job's blocks."""
        load = self._open[part[0]]
        load.done[part[1]] = ok
        load.left -= 1
        if load.left == 0:
            del self._open[part[0]]
            done = load.done.index(False) if False in load.done else len(load.done)
            error = None if done == len(load.done) else TierIOError("a block did not arrive")
            self._results.append(JobResult(part[0], done, error))

    def take_results(self) -> list[JobResult]:
        """Return the results of jobs that have ended, once each."""
        results, self._results = self._results, []
        return results


class Connections(Protocol):
    """The connections to peers; fetched: what their consumers count together."""

    fetched: Fetched

    def say(self, number: int, message: Message) -> None:
        """Send on a connection that was made, once its peer has accepted it."""
        ...

    def reached_at(self, number: int) -> tuple[str, bytes]:
        """Return the name and metadata of the exporter at the other end; empty if it is gone."""
        ...


class Consumer:
    """All fetches into one namespace, of which it is a tier: a block that is offered is a HIT."""

    def __init__(
        self,
        peers: Connections,
        source: Source,
        transfers: Transfers,
        direct: DirectFetches,
        waits: Waits = WAITS,
    ) -> None:
        """source: the namespace. direct: tells workers what they may read or have written."""
        self.name = "peer"
        self._peers = peers
        self._source = source
        self._transfers = transfers
        self._direct = direct
        self._waits = waits
        self._extend_ns = max(EXTEND_NS_MIN, min(EXTEND_NS, waits.quiet_ns // 4))
        self._digest = source.layout.digest
        self._groups = len(source.layout.rules)
        self._slot_bytes = source.layout.slot_bytes
        self._landing = transfers.landing(self._digest, self._slot_bytes)
        self._fetches: dict[int, Fetch] = {}
        self._located: dict[BlockKey, Tag] = {}
        self._regions = Regions()
        self._loads = Loads()
        self._turns = LandingTurns(self._landing)
        self._introduced: dict[int, bytes] = {}  # peers that know our exporter's metadata
        self._late_reads: dict[Tag, int] = {}  # landing slots that a read may still fill
        self._late_writes: dict[int, list[int]] = {}  # by fetch: those that its peer may write
        self._late_fills: dict[int, list[int]] = {}  # by fetch: positions of which that is so
        self._next = 1
        self._now_ns = 0
        self.counts, self.fetched = peers.fetched.events, peers.fetched.blocks

    # Asking

    def want(self, peer: int, want: m.Want, now_ns: int, *, direct: bool = False) -> int:
        """Ask a peer for blocks; return the fetch's number, which is the message's job, too.

        direct: to be claimed with claim(), and not offered to others.
        """
        self._now_ns = now_ns
        if not direct:
            self._landing.open()
        chain = Chain(want.hashes, want.width, self._groups, want.scope)
        number, self._next = self._next, self._next + 1
        blocks = [Block(chain.key(g, index)) for g, index in m.wanted_of(want, self._groups)]
        fetch = Fetch(
            number, peer, blocks, now_ns, now_ns + self._extend_ns, want.request, want.push, direct
        )
        self._fetches[number] = fetch
        for position, block in enumerate(() if direct else blocks):
            self._located.setdefault(block.key, fetch.tag(position))
        asked = msgspec.structs.replace(want, job=number, lease_ms=LEASE_MS, direct=direct)
        self._peers.say(peer, asked)
        return number

    def claimed(self, number: int) -> None:
        """Claim nothing more of a fetch: what is still unclaimed is given up."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            self._give_up(fetch, UNCLAIMED)
            self._settle(fetch)

    def offered(self, number: int) -> dict[int, str] | None:
        """Return the tiers of offered blocks by position; None before the peer has answered."""
        fetch = self._fetches.get(number)
        if fetch is None:  # it is over
            return {}
        return dict(fetch.tiers) if fetch.offered else None

    def claim(self, number: int, positions: Collection[int]) -> None:
        """Workers will read these blocks of a direct fetch; those lost since the offer fail now."""
        fetch = self._fetches.get(number)
        wanted = [p for p in positions if fetch and fetch.blocks[p].state is State.OFFERED]
        for position in {*positions}.difference(wanted):
            self._direct.passed(self._digest, number, position, ok=False, written=False)
        if fetch is not None:
            for position in wanted:
                fetch.blocks[position].state = State.CLAIMED
            if fetch.push:
                self._direct.push(self._digest, number)
            self._pass_on(fetch, wanted)
            self.claimed(number)

    def fill(
        self, number: int, targets: Mapping[int, list[int]], ranks: Sequence[RankPages]
    ) -> None:
        """A peer may write blocks of a direct fetch to these engine blocks, of all these ranks."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            for message in fetch.fills(targets, ranks):
                self._peers.say(fetch.peer, message)

    def cancel(self, number: int, *, now: bool = False) -> None:
        """Cancel a direct fetch. now: do not wait for writes in flight."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            self._give_up(fetch, OPEN)
            self._settle(fetch)
        if now:
            self._late_fills.pop(number, None)

    def arrived(self, number: int, positions: Collection[int], now_ns: int, *, ok: bool) -> None:
        """All workers have read these blocks of a direct fetch, or one could not.

        A block that could not be read in an engine's memory is in a slot, too.
        """
        fetch = self._fetches.get(number)
        if fetch is None:
            return
        if fetch.push:  # its load has failed
            self.cancel(number)
            return
        fetch.heard_ns = now_ns
        fetch.arrived_ns = now_ns if ok else fetch.arrived_ns
        moving = [p for p in positions if fetch.blocks[p].state is State.MOVING]
        unread = [p for p in moving if not ok and fetch.blocks[p].resident is not None]
        for position in moving:
            if ok or position in unread:
                fetch.blocks[position].state = State.CHECKED
            else:
                self._done(fetch, position, ok=False)
        self._confirm(fetch, moving if ok else (), unread)

    def withdraw(self, request: str) -> None:
        """Claim nothing more for a request; blocks that are being loaded still arrive."""
        for number in [n for n, fetch in self._fetches.items() if fetch.request == request]:
            self.claimed(number)

    def heard(self, peer: int, now_ns: int, patience_ns: int = 0) -> None:
        """A peer is there, or it takes so much longer until it can answer."""
        for fetch in self._fetches.values():
            if fetch.peer == peer:
                fetch.heard_ns = now_ns + patience_ns

    # Answers of a producer

    def on_message(self, peer: int, message: Message, now_ns: int) -> None:
        """Act on one message of a peer. Raises ProtocolError for a wrong one."""
        self._now_ns = now_ns
        if not isinstance(message, FromProducer):
            raise ProtocolError(f"{type(message).__name__} is not for a consumer")
        if isinstance(message, m.Have):  # regions are sent once, with whatever comes first
            self._regions.learn(peer, message.regions)
        fetch = self._fetches.get(message.job)
        if fetch is None:  # given up before
            if isinstance(message, m.End):
                self._on_end_of_writes(message)
            return
        if fetch.peer != peer:
            raise ProtocolError(f"job {message.job} is not this peer's")
        if isinstance(message, m.Computing):
            self._computing(fetch, now_ns)
            return
        fetch.heard_ns = now_ns
        self._answered(fetch, message)
        self._settle(fetch)

    def _answered(self, fetch: Fetch, message: FromProducer) -> None:
        match message:
            case m.Offer():
                fetch.take(message)
                self._give_up(fetch, {State.WANTED})
            case m.Have():
                self._have(fetch, message)
            case m.Resident():
                self._pass_on(fetch, fetch.learn(message))
            case m.Valid():
                self._valid(fetch, message)
            case m.End(reason=reason):
                fetch.ended = reason not in m.MAY_BE_WRITTEN
                self._fail(fetch, "ended")
                self._on_end_of_writes(message)

    def _computing(self, fetch: Fetch, now_ns: int) -> None:
        """Wait for a peer that computes, up to a limit: its engine may hang."""
        on_its_way = LANDING if fetch.push else PULLED
        if any(block.state in on_its_way for block in fetch.blocks):
            return  # these blocks have to arrive
        waited_for = now_ns - fetch.waited_ns < LEASE_MS * 1_000_000
        if waited_for and now_ns - fetch.arrived_ns < self._waits.limit_ns:
            fetch.heard_ns = fetch.computed_ns = now_ns

    def progress(
        self, number: int | None, keys: Iterable[BlockKey], now_ns: int
    ) -> tuple[int, int | None] | None:
        """Return how long ago a fetch last went on, and how long ago its peer still computed.

        Both in milliseconds; a fetch goes on when a block arrives or its peer says that it
        computes. The call tells the fetch that a load waits for it. number: None for the fetch
        that brings the first of these blocks that is still fetched. None if there is none.
        """
        if number is None:
            tags = (self._located.get(key) for key in keys)
            number = next((tag.job for tag in tags if tag is not None), None)
        fetch = None if number is None else self._fetches.get(number)
        if fetch is None:
            return None
        fetch.waited_ns = now_ns
        computed_ns = fetch.computed_ns
        heard_ns = fetch.arrived_ns if computed_ns is None else max(fetch.arrived_ns, computed_ns)
        ago_ms = None if computed_ns is None else (now_ns - computed_ns) // 1_000_000
        return (now_ns - heard_ns) // 1_000_000, ago_ms

    def _on_end_of_writes(self, end: m.End) -> None:
        """Free what a peer may have been writing, unless it may still do so."""
        if end.reason not in m.MAY_BE_WRITTEN:
            self._landing.give_back(self._late_writes.pop(end.job, ()))
            for position in self._late_fills.pop(end.job, ()):
                self._direct.passed(self._digest, end.job, position, ok=False, written=False)

    def on_exporter_lost(self) -> None:
        """Our exporter was restarted: no transfer of the old process writes any more."""
        for fetch in list(self._fetches.values()):
            self._fail(fetch, "exporter")
            self._settle(fetch)
        for slots in (self._late_reads.values(), *self._late_writes.values()):
            self._landing.give_back(list(slots))
        self._late_reads, self._late_writes = {}, {}

    def on_peer_lost(self, peer: int) -> None:
        """A connection has ended: all that was wanted over it fails."""
        self._regions.forget(peer)
        self._introduced.pop(peer, None)
        for fetch in [fetch for fetch in self._fetches.values() if fetch.peer == peer]:
            self._fail(fetch, "lost")
            fetch.released = True
            self._settle(fetch)
        self._turns.forget(peer)

    @property
    def open(self) -> int:
        """Count the open fetches."""
        return len(self._fetches)

    @property
    def in_use(self) -> bool:
        """Tell whether a fetch is open, or a landing slot is not free."""
        return bool(self._fetches or self.quarantined or self._landing.used)

    @property
    def asked(self) -> set[int]:
        """The peers of open fetches."""
        return {fetch.peer for fetch in self._fetches.values()}

    @property
    def quarantined(self) -> int:
        """Count the landing slots that were given up and may still be written."""
        return len(self._late_reads) + sum(map(len, self._late_writes.values()))

    @property
    def crowded(self) -> bool:
        """Tell whether more than half of the landing slots are in quarantine."""
        return 2 * self.quarantined > self._landing.count

    @property
    def quarantined_bytes(self) -> int:
        """Landing memory in quarantine."""
        return self.quarantined * self._slot_bytes

    @property
    def landing_bytes(self) -> int:
        """Landing memory that is not free, quarantined or not."""
        return self._landing.used * self._slot_bytes

    def _have(self, fetch: Fetch, have: m.Have) -> None:
        landed, positions = [], []
        for position, (extent, slot), summed in m.places_of(have, len(fetch.blocks)):
            block = fetch.blocks[position]
            positions.append(position)
            region = self._regions.get(fetch.peer, extent, slot)
            waits = block.place is None and block.state is State.CLAIMED
            if waits and not fetch.push and not fetch.direct:
                self._turns.queue(fetch.tag(position))
            block.place, block.sum = (region, slot), summed
            if fetch.push and block.state is State.MOVING:
                landed.append(position)
                fetch.arrived_ns = self._now_ns
        if fetch.direct:
            fetch.written(have, landed)
            self._confirm(fetch, landed)
            self._pass_on(fetch, positions)
        else:
            self._check(fetch, landed)

    def _valid(self, fetch: Fetch, valid: m.Valid) -> None:
        positions = m.positions_of(valid.positions, len(fetch.blocks))
        again = m.positions_of(valid.again, len(fetch.blocks))
        for position in (*positions, *again):
            if fetch.blocks[position].state is not State.CHECKED:
                raise ProtocolError(f"position {position} was not confirmed")
        for position in again:  # the peer sends their places anew
            block = fetch.blocks[position]
            block.state, block.resident = State.CLAIMED, None
        self.counts["fetched"] += len(positions)
        for position in positions:
            self.fetched[fetch.tier_of(position)] += 1
            self._done(fetch, position, ok=True)

    # Time, and ends of transfers

    def tick(self, now_ns: int) -> None:
        """Give up what is late, keep leases alive, and go on where landing slots are free."""
        self._now_ns = now_ns
        for fetch in list(self._fetches.values()):
            limit_ns = max(STALL_NS, self._waits.quiet_ns) if fetch.offered else ANSWER_NS
            if now_ns - fetch.heard_ns >= limit_ns:
                self._fail(fetch, "late")
            elif now_ns >= fetch.extend_ns:
                fetch.extend_ns = now_ns + self._extend_ns
                self._peers.say(fetch.peer, m.Extend(fetch.number, LEASE_MS))
            self._settle(fetch)
        self._move()

    def moved(self, tags: Sequence[Tag], *, ok: bool) -> None:
        """A read of one fetch into landing slots has ended."""
        late = [self._late_reads.pop(tag) for tag in tags if tag in self._late_reads]
        self._landing.give_back(late)
        fetch = self._fetches.get(tags[0].job)
        if fetch is None:
            return
        fetch.heard_ns = self._now_ns
        fetch.arrived_ns = self._now_ns if ok else fetch.arrived_ns
        moving = [t.position for t in tags if fetch.blocks[t.position].state is State.MOVING]
        if ok:
            self._check(fetch, moving)
        else:
            for position in moving:
                self._done(fetch, position, ok=False)
        self._settle(fetch)

    def checked(self, tags: Sequence[Tag], right: Sequence[bool]) -> None:
        """Blocks were copied to their slots; right: their sums are as they should be."""
        fetch = self._fetches[tags[0].job]
        confirm = []
        for tag, ok in zip(tags, right, strict=True):
            block = fetch.blocks[tag.position]
            if ok and not fetch.released:
                block.state = State.CHECKED
                confirm.append(tag.position)
                self._leave_landing(fetch, block)
            else:
                self.counts["corrupt"] += not ok
                self._done(fetch, tag.position, ok=False)
        self._confirm(fetch, confirm)
        self._move()

    # As a tier

    def lookup(self, key: BlockKey) -> LookupResult:
        """HIT for what a peer offers; RETRY until it has answered."""
        tag = self._located.get(key)
        if tag is None:
            return LookupResult.MISS
        state = self._fetches[tag.job].blocks[tag.position].state
        return LookupResult.RETRY if state is State.WANTED else LookupResult.HIT

    def submit(self, job: TransferJob) -> None:
        """Fetch offered blocks into slots."""
        self._loads.begin(job)
        for position, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            tag = self._located.get(key)
            block = None if tag is None else self._fetches[tag.job].blocks[tag.position]
            if tag is None or block is None or block.state is not State.OFFERED:
                self._loads.ended((job.job_id, position), ok=False)
                continue
            block.state, block.slot, block.load = State.CLAIMED, slot, (job.job_id, position)
            if block.place is not None or self._fetches[tag.job].push:
                self._turns.queue(tag)
        self._move()

    def poll(self) -> list[JobResult]:
        """Take the results of loads that are over."""
        return self._loads.take_results()

    def discard(self, keys: Collection[BlockKey]) -> None:
        """Forget what was offered under these keys."""
        for key in keys:
            tag = self._located.pop(key, None)
            if tag is not None:
                fetch = self._fetches[tag.job]
                if fetch.blocks[tag.position].state in UNCLAIMED:
                    self._done(fetch, tag.position, ok=False)
                self._settle(fetch)

    def touch(self, key: BlockKey) -> None:
        """Do nothing: the peer decides what it keeps."""

    def clear(self) -> None:
        """Forget all offers; what is being fetched is not ready when it ends."""
        for fetch in list(self._fetches.values()):
            self._fail(fetch, "cleared")
            self._settle(fetch)

    drain = close = clear  # without waiting: what has not arrived does not count

    # Of one fetch

    def _move(self) -> None:
        """Start what can be moved now into free landing slots, in the order that it came."""
        for number, slots in self._turns.next(self._is_claimed):
            fetch = self._fetches[number]
            for position, slot in slots.items():
                fetch.blocks[position].landing = slot
                fetch.blocks[position].state = State.MOVING
            (self._land if fetch.push else self._read)(fetch, list(slots))

    def _is_claimed(self, tag: Tag) -> bool:
        fetch = self._fetches.get(tag.job)
        return fetch is not None and fetch.blocks[tag.position].state is State.CLAIMED

    def _pass_on(self, fetch: Fetch, positions: Collection[int]) -> None:
        """Let workers read what can be read now."""
        found = []
        for position in () if fetch.push else positions:
            block = fetch.blocks[position]
            if block.state is State.CLAIMED and (block.resident or block.place):
                block.state = State.MOVING
                found.append(position)
        for each in fetch.engine_reads(found):
            self._direct.tell_engine(self._digest, fetch.number, each)
        agent = self._peers.reached_at(fetch.peer)
        in_slots = [position for position in found if fetch.blocks[position].resident is None]
        for of, read in fetch.slot_reads(in_slots):
            self._direct.tell(self._digest, fetch.number, agent, read.region, of, read.numbers)

    def _read(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Read blocks of one fetch, in one go for each extent of the peer's."""
        agent, _ = self._peers.reached_at(fetch.peer)
        for of, read in fetch.slot_reads(positions):
            self._transfers.read(
                [fetch.tag(position) for position in of], agent, self._digest, read
            )

    def _land(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Tell the peer where to write blocks of one fetch."""
        blocks = [fetch.blocks[position] for position in positions]
        slots = u32([block.landing for block in blocks if block.landing is not None])
        region, metadata = self._landing.region()
        known = self._introduced.get(fetch.peer) == metadata
        self._introduced[fetch.peer] = metadata
        new = b"" if known else metadata
        self._peers.say(fetch.peer, m.Land(fetch.number, region, u32(positions), slots, new))

    def _check(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Check and copy landed blocks."""
        checks = []
        for position in positions:
            block = fetch.blocks[position]
            block.state = State.LANDED
            if block.landing is not None and block.slot is not None:
                check = Check(block.key, block.landing, block.sum, block.slot)
                views = self._landing.view(block.landing), self._source.view(block.slot)
                checks.append((check, *views))
        if checks:
            self._transfers.check([fetch.tag(p) for p in positions], self._digest, checks)

    def _done(self, fetch: Fetch, position: int, *, ok: bool) -> None:
        """End a block: it is ready, or will not be; nothing of ours uses its slots any more."""
        block, tag = fetch.blocks[position], fetch.tag(position)
        late = self._leave_landing(fetch, block)
        if late is not None and fetch.push:
            self._late_writes.setdefault(fetch.number, []).append(late)
        elif late is not None:
            self._late_reads[tag] = late
            self._transfers.abandon(tag)
        claimed = block.state in {State.CLAIMED, State.MOVING, State.CHECKED}
        written = fetch.push and block.state is State.MOVING and not fetch.ended
        block.state = State.DONE
        fetch.left -= 1
        if self._located.get(block.key) == tag:
            del self._located[block.key]
        if block.load is not None:
            self._loads.ended(block.load, ok=ok)
        if fetch.direct and claimed:
            if written:
                self._late_fills.setdefault(fetch.number, []).append(position)
            self._direct.passed(self._digest, fetch.number, position, ok=ok, written=written)

    def _confirm(self, fetch: Fetch, positions: Sequence[int], unread: Sequence[int] = ()) -> None:
        """Ask whether the lease of what has arrived held until now."""
        if positions or unread:
            self._peers.say(fetch.peer, m.Confirm(fetch.number, u32(positions), u32(unread)))
        self._settle(fetch)

    def _leave_landing(self, fetch: Fetch, block: Block) -> int | None:
        """Take a block's landing slot from it; return the slot if it may still be written."""
        landing, block.landing = block.landing, None
        if landing is None:
            return None
        self._turns.left(fetch.peer)
        if block.state is State.MOVING:
            return landing
        self._landing.give_back([landing])
        return None

    def _fail(self, fetch: Fetch, event: str) -> None:
        """Give up all blocks; a copy into a slot of ours that is under way ends first."""
        self.counts[event] += 1
        self._give_up(fetch, OPEN - {State.LANDED})

    def _give_up(self, fetch: Fetch, states: Collection[State]) -> None:
        """End the blocks in these states as not ready."""
        for position, block in enumerate(fetch.blocks):
            if block.state in states:
                self._done(fetch, position, ok=False)

    def _settle(self, fetch: Fetch) -> None:
        """Release and forget a fetch whose blocks have all ended."""
        if fetch.left or self._fetches.pop(fetch.number, None) is None:
            return
        if not fetch.released:
            self._peers.say(fetch.peer, m.Release(fetch.number))
