"""Blocks that engines still have in their own memory, for peers that read there.

worker          Serves: its agent, and where its pages are. All have: the other half gets a Board
scheduler half  Shown: these engine blocks go to these slots, and this is on the Board for each
worker          Stored: they are in these slots, with these keys; find() has them from now on
scheduler half  about to have a block overwritten: adds one on the Board, and find() has it not

A block is found here only once its copy has ended: what has been copied has been computed, and
whoever finds other content in the engine can have the copy.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Container, Mapping, Sequence

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages
from kvstore.core.types import BlockKey, Slot
from kvstore.rate_log import RateLog
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.peer import RANKS_MAX

_said = RateLog(logging.getLogger(__name__))  # of all namespaces

BLOCKS_MAX = 1 << 24  # of one engine


class Resident(msgspec.Struct, frozen=True):
    """A block in an engine's own memory, as long as its engine blocks have these generations."""

    engine: int
    blocks: tuple[int, ...]
    generations: tuple[int, ...]


class _Board:
    """Memory that the scheduler half writes."""

    def __init__(self, blocks: int) -> None:
        """Raises OSError."""
        self.fd = os.memfd_create("kvstore-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:  # an engine that could make it shorter could end us
            os.posix_fallocate(self.fd, 0, blocks * framing.WORD)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._memory = mmap.mmap(self.fd, blocks * framing.WORD)
        except OSError:
            os.close(self.fd)
            raise
        self.words = memoryview(self._memory).cast("I")

    def close(self) -> None:
        self.words.release()
        self._memory.close()
        os.close(self.fd)


class _Engine(msgspec.Struct, eq=False):
    """One session's; coming: shown, by slot, and not stored yet."""

    world: int
    workers: Mapping[int, int]
    blocks: int = 0
    ranks: dict[int, RankPages] = {}
    board: _Board | None = None
    tried: bool = False  # to make that
    left: bool = False
    coming: dict[int, tuple[bytes, Resident]] = {}
    here: dict[BlockKey, Resident] = {}
    of: dict[int, BlockKey] = {}  # by a block's first engine block


class Engines:
    """Those of one namespace, by their sessions' numbers."""

    def __init__(self) -> None:
        """Know none."""
        self._engines: dict[int, _Engine] = {}

    def serves(
        self, session: int, workers: Mapping[int, int], world: int, rank: int, message: p.Serves
    ) -> None:
        """A worker can be read, of `world` that an engine has; workers: connections, by rank.

        Raises ProtocolError.
        """
        if not 0 < message.blocks <= BLOCKS_MAX:
            raise ProtocolError(f"{message.blocks} engine blocks, expected 1 to {BLOCKS_MAX}")
        engine = self._engines.setdefault(session, _Engine(world, workers))
        engine.ranks[rank] = message.rank
        if engine.board is None:
            engine.blocks = max(engine.blocks, message.blocks)

    def take_board(self, session: int) -> tuple[p.Board, int] | None:
        """Return what a scheduler half is told once all its workers can be read, and its memory."""
        engine = self._engines.get(session)
        if engine is None or engine.tried or len(engine.ranks) < engine.world:
            return None
        engine.tried = True
        kind = "engines whose memory peers do not read"
        if engine.world > RANKS_MAX:
            text = "an engine of %d ranks: %d can be told to peers"
            _said.warn(kind, text, engine.world, RANKS_MAX)
            return None
        try:
            engine.board = _Board(engine.blocks)
        except OSError as exc:
            _said.warn(kind, "peers read nothing in an engine's memory: no board: %s", exc)
            return None
        return p.Board(engine.blocks), engine.board.fd

    @property
    def serving(self) -> int:
        """Count those whose memory peers are told of."""
        return sum(e.board is not None and not e.left for e in self._engines.values())

    def shown(self, session: int, shown: p.Shown, granted: Container[Slot]) -> None:
        """Engine blocks are about to be copied to granted slots. Raises ProtocolError."""
        engine = self._engines.get(session)
        slots, blocks = framing.from_u32(shown.slots), framing.from_u32(shown.blocks)
        generations = framing.from_u32(shown.generations)
        if engine is None or engine.board is None:
            raise ProtocolError("blocks shown by an engine that has no board")
        per = len(blocks) // max(1, len(slots))
        if not len(slots) == len(shown.keys) or len(slots) * per != len(blocks) or not per:
            raise ProtocolError(f"{len(blocks)} engine blocks shown for {len(slots)} slots")
        if len(generations) != len(blocks) or max(blocks) >= engine.blocks:
            raise ProtocolError(f"engine blocks {blocks[:8]}, expected below {engine.blocks}")
        for number, (slot, key) in enumerate(zip(slots, shown.keys, strict=True)):
            part = slice(number * per, number * per + per)
            place = Resident(session, tuple(blocks[part]), tuple(generations[part]))
            if slot in granted:  # else it is stored already
                engine.coming[slot] = key, place

    def stored(self, session: int, slot: Slot, key: BlockKey, *, ok: bool) -> None:
        """All ranks have copied a slot, or could not: what was shown of it is readable, or not."""
        engine = self._engines.get(session)
        shown, place = (None, None) if engine is None else engine.coming.pop(slot, (None, None))
        if engine is None or place is None or shown != key or not ok:
            return
        first = place.blocks[0]
        before = engine.of.get(first)
        if before is not None and before != key:
            engine.here.pop(before, None)
        engine.of[first], engine.here[key] = key, place

    def find(self, key: BlockKey) -> Resident | None:
        """Return where a block is in some engine's memory."""
        for engine in self._engines.values():
            place = None if engine.left else engine.here.get(key)
            if place is not None and self.holds(place):
                return place
        return None

    def holds(self, place: Resident) -> bool:
        """Tell whether engine blocks have the content that they were shown with."""
        engine = self._engines.get(place.engine)
        if engine is None or engine.board is None:
            return False
        words = engine.board.words
        pairs = zip(place.blocks, place.generations, strict=True)
        return all(words[block] == generation for block, generation in pairs)

    def ranks(self, number: int) -> Sequence[RankPages]:
        """Say how an engine's memory is reached, by rank."""
        engine = self._engines.get(number)
        return () if engine is None else [engine.ranks[rank] for rank in sorted(engine.ranks)]

    def workers(self, number: int) -> Mapping[int, int]:
        """Say on which connection each rank's worker is."""
        engine = self._engines.get(number)
        return {} if engine is None else engine.workers

    def leave(self, session: int) -> None:
        """An engine is about to go: nothing new is found in its memory."""
        engine = self._engines.get(session)
        if engine is not None:
            engine.left = True

    def end_of(self, session: int) -> None:
        """An engine is gone."""
        engine = self._engines.pop(session, None)
        if engine is not None and engine.board is not None:
            engine.board.close()
