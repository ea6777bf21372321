"""Checks and sorts the records of one namespace that a start finds in the index.

A record is refused when it cannot stand for a block (foreign), lies beyond the end of its extent
(beyond), or has no way to a root (unreachable). Of two in one place the one that was written last
counts. A parent was written before its children, so in the order of generations parents come
first, and there are no circles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tiers.nvme.messages import NO_PARENT, NOWHERE, NUMBER, VALUE, Batch

BATCH_ROWS = 1024  # of which a store takes in one without a look at the clock
Refused = tuple[bytes, int, str]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.uint64]
Places = NDArray[np.intp]

_FIELDS = np.dtype(
    [("place", "<u8"), ("above", "<u8"), ("generation", "<u8"), ("sum", "<u8"), ("size", "<u4")]
)


class Rows:
    """Records as they lie in the index, packed."""

    def __init__(self) -> None:
        """Start empty."""
        self.refused: list[Refused] = []  # those of a wrong size
        self._keys: list[NDArray[np.uint8]] = []
        self._lengths: list[NDArray[np.uint16]] = []
        self._values: list[NDArray[np.void]] = []

    def add(self, chunk: list[bytes]) -> None:
        """Take key, value, key, value, ..."""
        keys, values = chunk[::2], chunk[1::2]
        if not keys:
            return
        if set(map(len, values)) != {VALUE.size} or min(map(len, keys)) < NUMBER.size:
            rows = list(zip(keys, values, strict=True))
            sound = [row for row in rows if _sound(*row)]
            self.refused += [(row[0], NOWHERE, "foreign") for row in rows if not _sound(*row)]
            keys, values = [key for key, _ in sound], [value for _, value in sound]
        if not keys:
            return
        lengths = np.fromiter(map(len, keys), np.uint16, len(keys))
        width = int(lengths.max())
        if int(lengths.min()) != width:
            keys = [key.ljust(width, b"\0") for key in keys]
        self._keys.append(np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), width))
        self._lengths.append(lengths)
        self._values.append(np.frombuffer(b"".join(values), _FIELDS))

    def packed(self) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.void]]:
        """Return keys (one a row, padded), their lengths, and values; empties this."""
        if not self._keys:
            return np.zeros((0, 1), np.uint8), np.zeros(0, np.uint16), np.zeros(0, _FIELDS)
        width = max(keys.shape[1] for keys in self._keys)
        padded = [np.pad(k, ((0, 0), (0, width - k.shape[1]))) for k in self._keys]
        self._keys.clear()
        found = np.concatenate(padded), np.concatenate(self._lengths), np.concatenate(self._values)
        self._lengths.clear()
        self._values.clear()
        return found


def _sound(key: bytes, value: bytes) -> bool:
    return len(key) >= NUMBER.size and len(value) == VALUE.size


class Sorted:
    """The records of a namespace, the oldest first, and those that are refused."""

    def __init__(self, number: int, slot_bytes: int, counts: Mapping[int, int], rows: Rows) -> None:
        """counts: slots of the namespace's extents."""
        self._number = number
        self.refused = rows.refused
        keys, lengths, values = rows.packed()
        order = np.argsort(values["generation"], kind="stable")
        values = values[order]
        causes = _causes(values, counts)
        causes[(causes == _OK) & (values["size"] != slot_bytes)] = _FOREIGN
        owners, places = _owners(values["place"], causes == _OK)
        holds = _flags(owners, len(values))
        causes[(causes == _OK) & ~holds] = _FOREIGN
        parents = _parents(values, owners, places)
        _cut_off(values["above"], parents, causes)
        good = np.flatnonzero(causes == _OK)
        bad = np.flatnonzero(causes != _OK)
        self.refused += [
            (
                keys[order[at], : lengths[order[at]]].tobytes(),
                int(values["place"][at]) if holds[at] or causes[at] == _BEYOND else NOWHERE,
                _NAMES[causes[at]],
            )
            for at in bad
        ]
        self._keys, self._lengths, self._order = keys, lengths, order[good]
        position = np.full(len(values) + 1, NO_PARENT, np.uint32)
        position[good] = np.arange(len(good), dtype=np.uint32)
        self._parents = position[parents[good]]
        self._values = values[good]
        inner = self._parents[self._parents != NO_PARENT]
        self._leaves = ~_flags(inner.astype(np.intp), len(good))

    def __len__(self) -> int:
        """Count the records that are not refused."""
        return len(self._order)

    def batches(self, skip: int = 0) -> Iterator[Batch]:
        """Yield the records, without the first `skip`."""
        head = NUMBER.size
        for first in range(skip, len(self), BATCH_ROWS):
            part = slice(first, first + BATCH_ROWS)
            rows, values = self._order[part], self._values[part]
            lengths = self._lengths[rows] - head
            width = int(lengths.max())
            same = int(lengths.min()) == width
            yield Batch(
                number=self._number,
                width=width,
                lengths=b"" if same else lengths.astype("<u2").tobytes(),
                keys=self._keys[rows, head : head + width].tobytes(),
                places=values["place"].tobytes(),
                parents=self._parents[part].astype("<u4").tobytes(),
                generations=values["generation"].tobytes(),
                checksums=values["sum"].tobytes(),
                leaves=self._leaves[part].tobytes(),
            )


_OK, _FOREIGN, _BEYOND, _UNREACHABLE = range(4)
_NAMES = ("ok", "foreign", "beyond", "unreachable")


def _flags(at: Places, count: int) -> Flags:
    """Return count flags, set at these."""
    found = np.zeros(count, np.bool_)
    found[at] = True
    return found


def _causes(values: NDArray[np.void], counts: Mapping[int, int]) -> Places:
    """Say of each record whether its place is one: _OK, _FOREIGN or _BEYOND."""
    numbers = np.array(sorted(counts), np.uint64)
    sizes = np.array([counts[int(number)] for number in numbers] or [0], np.uint64)
    extent = values["place"] >> np.uint64(32)
    at = np.searchsorted(numbers, extent)
    known = np.zeros(len(values), np.bool_)
    inside = at < len(numbers)
    known[inside] = numbers[at[inside]] == extent[inside]
    at[~known] = 0
    beyond = (values["place"] & np.uint64(0xFFFFFFFF)) >= sizes[at]
    return np.where(known, np.where(beyond, _BEYOND, _OK), _FOREIGN).astype(np.intp)


def _owners(places: Numbers, placed: Flags) -> tuple[Places, Numbers]:
    """Return the record that was written last in each place, in the order of places, and these."""
    rows = np.flatnonzero(placed)
    rows = rows[np.argsort(places[rows], kind="stable")]
    found = places[rows]
    last = np.ones(len(rows), np.bool_)
    last[:-1] = found[1:] != found[:-1]
    return rows[last], found[last]


def _parents(values: NDArray[np.void], owners: Places, places: Numbers) -> Places:
    """Return each record's parent, itself a record that is older; len(values) for none."""
    none = len(values)
    if not len(owners):
        return np.full(none, none, np.intp)
    at = np.searchsorted(places, values["above"])
    at[at == len(places)] = 0
    parents = owners[at]
    older = values["generation"][parents] < values["generation"]
    return np.where((places[at] == values["above"]) & older, parents, none)


def _cut_off(above: Numbers, parents: Places, causes: Places) -> None:
    """Mark what has no way to a root."""
    lost = (above != NOWHERE) & (parents == len(parents))
    bad = np.append((causes != _OK) | lost, False)
    ancestor = np.append(parents, len(parents))
    while bad.any():  # twice as far up each time
        wider = bad | bad[ancestor]
        if (ancestor == len(parents)).all():
            break
        bad, ancestor = wider, ancestor[ancestor]
    causes[bad[:-1] & (causes == _OK)] = _UNREACHABLE
