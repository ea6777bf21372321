"""The side of a hand-over that fetches blocks: all fetches into one namespace.

As the namespace's tier it answers lookups with what peers offer, and loads fetch that into slots.
What workers read themselves, or have written into their engine, is claimed by its number.
moves.py has the states of a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.types import BlockKey, Chain, JobResult, LookupResult, TransferJob
from kvstore.handover.arrivals import Arrivals
from kvstore.handover.direct_fetches import DirectFetch, Send
from kvstore.handover.fetches import LEASE_MS, OPEN, UNCLAIMED, Fetch, Fetched
from kvstore.handover.jobs import PREFILL, Source, check_ranks
from kvstore.handover.links import Links
from kvstore.handover.moves import CLAIMED, MOVING, OFFERED, WANTED
from kvstore.handover.runs import Part, runs_of
from kvstore.handover.transfers import Regions, Transfers
from kvstore.wire import engine as p
from kvstore.wire import peer as m
from kvstore.wire.framing import U32, Message

ANSWER_NS = 1_000_000_000
STALL_NS = 10_000_000_000
EXTEND_NS = 1_000_000_000  # between heartbeats; the answer says that the peer still computes
EXTEND_NS_MIN = 10_000_000
FromProducer = m.Offer | m.Have | m.Settled


class Waits(msgspec.Struct):
    """How long a fetch may take: without an arrival, and while its peer computes.

    A reload of the store's settings changes them.
    """

    quiet_ns: int = 2_000_000_000
    limit_ns: int = 60_000_000_000

    @property
    def extend_ns(self) -> int:
        """Time between two messages that extend the peer's lease."""
        return max(EXTEND_NS_MIN, min(EXTEND_NS, self.quiet_ns // 4))


WAITS = Waits()


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
        self.arrivals = Arrivals(peers, source, transfers)
        self._peers = peers
        self._source = source
        self._send = send
        self._waits = waits
        self._groups = len(source.layout.rules)
        self._fetches: dict[int, Fetch] = {}
        self._late: dict[int, Fetch] = {}  # ended, and something given up may still be written
        self._located: dict[BlockKey, int] = {}  # see Fetch
        self._also: dict[BlockKey, list[tuple[Fetch, int]]] = {}  # likewise
        self._direct: dict[int, DirectFetch] = {}  # until their leases end
        self._regions = Regions()
        self._next = 1
        self._now_ns = 0
        self._fetched = fetched
        self.counts, self.fetched = fetched.events, fetched.blocks

    # What is asked of peers

    def want(
        self, peer: int, want: m.Want, now_ns: int, *, direct: bool = False, hinted: bool = False
    ) -> int:
        """Ask a peer for blocks; return the fetch's number, which is the message's job, too.

        direct: to be claimed with claim(), and not offered to others. hinted: the peer may have
        none of them, so lookups find them, and wait for them, once it has offered them.
        """
        self._now_ns = now_ns
        chain = Chain(want.hashes, want.width, self._groups, want.scope)
        number, self._next = self._next, self._next + 1
        keys: list[BlockKey] = []
        for group, indices in enumerate(m.wanted_of(want, self._groups)):
            keys += chain.keys_at(group, indices)
        fetch = Fetch(
            connection=peer,
            number=number,
            keys=keys,
            request=want.request,
            push=want.push,
            direct=direct,
            say=partial(self._peers.say, peer),
            fetched=self._fetched,
            located=self._located,
            also=self._also,
            into=None if direct else self.arrivals,
            heard_ns=now_ns,
            extend_ns=now_ns + self._waits.extend_ns,
            hinted=hinted,
        )
        self._fetches[number] = fetch
        if not direct and not hinted:
            fetch.locate()
        fetch.say(msgspec.structs.replace(want, job=number, lease_ms=LEASE_MS, direct=direct))
        return number

    def offered(self, number: int) -> Mapping[int, str] | None:
        """Return the tiers of offered blocks by position; None before the peer has answered."""
        fetch = self._fetches.get(number)
        if fetch is None:  # it is over
            return {}
        return fetch.offers if fetch.offered else None

    def claimed(self, number: int) -> None:
        """Claim nothing more of a fetch: what is still unclaimed is given up."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            fetch.give_up(UNCLAIMED)
            self._settle(fetch)

    def cancel(self, number: int) -> None:
        """Cancel a direct fetch."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            fetch.give_up(OPEN)
            self._settle(fetch)

    def withdraw(self, request: str) -> None:
        """Claim nothing more for a request; blocks that are being loaded still arrive."""
        for number in [n for n, fetch in self._fetches.items() if fetch.request == request]:
            self.claimed(number)

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

    def place(self, key: BlockKey) -> str | None:
        """Name the peer and its tier that has an offered block; None: its engine computes it."""
        number, position = divmod(self._located.get(key, 0), m.JOB_BLOCKS_MAX)
        fetch = self._fetches.get(number)
        tier = PREFILL if fetch is None else fetch.tier_of(position)
        if fetch is None or tier == PREFILL:
            return None
        return f"{self._peers.address_of(fetch.connection)} {tier}"

    # What workers read, or have written

    def claim(
        self, number: int, session: int, workers: Mapping[int, int], positions: Collection[int]
    ) -> None:
        """A session's workers, by rank, will read these blocks of a fetch, or have them written.

        Those lost since the offer fail now.
        """
        fetch = self._fetches.get(number)
        push = fetch is not None and fetch.push
        peer = partial(self._peers.reached_at, -1 if fetch is None else fetch.connection)
        claimed = frozenset(positions)
        direct = DirectFetch(self._send, peer, number, session, dict(workers), claimed, push)
        self._direct[number] = direct
        wanted = [p for p in sorted(claimed) if fetch and fetch.states[p] == OFFERED]
        direct.passed(sorted(claimed.difference(wanted)), ok=False)
        direct.flush()
        if fetch is not None:
            fetch.into = direct
            for run in runs_of(wanted):
                fetch.states.put(run, CLAIMED)
            if push:
                direct.tell(p.Places(number, push=True))
            direct.readable(fetch, wanted)
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
            if fetch is not None and fetch.push:  # its load has failed
                self.cancel(message.fetch)
            elif fetch is not None:
                direct.on_arrived(fetch, positions, now_ns, ok=ok)
                self._settle(fetch)
            return
        ranks = self._source.engines.ranks(session)
        targets = direct.target(session, rank, message, ranks)
        if targets is None:
            self.cancel(message.fetch)
        elif fetch is not None:
            for fill in fetch.fills(targets, ranks):
                fetch.say(fill)

    def end(self, number: int) -> None:
        """End a direct fetch whose lease has ended; writes in flight are not waited for."""
        self.cancel(number)
        self._late.pop(number, None)
        direct = self._direct.pop(number, None)
        if direct is not None:
            direct.flush()

    # What peers say, and their ends

    def heard(self, peer: int, now_ns: int, patience_ns: int = 0) -> None:
        """A peer is there, or it takes so much longer until it can answer."""
        for fetch in self._fetches.values():
            if fetch.connection == peer:
                fetch.heard_ns = now_ns + patience_ns

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
        if fetch.connection != peer:
            raise ProtocolError(f"job {message.job} is not this peer's")
        if message.job not in self._fetches:
            if isinstance(message, m.Settled) and message.end:
                fetch.writes_ended(message.end)
                self._forget_late(fetch)
            return
        match message:
            case m.Offer():
                fetch.heard_ns = now_ns
                fetch.take(message)
                self._source.peer_block_ns = message.block_ns or self._source.peer_block_ns
            case m.Have():
                check_ranks(self._source.layout, message.ranks)  # workers go through each piece
                fetch.heard_ns = now_ns
                fetch.have(message, self._regions, now_ns)
            case m.Settled():
                fetch.settled(message, now_ns, self._waits.limit_ns)
        self._settle(fetch)

    def on_peer_lost(self, peer: int) -> None:
        """A connection has ended: all that was wanted over it fails."""
        self._regions.forget(peer)
        for fetch in [fetch for fetch in self._fetches.values() if fetch.connection == peer]:
            fetch.fail("lost")
            fetch.released = True
            self._settle(fetch)
        self.arrivals.forget(peer)

    def on_exporter_lost(self) -> None:
        """Our exporter was restarted: no transfer of the old process writes any more."""
        for fetch in [*self._fetches.values(), *self._late.values()]:
            if fetch.number in self._fetches:
                fetch.fail("exporter")
                self._settle(fetch)
            if not fetch.direct:
                fetch.not_late(fetch.late)
                self._forget_late(fetch)

    @property
    def open(self) -> int:
        """Count the open fetches."""
        return len(self._fetches)

    @property
    def in_use(self) -> bool:
        """Tell whether a fetch is open, or a landing slot is not free."""
        return bool(self._fetches or self.arrivals.quarantined or self.arrivals.landing.used)

    # Time, and ends of transfers

    def tick(self, now_ns: int) -> None:
        """Give up what is late, keep leases alive, and go on where landing slots are free."""
        self._now_ns = now_ns
        for fetch in list(self._fetches.values()):
            limit_ns = max(STALL_NS, self._waits.quiet_ns) if fetch.offered else ANSWER_NS
            if now_ns - fetch.heard_ns >= limit_ns:
                fetch.fail("late")
            elif now_ns >= fetch.extend_ns:
                fetch.extend_ns = now_ns + self._waits.extend_ns
                fetch.say(m.Settle(fetch.number, LEASE_MS))
            self._settle(fetch)
        self.arrivals.start()
        self._flush()

    def moved(self, part: Part, *, ok: bool) -> None:
        """A read of one fetch into landing slots has ended."""
        fetch = self._fetches.get(part.job) or self._late.get(part.job)
        if fetch is None:
            return
        moving = fetch.in_state(part.positions, MOVING)
        for run in () if ok else moving:
            fetch.done(run, ok=False)
        fetch.not_late(part.positions)
        if part.job not in self._fetches:
            self._forget_late(fetch)
            return
        fetch.heard_ns = self._now_ns
        fetch.arrived_ns = self._now_ns if ok else fetch.arrived_ns
        if ok:
            self.arrivals.written(fetch, moving)
        self._settle(fetch)

    def checked(self, part: Part, right: Sequence[bool]) -> None:
        """Blocks were copied to their slots; right: their sums are as they should be."""
        fetch = self._fetches[part.job]
        self.arrivals.checked(fetch, part, right)
        self._settle(fetch)

    def _settle(self, fetch: Fetch) -> None:
        """Release and forget a fetch whose blocks have all ended."""
        if fetch.left or self._fetches.pop(fetch.number, None) is None:
            return
        self._late[fetch.number] = fetch
        self._forget_late(fetch)
        if not fetch.released:
            fetch.say(m.Settle(fetch.number, 0))

    def _forget_late(self, fetch: Fetch) -> None:
        if not fetch.late:
            self._late.pop(fetch.number, None)

    def _flush(self) -> None:
        """Tell workers the verdicts of this turn."""
        for direct in self._direct.values():
            direct.flush()

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
        places = list(map(self._located.get, keys[first:]))
        along = range(self._located[keys[first]], self._located[keys[first]] + len(places))
        pairs = enumerate(zip(places, along, strict=True))
        count = next((n for n, (place, expected) in pairs if place != expected), len(places))
        number, position = divmod(along[0], m.JOB_BLOCKS_MAX)
        return result, self._fetches[number].alike(position, count)

    def submit(self, job: TransferJob) -> None:
        """Fetch offered blocks into slots."""
        loads, done, keys = self.arrivals.loads, 0, list(job.keys)
        load = loads.begin(job)
        while done < len(keys):
            number, first = divmod(self._located.get(keys[done], 0), m.JOB_BLOCKS_MAX)
            fetch = self._fetches.get(number)
            count = 0 if fetch is None else fetch.claimable(first, keys[done:])
            if fetch is None or not count:
                loads.ended(load, (done, done + 1), ok=False)
                done += 1
                continue
            slots = array(U32, job.slots[done : done + count])
            self.arrivals.claim(fetch, (first, first + count), load, done, slots)
            done += count
        self.arrivals.start()

    def poll(self) -> list[JobResult]:
        """Take the results of loads that are over."""
        return self.arrivals.loads.take_results()

    def discard(self, keys: Collection[BlockKey]) -> None:
        """Forget what was offered under these keys."""
        for key in keys:
            place = self._located.pop(key, None)
            self._also.pop(key, None)
            if place is not None:
                number, position = divmod(place, m.JOB_BLOCKS_MAX)
                fetch = self._fetches[number]
                if fetch.states[position] in UNCLAIMED:
                    fetch.done((position, position + 1), ok=False)
                self._settle(fetch)

    def touch(self, key: BlockKey) -> None:
        """Do nothing: the peer decides what it keeps."""

    def clear(self) -> None:
        """Forget all offers; what is being fetched is not ready when it ends."""
        try:
            for fetch in list(self._fetches.values()):
                fetch.fail("cleared")
                self._settle(fetch)
        finally:
            self._flush()

    drain = close = clear  # without waiting: what has not arrived does not count
