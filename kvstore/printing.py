"""How commands print tables and progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

_WIDE = 10_000  # columns, more than any table has


def output() -> Console:
    """Return standard output for tables: as wide as the terminal, and unlimited in a pipe or file.

    Without a terminal rich assumes 80 columns and cuts off the rest of a row.
    """
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)


def table(*headings: str) -> Table:
    """Make a table; numbers stand below a heading that ends with ">", words wrap in the last."""
    made = Table(box=None, header_style="bold")
    for heading in headings:
        last = heading is headings[-1]
        number = heading.endswith(">")
        made.add_column(
            heading.rstrip(">"), justify="right" if number else "left", no_wrap=number or not last
        )
    return made


@contextlib.contextmanager
def share() -> Iterator[Callable[[float, str], None]]:
    """Show progress on a terminal; call the result with the share that is done, and a text."""
    console = Console(stderr=True)
    columns = BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    text, off = TextColumn("{task.description:<40}", markup=False), not console.is_terminal
    with Progress(text, *columns, console=console, transient=True, disable=off) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda share, what: progress.update(task, completed=share, description=what)
