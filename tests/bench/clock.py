"""Processor time of another process, to the nanosecond, threads that have ended included."""

from __future__ import annotations

import time
from pathlib import Path

from kvstore.core.errors import KVStoreError

_SCHED = 2  # the kind of clock that counts what the scheduler gave


class Clock:
    """The CPU clock of a process; its number is made as in clock_getcpuclockid(3) of Linux."""

    def __init__(self, pid: int) -> None:
        """pid: of a process that runs."""
        self._id = (~pid << 3) | _SCHED

    def now_us(self) -> float:
        """Return the microseconds that all its threads have run."""
        try:
            return time.clock_gettime_ns(self._id) / 1e3
        except OSError as exc:
            raise KVStoreError(f"a process has ended that was measured: {exc.strerror}") from exc


def main_thread_us(pid: int) -> float:
    """Return the microseconds that the main thread of a process has run (schedstat, proc(5))."""
    text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii")
    return int(text.split()[0]) / 1e3


def child_of(pid: int, module: str) -> int:
    """Return the child process that runs a module. Raises KVStoreError."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    for child in children:
        command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if module.encode() in command:
            return int(child)
    raise KVStoreError(f"process {pid} has no child that runs {module}")
