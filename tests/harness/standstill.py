"""A machine that stands still, as a virtual one does that is moved to another host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore import clock

PAUSE_NS = 3600 * 1_000_000_000  # beyond all limits


class Machine:
    """Its clock goes on while it stands still, and nothing else does."""

    def __init__(self) -> None:
        self.stood_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.stood_ns

    def stands_still(self) -> None:
        self.stood_ns += PAUSE_NS


@contextmanager
def machine() -> Iterator[Machine]:
    """Have this process run on such a machine."""
    running, made = clock.now_ns, Machine()
    running._read = made
    try:
        yield made
    finally:
        with running._lock:
            running._read = time.monotonic_ns
            running._read_ns = time.monotonic_ns()
