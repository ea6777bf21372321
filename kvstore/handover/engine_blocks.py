"""Blocks that engines still have in their own memory, for peers that read there.

worker          Serves: its agent and pages. After all workers, the scheduler half: BlockVersions
scheduler half  EngineBlocks: these engine blocks go to these slots, with these versions
worker          Stored: they are in these slots, with these keys; find() returns them from now on
scheduler half  before a block is overwritten: adds one to its version; find() has it no more

BlockVersions is shared memory with one version counter for each engine block. A block is found here
only once its copy has ended: a copied block has been computed, and a peer that finds other content
in the engine can read the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

import msgspec

from kvstore.core.errors import ProtocolError, TierFull
from kvstore.core.layout import RankPages
from kvstore.core.types import BlockKey, Slot
from kvstore.logs import RateLog
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.peer import RANKS_MAX
from tiers.cpu import GENERATION_BYTES, CpuExtent

_said = RateLog(logging.getLogger(__name__))  # of all namespaces

NAMED_TIMES = 4  # blocks of several groups, and those that an engine has overwritten since
BLOCKS_MAX = 1 << 22  # of one engine: 67 million tokens in blocks of 16, 16 MiB of counters


class Resident(msgspec.Struct, frozen=True):
    """A block in an engine's own memory, valid while its engine blocks have these versions."""

    engine: int
    blocks: tuple[int, ...]
    versions: tuple[int, ...]


class _Engine(msgspec.Struct, eq=False):
    """One engine; coming: blocks shown and not stored yet, by slot."""

    world: int
    blocks: int = 0
    ranks: dict[int, RankPages] = {}
    versions: CpuExtent | None = None  # a u32 for each engine block: its slots have no bytes
    tried: bool = False  # to make them
    left: bool = False
    coming: dict[int, tuple[bytes, Resident]] = {}
    here: dict[BlockKey, Resident] = {}
    by_first: dict[int, BlockKey] = {}  # by a block's first engine block
    named: int = 0  # engine blocks that coming and here name, repeats included

    def drop(self, place: Resident | None) -> None:
        """A block that was shown is not any more."""
        self.named -= 0 if place is None else len(place.blocks)

    def trim(self) -> None:
        """Name no more engine blocks than there are, some twice: what was shown first goes."""
        while self.named > NAMED_TIMES * self.blocks and self.here:
            self.drop(self.here.pop(next(iter(self.here))))
        while self.named > NAMED_TIMES * self.blocks:
            self.drop(self.coming.pop(next(iter(self.coming)))[1])


class Engines:
    """The engines of one namespace, by their sessions' numbers."""

    def __init__(self) -> None:
        self._engines: dict[int, _Engine] = {}

    def serves(self, session: int, world: int, rank: int, message: p.Serves) -> None:
        """Add a worker that can be read, one of `world`. Raises ProtocolError."""
        if not 0 < message.blocks <= BLOCKS_MAX:
            raise ProtocolError(f"{message.blocks} engine blocks, expected 1 to {BLOCKS_MAX}")
        engine = self._engines.setdefault(session, _Engine(world))
        engine.ranks[rank] = message.rank
        if engine.versions is None:
            engine.blocks = max(engine.blocks, message.blocks)

    def take_block_versions(self, session: int) -> tuple[p.BlockVersions, int] | None:
        """Return the message and memory for a scheduler half all of whose workers can be read."""
        engine = self._engines.get(session)
        if engine is None or engine.tried or len(engine.ranks) < engine.world:
            return None
        engine.tried = True
        kind = "engines whose memory peers do not read"
        if engine.world > RANKS_MAX:
            _said.warn(
                kind,
                "peers do not read an engine of %d ranks, expected up to %d",
                engine.world,
                RANKS_MAX,
            )
            return None
        try:
            engine.versions = CpuExtent(engine.blocks * GENERATION_BYTES, slot_bytes=0)
        except (OSError, TierFull) as exc:
            _said.warn(kind, "peers cannot read an engine: no memory for block versions: %s", exc)
            return None
        return p.BlockVersions(engine.blocks), engine.versions.fd

    @property
    def serving(self) -> int:
        """Count the engines whose memory peers can read."""
        return sum(e.versions is not None and not e.left for e in self._engines.values())

    def announce(self, session: int, announced: p.EngineBlocks, granted: Container[Slot]) -> None:
        """Note engine blocks that are about to be copied to granted slots. Raises ProtocolError."""
        engine = self._engines.get(session)
        slots, blocks = framing.from_u32(announced.slots), framing.from_u32(announced.blocks)
        generations = framing.from_u32(announced.generations)
        if engine is None or engine.versions is None:
            raise ProtocolError("blocks shown by an engine that has no board")
        per = len(blocks) // max(1, len(slots))
        if not len(slots) == len(announced.keys) or len(slots) * per != len(blocks) or not per:
            raise ProtocolError(f"{len(blocks)} engine blocks shown for {len(slots)} slots")
        if len(generations) != len(blocks) or max(blocks) >= engine.blocks:
            raise ProtocolError(f"engine blocks {blocks[:8]}, expected below {engine.blocks}")
        if len(blocks) > engine.blocks:
            raise ProtocolError(f"{len(blocks)} engine blocks, expected up to {engine.blocks}")
        for number, (slot, key) in enumerate(zip(slots, announced.keys, strict=True)):
            part = slice(number * per, number * per + per)
            place = Resident(session, tuple(blocks[part]), tuple(generations[part]))
            if slot in granted:  # else it is stored already
                engine.drop(engine.coming.pop(slot, (b"", None))[1])
                engine.coming[slot] = key, place
                engine.named += per
        engine.trim()

    def stored(self, session: int, slot: Slot, key: BlockKey, *, ok: bool) -> None:
        """Record the end of a slot's copy by all ranks; ok: find() returns the block now."""
        engine = self._engines.get(session)
        shown, place = (None, None) if engine is None else engine.coming.pop(slot, (None, None))
        if engine is None or place is None:
            return
        if shown != key or not ok:
            engine.drop(place)
            return
        first = place.blocks[0]
        before = engine.by_first.get(first)
        for old in {key} if before is None else {key, before}:
            engine.drop(engine.here.pop(old, None))
        engine.by_first[first], engine.here[key] = key, place

    def find(self, key: BlockKey) -> Resident | None:
        """Return a block's place in some engine's memory."""
        for engine in self._engines.values():
            place = None if engine.left else engine.here.get(key)
            if place is not None and self.holds(place):
                return place
        return None

    def holds(self, place: Resident) -> bool:
        """Tell whether engine blocks still have the content that they were shown with."""
        engine = self._engines.get(place.engine)
        if engine is None or engine.versions is None:
            return False
        words = engine.versions.generations
        pairs = zip(place.blocks, place.versions, strict=True)
        return all(words[block] == generation for block, generation in pairs)

    def ranks(self, number: int) -> Sequence[RankPages]:
        """Return how to reach an engine's memory, by rank."""
        engine = self._engines.get(number)
        return () if engine is None else [engine.ranks[rank] for rank in sorted(engine.ranks)]

    def leave(self, session: int) -> None:
        """Find no more blocks in an engine that leaves."""
        engine = self._engines.get(session)
        if engine is not None:
            engine.left = True

    def end_of(self, session: int) -> None:
        """Drop an engine that is gone."""
        engine = self._engines.pop(session, None)
        if engine is not None and engine.versions is not None:
            engine.versions.close()
