"""The storing part of the scheduler half: which blocks are stored, and the fence.

An engine block that is the source of an unfinished copy may get a new owner at any time: its
request is preempted, ends, or its window moves on. That does not wait for the copy. Instead every
step names the copies whose sources it is about to overwrite, and the workers finish those first.

The blocks of a step are gathered into a few jobs, whichever request they are of: a step in which
256 requests decode completes 16 blocks of 16 requests, and a job costs as much as ten blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from connectors.engine_interface import BlockTable, EngineRequest, Geometry
from connectors.events import BlockEvents, Extra
from connectors.partial_block import PartialBlock
from connectors.request_state import TrackedRequest
from connectors.step_meta import EngineSpec, StoreJob
from connectors.store_client import StoreClient
from kvstore.core.types import make_key

JOB_BLOCKS_MAX = 64  # a fence waits for whole jobs
RUN_BLOCKS_MIN = 4  # fewer are gathered one by one


class _GroupBatch(msgspec.Struct):
    """Blocks of one group for the next job, and how the group makes keys."""

    group: int
    engine_blocks: int  # of each block
    suffix: bytes  # block hash + suffix is the key
    rooted: bool  # blocks have no parent
    ids: list[int] = []
    slots: list[int] = []
    keys: list[bytes] = []
    parents: list[bytes] = []

    def add(
        self, ids: Sequence[int], slots: Iterable[int], keys: list[bytes], parent_hash: bytes
    ) -> None:
        """Gather consecutive blocks. parent_hash: of the block before them, b"" for none."""
        self.ids += ids
        self.slots += slots
        self.keys += keys
        first = parent_hash + self.suffix if parent_hash and not self.rooted else b""
        self.parents.append(first)
        self.parents += [b""] * (len(keys) - 1) if self.rooted else keys[:-1]

    def clear(self) -> None:
        """Start the next job."""
        self.ids, self.slots, self.keys, self.parents = [], [], [], []


class StorePlanner:
    """Plans stores of complete blocks, and knows which engine blocks are still being read."""

    def __init__(
        self, geometry: Geometry, client: StoreClient, world: int, events: BlockEvents
    ) -> None:
        """world: ranks that report each job."""
        self._events = events
        self._geometry = geometry
        self._client = client
        self._world = world
        self._hashes_per_block = geometry.block_tokens // geometry.hash_tokens
        self._sources: dict[int, frozenset[int]] = {}  # unfinished job -> engine blocks it reads
        self._ranks_ended: Counter[int] = Counter()
        self._next_job = 1
        self._jobs: list[StoreJob] = []
        self._batches: list[_GroupBatch] = []
        self._gathered = 0  # blocks for the next job,
        self._apart = b"", False  # the tenant's tag, and whether they are kept off the disk
        self._scope = b""
        self.use_scope(b"")

    def use_scope(self, scope: bytes) -> None:
        """Make keys in this scope from now on. Nothing may be gathered meanwhile."""
        self._scope = scope
        suffix = scope + self._apart[0]
        self._batches = [
            _GroupBatch(group, per_block, make_key(b"", group, suffix), rule.trailing is not None)
            for group, (per_block, rule) in enumerate(
                zip(self._geometry.blocks_per_chunk, self._geometry.rules, strict=True)
            )
        ]

    def can_store(self) -> bool:
        """Return True if there are credits for a block of each group."""
        return bool(self._client.session) and len(self._client.credits) >= len(self._batches)

    @property
    def describes(self) -> bool:
        """True if stored blocks are described by their tokens."""
        return self._client.collect_events

    def extra_of(self, request: EngineRequest) -> Extra | None:
        """Return what describes a request's blocks besides their tokens, if anything does."""
        return self._events.extra_of(request) if self.describes else None

    def store_complete(
        self, tracked: TrackedRequest, computed: int, table: Callable[[str], BlockTable]
    ) -> int:
        """Store the blocks that are complete now and not stored yet, as far as credits go.

        Returns how many computed tokens it takes before another block can be complete.
        """
        client, request = self._client, tracked.request
        if not client.session:
            return 0
        size = self._geometry.block_tokens
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        end = min(computed, hashed, tracked.store_tokens) // size
        if tracked.cursor < end:
            self._gather(tracked, end, table(request.request_id) if client.credits else ())
            if tracked.cursor < end:
                client.count("store_declined")
        return (tracked.cursor + 1) * size

    def count_complete(self, tracked: TrackedRequest, computed: int) -> int:
        """Count the leading blocks of a request that are complete and may be stored."""
        hashed = len(tracked.request.block_hashes) * self._geometry.hash_tokens
        return min(computed, hashed, tracked.store_tokens) // self._geometry.block_tokens

    def left_out(self, tracked: TrackedRequest, computed: int) -> list[bytes]:
        """Return the keys of a request's complete blocks that have found no slot, of one group."""
        every, hashes = self._hashes_per_block, tracked.request.block_hashes
        end = min(computed // self._geometry.block_tokens, len(hashes) // every)
        suffix = next((b.suffix for b in self._batches if not b.rooted), self._batches[0].suffix)
        return [hashes[(n + 1) * every - 1] + suffix for n in range(tracked.cursor, end)]

    def _gather(self, tracked: TrackedRequest, end: int, table: BlockTable) -> None:
        """Gather the blocks up to end-1, of every group that has them, as far as credits go."""
        if tracked.apart != self._apart:
            self._use(tracked)
        first, free, groups = tracked.cursor, self._client.credits, len(self._batches)
        while first < end and len(free) >= groups:
            if first < tracked.doubted.stop:
                self.forget_known(tracked, first, min(end, first + JOB_BLOCKS_MAX))
            if first + 1 == end:  # most steps complete one block of a request
                self._gather_block(tracked, first, table)
                first = end
            else:
                stop = min(end, first + JOB_BLOCKS_MAX, first + len(free) // groups)
                if stop - first < RUN_BLOCKS_MIN or not self._gather_run(
                    tracked, first, stop, table
                ):
                    for index in range(first, stop):
                        self._gather_block(tracked, index, table)
                first = stop
            if self._gathered >= JOB_BLOCKS_MAX * groups:
                self._close_job()
        tracked.cursor = first

    def forget_known(self, tracked: TrackedRequest, first: int, end: int) -> None:
        """Store those of blocks first..end-1 whose load has failed, though they are known.

        The store drops what was damaged, and may say so only after the engine has computed them.
        """
        doubted, every = tracked.doubted, self._hashes_per_block
        first, end = max(first, doubted.start), min(end, doubted.stop)
        hashes = tracked.request.block_hashes[(first + 1) * every - 1 : end * every : every]
        for batch in self._batches:
            self._client.known.remove([block_hash + batch.suffix for block_hash in hashes])

    def _use(self, tracked: TrackedRequest) -> None:
        """Gather blocks of a request: a job has those of one tenant, for the same tiers."""
        if self._gathered:
            self._close_job()
        self._apart = tracked.apart
        self.use_scope(self._scope)

    def _gather_run(self, tracked: TrackedRequest, first: int, end: int, table: BlockTable) -> bool:
        """Gather a run that each group has as a whole, new or not at all; False if one does not."""
        every, client = self._hashes_per_block, self._client
        hashes = tracked.request.block_hashes[(first + 1) * every - 1 : end * every : every]
        parent_hash = tracked.request.block_hashes[first * every - 1] if first else b""
        runs = []
        for batch in self._batches:
            ids = table[batch.group][first * batch.engine_blocks : end * batch.engine_blocks]
            present = tracked.present[batch.group]
            if not any(ids) or present.run(first, end) is not None:
                continue
            suffix = batch.suffix
            keys = [block_hash + suffix for block_hash in hashes]
            new = client.known.none_of(keys)
            if not new and all(
                key in client.known for key in keys
            ):  # the engine's own cache had them
                client.known.add(keys)  # the last to be forgotten
                continue
            whole = len(ids) == (end - first) * batch.engine_blocks and 0 not in ids
            if not new or not whole or present.any_of(first, end):
                return False
            runs.append((batch, ids, keys))
        for batch, ids, keys in runs:
            slots = [client.credits.popleft() for _ in keys]
            batch.add(ids, slots, keys, parent_hash)
            self._gathered += len(keys)
        if runs:
            self._events.stored(tracked.request, first, end)
        return True

    def _gather_block(self, tracked: TrackedRequest, index: int, table: BlockTable) -> None:
        """Gather one block, of every group that has it and whose store lacks it."""
        hashes, every = tracked.request.block_hashes, self._hashes_per_block
        last, before = (index + 1) * every - 1, self._gathered
        block_hash = hashes[last]
        parent_hash = hashes[last - every] if index else b""
        free, known = self._client.credits, self._client.known
        for batch, present in zip(self._batches, tracked.present, strict=True):
            per_block = batch.engine_blocks
            ids = table[batch.group][index * per_block : (index + 1) * per_block]
            key = block_hash + batch.suffix
            if (
                len(ids) == per_block
                and 0 not in ids
                and (index >= present.end or index not in present)
                and key not in known
            ):
                batch.ids += ids
                batch.slots.append(free.popleft())
                batch.keys.append(key)
                rooted = batch.rooted or not parent_hash
                batch.parents.append(b"" if rooted else parent_hash + batch.suffix)
                self._gathered += 1
        if self._gathered > before:
            self._events.stored(tracked.request, index, index + 1)

    def has_partial(self, partial: PartialBlock, table: BlockTable) -> bool:
        """Return True if all groups have the engine blocks of a partly filled last block."""
        return all(self._ids_of(partial, table))

    def _ids_of(self, partial: PartialBlock, table: BlockTable) -> list[Sequence[int]]:
        """List each group's engine blocks that have tokens of a block; none if it lacks one."""
        found: list[Sequence[int]] = []
        for batch, tokens in zip(self._batches, self._geometry.engine_block_tokens, strict=True):
            first, end = partial.block * batch.engine_blocks, -(-partial.end // tokens)
            ids = table[batch.group][first:end]
            found.append(() if len(ids) < end - first or 0 in ids else ids)
        return found

    def store_partial(
        self, tracked: TrackedRequest, partial: PartialBlock, table: BlockTable
    ) -> bool:
        """Store a request's partly filled last block, which all groups have.

        Only engine blocks that have tokens are copied. False while a block before it, or a
        credit, is missing.
        """
        client, hashes = self._client, tracked.request.block_hashes
        if not client.session or tracked.cursor != partial.block:
            return False
        if not self.can_store():
            client.count("store_declined")
            return False
        parent_hash = hashes[partial.block * self._hashes_per_block - 1] if partial.block else b""
        if tracked.apart != self._apart:
            self._use(tracked)
        for batch, ids in zip(self._batches, self._ids_of(partial, table), strict=True):
            key = partial.hash + batch.suffix
            batch.add(ids, [client.credits.popleft()], [key], parent_hash)
            self._gathered += 1
        self._close_job(partial_blocks=1)
        return True

    def _close_job(self, *, partial_blocks: int = 0) -> None:
        """Make one job of what was gathered. Blocks are whole, so their order says where each goes.

        partial_blocks: how many at the end of each group are not whole. Peers may read the others
        in the engine, too.
        """
        number = self._next_job
        self._next_job += 1
        batches = self._batches
        ids: list[int] = []
        slots: list[int] = []
        keys: list[bytes] = []
        parents: list[bytes] = []
        for batch in batches:
            ids += batch.ids
            slots += batch.slots
            keys += batch.keys
            parents += batch.parents
        sizes = tuple(len(batch.ids) for batch in batches)
        for batch in batches:
            whole = len(batch.slots) - partial_blocks
            self._client.publish_blocks(
                batch.slots[:whole], batch.keys[:whole], batch.ids[: whole * batch.engine_blocks]
            )
            batch.clear()
        self._sources[number] = frozenset(ids)
        spec = EngineSpec(tuple(ids), sizes, (0,) * len(sizes))
        job = StoreJob(
            number,
            self._client.session,
            spec,
            tuple(slots),
            tuple(keys),
            tuple(parents),
            self._apart[1],
        )
        self._jobs.append(job)
        self._client.stats["store_blocks"] += len(slots)
        self._gathered = 0

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """Return the jobs planned since the last call."""
        if self._gathered:
            self._close_job()
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def fence(self, written: Iterable[int]) -> set[int]:
        """Return the unfinished jobs that read any of these engine blocks."""
        if not self._sources:
            return set()
        blocks = set(written)
        return {job for job, read in self._sources.items() if not read.isdisjoint(blocks)}

    def is_open(self, job: int) -> bool:
        """Return True until a job has ended on all ranks."""
        return job in self._sources

    def on_jobs_ended(self, ranks_ended: Mapping[int, int]) -> None:
        """Take the workers' reports: by job, on how many ranks it ended."""
        for number, ranks in ranks_ended.items():
            self._ranks_ended[number] += ranks
            if self._ranks_ended[number] < self._world:
                continue
            del self._ranks_ended[number]
            self._sources.pop(number, None)
