"""How commands print tables and progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_WIDE = 10_000  # columns, more than any table has


def output() -> Console:
    """Return standard output for tables: as wide as the terminal, and unlimited in a pipe or file.

    Without a terminal rich assumes 80 columns and cuts off the rest of a row.
    """
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)


@contextlib.contextmanager
def share() -> Iterator[Callable[[float, str], None]]:
    """Show progress on a terminal; call the result with the share that is done, and a text."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda share, what: progress.update(task, completed=share, description=what)
