"""The lookups of an engine's requests: asked, waited for, and given up.

A lookup is on its way while the engine takes steps. A step waits for an answer, but not for long:
all lookups share its budget. Without an answer the request is deferred: the engine asks again in
a later step. A request that was deferred for too long is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import dropwhile

from connectors.compute_pace import ComputePace
from connectors.engine_interface import Geometry
from connectors.events import BlockEvents
from connectors.kv_transfer_params import NO_REMOTE
from connectors.late_stores import LateStores
from connectors.partial_block import query_for
from connectors.request_state import NO_QUERY, Phase, TrackedRequest
from connectors.store_client import Grant, StoreClient
from kvstore.core import limits
from kvstore.core.types import make_key
from kvstore.wire import engine as p

IDLE_WAIT_S = 0.001
BUSY_WAIT_S = 0.0002
TIMEOUTS_IN_A_ROW_MAX = 3
ANSWER_LIMIT_NS = 500_000_000  # beyond what the store may defer: it does not answer
OVERDUE_NS = 500_000_000  # nor in this time: the machine may have stood still, the store with it
OVERDUE_STEP_NS = 200_000_000  # of that, between two looks: it may stand still again
LOADING_LIMIT_NS = 5_000_000_000  # waiting for another request's load, or for room for a lease
FAILURES_MAX = 2  # after a failed load other copies are tried once, then it is computed


class LeaseQueue:
    """The requests that found blocks and got no lease, since the leases are at their cap.

    They ask again in the order of their arrival, one at a time. Lookups of later requests may be on
    their way already, or come with them. They would be answered before the lookup that the earliest
    request repeats, and take the room that was made for it, again and again.

    A queue can be long. So its requests do not wait for a certain time each, but as long as now and
    then one of them has its lease.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, TrackedRequest]] = []  # a heap; some wait no more
        self._waited = self._first_tried = False  # in this step
        self._stuck_ns: int | None = None  # since when they are tried, and none has had its lease

    @property
    def first(self) -> TrackedRequest | None:
        """The earliest request, which is to have the next lease."""
        while self._waiting and not self._waiting[0][1].capped:
            heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def blocks(self, tracked: TrackedRequest) -> bool:
        """Return True if a request has to wait until an earlier one has its lease."""
        return tracked.capped and tracked is not self.first

    def add(self, tracked: TrackedRequest) -> None:
        """A request found blocks and got no lease, or gave its own back."""
        if not tracked.capped:
            tracked.capped = True
            heappush(self._waiting, (tracked.arrival, tracked))
            self.mark_tried(tracked)

    def mark_tried(self, tracked: TrackedRequest) -> None:
        """The engine tries to admit a request in this step."""
        self._first_tried |= tracked is self.first

    def stuck_ns(self, now_ns: int) -> int:
        """A request of the queue has to wait; return since when they have, and all in vain.

        That is without a lease for any of them, and without a step in which none had to wait.
        """
        self._waited = True
        if self._stuck_ns is None:
            self._stuck_ns = now_ns
        return self._stuck_ns

    def moved(self, tracked: TrackedRequest) -> None:
        """A request has its answer."""
        if tracked.capped:
            self._stuck_ns, self._first_tried = None, True
        self.remove(tracked)

    def remove(self, tracked: TrackedRequest) -> None:
        """A request needs no lease any more, or has it."""
        tracked.capped = False

    def next_step(self) -> None:
        """End a step: a first request that the engine did not try to admit blocks no other."""
        first = self.first
        if not self._waited:
            self._stuck_ns = None
        elif not self._first_tried and first is not None:
            self.remove(first)
        self._waited = self._first_tried = False


class RequestLookups:
    """Asks the store about requests, and decides how long each waits for its answer."""

    def __init__(
        self,
        geometry: Geometry,
        client: StoreClient,
        requests: Mapping[str, TrackedRequest],
        events: BlockEvents,
        *,
        direct: bool,
    ) -> None:
        """requests: all of the engine's, in the order of their arrival; the caller's.

        direct: workers read blocks straight from peers.
        """
        self._geometry = geometry
        self._client = client
        self._requests = requests
        self._events = events
        self._direct = direct
        self.pace: ComputePace | None = None  # of computing; None: whatever is here is loaded
        self.late: LateStores | None = None  # None: blocks are stored when they are complete
        self._scope = b""
        self.queue = LeaseQueue()
        self._room = False  # a lease has ended since the first of the queue has asked
        self._asking: dict[int, TrackedRequest] = {}  # by lookup
        self._step = 0
        self._waited_s = 0.0  # in this step
        self._timeouts = 0  # in a row

    def ask(self, tracked: TrackedRequest) -> None:
        """Look up a request's blocks, unless it computes its prompt, or waits for its turn.

        After a failed load only in memory, so that a request waits for a disk or a peer once.
        """
        if not tracked.may_load or self.queue.blocks(tracked):
            return
        failed, load_from = tracked.failures > 0, tracked.policy.kv_load_tiers
        remote = tracked.remote if load_from.peers and not failed else NO_REMOTE
        query = query_for(self._geometry, tracked.request, remote)
        if not query.blocks:
            return
        lookup = p.Lookup(
            ask=0,
            hashes=b"".join(query.hashes),
            width=self._geometry.hash_bytes,
            scope=self._scope + tracked.tag,
            memory_only=failed or not load_from.disk,
            peer=remote.address,
            request=remote.request,
            push=remote.push,
            inside=query.inside,
            loadable=query.blocks,
            direct=self._direct,
            hinted=remote.hinted,
            off_disk=not tracked.policy.kv_store_tiers.disk,
            block_ns=None if self.pace is None else self.pace.block_ns(self._geometry.block_tokens),
            again=failed or tracked.query is not NO_QUERY,
        )
        tracked.ask = self._client.ask(lookup)
        tracked.overdue_ns = tracked.overdue_at_ns = 0
        if tracked.ask:
            self._asking[tracked.ask] = tracked
            tracked.phase, tracked.query = Phase.ASKED, query
            self._events.asked(tracked.request, query.hashes[: query.own])

    def pin(self, tracked: TrackedRequest) -> None:
        """Have the store keep a request's prompt in memory, or what was kept before no longer."""
        policy, scope = tracked.policy, self._scope + tracked.tag
        if policy.kv_unpin:
            self._client.pin(p.Prefix(policy.kv_unpin, scope=scope))
        if policy.kv_pin:
            width = self._geometry.hash_bytes
            query = query_for(self._geometry, tracked.request, NO_REMOTE)
            hashes = b"".join(query.hashes[: limits.PIN_BYTES_MAX // width])
            self._client.pin(p.Prefix(policy.kv_pin, hashes, width, scope))

    def answer(self, tracked: TrackedRequest, *, idle: bool) -> Grant | None:
        """Return a request's answer, waiting for it within this step's budget.

        idle: no request of the last step is left. None: there is no answer that can be used now;
        is_waiting() tells whether one is to come.
        """
        if tracked.phase is Phase.LOADED:
            tracked.phase = Phase.NEW
        self._client.receive()
        self.line_up()
        if tracked.ask and self._client.asked_ns(tracked.ask) is None:  # lost with its session
            self.drop(tracked)
        if tracked.phase in (Phase.NEW, Phase.RUNNING) and tracked.failures < FAILURES_MAX:
            self.ask(tracked)
        if not tracked.ask:
            return None
        grant = self._client.grant(tracked.ask)
        if grant is not None:
            self._timeouts = 0
        else:
            self._client.send_step()
            self._wait(tracked, idle=idle)
            self.line_up()
            grant = self._client.grant(tracked.ask)
            if not tracked.ask:  # leases were at their cap
                self.ask(tracked)
        if grant is None:
            return None
        if self._client.clock() >= grant.until_ns:
            self.drop(tracked)  # its pins may be gone, or more is there now
            self.ask(tracked)
            return None
        if self.late is not None and self._is_outdated(self.late, tracked, grant):
            return None
        self.queue.moved(tracked)
        return grant

    def _is_outdated(self, late: LateStores, tracked: TrackedRequest, grant: Grant) -> bool:
        """Return True if a request is to have another answer: what this one lacks is stored by now.

        It was given when the engine still had these blocks itself. The request asks once for each.
        """
        reach = min((places.leading for places in grant.hits), default=0)
        block = max(reach, tracked.local // self._geometry.block_tokens)
        if block >= tracked.query.blocks or block == tracked.asked_again:
            return False
        key = make_key(tracked.query.hashes[block], 0, self._scope + tracked.tag)
        if late.is_copying(key):
            tracked.stored_later = block
            return True
        if tracked.stored_later != block and key not in self._client.known:
            return False
        tracked.asked_again = block
        self.drop(tracked)
        self.ask(tracked)
        return True

    def _wait(self, tracked: TrackedRequest, *, idle: bool) -> None:
        if tracked.waited and not idle:
            return  # with nothing else to run an empty step would cost more
        if not idle and self._timeouts >= TIMEOUTS_IN_A_ROW_MAX:
            return
        budget_s = IDLE_WAIT_S if idle else BUSY_WAIT_S
        end = self._client.clock() + int((budget_s - self._waited_s) * 1e9)
        started = self._client.clock()
        while self._client.grant(tracked.ask) is None and self._client.session:
            left_ns = end - self._client.clock()
            if left_ns <= 0:
                break
            self._client.receive(left_ns / 1e9)
        self._waited_s += (self._client.clock() - started) / 1e9
        tracked.waited = True
        if not idle:
            found = self._client.grant(tracked.ask) is not None
            self._timeouts = 0 if found else self._timeouts + 1

    def line_up(self) -> None:
        """Have those that found blocks queue for a lease in their order, and the first ask again.

        The first one asks as soon as a lease has ended, so that it has its own when the engine has
        room for it. A later one that was answered before gives its lease back, or it would come
        first; not one that a peer sends its blocks to.
        """
        queue, answered = self.queue, self._client.answered
        for ask in answered:
            tracked, grant = self._asking.get(ask), self._client.grant(ask)
            if tracked is None or grant is None:
                continue
            first = queue.first
            late = first is not None and first.arrival < tracked.arrival
            if grant.capped:
                self._give_way(tracked)
                if tracked is queue.first:
                    self._make_room(tracked)
            elif late and grant.lease and not tracked.remote.address:
                self._give_way(tracked)
            elif tracked is first:
                queue.moved(tracked)
                self._room = True  # for the next one, it may be
        answered.clear()
        first = queue.first
        if self._room and first is not None and not first.ask:
            self._room = False
            self.ask(first)

    def _give_way(self, tracked: TrackedRequest) -> None:
        self.queue.add(tracked)
        self.drop(tracked)

    def _make_room(self, first: TrackedRequest) -> None:
        """Leases are at their cap: release those of requests that arrived later than the first."""
        later = dropwhile(lambda other: other is not first, self._requests.values())
        for other in later:
            grant = self._client.grant(other.ask)
            if grant is not None and grant.lease:
                self._give_way(other)

    def is_waiting(self, tracked: TrackedRequest) -> bool:
        """Return True if a request without an answer will have one, or will ask for one."""
        return tracked.phase is Phase.ASKED or self.queue.blocks(tracked)

    def defer(self, tracked: TrackedRequest) -> int | None:
        """Answer "ask again later", or 0 when that has gone on for too long.

        Only steps in which the engine asks count. In others it has no room for the request, and an
        answer that came may have expired before the engine asks again.
        """
        now = self._client.clock()
        if tracked.deferred_ns is None or tracked.deferred_step < self._step - 1:
            tracked.deferred_ns = now
            self._client.count("deferred")
        tracked.deferred_step = self._step
        limit_ns = ANSWER_LIMIT_NS + self._client.defer_ms * 1_000_000
        overdue = self._client.unanswered_ns(tracked.ask) > limit_ns
        silent = overdue and self._stays(tracked, now)
        since_ns = self.queue.stuck_ns(now) if tracked.capped else tracked.deferred_ns
        if silent or now - since_ns > max(LOADING_LIMIT_NS, limit_ns):
            self._client.count("timed_out")
            tracked.gave_up = "lease_limit" if tracked.capped else "too_late"
            self.drop(tracked)
            tracked.phase, tracked.failures = Phase.RUNNING, FAILURES_MAX
            self.queue.remove(tracked)
            if overdue and tracked.overdue_ns:  # of long steps few are taken in the whole time
                self._client.detach("no answer in time")
            return 0
        self._client.count("deferred_steps")
        return None

    @staticmethod
    def _stays(tracked: TrackedRequest, now_ns: int) -> bool:
        """Look at a request whose answer is overdue: tell whether it has been for a while."""
        since_ns = tracked.overdue_at_ns or now_ns
        tracked.overdue_ns += min(now_ns - since_ns, OVERDUE_STEP_NS)
        tracked.overdue_at_ns = now_ns
        return tracked.overdue_ns > OVERDUE_NS

    def drop(self, tracked: TrackedRequest) -> None:
        """Give up a request's lookup, if it has one, and its answer."""
        if tracked.ask:
            self._forget(tracked)
            tracked.phase = Phase.NEW

    def end(self, tracked: TrackedRequest, *, used: bool = False) -> None:
        """A request was admitted, or is over. used: a load has its lease now."""
        self.queue.remove(tracked)
        if used:
            self._client.take(tracked.ask)
            self._asking.pop(tracked.ask, None)
        elif tracked.ask:
            self._forget(tracked)
        tracked.ask, tracked.query = 0, NO_QUERY

    def lease_ended(self) -> None:
        """There may be room for another."""
        self._room = True

    def _forget(self, tracked: TrackedRequest) -> None:
        grant = self._client.grant(tracked.ask)
        if grant is not None and grant.lease:
            self._room = True
        self._client.drop(tracked.ask)
        self._asking.pop(tracked.ask, None)
        tracked.ask = 0

    def next_step(self) -> None:
        """End a step, and with it what was waited."""
        self.queue.next_step()
        self._step += 1
        self._waited_s = 0.0

    def use_scope(self, scope: bytes) -> None:
        """Ask in this scope from now on; what was asked before is of no use."""
        self._scope = scope
        for tracked in self._requests.values():
            self.drop(tracked)
