"""The time that a process has been running, for limits on how long others take.

A machine may stand still: a virtual one that is moved to another host, say. Then the system's clock
goes on, and all that is waited for would be late at once, though none of it could have come. Here
such a standstill counts as a moment. It shows as a long time between two readings; so whoever waits
has to read this clock more often than that. Times of it mean nothing to other clocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MOMENT_NS = 250_000_000  # the store's loop and a worker's loads read it more often


class Clock:
    """Nanoseconds that never go back. Called from any thread."""

    def __init__(self, read: Callable[[], int] = time.monotonic_ns) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._read_ns = self._now_ns = read()

    def __call__(self) -> int:
        """Return the time."""
        with self._lock:
            read_ns = self._read()
            self._now_ns += min(read_ns - self._read_ns, MOMENT_NS)
            self._read_ns = read_ns
            return self._now_ns


now_ns = Clock()


def now_s() -> float:
    """Return the time in seconds."""
    return now_ns() / 1e9
