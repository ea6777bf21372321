"""What moves the bytes of a hand-over: the exporter process, and threads that take checksums.

Landing slots are memory of their own, one sealed extent for each namespace, which the exporter
maps read-write. A landed block is summed there and copied into its slot by the same thread; both
release the GIL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence

import msgspec

from kvstore.export import messages as m
from kvstore.export.consumer import Check, Read
from kvstore.export.consumer import Tag as Part
from kvstore.export.jobs import Tag, Write
from kvstore.export.sums import block_sum, copied_sum
from kvstore.protocol import u32
from kvstore.service.peers import (
    Arrived,
    Checked,
    Down,
    Event,
    Reachable,
    Summed,
    Unreachable,
    Up,
    Written,
)
from kvstore.types import BlockKey
from tiers.cpu import CpuExtent
from tiers.exporter.client import Down as Ended_
from tiers.exporter.client import Exporter, Move, Settings
from tiers.exporter.messages import Ended, Mapped, Metadata, Ready, Unmapped
from tiers.runner import Runner

LANDING_FIRST = 1 << 30  # their extents are numbered from here, apart from those of slots
THREADS = 2
BATCH_BYTES = 8 << 20


class Landing:
    """Landing slots of one namespace."""

    def __init__(self, extent: int, memory: CpuExtent) -> None:
        """extent: its number in the exporter."""
        self.extent = extent
        self.memory = memory
        self.base = 0  # where the exporter has it; 0: not yet
        self.metadata = b""
        self._free = list(range(memory.count))

    def take(self, count: int) -> list[int]:
        """Take up to count free ones; none while the exporter has not mapped them."""
        count = min(count, len(self._free)) if self.base else 0
        return [self._free.pop() for _ in range(count)]

    def give(self, slots: Collection[int]) -> None:
        """Give some back."""
        self._free.extend(slots)

    def region(self) -> tuple[m.Region, bytes]:
        """Say where the exporter has them, and its metadata since then."""
        return m.Region(self.extent, self.base, self.memory.count), self.metadata

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes."""
        return self.memory.slot(slot)


class _Sums(msgspec.Struct):
    tags: list[Tag]
    namespace: str
    blocks: list[tuple[BlockKey, memoryview]]

    def run(self) -> Summed:
        return Summed(self.tags, [block_sum(self.namespace, *block) for block in self.blocks])

    def failed(self) -> Summed:
        return Summed(self.tags, [0] * len(self.tags))


class _Checks(msgspec.Struct):
    tags: list[Part]
    namespace: str
    blocks: list[tuple[Check, memoryview, memoryview]]

    def run(self) -> Checked:
        return Checked(self.namespace, self.tags, [self._one(*block) for block in self.blocks])

    def _one(self, check: Check, landed: memoryview, slot: memoryview) -> bool:
        return copied_sum(self.namespace, check.key, landed, slot) == check.sum

    def failed(self) -> Checked:
        return Checked(self.namespace, self.tags, [False] * len(self.tags))


class PeerMover:
    """Called from one thread, the store's."""

    def __init__(self, service: str, devices: str, landing_bytes: int) -> None:
        """service, devices: as in exporter Settings. landing_bytes: of each namespace's slots."""
        self._exporter = Exporter(Settings(service, devices))
        self._landing_bytes = landing_bytes
        self._landings: dict[str, Landing] = {}
        self._transfers: dict[int, tuple[str | None, list[Tag] | list[Part]]] = {}
        self._addresses: dict[int, int] = {}  # mapped, and peers were not told how to reach it
        self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # threads have results
        self._runner: Runner[_Sums | _Checks, Summed | Checked] = Runner(
            "kvstore-handover",
            lambda job: job.run(),
            lambda job, _: job.failed(),
            THREADS,
            lambda: os.eventfd_write(self._told, 1),
        )

    def fds(self) -> Iterator[int]:
        """Go through the descriptors that can be read when poll() has something to return."""
        yield from (self._exporter.fileno(), self._told)

    def wait_s(self, now_ns: int) -> float | None:
        """Return when to call poll() at the latest; None: when a descriptor says so."""
        return self._exporter.wait_s(now_ns)

    def poll(self, now_ns: int) -> Sequence[Event]:
        """Return what has happened."""
        events: list[Event] = []
        for event in self._exporter.poll(now_ns):
            match event:
                case Ready(name, metadata):
                    events.append(Up(name, metadata))
                case Mapped(extent, address):
                    self._addresses[extent] = address
                case Metadata(metadata):
                    events += self._reachable(metadata)
                case Unmapped(extent):
                    events.append(Unreachable(extent))
                case Ended(number, _, _, error):
                    events.append(self._ended(number, ok=error is None))
                case Ended_(reason):
                    self._addresses.clear()
                    for landing in self._landings.values():
                        landing.base = 0
                    events.append(Down(reason))
                case _:
                    pass  # refused peers fail their transfers; extents are mapped again
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._told)
        return [*events, *self._runner.poll()]

    def _reachable(self, metadata: bytes) -> list[Reachable]:
        addresses, self._addresses = self._addresses, {}
        for landing in self._landings.values():
            if landing.extent in addresses:
                landing.base, landing.metadata = addresses[landing.extent], metadata
        return [Reachable(extent, address, metadata) for extent, address in addresses.items()]

    def _ended(self, number: int, *, ok: bool) -> Event:
        digest, tags = self._transfers.pop(number)
        if digest is None:
            return Written(tags, ok)  # type: ignore[arg-type]
        return Arrived(digest, tags, ok)  # type: ignore[arg-type]

    def export(self, extent: int, fd: int, size: int) -> None:
        """Let peers read an extent."""
        self._exporter.map(extent, fd, size, writable=False)

    def unexport(self, extent: int) -> None:
        """Have Unreachable come once no transfer uses an extent."""
        self._exporter.unmap(extent)

    def landing(self, namespace: str, slot_bytes: int) -> Landing:
        """Return a namespace's landing slots, made at the first call. Raises TierFull."""
        found = self._landings.get(namespace)
        if found is None:
            memory = CpuExtent(max(self._landing_bytes, 2 * slot_bytes), slot_bytes)
            number = LANDING_FIRST + len(self._landings)
            found = self._landings[namespace] = Landing(number, memory)
            self._exporter.map(number, memory.fd, memory.count * slot_bytes, writable=True)
        return found

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Learn how to reach a peer's exporter now."""
        self._exporter.add_peer(agent, metadata)

    def sum(
        self, tags: list[Tag], namespace: str, blocks: list[tuple[BlockKey, memoryview]]
    ) -> None:
        """Take checksums, some blocks at a time."""
        step = max(1, BATCH_BYTES // len(blocks[0][1]))
        for at in range(0, len(tags), step):
            part = slice(at, at + step)
            self._runner.submit(_Sums(tags[part], namespace, blocks[part]))

    def check(
        self, tags: list[Part], namespace: str, blocks: list[tuple[Check, memoryview, memoryview]]
    ) -> None:
        """Copy landed blocks into their slots and take their checksums there."""
        step = max(1, BATCH_BYTES // len(blocks[0][1]))
        for at in range(0, len(tags), step):
            part = slice(at, at + step)
            self._runner.submit(_Checks(tags[part], namespace, blocks[part]))

    def write(self, tags: list[Tag], agent: str, write: Write) -> None:
        """Write to a peer's landing slots."""
        size, region = write.slot_bytes, write.landing
        local, remote = u32(write.numbers), u32(write.landing_slots)
        move = Move(
            agent, True, write.extent, region.base, region.slots * size, size, local, remote
        )
        self._transfers[self._exporter.start(move)] = (None, tags)

    def read(self, tags: list[Part], agent: str, digest: str, read: Read) -> None:
        """Read a peer's slots into landing slots."""
        landing, region = self._landings[digest], read.region
        size = landing.memory.slot_bytes
        local, remote = u32(read.landing), u32(read.numbers)
        move = Move(
            agent, False, landing.extent, region.base, region.slots * size, size, local, remote
        )
        self._transfers[self._exporter.start(move)] = (digest, tags)

    def close(self) -> None:
        """End the process and the threads, and free the landing slots."""
        self._exporter.close()
        self._runner.close()
        os.close(self._told)
        for landing in self._landings.values():
            landing.memory.close()
        self._landings.clear()
