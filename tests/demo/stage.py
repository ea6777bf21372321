"""What demos have in common: what they say on the way, their table, and their exit status."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore.core.errors import KVStoreError
from tests.bench.store import end_as_interrupted


class Demo(ABC):
    """A run, what it shows in 80 columns, and what is not as it has to be."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.console = console
        self.folder = folder
        self._started_s = time.monotonic()

    @abstractmethod
    def run(self) -> None: ...
    @abstractmethod
    def show(self) -> None: ...
    @abstractmethod
    def problems(self) -> list[str]: ...

    def say(self, text: str) -> None:
        """Print what is done now."""
        self.console.print(f"[dim]{time.monotonic() - self._started_s:5.1f} s[/dim]  {text}")

    def wait(self, done: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait until something holds. Raises KVStoreError after the limit."""
        end_s = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > end_s:
                raise KVStoreError(f"waited {limit_s:.0f} s for {what}")
            time.sleep(0.05)


def table(names: Sequence[str], numbers: Sequence[str], last: str) -> Table:
    """Make a table with columns for names, for numbers, and for what became of the output."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in names:
        made.add_column(name, no_wrap=True)
    for number in numbers:
        made.add_column(number, justify="right", no_wrap=True)
    made.add_column(last, no_wrap=True)
    return made


def play(kind: type[Demo]) -> int:
    """Run a demo; the exit status is 0 only if everything is as promised."""
    end_as_interrupted()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as name:
        tempfile.tempdir = name  # engines' logs too
        demo = kind(console, Path(name))
        try:
            demo.run()
        except KVStoreError as exc:
            console.print(f"the demo failed: {exc}", markup=False)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted; everything that was started has been ended")
            return 130
    console.print()
    demo.show()
    wrong = demo.problems()
    for line in wrong:
        console.print(f"WRONG: {line}", markup=False)
    if not wrong:
        console.print("all outputs identical, all tokens from where they had to come")
    return 1 if wrong else 0
