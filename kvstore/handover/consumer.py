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

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.types import BlockKey, Chain, JobResult, LookupResult, TransferJob
from kvstore.handover.direct_fetches import DirectFetch, Send
from kvstore.handover.fetches import (
    CHECKED,
    CLAIMED,
    DONE,
    FAILS,
    LANDED,
    LANDING,
    MOVING,
    OFFERED,
    OPEN,
    PULLED,
    UNCLAIMED,
    WANTED,
    Fetch,
    Loads,
)
from kvstore.handover.jobs import Source
from kvstore.handover.links import Links
from kvstore.handover.runs import Part, Run, at, joined, runs_of
from kvstore.handover.transfers import LandingTurns, Regions, Slots, Transfers
from kvstore.wire import engine as p
from kvstore.wire import peer as m
from kvstore.wire.framing import U32, Message, u32

ANSWER_NS = 1_000_000_000
STALL_NS = 10_000_000_000
LEASE_MS = 30_000
EXTEND_NS = 1_000_000_000  # between heartbeats; the answer says that the peer still computes
EXTEND_NS_MIN = 10_000_000
FromProducer = m.Offer | m.Have | m.Settled


class Waits(NamedTuple):
    """How long a fetch may take: without an arrival, and while its peer computes."""

    quiet_ns: int = 2_000_000_000
    limit_ns: int = 60_000_000_000


WAITS = Waits()


class Fetched(msgspec.Struct):
    """Counts of fetches: events by name, and blocks by the tier in which their peer had them.

    direct_bytes: that workers have read.
    """

    events: Counter[str] = msgspec.field(default_factory=Counter)
    blocks: Counter[str] = msgspec.field(default_factory=Counter)
    direct_bytes: int = 0


class Consumer:
    """All fetches into one namespace, of which it is a tier: a block that is offered is a HIT."""

    def __init__(
        self,
        peers: Links,
        source: Source,
        transfers: Transfers,
        send: Send,
        fetched: Fetched,
        waits: Waits = WAITS,
    ) -> None:
        """source: the namespace. send(connection, message, None): to a worker of its engines."""
        self.name = "peer"
        self._peers = peers
        self._source = source
        self._transfers = transfers
        self._send = send
        self._waits = waits
        self._extend_ns = max(EXTEND_NS_MIN, min(EXTEND_NS, waits.quiet_ns // 4))
        self._digest = source.layout.digest
        self._groups = len(source.layout.rules)
        self._slot_bytes = source.layout.slot_bytes
        self._landing = transfers.landing(self._digest, self._slot_bytes)
        self._fetches: dict[int, Fetch] = {}
        self._located: dict[BlockKey, int] = {}  # the fetch * JOB_BLOCKS_MAX + the position
        self._regions = Regions()
        self._loads = Loads()
        self._turns = LandingTurns(self._landing)
        self._introduced: dict[int, bytes] = {}  # peers that know our exporter's metadata
        self._direct: dict[int, DirectFetch] = {}  # until their leases end
        self._late: dict[int, Fetch] = {}  # of which something given up may still be written
        self._next = 1
        self._now_ns = 0
        self._fetched = fetched
        self.counts, self.fetched = fetched.events, fetched.blocks

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
        keys: list[BlockKey] = []
        for group, indices in enumerate(m.wanted_of(want, self._groups)):
            keys += chain.keys_at(group, indices)
        fetch = Fetch(
            number, peer, keys, now_ns, now_ns + self._extend_ns, want.request, want.push, direct
        )
        self._fetches[number] = fetch
        if not direct:
            first = number * m.JOB_BLOCKS_MAX
            named = zip(keys, range(first, first + len(keys)), strict=True)
            self._located |= dict(pair for pair in named if pair[0] not in self._located)
        asked = msgspec.structs.replace(want, job=number, lease_ms=LEASE_MS, direct=direct)
        self._peers.say(peer, asked)
        return number

    def claimed(self, number: int) -> None:
        """Claim nothing more of a fetch: what is still unclaimed is given up."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            self._give_up(fetch, UNCLAIMED)
            self._settle(fetch)

    def offered(self, number: int) -> Mapping[int, str] | None:
        """Return the tiers of offered blocks by position; None before the peer has answered."""
        fetch = self._fetches.get(number)
        if fetch is None:  # it is over
            return {}
        return fetch.offers if fetch.offered else None

    def claim(
        self, number: int, session: int, workers: Mapping[int, int], positions: Collection[int]
    ) -> None:
        """A session's workers, by rank, will read these blocks of a fetch, or have them written.

        Those lost since the offer fail now.
        """
        fetch = self._fetches.get(number)
        push = fetch is not None and fetch.push
        claimed = frozenset(positions)
        direct = DirectFetch(self._send, number, session, dict(workers), claimed, push)
        self._direct[number] = direct
        wanted = [p for p in sorted(claimed) if fetch and fetch.states[p] == OFFERED]
        direct.passed(sorted(claimed.difference(wanted)), ok=False)
        direct.flush()
        if fetch is not None:
            for run in runs_of(wanted):
                fetch.states.put(run, CLAIMED)
            if push:
                direct.tell(p.Push(number))
            self._pass_on(fetch, wanted)
            self.claimed(number)

    def of_worker(
        self, session: int, rank: int, message: p.Arrived | p.Target, now_ns: int
    ) -> None:
        """A worker has read, or could not, or can be written to. Raises ProtocolError."""
        if isinstance(message, p.Arrived):
            self._fetched.direct_bytes += message.copied_bytes
        direct, fetch = self._direct.get(message.fetch), self._fetches.get(message.fetch)
        if direct is None:
            return
        if isinstance(message, p.Arrived):
            positions, ok = direct.arrived(session, rank, message)
            if fetch is not None:
                self._arrived(fetch, positions, now_ns, ok=ok)
            return
        ranks = self._source.engines.ranks(session)
        targets = direct.target(session, rank, message, ranks)
        if targets is None:
            self.cancel(message.fetch)
        elif fetch is not None:
            for fill in fetch.fills(targets, ranks):
                self._peers.say(fetch.peer, fill)

    def cancel(self, number: int) -> None:
        """Cancel a direct fetch."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            self._give_up(fetch, OPEN)
            self._settle(fetch)

    def end(self, number: int) -> None:
        """End a direct fetch whose lease has ended; writes in flight are not waited for."""
        self.cancel(number)
        self._late.pop(number, None)
        direct = self._direct.pop(number, None)
        if direct is not None:
            direct.flush()

    def _flush(self) -> None:
        """Tell workers the verdicts of this turn."""
        for direct in self._direct.values():
            direct.flush()

    def _arrived(self, fetch: Fetch, positions: Sequence[int], now_ns: int, *, ok: bool) -> None:
        """All workers have read these blocks of a direct fetch, or one could not.

        A block that could not be read in an engine's memory is in a slot, too.
        """
        if fetch.push:  # its load has failed
            self.cancel(fetch.number)
            return
        fetch.heard_ns = now_ns
        fetch.arrived_ns = now_ns if ok else fetch.arrived_ns
        moving = [p for p in positions if fetch.states[p] == MOVING]
        unread = [p for p in moving if not ok and p in fetch.residents]
        for run in runs_of(moving if ok else unread):
            fetch.states.put(run, CHECKED)
        if not ok:
            for run in runs_of([p for p in moving if p not in fetch.residents]):
                self._done(fetch, run, ok=False)
        self._ask_validity(fetch, moving if ok else (), unread)

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
        fetch = self._fetches.get(message.job) or self._late.get(message.job)
        if fetch is None:  # given up before
            return
        if fetch.peer != peer:
            raise ProtocolError(f"job {message.job} is not this peer's")
        if message.job not in self._fetches:
            if isinstance(message, m.Settled) and message.end:
                self._on_end_of_writes(fetch, message.end)
            return
        match message:
            case m.Offer():
                fetch.heard_ns = now_ns
                fetch.take(message)
                self._give_up(fetch, bytes((WANTED,)))
            case m.Have():
                fetch.heard_ns = now_ns
                self._have(fetch, message)
            case m.Settled():
                self._settled(fetch, message, now_ns)
        self._settle(fetch)

    def _settled(self, fetch: Fetch, settled: m.Settled, now_ns: int) -> None:
        """Use what is valid, before the end that may come with it."""
        if settled.valid or settled.again:
            fetch.heard_ns = now_ns
            self._valid(fetch, settled)
        if settled.computing:
            self._computing(fetch, now_ns)
        if settled.end:
            fetch.ended = settled.end not in m.MAY_BE_WRITTEN
            fetch.released |= settled.end != m.LEASE_OVER
            if fetch.left:
                self._fail(fetch, "ended")
            self._on_end_of_writes(fetch, settled.end)

    def _computing(self, fetch: Fetch, now_ns: int) -> None:
        """Wait for a peer that computes, up to a limit: its engine may hang."""
        if fetch.states.have(LANDING if fetch.push else PULLED):
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
            found = next((key for key in keys if key in self._located), None)
            number = None if found is None else self._located[found] // m.JOB_BLOCKS_MAX
        fetch = None if number is None else self._fetches.get(number)
        if fetch is None:
            return None
        fetch.waited_ns = now_ns
        computed_ns = fetch.computed_ns
        heard_ns = fetch.arrived_ns if computed_ns is None else max(fetch.arrived_ns, computed_ns)
        ago_ms = None if computed_ns is None else (now_ns - computed_ns) // 1_000_000
        return (now_ns - heard_ns) // 1_000_000, ago_ms

    def _on_end_of_writes(self, fetch: Fetch, end: str) -> None:
        """Free what a peer may have been writing, unless it may still do so."""
        if end not in m.MAY_BE_WRITTEN:
            self._not_late(fetch, fetch.late if fetch.push else ())

    def _not_late(self, fetch: Fetch, positions: Iterable[int]) -> None:
        """Nothing writes any more where these blocks, given up before, were to arrive."""
        ended = sorted(fetch.late.intersection(positions))
        fetch.late.difference_update(ended)
        if fetch.direct and ended:
            direct = self._direct[fetch.number]
            direct.passed(ended, ok=False)
            direct.flush()  # no turn may come: its fetch is over
        else:
            self._landing.give_back([fetch.landing[position] for position in ended])
        if not fetch.late:
            self._late.pop(fetch.number, None)

    def on_exporter_lost(self) -> None:
        """Our exporter was restarted: no transfer of the old process writes any more."""
        for fetch in list(self._fetches.values()):
            self._fail(fetch, "exporter")
            self._settle(fetch)
        for fetch in [fetch for fetch in self._late.values() if not fetch.direct]:
            self._not_late(fetch, fetch.late)

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
    def quarantined(self) -> int:
        """Count the landing slots that were given up and may still be written."""
        return sum(len(fetch.late) for fetch in self._late.values() if not fetch.direct)

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
        """Go on with blocks that can be read, or, pushed, have been written."""
        positions, new = fetch.put(have, self._regions)
        if fetch.push:
            landed = self._in_state(fetch, positions, MOVING)
            fetch.arrived_ns = self._now_ns if landed else fetch.arrived_ns
            if not fetch.direct:
                self._check(fetch, landed)
                return
            for run in landed:
                fetch.states.put(run, CHECKED)
            self._ask_validity(fetch, joined(landed))
        elif fetch.direct:
            self._pass_on(fetch, positions)
        else:
            for claimed in self._in_state(fetch, new, CLAIMED):
                self._turns.queue(fetch.peer, fetch.number, claimed)

    @staticmethod
    def _in_state(fetch: Fetch, positions: Sequence[int], state: int) -> list[Run]:
        states = bytes((state,))
        return [part for run in runs_of(positions) for part in fetch.states.within(run, states)]

    def _valid(self, fetch: Fetch, settled: m.Settled) -> None:
        positions = m.positions_of(settled.valid, len(fetch.keys))
        again = m.positions_of(settled.again, len(fetch.keys))
        for run in (*runs_of(positions), *runs_of(again)):
            if not fetch.states.are(run, CHECKED):
                raise ProtocolError(f"positions {run[0]} to {run[1] - 1} were not all confirmed")
        for run in runs_of(again):  # the peer sends their places anew
            fetch.states.put(run, CLAIMED)
            for position in range(*run):
                fetch.residents.pop(position, None)
        self.counts["fetched"] += len(positions)
        for run in runs_of(positions):
            self.fetched.update(fetch.count_tiers(run))
            for part in fetch.states.within(run, bytes((CHECKED,))):
                self._done(fetch, part, ok=True)

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
                self._peers.say(fetch.peer, m.Settle(fetch.number, LEASE_MS))
            self._settle(fetch)
        self._move()
        self._flush()

    def moved(self, part: Part, *, ok: bool) -> None:
        """A read of one fetch into landing slots has ended."""
        late = self._late.get(part.job)
        if late is not None:
            self._not_late(late, part.positions)
        fetch = self._fetches.get(part.job)
        if fetch is None:
            return
        fetch.heard_ns = self._now_ns
        fetch.arrived_ns = self._now_ns if ok else fetch.arrived_ns
        moving = self._in_state(fetch, part.positions, MOVING)
        if ok:
            self._check(fetch, moving)
        else:
            for run in moving:
                self._done(fetch, run, ok=False)
        self._settle(fetch)

    def checked(self, part: Part, right: Sequence[bool]) -> None:
        """Blocks were copied to their slots; right: their sums are as they should be."""
        fetch = self._fetches[part.job]
        pairs = zip(part.positions, right, strict=True)
        wrong = [] if all(right) else [position for position, ok in pairs if not ok]
        self.counts["corrupt"] += len(wrong)
        given_up = part.positions if fetch.released else wrong
        for run in runs_of(given_up):
            self._done(fetch, run, ok=False)
        good = self._in_state(fetch, part.positions, LANDED)
        for run in good:
            self._leave_landing(fetch, run)
            fetch.states.put(run, CHECKED)
        self._ask_validity(fetch, joined(good))
        self._move()

    # As a tier

    def lookup(self, key: BlockKey) -> LookupResult:
        """HIT for what a peer offers; RETRY until it has answered."""
        place = self._located.get(key)
        if place is None:
            return LookupResult.MISS
        number, position = divmod(place, m.JOB_BLOCKS_MAX)
        wanted = self._fetches[number].states[position] == WANTED
        return LookupResult.RETRY if wanted else LookupResult.HIT

    def leading(self, keys: Sequence[BlockKey], first: int) -> tuple[LookupResult, int]:
        """Return what lookup() says of keys[first], and from there on of how many blocks."""
        if not self._located:
            return LookupResult.MISS, len(keys) - first
        result, end = self.lookup(keys[first]), first + 1
        if result is LookupResult.MISS:
            while end < len(keys) and keys[end] not in self._located:
                end += 1
            return result, end - first
        place = self._located[keys[first]]
        number, position = divmod(place, m.JOB_BLOCKS_MAX)
        states, waits = self._fetches[number].states, result is LookupResult.RETRY
        while end < len(keys) and self._located.get(keys[end]) == place + end - first:
            if (states[position + end - first] == WANTED) is not waits:
                break
            end += 1
        return result, end - first

    def submit(self, job: TransferJob) -> None:
        """Fetch offered blocks into slots."""
        load, done, keys = self._loads.begin(job), 0, list(job.keys)
        while done < len(keys):
            number, first = divmod(self._located.get(keys[done], 0), m.JOB_BLOCKS_MAX)
            fetch = self._fetches.get(number)
            count = 0 if fetch is None else self._claimable(fetch, first, keys[done:])
            if fetch is None or not count:
                self._loads.ended(load, (done, done + 1), ok=False)
                done += 1
                continue
            run, after = (first, first + count), done + count
            fetch.states.put(run, CLAIMED)
            fetch.slots[first : run[1]] = array(U32, job.slots[done:after])
            fetch.loads[first : run[1]] = array(U32, (load,)) * count
            fetch.parts[first : run[1]] = array(U32, range(done, after))
            readable = range(*run) if fetch.push else fetch.places.known(range(*run))
            for ready in runs_of(readable):
                self._turns.queue(fetch.peer, number, ready)
            done = after
        self._move()

    @staticmethod
    def _claimable(fetch: Fetch, first: int, keys: list[BlockKey]) -> int:
        """Count the blocks from a position on that are offered, and are these: all, or one."""
        end = first + len(keys)
        if fetch.keys[first:end] == keys and fetch.states.are((first, end), OFFERED):
            return len(keys)
        return int(fetch.states[first] == OFFERED)

    def poll(self) -> list[JobResult]:
        """Take the results of loads that are over."""
        return self._loads.take_results()

    def discard(self, keys: Collection[BlockKey]) -> None:
        """Forget what was offered under these keys."""
        for key in keys:
            place = self._located.pop(key, None)
            if place is not None:
                number, position = divmod(place, m.JOB_BLOCKS_MAX)
                fetch = self._fetches[number]
                if fetch.states[position] in UNCLAIMED:
                    self._done(fetch, (position, position + 1), ok=False)
                self._settle(fetch)

    def touch(self, key: BlockKey) -> None:
        """Do nothing: the peer decides what it keeps."""

    def clear(self) -> None:
        """Forget all offers; what is being fetched is not ready when it ends."""
        try:
            for fetch in list(self._fetches.values()):
                self._fail(fetch, "cleared")
                self._settle(fetch)
        finally:
            self._flush()

    drain = close = clear  # without waiting: what has not arrived does not count

    # Of one fetch

    def _move(self) -> None:
        """Start what can be moved now into free landing slots, in the order that it came."""
        for number, runs, slots in self._turns.next(self._still_claimed):
            fetch, used = self._fetches[number], 0
            for first, end in runs:
                fetch.landing[first:end] = slots[used : used + end - first]
                used += end - first
                fetch.states.put((first, end), MOVING)
            (self._land if fetch.push else self._read)(fetch, joined(runs))

    def _still_claimed(self, number: int, run: Run) -> Iterable[Run]:
        fetch = self._fetches.get(number)
        return () if fetch is None else fetch.states.within(run, bytes((CLAIMED,)))

    def _pass_on(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Let workers read what can be read now."""
        known = set() if fetch.push else {*fetch.places.known(positions)}
        if fetch.residents:
            known |= fetch.residents.keys() & set(positions)
        found = [p for p in positions if p in known and fetch.states[p] == CLAIMED]
        for run in runs_of(found):
            fetch.states.put(run, MOVING)
        for engine, blocks in fetch.engine_reads(found):
            self._direct[fetch.number].tell_engine(engine, fetch.engines[engine], blocks)
        agent = self._peers.reached_at(fetch.peer)
        in_slots = [position for position in found if position not in fetch.residents]
        for of, read in fetch.slot_reads(in_slots):
            self._direct[fetch.number].tell_slots(agent, read.region, of, read.numbers)

    def _read(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Read blocks of one fetch, in one go for each extent of the peer's."""
        agent, _ = self._peers.reached_at(fetch.peer)
        for of, read in fetch.slot_reads(positions):
            self._transfers.read(fetch.part(of), agent, self._digest, read)

    def _land(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Tell the peer where to write blocks of one fetch."""
        slots = at(fetch.landing, positions).tobytes()
        region, metadata = self._landing.region()
        known = self._introduced.get(fetch.peer) == metadata
        self._introduced[fetch.peer] = metadata
        new = b"" if known else metadata
        land = m.Land(fetch.number, u32(positions), slots, region, metadata=new)
        self._peers.say(fetch.peer, land)

    def _check(self, fetch: Fetch, runs: Sequence[Run]) -> None:
        """Check and copy landed blocks."""
        for run in runs:
            fetch.states.put(run, LANDED)
        positions = joined(runs)
        if positions:
            self._transfers.check(
                fetch.part(positions),
                self._digest,
                [key for run in runs for key in fetch.keys[slice(*run)]],
                at(fetch.sums, positions),
                Slots(self._landing.view, at(fetch.landing, positions)),
                Slots(self._source.view, at(fetch.slots, positions)),
            )

    def _done(self, fetch: Fetch, run: Run, *, ok: bool) -> None:
        """End blocks of one state: ready, or never; nothing of ours uses their slots any more."""
        first, end = run
        state = fetch.states[first]
        self._leave_landing(fetch, run)
        fetch.states.put(run, DONE)
        fetch.left -= end - first
        self._forget_places(fetch, run)
        if fetch.direct and state in {CLAIMED, MOVING, CHECKED}:
            written = fetch.push and state == MOVING and not fetch.ended
            if written:
                self._put_late(fetch, range(first, end))
            self._direct[fetch.number].passed(range(first, end), ok=ok, written=written)
        elif state not in UNCLAIMED:
            self._end_loads(fetch, run, ok=ok)

    def _forget_places(self, fetch: Fetch, run: Run) -> None:
        place = fetch.number * m.JOB_BLOCKS_MAX + run[0]
        for key in fetch.keys[slice(*run)]:
            if self._located.get(key) == place:
                del self._located[key]
            place += 1

    def _end_loads(self, fetch: Fetch, run: Run, *, ok: bool) -> None:
        """Tell the loads that wait for these blocks."""
        first, end = run
        while first < end:
            load, part = fetch.loads[first], fetch.parts[first]
            stop = first + 1
            while (
                stop < end
                and fetch.loads[stop] == load
                and fetch.parts[stop] == part + stop - first
            ):
                stop += 1
            self._loads.ended(load, (part, part + stop - first), ok=ok)
            first = stop

    def _ask_validity(
        self, fetch: Fetch, arrived: Sequence[int], unread: Sequence[int] = ()
    ) -> None:
        """Ask whether the lease of what has arrived held until now."""
        if arrived or unread:
            asked = m.Settle(fetch.number, LEASE_MS, u32(arrived), u32(unread))
            self._peers.say(fetch.peer, asked)
        self._settle(fetch)

    def _leave_landing(self, fetch: Fetch, run: Run) -> None:
        """Take the landing slots of blocks of one state from them, if they have some.

        What may still be written is in quarantine until that has ended.
        """
        first, end = run
        state = fetch.states[first]
        if fetch.direct or state not in {MOVING, LANDED}:
            return
        self._turns.left(fetch.peer, end - first)
        if state == LANDED:
            self._landing.give_back(fetch.landing[first:end])
            return
        self._put_late(fetch, range(first, end))
        if not fetch.push:
            self._transfers.abandon(fetch.part(range(first, end)))

    def _put_late(self, fetch: Fetch, positions: range) -> None:
        """Keep in quarantine where these blocks are still read or written to."""
        fetch.late.update(positions)
        self._late[fetch.number] = fetch

    def _fail(self, fetch: Fetch, event: str) -> None:
        """Give up all blocks; a copy into a slot of ours that is under way ends first."""
        self.counts[event] += 1
        self._give_up(fetch, FAILS)

    def _give_up(self, fetch: Fetch, states: bytes) -> None:
        """End the blocks in these states as not ready."""
        for run in fetch.states.within(fetch.all, states):
            self._done(fetch, run, ok=False)

    def _settle(self, fetch: Fetch) -> None:
        """Release and forget a fetch whose blocks have all ended."""
        if fetch.left or self._fetches.pop(fetch.number, None) is None:
            return
        if not fetch.released:
            self._peers.say(fetch.peer, m.Settle(fetch.number, 0))
