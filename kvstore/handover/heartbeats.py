"""Requests that are handed over, as our engines tell of them, and what other stores are told.

Heartbeats are the store's, not the engine's: a busy engine's step may take seconds. They begin
when a request is queued and end when it wants nothing more, or with its engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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


class Waiting:
    """Requests of our engines that wait for what others hold: when to say so again."""

    def __init__(self, period_ns: int) -> None:
        """period_ns: between two heartbeats."""
        self._period_ns = period_ns
        self._held: dict[Held, tuple[int, int]] = {}  # first due first: when, and its session

    def __len__(self) -> int:
        """Count the requests."""
        return len(self._held)

    def may_begin(self, held: Held) -> bool:
        """Tell whether a request is new, and there are not too many already."""
        return held not in self._held and len(self._held) < WAITING_MAX

    def begin(self, held: Held, session: int, now_ns: int) -> None:
        """Take note of a request that may begin, now."""
        self._held[held] = now_ns + self._period_ns, session

    def end(self, held: Held) -> None:
        """It wants nothing more; unknown ones are ignored."""
        self._held.pop(held, None)

    def end_of(self, session: int) -> None:
        """An engine is gone, and all of its requests with it."""
        for held in [held for held, (_, owner) in self._held.items() if owner == session]:
            self.end(held)

    def due(self, now_ns: int) -> list[Held]:
        """Return those whose heartbeat is due."""
        found = []
        for held, (due_ns, _) in self._held.items():
            if due_ns > now_ns:
                break
            found.append(held)
        for held in found:  # behind the others
            _, session = self._held.pop(held)
            self.begin(held, session, now_ns)
        return found


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
        self._waiting = Waiting(LEASE_MS * 1_000_000 // 3)

    def on_step(self, namespace: Source, session: int, step: Step, now_ns: int) -> None:
        """Take note of what an engine says. Raises ProtocolError."""
        for handed_over in step.handed_over:
            self._hand(namespace, session, handed_over, now_ns)
        digest = namespace.layout.digest
        for lookup in step.lookups:
            if lookup.peer and lookup.request:
                self._wait(Held(lookup.peer, digest, lookup.request), session, now_ns)
        for gone in step.unwanted:
            self._let_go(Held(gone.peer, digest, gone.request))

    def _wait(self, held: Held, session: int, now_ns: int) -> None:
        """Tell the store that holds it that a request waits here, now and again and again."""
        if self._waiting.may_begin(held) and not self._refusal(held.address):
            self._beat(held)
            self._waiting.begin(held, session, now_ns)

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

    def _let_go(self, held: Held) -> None:
        self._waiting.end(held)
        self.counts["done"] += self._keep(held, 0)

    def _beat(self, held: Held) -> None:
        self.counts["heartbeats"] += self._keep(held, LEASE_MS)

    def _keep(self, held: Held, lease_ms: int) -> bool:
        keep = m.Keep(held.namespace, held.request, lease_ms)
        return self._links.tell(held.address, held.namespace, keep)

    def tick(self, now_ns: int) -> None:
        """Send the heartbeats that are due."""
        for held in self._waiting.due(now_ns):
            self._beat(held)

    def end_of(self, session: int) -> None:
        """An engine is gone: its requests compute nothing more, and wait for nothing."""
        self._waiting.end_of(session)
        self._leases.end_of(session)
