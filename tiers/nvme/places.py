"""The extents of one namespace on disk, and which of their slots are free."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from tiers.nvme.files import ExtentFile, stride_of
from tiers.nvme.index import Record
from tiers.nvme.messages import RECORD_BYTES

POSITION = 0xFFFFFFFF  # in a place: extent << 32 | position
SLICE = 1 << 14  # slots looked at


def cost(extent_bytes: int, slot_bytes: int) -> int:
    """Bytes on disk of an extent, and of the index entries that its blocks can have."""
    return extent_bytes + extent_bytes // stride_of(slot_bytes) * RECORD_BYTES


class ExtentSlots:
    """Slots by extent; a place is an extent's number and a position in it."""

    def __init__(self) -> None:
        """Start without extents."""
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

    def doubt(self, place: int) -> None:
        """Have a place be the last to be taken again, once it is free."""
        self._doubtful.add(place)

    def withdraw(self, number: int) -> None:
        """Take no slot of an extent any more; it goes when its last one is free."""
        self.retiring.add(number)
        self.free -= len(self._free.pop(number, ()))

    def vacate(self) -> None:
        """Have nothing in any extent; none has a free slot before open_extent()."""
        self.cleared = set(self.extents)
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
