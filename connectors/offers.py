"""The storing side of the scheduler half: which blocks are offered, and the fence.

An engine block that is the source of an unfinished copy may get a new owner at any time: its
request is preempted, ends, or its window moves on. Copies are not waited for then. Instead every
step names the copies whose sources it is about to overwrite, and the workers end those first.

The blocks of a step are gathered into a few jobs, whichever request they are of: a step in which
256 requests decode completes 16 blocks of 16 requests, and a job costs as much as ten blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from connectors.client import StoreClient
from connectors.jobs import EngineSpec, StoreJob, StoreSpec
from connectors.requests import BlockTable, Geometry, Tracked
from kvstore.types import make_key

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
        self, geometry: Geometry, client: StoreClient, world: int, declined: Callable[[], None]
    ) -> None:
        """world: ranks that report each job. declined(): called when credits ran out."""
        self.blocks = 0  # offered so far
        self._geometry = geometry
        self._client = client
        self._world = world
        self._declined = declined
        self._hashes_per_block = geometry.block_tokens // geometry.hash_tokens
        self._sources: dict[int, tuple[int, ...]] = {}  # engine block -> jobs that read it
        self._sources_of: dict[int, tuple[int, ...]] = {}
        self._ranks_over: Counter[int] = Counter()
        self._next_job = 1
        self._jobs: list[StoreJob] = []
        self._gathered: list[_Gathered] = []
        self.use_scope(b"")

    def use_scope(self, scope: bytes) -> None:
        """Make keys in this scope from now on. Nothing may be gathered meanwhile."""
        self._gathered = [
            _Gathered(group, per, make_key(b"", group, scope), rule.trailing is not None)
            for group, (per, rule) in enumerate(
                zip(self._geometry.blocks_per_chunk, self._geometry.rules, strict=True)
            )
        ]

    def offer(
        self, tracked: Tracked, computed: int, table: Callable[[str], BlockTable | None]
    ) -> None:
        """Store the blocks that are complete now and not stored yet, as far as credits go.

        Called for a request whose tracked.due was reached, and sets the next one.
        """
        client, request = self._client, tracked.request
        if not client.session:
            return
        size = self._geometry.block_tokens
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        first, end = min(tracked.cursor), min(computed, hashed) // size
        if first < end:
            blocks = table(request.request_id) if client.credits else None
            if not client.credits:
                self._declined()
            if blocks is None:
                return
            if not self._take(tracked, first, end, blocks):
                self._declined()
        tracked.due = (min(tracked.cursor) + 1) * size

    def _take(self, tracked: Tracked, first: int, end: int, table: BlockTable) -> bool:
        """Gather blocks first..end-1 of every group that has them; False when credits ran out."""
        for start in range(first, end, JOB_BLOCKS_MAX):
            stop = min(end, start + JOB_BLOCKS_MAX)
            if not self._take_run(tracked, start, stop, table) and not self._take_each(
                tracked, start, stop, table
            ):
                return False
            if len(self._gathered[0].slots) >= JOB_BLOCKS_MAX:
                self._close_job()
        return True

    def _take_run(self, tracked: Tracked, first: int, end: int, table: BlockTable) -> bool:
        """Gather a run that is new in every group, at once; False if it is not, nothing done."""
        count, every, free = end - first, self._hashes_per_block, self._client.credits
        if count < RUN_BLOCKS_MIN or count * len(self._gathered) > len(free):
            return False
        hashes = tracked.request.block_hashes[(first + 1) * every - 1 : end * every : every]
        runs = []
        for of in self._gathered:
            ids = table[of.group][first * of.engine_blocks : end * of.engine_blocks]
            keys = [block_hash + of.suffix for block_hash in hashes]
            if (
                tracked.cursor[of.group] != first
                or len(ids) != count * of.engine_blocks
                or 0 in ids
                or tracked.present[of.group].any_of(first, end)
                or not self._client.none_known(keys)
            ):
                return False
            runs.append((of, ids, keys))
        for of, ids, keys in runs:
            of.parents.extend([b""] * count if of.rooted else [self._above(tracked, first, of)])
            of.parents.extend(() if of.rooted else keys[:-1])
            of.ids.extend(ids)
            of.keys.extend(keys)
            of.slots.extend([free.popleft() for _ in range(count)])
            tracked.cursor[of.group] = end
        return True

    def _above(self, tracked: Tracked, index: int, of: _Gathered) -> bytes:
        """Name the block before block `index`; empty for the first."""
        if index == 0:
            return b""
        return tracked.request.block_hashes[index * self._hashes_per_block - 1] + of.suffix

    def _take_each(self, tracked: Tracked, first: int, end: int, table: BlockTable) -> bool:
        """Gather block by block, all groups of one before the next; False without credits."""
        cursor, free = tracked.cursor, self._client.credits
        for index in range(first, end):
            for of in self._gathered:
                if cursor[of.group] != index:
                    continue
                per = of.engine_blocks
                ids = table[of.group][index * per : (index + 1) * per]
                key = self._above(tracked, index + 1, of)
                if (
                    len(ids) == per
                    and 0 not in ids
                    and index not in tracked.present[of.group]
                    and not self._client.known_ready(key)
                ):
                    if not free:
                        return False
                    of.ids += ids
                    of.slots.append(free.popleft())
                    of.keys.append(key)
                    of.parents.append(b"" if of.rooted else self._above(tracked, index, of))
                cursor[of.group] = index + 1
        return True

    def _close_job(self) -> None:
        """Make one job of what was gathered. Blocks are whole, so their order is all it takes."""
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
        this = (number,)
        for block in ids:
            jobs = self._sources.get(block)
            self._sources[block] = this if jobs is None else jobs + this
        self._sources_of[number] = tuple(ids)
        sizes = tuple(len(of.ids) for of in self._gathered)
        self._jobs.append(
            StoreJob(
                number,
                self._client.session,
                EngineSpec(self._sources_of[number], sizes, (0,) * len(sizes)),
                StoreSpec(MEDIUM, tuple(slots)),
                tuple(keys),
                tuple(parents),
            )
        )
        self.blocks += len(slots)
        for of in self._gathered:
            of.ids, of.slots, of.keys, of.parents = [], [], [], []

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """Return the jobs of what was offered since the last call."""
        if any(of.slots for of in self._gathered):
            self._close_job()
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def take_count(self) -> int:
        """Return the blocks offered since the last call."""
        count, self.blocks = self.blocks, 0
        return count

    def fence(self, written: Iterable[int]) -> set[int]:
        """Name the unfinished jobs that read any of these engine blocks."""
        jobs: set[int] = set()
        if self._sources:
            for block in written:
                jobs.update(self._sources.get(block, ()))
        return jobs

    def over(self, ranks_over: Mapping[int, int]) -> None:
        """Take the workers' reports: jobs that ended, and on how many ranks."""
        for number, ranks in ranks_over.items():
            self._ranks_over[number] += ranks
            if self._ranks_over[number] < self._world:
                continue
            del self._ranks_over[number]
            for block in self._sources_of.pop(number, ()):
                others = tuple(job for job in self._sources.pop(block, ()) if job != number)
                if others:
                    self._sources[block] = others
