"""Requests whose blocks another store will ask for, from their first step to the end of a lease.

    running --its engine: done, with all keys--> held --all consumers done---------> released
       |                                          +----its lease is over-----------> lapsed
       +--its engine: done, all consumers were before------------------------------> released
       +--its engine: ended otherwise, or detached---------------------------------> gone

While it runs, any of its blocks may still come. Held, those may that it named and that are not
ready yet: their copies end a little later than the request, and its lease begins with the last of
them. What is ready is pinned; what only a lower tier has is left to it. How the last requests
ended is remembered for who asks too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.index import Entry
from kvstore.core.limits import REQUESTS_MAX
from kvstore.core.manager import Manager
from kvstore.core.types import BlockKey
from kvstore.wire.peer import RequestState

LATE_NS = 5_000_000_000  # what a request named is not coming when none of it came for so long
PAST_MAX = 4096  # ended requests that are remembered

End = Literal["released", "gone", "lapsed"]


class RequestLease(msgspec.Struct, eq=False):
    """One request; keys: those it named when it ended; missing: of these, not ready yet.

    reported: consumers that are done.
    """

    request: str
    manager: Manager
    slot_bytes: int
    owner: int
    common: str = ""
    running: bool = True
    fixed: bool = False
    ended_ns: int = 0
    lease_ns: int = 0
    deadline_ns: int = 0
    late_ns: int = 0
    keys: tuple[BlockKey, ...] = ()
    missing: dict[BlockKey, None] = {}
    pinned: list[Entry] = []
    consumers: int = 0
    reported: set[int] = set()

    @property
    def wanted(self) -> bool:
        """Tell whether some consumer is not done."""
        return not self.consumers or len(self.reported) < self.consumers


class RequestLeases:
    """All such requests of a store, by the id that the hand-over has.

    Names from outside are such an id, or else what requests have in common that a router has
    sent to both sides at once: then it has to name one request only.
    """

    def __init__(self, held_bytes_max: int, counts: Counter[str]) -> None:
        """held_bytes_max: of all blocks that are pinned here; others may leave memory."""
        self._leases: dict[str, RequestLease] = {}
        self._common: dict[str, list[str]] = {}
        self._past: dict[str, End] = {}
        self._held_bytes_max = held_bytes_max
        self._counts = counts
        self._stored_ns: list[int] = []
        self.held_bytes = 0

    def __len__(self) -> int:
        """Count the requests that are running or held."""
        return len(self._leases)

    # What its engine says

    def running(
        self, request: str, manager: Manager, slot_bytes: int, owner: int, common: str = ""
    ) -> None:
        """A request has begun; owner: its session; common: what others may call it.

        What is still held under its id was of another one, of which nobody will speak any more.
        """
        before = self._leases.get(request)
        if before is not None and before.running and before.owner == owner:
            return
        if before is not None:
            self._end(before, "gone")
        if len(self._leases) >= REQUESTS_MAX:
            self._counts["unknown"] += 1
            return
        self._leases[request] = RequestLease(request, manager, slot_bytes, owner, common)
        if common:
            self._common.setdefault(common, []).append(request)

    def done(
        self,
        request: str,
        keys: Iterable[BlockKey],
        end_ns: int,
        now_ns: int,
        *,
        fixed: bool = False,
    ) -> None:
        """A request has ended with these blocks; unknown ones are ignored.

        fixed: heartbeats do not move end_ns.
        """
        hand = self._leases.get(request)
        if hand is not None and hand.running:
            hand.running, hand.fixed = False, fixed
            hand.deadline_ns = end_ns if fixed else max(hand.deadline_ns, end_ns)
            hand.ended_ns, hand.late_ns = now_ns, now_ns + LATE_NS
            hand.lease_ns = end_ns - now_ns
            hand.keys = tuple(keys)
            hand.missing = dict.fromkeys(hand.keys)
            if hand.wanted:
                self._pin(hand, now_ns)
            else:
                self._end(hand, "released")

    def gone(self, request: str) -> None:
        """A request has ended without blocks for anybody; unknown ones are ignored."""
        hand = self._leases.get(request)
        if hand is not None:
            self._end(hand, "gone")

    def end_of(self, owner: int) -> None:
        """A session has ended: what its requests still compute will not come."""
        for hand in list(self._leases.values()):
            if hand.owner == owner and hand.running:
                self._end(hand, "gone")

    def _end(self, hand: RequestLease, how: End) -> None:
        del self._leases[hand.request]
        self.held_bytes -= len(hand.pinned) * hand.slot_bytes
        for entry in hand.pinned:
            hand.manager.unpin(entry)
        if hand.common:
            self._common[hand.common].remove(hand.request)
            if not self._common[hand.common]:
                del self._common[hand.common]
        self._past[hand.request] = how
        if len(self._past) > PAST_MAX:
            del self._past[next(iter(self._past))]
        self._counts["released"] += how == "released"
        self._counts["lapsed"] += how == "lapsed"

    # What other stores say

    def ambiguous(self, name: str) -> bool:
        """Tell whether a name stands for more than one request."""
        return name not in self._leases and len(self._common.get(name, ())) > 1

    def _find(self, name: str) -> RequestLease | None:
        """Return the request that a name stands for."""
        same = self._common.get(name, ())
        return self._leases.get(same[0] if name not in self._leases and len(same) == 1 else name)

    def knows(self, name: str) -> bool:
        """Tell whether a request runs, is held, or has ended not long ago."""
        return self._find(name) is not None or name in self._past

    def may_come(self, name: str, key: BlockKey) -> bool:
        """Tell whether a request may still store a block."""
        hand = self._find(name)
        return hand is not None and hand.wanted and (hand.running or key in hand.missing)

    def computes(self, name: str) -> bool:
        """Tell whether a request still runs, and a consumer waits for what it computes."""
        hand = self._find(name)
        return hand is not None and hand.wanted and hand.running

    def keep(self, manager: Manager | None, name: str, end_ns: int) -> None:
        """A request waits for what is held: hold it until end_ns at least."""
        hand = self._find(name)
        if hand is None or hand.manager is not manager:
            self._counts["unknown"] += 1
        elif not hand.fixed:
            self._counts["extended"] += 1
            hand.deadline_ns = max(hand.deadline_ns, end_ns)

    def report(self, manager: Manager | None, name: str, rank: int, consumers: int) -> RequestState:
        """One of a request's consumers is done; what is held goes when all of them are.

        Raises ProtocolError for a number of consumers that others did not name.
        """
        if self.ambiguous(name):
            self._counts["ambiguous"] += 1
            return "ambiguous"
        hand = self._find(name)
        if hand is None or hand.manager is not manager:
            past = self._past.get(name)
            self._counts["unknown"] += past is None
            return past or "unknown"
        if hand.consumers not in {0, consumers}:
            raise ProtocolError(f"{consumers} consumers, others said {hand.consumers}")
        hand.consumers = consumers
        hand.reported.add(rank)
        if hand.running or hand.wanted:
            return "waits"
        self._end(hand, "released")
        return "released"

    # Time

    def tick(self, now_ns: int) -> None:
        """Pin what has become ready, and let go of what was held long enough."""
        for hand in list(self._leases.values()):
            if hand.running:
                continue
            if hand.missing:
                self._pin(hand, now_ns)
            if now_ns >= hand.late_ns:
                hand.missing.clear()
            if not hand.missing and now_ns >= hand.deadline_ns:
                self._end(hand, "lapsed")

    def _pin(self, hand: RequestLease, now_ns: int) -> None:
        """Pin what is ready, as far as the cap goes."""
        for key in list(hand.missing):
            if hand.manager.ready(key) is None:
                continue
            del hand.missing[key]
            hand.late_ns = now_ns + LATE_NS
            if self.held_bytes + hand.slot_bytes <= self._held_bytes_max:
                entry = hand.manager.pin(key)
                if entry is not None:
                    hand.pinned.append(entry)
                    self.held_bytes += hand.slot_bytes
        if not hand.missing:
            self._stored_ns.append(now_ns - hand.ended_ns)
            hand.deadline_ns = max(hand.deadline_ns, now_ns + hand.lease_ns)

    def take_stored_ns(self) -> list[int]:
        """Return how long after each request's end its last block was ready; once each."""
        stored, self._stored_ns = self._stored_ns, []
        return stored
