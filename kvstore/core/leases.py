"""Timed pins: what a lookup's reply promises, and for how long.

    granted --complete (load ended, or not wanted)--> ended
    granted --deadline passed-----------------------> ended

A lease pins its entries, so their slots keep their bytes until it ends. Reading after the end
is caught by the slot's generation: it grows before a slot is handed to a new writer.

Eviction takes leaves only, so a pin on the last block of a path holds the blocks above it, too:
that pin is all that a lease of a path takes. Before any block leaves in another way than eviction,
pin_all has each lease pin all of its blocks.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from kvstore.core.errors import check
from kvstore.core.index import Entry, State
from kvstore.core.types import LeaseId

PINS = -1  # owns leases that no engine has
NEVER_NS = 1 << 62  # a deadline that no clock reaches
_COMING = State.COMING


class Generations:
    """A counter for each slot (u32), written to the memory that readers of the slots map, too."""

    def __init__(self) -> None:
        self._counters = array("I")
        self._mapped: list[memoryview] = []  # by extent
        self._per_extent = 1

    def __getitem__(self, slot: int) -> int:
        return self._counters[slot]

    def add(self, mapped: memoryview) -> None:
        """Add an extent's slots, at generation 0; mapped: its counters. All have as many."""
        self._per_extent = len(mapped)
        self._mapped.append(mapped)
        self._counters.extend([0] * len(mapped))

    def of(self, slots: Iterable[int]) -> list[int]:
        """Return the generations of slots."""
        counters = self._counters
        return [counters[slot] for slot in slots]

    def grow(self, slots: Iterable[int], by: int) -> None:
        """Let generations grow; readers see it before the call returns."""
        counters, mapped, per_extent = self._counters, self._mapped, self._per_extent
        for slot in slots:
            counters[slot] = grown = (counters[slot] + by) & 0xFFFFFFFF
            mapped[slot // per_extent][slot % per_extent] = grown


class GroupHit(msgspec.Struct, frozen=True):
    """Present blocks of one KV group: block indices, ascending, and the slot of each."""

    indices: Sequence[int]
    slots: Sequence[int]
    generations: Sequence[int]


def hit_of(
    indices: Sequence[int], entries: Sequence[Entry], generations: Generations, *, ready: bool
) -> GroupHit:
    """Name the slots of blocks; of what is coming, the generation once it can be read.

    ready: none is coming.
    """
    slots = [entry.slot for entry in entries]
    ages = generations.of(slots)
    for at, entry in enumerate(() if ready else entries):
        if entry.state is _COMING:
            ages[at] = (ages[at] + 1) & 0xFFFFFFFF
    return GroupHit(indices, slots, ages)


class Lease(msgspec.Struct, eq=False):
    """Blocks pinned for one owner until complete or deadline_ns (store's clock).

    pinned: the entries that have a pin of this lease; the others are above one of these.
    """

    lease_id: LeaseId
    owner: int
    deadline_ns: int
    groups: tuple[GroupHit, ...]
    entries: Sequence[Entry]
    pinned: Sequence[Entry]


class LeaseBook:
    """All leases of a namespace, by id, by owner and by deadline."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, Lease] = {}
        self._paths: dict[LeaseId, Lease] = {}  # those that do not pin all of their entries
        self._blocks: dict[int, int] = {}
        self._deadlines: list[tuple[int, LeaseId]] = []
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def by_engines(self) -> int:
        """Count the blocks that engines lease for requests, up to a deadline, repeats included."""
        return sum(self._blocks.values()) - self.blocks_of(PINS)

    def blocks_of(self, owner: int) -> int:
        """Count the blocks that an owner's leases pin, repeats included."""
        return self._blocks.get(owner, 0)

    def empty(self, owner: int, deadline_ns: int, groups: int) -> Lease:
        """Make a lease on nothing, which ends like any other."""
        return self.add(owner, deadline_ns, (GroupHit((), (), ()),) * groups, (), ())

    def add(
        self,
        owner: int,
        deadline_ns: int,
        groups: tuple[GroupHit, ...],
        entries: Sequence[Entry],
        pinned: Sequence[Entry],
    ) -> Lease:
        """Make a lease, under an id that was never used before, and take its pins."""
        lease = Lease(LeaseId(self._next_id), owner, deadline_ns, groups, entries, pinned)
        self._next_id += 1
        for entry in pinned:
            entry.pins += 1
        if len(pinned) < len(entries):
            self._paths[lease.lease_id] = lease
        self._leases[lease.lease_id] = lease
        self._blocks[owner] = self.blocks_of(owner) + len(entries)
        if deadline_ns < NEVER_NS:  # else its entry would stay for good
            heapq.heappush(self._deadlines, (deadline_ns, lease.lease_id))
        return lease

    def pin_all(self) -> None:
        """Have each lease pin all of its entries: one of them may be about to leave.

        It costs 6 us for each lease of 256 blocks made since the last call.
        """
        for lease in self._paths.values():
            for entry in lease.entries:
                entry.pins += 1
            for entry in lease.pinned:
                entry.pins -= 1
            lease.pinned = lease.entries
        self._paths.clear()

    def extend(self, lease_id: LeaseId, deadline_ns: int) -> None:
        """Have a lease end later, if it has not ended."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.deadline_ns = max(lease.deadline_ns, deadline_ns)

    def entries_of(self, lease_id: LeaseId) -> Sequence[Entry]:
        """Return what a lease pins; nothing if it has ended."""
        lease = self._leases.get(lease_id)
        return () if lease is None else lease.entries

    def end(self, lease_id: LeaseId) -> Lease | None:
        """Unpin; None if the lease has ended before."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        self._paths.pop(lease_id, None)
        for entry in lease.pinned:
            entry.pins -= 1
            check(entry.pins >= 0, "pins of an entry below zero")
        left = self.blocks_of(lease.owner) - len(lease.entries)
        if left:
            self._blocks[lease.owner] = left
        else:
            self._blocks.pop(lease.owner, None)
        return lease

    def owned_by(self, lease_id: LeaseId, owner: int) -> bool:
        """Tell whether a lease has not ended and is this owner's."""
        lease = self._leases.get(lease_id)
        return lease is not None and lease.owner == owner

    def of_owner(self, owner: int) -> list[Lease]:
        """List an owner's leases."""
        return [lease for lease in self._leases.values() if lease.owner == owner]

    def due(self, now_ns: int) -> list[LeaseId]:
        """Take the leases whose deadline has passed; they still have to be ended."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            lease_id = heapq.heappop(self._deadlines)[1]
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease.deadline_ns <= now_ns:
                late.append(lease_id)
            else:  # it was extended
                heapq.heappush(self._deadlines, (lease.deadline_ns, lease_id))
        return late
