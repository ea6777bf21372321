"""A descriptor that wakes a loop when threads have something for it."""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """Readable from wake() until heard()."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._to_read = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._fd

    def wake(self) -> None:
        """Wake the loop; called on any thread.

        The flag is there before the loop can wake, or that turn would not read the descriptor, and
        after: a turn may have read too early, and the descriptor would stay readable.
        """
        self._to_read = True
        os.eventfd_write(self._fd, 1)
        self._to_read = True

    def heard(self) -> None:
        """Have the loop sleep again; what threads have is taken after this."""
        if self._to_read:
            self._to_read = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor, once no thread can wake anybody; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
