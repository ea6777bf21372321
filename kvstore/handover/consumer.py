"""The side of a hand-over that fetches blocks: into landing slots, checked, then into its own.

Of each wanted block:

    WANTED --offered--> OFFERED --a load claims it, with a slot of ours--> CLAIMED
    CLAIMED --readable there, a landing slot here; pulled--> MOVING --read----> LANDED
    CLAIMED --a landing slot here, told to the peer; pushed--> MOVING --written--> LANDED
    LANDED --its sum is right, copied to its slot--> CHECKED --the peer: lease held--> DONE, ready
    any --failed, late, lease over, peer gone--> DONE, not ready; its load fails there

Of a direct fetch, which somebody claims by its number, and whose blocks workers read themselves:

    OFFERED --claimed--> CLAIMED --readable there--> MOVING --read by all ranks--> CHECKED --> DONE
    CHECKED --was to be read in an engine's memory, which has something else--> CLAIMED
    CLAIMED --pushed: writable at all ranks, the peer is told--> MOVING --written--> CHECKED

Landing slots are never visible to anybody: what arrives late, or from somebody who should not
write, lands there. One that may still be written when its block is given up is quarantined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages
from kvstore.core.types import BlockKey, Chain, JobResult, LookupResult, TransferJob
from kvstore.handover.fetches import (
    WAITS,
    Block,
    Check,
    Fetch,
    Fetched,
    Landing,
    Loads,
    Regions,
    State,
    Tag,
    Turns,
    Waits,
    Work,
    engine_reads_of,
    fills_of,
    reads_of,
)
from kvstore.wire import peer as m
from kvstore.wire.framing import Message, u32

ANSWER_NS = 1_000_000_000
STALL_NS = 10_000_000_000
LEASE_MS = 30_000
EXTEND_NS = 1_000_000_000  # a heartbeat is answered by who computes, or does not know the fetch
EXTEND_NS_MIN = 10_000_000
UNCLAIMED = frozenset({State.WANTED, State.OFFERED})
OPEN = frozenset(State) - {State.DONE}
LANDING = frozenset({State.LANDED, State.CHECKED})
PULLED = LANDING | {State.MOVING}

Send = Callable[[int, Message], None]
FromProducer = m.Offer | m.Have | m.Resident | m.Computing | m.Valid | m.End


class Consumer:
    """All fetches into one namespace. To its tiering it is a tier: what was offered is here."""

    def __init__(
        self,
        work: Work,
        landing: Landing,
        send: Send,
        groups: int,
        fetched: Fetched | None = None,
        waits: Waits = WAITS,
    ) -> None:
        """groups: KV groups of the namespace. fetched: what is counted; consumers may share it."""
        self._waits = waits
        self._extend_ns = max(EXTEND_NS_MIN, min(EXTEND_NS, waits.quiet_ns // 4))
        self.name = "peer"
        self._work = work
        self._landing = landing
        self._send = send
        self._groups = groups
        self._fetches: dict[int, Fetch] = {}
        self._located: dict[BlockKey, Tag] = {}
        self._regions = Regions()
        self._loads = Loads()
        self._turns = Turns(landing)
        self._introduced: dict[int, bytes] = {}  # peers that know our exporter's metadata
        self._late_reads: dict[Tag, int] = {}  # landing slots that a read may still fill
        self._late_writes: dict[int, list[int]] = {}  # by fetch: those that its peer may write
        self._late_fills: dict[int, list[int]] = {}  # by fetch: positions of which that is so
        self._next = 1
        self._now_ns = 0
        counted = Fetched() if fetched is None else fetched
        self.counts, self.fetched = counted.events, counted.blocks

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
        extend_ns, left = now_ns + self._extend_ns, len(blocks)
        fetch = Fetch(
            number, peer, blocks, want.push, now_ns, extend_ns, now_ns, now_ns, left, want.request
        )
        fetch.direct = direct
        self._fetches[number] = fetch
        for position, block in enumerate(() if direct else blocks):
            self._located.setdefault(block.key, Tag(number, position))
        self._send(peer, replace(want, job=number, lease_ms=LEASE_MS, direct=direct))
        return number

    def claimed(self, number: int) -> None:
        """Nothing more will be loaded of a fetch: what is offered and not claimed is let go of."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            self._give_up(fetch, UNCLAIMED)
            self._settle(fetch)

    def offered(self, number: int) -> dict[int, str] | None:
        """Say what is to be had of a fetch, and in which tier; None before its peer answered."""
        fetch = self._fetches.get(number)
        if fetch is None:  # it is over
            return {}
        return dict(fetch.tiers) if fetch.offered else None

    def claim(self, number: int, positions: Collection[int]) -> None:
        """Workers will read these of a direct fetch; what has failed since its offer is told."""
        fetch = self._fetches.get(number)
        wanted = [p for p in positions if fetch and fetch.blocks[p].state is State.OFFERED]
        for position in {*positions}.difference(wanted):
            self._work.passed(number, position, ok=False, written=False)
        if fetch is not None:
            for position in wanted:
                fetch.blocks[position].state = State.CLAIMED
            if fetch.push:
                self._work.push(number)
            self._pass_on(fetch, wanted)
            self.claimed(number)

    def fill(
        self, number: int, targets: Mapping[int, list[int]], ranks: Sequence[RankPages]
    ) -> None:
        """A peer may write blocks of a direct fetch to these engine blocks, of all these ranks."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            for message in fills_of(fetch, targets, ranks):
                self._send(fetch.peer, message)

    def let_go(self, number: int, *, now: bool = False) -> None:
        """Nobody wants any more of a direct fetch; now: nor waits until it is not written."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            self._give_up(fetch, OPEN)
            self._settle(fetch)
        if now:
            self._late_fills.pop(number, None)

    def arrived(self, number: int, positions: Collection[int], now_ns: int, *, ok: bool) -> None:
        """All workers have read these blocks of a direct fetch, or one could not.

        What could not be read in an engine's memory is in a slot, too.
        """
        fetch = self._fetches.get(number)
        if fetch is None:
            return
        if fetch.push:  # its load has failed
            self.let_go(number)
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
        """A request wants nothing more; what is being loaded already comes."""
        for number in [n for n, fetch in self._fetches.items() if fetch.request == request]:
            self.claimed(number)

    def heard(self, peer: int, now_ns: int, patience_ns: int = 0) -> None:
        """A peer is there, or it takes so much longer until it can answer."""
        for fetch in self._fetches.values():
            if fetch.peer == peer:
                fetch.heard_ns = now_ns + patience_ns

    # What a producer says

    def on_message(self, peer: int, message: Message, now_ns: int) -> None:
        """Act on one message of a peer. Raises ProtocolError for a wrong one."""
        self._now_ns = now_ns
        if not isinstance(message, FromProducer):
            raise ProtocolError(f"{type(message).__name__} is not for a consumer")
        if isinstance(message, m.Have):  # they are told once, whatever they were told with
            self._regions.learn(peer, message.regions)
        fetch = self._fetches.get(message.job)
        if fetch is None:  # given up before
            if isinstance(message, m.End):
                self._written_no_more(message)
            return
        if fetch.peer != peer:
            raise ProtocolError(f"job {message.job} is not this peer's")
        if isinstance(message, m.Computing):
            self._computing(fetch, now_ns)
            return
        fetch.heard_ns = now_ns
        self._on_word(fetch, message)
        self._settle(fetch)

    def _on_word(self, fetch: Fetch, message: Message) -> None:
        if isinstance(message, m.Offer):
            fetch.take(message)
            self._give_up(fetch, {State.WANTED})
        elif isinstance(message, m.Have):
            self._have(fetch, message)
        elif isinstance(message, m.Resident):
            self._resident(fetch, message)
        elif isinstance(message, m.Valid):
            self._valid(fetch, message)
        elif isinstance(message, m.End):
            fetch.ended = message.reason not in m.MAY_BE_WRITTEN
            self._fail(fetch, "ended")
            self._written_no_more(message)

    def _computing(self, fetch: Fetch, now_ns: int) -> None:
        """Wait for what is computed, but not for ever: an engine can hang while its store lives."""
        on_its_way = PULLED if not fetch.push else LANDING
        if any(block.state in on_its_way for block in fetch.blocks):
            return  # that is what has to arrive
        waited_for = now_ns - fetch.waited_ns < LEASE_MS * 1_000_000
        if waited_for and now_ns - fetch.arrived_ns < self._waits.limit_ns:
            fetch.heard_ns = fetch.computed_ns = now_ns

    def sign(
        self, number: int | None, keys: Iterable[BlockKey], now_ns: int
    ) -> tuple[int, int | None] | None:
        """Say when a block of a fetch came, or its peer said that it computes, and when it said so.

        Somebody waits for it, then.

        Both in milliseconds before now. number: of the fetch; None: of that which brings the first
        of these blocks that is still fetched. None if there is none.
        """
        if number is None:
            tags = (self._located.get(key) for key in keys)
            number = next((tag.fetch for tag in tags if tag is not None), None)
        fetch = None if number is None else self._fetches.get(number)
        if fetch is None:
            return None
        fetch.waited_ns = now_ns
        computed_ns = fetch.computed_ns
        heard_ns = fetch.arrived_ns if computed_ns is None else max(fetch.arrived_ns, computed_ns)
        ago_ms = None if computed_ns is None else (now_ns - computed_ns) // 1_000_000
        return (now_ns - heard_ns) // 1_000_000, ago_ms

    def _written_no_more(self, end: m.End) -> None:
        if end.reason not in m.MAY_BE_WRITTEN:
            self._landing.give(self._late_writes.pop(end.job, ()))
            for position in self._late_fills.pop(end.job, ()):
                self._work.passed(end.job, position, ok=False, written=False)

    def on_exporter_lost(self) -> None:
        """Our exporter is another process now: no transfer of the old one writes any more."""
        for fetch in list(self._fetches.values()):
            self._fail(fetch, "exporter")
            self._settle(fetch)
        for slots in (self._late_reads.values(), *self._late_writes.values()):
            self._landing.give(list(slots))
        self._late_reads, self._late_writes = {}, {}

    @property
    def open(self) -> int:
        """Count what is wanted."""
        return len(self._fetches)

    def asked(self) -> set[int]:
        """Return the peers that something is wanted of."""
        return {fetch.peer for fetch in self._fetches.values()}

    @property
    def quarantined(self) -> int:
        """Count the landing slots that were given up while something may still write them."""
        return len(self._late_reads) + sum(map(len, self._late_writes.values()))

    def on_peer_lost(self, peer: int) -> None:
        """A peer is gone, or has another memory: what was to come from it does not."""
        self._regions.forget(peer)
        self._introduced.pop(peer, None)
        for fetch in [fetch for fetch in self._fetches.values() if fetch.peer == peer]:
            self._fail(fetch, "lost")
            fetch.released = True
            self._settle(fetch)
        self._turns.forget(peer)

    def _have(self, fetch: Fetch, have: m.Have) -> None:
        landed, positions = [], []
        for position, (extent, slot), summed in m.places_of(have, len(fetch.blocks)):
            block = fetch.blocks[position]
            positions.append(position)
            region = self._regions.get(fetch.peer, extent, slot)
            waits = block.place is None and block.state is State.CLAIMED
            if waits and not fetch.push and not fetch.direct:
                self._turns.queue(fetch.peer, Tag(fetch.number, position))
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

    def _resident(self, fetch: Fetch, message: m.Resident) -> None:
        if not fetch.direct or fetch.push:
            raise ProtocolError(f"job {message.job} was not asked to be read in an engine")
        self._pass_on(fetch, fetch.learn(message))

    def _valid(self, fetch: Fetch, valid: m.Valid) -> None:
        positions = m.positions_of(valid.positions, len(fetch.blocks))
        again = m.positions_of(valid.again, len(fetch.blocks))
        for position in (*positions, *again):
            if fetch.blocks[position].state is not State.CHECKED:
                raise ProtocolError(f"position {position} was not confirmed")
        for position in again:  # it is told anew where they are
            block = fetch.blocks[position]
            block.state, block.resident = State.CLAIMED, None
        self.counts["fetched"] += len(positions)
        for position in positions:
            self.fetched[fetch.tier_of(position)] += 1
            self._done(fetch, position, ok=True)

    # Time, and what was done elsewhere

    def tick(self, now_ns: int) -> None:
        """Give up what is late, keep leases alive, and go on where landing slots are free."""
        self._now_ns = now_ns
        for fetch in list(self._fetches.values()):
            limit_ns = max(STALL_NS, self._waits.quiet_ns) if fetch.offered else ANSWER_NS
            if now_ns - fetch.heard_ns >= limit_ns:
                self._fail(fetch, "late")
            elif now_ns >= fetch.extend_ns:
                fetch.extend_ns = now_ns + self._extend_ns
                self._send(fetch.peer, m.Extend(fetch.number, LEASE_MS))
            self._settle(fetch)
        self._move()

    def moved(self, tags: Sequence[Tag], *, ok: bool) -> None:
        """A read of one fetch into landing slots has ended."""
        late = [self._late_reads.pop(tag) for tag in tags if tag in self._late_reads]
        self._landing.give(late)
        fetch = self._fetches.get(tags[0].fetch)
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
        """Blocks were copied to their slots, or have other sums than they should."""
        fetch = self._fetches[tags[0].fetch]
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
        state = self._fetches[tag.fetch].blocks[tag.position].state
        return LookupResult.RETRY if state is State.WANTED else LookupResult.HIT

    def submit(self, job: TransferJob) -> None:
        """Fetch offered blocks into slots."""
        self._loads.begin(job)
        for position, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            tag = self._located.get(key)
            block = None if tag is None else self._fetches[tag.fetch].blocks[tag.position]
            if tag is None or block is None or block.state is not State.OFFERED:
                self._loads.ended((job.job_id, position), ok=False)
                continue
            block.state, block.slot, block.load = State.CLAIMED, slot, (job.job_id, position)
            fetch = self._fetches[tag.fetch]
            if block.place is not None or fetch.push:
                self._turns.queue(fetch.peer, tag)
        self._move()

    def poll(self) -> list[JobResult]:
        """Take the results of loads that are over."""
        return self._loads.take_results()

    def discard(self, keys: Collection[BlockKey]) -> None:
        """Forget what was offered under these keys."""
        for key in keys:
            tag = self._located.pop(key, None)
            if tag is not None:
                fetch = self._fetches[tag.fetch]
                if fetch.blocks[tag.position].state in {State.WANTED, State.OFFERED}:
                    self._done(fetch, tag.position, ok=False)
                self._settle(fetch)

    def touch(self, key: BlockKey) -> None:
        """Nothing: what a peer keeps is its own affair."""

    def clear(self) -> None:
        """Forget all offers; what is being fetched is not ready when it ends."""
        for fetch in list(self._fetches.values()):
            self._fail(fetch, "cleared")
            self._settle(fetch)

    drain = close = clear  # nothing is waited for: what has not arrived does not count

    # Of one fetch

    def _move(self) -> None:
        """Start what can be moved now into free landing slots, in the order that it came."""
        for peer, number, blocks in self._turns.next(self._claimed):
            (self._land if self._fetches[number].push else self._read)(peer, number, blocks)

    def _claimed(self, tag: Tag) -> Block | None:
        """Return a block that still waits for a landing slot; it has one next."""
        fetch = self._fetches.get(tag.fetch)
        block = None if fetch is None else fetch.blocks[tag.position]
        if block is None or block.state is not State.CLAIMED:
            return None
        block.state = State.MOVING
        return block

    def _pass_on(self, fetch: Fetch, positions: Collection[int]) -> None:
        """Have workers read what can be read now."""
        found = []
        for position in () if fetch.push else positions:
            block = fetch.blocks[position]
            if block.state is State.CLAIMED and (block.resident or block.place):
                block.state = State.MOVING
                found.append((position, block))
        for each in engine_reads_of(fetch, found):
            self._work.pass_on_engine(fetch.number, each)
        for of, read in reads_of(pair for pair in found if pair[1].resident is None):
            self._work.pass_on(fetch.number, fetch.peer, read, of)

    def _read(self, peer: int, number: int, blocks: Sequence[tuple[int, Block]]) -> None:
        """Read blocks of one fetch, in one go for each extent of the peer's."""
        for positions, read in reads_of(blocks):
            self._work.read([Tag(number, position) for position in positions], peer, read)

    def _land(self, peer: int, number: int, blocks: Sequence[tuple[int, Block]]) -> None:
        """Tell the peer where to write blocks of one fetch."""
        positions = u32([position for position, _ in blocks])
        slots = u32([block.landing for _, block in blocks if block.landing is not None])
        region, metadata = self._landing.region()
        known = self._introduced.get(peer) == metadata
        self._introduced[peer] = metadata
        self._send(peer, m.Land(number, region, positions, slots, b"" if known else metadata))

    def _check(self, fetch: Fetch, positions: Sequence[int]) -> None:
        checks = []
        for position in positions:
            block = fetch.blocks[position]
            block.state = State.LANDED
            if block.landing is not None and block.slot is not None:
                checks.append(Check(block.key, block.landing, block.sum, block.slot))
        if checks:
            self._work.check([Tag(fetch.number, position) for position in positions], checks)

    def _done(self, fetch: Fetch, position: int, *, ok: bool) -> None:
        """A block is ready, or will not be; nothing of ours uses its slots any more."""
        block = fetch.blocks[position]
        late = self._leave_landing(fetch, block)
        if late is not None and fetch.push:
            self._late_writes.setdefault(fetch.number, []).append(late)
        elif late is not None:
            self._late_reads[Tag(fetch.number, position)] = late
            self._work.abandon(Tag(fetch.number, position))
        claimed = block.state in {State.CLAIMED, State.MOVING, State.CHECKED}
        written = fetch.push and block.state is State.MOVING and not fetch.ended
        block.state = State.DONE
        fetch.left -= 1
        if self._located.get(block.key) == Tag(fetch.number, position):
            del self._located[block.key]
        if block.load is not None:
            self._loads.ended(block.load, ok=ok)
        if fetch.direct and claimed:
            if written:
                self._late_fills.setdefault(fetch.number, []).append(position)
            self._work.passed(fetch.number, position, ok=ok, written=written)

    def _confirm(self, fetch: Fetch, positions: Sequence[int], unread: Sequence[int] = ()) -> None:
        """Ask whether the lease of what has arrived held until now."""
        if positions or unread:
            self._send(fetch.peer, m.Confirm(fetch.number, u32(positions), u32(unread)))
        self._settle(fetch)

    def _leave_landing(self, fetch: Fetch, block: Block) -> int | None:
        """Let go of a block's landing slot; return it if something may still write it."""
        landing, block.landing = block.landing, None
        if landing is None:
            return None
        self._turns.left(fetch.peer)
        if block.state is State.MOVING:
            return landing
        self._landing.give([landing])
        return None

    def _fail(self, fetch: Fetch, event: str) -> None:
        """Nothing more comes; a copy into a slot of ours that is under way ends first."""
        self.counts[event] += 1
        self._give_up(fetch, OPEN - {State.LANDED})

    def _give_up(self, fetch: Fetch, states: Collection[State]) -> None:
        """Have what is in one of these states be not ready."""
        for position, block in enumerate(fetch.blocks):
            if block.state in states:
                self._done(fetch, position, ok=False)

    def _settle(self, fetch: Fetch) -> None:
        """Tell the peer when nothing more is wanted, and forget the fetch."""
        if fetch.left or self._fetches.pop(fetch.number, None) is None:
            return
        if not fetch.released:
            self._send(fetch.peer, m.Release(fetch.number))
