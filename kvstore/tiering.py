"""Moves blocks between the memory pool and the tiers below it: cascade down, promote up.

Cascade: every block that becomes ready is copied to each tier, parents first, while the tier's
backlog has room; what does not fit is skipped and counted, so eviction never waits for a write.
Promote: blocks that only a lower tier has are read into granted slots and become ready there.
Every job ends in exactly one result, which unpins or releases all its slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from kvstore.errors import BlockCorrupt, TierError, check
from kvstore.index import Entry
from kvstore.manager import Chain, Manager, StoreOutcome
from kvstore.tier import Tier
from kvstore.types import BlockKey, JobId, JobKind, JobResult, LookupResult, Slot, TransferJob


class Promotion(msgspec.Struct, eq=False):
    """Blocks on their way up for one lookup; done when no job is left."""

    jobs_left: int = 0
    keys: dict[BlockKey, str] = {}


class _Open(msgspec.Struct, eq=False):
    tier: Tier
    job: TransferJob
    pinned: list[Entry] = []
    promotion: Promotion | None = None


class Tiering:
    """The lower tiers of one namespace and the jobs under way to and from them."""

    def __init__(self, manager: Manager, tiers: Sequence[Tier], backlog_max: int = 64) -> None:
        """tiers: fastest first. backlog_max: jobs per tier that may be under way."""
        self.counts: Counter[tuple[str, str]] = Counter()  # (tier, event)
        self.tiers = tuple(tiers)
        self._manager = manager
        self._backlog_max = backlog_max
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

    def cascade(self, added: Sequence[BlockKey]) -> None:
        """Copy newly ready blocks, parents first, to every tier that lacks them."""
        for tier in self.tiers:
            keys = [key for key in added if tier.lookup(key) is LookupResult.MISS]
            if not keys:
                continue
            if self._under_way[tier.name] >= self._backlog_max:
                self.counts[tier.name, "skipped"] += len(keys)
                continue
            pinned = [entry for entry in map(self._manager.pin, keys) if entry is not None]
            if not pinned:
                continue
            job = self._job(JobKind.STORE, [(entry.key, entry.slot) for entry in pinned])
            self._submit(_Open(tier, job, pinned))

    def where(self, key: BlockKey) -> tuple[LookupResult, Tier | None]:
        """Find the first tier that has a block, or may have it."""
        if key in self._promoting:
            return LookupResult.PENDING, None
        for tier in self.tiers:
            result = tier.lookup(key)
            if result is not LookupResult.MISS:
                return result, tier
        return LookupResult.MISS, None

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
        moves = [(key, slot) for (key, _), slot in zip(pairs, slots, strict=False)]
        if not moves:
            return
        for (key, above), slot in zip(pairs, slots, strict=False):
            self._manager.begin_store(key, above, slot)
            self._promoting[key] = promotion
            promotion.keys[key] = tier.name
        promotion.jobs_left += 1
        self._submit(_Open(tier, self._job(JobKind.LOAD, moves), [], promotion))

    def _job(self, kind: JobKind, moves: Sequence[tuple[BlockKey, Slot]]) -> TransferJob:
        self._next_job += 1
        keys = tuple(key for key, _ in moves)
        return TransferJob(JobId(self._next_job), kind, keys, tuple(slot for _, slot in moves))

    def _submit(self, work: _Open) -> None:
        self._open[work.job.job_id] = work
        self._under_way[work.tier.name] += 1
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
        return done

    def _finish(self, result: JobResult) -> Promotion | None:
        work = self._open.pop(result.job_id, None)
        check(work is not None, f"job {result.job_id} reported twice, or never submitted")
        if work is None:
            return None
        name, job = work.tier.name, work.job
        self._under_way[name] -= 1
        direction = "stored" if job.kind is JobKind.STORE else "loaded"
        self.counts[name, direction] += result.done
        if result.done < len(job.keys):
            self.counts[name, direction + "_failed"] += len(job.keys) - result.done
        for entry in work.pinned:
            self._manager.unpin(entry)
        if job.kind is JobKind.LOAD:
            if isinstance(result.error, BlockCorrupt):
                self.counts[name, "corrupt"] += 1
                work.tier.discard(job.keys[result.done : result.done + 1])
            self._landed(name, job, result.done)
        if work.promotion is not None:
            work.promotion.jobs_left -= 1
        return work.promotion

    def _landed(self, tier: str, job: TransferJob, done: int) -> None:
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
        for tier in self.tiers:
            tier.clear()

    def close(self) -> None:
        """Wait for jobs under way, take their results and close the tiers."""
        for tier in self.tiers:
            tier.drain()
        self.poll()
        for tier in self.tiers:
            tier.close()
