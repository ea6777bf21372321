"""How likely a block is to be used, by its age and by whether it has been used.

Of the last few thousand blocks of a sample it is known when each was asked for, and whether that
was for the first time. So two things are counted, and fade as more is asked for: how many of either
kind were asked for again, and after what time, in quarters of an octave. (Age says how dense hits
are: Beckmann, Chen and Cidon, LHD, NSDI 2018. Here it is asked only if few times were as long.)
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from math import log2

from kvstore.core.ghosts import ENTRY_BYTES, TICKS, Ghosts
from kvstore.core.types import BlockKey

_BUCKETS = 128  # from a tick of the table to four years
_PARTS = 64  # in which counts fade by 1/e


class Odds:
    """Counts what is asked for again."""

    def __init__(self, blocks: int, fades: int) -> None:
        """blocks: of the last so many it is known when they were asked for; a power of two.

        fades: while so many are asked for, what was counted fades by 1/e.
        """
        self._asked = Ghosts(memoryview(bytearray(ENTRY_BYTES * 2 * blocks)))
        self._times = [0.0] * _BUCKETS  # after which blocks were asked for again
        self._as_long = [0.0] * _BUCKETS  # the part of these that was as long, or longer
        self._first, self._again = [0.0, 0.0], [0.0, 0.0]  # asked for, and again; by kind
        self._each = fades // _PARTS
        self._noted = 0

    def of(self, age_s: float, *, used: bool) -> float:
        """Return how likely a block of this age is to be used, in parts of 1.

        age_s: since it was used or stored last. used: it was used before.
        """
        of_kind = min(1.0, self._again[used] / self._first[used]) if self._first[used] else 0.0
        return of_kind * self._as_long[_bucket(age_s)]

    def note(self, keys: Collection[BlockKey], now_s: float) -> None:
        """A request asks for blocks."""
        known = []
        for key in keys:
            before = self._asked.find(key)
            known.append(int(before is not None))
            self._first[known[-1]] += 1
            if before is not None:
                self._again[before.used] += 1
                self._times[_bucket(now_s - before.left_s)] += 1
        self._asked.add(keys, now_s, known)
        self._noted += len(keys)
        if self._noted >= self._each:
            self._measure()

    def _measure(self) -> None:
        self._noted = 0
        every = sum(self._times) or 1.0
        as_long = accumulate(reversed(self._times))
        self._as_long = [times / every for times in as_long][::-1]
        stays = 1 - 1 / _PARTS
        for counts in (self._times, self._first, self._again):
            counts[:] = [count * stays for count in counts]


def _bucket(time_s: float) -> int:
    return min(_BUCKETS - 1, int(4 * log2(max(1.0, time_s * TICKS))))
