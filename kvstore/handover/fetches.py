"""What a store keeps of its fetches: the state and the places of wanted blocks, and their loads."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvstore.core.errors import ProtocolError, TierIOError
from kvstore.core.layout import RankPages
from kvstore.core.types import BlockKey, JobId, JobResult, TransferJob
from kvstore.handover.runs import Part, Places, Run, States, at, numbers, runs_of
from kvstore.handover.transfers import Regions, SlotRead
from kvstore.wire import peer as m
from kvstore.wire.framing import u32

ENGINE, OTHER = "gpu", "other"
TIERS = ("cpu", "nvme", "prefill", ENGINE)  # of a peer's, and how they are counted

# States of a wanted block; see the top of consumer.py.
WANTED, OFFERED, CLAIMED, MOVING, LANDED, CHECKED, DONE = range(7)

UNCLAIMED = bytes((WANTED, OFFERED))
OPEN = bytes(range(DONE))
LANDING = bytes((LANDED, CHECKED))
PULLED = bytes((MOVING, LANDED, CHECKED))
FAILS = bytes(set(OPEN) - {LANDED})  # at once; a copy into a slot of ours ends first


@dataclass(eq=False)
class Fetch:
    """Blocks wanted from one peer by one Want; direct: by workers, into engine memory."""

    number: int
    peer: int
    keys: list[BlockKey]
    heard_ns: int  # its start, then when its peer last answered
    extend_ns: int
    request: str
    push: bool
    direct: bool
    arrived_ns: int = field(init=False)  # the last block
    waited_ns: int = field(init=False)  # when a load was last known to wait for it
    left: int = field(init=False)  # blocks that are not DONE
    offered: bool = False
    computed_ns: int | None = None  # when its peer said that it still computes
    released: bool = False
    tiers: tuple[str, ...] = ()  # of the peer's
    ranks_told: bool = False  # to the peer: where it writes
    ended: bool = False  # the peer writes nothing any more
    late: set[int] = field(default_factory=set)  # given up, and something may still be written
    # Of the peer's engines, what is known of their memory, and which of their blocks a block is.
    engines: dict[int, Sequence[RankPages]] = field(default_factory=dict)
    residents: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    by_engine: set[int] = field(default_factory=set)  # written from the peer's engine
    # Of each block:
    states: States = field(init=False)
    which: bytearray = field(init=False)  # the tier that has it, from 1; 0: it was not offered
    slots: array[int] = field(init=False)  # ours
    loads: array[int] = field(init=False)  # the load that it is for,
    parts: array[int] = field(init=False)  # and which of its blocks it is
    landing: array[int] = field(init=False)  # its landing slot, in MOVING and LANDED
    places: Places = field(init=False)  # where it can be read
    sums: array[int] = field(init=False)

    def __post_init__(self) -> None:
        """Start with all blocks open."""
        self.arrived_ns = self.waited_ns = self.heard_ns
        self.left = count = len(self.keys)
        self.states, self.which, self.places = (
            States(count, WANTED),
            bytearray(count),
            Places(count),
        )
        self.slots, self.loads, self.parts = numbers(count), numbers(count), numbers(count)
        self.landing, self.sums = numbers(count), numbers(count, "Q")

    @property
    def all(self) -> Run:
        """The run of all blocks."""
        return 0, len(self.keys)

    def part(self, positions: Sequence[int]) -> Part:
        """Name some blocks in the store."""
        return Part(self.peer, self.number, positions)

    def take(self, offer: m.Offer) -> None:
        """Note which blocks the peer has. Raises ProtocolError for a second or invalid offer."""
        offered = m.positions_of(offer.positions, len(self.keys))
        if self.offered or len(offer.which) != len(offered):
            raise ProtocolError(
                f"a second offer, or {len(offer.which)} tiers of {len(offered)} blocks"
            )
        if (most := max(offer.which, default=0)) >= min(len(offer.tiers), 255) and offered:
            raise ProtocolError(f"tier {most}, expected below {len(offer.tiers)}")
        self.offered = True
        self.tiers = offer.tiers
        which = memoryview(bytes(tier + 1 for tier in offer.which))
        for run in runs_of(offered):
            self.which[slice(*run)], which = which[: run[1] - run[0]], which[run[1] - run[0] :]
            for part in self.states.within(run, bytes((WANTED,))):  # others were given up before
                self.states.put(part, OFFERED)

    def put(self, have: m.Have, regions: Regions) -> tuple[Sequence[int], Sequence[int]]:
        """Note where blocks can be read. Raises ProtocolError for an unknown region or engine.

        Returns their positions, and of these those whose place was not known before.
        """
        if have.engine is not None:
            positions = m.positions_of(have.positions, len(self.keys))
            self._put_engine(have.engine, have.ranks, m.engine_blocks_of(positions, have.places))
            return positions, positions
        positions, extents, slots, sums = m.places_of(have, len(self.keys))
        given = m.positions_of(have.given, len(self.keys))
        if self.push:
            self.by_engine.update(given)
        known = set(self.places.known(positions))
        by_extent: dict[int, list[int]] = {}
        for n, extent in enumerate(extents):
            by_extent.setdefault(extent, []).append(n)
        for extent, numbered in by_extent.items():
            of_it = m.neighbours(numbered)
            found = m.neighbours([positions[n] for n in of_it])
            self.places.put(found, regions.get(self.peer, extent), at(slots, of_it))
        done = 0
        for first, end in runs_of(positions):
            self.sums[first:end] = sums[done : done + end - first]
            done += end - first
        return positions, [p for p in positions if p not in known] if known else positions

    def _put_engine(
        self, engine: int, ranks: Sequence[RankPages], blocks: dict[int, list[int]]
    ) -> None:
        if not self.direct or self.push:
            raise ProtocolError(f"job {self.number} was not asked to be read in an engine")
        if ranks and len(self.engines) < m.ENGINES_MAX:
            self.engines[engine] = ranks
        if engine not in self.engines:
            raise ProtocolError(
                f"engine {engine} without its memory, or more than {m.ENGINES_MAX} of them"
            )
        self.residents |= {position: (engine, found) for position, found in blocks.items()}

    @property
    def offers(self) -> dict[int, str]:
        """The peer's tier of each block that it has offered, by position."""
        return {at: self.tiers[tier - 1] for at, tier in enumerate(self.which) if tier}

    def count_tiers(self, run: Run) -> Counter[str]:
        """Count blocks by the peer's tier that they came from."""
        found: Counter[str] = Counter()
        of_engine = [p for p in range(*run) if p in self.by_engine or p in self.residents]
        which = bytearray(self.which[slice(*run)])
        for position in of_engine:
            found[ENGINE] += 1
            which[position - run[0]] = 0
        for number, tier in enumerate(self.tiers, 1):
            found[tier if tier in TIERS else OTHER] += which.count(number)
        return +found

    def slot_reads(self, positions: Sequence[int]) -> Iterator[tuple[Sequence[int], SlotRead]]:
        """Gather reads of the peer's slots by its extent: positions, and a read of them."""
        for region, found, slots in self.places.by_region(positions):
            yield found, SlotRead(region, slots, at(self.landing, found))

    def engine_reads(self, positions: Iterable[int]) -> Iterator[tuple[int, dict[int, list[int]]]]:
        """Gather reads of engines' memory, by engine and how many engine blocks a block has."""
        reads: dict[tuple[int, int], dict[int, list[int]]] = {}
        for position in positions:
            if position in self.residents:
                engine, found = self.residents[position]
                reads.setdefault((engine, len(found)), {})[position] = found
        for (engine, _), blocks in reads.items():
            yield engine, blocks

    def fills(
        self, targets: Mapping[int, list[int]], ranks: Sequence[RankPages]
    ) -> Iterator[m.Land]:
        """Name the engine blocks to write to, by how many of them a block has; the ranks once."""
        sizes: dict[int, list[int]] = {}
        for position, found in targets.items():
            if self.states[position] == CLAIMED:
                self.states.put((position, position + 1), MOVING)
                sizes.setdefault(len(found), []).append(position)
        for positions in sizes.values():
            blocks = u32([block for position in positions for block in targets[position]])
            new = () if self.ranks_told else tuple(ranks)
            self.ranks_told = True
            yield m.Land(self.number, u32(positions), blocks, ranks=new)


class _Load(msgspec.Struct, eq=False):
    job_id: JobId
    left: int
    done: bytearray


class Loads:
    """Jobs that blocks are fetched for; one ends with the last of its blocks."""

    def __init__(self) -> None:
        """Start without any."""
        self._open: dict[int, _Load] = {}
        self._results: list[JobResult] = []
        self._next = 1

    def begin(self, job: TransferJob) -> int:
        """Open a load and return its number; it has a result once all its blocks have ended."""
        number, self._next = self._next, self._next % 0xFFFFFFFF + 1
        self._open[number] = _Load(job.job_id, len(job.keys), bytearray(len(job.keys)))
        return number

    def ended(self, number: int, run: Run, *, ok: bool) -> None:
        """Record the end of some of a load's blocks."""
        load, (first, end) = self._open[number], run
        load.done[first:end] = bytes((ok,)) * (end - first)
        load.left -= end - first
        if load.left == 0:
            del self._open[number]
            done = load.done.find(False)
            error = None if done < 0 else TierIOError("a block did not arrive")
            self._results.append(
                JobResult(load.job_id, len(load.done) if error is None else done, error)
            )

    def take_results(self) -> list[JobResult]:
        """Return the results of jobs that have ended, once each."""
        results, self._results = self._results, []
        return results
