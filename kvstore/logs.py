"""The log of a store's process: one record is one line, and outsiders cause few of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from kvstore.units import one_line

LINE_MAX = 2000  # characters of a message; no honest one is as long
LINES_MAX = 5  # of one kind in one window
WINDOW_NS = 10_000_000_000


class OneLine(logging.Formatter):
    """Escapes what could end a line, or steer a terminal; tracebacks stay as they are."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without a traceback."""
        record.message = one_line(record.message, LINE_MAX)
        return super().formatMessage(record)


def log_to_stderr(line: str) -> None:
    """Have this process log to standard error; line: as in logging.Formatter."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(line))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _Kind(msgspec.Struct, eq=False):
    since_ns: int
    lines: int = 0
    more: int = 0


class RateLog:
    """Lines of one part of the store: a few of each kind in a while, then how many more there were.

    What can cause one line can cause a million. A kind is a literal of the code, never a name from
    outside, so there are few. The calls are one thread's.
    """

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
        self._left_out = False  # of some kind, lines that no summary has told of

    def warn(self, kind: str, text: str, *values: object) -> None:
        """Log a line, or count it. kind: what is counted together, as the summary names it."""
        self._say(logging.WARNING, kind, text, values)

    def info(self, kind: str, text: str, *values: object) -> None:
        """Log a line that warns of nothing, or count it."""
        self._say(logging.INFO, kind, text, values)

    def bug(self, kind: str, text: str, *values: object) -> None:
        """Log the exception being handled as an error; the first of a window with its traceback."""
        self._say(logging.ERROR, kind, text, values, bug=True)

    def _say(
        self, level: int, kind: str, text: str, values: tuple[object, ...], *, bug: bool = False
    ) -> None:
        now_ns = self._clock()
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Kind(now_ns)
        elif now_ns - found.since_ns >= WINDOW_NS:
            self._sum_up(kind, found, now_ns)
        if found.lines >= self._lines_max:
            found.more += 1
            self._left_out = True
            return
        found.lines += 1
        self._log.log(level, text, *values, exc_info=bug and found.lines == 1)

    def tick(self) -> None:
        """Say how many lines were left out, once their time is over."""
        if not self._left_out:  # as nearly always; each turn of a loop asks
            return
        now_ns = self._clock()
        for kind, found in self._kinds.items():
            if found.more and now_ns - found.since_ns >= WINDOW_NS:
                self._sum_up(kind, found, now_ns)
        self._left_out = any(found.more for found in self._kinds.values())

    def _sum_up(self, kind: str, found: _Kind, now_ns: int) -> None:
        if found.more:
            seconds = (now_ns - found.since_ns) / 1e9
            self._log.warning("%s: %s more in the last %.0f s", kind, f"{found.more:,}", seconds)
        found.since_ns, found.lines, found.more = now_ns, 0, 0
