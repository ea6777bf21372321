"""One namespace's part of the disk: its records, its slots in extents, and what is durable of it.

Slots are taken by stores, and come back when a record is DROPPED, not being read or written, and
the index file has forgotten it. Extents are added when the cap allows, and retired when the space
is needed elsewhere: their blocks are dropped, and when the last slot is free the file goes.

No call takes long, however many records there are. What concerns many is done by step(), in
slices. All at once go the records of clear(): the index file drops the namespace's table.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, cast

import xxhash

from kvstore.core.errors import check
from kvstore.core.index import Node, State
from kvstore.core.tenants import Share, with_tenants
from kvstore.core.types import BlockKey, Slot
from tiers.nvme.files import ExtentFile, stride_of
from tiers.nvme.index import DiskIndex, Durable, Record
from tiers.nvme.messages import NO_PARENT, NOWHERE, RECORD_BYTES, VALUE, Page, row_format

POSITION = 0xFFFFFFFF  # in a place: extent << 32 | position
SLICE = 1 << 14  # slots looked at
_CHECKED = struct.Struct("<QQ")  # generation, payload bytes
QUOTA_SLICE = 256  # blocks that one call takes from a tenant that has too much
_DROPS_MAX = 2048  # of one call
_ROWS = 1024  # taken in without a look at the clock
_SUM_ALIGN = 64  # XXH3 takes a sixth longer over a page that it meets between two cache lines


def cost(extent_bytes: int, slot_bytes: int) -> int:
    """Bytes on disk of an extent, and of the index entries that its blocks can have."""
    return extent_bytes + extent_bytes // stride_of(slot_bytes) * RECORD_BYTES


class ExtentSlots:
    """Slots by extent; a place is an extent's number and a position in it."""

    def __init__(self) -> None:
        self.extents: dict[int, ExtentFile] = {}
        self.free = 0  # slots that can be taken
        self.held: dict[int, list[Record | None]] = {}  # by extent and position
        self.newest: dict[int, int] = {}  # extent -> generation of what it was last given
        self.pins: Counter[int] = Counter()  # extent -> pins of its records
        self.retiring: set[int] = set()  # extents on their way out
        self.cleared: set[int] = set()  # extents with nothing in them but for pins
        self._free: dict[int, array[int]] = {}  # positions by extent; the last is taken next
        self._used: Counter[int] = Counter()  # extent -> places in use
        self._doubtful: set[int] = set()  # places of writes that failed, until they are free

    @property
    def total(self) -> int:
        """Count the slots of all extents that are not being retired."""
        return sum(f.count for n, f in self.extents.items() if n not in self.retiring)

    def add_extent(self, number: int, file: ExtentFile) -> None:
        """Use a new, empty extent."""
        self.extents[number] = file
        self.open_extent(number)

    def open_extent(self, number: int) -> None:
        """Have all slots of an extent free."""
        count = self.extents[number].count
        self.held[number] = [None] * count
        self._used[number] = 0
        self._free[number] = array("I", range(count - 1, -1, -1))
        self.free += count

    def take_places(self, count: int) -> list[int]:
        """Take up to count free slots, neighbours together."""
        taken: list[int] = []
        while len(taken) < count and self._free:
            number, free = next(iter(self._free.items()))
            part = free[-(count - len(taken)) :]
            del free[len(free) - len(part) :]
            if not free:
                del self._free[number]
            self._used[number] += len(part)
            taken += [number << 32 | position for position in part]
        self.free -= len(taken)
        return sorted(taken)

    def give_back(self, place: int) -> None:
        """Free a slot that no record has."""
        extent, position = place >> 32, place & POSITION
        self._used[extent] -= 1
        self.held[extent][position] = None
        if extent not in self.retiring:
            free = self._free.setdefault(extent, array("I"))
            if place in self._doubtful:  # a bad sector would fail the next write, too
                self._doubtful.discard(place)
                free.insert(0, position)
            else:
                free.append(position)
            self.free += 1

    def withdraw(self, number: int) -> None:
        """Take no slot of an extent any more; it goes when its last one is free."""
        self.retiring.add(number)
        self.free -= len(self._free.pop(number, ()))

    def vacate(self) -> None:
        """Have nothing in any extent; none has a free slot before open_extent()."""
        self.cleared = set(self.extents)
        self.held = {}
        self._free, self.free = {}, 0
        self._used.clear()
        self.newest.clear()

    def expect(self) -> None:
        """Have all slots be what held says; none is free before free_rest()."""
        self.held = {number: [None] * count for number, count in self.slot_counts.items()}

    def free_rest(self) -> Iterator[None]:
        """Have the slots free that nothing is held in. Yields now and then."""
        for number, held in self.held.items():
            free = array("I")
            for end in range(len(held), 0, -SLICE):
                part = range(end - 1, max(0, end - SLICE) - 1, -1)
                free.extend(position for position in part if held[position] is None)
                yield
            self._used[number] = len(held) - len(free)
            if free and number not in self.retiring:
                self._free[number] = free
                self.free += len(free)

    @property
    def slot_counts(self) -> dict[int, int]:
        """Slots of each extent."""
        return {number: file.count for number, file in self.extents.items()}

    def take_retired(self) -> list[tuple[int, ExtentFile]]:
        """Take out and return the extents that are empty now."""
        empty = [
            number
            for number in self.retiring
            if not self._used[number] and not self.pins[number] and number not in self.cleared
        ]
        self.retiring.difference_update(empty)
        for number in empty:
            self.held.pop(number, None)
            self.newest.pop(number, None)
        return [(number, self.extents.pop(number)) for number in empty]

    def coldest(self) -> int | None:
        """Return the extent that was given nothing for the longest time, to be retired."""
        numbers = (number for number in self.extents if number not in self.retiring)
        return min(numbers, key=lambda number: self.newest.get(number, 0), default=None)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all extents, with the index entries that their blocks can have."""
        return sum(cost(file.bytes, file.slot_bytes) for file in self.extents.values())

    @property
    def retiring_bytes(self) -> int:
        """Those of them that are on their way out."""
        files = [self.extents[number] for number in self.retiring]
        return sum(cost(file.bytes, file.slot_bytes) for file in files)


class DiskNamespace(ExtentSlots):
    """Everything on disk of one namespace digest."""

    def __init__(self, digest: str, slot_bytes: int) -> None:
        super().__init__()
        self.digest = digest
        self.slot_bytes = slot_bytes
        self.counts: Counter[str] = Counter()
        self.growing = False
        self.attached = 0  # tiers that use it
        self.index = DiskIndex()
        self.loading: Loading | None = None  # while records are still to come
        self._emptying: deque[Iterator[None]] = deque()  # retired extents
        self._sinking: deque[Record] = deque()  # roots of what leaves in slices
        self.dismantling: deque[Iterator[None]] = deque()  # records of before, while they are here
        self._cleared = Durable.YES  # what the index file knows of the last clear()
        self.to_put: list[Record] = []  # READY, in the order in which they became so
        self.to_delete: list[Record] = []  # DROPPED, and in the index file
        self.leaving = 0  # DROPPED, and not free yet
        self.tokens_of: Callable[[BlockKey], bytes] = lambda _: b""
        self._before: set[BlockKey] = set()  # could be read before the directory was closed

    # Records

    def pin(self, record: Record) -> None:
        """One reader or writer more: its slot is not given away."""
        record.pins += 1
        self.pins[record.slot >> 32] += 1

    def begin(self, key: BlockKey, parent: Record | None, place: int, generation: int) -> Record:
        """Enter a block whose write starts now."""
        record = Record(key, parent, Slot(place), generation)
        self.pin(record)
        self.newest[place >> 32] = generation
        self.held[place >> 32][place & POSITION] = record
        self.index.insert(record, parent)
        return record

    def written(self, record: Record, checksum: int, *, ok: bool) -> None:
        """End a write: the block can be read now, or is dropped with what hangs below it."""
        record.checksum = checksum
        if record.slot >> 32 in self.cleared:
            record.state = State.DROPPED
        elif ok and record.state is State.WRITING:
            self.index.ready(record)
            self.to_put.append(record)
        elif record.state is not State.DROPPED:
            self._doubtful.add(record.slot)
            self.drop(record, "failed")
        self.unpin(record)

    def unpin(self, record: Record) -> None:
        """One reader or writer less."""
        extent = record.slot >> 32
        record.pins -= 1
        self.pins[extent] -= 1
        check(record.pins >= 0, "pins of a record below zero")
        if extent in self.cleared:
            self._reopen(extent)
        elif record.pins == 0:
            if record.state is State.DROPPED:
                self._leave(record)
            else:
                self.index.order.freed(record)

    def drop(self, record: Record, reason: str) -> None:
        """Take a block out, with all that hangs below it; in slices if that is much."""
        if record.slot >> 32 in self.cleared:
            return
        self.counts[reason] += 1
        self.index.gone(record)
        record.state = State.DROPPED
        if not self._sink(record, _DROPS_MAX):
            self.pin(record)  # its slot waits for those below it
            self._sinking.append(record)

    def _sink(self, root: Record, count: int) -> bool:
        """Take out up to count records; True when that was all."""
        for done, gone in enumerate(self.index.take_subtree(root), 1):
            self.counts["unlinked"] += gone is not root
            self.leaving += 1
            if gone.durable in (Durable.YES, Durable.PERHAPS):
                self.to_delete.append(gone)
            self._leave(gone)
            if gone is not root and done == count:
                return False
        return True

    def _leave(self, record: Record) -> None:
        """Free the slot of a dropped record once nothing needs it."""
        if record.pins == 0 and record.durable is Durable.NO:
            self.leaving -= 1
            self.give_back(record.slot)

    def evict(self, count: int) -> None:
        """Drop up to count of the coldest blocks."""
        self._drop_first(self.index.order.victims(), max(0, count), "evicted")

    def tend_tenants(self, shares: Mapping[bytes, Share]) -> bool:
        """Drop some blocks of tenants that have more than they may; True: call again soon.

        shares: of all tenants, by tag.
        """
        index = self.index
        if shares and (index.tenants is None or not index.tenants.knows(shares)):
            blocks = len(index)
            index.order = index.tenants = with_tenants(index.order, shares, blocks, self.slot_bytes)
        drop = partial(self._drop_first, count=QUOTA_SLICE, reason="quota")
        return index.tenants is not None and index.tenants.tend(index.table, drop)

    def _drop_first(self, victims: Iterator[Node], count: int, reason: str) -> None:
        for victim in islice(victims, count):
            self.drop(cast("Record", victim), reason)

    def retire(self, number: int) -> None:
        """Stop using an extent and drop what is in it, in slices."""
        self.withdraw(number)
        self._emptying.append(self._empty(number))

    def _empty(self, number: int) -> Iterator[None]:
        # An extent that is empty already may have gone before its turn has come.
        for position, record in enumerate(self.held.get(number, ())):
            if record is not None and record.state is not State.DROPPED:
                self.drop(record, "resize")
                yield
            elif position % SLICE == 0:
                yield

    # What concerns many records

    def clear(self) -> None:
        """Forget every block."""
        self.counts["cleared"] += len(self.index)
        self.index.let_go()
        self.dismantling.append(self._dismantle(self.index))
        self.index = DiskIndex(self.index.changes)
        self.loading = None
        self.tell_lost()
        self._cleared = Durable.NO
        self.vacate()
        self.leaving = 0
        self._emptying.clear()
        for record in self._sinking:
            self.unpin(record)
        self._sinking.clear()
        self.to_put, self.to_delete = [], []

    def _dismantle(self, old: DiskIndex) -> Iterator[None]:
        for readable in old.dismantle():
            self._before.update(readable)
            if self.loading is None:
                self.tell_lost()
            yield

    def tell_lost(self) -> None:
        """Note which blocks of before are not here any more."""
        if self.index.changes is not None:
            self.index.changes.removed += (k for k in self._before if self.index.get(k) is None)
        self._before = set()

    def succeed(self, old: DiskNamespace) -> None:
        """Go on for a space whose directory was closed: what it had forgotten stays so."""
        self.counts.update(old.counts)
        self.index.changes = old.index.changes
        self.tokens_of = old.tokens_of
        self._before = old._before
        old.index.let_go()
        self.dismantling.append(self._dismantle(old.index))
        if self.loading is not None:
            self.loading.unwanted = {r.key for r in (*old.to_delete, *old._sinking)}
            if old.loading is not None:
                self.loading.unwanted |= old.loading.unwanted

    @property
    def clearing(self) -> bool:
        """Tell whether a clear is not durable yet."""
        return self._cleared is not Durable.YES

    def _reopen(self, number: int) -> None:
        """Use a cleared extent again, once that is durable and no call is under way in it."""
        if self._cleared is Durable.YES and not self.pins[number]:
            self.cleared.remove(number)
            if number in self.extents and number not in self.retiring:
                self.open_extent(number)

    def step(self) -> bool:
        """Do a slice of what concerns many records; True while there is more to do."""
        if self._sinking:
            record = self._sinking.popleft()
            if self.index.holds(record) and not self._sink(record, _DROPS_MAX):
                self._sinking.appendleft(record)
            else:
                self.unpin(record)
        elif self._emptying or self.dismantling:
            queue = self._emptying or self.dismantling
            if next(queue[0], queue) is queue:
                queue.popleft()
        return bool(self._sinking or self._emptying or self.dismantling)

    @property
    def at_rest(self) -> bool:
        """Tell whether nothing is left to do here but what will be asked for."""
        slices = self._sinking or self._emptying or self.dismantling
        return not (slices or self.pending or self.growing or self.retiring)

    @property
    def unused(self) -> bool:
        """Tell whether no tier uses it, and nothing of it is on disk; at rest."""
        return not (self.attached or self.extents or self.loading)

    # Durability

    @property
    def pending(self) -> bool:
        """Tell whether there is something to commit."""
        return self.clearing or bool(self.to_put or self.to_delete)

    def take_clear(self) -> bool:
        """Tell whether the index file has to forget all records, before it is told of others."""
        if self._cleared is Durable.YES:
            return False
        self._cleared = Durable.COMING
        return True

    def take_puts(self) -> list[Record]:
        """Return what can become durable now: blocks whose parents are, or do with them."""
        taken: list[Record] = []
        later: list[Record] = []
        # Writes end in any order; by generation, parents come first.
        for record in sorted(self.to_put, key=lambda record: record.generation):
            parent = cast("Record | None", record.parent)
            if record.state is State.DROPPED:
                continue
            if parent is None or parent.durable in (Durable.YES, Durable.COMING):
                record.durable = Durable.COMING
                taken.append(record)
            else:
                later.append(record)
        self.to_put = later
        return taken

    def take_deletes(self) -> list[Record]:
        """Return what has to leave the index file."""
        taken, self.to_delete = self.to_delete, []
        return taken

    def value(self, record: Record) -> bytes:
        """Return what the index file keeps of a record."""
        parent = NOWHERE if record.parent is None else record.parent.slot
        return VALUE.pack(record.slot, parent, record.generation, record.checksum, self.slot_bytes)

    def committed(self, puts: list[Record], deletes: list[Record], *, ok: bool) -> None:
        """End a commit; one that failed is tried again."""
        if self.cleared:
            puts = [record for record in puts if record.slot >> 32 not in self.cleared]
            deletes = [record for record in deletes if record.slot >> 32 not in self.cleared]
        for record in puts:
            record.durable = Durable.YES if ok else Durable.PERHAPS
            if record.state is State.DROPPED and not self.index.holds(record):
                self.to_delete.append(record)
        if not ok:
            self.to_put[:0] = [record for record in puts if record.state is not State.DROPPED]
            self.to_delete[:0] = deletes
        else:
            for record in deletes:
                record.durable = Durable.NO
                self._leave(record)
        if self._cleared is Durable.COMING:
            self._cleared = Durable.YES if ok else Durable.NO
            for number in list(self.cleared):
                self._reopen(number)

    def checksum(self, record: Record, block: memoryview) -> int:
        """Sum over namespace, key, generation, length and payload; releases the GIL."""
        head = _CHECKED.pack(record.generation, len(block)) + self.digest.encode() + record.key
        state = xxhash.xxh3_64(head.ljust(-(-len(head) // _SUM_ALIGN) * _SUM_ALIGN, b"\0"))
        state.update(block)
        return state.intdigest()

    def discard(self, key: BlockKey) -> None:
        """Forget a block, and what hangs below it; one that is not loaded yet, when it is."""
        record = self.index.get(key)
        if record is not None:
            self.drop(record, "discarded")
        elif self.loading is not None:
            self.loading.unwanted.add(key)


class Loading:
    """The records of a namespace, as they come from the index file."""

    def __init__(self, space: DiskNamespace) -> None:
        """All slots are taken until the last page."""
        self._space = space
        self._loaded: list[Record] = []  # in the order in which they came
        self.newest = 0  # generation
        self.unwanted: set[BlockKey] = set()  # not loaded yet, and not to be kept
        space.expect()

    def take(self, page: Page) -> Iterator[None]:
        """Take in records, parents first, until all are in or are cleared. Yields now and then."""
        space = self._space
        rows = struct.iter_unpack(row_format(page.width), page.rows)
        for _ in range(0, page.count, _ROWS):
            if space.loading is self:
                self._take(islice(rows, _ROWS))
            yield
        if space.loading is self and page.refused is not None:
            self._refuse(page.refused)
            for _ in self._end():
                yield
                if space.loading is not self:
                    return

    def _take(self, rows: Iterable[tuple[Any, ...]]) -> None:
        space, loaded, generation = self._space, self._loaded, 0
        held, newest = space.held, space.newest
        ready, dropped, durable = State.READY, State.DROPPED, Durable.YES
        insert, used = space.index.insert, space.index.order.used
        for padded, length, place, above, generation, checksum, leaf in rows:
            key = padded[:length]
            parent = None if above == NO_PARENT else loaded[above]
            record = Record(key, parent, place, generation, checksum, ready, durable)
            loaded.append(record)
            extent = place >> 32
            held[extent][place & POSITION] = record
            newest[extent] = generation
            if parent is not None and parent.state is dropped:
                record.state = dropped
                space.counts["unlinked"] += 1
                space.leaving += 1
                space.to_delete.append(record)
                continue
            insert(record, parent)
            if leaf:  # the others enter the order when they have become leaves
                used(record, 0)
        self.newest = generation

    def _refuse(self, refused: list[tuple[bytes, int, str]]) -> None:
        """Have rows that stand for nothing taken out of the index file: key, place, cause."""
        for key, place, cause in refused:
            self._space.counts["unreachable" if cause == "unreachable" else "foreign"] += 1
            ghost = Record(BlockKey(key), None, Slot(place), 0, 0, State.DROPPED, Durable.YES)
            self._space.to_delete.append(ghost)
            if place == NOWHERE or cause == "beyond":
                ghost.pins = 1  # there is no slot to be freed
            else:
                self._space.held[place >> 32][place & POSITION] = ghost
                self._space.leaving += 1

    def _end(self) -> Iterator[None]:
        """All records are in: the other slots are free. Yields now and then."""
        space = self._space
        for key in self.unwanted:
            record = space.index.get(key)
            if record is not None:
                space.drop(record, "discarded")
            yield
        yield from space.free_rest()
        space.tell_lost()
        space.loading = None
