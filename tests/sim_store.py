"""The simulation's wires, memory and workers: what lies between the real store and its engine."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.jobs import LoadJob, StepMeta, StoreJob, pieces
from connectors.link import LinkLost
from connectors.loads import Load
from connectors.reference import Shape
from kvstore import protocol as p
from kvstore.errors import KVStoreError, check
from kvstore.layout import Move, RankLayout
from kvstore.service.namespace import MemoryExtent
from kvstore.service.store import Store

US = 1_000
MS = 1_000_000


class Extent:
    """Slots in a bytearray, and their generations."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.fd, self.count, self.slot_bytes = fd, slots, slot_bytes
        self.generations_offset = slots * slot_bytes
        self.bytes = slots * (slot_bytes + 4)
        self.data = bytearray(b"\xaa" * self.generations_offset)
        self.generations = [0] * slots

    def slot(self, position: int) -> memoryview:
        start = position * self.slot_bytes
        return memoryview(self.data)[start : start + self.slot_bytes]

    def set_generation(self, position: int, value: int) -> None:
        self.generations[position] = value


class Pool:
    """A capped pool of extents of `slots` slots; an extent takes a few polls to be made."""

    def __init__(self, fds: dict[int, Extent], extents: int, slots: int, slot_bytes: int) -> None:
        self.extent_bytes = slots * (slot_bytes + 4)
        self.capacity_bytes = extents * self.extent_bytes
        self._fds = fds
        self._slots = slots
        self._used = 0
        self._coming: deque[tuple[str, MemoryExtent]] = deque()
        self._polls = 0
        self._numbers = count(max(fds, default=0) + 1)

    @property
    def used_bytes(self) -> int:
        return self._used

    def request(self, tag: str, slot_bytes: int) -> bool:
        if self._used + self.extent_bytes > self.capacity_bytes:
            return False
        self._used += self.extent_bytes
        extent = Extent(next(self._numbers), self._slots, slot_bytes)
        self._fds[extent.fd] = extent
        self._coming.append((tag, extent))
        return True

    def poll(self) -> Sequence[tuple[str, MemoryExtent | Exception]]:
        self._polls += 1
        if self._coming and self._polls % 3 == 0:
            return [self._coming.popleft()]
        return []

    def release(self, extent: MemoryExtent) -> None:
        del self._fds[extent.fd]
        self._used -= self.extent_bytes
        check(self._used >= 0, "an extent released twice")

    def close(self) -> None:
        self._coming.clear()


class Wire:
    """One connection. Both directions keep their order; messages take their time."""

    def __init__(self, net: Net, number: int) -> None:
        self.number = number
        self.up: deque[tuple[int, p.Message | None]] = deque()
        self.down: deque[tuple[int, p.Message]] = deque()
        self.fds: deque[Extent] = deque()
        self.open = True
        self.lost = False
        self._net = net

    def send(self, message: p.Message) -> None:
        self.flush()
        self.up.append((self._net.due(self.up), self._net.to_store(message)))

    def flush(self) -> None:
        if self.lost or not self.open:
            raise LinkLost("store is gone")

    def pop(self) -> p.Message | None:
        """Take one message that has arrived; None if none has. Raises LinkLost."""
        if self.open and self.down and self.down[0][0] <= self._net.now:
            return self.down.popleft()[1]
        self.flush()
        return None

    def receive(self, timeout_s: float = 0.0) -> list[p.Message]:
        end = self._net.now + int(timeout_s * 1e9)
        messages: list[p.Message] = []
        while True:
            message = self.pop() if not messages or self.down else None
            if message is not None:
                messages.append(message)
            elif messages or self._net.now >= end:
                return messages
            else:
                self._net.now = min(end, self._net.now + 50 * US)
                self._net.pump()

    def close(self) -> None:
        if self.open:
            self.open = False
            self.up.append((self._net.due(self.up), None))


class Net:
    """Carries messages between one store and its clients, in simulated time."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 1_000 * MS
        self.store: Store | None = None
        self.frozen_until = 0
        self.slow = False
        self.slow_until = 0
        self.fds: dict[int, Extent] = {}
        self.wires: dict[int, Wire] = {}
        self._next = 1
        self._rng = rng
        self._to_store = p.Decoder(p.ToStore)
        self._to_engine = p.Decoder(p.ToEngine)

    def to_store(self, message: p.Message) -> p.Message:
        return next(iter(list(self._to_store.feed(p.encode(message)))))

    def due(self, queue: deque[tuple[int, p.Message | None]] | deque[tuple[int, p.Message]]) -> int:
        if self.slow or self.now < self.slow_until:
            delay = self._rng.choice((0, 1, 5, 60)) * MS
        else:
            delay = int(self._rng.random() * 200) * US
        return max(self.now + delay, queue[-1][0] if queue else 0)

    def close_due(self, wire: Wire | None) -> int:
        """When the store will have seen a connection's end: before it sees the next one."""
        return wire.up[-1][0] if wire is not None and wire.up else 0

    def retry_delay(self) -> int:
        return self._rng.choice((1, 5, 50)) * MS

    def connect(self) -> Wire | None:
        if self.store is None:
            return None
        wire = Wire(self, self._next)
        self.wires[wire.number] = wire
        self._next += 1
        return wire

    def send(self, number: int, message: p.Message, fd: int | None) -> None:
        """The store's way out."""
        wire = self.wires.get(number)
        if wire is not None and wire.open:
            copy = next(iter(list(self._to_engine.feed(p.encode(message)))))
            wire.down.append((self.due(wire.down), copy))
            if fd is not None:
                wire.fds.append(self.fds[fd])

    def pump(self) -> None:
        """One turn of the store's loop."""
        if self.store is None or self.now < self.frozen_until:
            return
        for wire in list(self.wires.values()):
            while wire.up and wire.up[0][0] <= self.now:
                message = wire.up.popleft()[1]
                if message is None:
                    del self.wires[wire.number]
                    self.store.on_closed(wire.number, self.now)
                else:
                    self.store.on_message(wire.number, message, self.now)
        self.store.on_tick(self.now)

    def kill(self) -> None:
        """The store's process is gone."""
        self.store = None
        for wire in self.wires.values():
            wire.lost = True
        self.wires.clear()


class Joiner:
    """Connects until welcomed, as connectors.link does on a thread."""

    def __init__(self, net: Net, hello: p.Hello) -> None:
        self.refused: KVStoreError | None = None
        self._net = net
        self._hello = hello
        self._wire: Wire | None = None
        self._last: Wire | None = None
        self._wanted = False
        self._retry_ns = 0

    def start(self) -> None:
        check(not self._wanted, "a second attempt while one is under way")
        self._wanted = True
        self._retry_ns = self._net.close_due(self._last)

    def take(self) -> tuple[Wire, p.Welcome] | None:
        if not self._wanted or self._net.now < self._retry_ns:
            return None
        try:
            if self._wire is None:
                self._wire = self._net.connect()
                if self._wire is not None:
                    self._wire.send(self._hello)
            message = None if self._wire is None else self._wire.pop()
        except LinkLost:
            message = p.Detach("lost")
        if isinstance(message, p.Welcome) and self._wire is not None:
            self._last, self._wire, self._wanted = self._wire, None, False
            return self._last, message
        if isinstance(message, p.Refused):
            check(message.retry, f"refused for good: {message.reason}")
        if message is not None or self._wire is None:
            self._hang_up()
            retry_ns = self._net.now + self._net.retry_delay()
            self._retry_ns = max(retry_ns, self._net.close_due(self._last))
        return None

    def close(self) -> None:
        self._wanted = False
        self._hang_up()

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._last, self._wire = self._wire, None


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended."""

    ok: bool
    store_job: int | None = None
    request_id: str | None = None


class Copied(msgspec.Struct):
    """What a worker counts for the engine."""

    failed_loads: int = 0


class Worker:
    """One rank's worker half; copies a few engine blocks at a time, whenever it is let."""

    def __init__(
        self, net: Net, hello: p.Hello, shape: Shape, memory: bytearray, rng: random.Random
    ) -> None:
        self.errors = 0.0  # share of loads whose bytes turn out wrong
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
        self._wait_ns = 0
        self.counts: Counter[str] = Counter()
        self.meanwhile: Callable[[], None] = lambda: None  # in the middle of a load's copies
        self._ending = False
        self._dies_ns: int | None = None  # its engine is dead, and it will be then
        self._outcomes: list[Outcome] = []
        self._over: set[int] = set()
        self._stats = Copied()
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
            self._queue.append(job)

    def after_forward(self, meta: StepMeta) -> None:
        for job in meta.stores:
            self._submit(job)

    def _submit(self, job: StoreJob) -> None:
        self.stores_open.add(job.job_id)
        self._queue.append(job)

    def finished_loads(self, _meta: StepMeta) -> tuple[set[str], set[str]]:
        outcomes, self._outcomes = self._outcomes, []
        ended, failed = set(), set()
        for outcome in outcomes:
            if outcome.store_job is not None:
                self._over.add(outcome.store_job)
            elif outcome.request_id is not None:
                ended.add(outcome.request_id)
                if not outcome.ok:
                    failed.add(outcome.request_id)
                    self._stats.failed_loads += 1
        return ended, failed

    def take_stores_over(self) -> frozenset[int]:
        over, self._over = frozenset(self._over), set()
        return over

    def take_stats(self) -> Copied:
        stats, self._stats = self._stats, Copied()
        return stats

    # The copy thread

    @property
    def busy(self) -> bool:
        return self._copying is not None or bool(self._queue) or bool(self._waiting)

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
        ok = job.session == self._session and wire is not None
        if ok and wire is not None:
            for move in pieces(job.engine, job.store, self._per):
                self._move(move, store=True)
                yield True
            self._tell(wire, p.Stored(p.u32(job.store.slots), job.keys, job.parents, True, 1e-6))
        self.stores_open.discard(job.job_id)
        self._outcomes.append(Outcome(ok, store_job=job.job_id))

    def _load(self, job: LoadJob) -> Iterator[bool]:
        """Yield False while slots are still being filled."""
        ok, load = False, None
        while job.session == self._session and self.wire is not None:
            if load is None:
                load = Load(job, self._per, self._net.now + self._wait_ns)
            if load.advance(self._fill, self._generations, self._net.now):
                damaged = load.damaged or [s for s in job.store.slots if self._errs()]
                ok = load.ok and not damaged
                self.counts["late"] += load.late > 0
                self._tell(self.wire, p.Loaded(job.lease, 1, 1e-6, p.u32(damaged)))
                break
            self.counts["waits"] += 1
            yield False
        self.loads_open.discard(job.request_id)
        self._outcomes.append(Outcome(ok, request_id=job.request_id))

    def _errs(self) -> bool:
        return self._rng.random() < self.errors

    def _fill(self, moves: Sequence[Move]) -> int:
        for number, move in enumerate(moves):
            if number and self._rng.random() < 0.1:
                self.meanwhile()
            self._move(move, store=False)
        return len(moves)

    def _tell(self, wire: Wire, message: p.Message) -> None:
        with contextlib.suppress(LinkLost):
            wire.send(message)

    def _extent(self, slot: int) -> tuple[int, Extent]:
        for first, extent in self._extents.values():
            if first <= slot < first + extent.count:
                return slot - first, extent
        raise AssertionError(f"slot {slot} is not mapped here")

    def _generations(self, slots: NDArray[np.int64]) -> NDArray[np.uint32]:
        places = [self._extent(int(slot)) for slot in slots]
        return np.array([extent.generations[at] for at, extent in places], np.uint32)

    def _move(self, move: Move, *, store: bool) -> None:
        check(self._layout is not None, "a copy before the welcome")
        if self._layout is None:
            return
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
            self._layout, self._wait_ns = taken[1].layout, taken[1].wait_ms * MS
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

    def _handle(self, wire: Wire, message: p.Message) -> None:
        if isinstance(message, p.Extent):
            self._extents[message.extent] = (message.first, wire.fds.popleft())
            wire.send(p.Mapped(message.extent))
        elif isinstance(message, p.Unmap):
            while self.busy:
                self.copy(1)
                self._net.now += MS // 10
                self._net.pump()
            self._extents.pop(message.extent, None)
            wire.send(p.Unmapped(message.extent))
        elif isinstance(message, p.Detach):
            self._ending = True
