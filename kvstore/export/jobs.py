"""What a producer keeps of its peers' wants, and what it needs of others."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvstore.export import messages as m
from kvstore.index import Entry
from kvstore.layout import RankPages, SlotLayout
from kvstore.leases import Generations
from kvstore.manager import Manager
from kvstore.tiering import Tiering
from kvstore.types import BlockKey, Slot


class Tag(msgspec.Struct, frozen=True):
    """Names one wanted block to whoever works on it."""

    peer: int
    job: int
    position: int


class Resident(msgspec.Struct, frozen=True):
    """A block in an engine's own memory, as long as its engine blocks have these generations."""

    engine: int
    blocks: tuple[int, ...]
    generations: tuple[int, ...]


class Engines(Protocol):
    """What engines still have in their own memory."""

    def find(self, key: BlockKey) -> Resident | None:
        """Return where a block is, that a slot has, too."""
        ...

    def holds(self, place: Resident) -> bool:
        """Tell whether it is there at this moment."""
        ...

    def ranks(self, number: int) -> Sequence[RankPages]:
        """Say how an engine's memory is reached, by rank."""
        ...


class Source(Protocol):
    """A namespace, as much of it as a hand-over needs."""

    layout: SlotLayout
    manager: Manager
    tiering: Tiering

    @property
    def engines(self) -> Engines:
        """Their own memory."""
        ...

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


class Work(Protocol):
    """What takes time and is done elsewhere: each call has one answer, by its tags, later.

    The slots keep their bytes until then.
    """

    def sum(self, tags: list[Tag], source: Source, blocks: list[tuple[BlockKey, Slot]]) -> None:
        """Take blocks' checksums; the answer is Producer.summed."""
        ...

    def write(self, tags: list[Tag], agent: str, write: Write) -> None:
        """Write slots of one of our extents to a peer; the answer is Producer.written."""
        ...

    def fill(self, tags: list[Tag], fill: Fill) -> None:
        """Write parts of slots to an engine of a peer's; the answer is Producer.written."""
        ...

    def abandon(self, tag: Tag) -> None:
        """Nobody waits for a write any more: what has not begun is not begun; written() comes."""
        ...

    def region(self, extent: int) -> tuple[m.Region, bytes] | None:
        """Say where the exporter has an extent, and its metadata then; None: not yet."""
        ...


class Write(msgspec.Struct, frozen=True):
    """Slots of one extent, and the landing slots that they go to."""

    extent: int
    numbers: list[int]
    slot_bytes: int
    landing: m.Region
    landing_slots: list[int]


class Fill(msgspec.Struct, frozen=True):
    """Parts of slots of one extent and group, and one rank's engine blocks that they go to.

    offsets: where in the extent each part begins.
    """

    extent: int
    rank: RankPages
    group: int
    offsets: list[int]
    blocks: list[int]


class State(enum.Enum):
    """Where a wanted block is on its way; see the top of producer.py."""

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
    state: State = State.DONE
    slot: Slot | None = None
    entry: Entry | None = None
    sum: int = 0
    landing: tuple[m.Region, int] | None = None
    target: list[int] | None = None  # engine blocks of the peer's, if it is written there
    writes: int = 0  # that have not ended
    failed: bool = False  # one of them
    resident: Resident | None = None  # where it was told to be, if not in its slot
    moved: bool = False  # it was told so, and is not there any more


class Job(msgspec.Struct, eq=False):
    """What a consumer wants in one go; over: its lease has ended.

    offer_ns: until when an offer may wait; None: it was made. order: of the blocks, by the index
    in their chain. direct: they may be read in an engine's memory, and need no sums.
    """

    number: int
    blocks: list[Block]
    request: str
    push: bool
    deadline_ns: int
    offer_ns: int | None
    order: list[tuple[int, int]]
    awaited: deque[int] = msgspec.field(default_factory=deque)  # positions, first blocks first
    news: list[int] = []  # positions to tell
    unsummed: list[int] = []  # and those whose sums are to be asked for
    unwritten: list[int] = []  # and those to write
    left: int = 0  # blocks that are not DONE
    direct: bool = False
    engines: set[int] = set()  # whose memory was told
    ranks: tuple[RankPages, ...] = ()  # of the peer's engine, if blocks are written there
    over: bool = False
    released: bool = False


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
