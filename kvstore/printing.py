"""Where commands print their tables."""

from __future__ import annotations

from rich.console import Console

_WIDE = 10_000  # columns, more than any table has


def output() -> Console:
    """Return standard output for tables: as wide as the terminal is, and whole in a pipe or file.

    Without a terminal rich takes 80 columns and cuts off what does not fit.
    """
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)
