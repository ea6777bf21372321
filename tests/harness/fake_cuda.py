"""A CUDA that is not there: streams and events in this process, bytes moved by NumPy.

It is a fake because what it shows cannot be shown with a device: a real GPU runs things in one of
many orders, mostly the harmless one, so a copy that does not wait for what it must passes a hundred
times. Here a stream runs only when somebody asks whether an event was reached, or a test says so;
a seed decides which stream moves next and how far, a stream can be held, and a launch is carried
out in pieces, in any order, reading its tables and memory only then. What a device would punish
with an error or the end of the process is kept in `faults`: an address that is not the engine's
and not pinned, a copy across two registrations, memory unregistered under a copy.

What it does not have: time, speed, and the weak order of memory within one launch.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from connectors.copies.gpu.cuda import Cuda, Launch
from connectors.copies.gpu.plan import Words
from kvstore.core.errors import TierIOError
from tests.harness.gpu_twin import items

COMPUTE = 1


class Record:
    """What an event stands for after one `record`."""

    done = False


class Op:
    """Something on a stream: pieces that run in any order, then it is over."""

    def __init__(
        self,
        pieces: Callable[[], list[Callable[[], object]]],
        ready: Callable[[], bool] = lambda: True,
        *,
        moves: bool = False,
    ) -> None:
        """pieces(): what there is to do, asked when the stream has come to it.

        moves: it reads or writes slots.
        """
        self.ready = ready
        self.moves = moves
        self._make = pieces
        self._left: list[Callable[[], object]] | None = None

    def step(self, rng: random.Random) -> bool:
        """Run a piece; True when nothing is left."""
        if self._left is None:
            self._left = self._make()
            rng.shuffle(self._left)
        if self._left:
            self._left.pop()()
        return not self._left


class FakeCuda(Cuda):
    """Cuda of connectors/copies/gpu/cuda.py, without a device."""

    def __init__(self, memory: Sequence[torch.Tensor], seed: int = 0) -> None:
        """memory: tensors that stand for the GPU's memory."""
        self.rng = random.Random(seed)
        self.faults: list[str] = []
        self.held: set[int] = set()
        self.pace = 3  # pieces run when somebody asks for an event
        self.refuse: dict[str, int] = {}  # launch, copy, wait, (un)pin: calls until refused
        self.calls: Counter[str] = Counter()
        self.asked = 0
        self._lock = threading.RLock()
        self._device = [(m.data_ptr(), m.numel()) for m in memory]
        self._kept: list[NDArray[np.uint8]] = [m.numpy() for m in memory]
        self._host: list[tuple[int, int]] = []
        self.pinned_ranges: dict[int, int] = {}
        self._ops: dict[int, deque[Op]] = {COMPUTE: deque()}
        self._records: dict[int, Record | None] = {}
        self._next = 100
        self.closed = False
        self.capturing = False  # the engine captures a graph
        self.relaxed: set[int] = set()  # threads

    # What tests do

    def compute(self, work: Callable[[], object]) -> None:
        """Queue something that the engine computes."""
        with self._lock:
            self._ops[COMPUTE].append(Op(lambda: [work]))

    def run(self, stream: int | None = None) -> None:
        """Let one stream, or all, run until nothing can go on; held streams, too, if named."""
        with self._lock:
            while self._step([stream] if stream is not None else None):
                pass

    @property
    def idle(self) -> bool:
        """Whether nothing is queued."""
        with self._lock:
            return not any(self._ops.values())

    def lane(self, number: int) -> int:
        """The streams in the order they were made, the compute stream first."""
        return list(self._ops)[number]

    def _step(self, among: list[int] | None = None) -> bool:
        names = [s for s in self._ops if s not in self.held] if among is None else among
        able = [s for s in names if self._ops[s] and self._ops[s][0].ready()]
        if not able:
            return False
        stream = self.rng.choice(able)
        if self._ops[stream][0].step(self.rng):
            self._ops[stream].popleft()
        return True

    def _unsafe(self, call: str) -> None:
        """Calls that CUDA forbids while a graph is captured, to threads that are not relaxed."""
        if self.capturing and threading.get_ident() not in self.relaxed:
            self.faults.append(f"{call} spoiled a graph that was being captured")

    # Cuda

    def relax_capture(self) -> None:
        self.relaxed.add(threading.get_ident())

    def bus_id(self) -> str:
        return "0000:AB:00.0"

    def compute_stream(self) -> int:
        return COMPUTE

    def _number(self) -> int:
        self._next += 1
        return self._next

    def new_stream(self) -> int:
        with self._lock:
            number = self._number()
            self._ops[number] = deque()
            return number

    def new_event(self, *, timing: bool = False) -> int:
        del timing
        with self._lock:
            number = self._number()
            self._records[number] = None
            return number

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            record = Record()
            self._records[event] = record

            def reached() -> None:
                record.done = True

            self._ops[stream].append(Op(lambda: [reached]))

    def wait(self, stream: int, event: int) -> None:
        """As CUDA: for the event as it stands now, and not at all if it was never recorded."""
        with self._lock:
            self._refuses("wait")
            record = self._records[event]
            if record is not None:
                self._ops[stream].append(Op(list, lambda: record.done))

    def reached(self, event: int) -> bool:
        self._unsafe("reached")
        with self._lock:
            self.asked += 1
            for _ in range(self.rng.randint(0, self.pace)):
                self._step()
            record = self._records[event]
            return record is None or record.done

    def milliseconds(self, begin: int, end: int) -> float:
        raise NotImplementedError("nothing takes time here")

    def _refuses(self, call: str) -> None:
        self.calls[call] += 1
        left = self.refuse.get(call)
        if left is not None:
            self.refuse[call] = left - 1
            if left <= 0:
                raise TierIOError(f"GPU 0: the fake refuses this {call}")

    def launch(self, launch: Launch, stream: int) -> None:
        with self._lock:
            self._refuses("launch")

            def pieces() -> list[Callable[[], object]]:
                tiles = self._words(launch.tiles, launch.tile_count, 4)
                places = self._words(launch.places, launch.place_count, 2)
                return [
                    lambda e=e, s=s, n=n: self._move(e, s, n, store=launch.store)  # type: ignore[misc]
                    for e, s, n in zip(*(c.tolist() for c in items(tiles, places)), strict=True)
                ]

            self._ops[stream].append(Op(pieces, moves=True))

    def copy(self, to: Words, source: Words, sizes: Words, stream: int) -> None:
        with self._lock:
            self._refuses("copy")
            rows = list(zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True))

            def pieces() -> list[Callable[[], object]]:
                return [lambda t=t, s=s, n=n: self._copy(t, s, n) for t, s, n in rows]  # type: ignore[misc]

            self._ops[stream].append(Op(pieces, moves=True))

    def table(self, rows: Words, stream: int) -> int:
        with self._lock:
            address = self.memory(max(1, rows.nbytes))
            made = rows.copy()

            def fill() -> None:
                ctypes.memmove(address, made.ctypes.data, made.nbytes)

            self._ops[stream].append(Op(lambda: [fill]))
            return address

    def memory(self, size: int) -> int:
        self._unsafe("memory")
        with self._lock:
            made = np.full(size, 0xA5, np.uint8)
            self._kept.append(made)
            self._device.append((made.ctypes.data, size))
            return int(made.ctypes.data)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        self._unsafe("pinned")
        with self._lock:
            made = np.full(size, 0xA5, np.uint8)
            self._kept.append(made)
            self._host.append((made.ctypes.data, size))
            return made

    def pin(self, address: int, size: int) -> None:
        self._unsafe("pin")
        with self._lock:
            self._refuses("pin")
            if address in self.pinned_ranges:
                raise TierIOError("GPU 0: the fake has this memory registered already")
            self.pinned_ranges[address] = size

    def unpin(self, address: int) -> None:
        self._unsafe("unpin")
        with self._lock:
            self._refuses("unpin")
            if self.moving:
                self.faults.append("memory was unregistered while copies were queued")
            del self.pinned_ranges[address]

    @property
    def moving(self) -> bool:
        """Whether a copy of slots is queued."""
        with self._lock:
            return any(op.moves for ops in self._ops.values() for op in ops)

    def close(self) -> None:
        with self._lock:
            if self.moving:
                self.faults.append("closed while copies were queued")
            self.closed = True

    # Bytes

    def _in_host(self, address: int, size: int, *, one: bool) -> bool:
        ranges = [*self._host, *self.pinned_ranges.items()]
        if one:
            return any(a <= address and address + size <= a + n for a, n in ranges)
        at = address
        for a, n in sorted(ranges):
            if a <= at < a + n:
                at = a + n
        return at >= address + size

    def _in_device(self, address: int, size: int) -> bool:
        return any(a <= address and address + size <= a + n for a, n in self._device)

    def _words(self, address: int, rows: int, columns: int) -> Words:
        size = rows * columns * 8
        if not self._in_device(address, size) and not self._in_host(address, size, one=False):
            self.faults.append(f"a table of {size} bytes at {address:#x}, where there is no memory")
            return np.empty((0, columns), np.uint64)
        held = (ctypes.c_uint64 * (rows * columns)).from_address(address)
        return np.array(held, np.uint64).reshape(rows, columns)

    def _move(self, engine: int, slot: int, size: int, *, store: bool) -> None:
        to, source = (slot, engine) if store else (engine, slot)
        if not self._in_device(engine, size) or not self._in_host(slot, size, one=False):
            self.faults.append(f"the kernel moved {size} bytes at {engine:#x} and {slot:#x}")
            return
        ctypes.memmove(to, source, size)

    def _copy(self, to: int, source: int, size: int) -> None:
        sides = [
            (self._in_device(a, size), self._in_host(a, size, one=True)) for a in (to, source)
        ]  # fmt: skip
        if sorted(sides) != [(False, True), (True, False)]:
            self.faults.append(f"the copy engines moved {size} bytes {source:#x} to {to:#x}")
            return
        ctypes.memmove(to, source, size)
