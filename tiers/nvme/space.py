"""One namespace's part of the disk: its records, its slots in extents, and what is durable of it.

Slots are taken by stores, and come back when a record is DROPPED, nobody reads or writes it, and
the journal has forgotten it. Extents are added when the cap allows, and retired when the space is
needed elsewhere: their blocks are dropped, and when the last slot is free the file goes.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import cast

import xxhash

from kvstore.errors import check
from kvstore.index import State
from kvstore.types import BlockKey
from tiers.nvme.files import ExtentFile, stride_of
from tiers.nvme.index import NOWHERE, DiskIndex, Durable, Record
from tiers.nvme.journal import NUMBER, RECORD_BYTES, VALUE

_CHECKED = struct.Struct("<QQ")  # generation, payload bytes
_SLICE = 1024
_SUM_ALIGN = 64  # XXH3 takes a sixth longer over a page that it meets between two cache lines


def cost(extent_bytes: int, slot_bytes: int) -> int:
    """Bytes on disk of an extent, and of the index entries that its blocks can have."""
    return extent_bytes + extent_bytes // stride_of(slot_bytes) * RECORD_BYTES


class Space:
    """Everything on disk of one namespace digest."""

    def __init__(self, number: int, digest: str, slot_bytes: int) -> None:
        """number: of the namespace in the journal."""
        self.number = number
        self.digest = digest
        self.slot_bytes = slot_bytes
        self.counts: Counter[str] = Counter()
        self.growing = False
        self.attached = 0  # tiers that use it
        self._prefix = NUMBER.pack(number)
        self.start_empty()

    def start_empty(self) -> None:
        """Have no extents and no blocks; those there were are gone."""
        self.index = DiskIndex()
        self.extents: dict[int, ExtentFile] = {}
        self._free: list[int] = []  # places; the last is taken next
        self._used: Counter[int] = Counter()  # extent -> places in use
        self._retiring: set[int] = set()
        self.to_put: list[Record] = []  # READY, in the order in which they became so
        self.to_delete: list[Record] = []  # DROPPED, and in the journal
        self.leaving = 0  # DROPPED, and not free yet
        self._orphans: dict[int, list[Record]] = {}  # while loading: parent's place -> children
        self._at: dict[int, Record] = {}  # while loading

    # Slots

    @property
    def free(self) -> int:
        """Count the slots that can be taken."""
        return len(self._free)

    @property
    def total(self) -> int:
        """Count the slots of all extents that are not being retired."""
        return sum(f.count for n, f in self.extents.items() if n not in self._retiring)

    def add_extent(self, number: int, file: ExtentFile) -> None:
        """Use a new, empty extent."""
        self.extents[number] = file
        self.growing = False
        self._free[:0] = [number << 32 | position for position in reversed(range(file.count))]

    def take_places(self, count: int) -> list[int]:
        """Take up to count free slots, neighbours together."""
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - len(taken) :]
        for place in taken:
            self._used[place >> 32] += 1
        return sorted(taken)

    def give_back(self, place: int) -> None:
        """Free a slot that no record has."""
        extent = place >> 32
        self._used[extent] -= 1
        if extent not in self._retiring:
            self._free.append(place)

    def retire(self, number: int) -> None:
        """Stop using an extent and drop what is in it."""
        self._retiring.add(number)
        self._free = [place for place in self._free if place >> 32 != number]
        for record in self.index:
            if record.slot >> 32 == number and record.state is not State.DROPPED:
                self.drop(record, "resize")

    @property
    def retiring(self) -> int:
        """Count the extents on their way out."""
        return len(self._retiring)

    def take_retired(self) -> list[tuple[int, ExtentFile]]:
        """Let go of the extents that are empty now."""
        empty = [number for number in self._retiring if not self._used[number]]
        self._retiring.difference_update(empty)
        return [(number, self.extents.pop(number)) for number in empty]

    def coldest(self) -> int | None:
        """Return the extent whose newest block is the oldest, to be retired."""
        newest = dict.fromkeys((n for n in self.extents if n not in self._retiring), 0)
        for record in self.index:
            extent = record.slot >> 32
            if extent in newest:
                newest[extent] = max(newest[extent], record.generation)
        return min(newest, key=lambda number: newest[number], default=None)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all extents, with the index entries that their blocks can have."""
        return sum(cost(file.bytes, file.slot_bytes) for file in self.extents.values())

    @property
    def retiring_bytes(self) -> int:
        """Those of them that are on their way out."""
        files = [self.extents[number] for number in self._retiring]
        return sum(cost(file.bytes, file.slot_bytes) for file in files)

    # Records

    def begin(self, key: BlockKey, parent: Record | None, place: int, generation: int) -> Record:
        """Enter a block whose write starts now."""
        record = Record(key, parent, place, generation)
        record.pins = 1
        self.index.insert(record)
        return record

    def written(self, record: Record, checksum: int, *, ok: bool) -> None:
        """End a write: the block can be read now, or is dropped with what hangs below it."""
        record.checksum = checksum
        if ok and record.state is State.WRITING:
            self.index.ready(record)
            self.to_put.append(record)
        elif record.state is not State.DROPPED:
            self.drop(record, "failed")
        self.unpin(record)

    def unpin(self, record: Record) -> None:
        """One reader or writer less."""
        record.pins -= 1
        check(record.pins >= 0, "pins of a record below zero")
        if record.pins == 0:
            if record.state is State.DROPPED:
                self._leave(record)
            else:
                self.index.order.freed(record)

    def drop(self, record: Record, reason: str) -> None:
        """Take a block out, with all that hangs below it."""
        for gone in self.index.take_subtree(record):
            self.counts[reason if gone is record else "unlinked"] += 1
            self.leaving += 1
            if gone.durable is Durable.YES:
                self.to_delete.append(gone)
            self._leave(gone)

    def clear(self) -> None:
        """Drop every block; stores under way may still land."""
        for record in self.index:
            if record.state is not State.DROPPED:
                self.drop(record, "cleared")

    def _leave(self, record: Record) -> None:
        """Free the slot of a dropped record once nothing needs it."""
        if record.pins == 0 and record.durable is Durable.NO:
            self.leaving -= 1
            self.give_back(record.slot)

    def evict(self, count: int) -> int:
        """Drop up to count of the coldest blocks; return how many went."""
        for done in range(count):
            victim = self.index.order.victim()
            if victim is None:
                return done
            self.drop(cast("Record", victim), "evicted")
        return count

    # Durability

    def journal_key(self, record: Record) -> bytes:
        """Name a record in the journal."""
        return self._prefix + record.key

    def take_puts(self) -> list[Record]:
        """Return what can become durable now: blocks whose parents are, or do with them."""
        taken: list[Record] = []
        later: list[Record] = []
        # Writes end in any order; by generation, parents come first.
        for record in sorted(self.to_put, key=lambda record: record.generation):
            parent = cast("Record | None", record.parent)
            if record.state is State.DROPPED:
                continue
            if parent is None or parent.durable is not Durable.NO:
                record.durable = Durable.COMING
                taken.append(record)
            else:
                later.append(record)
        self.to_put = later
        return taken

    def take_deletes(self) -> list[Record]:
        """Return what has to leave the journal."""
        taken, self.to_delete = self.to_delete, []
        return taken

    def value(self, record: Record) -> bytes:
        """Return what the journal keeps of a record."""
        parent = NOWHERE if record.parent is None else record.parent.slot
        return VALUE.pack(record.slot, parent, record.generation, record.checksum, self.slot_bytes)

    def committed(self, puts: list[Record], deletes: list[Record], *, ok: bool) -> None:
        """End a commit; one that failed is tried again."""
        for record in puts:
            record.durable = Durable.YES if ok else Durable.NO
            if record.state is State.DROPPED:
                if ok:
                    self.to_delete.append(record)
                else:
                    self._leave(record)
        if not ok:
            self.to_put[:0] = [record for record in puts if record.state is not State.DROPPED]
            self.to_delete[:0] = deletes
            return
        for record in deletes:
            record.durable = Durable.NO
            self._leave(record)

    def checksum(self, record: Record, block: memoryview) -> int:
        """Sum over namespace, key, generation, length and payload; releases the GIL."""
        head = _CHECKED.pack(record.generation, len(block)) + self.digest.encode() + record.key
        state = xxhash.xxh3_64(head.ljust(-(-len(head) // _SUM_ALIGN) * _SUM_ALIGN, b"\0"))
        state.update(block)
        return state.intdigest()

    # Loading

    def load(self, key: bytes, value: bytes) -> int:
        """Take in one row of the journal, in any order; return its generation."""
        if len(value) != VALUE.size:
            self.counts["foreign"] += 1
            self._forget(key, NOWHERE)
            return 0
        place, above, generation, checksum, size = VALUE.unpack(value)
        file = self.extents.get(place >> 32)
        if (
            size != self.slot_bytes
            or file is None
            or place & 0xFFFFFFFF >= file.count
            or place in self._at
        ):
            self.counts["foreign"] += 1
            self._forget(key, place)
            return int(generation)
        parent = self._at.get(above)
        if parent is not None and parent.generation >= generation:
            parent = None  # a parent is written first; a circle would never end
        record = Record(BlockKey(key), parent, place, generation)
        record.checksum, record.durable = checksum, Durable.YES
        self.index.insert(record)
        record.state = State.READY
        self._at[place] = record
        if parent is None and above != NOWHERE:
            self._orphans.setdefault(above, []).append(record)
        if place in self._orphans:
            children = self._orphans.pop(place)
            self._orphans[place] = [child for child in children if child.generation <= generation]
            for child in children:
                if child.generation > generation:
                    self.index.adopt(child, record)
        return int(generation)

    def _forget(self, key: bytes, place: int) -> None:
        """Have a row that stands for nothing taken out of the journal."""
        ghost = Record(BlockKey(key), None, place, 0)
        ghost.state, ghost.durable, ghost.pins = State.DROPPED, Durable.YES, 1
        self.to_delete.append(ghost)

    def settle(self) -> Iterator[None]:
        """All rows are in: what has no way to a root goes, the rest of the slots are free.

        Yields now and then: with millions of blocks this takes seconds.
        """
        # What was written last was used last, as far as we know.
        for number, record in enumerate(sorted(self._at.values(), key=attrgetter("generation"))):
            if record.state is State.READY:
                self.index.order.touch(record)
            self._used[record.slot >> 32] += 1
            if number % _SLICE == 0:
                yield
        for child in [child for children in self._orphans.values() for child in children]:
            if child.state is State.READY:
                self.drop(child, "unreachable")
        self._orphans = {}
        for number, file in self.extents.items():
            places = (number << 32 | position for position in reversed(range(file.count)))
            self._free[:0] = [place for place in places if place not in self._at]
            yield
        self._at = {}
