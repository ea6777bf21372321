"""Log lines that outsiders cause: a few of each kind in a while, and then how many more there were.

Whoever can cause a line can cause a million. A kind is a literal of the code, never a name from
outside, so there are few.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

LINES_MAX = 5  # of one kind in one window
WINDOW_NS = 10_000_000_000


class _Kind(msgspec.Struct, eq=False):
    since_ns: int
    lines: int = 0
    more: int = 0


class RateLog:
    """Lines of one part of the store. Its calls are one thread's."""

    def __init__(
        self,
        log: logging.Logger,
        clock: Callable[[], int] = time.monotonic_ns,
        lines_max: int = LINES_MAX,
    ) -> None:
        """log: where lines go. lines_max: of one kind in one window."""
        self._log = log
        self._clock = clock
        self._lines_max = lines_max
        self._kinds: dict[str, _Kind] = {}

    def warn(self, kind: str, text: str, *values: object) -> None:
        """Log a line, or count it. kind: what is counted together, as the summary names it."""
        self._say(logging.WARNING, kind, text, values)

    def info(self, kind: str, text: str, *values: object) -> None:
        """Log a line that warns of nothing, or count it."""
        self._say(logging.INFO, kind, text, values)

    def bug(self, kind: str, text: str, *values: object) -> None:
        """Log what is being handled as an error; the first of a window with its traceback."""
        self._say(logging.ERROR, kind, text, values, traceback=True)

    def _say(
        self,
        level: int,
        kind: str,
        text: str,
        values: tuple[object, ...],
        *,
        traceback: bool = False,
    ) -> None:
        now_ns = self._clock()
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Kind(now_ns)
        elif now_ns - found.since_ns >= WINDOW_NS:
            self._sum_up(kind, found, now_ns)
        if found.lines >= self._lines_max:
            found.more += 1
            return
        found.lines += 1
        self._log.log(level, text, *values, exc_info=traceback and found.lines == 1)

    def tick(self) -> None:
        """Say how many lines were left out, once their time is over."""
        if not self._kinds:
            return
        now_ns = self._clock()
        for kind, found in self._kinds.items():
            if found.more and now_ns - found.since_ns >= WINDOW_NS:
                self._sum_up(kind, found, now_ns)

    def _sum_up(self, kind: str, found: _Kind, now_ns: int) -> None:
        if found.more:
            seconds = (now_ns - found.since_ns) / 1e9
            self._log.warning("%s: %s more in the last %.0f s", kind, f"{found.more:,}", seconds)
        found.since_ns, found.lines, found.more = now_ns, 0, 0
