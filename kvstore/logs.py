"""The log of a store's process: one record is one line, whatever the texts in it are."""

from __future__ import annotations

import logging

from kvstore.text import one_line

LINE_MAX = 2000
"""Characters of a message; no honest one is as long."""


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
