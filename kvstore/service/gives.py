"""Blocks that workers of our engines write to engines of peers: a few at a time, the others wait.

waiting --fewer than AT_ONCE of its engine's are under way--> told to all of its workers
  |                                                             |
  | nobody wants it any more                                    +--each has said what became of it,
  v                                                             |  or the engine is gone
stopped                                                         v  and some of it may still come
                                                              written, stopped or failed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from kvstore import protocol as p
from kvstore.errors import ProtocolError
from kvstore.export.jobs import Give, Tag
from kvstore.service.direct import Send
from kvstore.service.moves import Written

AT_ONCE = 4  # of one engine
TOLD_MAX = 1024  # agents that an engine's workers have been told of; they know as many


class _Give(msgspec.Struct, eq=False):
    """One of them; wanted: its blocks that somebody waits for. left: ranks that have not ended."""

    number: int
    tags: list[Tag]
    give: Give
    workers: Mapping[int, int]
    wanted: int
    left: set[int] = set()
    ends: set[str] = set()


class _Engine(msgspec.Struct, eq=False):
    """One session's; told: agents that its workers know how to reach."""

    waiting: deque[_Give] = msgspec.field(default_factory=deque)
    open: dict[int, _Give] = {}
    told: set[str] = set()


class Gives:
    """Those of one store."""

    def __init__(self, send: Send, metadata: Callable[[str], bytes]) -> None:
        """send(connection, message, None): to a worker. metadata(agent): how a peer is reached."""
        self._send = send
        self._metadata = metadata
        self._engines: dict[int, _Engine] = {}
        self._of: dict[Tag, _Give] = {}
        self._ended: list[Written] = []
        self._next = 1
        self.moved_bytes = 0

    def start(self, tags: list[Tag], give: Give, workers: Mapping[int, int]) -> None:
        """Have an engine's workers, by rank, write; ends as Written."""
        engine = self._engines.setdefault(give.engine, _Engine())
        found = _Give(self._next, tags, give, dict(workers), len(tags))
        self._next += 1
        self._of |= dict.fromkeys(tags, found)
        engine.waiting.append(found)
        self._go_on(engine)

    def _go_on(self, engine: _Engine) -> None:
        while engine.waiting and len(engine.open) < AT_ONCE:
            self._tell(engine, engine.waiting.popleft())

    def _tell(self, engine: _Engine, found: _Give) -> None:
        give, ranks = found.give, []
        for rank in give.ranks:
            news = rank.agent not in engine.told
            metadata = self._metadata(rank.agent) if news else b""
            ranks.append(msgspec.structs.replace(rank, metadata=metadata))
        if len(engine.told) > TOLD_MAX:
            engine.told.clear()
        engine.told.update(rank.agent for rank in ranks if rank.metadata)
        blocks, targets = p.u32(give.blocks), p.u32(give.targets)
        told = p.Give(found.number, give.group, tuple(ranks), blocks, targets)
        engine.open[found.number] = found
        found.left = set(found.workers)
        for connection in found.workers.values():
            self._send(connection, told, None)

    def abandon(self, tag: Tag) -> None:
        """Nobody waits for a block any more: what no worker was told of is not begun."""
        found = self._of.pop(tag, None)
        if found is None:
            return
        found.wanted -= 1
        waiting = self._engines[found.give.engine].waiting
        if not found.wanted and found in waiting:
            waiting.remove(found)
            self._end(found, ok=False, stopped=True)

    def given(self, session: int, rank: int, message: p.Given) -> None:
        """A worker has written, or could not. Raises ProtocolError for what it was not told."""
        engine = self._engines.get(session)
        found = None if engine is None else engine.open.get(message.give)
        if engine is None or found is None or rank not in found.left:
            raise ProtocolError(f"the end of give {message.give}, which rank {rank} was not told")
        self.moved_bytes += message.copied_bytes
        found.left.discard(rank)
        found.ends.add(message.end)
        if not found.left:
            del engine.open[message.give]
            ok = found.ends == {"all"}
            self._end(found, ok=ok, stopped=not ok and "failed" not in found.ends)
            self._go_on(engine)

    def _end(self, found: _Give, *, ok: bool, stopped: bool) -> None:
        for tag in found.tags:
            self._of.pop(tag, None)
        self._ended.append(Written(found.tags, ok, stopped))

    def end_of(self, session: int) -> None:
        """An engine is gone: what its workers had begun may still come."""
        engine = self._engines.pop(session, _Engine())
        for found in engine.open.values():
            self._end(found, ok=False, stopped=False)
        for found in engine.waiting:
            self._end(found, ok=False, stopped=True)

    def take(self) -> list[Written]:
        """Return what has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended
