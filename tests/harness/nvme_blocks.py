"""Blocks for tests of the NVMe tier: chains whose bytes follow from their names."""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.config import NvmeConfig
from kvstore.core.tier import TierContext, TokenRow
from kvstore.core.types import BlockKey, JobId, JobKind, JobResult, LookupResult, Slot, TransferJob
from tests.harness.patience import WAIT_S
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.tier import NvmeTier

MIB = 1 << 20
SLOT_BYTES = 8192
SLOTS = 64


def settings_for(path: Path, capacity_bytes: int = 64 * MIB) -> NvmeConfig:
    """A small disk whose commits do not wait long."""
    return NvmeConfig(
        str(path),
        capacity_bytes,
        extent_bytes=2 * MIB,
        durability_ns=20_000_000,
        threads=2,
        backlog_ns=10**10,
        write_budget_bytes=None,
    )


class Memory:
    """SlotMemory that starts on a page, as the store's does."""

    def __init__(self, slot_bytes: int = SLOT_BYTES) -> None:
        self.slot_bytes = slot_bytes
        self._data = memoryview(mmap.mmap(-1, SLOTS * slot_bytes))

    def view(self, slot: Slot) -> memoryview:
        return self._data[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


def key(chain: int, index: int) -> BlockKey:
    return BlockKey(hashlib.sha256(f"{chain}/{index}".encode()).digest() + b"\0\0")


def content(name: BlockKey, size: int = SLOT_BYTES) -> bytes:
    return hashlib.shake_128(name).digest(size)


def disk_bytes(folder: Path) -> int:
    """Bytes that all files in a folder take on disk; one may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


class Shelf:
    """One namespace's tier on a disk, with memory of its own."""

    def __init__(self, disk: NvmeDisk, namespace: str = "0123456789ab", **memory: int) -> None:
        self.disk = disk
        self.memory = Memory(**memory)
        self.size = self.memory.slot_bytes
        context = TierContext("nvme", namespace, self.size, self.memory, {})
        self.tier: NvmeTier = disk.tier(context)
        self._next = 0

    def run(self, kind: JobKind, keys: Sequence[BlockKey], above: BlockKey | None) -> JobResult:
        self._next += 1
        slots = tuple(Slot(n) for n in range(len(keys)))
        parents = (above, *keys[:-1]) if kind is JobKind.STORE else ()
        self.tier.submit(TransferJob(JobId(self._next), kind, tuple(keys), slots, parents))
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            for result in self.tier.poll():
                return result
            time.sleep(0.0005)
        raise AssertionError("no result")

    def put(self, chain: int, first: int, end: int) -> JobResult:
        """Store blocks first..end-1 of a chain."""
        keys = [key(chain, index) for index in range(first, end)]
        for slot, name in enumerate(keys):
            self.memory.view(Slot(slot))[:] = content(name, self.size)
        return self.run(JobKind.STORE, keys, key(chain, first - 1) if first else None)

    def get(self, keys: Sequence[BlockKey]) -> JobResult:
        """Load blocks; those that the result says are whole must be."""
        for slot in range(len(keys)):
            self.memory.view(Slot(slot))[:] = b"\xbb" * self.size
        result = self.run(JobKind.LOAD, keys, None)
        for slot, name in enumerate(keys[: result.done]):
            assert self.memory.view(Slot(slot)) == content(name, self.size), "wrong bytes"
        return result

    def fill(self, chains: int, length: int = 30) -> None:
        """Store the first chains."""
        for chain in range(chains):
            self.put(chain, 0, length)

    def whole(self, chain: int, count: int) -> bool:
        """Load a chain's first blocks; tell whether all are there."""
        return self.get([key(chain, index) for index in range(count)]).done == count

    def has(self, chain: int, index: int) -> bool:
        return self.tier.lookup(key(chain, index)) is LookupResult.HIT

    def keys(self) -> list[BlockKey]:
        return [record.key for record in self.tier.space.index]

    def token_rows(self) -> list[TokenRow]:
        """All rows of token ids, page by page."""
        found, mark = list[TokenRow](), 0
        while True:
            page = self.tier.token_rows(mark)
            if page is None:
                self.disk.poll()
                time.sleep(0.0005)
                continue
            found += page.rows
            if page.last:
                return found
            mark = page.mark

    def settle(self) -> None:
        """Wait until the index is read and everything is durable."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            self.disk.flush()
            if (
                self.disk.state == "ok"
                and not self.disk.busy
                and not self.disk.attached.commits.pending
            ):
                return
        raise AssertionError(f"not settled: {self.disk.state}")


@contextmanager
def shelf(
    settings: NvmeConfig,
    namespace: str = "0123456789ab",
    *,
    settled: bool = True,
    tokens: bool = False,
    **memory: int,
) -> Iterator[Shelf]:
    """A disk with one namespace, closed in order. settled: its index is read."""
    disk = NvmeDisk(settings, tokens=tokens)
    try:
        made = Shelf(disk, namespace, **memory)
        if settled:
            made.settle()
        yield made
        made.tier.close()
    finally:
        disk.close()
