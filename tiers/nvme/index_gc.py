"""Takes out of the index what means nothing any more, some records at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tiers.nvme.context import Shared

ROWS = 10_000  # of one commit


class Purge:
    """Numbers that records in the index begin with, and no namespace has any more."""

    def __init__(self, shared: Shared) -> None:
        """Begin with those that the start has found."""
        self._shared = shared
        self._running = False
        self._left = False
        self.start_over()

    def start_over(self) -> None:
        """The directory is read anew."""
        self._numbers = deque(self._shared.opening.strays)

    def add(self, numbers: Iterable[int]) -> None:
        """Have the records of these deleted."""
        self._numbers.extend(numbers)

    @property
    def busy(self) -> bool:
        """Tell whether there is something left to delete, and it can be."""
        return bool(self._numbers) and self._shared.health.writable

    def step(self) -> None:
        """Delete some more; returns at once."""
        if self._running or not self.busy or self._shared.opening.loading:
            return
        self._running = True
        number = self._numbers[0]

        def work() -> None:
            self._left = self._shared.opening.journal.purge(number, ROWS)

        def done(error: Exception | None, now_s: float) -> None:
            self._running = False
            if error is not None:
                self._shared.write_failed("a commit", error, now_s)
            elif not self._left and number in self._numbers:
                self._numbers.remove(number)

        self._shared.keeper.submit(work, done)
