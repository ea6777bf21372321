"""Copies of a GPU engine's blocks: everything is queued, the device keeps the order.

    step thread      copy thread                     compute stream    copy streams
    mark ----------------------------------------->  record m
                     job: wait m, move, record e ------------------->  wait m, move, e
    fence ---------------------------------------->  wait e            |
                     over? e reached? <--------------------------------+

There are two copy streams, one for each direction, and each runs its jobs in order. So a job is
named by its number in its direction, and it is over when the event of that number, or a later one,
is reached. Events are a ring: number n uses event n % count.

Marks are a ring, too, recorded by the step thread. An event or mark that is recorded anew stands
for something later on the same stream: who waits for the former waits a little longer than it must,
never too short. Every job is queued before a fence names it, so no wait can close a circle.

Why the slot and the engine's block stay as they are meanwhile: the store keeps a slot until the
worker has told it, and the worker tells it when the copy is over; what overwrites an engine block
is queued on the compute stream behind the fence.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import numpy as np

from connectors.copies.gpu.cuda import Cuda, Launch
from connectors.copies.gpu.measure import Choice, measured
from connectors.copies.gpu.pins import Pins
from connectors.copies.gpu.plan import GroupPlan, Words, batches_of, places_of, plans
from connectors.copies.host import Copying, Device, LayerCache, MappedExtent, SlotMap
from connectors.step_meta import Moves
from kvstore.core.errors import TierError, TierIOError
from kvstore.core.layout import RankLayout

log = logging.getLogger(__name__)

JOBS_MAX = 1024  # of one direction that are told apart
MARKS = 256
PLACES_MAX = 1 << 16  # engine blocks of one direction that are under way with the kernel
_ROOM_S = 0.0001
_PLACE_BYTES = 16


class Queued(Copying):
    """A copy on its stream."""

    lane: Lane
    number: int
    error: TierError | None = None

    def over(self) -> bool:
        """Ask the device. Raises TierError when it has failed, or was queued in part only."""
        if not self.lane.reached(self.number):
            return False
        if self.error is not None:
            raise self.error
        return True


class Lane:
    """One direction: a stream, the jobs on it, and the places that the kernel reads."""

    def __init__(self, cuda: Cuda, *, store: bool) -> None:
        """Make everything that a job needs, so that no job makes anything."""
        self.store = store
        self.stream = cuda.new_stream()
        self._cuda = cuda
        self._events = [cuda.new_event() for _ in range(JOBS_MAX)]
        self._last = self._reached = 0  # numbers of jobs
        self._ring = cuda.pinned(PLACES_MAX * _PLACE_BYTES).view(np.uint64).reshape(-1, 2)
        self._next = 0  # position in the ring
        self._taken: deque[tuple[int, int]] = deque()  # number of a job, places it holds
        self._free = PLACES_MAX

    def after(self, mark: int) -> None:
        """Let what is queued from here on wait for an event of the compute stream."""
        self._cuda.wait(self.stream, mark)

    def event(self, number: int) -> int | None:
        """Return the event that stands for a job, None once that is over. From any thread."""
        return None if number <= self._reached else self._events[number % len(self._events)]

    def reached(self, number: int) -> bool:
        """Tell whether a job is over; jobs end in order."""
        while self._reached < number:
            at = self._reached + 1
            if not self._cuda.reached(self._events[at % len(self._events)]):
                return False
            self._reached = at
            while self._taken and self._taken[0][0] <= at:
                self._free += self._taken.popleft()[1]
        return True

    def close_job(self) -> int:
        """Number what was queued since the last call."""
        number = self._last + 1
        self._cuda.record(self._events[number % len(self._events)], self.stream)
        self._last = number
        return number

    def launch(self, tiles: int, tile_count: int, places: Words, blocks: int) -> None:
        """Queue the kernel for places, as many launches as the ring asks for."""
        while len(places):
            room = min(len(places), len(self._ring) - self._next, len(self._ring) // 4)
            self._make_room(room)
            here = slice(self._next, self._next + room)
            self._ring[here] = places[:room]
            address = self._ring[here].ctypes.data
            self._cuda.launch(
                Launch(tiles, tile_count, address, room, self.store, blocks), self.stream
            )
            self._free -= room
            self._taken.append((self._last + 1, room))
            self._next = here.stop % len(self._ring)
            places = places[room:]

    def copy(self, runs: Words, places: Words) -> None:
        """Queue the copy engines for places."""
        for batch in batches_of(runs, places, store=self.store):
            self._cuda.copy(*batch, self.stream)

    def _make_room(self, places: int) -> None:
        if self._free < places and self._taken[-1][0] > self._last:
            self.close_job()  # what is waited for has to have an end
        while self._free < places:
            if not self.reached(self._taken[0][0]):
                time.sleep(_ROOM_S)


class _Way(msgspec.Struct):
    """One KV group in one direction: its tables, and who moves it."""

    plan: GroupPlan
    tiles: int  # address on the device
    blocks: int  # thread blocks for the kernel, 0: the copy engines move it


class GpuCopier:
    """Moves pages between a GPU's KV tensors and pinned slots; used by one thread."""

    def __init__(
        self,
        cuda: Cuda,
        lanes: dict[bool, Lane],
        caches: dict[str, LayerCache],
        layout: RankLayout,
        choice: Choice,
    ) -> None:
        """lanes: by whether they store. Raises TierError for a layer that is not there."""
        self._lanes = lanes
        self._ways = {
            store: [
                _Way(
                    plan,
                    cuda.table(plan.tiles, lane.stream),
                    choice.thread_blocks(plan.run_bytes, store=store),
                )
                for plan in plans(layout, caches, store=store)
            ]
            for store, lane in lanes.items()
        }

    def copy(self, moves: Moves, slots: SlotMap, *, store: bool, after: int = 0) -> Queued:
        """Queue copies engine -> slots (store) or slots -> engine, behind mark `after`.

        Raises TierError with nothing queued. What fails half-way is told by over(), once what was
        queued has ended.
        """
        lane, ways = self._lanes[store], self._ways[store]
        places = places_of(moves, slots, [way.plan for way in ways])
        lane.after(after)
        moved, error = 0, None
        try:
            for group, rows in places:
                way = ways[group]
                if way.blocks and len(way.plan.runs):
                    lane.launch(way.tiles, len(way.plan.tiles), rows, way.blocks)
                elif len(way.plan.runs):
                    lane.copy(way.plan.runs, rows)
                moved += way.plan.block_bytes * len(rows)
        except TierError as exc:
            error = exc
        return Queued(moved, lane, lane.close_job(), error)


class CudaDevice(Device):
    """A GPU that an engine's KV tensors are on."""

    def __init__(
        self,
        caches: dict[str, LayerCache],
        make: Callable[[], Cuda] | None = None,
        choice: Choice | None = None,
    ) -> None:
        """make(), choice: for tests; otherwise what is there, and what is measured on it.

        Raises NotSupported where cupy is missing, or the driver or GPU cannot do it.
        """
        index = next(iter(caches.values())).storage.device.index or 0
        self._make: Callable[[], Cuda] = partial(Cuda, index) if make is None else make
        self._cuda = self._make()
        super().__init__(caches)
        self._copiers: dict[RankLayout, GpuCopier] = {}  # tables on the device stay
        self._choice = choice
        self._lanes = {store: Lane(self._cuda, store=store) for store in (True, False)}
        self._marks = [self._cuda.new_event() for _ in range(MARKS)]
        self._mark = 0
        self._pins = Pins(self._cuda)

    def enter_thread(self) -> None:
        """Keep the calling thread from spoiling CUDA graphs, which engines capture as they start.

        Engines capture in CUDA's mode "global": a call of any thread that makes or pins memory
        ends the capture with an error, unless that thread has relaxed its own mode.
        """
        try:
            self._cuda.relax_capture()
        except TierIOError as exc:
            log.warning("kvstore: the engine may fail to capture CUDA graphs: %s", exc)

    def copier(self, layout: RankLayout) -> GpuCopier:
        """Plan copies after a store's layout, and measure once which engine is fast at what.

        Raises TierError for a layer that is not there, and when the device fails.
        """
        if self._choice is None:
            self._choice = measured(self._make)
        if layout not in self._copiers:
            self._copiers[layout] = GpuCopier(
                self._cuda, self._lanes, self._caches, layout, self._choice
            )
        return self._copiers[layout]

    def mark(self) -> int:
        """Record an event behind all that the calling thread's engine has queued."""
        self._mark = (self._mark + 1) % MARKS
        event = self._marks[self._mark]
        self._cuda.record(event, self._cuda.compute_stream())
        return event

    def passed(self, mark: int) -> bool:
        """Ask the device whether the compute stream has come to a mark. Raises TierError."""
        return self._cuda.reached(mark)

    def fence(self, copies: Iterable[Queued]) -> None:
        """Let the compute stream wait for copies; the calling thread does not wait."""
        stream = self._cuda.compute_stream()
        last: dict[bool, Queued] = {}
        for copy in copies:
            held = last.get(copy.lane.store)
            if held is None or copy.number > held.number:
                last[copy.lane.store] = copy
        for copy in last.values():
            event = copy.lane.event(copy.number)
            if event is not None:
                self._cuda.wait(stream, event)

    def pin(self, extent: MappedExtent, stopped: Callable[[], bool]) -> None:
        """Register an extent's slots with CUDA. Raises TierError, saying what may be the reason."""
        self._pins.pin(extent, stopped)

    def unpin(self, extent: MappedExtent) -> None:
        """Unregister them."""
        self._pins.unpin(extent)

    def close(self) -> None:
        """Give back streams, events and memory; safe to call twice."""
        self._cuda.close()
