"""Looks at the directory every second, on a thread of its own: the calls can hang with the disk."""

from __future__ import annotations

from kvstore.core.errors import TierError
from tiers.nvme.directory import Look, Volume
from tiers.nvme.health import Pace
from tiers.runner import Runner

EVERY_S = 1.0


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
