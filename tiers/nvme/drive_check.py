"""Measures a drive as the tier uses it: checked blocks to and from an extent file.

The file is preallocated and has no name any more while it is measured: whatever ends the process,
nothing stays behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import xxhash
from numpy.random import default_rng  # here: a Ctrl-C that meets an import can be lost

from kvstore.config import HUGE_PAGE_BYTES
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.units import GIB, MIB
from tiers.nvme.block_io import Move, ThreadMover, writers_of
from tiers.nvme.drive_report import Report, Sample, suggest
from tiers.nvme.files import ExtentFile, address_of

BLOCK_BYTES = 2 * MIB
FILE_BYTES = GIB
SPARE_BYTES = 64 * MIB
DEPTHS = (1, 2, 4, 8, 16)
CASES = tuple((kind, pattern) for kind in ("read", "write") for pattern in ("sequential", "random"))
FILL_SHARE = 0.25  # of the time, to write the file for the first time
AREA_BLOCKS_MIN = 64
TICK_S = 0.0005
SILENCE_S = 30.0

Watch = Callable[[float, str], None]  # share that is done, and what is going on


def measure(folder: Path, seconds: float, watch: Watch) -> Report:
    """Measure for about so long. Raises ConfigError, or KVStoreError when the drive fails."""
    drive = _room(folder)
    start_s = time.monotonic()
    memory, _ = filled((2 * max(DEPTHS) + 8) * BLOCK_BYTES)
    blocks = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
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
    writers = {depth: writers_of(depth) for depth in DEPTHS}
    suggestion = suggest(samples, writers, drive)
    return Report(
        path=str(folder),
        block_bytes=BLOCK_BYTES,
        file_bytes=FILE_BYTES,
        drive_bytes=drive,
        seconds=round(time.monotonic() - start_s, 1),
        samples=samples,
        suggestion=suggestion,
        toml=suggestion.toml,
    )


def filled(size: int) -> tuple[memoryview, str]:
    """Return memory, all of it there, without zeros that a disk could leave out, and its pages.

    Private memory gets huge pages where madvise is heard, which shared memory does by a setting of
    its own (see `kvstore check`); "small" when not all of it did.
    """
    raw = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without
        raw.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(raw)
    start = -address_of(whole) % HUGE_PAGE_BYTES
    memory = whole[start : start + size]
    pattern = default_rng(size).bytes(MIB)
    for at in range(0, size, MIB):
        memory[at : at + MIB] = pattern[: size - at]
    huge = _huge_bytes(address_of(memory)) >= size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return memory, "huge" if huge else "small"


def _huge_bytes(address: int) -> int:
    """Count the bytes in huge pages of the mapping that an address is in."""
    inside = False
    with Path("/proc/self/smaps").open(encoding="utf-8") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):
                begin, end = (int(text, 16) for text in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "AnonHugePages:":
                return int(rest[0]) << 10
    return 0


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

    def sums(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(block) for block in self.blocks]


class _Silent(KVStoreError):
    """A disk that does not answer: nothing of it can be waited for."""


@contextmanager
def _closing(mover: ThreadMover[Move]) -> Iterator[None]:
    try:
        yield
    except _Silent:
        raise
    except BaseException:
        mover.close()
        raise
    mover.close()


class _Driver:
    """Keeps a mover busy with one file."""

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
        mover = ThreadMover[Move](2, 2)
        positions = iter(range(self._file.count))
        with _closing(mover):
            count, _ = self._keep(mover, positions, 4, seconds, "preparing", store=True)
            while count < AREA_BLOCKS_MIN:
                more, _ = self._keep(mover, positions, 4, seconds, "preparing", store=True)
                count += more
        self._area = count

    def cases(self, depth: int, seconds: float) -> list[Sample]:
        """Measure reads and writes, in order and at random."""
        samples = []
        mover = ThreadMover[Move](depth, depth)
        with _closing(mover):
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
            while now_s - start_s < seconds and len(self._blocks) - len(free) < most:
                position = next(positions, None)
                if position is None:
                    break
                mover.start(_Checked(store, self._file, position, [free.pop()]))
            if len(free) == len(self._blocks):
                return done, now_s - start_s
            time.sleep(TICK_S)
            for moved in mover.poll():
                if moved.error is not None:
                    raise KVStoreError(f"{what}: {moved.error}")
                free.append(moved.run.blocks[0])
                done, heard_s = done + 1, now_s
            if now_s - heard_s > SILENCE_S:
                raise _Silent(f"{what}: no answer from the disk for {SILENCE_S:.0f} s")
            self._tell(what)
