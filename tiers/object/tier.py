"""The blocks of one namespace in a bucket, as a tier that other stores use, too.

It is asked about whole paths (search), and given runs of them once they are used again (use).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice

import msgspec

from kvstore import clock
from kvstore.core.errors import BlockCorrupt, TierError, TierIOError
from kvstore.core.tier import TierContext, leading_alike
from kvstore.core.types import (
    BlockKey,
    Chain,
    GroupRule,
    JobKind,
    JobResult,
    LookupResult,
    TransferJob,
)
from tiers.object.bucket import Bucket, Request
from tiers.object.format import Format, Run
from tiers.object.health import CORRUPT, GET, HEAD, MISSING, OK, PUT
from tiers.object.known import ABSENT_NS, DAMAGED_NS, Known
from tiers.object.search import Search, Told

SEARCH_NS = 1_500_000_000  # for all questions about one path
SEARCHES_MAX = 256
QUEUE_MAX = 1024  # runs that wait to be put
SCAN_MAX = 1024  # runs of a path that one use looks at
QUEUED_MAX = 128  # of which it queues so many; the next use of the path goes on
FOUND_MAX = 128  # runs that are named in one turn, of all that searches have found
DELAY_NS = 500_000_000  # from a use until its runs are put: they may still be coming from a disk
DRAIN_S = 20.0
_PAUSE_S = 0.001
_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class _Load(msgspec.Struct, eq=False):
    """A load under way: how many blocks are left to come, and why some did not, by their place."""

    job: TransferJob
    left: int
    errors: dict[int, TierError] = {}


class _Fetch:
    """A run that is being read, and who wants which of its blocks.

    Jobs may share one until it has arrived. Its thread copies blocks under the lock.
    """

    def __init__(self, form: Format, run: Run) -> None:
        self.run = run
        self.wanted: list[tuple[_Load, int]] = []  # and the place in the job
        self.whole: list[bool] = []
        self._places: list[tuple[int, memoryview]] = []
        self._form = form
        self._taken = False
        self._lock = threading.Lock()

    def want(self, work: _Load, place: int, position: int, slot: memoryview) -> bool:
        """Have a block copied to a slot; False if it is too late for that."""
        with self._lock:
            if not self._taken:
                self.wanted.append((work, place))
                self._places.append((position, slot))
            return not self._taken

    def take(self, data: memoryview) -> None:
        """Copy what is wanted, on a thread. Raises BlockCorrupt if some of it is damaged."""
        rest = self._form.unpack(self.run, data)
        with self._lock:
            self._taken = True
            self.whole = list(self._form.copy(self.run, rest, self._places))
        if not all(self.whole):
            raise BlockCorrupt(f"{self.run.name}: checksum")

    def revoke(self) -> None:
        """Copy nothing from now on."""
        with self._lock:
            self._taken = True
            self._places.clear()


class ObjectTier:
    """One namespace's view of the bucket."""

    def __init__(self, context: TierContext, bucket: Bucket) -> None:
        self.name = context.name
        self._memory, self._bucket = context.memory, bucket
        self._form = Format(context.namespace, context.slot_bytes, bucket.run_bytes, bucket.secret)
        self._known = Known(cleared=bucket.cleared)
        self._now_ns = clock.now_ns()
        self._searches: dict[BlockKey, tuple[Search, int]] = {}  # and until when
        self._fetches: dict[str, _Fetch] = {}
        self._queue: deque[tuple[int, Run]] = deque()  # and not before when
        self._queued: set[str] = set()
        self._putting: set[str] = set()
        self._open = 0
        self._clears = 0
        self._results: list[JobResult] = []
        self._closed = False

    # Paths

    def search(
        self, rules: Sequence[GroupRule], chain: Chain, first: int, blocks: int, now_ns: int
    ) -> None:
        """Find out what is here of a path from a block on; lookups of that one wait for it."""
        self._now_ns = now_ns
        full = next((g for g, rule in enumerate(rules) if rule.trailing is None), None)
        if full is None or self._closed or len(self._searches) >= SEARCHES_MAX:
            return
        key = chain.key(full, first)
        search = Search(self._form, rules, chain, first, blocks, self._look, self._state)
        if key not in self._searches:
            self._searches[key] = search, now_ns + SEARCH_NS
            search.begin()
            self._end_searches()

    def _state(self, name: str) -> bool | None:
        return self._known.state(name, self._now_ns)

    def _look(self, run: Run, told: Told, wanted: Callable[[], bool]) -> None:
        there = self._state(run.name)
        if there is not None or not self._bucket.may_look(self._now_ns):
            told(there)
            return
        ended = partial(self._looked, run, told)
        self._bucket.submit(Request(HEAD, run.name, ended, self._form.size(run), wanted=wanted))

    def _looked(self, run: Run, told: Told, request: Request) -> None:
        there = {OK: True, MISSING: False, CORRUPT: False}.get(request.outcome)
        if self._known.cleared:
            there = self._known.state(run.name, self._now_ns)
        elif there:
            self._known.there(run, self._now_ns)
        elif there is False:
            self._known.absent(run.name, self._now_ns + ABSENT_NS)
        told(there)

    def _end_searches(self) -> None:
        room = FOUND_MAX
        for key, (search, until_ns) in list(self._searches.items()):
            if search.over:
                for run in islice(search.found, room):
                    room -= 1
                    if self._known.state(run.name, self._now_ns) is None:
                        self._known.there(run, self._now_ns)
            if (search.over and room) or self._now_ns >= until_ns:
                search.over = True
                del self._searches[key]

    def use(self, rules: Sequence[GroupRule], chain: Chain, blocks: int, now_ns: int) -> int:
        """A request uses a path: queue its runs that are not here, as far as is known.

        Return how many blocks found no room in the queue.
        """
        skipped, room = 0, QUEUED_MAX
        if self._closed or self._bucket.health.off or all(r.trailing is not None for r in rules):
            return 0
        for number in range(min(blocks // self._form.run_blocks, SCAN_MAX)):
            for group, rule in enumerate(rules):
                kept = self._form.kept(rule, number)
                last = chain.key(group, kept[-1])
                if self._known.has(last, now_ns):
                    continue  # most of a path: it is not named
                name = self._form.name_of(last)
                if name in self._queued or name in self._putting:
                    continue
                if len(self._queue) >= QUEUE_MAX:
                    skipped += len(kept)
                    continue
                room -= 1
                if room < 0:
                    return skipped
                self._queued.add(name)
                self._queue.append((now_ns + DELAY_NS, Run(name, chain.keys_at(group, kept))))
        return skipped

    @property
    def waiting(self) -> int:
        """Count the blocks that wait to be put."""
        return sum(len(run.keys) for _, run in self._queue)

    def offered(
        self, now_ns: int, here: Callable[[Sequence[BlockKey]], bool]
    ) -> Sequence[BlockKey]:
        """Take the next run that may be put now, for a job to store it; () for none.

        here(keys): whether a run can still be stored; no request and no trial is spent on another.
        """
        while self._queue and self._queue[0][0] <= now_ns:
            run = self._queue[0][1]
            known = self._known.state(run.name, now_ns)
            if not known and len(self._putting) >= self._bucket.put_threads:
                return ()
            wanted = not known and here(run.keys)
            if wanted and not self._bucket.may_put(now_ns, anew=known is False):
                return ()
            self._queue.popleft()
            self._queued.discard(run.name)
            if wanted:
                return run.keys
        return ()

    # As a tier

    def lookup(self, key: BlockKey) -> LookupResult:
        """HIT for a block of a run that is there; RETRY while that is being found out."""
        if key in self._searches:  # also if it is here: more of its path may be
            return _RETRY
        if self._known.place(key, self._now_ns) is None or self._bucket.health.off:
            return _MISS
        return _HIT

    def leading(self, keys: Sequence[BlockKey], first: int) -> tuple[LookupResult, int]:
        """Return what lookup() says of keys[first], and from there on of how many blocks."""
        return leading_alike(self.lookup, keys, first)

    def touch(self, key: BlockKey) -> None:
        """Do nothing: the bucket's rules decide what it keeps."""

    def submit(self, job: TransferJob) -> None:
        """Start a job. Raises TierError once the tier is closed."""
        if self._closed:
            raise TierError("tier is closed")
        self._open += 1
        (self._put if job.kind is JobKind.STORE else self._get)(job)

    def poll(self) -> Sequence[JobResult]:
        """Return the jobs that have ended."""
        self._now_ns = clock.now_ns()
        self._bucket.poll(self._now_ns)
        if self._searches:
            self._end_searches()
        results, self._results = self._results, []
        return results

    def discard(self, keys: Collection[BlockKey]) -> None:
        """Use the objects no more that have these blocks: the next use puts them anew.

        None is deleted: what damages them may be on the way here, and others can read them.
        """
        for key in keys:
            found = self._known.place(key, self._now_ns)
            if found is not None:
                self._known.absent(found[0].name, self._now_ns + DAMAGED_NS)

    def clear(self) -> None:
        """Use nothing that is there now, until the store is started again; others may."""
        self._clears += 1
        self._known.clear()
        for search, _ in self._searches.values():
            search.over = True
        self._searches.clear()
        self._queue.clear()
        self._queued.clear()

    def drain(self) -> None:
        """Wait until every job has a result, as long as requests may take."""
        end_s = clock.now_s() + DRAIN_S
        while self._open and clock.now_s() < end_s:
            self._bucket.poll(clock.now_ns())
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Take no more jobs; those under way end, or write into no slot any more."""
        if not self._closed:
            self._closed = True
            self._queue.clear()
            self.drain()
            for fetch in self._fetches.values():
                fetch.revoke()

    # Jobs

    def _put(self, job: TransferJob) -> None:
        run = Run(self._form.name_of(job.keys[-1]), job.keys)
        known = self._known.state(run.name, self._now_ns)
        if known:
            self._report(job, len(job.keys), None)
            return
        blocks = [self._memory.view(slot) for slot in job.slots]
        self._putting.add(run.name)
        self._bucket.budget.spend(self._form.size(run))
        self._bucket.submit(
            Request(
                PUT,
                run.name,
                partial(self._put_ended, job, run, self._clears),
                self._form.size(run),
                make=partial(self._form.pack, run, blocks),
                anew=known is False,  # or another store may have put it
            )
        )

    def _put_ended(self, job: TransferJob, run: Run, clears: int, request: Request) -> None:
        self._putting.discard(run.name)
        if not request.changes:  # another store has put it, or nothing was sent
            self._bucket.budget.spend(-self._form.size(run))
        if request.outcome != OK:
            self._report(job, 0, TierIOError(request.why))
            return
        if clears == self._clears:  # or it may be another store's: not to delete
            self._known.there(run, self._now_ns)
        self._report(job, len(job.keys), None)

    def _get(self, job: TransferJob) -> None:
        work = _Load(job, len(job.keys))
        for place, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            found = self._known.place(key, self._now_ns)
            if found is None:
                self._came(work, place, TierIOError("not in the bucket, as far as is known"))
                continue
            (run, position), view = found, self._memory.view(slot)
            fetch = self._fetches.get(run.name)
            if fetch is None or not fetch.want(work, place, position, view):
                fetch = self._fetches[run.name] = _Fetch(self._form, run)
                fetch.want(work, place, position, view)
                ended, size = partial(self._get_ended, fetch), self._form.size(run)
                self._bucket.submit(Request(GET, run.name, ended, size, take=fetch.take))

    def _get_ended(self, fetch: _Fetch, request: Request) -> None:
        run = fetch.run
        if self._fetches.get(run.name) is fetch:
            del self._fetches[run.name]
        fetch.revoke()
        error: TierError = TierIOError(request.why)
        if request.outcome == CORRUPT:
            error = BlockCorrupt(request.why)
            self._known.absent(run.name, self._now_ns + DAMAGED_NS)
        elif request.outcome == MISSING:
            self._known.gone(run.name, self._now_ns)
        whole = fetch.whole or [False] * len(fetch.wanted)
        for (work, place), ok in zip(fetch.wanted, whole, strict=True):
            self._came(work, place, None if ok else error)

    def _came(self, work: _Load, place: int, error: TierError | None) -> None:
        work.left -= 1
        if error is not None:
            work.errors[place] = error
        if not work.left:
            done = min(work.errors, default=len(work.job.keys))
            self._report(work.job, done, work.errors.get(done))

    def _report(self, job: TransferJob, done: int, error: TierError | None) -> None:
        self._open -= 1
        self._results.append(JobResult(job.job_id, done, error))
