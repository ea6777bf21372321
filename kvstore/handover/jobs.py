"""What a producer keeps of its peers' wants, and what it needs of others."""

from __future__ import annotations

import enum
from collections import deque
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
from kvstore.wire import peer as m

UNKNOWN_NS = 300_000_000  # a router sends a request to both engines at once, say
JOBS_MAX = 1024  # of one peer
BLOCKS_MAX = 1 << 20  # wanted by one peer at one time


class Tag(msgspec.Struct, frozen=True):
    """Names one wanted block to whoever works on it."""

    peer: int
    job: int
    position: int


class Source(Protocol):
    """A namespace, as much of it as a hand-over needs."""

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
        """Note that nobody has to wait for this connection to map or unmap an extent."""
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

    def give(self, tags: list[Tag], source: Source, give: Give) -> None:
        """Have our engine write what it has to one of a peer's; the answer is written()."""
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


class Give(msgspec.Struct, frozen=True):
    """Engine blocks of one of our engines, of one group, and those of a peer's that they go to.

    engine: its session's number. ranks: of the peer's, with the group's pages and no others.
    """

    engine: int
    group: int
    ranks: tuple[RankPages, ...]
    blocks: list[int]
    targets: list[int]


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
    resident: Resident | None = None  # where it was told to be, or is written from, if not its slot
    moved: bool = False  # it is not there any more


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


def job_of(peer: Peer, want: m.Want, now_ns: int) -> Job:
    """Return what a peer wants. Raises ProtocolError for what cannot be, and for too much."""
    rules = peer.source.layout.rules
    wanted = m.wanted_of(want, len(rules))
    if want.job <= 0 or want.job in peer.jobs:
        raise ProtocolError(f"job {want.job}, expected a new number above 0")
    if len(peer.jobs) >= JOBS_MAX:
        raise ProtocolError(f"more than {JOBS_MAX} jobs at one time")
    if peer.blocks + len(wanted) > BLOCKS_MAX:
        raise ProtocolError(f"more than {BLOCKS_MAX} blocks wanted at one time")
    if want.push and not peer.agent:
        raise ProtocolError("a push to a peer that named no exporter")
    chain = Chain(want.hashes, want.width, len(rules), want.scope)
    blocks = [Block(chain.key(group, index)) for group, index in wanted]
    end_ns, offer_ns = now_ns + m.lease_ns(want.lease_ms), now_ns + UNKNOWN_NS
    order = [(index, group) for group, index in wanted]
    job = Job(want.job, blocks, want.request, want.push, end_ns, offer_ns, order)
    job.direct = want.direct
    return job
