"""A consumer's fetches, and what it needs of others: how blocks are named, and what is done."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvstore.core.errors import ProtocolError, TierIOError
from kvstore.core.layout import RankPages
from kvstore.core.types import BlockKey, JobId, JobResult, Slot, TransferJob
from kvstore.wire import peer as m
from kvstore.wire.framing import u32

REGIONS_MAX = 1 << 16  # of all peers
ENGINE = "gpu"
TIERS = ("cpu", "nvme", "prefill", ENGINE)  # of a peer's, and how they are counted
OTHER = "other"


class Waits(NamedTuple):
    """How long blocks of a fetch may take: without one of them, and while a peer computes."""

    quiet_ns: int = 2_000_000_000
    limit_ns: int = 60_000_000_000


WAITS = Waits()


class State(enum.Enum):
    """Where a wanted block is on its way; see the top of kvstore/handover/consumer.py."""

    WANTED = "wanted"
    OFFERED = "offered"
    CLAIMED = "claimed"
    MOVING = "moving"
    LANDED = "landed"
    CHECKED = "checked"
    DONE = "done"


class Block(msgspec.Struct, eq=False):
    """One wanted block."""

    key: BlockKey
    state: State = State.WANTED
    slot: Slot | None = None
    load: tuple[JobId, int] | None = None  # and its number in there
    landing: int | None = None
    place: tuple[m.Region, int] | None = None  # and its number there, once it can be read
    resident: tuple[int, list[int]] | None = None  # or an engine of the peer's, and its blocks
    given: bool = False  # by an engine of the peer's, from its memory
    sum: int = 0


class Fetched(msgspec.Struct):
    """What is counted of fetches: events by name, and blocks by the tier their peer had them in."""

    events: Counter[str] = msgspec.field(default_factory=Counter)
    blocks: Counter[str] = msgspec.field(default_factory=Counter)


class Fetch(msgspec.Struct, eq=False):
    """What is wanted from one peer in one go; direct: by workers, into engine memory."""

    number: int
    peer: int
    blocks: list[Block]
    push: bool
    heard_ns: int
    extend_ns: int
    arrived_ns: int  # the last block
    waited_ns: int  # when a load was last known to wait for it
    left: int  # blocks that are not DONE
    request: str = ""
    offered: bool = False
    computed_ns: int | None = None  # when its peer said that it computes what it has not
    released: bool = False
    tiers: dict[int, str] = {}  # position -> the peer's tier
    direct: bool = False
    ranks_told: bool = False  # to the peer: where it writes
    ended: bool = False  # the peer writes nothing any more
    engines: dict[int, Sequence[RankPages]] = {}  # of the peer's, whose memory was told

    def learn(self, message: m.Resident) -> Collection[int]:
        """Take note of an engine, and return which blocks are there.

        Raises ProtocolError for too many engines, or one that nothing is told of.
        """
        if message.ranks and len(self.engines) < m.ENGINES_MAX:
            self.engines[message.engine] = message.ranks
        if message.engine not in self.engines:
            raise ProtocolError(
                f"engine {message.engine} without its memory, or more than {m.ENGINES_MAX} of them"
            )
        found = m.residents_of(message, len(self.blocks))
        for position, blocks in found.items():
            self.blocks[position].resident = message.engine, blocks
        return found

    def written(self, have: m.Have, positions: Sequence[int]) -> None:
        """These have been written, some by an engine. Raises ProtocolError."""
        for position in m.positions_of(have.given, len(self.blocks)):
            self.blocks[position].given = self.push
        for position in positions:
            self.blocks[position].state = State.CHECKED

    def take(self, offer: m.Offer) -> None:
        """Note what is to be had. Raises ProtocolError for a second offer, or one without sense."""
        offered = m.positions_of(offer.positions, len(self.blocks))
        if self.offered or len(offer.which) != len(offered):
            raise ProtocolError(
                f"a second offer, or {len(offer.which)} tiers of {len(offered)} blocks"
            )
        self.offered = True
        for position, tier in zip(offered, offer.which, strict=True):
            if tier >= len(offer.tiers):
                raise ProtocolError(f"tier {tier}, expected below {len(offer.tiers)}")
            self.tiers[position] = offer.tiers[tier]
            if self.blocks[position].state is State.WANTED:  # else it was given up before
                self.blocks[position].state = State.OFFERED

    def tier_of(self, position: int) -> str:
        """Name the tier of the peer's that a block came from, as it is counted."""
        block, tier = self.blocks[position], self.tiers[position]
        tier = ENGINE if block.given or block.resident is not None else tier
        return tier if tier in TIERS else OTHER


class Tag(msgspec.Struct, frozen=True):
    """Names one block of a fetch to whoever works on it."""

    fetch: int
    position: int


class Read(msgspec.Struct, frozen=True):
    """Slots of one of a peer's extents, and the landing slots that they are read into."""

    region: m.Region
    numbers: list[int]
    landing: list[int]


class EngineRead(msgspec.Struct, frozen=True):
    """Blocks in the memory of one of a peer's engines, by position; ranks: how to reach it."""

    engine: int
    ranks: Sequence[RankPages]
    blocks: dict[int, list[int]]


class Check(msgspec.Struct, frozen=True):
    """A landed block: what it has to be, and where it goes if it is."""

    key: BlockKey
    landing: int
    sum: int
    slot: Slot


class Work(Protocol):
    """What takes time and is done elsewhere: each call has one answer, by its tags, later."""

    def read(self, tags: list[Tag], peer: int, read: Read) -> None:
        """Read a peer's slots for one fetch; the answer is Consumer.moved."""
        ...

    def abandon(self, tag: Tag) -> None:
        """Nobody waits for a read any more: what has not begun is not begun; moved() comes."""
        ...

    def check(self, tags: list[Tag], blocks: list[Check]) -> None:
        """Copy landed blocks to their slots if their sums are right; the answer: checked."""
        ...

    def pass_on(self, number: int, peer: int, read: Read, positions: list[int]) -> None:
        """Have workers read a peer's slots; the answer is Consumer.arrived. read: lands nowhere."""
        ...

    def pass_on_engine(self, number: int, read: EngineRead) -> None:
        """Have workers read the memory of a peer's engine; the answer is Consumer.arrived."""
        ...

    def push(self, number: int) -> None:
        """Have workers say where a peer may write; the answer is Consumer.fill."""
        ...

    def passed(self, number: int, position: int, *, ok: bool, written: bool) -> None:
        """Tell the workers what came of a block that they wait for; written: it may still be."""
        ...


class Landing(Protocol):
    """Slots that only we and the exporters touch, under a cap in bytes."""

    @property
    def count(self) -> int:
        """Count the slots there are."""
        ...

    def open(self) -> None:
        """They will be wanted soon."""
        ...

    def take(self, count: int) -> list[int]:
        """Take up to count free ones."""
        ...

    def give(self, slots: Collection[int]) -> None:
        """Give some back."""
        ...

    def region(self) -> tuple[m.Region, bytes]:
        """Say where our exporter has them, and its metadata since then."""
        ...


class _Load(msgspec.Struct, eq=False):
    left: int
    done: list[bool]


class Loads:
    """Jobs that blocks are fetched for; one ends with the last of its blocks."""

    def __init__(self) -> None:
        """Start without any."""
        self._open: dict[JobId, _Load] = {}
        self._results: list[JobResult] = []

    def begin(self, job: TransferJob) -> None:
        """Have a result once all its blocks have ended."""
        self._open[job.job_id] = _Load(len(job.keys), [False] * len(job.keys))

    def ended(self, part: tuple[JobId, int], *, ok: bool) -> None:
        """A job's block is there, or will not be."""
        load = self._open[part[0]]
        load.done[part[1]] = ok
        load.left -= 1
        if load.left == 0:
            del self._open[part[0]]
            done = load.done.index(False) if False in load.done else len(load.done)
            error = None if done == len(load.done) else TierIOError("a block did not arrive")
            self._results.append(JobResult(part[0], done, error))

    def take_results(self) -> list[JobResult]:
        """Return the results of jobs that have ended, once each."""
        results, self._results = self._results, []
        return results


def reads_of(blocks: Iterable[tuple[int, Block]]) -> Iterator[tuple[list[int], Read]]:
    """Gather what can be read by the peer's extent: positions, and a read of them."""
    reads: dict[m.Region, tuple[list[int], Read]] = {}
    for position, block in blocks:
        if block.place is not None:
            region, slot = block.place
            positions, read = reads.setdefault(region, ([], Read(region, [], [])))
            positions.append(position)
            read.numbers.append(slot)
            if block.landing is not None:
                read.landing.append(block.landing)
    yield from reads.values()


def fills_of(
    fetch: Fetch, targets: Mapping[int, list[int]], ranks: Sequence[RankPages]
) -> Iterator[m.Fill]:
    """Tell the peer where to write, by how many engine blocks a block has; the ranks once."""
    sizes: dict[int, list[int]] = {}
    for position, found in targets.items():
        if fetch.blocks[position].state is State.CLAIMED:
            fetch.blocks[position].state = State.MOVING
            sizes.setdefault(len(found), []).append(position)
    for positions in sizes.values():
        blocks = u32([block for position in positions for block in targets[position]])
        new = () if fetch.ranks_told else tuple(ranks)
        fetch.ranks_told = True
        yield m.Fill(fetch.number, u32(positions), blocks, new)


def engine_reads_of(fetch: Fetch, blocks: Iterable[tuple[int, Block]]) -> Iterator[EngineRead]:
    """Gather what is in engines' memory, by engine and how many engine blocks a block has."""
    reads: dict[tuple[int, int], EngineRead] = {}
    for position, block in blocks:
        if block.resident is not None:
            engine, found = block.resident
            read = EngineRead(engine, fetch.engines[engine], {})
            reads.setdefault((engine, len(found)), read).blocks[position] = found
    yield from reads.values()


class Regions:
    """Memory of peers' exporters, by peer and extent."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[tuple[int, int], m.Region] = {}

    def get(self, peer: int, extent: int, slot: int) -> m.Region:
        """Return one that has a slot. Raises ProtocolError for what is not known."""
        found = self._known.get((peer, extent))
        if found is None or slot >= found.slots:
            raise ProtocolError(f"slot {slot} of extent {extent}, which is not known or shorter")
        return found

    def learn(self, peer: int, regions: Sequence[m.Region]) -> None:
        """Take note of a peer's; who names too many loses its first ones."""
        self._known |= {(peer, region.extent): region for region in regions}
        if len(self._known) > REGIONS_MAX:
            of_peer = [at for at in self._known if at[0] == peer]
            for at in of_peer[: len(self._known) - REGIONS_MAX]:
                del self._known[at]

    def forget(self, peer: int) -> None:
        """A peer is gone."""
        self._known = {at: region for at, region in self._known.items() if at[0] != peer}


class Turns:
    """Blocks that lack nothing but a landing slot; peers take turns.

    One peer has three quarters of the slots at most, so that others land beside one that hangs.
    """

    def __init__(self, landing: Landing) -> None:
        """landing: where slots come from."""
        self._landing = landing
        self._waiting: dict[int, deque[Tag]] = {}  # by peer
        self._used: Counter[int] = Counter()  # slots that are a peer's

    def queue(self, peer: int, tag: Tag) -> None:
        """A block waits for a slot."""
        self._waiting.setdefault(peer, deque()).append(tag)

    def next(
        self, claimed: Callable[[Tag], Block | None]
    ) -> Iterator[tuple[int, int, list[tuple[int, Block]]]]:
        """Give out free slots; yields a peer, a fetch, and its blocks with their positions.

        claimed(tag): the block, if it still wants a slot.
        """
        share = max(1, self._landing.count * 3 // 4)
        for peer, waiting in list(self._waiting.items()):
            room = min(share - self._used[peer], len(waiting))
            free = self._landing.take(room) if room > 0 else []
            chosen: dict[int, list[tuple[int, Block]]] = {}
            while waiting and free:
                tag = waiting.popleft()
                block = claimed(tag)
                if block is not None:
                    block.landing = free.pop()
                    chosen.setdefault(tag.fetch, []).append((tag.position, block))
            self._landing.give(free)
            if chosen or not waiting:
                del self._waiting[peer]
            if chosen and waiting:
                self._waiting[peer] = waiting  # behind those that got none
            for number, blocks in chosen.items():
                self._used[peer] += len(blocks)
                yield peer, number, blocks

    def left(self, peer: int) -> None:
        """A peer has one slot less."""
        self._used[peer] -= 1

    def forget(self, peer: int) -> None:
        """A peer is gone: nothing of it waits."""
        self._waiting.pop(peer, None)
        self._used = +self._used
