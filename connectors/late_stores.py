"""Storing later: blocks go to the store when the engine is about to give them other content.

What the engine's own cache keeps need not be in the store's memory as well. So the complete blocks
of a request are only noted. Once one of them is among the next that the engine gives out, all that
its request noted is stored, from the first block on: a block is of use only with all before it. The
fence keeps the bytes until they are copied.

    complete --among the next free blocks--> due --copied--> stored
       |                                      |
       +--------given other content first-----+--> lost, a miss

The step n + 1 gives out no more blocks than step_blocks, loads aside, so step n looks as far ahead.
For a load the engine takes blocks at once: they are looked at before it does.

Only engines with one full group: others give out blocks in no order that a prompt's blocks share.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from connectors.engine_interface import BlockTable, EngineCache, Geometry
from connectors.events import Extra
from connectors.request_state import NEVER, TrackedRequest
from connectors.step_meta import StoreJob
from connectors.store_client import NO_HITS
from connectors.store_planner import StorePlanner
from kvstore.wire.framing import U32

DUE_MAX = 1000  # paths that wait for slots; the engine has reused the blocks of the oldest by then
LOOK_MAX = 1024  # engine blocks of a path that are looked at at once
VISITS_MAX = 2 * LOOK_MAX  # in a step: 10 ms at most. The rest waits, and is lost if it is reused


class PastRequest(msgspec.Struct):
    """What stores need of a request that may have ended."""

    request_id: str
    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    extra: Extra | None = None
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0


class _Path(msgspec.Struct, eq=False):
    """The complete blocks of a request, by the engine blocks that they are in."""

    past: PastRequest
    tracked: TrackedRequest  # what stores know of it
    blocks: list[int] = []
    due: bool = False


class LateStores:
    """Knows which blocks of the engine are worth storing, and when it is time to."""

    def __init__(
        self, cache: EngineCache, geometry: Geometry, stores: StorePlanner, step_blocks: int
    ) -> None:
        """step_blocks: how many blocks the engine gives out in a step, those of loads aside."""
        self._cache = cache
        self._stores = stores
        self._step_blocks = step_blocks
        self._block_tokens = geometry.block_tokens
        self._engine_tokens = geometry.engine_block_tokens[0]
        self._hashes = self._engine_tokens // geometry.hash_tokens  # in an engine block
        self._paths: dict[str, _Path] = {}  # of requests that run, or will again
        # By engine block: the path that noted it last, unless it got other content since.
        self._notes: list[_Path | None] = [None] * cache.block_count
        self._due: deque[_Path] = deque(maxlen=DUE_MAX)
        self._leaving: dict[int, bytes] = {}  # free in this step until now: block and hash
        self._looked_at = 0  # of the next free blocks
        self._copies: dict[int, frozenset[bytes]] = {}  # by job, the keys

    def store_complete(
        self, tracked: TrackedRequest, computed: int, table: Callable[[str], BlockTable]
    ) -> int:
        """Note the blocks that are complete now, where StorePlanner would store them.

        Returns how many computed tokens it takes before another block can be complete.
        """
        if tracked.cursor == NEVER:
            return NEVER
        name, end = tracked.request.request_id, self._stores.count_complete(tracked, computed)
        path = self._paths.get(name)
        noted = 0 if path is None else len(path.blocks)
        stop = end * (self._block_tokens // self._engine_tokens)
        if noted < stop:
            if path is None:
                path = self._paths[name] = self._new_path(tracked)
            for block in table(name)[0][noted:stop]:
                before = self._notes[block]
                if before is not None and before.tracked.apart != path.tracked.apart:
                    self._is_due(before)  # another tenant's: it is about to be forgotten
                self._notes[block] = path
                path.blocks.append(block)
            path.due = False
        return (end + 1) * self._block_tokens

    def begin(self, request_id: str, tokens: int) -> None:
        """The engine has allocated a request's blocks afresh.

        tokens: what its own cache had, whose blocks may have been free, and what it loads.
        """
        self._paths.pop(request_id, None)
        self._looked_at -= tokens // self._engine_tokens

    def end(self, request_id: str) -> Sequence[StoreJob]:
        """A request ends, and its blocks become free. Return its stores, if that is soon."""
        path = self._paths.pop(request_id, None)
        if path is None:
            return ()
        tokens = path.past.all_token_ids
        if tokens:  # a tenth of the memory, until its blocks are reused
            path.past.all_token_ids = array(U32, tokens)
        if self._looked_at >= self._step_blocks:
            return ()
        self._is_due(path)
        return self._store_due()

    def make_way(self, tokens: int) -> None:
        """The engine takes blocks for a load of so many tokens, in this step."""
        load = -(-tokens // self._engine_tokens)
        if load > self._cache.free_count:  # it has to wait, and asks in every step
            return
        count = load + self._step_blocks
        if self._looked_at < count:
            self._look(count)

    def step(self, written: Sequence[int]) -> Sequence[StoreJob]:
        """Return the stores of a step that gives these engine blocks other content."""
        for block in written:
            self._notes[block] = None
        self._looked_at -= len(written)
        if written and self._looked_at < self._step_blocks:
            self._look(2 * self._step_blocks)
        jobs = self._store_due()
        self._leaving.clear()
        return jobs

    def clear(self) -> None:
        """Forget all blocks: they are of before a reset."""
        self._notes = [None] * len(self._notes)
        self._paths.clear()
        self._due.clear()
        self._leaving.clear()

    def is_copying(self, key: bytes) -> bool:
        """Return True while a block is on its way to the store."""
        return any(key in keys and self._stores.is_open(job) for job, keys in self._copies.items())

    def _look(self, count: int) -> None:
        """What the next free blocks hold is due."""
        seen = 0
        for block, block_hash in self._cache.next_free(count):
            seen += 1
            path = self._notes[block]
            if path is not None and block_hash is not None:
                self._leaving[block] = block_hash
                self._is_due(path)
        self._looked_at = seen

    def _is_due(self, path: _Path) -> None:
        if not path.due:
            path.due = True
            self._due.append(path)

    def _store_due(self) -> Sequence[StoreJob]:
        """Store what is due, as far as there are slots."""
        if not self._due:
            return ()
        visits = VISITS_MAX
        while self._due and visits > 0 and self._stores.can_store():
            whole, visited = self._store_part(self._due[0])
            visits -= max(1, visited)
            if whole:
                self._due.popleft()
        jobs, stores = self._stores.take_jobs(), self._stores
        self._copies = {job: keys for job, keys in self._copies.items() if stores.is_open(job)}
        self._copies.update((job.job_id, frozenset(job.keys)) for job in jobs)
        return jobs

    def _store_part(self, path: _Path) -> tuple[bool, int]:
        """Store more of a path, as far as there are slots.

        Returns whether that was all, and how many engine blocks were looked at.
        """
        tracked, per = path.tracked, self._block_tokens // self._engine_tokens
        first = tracked.cursor
        held = self._held(path, first * per)
        blocks = [0] * (first * per) + held
        tokens = len(blocks) * self._engine_tokens
        self._stores.store_complete(tracked, tokens, lambda _: (blocks,))
        if tracked.cursor < self._stores.count_complete(tracked, tokens):
            return False, len(held)
        return len(blocks) == len(path.blocks) or tracked.cursor == first, len(held)

    def _held(self, path: _Path, first: int) -> list[int]:
        """List some engine blocks of a path; 0 for those that hold something else by now.

        The notes say that nothing was written to a block, and the engine's own cache must find it,
        too: it forgets what was lost without being written, as when the engine sleeps.
        """
        blocks = path.blocks[first : first + LOOK_MAX]
        every, end = self._hashes, (first + len(blocks)) * self._hashes
        hashes = path.tracked.request.block_hashes[(first + 1) * every - 1 : end : every]
        leaving, notes, held = self._leaving, self._notes, self._cache.held
        return [
            block if name == (leaving.get(block) or (notes[block] and held(block))) else 0
            for block, name in zip(blocks, hashes, strict=False)
        ]

    def _new_path(self, tracked: TrackedRequest) -> _Path:
        """Keep what stores need of a request, whatever becomes of it.

        What the store had of it when it came may have left since.
        """
        request = tracked.request
        tokens = request.all_token_ids if self._stores.describes else ()
        extra = self._stores.extra_of(request)
        past = PastRequest(request.request_id, request.block_hashes, tokens, extra)
        known = TrackedRequest(past, (NO_HITS,), tag=tracked.tag, apart=tracked.apart)
        return _Path(past, known)
