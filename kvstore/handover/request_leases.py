"""Requests whose blocks another store will ask for, from their first step to the end of a lease.

    running --its engine: done, with all keys--> held --all consumers done---------> released
       |                                          +----its lease is over-----------> lapsed
       +--its engine: done, all consumers were before------------------------------> released
       +--its engine: ended otherwise, or detached---------------------------------> gone

While it runs, any of its blocks may still come. Held, those may that it named and that are not
ready yet: their copies end a little later than the request, and its lease begins with the last of
them. One that left memory since the request began, before it was pinned, does not come: readers
do not wait for it. What is ready is pinned; what only a lower tier has is left to it. How the last
requests ended is remembered for who asks too late.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Literal

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.ghosts import TICKS
from kvstore.core.index import Entry
from kvstore.core.limits import REQUESTS_MAX
from kvstore.core.manager import Manager
from kvstore.core.types import BlockKey
from kvstore.wire.peer import RequestState

LATE_NS = 5_000_000_000  # what a request named is not coming when none of it came for so long
LOOKS_MAX = 8192  # at missing blocks in a turn: each takes a quarter of a microsecond
KEYS_MAX = 1 << 22  # that all held requests name: two hundred bytes each
PAST_MAX = 4096  # ended requests that are remembered

End = Literal["released", "gone", "lapsed"]
Name = tuple[Manager | None, str]  # None: a namespace that is not here
PastName = tuple[weakref.ref[Manager] | None, str]  # of a namespace that may be forgotten
NOBODY = -1  # owns what an engine that is gone has computed


class RequestLease(msgspec.Struct, eq=False):
    """One request; keys: those it named when it ended; missing: of these, not ready yet.

    began_s: on its manager's clock. reported: consumers that are done.
    """

    request: str
    manager: Manager
    slot_bytes: int
    owner: int
    common: str = ""
    began_s: float = 0.0
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
        self._past: dict[PastName, End] = {}
        self.held_bytes_max = held_bytes_max
        self._counts = counts
        self._stored_ns: list[int] = []
        self.held_bytes = 0
        self._keys = 0  # that those held name

    def __len__(self) -> int:
        """Count the requests that are running or held."""
        return len(self._leases)

    # What its engine says

    def has_room(self, keys: int) -> bool:
        """Tell whether a request may name so many blocks; one that may not is counted."""
        room = self._keys + keys <= KEYS_MAX
        self._counts["unknown"] += not room
        return room

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
        lease = RequestLease(request, manager, slot_bytes, owner, common, manager.now_s)
        self._leases[manager, request] = lease
        manager.slots.hands_over = True
        manager.slots.awaited_s[request] = lease.began_s
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
        lease = self._leases.get((manager, request))
        if lease is not None and lease.running and lease.owner == owner:
            lease.running, lease.fixed = False, fixed
            lease.deadline_ns = end_ns if fixed else max(lease.deadline_ns, end_ns)
            lease.ended_ns, lease.late_ns = now_ns, now_ns + LATE_NS
            lease.lease_ns = end_ns - now_ns
            lease.keys = tuple(keys)
            self._keys += len(lease.keys)
            lease.missing = dict.fromkeys(lease.keys)
            if lease.wanted:
                self._pin(lease, now_ns, len(lease.missing))
            else:
                self._end(lease, "released")

    def gone(self, request: str, manager: Manager, owner: int) -> None:
        """A request has ended without blocks for anybody; unknown ones are ignored."""
        lease = self._leases.get((manager, request))
        if lease is not None and lease.owner == owner:
            self._end(lease, "gone")

    def end_of(self, owner: int) -> None:
        """A session has ended: what its requests still compute will not come."""
        for lease in [lease for lease in self._leases.values() if lease.owner == owner]:
            lease.owner = NOBODY
            if lease.running:
                self._end(lease, "gone")

    def clear(self) -> None:
        """End all: nothing is handed over any more."""
        for lease in list(self._leases.values()):
            self._end(lease, "gone")

    def _end(self, lease: RequestLease, how: End) -> None:
        del self._leases[lease.manager, lease.request]
        lease.manager.slots.awaited_s.pop(lease.request, None)
        self._keys -= len(lease.keys)
        self.held_bytes -= len(lease.pinned) * lease.slot_bytes
        lease.manager.unpin(lease.pinned)
        if lease.common:
            same = self._common[lease.manager, lease.common]
            same.remove(lease.request)
            if not same:
                del self._common[lease.manager, lease.common]
        self._past[_past_name(lease.manager, lease.request)] = how
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
        return self._find(name, manager) is not None or _past_name(manager, name) in self._past

    def may_come(
        self, name: str, manager: Manager, key: BlockKey, *, undecided: bool = False
    ) -> bool:
        """Tell whether a block that is not here may still come.

        A request may store it, once. undecided: a lower tier may have it, too.
        """
        lease = self._find(name, manager)
        if lease is None or not lease.wanted or lease.running:
            return lease is not None and lease.wanted
        return key in lease.missing and (undecided or not _was_lost(manager, key, lease.began_s))

    def computes(self, name: str, manager: Manager) -> bool:
        """Tell whether a request still runs, and a consumer waits for what it computes."""
        lease = self._find(name, manager)
        return lease is not None and lease.wanted and lease.running

    def keep(self, manager: Manager | None, name: str, end_ns: int) -> None:
        """A request waits for what is held: hold it until end_ns at least."""
        lease = self._find(name, manager)
        if lease is None:
            self._counts["unknown"] += 1
        elif not lease.fixed:
            self._counts["extended"] += 1
            lease.deadline_ns = max(lease.deadline_ns, end_ns)

    def report(self, manager: Manager | None, name: str, rank: int, consumers: int) -> RequestState:
        """One of a request's consumers is done; what is held goes when all of them are.

        Raises ProtocolError for a number of consumers that others did not name.
        """
        if self.ambiguous(name, manager):
            self._counts["ambiguous"] += 1
            return "ambiguous"
        lease = self._find(name, manager)
        if lease is None:
            past = self._past.get(_past_name(manager, name))
            self._counts["unknown"] += past is None
            return past or "unknown"
        if lease.consumers not in {0, consumers}:
            raise ProtocolError(f"{consumers} consumers, others said {lease.consumers}")
        lease.consumers = consumers
        lease.reported.add(rank)
        if lease.running or lease.wanted:
            return "waits"
        self._end(lease, "released")
        return "released"

    # Time

    def tick(self, now_ns: int) -> None:
        """Pin what has become ready, and let go of what was held long enough."""
        waiting = sum(bool(lease.missing) for lease in self._leases.values())
        most = LOOKS_MAX // max(1, waiting) + 1
        for lease in list(self._leases.values()):
            if lease.running:
                continue
            if lease.missing:
                self._pin(lease, now_ns, most)
            if now_ns >= lease.late_ns:
                lease.missing.clear()
            if not lease.missing:
                lease.manager.slots.awaited_s.pop(lease.request, None)
                if now_ns >= lease.deadline_ns:
                    self._end(lease, "lapsed")

    def _pin(self, lease: RequestLease, now_ns: int, most: int) -> None:
        """Pin what is ready, as far as the cap goes; look for `most`, the others come first next.

        An engine may name a million that never come.
        """
        turns = len(lease.missing) > most
        for key in list(islice(lease.missing, most)):
            if lease.manager.ready(key) is None:
                if turns:
                    lease.missing[key] = lease.missing.pop(key)
                continue
            del lease.missing[key]
            lease.late_ns = now_ns + LATE_NS
            if self.held_bytes + lease.slot_bytes <= self.held_bytes_max:
                entry = lease.manager.pin(key)
                if entry is not None:
                    lease.pinned.append(entry)
                    self.held_bytes += lease.slot_bytes
        if not lease.missing:
            self._stored_ns.append(now_ns - lease.ended_ns)
            lease.deadline_ns = max(lease.deadline_ns, now_ns + lease.lease_ns)

    def take_stored_ns(self) -> list[int]:
        """Return how long after each request's end its last block was ready; once each."""
        stored, self._stored_ns = self._stored_ns, []
        return stored


def _was_lost(manager: Manager, key: BlockKey, since_s: float) -> bool:
    """Tell whether a block that is not in memory was evicted, or not kept, since then."""
    lost_s = manager.ghosts.left_s(key), manager.unkept.left_s(key)
    first_s = since_s - 1 / TICKS
    return any(each_s is not None and each_s > first_s for each_s in lost_s)


def _past_name(manager: Manager | None, name: str) -> PastName:
    return None if manager is None else weakref.ref(manager), name
