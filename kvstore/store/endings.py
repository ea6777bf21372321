"""Workers that were killed: until their process has ended, its GPU may write into memory.

The kernel closes the sockets and the devices of a process in no promised order. So a connection can
be closed while a GPU goes on with the copies that it was given.
"""

from __future__ import annotations

import os
import select

from kvstore import clock
from kvstore.store.session import Session

WAIT_S = 10.0  # for the end of one: it may live on, with the connection alone lost


class Endings:
    """Processes that may not have ended, by the number of their session."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[Session, int, float]]] = {}

    def add(self, session: Session, end: int) -> None:
        """Wait for the end of a process; end: its pidfd, which is closed then."""
        waiting = self._waiting.setdefault(session.number, [])
        waiting.append((session, end, clock.now_s() + WAIT_S))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def waits_for(self, session: Session) -> bool:
        """Tell whether a process of a session may not have ended."""
        return session.number in self._waiting

    def take(self) -> list[Session]:
        """Return the sessions whose processes have ended, or were waited for long enough."""
        done, now_s = [], clock.now_s()
        for number, waiting in list(self._waiting.items()):
            if all(now_s >= until or _has_ended(end) for _, end, until in waiting):
                done.append(waiting[0][0])
                _close(self._waiting.pop(number))
        return done

    def close(self) -> None:
        """Wait for none of them any more."""
        for waiting in self._waiting.values():
            _close(waiting)
        self._waiting.clear()


def _has_ended(end: int) -> bool:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))


def _close(waiting: list[tuple[Session, int, float]]) -> None:
    for _, end, _ in waiting:
        os.close(end)
