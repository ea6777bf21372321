"""Which block leaves memory next: leaf-first LRU.

A request uses a whole path, so a parent is never colder than its child, and the place of a block
in the order stands for all blocks above it:

    touched: a b c d      order:  cold  ... - x - d  hot       d is the end of the path abcd
    d goes as a victim            cold  c - x ...              c takes the end that d had

Touching refreshes the deepest block only, in O(1), and takes its parent out of the order. When a
leaf goes, its parent takes the older end position that its own and its child's recency give it.
The order holds leaves that can go, and inner blocks that were touched themselves after what
hangs below them; an inner block that has reached the cold end is skipped once and leaves. When it
can be evicted again it re-enters at the cold end, which is its exact place: everything still in
the order was used after it. (Stack-distance argument: leaf-first LRU keeps the resident set
closed under "parent of", so its prefix hits are plain LRU's.) A lease's pin is a use that lasts: a
leased leaf is not in the order, and is touched when a lease ends. A pin for a copy to a lower tier
is no use: its block stays in the order. A search passes over a pinned block once, and takes it out.
So however many blocks are pinned, they cost no call much.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.index import Node, State
from kvstore.core.types import BlockKey, Slot

LRU = "lru"
SKIPS_MAX = 1024
"""Blocks that one search for victims passes over: what limits its time."""
_READY = State.READY


class Mark(Node):
    """What is colder than this in an order was touched before."""

    __slots__ = ("epoch",)

    def __init__(self, epoch: int) -> None:
        super().__init__(BlockKey(b""), None, Slot(-1))
        self.epoch = epoch


class LeafLRU:
    """Leaf-first least recently used; all operations O(1) amortised."""

    def __init__(self) -> None:
        root = Node(BlockKey(b""), None, Slot(-1))
        root.prev = root.next = root
        self._root = root  # root.next is the coldest, root.prev the hottest
        self._age = 0

    # A list of blocks

    @property
    def coldest(self) -> Node | None:
        """Return what is at the cold end; None if nothing is in the order."""
        return None if self._root.next is self._root else self._root.next

    def heat(self, entry: Node) -> None:
        """Move a block to the hot end, wherever it is."""
        self._unlink(entry)
        self._link_after(entry, self._root.prev)

    def cool(self, entry: Node) -> None:
        """Put a block that is in no order at the cold end."""
        self._link_after(entry, self._root)

    def passed(self, coldest: Node) -> None:
        """Note what was at the cold end, and no block that can be evicted."""
        if isinstance(coldest, Mark):
            self._age = coldest.epoch

    def _link_after(self, entry: Node, at: Node | None) -> None:
        if at is not None and (follower := at.next) is not None:
            entry.prev, entry.next = at, follower
            at.next = follower.prev = entry

    # What the manager reports

    def stored(self, entry: Node, _now_s: float) -> None:
        """A block can be read now; one that is pinned enters with its last pin."""
        if not entry.pins:
            self.touch(entry)

    def used(self, entry: Node, _now_s: float) -> None:
        """A request used a block, and so all above it."""
        self.touch(entry)

    def keep(self, entry: Node) -> None:
        """A request used a block; others may have used what hangs below it since."""

    def unpinned(self, entry: Node) -> None:
        """A block's last pin is gone."""
        self.touch(entry)

    def touch(self, entry: Node) -> None:
        """A block was stored or used: move it to the hot end, where it stands for its parent."""
        above = entry.parent
        if above is not None and above.next is not None:
            self._unlink(above)
        self.heat(entry)

    def covered(self, entry: Node | None) -> None:
        """A block has a child from now on; it is found so when its turn comes."""

    def freed(self, entry: Node | None) -> None:
        """A block lost its last child or pin: it re-enters at the cold end if it left the order.

        None: what has left had no parent.
        """
        if entry is not None and entry.next is None and evictable(entry):
            self.cool(entry)

    def remove(self, entry: Node) -> None:
        """Leave the order, if in it: the block is pinned, or has left memory."""
        self._unlink(entry)

    def _unlink(self, entry: Node) -> None:
        before, after = entry.prev, entry.next
        if before is not None and after is not None:
            before.next, after.prev = after, before
            entry.prev = entry.next = None

    def give(self, entry: Node) -> None:
        """Another order has the block from now on."""
        self.remove(entry)

    def inherit(self, entry: Node) -> None:
        """Leave the order for another reason than eviction; the parent stays in memory.

        A parent that becomes a leaf takes the place, or else the hot end.
        """
        at, above = entry.prev, entry.parent
        self.remove(entry)
        last = above is not None and above.children == 1 and above.next is None
        if above is not None and last and above.state is _READY and not above.pins:
            self._link_after(above, at or self._root.prev)

    def mark(self, epoch: int) -> None:
        """Note a time, after those that were noted before."""
        hottest = self._root.prev
        if isinstance(hottest, Mark):
            hottest.epoch = epoch
        else:
            self._link_after(Mark(epoch), hottest)

    def age(self) -> int:
        """Return the last noted time before the coldest block was touched; 0: none."""
        while isinstance(coldest := self._root.next, Mark):
            self._age = coldest.epoch
            self._unlink(coldest)
        return self._age

    def clear(self) -> None:
        """Forget all blocks at once; the caller unlinks them from one another."""
        self._root.prev = self._root.next = self._root

    def victims(self, *, wanted: bool = False) -> Iterator[Node]:  # noqa: ARG002 - all are wanted
        """Take the coldest evictable blocks out of the order; others at the cold end leave it.

        The caller takes each out of the index before it asks for the next, and after the last one
        that it takes tells freed() of its parent. Ends when there is none, or after a limited
        search: the next call goes on from there.
        """
        root, skipped = self._root, 0
        while skipped < SKIPS_MAX:
            coldest = root.next
            if coldest is None or coldest is root:
                return
            self._unlink(coldest)
            above: Node | None = coldest
            if not evictable(coldest):
                skipped += 1
                self.passed(coldest)
            while above is not None and above.next is None and evictable(above):
                yield above  # and its parent, which is a leaf by then, takes this place
                above = above.parent


def evictable(entry: Node) -> bool:
    """Tell whether a block can be evicted: it is ready, without pins and without children."""
    return entry.pins == 0 and entry.children == 0 and entry.state is _READY
