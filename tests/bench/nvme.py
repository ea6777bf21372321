"""`tests.bench nvme`: blocks to a disk and back, against what the disk gives without a tier.

The real tier with its threads, index and commits, fed as the store feeds it: jobs of neighbouring
blocks, several open, polled once per tick. In each round every system writes all blocks and reads
them back, one after the other. What a write's commit costs comes after its time is taken.

Fair to both sides: as many calls under way, and calls as long (the tier moves neighbours in one
call); files preallocated, the page cache passed by, the first round not counted, memory in huge
pages where the machine has any (with small ones a disk is given each block in hundreds of pieces).
A round in which a hypervisor took the processors away is measured again. Not equal is how much
memory there is: fio goes through a few buffers again and again, a cache's blocks each have a place
of their own.

Results read and write also have the slowest and fastest round (value_low, value_high,
reference_low, reference_high) and CPU time per block.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import msgspec

from kvstore.config import NvmeConfig
from kvstore.core.errors import KVStoreError
from kvstore.core.tier import TierContext
from kvstore.core.types import BlockKey, JobId, JobKind, Slot, TransferJob
from kvstore.units import MIB, sized
from tests.bench.raw_disk import Depth, Moved, System, check_space, filled, reference, timed
from tests.bench.report import Result, alternate, compared, progress
from tiers.nvme.block_io import writers_of
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.index import Record
from tiers.nvme.namespace import DiskNamespace
from tiers.nvme.tier import RUN_BYTES_MAX, NvmeTier

PAIRS = 5
READERS = 4  # the default of `threads`
WRITERS = writers_of(READERS)
OPEN_JOBS = 4
TICK_S = 0.001  # the store's, while something is under way
SETTLE_S = 60.0
NAMES = {JobKind.LOAD: "read", JobKind.STORE: "write"}
Passes = dict[JobKind, Moved]


class Sizes(msgspec.Struct, frozen=True):
    """How much is moved."""

    block_bytes: tuple[int, ...] = (MIB // 2, MIB, 2 * MIB, 4 * MIB)
    data_bytes: int = 512 * MIB
    job_bytes: int = 32 * MIB
    extent_bytes: int = 64 * MIB


class Unchecked(NvmeDisk):
    """The tier without checksums: what these cost is the difference."""

    def tier(self, context: TierContext) -> NvmeTier:
        """Make a namespace's tier."""
        made = super().tier(context)
        made.space.__class__ = _Unchecked
        return made


class _Unchecked(DiskNamespace):
    def checksum(self, _record: Record, _block: memoryview) -> int:
        return 0


class Slots:
    """SlotMemory over the benchmark's blocks."""

    def __init__(self, blocks: Sequence[memoryview]) -> None:
        """Slot n is blocks[n]."""
        self._blocks = blocks

    def view(self, slot: Slot) -> memoryview:
        """Return the slot's bytes."""
        return self._blocks[slot]


class Ours:
    """An NVMe tier in a directory of its own, with room for all blocks."""

    def __init__(
        self, folder: Path, blocks: Sequence[memoryview], sizes: Sizes, *, checked: bool
    ) -> None:
        """Open an empty disk."""
        self.name = "kvstore" if checked else "kvstore without checksums"
        self._blocks = blocks
        capacity = 2 * sizes.data_bytes + sizes.extent_bytes
        settings = NvmeConfig(
            str(folder), capacity, sizes.extent_bytes, 10**9, READERS, 10**10, None
        )
        self._disk = (NvmeDisk if checked else Unchecked)(settings)
        context = TierContext("nvme", "bench", len(blocks[0]), Slots(blocks), {})
        self._tier = self._disk.tier(context)
        self._per_job = max(1, sizes.job_bytes // len(blocks[0]))
        self._keys = [BlockKey(number.to_bytes(34, "big")) for number in range(len(blocks))]
        self._next = 0

    def write(self) -> Moved:
        """Store all blocks anew, until the last result."""
        self._tier.clear()
        self._settle()
        moved = timed(self._blocks, lambda: self._run(JobKind.STORE))
        self._settle()
        return moved

    def read(self) -> Moved:
        """Load all blocks, until the last result."""
        return timed(self._blocks, lambda: self._run(JobKind.LOAD))

    def close(self) -> None:
        """Close the disk in order."""
        self._tier.close()
        self._disk.close()

    def _jobs(self, kind: JobKind) -> list[TransferJob]:
        jobs = []
        for first in range(0, len(self._keys), self._per_job):
            keys = tuple(self._keys[first : first + self._per_job])
            slots = tuple(Slot(first + number) for number in range(len(keys)))
            parents = (None, *keys[:-1]) if kind is JobKind.STORE else ()
            self._next += 1
            jobs.append(TransferJob(JobId(self._next), kind, keys, slots, parents))
        return jobs

    def _run(self, kind: JobKind) -> None:
        waiting = self._jobs(kind)[::-1]
        sizes = {job.job_id: len(job.keys) for job in waiting}
        opened = 0
        while waiting or opened:
            while waiting and opened < OPEN_JOBS:
                self._tier.submit(waiting.pop())
                opened += 1
            time.sleep(TICK_S)
            for result in self._tier.poll():
                opened -= 1
                if result.error is not None or result.done != sizes[result.job_id]:
                    raise KVStoreError(f"{self.name}: {NAMES[kind]} failed: {result}")

    def _settle(self) -> None:
        """Wait until everything is durable and nothing is under way."""
        space, deadline_s = self._tier.space, time.monotonic() + SETTLE_S
        while self._disk.busy or space.to_put or space.to_delete or space.leaving:
            self._disk.flush()
            if time.monotonic() > deadline_s:
                raise KVStoreError(f"{self.name}: not durable after {SETTLE_S:.0f} s")


def run(pairs: int | None, sizes: Sizes | None = None) -> list[Result]:
    """Measure everything in the current directory; pairs: rounds, instead of the default."""
    sizes, rounds = sizes or Sizes(), pairs or PAIRS
    # The reference's file, and two tiers with one extent to spare and their index.
    check_space(3 * sizes.data_bytes + 2 * sizes.extent_bytes + 128 * MIB)
    memory, pages = filled(sizes.data_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=Path.cwd()) as name,
        progress(len(sizes.block_bytes) * (1 + rounds)) as tell,
    ):
        results = []
        for block_bytes in sizes.block_bytes:
            tell(f"blocks of {sized(block_bytes)}", 0)
            ends = range(block_bytes, len(memory) + 1, block_bytes)
            blocks = [memory[end - block_bytes : end] for end in ends]
            how = {"block_bytes": block_bytes, "pages": pages}
            against, found, disturbed = _measured(Path(name), blocks, sizes, rounds, tell)
            results += _results(how, against, found, disturbed)
    return results


def _measured(
    folder: Path, blocks: Sequence[memoryview], sizes: Sizes, rounds: int, tell: Callable[..., None]
) -> tuple[str, dict[str, list[Passes]], int]:
    """Alternate the systems; the first round makes files. Return the reference's name, too."""
    depth = Depth(READERS, WRITERS, min(RUN_BYTES_MAX, sizes.data_bytes // READERS))
    with ExitStack() as ends:
        other = ends.enter_context(closing(reference(folder, blocks, depth)))
        systems: dict[str, System] = {"reference": other}
        for name in ("checked", "unchecked"):
            place = Path(ends.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            ours = Ours(place, blocks, sizes, checked=name == "checked")
            systems[name] = ends.enter_context(closing(ours))
        passes = {name: partial(_passes, system) for name, system in systems.items()}
        found, disturbed = alternate(passes, rounds, tell)
        return other.name, found, disturbed


def _passes(system: System) -> Passes:
    """Write all blocks, and read them back."""
    return {JobKind.STORE: system.write(), JobKind.LOAD: system.read()}


def _results(
    how: dict[str, object], against: str, found: dict[str, list[Passes]], disturbed: int
) -> list[Result]:
    results = []
    for kind, name in NAMES.items():
        rates = {s: [passes[kind].bytes_per_s for passes in found[s]] for s in found}
        cpu_us = {s: [passes[kind].cpu_us_per_block for passes in found[s]] for s in found}
        theirs = rates["reference"]
        for variant in ("checked", "unchecked"):
            ours = rates[variant]
            more: dict[str, object] = {
                **how,
                "checksum": variant == "checked",
                "disturbed_rounds": disturbed,
                "cpu_us_per_block": round(statistics.median(cpu_us[variant]), 1),
                "reference_cpu_us_per_block": round(statistics.median(cpu_us["reference"]), 1),
                "depth": READERS if kind is JobKind.LOAD else WRITERS,
                "rounds": len(ours),
                "value_low": min(ours) * 1e-9,
                "value_high": max(ours) * 1e-9,
                "reference_low": min(theirs) * 1e-9,
                "reference_high": max(theirs) * 1e-9,
            }
            results.append(compared(name, ours, theirs, "GB/s", against, more))
    return results
