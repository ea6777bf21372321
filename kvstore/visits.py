"""Which of many things a turn of the store's loop visits: its cost does not grow with their number.

A thing is awake while something is open or due in it: every turn visits it. All others are at
rest: of these one is visited for each 5 ms that pass, so that each has its turn in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TypeVar

RESTING_NS = 5_000_000  # for each that pass, one thing at rest is visited
RESTING_MAX = 8  # of these that one turn visits

T = TypeVar("T")


class Visits:
    """The things of one kind that are awake, by name."""

    def __init__(self) -> None:
        self._awake: dict[str, None] = {}  # in the order in which they woke
        self._round: Iterator[str] = iter(())  # names whose turn is still to come
        self._rested_ns = 0  # when things at rest were last visited

    def wake(self, name: str) -> None:
        """Visit a thing in every turn from now on."""
        self._awake[name] = None

    def rest(self, name: str) -> None:
        """Visit a thing now and then only."""
        self._awake.pop(name, None)

    def __bool__(self) -> bool:
        return bool(self._awake)

    def awake(self, things: Mapping[str, T]) -> list[T]:
        """List the things that are awake; a name without a thing is forgotten."""
        try:
            return [things[name] for name in self._awake]
        except KeyError:
            self._awake = {name: None for name in self._awake if name in things}
            return [things[name] for name in self._awake]

    def take(self, things: Mapping[str, T], now_ns: int) -> list[T]:
        """List what this turn visits: all that are awake, then a few of the others."""
        visited = self.awake(things)
        due = min(RESTING_MAX, (now_ns - self._rested_ns) // RESTING_NS)
        if due:
            self._rested_ns = now_ns
            resting = list(islice(self._round, due))
            if len(resting) < due:
                self._round = iter(list(things))
            visited += [things[n] for n in resting if n in things and n not in self._awake]
        return visited
