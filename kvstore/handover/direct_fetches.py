"""Direct fetches: workers of an engine read the blocks, or a peer writes them, in its memory.

lookup    claims blocks, for a lease ------> Consumer.claim()
peer      blocks can be read --------------> readable(): Places to each worker
workers   Arrived, from each rank ---------> on_arrived(): the peer is asked whether they are valid
          pushed: Target, from each rank --> target(): Land to the peer
peer      the lease held, or it failed ----> ended(): Passed to each worker, at the end of a turn
lease     has ended -----------------------> Consumer.end()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages
from kvstore.core.leases import GroupHit
from kvstore.core.types import GroupRule
from kvstore.handover.fetches import Fetch
from kvstore.handover.moves import CHECKED, CLAIMED, MOVING
from kvstore.handover.runs import Run, joined, runs_of
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.peer import Region, clip, engine_blocks_of

Send = Callable[[int, framing.Message, int | None], None]
Positions = Mapping[int, int]
"""Of one group: block index -> its position in a fetch."""


def reaching_on(
    rules: Sequence[GroupRule], lacking: Sequence[Sequence[int]], blocks: int
) -> list[Sequence[int]]:
    """Return what to ask for: blocks that are lacking, and all behind a full group's first gap.

    A lease cannot pin what is here behind a gap.
    """
    gaps = [
        found[0] for rule, found in zip(rules, lacking, strict=True) if not rule.trailing and found
    ]
    gap = min(gaps, default=blocks)
    wanted: list[Sequence[int]] = []
    for rule, found in zip(rules, lacking, strict=True):
        absent = set(found)
        wanted.append([index for index in clip(rule, blocks) if index >= gap or index in absent])
    return wanted


def with_reads(fetch: int, hit: GroupHit, reads: Positions) -> p.Hit:
    """Name the blocks of a group that are here, and those that workers read."""
    here = zip(hit.indices, hit.slots, hit.generations, strict=True)
    read = ((index, p.DIRECT + position, fetch) for index, position in reads.items())
    columns = list(zip(*sorted((*here, *read)), strict=True)) or [(), (), ()]
    return p.Hit(*(framing.u32(column) for column in columns))


class DirectFetch(msgspec.Struct, eq=False):
    """One fetch between the store and a session's workers, until its lease ends.

    send(connection, message, None): to a worker; workers: connections by rank. positions: that
    were claimed. push: workers are asked where the peer may write them. peer(): its exporter's
    agent, and how to reach it.
    """

    send: Send
    peer: Callable[[], tuple[str, bytes]]
    number: int
    session: int
    workers: Mapping[int, int]
    positions: frozenset[int]
    push: bool
    ready: dict[int, set[int]] = {}  # by position: ranks that have read it, or named its blocks
    in_engine: set[int] = set()  # positions that are read in an engine's memory
    unread: set[int] = set()  # of these, those that a rank could not read
    reached: tuple[str, bytes] | None = None  # the peer's exporter, as workers know it
    engines: set[int] = set()  # of the peer's, whose memory workers know
    agents: dict[int, str] = {}  # of ranks that have named engine blocks
    targets: dict[int, list[int]] = {}  # engine blocks that some rank has named, by position
    verdicts: dict[tuple[bool, bool], list[int]] = {}  # that workers do not know yet

    def tell(self, message: framing.Message) -> None:
        """Send to all workers."""
        for connection in self.workers.values():
            self.send(connection, message, None)

    # As the place that blocks of a fetch go to

    def readable(self, fetch: Fetch, positions: Sequence[int]) -> None:
        """Let workers read what can be read now."""
        known = set() if fetch.push else {*fetch.places.known(positions)}
        if fetch.residents:
            known |= fetch.residents.keys() & set(positions)
        found = [p for p in positions if p in known and fetch.states[p] == CLAIMED]
        for run in runs_of(found):
            fetch.states.put(run, MOVING)
        for engine, blocks in fetch.engine_reads(found):
            self.tell_engine(engine, fetch.engines[engine], blocks)
        in_slots = [position for position in found if position not in fetch.residents]
        for region, of, slots in fetch.places.by_region(in_slots):
            self.tell_slots(self.peer(), region, of, slots)

    def written(self, fetch: Fetch, runs: Sequence[Run]) -> None:
        """The peer has written blocks into the engine."""
        for run in runs:
            fetch.states.put(run, CHECKED)
        fetch.ask_validity(joined(runs))

    def ended(self, fetch: Fetch, run: Run, state: int, *, ok: bool) -> None:
        """Blocks have ended in this state; what a peer may still write is so passed."""
        written = fetch.push and state == MOVING and not fetch.ended
        if written:
            fetch.late.update(range(*run))
        self.passed(range(*run), ok=ok, written=written)

    def free(self, _fetch: Fetch, positions: Sequence[int]) -> None:
        """Nothing writes these given-up blocks any more."""
        self.passed(positions, ok=False)
        self.flush()  # no turn may come: its fetch is over

    def on_arrived(self, fetch: Fetch, positions: Sequence[int], now_ns: int, *, ok: bool) -> None:
        """All workers have read these blocks, or one could not; they are not pushed.

        A block that could not be read in an engine's memory is in a slot, too.
        """
        fetch.heard_ns = now_ns
        fetch.arrived_ns = now_ns if ok else fetch.arrived_ns
        moving = [p for p in positions if fetch.states[p] == MOVING]
        unread = [p for p in moving if not ok and p in fetch.residents]
        for run in runs_of(moving if ok else unread):
            fetch.states.put(run, CHECKED)
        if not ok:
            for run in runs_of([p for p in moving if p not in fetch.residents]):
                fetch.done(run, ok=False)
        fetch.ask_validity(moving if ok else (), unread)

    # What is said to the workers, and by them

    def _expect(self, positions: Collection[int], *, in_engine: bool) -> None:
        """Wait for all ranks to read these blocks, for the first time or from another place."""
        for position in positions:
            self.ready.pop(position, None)
        self.unread.difference_update(positions)
        if in_engine:
            self.in_engine.update(positions)
        else:
            self.in_engine.difference_update(positions)

    def tell_slots(
        self,
        agent: tuple[str, bytes],
        region: Region,
        positions: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """Tell workers that they can read blocks. agent: the peer's, and its metadata."""
        name, metadata = agent
        new = b"" if self.reached == agent else metadata
        self.reached = agent
        self._expect(positions, in_engine=False)
        at, slots = framing.u32(positions), framing.u32(numbers)
        self.tell(p.Places(self.number, at, slots, name, new, region.base))

    def tell_engine(
        self, engine: int, ranks: Sequence[RankPages], blocks: Mapping[int, list[int]]
    ) -> None:
        """Tell workers that they can read blocks, by position, in one of the peer's engines."""
        self._expect(blocks.keys(), in_engine=True)
        new = () if engine in self.engines else tuple(ranks)
        self.engines.add(engine)
        packed = framing.u32([block for found in blocks.values() for block in found])
        at = framing.u32(list(blocks))
        self.tell(p.Places(self.number, at, packed, engine=engine, ranks=new))

    def target(
        self, session: int, rank: int, message: p.Target, ranks: Sequence[RankPages]
    ) -> dict[int, list[int]] | None:
        """Record engine blocks that a rank offers; return those of all ranks, by position.

        ranks: of its engine, as they are now. None: one has another agent than it had when it
        named its blocks, which may have another use by now. Raises ProtocolError for another
        session's fetch, for positions that were not claimed, and for ranks that disagree.
        """
        positions = framing.from_u32(message.positions)
        self._check(session, positions)
        if not self.push:
            raise ProtocolError(f"engine blocks for fetch {self.number}, which is not pushed")
        whole = {}
        self.agents[rank] = message.agent
        for position, found in engine_blocks_of(positions, message.blocks).items():
            if not any(found):
                raise ProtocolError(f"no engine block for position {position}")
            if self.targets.setdefault(position, found) != found:
                raise ProtocolError(f"engine blocks {found[:8]} of rank {rank}, others have others")
            if self._all_ranks(position, rank):
                whole[position] = found
        named = [self.agents[number] for number in sorted(self.agents)]
        return None if whole and named != [each.agent for each in ranks] else whole

    def _check(self, session: int, positions: Sequence[int]) -> None:
        if self.session != session:
            raise ProtocolError(f"fetch {self.number} is another engine's")
        if not self.positions.issuperset(positions):
            raise ProtocolError(f"positions {positions[:8]}, which the engine has not claimed")

    def _all_ranks(self, position: int, rank: int) -> bool:
        """Note that a rank has done its part of a block; tell whether all have."""
        ready = self.ready.setdefault(position, set())
        ready.add(rank)
        return len(ready) == len(self.workers)

    def arrived(self, session: int, rank: int, message: p.Arrived) -> tuple[list[int], bool]:
        """Record what a rank has read; return what all ranks have, and whether none failed.

        Raises ProtocolError for another session's fetch, and for positions that were not claimed.
        """
        positions = framing.from_u32(message.positions)
        self._check(session, positions)
        if self.push and message.ok:
            raise ProtocolError(f"fetch {self.number} is written by its peer, not read")
        if not message.ok and self.in_engine.isdisjoint(positions):
            return positions, False
        if not message.ok:
            self.unread.update(positions)
        whole = [position for position in positions if self._all_ranks(position, rank)]
        return whole, self.unread.isdisjoint(whole)

    def passed(self, positions: Iterable[int], *, ok: bool, written: bool = False) -> None:
        """Record blocks' verdict: valid, failed, or failed with a write possibly in flight."""
        self.verdicts.setdefault((ok, written), []).extend(positions)

    def flush(self) -> None:
        """Send verdicts to the workers; that nothing is written any more follows that it may be."""
        verdicts, self.verdicts = self.verdicts, {}
        for how, positions in sorted(verdicts.items(), reverse=True):
            if positions:
                self.tell(p.Passed(self.number, framing.u32(positions), *how))
