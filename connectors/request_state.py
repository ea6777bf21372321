"""The scheduler half's state of each request."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from connectors.engine_interface import EngineRequest
from connectors.kv_transfer_params import NO_REMOTE, Remote
from connectors.request_policy import NO_LIMITS, RequestPolicy
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
    deferred_ns: int | None = None  # when the engine was first told to ask later
    deferred_step: int = 0  # the last step in which it was told so
    overdue_ns: int = 0  # how long its answer has been, as far as the engine has looked
    overdue_at_ns: int = 0  # when it has looked last; 0: it was not overdue
    gave_up: str = ""  # why it waits for no answer any more, if that is so
    failures: int = 0
    refused: int = 0  # empty steps in a row in which the engine did not take its load
    gives_way: bool = False  # its load has failed since the engine asked: others come first, once
    local: int = 0  # tokens that the engine has itself
    started_at: int | None = None  # computed tokens before a step that may be undone
    cursor: int = 0  # blocks before it are stored, or need not be
    doubted: range = range(0)  # blocks of a load that failed: they are stored, known or not
    in_step: bool = False  # its load, if it has one, ends in the step that admits it
    loading_hash: bytes | None = None  # of the first block being loaded
    remote: Remote = NO_REMOTE  # where its prompt was computed, until it is loaded
    policy: RequestPolicy = NO_LIMITS
    tag: bytes = b""  # of its tenant
    apart: tuple[bytes, bool] = (b"", False)  # tag, kept off the disk: a job has blocks of one such
    store_tokens: int = NEVER  # of its first ones: no others are stored
    late: bool = False  # its blocks are stored when the engine is about to reuse theirs
    stored_later: int = -1  # the block that it waits for since its answer lacks it; see lookups
    asked_again: int = -1  # the last such block for which it has asked again
