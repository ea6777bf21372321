"""Takes out of the journal what means nothing any more, some records at a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

from tiers.nvme.opening import Keep, Opening

log = logging.getLogger(__name__)

ROWS = 10_000  # of one commit
RETRY_S = 5.0


class Purge:
    """Numbers that records in the journal begin with, and no namespace has any more."""

    def __init__(self, opening: Opening, keep: Keep) -> None:
        """keep: runs what waits for the disk elsewhere."""
        self._opening = opening
        self._keep = keep
        self._numbers: deque[int] = deque()
        self._running = False
        self._left = False
        self._retry_s = 0.0

    def add(self, numbers: Iterable[int]) -> None:
        """Have the records of these deleted."""
        self._numbers.extend(numbers)

    @property
    def busy(self) -> bool:
        """Tell whether there is something left to delete, and it can be."""
        return bool(self._numbers) and time.monotonic() >= self._retry_s

    def step(self) -> None:
        """Delete some more; returns at once."""
        if self._running or not self.busy or self._opening.loading:
            return
        self._running = True
        number = self._numbers[0]

        def work() -> None:
            self._left = self._opening.journal.purge(number, ROWS)

        self._keep(work, self._done)

    def _done(self, error: Exception | None) -> None:
        self._running = False
        if error is not None:
            log.error("records that mean nothing stay in the index for now: %s", error)
            self._retry_s = time.monotonic() + RETRY_S
        elif not self._left:
            self._numbers.popleft()
