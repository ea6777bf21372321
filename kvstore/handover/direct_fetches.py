"""Fetches whose blocks workers of an engine read, or peers write, straight into its memory.

lookup    claims blocks, for a lease ------> begin()
peer      blocks can be read --------------> tell(): Places to each worker
workers   Arrived, from each rank ---------> arrived(): the consumer confirms them at the peer
          pushed: Target, from each rank --> target(): the consumer tells the peer
peer      the lease held, or it failed ----> passed(): Passed to each worker, at the end of a turn
lease     has ended -----------------------> end()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages
from kvstore.core.leases import GroupHit
from kvstore.core.types import GroupRule
from kvstore.handover.transfers import EngineRead
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.peer import Region, clip

Send = Callable[[int, framing.Message, int | None], None]
Positions = Mapping[int, int]
"""Of one group: block index -> its position in a fetch."""


def reaching_on(
    rules: Sequence[GroupRule], lacking: Sequence[list[int]], blocks: int
) -> list[list[int]]:
    """Return what to ask for: blocks that are lacking, and all behind a full group's first gap.

    A lease cannot pin what is here behind a gap.
    """
    gaps = [
        found[0] for rule, found in zip(rules, lacking, strict=True) if not rule.trailing and found
    ]
    gap = min(gaps, default=blocks)
    wanted = []
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


def no_workers(_connection: int, _message: framing.Message, _fd: int | None) -> None:
    """Send nothing: there are no workers."""


class _Fetch(msgspec.Struct, eq=False):
    """One fetch; positions: that were claimed. read: ranks that have read, by position."""

    session: int
    workers: Mapping[int, int]  # rank -> connection
    positions: frozenset[int]
    read: dict[int, set[int]] = {}
    passed: dict[tuple[bool, bool], list[int]] = {}  # verdicts that workers do not know yet
    agent: tuple[str, bytes] | None = None  # of the peer's exporter, as workers know it
    in_engine: set[int] = set()  # positions that are read in an engine's memory
    unread: set[int] = set()  # of these, those that a rank could not read
    engines: set[int] = set()  # of the peer's, whose memory workers know
    push: bool = False
    agents: dict[int, str] = {}  # of ranks that have named engine blocks
    targets: dict[int, list[int]] = {}  # engine blocks that some rank has named, by position

    def expect(self, positions: Iterable[int], *, in_engine: bool = False) -> None:
        """Wait for all ranks to read these blocks, for the first time or from another place."""
        for position in positions:
            self.read.pop(position, None)
        self.unread.difference_update(positions)
        self.in_engine.difference_update(positions)
        if in_engine:
            self.in_engine.update(positions)


class DirectFetches:
    """All direct fetches of a store, each named by its namespace's digest and its number there."""

    def __init__(self, send: Send) -> None:
        """send(connection, message, None): to a worker."""
        self._send = send
        self._fetches: dict[tuple[str, int], _Fetch] = {}
        self._untold: set[tuple[str, int]] = set()  # fetches with verdicts to send
        self.moved_bytes = 0

    def begin(
        self,
        digest: str,
        number: int,
        session: int,
        workers: Mapping[int, int],
        positions: Collection[int],
    ) -> None:
        """A session's workers, by rank, will read these positions of a fetch."""
        self._fetches[digest, number] = _Fetch(session, dict(workers), frozenset(positions))

    def tell(
        self,
        digest: str,
        number: int,
        agent: tuple[str, bytes],
        region: Region,
        positions: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """Tell workers that they can read blocks. agent: the peer's, and its metadata."""
        fetch = self._fetches.get((digest, number))
        if fetch is None:
            return
        name, metadata = agent
        new = b"" if fetch.agent == agent else metadata
        fetch.agent = agent
        fetch.expect(positions)
        where = name, new, region.base, region.slots
        places = p.Places(number, *where, framing.u32(positions), framing.u32(numbers))
        for connection in fetch.workers.values():
            self._send(connection, places, None)

    def tell_engine(self, digest: str, number: int, read: EngineRead) -> None:
        """Tell workers that they can read blocks in the memory of one of a peer's engines."""
        fetch = self._fetches.get((digest, number))
        if fetch is None:
            return
        fetch.expect(read.blocks, in_engine=True)
        ranks = () if read.engine in fetch.engines else tuple(read.ranks)
        fetch.engines.add(read.engine)
        positions = framing.u32(list(read.blocks))
        blocks = framing.u32([block for found in read.blocks.values() for block in found])
        for connection in fetch.workers.values():
            told = p.InEngine(number, read.engine, ranks, positions, blocks)
            self._send(connection, told, None)

    def push(self, digest: str, number: int) -> None:
        """Ask workers where the peer may write the blocks."""
        fetch = self._fetches.get((digest, number))
        if fetch is not None:
            fetch.push = True
            for connection in fetch.workers.values():
                self._send(connection, p.Push(number), None)

    def target(
        self,
        digest: str,
        session: int,
        rank: int,
        message: p.Target,
        ranks: Sequence[RankPages],
    ) -> dict[int, list[int]] | None:
        """Record engine blocks that a rank offers; return those of all ranks, by position.

        ranks: of its engine, as they are now. None: one has another agent than it had when it
        named its blocks, which may have another use by now. Raises ProtocolError for another
        session's fetch, for positions that were not claimed, and for ranks that disagree.
        """
        fetch = self._fetches.get((digest, message.fetch))
        positions, blocks = framing.from_u32(message.positions), framing.from_u32(message.blocks)
        if fetch is None:
            return {}
        per = len(blocks) // max(1, len(positions))
        if not fetch.push or not per or len(blocks) != per * len(positions):
            raise ProtocolError(f"{len(blocks)} engine blocks for {len(positions)} positions")
        self._check(fetch, message.fetch, session, positions)
        whole = {}
        fetch.agents[rank] = message.agent
        for number, position in enumerate(positions):
            found = blocks[number * per : number * per + per]
            if not any(found):
                raise ProtocolError(f"no engine block for position {position}")
            if fetch.targets.setdefault(position, found) != found:
                raise ProtocolError(f"engine blocks {found[:8]} of rank {rank}, others have others")
            ready = fetch.read.setdefault(position, set())
            ready.add(rank)
            if len(ready) == len(fetch.workers):
                whole[position] = found
        named = [fetch.agents[number] for number in sorted(fetch.agents)]
        return None if whole and named != [each.agent for each in ranks] else whole

    @staticmethod
    def _check(fetch: _Fetch, number: int, session: int, positions: Sequence[int]) -> None:
        if fetch.session != session:
            raise ProtocolError(f"fetch {number} is another engine's")
        if not fetch.positions.issuperset(positions):
            raise ProtocolError(f"positions {positions[:8]}, which the engine has not claimed")

    def arrived(
        self, digest: str, session: int, rank: int, message: p.Arrived
    ) -> tuple[list[int], bool] | None:
        """Record what a rank has read; return what all ranks have, and whether none failed.

        None: the fetch is over. Raises ProtocolError for another session's fetch, and for
        positions that were not claimed.
        """
        self.moved_bytes += message.copied_bytes
        fetch = self._fetches.get((digest, message.fetch))
        if fetch is None:
            return None
        positions = framing.from_u32(message.positions)
        self._check(fetch, message.fetch, session, positions)
        if fetch.push and message.ok:
            raise ProtocolError(f"fetch {message.fetch} is written by its peer, not read")
        if not message.ok and fetch.in_engine.isdisjoint(positions):
            return positions, False
        whole = []
        for position in positions:
            ranks = fetch.read.setdefault(position, set())
            ranks.add(rank)
            if not message.ok:
                fetch.unread.add(position)
            if len(ranks) == len(fetch.workers):
                whole.append(position)
        return whole, fetch.unread.isdisjoint(whole)

    def passed(
        self, digest: str, number: int, positions: Iterable[int], *, ok: bool, written: bool
    ) -> None:
        """Record blocks' verdict: valid, failed, or failed with a write possibly in flight."""
        fetch = self._fetches.get((digest, number))
        if fetch is not None:
            fetch.passed.setdefault((ok, written and not ok), []).extend(positions)
            self._untold.add((digest, number))

    def flush(self) -> None:
        """Send the verdicts to the workers."""
        untold, self._untold = self._untold, set()
        for of in untold:
            fetch = self._fetches[of]
            passed, fetch.passed = fetch.passed, {}
            for how, positions in passed.items():
                for connection in fetch.workers.values():
                    self._send(connection, p.Passed(of[1], framing.u32(positions), *how), None)

    def end(self, digest: str, number: int) -> None:
        """End a fetch whose lease has ended."""
        self.flush()
        self._fetches.pop((digest, number), None)
