"""Time that a hypervisor gave to other machines while ours had work (`steal` in proc(5)).

No program on the machine can see it otherwise: what a benchmark calls slow was not run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_STEAL = 8  # column of the first line of /proc/stat
DISTURBED = 0.02
ATTEMPTS = 4
T = TypeVar("T")


class Watch:
    """A stopwatch that knows how much of the time was stolen; processors are added up."""

    def __init__(self) -> None:
        """Start."""
        self._since = time.monotonic(), _stolen_s()

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._since[0]

    def stolen_s(self) -> float:
        """Return the stolen seconds since the start, of all processors."""
        return _stolen_s() - self._since[1]

    def own_s(self) -> float:
        """Return the seconds that this machine had at least; without a hypervisor, all."""
        return self.elapsed_s() - self.stolen_s()

    def share(self) -> float:
        """Return the stolen share of the processors' time since the start."""
        return self.stolen_s() / self.elapsed_s() / (os.cpu_count() or 1)

    def disturbed(self) -> bool:
        """Tell whether enough was stolen to change what is measured."""
        return self.share() > DISTURBED


def undisturbed(measure: Callable[[], T]) -> tuple[T, int]:
    """Measure until nothing is stolen meanwhile, a few times at most; how often it was."""
    for disturbed in range(ATTEMPTS):
        watch = Watch()
        found = measure()
        if not watch.disturbed():
            return found, disturbed
    return found, ATTEMPTS


def _stolen_s() -> float:
    """Processor seconds since the machine started, in steps of 10 ms."""
    total = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
    return int(total[_STEAL]) / os.sysconf("SC_CLK_TCK")
