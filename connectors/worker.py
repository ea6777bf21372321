"""The worker half: copies engine blocks to and from slots, and reports to the store itself.

Threads: the engine's step thread submits and collects; one thread copies (worker_copies.py); one
talks to the store (slot memory comes and goes, sessions end).

An engine calls, in each step: before_step, which ends copies that the step would overwrite;
start_loads; after_forward, which starts stores; finished_loads.

When a session ends, all work planned in it stops: jobs carry the session's number, and a job of
another session copies nothing. The socket is closed only after the last copy, because the store
reuses slots as soon as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from connectors.copies.host import Device, LayerCache, MappedExtent, device_of
from connectors.step_meta import StepMeta, StoreJob
from connectors.store_connection import Attacher, Link, LinkLost
from connectors.worker_copies import Copies, LoadTask, Session
from kvstore import clock
from kvstore.core.errors import KVStoreError, NotSupported, TierError, TierFull
from kvstore.core.layout import RankGeometry, RankLayout
from kvstore.wire import engine as p
from kvstore.wire import framing

if TYPE_CHECKING:  # settings are read elsewhere; direct transfers load NIXL, see _direct_transfers
    from connectors.config import DirectWay
    from connectors.direct_reads import DirectTransfers

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.02
SHUTDOWN_WAIT_S = 5.0  # for stores that are queued; a copy takes milliseconds
_READ_S = 0.1
_FETCH_MESSAGES = p.Places | p.Passed


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
        transfers = _direct_transfers(caches, pushed=direct == "push") if direct else None
        hello = p.Hello(
            p.VERSION,
            engine,
            "worker",
            rank,
            world,
            geometry=geometry,
            direct=transfers is not None,
        )
        self._device = device_of(caches) if device is None else device
        self._copies = Copies(self._device, geometry.blocks_per_chunk, transfers)
        self._due: Sequence[StoreJob] = ()  # stores of this step that are not queued yet
        self._stores_over: set[int] = set()
        self._bad_blocks: set[int] = set()  # of the engine, that a load in this step did not fill
        self._loaded_bytes, self._loaded_s = 0, 0.0
        self._stats: Counter[str] = Counter()
        self._attacher = Attacher(find_store, hello, store_user, self._serve)
        self._attacher.start()

    # The engine's step

    def before_step(self, meta: StepMeta) -> None:
        """First call of every step: nothing below may overwrite what is still being read.

        An engine may leave after_forward out: vLLM's model runner V1 does with speculative
        decoding, on all pipeline stages but the last. Those stores are queued here.
        """
        self._submit_stores(self._due)
        self._due = meta.stores
        self._submit_stores(meta.early)
        wanted = [t for n in meta.flush if (t := self._copies.stores_open.get(n)) is not None]
        if wanted:
            # The device does not know copies that are only queued here; that takes a moment.
            self._copies.runner.wait(lambda: all(task.over or task.copying for task in wanted))
            self._device.fence(task.copying for task in wanted if task.copying is not None)

    def start_loads(self, meta: StepMeta) -> None:
        """Queue this step's loads, and end those that its forward pass reads from."""
        if not meta.loads:
            return
        mark = self._device.mark()
        tasks = [self._copies.load(job, mark) for job in meta.loads]
        awaited = [task for task in tasks if task.job.in_step]
        if awaited:  # they copy from memory and wait for no block, so that is a moment
            self._copies.runner.wait(lambda: all(task.over for task in awaited))
        for task in awaited:
            if not task.ok:
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
        self._due = ()

    def _submit_stores(self, jobs: Sequence[StoreJob]) -> None:
        if jobs:
            mark = self._device.mark()
            for job in jobs:
                self._copies.store(job, mark)

    def finished_loads(self, meta: StepMeta) -> tuple[set[str], set[str]]:
        """Return requests whose load has ended, and which of these failed; each exactly once.

        A load that ended in its step is not among them: its request did not wait.

        In a step that computes nothing, wait a moment for loads that are almost there: the next
        step would come too soon.
        """
        if meta.idle and self._copies.loads_open:
            self._copies.runner.wait(lambda: not self._copies.loads_open, IDLE_WAIT_S)
        ended: set[str] = set()
        failed: set[str] = set()
        for task in self._copies.runner.poll():
            if isinstance(task, LoadTask):
                names = () if task.job.in_step else (task.job.request_id,)
                ended.update(names)
                self._loaded_bytes += task.copied_bytes if task.seconds else 0
                self._loaded_s += task.seconds
                if not task.ok:
                    failed.update(names)
                    self._stats["failed_loads"] += 1
                    self._stats["given_up_loads"] += task.late
                self._stats["load_bytes"] += task.copied_bytes
            else:
                self._stores_over.add(task.job.job_id)
                self._stats["failed_stores"] += not task.ok
                self._stats["store_bytes"] += task.copied_bytes
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
        self._copies.runner.wait(lambda: not self._copies.stores_open, SHUTDOWN_WAIT_S)
        self._attacher.close()
        self._copies.runner.close()
        if self._copies.direct is not None:
            self._copies.direct.close()
        self._device.close()

    # The link thread

    def _serve(self, link: Link, welcome: p.Welcome) -> None:
        """Serve a session until it ends. Raises TierError for memory that copies cannot use."""
        copies, session, fault = self._copies, None, ""
        self._device.enter_thread()
        try:
            if welcome.layout is None:
                raise TierError("the store's welcome has no layout")
            session = Session(link, welcome, self._device.copier(welcome.layout))
            if copies.direct is not None and welcome.devices:
                self._open_direct(copies.direct, welcome.layout, welcome.devices, session)
            copies.session = session
            while not self._attacher.stop.is_set() and self._handle(session, link.receive(_READ_S)):
                pass
        except LinkLost as exc:
            log.debug("kvstore: %s", exc)  # the scheduler half warns of it
        except KVStoreError as exc:
            fault = str(exc)
            raise
        finally:
            copies.session = None  # copies planned for this session stop here
            if copies.direct is not None:
                copies.direct.end_session()
            copies.runner.drain()
            link.close(fault)  # the store need not wait while a large tier is unpinned
            for extent in () if session is None else session.slots.clear():
                self._device.unpin(extent)

    def _open_direct(
        self, direct: DirectTransfers, layout: RankLayout, devices: str, session: Session
    ) -> None:
        """Raises NotSupported where that cannot be; the next session is one without."""
        try:
            direct.open(layout, devices, session.send)
        except NotSupported:
            self._copies.direct = None
            self._attacher.hello = msgspec.structs.replace(self._attacher.hello, direct=False)
            raise

    def _handle(self, session: Session, messages: Iterable[framing.Message]) -> bool:
        """Act on messages of the store; False if it ends the session."""
        direct = self._copies.direct
        for message in messages:
            if isinstance(message, p.Extent) and message.count:
                self._map(session, message)
            elif isinstance(message, p.Extent):
                self._copies.runner.wait(self._copies.use_no_slots)
                removed = session.slots.remove(message.extent)
                if removed is not None:
                    self._device.unpin(removed)
                session.link.send(p.Mapped(message.extent, gone=True))
            elif isinstance(message, p.Coming):
                deadline = session.deadlines.get(message.lease)
                if deadline is not None:
                    deadline.on_coming(message, clock.now_ns())
            elif isinstance(message, _FETCH_MESSAGES) and direct is not None:
                direct.receive(message)
            elif isinstance(message, p.Detach):
                log.debug("kvstore: detached: %s", message.reason)
                return False
        return True

    def _map(self, session: Session, message: p.Extent) -> None:
        """Map an extent, pin it, and say that its slots can be used."""
        fd = session.link.take_fd()
        try:
            extent = MappedExtent(fd, message)
        except (OSError, ValueError) as exc:
            raise TierFull(f"{message.bytes} bytes of the store cannot be mapped: {exc}") from exc
        self._device.pin(extent, self._attacher.stop.is_set)
        session.slots.add(message.extent, extent)
        self._attacher.refusals.attached()
        session.link.send(p.Mapped(message.extent))


def _direct_transfers(caches: dict[str, LayerCache], *, pushed: bool) -> DirectTransfers | None:
    from connectors.direct_reads import DirectTransfers  # noqa: PLC0415 - it loads NIXL

    try:
        return DirectTransfers(caches, pushed=pushed)
    except NotSupported as exc:
        log.warning("kvstore: %s; blocks of peers go through the store's memory", exc)
        return None
