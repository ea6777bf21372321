"""A producer's jobs: what peers want, what they are told of it, and what is written to them."""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.index import Entry
from kvstore.core.layout import RankPages, SlotLayout
from kvstore.core.leases import Generations
from kvstore.core.manager import Manager
from kvstore.core.tiering import Tiering
from kvstore.core.types import BlockKey, Chain, Slot
from kvstore.handover.engine_blocks import Engines, Resident
from kvstore.handover.transfers import EngineWrite, SlotFill, SlotWrite, Tag
from kvstore.wire import peer as m
from kvstore.wire.framing import Message, u32

UNKNOWN_NS = 300_000_000  # a router that sends a request to both engines at once, say
JOBS_MAX = 1024  # of one peer
BLOCKS_MAX = 1 << 20  # wanted by one peer at one time
FILL_BYTES = 8 << 20  # of one write into an engine: once abandoned, it is in quarantine as a whole
FILL_PIECES = 1 << 15  # of one, of all ranks together
RUNS_MAX = 1 << 13  # of pages, of all ranks together
PIECES_MAX = 1 << 16  # of one block there

Placed = tuple[int, list[int], list[int]]
"""A position, and what goes where."""
Region = Callable[[int], tuple[m.Region, bytes] | None]
"""Where the exporter has an extent, and its metadata then; None: not mapped yet."""


class Source(Protocol):
    """A namespace, as far as a hand-over uses it."""

    layout: SlotLayout
    manager: Manager
    tiering: Tiering
    engines: Engines

    @property
    def generations(self) -> Generations:
        """How often each slot was written."""
        ...

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes."""
        ...

    def place(self, slot: Slot) -> tuple[int, int]:
        """Return a slot's extent and its number in there."""
        ...

    def settle(self, extent: int, connection: int) -> None:
        """Wait no longer for this connection to map or unmap an extent."""
        ...


class State(enum.Enum):
    """State of a wanted block; see the top of producer.py."""

    AWAITED = "awaited"
    STAGING = "staging"
    SUMMING = "summing"
    SUMMED = "summed"
    WRITING = "writing"
    TOLD = "told"
    DONE = "done"


BUSY = (State.STAGING, State.SUMMING, State.WRITING)


class Block(msgspec.Struct, eq=False):
    """One wanted block; slot: held for it, by a pin of its entry or as its own."""

    key: BlockKey
    group: int
    index: int  # in its chain
    state: State = State.DONE
    slot: Slot | None = None
    entry: Entry | None = None
    sum: int = 0
    landing: tuple[m.Region, int] | None = None
    target: list[int] | None = None  # engine blocks of the peer's, if it is written there
    writes: int = 0  # that have not ended
    failed: bool = False  # one of them
    resident: Resident | None = (
        None  # in an engine of ours: told to be there, or written from there
    )
    moved: bool = False  # it is not in that engine any more

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: first blocks of the chain come first."""
        return self.index, self.group


class Peer(msgspec.Struct, eq=False):
    """One consumer: a namespace of a store."""

    number: int
    source: Source
    agent: str
    jobs: dict[int, Job] = {}
    held_bytes: int = 0
    blocks: int = 0  # of its jobs
    regions: set[int] = set()  # extents it was told about
    closed: bool = False

    def open(self, want: m.Want, now_ns: int) -> Job:
        """Make a job of what the peer wants. Raises ProtocolError for an invalid one."""
        groups = len(self.source.layout.rules)
        wanted = m.wanted_of(want, groups)
        if want.job <= 0 or want.job in self.jobs:
            raise ProtocolError(f"job {want.job}, expected a new number above 0")
        if len(self.jobs) >= JOBS_MAX:
            raise ProtocolError(f"more than {JOBS_MAX} jobs at one time")
        if self.blocks + len(wanted) > BLOCKS_MAX:
            raise ProtocolError(f"more than {BLOCKS_MAX} blocks wanted at one time")
        if want.push and not self.agent:
            raise ProtocolError("a push to a peer that named no exporter")
        chain = Chain(want.hashes, want.width, groups, want.scope)
        return Job(
            peer=self,
            number=want.job,
            blocks=[Block(chain.key(group, index), group, index) for group, index in wanted],
            request=want.request,
            push=want.push,
            direct=want.direct,
            deadline_ns=now_ns + m.lease_ns(want.lease_ms),
            offer_ns=now_ns + UNKNOWN_NS,
        )


class Job(msgspec.Struct, eq=False):
    """What a peer wants by one Want; over: its lease has ended.

    offer_ns: until when an offer may wait; None: it was made. direct: blocks may be read in an
    engine's memory, and need no sums.
    """

    peer: Peer
    number: int
    blocks: list[Block]
    request: str
    push: bool
    direct: bool
    deadline_ns: int
    offer_ns: int | None
    awaited: deque[int] = msgspec.field(default_factory=deque)  # positions, first blocks first
    untold: list[int] = []  # positions of which the peer is to be told
    unsummed: list[int] = []  # and those whose sums are to be taken
    unwritten: list[int] = []  # and those to write
    left: int = 0  # blocks that are not DONE
    engines: set[int] = set()  # whose memory the peer was told
    ranks: tuple[RankPages, ...] = ()  # of the peer's engine, if blocks are written there
    over: bool = False
    released: bool = False

    @property
    def source(self) -> Source:
        """The namespace."""
        return self.peer.source

    def tag(self, position: int) -> Tag:
        """Name one block in the store."""
        return Tag(self.peer.number, self.number, position)

    def tags(self, positions: Iterable[int]) -> list[Tag]:
        """Name blocks in the store."""
        return [self.tag(position) for position in positions]

    def write(self, position: int) -> None:
        """Write a block at the next tick."""
        self.blocks[position].state = State.WRITING
        self.unwritten.append(position)

    def is_overwritten(self, block: Block) -> bool:
        """Tell whether a block that was told or written from an engine's memory has left it."""
        return block.resident is not None and not self.source.engines.holds(block.resident)

    # What the peer is told: where blocks can be read, in slots or in an engine's own memory

    def messages(self, region: Region) -> Iterator[Message]:
        """Take what is to be told, and yield it; what cannot be told yet stays."""
        waiting, self.untold = self.untold, []
        waiting = [position for position in waiting if self.blocks[position].slot is not None]
        if self.direct and not self.push:
            engines = set(self.engines)
            for position in waiting:
                block = self.blocks[position]
                block.resident = None if block.moved else self._resident(engines, block)
            yield from self._in_engines(waiting)
            waiting = [position for position in waiting if self.blocks[position].resident is None]
        message = self._in_slots(waiting, region)
        if message is not None:
            yield message

    def _resident(self, engines: set[int], block: Block) -> Resident | None:
        """Return where an engine has a block; a peer is told of ENGINES_MAX engines at most."""
        found = self.source.engines.find(block.key)
        if found is None or (found.engine not in engines and len(engines) >= m.ENGINES_MAX):
            return None
        engines.add(found.engine)
        return found

    def _in_engines(self, waiting: list[int]) -> Iterator[m.Resident]:
        """Name what engines have, by engine and how many engine blocks a block has."""
        found: dict[tuple[int, int], list[tuple[int, Resident]]] = {}
        for position in waiting:
            place = self.blocks[position].resident
            if place is not None:
                found.setdefault((place.engine, len(place.blocks)), []).append((position, place))
        for (engine, _), places in found.items():
            new = () if engine in self.engines else tuple(self.source.engines.ranks(engine))
            self.engines.add(engine)
            positions = u32([position for position, _ in places])
            blocks = u32([block for _, place in places for block in place.blocks])
            yield m.Resident(self.number, positions, engine, blocks, new)

    def _in_slots(self, waiting: list[int], region: Region) -> m.Have | None:
        positions: list[int] = []
        places: list[int] = []
        generations: list[int] = []
        sums = array("Q")
        by_engine: list[int] = []
        regions: list[m.Region] = []
        metadata = b""
        for position in waiting:
            block = self.blocks[position]
            if block.slot is None:
                continue
            extent, number = self.source.place(block.slot)
            if extent not in self.peer.regions:
                found = region(extent)
                if found is None:
                    self.untold.append(position)  # it is being mapped
                    continue
                self.peer.regions.add(extent)
                regions.append(found[0])
                metadata = found[1]
            positions.append(position)
            by_engine += [] if block.resident is None else [position]
            places += extent, number
            generations.append(self.source.generations[block.slot])
            sums.append(block.sum)
        if not positions:
            return None
        packed = u32(positions), u32(places), u32(generations), sums.tobytes()
        return m.Have(self.number, *packed, tuple(regions), metadata, u32(by_engine))

    # What is written to the peer: to its landing slots, or into its engine

    def learn(self, fill: m.Fill) -> list[int]:
        """Note where blocks go in the peer's engine; return which. Raises ProtocolError."""
        if not (self.push and self.direct) or bool(fill.ranks) == bool(self.ranks):
            raise ProtocolError(
                f"engine blocks with {len(fill.ranks)} ranks for job {self.number}, expected a"
                " direct push, and ranks once"
            )
        if fill.ranks:
            check_ranks(self.source.layout, fill.ranks)
            self.ranks = tuple(msgspec.structs.replace(rank, metadata=b"") for rank in fill.ranks)
        targets = m.residents_of(fill, len(self.blocks))
        for position, blocks in targets.items():
            self._check_target(position, blocks)
            self.blocks[position].target = blocks
        return list(targets)

    def _check_target(self, position: int, blocks: Sequence[int]) -> None:
        layout, group = self.source.layout, self.blocks[position].group
        most = layout.slot_bytes // _stride(layout, group)
        if len(blocks) > most or not any(blocks):
            raise ProtocolError(
                f"engine blocks {list(blocks[:8])} for position {position}, expected up to {most},"
                " and one that is not 0"
            )
        if not any(rank.pages[group] for rank in self.ranks):
            raise ProtocolError(f"no pages of group {group}, which position {position} is of")
        if self.blocks[position].target is not None:
            raise ProtocolError(f"a second place for position {position}")

    def slot_writes(self, positions: Sequence[int]) -> Iterator[tuple[list[Tag], SlotWrite]]:
        """Gather writes to landing slots, one for each pair of extents."""
        batches: dict[tuple[int, m.Region], list[tuple[int, int, int]]] = {}
        for position in positions:
            block = self.blocks[position]
            if block.slot is not None and block.landing is not None:
                extent, number = self.source.place(block.slot)
                region, slot = block.landing
                batches.setdefault((extent, region), []).append((position, number, slot))
        size = self.source.layout.slot_bytes
        for (extent, region), moves in batches.items():
            numbers, slots = [move[1] for move in moves], [move[2] for move in moves]
            tags = self.tags(move[0] for move in moves)
            yield tags, SlotWrite(extent, numbers, size, region, slots)

    def engine_writes(self, positions: Sequence[int]) -> Iterator[tuple[list[Tag], EngineWrite]]:
        """Gather writes from our engines' memory, a few blocks at a time."""
        batches: dict[tuple[int, int], list[Placed]] = {}
        for position in positions:
            block = self.blocks[position]
            find = not block.moved and block.target is not None
            block.resident = self.source.engines.find(block.key) if find else None
            place, target = block.resident, block.target or ()
            pieces = self._pieces(block.group) * len(target)
            if place is None or len(place.blocks) < len(target) or pieces > FILL_PIECES:
                block.resident = None
                continue
            pairs = [(own, at) for own, at in zip(place.blocks, target, strict=False) if at]
            own, there = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            batches.setdefault((place.engine, block.group), []).append((position, own, there))
        for (engine, group), found in batches.items():
            ranks = tuple(
                RankPages(rank.agent, b"", (rank.pages[group],), rank.gpu)
                for rank in self.ranks
                if rank.pages[group]
            )
            for tags, own, there in self._batches(group, found):
                yield self._counted(tags), EngineWrite(engine, group, ranks, own, there)

    def fills(self, positions: Sequence[int]) -> Iterator[tuple[list[Tag], SlotFill]]:
        """Gather writes from slots to the peer's engine, for each rank, extent and group."""
        layout = self.source.layout
        batches: dict[tuple[int, int], list[Placed]] = {}
        for position in positions:
            block = self.blocks[position]
            if block.slot is None or block.target is None or block.resident is not None:
                continue
            extent, number = self.source.place(block.slot)
            first, stride = number * layout.slot_bytes, _stride(layout, block.group)
            offsets = [first + part * stride for part, at in enumerate(block.target) if at]
            wanted = [at for at in block.target if at]
            batches.setdefault((extent, block.group), []).append((position, offsets, wanted))
        for (extent, group), found in batches.items():
            for tags, offsets, blocks in self._batches(group, found):
                for rank in self.ranks:
                    if rank.pages[group]:
                        yield self._counted(tags), SlotFill(extent, rank, group, offsets, blocks)

    def _batches(
        self, group: int, found: list[Placed]
    ) -> Iterator[tuple[list[Tag], list[int], list[int]]]:
        pieces = self._pieces(group) * max(len(blocks) for _, _, blocks in found)
        blocks_max = FILL_BYTES // self.source.layout.slot_bytes
        step = max(1, min(blocks_max, FILL_PIECES // max(1, pieces)))
        for at in range(0, len(found), step):
            batch = found[at : at + step]
            sources = [place for _, places, _ in batch for place in places]
            targets = [place for _, _, places in batch for place in places]
            yield self.tags(position for position, _, _ in batch), sources, targets

    def _pieces(self, group: int) -> int:
        """Count those of an engine block, in all ranks."""
        return sum(run.pieces for rank in self.ranks for run in rank.pages[group])

    def _counted(self, tags: list[Tag]) -> list[Tag]:
        for tag in tags:
            self.blocks[tag.position].writes += 1
        return tags

    def split_written(self, tags: list[Tag], *, ok: bool) -> tuple[list[Tag], list[Tag]]:
        """Split what was written from what has to be written again, from its slot.

        An engine did not write that, or overwrote its own blocks meanwhile.
        """
        rest, again = [], []
        for tag in tags:
            block = self.blocks[tag.position]
            if block.resident is None or (ok and not self.is_overwritten(block)):
                rest.append(tag)
            else:
                block.moved, block.resident, block.writes = True, None, 0
                again.append(tag)
        return rest, again


def check_ranks(layout: SlotLayout, ranks: Sequence[RankPages]) -> None:
    """Raise ProtocolError for pages that do not fit the parts of such slots."""
    runs = [run for rank in ranks for pages in rank.pages for run in pages]
    if len(runs) > RUNS_MAX:
        raise ProtocolError(f"{len(runs)} runs of pages, expected up to {RUNS_MAX}")
    if (pieces := sum(run.pieces for run in runs)) > PIECES_MAX:
        raise ProtocolError(f"{pieces} pieces of a block, expected up to {PIECES_MAX}")
    for number, rank in enumerate(ranks):
        if len(rank.pages) != len(layout.rules):
            raise ProtocolError(
                f"pages of {len(rank.pages)} groups of rank {number}, expected {len(layout.rules)}"
            )
        for group, pages in enumerate(rank.pages):
            end = max((run.offset + run.pieces * run.piece_bytes for run in pages), default=0)
            if end > _stride(layout, group):
                raise ProtocolError(
                    f"pages of rank {number} up to byte {end} of a part of group {group},"
                    f" expected up to {_stride(layout, group)}"
                )


def _stride(layout: SlotLayout, group: int) -> int:
    return layout.ranks[0].groups[group].stride
