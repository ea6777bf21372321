"""Where commands print their tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_WIDE = 10_000  # columns, more than any table has


def output() -> Console:
    """Return standard output for tables: as wide as the terminal is, and whole in a pipe or file.

    Without a terminal rich takes 80 columns and cuts off what does not fit.
    """
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)


@contextlib.contextmanager
def share() -> Iterator[Callable[[float, str], None]]:
    """Show on a terminal what is going on and which share of it is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda share, what: progress.update(task, completed=share, description=what)
