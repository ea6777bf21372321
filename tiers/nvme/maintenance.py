"""The threads beside those that move blocks: the keeper changes the directory, the watch looks.

The keeper does whatever has to sync, one thing after the other. The index is touched on it alone,
and so is the directory's descriptor. The calls of both can hang with the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvstore.core.errors import KVStoreError
from tiers.nvme.health import Pace
from tiers.runner import Runner

T = TypeVar("T")


class Task(msgspec.Struct, eq=False):
    """Something for the thread, and what happens here with what it returned or raised."""

    work: Callable[[], object]
    done: Callable[[Any, float], None]
    result: object = None


class TaskThread:
    """Does tasks in their order; called from one thread, which never waits, except in close."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self.pace = Pace(1)
        self._runner: Runner[Task, Task] = Runner(f"kvstore-nvme-{name}", _work, _failed)

    @property
    def open(self) -> int:
        """Count the tasks that are not done."""
        return self.pace.open

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception, float], None]) -> None:
        """Do work() on the thread, then done(what it returned or raised, now_s) here, in poll."""
        self.pace.began(time.monotonic())
        self._runner.submit(Task(work, done))

    def poll(self, now_s: float) -> None:
        """Take what is done."""
        for task in self._runner.poll():
            self.pace.ended(now_s)
            task.done(task.result, now_s)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._runner.close()


def _work(task: Task) -> Task:
    try:
        task.result = task.work()
    except (OSError, KVStoreError) as exc:
        task.result = exc
    return task


def _failed(task: Task, error: Exception) -> Task:
    task.result = error
    return task
