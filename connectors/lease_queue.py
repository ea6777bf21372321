"""Which request gets the next lease when an engine's leases are at their cap: the earliest one.

Lookups of later requests may be on their way already. They would be answered before the lookup
that the earliest request repeats, and take the room that was made for it, again and again. So a
later request that was capped does not ask until the earliest one has its lease.
"""

from __future__ import annotations

from connectors.request_state import TrackedRequest


class LeaseQueue:
    """The earliest request that was capped, as long as the engine tries to admit it."""

    def __init__(self) -> None:
        """Start with no request waiting."""
        self._first: TrackedRequest | None = None
        self._seen = False

    def blocks(self, tracked: TrackedRequest) -> bool:
        """Return True if a request has to wait until an earlier one has its lease."""
        first = self._first
        return first is not None and tracked.capped and tracked.arrival > first.arrival

    def add(self, tracked: TrackedRequest) -> None:
        """A request found blocks and got no lease."""
        if self._first is None or tracked.arrival < self._first.arrival:
            self._first, self._seen = tracked, True

    def mark_seen(self, tracked: TrackedRequest) -> None:
        """The engine tries to admit a request in this step."""
        self._seen |= tracked is self._first

    def remove(self, tracked: TrackedRequest) -> None:
        """A request has its lease, or needs none any more."""
        tracked.capped = False
        if tracked is self._first:
            self._first = None

    def next_step(self) -> None:
        """End a step: a first request that the engine did not try to admit blocks no other."""
        if not self._seen:
            self._first = None
        self._seen = False
