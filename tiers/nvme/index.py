"""The blocks of one namespace that are on disk, as a forest (parent = previous block).

    absent --slot taken--> WRITING --data on disk--> READY --evicted, damaged--> DROPPED
    WRITING --write failed, or an ancestor left--> DROPPED

A DROPPED record's slot is free again when nobody reads or writes it (pins) and when no durable
record names it (durable): a crash must not find a record that points at another block's bytes.
The set is closed under "parent of": a record enters below its parent, and leaves with all that
hangs below it. So what a restart finds is reachable.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import cast

from kvstore.eviction import LeafLRU
from kvstore.index import Entry, Index, State
from kvstore.types import BlockKey, Slot

NOWHERE = (1 << 64) - 1
"""The place of a root's parent."""


class Durable(enum.Enum):
    """What the journal knows of a record."""

    NO = "no"
    COMING = "coming"  # in the commit under way
    YES = "yes"


class Record(Entry):
    """One block on disk; slot is its place there (see place_of)."""

    __slots__ = ("after", "before", "checksum", "durable", "first", "generation")

    def __init__(self, key: BlockKey, parent: Record | None, place: int, generation: int) -> None:
        """Start WRITING, without pins or children."""
        super().__init__(key, parent, Slot(place))
        self.generation = generation
        self.checksum = 0
        self.durable = Durable.NO
        self.first: Record | None = None  # child
        self.before: Record | None = None  # siblings
        self.after: Record | None = None


class DiskIndex:
    """Records by key, with their children, in order of recency."""

    def __init__(self) -> None:
        """Start empty."""
        self._index = Index()
        self.order = LeafLRU()

    def __len__(self) -> int:
        """Count the records, those being written included."""
        return len(self._index)

    def get(self, key: BlockKey) -> Record | None:
        """Return the record, ready or being written."""
        return cast("Record | None", self._index.get(key))

    def __iter__(self) -> Iterator[Record]:
        """Go through all records, in no order."""
        return iter(cast("Iterator[Record]", list(self._index)))

    def insert(self, record: Record) -> None:
        """Add a record below its parent, which is here."""
        self._index.insert(record)
        parent = cast("Record | None", record.parent)
        if parent is not None:
            self._link(record, parent)

    def adopt(self, record: Record, parent: Record) -> None:
        """Hang a root below a parent that was found later; only while loading."""
        self._index.relink(record, parent)
        self._link(record, parent)

    def _link(self, record: Record, parent: Record) -> None:
        record.after = parent.first
        if parent.first is not None:
            parent.first.before = record
        parent.first = record

    def remove(self, record: Record) -> None:
        """Take out a record that has no children."""
        parent = cast("Record | None", record.parent)
        if parent is not None:
            if record.before is not None:
                record.before.after = record.after
            else:
                parent.first = record.after
            if record.after is not None:
                record.after.before = record.before
        record.before = record.after = None
        self.order.remove(record)
        self._index.remove(record)
        if parent is not None:
            self.order.freed(parent)

    def take_subtree(self, record: Record) -> Iterator[Record]:
        """Take out a record with all that hangs below it, children first."""
        at = record
        while True:
            while at.first is not None:
                at = at.first
            above = cast("Record | None", at.parent)
            self.remove(at)
            yield at
            if at is record or above is None:
                return
            at = above

    def ready(self, record: Record) -> None:
        """The record's data is on disk: it may be read, and evicted as a leaf."""
        record.state = State.READY
        self.order.touch(record)
