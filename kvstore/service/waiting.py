"""Requests of our engines that wait for what other stores hold for them: when to say so again.

Heartbeats are the store's, not the engine's: a busy engine's step may take seconds. They begin
when a request is queued and end when it wants nothing more, or with its engine.
"""

from __future__ import annotations

from typing import NamedTuple

WAITING_MAX = 1 << 16


class Held(NamedTuple):
    """What is held: by which store, for which namespace, under which name."""

    address: str
    namespace: str
    request: str


class Waiting:
    """All of a store."""

    def __init__(self, period_ns: int) -> None:
        """period_ns: between two heartbeats."""
        self._period_ns = period_ns
        self._due_ns: dict[Held, int] = {}  # in the order of time
        self._session: dict[Held, int] = {}

    def __len__(self) -> int:
        """Count the requests."""
        return len(self._due_ns)

    def begin(self, held: Held, session: int, now_ns: int) -> bool:
        """Take note of a request, now; False if it is known, or there are too many already."""
        if held in self._session or len(self._session) >= WAITING_MAX:
            return False
        self._due_ns[held] = now_ns + self._period_ns
        self._session[held] = session
        return True

    def end(self, held: Held) -> None:
        """It wants nothing more; unknown ones are ignored."""
        self._due_ns.pop(held, None)
        self._session.pop(held, None)

    def end_of(self, session: int) -> None:
        """An engine is gone, and all of its requests with it."""
        for held in [held for held, owner in self._session.items() if owner == session]:
            self.end(held)

    def due(self, now_ns: int) -> list[Held]:
        """Return those whose heartbeat is due."""
        found = []
        for held, due_ns in self._due_ns.items():
            if due_ns > now_ns:
                break
            found.append(held)
        for held in found:  # behind the others
            del self._due_ns[held]
            self._due_ns[held] = now_ns + self._period_ns
        return found
