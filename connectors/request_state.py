"""The scheduler half's state of one request."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from connectors.engine_interface import EngineRequest
from connectors.kv_transfer_params import NO_REMOTE
from connectors.store_client import NO_HITS, GroupHits

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


class TrackedRequest:
    """One request of the engine, from arrival to end."""

    __slots__ = (
        "arrival", "ask", "capped", "cursor", "deferred_ns", "failures", "loading_hash",
        "local", "may_load", "phase", "present", "query", "remote", "request", "sources",
        "started_at", "waited",
    )  # fmt: skip

    def __init__(
        self, request: EngineRequest, groups: int, arrival: int = 0, *, may_load: bool = True
    ) -> None:
        self.request = request
        self.arrival = arrival  # numbers requests in their order
        self.may_load = may_load  # False: it computes its whole prompt
        self.phase = Phase.NEW
        self.ask = 0  # number of its lookup; 0: it has none
        self.query = NO_QUERY  # of the last lookup
        self.sources: dict[str, int] = {}  # tokens of its last load, by tier
        self.capped = False  # it lost its lease, or got none, at the cap of leases
        self.waited = False  # a busy engine waits for first lookups only
        self.deferred_ns: int | None = None
        self.failures = 0
        self.local = 0  # tokens that the engine has itself
        self.started_at: int | None = None  # computed tokens before a step that may be undone
        self.present: tuple[GroupHits, ...] = (NO_HITS,) * groups
        self.cursor = 0  # blocks before it are stored, or need not be
        self.loading_hash: bytes | None = None  # of the first block being loaded
        self.remote = NO_REMOTE  # where its prompt was computed, until it is loaded
