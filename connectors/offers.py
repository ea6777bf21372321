"""The storing side of the scheduler half: which blocks are offered, and the fence.

An engine block that is the source of an unfinished copy may get a new owner at any time: its
request is preempted, ends, or its window moves on. Copies are not waited for then. Instead every
step names the copies whose sources it is about to overwrite, and the workers end those first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

from connectors.client import StoreClient
from connectors.jobs import EngineSpec, StoreJob, StoreSpec
from connectors.requests import BlockTable, Geometry, Tracked
from kvstore.types import make_key

MEDIUM = "cpu"


class Offers:
    """Plans stores of complete blocks, and knows which engine blocks are still being read."""

    def __init__(
        self, geometry: Geometry, client: StoreClient, world: int, declined: Callable[[], None]
    ) -> None:
        """world: ranks that report each job. declined(): called when credits ran out."""
        self.scope = b""
        self.blocks = 0  # offered so far
        self._geometry = geometry
        self._client = client
        self._world = world
        self._declined = declined
        self._groups = len(geometry.rules)
        self._sources: dict[int, set[int]] = {}
        self._jobs: dict[int, tuple[int, ...]] = {}
        self._ranks_over: Counter[int] = Counter()
        self._next_job = 1

    def offer(
        self, tracked: Tracked, computed: int, table: Callable[[str], BlockTable | None]
    ) -> list[StoreJob]:
        """Store the blocks that are complete now and not stored yet, as far as credits go."""
        if not self._client.session:
            return []
        hashed = len(tracked.request.block_hashes) * self._geometry.hash_tokens
        end = min(computed, hashed) // self._geometry.block_tokens
        if min(tracked.cursor) >= end:
            return []
        blocks = table(tracked.request.request_id)
        if blocks is None:
            return []
        taken: list[list[tuple[int, int, bytes]]] = [[] for _ in range(self._groups)]
        for index in range(min(tracked.cursor), end):
            block_hash = self._geometry.block_hash(tracked.request, index)
            for group in range(self._groups):
                if tracked.cursor[group] != index:
                    continue
                key = make_key(block_hash, group, self.scope)
                if self._wanted(tracked, group, index, key, blocks[group]):
                    if not self._client.credits:
                        self._declined()
                        return self._store_jobs(tracked, taken, blocks)
                    taken[group].append((index, self._client.credits.popleft(), key))
                tracked.cursor[group] = index + 1
        return self._store_jobs(tracked, taken, blocks)

    def _wanted(
        self, tracked: Tracked, group: int, index: int, key: bytes, table: Sequence[int]
    ) -> bool:
        """Tell whether a block should be stored: whole in the engine, and not ready already."""
        per = self._geometry.blocks_per_chunk[group]
        ids = table[index * per : (index + 1) * per]
        if len(ids) < per or not all(ids):
            return False
        return index not in tracked.present[group] and not self._client.known_ready(key)

    def _store_jobs(
        self,
        tracked: Tracked,
        taken: Sequence[Sequence[tuple[int, int, bytes]]],
        table: BlockTable,
    ) -> list[StoreJob]:
        """Make jobs of leading runs: one run of neighbouring blocks per group and job."""
        runs = [_runs(blocks) for blocks in taken]
        return [self._store_job(tracked, row, table) for row in zip_longest(*runs, fillvalue=[])]

    def _store_job(
        self,
        tracked: Tracked,
        row: Sequence[Sequence[tuple[int, int, bytes]]],
        table: BlockTable,
    ) -> StoreJob:
        ids: list[int] = []
        sizes, firsts, slots, keys, parents = [], [], [], [], []
        for group, run in enumerate(row):
            per = self._geometry.blocks_per_chunk[group]
            first = run[0][0] if run else 0
            listed = table[group][first * per : (first + len(run)) * per]
            ids.extend(listed)
            sizes.append(len(listed))
            firsts.append(first * per)
            for index, slot, key in run:
                slots.append(slot)
                keys.append(key)
                rooted = index == 0 or self._geometry.rules[group].trailing is not None
                above = b"" if rooted else self._geometry.block_hash(tracked.request, index - 1)
                parents.append(b"" if rooted else make_key(above, group, self.scope))
        number = self._next_job
        self._next_job += 1
        self._jobs[number] = tuple(ids)
        for block in ids:
            self._sources.setdefault(block, set()).add(number)
        self.blocks += len(slots)
        return StoreJob(
            number,
            self._client.session,
            EngineSpec(tuple(ids), tuple(sizes), tuple(firsts)),
            StoreSpec(MEDIUM, tuple(slots)),
            tuple(keys),
            tuple(parents),
        )

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
            for block in self._jobs.pop(number, ()):
                jobs = self._sources.get(block)
                if jobs is not None:
                    jobs.discard(number)
                    if not jobs:
                        del self._sources[block]


def _runs(blocks: Sequence[tuple[int, int, bytes]]) -> list[list[tuple[int, int, bytes]]]:
    runs: list[list[tuple[int, int, bytes]]] = []
    for block in blocks:
        if runs and runs[-1][-1][0] + 1 == block[0]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
