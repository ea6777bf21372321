"""Moves blocks between the memory pool and the tiers below it: cascade down, promote up.

Cascade: every block that becomes ready is queued for each tier and copied there early, parents
first, so that eviction never waits for a write. Only so much of memory is pinned by copies at one
time, and the queue is bounded: what does not fit, or has left memory when its turn comes, is
counted and not copied.
Promote: blocks that only a lower tier has are read into granted slots and become ready there.
Every job ends in exactly one result, which unpins or releases all its slots.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from kvstore.errors import BlockCorrupt, TierError, check
from kvstore.index import Entry
from kvstore.leases import Lease
from kvstore.manager import Chain, Manager, StoreOutcome
from kvstore.tier import Tier
from kvstore.types import BlockKey, JobId, JobKind, JobResult, LookupResult, Slot, TransferJob

JOB_BLOCKS_MAX = 64
_PINNED_PART = 4  # of the slots: a quarter


class Promotion(msgspec.Struct, eq=False):
    """Blocks on their way up for one lookup; done when no job is left.

    Jobs end in any order, but a block becomes ready only below a ready one: they land in theirs.
    """

    jobs: deque[JobId] = msgspec.field(default_factory=deque)
    ended: dict[JobId, tuple[_Open, int]] = {}  # with the blocks done
    keys: dict[BlockKey, str] = {}

    @property
    def jobs_left(self) -> int:
        """Count the jobs whose blocks have not landed."""
        return len(self.jobs)


class _Open(msgspec.Struct, eq=False):
    tier: Tier
    job: TransferJob
    pinned: list[Entry] = []
    promotion: Promotion | None = None


class Tiering:
    """The lower tiers of one namespace and the jobs under way to and from them."""

    def __init__(self, manager: Manager, tiers: Sequence[Tier], backlog_max: int = 64) -> None:
        """tiers: fastest first. backlog_max: jobs of blocks that may wait for each tier."""
        self.counts: Counter[tuple[str, str]] = Counter()  # (tier, event)
        self.tiers = tuple(tiers)
        self._manager = manager
        self._queued_max = backlog_max * JOB_BLOCKS_MAX
        self._queues: dict[str, deque[BlockKey]] = {tier.name: deque() for tier in tiers}
        self._storing: Counter[str] = Counter()  # blocks being copied to a tier
        self._open: dict[JobId, _Open] = {}
        self._under_way: Counter[str] = Counter()
        self._promoting: dict[BlockKey, Promotion] = {}
        self._next_job = 1

    @property
    def busy(self) -> bool:
        """Tell whether any job has no result yet."""
        return bool(self._open)

    @property
    def jobs_open(self) -> int:
        """Count the jobs without a result."""
        return len(self._open)

    @property
    def queued(self) -> int:
        """Count the blocks that wait to be copied down, or are being copied."""
        return sum(map(len, self._queues.values())) + sum(self._storing.values())

    def cascade(self, added: Sequence[BlockKey]) -> None:
        """Queue newly ready blocks, parents first, for every tier."""
        for tier in self.tiers:
            queue = self._queues[tier.name]
            room = self._queued_max - len(queue)
            queue.extend(added[:room])
            self.counts[tier.name, "skipped"] += len(added[room:])
            self._pump(tier)

    def _pump(self, tier: Tier) -> None:
        """Copy queued blocks down, as many at a time as may be pinned for it."""
        queue = self._queues[tier.name]
        limit = max(1, self._manager.slots_total // _PINNED_PART)
        while queue and self._storing[tier.name] < limit:
            pinned: dict[BlockKey, Entry] = {}
            room = min(JOB_BLOCKS_MAX, limit - self._storing[tier.name])
            while queue and len(pinned) < room:
                self._gather(tier, queue.popleft(), pinned)
            if pinned:
                moves = [(entry.key, entry.slot) for entry in pinned.values()]
                parents = [e.parent.key if e.parent else None for e in pinned.values()]
                job = self._job(JobKind.STORE, moves, parents)
                self._submit(_Open(tier, job, list(pinned.values())))

    def _gather(self, tier: Tier, key: BlockKey, pinned: dict[BlockKey, Entry]) -> None:
        """Pin a block that a tier lacks, after those above it that the tier lacks, too."""
        above = self._manager.ready(key)
        if above is None:
            self.counts[tier.name, "late"] += 1
        path: list[Entry] = []
        while above is not None and above.key not in pinned:
            if tier.lookup(above.key) is not LookupResult.MISS:
                break
            path.append(above)
            above = self._manager.ready(above.parent.key) if above.parent else None
        for lacking in reversed(path):
            self._manager.pin(lacking.key)
            pinned[lacking.key] = lacking

    def where(self, key: BlockKey) -> tuple[LookupResult, Tier | None]:
        """Find the first tier that has a block, or may have it."""
        if key in self._promoting:
            return LookupResult.PENDING, None
        for tier in self.tiers:
            result = tier.lookup(key)
            if result is not LookupResult.MISS:
                return result, tier
        return LookupResult.MISS, None

    def used(self, chain: Chain, lease: Lease) -> None:
        """Tell the tiers which paths a request uses, though it has them from memory."""
        for group, rule in enumerate(self._manager.rules):
            indices = lease.groups[group].indices
            for index in indices[-(rule.trailing or 1) :]:
                for tier in self.tiers:
                    tier.touch(chain.key(group, index))

    def promote(self, chain: Chain, blocks: int) -> Promotion:
        """Read what the first `blocks` blocks lack in memory; blocks already coming are joined.

        Slots are granted as far as they go; what finds none stays where it is.
        """
        promotion = Promotion()
        wanted: dict[Tier, list[tuple[BlockKey, BlockKey | None]]] = {}
        for group, rule in enumerate(self._manager.rules):
            first = 0 if rule.trailing is None else max(0, blocks - rule.trailing)
            for index in range(first, blocks):
                key = chain.key(group, index)
                if self._manager.probe(key) is not LookupResult.MISS:
                    self._manager.touch(key)  # or its slot would be the next one granted
                    continue
                result, tier = self.where(key)
                if tier is None or result is not LookupResult.HIT:
                    continue
                above = chain.key(group, index - 1) if rule.trailing is None and index else None
                wanted.setdefault(tier, []).append((key, above))
        for tier, pairs in wanted.items():
            self._load(tier, pairs, promotion)
        return promotion

    def _load(
        self,
        tier: Tier,
        pairs: Sequence[tuple[BlockKey, BlockKey | None]],
        promotion: Promotion,
    ) -> None:
        slots = self._manager.prepare_store(len(pairs))
        moves: list[tuple[BlockKey, Slot]] = []
        for (key, above), slot in zip(pairs, slots, strict=False):
            self._manager.begin_store(key, above, slot)
            self._promoting[key] = promotion
            promotion.keys[key] = tier.name
            moves.append((key, slot))
        for first in range(0, len(moves), JOB_BLOCKS_MAX):  # the leading ones are of use sooner
            job = self._job(JobKind.LOAD, moves[first : first + JOB_BLOCKS_MAX])
            promotion.jobs.append(job.job_id)
            self._submit(_Open(tier, job, [], promotion))

    def _job(
        self,
        kind: JobKind,
        moves: Sequence[tuple[BlockKey, Slot]],
        parents: Sequence[BlockKey | None] = (),
    ) -> TransferJob:
        self._next_job += 1
        keys, slots = tuple(key for key, _ in moves), tuple(slot for _, slot in moves)
        return TransferJob(JobId(self._next_job), kind, keys, slots, tuple(parents))

    def _submit(self, work: _Open) -> None:
        self._open[work.job.job_id] = work
        self._under_way[work.tier.name] += 1
        self._storing[work.tier.name] += len(work.pinned)
        try:
            work.tier.submit(work.job)
        except TierError as exc:
            self._finish(JobResult(work.job.job_id, 0, exc))

    def poll(self) -> list[Promotion]:
        """Take finished jobs from all tiers; return the promotions that are done now."""
        done = []
        for tier in self.tiers:
            for result in tier.poll():
                promotion = self._finish(result)
                if promotion is not None and promotion.jobs_left == 0:
                    done.append(promotion)
            self._pump(tier)
        return done

    def _finish(self, result: JobResult) -> Promotion | None:
        work = self._open.pop(result.job_id, None)
        check(work is not None, f"job {result.job_id} reported twice, or never submitted")
        if work is None:
            return None
        name, job = work.tier.name, work.job
        self._under_way[name] -= 1
        self._storing[name] -= len(work.pinned)
        direction = "stored" if job.kind is JobKind.STORE else "loaded"
        self.counts[name, direction] += result.done
        if result.done < len(job.keys):
            self.counts[name, direction + "_failed"] += len(job.keys) - result.done
        for entry in work.pinned:
            self._manager.unpin(entry)
        if job.kind is JobKind.LOAD and isinstance(result.error, BlockCorrupt):
            self.counts[name, "corrupt"] += 1
            work.tier.discard(job.keys[result.done : result.done + 1])
        promotion = work.promotion
        if promotion is not None:
            promotion.ended[job.job_id] = (work, result.done)
            while promotion.jobs and promotion.jobs[0] in promotion.ended:
                first, done = promotion.ended.pop(promotion.jobs.popleft())
                self._land(first.tier.name, first.job, done)
        return promotion

    def _land(self, tier: str, job: TransferJob, done: int) -> None:
        for position, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            self._promoting.pop(key, None)
            outcome = self._manager.complete_store(slot, ok=position < done)
            if outcome is StoreOutcome.ORPHAN:
                self.counts[tier, "orphan"] += 1

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Drop damaged blocks from every tier."""
        for tier in self.tiers:
            tier.discard(keys)

    def clear(self) -> None:
        """Empty every tier."""
        for queue in self._queues.values():
            queue.clear()
        for tier in self.tiers:
            tier.clear()

    def close(self) -> None:
        """Wait for jobs under way, take their results and close the tiers."""
        for queue in self._queues.values():
            queue.clear()
        for tier in self.tiers:
            tier.drain()
        self.poll()
        for tier in self.tiers:
            tier.close()
