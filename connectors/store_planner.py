"""The storing side of the scheduler half: which blocks are offered, and the fence.

An engine block that is the source of an unfinished copy may get a new owner at any time: its
request is preempted, ends, or its window moves on. Copies are not waited for then. Instead every
step names the copies whose sources it is about to overwrite, and the workers end those first.

The blocks of a step are gathered into a few jobs, whichever request they are of: a step in which
256 requests decode completes 16 blocks of 16 requests, and a job costs as much as ten blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from connectors.engine_interface import BlockTable, Geometry
from connectors.events import Events
from connectors.partial_block import Tail
from connectors.request_state import Tracked
from connectors.step_meta import EngineSpec, StoreJob, StoreSpec
from connectors.store_client import StoreClient
from kvstore.core.types import make_key

MEDIUM = "cpu"
JOB_BLOCKS_MAX = 64  # a fence waits for whole jobs
RUN_BLOCKS_MIN = 4  # fewer are gathered one by one


class _Gathered(msgspec.Struct):
    """Blocks of one group for the next job, and how the group makes keys."""

    group: int
    engine_blocks: int  # of each block
    suffix: bytes  # block hash + suffix is the key
    rooted: bool  # blocks have no parent
    ids: list[int] = []
    slots: list[int] = []
    keys: list[bytes] = []
    parents: list[bytes] = []


class Offers:
    """Plans stores of complete blocks, and knows which engine blocks are still being read."""

    def __init__(
        self,
        geometry: Geometry,
        client: StoreClient,
        world: int,
        count: Callable[[str], None],
        events: Events,
    ) -> None:
        """world: ranks that report each job. count(event): called when credits ran out."""
        self._events = events
        self.blocks = 0  # offered so far
        self._geometry = geometry
        self._client = client
        self._world = world
        self._count = count
        self._hashes_per_block = geometry.block_tokens // geometry.hash_tokens
        self._sources: dict[int, frozenset[int]] = {}  # unfinished job -> engine blocks it reads
        self._ranks_over: Counter[int] = Counter()
        self._next_job = 1
        self._jobs: list[StoreJob] = []
        self._gathered: list[_Gathered] = []
        self._slots = 0  # gathered for the next job
        self.use_scope(b"")

    def use_scope(self, scope: bytes) -> None:
        """Make keys in this scope from now on. Nothing may be gathered meanwhile."""
        self._gathered = [
            _Gathered(group, per, make_key(b"", group, scope), rule.trailing is not None)
            for group, (per, rule) in enumerate(
                zip(self._geometry.blocks_per_chunk, self._geometry.rules, strict=True)
            )
        ]

    def may_offer(self) -> bool:
        """Tell whether there are credits for a block of each group."""
        return bool(self._client.session) and len(self._client.credits) >= len(self._gathered)

    def offer(
        self, tracked: Tracked, computed: int, table: Callable[[str], BlockTable | None]
    ) -> int:
        """Store the blocks that are complete now and not stored yet, as far as credits go.

        Returns how many computed tokens it takes before another block can be complete.
        """
        client, request = self._client, tracked.request
        if not client.session:
            return 0
        size = self._geometry.block_tokens
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        end = min(computed, hashed) // size
        if tracked.cursor < end:
            blocks = table(request.request_id) if client.credits else ()
            if blocks is None:
                return 0
            self._take(tracked, end, blocks)
            if tracked.cursor < end:
                self._count("store_declined")
        return (tracked.cursor + 1) * size

    def _take(self, tracked: Tracked, end: int, table: BlockTable) -> None:
        """Gather the blocks up to end-1, of every group that has them, as far as credits go."""
        first, free, groups = tracked.cursor, self._client.credits, len(self._gathered)
        while first < end and len(free) >= groups:
            stop = min(end, first + JOB_BLOCKS_MAX, first + len(free) // groups)
            if stop - first < RUN_BLOCKS_MIN or not self._take_run(tracked, first, stop, table):
                self._take_each(tracked, first, stop, table)
            first = stop
            if self._slots >= JOB_BLOCKS_MAX * groups:
                self._close_job()
        tracked.cursor = first

    def _take_run(self, tracked: Tracked, first: int, end: int, table: BlockTable) -> bool:
        """Gather a run that each group has as a whole, new or not at all; False if one does not."""
        every = self._hashes_per_block
        hashes = tracked.request.block_hashes[(first + 1) * every - 1 : end * every : every]
        above = tracked.request.block_hashes[first * every - 1] if first else b""
        runs = []
        for of in self._gathered:
            ids = table[of.group][first * of.engine_blocks : end * of.engine_blocks]
            if not any(ids) or tracked.present[of.group].all_of(first, end):
                continue
            suffix = of.suffix
            keys = [block_hash + suffix for block_hash in hashes]
            new = self._client.none_known(keys)
            if not new and self._client.all_known(keys):  # of what the engine's own cache had
                continue
            if (
                not new
                or len(ids) != (end - first) * of.engine_blocks
                or 0 in ids
                or tracked.present[of.group].any_of(first, end)
            ):
                return False
            runs.append((of, ids, keys))
        for of, ids, keys in runs:
            self._gather_run(of, ids, keys, above)
        if runs:
            self._events.offered(tracked.request, first, end)
        return True

    def _gather_run(
        self, of: _Gathered, ids: Sequence[int], keys: list[bytes], above: bytes
    ) -> None:
        if of.rooted:
            of.parents.extend([b""] * len(keys))
        else:
            of.parents.append(above + of.suffix if above else b"")
            of.parents.extend(keys[:-1])
        of.ids.extend(ids)
        of.keys.extend(keys)
        of.slots.extend([self._client.credits.popleft() for _ in keys])
        self._slots += len(keys)

    def _take_each(self, tracked: Tracked, first: int, end: int, table: BlockTable) -> None:
        """Gather block by block, all groups of one before the next."""
        hashes, every = tracked.request.block_hashes, self._hashes_per_block
        free, known_ready = self._client.credits, self._client.known_ready
        above = hashes[first * every - 1] if first else b""
        for index in range(first, end):
            block_hash, slots = hashes[(index + 1) * every - 1], self._slots
            for of in self._gathered:
                per = of.engine_blocks
                ids = table[of.group][index * per : (index + 1) * per]
                key = block_hash + of.suffix
                if (
                    len(ids) == per
                    and 0 not in ids
                    and index not in tracked.present[of.group]
                    and not known_ready(key)
                ):
                    of.ids += ids
                    of.slots.append(free.popleft())
                    of.keys.append(key)
                    of.parents.append(above + of.suffix if above and not of.rooted else b"")
                    self._slots += 1
            if self._slots > slots:
                self._events.offered(tracked.request, index, index + 1)
            above = block_hash

    def has_tail(self, tail: Tail, table: BlockTable) -> bool:
        """Tell whether all groups have the engine blocks of a partly filled last block."""
        return all(self._sources_of(tail, table))

    def _sources_of(self, tail: Tail, table: BlockTable) -> list[Sequence[int]]:
        """List each group's engine blocks that have tokens of a tail; none if it lacks one."""
        sources: list[Sequence[int]] = []
        for of, tokens in zip(self._gathered, self._geometry.engine_block_tokens, strict=True):
            first, end = tail.block * of.engine_blocks, -(-tail.end // tokens)
            ids = table[of.group][first:end]
            sources.append(() if len(ids) < end - first or 0 in ids else ids)
        return sources

    def offer_tail(self, tracked: Tracked, tail: Tail, table: BlockTable) -> bool:
        """Store a request's partly filled last block, which all groups have.

        Only engine blocks that have tokens are copied. False: not as long as it lacks a block
        before it, or credits.
        """
        client, hashes = self._client, tracked.request.block_hashes
        if not client.session or tracked.cursor != tail.block:
            return False
        if not self.may_offer():
            self._count("store_declined")
            return False
        above = hashes[tail.block * self._hashes_per_block - 1] if tail.block else b""
        for of, ids in zip(self._gathered, self._sources_of(tail, table), strict=True):
            of.ids += ids
            of.slots.append(client.credits.popleft())
            of.keys.append(tail.hash + of.suffix)
            of.parents.append(above + of.suffix if above and not of.rooted else b"")
            self._slots += 1
        self._close_job(tails=1)
        return True

    def _close_job(self, *, tails: int = 0) -> None:
        """Make one job of what was gathered: their order is all it takes, since blocks are whole.

        But for a last one of a group, of which the leading engine blocks are there (tails: 1).
        Peers may read the others in the engine, too.
        """
        number = self._next_job
        self._next_job += 1
        ids: list[int] = []
        slots: list[int] = []
        keys: list[bytes] = []
        parents: list[bytes] = []
        for of in self._gathered:
            ids += of.ids
            slots += of.slots
            keys += of.keys
            parents += of.parents
            whole = len(of.slots) - tails
            shown = of.slots[:whole], of.keys[:whole], of.ids[: whole * of.engine_blocks]
            self._client.show(*shown)
        self._sources[number] = frozenset(ids)
        sizes = tuple(len(of.ids) for of in self._gathered)
        self._jobs.append(
            StoreJob(
                number,
                self._client.session,
                EngineSpec(tuple(ids), sizes, (0,) * len(sizes)),
                StoreSpec(MEDIUM, tuple(slots)),
                tuple(keys),
                tuple(parents),
            )
        )
        self.blocks += len(slots)
        for of in self._gathered:
            of.ids, of.slots, of.keys, of.parents = [], [], [], []
        self._slots = 0

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """Return the jobs of what was offered since the last call."""
        if self._slots:
            self._close_job()
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def take_count(self) -> int:
        """Return the blocks offered since the last call."""
        count, self.blocks = self.blocks, 0
        return count

    def fence(self, written: Iterable[int]) -> set[int]:
        """Name the unfinished jobs that read any of these engine blocks."""
        if not self._sources:
            return set()
        blocks = set(written)
        return {job for job, read in self._sources.items() if not read.isdisjoint(blocks)}

    def over(self, ranks_over: Mapping[int, int]) -> None:
        """Take the workers' reports: jobs that ended, and on how many ranks."""
        for number, ranks in ranks_over.items():
            self._ranks_over[number] += ranks
            if self._ranks_over[number] < self._world:
                continue
            del self._ranks_over[number]
            self._sources.pop(number, None)
