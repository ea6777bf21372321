"""Which engine moves runs of which size: measured once, before the first copy.

The copy engines take no processor of the GPU but a moment for each run, which tells below some tens
of KiB. The kernel takes processors, the fewer the better for the computation beside it: on an H200,
stores of 64 KiB pages by 4, 8, 16 and 32 thread blocks make large products 9, 10, 36 and 85 %
slower, the copy engines 4 %. So the kernel is chosen where it is clearly faster, with as few thread
blocks as give nearly its best.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from connectors.copies.gpu.cuda import Cuda, Launch
from connectors.copies.gpu.plan import Words, batches_of, tiles_of
from kvstore.core.errors import TierIOError

log = logging.getLogger(__name__)

RUN_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
THREAD_BLOCKS = (4, 8, 16, 32)
BYTES = 32 << 20  # of memory, on either side
MOVED = 128 << 20  # for one figure: 64 blocks of a model of 7B, about what a job has
RUNS_MAX = 2048  # of one figure: the smallest runs would take the longest otherwise
ROUNDS = 3
NEARLY = 0.8
CLEARLY = 1.25
_ASK_S = 0.0002


Rates = dict[bool, dict[int, dict[int, float]]]
"""Bytes a second: by whether they store, run size, and thread blocks, 0: the copy engines."""


class Choice(msgspec.Struct, frozen=True):
    """Who moves runs; rows: by run size, growing, (run bytes, thread blocks, 0: copy engines)."""

    store: tuple[tuple[int, int], ...]
    load: tuple[tuple[int, int], ...]

    def thread_blocks(self, run_bytes: int, *, store: bool) -> int:
        """Return how many thread blocks move runs of a size, 0 for the copy engines.

        The nearest size that was measured decides, by ratio.
        """
        rows = self.store if store else self.load
        nearest = min(rows, key=lambda row: max(row[0], run_bytes) / max(1, min(row[0], run_bytes)))
        return nearest[1]


GUESS = Choice(((16 << 10, 8), (64 << 10, 0)), ((16 << 10, 8), (64 << 10, 0)))
"""Without a measurement: the kernel for runs up to 32 KiB, about where others have found it."""


def measured(make: Callable[[], Cuda]) -> Choice:
    """Measure with a CUDA of its own, whose memory is given back. Raises NotSupported.

    Where that fails, because the engine has left no memory, say, it says so and guesses.
    """
    started, cuda = time.monotonic(), make()
    try:
        choice = chosen(rates(cuda))
    except TierIOError as exc:
        log.warning("kvstore: not measured, copies take turns by size: %s; %s", exc, GUESS)
        choice = GUESS
    finally:
        cuda.close()
    log.info("kvstore: GPU measured in %.1f s: %s", time.monotonic() - started, choice)
    return choice


def chosen(found: Rates) -> Choice:
    """Choose from what was measured."""
    return Choice(_rows(found[True]), _rows(found[False]))


def _rows(found: dict[int, dict[int, float]]) -> tuple[tuple[int, int], ...]:
    rows = []
    for size, speeds in found.items():
        enough = NEARLY * max(speed for blocks, speed in speeds.items() if blocks)
        few = min(blocks for blocks, speed in speeds.items() if blocks and speed >= enough)
        rows.append((size, few if speeds[few] > CLEARLY * speeds[0] else 0))
    return tuple(rows)


def rates(cuda: Cuda) -> Rates:
    """Measure every size, direction and engine; the best of a few rounds each."""
    stream, begin, end = cuda.new_stream(), cuda.new_event(timing=True), cuda.new_event(timing=True)
    device, host = cuda.memory(BYTES), cuda.pinned(BYTES)
    host[:] = np.arange(BYTES // 4, dtype=np.uint32).view(np.uint8)  # zeros may go faster

    def timed(work: Callable[[], None]) -> float:
        best = float("inf")
        for _ in range(1 + ROUNDS):  # the first one warms up
            cuda.record(begin, stream)
            work()
            cuda.record(end, stream)
            while not cuda.reached(end):
                time.sleep(_ASK_S)
            best = min(best, cuda.milliseconds(begin, end))
        return best / 1000

    found: Rates = {True: {}, False: {}}
    for size in RUN_SIZES:
        count = min(RUNS_MAX, MOVED // size)
        runs = np.array([[device, size, 0, size]], np.uint64)
        tiles = tiles_of(runs)
        table = cuda.table(tiles, stream)
        places = cuda.pinned(count * 16).view(np.uint64).reshape(count, 2)
        numbers = np.arange(count, dtype=np.uint64) % np.uint64(BYTES // size)
        places[:, 0] = host.ctypes.data + numbers * np.uint64(size)
        places[:, 1] = numbers
        for store, by_size in found.items():
            by_size[size] = {}
            for blocks in (0, *THREAD_BLOCKS):
                launch = Launch(table, len(tiles), places.ctypes.data, count, store, blocks)
                work = partial(cuda.launch, launch, stream)
                if not blocks:
                    work = partial(_copy, cuda, stream, runs, places, store=store)
                by_size[size][blocks] = count * size / timed(work)
    return found


def _copy(cuda: Cuda, stream: int, runs: Words, places: Words, *, store: bool) -> None:
    for batch in batches_of(runs, places, store=store):
        cuda.copy(*batch, stream)
