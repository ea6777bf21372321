"""Checks and sorts the records of one namespace that a start finds in the index.

A record is refused when it cannot stand for a block (foreign), lies beyond the end of its extent
(beyond), or has no way to a root (unreachable). Of two in one place the one that was written last
counts. A parent was written before its children, so in the order of generations parents come
first, and there are no circles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tiers.nvme.messages import NO_PARENT, NOWHERE, VALUE, Page

Refused = tuple[bytes, int, str]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.uint64]
Places = NDArray[np.intp]

_FIELDS = np.dtype(
    [("place", "<u8"), ("above", "<u8"), ("generation", "<u8"), ("sum", "<u8"), ("size", "<u4")]
)


class Sorted:
    """The records of a namespace, the oldest first, and those that are refused."""

    def __init__(self, slot_bytes: int, counts: Mapping[int, int]) -> None:
        """counts: slots of the namespace's extents."""
        self.refused: list[Refused] = []
        self._slot_bytes = slot_bytes
        self._counts = counts

    def sort(self, chunks: Iterable[list[bytes]]) -> Iterator[None]:
        """Read key, value, key, value, ..., and sort all. Yields now and then."""
        packed = [(np.zeros(0, "S1"), np.zeros(0, np.uint16), np.zeros(0, _FIELDS))]
        for chunk in chunks:
            packed.append(self._pack(chunk))
            yield
        keys, lengths, values = map(np.concatenate, zip(*packed, strict=True))
        packed.clear()
        order = np.argsort(values["generation"], kind="stable")
        keys, lengths, values = keys[order], lengths[order], values[order]
        yield
        causes = _causes(values, self._counts)
        causes[(causes == _OK) & (values["size"] != self._slot_bytes)] = _FOREIGN
        owners, places = _owners(values["place"], causes == _OK)
        holds = _flags(owners, len(values))
        causes[(causes == _OK) & ~holds] = _FOREIGN
        yield
        parents = _parents(values, owners, places)
        yield
        _cut_off(values["above"], parents, causes)
        yield
        good = np.flatnonzero(causes == _OK)
        self.refused += [
            (
                bytes(keys[at]).ljust(int(lengths[at]), b"\0"),
                int(values["place"][at]) if holds[at] or causes[at] == _BEYOND else NOWHERE,
                _NAMES[causes[at]],
            )
            for at in np.flatnonzero(causes != _OK)
        ]
        position = np.full(len(values) + 1, NO_PARENT, np.uint32)
        position[good] = np.arange(len(good), dtype=np.uint32)
        self._keys, self._lengths, self._values = keys[good], lengths[good], values[good]
        self._parents = position[parents[good]]
        inner = self._parents[self._parents != NO_PARENT]
        self._leaves = ~_flags(inner.astype(np.intp), len(good))

    def _pack(
        self, chunk: list[bytes]
    ) -> tuple[NDArray[np.bytes_], NDArray[np.uint16], NDArray[np.void]]:
        keys, values = chunk[::2], chunk[1::2]
        if set(map(len, values)) != {VALUE.size}:
            rows = list(zip(keys, values, strict=True))
            self.refused += [(k, NOWHERE, "foreign") for k, v in rows if len(v) != VALUE.size]
            rows = [row for row in rows if len(row[1]) == VALUE.size]
            keys, values = [key for key, _ in rows], [value for _, value in rows]
        lengths = np.fromiter(map(len, keys), np.uint16, len(keys))
        fields = np.frombuffer(bytearray().join(values), _FIELDS)
        return np.array(keys, "S"), lengths, fields

    def page(self, first: int, most: int) -> Page:
        """Return up to so many records, with the last also what is refused."""
        width = max(1, self._keys.dtype.itemsize)
        fields = [("key", f"S{width}"), ("length", "<u2"), ("place", "<u8"), ("parent", "<u4")]
        fields += [("generation", "<u8"), ("sum", "<u8"), ("leaf", "?")]
        part = slice(first, first + most)
        values = self._values[part]
        rows = np.empty(len(values), fields)
        rows["key"], rows["length"] = self._keys[part], self._lengths[part]
        rows["parent"], rows["leaf"] = self._parents[part], self._leaves[part]
        for field in ("place", "generation", "sum"):
            rows[field] = values[field]
        ended = part.stop >= len(self._keys)
        return Page(width, rows.tobytes(), len(rows), self.refused if ended else None)


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
