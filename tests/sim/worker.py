"""A worker half in a simulated world: it copies a few engine blocks at a time, when it may."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from connectors.copies.host import Copying
from connectors.load_progress import LoadDeadline, SlotLoad
from connectors.step_meta import LoadJob, Moves, StepMeta, StoreJob, pieces
from connectors.store_connection import LinkLost
from kvstore.core.errors import TierError, check
from kvstore.core.layout import Move, RankLayout
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.moves import listed
from tests.reference import Shape
from tests.sim.store import MS, Extent, Joiner, Net, Wire


class Worker:
    """One rank's worker half; copies a few engine blocks at a time, whenever it is let."""

    def __init__(
        self, net: Net, hello: p.Hello, shape: Shape, memory: bytearray, rng: random.Random
    ) -> None:
        self.errors = 0.0  # share of loads whose bytes turn out wrong
        self.errors_in_step = 0.0  # likewise, of those that a step waits for: there are few
        self.stalled_until = 0
        self.slowness = 0.0  # share of its turns in which it copies nothing
        self._rng = rng
        self.loads_open: set[str] = set()
        self.stores_open: set[int] = set()
        self.wire: Wire | None = None
        self._net = net
        self._rank = hello.rank
        self._shape = shape
        self.memory = memory
        self._per = tuple(shape.block_tokens // tokens for tokens in shape.group_tokens)
        self._joiner = Joiner(net, hello)
        self._session = 0
        self._layout: RankLayout | None = None
        self._extents: dict[int, tuple[int, Extent]] = {}
        self._queue: deque[StoreJob | LoadJob] = deque()
        self._copying: Iterator[bool] | None = None
        self._waiting: deque[Iterator[bool]] = deque()  # loads whose slots are being filled
        self._waits_ns = 0, 0
        self._deadline: dict[int, LoadDeadline] = {}  # by lease
        self.counts: Counter[str] = Counter()
        self.meanwhile: Callable[[], None] = lambda: None  # in the middle of a load's copies
        self._ending = False
        self._dies_ns: int | None = None  # its engine is dead, and it will be then
        self._ended: list[tuple[str, bool]] = []  # request, whether its load was good
        self._bad_blocks: set[int] = set()
        self._over: set[int] = set()
        self._stats: Counter[str] = Counter()
        self._joiner.start()

    # The engine's step, as in connectors.worker

    def before_step(self, meta: StepMeta) -> None:
        for job in meta.early:
            self._submit(job)
        while self.stores_open.intersection(meta.flush):
            self.copy(1)

    def start_loads(self, meta: StepMeta) -> None:
        for job in meta.loads:
            self.loads_open.add(job.request_id)
            if job.in_step:
                self._queue.appendleft(job)
            else:
                self._queue.append(job)
        for job in meta.loads:
            while job.in_step and job.request_id in self.loads_open:
                self.copy(1)

    def after_forward(self, meta: StepMeta) -> None:
        for job in meta.stores:
            self._submit(job)

    def _submit(self, job: StoreJob) -> None:
        self.stores_open.add(job.job_id)
        self._queue.append(job)

    def take_bad_blocks(self) -> set[int]:
        """Return the engine blocks that loads in this step did not fill."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def finished_loads(self, meta: StepMeta) -> tuple[set[str], set[str]]:
        """In a step that computes nothing loads are waited for: some end in the one they began."""
        if meta.idle and self.loads_open and self._wakes():
            self.copy(40)
        ended, self._ended = self._ended, []
        failed = [request for request, ok in ended if not ok]
        self._stats["failed_loads"] += len(failed)
        return {request for request, _ in ended}, set(failed)

    def take_stores_over(self) -> frozenset[int]:
        over, self._over = frozenset(self._over), set()
        return over

    def take_stats(self) -> Counter[str]:
        stats, self._stats = self._stats, Counter()
        return stats

    # The copy thread

    @property
    def busy(self) -> bool:
        return self._copying is not None or bool(self._queue) or bool(self._waiting)

    @property
    def idle(self) -> bool:
        """Tell whether everything is copied, and the engine knows."""
        return not (self.busy or self._ended or self._over)

    def turn(self) -> None:
        """The link's and the copy thread's turn."""
        self.talk()
        if self.busy and self._wakes():
            self.copy(self._rng.choice((1, 4, 40)))

    def _wakes(self) -> bool:
        return self._net.now >= self.stalled_until and self._rng.random() >= self.slowness

    def copy(self, moves: int) -> None:
        """Copy up to this many engine blocks; loads that wait for slots let others pass."""
        for _ in range(moves):
            if self._copying is None:
                self._copying = self._take()
            if self._copying is None:
                return
            goes_on = next(self._copying, None)
            if goes_on is False:
                self._waiting.append(self._copying)
            if not goes_on:
                self._copying = None

    def _take(self) -> Iterator[bool] | None:
        if self._waiting and (not self._queue or self._rng.random() < 0.5):
            return self._waiting.popleft()
        if not self._queue:
            return None
        job = self._queue.popleft()
        return self._store(job) if isinstance(job, StoreJob) else self._load(job)

    def _store(self, job: StoreJob) -> Iterator[bool]:
        """Yield True after each engine block."""
        wire = self.wire
        if job.session == self._session and wire is not None:
            for move in listed(pieces(job.engine, job.slots, self._per)):
                self._move(move, store=True)
                yield True
            self._tell(wire, p.Stored(framing.u32(job.slots), job.keys, job.parents, True, 1e-6))
        self.stores_open.discard(job.job_id)
        self._over.add(job.job_id)

    def _load(self, job: LoadJob) -> Iterator[bool]:
        """Yield False while slots are still being filled."""
        ok, load = False, None
        while job.session == self._session and self.wire is not None:
            if load is None:
                wait_ns, limit_ns = self._waits_ns
                deadline = LoadDeadline(0 if job.in_step else wait_ns, limit_ns, self._net.now)
                self._deadline[job.lease] = deadline
                load = SlotLoad(job, self._per, deadline)
            try:
                over = load.advance(self._fill, self._generations, self._net.now)
            except TierError:
                assert not self._is_leased(job.lease), "memory was taken from under a lease"
                self._tell(self.wire, p.Loaded(job.lease, 0, 1e-6, framing.u32(job.slots)))
                break
            if over:
                damaged = load.damaged or [s for s in job.slots if self._errs(job)]
                ok = load.ok and not damaged
                self.counts["late"] += load.late > 0
                self._tell(self.wire, p.Loaded(job.lease, 1, 1e-6, framing.u32(damaged), load.late))
                break
            if deadline.should_ask(self._net.now):
                self._tell(self.wire, p.Loading(job.lease))
            self.counts["waits"] += 1
            yield False
        self.loads_open.discard(job.request_id)
        if not ok:
            self._spoil(job.engine.block_ids)
        if not job.in_step:
            self._ended.append((job.request_id, ok))
            return
        self.counts["in_step"] += 1
        if not ok:
            self.counts["in_step_failed"] += 1
            self._bad_blocks.update(job.engine.block_ids)

    def _spoil(self, blocks: Iterable[int]) -> None:
        """Leave wrong bytes, as a load does whose slots were reused."""
        size = self._shape.page_bytes
        for block in blocks:
            self.memory[block * size : (block + 1) * size] = bytes(size)

    def _is_leased(self, lease: int) -> bool:
        store = self._net.store
        found = [] if store is None else store.namespaces.values()
        return any(lease in namespace.manager.leases._leases for namespace in found)

    def _errs(self, job: LoadJob) -> bool:
        return self._rng.random() < (self.errors_in_step if job.in_step else self.errors)

    def _fill(self, moves: Moves) -> Copying:
        for number, move in enumerate(listed(moves)):
            if number and self._rng.random() < 0.1:
                self.meanwhile()
            self._move(move, store=False)
        return Copying(len(moves))

    def _tell(self, wire: Wire, message: framing.Message) -> None:
        with contextlib.suppress(LinkLost):
            wire.send(message)

    def _extent(self, slot: int) -> tuple[int, Extent]:
        for first, extent in self._extents.values():
            if first <= slot < first + extent.count:
                return slot - first, extent
        raise TierError(f"slot {slot} is not mapped here")

    def _generations(self, slots: NDArray[np.int64]) -> NDArray[np.uint32]:
        places = [self._extent(int(slot)) for slot in slots]
        return np.array([extent.generations[at] for at, extent in places], np.uint32)

    def _move(self, move: Move, *, store: bool) -> None:
        assert self._layout is not None, "a copy before the welcome"
        layout = self._layout.groups[move.group]
        run = layout.runs[0]
        position, extent = self._extent(move.slot)
        there = position * extent.slot_bytes + move.part * layout.stride + run.offset
        here = move.block_id * self._shape.page_bytes
        size = self._shape.group_tokens[move.group] * self._shape.token_bytes
        check(run.length == size, "the layout's run is not a page")
        if store:
            extent.data[there : there + size] = self.memory[here : here + size]
        else:
            self.memory[here : here + size] = extent.data[there : there + size]

    # The link thread

    def lose(self) -> None:
        """The connection breaks."""
        self._ending = self.wire is not None

    def orphan(self, until_ns: int) -> None:
        """Its engine is dead: it ends what it was given, and dies itself some time later."""
        self._dies_ns = until_ns
        self._joiner.close()

    def dies(self) -> bool:
        """Die if it is time; True if it is dead."""
        if self._dies_ns is None or self._net.now < self._dies_ns:
            return False
        if self.wire is not None:
            self.wire.close()
        return True

    def talk(self) -> None:
        if self.wire is None:
            taken = self._joiner.take()
            if taken is None:
                return
            self.wire, self._session = taken[0], taken[1].session
            welcome = taken[1]
            self._layout = welcome.layout
            self._waits_ns = welcome.wait_ms * MS, welcome.limit_ms * MS
        try:
            while not self._ending:
                message = self.wire.pop()
                if message is None:
                    break
                self._handle(self.wire, message)
        except LinkLost:
            self._ending = True
        if self._ending:
            self._session = 0
            if not self.busy:
                self._extents.clear()
                self.wire.close()
                self.wire, self._ending = None, False
                if self._dies_ns is None:
                    self._joiner.start()

    def _handle(self, wire: Wire, message: framing.Message) -> None:
        if isinstance(message, p.Extent) and message.count:
            self._extents[message.extent] = (message.first, wire.fds.popleft())
            wire.send(p.Mapped(message.extent))
        elif isinstance(message, p.Coming):
            if message.lease in self._deadline:
                self._deadline[message.lease].on_coming(message, self._net.now)
        elif isinstance(message, p.Extent):
            while self.busy:
                self.copy(1)
                self._net.now += MS // 10
                self._net.pump()
            self._extents.pop(message.extent, None)
            wire.send(p.Mapped(message.extent, gone=True))
        elif isinstance(message, p.Detach):
            self._ending = True
