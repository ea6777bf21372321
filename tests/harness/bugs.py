"""Bugs of the store that its barriers end: tests see them all the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kvstore.logs import RateLog


@contextmanager
def noted() -> Iterator[list[BaseException]]:
    """Yield a list of what barriers end meanwhile, in this process."""
    found: list[BaseException] = []
    bug = RateLog.bug

    def note(said: RateLog, kind: str, text: str, *values: object) -> None:
        error = sys.exc_info()[1]
        assert error is not None, "it is told as it is handled"
        found.append(error)
        bug(said, kind, text, *values)

    with patch.object(RateLog, "bug", note):
        yield found


@contextmanager
def escaping() -> Iterator[None]:
    """Have barriers end nothing, for campaigns that look for what does."""

    def escape(*_arguments: object) -> None:
        raise  # noqa: PLE0704 - what the barrier is handling

    with patch.object(RateLog, "bug", escape):
        yield
