"""Requests that are handed over, as our engines tell of them, and what other stores are told.

Heartbeats are the store's, not the engine's: a busy engine's step may take seconds. They begin
when a request is queued and end when it wants nothing more, or with its engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from kvstore.core.errors import ProtocolError
from kvstore.core.limits import LOOKUP_BLOCKS_MAX
from kvstore.core.types import Chain
from kvstore.handover.fetches import LEASE_MS
from kvstore.handover.jobs import Source
from kvstore.handover.links import Links
from kvstore.handover.request_leases import RequestLeases
from kvstore.wire import peer as m
from kvstore.wire.engine import HandedOver, Step

WAITING_MAX = 1 << 16


class Held(NamedTuple):
    """What is held: by which store, for which namespace, under which name."""

    address: str
    namespace: str
    request: str


class Requests:
    """All of a store: those that others go on with, and those that others have computed."""

    def __init__(
        self,
        leases: RequestLeases,
        wake: Callable[[], None],
        links: Links,
        refusal: Callable[[str], str],
    ) -> None:
        """leases: of the former. wake(): others may ask soon.

        links: to the stores that hold the latter. refusal(address): why one cannot be asked, ever.
        """
        self.counts: Counter[str] = Counter()
        self._leases = leases
        self._wake = wake
        self._links = links
        self._refusal = refusal
        self._period_ns = LEASE_MS * 1_000_000 // 3
        # Requests that our engines wait for: next heartbeat, soonest first, and engines' sessions.
        self._waiting: dict[Held, tuple[int, set[int]]] = {}

    def on_step(self, namespace: Source, session: int, step: Step, now_ns: int) -> list[str]:
        """Take note of what an engine says; return the requests that no engine waits for now.

        Raises ProtocolError.
        """
        for handed_over in step.handed_over:
            self._hand(namespace, session, handed_over, now_ns)
        digest = namespace.layout.digest
        for lookup in step.lookups:
            if lookup.peer and lookup.request:
                self._wait(Held(lookup.peer, digest, lookup.request), session, now_ns)
        held = [Held(gone.peer, digest, gone.request) for gone in step.unwanted]
        return [each.request for each in held if self._let_go(each, session)]

    def _wait(self, held: Held, session: int, now_ns: int) -> None:
        """Tell the store that holds it that a request waits here, now and again and again."""
        if held in self._waiting:
            self._waiting[held][1].add(session)
        elif len(self._waiting) < WAITING_MAX and not self._refusal(held.address):
            self._beat(held, {session}, now_ns)

    def _hand(self, namespace: Source, session: int, request: HandedOver, now_ns: int) -> None:
        leases, rules = self._leases, namespace.layout.rules
        if request.state == "running":
            self._wake()
            size = namespace.layout.slot_bytes
            leases.running(request.request, namespace.manager, size, session, request.common)
        elif request.state == "gone" or not request.hashes:
            leases.gone(request.request, namespace.manager, session)
        elif request.width <= 0 or len(request.hashes) % request.width:
            raise ProtocolError(f"{len(request.hashes)} bytes of hashes, {request.width} each")
        elif (blocks := len(request.hashes) // request.width) > LOOKUP_BLOCKS_MAX:
            raise ProtocolError(f"{blocks} blocks, expected up to {LOOKUP_BLOCKS_MAX}")
        else:
            hashes, width = request.hashes, request.width
            chain = Chain(hashes, width, len(rules), request.scope, inside=1)  # whatever is asked
            named = [range(chain.first_of(rule, blocks), blocks) for rule in rules]
            if not leases.has_room(sum(map(len, named))):
                leases.gone(request.request, namespace.manager, session)
                return
            keys = [chain.key(group, index) for group, few in enumerate(named) for index in few]
            end_ns = now_ns + request.lease_ms * 1_000_000
            leases.done(
                request.request,
                namespace.manager,
                session,
                keys,
                end_ns,
                now_ns,
                fixed=request.fixed,
            )

    def _let_go(self, held: Held, session: int) -> bool:
        """Tell the store that holds it, unless another engine was given the same parameters."""
        _, sessions = self._waiting.get(held, (0, set[int]()))
        sessions.discard(session)
        if sessions:
            return False
        self._waiting.pop(held, None)
        self.counts["done"] += self._keep(held, 0)
        return True

    def _beat(self, held: Held, sessions: set[int], now_ns: int) -> None:
        self.counts["heartbeats"] += self._keep(held, LEASE_MS)
        self._waiting.pop(held, None)  # behind the others
        self._waiting[held] = now_ns + self._period_ns, sessions

    def _keep(self, held: Held, lease_ms: int) -> bool:
        keep = m.Keep(held.namespace, held.request, lease_ms)
        return self._links.tell(held.address, held.namespace, keep)

    def tick(self, now_ns: int) -> None:
        """Send the heartbeats that are due."""
        due = takewhile(lambda item: item[1][0] <= now_ns, self._waiting.items())
        for held, (_, sessions) in list(due):
            self._beat(held, sessions, now_ns)

    def end_of(self, session: int) -> None:
        """An engine is gone: its requests compute nothing more, and wait for nothing."""
        for held, (_, sessions) in list(self._waiting.items()):
            sessions.discard(session)
            if not sessions:
                del self._waiting[held]
        self._leases.end_of(session)
