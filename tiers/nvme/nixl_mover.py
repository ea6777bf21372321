"""Moves blocks with NIXL's POSIX plugin: io_uring, or Linux AIO where the kernel refuses that.

One thread has the agent, keeps as many transfers under way as there would be threads, and sleeps
between two looks at them: the plugin cannot be waited for. It gives errors without a number, so
what failed is all that is known. A transfer is let go of only after its end; one that never ends
(a hung disk) keeps its memory.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import time
from collections import deque
from importlib import metadata
from typing import Any, Generic

import msgspec
from nixl import _api as nixl
from nixl import _bindings

from kvstore.core.errors import ConfigError, TierIOError
from tiers.nvme.block_io import READS_FIRST_S, Moved, R
from tiers.nvme.files import Descriptor, address_of, aligned
from tiers.runner import Runner

NAP_S = 0.0002
LONG_NAP_S = 0.005  # once nothing has ended for STILL_S
STILL_S = 0.05
PLUGIN = "POSIX"
ENGINES = ("use_uring", "use_aio")  # never POSIX AIO: one failed request poisons all later ones
VERSION_MIN = "1.5.1"  # before, a short read counted as done
ERRORS: tuple[type[Exception], ...] = tuple(
    kind for name, kind in vars(_bindings).items() if name.endswith("Error")
)
LOAD_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *ERRORS,
)  # RuntimeError: there is no plugin at all
_numbers = itertools.count()


class _Flight(msgspec.Struct, Generic[R], eq=False):
    """A transfer under way, and what goes when it has ended."""

    run: R
    sums: list[int]
    buffer: memoryview | None  # instead of memory that is not aligned
    handle: Any
    registered: list[Any]
    descriptor: Descriptor  # of the extent, which stays open until then


class NixlMover(Generic[R]):
    """Transfers of one agent, driven by one thread."""

    def __init__(self, readers: int, writers: int) -> None:
        """Load the plugin. Raises ConfigError where it does not."""
        self._agent, self.engine = load()
        self._limits = {False: readers, True: writers}  # by Move.store
        self._waiting: dict[bool, deque[tuple[float, R]]] = {False: deque(), True: deque()}
        self._flying: list[_Flight[R]] = []
        self._landed: deque[tuple[_Flight[R], TierIOError | None]] = deque()
        self._ended: deque[Moved[R]] = deque()
        self._at: R | None = None  # whose turn it is: a bug is its error
        # A job for each move; its result is the next move that ends, whichever that is.
        self._runner: Runner[R, Moved[R]] = Runner(
            "kvstore-nvme-nixl", lambda _: self._next(), lambda _, error: self._broken(error)
        )

    @property
    def open(self) -> int:
        """Count the moves whose result is not there yet."""
        return self._runner.open

    def start(self, run: R) -> None:
        """Move a run as soon as its turn comes."""
        self._waiting[run.store].append((time.monotonic(), run))
        self._runner.submit(run)

    def poll(self) -> list[Moved[R]]:
        """Take the results that are there."""
        return self._runner.poll()

    def close(self) -> None:
        """Finish what was started and end the thread."""
        self._runner.close()

    # On the mover's thread

    def _next(self) -> Moved[R]:
        still_s = time.monotonic()
        while True:
            self._post(stores=(False, True))
            self._look()
            if self._ended:
                return self._ended.popleft()
            long = time.monotonic() - still_s > STILL_S
            time.sleep(LONG_NAP_S if long else NAP_S)

    def _post(self, stores: tuple[bool, ...]) -> None:
        """Start what may be under way, in this order of kinds."""
        for store in stores:
            waiting = self._waiting[store]
            while waiting and self._under_way(store=store) < self._limits[store]:
                if store and not self._may_write(waiting[0][0]):
                    return
                _, self._at = waiting.popleft()
                self._post_one(self._at)
                self._at = None

    def _under_way(self, *, store: bool) -> int:
        return sum(flight.run.store is store for flight in self._flying)

    def _may_write(self, since_s: float) -> bool:
        reads = self._waiting[False] or self._under_way(store=False)
        return not reads or time.monotonic() - since_s > READS_FIRST_S

    def _post_one(self, run: R) -> None:
        agent, sums = self._agent, run.sums() if run.store else []
        buffer = None if all(aligned(block) for block in run.blocks) else _buffer_for(run)
        memory = _places(run.blocks if buffer is None else [buffer])
        descriptor = run.file.descriptor
        try:
            fd = descriptor.take()
        except TierIOError as exc:
            self._ended.append(Moved(run, [], exc))
            return
        at, file = run.position * run.file.stride, []
        for _, size, _ in memory:
            file.append((at, size, fd))
            at += size
        registered: list[Any] = []
        try:
            for places, kind in ((memory, "DRAM"), (file, "FILE")):
                named = [(*place, "") for place in places]
                registered.append(agent.register_memory(named, kind, backends=[PLUGIN]))
            handle = agent.initialize_xfer(
                "WRITE" if run.store else "READ",
                agent.get_xfer_descs(memory, "DRAM"),
                agent.get_xfer_descs(file, "FILE"),
                agent.name,
                backends=[PLUGIN],
            )
            flight = _Flight(run, sums, buffer, handle, registered, descriptor)
            agent.transfer(handle)
        except ERRORS as exc:
            self._deregister(registered)
            descriptor.give_back()
            self._ended.append(Moved(run, [], _io_error(run, exc)))
        else:
            self._flying.append(flight)

    def _look(self) -> None:
        """Take down what has ended; the next reads are started before checksums are made."""
        for flight in list(self._flying):
            self._at, error = flight.run, None
            try:
                if self._agent.check_xfer_state(flight.handle) == "PROC":
                    continue
            except ERRORS as exc:
                error = _io_error(flight.run, exc)
            self._flying.remove(flight)
            self._agent.release_xfer_handle(flight.handle)
            self._deregister(flight.registered)
            flight.descriptor.give_back()
            self._landed.append((flight, error))
        self._at = None
        if self._landed:
            self._post(stores=(False,))
        while self._landed:
            flight, error = self._landed.popleft()
            self._at = flight.run
            self._ended.append(_moved(flight, error))
            self._at = None

    def _deregister(self, registered: list[Any]) -> None:
        for one in registered:
            self._agent.deregister_memory(one, backends=[PLUGIN])

    def _broken(self, error: Exception) -> Moved[R]:
        """After a bug above: the move whose turn it was fails for it."""
        run, self._at = self._at, None
        if run is None:
            raise error
        self._flying = [flight for flight in self._flying if flight.run is not run]
        return Moved(run, [], error)


def load() -> tuple[Any, str]:
    """Make an agent with the plugin; the second is its engine. Raises ConfigError without."""
    wrong = f'mover = "nixl": expected NIXL {VERSION_MIN} or newer with its {PLUGIN} plugin'
    found = metadata.version("nixl")
    if [int(part) for part in found.split(".")[:3]] < [int(p) for p in VERSION_MIN.split(".")]:
        raise ConfigError(f"{wrong}, found {found}")
    refused = []
    for engine in ENGINES:
        try:
            agent = make_agent()
            agent.create_backend(PLUGIN, {engine: "true"})
        except LOAD_ERRORS as exc:
            refused.append(f"{engine}: {exc}")
            continue
        return agent, engine.removeprefix("use_")
    raise ConfigError(f"{wrong}, found NIXL {found} without ({'; '.join(refused)})")


def make_agent() -> nixl.nixl_agent:
    """Make an agent without any backend, of a name that no other has."""
    quiet = logging.getLogger("nixl")
    quiet.setLevel(logging.WARNING)
    quiet.handlers.clear()  # it writes to standard output, which is for results
    quiet.propagate = True
    settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
    return nixl.nixl_agent(f"kvstore-{os.getpid()}-{next(_numbers)}", settings)


def _buffer_for(run: R) -> memoryview:
    """Return aligned memory for all slots, with what is to be written."""
    stride, size = run.file.stride, run.file.slot_bytes
    buffer = memoryview(mmap.mmap(-1, len(run.blocks) * stride))
    if run.store:
        for number, block in enumerate(run.blocks):
            buffer[number * stride : number * stride + size] = block
    return buffer


def _places(pieces: list[memoryview]) -> list[tuple[int, int, int]]:
    """Return address, length and device of memory, neighbours together: fewer calls."""
    found: list[tuple[int, int, int]] = []
    for piece in pieces:
        at = address_of(piece)
        if found and sum(found[-1]) == at:
            found[-1] = (found[-1][0], found[-1][1] + len(piece), 0)
        else:
            found.append((at, len(piece), 0))
    return found


def _moved(flight: _Flight[R], error: TierIOError | None) -> Moved[R]:
    run = flight.run
    if error is not None:
        return Moved(run, [], error)
    if run.store:
        return Moved(run, flight.sums)
    if flight.buffer is not None:
        stride, size = run.file.stride, run.file.slot_bytes
        for number, block in enumerate(run.blocks):
            block[:] = flight.buffer[number * stride : number * stride + size]
    return Moved(run, run.sums())


def _io_error(run: R, error: Exception) -> TierIOError:
    what = "write" if run.store else "read"
    return TierIOError(f"{run.file.path.name}: {what} by NIXL failed: {error}")
