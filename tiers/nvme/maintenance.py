"""Two threads beside those that move blocks: the keeper changes the directory, the watch looks.

The keeper does whatever has to sync, one thing after the other. The index is touched on it alone,
and so is the directory's descriptor. The calls of both can hang with the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from kvstore.core.errors import KVStoreError, TierError
from tiers.nvme.directory import Look, Volume
from tiers.nvme.health import Pace
from tiers.runner import Runner

EVERY_S = 1.0  # between two looks

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


class Watch:
    """One look at a time; called from one thread, which never waits, except in close."""

    def __init__(self) -> None:
        """Start the thread."""
        self.pace = Pace(1)
        self._next_s = 0.0
        self._runner: Runner[Volume, Look | Exception] = Runner(
            "kvstore-nvme-watch", _look, lambda _volume, exc: exc
        )

    def start(self, volume: Volume, now_s: float) -> None:
        """Look again if it is time."""
        if self.pace.open == 0 and now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self.pace.began(now_s)
            self._runner.submit(volume)

    def poll(self, now_s: float) -> list[Look | Exception]:
        """Return what was seen, or why it could not be."""
        found = self._runner.poll()
        for _ in found:
            self.pace.ended(now_s)
        return found

    def close(self) -> None:
        """End the thread."""
        self._runner.close()


def _look(volume: Volume) -> Look | Exception:
    try:
        return volume.look()
    except (OSError, TierError) as exc:
        return exc
