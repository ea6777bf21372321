"""The keeper: one thread for whatever changes the disk and has to sync, one thing after the other.

The index is touched on it alone, and so is the directory's descriptor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from kvstore.core.errors import KVStoreError
from tiers.nvme.health import Pace
from tiers.runner import Runner

Work = Callable[[], None]
Done = Callable[[Exception | None, float], None]


class Chore(msgspec.Struct, eq=False):
    """Something for the keeper's thread, and what happens here when it is done."""

    work: Work
    done: Done


class Keeper:
    """Does chores in their order; called from one thread, which never waits, except in close."""

    def __init__(self) -> None:
        """Start the thread."""
        self.pace = Pace(1)
        self._runner: Runner[Chore, tuple[Chore, Exception | None]] = Runner(
            "kvstore-nvme-keeper", run_chore, lambda chore, exc: (chore, exc)
        )

    @property
    def open(self) -> int:
        """Count the chores that are not done."""
        return self.pace.open

    def submit(self, work: Work, done: Done) -> None:
        """Do work() on the thread, then done(error, now_s) here, in poll."""
        self.pace.began(time.monotonic())
        self._runner.submit(Chore(work, done))

    def poll(self, now_s: float) -> None:
        """Take what is done."""
        for chore, error in self._runner.poll():
            self.pace.ended(now_s)
            chore.done(error, now_s)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._runner.close()


def run_chore(chore: Chore) -> tuple[Chore, Exception | None]:
    """Do it, and say what went wrong."""
    try:
        chore.work()
    except (OSError, KVStoreError) as exc:
        return chore, exc
    return chore, None
