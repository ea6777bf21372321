"""Requests, the work of one step, and what a step gives to the engine's user.

WAITING --blocks--> RUNNING --last token--> DONE
 |  ^  ^               |                     ^
 |  |  +--preempted----+                     |
 |  +--reported---+                          |
 +--blocks--> LOADING --aborted--------------+ (its blocks are kept until it is reported)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from connectors.events import BlockEvent
from tests.reference.shape import Shape
from tests.reference.text import Text


class State(enum.Enum):
    """Where a request is; see the module's picture."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


class Hit(msgspec.Struct):
    """What was found for a request when it was last looked up, in tokens."""

    asked: int = 0
    local: int = 0
    external: int = 0


class Request:
    """One request, as the scheduler knows it; `text` has what the device knows."""

    def __init__(
        self, request_id: str, prompt: Sequence[int], new: int, shape: Shape, priority: int = 0
    ) -> None:
        """new: tokens to generate. priority: the smallest goes first."""
        self.request_id = request_id
        self.priority = priority
        self.arrival = 0  # given by the engine
        self.num_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.tokens_max = len(prompt) + new
        self.text = Text(prompt, shape.hash_tokens)
        self.block_hashes: Sequence[bytes] = self.text.hashes
        self.state = State.WAITING
        self.table: list[list[int]] = [[] for _ in shape.groups]
        self.published = [0] * len(shape.groups)  # leading blocks offered to the prefix cache
        self.placeholders = 0  # tokens scheduled to be sampled, and not known yet
        self.drafts = 0  # speculated tokens that the next step may check
        self.in_flight: list[Work] = []
        self.preemptions = 0
        self.hit = Hit()
        self._hash_tokens = shape.hash_tokens

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Its tokens; behind those that the scheduler knows there may be more."""
        return self.text.tokens

    def leave_out_last(self) -> None:
        """Compute all but the prompt's last token, and sample one: another engine goes on there.

        To be called before it is added to an engine.
        """
        if self.num_tokens > 1:
            self.num_tokens -= 1
            self.tokens_max = self.num_tokens + 1
            self.text.cut(self.num_tokens)

    @property
    def order(self) -> tuple[int, int]:
        """The largest is preempted first where priorities count."""
        return self.priority, self.arrival

    @property
    def holds_blocks(self) -> bool:
        return any(self.table)

    @property
    def settled_tokens(self) -> int:
        """Computed tokens that no rejected draft can take back."""
        settled = self.num_computed_tokens
        for work in self.in_flight:
            if not work.stale:
                settled -= work.end - work.first
        return max(0, settled)

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens of steps whose output is not there yet, those from before a preemption too."""
        return sum(work.end - work.first for work in self.in_flight)

    @property
    def awaits_output(self) -> bool:
        """Tell whether a step from before its preemption will still give it tokens."""
        return any(work.stale and not work.dropped for work in self.in_flight)

    def know(self, count: int) -> None:
        """Learn of sampled tokens: there are `count` now."""
        self.num_tokens = count
        self.text.know(count)

    def hash_at(self, tokens: int) -> bytes:
        """Return the hash that names the block ending at this many tokens."""
        return self.block_hashes[tokens // self._hash_tokens - 1]

    def rewind(self, *, drop: bool) -> None:
        """Start over; output of steps under way is dropped, or else still taken."""
        self.num_computed_tokens = self.placeholders = self.drafts = 0
        self.published = [0] * len(self.table)
        self.disown(drop=drop)

    def disown(self, *, drop: bool) -> None:
        """Let steps under way no longer change the counters."""
        for work in self.in_flight:
            work.stale = True
            work.dropped = work.dropped or drop
        if drop:
            self.text.cut(self.num_tokens)


class Work(msgspec.Struct, eq=False):
    """Tokens first..end-1 of a request are computed, into the blocks of `table`.

    The last `drafts` of them are speculated. before: the request's steps under way when this one
    was scheduled; drafts that they reject move it back. The last three are set by the device.
    """

    request: Request
    first: int
    end: int
    drafts: int
    samples: bool
    table: list[list[int]]
    before: tuple[Work, ...]
    loaded: int = 0  # tokens that a load brought, in the first work after it
    stale: bool = False  # preempted meanwhile: counters were reset
    dropped: bool = False  # its tokens are not wanted
    rejected: int = 0
    tokens: list[int] = []
    stopped: bool = False


class HitStats(msgspec.Struct):
    """Tokens of requests that started to run, by where their KV came from.

    Requests that were preempted before are counted apart (`again`).
    """

    asked: int = 0
    local: int = 0
    external: int = 0
    sources: dict[str, int] = {}
    asked_again: int = 0
    hit_again: int = 0


class Output(msgspec.Struct):
    """What came out of one step.

    tokens: by request, those it got. finished: requests that ended in this step. connector: the
    counts of its scheduler side and of all ranks, added up. events: (stored or removed, block
    hash, group) of the engine's blocks, then the connector's.
    """

    tokens: dict[str, list[int]]
    finished: list[str]
    hits: HitStats
    connector: dict[str, int]
    events: list[tuple[bool, bytes, int] | BlockEvent]
