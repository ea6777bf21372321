"""Blocks that workers of our engines write to engines of peers: a few writes at a time.

waiting --few of its engine's and its peer's are under way--> told to all of its workers
  | abandoned, it waits for long,                               | each reports how it ended,
  | or the engine leaves, or is slow                            | or the engine is gone, or frozen
  +-> stopped: the exporter can write it                        +-> written, stopped or failed

Failed: some of it may still arrive. A peer that hangs takes a part of an engine's turns only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import METADATA_MAX
from kvstore.handover.direct_fetches import Send
from kvstore.handover.runs import Part
from kvstore.handover.transfers import EngineWrite, Written
from kvstore.wire import engine as p
from kvstore.wire import framing

AT_ONCE = 4  # of one engine
OF_PEER = 2  # of these
WAIT_NS = 500_000_000  # beyond, the exporter is faster
SLOW_NS = 1_000_000_000  # an engine with an open write this old gets no others
LOST_NS = 10_000_000_000  # a write this old is lost: its worker is frozen, or it had given up
TOLD_MAX = 512  # agents whose metadata an engine's workers have; they keep twice as many


class _Write(msgspec.Struct, eq=False):
    """One write. left: ranks that have not ended.

    since_ns: when it was started, or told to the workers. lost: it is not waited for any more.
    """

    number: int
    part: Part
    write: EngineWrite
    workers: Mapping[int, int]
    since_ns: int
    lost: bool = False
    left: set[int] = set()
    ends: set[str] = set()


class _Engine(msgspec.Struct, eq=False):
    """One engine; told: agents that its workers know how to reach."""

    waiting: dict[int, deque[_Write]] = {}  # by peer
    open: dict[int, _Write] = {}
    told: set[str] = set()

    def next(self) -> _Write | None:
        """Take the first write that may begin now."""
        if len(self.open) >= AT_ONCE:
            return None
        peers = Counter(found.part.peer for found in self.open.values())
        first = [waiting[0] for peer, waiting in self.waiting.items() if peers[peer] < OF_PEER]
        return self.take(min(first, key=lambda found: found.number).part.peer) if first else None

    def take(self, peer: int) -> _Write:
        """Take the first write that waits, of one peer."""
        waiting = self.waiting[peer]
        found = waiting.popleft()
        if not waiting:
            del self.waiting[peer]
        return found


class EngineWrites:
    """All such writes of a store."""

    def __init__(self, send: Send, metadata: Callable[[str], bytes]) -> None:
        """send(connection, message, None): to a worker. metadata(agent): how a peer is reached."""
        self._send = send
        self._metadata = metadata
        self._engines: dict[int, _Engine] = {}
        self._ended: list[Written] = []
        self._next = 1
        self.moved_bytes = 0

    @property
    def open(self) -> int:
        """Count the writes that have begun and not ended at all workers."""
        return sum(len(engine.open) for engine in self._engines.values())

    def start(
        self, part: Part, write: EngineWrite, workers: Mapping[int, int], now_ns: int
    ) -> None:
        """Queue a write by an engine's workers, by rank; ends as Written."""
        engine = self._engines.setdefault(write.engine, _Engine())
        found = _Write(self._next, part, write, dict(workers), now_ns)
        self._next += 1
        if any(now_ns - each.since_ns >= SLOW_NS for each in engine.open.values()):
            self._end(found, ok=False, stopped=True)
            return
        engine.waiting.setdefault(part.peer, deque()).append(found)
        self._go_on(engine, now_ns)

    def _go_on(self, engine: _Engine, now_ns: int) -> None:
        while (found := engine.next()) is not None:
            found.since_ns = now_ns
            self._tell(engine, found)

    def _tell(self, engine: _Engine, found: _Write) -> None:
        write, ranks = found.write, []
        for rank in write.ranks:
            news = rank.agent not in engine.told
            metadata = self._metadata(rank.agent) if news else b""
            metadata = metadata if len(metadata) <= METADATA_MAX else b""  # an exporter's, say
            ranks.append(msgspec.structs.replace(rank, metadata=metadata))
        if len(engine.told) > TOLD_MAX:
            engine.told.clear()
        engine.told.update(rank.agent for rank in ranks if rank.metadata)
        blocks, targets = framing.u32(write.blocks), framing.u32(write.targets)
        told = p.WriteBlocks(found.number, write.group, tuple(ranks), blocks, targets)
        engine.open[found.number] = found
        found.left = set(found.workers)
        for connection in found.workers.values():
            self._send(connection, told, None)

    def abandon(self, part: Part) -> None:
        """Stop waiting for a job's blocks: writes that have not begun are dropped."""
        positions = set(part.positions)
        for engine in self._engines.values():
            kept: deque[_Write] = deque()
            for found in engine.waiting.pop(part.peer, ()):
                if found.part.job == part.job and not positions.isdisjoint(found.part.positions):
                    self._end(found, ok=False, stopped=True)
                else:
                    kept.append(found)
            if kept:
                engine.waiting[part.peer] = kept

    def written(self, session: int, rank: int, message: p.BlocksWritten) -> None:
        """Record the end of a worker's write. Raises ProtocolError for an unknown one."""
        engine = self._engines.get(session)
        found = None if engine is None else engine.open.get(message.write)
        if engine is None or found is None or rank not in found.left:
            raise ProtocolError(f"the end of write {message.write}, which rank {rank} was not sent")
        self.moved_bytes += message.copied_bytes
        found.left.discard(rank)
        found.ends.add(message.end)
        if message.end == "none":  # a worker may have forgotten them
            engine.told.difference_update(rank.agent for rank in found.write.ranks)
        if not found.left:
            del engine.open[message.write]
            ok = found.ends == {"all"}
            if found.lost:
                return
            self._end(found, ok=ok, stopped=not ok and "failed" not in found.ends)

    def _end(self, found: _Write, *, ok: bool, stopped: bool) -> None:
        self._ended.append(Written(found.part, ok, stopped))

    def leave(self, session: int) -> None:
        """Begin no more writes of an engine that leaves; its workers end those that have begun."""
        engine = self._engines.get(session)
        while engine is not None and engine.waiting:
            self._end(engine.take(next(iter(engine.waiting))), ok=False, stopped=True)

    def end_of(self, session: int) -> None:
        """Drop an engine that is gone: writes that had begun may still arrive."""
        self.leave(session)
        engine = self._engines.pop(session, _Engine())
        for found in engine.open.values():
            self._lose(found)

    def _lose(self, found: _Write) -> None:
        """End a write that may still arrive; only its engine still counts it."""
        if not found.lost:
            found.lost = True
            self._end(found, ok=False, stopped=False)

    def take(self, now_ns: int) -> list[Written]:
        """Begin what can begin; return what has ended since the last call."""
        for engine in self._engines.values():
            self._go_on(engine, now_ns)
            for peer in list(engine.waiting):
                while peer in engine.waiting:
                    if now_ns - engine.waiting[peer][0].since_ns < WAIT_NS:
                        break
                    self._end(engine.take(peer), ok=False, stopped=True)
            for found in engine.open.values():
                if now_ns - found.since_ns >= LOST_NS:
                    self._lose(found)
        ended, self._ended = self._ended, []
        return ended
