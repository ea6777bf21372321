"""One load under way: engine blocks are filled as the slots they come from become ready.

A lease may name slots that the store is still filling from a lower tier. The slot's generation, in
memory that store and workers share, tells its state: one less than the leased one while the bytes
are on their way, the leased one once they are there, any other when they will not come or the slot
was reused. So a disk reads the end of a hit while its beginning is copied. What comes straight from
a peer uses no slot: connectors/direct_reads.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from connectors.copies.host import Copying
from connectors.step_meta import SLOT, LoadJob, Moves, pieces
from kvstore.core.errors import TierError
from kvstore.wire import engine as p

ASK_NS = 250_000_000  # a load that waits tells the store so as often as this, or more often

Copy = Callable[[Moves], Copying]
"""Begins to copy slots to engine blocks. Raises TierError, with nothing begun."""

Generations = Callable[[NDArray[np.int64]], NDArray[np.uint32]]
"""Returns the generations that slots have now. Raises TierError for a slot that is not mapped."""


class LoadDeadline:
    """When a waiting load expires: after a time without an arrival, and after one in all.

    The store's word that blocks are on their way counts as an arrival; that a peer is still
    computing them restarts the limit for all. One thread notes arrivals, another may note what the
    store says: each writes numbers of its own.
    """

    def __init__(self, quiet_ns: int, limit_ns: int, now_ns: int) -> None:
        """quiet_ns: longest time without an arrival. limit_ns: longest time in all."""
        self._quiet_ns, self._limit_ns = quiet_ns, limit_ns
        self._ask_ns = min(quiet_ns // 4, ASK_NS)
        self._first_ns = self._began_ns = self._arrived_ns = self._asked_ns = now_ns
        self._heard_ns = self._computed_ns = 0

    def arrived(self, now_ns: int) -> None:
        """A block has come."""
        self._arrived_ns = now_ns

    def restart(self, now_ns: int) -> None:
        """Nothing could come until now: the engine was not ready for it."""
        self._began_ns = self._arrived_ns = now_ns

    def on_coming(self, coming: p.Coming, now_ns: int) -> None:
        """The store says that blocks are on their way."""
        self._heard_ns = max(self._heard_ns, now_ns - coming.quiet_ms * 1_000_000)
        if coming.computed_ms is not None:
            self._computed_ns = max(self._computed_ns, now_ns - coming.computed_ms * 1_000_000)

    def should_ask(self, now_ns: int) -> bool:
        """Return True when it is time to tell the store that the load still waits."""
        if now_ns - self._asked_ns < self._ask_ns:
            return False
        self._asked_ns = now_ns
        return True

    def quiet_ns(self, now_ns: int) -> int:
        """Return the time since the last arrival."""
        return now_ns - max(self._arrived_ns, self._heard_ns)

    def total_ns(self, now_ns: int) -> int:
        """Return the time since the load began."""
        return now_ns - self._first_ns

    def has_expired(self, now_ns: int) -> bool:
        """Return True if blocks that have not come by now are late."""
        spent_ns = now_ns - max(self._began_ns, self._computed_ns)
        return self.quiet_ns(now_ns) >= self._quiet_ns or spent_ns >= self._limit_ns


class SlotLoad:
    """The part of a load that comes from slots; has no thread, clock or memory of its own."""

    def __init__(
        self, job: LoadJob, blocks_per_chunk: tuple[int, ...], deadline: LoadDeadline
    ) -> None:
        """blocks_per_chunk: engine blocks in a block, by group. deadline: of slots not ready.

        Raises ValueError if the job's blocks and slots do not fit.
        """
        self.job = job
        self.copied_bytes = 0
        self.seconds = 0.0  # spent copying
        self.damaged: list[int] = []  # slots that do not hold what was leased
        self.late = 0  # slots that were not ready in time
        self._deadline = deadline
        self._arrived = 0  # slots that are ready, copied ones included
        moves = pieces(job.engine, job.slots, blocks_per_chunk)
        self._moves = moves[moves[:, SLOT] < p.DIRECT]
        slots = np.array(job.slots, np.int64)
        self._slots = slots[slots < p.DIRECT]
        self._leased = np.array(job.generations, np.uint32)[slots < p.DIRECT]
        # For each slot, in order: how many moves end with it.
        self._ends = [*(np.flatnonzero(np.diff(self._moves[:, SLOT])) + 1), len(self._moves)]
        self._ready = 0  # leading slots that are copied
        self._under_way: tuple[int, Copying] | None = None  # and slots that will be then

    @property
    def ok(self) -> bool:
        """True if every block has arrived; asked once the load is over."""
        return not self.damaged and not self.late

    @property
    def copying(self) -> bool:
        """True while engine blocks may be being written."""
        return self._under_way is not None

    def advance(self, copy: Copy, generations: Generations, now_ns: int) -> bool:
        """Copy what has become ready; True when the load is over, complete or not.

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
            arrived = len(self._slots) - waiting.size
            if arrived > self._arrived:
                self._arrived = arrived
                self._deadline.arrived(now_ns)
            end = self._ready + int(waiting[0]) if waiting.size else len(self._slots)
            if end > self._ready:
                first = self._ends[self._ready - 1] if self._ready else 0
                self._under_way = end, copy(self._moves[first : self._ends[end - 1]])
            elif end < len(self._slots) and self._deadline.has_expired(now_ns):
                self.late = int(waiting.size)
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
