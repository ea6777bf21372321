"""The worker half: copies engine blocks to and from slots, and tells the store itself.

Threads: the engine's step thread submits and collects; one copies; one talks to the store (memory
handed over, session ended). Only memory is touched here, never a disk. A load whose slots are
still being filled from a lower tier is taken up again and again, other copies in between, and
fails when that takes too long: so every copy ends, and nobody waits for another's.

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

import msgspec

from connectors.jobs import LoadJob, StepMeta, StoreJob, pieces
from connectors.link import Link, LinkLost, attach, monotonic_ns
from connectors.loads import Load
from kvstore import protocol as p
from kvstore.errors import KVStoreError, TierError
from kvstore.layout import Move, RankGeometry
from tiers.copier import HostCopier, LayerCache, MappedExtent, SlotMap
from tiers.runner import Runner

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.02
REFUSED_WAIT_S = 1.0
SHUTDOWN_WAIT_S = 5.0  # for stores that are queued; a copy takes milliseconds
_READ_S = 0.1


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended; for a load, request_id is set."""

    ok: bool
    store_job: int | None = None
    request_id: str | None = None
    copied_bytes: int = 0


class WorkerStats(msgspec.Struct):
    """Counted since the last time they were taken."""

    store_bytes: int = 0
    load_bytes: int = 0
    failed_loads: int = 0
    failed_stores: int = 0


class WorkerHalf:
    """One rank's side of the connector."""

    def __init__(
        self,
        engine: str,
        rank: int,
        world: int,
        geometry: RankGeometry,
        caches: dict[str, LayerCache],
        find_store: Callable[[], str],
    ) -> None:
        """Start attaching to the store; returns at once. find_store(): its address."""
        self.refused: KVStoreError | None = None
        self._hello = p.Hello(p.VERSION, engine, "worker", rank, world, geometry=geometry)
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._caches = caches
        self._find_store = find_store
        self._link: Link | None = None
        self._session = 0
        self._copier: HostCopier | None = None
        self._slots = SlotMap()
        self._wait_ns = 0
        self._loads: dict[str, Load] = {}  # the copy thread's, begun and not over
        self._stores_over: set[int] = set()
        self._stores_open: set[int] = set()
        self._loads_open: set[str] = set()
        self._stats = WorkerStats()
        self._stop = threading.Event()
        self._runner: Runner[StoreJob | LoadJob, Outcome] = Runner(
            "kvstore-copy", self._copy, _failed
        )
        self._thread = threading.Thread(target=self._talk, name="kvstore-link", daemon=True)
        self._thread.start()

    # The engine's step

    def before_step(self, meta: StepMeta) -> None:
        """First call of every step: nothing below may overwrite what is still being read."""
        for job in meta.early:
            self._submit_store(job)
        if any(job_id in self._stores_open for job_id in meta.flush):
            wanted = frozenset(meta.flush)
            self._runner.wait(lambda: not self._unfinished(wanted))

    def _unfinished(self, wanted: frozenset[int]) -> bool:
        return any(job_id in self._stores_open for job_id in wanted)

    def start_loads(self, meta: StepMeta) -> None:
        """Queue this step's loads."""
        for job in meta.loads:
            self._loads_open.add(job.request_id)
            self._runner.submit(job)

    def after_forward(self, meta: StepMeta) -> None:
        """Queue the stores whose sources this step has just computed."""
        for job in meta.stores:
            self._submit_store(job)

    def _submit_store(self, job: StoreJob) -> None:
        self._stores_open.add(job.job_id)
        self._runner.submit(job)

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

    # The copy thread

    def _copy(self, job: StoreJob | LoadJob) -> Outcome | None:
        if isinstance(job, StoreJob):
            try:
                return self._store(job)
            finally:
                self._stores_open.discard(job.job_id)
        over = True
        try:
            outcome = self._load(job)
            over = outcome is not None
            return outcome
        finally:
            if over:
                self._loads.pop(job.request_id, None)
                self._loads_open.discard(job.request_id)

    def _store(self, job: StoreJob) -> Outcome:
        link, copier, started = self._link, self._copier, time.perf_counter()
        if job.session != self._session or link is None or copier is None:
            return Outcome(ok=False, store_job=job.job_id)
        try:
            moves = pieces(job.engine, job.store, self._blocks_per_chunk)
            copied, ok = copier.copy(moves, self._slots, store=True), True
        except (TierError, ValueError) as exc:
            log.error("store of %d blocks failed: %s", len(job.keys), exc)
            copied, ok = 0, False
        seconds = time.perf_counter() - started
        self._tell(link, p.Stored(p.u32(job.store.slots), job.keys, job.parents, ok, seconds))
        return Outcome(ok=ok, store_job=job.job_id, copied_bytes=copied)

    def _load(self, job: LoadJob) -> Outcome | None:
        """Copy what is ready; None while slots are still being filled."""
        link, copier, now_ns = self._link, self._copier, monotonic_ns()
        load, started = self._loads.get(job.request_id), time.perf_counter()
        if job.session != self._session or link is None or copier is None:
            copied = 0 if load is None else load.copied_bytes
            return Outcome(ok=False, request_id=job.request_id, copied_bytes=copied)
        ok, damaged = False, list(job.store.slots)
        try:
            if load is None:
                load = Load(job, self._blocks_per_chunk, now_ns + self._wait_ns)
                self._loads[job.request_id] = load
            over = load.advance(partial(self._fill, copier), self._slots.generations, now_ns)
            load.seconds += time.perf_counter() - started
            if not over:
                return None
            ok, damaged = load.ok, load.damaged
        except (TierError, ValueError) as exc:
            log.error("load for %s failed: %s", job.request_id, exc)
        if damaged:
            log.warning("load for %s: %d slots hold something else", job.request_id, len(damaged))
        copied, seconds = (0, 0.0) if load is None else (load.copied_bytes, load.seconds)
        self._tell(link, p.Loaded(job.lease, copied, seconds, p.u32(damaged)))
        return Outcome(ok=ok, request_id=job.request_id, copied_bytes=copied)

    def _fill(self, copier: HostCopier, moves: Sequence[Move]) -> int:
        return copier.copy(moves, self._slots, store=False)

    def _tell(self, link: Link, message: p.Message) -> None:
        try:
            link.send(message)
        except LinkLost as exc:  # the link thread sees it too, and ends the session
            log.debug("not told: %s", exc)

    # The link thread

    def _talk(self) -> None:
        while not self._stop.is_set():
            try:
                attached = attach(self._find_store, self._hello, self._stop)
            except KVStoreError as exc:
                # Not for good: the scheduler half, which attaches later, is refused only in a
                # session that has us in it; and a store may come back with other settings.
                if self.refused is None:
                    log.error("kvstore: %s", exc)
                self.refused = exc
                self._stop.wait(REFUSED_WAIT_S)
                continue
            if attached is None:
                return
            self._serve(*attached)

    def _serve(self, link: Link, welcome: p.Welcome) -> None:
        try:
            if welcome.layout is None:
                raise TierError("the store's welcome has no layout")
            self._copier = HostCopier(self._caches, welcome.layout)
            self._wait_ns = welcome.wait_ms * 1_000_000
            self._link, self._session = link, welcome.session
            while not self._stop.is_set() and self._handle(link, link.receive(_READ_S)):
                pass
        except (LinkLost, TierError) as exc:
            log.warning("kvstore: %s", exc)
        finally:
            self._session, self._link = 0, None  # copies planned for this session stop here
            self._runner.drain()
            self._slots.clear()
            link.close()

    def _handle(self, link: Link, messages: Iterable[p.Message]) -> bool:
        for message in messages:
            if isinstance(message, p.Extent):
                extent = MappedExtent(
                    link.fds.pop(0),
                    message.first,
                    message.count,
                    message.slot_bytes,
                    message.bytes,
                    message.generations_offset,
                )
                self._slots.add(message.extent, extent)
                link.send(p.Mapped(message.extent))
            elif isinstance(message, p.Unmap):
                self._runner.drain()
                self._slots.remove(message.extent)
                link.send(p.Unmapped(message.extent))
            elif isinstance(message, p.Detach):
                log.info("kvstore: detached: %s", message.reason)
                return False
        return True


def _failed(job: StoreJob | LoadJob, _error: Exception) -> Outcome:
    if isinstance(job, StoreJob):
        return Outcome(ok=False, store_job=job.job_id)
    return Outcome(ok=False, request_id=job.request_id)
