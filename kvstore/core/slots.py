"""The slots of one namespace: which are empty, which are on credit, and which are to go for good.

Any other slot holds a block. A slot's generation grows with each grant: a reader whose lease has
ended finds another one.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

from kvstore.core.index import Entry
from kvstore.core.leases import Generations
from kvstore.core.odds import Odds
from kvstore.core.types import BlockKey, Slot

Write = Entry | tuple[BlockKey, BlockKey | None]
"""What is being written into a granted slot: an entry that was made for this slot, else its key and
its parent's, as another copy was first or nothing is above."""


class Slots:
    """Counts slots and grants them; knows nothing of the blocks in the others."""

    def __init__(self, generations: Generations) -> None:
        """generations: has a counter for every slot added; the caller sees to that."""
        self.total = 0  # those being retired left out
        self.stored_s = array("d")  # of the block in each slot: when it became ready
        self.used_s = array("d")  # and when it was last used itself, if that was later
        self.was_used = bytearray()  # 1: a request used it, or one below it
        self.barely = bytearray()  # 1: before it was used it was the next to leave
        self.by_recency = False  # what was used leaves in one order with what was not
        self.keeps_more = False  # what was used may have nearly all
        self.keeps_longer = False  # it gives way only to what was used after it
        self.odds: Odds | None = None  # which of two kinds of blocks is likelier to be used
        self.hands_over = False  # other stores ask for blocks that engines here are computing
        self.awaited_s: dict[str, float] = {}  # when each such request began, the oldest first
        self.free: list[Slot] = []
        self.granted: dict[Slot, Write | None] = {}  # None: nothing is written there yet
        self.generations = generations
        self.retiring: set[Slot] = set()
        self.lingering: set[Slot] = set()  # of dropped blocks that are still pinned

    def add(self, slots: Collection[Slot]) -> None:
        """Take over empty slots; the lowest are handed out first."""
        self.free.extend(sorted(slots, reverse=True))
        new = max(0, max(slots, default=-1) + 1 - len(self.was_used))
        self.was_used.extend(bytes(new))
        self.barely.extend(bytes(new))
        for times in (self.stored_s, self.used_s):
            times.frombytes(bytes(times.itemsize * new))
        self.total += len(slots)

    def retire(self, slots: Iterable[Slot]) -> bool:
        """Put no other block into these slots; True if that is new for any of them."""
        fresh = set(slots) - self.retiring
        if fresh:
            self.retiring |= fresh
            self.total -= len(fresh)
            self.free = [slot for slot in self.free if slot not in fresh]
        return bool(fresh)

    def unsettled(self, slots: Collection[Slot]) -> int:
        """Count those of some slots that are on credit, or hold a dropped block that is pinned."""
        wanted = set(slots)
        return len((wanted & self.granted.keys()) | (wanted & self.lingering))

    def grant(self, count: int) -> list[Slot]:
        """Put up to `count` empty slots on credit, each at a new generation."""
        free, granted = self.free, self.granted
        found = [free.pop() for _ in range(min(count, len(free)))]
        self.generations.grow(found, 1)
        granted.update(dict.fromkeys(found))
        return found

    def release(self, slot: Slot) -> None:
        """A slot is empty, unless it is to go."""
        self.lingering.discard(slot)
        if slot not in self.retiring:
            self.free.append(slot)

    def vacate(self, slot: Slot, *, pinned: bool) -> None:
        """The block in a slot has left: the slot is empty now, or after the block's last pin."""
        if pinned:
            self.lingering.add(slot)
        else:
            self.release(slot)

    def awaits(self, stored_s: float) -> bool:
        """Tell whether another store may wait for a block that was stored then."""
        return bool(self.awaited_s) and next(iter(self.awaited_s.values())) <= stored_s

    @property
    def capacity(self) -> int:
        """Count the slots that are not on credit."""
        return self.total - len(self.granted)

    @property
    def used(self) -> int:
        """Count the slots that hold blocks, those being retired left out."""
        granted = len(self.granted) - len(self.granted.keys() & self.retiring)
        return self.total - len(self.free) - granted
