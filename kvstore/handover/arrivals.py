"""Where fetched blocks arrive: in landing slots, checked, then copied into slots of the store.

Landing slots are never visible outside: bytes that arrive late, or from a peer that should not
write, land there. One that may still be written when its block is given up is in quarantine.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import msgspec

from kvstore.core.errors import TierIOError
from kvstore.core.types import JobId, JobResult, TransferJob
from kvstore.handover.fetches import Fetch
from kvstore.handover.jobs import Source
from kvstore.handover.links import Links
from kvstore.handover.moves import CHECKED, CLAIMED, LANDED, MOVING
from kvstore.handover.runs import Part, Run, at, joined, put_at, runs_of
from kvstore.handover.transfers import Landing, Slots, Transfers, batch_blocks, pieces, slot_move
from kvstore.wire import peer as m
from kvstore.wire.framing import U32, u32


class LandingTurns:
    """Blocks that wait for a landing slot only; peers take turns.

    One peer has three quarters of the slots at most, so that others land beside one that hangs.
    """

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._waiting: dict[int, deque[tuple[Fetch, Run]]] = {}  # by peer
        self._used: Counter[int] = Counter()  # slots, by peer

    def queue(self, fetch: Fetch, run: Run) -> None:
        """Add blocks that wait for a slot."""
        self._waiting.setdefault(fetch.connection, deque()).append((fetch, run))

    def next(self) -> Iterator[tuple[Fetch, list[Run], array[int]]]:
        """Assign free slots to what still waits: of a fetch, runs of its blocks, their slots."""
        for peer, waiting in list(self._waiting.items()):
            # Ended fetches of a peer that gets no slot would stay.
            while waiting and not waiting[0][0].left:
                waiting.popleft()
            free = self._landing.take(self._room(peer, waiting))
            chosen: dict[int, tuple[Fetch, list[Run], array[int]]] = {}
            while waiting and free:
                fetch, run = waiting.popleft()
                for first, end in fetch.states.within(run, bytes((CLAIMED,))):
                    stop = min(end, first + len(free))
                    if first < stop:
                        _, runs, slots = chosen.setdefault(fetch.number, (fetch, [], array(U32)))
                        runs.append((first, stop))
                        slots.extend(free[: stop - first])
                        del free[: stop - first]
                    if stop < end:
                        waiting.appendleft((fetch, (stop, run[1])))
                        break
            self._landing.give_back(free)
            if chosen or not waiting:
                del self._waiting[peer]
            if chosen and waiting:
                self._waiting[peer] = waiting  # behind those that got none
            for fetch, runs, slots in chosen.values():
                self._used[peer] += len(slots)
                yield fetch, runs, slots

    def _room(self, peer: int, waiting: Sequence[tuple[Fetch, Run]]) -> int:
        """Count the slots that a peer may have now; few large transfers cost less than many.

        It waits for more of them only where some are freed soon: not while all that is under way
        is still to be written by the peer, or is of other fetches.
        """
        share, batch = max(1, self._landing.count * 3 // 4), max(1, self._landing.count // 4)
        left = max(0, share - self._used[peer])
        if not waiting or left >= batch:
            return left
        fetch = waiting[0][0]
        soon = bytes((LANDED,)) if fetch.push else bytes((MOVING, LANDED))
        wanted = sum(end - first for _, (first, end) in waiting)
        return 0 if fetch.states.have(soon) and left < wanted else left

    def left(self, peer: int, count: int) -> None:
        """A peer uses some slots less."""
        self._used[peer] -= count

    def forget(self, peer: int) -> None:
        """Drop a peer's waiting blocks."""
        self._waiting.pop(peer, None)
        self._used = +self._used


class Arrivals:
    """Blocks on their way into slots of one namespace, and the loads that wait for them."""

    def __init__(self, peers: Links, source: Source, transfers: Transfers) -> None:
        self._peers = peers
        self._source = source
        self._transfers = transfers
        self._digest = source.layout.digest
        self.landing = transfers.landing(self._digest, source.layout.slot_bytes)
        self.loads = Loads()
        self.quarantined = 0  # landing slots that were given up and may still be written
        self._turns = LandingTurns(self.landing)
        self._introduced: dict[int, bytes] = {}  # peers that know our exporter's metadata

    @property
    def crowded(self) -> bool:
        """Tell whether more than half of the landing slots are in quarantine."""
        return 2 * self.quarantined > self.landing.count

    @property
    def quarantined_bytes(self) -> int:
        """Landing memory in quarantine."""
        return self.quarantined * self.landing.slot_bytes

    @property
    def landing_bytes(self) -> int:
        """Landing memory that is not free, quarantined or not."""
        return self.landing.used * self.landing.slot_bytes

    def forget(self, peer: int) -> None:
        """Drop what is known of a connection that has ended."""
        self._introduced.pop(peer, None)
        self._turns.forget(peer)

    def claim(self, fetch: Fetch, run: Run, load: int, first: int, slots: array[int]) -> None:
        """Have offered blocks fetched into slots, as a load's blocks from the first on."""
        count = run[1] - run[0]
        fetch.states.put(run, CLAIMED)
        fetch.slots[slice(*run)] = slots
        fetch.loads[slice(*run)] = array(U32, (load,)) * count
        fetch.parts[slice(*run)] = array(U32, range(first, first + count))
        for ready in runs_of(range(*run) if fetch.push else fetch.places.known(range(*run))):
            self._turns.queue(fetch, ready)

    def readable(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Read these blocks as soon as there is room."""
        for claimed in fetch.in_state(positions, CLAIMED):
            self._turns.queue(fetch, claimed)

    def start(self) -> None:
        """Start what can be moved now into free landing slots, in the order that it came."""
        for fetch, runs, slots in self._turns.next():
            positions = joined(runs)
            put_at(fetch.landing, positions, slots)
            for run in runs:
                fetch.states.put(run, MOVING)
            (self._land if fetch.push else self._read)(fetch, positions)

    def _read(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Read blocks of one fetch, in batches of each extent of the peer's."""
        agent, _ = self._peers.reached_at(fetch.connection)
        size = self.landing.slot_bytes
        for region, of, slots in fetch.places.by_region(positions):
            for piece in pieces(len(of), batch_blocks(size, len(fetch.keys))):
                local = self.landing.extent, at(fetch.landing, of[piece])
                read = slot_move(agent, local, (region, slots[piece]), size, write=False)
                self._transfers.start(fetch.part(of[piece]), read, self._digest)

    def _land(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Tell the peer where to write blocks of one fetch."""
        slots = at(fetch.landing, positions).tobytes()
        region, metadata = self.landing.region()
        known = self._introduced.get(fetch.connection) == metadata
        self._introduced[fetch.connection] = metadata
        new = b"" if known else metadata
        fetch.say(m.Land(fetch.number, u32(positions), slots, region, metadata=new))

    def written(self, fetch: Fetch, runs: Sequence[Run]) -> None:
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
                Slots(self.landing.view, at(fetch.landing, positions)),
                Slots(self._source.view, at(fetch.slots, positions)),
            )

    def checked(self, fetch: Fetch, part: Part, right: Sequence[bool]) -> None:
        """Blocks were copied to their slots; right: their sums are as they should be."""
        pairs = zip(part.positions, right, strict=True)
        wrong = [] if all(right) else [position for position, ok in pairs if not ok]
        fetch.fetched.events["corrupt"] += len(wrong)
        given_up = part.positions if fetch.released else wrong
        for run in runs_of(given_up):
            fetch.done(run, ok=False)
        good = fetch.in_state(part.positions, LANDED)
        for run in good:
            self._leave_landing(fetch, run, LANDED)
            fetch.states.put(run, CHECKED)
        fetch.ask_validity(joined(good))
        self.start()

    def ended(self, fetch: Fetch, run: Run, state: int, *, ok: bool) -> None:
        """Blocks have ended in this state: their landing slots are free, or in quarantine."""
        if state in {MOVING, LANDED}:
            self._leave_landing(fetch, run, state)
        self.loads.end(fetch, run, ok=ok)

    def _leave_landing(self, fetch: Fetch, run: Run, state: int) -> None:
        """Take their landing slots from blocks; what may still be written is in quarantine."""
        first, end = run
        self._turns.left(fetch.connection, end - first)
        if state == LANDED:
            self.landing.give_back(fetch.landing[first:end])
            return
        self.quarantined += end - first
        fetch.late.update(range(first, end))
        if not fetch.push:
            self._transfers.abandon(fetch.part(range(first, end)))

    def free(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Nothing writes to the landing slots of given-up blocks any more."""
        self.quarantined -= len(positions)
        self.landing.give_back([fetch.landing[position] for position in positions])


class _Load(msgspec.Struct, eq=False):
    job_id: JobId
    left: int
    done: bytearray


class Loads:
    """Jobs that blocks are fetched for; one ends with the last of its blocks."""

    def __init__(self) -> None:
        self._open: dict[int, _Load] = {}
        self._results: list[JobResult] = []
        self._next = 1

    def begin(self, job: TransferJob) -> int:
        """Open a load and return its number; it has a result once all its blocks have ended."""
        number, self._next = self._next, self._next % 0xFFFFFFFF + 1
        self._open[number] = _Load(job.job_id, len(job.keys), bytearray(len(job.keys)))
        return number

    def end(self, fetch: Fetch, run: Run, *, ok: bool) -> None:
        """Record the end of blocks of a fetch, for the loads that wait for them."""
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
            self.ended(load, (part, part + stop - first), ok=ok)
            first = stop

    def ended(self, number: int, run: Run, *, ok: bool) -> None:
        """Record the end of some of a load's blocks."""
        load, (first, end) = self._open[number], run
        load.done[first:end] = bytes((ok,)) * (end - first)
        load.left -= end - first
        if load.left == 0:
            del self._open[number]
            done = load.done.find(False)
            error = None if done < 0 else TierIOError("a block did not arrive")
            self._results.append(
                JobResult(load.job_id, len(load.done) if error is None else done, error)
            )

    def take_results(self) -> list[JobResult]:
        """Return the results of jobs that have ended, once each."""
        results, self._results = self._results, []
        return results
