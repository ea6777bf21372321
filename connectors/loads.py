"""One load under way: engine blocks are filled as the slots they come from become ready.

A lease may name slots that the store is still filling from a lower tier. The slot's generation,
in memory that store and workers share, tells how that stands: one less than the leased one while
the bytes are on their way, the leased one once they are there, any other when they will not come
or are somebody else's by now. So a disk reads the end of a hit while its beginning is copied.
What comes straight from a peer is no slot's: connectors/direct.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from connectors.jobs import LoadJob, pieces
from kvstore.errors import TierError
from kvstore.layout import Move
from kvstore.protocol import DIRECT


class Copying(Protocol):
    """A copy that was begun; tiers/device.py says more."""

    @property
    def bytes(self) -> int:
        """Count what it moves."""
        ...

    def over(self) -> bool:
        """Tell whether it has ended. Raises TierError if it failed."""
        ...


Copy = Callable[[Sequence[Move]], Copying]
"""Begins to copy slots to engine blocks. Raises TierError, with nothing begun."""

Generations = Callable[[NDArray[np.int64]], NDArray[np.uint32]]
"""Returns the generations that slots have now. Raises TierError for a slot that is not mapped."""


class Load:
    """What is copied of a job, and what is still awaited; no thread, clock or memory of its own."""

    def __init__(self, job: LoadJob, per: tuple[int, ...], until_ns: int) -> None:
        """per: engine blocks in a block, by group. until_ns: when slots not ready are late.

        Raises ValueError if the job's blocks and slots do not fit.
        """
        self.job = job
        self.copied_bytes = 0
        self.seconds = 0.0  # spent copying
        self.damaged: list[int] = []  # slots that do not hold what was leased
        self.late = 0  # slots that were not ready in time
        self._until_ns = until_ns
        self._moves = [m for m in pieces(job.engine, job.store, per) if m.slot < DIRECT]
        slots = np.array(job.store.slots, np.int64)
        self._slots = slots[slots < DIRECT]
        self._leased = np.array(job.generations, np.uint32)[slots < DIRECT]
        self._ends = _ends(self._moves)
        self._ready = 0  # leading slots that are copied
        self._under_way: tuple[int, Copying] | None = None  # and slots that will be then

    @property
    def ok(self) -> bool:
        """Tell whether every block has arrived; asked once the load is over."""
        return not self.damaged and not self.late

    @property
    def copying(self) -> bool:
        """Tell whether engine blocks may be being written at this moment."""
        return self._under_way is not None

    def advance(self, copy: Copy, generations: Generations, now_ns: int) -> bool:
        """Copy what has become ready; True when the load is over, well or not.

        It is not over while anything is being copied. Raises TierError when a copy fails.
        """
        while self.end_copy(generations):
            if self.damaged:
                return True
            behind = self._leased[self._ready :] - generations(self._slots[self._ready :])
            lost = np.flatnonzero(behind > 1)
            if lost.size:
                return self._give_up(self._ready + lost)
            waiting = np.flatnonzero(behind)
            end = self._ready + int(waiting[0]) if waiting.size else len(self._slots)
            if end > self._ready:
                first = self._ends[self._ready - 1] if self._ready else 0
                self._under_way = end, copy(self._moves[first : self._ends[end - 1]])
            elif end < len(self._slots) and now_ns >= self._until_ns:
                self.late = len(self._slots) - end
                return True
            else:
                return end == len(self._slots)
        return False

    def end_copy(self, generations: Generations) -> bool:
        """Take in a copy that has ended; False while one is under way. Raises TierError."""
        if self._under_way is None:
            return True
        end, copying = self._under_way
        try:
            if not copying.over():
                return False
        except TierError:
            self._under_way = None
            raise
        self._under_way = None
        self.copied_bytes += copying.bytes
        # What was reused while it was copied is not what was leased.
        copied = slice(self._ready, end)
        reused = np.flatnonzero(generations(self._slots[copied]) != self._leased[copied])
        if reused.size:
            self._give_up(self._ready + reused)
        else:
            self._ready = end
        return True

    def _give_up(self, positions: NDArray[np.int64]) -> bool:
        self.damaged = [int(slot) for slot in self._slots[positions]]
        return True


def _ends(moves: Sequence[Move]) -> list[int]:
    """Return for each slot, in order, how many moves end with it."""
    ends: list[int] = []
    for number, move in enumerate(moves):
        if number and move.slot != moves[number - 1].slot:
            ends.append(number)
    return [*ends, len(moves)] if moves else ends
