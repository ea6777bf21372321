"""Drain: before a store ends, it takes no more engines and writes down what only memory has."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator

import msgspec

from kvstore.core.types import LookupResult
from kvstore.metrics import OBJECT, Numbers
from kvstore.store.namespaces import Namespaces

log = logging.getLogger(__name__)

REFUSAL = "the store is draining: it takes no engine and no peer that is not there yet"
DRAINS = DRAIN, DRAIN_NOW, DRAIN_CANCEL, DRAIN_STATE = (  # of queries
    *("drain", "drain now", "drain cancel"),
    "drain state",  # changes nothing
)
_LOOK_MAX = 2048  # blocks in one turn


class Drained(msgspec.Struct, frozen=True):
    """How far a drain is.

    engines: still attached. queued, written, failed: blocks to lower tiers, the last two since the
    drain began. done: no engine is left, and no block that only memory has and a tier would take.
    """

    draining: bool
    engines: int
    queued: int
    written: int
    failed: int
    done: bool


class Drain:
    """Walks through memory, a part in each turn, and queues what lower tiers lack.

    It does so at once, and again when the last engine has gone: what engines store meanwhile goes
    down as ever, unless there is too much of it.
    """

    def __init__(self, namespaces: Namespaces, engines: Collection[str], numbers: Numbers) -> None:
        self.active = False
        self._namespaces, self._engines, self._numbers = namespaces, engines, numbers
        self._walk: Iterator[int] | None = None
        self._told = False  # the log
        self._alone = False  # the walk began after the last engine had gone
        self._before: Counter[str] = Counter()

    def start(self) -> None:
        """Begin, unless it has begun."""
        if not self.active:
            log.info(
                "draining: no new engine or peer is taken; %d are attached", len(self._engines)
            )
            self.active, self._alone, self._told = True, not self._engines, False
            self._before, self._walk = self._counts(), self.look()

    def cancel(self) -> None:
        """Take engines and peers again; what is queued is written nevertheless."""
        if self.active:
            log.info("the drain is cancelled: engines and peers are taken again")
            self.active, self._walk = False, None

    @property
    def looking(self) -> bool:
        """Tell whether a part of memory has not been looked at."""
        return self._walk is not None

    def tick(self) -> None:
        """Look at some blocks, while it is active."""
        if not self._engines and not self._alone:
            self._alone, self._walk = True, self.look()
        looked = 0
        while self._walk is not None and looked < _LOOK_MAX:
            count = next(self._walk, None)
            if count is None:
                self._walk = None
            looked += count or 0
        if self._alone and not self.looking and not self._told and (state := self.state()).done:
            self._told = True
            log.info("drained: %d blocks written, %d failed", state.written, state.failed)

    def look(self) -> Iterator[int]:
        """Queue what lower tiers lack, part by part.

        What a tier does not know of yet comes last: it holds up what is queued after it.
        """
        for state in (LookupResult.MISS, LookupResult.RETRY):
            for namespace in list(self._namespaces.values()):
                self._namespaces.wake(namespace)
                for part in namespace.manager.index.parts():
                    with namespace.around_tiers:
                        namespace.tiering.enqueue_lacking(part, state)
                    yield len(part)

    def look_anew(self) -> Iterator[int]:
        """Queue what lower tiers lack, instead of what is queued; for a store that ends."""
        for namespace in self._namespaces.values():
            namespace.tiering.unqueue()
        yield from self.look()

    def stored(self) -> int:
        """Count the blocks that were ever copied down."""
        return self._counts()["stored"]

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for namespace in self._namespaces.values():
            namespace.count()
        for (name, *labels), count in self._numbers.counts.items():
            if name == "kvstore_tier_blocks" and OBJECT not in labels:
                counts[labels[-1]] += count
        return counts

    def state(self) -> Drained:
        """Say how far it is."""
        since, queued = self._counts() - self._before, self._namespaces.queued_blocks
        return Drained(
            draining=self.active,
            engines=len(self._engines),
            queued=queued,
            written=since["stored"],
            failed=since["stored_failed"],
            done=self.active and self._alone and self._walk is None and not queued,
        )
