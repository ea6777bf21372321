"""The blocks of one namespace on disk, as a Tier: jobs in, neighbouring slots moved together."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvstore import clock
from kvstore.core.errors import BlockCorrupt, TierError, TierFull, TierIOError
from kvstore.core.index import State
from kvstore.core.tier import TierContext, TokenRow, TokenRows, leading_alike
from kvstore.core.types import BlockKey, Changes, JobKind, JobResult, LookupResult, TransferJob
from tiers.nvme.block_io import Move
from tiers.nvme.files import RUN_BLOCKS_MAX, runs_of
from tiers.nvme.index import Record
from tiers.nvme.messages import TokenPage
from tiers.nvme.namespace import DiskNamespace

if TYPE_CHECKING:
    from tiers.nvme.disk import NvmeDisk

log = logging.getLogger(__name__)

TOKEN_ROWS = 64  # read in one go
TOKENS_S = 5.0  # what was read before is read again
RUN_BYTES_MIN = 512 << 10  # below, more calls cost more than they bring
RUN_BYTES_MAX = 4 << 20
DRAIN_S = 20.0
BLOCK_ERRORS_MAX = 3  # reads of one block that failed


class JobProgress(msgspec.Struct, eq=False):
    """A job under way; ok[i] is None while block i is not moved yet."""

    job: TransferJob
    ok: list[bool | None]
    next: int = 0  # first block that has no run yet
    runs: int = 0  # under way
    error: TierError | None = None


class Run(Move, eq=False, kw_only=True):
    """A move for a job, with what its blocks are."""

    tier: NvmeTier
    space: DiskNamespace
    work: JobProgress
    places: list[int]  # in the job
    records: list[Record]

    def checksums(self) -> list[int]:
        """Return the checksum of each block as it is in memory."""
        checksum = self.space.checksum
        return [checksum(r, b) for r, b in zip(self.records, self.blocks, strict=True)]


class NvmeTier:
    """One namespace's view of the disk."""

    def __init__(self, context: TierContext, space: DiskNamespace, disk: NvmeDisk) -> None:
        self.name = context.name
        self.space = space
        space.attached += 1
        self._memory = context.memory
        self._disk = disk
        self._waiting: deque[JobProgress] = deque()  # stores that wait for slots, in their order
        self._queued: set[BlockKey] = set()  # keys of these
        self._open = 0
        self._results: list[JobResult] = []
        self._unreadable: Counter[BlockKey] = Counter()  # failed reads, of those that had any
        # By mark: when it was asked for, and what has come.
        self._token_pages: dict[int, tuple[float, list[TokenPage | Exception]]] = {}
        self.closed = False

    def use(self, space: DiskNamespace) -> None:
        """Go on with other records: the directory is read anew, and no block is being written."""
        if not self.closed:
            self.space.attached -= 1
            space.attached += 1
        self.space = space

    def lookup(self, key: BlockKey) -> LookupResult:
        """HIT when the block can be read, PENDING while it is written.

        RETRY while the records of a start are still to come.
        """
        if not self._disk.online:
            return LookupResult.MISS
        record = self.space.index.get(key)
        if record is None:
            if self.space.loading is not None:
                return LookupResult.RETRY
            return LookupResult.PENDING if key in self._queued else LookupResult.MISS
        return LookupResult.HIT if record.state is State.READY else LookupResult.PENDING

    def leading(self, keys: Sequence[BlockKey], first: int) -> tuple[LookupResult, int]:
        """Return what lookup() says of keys[first], and from there on of how many blocks."""
        if not self._disk.online:
            return LookupResult.MISS, len(keys) - first
        return leading_alike(self.lookup, keys, first)

    def touch(self, key: BlockKey) -> None:
        """Refresh a block that was used, and with it the path above it."""
        record = self.space.index.get(key)
        if record is not None and record.state is State.READY:
            self.space.index.order.used(record, 0)

    def submit(self, job: TransferJob) -> None:
        """Start a job; a store may wait for slots to become free."""
        if self.closed:
            raise TierError("tier is closed")
        work = JobProgress(job, [None] * len(job.keys))
        self._open += 1
        if job.kind is JobKind.LOAD:
            self._start_load(work)
        else:
            self._waiting.append(work)
            self._queued.update(job.keys)
            self._start_stores()

    def poll(self) -> Sequence[JobResult]:
        """Return the jobs that have ended; without any, a disk that was read needs nothing."""
        if self._open or self._disk.state == "loading":
            self._disk.poll()
            self._start_stores()
        results, self._results = self._results, []
        return results

    def discard(self, keys: Collection[BlockKey]) -> None:
        """Forget blocks, and what hangs below them."""
        self._disk.attached.wake(self.space)
        for key in keys:
            self.space.discard(key)

    def clear(self) -> None:
        """Forget every block, at once; those stored from now on are kept."""
        self._disk.attached.clear(self.space)

    @property
    def full(self) -> bool:
        """Tell whether a block is evicted for each that comes, or soon will be."""
        return self._disk.online and self._disk.attached.room.full(self.space)

    def tell(self) -> None:
        """Note what becomes readable, and what leaves."""
        self.space.index.changes = self.space.index.changes or Changes()

    def take_changes(self) -> Changes:
        """Return what was noted since the last call."""
        changes = self.space.index.changes
        if changes is None:
            return Changes()
        self.space.index.changes = Changes()
        return changes

    @property
    def blocks(self) -> int:
        """Count the blocks that can be read, as far as they are loaded."""
        return len(self.space.index)

    def describe(self, tokens_of: Callable[[BlockKey], bytes]) -> None:
        """Keep token ids beside records from now on, if the disk does."""
        self.space.tokens_of = tokens_of

    def token_rows(self, mark: int) -> TokenRows | None:
        """Return readable blocks with token ids, as they were written; None: not read yet."""
        disk, space = self._disk, self.space
        if not disk.online or not disk.keeps_tokens:
            return TokenRows((), mark, last=True)
        if space.loading is not None:
            return None
        now_s, pages = clock.now_s(), self._token_pages
        # Engines that attach together share a page; an engine may leave before it takes its page.
        for old in [at for at, (asked_s, _) in pages.items() if now_s - asked_s > TOKENS_S]:
            del pages[old]
        _, coming = pages.get(mark, (0.0, []))
        if mark not in pages:
            pages[mark] = now_s, coming
            read = partial(disk.attached.index.tokens, space.digest, mark, TOKEN_ROWS)
            disk.keeper.submit(read, lambda found, _now_s: coming.append(found))
        if not coming:
            return None
        del pages[mark]
        page = coming[0]
        if isinstance(page, Exception):
            log.warning("%s: token ids cannot be read: %s", space.digest[:12], page)
            return TokenRows((), mark, last=True)
        rows = [self._token_row(*row) for row in page.rows]
        last = page.rows[-1][0] if page.rows else mark
        return TokenRows([row for row in rows if row is not None], last, page.last)

    def _token_row(self, generation: int, key: bytes, tokens: bytes) -> TokenRow | None:
        """Return a row of a block that can be read, and is the very copy that it was made for."""
        record = self.space.index.get(BlockKey(key))
        if record is None or record.state is not State.READY or record.generation != generation:
            return None
        parent = None if record.parent is None else record.parent.key
        return TokenRow(record.key, parent, tokens)

    def drain(self) -> None:
        """Wait until every job has a result; not for ever, should the disk hang."""
        deadline = clock.now_s() + DRAIN_S
        while self._open and clock.now_s() < deadline:
            self._disk.poll()
            self._start_stores()
            self._disk.flush()

    def close(self) -> None:
        """Take no more jobs; those under way end. Safe to call twice."""
        if not self.closed:
            self.drain()
            self.closed = True
            self.space.attached -= 1
            self.space.index.changes = None  # take_changes() is not called any more
            self._token_pages.clear()
            self._disk.attached.wake(self.space)  # which may be forgotten now

    # Loads

    def _start_load(self, work: JobProgress) -> None:
        """Plan runs up to the first block that is not here."""
        found: list[Record] = []
        for key in work.job.keys if self._disk.online else ():
            record = self.space.index.get(key)
            if record is None or record.state is not State.READY:
                break
            found.append(record)
        if len(found) < len(work.job.keys):
            work.error = TierIOError("a block has left the disk" if self._disk.online else "off")
        work.next = len(work.job.keys)
        for record in found:
            self.space.pin(record)
        self._start_runs(work, list(enumerate(found)))
        self._end(work)

    # Stores

    def _start_stores(self) -> None:
        while self._waiting:
            work = self._waiting[0]
            if not self._place(work):
                return
            self._waiting.popleft()
            self._queued.difference_update(work.job.keys)
            self._end(work)

    def _place(self, work: JobProgress) -> bool:
        """Give blocks slots and start to write them; False while there are none."""
        space, job = self.space, work.job
        self._disk.attached.wake(space)
        left = len(job.keys) - work.next
        if not self._disk.writable:
            work.error, work.next = TierIOError("the tier is read-only now"), len(job.keys)
            return True
        if space.free < left and not self._disk.attached.room.make(space, left):
            if space.free == 0:
                work.error, work.next = TierFull("no slot can be freed"), len(job.keys)
                return True
        elif space.free < left:
            return False
        places = space.take_places(left)
        taken: list[tuple[int, Record]] = []
        while work.next < len(job.keys) and len(taken) < len(places):
            key, above = job.keys[work.next], job.parent(work.next)
            parent = None if above is None else space.index.get(above)
            if space.index.get(key) is not None:
                work.ok[work.next] = True
            elif self.space.index.sinks(key) or (above is not None and parent is None):
                space.counts["unplaced"] += 1  # its parent was not written, or has left
                work.ok[work.next] = False
            else:
                generation = self._disk.attached.next_generation()
                place = places[len(taken)]
                taken.append((work.next, space.begin(key, parent, place, generation)))
            work.next += 1
        for place in reversed(places[len(taken) :]):
            space.give_back(place)
        self._start_runs(work, taken)
        return work.next == len(job.keys)

    # Runs

    def _start_runs(self, work: JobProgress, blocks: list[tuple[int, Record]]) -> None:
        """Move blocks, in runs of neighbours as long as they may be, several at a time."""
        store = work.job.kind is JobKind.STORE
        longest = self._run_blocks(len(blocks), self._disk.lanes(store=store))
        for run in runs_of(blocks, lambda pair: pair[1].slot, longest):
            place = run[0][1].slot
            work.runs += 1
            self._disk.start(
                Run(
                    store=store,
                    tier=self,
                    space=self.space,
                    work=work,
                    file=self.space.extents[place >> 32],
                    position=place & 0xFFFFFFFF,
                    places=[number for number, _ in run],
                    records=[record for _, record in run],
                    blocks=[self._memory.view(work.job.slots[number]) for number, _ in run],
                )
            )

    def _run_blocks(self, count: int, lanes: int) -> int:
        """Blocks of one run: few enough for every lane to get one, as long as that pays."""
        size = self.space.slot_bytes
        most = min(RUN_BLOCKS_MAX, RUN_BYTES_MAX // size)
        return max(1, min(most, max(-(-count // lanes), RUN_BYTES_MIN // size)))

    def ended(self, run: Run) -> None:
        """Take the result of a run."""
        work = run.work
        self._disk.attached.wake(self.space)
        work.runs -= 1
        if run.error is not None:
            self.space.counts["io_error"] += 1
            work.error = TierIOError(f"{run.file.path.name}: {run.error}")
        sums = run.sums or [0] * len(run.records)
        for number, record, found in zip(run.places, run.records, sums, strict=True):
            if work.job.kind is JobKind.STORE:
                self.space.written(record, found, ok=run.error is None)
                work.ok[number] = record.state is State.READY
                continue
            work.ok[number] = run.error is None and found == record.checksum
            if run.error is None and not work.ok[number]:
                work.error = BlockCorrupt(f"{run.file.path.name}: checksum")
            if run.space is not self.space:
                continue  # the directory is read anew, and this record was another's
            if run.error is not None:
                self._unread(record)
            elif not work.ok[number] and record.state is State.READY:
                self.space.drop(record, "damaged")
            self.space.unpin(record)
        run.blocks.clear()
        self._end(work)

    def _unread(self, record: Record) -> None:
        """Give up a block that cannot be read again and again, while others can."""
        if not self._disk.online:
            return  # the disk is the cause
        self._unreadable[record.key] += 1
        if self._unreadable[record.key] >= BLOCK_ERRORS_MAX:
            del self._unreadable[record.key]
            if record.state is State.READY:
                self.space.drop(record, "unreadable")

    def _end(self, work: JobProgress) -> None:
        """Report a job once nothing of it is left to do."""
        if work.runs or work.next < len(work.job.keys):
            return
        job = work.job
        done = next((n for n, ok in enumerate(work.ok) if not ok), len(work.ok))
        work.next = len(job.keys) + 1
        self._open -= 1
        self._results.append(JobResult(job.job_id, done, work.error))
