"""What a disk gives without a tier: fio, or a plain loop with direct I/O where there is none.

Both move as many bytes, in the same directory, with as many calls under way and as long as the
tier's.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
from numpy.random import default_rng

from kvstore.config import HUGE_PAGE_BYTES
from kvstore.core.errors import KVStoreError
from kvstore.units import MIB, sized
from tiers.nvme.files import address_of

FIO_S = 300


class Moved(msgspec.Struct, frozen=True):
    """One pass over all blocks: bytes per second, and CPU time of all threads for each block."""

    bytes_per_s: float
    cpu_us_per_block: float


class Depth(msgspec.Struct, frozen=True):
    """Calls under way at one time, and bytes of one: blocks that are neighbours share a call."""

    read: int
    write: int
    call_bytes: int


class System(Protocol):
    """Something that keeps blocks on disk."""

    name: str

    def write(self) -> Moved: ...
    def read(self) -> Moved: ...
    def close(self) -> None: ...


def check_space(needed: int) -> None:
    """Raise KVStoreError if the current directory has less room than that."""
    free = shutil.disk_usage(Path.cwd()).free
    if free < needed:
        raise KVStoreError(
            f"{Path.cwd()}: {sized(free)} free, the benchmark needs {sized(needed)} for a while"
        )


def timed(blocks: Sequence[memoryview], work: Callable[[], None]) -> Moved:
    """Run work, which moves all these blocks."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    work()
    took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return Moved(sum(map(len, blocks)) / took_s, cpu_s / len(blocks) * 1e6)


def each(count: int, threads: int, move: Callable[[int], None]) -> None:
    """Call move(0) to move(count - 1) on threads. Raises KVStoreError."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            list(pool.map(move, range(count)))
        except OSError as exc:
            raise KVStoreError(f"the benchmark's own files: {exc}") from exc


class Reference:
    """One file without a tier."""

    name: str

    def __init__(self, folder: Path, blocks: Sequence[memoryview], depth: Depth) -> None:
        self._path = folder / "reference"
        self._blocks = blocks
        self._depth = depth

    def write(self) -> Moved:
        """Write all blocks."""
        return self._move("write", self._depth.write)

    def read(self) -> Moved:
        """Read all blocks back."""
        return self._move("read", self._depth.read)

    def _move(self, kind: str, depth: int) -> Moved:
        raise NotImplementedError

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class ThreadLoop(Reference):
    """Preallocated, with direct I/O: each thread moves the next blocks, nothing else."""

    name = "O_DIRECT loop"

    def __init__(self, folder: Path, blocks: Sequence[memoryview], depth: Depth) -> None:
        """Preallocate the file. Raises KVStoreError without direct I/O."""
        super().__init__(folder, blocks, depth)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
            os.posix_fallocate(self._fd, 0, sum(map(len, blocks)))
        except OSError as exc:
            raise KVStoreError(f"{folder}: no file with direct I/O: {exc.strerror}") from exc

    def _move(self, kind: str, depth: int) -> Moved:
        call = os.pwritev if kind == "write" else os.preadv
        size = len(self._blocks[0])
        step = max(1, self._depth.call_bytes // size)
        firsts = range(0, len(self._blocks), step)

        def move(number: int) -> None:
            pieces = self._blocks[firsts[number] : firsts[number] + step]
            if call(self._fd, list(pieces), firsts[number] * size) != size * len(pieces):
                raise OSError("a block was cut short")

        return timed(self._blocks, lambda: each(len(firsts), depth, move))

    def close(self) -> None:
        """Remove the file."""
        os.close(self._fd)
        super().close()


class Fio(Reference):
    """fio with as many threads, each in its own part of the file; huge pages where glibc asks.

    It has memory of its own: only the number of blocks and their size are used.
    """

    name = "fio"

    def _move(self, kind: str, depth: int) -> Moved:
        block_bytes = len(self._blocks[0])
        call_bytes = max(block_bytes, self._depth.call_bytes)
        part = len(self._blocks) * block_bytes // depth // call_bytes * call_bytes
        options = {
            "name": "kvstore",
            "filename": str(self._path),
            "ioengine": "psync",
            "direct": 1,
            "rw": kind,
            "bs": call_bytes,
            "numjobs": depth,
            "size": part,
            "offset_increment": part,
            "scramble_buffers": 0,
            "output-format": "json",
        }
        command = ["fio", "--thread", "--group_reporting"]
        command += [f"--{name}={value}" for name, value in options.items()]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=True,
                timeout=FIO_S,
                env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
            )
            job = json.loads(done.stdout)["jobs"][0]
            # Run time is the sum over threads here, and the shares are of it.
            cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
            blocks = job[kind]["io_bytes"] / block_bytes
            return Moved(float(job[kind]["bw_bytes"]), cpu_s / blocks * 1e6)
        except subprocess.CalledProcessError as exc:
            raise KVStoreError(f"fio: {exc.stderr.strip() or exc}") from exc
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise KVStoreError(f"fio: {exc}") from exc
        except (ValueError, LookupError, ZeroDivisionError) as exc:
            raise KVStoreError(f"fio reports in a form that is not known here: {exc!r}") from exc


def reference(folder: Path, blocks: Sequence[memoryview], depth: Depth) -> Reference:
    """Take fio where it is installed."""
    kind = ThreadLoop if shutil.which("fio") is None else Fio
    return kind(folder, blocks, depth)


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
