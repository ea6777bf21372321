"""A producer's jobs: what peers want, what they are told of it, and what is written to them."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from kvstore.core.errors import InvariantBroken, ProtocolError
from kvstore.core.index import Entry
from kvstore.core.layout import RankPages, SlotLayout
from kvstore.core.manager import Manager
from kvstore.core.tiering import Tiering
from kvstore.core.types import BlockKey, Chain, LookupResult, Slot
from kvstore.handover.engine_blocks import Engines, Resident
from kvstore.handover.moves import MOVING, STAGING, SUMMED, SUMMING, TOLD, WANTED, Move
from kvstore.handover.request_leases import RequestLeases
from kvstore.handover.runs import Part, Places, Run, at, joined, numbers, runs_of
from kvstore.handover.transfers import slot_move
from kvstore.wire import peer as m
from kvstore.wire.framing import U32, WORD, Message, u32
from tiers.nixl.messages import Fill, Transfer

UNKNOWN_NS = 300_000_000  # a router that sends a request to both engines at once, say
LOOK_NS = 20_000_000  # meanwhile, its first missing block is looked for again
JOBS_MAX = 1024  # of one peer
BLOCKS_MAX = 1 << 20  # wanted by one peer at one time
FILL_BYTES = 8 << 20  # of one write into an engine: once abandoned, it is in quarantine as a whole
FILL_PIECES = 1 << 15  # of one, of all ranks together
WRITING_BYTES = 512 << 20  # of one direct push under way: others' transfers wait behind them
RUNS_MAX = 1 << 13  # of pages, of all ranks together
PIECES_MAX = 1 << 16  # of one block there
MEMORY, PREFILL = "cpu", "prefill"  # where an offered block is, beside the names of lower tiers

Placed = tuple[int, list[int], list[int]]
"""A position, and what goes where."""


class OwnExporter(NamedTuple):
    """Our exporter: its agent's name, how peers reach it, and extents that it has mapped."""

    agent: str
    metadata: bytes
    regions: Mapping[int, m.Region]


class Source(Protocol):
    """A namespace, as far as a hand-over uses it."""

    layout: SlotLayout
    manager: Manager
    tiering: Tiering
    engines: Engines
    block_ns: int  # that an engine takes to compute one; 0: not known
    peer_block_ns: int  # likewise one of a peer

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes."""

    def place(self, slot: Slot) -> tuple[int, int]:
        """Return a slot's extent and its number in there."""

    def places(self, slots: array[int]) -> tuple[array[int], array[int]]:
        """Return the extent of each slot, and its number in there."""

    def settle(self, extent: int, connection: int) -> None:
        """Wait no longer for this connection to map or unmap an extent."""


BUSY = bytes((STAGING, SUMMING, MOVING))
HELD = bytes((STAGING, SUMMING, SUMMED, MOVING, TOLD))  # with a slot


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

    def open(self, want: m.Want, leases: RequestLeases, now_ns: int) -> Job:
        """Make a job of what the peer wants. Raises ProtocolError for an invalid one."""
        groups = len(self.source.layout.rules)
        wanted = m.wanted_of(want, groups)
        if want.job <= 0 or want.job in self.jobs:
            raise ProtocolError(f"job {want.job}, expected a new number above 0")
        if len(self.jobs) >= JOBS_MAX:
            raise ProtocolError(f"more than {JOBS_MAX} jobs at one time")
        if self.blocks + sum(map(len, wanted)) > BLOCKS_MAX:
            raise ProtocolError(f"more than {BLOCKS_MAX} blocks wanted at one time")
        if want.push and not self.agent:
            raise ProtocolError("a push to a peer that named no exporter")
        chain = Chain(want.hashes, want.width, groups, want.scope)
        keys: list[BlockKey] = []
        for group, indices in enumerate(wanted):
            keys += chain.keys_at(group, indices)
        job = Job(
            connection=self.number,
            number=want.job,
            keys=keys,
            request=want.request,
            push=want.push,
            direct=want.direct,
            peer=self,
            leases=leases,
            wanted=wanted,
            deadline_ns=now_ns + m.lease_ns(want.lease_ms),
            block_ns=want.block_ns,
        )
        job.look = Look(job, now_ns + UNKNOWN_NS)
        return job


@dataclass(eq=False, kw_only=True)
class Job(Move):
    """What a peer wants: blocks of a chain, by group; over: its lease has ended.

    leases: of requests, one of which may be the job's. An awaited block has no room under the
    peer's cap yet, or is still computed by that request. look: for what to offer; None: that was
    offered. direct: blocks may be read in an engine's memory, and need no sums.
    """

    peer: Peer
    leases: RequestLeases
    wanted: Sequence[Sequence[int]]
    deadline_ns: int
    block_ns: int | None = None  # see Want
    look: Look | None = None
    awaited: deque[int] = field(default_factory=deque)  # positions, first blocks first
    untold: list[int] = field(default_factory=list)  # positions of which the peer is to be told
    unsummed: list[int] = field(default_factory=list)  # and those whose sums are to be taken
    unwritten: list[int] = field(default_factory=list)  # and those to write
    engines: set[int] = field(default_factory=set)  # whose memory the peer was told
    ranks: tuple[RankPages, ...] = ()  # of the peer's engine, if blocks are written there
    over: bool = False
    released: bool = False
    # By position, of a direct want:
    targets: dict[int, list[int]] = field(default_factory=dict)  # engine blocks of the peer's
    writes: Counter[int] = field(default_factory=Counter)  # that have not ended
    failed: set[int] = field(default_factory=set)  # one of them has
    residents: dict[int, Resident] = field(default_factory=dict)  # told to be in an engine
    moved: set[int] = field(default_factory=set)  # not in that engine any more
    # Of each block:
    entries: list[Entry | None] = field(init=False)  # in HELD: pinned; None: the slot is its own
    landings: Places = field(init=False)  # where it is written to

    def __post_init__(self) -> None:
        super().__post_init__()
        self.entries, self.landings = [None] * len(self.keys), Places(len(self.keys))

    def group_of(self, position: int) -> int:
        """Return the KV group of a block."""
        for group, indices in enumerate(self.wanted):
            if position < len(indices):
                return group
            position -= len(indices)
        raise InvariantBroken("a position beyond a job's blocks")

    def _in_order(self, positions: Sequence[int]) -> Sequence[int]:
        """Sort positions: the first blocks of the chain come first."""
        if sum(map(bool, self.wanted)) == 1:
            return positions
        order = [index for indices in self.wanted for index in indices]
        return sorted(positions, key=order.__getitem__)

    @property
    def source(self) -> Source:
        """The namespace."""
        return self.peer.source

    # What there is of the blocks, and how they go on

    @property
    def computes(self) -> bool:
        """Tell whether an engine computes what the job awaits, and no transfer goes on."""
        if not self.awaited or not self.leases.computes(self.request, self.source.manager):
            return False
        return not self.states.have(BUSY)

    def offer(self, found: Sequence[str | None], now_ns: int) -> m.Offer:
        """Offer what there is, and await it; found: the tier of each block."""
        slow = self.too_slow(found, now_ns)
        found = [None if tier in slow else tier for tier in found] if slow else found
        tiers: dict[str, int] = {}
        which = [tiers.setdefault(tier, len(tiers)) for tier in found if tier is not None]
        there = range(len(found))
        offered = there if None not in found else [p for p in there if found[p] is not None]
        for run in runs_of(offered):
            self.states.put(run, WANTED)
        self.awaited.extend(self._in_order(offered))
        self.left = len(offered)
        return m.Offer(self.number, u32(offered), tuple(tiers), bytes(which), self.source.block_ns)

    def too_slow(self, tiers: Sequence[str | None], now_ns: int) -> set[str]:
        """Name the tiers that are read for longer than computing takes from their first block on.

        tiers: of each block. The peer's engine would not wait for such a tier. It cannot use blocks
        after a missing one, so these save no computing. While the job's request runs no tier is
        named: the engine here computes what is missing.
        """
        block_ns = self.source.block_ns if self.block_ns == 0 else self.block_ns
        if not block_ns or self.leases.computes(self.request, self.source.manager):
            return set()
        first: dict[str, int] = {}
        end, at = 0, 0
        gap: int | None = None
        for rule, indices in zip(self.source.layout.rules, self.wanted, strict=True):
            for tier, index in zip(tiers[at : at + len(indices)], indices, strict=True):
                if tier is not None:
                    # Without the last blocks of such a group there is no hit, or a shorter one.
                    since = index if rule.trailing is None else 0
                    first[tier] = min(since, first.get(tier, since))
                    end = max(end, index + 1)
                elif rule.trailing is None:
                    gap = index if gap is None else min(gap, index)
            at += len(indices)
        loads, end = self.source.tiering.loads, end if gap is None else min(end, gap)
        return {
            tier
            for tier, index in first.items()
            if loads.too_slow(tier, tiers.count(tier), (end - index) * block_ns, now_ns)
        }

    def held(self, positions: Sequence[int]) -> None:
        """Have blocks' checksums taken, or none: a direct want does not check them."""
        if not self.direct:
            state = SUMMING
            self.unsummed.extend(positions)
        elif not self.push:
            state = TOLD
            self.untold.extend(positions)
        else:
            state = SUMMED
        for run in runs_of(positions):
            self.states.put(run, state)
        if state == SUMMED:
            self.write([position for position in positions if position in self.targets])

    def go_on(self, run: Run) -> None:
        """Go on with blocks of one state whose read, checksums or write have ended well."""
        state, positions = self.states[run[0]], range(*run)
        if state == STAGING:
            self.held(positions)
        elif state == MOVING or not self.push:
            self.states.put(run, TOLD)
            self.untold.extend(positions)
        else:
            self.states.put(run, SUMMED)
            self.write(self.landings.known(positions))

    def write(self, positions: Sequence[int]) -> None:
        """Write blocks at the next tick."""
        for run in runs_of(positions):
            self.states.put(run, MOVING)
        self.unwritten.extend(positions)

    def take_unwritten(self) -> Sequence[int]:
        """Take blocks to write now: all; of a direct push a few, or none while many are going."""
        layout, count = self.source.layout, len(self.unwritten)
        if self.direct and count:
            writing = self.states.count(MOVING) - count
            most = [layout.slot_bytes // _stride(layout, g) for g in range(len(layout.rules))]
            # These fill one write for each group, or less.
            few = len(most) * min(self._step(group, blocks) for group, blocks in enumerate(most))
            count = few if writing * layout.slot_bytes < WRITING_BYTES else 0
        taken = self.unwritten[:count]
        del self.unwritten[:count]
        return taken

    def told(self, positions: Sequence[int]) -> Sequence[int]:
        """Return those that the peer was told of, while the lease holds."""
        if self.over:
            return ()
        if all(self.states.are(run, TOLD) for run in runs_of(positions)):
            return positions
        return [position for position in positions if self.states[position] == TOLD]

    def is_overwritten(self, position: int) -> bool:
        """Tell whether a block that was told in an engine's memory has left it."""
        place = self.residents.get(position)
        return place is not None and not self.source.engines.holds(place)

    # What the peer is told: where blocks can be read, in slots or in an engine's own memory

    def messages(self, exporter: OwnExporter | None) -> Iterator[Message]:
        """Take what is to be told, and yield it; what cannot be told yet stays."""
        waiting, self.untold = self.untold, []
        waiting = [position for position in waiting if self.states[position] in HELD]
        if self.direct and not self.push:
            engines = set(self.engines)
            for position in waiting:
                self.residents.pop(position, None)
                place = None if position in self.moved else self._resident(engines, position)
                if place is not None:
                    self.residents[position] = place
            yield from self._in_engines(waiting)
            waiting = [position for position in waiting if position not in self.residents]
        if waiting:
            yield from self._in_slots(waiting, exporter)

    def _resident(self, engines: set[int], position: int) -> Resident | None:
        """Return where an engine has a block; a peer is told of ENGINES_MAX engines at most."""
        found = self.source.engines.find(self.keys[position])
        if found is None or (found.engine not in engines and len(engines) >= m.ENGINES_MAX):
            return None
        engines.add(found.engine)
        return found

    def _in_engines(self, waiting: list[int]) -> Iterator[m.Have]:
        """Name what engines have, by engine and how many engine blocks a block has."""
        found: dict[tuple[int, int], list[tuple[int, Resident]]] = {}
        for position in waiting:
            place = self.residents.get(position)
            if place is not None:
                found.setdefault((place.engine, len(place.blocks)), []).append((position, place))
        for (engine, _), places in found.items():
            new = () if engine in self.engines else tuple(self.source.engines.ranks(engine))
            self.engines.add(engine)
            positions = u32([position for position, _ in places])
            blocks = u32([block for _, place in places for block in place.blocks])
            yield m.Have(self.number, positions, blocks, engine=engine, ranks=new)

    def _in_slots(self, waiting: list[int], exporter: OwnExporter | None) -> Iterator[m.Have]:
        positions = joined(runs_of(waiting))
        extents, places = self.source.places(at(self.slots, positions))
        mapped = {} if exporter is None else exporter.regions
        new = {*extents} - self.peer.regions
        unmapped = new - mapped.keys()
        regions = [mapped[extent] for extent in new - unmapped]
        metadata = exporter.metadata if exporter is not None and regions else b""
        self.peer.regions |= new - unmapped
        if unmapped:
            of = dict(zip(positions, extents, strict=True))
            self.untold += [position for position in positions if of[position] in unmapped]
            positions = [position for position in positions if of[position] not in unmapped]
            extents, places = self.source.places(at(self.slots, positions))
        if not positions:
            return
        pairs = numbers(2 * len(positions))
        pairs[::2], pairs[1::2] = extents, places
        sums = at(self.sums, positions).tobytes()
        yield m.Have(
            self.number,
            u32(positions),
            pairs.tobytes(),
            sums=sums,
            regions=tuple(regions),
            metadata=metadata,
        )

    # What is written to the peer: to its landing slots, or into its engine

    def land(self, land: m.Land) -> list[int]:
        """Note where blocks go at the peer; return what can be written. Raises ProtocolError."""
        positions, region = m.positions_of(land.positions, len(self.keys)), land.region
        in_engine = region is None or bool(land.ranks)
        if not self.push or self.direct is not in_engine or (in_engine and region is not None):
            named = "engine blocks" if in_engine else "landing slots"
            raise ProtocolError(
                f"{named} for job {self.number}, expected a push: engine blocks if direct"
            )
        if region is None:
            self._learn(positions, land)
        else:
            slots = array(U32)
            if len(land.numbers) != len(land.positions):
                raise ProtocolError(
                    f"{len(land.numbers) // WORD} landing slots for {len(positions)} blocks to push"
                )
            slots.frombytes(land.numbers)
            if self.landings.known(positions):
                raise ProtocolError(f"a second landing slot in positions {list(positions[:8])}")
            self.landings.put(positions, region, slots)
        return [position for position in positions if self.states[position] == SUMMED]

    def _learn(self, positions: Sequence[int], land: m.Land) -> None:
        if bool(land.ranks) == bool(self.ranks):
            raise ProtocolError(
                f"{len(land.ranks)} ranks for job {self.number}, expected them once"
            )
        if land.ranks:
            check_ranks(self.source.layout, land.ranks)
            self.ranks = tuple(msgspec.structs.replace(rank, metadata=b"") for rank in land.ranks)
        for position, blocks in m.engine_blocks_of(positions, land.numbers).items():
            self._check_target(position, blocks)
            self.targets[position] = blocks

    def _check_target(self, position: int, blocks: Sequence[int]) -> None:
        layout, group = self.source.layout, self.group_of(position)
        most = layout.slot_bytes // _stride(layout, group)
        if len(blocks) > most or not any(blocks):
            raise ProtocolError(
                f"engine blocks {list(blocks[:8])} for position {position}, expected up to {most},"
                " and one that is not 0"
            )
        if not any(rank.pages[group] for rank in self.ranks):
            raise ProtocolError(f"no pages of group {group}, which position {position} is of")
        if position in self.targets:
            raise ProtocolError(f"a second place for position {position}")

    def slot_writes(self, positions: Sequence[int]) -> Iterator[tuple[Part, Transfer]]:
        """Gather writes to landing slots, one for each pair of extents."""
        size = self.source.layout.slot_bytes
        for region, found, there in self.landings.by_region(joined(runs_of(positions))):
            extents, places = self.source.places(at(self.slots, found))
            for extent in dict.fromkeys(extents):
                of_it = m.neighbours([n for n, each in enumerate(extents) if each == extent])
                local, remote = (extent, at(places, of_it)), (region, at(there, of_it))
                write = slot_move(self.peer.agent, local, remote, size, write=True)
                yield self.part(m.neighbours([found[n] for n in of_it])), write

    def direct_writes(self, positions: Sequence[int]) -> Iterator[tuple[Part, Fill]]:
        """Gather writes to the peer's engine, a few blocks at a time: by extent, group and rank."""
        layout = self.source.layout
        batches: dict[tuple[int, int], list[Placed]] = {}
        for position in positions:
            target, group = self.targets[position], self.group_of(position)
            extent, number = self.source.place(Slot(self.slots[position]))
            first, stride = number * layout.slot_bytes, _stride(layout, group)
            own = range(first, first + len(target) * stride, stride)
            pairs = [(part, there) for part, there in zip(own, target, strict=True) if there]
            offsets, targets = [part for part, _ in pairs], [there for _, there in pairs]
            batches.setdefault((extent, group), []).append((position, offsets, targets))
        for (extent, group), found in batches.items():
            for of, offsets, targets in self._batches(group, found):
                parts, blocks = array("Q", offsets).tobytes(), u32(targets)
                for rank in self.ranks:
                    if pages := rank.pages[group]:
                        self.writes.update(of.positions)
                        yield of, Fill(0, rank.agent, extent, pages, parts, blocks, rank.gpu)

    def _batches(
        self, group: int, found: list[Placed]
    ) -> Iterator[tuple[Part, list[int], list[int]]]:
        step = self._step(group, max(len(blocks) for _, _, blocks in found))
        for first in range(0, len(found), step):
            batch = found[first : first + step]
            sources = [place for _, places, _ in batch for place in places]
            targets = [place for _, _, places in batch for place in places]
            yield self.part([position for position, _, _ in batch]), sources, targets

    def _step(self, group: int, engine_blocks: int) -> int:
        """Count the blocks of one write that have so many engine blocks each."""
        pieces = self._pieces(group) * engine_blocks
        blocks_max = FILL_BYTES // self.source.layout.slot_bytes
        return max(1, min(blocks_max, FILL_PIECES // max(1, pieces)))

    def _pieces(self, group: int) -> int:
        """Count those of an engine block, in all ranks."""
        return sum(run.pieces for rank in self.ranks for run in rank.pages[group])

    def last_write(self, position: int, *, ok: bool) -> bool:
        """Tell whether the last write of a block has ended: to each rank there is one."""
        self.writes[position] -= 1
        if not ok:
            self.failed.add(position)
        return self.writes[position] <= 0


class Look:
    """Finds what a job's blocks are in; one turn of the store's loop looks for a few of them.

    Blocks of a request that is not known yet may come in a moment. Until then only the first one
    that is missing is looked for, now and then.
    """

    def __init__(self, job: Job, until_ns: int) -> None:
        """until_ns: an offer may wait until then for an unknown request."""
        self._job = job
        self._until_ns = until_ns
        self._next_ns = 0  # when to look for a missing block again
        self.missing = False  # the block that is next
        self.unknown = False  # the request
        self.tiers: list[str | None] = []  # that have the first blocks

    @property
    def done(self) -> bool:
        """Tell whether all blocks were looked for."""
        return len(self.tiers) == len(self._job.keys)

    def go_on(self, most: int, now_ns: int) -> int:
        """Look for up to `most` of the blocks that are left; return for how many."""
        job, first = self._job, len(self.tiers)
        self.unknown = bool(job.request) and not job.leases.knows(job.request, job.source.manager)
        patient = self.unknown and now_ns < self._until_ns
        if not most or (patient and now_ns < self._next_ns):
            return 0
        keys = job.keys[first : first + (1 if patient and self.missing else most)]
        found = self._find(keys)
        self.missing = patient and None in found
        if self.missing:
            self._next_ns = now_ns + LOOK_NS
            del found[found.index(None) :]
        self.tiers += found
        return len(keys)

    def _find(self, wanted: list[BlockKey]) -> list[str | None]:
        """Name the tier that has each of these blocks, or will have it."""
        job = self._job
        manager, tiering = job.source.manager, job.source.tiering
        sources = tiering.sources_of(wanted)
        entries = manager.index.find(wanted)
        found: list[str | None] = [source or MEMORY for source in sources]
        lacking = [place for place, entry in enumerate(entries) if entry is None]
        keys, done = [wanted[place] for place in lacking], 0
        while done < len(keys):
            result, tier, alike = tiering.leading(keys, done)
            below = tier.name if tier is not None and result is LookupResult.HIT else None
            undecided = result is not LookupResult.MISS
            for place in lacking[done : done + alike]:
                key = wanted[place]
                coming = job.leases.may_come(job.request, manager, key, undecided=undecided)
                found[place] = below or (PREFILL if coming else None)
            done += alike
        return found


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
