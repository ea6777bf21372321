"""Which block leaves memory next: leaf-first LRU.

A request uses a whole path, so a parent is never colder than its child. Touching refreshes the
deepest block only, in O(1); when a leaf goes, its parent takes the place in the order that its
own and its child's recency give it. The list holds leaves, and inner blocks that were touched
themselves; an inner or pinned block that has reached the cold end is skipped once and leaves
the list. When it can be evicted again it re-enters at the cold end, which is its exact place:
everything still in the list was used after it. (Stack-distance argument: leaf-first LRU keeps
the resident set closed under "parent of", so its prefix hits are plain LRU's.)
"""

from __future__ import annotations

from typing import Protocol

from kvstore.index import Entry, State


class EvictionPolicy(Protocol):
    """Answers "which leaf goes next". The manager tells it of every change, on one thread."""

    def touch(self, entry: Entry) -> None:
        """The block was stored or used, and with it the whole path above it."""
        ...

    def freed(self, entry: Entry) -> None:
        """The block has lost its last pin or its last child: it may be evictable now."""
        ...

    def remove(self, entry: Entry) -> None:
        """The block leaves memory for a reason other than victim()."""
        ...

    def victim(self) -> Entry | None:
        """Take the next ready, unpinned leaf out of the order; None if there is none."""
        ...


class LeafLRU:
    """Leaf-first least recently used; all operations O(1) amortised."""

    def __init__(self) -> None:
        """Start with an empty order."""
        root = Entry.__new__(Entry)
        root.prev = root.next = root
        self._root = root  # root.next is the coldest, root.prev the hottest

    def _link_after(self, entry: Entry, at: Entry) -> None:
        follower = at.next
        if follower is None:
            return
        entry.prev, entry.next = at, follower
        at.next = follower.prev = entry

    def touch(self, entry: Entry) -> None:
        """Move to the hot end."""
        self.remove(entry)
        hottest = self._root.prev
        if hottest is not None:
            self._link_after(entry, hottest)

    def freed(self, entry: Entry) -> None:
        """Re-enter at the cold end, unless still in the order."""
        if entry.next is None and _evictable(entry):
            self._link_after(entry, self._root)

    def remove(self, entry: Entry) -> None:
        """Leave the order; nothing happens if not in it."""
        before, after = entry.prev, entry.next
        if before is not None and after is not None:
            before.next, after.prev = after, before
            entry.prev = entry.next = None

    def victim(self) -> Entry | None:
        """Return the coldest evictable block; others at the cold end leave the order."""
        while True:
            coldest = self._root.next
            if coldest is None or coldest is self._root:
                return None
            self.remove(coldest)
            if _evictable(coldest):
                return coldest


def _evictable(entry: Entry) -> bool:
    return entry.state is State.READY and entry.pins == 0 and entry.children == 0
