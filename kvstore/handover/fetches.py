"""The consumer's end of a move: what its peer says of the blocks, and how they end.

`into` is where the blocks go: Arrivals, through landing slots into slots, or a DirectFetch. It is
called when blocks can be read or have been written, and when they end: it moves what is CLAIMED
on to CHECKED. Here CHECKED becomes DONE, ready or not.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages
from kvstore.core.types import BlockKey
from kvstore.handover.moves import CHECKED, CLAIMED, DONE, LANDED, MOVING, OFFERED, WANTED, Move
from kvstore.handover.runs import Places, Run, at, numbers, put_at, runs_of
from kvstore.handover.transfers import Regions
from kvstore.wire import peer as m
from kvstore.wire.framing import Message, u32

if TYPE_CHECKING:
    from kvstore.handover.arrivals import Arrivals
    from kvstore.handover.direct_fetches import DirectFetch

LEASE_MS = 30_000
ENGINE, OTHER = "gpu", "other"
TIERS = ("cpu", "nvme", "prefill", ENGINE)  # of a peer's, and how they are counted

UNCLAIMED = bytes((WANTED, OFFERED))
OPEN = bytes(range(DONE))
UNASKED = bytes(set(OPEN) - {CHECKED})  # no answer says anything of them
LANDING = bytes((LANDED, CHECKED))
PULLED = bytes((MOVING, LANDED, CHECKED))
FAILS = bytes(set(OPEN) - {LANDED})  # at once; a copy into a slot of ours ends first


class Fetched(msgspec.Struct):
    """Counts of fetches: events by name, and blocks by the tier in which their peer had them.

    direct_bytes: that workers have read.
    """

    events: Counter[str] = msgspec.field(default_factory=Counter)
    blocks: Counter[str] = msgspec.field(default_factory=Counter)
    direct_bytes: int = 0


@dataclass(eq=False, kw_only=True)
class Fetch(Move):
    """Blocks that are fetched from one peer.

    say(message): to the peer. located: fetch * JOB_BLOCKS_MAX + position of what lookups find; what
    has ended is taken out. also: other fetches that want such a block, and its position there.
    into: None until workers have claimed blocks of a direct fetch.
    """

    say: Callable[[Message], None]
    fetched: Fetched
    located: dict[BlockKey, int]
    also: dict[BlockKey, list[tuple[Fetch, int]]]
    into: Arrivals | DirectFetch | None
    heard_ns: int  # its start, then when its peer last answered
    extend_ns: int
    arrived_ns: int = field(init=False)  # the last block
    waited_ns: int = field(init=False)  # when a load was last known to wait for it
    hinted: bool = False  # lookups find its blocks once they are offered
    offered: bool = False
    computed_ns: int | None = None  # when its peer said that it still computes
    released: bool = False  # by the peer, or the connection is lost: nothing is left to say
    tiers: tuple[str, ...] = ()  # of the peer's
    ranks_told: bool = False  # to the peer: where it writes
    ended: bool = False  # the peer writes nothing any more
    late: set[int] = field(default_factory=set)  # given up, and something may still be written
    # Of the peer's engines, what is known of their memory, and which of their blocks a block is.
    engines: dict[int, Sequence[RankPages]] = field(default_factory=dict)
    residents: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    # Of each block:
    which: bytearray = field(init=False)  # the tier that has it, from 1; 0: it was not offered
    loads: array[int] = field(init=False)  # the load that it is for,
    parts: array[int] = field(init=False)  # and which of its blocks it is
    landing: array[int] = field(init=False)  # its landing slot, in MOVING and LANDED
    places: Places = field(init=False)  # where it can be read

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arrived_ns = self.waited_ns = self.heard_ns
        self.left = count = len(self.keys)
        self.states.put(self.all, WANTED)
        self.which, self.places, self.landing = bytearray(count), Places(count), numbers(count)
        self.loads, self.parts = numbers(count), numbers(count)

    # Answers of the peer

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
        self.give_up(bytes((WANTED,)))
        if self.hinted:
            self.locate()

    def locate(self) -> None:
        """Have lookups find the blocks; those that they find already are found once that ends."""
        for first, end in self.states.within(self.all, UNCLAIMED):
            place = self.number * m.JOB_BLOCKS_MAX + first
            named = dict(zip(self.keys[first:end], range(place, place + end - first), strict=True))
            for key in self.located.keys() & named.keys():
                self.find(key, named.pop(key) % m.JOB_BLOCKS_MAX)
            self.located.update(named)

    def find(self, key: BlockKey, position: int) -> None:
        """Have lookups find a block; one of another fetch is found first, if there is one."""
        if key in self.located:
            self.also.setdefault(key, []).append((self, position))
        else:
            self.located[key] = self.number * m.JOB_BLOCKS_MAX + position

    def have(self, have: m.Have, regions: Regions, now_ns: int) -> None:
        """Go on with blocks that can be read, or, pushed, have been written."""
        positions, new = self._put(have, regions)
        if self.into is None:
            return
        if not self.push:
            self.into.readable(self, positions if self.direct else new)
            return
        landed = self.in_state(positions, MOVING)
        self.arrived_ns = now_ns if landed else self.arrived_ns
        self.into.written(self, landed)

    def settled(self, settled: m.Settled, now_ns: int, limit_ns: int) -> None:
        """Use what is valid, before the end that may come with it. Raises ProtocolError.

        limit_ns: how long a peer may compute without an arrival.
        """
        if settled.valid or settled.again:
            self.heard_ns = now_ns
            self._valid(settled)
        if settled.computing:
            self._computing(now_ns, limit_ns)
        if settled.end:
            self.ended = settled.end not in m.MAY_BE_WRITTEN
            self.released |= settled.end != m.LEASE_OVER
            if self.left:
                self.fail("ended")
            self.writes_ended(settled.end)

    def _valid(self, settled: m.Settled) -> None:
        positions = m.positions_of(settled.valid, len(self.keys))
        again = m.positions_of(settled.again, len(self.keys))
        for run in (*runs_of(positions), *runs_of(again)):
            if any(self.states.within(run, UNASKED)):
                raise ProtocolError(f"positions {run[0]} to {run[1] - 1} were not all confirmed")
        for run in self.in_state(again, CHECKED):  # the peer sends their places anew
            self.states.put(run, CLAIMED)
            for position in range(*run):
                self.residents.pop(position, None)
        for run in self.in_state(positions, CHECKED):  # others were given up meanwhile
            self.fetched.events["fetched"] += run[1] - run[0]
            self.fetched.blocks.update(self.count_tiers(run))
            self.done(run, ok=True)

    def _computing(self, now_ns: int, limit_ns: int) -> None:
        """Wait for a peer that computes, up to a limit: its engine may hang."""
        if self.states.have(LANDING if self.push else PULLED):
            return  # these blocks have to arrive
        waited_for = now_ns - self.waited_ns < LEASE_MS * 1_000_000
        if waited_for and now_ns - self.arrived_ns < limit_ns:
            self.heard_ns = self.computed_ns = now_ns

    def writes_ended(self, end: str) -> None:
        """Free what the peer may have been writing, unless it may still do so."""
        if end not in m.MAY_BE_WRITTEN:
            self.not_late(self.late if self.push else ())

    def not_late(self, positions: Iterable[int]) -> None:
        """Nothing writes any more where these blocks, given up before, were to arrive."""
        ended = sorted(self.late.intersection(positions))
        self.late.difference_update(ended)
        if ended and self.into is not None:
            self.into.free(self, ended)

    # The end of blocks

    def ask_validity(self, arrived: Sequence[int], unread: Sequence[int] = ()) -> None:
        """Ask whether the lease of what has arrived held until now."""
        if arrived or unread:
            self.say(m.Settle(self.number, LEASE_MS, u32(arrived), u32(unread)))

    def done(self, run: Run, *, ok: bool) -> None:
        """End blocks of one state: ready, or never; nothing of ours uses their slots any more."""
        state, place = self.states[run[0]], self.number * m.JOB_BLOCKS_MAX + run[0]
        self.states.put(run, DONE)
        self.left -= run[1] - run[0]
        for key in self.keys[slice(*run)]:
            if self.located.get(key) == place:
                del self.located[key]
                for other, at in self.also.pop(key, ()):
                    if not ok and other.states[at] in UNCLAIMED:
                        other.find(key, at)
            place += 1
        if self.into is not None and state not in UNCLAIMED:
            self.into.ended(self, run, state, ok=ok)

    def fail(self, event: str) -> None:
        """Give up all blocks; a copy into a slot of ours that is under way ends first."""
        self.fetched.events[event] += 1
        self.give_up(FAILS)

    def give_up(self, states: bytes) -> None:
        """End the blocks in these states as not ready."""
        for run in self.states.within(self.all, states):
            self.done(run, ok=False)

    # Where blocks are, and what is known of them

    def _put(self, have: m.Have, regions: Regions) -> tuple[Sequence[int], Sequence[int]]:
        """Note where blocks can be read. Raises ProtocolError for an unknown region or engine.

        Returns their positions, and of these those whose place was not known before.
        """
        if have.engine is not None:
            positions = m.positions_of(have.positions, len(self.keys))
            self._put_engine(have.engine, have.ranks, m.engine_blocks_of(positions, have.places))
            return positions, positions
        positions, extents, slots, sums = m.places_of(have, len(self.keys))
        known = set(self.places.known(positions))
        by_extent: dict[int, list[int]] = {}
        for n, extent in enumerate(extents):
            by_extent.setdefault(extent, []).append(n)
        for extent, numbered in by_extent.items():
            of_it = m.neighbours(numbered)
            found = m.neighbours([positions[n] for n in of_it])
            self.places.put(found, regions.get(self.connection, extent), at(slots, of_it))
        put_at(self.sums, positions, sums)
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

    def tier_of(self, position: int) -> str:
        """Name the peer's tier of a block that it has offered."""
        which = self.which[position]
        tier = self.tiers[which - 1] if which else ""
        return tier if tier in TIERS else OTHER

    def count_tiers(self, run: Run) -> Counter[str]:
        """Count blocks by the peer's tier that they came from."""
        found: Counter[str] = Counter()
        of_engine = [p for p in range(*run) if p in self.residents]
        which = bytearray(self.which[slice(*run)])
        for position in of_engine:
            found[ENGINE] += 1
            which[position - run[0]] = 0
        for number, tier in enumerate(self.tiers, 1):
            found[tier if tier in TIERS else OTHER] += which.count(number)
        return +found

    def alike(self, position: int, count: int) -> int:
        """Count the blocks from a position on that are in its state, and in its tier."""
        which = self.which[position : position + self.states.alike((position, position + count))]
        return len(which) - len(which.lstrip(which[:1]))

    def claimable(self, first: int, keys: list[BlockKey]) -> int:
        """Count the blocks from a position on that are offered, and are these: all, or one."""
        end = first + len(keys)
        if self.keys[first:end] == keys and self.states.are((first, end), OFFERED):
            return len(keys)
        return int(self.states[first] == OFFERED)

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
