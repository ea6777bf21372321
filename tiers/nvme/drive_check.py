"""Measures a drive as the tier uses it: checked blocks to and from an extent file; `check --disk`.

The settings of `[nvme]` that follow from that are suggested.

The file is preallocated and has no name any more while it is measured: whatever ends the process,
nothing stays behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import msgspec
import xxhash
from numpy.random import default_rng  # here: a Ctrl-C that meets an import can be lost

from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.printing import output, table
from kvstore.units import GIB, MIB
from tiers.nvme.block_io import Move, ThreadMover, writers_of
from tiers.nvme.files import ExtentFile

BLOCK_BYTES = 2 * MIB
FILE_BYTES = GIB
SPARE_BYTES = 64 * MIB
DEPTHS = (1, 2, 4, 8, 16)
CASES = tuple((kind, pattern) for kind in ("read", "write") for pattern in ("sequential", "random"))
FILL_SHARE = 0.25  # of the time, to write the file for the first time
AREA_BLOCKS_MIN = 64
TICK_S = 0.0005
SILENCE_S = 30.0
NEARLY = 0.9  # of the best rate: more in flight costs more than it brings
THREADS_MIN = 2  # one slow read holds no other
DRIVE_WRITES_PER_DAY = 1.0
DAY_S = 86_400

Progress = Callable[[float, str], None]  # share that is done, and what is going on


class Sample(msgspec.Struct, frozen=True):
    """Blocks moved for a moment with so many in flight."""

    kind: str  # read or write
    pattern: str  # sequential or random
    depth: int
    bytes_per_s: float
    cpu_us_per_block: float


class Suggestion(msgspec.Struct, frozen=True):
    """Settings of `[nvme]`, and what they rest on."""

    threads: int
    write_budget_bytes: int
    assumption: str

    @property
    def toml(self) -> str:
        """Return the lines for the configuration file."""
        unit, size = ("GiB", GIB) if self.write_budget_bytes >= GIB else ("MiB", MIB)
        return (
            f"[nvme]\nthreads = {self.threads}\n"
            f'write_budget = "{max(1, self.write_budget_bytes // size)}{unit}"'
        )


class DriveReport(msgspec.Struct, frozen=True):
    """All that was measured."""

    path: str
    block_bytes: int
    file_bytes: int
    drive_bytes: int  # size of the file system
    seconds: float
    samples: list[Sample]
    suggestion: Suggestion
    toml: str


def measure(folder: Path, seconds: float, watch: Progress) -> DriveReport:
    """Measure for about so long. Raises ConfigError, or KVStoreError when the drive fails."""
    drive = _room(folder)
    start_s = time.monotonic()
    blocks = _memory()
    with _file_in(folder) as file:

        def tell(what: str) -> None:
            watch(min(1.0, (time.monotonic() - start_s) / seconds), what)

        driver = _Driver(file, blocks, tell)
        driver.fill(FILL_SHARE * seconds)
        samples: list[Sample] = []
        left_s = max(seconds - (time.monotonic() - start_s), (1 - FILL_SHARE) * seconds)
        for depth in DEPTHS:
            samples += driver.cases(depth, left_s / (len(DEPTHS) * len(CASES)))
            if driver.too_slow(depth):
                break
    suggestion = suggest(samples, drive)
    return DriveReport(
        path=str(folder),
        block_bytes=BLOCK_BYTES,
        file_bytes=FILE_BYTES,
        drive_bytes=drive,
        seconds=round(time.monotonic() - start_s, 1),
        samples=samples,
        suggestion=suggestion,
        toml=suggestion.toml,
    )


def _memory() -> list[memoryview]:
    """Return blocks for all that is in flight, without zeros that a disk could leave out."""
    size = (2 * max(DEPTHS) + 8) * BLOCK_BYTES
    raw = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        raw.madvise(mmap.MADV_HUGEPAGE)
    whole, pattern = memoryview(raw), default_rng(size).bytes(BLOCK_BYTES)
    blocks = [whole[at : at + BLOCK_BYTES] for at in range(0, size, BLOCK_BYTES)]
    for block in blocks:
        block[:] = pattern
    return blocks


def _room(folder: Path) -> int:
    """Return the size of the file system. Raises ConfigError where the file does not fit."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as exc:
        raise ConfigError(f"{folder}: expected a directory: {exc.strerror}") from exc
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: expected a directory where files can be made")
    if usage.free < FILE_BYTES + SPARE_BYTES:
        raise ConfigError(
            f"{folder}: needed are {FILE_BYTES + SPARE_BYTES} bytes for a while,"
            f" found {usage.free} free"
        )
    return usage.total


@contextmanager
def _file_in(folder: Path) -> Iterator[ExtentFile]:
    path = folder / f".kvstore-check-{os.getpid()}"
    try:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            ExtentFile.make(path, FILE_BYTES, here)
            file = ExtentFile(path, BLOCK_BYTES, FILE_BYTES, here)
        finally:
            path.unlink(missing_ok=True)
            os.close(here)
    except OSError as exc:
        raise ConfigError(f"{folder}: no file can be made: {exc.strerror}") from exc
    try:
        yield file
    finally:
        file.close()


class _Checked(Move, eq=False):
    """With checksums, as the tier makes them."""

    def checksums(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(block) for block in self.blocks]


class _Driver:
    """Keeps a mover busy with one file; after an error its threads are not waited for."""

    def __init__(
        self, file: ExtentFile, blocks: list[memoryview], tell: Callable[[str], None]
    ) -> None:
        self._file = file
        self._blocks = blocks
        self._tell = tell
        self._area = file.count  # blocks that were written: others would be read from nowhere
        self._moved = 0  # in the last case

    def fill(self, seconds: float) -> None:
        """Write the file for the first time, as much of it as there is time for."""
        positions, count, mover = iter(range(self._file.count)), 0, ThreadMover[Move](2, 2)
        while count < AREA_BLOCKS_MIN:
            more, _ = self._keep(mover, positions, 4, seconds, "preparing", store=True)
            count += more
        mover.close()
        self._area = count

    def cases(self, depth: int, seconds: float) -> list[Sample]:
        """Measure reads and writes, in order and at random."""
        samples, mover = [], ThreadMover[Move](depth, depth)
        for kind, pattern in CASES:
            places = list(range(self._area))
            if pattern == "random":
                random.Random(depth).shuffle(places)  # noqa: S311  no secret
            cpu_s, what = time.process_time(), f"{pattern} {kind}s, {depth} in flight"
            count, took_s = self._keep(
                mover, cycle(places), 2 * depth + 8, seconds, what, store=kind == "write"
            )
            cpu_us = (time.process_time() - cpu_s) / count * 1e6
            rate = count * BLOCK_BYTES / took_s
            samples.append(Sample(kind, pattern, depth, rate, round(cpu_us, 1)))
            self._moved = count
        mover.close()
        return samples

    def too_slow(self, depth: int) -> bool:
        """Tell whether more in flight would only be waited for."""
        return self._moved < 2 * (4 * depth + 8)

    def _keep(
        self,
        mover: ThreadMover[Move],
        positions: Iterator[int],
        most: int,
        seconds: float,
        what: str,
        *,
        store: bool,
    ) -> tuple[int, float]:
        """Move blocks for some time; return how many, and how long it took to the last."""
        free, done = list(self._blocks), 0
        start_s = heard_s = time.monotonic()
        self._tell(what)
        while True:
            now_s = time.monotonic()
            while (not done or now_s - start_s < seconds) and len(self._blocks) - len(free) < most:
                position = next(positions, None)
                if position is None:
                    break
                mover.start(_Checked(store, self._file, position, [free.pop()]))
            if len(free) == len(self._blocks):
                return done, now_s - start_s
            time.sleep(TICK_S)
            for run in mover.poll():
                if run.error is not None:
                    raise KVStoreError(f"{what}: {run.error}")
                free.append(run.blocks[0])
                done, heard_s = done + 1, now_s
            if now_s - heard_s > SILENCE_S:
                raise KVStoreError(f"{what}: no answer from the disk for {SILENCE_S:.0f} s")
            self._tell(what)


def show(report: DriveReport) -> None:
    """Print it as a table, and the settings below."""
    rows = table("blocks of 2 MiB", "in flight>", "GB/s>", "CPU us>")
    for one in sorted(report.samples, key=lambda s: (s.kind, s.pattern == "random", s.depth)):
        rate, cpu = f"{one.bytes_per_s / 1e9:.2f}", f"{one.cpu_us_per_block:.0f}"
        rows.add_row(f"{one.pattern} {one.kind}s", str(one.depth), rate, cpu)
    for part in (
        f"{report.path}, measured for {report.seconds:.0f} s",
        rows,
        f"\n{report.toml}\n",
        f"The budget assumes that {report.suggestion.assumption}.",
    ):
        output().print(part, highlight=False, markup=False, soft_wrap=True)


def suggest(samples: list[Sample], drive_bytes: int) -> Suggestion:
    """Choose settings; drive_bytes: size of the file system."""
    reads, writes = _rates(samples, "read"), _rates(samples, "write")
    enough = [
        depth
        for depth in reads
        if depth >= THREADS_MIN
        and reads[depth] >= NEARLY * max(reads.values())
        and writes.get(writers_of(depth), 0.0) >= NEARLY * max(writes.values())
    ]
    threads = min(enough, default=max(reads))
    endured = int(DRIVE_WRITES_PER_DAY * drive_bytes)
    can = int(max(writes.values()) * DAY_S)
    assumption = (
        f"the drive endures {DRIVE_WRITES_PER_DAY:g} write of its capacity per day, and its"
        f" capacity is its file system's, {drive_bytes / GIB:.0f} GiB: at the"
        f" {max(writes.values()) / 1e9:.2f} GB/s measured, {endured / can:.1%} of the day"
    )
    return Suggestion(threads, max(MIB, min(endured, can)), assumption)


def _rates(samples: list[Sample], kind: str) -> dict[int, float]:
    """Return for each depth the mean of in order and at random: one alone is up to chance."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        if sample.kind == kind:
            found.setdefault(sample.depth, []).append(sample.bytes_per_s)
    return {depth: statistics.fmean(rates) for depth, rates in found.items()}
