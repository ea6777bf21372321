"""The time that a process has been running, for limits on how long others take.

A machine may stand still: a virtual one that is moved to another host, say. Then the system's clock
goes on, and every deadline would have passed at once, though no answer could have come. This clock
takes a long time between two readings for such a standstill, and counts MOMENT_NS of it. So a
caller that waits reads it more often than that. Do not compare its times with another clock's.
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
