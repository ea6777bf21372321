"""The log of a store's process: one record is one line, and outsiders cause few of them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.units import one_line, shown

log = logging.getLogger(__name__)

LINE_MAX = 2000  # characters of a message; no honest one is as long
FIELD_MAX = 300  # of a value from outside in it
TRACE_LINES_MAX = 100  # of a traceback, the last ones
LINES_MAX = 5  # of one kind in one window
WINDOW_NS = 10_000_000_000

READER_MS = 100  # for who reads the log, once

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json", "journald")
TEXT = "%(asctime)s %(levelname)s %(message)s"
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


class Subject:
    """What a line is about, such as an engine: readable in text, by field in JSON."""

    def __init__(self, **fields: str | int | None) -> None:
        """fields: the first one names it. "" and None are not known, and left out."""
        self.fields = {
            name: one_line(value, FIELD_MAX) if isinstance(value, str) else value
            for name, value in fields.items()
            if value not in ("", None)
        }

    def __str__(self) -> str:
        """Return "engine 'a' (model m, pid 7)"."""
        (kind, name), *rest = self.fields.items()
        known = ", ".join(f"{field} {value}" for field, value in rest)
        return f"{kind} {name!r} ({known})" if known else f"{kind} {name!r}"


class OneLine(logging.Formatter):
    """Escapes what could end a line, or steer a terminal.

    A traceback has many lines. Each is indented, so that none of them can pass for a record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without a traceback."""
        record.message = one_line(record.message, LINE_MAX)
        return super().formatMessage(record)

    def formatException(self, ei: logging._SysExcInfoType) -> str:  # noqa: N802 - logging's name
        """Return a traceback's last lines."""
        lines = super().formatException(ei).splitlines()[-TRACE_LINES_MAX:]
        return "\n".join("  " + one_line(line, LINE_MAX) for line in lines)


class Journald(OneLine):
    """Begins each line with its priority, as systemd reads it from standard error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines without a time, which the journal has itself."""
        prefix = f"<{_PRIORITIES.get(record.levelno, 2)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


class Json(OneLine):
    """Makes a JSON object of each record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time (RFC 3339, UTC), level, logger, message, and the fields of its subjects."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found: dict[str, object] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(record.getMessage(), LINE_MAX),
        }
        for value in record.args if isinstance(record.args, tuple) else ():
            if isinstance(value, Subject):
                found |= value.fields
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(found).decode()


class Unread:
    """A stream to a descriptor that may take no more: a pipe that stays full is waited for once.

    Lines that do not fit are lost then, until there is room again; also where a disk is full.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._cut = False  # a record ended in the middle of a line
        self.lost = 0

    @property
    def takes_more(self) -> bool:
        """Tell whether a part can be written."""
        return bool(self._poll.poll(0 if self.lost else READER_MS))

    def write(self, text: str) -> None:
        """Write a record, or count it as lost."""
        data = ("\n" * self._cut + text).encode(errors="backslashreplace")
        for at in range(0, len(data), select.PIPE_BUF):  # so much has room in what takes more
            part, taken = data[at : at + select.PIPE_BUF], 0
            if self.takes_more:
                with contextlib.suppress(OSError):  # a disk is full, or a reader has gone
                    taken = os.write(self._fd, part)
            if taken < len(part):
                self.lost += 1
                self._cut = self._cut or at + taken > 0
                return
        self._cut = False

    def flush(self) -> None:
        """Do nothing: all is written."""


class ToUnread(logging.StreamHandler[Unread]):
    """Says how many lines nobody has read, once somebody reads again."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, and before it how many were lost."""
        if self.stream.lost and self.stream.takes_more:
            lost, self.stream.lost = self.stream.lost, 0
            log.warning("standard error took no more: %s lines are lost", f"{lost:,}")
            if self.stream.lost:  # nor does it now
                self.stream.lost = lost
        super().emit(record)


def _handler() -> logging.Handler:
    try:
        return ToUnread(Unread(sys.stderr.fileno()))
    except (OSError, ValueError):  # it is no file, as in a test
        return logging.StreamHandler()


def default_format(environment: Mapping[str, str]) -> str:
    """Return "journald" where standard error goes to the journal, as systemd says, else "text"."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return "text"
    said = environment.get("JOURNAL_STREAM", "")
    return "journald" if said == f"{found.st_dev}:{found.st_ino}" else "text"


def log_to_stderr(line: str = TEXT, form: str = "text", level: str = "info") -> None:
    """Have this process log to standard error; line: of the text format, as in logging.Formatter.

    form: one of FORMATS; level: one of LEVELS.
    """
    forms = {"text": OneLine(line), "json": Json(), "journald": Journald("%(message)s")}
    handler = _handler()
    handler.setFormatter(forms[form])
    logging.basicConfig(level=level.upper(), handlers=[handler])


def set_level(level: str) -> None:
    """Change the level of this process's log, and log that. Raises ProtocolError for no level."""
    if level not in LEVELS:
        raise ProtocolError(f"log level {shown(level)}, expected one of {', '.join(LEVELS)}")
    root = logging.getLogger()
    was, now = root.level, logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(now)
    said = level, logging.getLevelName(was).lower()
    logging.getLogger(__name__).log(max(now, logging.INFO), "log level is %s, was %s", *said)


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
