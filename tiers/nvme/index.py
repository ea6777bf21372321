"""The blocks of one namespace that are on disk, as a forest (parent = previous block).

    absent --slot taken--> WRITING --data on disk--> READY --evicted, damaged--> DROPPED
    WRITING --write failed, or an ancestor left--> DROPPED

A DROPPED record's slot is free again when it is not being read or written (pins) and no durable
record names it (durable): a crash must not find a record that points at another block's bytes.
The set is closed under "parent of": a record enters below its parent, and leaves with all that
hangs below it. So what a restart finds is reachable.

What hangs below a record may be millions. Then it leaves in slices, from its leaves up, and the
record is the last: DROPPED, so that no lookup finds it, and still in its place (see sinks()).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import chain
from typing import cast

from kvstore.core.eviction import LeafLRU
from kvstore.core.index import TABLE_SHIFT, TABLES, Node, State
from kvstore.core.tenants import TenantOrder
from kvstore.core.types import BlockKey, Changes, Slot


class Durable(enum.Enum):
    """What the index file knows of a record."""

    NO = "no"
    PERHAPS = "perhaps"  # a commit failed, at an unknown point
    COMING = "coming"  # in the commit under way
    YES = "yes"


class Record(Node):
    """One block on disk; slot is its place there, extent << 32 | position."""

    __slots__ = ("after", "before", "checksum", "durable", "first", "generation")

    def __init__(  # flat, and without calls: a start makes millions
        self,
        key: BlockKey,
        parent: Record | None,
        place: Slot,
        generation: int,
        checksum: int = 0,
        state: State = State.WRITING,
        durable: Durable = Durable.NO,
    ) -> None:
        self.key = key
        self.parent = parent
        self.slot = place
        self.state = state
        self.children = self.pins = 0
        self.prev = self.next = None
        self.generation = generation
        self.checksum = checksum
        self.durable = durable
        self.first: Record | None = None  # child
        self.before: Record | None = None  # siblings
        self.after: Record | None = None


class DiskIndex:
    """Records by key, with their children, in order of recency."""

    def __init__(self, changes: Changes | None = None) -> None:
        """Start empty. changes: where what can be read, and cannot any more, is noted."""
        self._tables: list[dict[BlockKey, Record]] = [{} for _ in range(TABLES)]
        self.order: LeafLRU | TenantOrder = LeafLRU()
        self.tenants: TenantOrder | None = None  # the same, once there is a tenant
        self.changes = changes

    def __len__(self) -> int:
        """Count the records, those being written included."""
        return sum(map(len, self._tables))

    def table(self, number: int) -> list[Record]:
        """Return the records of one of the TABLES."""
        return list(self._tables[number].values())

    def get(self, key: BlockKey) -> Record | None:
        """Return the record, ready or being written."""
        found = self._tables[hash(key) >> TABLE_SHIFT].get(key)
        return None if found is None or found.state is State.DROPPED else found

    def sinks(self, key: BlockKey) -> bool:
        """Tell whether this block is about to leave, and cannot come back yet."""
        found = self._tables[hash(key) >> TABLE_SHIFT].get(key)
        return found is not None and found.state is State.DROPPED

    def holds(self, record: Record) -> bool:
        """Tell whether this very record is here, be it one that sinks."""
        return self._tables[hash(record.key) >> TABLE_SHIFT].get(record.key) is record

    def __iter__(self) -> Iterator[Record]:
        """Go through all records, in no order; for tests and fsck."""
        records = chain.from_iterable(list(table.values()) for table in self._tables)
        return (record for record in records if record.state is not State.DROPPED)

    def insert(self, record: Record, parent: Record | None) -> None:
        """Add a record below its parent, which is here."""
        key = record.key
        self._tables[hash(key) >> TABLE_SHIFT][key] = record
        if parent is not None:
            parent.children += 1
            sibling = parent.first
            if sibling is not None:
                record.after = sibling
                sibling.before = record
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
            parent.children -= 1
        record.before = record.after = None
        self.gone(record)
        self.order.remove(record)
        del self._tables[hash(record.key) >> TABLE_SHIFT][record.key]
        record.state = State.DROPPED
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
        if self.tenants is not None:
            self.tenants.entered(record.key)
        self.order.used(record, 0)
        if self.changes is not None:
            self.changes.added.append(record.key)

    def gone(self, record: Record) -> None:
        """The record is about to be taken out, or not to be read any more."""
        if record.state is State.READY:
            if self.changes is not None:
                self.changes.removed.append(record.key)
            if self.tenants is not None:
                self.tenants.left(record.key)

    def let_go(self) -> None:
        """Count nothing of it for tenants any more: it is out of use."""
        if self.tenants is not None:
            self.tenants.clear()
            self.tenants = None

    def dismantle(self) -> Iterator[list[BlockKey]]:
        """Cut the records of an index that is out of use apart, so that their memory is free.

        Yields after each table, which keys of it could be read, if that is noted. They hang
        together in circles, which would else wait for a collection of all garbage.
        """
        while self._tables:
            table, readable = self._tables.pop(), list[BlockKey]()
            if self.changes is not None:
                readable = [key for key, record in table.items() if record.state is State.READY]
            for record in table.values():
                record.parent = record.prev = record.next = None
                record.first = record.before = record.after = None
            yield readable
