"""Which block leaves memory next: two orders, of what was used again and of what was not.

A block that is stored is *new*. One that a request uses is *kept*, with all above it. Kept blocks
have a share of memory: while they have more, the coldest of them leaves next, else the coldest new
one. So what is stored and never used displaces nothing that is used, however much it is. (Two
orders: 2Q, Johnson and Shasha, VLDB 1994.)

The share is learned, as in ARC (Megiddo and Modha, FAST 2003). A block that comes back and had been
used would still be here if kept blocks had had more room: their share grows, up to KEPT_SHARE. One
that comes back soon and had never been used would be here if new ones had had more: it shrinks. So
sessions that come back one after the other find their blocks, if there is room for all.

A block that comes back is kept at once if it was gone for a shorter time than RETURN_AGES times the
age of the coldest kept block: it is likely to be used before that one. (The comparison is that of
LIRS, Jiang and Zhang, SIGMETRICS 2002.) So of what comes back in turns and does not fit, some stay.

Both orders hold the ends of paths only, as LeafLRU does. A kept block's parent is kept, too, and
counts those below it that are; so a use walks up to the first block that is kept already, and each
block is passed once for each time that it is new. A kept block without kept children is in the
order of kept blocks; a new one that can be evicted is in that of new ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.eviction import SKIPS_MAX, LeafLRU, evictable
from kvstore.core.ghosts import Ghosts, Left
from kvstore.core.index import Node, State
from kvstore.core.slots import Slots

SEGMENTED = "segmented"
KEPT_SHARE = 0.8
"""The largest share of kept blocks, of the slots that are not on credit."""
SOON = 0.125
"""A block that was never used is back soon while fewer have left than this part of the share."""
RETURN_AGES = 0.55
"""A block that was gone for so many times the age of the coldest kept one is not kept at once."""
GHOSTS = 4
"""Entries for each block in the table of those that have left: it finds half as many."""
_FULL = 0.95  # of these: before, what comes back displaces nothing
_READY = State.READY


class SegmentedLRU:
    """What a LeafLRU is, for blocks in memory; all operations O(1) amortised."""

    def __init__(self, slots: Slots, ghosts: Ghosts) -> None:
        """slots: where the blocks are. ghosts: which blocks have left, and when."""
        self._slots, self._ghosts = slots, ghosts
        self._new, self._kept = LeafLRU(), LeafLRU()
        self.kept = 0  # blocks
        self._share = KEPT_SHARE

    def stored(self, entry: Node, now_s: int) -> None:
        """A block can be read now; one that is pinned enters with its last pin."""
        left = self._ghosts.find(entry.key)
        if left is not None:
            self._learn(left)
        if entry.pins:
            return
        if left is not None and self._stays(left, now_s):
            self.used(entry)
            return
        above = entry.parent
        if above is not None and above.next is not None and not above.kept:
            self._new.remove(above)
        self._new.heat(entry)

    def _learn(self, left: Left) -> None:
        """A block came back: with more room for its like it would have been here."""
        capacity = max(1, self._slots.capacity)
        if left.used:
            if left.since <= capacity:
                self._share = min(KEPT_SHARE, self._share + 1 / capacity)
        elif left.since <= SOON * self._share * capacity:
            self._share = max(0.0, self._share - 1 / capacity)

    def _stays(self, left: Left, now_s: int) -> bool:
        """Tell whether a block that came back is kept at once."""
        coldest = self._kept.coldest
        if coldest is None or self.kept < _FULL * self._most:
            return True
        slots = self._slots
        used_s = max(slots.used_s[coldest.slot], slots.stored_s[coldest.slot])
        return now_s - left.left_s <= RETURN_AGES * (now_s - used_s)

    @property
    def _most(self) -> float:
        return self._share * self._slots.capacity

    def used(self, entry: Node) -> None:
        """A request used a block, and so all above it: they are kept, and it is the hottest."""
        self.keep(entry)
        above = entry.parent
        if above is not None and above.next is not None:
            self._kept.remove(above)
        self._kept.heat(entry)

    def keep(self, entry: Node) -> None:
        """A request used a block; others may have used what hangs below it since."""
        at: Node | None = entry
        below = 0
        while at is not None and not at.kept and at.state is _READY:
            at.kept = 1 + below
            self._slots.was_used[at.slot] = 1
            self.kept += 1
            self._new.remove(at)
            at, below = at.parent, 1
        if at is not None and at.kept and below:
            at.kept += 1
            self._kept.remove(at)
        if entry.kept == 1 and entry.next is None and not entry.pins:
            self._kept.heat(entry)

    def unpinned(self, entry: Node) -> None:
        """Its last pin is gone, which says nothing of its use."""
        (self._kept if entry.kept else self._new).heat(entry)

    def covered(self, entry: Node | None) -> None:
        """A block has a child from now on; it is found so when its turn comes."""

    def freed(self, entry: Node | None) -> None:
        """A block lost its last child or pin: it re-enters at the cold end if it left the order."""
        if entry is None or entry.next is not None:
            return
        if entry.kept:
            self._end(entry)
        elif evictable(entry):
            self._new.cool(entry)

    def remove(self, entry: Node) -> None:
        """Leave the order, if in one: the block is pinned."""
        self._new.remove(entry)

    def give(self, entry: Node) -> None:
        """Another order has the block from now on."""
        self._new.remove(entry)
        if entry.kept:
            self._unkeep(entry)

    def inherit(self, entry: Node) -> None:
        """A block leaves for another reason than eviction; its parent stays."""
        if entry.kept:
            self.give(entry)
        else:
            self._new.inherit(entry)

    def mark(self, epoch: int) -> None:
        """Note a time, after those that were noted before."""
        self._new.mark(epoch)

    def age(self) -> int:
        """Return the last noted time before the coldest new block was stored; 0: none."""
        return self._new.age()

    def clear(self) -> None:
        """Forget all blocks at once."""
        self._new.clear()
        self._kept.clear()
        self.kept = 0

    def _pop(self) -> Node | None:
        """Take the coldest kept block out, which is new then."""
        while (coldest := self._kept.coldest) is not None:
            self._kept.remove(coldest)
            if coldest.kept == 1:  # else another below it is kept
                self._unkeep(coldest)
                return coldest
        return None

    def _unkeep(self, entry: Node) -> None:
        entry.kept = 0
        self.kept -= 1
        above = entry.parent
        if above is not None and above.kept > 1:
            above.kept -= 1
            self._end(above)

    def _end(self, entry: Node) -> None:
        """A kept block may be the last one of its path now."""
        if entry.kept == 1 and entry.next is None and entry.state is _READY and not entry.pins:
            self._kept.cool(entry)

    def victims(self, *, wanted: bool = False) -> Iterator[Node]:
        """Take blocks out of the orders: kept ones beyond their share, then the coldest new ones.

        As LeafLRU does: the caller takes each out of the index before it asks for the next.
        wanted: for what a request uses; then kept ones, too.
        """
        skipped, most = 0, self._most
        while skipped < SKIPS_MAX and self.kept > most and (entry := self._pop()) is not None:
            if evictable(entry):
                yield entry
            else:  # it is new from now on, and found below what hangs from it, or with its last pin
                skipped += 1
        while skipped < SKIPS_MAX and (coldest := self._new.coldest) is not None:
            self._new.remove(coldest)
            above: Node | None = coldest
            if not evictable(coldest):
                skipped += 1
                self._new.passed(coldest)
            while above is not None and above.next is None and evictable(above) and not above.kept:
                yield above
                above = above.parent
        while wanted and (entry := self._pop()) is not None:
            if evictable(entry):
                yield entry
