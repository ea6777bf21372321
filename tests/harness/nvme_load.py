"""A mixed random load on namespaces of the NVMe tier, for the power campaign.

Blocks form trees: chains of LENGTH blocks, two of three of which fork off the chain before. Names,
parents and bytes follow from each other, so a later process can check what an earlier one left.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from kvstore.core.errors import BlockCorrupt
from kvstore.core.index import State
from kvstore.core.tier import TierContext
from kvstore.core.types import BlockKey, JobId, JobKind, JobResult, LookupResult, Slot, TransferJob
from tests.harness.nvme_blocks import SLOTS, Memory, content, key
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.index import Record

CHAINS, LENGTH = 120, 24  # per namespace
JOB_BLOCKS_MAX = 8
JOBS_MAX = 12


class Name(NamedTuple):
    """One block, in words of the tests."""

    chain: int
    block: int


def above(name: Name) -> Name | None:
    """The parent."""
    if name.block:
        return Name(name.chain, name.block - 1)
    return None if name.chain % 3 == 0 else Name(name.chain - 1, name.chain * 7 % 5)


@cache
def path_to(name: Name) -> tuple[Name, ...]:
    """From the root down to the block."""
    parent = above(name)
    return (name,) if parent is None else (*path_to(parent), name)


@cache
def key_of(name: Name) -> BlockKey:
    return key(*name)


@cache
def names_of(number: int) -> dict[BlockKey, Name]:
    """All blocks that a namespace can have."""
    chains = range(number * CHAINS, (number + 1) * CHAINS)
    return {key(chain, index): Name(chain, index) for chain in chains for index in range(LENGTH)}


def bytes_of(name: Name, size: int) -> bytes:
    return content(key_of(name), size)


class Load:
    """Random jobs on one namespace, several at a time; every block that is read is verified."""

    def __init__(
        self,
        disk: NvmeDisk,
        number: int,
        slot_bytes: int,
        rng: random.Random,
        stored: Callable[[list[Name]], None] = lambda _: None,
    ) -> None:
        """number: of the namespace; stored(names): these are acknowledged, and can be read."""
        self.size = slot_bytes
        self.names = names_of(number)
        self.memory = Memory(slot_bytes)
        self.tier = disk.tier(TierContext("nvme", f"{number:012x}", slot_bytes, self.memory, {}))
        self.corrupt = 0
        self.clear_share = 0.0002  # of all steps
        self._chains = range(number * CHAINS, (number + 1) * CHAINS)
        self._rng = rng
        self._stored = stored
        self._free = [Slot(n) for n in range(SLOTS)]
        self._open: dict[JobId, TransferJob] = {}
        self._again: list[Name] = []  # were to be read with a block that is damaged
        self._last = 0

    def step(self) -> None:
        """Do one random thing, and take results."""
        dice = self._rng.random()
        if dice < 0.6:
            self.store_some()
        elif dice < 0.85:
            self.load_some()
        elif dice < 0.985:
            self.tier.touch(key_of(self._any()))
        elif dice < 1 - self.clear_share:
            self._discard_some()
        else:
            self.tier.clear()
        self.poll()

    def poll(self) -> int:
        """Take results; return how many jobs ended."""
        results = self.tier.poll()
        for result in results:
            self._ended(self._open.pop(result.job_id), result)
        return len(results)

    def submit(self, kind: JobKind, names: Sequence[Name]) -> None:
        """Start a job if there are slots for it."""
        if len(self._free) < len(names) or len(self._open) >= JOBS_MAX or not names:
            return
        self._last += 1
        slots = tuple(self._free.pop() for _ in names)
        for slot, name in zip(slots, names, strict=True):
            store = kind is JobKind.STORE
            self.memory.view(slot)[:] = bytes_of(name, self.size) if store else b"\xbb" * self.size
        parents = [above(name) for name in names] if kind is JobKind.STORE else []
        job = TransferJob(
            JobId(self._last),
            kind,
            tuple(key_of(name) for name in names),
            slots,
            tuple(None if parent is None else key_of(parent) for parent in parents),
        )
        self._open[job.job_id] = job
        self.tier.submit(job)

    def has(self, name: Name) -> bool:
        return self.tier.lookup(key_of(name)) is LookupResult.HIT

    def _any(self) -> Name:
        return Name(self._rng.choice(self._chains), self._rng.randrange(LENGTH))

    def store_some(self) -> None:
        """Go on where the way to some block ends, be it in a job under way; parents first."""
        path = path_to(self._any())
        there = (n for n, name in enumerate(path) if self._absent(name))
        first = next(there, len(path))
        if self._rng.random() < 0.05:
            first = max(0, first - 2)  # blocks that are here already
        self.submit(JobKind.STORE, path[first:][: self._rng.randint(1, JOB_BLOCKS_MAX)])

    def _absent(self, name: Name) -> bool:
        return self.tier.lookup(key_of(name)) is LookupResult.MISS

    def load_some(self) -> None:
        path = path_to(self._any())
        first = self._rng.randrange(len(path))
        wanted = path[first:][: self._rng.randint(1, JOB_BLOCKS_MAX)]
        here = next((n for n, name in enumerate(wanted) if not self.has(name)), len(wanted))
        self.submit(JobKind.LOAD, wanted[:here])

    def _discard_some(self) -> None:
        here = [name for name in path_to(self._any()) if self.has(name)]
        if here:
            self.tier.discard([key_of(here[-1])])
            self.submit(JobKind.STORE, here[-1:])  # back before its leaving is durable

    def _ended(self, job: TransferJob, result: JobResult) -> None:
        """Check what was read; say what was stored."""
        names = [self.names[name] for name in job.keys]
        if isinstance(result.error, BlockCorrupt):
            self.corrupt += 1
            self._again += names[result.done + 1 :]
        if job.kind is JobKind.LOAD:
            for slot, name in list(zip(job.slots, names, strict=True))[: result.done]:
                assert self.memory.view(slot) == bytes_of(name, self.size), f"wrong bytes of {name}"
        else:
            self._stored([name for name in names[: result.done] if self.has(name)])
        self._free += job.slots

    # What a start has found

    def records(self) -> dict[Name, Record]:
        return {self.names[record.key]: record for record in self.tier.space.index}

    def check_closed(self) -> None:
        """Every block hangs below its own parent, which is here."""
        records = self.records()
        for name, record in records.items():
            parent = above(name)
            assert record.state is State.READY
            assert record.parent is (None if parent is None else records.get(parent)), name
            assert parent is None or record.parent is not None, f"{name} without its parent"

    def read_all(self, wait: Callable[[], None]) -> None:
        """Read every block that is here; wait() is called while nothing has ended."""
        left = deque(sorted(self.records()))
        while left or self._open:
            while left and len(self._free) >= JOB_BLOCKS_MAX and len(self._open) < JOBS_MAX:
                names = [left.popleft() for _ in range(min(JOB_BLOCKS_MAX, len(left)))]
                self.submit(JobKind.LOAD, [name for name in names if self.has(name)])
            if not self.poll():
                wait()
            left += self._again
            self._again.clear()
