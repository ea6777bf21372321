"""Who waits for room for a lease: leases of an engine are capped, and who came first is first.

The questions of others may be on their way already: they would be answered before the one that is
asked anew when somebody has given his lease up, and that again and again. So whoever came later,
and is known to want a lease, does not ask meanwhile.
"""

from __future__ import annotations

from connectors.request_state import Tracked


class Room:
    """The first request that waits for room, as long as the engine asks for it in each step."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._first: Tracked | None = None
        self._seen = False

    def is_for_another(self, tracked: Tracked) -> bool:
        """Tell whether a request has to wait until an earlier one has its lease."""
        first = self._first
        return first is not None and tracked.capped and tracked.number > first.number

    def wanted(self, tracked: Tracked) -> None:
        """A request found something, and no room."""
        if self._first is None or tracked.number < self._first.number:
            self._first, self._seen = tracked, True

    def seen(self, tracked: Tracked) -> None:
        """The engine would admit a request."""
        self._seen |= tracked is self._first

    def served(self, tracked: Tracked) -> None:
        """A request has its lease, or wants none any more."""
        tracked.capped = False
        if tracked is self._first:
            self._first = None

    def next_step(self) -> None:
        """A step is planned; the first does not hold others up if it could not run itself."""
        if not self._seen:
            self._first = None
        self._seen = False
