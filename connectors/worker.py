"""The worker half: copies engine blocks to and from slots, and tells the store itself.

Threads: the engine's step thread submits and collects; one copies; one talks to the store (memory
handed over, session ended). Only memory is touched here, never a disk. A load whose slots are
still being filled from a lower tier is taken up again and again, other copies in between, and
is given up when nothing arrives any more, or it takes too long: so every copy ends, and nobody
waits for another's. While it waits it tells the store, which keeps its lease and says whether what
a peer sends or computes goes on.

Where the engine's tensors are is the device's matter (copies/device.py). On a GPU a copy is queued
and then asked about, as a load is that waits; in host memory it has ended when it was begun. A job
is over, well or not, only when nothing of it is being copied any more.

A session that has ended stops all work that was planned under it: jobs carry the session's
number, and one of another session copies nothing. The socket is closed only after the last copy,
because the store reuses slots as soon as it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from connectors.copies.device import Copier, Copying, Device, device_of
from connectors.copies.host import LayerCache, MappedExtent, SlotMap
from connectors.load_progress import Load, Patience
from connectors.step_meta import LoadJob, StepMeta, StoreJob, pieces
from connectors.store_connection import Link, LinkLost, Refusals, attach, monotonic_ns
from kvstore.core.errors import KVStoreError, NotSupported, TierError
from kvstore.core.layout import Move, RankGeometry, RankLayout
from kvstore.units import shown
from kvstore.wire import engine as p
from kvstore.wire import framing
from tiers.runner import NOTHING, Nothing, Runner

if TYPE_CHECKING:  # the first is for vLLM's side, the second for engines with `direct` only
    from connectors.config import DirectWay
    from connectors.direct_reads import DirectReads, End, Giving, Reads

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.02
SHUTDOWN_WAIT_S = 5.0  # for stores that are queued; a copy takes milliseconds
_READ_S = 0.1
_OF_PEERS = p.Places | p.InEngine | p.Push | p.Passed


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended; for a load, request_id is set."""

    ok: bool
    store_job: int | None = None
    request_id: str | None = None
    copied_bytes: int = 0
    late: bool = False  # a load was given up


class Task(msgspec.Struct, eq=False):
    """A job, and how far it is; made by the step thread, then the copy thread's."""

    job: StoreJob | LoadJob | Giving
    mark: int  # of the device: copies begin behind it
    copying: Copying | None = None  # of a store
    link: Link | None = None  # that a store, or a write to a peer's engine, was begun under
    load: Load | None = None
    patience: Patience | None = None  # of a load
    reads: Reads | None = None  # of a load
    passed: bool = False  # what these overwrite is not used any more
    broken: bool = False  # its copies from slots
    started: float = 0.0  # the copy that is under way

    @property
    def load_ok(self) -> bool:
        """Tell whether all that comes from slots has come; asked once that is over."""
        return not self.broken and self.load is not None and self.load.ok


class WorkerStats(msgspec.Struct):
    """Counted since the last time they were taken."""

    store_bytes: int = 0
    load_bytes: int = 0
    failed_loads: int = 0
    given_up_loads: int = 0  # of these, what had not come in time
    failed_stores: int = 0


class WorkerHalf:
    """One rank's side of the connector."""

    def __init__(  # noqa: PLR0913 - who it is, what it has, where it goes
        self,
        engine: str,
        rank: int,
        world: int,
        geometry: RankGeometry,
        caches: dict[str, LayerCache],
        find_store: Callable[[], str],
        device: Device | None = None,
        *,
        direct: DirectWay = "",
        store_user: int | None = None,
    ) -> None:
        """Start attaching to the store; returns at once. find_store(): its address.

        device: where the tensors are, None: found out. Raises NotSupported if it is not served.
        direct: what peers have is read straight into the tensors, or written, where that can be
            done; "" for neither.
        store_user: who may run the store beside us and root.
        """
        self.refused: KVStoreError | None = None
        self._direct = _direct_reads(caches, pushed=direct == "push") if direct else None
        able = self._direct is not None
        self._hello = p.Hello(
            p.VERSION, engine, "worker", rank, world, geometry=geometry, direct=able
        )
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._device = device_of(caches) if device is None else device
        self._find_store, self._store_user = find_store, store_user
        self._link: Link | None = None
        self._session = 0
        self._copier: Copier | None = None
        self._slots = SlotMap()
        self._wait_ns = self._limit_ns = 0
        self._waiting: dict[int, Patience] = {}  # by lease: what the store may say of it
        self._stores_over: set[int] = set()
        self._stores_open: dict[int, Task] = {}
        self._loads_open: set[str] = set()
        self._idle_loads: set[str] = set()  # of these: what wait, and copy nothing
        self._gives_open: set[int] = set()
        self._stats = WorkerStats()
        self._refusals = Refusals()
        self._stop = threading.Event()
        self._runner: Runner[Task, Outcome] = Runner("kvstore-copy", self._copy, self._raised)
        self._thread = threading.Thread(target=self._talk, name="kvstore-link", daemon=True)
        self._thread.start()

    # The engine's step

    def before_step(self, meta: StepMeta) -> None:
        """First call of every step: nothing below may overwrite what is still being read."""
        self._submit_stores(meta.early)
        wanted = [t for n in meta.flush if (t := self._stores_open.get(n)) is not None]
        if wanted:
            # What was only queued here is unknown to the device; that takes a moment.
            self._runner.wait(lambda: all(self._begun(task) for task in wanted))
            self._device.fence(task.copying for task in wanted if task.copying is not None)

    def _begun(self, task: Task) -> bool:
        job = task.job
        return task.copying is not None or (
            isinstance(job, StoreJob) and job.job_id not in self._stores_open
        )

    def start_loads(self, meta: StepMeta) -> None:
        """Queue this step's loads."""
        if meta.loads:
            mark = self._device.mark()
            for job in meta.loads:
                self._loads_open.add(job.request_id)
                self._runner.submit(Task(job, mark))

    def after_forward(self, meta: StepMeta) -> None:
        """Queue the stores whose sources this step has just computed."""
        self._submit_stores(meta.stores)

    def _submit_stores(self, jobs: Sequence[StoreJob]) -> None:
        if jobs:
            mark = self._device.mark()
            for job in jobs:
                task = self._stores_open[job.job_id] = Task(job, mark)
                self._runner.submit(task)

    def finished_loads(self, meta: StepMeta) -> tuple[set[str], set[str]]:
        """Return requests whose load has ended, and which of these failed; each exactly once.

        In a step that computes nothing, wait a moment for loads that are almost there: the next
        step would come too soon.
        """
        if meta.idle and self._loads_open:
            self._runner.wait(lambda: not self._loads_open, IDLE_WAIT_S)
        ended: set[str] = set()
        failed: set[str] = set()
        for outcome in self._runner.poll():
            if outcome.request_id is not None:
                ended.add(outcome.request_id)
                if not outcome.ok:
                    failed.add(outcome.request_id)
                    self._stats.failed_loads += 1
                    self._stats.given_up_loads += outcome.late
                self._stats.load_bytes += outcome.copied_bytes
            elif outcome.store_job is not None:
                self._stores_over.add(outcome.store_job)
                self._stats.failed_stores += not outcome.ok
                self._stats.store_bytes += outcome.copied_bytes
        return ended, failed

    def take_stores_over(self) -> frozenset[int]:
        """Return store jobs that have ended since the last call, well or not."""
        over, self._stores_over = frozenset(self._stores_over), set()
        return over

    def take_stats(self) -> WorkerStats:
        """Return what was counted since the last call."""
        stats, self._stats = self._stats, WorkerStats()
        return stats

    def shutdown(self) -> None:
        """Finish stores, close the connection, end the threads; safe to call twice.

        Loads that are queued end as failed: nobody waits for them any more.
        """
        self._runner.wait(lambda: not self._stores_open, SHUTDOWN_WAIT_S)
        self._stop.set()
        self._thread.join()
        self._runner.close()
        if self._direct is not None:
            self._direct.close()
        self._device.close()

    # The copy thread

    def _copy(self, task: Task) -> Outcome | Nothing | None:
        outcome: Outcome | Nothing | None = _failed(task)
        try:
            outcome = self._move(task)
        finally:
            if isinstance(outcome, Outcome) and outcome.store_job is not None:
                self._stores_open.pop(outcome.store_job, None)
            elif isinstance(outcome, Outcome) and outcome.request_id is not None:
                self._loads_open.discard(outcome.request_id)
        return outcome

    def _move(self, task: Task) -> Outcome | Nothing | None:
        job = task.job
        if isinstance(job, StoreJob):
            return self._store(task, job)
        return self._load(task, job) if isinstance(job, LoadJob) else self._give(task, job)

    def _give(self, task: Task, giving: Giving) -> Nothing | None:
        """Write engine blocks to a peer's; None while that is under way."""
        if self._direct is not None and task.link is not None:
            over = task.link is not self._link
            end = self._direct.give(giving, monotonic_ns(), over=over)
            if end is None:
                return None
            self._given(task.link, giving, end)
        return NOTHING

    def _given(self, link: Link, giving: Giving, end: End) -> None:
        self._gives_open.discard(giving.asked.give)
        copied = giving.bytes if end == "all" else 0
        self._tell(link, p.Given(giving.asked.give, end, copied))

    def _raised(self, task: Task, _error: Exception) -> Outcome | Nothing:
        """End a job that a bug has ended; the store waits for a word on a write."""
        job = task.job
        if isinstance(job, StoreJob | LoadJob) or task.link is None:
            return _failed(task)
        self._given(task.link, job, "failed")
        return NOTHING

    def _store(self, task: Task, job: StoreJob) -> Outcome | None:
        """Begin the copy, then wait for its end; None while it is under way."""
        link, copier, ok = self._link, self._copier, True
        try:
            if task.copying is None:
                if job.session != self._session or link is None or copier is None:
                    return Outcome(ok=False, store_job=job.job_id)
                task.link, task.started = link, time.perf_counter()
                moves = pieces(job.engine, job.store, self._blocks_per_chunk)
                task.copying = copier.copy(moves, self._slots, store=True, after=task.mark)
            if not task.copying.over():
                return None
        except (TierError, ValueError) as exc:
            log.error("store of %d blocks failed: %s", len(job.keys), exc)
            ok = False
        seconds = time.perf_counter() - task.started
        if task.link is not None:  # open until the last copy is over, also if the session is not
            stored = p.Stored(framing.u32(job.store.slots), job.keys, job.parents, ok, seconds)
            self._tell(task.link, stored)
        copied = task.copying.bytes if ok and task.copying is not None else 0
        return Outcome(ok=ok, store_job=job.job_id, copied_bytes=copied)

    def _load(self, task: Task, job: LoadJob) -> Outcome | None:
        """Copy what is ready; None while slots are still being filled, or copied."""
        link, copier, now_ns = self._link, self._copier, monotonic_ns()
        self._idle_loads.discard(job.request_id)
        if job.session != self._session or link is None or copier is None:
            return self._abandon(task, job, now_ns)
        load_over = task.broken
        try:
            if task.load is None and not task.broken:
                self._begin_load(task, job, now_ns)
            if task.load is not None and not task.broken:
                load_over = self._advance(task, task.load, copier, now_ns)
        except (TierError, ValueError) as exc:
            log.error("load for %s failed: %s", job.request_id, exc)
            load_over = task.broken = True
        reads, reads_over = task.reads, True
        if reads is not None and self._direct is not None:
            reads.failed = reads.failed or (load_over and not task.load_ok)
            reads_over = self._read(self._direct, task, reads, link, now_ns)
        if reads_over and load_over:
            return self._loaded(task, job, link, now_ns)
        if task.patience is not None and task.patience.asks(now_ns):
            self._tell(link, p.Loading(job.lease))
        if task.load is None or not task.load.copying:
            self._idle_loads.add(job.request_id)
        return None

    def _begin_load(self, task: Task, job: LoadJob, now_ns: int) -> None:
        """Take up a load for the first time. Raises ValueError if its blocks and slots differ."""
        per, patience = self._blocks_per_chunk, Patience(self._wait_ns, self._limit_ns, now_ns)
        task.load = Load(job, per, patience)
        if self._direct is not None:
            task.reads = self._direct.reads(job, per, patience)
        task.patience = self._waiting[job.lease] = patience

    def _loaded(self, task: Task, job: LoadJob, link: Link, now_ns: int) -> Outcome:
        """Report a load that is over."""
        load, reads = task.load, task.reads
        self._waiting.pop(job.lease, None)
        slots = [slot for slot in job.store.slots if slot < p.DIRECT]
        damaged = slots if task.broken or load is None else load.damaged
        if damaged:
            log.warning("load for %s: %d slots hold something else", job.request_id, len(damaged))
        copied, seconds = (0, 0.0) if load is None else (load.copied_bytes, load.seconds)
        late = (0 if load is None else load.late) + (0 if reads is None else reads.late)
        if late and task.patience is not None:
            _warn_late(job, late, task.patience, now_ns)
        self._tell(link, p.Loaded(job.lease, copied, seconds, framing.u32(damaged), late))
        ok = task.load_ok
        if reads is not None:
            copied += reads.copied_bytes + reads.written_bytes
            ok = ok and not reads.failed
        return Outcome(ok, request_id=job.request_id, copied_bytes=copied, late=late > 0)

    def _read(self, direct: DirectReads, task: Task, reads: Reads, link: Link, now_ns: int) -> bool:
        """Go on with what comes from a peer; True when that is over.

        Nothing is moved into blocks that what the engine was asked for before may still use.
        """
        if not task.passed and not reads.failed:
            try:
                task.passed = self._device.passed(task.mark)
            except TierError as exc:
                log.error("nothing is read from a peer: %s", exc)
                reads.failed = True
            reads.patience.not_yet(now_ns)  # the engine may be steps ahead
        if not task.passed and not reads.failed:
            return False
        return direct.advance(reads, partial(self._tell, link), now_ns)

    def _advance(self, task: Task, load: Load, copier: Copier, now_ns: int) -> bool:
        """Copy what has become ready; True when that was all. Raises TierError."""
        if not load.copying:
            task.started = time.perf_counter()
        fill = partial(self._fill, copier, task.mark)
        over = load.advance(fill, self._slots.generations, now_ns)
        if not load.copying:
            load.seconds += time.perf_counter() - task.started
        return over

    def _abandon(self, task: Task, job: LoadJob, now_ns: int) -> Outcome | None:
        """End a load whose session is over; None while its engine blocks are being written."""
        load = task.load
        self._waiting.pop(job.lease, None)
        if task.reads is not None and self._direct is not None:
            task.reads.failed = True
            if not self._direct.give_up(task.reads, now_ns, _discard):
                return None
        copied = 0 if load is None else load.copied_bytes
        try:
            if load is not None and not load.end_copy(self._slots.generations):
                return None
        except TierError as exc:
            log.error("load for %s failed: %s", job.request_id, exc)
        return Outcome(ok=False, request_id=job.request_id, copied_bytes=copied)

    def _fill(self, copier: Copier, mark: int, moves: Sequence[Move]) -> Copying:
        return copier.copy(moves, self._slots, store=False, after=mark)

    def _tell(self, link: Link, message: framing.Message) -> None:
        try:
            link.send(message)
        except LinkLost as exc:  # the link thread sees it too, and ends the session
            log.debug("not told: %s", exc)

    # The link thread

    def _talk(self) -> None:
        while not self._stop.is_set():
            try:
                attached = attach(self._find_store, self._hello, self._stop, self._store_user)
                if attached is None:
                    return
                self._serve(*attached)
            except KVStoreError as exc:
                # Not for good: the scheduler half, which attaches later, is refused only in a
                # session that has us in it; and a store may come back with other settings.
                if not self._stop.is_set():
                    self.refused = exc.with_traceback(None)  # which would keep what failed
                    self._stop.wait(self._refusals.wait_s(exc))

    def _serve(self, link: Link, welcome: p.Welcome) -> None:
        """Be attached until that ends. Raises TierError for memory that copies cannot use."""
        try:
            if welcome.layout is None:
                raise TierError("the store's welcome has no layout")
            self._copier = self._device.copier(welcome.layout)
            self._wait_ns = welcome.wait_ms * 1_000_000
            self._limit_ns = welcome.limit_ms * 1_000_000
            if self._direct is not None and welcome.devices:
                self._open_direct(self._direct, welcome.layout, welcome.devices, link)
            self._link, self._session = link, welcome.session
            while not self._stop.is_set() and self._handle(link, link.receive(_READ_S)):
                pass
        except LinkLost as exc:
            log.warning("kvstore: %s", exc)
        finally:
            self._session, self._link = 0, None  # copies planned for this session stop here
            self._runner.drain()
            for extent in self._slots.clear():
                self._device.unpin(extent)
            link.close()

    def _open_direct(
        self, direct: DirectReads, layout: RankLayout, devices: str, link: Link
    ) -> None:
        """Raises NotSupported where that cannot be; the next session is one without."""
        try:
            direct.open(layout, devices, partial(self._tell, link))
        except NotSupported:
            self._direct = None
            self._hello = msgspec.structs.replace(self._hello, direct=False)
            raise

    def _uses_no_slots(self) -> bool:
        """Tell whether nothing is being copied from slots that are about to go.

        What is written to peers uses none, and what a load that waits has leased does not go.
        """
        return self._runner.open <= len(self._gives_open) + len(self._idle_loads)

    def _handle(self, link: Link, messages: Iterable[framing.Message]) -> bool:
        for message in messages:
            if isinstance(message, p.Extent):
                extent = MappedExtent(
                    link.take_fd(),
                    message.first,
                    message.count,
                    message.slot_bytes,
                    message.bytes,
                    message.generations_offset,
                )
                self._device.pin(extent, self._stop.is_set)
                self._slots.add(message.extent, extent)
                self._refusals.attached()
                link.send(p.Mapped(message.extent))
            elif isinstance(message, p.Unmap):
                self._runner.wait(self._uses_no_slots)
                removed = self._slots.remove(message.extent)
                if removed is not None:
                    self._device.unpin(removed)
                link.send(p.Unmapped(message.extent))
            elif isinstance(message, p.Give) and self._direct is not None:
                self._gives_open.add(message.give)
                self._runner.submit(Task(self._direct.giving(message), 0, link=link))
            elif isinstance(message, p.Coming):
                patience = self._waiting.get(message.lease)
                if patience is not None:
                    patience.heard(message, monotonic_ns())
            elif isinstance(message, _OF_PEERS) and self._direct is not None:
                self._direct.told(message)
            elif isinstance(message, p.Detach):
                log.info("kvstore: detached: %s", message.reason)
                return False
        return True


def _warn_late(job: LoadJob, late: int, patience: Patience, now_ns: int) -> None:
    blocks = len(job.store.slots)
    log.warning(
        "load for request %s given up: %d of %d blocks from %s came, the last sign of one %.1f s"
        " ago, in %.1f s; the request is computed",
        shown(job.request_id),
        blocks - late,
        blocks,
        shown(job.source),
        patience.quiet_ns(now_ns) / 1e9,
        patience.whole_ns(now_ns) / 1e9,
    )


def _discard(_message: framing.Message) -> None:
    """Send nothing: the session is over."""


def _direct_reads(caches: dict[str, LayerCache], *, pushed: bool) -> DirectReads | None:
    from connectors.direct_reads import DirectReads  # noqa: PLC0415 - without it NIXL stays out

    try:
        return DirectReads(caches, pushed=pushed)
    except NotSupported as exc:
        log.warning("kvstore: %s; what peers have goes through the store's memory", exc)
        return None


def _failed(task: Task) -> Outcome:
    job = task.job
    if isinstance(job, StoreJob):
        return Outcome(ok=False, store_job=job.job_id)
    return Outcome(ok=False, request_id=job.request_id if isinstance(job, LoadJob) else None)
