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
Name = tuple[Manager | None, str]  # None: a namespace that is not here
NOBODY = -1  # owns what an engine that is gone has computed


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
    """All such requests of a store, by namespace and the id that the hand-over has.

    Names from outside are such an id, or else what requests have in common that a router has
    sent to both sides at once: then it has to name one request of the namespace only. What engines
    say of a request of another engine's changes nothing.
    """

    def __init__(self, held_bytes_max: int, counts: Counter[str]) -> None:
        """held_bytes_max: of all blocks that are pinned here; others may leave memory."""
        self._leases: dict[Name, RequestLease] = {}
        self._common: dict[Name, list[str]] = {}
        self._past: dict[Name, End] = {}
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

        What its engine, or one that is gone, still holds under its id was of an earlier one.
        """
        before = self._leases.get((manager, request))
        if before is not None and before.owner not in {owner, NOBODY}:
            self._counts["ambiguous"] += 1
            return
        if before is not None and before.running:
            return
        if before is not None:
            self._end(before, "gone")
        if len(self._leases) >= REQUESTS_MAX:
            self._counts["unknown"] += 1
            return
        lease = RequestLease(request, manager, slot_bytes, owner, common)
        self._leases[manager, request] = lease
        if common:
            self._common.setdefault((manager, common), []).append(request)

    def done(
        self,
        request: str,
        manager: Manager,
        owner: int,
        keys: Iterable[BlockKey],
        end_ns: int,
        now_ns: int,
        *,
        fixed: bool = False,
    ) -> None:
        """A request has ended with these blocks; unknown ones are ignored.

        fixed: heartbeats do not move end_ns.
        """
        hand = self._leases.get((manager, request))
        if hand is not None and hand.running and hand.owner == owner:
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

    def gone(self, request: str, manager: Manager, owner: int) -> None:
        """A request has ended without blocks for anybody; unknown ones are ignored."""
        hand = self._leases.get((manager, request))
        if hand is not None and hand.owner == owner:
            self._end(hand, "gone")

    def end_of(self, owner: int) -> None:
        """A session has ended: what its requests still compute will not come."""
        for hand in [hand for hand in self._leases.values() if hand.owner == owner]:
            hand.owner = NOBODY
            if hand.running:
                self._end(hand, "gone")

    def _end(self, hand: RequestLease, how: End) -> None:
        name = hand.manager, hand.request
        del self._leases[name]
        self.held_bytes -= len(hand.pinned) * hand.slot_bytes
        for entry in hand.pinned:
            hand.manager.unpin(entry)
        if hand.common:
            same = self._common[hand.manager, hand.common]
            same.remove(hand.request)
            if not same:
                del self._common[hand.manager, hand.common]
        self._past[name] = how
        if len(self._past) > PAST_MAX:
            del self._past[next(iter(self._past))]
        self._counts["released"] += how == "released"
        self._counts["lapsed"] += how == "lapsed"

    # What other stores say

    def ambiguous(self, name: str, manager: Manager | None) -> bool:
        """Tell whether a name stands for more than one request of a namespace."""
        named = manager, name
        return named not in self._leases and len(self._common.get(named, ())) > 1

    def _find(self, name: str, manager: Manager | None) -> RequestLease | None:
        """Return the request that a name stands for."""
        named = manager, name
        same = self._common.get(named, ())
        if named not in self._leases and len(same) == 1:
            named = manager, same[0]
        return self._leases.get(named)

    def knows(self, name: str, manager: Manager) -> bool:
        """Tell whether a request runs, is held, or has ended not long ago."""
        return self._find(name, manager) is not None or (manager, name) in self._past

    def may_come(self, name: str, manager: Manager, key: BlockKey) -> bool:
        """Tell whether a request may still store a block."""
        hand = self._find(name, manager)
        return hand is not None and hand.wanted and (hand.running or key in hand.missing)

    def computes(self, name: str, manager: Manager) -> bool:
        """Tell whether a request still runs, and a consumer waits for what it computes."""
        hand = self._find(name, manager)
        return hand is not None and hand.wanted and hand.running

    def keep(self, manager: Manager | None, name: str, end_ns: int) -> None:
        """A request waits for what is held: hold it until end_ns at least."""
        hand = self._find(name, manager)
        if hand is None:
            self._counts["unknown"] += 1
        elif not hand.fixed:
            self._counts["extended"] += 1
            hand.deadline_ns = max(hand.deadline_ns, end_ns)

    def report(self, manager: Manager | None, name: str, rank: int, consumers: int) -> RequestState:
        """One of a request's consumers is done; what is held goes when all of them are.

        Raises ProtocolError for a number of consumers that others did not name.
        """
        if self.ambiguous(name, manager):
            self._counts["ambiguous"] += 1
            return "ambiguous"
        hand = self._find(name, manager)
        if hand is None:
            past = self._past.get((manager, name))
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
