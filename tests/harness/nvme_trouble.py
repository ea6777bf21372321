"""Trouble for a disk, and waiting for what comes of it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from kvstore import clock
from tests.harness.nvme_blocks import Shelf
from tests.harness.patience import WAIT_S
from tiers.nvme import disk, health

Wrap = Callable[..., Any]


def be_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the directory often, and try soon to come back."""
    monkeypatch.setattr(health, "RETRY_S", 0.1)
    monkeypatch.setattr(disk, "LOOK_EVERY_S", 0.05)


def wait(found: Shelf, done: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end, f"{found.disk.state}: {found.disk.health.reason}"
        found.disk.flush()


def wait_for(found: Shelf, state: str) -> None:
    wait(found, lambda: found.disk.state == state)


def away(found: Shelf) -> None:
    """Wait until it is off and has let go of everything."""
    wait(found, lambda: found.disk.attached.directory.lock_fd < 0)


@contextmanager
def moved_away(found: Shelf, folder: Path) -> Iterator[Path]:
    """Have a directory lie elsewhere for a while, until the tier has let go of it and come back."""
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    away(found)
    yield elsewhere
    elsewhere.rename(folder)
    wait_for(found, "ok")


def lose(found: Shelf) -> None:
    """Turn it off, until let_back: not for a moment, which a slow machine would miss."""
    found.disk.health.lost("for the test", clock.now_s() + WAIT_S)


def let_back(found: Shelf) -> None:
    """Let it try again now."""
    found.disk.health._retry_at_s = clock.now_s()


def open_files(folder: Path) -> list[str]:
    """Files in a directory that this process has open, by whatever name it has now."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if Path(target).is_relative_to(folder):
            found.append(target)
    return found


def raise_eio(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


class Gate:
    """Calls that hang until the gate opens."""

    def __init__(self, real: Wrap) -> None:
        self.go_on = threading.Event()
        self.waiting = 0
        self._real = real

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as the real one
        self.waiting += 1
        self.go_on.wait(600)
        return self._real(*arguments, **named)
