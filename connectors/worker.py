"""The worker half: copies engine blocks to and from slots, and reports to the store itself.

Threads: the engine's step thread submits and collects; one thread copies; one talks to the store
(slot memory comes and goes, sessions end). Only memory is touched here, never a disk. A load whose
slots are still being filled from a lower tier is continued again and again, with other copies in
between, and is given up when no block arrives any more, or when it takes too long. So every copy
ends, and none waits for another. While a load waits the worker reports that: the store keeps its
lease, and answers whether what a peer sends or computes is still on its way.

The device knows where the engine's tensors are. On a GPU a copy is queued and
then polled, as a waiting load is; in host memory it has ended when the call returns. A job ends,
complete or failed, only when nothing of it is being copied any more.

When a session ends, all work planned under it stops: jobs carry the session's number, and a job of
another session copies nothing. The socket is closed only after the last copy, because the store
reuses slots as soon as it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec

from connectors.copies.host import (
    Copier,
    Copying,
    Device,
    LayerCache,
    MappedExtent,
    SlotMap,
    device_of,
)
from connectors.load_progress import LoadDeadline, SlotLoad
from connectors.step_meta import LoadJob, StepMeta, StoreJob, pieces
from connectors.store_connection import Link, LinkLost, Refusals, attach
from kvstore.core.errors import KVStoreError, NotSupported, TierError
from kvstore.core.layout import Move, RankGeometry, RankLayout
from kvstore.units import shown
from kvstore.wire import engine as p
from kvstore.wire import framing
from tiers.runner import NOTHING, Nothing, Runner

if TYPE_CHECKING:  # settings are read elsewhere; direct transfers load NIXL, see _direct_transfers
    from connectors.config import DirectWay
    from connectors.direct_reads import DirectTransfers, PeerLoad, PeerWrite, WriteEnd

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.02
SHUTDOWN_WAIT_S = 5.0  # for stores that are queued; a copy takes milliseconds
_READ_S = 0.1
_FETCH_MESSAGES = p.Places | p.Push | p.Passed


class StoreTask(msgspec.Struct, eq=False):
    """A store and its state; made by the step thread, then the copy thread's."""

    job: StoreJob
    mark: int  # of the device: copies begin behind it
    copying: Copying | None = None
    link: Link | None = None  # that the copy was begun under
    started: float = 0.0


class LoadTask(msgspec.Struct, eq=False):
    """A load and its state; made by the step thread, then the copy thread's."""

    job: LoadJob
    mark: int  # of the device: copies begin behind it
    deadline: LoadDeadline | None = None
    slots: SlotLoad | None = None  # the part that comes from slots
    peer: PeerLoad | None = None  # the part that comes straight from a peer
    mark_passed: bool = False
    broken: bool = False  # copying from slots raised an error
    outcome: Outcome | None = None  # once it has ended
    started: float = 0.0  # the copy that is under way

    @property
    def slots_ok(self) -> bool:
        """True if all that comes from slots has come; asked once that is over."""
        return not self.broken and self.slots is not None and self.slots.ok


class Outcome(msgspec.Struct, frozen=True):
    """How a store or a load ended."""

    task: StoreTask | LoadTask
    ok: bool
    copied_bytes: int = 0
    late: bool = False  # a load was given up: blocks had not come in time
    seconds: float = 0.0  # that copying from slots took


class WriteTask(msgspec.Struct, eq=False):
    """A write to a peer's engine, for the session of this link."""

    write: PeerWrite
    link: Link


Task = StoreTask | LoadTask | WriteTask


class WorkerHalf:
    """One rank's side of the connector."""

    def __init__(  # noqa: PLR0913 - its identity, its tensors, its store
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
        direct: peers' blocks are read straight into the tensors ("pull"), or written there by the
            peer ("push"), where that is possible; "" for neither.
        store_user: may run the store, beside our own user and root.
        """
        self.refused: KVStoreError | None = None
        self._direct = _direct_transfers(caches, pushed=direct == "push") if direct else None
        self._hello = p.Hello(
            p.VERSION,
            engine,
            "worker",
            rank,
            world,
            geometry=geometry,
            direct=self._direct is not None,
        )
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._device = device_of(caches) if device is None else device
        self._find_store, self._store_user = find_store, store_user
        self._link: Link | None = None
        self._session = 0
        self._copier: Copier | None = None
        self._slots = SlotMap()
        self._wait_ns = self._limit_ns = 0
        self._deadlines: dict[int, LoadDeadline] = {}  # of waiting loads, by lease
        self._stores_over: set[int] = set()
        self._stores_open: dict[int, StoreTask] = {}
        self._loads_open: set[str] = set()
        self._bad_blocks: set[int] = set()  # of the engine, that a load in this step did not fill
        self._loaded_bytes, self._loaded_s = 0, 0.0
        self._idle_loads: set[str] = set()  # open loads that wait and copy nothing
        self._writes_open: set[int] = set()  # to peers
        self._stats: Counter[str] = Counter()
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
            # The device does not know copies that are only queued here; that takes a moment.
            self._runner.wait(lambda: all(self._begun(task) for task in wanted))
            self._device.fence(task.copying for task in wanted if task.copying is not None)

    def _begun(self, task: StoreTask) -> bool:
        return task.copying is not None or task.job.job_id not in self._stores_open

    def start_loads(self, meta: StepMeta) -> None:
        """Queue this step's loads, and end those that its forward pass reads from."""
        if meta.loads:
            mark = self._device.mark()
            tasks = [LoadTask(job, mark) for job in meta.loads]
            for task in tasks:
                self._loads_open.add(task.job.request_id)
                self._runner.submit(task, first=task.job.in_step)
            self._end_in_step([task for task in tasks if task.job.in_step])

    def _end_in_step(self, tasks: Sequence[LoadTask]) -> None:
        """Wait for loads. They copy from memory and wait for no block, so that is a moment."""
        if not tasks:
            return
        self._runner.wait(lambda: all(task.outcome is not None for task in tasks))
        for task in tasks:
            if task.outcome is None or not task.outcome.ok:
                self._bad_blocks.update(task.job.engine.block_ids)

    def take_bad_blocks(self) -> set[int]:
        """Return the engine blocks that loads in this step did not fill; what was read is wrong."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_copied(self) -> tuple[int, float]:
        """Return how much loads have copied from slots since the last call, in which time."""
        copied = self._loaded_bytes, self._loaded_s
        self._loaded_bytes, self._loaded_s = 0, 0.0
        return copied

    def after_forward(self, meta: StepMeta) -> None:
        """Queue the stores whose sources this step has just computed."""
        self._submit_stores(meta.stores)

    def _submit_stores(self, jobs: Sequence[StoreJob]) -> None:
        if jobs:
            mark = self._device.mark()
            for job in jobs:
                task = self._stores_open[job.job_id] = StoreTask(job, mark)
                self._runner.submit(task)

    def finished_loads(self, meta: StepMeta) -> tuple[set[str], set[str]]:
        """Return requests whose load has ended, and which of these failed; each exactly once.

        A load that ended in its step is not among them: its request did not wait.

        In a step that computes nothing, wait a moment for loads that are almost there: the next
        step would come too soon.
        """
        if meta.idle and self._loads_open:
            self._runner.wait(lambda: not self._loads_open, IDLE_WAIT_S)
        ended: set[str] = set()
        failed: set[str] = set()
        for outcome in self._runner.poll():
            if isinstance(outcome.task, LoadTask):
                names = () if outcome.task.job.in_step else (outcome.task.job.request_id,)
                ended.update(names)
                self._loaded_bytes += outcome.copied_bytes if outcome.seconds else 0
                self._loaded_s += outcome.seconds
                if not outcome.ok:
                    failed.update(names)
                    self._stats["failed_loads"] += 1
                    self._stats["given_up_loads"] += outcome.late
                self._stats["load_bytes"] += outcome.copied_bytes
            else:
                self._stores_over.add(outcome.task.job.job_id)
                self._stats["failed_stores"] += not outcome.ok
                self._stats["store_bytes"] += outcome.copied_bytes
        return ended, failed

    def take_stores_over(self) -> frozenset[int]:
        """Return store jobs that have ended since the last call, failed ones too."""
        over, self._stores_over = frozenset(self._stores_over), set()
        return over

    def take_stats(self) -> Counter[str]:
        """Return what was counted since the last call."""
        stats, self._stats = self._stats, Counter()
        return stats

    def shutdown(self) -> None:
        """Finish stores, close the connection, end the threads; safe to call twice.

        Loads that are queued end as failed: the engine does not wait for them any more.
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
        """Start or continue a task; None while it is under way."""
        if isinstance(task, WriteTask):
            return self._write(task)
        outcome: Outcome | None = Outcome(task, ok=False)  # if an error gets past what follows
        try:
            outcome = self._store(task) if isinstance(task, StoreTask) else self._load(task)
        finally:
            if outcome is not None and isinstance(task, StoreTask):
                self._stores_open.pop(task.job.job_id, None)
            elif outcome is not None and isinstance(task, LoadTask):
                self._loads_open.discard(task.job.request_id)
                task.outcome = outcome
        return outcome

    def _raised(self, task: Task, _error: Exception) -> Outcome | Nothing:
        """End a task that a bug has ended; the store waits for the end of a write."""
        if isinstance(task, WriteTask):
            self._write_ended(task, "failed")
            return NOTHING
        return Outcome(task, ok=False)

    def _write(self, task: WriteTask) -> Nothing | None:
        """Write engine blocks to a peer's; None while that is under way."""
        if self._direct is not None:
            over = task.link is not self._link
            end = self._direct.advance_write(task.write, monotonic_ns(), session_over=over)
            if end is None:
                return None
            self._write_ended(task, end)
        return NOTHING

    def _write_ended(self, task: WriteTask, end: WriteEnd) -> None:
        number = task.write.message.write
        self._writes_open.discard(number)
        copied = task.write.bytes if end == "all" else 0
        self._send(task.link, p.BlocksWritten(number, end, copied))

    def _store(self, task: StoreTask) -> Outcome | None:
        """Begin the copy, then wait for its end; None while it is under way."""
        job, link, copier, ok = task.job, self._link, self._copier, True
        try:
            if task.copying is None:
                if job.session != self._session or link is None or copier is None:
                    return Outcome(task, ok=False)
                task.link, task.started = link, time.perf_counter()
                moves = pieces(job.engine, job.slots, self._blocks_per_chunk)
                task.copying = copier.copy(moves, self._slots, store=True, after=task.mark)
            if not task.copying.over():
                return None
        except (TierError, ValueError) as exc:
            log.error("store of %d blocks failed: %s", len(job.keys), exc)
            ok = False
        seconds = time.perf_counter() - task.started
        if task.link is not None:  # open until the last copy is over, also if the session is not
            stored = p.Stored(framing.u32(job.slots), job.keys, job.parents, ok, seconds)
            self._send(task.link, stored)
        copied = task.copying.bytes if ok and task.copying is not None else 0
        return Outcome(task, ok, copied)

    def _load(self, task: LoadTask) -> Outcome | None:
        """Copy what is ready; None while slots are still being filled, or copied."""
        job, link, copier, now_ns = task.job, self._link, self._copier, monotonic_ns()
        self._idle_loads.discard(job.request_id)
        if job.session != self._session or link is None or copier is None:
            return self._abandon(task, now_ns)
        slots_over = task.broken
        try:
            if task.slots is None and not task.broken:
                self._begin_load(task, now_ns)
            if task.slots is not None and not task.broken:
                slots_over = self._advance_slots(task, task.slots, copier, now_ns)
        except (TierError, ValueError) as exc:
            log.error("load for %s failed: %s", job.request_id, exc)
            slots_over = task.broken = True
        peer_over = True
        if task.peer is not None and self._direct is not None:
            task.peer.failed = task.peer.failed or (slots_over and not task.slots_ok)
            peer_over = self._advance_peer(self._direct, task, task.peer, now_ns)
        if peer_over and slots_over:
            return self._loaded(task, link, now_ns)
        if task.deadline is not None and task.deadline.should_ask(now_ns):
            self._send(link, p.Loading(job.lease))
        if task.slots is None or not task.slots.copying:
            self._idle_loads.add(job.request_id)
        return None

    def _begin_load(self, task: LoadTask, now_ns: int) -> None:
        """Start a load. Raises ValueError if its blocks and slots differ."""
        job = task.job
        wait_ns = 0 if job.in_step else self._wait_ns
        deadline = LoadDeadline(wait_ns, self._limit_ns, now_ns)
        task.slots = SlotLoad(job, self._blocks_per_chunk, deadline)
        if self._direct is not None:
            task.peer = self._direct.start_load(job, self._blocks_per_chunk, deadline)
        task.deadline = self._deadlines[job.lease] = deadline

    def _loaded(self, task: LoadTask, link: Link, now_ns: int) -> Outcome:
        """Report a load that is over."""
        job, load, peer = task.job, task.slots, task.peer
        self._deadlines.pop(job.lease, None)
        slots = [slot for slot in job.slots if slot < p.DIRECT]
        damaged = slots if task.broken or load is None else load.damaged
        if damaged:
            log.warning(
                "load for %s failed: %d slots no longer hold the leased blocks",
                job.request_id,
                len(damaged),
            )
        copied, seconds = (0, 0.0) if load is None else (load.copied_bytes, load.seconds)
        late = (0 if load is None else load.late) + (0 if peer is None else peer.late)
        if late and task.deadline is not None:
            _warn_late(job, late, task.deadline, now_ns)
        self._send(link, p.Loaded(job.lease, copied, seconds, framing.u32(damaged), late))
        ok = task.slots_ok
        if peer is not None:
            seconds = 0.0  # it says nothing of a copy in this memory
            copied += peer.copied_bytes + peer.written_bytes
            ok = ok and not peer.failed
        return Outcome(task, ok, copied, late > 0, seconds)

    def _advance_peer(
        self, direct: DirectTransfers, task: LoadTask, peer: PeerLoad, now_ns: int
    ) -> bool:
        """Continue what comes from a peer; True when that is over.

        Nothing is moved into blocks that earlier work of the engine may still use.
        """
        if not task.mark_passed and not peer.failed:
            try:
                task.mark_passed = self._device.passed(task.mark)
            except TierError as exc:
                log.error("nothing is read from a peer: %s", exc)
                peer.failed = True
            peer.deadline.restart(now_ns)  # the engine may be steps ahead
        if not task.mark_passed and not peer.failed:
            return False
        return direct.advance(peer, now_ns)

    def _advance_slots(self, task: LoadTask, load: SlotLoad, copier: Copier, now_ns: int) -> bool:
        """Copy what has become ready; True when that was all. Raises TierError."""
        if not load.copying:
            task.started = time.perf_counter()

        def copy(moves: Sequence[Move]) -> Copying:
            return copier.copy(moves, self._slots, store=False, after=task.mark)

        over = load.advance(copy, self._slots.generations, now_ns)
        if not load.copying:
            load.seconds += time.perf_counter() - task.started
        return over

    def _abandon(self, task: LoadTask, now_ns: int) -> Outcome | None:
        """End a load whose session is over; None while its engine blocks are being written."""
        job, load = task.job, task.slots
        self._deadlines.pop(job.lease, None)
        if task.peer is not None and self._direct is not None:
            task.peer.failed = True
            if not self._direct.cancel(task.peer, now_ns):
                return None
        copied = 0 if load is None else load.copied_bytes
        try:
            if load is not None and not load.end_copy(self._slots.generations):
                return None
        except TierError as exc:
            log.error("load for %s failed: %s", job.request_id, exc)
        return Outcome(task, ok=False, copied_bytes=copied)

    def _send(self, link: Link, message: framing.Message) -> None:
        try:
            link.send(message)
        except LinkLost as exc:  # the link thread sees it too, and ends the session
            log.debug("%s not sent: %s", type(message).__name__, exc)

    # The link thread

    def _talk(self) -> None:
        while not self._stop.is_set():
            try:
                attached = attach(self._find_store, self._hello, self._stop, self._store_user)
                if attached is None:
                    return
                link, welcome = attached
                self._serve(link, welcome)
            except KVStoreError as exc:
                # Not for good: the scheduler half, which attaches later, is refused only in a
                # session that has us in it; and a store may come back with other settings.
                if not self._stop.is_set():
                    self.refused = exc.with_traceback(None)  # which would keep what failed
                    self._stop.wait(self._refusals.wait_s(exc))

    def _serve(self, link: Link, welcome: p.Welcome) -> None:
        """Serve a session until it ends. Raises TierError for memory that copies cannot use."""
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
            if self._direct is not None:
                self._direct.end_session()
            self._runner.drain()
            for extent in self._slots.clear():
                self._device.unpin(extent)
            link.close()

    def _open_direct(
        self, direct: DirectTransfers, layout: RankLayout, devices: str, link: Link
    ) -> None:
        """Raises NotSupported where that cannot be; the next session is one without."""
        try:
            direct.open(layout, devices, partial(self._send, link))
        except NotSupported:
            self._direct = None
            self._hello = msgspec.structs.replace(self._hello, direct=False)
            raise

    def _uses_no_slots(self) -> bool:
        """Return True if nothing is being copied from slots that are about to go.

        Writes to peers use no slots, and the store does not unmap what a waiting load has leased.
        """
        return self._runner.open <= len(self._writes_open) + len(self._idle_loads)

    def _handle(self, link: Link, messages: Iterable[framing.Message]) -> bool:
        """Act on messages of the store; False if it ends the session."""
        for message in messages:
            if isinstance(message, p.Extent) and message.count:
                self._map(link, message)
            elif isinstance(message, p.Extent):
                self._runner.wait(self._uses_no_slots)
                removed = self._slots.remove(message.extent)
                if removed is not None:
                    self._device.unpin(removed)
                link.send(p.Mapped(message.extent, gone=True))
            elif isinstance(message, p.WriteBlocks) and self._direct is not None:
                self._writes_open.add(message.write)
                self._runner.submit(WriteTask(self._direct.new_write(message), link))
            elif isinstance(message, p.Coming):
                deadline = self._deadlines.get(message.lease)
                if deadline is not None:
                    deadline.on_coming(message, monotonic_ns())
            elif isinstance(message, _FETCH_MESSAGES) and self._direct is not None:
                self._direct.receive(message)
            elif isinstance(message, p.Detach):
                log.info("kvstore: detached: %s", message.reason)
                return False
        return True

    def _map(self, link: Link, message: p.Extent) -> None:
        """Map an extent, pin it, and say that its slots can be used."""
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


def _warn_late(job: LoadJob, late: int, deadline: LoadDeadline, now_ns: int) -> None:
    blocks = len(job.slots)
    log.warning(
        "load for request %s given up: %d of %d blocks from %s came, the last sign of one %.1f s"
        " ago, in %.1f s; the request is computed",
        shown(job.request_id),
        blocks - late,
        blocks,
        shown(job.source),
        deadline.quiet_ns(now_ns) / 1e9,
        deadline.total_ns(now_ns) / 1e9,
    )


def _direct_transfers(caches: dict[str, LayerCache], *, pushed: bool) -> DirectTransfers | None:
    from connectors.direct_reads import DirectTransfers  # noqa: PLC0415 - it loads NIXL

    try:
        return DirectTransfers(caches, pushed=pushed)
    except NotSupported as exc:
        log.warning("kvstore: %s; blocks of peers go through the store's memory", exc)
        return None
