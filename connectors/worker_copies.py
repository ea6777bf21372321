"""The copies of one rank: stores and loads, made by a thread of their own.

Only memory is touched here, never a disk. A load whose slots are still being filled from a lower
tier is continued again and again, with other copies in between, and is given up when no block
arrives any more, or when it takes too long. So every copy ends, and none waits for another. While
a load waits the store hears that: it keeps the lease, and answers whether what a peer sends or
computes is still on its way.

On a GPU a copy is queued and then polled, as a waiting load is; in host memory it has ended when
the call returns. A job ends, complete or failed, only when nothing of it is being copied any more.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from connectors.copies.host import Copier, Copying, Device, SlotMap
from connectors.load_progress import LoadDeadline, SlotLoad
from connectors.step_meta import LoadJob, Moves, StoreJob, pieces
from connectors.store_connection import Link, LinkLost
from kvstore import clock
from kvstore.core.errors import TierError
from kvstore.units import shown
from kvstore.wire import engine as p
from kvstore.wire import framing
from tiers.runner import Runner

if TYPE_CHECKING:  # direct transfers load NIXL
    from connectors.direct_reads import DirectTransfers, PeerLoad

log = logging.getLogger(__name__)


class Session:
    """One attachment of a worker to its store: the memory that copies use while it lasts."""

    def __init__(self, link: Link, welcome: p.Welcome, copier: Copier) -> None:
        self.number = welcome.session
        self.link, self.copier = link, copier
        self.slots = SlotMap()
        self.wait_ns = welcome.wait_ms * 1_000_000
        self.limit_ns = welcome.limit_ms * 1_000_000
        self.deadlines: dict[int, LoadDeadline] = {}  # of waiting loads, by lease

    def send(self, message: framing.Message) -> None:
        """Send to the store. The link thread sees, too, if that is gone, and ends the session."""
        try:
            self.link.send(message)
        except LinkLost as exc:
            log.debug("%s not sent: %s", type(message).__name__, exc)


class StoreTask(msgspec.Struct, eq=False):
    """A store and its state; made by the step thread, then the copy thread's."""

    job: StoreJob
    mark: int  # of the device: copies begin behind it
    copying: Copying | None = None
    session: Session | None = None  # that the copy was begun in
    started: float = 0.0
    over: bool = False  # it has ended,
    ok: bool = False  # and is complete
    copied_bytes: int = 0


class LoadTask(msgspec.Struct, eq=False):
    """A load and its state; made by the step thread, then the copy thread's."""

    job: LoadJob
    mark: int  # of the device: copies begin behind it
    session: Session | None = None  # that the load was begun in
    deadline: LoadDeadline | None = None
    slots: SlotLoad | None = None  # the part that comes from slots
    peer: PeerLoad | None = None  # the part that comes straight from a peer
    mark_passed: bool = False
    broken: bool = False  # copying from slots raised an error
    started: float = 0.0  # the copy that is under way
    over: bool = False  # it has ended,
    ok: bool = False  # and is complete
    late: bool = False  # it was given up: blocks had not come in time
    copied_bytes: int = 0
    seconds: float = 0.0  # that copying from slots took

    @property
    def slots_ok(self) -> bool:
        """True if all that comes from slots has come; asked once that is over."""
        return not self.broken and self.slots is not None and self.slots.ok


Task = StoreTask | LoadTask


class Copies:
    """Queues copies and makes them; other threads queue, wait, and see what is open."""

    def __init__(
        self, device: Device, blocks_per_chunk: tuple[int, ...], direct: DirectTransfers | None
    ) -> None:
        """blocks_per_chunk: engine blocks in a block, by group."""
        self.session: Session | None = None  # set by the link thread
        self.direct = direct
        self.stores_open: dict[int, StoreTask] = {}
        self.loads_open: set[str] = set()
        self.runner: Runner[Task, Task] = Runner("kvstore-copy", self._copy, lambda task, _: task)
        self._device = device
        self._entered = False  # the copy thread is ready for the device
        self._blocks_per_chunk = blocks_per_chunk
        self._idle_loads: set[str] = set()  # open loads that wait and copy nothing

    def store(self, job: StoreJob, mark: int) -> None:
        """Queue a store."""
        task = self.stores_open[job.job_id] = StoreTask(job, mark)
        self.runner.submit(task)

    def load(self, job: LoadJob, mark: int) -> LoadTask:
        """Queue a load, before all else if a step waits for it."""
        task = LoadTask(job, mark)
        self.loads_open.add(job.request_id)
        self.runner.submit(task, first=job.in_step)
        return task

    def use_no_slots(self) -> bool:
        """Return True if nothing is being copied from slots that are about to go.

        The store does not unmap what a waiting load has leased.
        """
        return self.runner.open <= len(self._idle_loads)

    # On the copy thread

    def _copy(self, task: Task) -> Task | None:
        """Start or continue a task; None while it is under way."""
        if not self._entered:
            self._entered = True
            self._device.enter_thread()
        over = True  # also if an error gets past what follows
        try:
            over = self._store(task) if isinstance(task, StoreTask) else self._load(task)
        finally:
            if over and isinstance(task, StoreTask):
                self.stores_open.pop(task.job.job_id, None)
            elif over and isinstance(task, LoadTask):
                self.loads_open.discard(task.job.request_id)
            task.over = over
        return task if over else None

    def _store(self, task: StoreTask) -> bool:
        """Begin the copy, then wait for its end; False while it is under way."""
        job, session, ok = task.job, self.session, True
        try:
            if task.copying is None:
                if session is None or job.session != session.number:
                    return True
                task.session, task.started = session, time.perf_counter()
                moves = pieces(job.engine, job.slots, self._blocks_per_chunk)
                task.copying = session.copier.copy(
                    moves, session.slots, store=True, after=task.mark
                )
            if not task.copying.over():
                return False
        except (TierError, ValueError) as exc:
            log.error("store of %d blocks failed: %s", len(job.keys), exc)
            ok = False
        seconds = time.perf_counter() - task.started
        if task.session is not None:  # its link is open until the last copy is over
            slots = framing.u32(job.slots)
            stored = p.Stored(slots, job.keys, job.parents, ok, seconds, job.off_disk)
            task.session.send(stored)
        task.ok, task.copied_bytes = ok, task.copying.bytes if ok and task.copying else 0
        return True

    def _load(self, task: LoadTask) -> bool:
        """Copy what is ready; False while slots are still being filled, or copied."""
        job, session, now_ns = task.job, self.session, clock.now_ns()
        self._idle_loads.discard(job.request_id)
        if session is None or job.session != session.number:
            return self._abandon(task, now_ns)
        slots_over = task.broken
        try:
            if task.slots is None and not task.broken:
                self._begin_load(task, session, now_ns)
            if task.slots is not None and not task.broken:
                slots_over = self._advance_slots(task, task.slots, session, now_ns)
        except (TierError, ValueError) as exc:
            log.error("load for %s failed: %s", shown(job.request_id), exc)
            slots_over = task.broken = True
        peer_over = True
        if task.peer is not None and self.direct is not None:
            task.peer.failed = task.peer.failed or (slots_over and not task.slots_ok)
            peer_over = self._advance_peer(self.direct, task, task.peer, now_ns)
        if peer_over and slots_over:
            self._loaded(task, session, now_ns)
            return True
        if task.deadline is not None and task.deadline.should_ask(now_ns):
            session.send(p.Loading(job.lease))
        if task.slots is None or not task.slots.copying:
            self._idle_loads.add(job.request_id)
        return False

    def _begin_load(self, task: LoadTask, session: Session, now_ns: int) -> None:
        """Start a load. Raises ValueError if its blocks and slots differ."""
        job = task.job
        wait_ns = 0 if job.in_step else session.wait_ns
        deadline = LoadDeadline(wait_ns, session.limit_ns, now_ns)
        task.session = session
        task.slots = SlotLoad(job, self._blocks_per_chunk, deadline)
        if self.direct is not None:
            task.peer = self.direct.start_load(job, self._blocks_per_chunk, deadline)
        task.deadline = session.deadlines[job.lease] = deadline

    def _loaded(self, task: LoadTask, session: Session, now_ns: int) -> None:
        job, load, peer = task.job, task.slots, task.peer
        session.deadlines.pop(job.lease, None)
        slots = [slot for slot in job.slots if slot < p.DIRECT]
        damaged = slots if task.broken or load is None else load.damaged
        if damaged:
            log.warning(
                "load for %s failed: %d slots no longer hold the leased blocks",
                shown(job.request_id),
                len(damaged),
            )
        copied, seconds = (0, 0.0) if load is None else (load.copied_bytes, load.seconds)
        late = (0 if load is None else load.late) + (0 if peer is None else peer.late)
        if late and task.deadline is not None:
            _warn_late(job, late, task.deadline, now_ns)
        session.send(p.Loaded(job.lease, copied, seconds, framing.u32(damaged), late))
        ok = task.slots_ok
        if peer is not None:
            seconds = 0.0  # it says nothing of a copy in this memory
            copied += peer.copied_bytes + peer.written_bytes
            ok = ok and not peer.failed
        task.ok, task.late, task.copied_bytes, task.seconds = ok, late > 0, copied, seconds

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

    def _advance_slots(self, task: LoadTask, load: SlotLoad, session: Session, now_ns: int) -> bool:
        """Copy what has become ready; True when that was all. Raises TierError."""
        if not load.copying:
            task.started = time.perf_counter()

        def copy(moves: Moves) -> Copying:
            return session.copier.copy(moves, session.slots, store=False, after=task.mark)

        over = load.advance(copy, session.slots.generations, now_ns)
        if not load.copying:
            load.seconds += time.perf_counter() - task.started
        return over

    def _abandon(self, task: LoadTask, now_ns: int) -> bool:
        """End a load whose session is over; False while its engine blocks are being written."""
        job, load, session = task.job, task.slots, task.session
        if task.peer is not None and self.direct is not None:
            task.peer.failed = True
            if not self.direct.cancel(task.peer, now_ns):
                return False
        task.copied_bytes = 0 if load is None else load.copied_bytes
        try:
            if load and session and not load.end_copy(session.slots.generations):
                return False
        except TierError as exc:
            log.error("load for %s failed: %s", shown(job.request_id), exc)
        return True


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
