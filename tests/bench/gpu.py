"""`tests.bench gpu`: blocks between a GPU and pinned memory, against the bus, beside products.

The copier of the worker half itself, with jobs as a store hands them out: engine blocks and slots
in random order, from a job's begin until it is known to have ended, queueing and asking included.
The limit is one copy of as many bytes in one piece, by the copy engines, in the same run. Who moves
the runs (the kernel or the copy engines) is what was measured at the start, and each of the two.

Beside a computation: a chain of large matrix products, alone and with copies under way all the
time; its speed is taken by events on its own stream.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import torch

from connectors.copies.gpu.cuda import Cuda
from connectors.copies.gpu.device import CudaDevice, GpuCopier, Queued
from connectors.copies.gpu.measure import Choice, chosen, rates
from connectors.copies.host import LayerCache, MappedExtent, SlotMap
from connectors.step_meta import Moves
from kvstore.core.errors import NotSupported
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry, slot_layout
from kvstore.core.types import GroupRule
from kvstore.units import GIB, KIB, MIB
from kvstore.wire import engine as p
from tests.bench.report import Result, progress

ROUNDS = 5
RUNS = (16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
BLOCKS = (1, 16, 256, 4096)
BYTES_MAX = 2 * GIB  # of one job
MEMORY = 4 * GIB  # pinned, and as much on the GPU
MODEL = (32, 64 * KIB, 2048)  # layers, bytes of a page, blocks: 32k tokens of a 7B model, 16 each
JOB_BLOCKS = 64  # what the scheduler half gathers into one job
MATRIX = 8192
PRODUCTS = 100
IN_FLIGHT = 4
_SEED = 6
Event: Any = torch.cuda.Event  # which has no types
_LIMIT_S = 60.0
_KERNEL_BLOCKS = 8
_EITHER = {"kernel": _KERNEL_BLOCKS, "engines": 0}
_NAMES = {True: "store", False: "load"}


class Memory:
    """KV memory on a device and slots on the host, cut anew for each size of runs."""

    def __init__(self, size: int, device: str = "cuda", cuda: Cuda | None = None) -> None:
        """size: bytes of each. cuda: for tests; on a GPU, what is there."""
        self.size = size
        self.storage = torch.empty(size, dtype=torch.uint8, device=device)
        self.storage.random_(0, 256)
        self.cuda: Cuda = Cuda(self.storage.device.index or 0) if cuda is None else cuda
        self.stream = self.cuda.new_stream()
        self.end = self.cuda.new_event()
        fd = os.memfd_create("kvstore-bench")
        os.truncate(fd, size + 4096)
        self.extent = MappedExtent(fd, p.Extent(0, 0, 1, size, size, size + 4096))
        self.extent.data[:size].copy_(self.storage)  # zeros may go faster
        whole = {"memory": self.cache(0, size, size)}
        self._pins = CudaDevice(whole, lambda: self.cuda, Choice((), ()))
        started = time.perf_counter()
        self._pins.pin(self.extent, lambda: False)
        self.pin_s = time.perf_counter() - started

    def cache(self, offset: int, stride: int, page: int) -> LayerCache:
        """Describe pages in the KV memory."""
        return LayerCache(self.storage, offset, stride, page)

    def one_copy_s(self, size: int, *, store: bool) -> float:
        """Return the time of one copy of so many bytes in one piece."""
        engine = np.array([self.storage.data_ptr()], np.uint64)
        slot = np.array([self.extent.address], np.uint64)
        to, source = (slot, engine) if store else (engine, slot)
        piece = np.array([size], np.uint64)
        begun = time.perf_counter()
        self.cuda.copy(to, source, piece, self.stream)
        self.cuda.record(self.end, self.stream)
        _until(lambda: self.cuda.reached(self.end))
        return time.perf_counter() - begun

    def close(self) -> None:
        """Give everything back."""
        self._pins.unpin(self.extent)
        self._pins.close()


class Jobs:
    """Jobs of one geometry: `layers` pages of `run_bytes` for each block, layer after layer."""

    def __init__(self, memory: Memory, layers: int, run_bytes: int, choice: Choice) -> None:
        """Use all of the memory."""
        self.block_bytes = layers * run_bytes
        self.blocks = memory.size // self.block_bytes
        caches = {
            f"layer.{i}": memory.cache(i * self.blocks * run_bytes, run_bytes, run_bytes)
            for i in range(layers)
        }
        group = GroupGeometry(GroupRule(), tuple(LayerGeometry(n, run_bytes) for n in caches))
        layout = slot_layout([RankGeometry("bench", 16, (1,), (group,))]).ranks[0]
        extent = memory.extent
        extent.slot_bytes, extent.count = layout.slot_bytes, memory.size // layout.slot_bytes
        self.slots = SlotMap()
        self.slots.add(0, extent)
        self.device = CudaDevice(caches, lambda: memory.cuda, choice)
        self.copier: GpuCopier = self.device.copier(layout)
        self._rng = random.Random(_SEED)

    def moves(self, count: int) -> Moves:
        """Return so many blocks and slots in random order."""
        blocks = self._rng.sample(range(self.blocks), count)
        slots = self._rng.sample(range(self.blocks), count)
        return np.array([(0, block, slot, 0) for block, slot in zip(blocks, slots, strict=True)])

    def begin(self, moves: Moves, *, store: bool) -> Queued:
        """Queue a job."""
        return self.copier.copy(moves, self.slots, store=store, after=self.device.mark())

    def timed(self, count: int, *, store: bool) -> tuple[float, float]:
        """Return seconds of a job from begin to end, and of processor time to queue it."""
        moves = self.moves(count)
        begun, busy = time.perf_counter(), time.thread_time()
        queued = self.begin(moves, store=store)
        busy = time.thread_time() - busy
        _until(queued.over)
        return time.perf_counter() - begun, busy


class Sample(msgspec.Struct):
    """One figure: medians over rounds."""

    seconds: float
    limit_s: float
    busy_s: float


def _until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + _LIMIT_S
    while not done():
        if time.monotonic() > limit:
            raise NotSupported(f"a copy has not ended within {_LIMIT_S:.0f} s")


def sample(jobs: Jobs, memory: Memory, count: int, rounds: int, *, store: bool) -> Sample:
    """Measure jobs of so many blocks, each round beside one copy of as many bytes."""
    jobs.timed(count, store=store)
    rows = [
        (*jobs.timed(count, store=store), memory.one_copy_s(count * jobs.block_bytes, store=store))
        for _ in range(rounds)
    ]
    seconds, busy, limit = (statistics.median(column) for column in zip(*rows, strict=True))
    return Sample(seconds, limit, busy)


def sizes(
    memory: Memory, choice: Choice, rounds: int, runs: tuple[int, ...] = RUNS
) -> Iterator[Result]:
    """Measure runs of each size in jobs of each length, by each engine."""
    for run, (name, how) in itertools.product(runs, _choices(choice).items()):
        jobs = Jobs(memory, 1, run, how)
        fit = [count for count in BLOCKS if count <= jobs.blocks and count * run <= BYTES_MAX]
        for count, store in itertools.product(fit, (True, False)):
            found = sample(jobs, memory, count, rounds, store=store)
            size = count * run / GIB
            parameters = {
                "run_kib": run // KIB,
                "blocks": count,
                "engine": name,
                "thread_blocks": how.thread_blocks(run, store=store),
                "cpu_us": round(found.busy_s * 1e6, 1),
            }
            rate, limit = size / found.seconds, size / found.limit_s
            yield Result(_NAMES[store], rate, "GiB/s", reference=limit, parameters=parameters)


def _choices(choice: Choice) -> dict[str, Choice]:
    fixed = {name: Choice(((1, n),), ((1, n),)) for name, n in _EITHER.items()}
    return {"chosen": choice, **fixed}


def model(
    memory: Memory, choice: Choice, rounds: int, shape: tuple[int, int, int] = MODEL
) -> list[Result]:
    """Measure a whole prompt's load and store, and what one usual job costs the processor."""
    layers, page, blocks = shape
    results = []
    jobs = Jobs(memory, layers, page, choice)
    count = min(blocks, jobs.blocks)
    for store in (False, True):
        found = sample(jobs, memory, count, rounds, store=store)
        took_ms, limit_ms = found.seconds * 1e3, found.limit_s * 1e3
        parameters = {"layers": layers, "page_kib": page // KIB, "blocks": count}
        results.append(
            Result(
                f"prompt_{_NAMES[store]}", took_ms, "ms", reference=limit_ms, parameters=parameters
            )
        )
        few = min(JOB_BLOCKS, jobs.blocks)
        usual = sample(jobs, memory, few, rounds, store=store)
        parameters = {"layers": layers, "blocks": few}
        name = f"job_cpu_{_NAMES[store]}"
        results.append(Result(name, usual.busy_s * 1e6, "us", parameters=parameters))
    return [*results, both_ways(jobs, count // 2)]


def both_ways(jobs: Jobs, count: int) -> Result:
    """Store and load at once, as many blocks each; the reference is one after the other."""
    moves = jobs.moves(2 * count)
    halves = {True: moves[:count], False: moves[count:]}
    begun = time.perf_counter()
    for store, half in halves.items():
        _until(jobs.begin(half, store=store).over)
    apart = time.perf_counter() - begun
    begun = time.perf_counter()
    queued = [jobs.begin(half, store=store) for store, half in halves.items()]
    for job in queued:
        _until(job.over)
    together = time.perf_counter() - begun
    total = 2 * count * jobs.block_bytes / GIB
    return Result(
        "both_directions",
        total / together,
        "GiB/s",
        reference=total / apart,
        parameters={"blocks": 2 * count},
    )


def beside_products(memory: Memory, choice: Choice) -> Iterator[Result]:
    """Measure matrix products alone and with copies under way all the time."""
    layers, page, _ = MODEL
    for name, how in _choices(choice).items():
        jobs = Jobs(memory, layers, page, how)
        for directions in ((True,), (False,), (True, False)):
            alone, _ = _products(memory, jobs, ())
            beside, rate = _products(memory, jobs, directions)
            parameters = {
                "engine": name,
                "copies": " and ".join(_NAMES[store] for store in directions),
                "copied_gib_s": round(rate, 2),
            }
            yield Result(
                "products_beside_copies",
                1 / beside,
                "per s",
                reference=1 / alone,
                parameters=parameters,
            )


def _products(memory: Memory, jobs: Jobs, directions: tuple[bool, ...]) -> tuple[float, float]:
    """Return seconds of a product, and GiB/s that were copied meanwhile."""
    side = torch.randn(2, MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    begin, end = (Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        torch.mm(side[0], side[1], out=out)
    begin.record()
    for _ in range(PRODUCTS):
        torch.mm(side[0], side[1], out=out)
    end.record()
    copied, under_way, begun = 0, list[Queued](), time.perf_counter()
    moves = {store: jobs.moves(JOB_BLOCKS) for store in directions}
    nothing = memory.cuda.new_event()  # never recorded: nobody waits for the products
    while not end.query():
        under_way = [job for job in under_way if not job.over()]
        for store, blocks in moves.items():
            if sum(job.lane.store is store for job in under_way) < IN_FLIGHT:
                job = jobs.copier.copy(blocks, jobs.slots, store=store, after=nothing)
                under_way.append(job)
                copied += job.bytes
    seconds = time.perf_counter() - begun
    for job in under_way:
        _until(job.over)
    return begin.elapsed_time(end) / 1e3 / PRODUCTS, copied / seconds / GIB


def run(rounds: int | None) -> list[Result]:
    """Measure on the first GPU. Raises NotSupported where there is none."""
    rounds, found = rounds or ROUNDS, torch.__version__
    if not torch.cuda.is_available():
        raise NotSupported(f"bench gpu needs a GPU that torch can use, torch is {found}")
    with closing(Memory(MEMORY)) as memory, progress(4) as tell:
        tell("what is fast at what", 0)
        choice = chosen(rates(memory.cuda))
        how = {"gpu": torch.cuda.get_device_name(), "choice": msgspec.to_builtins(choice)}
        results = [Result("pinned", memory.size / memory.pin_s / GIB, "GiB/s", parameters=how)]
        tell("a prompt, and both directions")
        results += model(memory, choice, rounds)
        tell("beside matrix products")
        results += beside_products(memory, choice)
        tell("runs of each size")
        results += sizes(memory, choice, rounds)
    return results
