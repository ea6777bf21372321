"""Moves blocks between the memory pool and the tiers below it: cascade down, promote up.

Cascade: every block that becomes ready is queued for each tier and copied there early, parents
first, so that eviction never waits for a write; a full tier is given it later (late_writes). Only
so much of memory is pinned by copies at one time, and what waits is bounded in seconds: what does
not fit, or has left memory when its turn comes, is counted and not copied. Beyond a tier's write
budget only what was used or stored again is queued, with what the tier lacks above it.
Promote: blocks that only a lower tier has are read into granted slots, and can be leased at once:
they are coming. Jobs are small, so that the first blocks can be used while the last are read, and
end in any order; a block becomes ready only below a ready one, so a job that ended waits for the
jobs that hold its blocks' parents.
Every job ends in exactly one result, which unpins or releases all its slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstore.core.copy_queue import CopyQueue, RunQueue
from kvstore.core.errors import BlockCorrupt, InvariantBroken, TierError
from kvstore.core.index import Entry, Index, State
from kvstore.core.leases import Lease
from kvstore.core.load_paces import LoadPaces
from kvstore.core.manager import Manager
from kvstore.core.tier import Describing, Leading, Sharing, Telling, Tier
from kvstore.core.types import (
    BlockKey,
    Chain,
    Changes,
    JobId,
    JobKind,
    JobResult,
    LookupResult,
    Slot,
    StoreOutcome,
    TransferJob,
)
from kvstore.core.write_budget import Backlog, WriteBudget

JOB_BLOCKS_MAX = 64
LOAD_BYTES = 8 << 20
"""Of one job that reads from a lower tier: a few milliseconds of a disk, so that engines copy the
first blocks of a hit while the next are read."""
LEADING_MAX = 64  # blocks that are looked up in one go
_PINNED_PART = 4  # of the slots: a quarter
_BACKLOG_NS = 10_000_000_000


class Found(NamedTuple):
    """Neighbouring blocks of a chain that memory lacks, and the tier and place that has them."""

    group: int
    first: int
    end: int
    tier: Tier
    place: str | None


class _Open(msgspec.Struct, eq=False):
    tier: Tier
    job: TransferJob
    pinned: list[Entry] = []  # of a store
    above: set[JobId] = set()  # of a load: those that bring its blocks' parents, not landed
    below: list[_Open] = []  # those that wait for this one
    done: int | None = None  # blocks that arrived whole, once it has ended
    cleared: bool = False  # what it moves is of before a clear
    again: set[BlockKey] = set()  # of a cleared store: what was submitted anew since
    began_ns: int = 0
    place: str | None = None  # of a load: where it reads
    ahead: int = 0  # of a load: blocks that were being read there then, its own included
    due_ns: int = 0  # when it should end; 0: not known
    tags: Sequence[Any] = ()  # of a load for somebody who holds the slots: what to call its blocks


class _Wanted(msgspec.Struct):
    """Blocks to read at one place, parents before their children."""

    tier: Tier
    place: str | None
    keys: list[BlockKey] = []
    parents: list[BlockKey | None] = []


class OffDisk(set[BlockKey]):
    """Blocks in memory, or on their way up, that are never copied down."""

    def left(self, removed: Iterable[BlockKey], index: Index) -> None:
        """Blocks have left memory; some may have been stored again since."""
        if self:
            self.difference_update([key for key in removed if index.get(key) is None])


class Tiering:
    """The lower tiers of one namespace and the jobs under way to and from them."""

    def __init__(
        self,
        manager: Manager,
        tiers: Sequence[Tier],
        slot_bytes: int,
        backlog_ns: Mapping[str, int] | None = None,
        budgets: Mapping[str, WriteBudget] | None = None,
        remote: Sequence[Tier] = (),
        promoted: Callable[[float], object] = lambda _: None,
    ) -> None:
        """tiers: fastest first. backlog_ns: how long blocks may wait for a tier, by its name.

        remote: tiers that are asked after the others, and written to only if they are Sharing.
        budgets: what may be written to a tier, by its name; other namespaces share them.
        promoted(seconds): blocks have arrived that were asked for so long ago.
        """
        # Blocks moved, by (tier, event); may be emptied.
        self.counts: Counter[tuple[str, str]] = Counter()
        self.tiers = tuple(tiers)
        self.sources = (*tiers, *remote)
        # Asked here once: it takes 5 us.
        self._ways = [(t, t if isinstance(t, Leading) else None) for t in self.sources]
        self._at_once = LEADING_MAX if all(many for _, many in self._ways) else 1
        self.shared = [
            RunQueue(tier, tier, manager, self.counts)
            for tier in remote
            if isinstance(tier, Sharing)
        ]
        self.telling = [tier for tier in tiers if isinstance(tier, Telling)]
        self.describing = next((t for t in tiers if isinstance(t, Describing)), None)
        self._told = False
        self._manager = manager
        self._slot_bytes = slot_bytes
        self._now_ns = 0
        limits, shared = backlog_ns or {}, budgets or {}
        self.queues: dict[str, CopyQueue] = {}
        for name, tier in {tier.name: tier for tier in tiers}.items():
            backlog = Backlog(limits.get(name, _BACKLOG_NS))
            budget = shared.get(name) or WriteBudget(None)
            self.queues[name] = CopyQueue(tier, manager, self.counts, backlog, budget)
        self._promoted = promoted
        self._storing: Counter[str] = Counter()  # blocks being copied to a tier
        self._stored: Counter[str] = Counter()  # since the last poll
        self._open: dict[JobId, _Open] = {}
        self._under_way: Counter[str] = Counter()
        self.loads = LoadPaces(self.sources)
        self.load_blocks = max(1, min(JOB_BLOCKS_MAX, LOAD_BYTES // slot_bytes))
        self.coming: dict[BlockKey, _Open] = {}  # what is on its way up
        self.off_disk = OffDisk()
        self._staged: list[tuple[Any, bool]] = []
        self._next_job = 1

    def tell(self) -> None:
        """Have the tiers that can note what enters and leaves them."""
        self._told = True
        for tier in self.telling:
            tier.tell()

    def take_changes(self) -> Changes:
        """Return what entered and left these tiers since the last call; nothing before tell()."""
        told = Changes()
        for tier in self.telling if self._told else ():
            changes = tier.take_changes()
            told.added += changes.added
            told.removed += changes.removed
        return told

    @property
    def to_poll(self) -> bool:
        """Tell whether a job is under way whose end nobody announces: remote tiers do."""
        return any(self._under_way.get(tier.name) for tier in self.tiers)

    @property
    def jobs_open(self) -> int:
        """Count the jobs without a result."""
        return len(self._open)

    @property
    def storing(self) -> int:
        """Count the blocks that are pinned for copies to lower tiers."""
        return sum(self._storing.values())

    @property
    def queued(self) -> int:
        """Count the blocks that wait to be copied down, or are; not those for shared tiers."""
        return sum(len(queue) + self._storing[name] for name, queue in self.queues.items())

    def changed(self, changes: Changes) -> None:
        """Blocks have entered and left memory."""
        if changes.removed:
            self.off_disk.left(changes.removed, self._manager.index)
            for queue in self.queues.values():
                queue.left(changes.removed)
        if changes.added:
            self.cascade(changes.added)

    def cascade(self, added: Sequence[BlockKey]) -> None:
        """Newly ready blocks, parents first, are to be copied to every tier that may take them."""
        for queue in self.queues.values():
            queue.add(added, self._now_ns)
            self._pump(queue)

    def enqueue_lacking(self, entries: Sequence[Entry], state: LookupResult) -> None:
        """Queue what memory has of these, where a tier answers this state for it."""
        ready = [e.key for e in entries if e.state is State.READY and e.key not in self.off_disk]
        for queue in self.queues.values():
            lacking = [key for key in ready if queue.tier.lookup(key) is state]
            queue.put(lacking, self._now_ns)
            self._pump(queue)

    def _pump(self, queue: CopyQueue) -> None:
        """Copy queued blocks down, as many at a time as may be pinned for it."""
        tier = queue.tier
        limit = max(1, self._manager.slots.total // _PINNED_PART)
        while len(queue) and self._storing[tier.name] < limit:
            if tier.lookup(queue.first.key) is LookupResult.RETRY:
                return  # it does not know yet what it has
            room = min(JOB_BLOCKS_MAX, limit - self._storing[tier.name])
            pinned = queue.take(room, self.off_disk)
            if pinned:
                queue.budget.spend(len(pinned) * self._slot_bytes)
                entries = list(pinned.values())
                slots = [entry.slot for entry in entries]
                parents = [entry.parent.key if entry.parent else None for entry in entries]
                job = self._job(JobKind.STORE, [*pinned], slots, parents)
                self._submit(_Open(tier, job, entries))

    def leading(
        self, keys: Sequence[BlockKey], first: int
    ) -> tuple[LookupResult, Tier | None, int]:
        """Find the first tier that has keys[first], or may, and for how many from there it does."""
        # No tier looks at more than the next call goes on from, or at a few too many.
        some = keys[first : first + self._at_once]
        count = len(some)
        for tier, many in self._ways:
            if many is None:
                result, count = tier.lookup(some[0]), 1
            else:
                result, alike = many.leading(some[:count], 0)
                count = min(count, alike)
            if result is not LookupResult.MISS:
                return result, tier, count
        return LookupResult.MISS, None, count

    def used(self, chain: Chain, lease: Lease) -> None:
        """Tell the tiers which paths a request uses; what they lack of them was used again."""
        for group, rule in enumerate(self._manager.rules):
            indices = lease.groups[group].indices
            for index in indices[-(rule.trailing or 1) :]:
                key = chain.key(group, index)
                for tier in self.tiers:
                    tier.touch(key)
                    if tier.lookup(key) is LookupResult.MISS and self._manager.ready(key):
                        self.queues[tier.name].add([key], self._now_ns, again=True)

        for shared in self.shared:
            shared.use(chain, lease, self._now_ns)

    def sources_of(self, keys: Iterable[BlockKey]) -> list[str | None]:
        """Name the tier that each block is coming from; None for those that are not coming."""
        jobs = map(self.bringing, keys)
        return [None if job is None else job.tier.name for job in jobs]

    def bringing(self, key: BlockKey) -> _Open | None:
        """Return the job that brings a block; one of before a clear does not."""
        work = self.coming.get(key)
        return None if work is None or work.cleared else work

    def promote(
        self,
        chain: Chain,
        blocks: int,
        found: Sequence[Found],
        now_ns: int = 0,
        *,
        off_disk: bool = False,
        whole: bool = False,
    ) -> bool:
        """Start reading what a hit of the first `blocks` blocks lacks in memory.

        found: in ascending order. off_disk: none of it is copied down. Slots are granted as far as
        they go; what finds none stays where it is. whole: while engines lease at least as many as
        it lacks, nothing is started and the answer is False.
        """
        self._now_ns = max(self._now_ns, now_ns)
        wanted: list[_Wanted] = []
        for group, rule in enumerate(self._manager.rules):
            first, chained = chain.first_of(rule, blocks), rule.trailing is None
            runs = [run for run in found if run.group == group and run.end > first]
            gaps = [run.first for run in runs] + [blocks]
            ends = [first] + [run.end for run in runs]
            for begin, gap in zip(ends, gaps, strict=True):
                # Or their slots would be the next ones granted; a chain's last stands for all.
                for index in range(gap - 1, begin - 1, -1) if chained else range(begin, gap):
                    if self._manager.touch(chain.key(group, index)) and chained:
                        break
            for run in runs:
                begin = max(first, run.first)
                keys = chain.keys_at(group, range(begin, run.end))
                above: list[BlockKey | None] = [None] * len(keys)
                if chained:
                    above = [chain.key(group, begin - 1) if begin else None, *keys[:-1]]
                # A block's parent is under way before it: by an earlier job, or earlier in its own.
                if not wanted or (wanted[-1].tier, wanted[-1].place) != (run.tier, run.place):
                    wanted.append(_Wanted(run.tier, run.place))
                wanted[-1].keys += keys
                wanted[-1].parents += above
        needed = sum(len(each.keys) for each in wanted)
        slots = self._manager.prepare_store(needed, wanted=True)
        if whole and 0 < needed - len(slots) <= self._manager.leases.by_engines:
            self._manager.give_back(slots)
            return False
        for each in wanted:
            here, slots = slots[: len(each.keys)], slots[len(each.keys) :]
            self._load(each.tier, each.keys, each.parents, here, off_disk=off_disk)
        return True

    def _load(
        self,
        tier: Tier,
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey | None],
        slots: Sequence[Slot],
        *,
        off_disk: bool,
    ) -> None:
        """Read blocks into slots; the first job is under way before the next one is made."""
        for first in range(0, len(slots), self.load_blocks):
            piece = slice(first, min(first + self.load_blocks, len(slots)))
            began = self._manager.begin_promotions(keys[piece], parents[piece], slots[piece])
            places = [first + at for at in began]
            if len(began) < piece.stop - first:
                unused = set(range(first, piece.stop)).difference(places)
                self._manager.give_back([slots[place] for place in sorted(unused)])
            if began:
                moved, above = [keys[at] for at in places], [parents[at] for at in places]
                if off_disk:
                    self.off_disk.update(moved)
                job = self._job(JobKind.LOAD, moved, [slots[at] for at in places], above)
                self._start_load(_Open(tier, job))

    def stage(
        self, tier: Tier, keys: Sequence[BlockKey], slots: Sequence[Slot], tags: Sequence[Any]
    ) -> None:
        """Read blocks into granted slots of the caller, outside of the index: a copy to pass on.

        take_staged() says of each tag how that ended; until then its slot stays granted.
        """
        for first in range(0, len(keys), self.load_blocks):
            part = slice(first, first + self.load_blocks)
            job = self._job(JobKind.LOAD, keys[part], slots[part], [None] * len(keys[part]))
            self._submit(_Open(tier, job, tags=tags[part]))

    def take_staged(self) -> list[tuple[Any, bool]]:
        """Return the tags of staged blocks that were read, or could not be, since the last call."""
        staged, self._staged = self._staged, []
        return staged

    def _start_load(self, work: _Open) -> None:
        self.coming.update(dict.fromkeys(work.job.keys, work))
        for parent in set(work.job.parents).difference(work.job.keys):
            bringer = None if parent is None else self.coming.get(parent)
            if bringer is not None and bringer is not work and bringer.job.job_id not in work.above:
                work.above.add(bringer.job.job_id)
                bringer.below.append(work)
        self._submit(work)

    def _job(
        self,
        kind: JobKind,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        parents: Sequence[BlockKey | None],
    ) -> TransferJob:
        self._next_job += 1
        return TransferJob(JobId(self._next_job), kind, tuple(keys), tuple(slots), tuple(parents))

    def _submit(self, work: _Open) -> None:
        if work.job.kind is JobKind.STORE:
            for before in self._open.values():
                if before.cleared and before.tier is work.tier:
                    before.again.update(work.job.keys)
        self._open[work.job.job_id] = work
        self._under_way[work.tier.name] += 1
        if work.job.kind is JobKind.LOAD:
            work.place = self.loads.place_of(work.tier, work.job.keys[0])
            wait_ns, work.ahead = self.loads.began(work.place, len(work.job.keys))
            work.began_ns, work.due_ns = self._now_ns, self._now_ns + wait_ns if wait_ns else 0
        self._storing[work.tier.name] += len(work.pinned)
        try:
            work.tier.submit(work.job)
        except TierError as exc:
            self._finish(JobResult(work.job.job_id, 0, exc))

    def poll(self, now_ns: int) -> None:
        """Take finished jobs from all tiers, and start the next ones."""
        self._now_ns = now_ns
        storing = [tier for tier in self.tiers if self._storing.get(tier.name)]
        for tier in self.sources:
            for result in tier.poll():
                self._finish(result)
        for name, queue in self.queues.items():
            busy = queue.tier in storing
            queue.backlog.measure(self._stored.pop(name, 0), now_ns, busy=busy)
            if len(queue):
                self._pump(queue)
        limit = max(1, self._manager.slots.total // _PINNED_PART)
        for shared in self.shared:
            while self._storing[shared.tier.name] < limit and (
                pinned := shared.take(limit, self.off_disk, now_ns)
            ):
                keys, slots = [e.key for e in pinned], [e.slot for e in pinned]
                self._submit(_Open(shared.tier, self._job(JobKind.STORE, keys, slots, []), pinned))

    def _finish(self, result: JobResult) -> None:
        work = self._open.pop(result.job_id, None)
        if work is None:
            raise InvariantBroken(f"job {result.job_id} reported twice, or never submitted")
        name, job = work.tier.name, work.job
        self._under_way[name] -= 1
        self._storing[name] -= len(work.pinned)
        if job.kind is JobKind.LOAD:
            took_ns = self._now_ns - work.began_ns if result.done == len(job.keys) else None
            self.loads.ended(work.place, len(job.keys), work.ahead, took_ns)
        direction = "stored" if job.kind is JobKind.STORE else "loaded"
        self.counts[name, direction] += result.done
        if result.done < len(job.keys):
            self.counts[name, direction + "_failed"] += len(job.keys) - result.done
        self._manager.unpin(work.pinned, used=False)
        if job.kind is JobKind.LOAD and isinstance(result.error, BlockCorrupt):
            self.counts[name, "corrupt"] += 1
            work.tier.discard(job.keys[result.done : result.done + 1])
        if work.tags:
            whole = 0 if work.cleared else result.done
            self._staged += [(tag, place < whole) for place, tag in enumerate(work.tags)]
        elif job.kind is JobKind.LOAD:
            work.done = result.done
            self._land(work)
        else:
            self._stored[name] += result.done
            if work.cleared:
                work.tier.discard([key for key in job.keys if key not in work.again])

    def _land(self, ended: _Open) -> None:
        """Make a job's blocks ready, and those of the jobs that waited for it alone."""
        landing = [ended]
        while landing:
            work = landing.pop()
            if work.done is None or work.above:
                continue
            for key in work.job.keys:
                if self.coming.get(key) is work:  # cleared, it may be on its way again
                    del self.coming[key]
            done = 0 if work.cleared else work.done
            if done:
                self._promoted((self._now_ns - work.began_ns) / 1e9)
            outcomes = self._manager.complete_promotions(work.job.slots, done)
            self.counts[work.tier.name, "orphan"] += outcomes.count(StoreOutcome.ORPHAN)
            self.off_disk.left(work.job.keys, self._manager.index)
            for below in work.below:
                below.above.discard(work.job.job_id)
            landing.extend(work.below)

    def unqueue(self) -> None:
        """Forget what waits to be copied down."""
        for queue in self.queues.values():
            queue.clear()

    def clear(self) -> None:
        """Empty every tier; what is under way does not come back when it ends."""
        self.unqueue()
        for work in (*self._open.values(), *self.coming.values()):
            work.cleared = True
        for tier in self.sources:
            tier.clear()

    def stop(self) -> None:
        """Use the tiers no more. Slots of jobs under way stay as they are: they may be written."""
        self.tiers = self.sources = ()
        self._ways.clear()
        self.telling.clear()
        self.describing = None
        self.shared.clear()
        self._under_way.clear()
        self._storing.clear()
        self.unqueue()
        self.queues.clear()

    def close(self) -> None:
        """Wait for jobs under way, take their results and close the tiers."""
        self.unqueue()
        for tier in self.sources:
            if self._under_way[tier.name]:
                tier.drain()
        self.poll(self._now_ns)
        for tier in self.sources:
            tier.close()
