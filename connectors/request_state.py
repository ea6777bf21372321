"""The scheduler half's state of one request."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from connectors.engine_interface import EngineRequest
from connectors.kv_transfer_params import NO_REMOTE
from connectors.store_client import NOWHERE, Grant, Places

NEVER = 1 << 62  # more tokens than a request can have


class Question(NamedTuple):
    """What is asked about a request's blocks.

    hashes: one for each block. The first `own` of them are the engine's; one more may be a tail's.
    blocks: of these, how many may be loaded; they stand for the first `end` tokens. inside: tokens
    of the last of these, 0: all.
    """

    hashes: Sequence[bytes] = ()
    own: int = 0
    blocks: int = 0
    end: int = 0
    inside: int = 0


NO_QUESTION = Question()


class Phase(enum.Enum):
    """Where a request is; see the module's picture."""

    NEW = "new"
    ASKED = "asked"
    LOADING = "loading"
    LOADED = "loaded"  # the engine allocates once more before the request runs
    RUNNING = "running"


class Tracked:
    """One request."""

    __slots__ = (
        "ask", "begun", "capped", "cursor", "deferred_ns", "failures", "grant", "key_hash", "local",
        "number", "phase", "present", "question", "reads", "remote", "request", "waited",
    )  # fmt: skip

    def __init__(
        self, request: EngineRequest, groups: int, number: int = 0, *, reads: bool = True
    ) -> None:
        self.request = request
        self.number = number  # the higher, the later it came
        self.reads = reads  # it may be given what others have computed
        self.phase = Phase.NEW
        self.ask: int | None = None
        self.capped = False  # it found something, and had to give its lease back, or got none
        self.waited = False  # a busy engine waits for first asks only
        self.deferred_ns: int | None = None
        self.failures = 0
        self.grant: Grant | None = None
        self.local = 0
        self.begun: int | None = None  # what it had computed before a step that can be taken back
        self.present: tuple[Places, ...] = (NOWHERE,) * groups
        self.cursor = 0  # blocks before it were offered, or need not be
        self.key_hash: bytes | None = None  # first block being loaded, see O7
        self.remote = NO_REMOTE  # where its prompt was computed, until it was loaded
        self.question = NO_QUESTION  # the last one
