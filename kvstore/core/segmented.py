"""Which block leaves memory next: two orders, of what was used again and of what was not.

A block that is stored is *new*. One that a request uses is *kept*, with all above it. Kept blocks
have a share of memory: while they have more, the coldest of them leaves next, else the coldest new
one. So what is stored and never used displaces nothing that is used, however much it is. (Two
orders: 2Q, Johnson and Shasha, VLDB 1994.)

The share is learned, by what a little more room or less would change, as in ARC (Megiddo and Modha,
FAST 2003). It grows, up to KEPT_SHARE, with each block that had been used and comes back, and with
each that is used when it is cold: with less room it would be gone. It shrinks with each that had
never been used and comes back soon: with more room it would be here.

A block that comes back is kept at once if it was gone for no longer than the coldest kept one has
not been used: it is likely to be used before that one. (The comparison is that of LIRS, Jiang and
Zhang, SIGMETRICS 2002.)

What comes back in turns and does not all fit would each time have left just before its turn. It
shows: a path is used that is the coldest of all, so all else came back sooner. What is stored below
such a path would not stay until it is used; it is the next to leave, and the others stay. (As with
LRU insertion: Qureshi et al., ISCA 2007.) Not where requests are handed over: there a store waits
for what was stored last.

A session that has ended makes room for those that begin: a kept block leaves before the coldest new
one, whatever the share, if it has been cold for longer, and for so long that it is hardly used any
more (`kvstore/core/odds.py`).

While a request runs that is handed over, a kept block leaves before one that was stored since the
request began, whatever the share, if it was not used since then: other stores wait for the new one.

Where recency alone hits more (`kvstore/core/trial.py`), the share does not matter: of both orders'
coldest blocks that one leaves that was used or stored longer ago (`Slots.by_recency`). Where few
blocks have most uses, what is new needs little room: then the share may grow up to MORE_KEPT. And
where all comes back in turns, but never before it has left, a block that comes back is kept only if
it was used or stored after the coldest kept one (`Slots.keeps_longer`): else each would displace
the one whose turn is next.

Both orders hold the ends of paths only, as LeafLRU does. A kept block's parent is kept, too, and
counts those below it that are; so a use walks up to the first block that is kept already, and each
block is passed once for each time that it is new. A kept block without kept children is in the
order of kept blocks; a new one that can be evicted is in that of new ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.eviction import SKIPS_MAX, LeafLRU, Mark, evictable
from kvstore.core.ghosts import Ghosts, Left
from kvstore.core.index import Node, State
from kvstore.core.slots import Slots

SEGMENTED = "segmented"
KEPT_SHARE = 0.8
"""The largest share of kept blocks, of the slots that are not on credit."""
MORE_KEPT = 0.95
"""The same where that hits more (`Slots.keeps_more`)."""
SOON = 0.5
"""A block that was never used is back soon while fewer have left than this part of the capacity."""
COLD = 1 / 3
"""A kept block is cold if it was not used for this part of the coldest one's time."""
HARDLY = 8
"""A kept block is hardly used where a new one is so many times as likely to be used."""
GHOSTS = 4
"""Entries for each block in the table of those that have left: it finds half as many."""
_FULL = 0.95  # of these, or of all slots: before, what comes back displaces nothing
_READY = State.READY


class SegmentedLRU(LeafLRU):
    """The order of new blocks, and beside it that of kept ones; all operations O(1) amortised."""

    def __init__(self, slots: Slots, ghosts: Ghosts) -> None:
        """slots: where the blocks are. ghosts: which blocks have left, and when."""
        super().__init__()
        self._slots, self._ghosts = slots, ghosts
        self._kept = LeafLRU()
        self.kept = 0  # blocks
        self._share = KEPT_SHARE
        self._now_s = 0.0

    def stored(self, entry: Node, now_s: float) -> None:
        """A block can be read now; one that is pinned enters with its last pin."""
        self._now_s = now_s
        above, barely = entry.parent, self._slots.barely
        barely[entry.slot] = above is not None and barely[above.slot]
        left = self._ghosts.find(entry.key)
        if left is not None:
            self._learn(left)
        if entry.pins:
            return
        waits = self._slots.by_recency and barely[entry.slot]  # for the others' turns
        if left is not None and not waits and self._stays(left):
            self._use(entry)
            return
        if above is not None and above.next is not None and not above.kept:
            self.remove(above)
        if barely[entry.slot]:
            self.cool(entry)
        else:
            self.heat(entry)

    def _learn(self, left: Left) -> None:
        """A block came back: with more room for its like it would have been here."""
        capacity = self._slots.capacity
        if left.used:
            if left.since <= capacity:
                self._grow(1)
        elif left.since <= SOON * capacity:
            self._grow(-1)

    def _grow(self, blocks: int) -> None:
        share = self._share + blocks / max(1, self._slots.capacity)
        self._share = min(self._largest, max(0.0, share))

    def _stays(self, left: Left) -> bool:
        """Tell whether a block that came back is kept at once."""
        coldest = self._kept.coldest
        if coldest is None or self.kept < _FULL * self._most:
            return True
        before_s = left.last_s if self._slots.keeps_longer else left.left_s
        return before_s >= self._last_s(coldest)

    def _last_s(self, entry: Node) -> float:
        return max(self._slots.used_s[entry.slot], self._slots.stored_s[entry.slot])

    def _judge(self, entry: Node) -> None:
        """The end of a path is used: learn from how cold it had become."""
        slots = self._slots
        slots.barely[entry.slot] = 0
        by_kept = entry.kept or (slots.by_recency and self.kept)
        coldest = (self._kept if by_kept else self).coldest
        full = len(slots.free) <= (1 - _FULL) * slots.capacity
        if not full or coldest is None or isinstance(coldest, Mark):
            return
        last_s, coldest_s = self._last_s(entry), self._last_s(coldest)
        slots.barely[entry.slot] = last_s <= coldest_s and not slots.hands_over
        if self._now_s - last_s >= COLD * (self._now_s - coldest_s):
            self._grow(_kept_by(entry))

    @property
    def _largest(self) -> float:
        return MORE_KEPT if self._slots.keeps_more else KEPT_SHARE

    @property
    def _most(self) -> float:
        return min(self._share, self._largest) * self._slots.capacity

    def used(self, entry: Node, now_s: float) -> None:
        """A request used a block, and so all above it: they are kept, and it is the hottest."""
        self._now_s = now_s
        if not entry.children:  # else its time is not that of the path
            self._judge(entry)
        self._use(entry)

    def _use(self, entry: Node) -> None:
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
            self.remove(at)
            at, below = at.parent, 1
        if at is not None and at.kept and below:
            at.kept += 1
            self._kept.remove(at)
        if entry.kept == 1 and entry.next is None and not entry.pins:
            self._kept.heat(entry)

    def unpinned(self, entry: Node) -> None:
        """Its last pin is gone, which says nothing of its use."""
        (self._kept if entry.kept else self).heat(entry)

    def freed(self, entry: Node | None) -> None:
        """A block lost its last child or pin: it re-enters at the cold end if it left the order."""
        if entry is None or entry.next is not None:
            return
        if entry.kept:
            self._end(entry)
        elif evictable(entry):
            self.cool(entry)

    def give(self, entry: Node) -> None:
        """Another order has the block from now on."""
        self.remove(entry)
        if entry.kept:
            self._unkeep(entry)

    def inherit(self, entry: Node) -> None:
        """A block leaves for another reason than eviction; its parent stays."""
        if entry.kept:
            self.give(entry)
        else:
            super().inherit(entry)

    def clear(self) -> None:
        """Forget all blocks at once."""
        super().clear()
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

    def _kept_goes(self, new: Node | None) -> bool:
        """Tell whether the coldest kept block leaves before the coldest new one."""
        slots, kept = self._slots, self._kept.coldest
        if not slots.by_recency and self.kept > self._most:
            return True
        if kept is None or new is None or isinstance(new, Mark):
            return new is None and (slots.by_recency or bool(slots.awaited_s))
        kept_s, new_s = self._last_s(kept), self._last_s(new)
        if slots.awaits(new_s) and kept_s <= new_s:
            return True
        if slots.by_recency:
            return not slots.barely[new.slot] and kept_s <= new_s
        if slots.odds is None or kept_s > new_s:
            return False
        of_kept = slots.odds.of(self._now_s - kept_s, used=True)
        return of_kept * HARDLY < slots.odds.of(self._now_s - new_s, used=False)

    def victims(self, *, wanted: bool = False) -> Iterator[Node]:
        """Take blocks out of the orders: kept ones beyond their share, then the coldest new ones.

        As LeafLRU does: the caller takes each out of the index before it asks for the next.
        wanted: for what a request uses; then kept ones, too.
        """
        skipped = 0
        while skipped < SKIPS_MAX:
            coldest = self.coldest
            if self._kept_goes(coldest) and (entry := self._pop()) is not None:
                if evictable(entry):
                    yield entry
                    self.freed(entry.parent)  # it counts no child that was above when it was stored
                else:  # new from now on, and found below what hangs from it, or with its last pin
                    skipped += 1
                continue
            if coldest is None:
                break
            self.remove(coldest)
            above: Node | None = coldest
            if not evictable(coldest):
                skipped += 1
                self.passed(coldest)
            while above is not None and above.next is None and evictable(above) and not above.kept:
                yield above
                above = above.parent
            self.freed(above)  # it may have been pinned, and so in no order
        while wanted and (entry := self._pop()) is not None:
            if evictable(entry):
                yield entry
                self.freed(entry.parent)


def _kept_by(entry: Node) -> int:
    """Count the kept blocks of a path that are kept for its end alone; 0 if that is new."""
    count, kept = 0, 1  # an end counts itself, one above it its child, too
    at: Node | None = entry
    while at is not None and at.kept == kept:
        at, count, kept = at.parent, count + 1, 2
    return count
