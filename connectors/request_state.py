"""The scheduler half's state of each request, and which of them gets the next lease."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from connectors.engine_interface import EngineRequest
from connectors.kv_transfer_params import NO_REMOTE, Remote
from connectors.store_client import GroupHits

NEVER = 1 << 62  # more tokens than a request can have


class BlockQuery(NamedTuple):
    """The blocks of a request that a lookup asks for.

    hashes: one for each block. The first `own` of them are the engine's; one more may be that of a
    partly filled block. blocks: how many of them may be loaded; they stand for the first `end`
    tokens. inside: tokens of the last of these, 0: all.
    """

    hashes: Sequence[bytes] = ()
    own: int = 0
    blocks: int = 0
    end: int = 0
    inside: int = 0


NO_QUERY = BlockQuery()


class Phase(enum.Enum):
    """Where a request is; scheduler.py draws how it moves."""

    NEW = "new"
    ASKED = "asked"
    LOADING = "loading"
    LOADED = "loaded"  # the engine allocates once more before the request runs
    RUNNING = "running"


class TrackedRequest(msgspec.Struct, eq=False):
    """One request of the engine, from arrival to end."""

    request: EngineRequest
    present: tuple[GroupHits, ...]  # what the store has of it, by group
    arrival: int = 0  # numbers requests in their order
    may_load: bool = True  # False: it computes its whole prompt
    repeatable: bool = True  # a step of it may be taken once more
    phase: Phase = Phase.NEW
    ask: int = 0  # number of its lookup; 0: it has none
    query: BlockQuery = NO_QUERY  # of the last lookup
    sources: dict[str, int] = {}  # tokens of its last load, by tier
    capped: bool = False  # it lost its lease, or got none, at the cap of leases
    waited: bool = False  # a busy engine waits for first lookups only
    deferred_ns: int | None = None
    failures: int = 0
    local: int = 0  # tokens that the engine has itself
    started_at: int | None = None  # computed tokens before a step that may be undone
    cursor: int = 0  # blocks before it are stored, or need not be
    in_step: bool = False  # its load, if it has one, ends in the step that admits it
    loading_hash: bytes | None = None  # of the first block being loaded
    remote: Remote = NO_REMOTE  # where its prompt was computed, until it is loaded


class LeaseQueue:
    """The earliest request that was capped, as long as the engine tries to admit it.

    It gets the next lease when an engine's leases are at their cap. Lookups of later requests may
    be on their way already. They would be answered before the lookup that the earliest request
    repeats, and take the room that was made for it, again and again. So a later request that was
    capped does not ask until the earliest one has its lease.
    """

    def __init__(self) -> None:
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
