"""Requests whose blocks another store will ask for, from their first step to the end of a lease.

    running --its engine: done, with all keys--> held --fetched and released, lease over--> gone
       +--its engine: ended otherwise, or detached--------------------------------------> gone

While it runs, any of its blocks may still come. Held, those may that it named and that are not
ready yet: their copies end a little later than the request. What is ready is pinned; what only a
lower tier has is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvstore.index import Entry
from kvstore.manager import Manager
from kvstore.types import BlockKey

LATE_NS = 5_000_000_000  # what a request named and did not store by then is not coming


class Hand(msgspec.Struct, eq=False):
    """One request; keys: those it named when it ended; missing: of these, not ready yet."""

    manager: Manager
    slot_bytes: int
    owner: int
    running: bool = True
    deadline_ns: int = 0
    late_ns: int = 0
    keys: tuple[BlockKey, ...] = ()
    missing: dict[BlockKey, None] = {}
    pinned: list[Entry] = []


class Hands:
    """All such requests of a store, by the id that the hand-over has."""

    def __init__(self, held_bytes_max: int) -> None:
        """held_bytes_max: of all blocks that are pinned here; others may leave memory."""
        self._hands: dict[str, Hand] = {}
        self._held_bytes_max = held_bytes_max
        self.held_bytes = 0

    def __len__(self) -> int:
        """Count the requests that are running or held."""
        return len(self._hands)

    def running(self, request: str, manager: Manager, slot_bytes: int, owner: int) -> None:
        """A request has begun; owner: its session."""
        self._hands.setdefault(request, Hand(manager, slot_bytes, owner))

    def done(self, request: str, keys: Iterable[BlockKey], end_ns: int, now_ns: int) -> None:
        """A request has ended with these blocks; unknown ones are ignored."""
        hand = self._hands.get(request)
        if hand is not None and hand.running:
            hand.running, hand.deadline_ns, hand.late_ns = False, end_ns, now_ns + LATE_NS
            hand.keys = tuple(keys)
            hand.missing = dict.fromkeys(hand.keys)
            self._pin(hand)

    def gone(self, request: str) -> None:
        """Nobody wants a request's blocks any more."""
        hand = self._hands.pop(request, None)
        if hand is not None:
            self.held_bytes -= len(hand.pinned) * hand.slot_bytes
            for entry in hand.pinned:
                hand.manager.unpin(entry)

    def end_of(self, owner: int) -> None:
        """A session has ended: what its requests still compute will not come."""
        for request in [
            r for r, hand in self._hands.items() if hand.owner == owner and hand.running
        ]:
            self.gone(request)

    def located(self, request: str, manager: Manager) -> tuple[str, tuple[BlockKey, ...]]:
        """Say whether a namespace's request is "running", "held" or "unknown", and its blocks."""
        hand = self._hands.get(request)
        if hand is None or hand.manager is not manager:
            return "unknown", ()
        return ("running" if hand.running else "held"), hand.keys

    def may_come(self, request: str, key: BlockKey) -> bool:
        """Tell whether a request may still store a block."""
        hand = self._hands.get(request)
        return hand is not None and (hand.running or key in hand.missing)

    def tick(self, now_ns: int) -> None:
        """Pin what has become ready, and let go of what was held long enough."""
        for request, hand in list(self._hands.items()):
            if hand.running:
                continue
            self._pin(hand)
            if now_ns >= hand.late_ns:
                hand.missing.clear()
            if now_ns >= hand.deadline_ns:
                self.gone(request)

    def _pin(self, hand: Hand) -> None:
        """Pin what is ready, as far as the cap goes."""
        for key in list(hand.missing):
            if hand.manager.ready(key) is None:
                continue
            del hand.missing[key]
            if self.held_bytes + hand.slot_bytes <= self._held_bytes_max:
                entry = hand.manager.pin(key)
                if entry is not None:
                    hand.pinned.append(entry)
                    self.held_bytes += hand.slot_bytes
