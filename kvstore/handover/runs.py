"""Positions of a fetch or a job that change together, as runs of neighbours.

Python's cost for each block is what limits a hand-over of small blocks. What the two sides keep of
each block is in arrays; an event changes a slice of them. Blocks that differ are split into runs,
of one block if need be.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.core.errors import ProtocolError
from kvstore.wire import peer as m
from kvstore.wire.framing import U32

_SAME = re.compile(rb"(.)\1*", re.DOTALL)
Run = tuple[int, int]
"""The first position, and the one behind the last."""


class Part(NamedTuple):
    """Blocks of one fetch or job: the connection, its number, and positions in it.

    Connection and number are unique in a store: connections that were made and those that were
    accepted share their numbers.
    """

    peer: int
    job: int
    positions: Sequence[int]

    def cut(self, piece: slice) -> Part:
        """Return some of the blocks."""
        return self._replace(positions=self.positions[piece])


def runs_of(positions: Sequence[int]) -> list[Run]:
    """Cut positions, each of which is named once, into runs of neighbours, in their order."""
    if not positions:
        return []
    first, count = positions[0], len(positions)
    if positions[-1] == first + count - 1 and list(positions) == list(range(first, first + count)):
        return [(first, first + count)]
    found: list[Run] = []
    end = first
    for position in positions:
        if position != end:
            found.append((first, end))
            first = position
        end = position + 1
    found.append((first, end))
    return found


def joined(runs: Sequence[Run]) -> Sequence[int]:
    """Return the positions of runs: a range if it is one."""
    if len(runs) == 1:
        return range(*runs[0])
    return [position for run in runs for position in range(*run)]


def at(values: array[int], positions: Sequence[int]) -> array[int]:
    """Return what an array has at these positions."""
    if isinstance(positions, range):
        return values[positions.start : positions.stop]
    return array(values.typecode, [values[position] for position in positions])


def put_at(values: array[int], positions: Sequence[int], found: array[int]) -> None:
    """Change what an array has at these positions."""
    done = 0
    for first, end in runs_of(positions):
        values[first:end] = found[done : done + end - first]
        done += end - first


def numbers(count: int, typecode: str = "I") -> array[int]:
    """Return an array of zeros."""
    return array(typecode, bytes(count * array(typecode).itemsize))


class Places:
    """Where blocks are, or go, in a peer's memory: for each a region, and a slot there."""

    def __init__(self, count: int) -> None:
        self._regions: list[m.Region] = []
        self._numbers: dict[m.Region, int] = {}  # from 1
        self._of = numbers(count)  # the region's number, from 1; 0: not known
        self._slots = numbers(count)

    def put(self, positions: Sequence[int], region: m.Region, slots: array[int]) -> None:
        """Note where blocks are. Raises ProtocolError for slots that the region does not have."""
        if max(slots, default=0) >= region.slots:
            raise ProtocolError(f"slots {list(slots[:8])}, expected below {region.slots}")
        if not positions:
            return
        if region not in self._numbers:
            self._regions.append(region)
            self._numbers[region] = len(self._regions)
        put_at(self._of, positions, array(U32, (self._numbers[region],)) * len(positions))
        put_at(self._slots, positions, slots)

    def known(self, positions: Sequence[int]) -> Sequence[int]:
        """Return those of these positions whose place is known."""
        of = at(self._of, positions)
        unknown = of.count(0)
        if unknown in {0, len(of)}:
            return () if unknown else positions
        return [position for position, number in zip(positions, of, strict=True) if number]

    def by_region(
        self, positions: Sequence[int]
    ) -> Iterator[tuple[m.Region, Sequence[int], array[int]]]:
        """Go through blocks region by region: their positions, and their slots there."""
        of = at(self._of, positions)
        if of.count(of[0] if of else 0) == len(of):
            if of:
                yield self._regions[of[0] - 1], positions, at(self._slots, positions)
            return
        found: dict[int, list[int]] = {}
        for position, number in zip(positions, of, strict=True):
            found.setdefault(number, []).append(position)
        for number, those in found.items():
            yield self._regions[number - 1], those, at(self._slots, those)


class States:
    """The state of each block, as a small number."""

    def __init__(self, count: int, state: int) -> None:
        self._states = bytearray((state,)) * count

    def __getitem__(self, position: int) -> int:
        return self._states[position]

    def put(self, run: Run, state: int) -> None:
        """Change the state of a run."""
        first, end = run
        self._states[first:end] = bytes((state,)) * (end - first)

    def are(self, run: Run, state: int) -> bool:
        """Tell whether all blocks of a run are in a state."""
        first, end = run
        return self._states.count(state, first, end) == end - first

    def count(self, state: int) -> int:
        """Count the blocks in a state."""
        return self._states.count(state)

    def alike(self, run: Run) -> int:
        """Count the leading blocks of a run that are in one state."""
        found = _SAME.match(self._states, *run)
        return 0 if found is None else len(found[0])

    def have(self, states: bytes) -> bool:
        """Tell whether any block is in one of these states."""
        return any(state in self._states for state in states)

    def within(self, run: Run, states: bytes) -> Iterator[Run]:
        """Go through the parts of a run that are in these states; each part is in one of them.

        The caller may change a part as soon as it has it.
        """
        for found in list(_SAME.finditer(self._states, *run)):
            if found[0][0] in states:
                yield found.span()
