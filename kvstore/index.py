"""The blocks of one namespace that are in memory, as a forest (parent = previous block).

A block of a full-attention group hangs below its parent, and the set of present blocks is
closed under "parent of": a block enters READY only below a READY parent, and leaves only
without children. So the present part of a request's chain is a prefix, and a binary search
finds its end. Blocks of sliding-window and state groups have no parent here: what they are
good for does not depend on what lies before them. A COMING block enters below a READY or COMING
one and becomes READY below a READY one: both sets are closed.

Closure is a speed-up and never a safety argument. Dropping a damaged block may leave a hole;
whoever plans a load verifies every block of the chain, so a hole costs hits, never bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence

from kvstore.types import BlockKey, LookupResult, Slot


class State(enum.Enum):
    """WRITING or COMING -> READY -> DROPPED, or -> DROPPED; absent is not being in the index."""

    WRITING = "writing"
    COMING = "coming"  # being read from a lower tier: a lease may name what is not there yet
    READY = "ready"
    DROPPED = "dropped"  # out of the index; its slot is freed with its last pin


class Entry:
    """One block in memory. prev and next belong to the eviction policy."""

    __slots__ = ("children", "key", "next", "parent", "pins", "prev", "slot", "state")

    def __init__(self, key: BlockKey, parent: Entry | None, slot: Slot) -> None:
        """Start WRITING, without pins or children."""
        self.key = key
        self.parent = parent
        self.slot = slot
        self.state = State.WRITING
        self.children = 0
        self.pins = 0
        self.prev: Entry | None = None
        self.next: Entry | None = None


class Index:
    """Finds entries by key and keeps the count of children."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[BlockKey, Entry] = {}
        self.holes = 0  # dropped entries that still have children; > 0 makes lookups linear

    def __len__(self) -> int:
        """Count the entries, those being written included."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Go through all entries, in no order."""
        return iter(self._entries.values())

    def get(self, key: BlockKey) -> Entry | None:
        """Return the entry, ready or being written."""
        return self._entries.get(key)

    def probe(self, key: BlockKey, *, coming: bool = True) -> LookupResult:
        """Say what is known about one key; coming: what is on its way up counts as here."""
        entry = self._entries.get(key)
        if entry is None:
            return LookupResult.MISS
        if entry.state is State.COMING:
            return LookupResult.HIT if coming else LookupResult.MISS
        return LookupResult.HIT if entry.state is State.READY else LookupResult.PENDING

    def insert(self, entry: Entry) -> None:
        """Add an entry below its parent."""
        self._entries[entry.key] = entry
        if entry.parent is not None:
            entry.parent.children += 1

    def remove(self, entry: Entry) -> None:
        """Take an entry out; its children, if any, are cut off from now on."""
        del self._entries[entry.key]
        entry.state = State.DROPPED
        if entry.children:
            self.holes += 1
        self._leave_parent(entry)

    def relink(self, entry: Entry, parent: Entry | None) -> None:
        """Hang an entry below the entry that now holds its parent's key."""
        if entry.parent is not parent:
            self._leave_parent(entry)
            entry.parent = parent
            if parent is not None:
                parent.children += 1

    def _leave_parent(self, entry: Entry) -> None:
        parent = entry.parent
        if parent is not None:
            parent.children -= 1
            if parent.children == 0 and parent.state is State.DROPPED:
                self.holes -= 1

    def prefix(self, key_at: Callable[[int], BlockKey], limit: int, *, coming: bool = True) -> int:
        """Find the end of the chain that is here: O(log limit) probes, O(limit) while holes exist.

        key_at(i): key of block i of one full-attention chain. coming: see probe.
        """
        entries, also = self._entries, State.COMING if coming else State.READY
        if self.holes:
            for index in range(limit):
                entry = entries.get(key_at(index))
                if entry is None or (entry.state is not State.READY and entry.state is not also):
                    return index
            return limit
        low, high = 0, limit
        while low < high:
            middle = (low + high) // 2
            entry = entries.get(key_at(middle))
            if entry is not None and (entry.state is State.READY or entry.state is also):
                low = middle + 1
            else:
                high = middle
        return low

    def run(self, keys: Sequence[BlockKey], *, coming: bool = True) -> list[Entry]:
        """Return the entries of one chain's leading keys up to the first that is not here.

        Blocks that were cut off by a drop hang below the new copy of their parent from now on; what
        is ready only once that copy is ready, too.
        """
        found: list[Entry] = []
        also = State.COMING if coming else State.READY
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or (entry.state is not State.READY and entry.state is not also):
                break
            above_ready = bool(found) and found[-1].state is State.READY
            if self.holes and found and (above_ready or entry.state is not State.READY):
                self.relink(entry, found[-1])
            found.append(entry)
        return found
