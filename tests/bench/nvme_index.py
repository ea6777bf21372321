"""`tests.bench nvme-index`: how fast a disk with many blocks is known after a start.

For each count an index is written by the tier's own process, then a fresh process opens the disk
and polls it as a store does. No block is written: extents are files without content. Results are
seconds from the process' start until the first hit and until all blocks are known, the longest
single poll, and per block CPU time (store and index process), resident memory and index file.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvstore.config import NvmeConfig
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.core.tier import TierContext
from kvstore.core.types import BlockKey, LookupResult, Slot
from kvstore.units import GIB, KIB, MIB, sized
from tests.bench.report import Result, progress
from tiers.nvme.directory import Directory
from tiers.nvme.index_client import IndexClient
from tiers.nvme.messages import FOLDER, NOWHERE, RECORD_BYTES, VALUE, Commit

BLOCKS = (10_000, 100_000, 1_000_000)
CHAIN = 100  # blocks of one request
SLOT_BYTES = 4 * KIB
EXTENT_BYTES = GIB
COMMIT_ROWS = 20_000
TICK_S = 0.001  # the store's, while something is under way
DIGEST = "bench"
_SLOTS = EXTENT_BYTES // SLOT_BYTES


class Found(msgspec.Struct):
    """What a process measured that opened a disk."""

    first_hit_s: float
    all_known_s: float
    longest_poll_ms: float
    cpu_s: float
    memory_bytes: int


class NoMemory:
    """SlotMemory without slots: nothing is moved."""

    def view(self, slot: Slot) -> memoryview:
        """Fail: nobody may ask."""
        raise KVStoreError(f"slot {slot} was asked for, expected no transfer")


def run(blocks: Sequence[int] | None = None, folder: Path | None = None) -> list[Result]:
    """Measure each count of blocks, in a folder of its own below this one."""
    counts = tuple(blocks or BLOCKS)
    below = Path.cwd() if folder is None else folder
    if not below.is_dir():
        raise ConfigError(f"{below}: expected a directory")
    needed, free = 2 * RECORD_BYTES * max(counts) + 64 * MIB, shutil.disk_usage(below).free
    if free < needed:
        raise KVStoreError(f"{below}: {sized(free)} free, the benchmark needs {sized(needed)}")
    results = []
    with progress(2 * sum(counts)) as tell:
        for count in counts:
            with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=below) as name:
                place, what = Path(name), f"{count:,} blocks"
                file_bytes = make(place, count, partial(tell, what))
                results += _results(count, opened(place, count), file_bytes)
            tell(what, count)
    return results


def key_of(number: int) -> BlockKey:
    """Name a block."""
    return BlockKey(hashlib.sha256(number.to_bytes(8, "big")).digest() + b"\0\0")


def make(folder: Path, count: int, tell: Callable[[int], object]) -> int:
    """Write an index of chains, and extents without content; return the bytes of the index."""
    volume = Directory(folder)
    volume.open(0.0)
    client = IndexClient(folder, count, volume.lock_fd)
    try:
        extents = range(1, -(-count // _SLOTS) + 1)
        for number in extents:
            with volume.extent(number).open("wb") as file:
                os.truncate(file.fileno(), EXTENT_BYTES)
        client.commit(Commit(extents=[(number, SLOT_BYTES, DIGEST) for number in extents]))
        for first in range(0, count, COMMIT_ROWS):
            rows = list(_rows(first, min(count, first + COMMIT_ROWS)))
            client.commit(Commit(puts={DIGEST: rows}))
            tell(len(rows))
        client.commit(Commit(clean=True))
        return (folder / FOLDER / "data.mdb").stat().st_blocks * 512
    finally:
        client.close()
        volume.close()


def _rows(first: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    for number in range(first, end):
        above = NOWHERE if number % CHAIN == 0 else _place(number - 1)
        value = VALUE.pack(_place(number), above, number + 1, number << 32, SLOT_BYTES)
        yield key_of(number), value


def _place(number: int) -> int:
    return (number // _SLOTS + 1) << 32 | number % _SLOTS


def opened(folder: Path, count: int) -> Found:
    """Open the disk in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(folder), str(count), str(time.monotonic())],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise KVStoreError(f"the disk was not opened: {lines[-1] if lines else done.returncode}")
    return msgspec.json.decode(done.stdout, type=Found)


def look(folder: Path, count: int, started_s: float) -> Found:
    """Open the disk in this process, which began at started_s, until all blocks are known."""
    from tiers.nvme.disk import NvmeDisk

    extents = -(-count // _SLOTS)
    settings = NvmeConfig(
        str(folder),
        (extents + 1) * 2 * EXTENT_BYTES,
        EXTENT_BYTES,
        10**9,
        4,
        10**10,
        None,
    )
    before_bytes = resident_bytes()
    disk = NvmeDisk(settings)
    tier = disk.tier(TierContext("nvme", DIGEST, SLOT_BYTES, NoMemory(), {}))
    first_hit_s, longest_s = 0.0, 0.0
    while disk.state == "loading":
        began_s = time.monotonic()
        disk.poll()
        longest_s = max(longest_s, time.monotonic() - began_s)
        if not first_hit_s and tier.lookup(key_of(0)) is LookupResult.HIT:
            first_hit_s = time.monotonic() - started_s
        time.sleep(TICK_S)
    all_known_s = time.monotonic() - started_s
    known, memory_bytes = len(tier.space.index), resident_bytes() - before_bytes
    if known != count:
        raise KVStoreError(f"{known} blocks are known, expected {count}")
    with contextlib.suppress(OSError):
        tier.close()
        disk.close()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return Found(first_hit_s, all_known_s, longest_s * 1e3, cpu_s, memory_bytes)


def resident_bytes() -> int:
    """Memory that this process has."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * mmap.PAGESIZE


def _results(count: int, found: Found, file_bytes: int) -> list[Result]:
    rows = [
        ("index_first_hit", found.first_hit_s, "s"),
        ("index_all_known", found.all_known_s, "s"),
        ("index_longest_poll", found.longest_poll_ms, "ms"),
        ("index_cpu", found.cpu_s * 1e6 / count, "us per block"),
        ("index_memory", found.memory_bytes / count, "bytes per block"),
        ("index_file", file_bytes / count, "bytes per block"),
    ]
    return [Result(name, value, unit, parameters={"blocks": count}) for name, value, unit in rows]


def main() -> int:
    """Run as the process that opened() starts."""
    folder, count, started_s = sys.argv[1:4]
    found = look(Path(folder), int(count), float(started_s))
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
