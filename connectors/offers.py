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

_Offered = tuple[int, int, bytes]
"""A block's index in its request, the slot it goes to, its key."""


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
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._hashes_per_block = geometry.block_tokens // geometry.hash_tokens
        self._rooted = [rule.trailing is not None for rule in geometry.rules]
        self._sources: dict[int, set[int]] = {}
        self._jobs: dict[int, tuple[int, ...]] = {}
        self._ranks_over: Counter[int] = Counter()
        self._next_job = 1
        self.use_scope(b"")

    def use_scope(self, scope: bytes) -> None:
        """Make keys in this scope from now on."""
        self._suffixes = [make_key(b"", group, scope) for group in range(len(self._rooted))]

    def offer(
        self, tracked: Tracked, computed: int, table: Callable[[str], BlockTable | None]
    ) -> list[StoreJob]:
        """Store the blocks that are complete now and not stored yet, as far as credits go.

        Called for a request whose tracked.due was reached, and sets the next one.
        """
        if not self._client.session:
            return []
        request, cursor = tracked.request, tracked.cursor
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        first, end = min(cursor), min(computed, hashed) // self._geometry.block_tokens
        if first < end:
            if not self._client.credits:
                self._declined()
                return []
            blocks = table(request.request_id)
            if blocks is None:
                return []
            taken = self._take(tracked, first, end, blocks)
            tracked.due = (min(cursor) + 1) * self._geometry.block_tokens
            return [self._store_job(tracked, row, blocks) for row in _rows(taken)]
        tracked.due = (first + 1) * self._geometry.block_tokens
        return []

    def _take(
        self, tracked: Tracked, first: int, end: int, table: BlockTable
    ) -> list[list[_Offered]]:
        """Find index, slot and key of what is to be stored, by group; advances the cursors."""
        slots, cursor, present = self._client.credits, tracked.cursor, tracked.present
        hashes, every = tracked.request.block_hashes, self._hashes_per_block
        groups = [
            (group, per, len(table[group]) // per, self._suffixes[group])
            for group, per in enumerate(self._blocks_per_chunk)
        ]
        taken: list[list[_Offered]] = [[] for _ in groups]
        for index in range(first, end):
            block_hash = hashes[(index + 1) * every - 1]
            for group, per, whole, suffix in groups:
                if cursor[group] != index:
                    continue
                # A block is offered if it is whole in the engine and not ready already.
                ids = table[group]
                if index < whole and (ids[index] if per == 1 else all(_part(ids, index, per))):
                    key = block_hash + suffix
                    if index not in present[group] and not self._client.known_ready(key):
                        if not slots:
                            self._declined()
                            return taken
                        taken[group].append((index, slots.popleft(), key))
                cursor[group] = index + 1
        return taken

    def _store_job(
        self,
        tracked: Tracked,
        row: Sequence[Sequence[_Offered]],
        table: BlockTable,
    ) -> StoreJob:
        listed: list[int] = []
        sizes, firsts, slots, keys, parents = [], [], [], [], []
        for group, run in enumerate(row):
            per = self._blocks_per_chunk[group]
            first = run[0][0] if run else 0
            ids = table[group][first * per : (first + len(run)) * per]
            listed.extend(ids)
            sizes.append(len(ids))
            firsts.append(first * per)
            if not run:
                continue
            run_keys = [key for _, _, key in run]
            slots += [slot for _, slot, _ in run]
            keys += run_keys
            if self._rooted[group]:
                parents += [b""] * len(run)
            else:
                hashes, above = tracked.request.block_hashes, b""
                if first > 0:
                    above = hashes[first * self._hashes_per_block - 1] + self._suffixes[group]
                parents += [above, *run_keys[:-1]]
        number = self._next_job
        self._next_job += 1
        self._jobs[number] = block_ids = tuple(listed)
        for block in block_ids:
            jobs = self._sources.get(block)
            if jobs is None:
                self._sources[block] = {number}
            else:
                jobs.add(number)
        self.blocks += len(slots)
        return StoreJob(
            number,
            self._client.session,
            EngineSpec(block_ids, tuple(sizes), tuple(firsts)),
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


def _part(ids: Sequence[int], index: int, per: int) -> Sequence[int]:
    """Return the engine blocks of one block."""
    return ids[index * per : (index + 1) * per]


def _rows(taken: Sequence[list[_Offered]]) -> Iterable[Sequence[Sequence[_Offered]]]:
    """Cut what was taken into jobs of leading runs: neighbouring blocks, one run per group."""
    if not any(taken):
        return ()
    for blocks in taken:
        if blocks and blocks[-1][0] - blocks[0][0] != len(blocks) - 1:
            return zip_longest(*map(_runs, taken), fillvalue=())
    return (taken,)


def _runs(blocks: Sequence[_Offered]) -> list[list[_Offered]]:
    runs: list[list[_Offered]] = []
    for block in blocks:
        if runs and runs[-1][-1][0] + 1 == block[0]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
