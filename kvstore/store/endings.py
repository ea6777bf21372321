"""Processes of workers that are ending: until they have ended their GPUs may write into memory.

The kernel closes the sockets and the devices of a process that was killed in no promised order. So
a connection can be closed while the GPU goes on with the copies that it was given.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

WAIT_S = 10.0  # for the end of one
_EXITING = 0x4  # PF_EXITING, Linux's flag of a thread that ends


class Endings:
    """Connections that are closed, of workers whose processes are ending."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, float]] = {}  # connection -> pidfd, until when

    def __len__(self) -> int:
        """Count the connections."""
        return len(self._waiting)

    def add(self, connection: int, pid: int) -> bool:
        """Wait for the end of a process; False if it lives on, has ended, or cannot be seen."""
        with contextlib.suppress(OSError):
            end = os.pidfd_open(pid) if _is_exiting(pid) else None
            if end is not None:
                self._waiting[connection] = end, time.monotonic() + WAIT_S
        return connection in self._waiting

    def take(self) -> list[int]:
        """Return the connections whose processes have ended, or were waited for long enough."""
        now_s = time.monotonic()
        ended = [c for c, (end, until) in self._waiting.items() if now_s >= until or _over(end)]
        for connection in ended:
            os.close(self._waiting.pop(connection)[0])
        return ended

    def close(self) -> None:
        """Wait for none of them any more."""
        for end, _ in self._waiting.values():
            os.close(end)
        self._waiting.clear()


def _is_exiting(pid: int) -> bool:
    """Tell whether the first thread of a process ends, or has. Raises OSError if there is none.

    Of a process that was killed it has before the last one closes the files.
    """
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return bool(int(fields[6]) & _EXITING)


def _over(end: int) -> bool:
    """Tell whether all threads of a process have ended; end: its pidfd."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))
