"""The part of a load that comes straight from a peer: read by this worker, or written by the peer.

What this worker writes to a peer's engine, too: see Giving.

    the job names (fetch, position) --Places: it can be read--> reading --> read, the store is told
    read --Places once more: there it was overwritten meanwhile--> reading, from elsewhere
    the job names it --Push: the store is told our engine blocks--> being written by the peer
    --Passed, of the store: the peer held it until then--> good; or not, at any time before

A load ends, well or not, only when nothing of it is being read or written any more. What does not
end by itself once it is given up, as from a peer that hangs, ends with the agent. Within a machine
not even that ends what others write: an agent that is written to is reached by networks only.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from connectors.copies.host import LayerCache
from connectors.engine_agent import NETWORKS, READ_BYTES, EngineAgent, Moving
from connectors.load_progress import Patience
from connectors.step_meta import LoadJob, pieces
from kvstore.core.errors import KVStoreError, TierError
from kvstore.core.layout import Move, RankLayout, RankPages
from kvstore.wire import engine as p
from kvstore.wire import framing

log = logging.getLogger(__name__)

FETCHES_MAX = 1024  # that the store has told of
GIVE_UP_NS = 1_000_000_000  # for reads that nobody waits for, to end by themselves
GIVE_NS = 5_000_000_000  # for a write, of some MB
LATE_MAX = 16  # of these that have not ended by then
RETRY_NS = 1_000_000_000  # to make an agent again that could not be made

Where = tuple[int, int]
"""A fetch, and a position in it."""
Tell = Callable[[framing.Message], None]
Told = p.Places | p.InEngine | p.Push | p.Passed
End = Literal["all", "none", "failed"]
"""Of a write: see Given."""


class _Place(msgspec.Struct, eq=False):
    """A slot of a peer's: an address. Or blocks of one of its engines: ranks."""

    peer: str = ""
    address: int = 0
    ranks: tuple[RankPages, ...] = ()
    blocks: Sequence[int] = ()


class _Fetch(msgspec.Struct, eq=False):
    """What the store has said of a fetch."""

    places: dict[int, _Place] = {}
    passed: dict[int, bool] = {}
    engines: dict[int, tuple[RankPages, ...]] = {}
    pushed: bool = False
    written: set[int] = set()  # not good, and the peer may still write them

    def learn(self, message: p.InEngine, positions: Sequence[int]) -> None:
        """Take note of what is in a peer's engine, whose memory is told once."""
        ranks = self.engines.setdefault(message.engine, message.ranks)
        blocks = framing.from_u32(message.blocks)
        per = len(blocks) // max(1, len(positions))
        for number, position in enumerate(positions):
            found = blocks[number * per : number * per + per]
            self.places[position] = _Place(ranks=ranks, blocks=found)


class _Flying(msgspec.Struct, frozen=True):
    reading: Moving
    wheres: list[Where]
    in_engine: bool


class Reads(msgspec.Struct, eq=False):
    """What one load reads: the moves of each block, and how far they are."""

    moves: dict[Where, list[Move]]
    patience: Patience
    per: tuple[int, ...]  # engine blocks in a block, by group
    started: dict[Where, _Place] = {}
    named: set[Where] = set()  # whose engine blocks the peer may write, by this agent:
    agent: str = ""
    written_bytes: int = 0
    flying: list[_Flying] = []
    copied_bytes: int = 0
    failed: bool = False
    good: int = 0  # blocks that are there
    late: int = 0  # blocks that were not when it was given up
    given_up_ns: int | None = None


class Giving(msgspec.Struct, eq=False):
    """A write to a peer's engine, and how far it is."""

    asked: p.Give
    writing: Moving | None = None
    until_ns: int = 0

    @property
    def bytes(self) -> int:
        """Count what has been asked of NIXL."""
        return 0 if self.writing is None else self.writing.bytes


class DirectReads:
    """Those of one worker, and its writes: told by its link thread, done by its copy thread."""

    def __init__(self, caches: dict[str, LayerCache], *, pushed: bool = False) -> None:
        """caches: by layer name; pushed: peers write, too.

        Raises NotSupported where nothing can be read into them.
        """
        self._agent = EngineAgent(caches, transports=NETWORKS if pushed else None)
        self._slot_bytes = 0
        self._told: deque[Told] = deque()
        self._fetches: dict[int, _Fetch] = {}
        self._late: list[Moving] = []  # writes that nobody waits for
        self._retry_ns = 0  # not before, if there is no agent
        self._tell: Tell = nobody

    def open(self, layout: RankLayout, devices: str, tell: Tell) -> None:
        """A session begins; no load is under way. tell(): to the store.

        Raises TierError, NotSupported where NIXL does not take the tensors' memory.
        """
        self._told.clear()
        self._fetches.clear()
        self._slot_bytes = layout.slot_bytes
        self._tell = tell
        self._agent.open(layout, devices)
        self._offer()

    def close(self) -> None:
        """End the agent; nothing is read or written any more."""
        self._agent.close()

    def _offer(self) -> None:
        """Have peers read what this engine has."""
        try:
            serves = self._agent.serves()
        except (TierError, ValueError) as exc:  # more pieces than can be told, say
            log.warning("peers read none of this engine's memory: %s", exc)
            return
        if serves is not None:
            self._tell(p.Serves(*serves))

    @staticmethod
    def giving(asked: p.Give) -> Giving:
        """Return a write that the store asks for; give() goes on with it."""
        return Giving(asked)

    def told(self, message: Told) -> None:
        """The store has said something; called from the link thread."""
        self._told.append(message)

    def reads(self, job: LoadJob, per: tuple[int, ...], patience: Patience) -> Reads | None:
        """Return what a load has to read; None: nothing. per: engine blocks in a block, by group.

        patience: with blocks that are not good.
        """
        fetches = dict(zip(job.store.slots, job.generations, strict=True))
        read: dict[Where, list[Move]] = {}
        if max(job.store.slots, default=0) >= p.DIRECT:
            for move in pieces(job.engine, job.store, per):
                if move.slot >= p.DIRECT:
                    where = fetches[move.slot], move.slot - p.DIRECT
                    read.setdefault(where, []).append(move)
        return Reads(read, patience, per) if read else None

    def advance(self, reads: Reads, tell: Tell, now_ns: int) -> bool:
        """Go on with a load's reads; True when they are over: not failed, all are good.

        tell(): to the store.
        """
        try:
            self._listen()
        except (KVStoreError, ValueError) as exc:
            log.error("the store's word on blocks of a peer cannot be read: %s", exc)
            reads.failed = True
        self._land(reads, tell)
        passed = [self._passed(where) for where in reads.moves]
        if not reads.failed:
            good = passed.count(True)
            if good > reads.good:
                reads.good = good
                reads.patience.arrived(now_ns)
            if None in passed and reads.patience.is_over(now_ns):
                reads.late = passed.count(None)
            reads.failed = False in passed or reads.late > 0
        if not reads.failed:
            if not self._agent.name and now_ns >= self._retry_ns:
                self._retry_ns = now_ns + RETRY_NS
                self._restart()
            self._name(reads, tell)
            self._start(reads)
            self._land(reads, tell)
        if reads.failed:
            return self.give_up(reads, now_ns, tell)
        if None in passed or reads.flying:
            return False
        reads.written_bytes = sum(self._bytes_of(reads, where) for where in reads.named)
        return True

    def give_up(self, reads: Reads, now_ns: int, tell: Tell) -> bool:
        """Start nothing more; True once nothing is being read, or written."""
        self._land(reads, lambda _: None)
        written = self._written(reads)
        if not reads.flying and not written:
            return True
        if reads.given_up_ns is None:
            reads.given_up_ns = now_ns
            for fetch in {where[0] for where in written}:
                positions = framing.u32([where[1] for where in written if where[0] == fetch])
                tell(p.Arrived(fetch, positions, 0, ok=False))  # its peer is to stop
        if now_ns - reads.given_up_ns < GIVE_UP_NS:
            return False
        log.warning("what comes from a peer does not end: ending the agent that it comes through")
        reads.flying.clear()
        self._restart()
        return True

    def _restart(self) -> None:
        try:
            self._agent.restart()
            self._offer()
        except TierError as exc:
            log.error("nothing can be read from peers: %s", exc)

    def give(self, giving: Giving, now_ns: int, *, over: bool) -> End | None:
        """Go on with a write; None while it is under way. over: the session is, begin none."""
        asked, limit_ns = giving.asked, GIVE_UP_NS if over else GIVE_NS
        if giving.writing is None:
            if over:
                return "none"
            self._look_at_late()
            try:
                blocks, targets = framing.from_u32(asked.blocks), framing.from_u32(asked.targets)
                giving.writing = self._agent.write(asked.ranks, asked.group, blocks, targets)
            except (KVStoreError, ArithmeticError, LookupError, ValueError) as exc:
                log.error("engine blocks are not written to a peer: %s", exc)
                return "none"
            giving.until_ns = now_ns + GIVE_NS
        giving.until_ns = min(giving.until_ns, now_ns + limit_ns)
        try:
            if self._agent.over(giving.writing):
                return "all"
        except TierError as exc:
            log.error("engine blocks were not written to a peer: %s", exc)
            return "none" if giving.writing.clean else "failed"
        if now_ns < giving.until_ns:
            return None
        log.warning("what goes to a peer does not end: it is waited for no more")
        self._late.append(giving.writing)
        return "failed"

    def _look_at_late(self) -> None:
        """Let go of writes that nobody waits for; too many of them end with the agent."""
        late, self._late = self._late, []
        for writing in late:
            with contextlib.suppress(TierError):
                if not self._agent.over(writing):
                    self._late.append(writing)
        if len(self._late) > LATE_MAX:
            log.warning("%d writes to peers do not end: ending their agent", len(self._late))
            self._late.clear()
            self._restart()

    def _listen(self) -> None:
        while self._told:
            message = self._told.popleft()
            fetch = self._fetches.setdefault(message.fetch, _Fetch())
            while len(self._fetches) > FETCHES_MAX:
                del self._fetches[next(iter(self._fetches))]
            if isinstance(message, p.Push):
                fetch.pushed = True
                continue
            positions = framing.from_u32(message.positions)
            if isinstance(message, p.Passed):
                fetch.passed.update(dict.fromkeys(positions, message.ok))
                fetch.written.difference_update(positions)
                fetch.written.update(positions if message.written else ())
                continue
            if isinstance(message, p.InEngine):
                fetch.learn(message, positions)
                continue
            if message.metadata:
                self._agent.meet(message.agent, message.metadata)
            for position, number in zip(positions, framing.from_u32(message.numbers), strict=True):
                address = message.base + number * self._slot_bytes
                fetch.places[position] = _Place(message.agent, address)

    def _passed(self, where: Where) -> bool | None:
        fetch = self._fetches.get(where[0])
        return None if fetch is None else fetch.passed.get(where[1])

    def _written(self, reads: Reads) -> list[Where]:
        """List what a peer may still write, since it knows our engine blocks."""
        if reads.agent != self._agent.name:  # it has ended
            return []
        return [where for where in reads.named if self._is_written(where)]

    def _is_written(self, where: Where) -> bool:
        fetch = self._fetches.get(where[0])
        return fetch is None or where[1] not in fetch.passed or where[1] in fetch.written

    def _bytes_of(self, reads: Reads, where: Where) -> int:
        return sum(self._agent.part_bytes[move.group] for move in reads.moves[where])

    def _name(self, reads: Reads, tell: Tell) -> None:
        """Tell the store where blocks may be written that a peer writes: nothing else does."""
        found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for where, moves in reads.moves.items():
            fetch = self._fetches.get(where[0])
            if fetch is None or not fetch.pushed or where in reads.named:
                continue
            reads.named.add(where)
            reads.agent = self._agent.name
            blocks = [0] * reads.per[moves[0].group]
            for move in moves:
                blocks[move.part] = move.block_id
            positions, target = found.setdefault((where[0], len(blocks)), ([], []))
            positions.append(where[1])
            target += blocks
        for (number, _), (positions, target) in found.items():
            tell(p.Target(number, self._agent.name, framing.u32(positions), framing.u32(target)))

    def _place(self, where: Where) -> _Place | None:
        fetch = self._fetches.get(where[0])
        return None if fetch is None else fetch.places.get(where[1])

    def _start(self, reads: Reads) -> None:
        """Read what can be read now."""
        found = []
        for where in reads.moves:
            place = self._place(where)
            if place is not None and reads.started.get(where) is not place:
                found.append((where, place))
        for _, run in groupby(found, key=lambda pair: (pair[0][0], pair[1].peer, pair[1].ranks)):
            chunk: list[tuple[Where, _Place]] = []
            for pair in run:
                chunk.append(pair)
                if len(chunk) * self._slot_bytes >= READ_BYTES:
                    self._read(reads, chunk)
                    chunk = []
            if chunk:
                self._read(reads, chunk)

    def _read(self, reads: Reads, chunk: Sequence[tuple[Where, _Place]]) -> None:
        """Read blocks that are in slots of one peer, or in one of its engines."""
        first = chunk[0][1]
        reads.started.update(chunk)
        try:
            if first.peer:
                moves = [(move, place.address) for w, place in chunk for move in reads.moves[w]]
                reading = self._agent.read(first.peer, moves)
            else:
                parts = [
                    (move, place.blocks[move.part])
                    for where, place in chunk
                    for move in reads.moves[where]
                ]
                reading = self._agent.read_engine(first.ranks, parts)
        except (TierError, ArithmeticError, LookupError, ValueError) as exc:
            reading = Moving(0, 0, [], str(exc))  # others may be under way: nothing ends here
        reads.flying.append(_Flying(reading, [where for where, _ in chunk], not first.peer))

    def _land(self, reads: Reads, tell: Tell) -> None:
        """Tell the store of reads that have ended.

        What could not be read in an engine is in a slot, too: its place is told once more.
        """
        flying, reads.flying = reads.flying, []
        for each in flying:
            ok = True
            try:
                if not self._agent.over(each.reading):
                    reads.flying.append(each)
                    continue
            except TierError as exc:
                log.error("blocks of a peer were not read: %s", exc)
                ok = False
                reads.failed = reads.failed or not each.in_engine
            ok = ok and not reads.failed
            copied = each.reading.bytes if ok else 0
            reads.copied_bytes += copied
            positions = framing.u32([position for _, position in each.wheres])
            tell(p.Arrived(each.wheres[0][0], positions, copied, ok))


def nobody(_message: framing.Message) -> None:
    """Say nothing: there is no store."""
