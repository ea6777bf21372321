"""What moves the bytes of a hand-over: the exporter process, and threads that take checksums.

Landing slots are memory of their own, one sealed extent for each namespace, which the exporter
maps read-write. A landed block is summed there and copied into its slot by the same thread; both
release the GIL.
"""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from kvstore.core.errors import InvariantBroken, TierFull
from kvstore.core.types import BlockKey
from kvstore.handover.checksums import block_sum, copied_sum
from kvstore.handover.fetches import Check, Read
from kvstore.handover.fetches import Tag as Part
from kvstore.handover.jobs import Fill, Tag, Write
from kvstore.handover.moves import (
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
from kvstore.wire import peer as m
from kvstore.wire.framing import u32
from tiers.cpu import GENERATION_BYTES, CpuExtent
from tiers.nixl.errors import ErrorClass
from tiers.nixl.messages import Ended, Mapped, Metadata, NotMapped, Ready, Unmapped
from tiers.nixl.reach import over_tcp
from tiers.nixl.supervisor import Down as Ended_
from tiers.nixl.supervisor import Event as Said
from tiers.nixl.supervisor import Exporter, Filling, Move, Settings
from tiers.runner import Runner

log = logging.getLogger(__name__)

LANDING_FIRST = 1 << 30  # their extents are numbered from here, apart from those of slots
LANDINGS_MAX = 8  # models that blocks arrive for at one time
RETRY_NS = 1_000_000_000  # after memory could not be had
THREADS = 2
BATCH_BYTES_MIN, BATCH_BYTES_MAX = 4 << 20, 8 << 20
BATCHES = 4  # of a prompt: the first is checked while the next is read


def batches(count: int, block_bytes: int) -> Iterator[slice]:
    """Cut blocks into batches: few of them for many blocks, since each costs a turn or two."""
    whole = count * block_bytes
    size = whole // BATCHES if whole > BATCH_BYTES_MAX else BATCH_BYTES_MAX
    step = max(1, min(BATCH_BYTES_MAX, max(BATCH_BYTES_MIN, size)) // block_bytes)
    return (slice(at, at + step) for at in range(0, count, step))


class Landing:
    """Landing slots of one namespace; their memory is made when they are first wanted."""

    def __init__(self, slot_bytes: int, want: Callable[[Landing], None]) -> None:
        """want(landing): its memory is needed."""
        self.slot_bytes = slot_bytes
        self.memory: CpuExtent | None = None
        self.extent = 0  # its number
        self.base = 0  # where the exporter has it; 0: not yet
        self.metadata = b""
        self.used_ns = 0
        self.retry_ns: int | None = 0  # when to make it; None: it is being made, or there
        self._want = want
        self._free: list[int] = []

    @property
    def count(self) -> int:
        """Count the slots there are."""
        return 0 if self.memory is None else self.memory.count

    @property
    def used(self) -> int:
        """Count the slots in which something arrives, or may still arrive."""
        return self.count - len(self._free)

    def open(self) -> None:
        """Have memory made where there is none; slots can be taken some time later."""
        self._want(self)

    def take(self, count: int) -> list[int]:
        """Take up to count free ones; none while the exporter has not mapped them."""
        if not self.base:
            self._want(self)
            return []
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def give(self, slots: Collection[int]) -> None:
        """Give some back."""
        self._free.extend(slots)

    def region(self) -> tuple[m.Region, bytes]:
        """Say where the exporter has them, and its metadata since then."""
        return m.Region(self.extent, self.base, self.count), self.metadata

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes."""
        if self.memory is None:
            raise InvariantBroken("a landing slot without memory")
        return self.memory.slot(slot)

    def made(self, extent: int, memory: CpuExtent) -> None:
        """Its memory is there."""
        self.extent, self.memory, self._free = extent, memory, list(range(memory.count))

    def unmade(self) -> CpuExtent | None:
        """Its memory is used no more: return it."""
        memory, self.memory = self.memory, None
        self.base, self.retry_ns, self._free = 0, 0, []
        return memory


class _Transfer(msgspec.Struct, eq=False):
    """One that is under way; digest: of the namespace that it reads for, None for a write."""

    digest: str | None
    tags: list[Tag] | list[Part]
    wanted: int  # blocks that somebody waits for


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


class _Make(msgspec.Struct):
    landing: Landing
    size: int

    def run(self) -> _Made:
        try:
            return _Made(self.landing, CpuExtent(self.size, self.landing.slot_bytes))
        except TierFull as exc:
            return _Made(self.landing, exc)

    def failed(self) -> _Made:
        return _Made(self.landing, TierFull("its memory could not be made"))


class _Made(msgspec.Struct):
    landing: Landing
    memory: CpuExtent | TierFull


class PeerMover:
    """Called from one thread, the store's."""

    def __init__(self, service: str, devices: str, landing_bytes: int) -> None:
        """service, devices: as in exporter Settings. landing_bytes: of each namespace's slots.

        Until wake() there is no process.
        """
        settings = Settings(service, devices, quarantine_bytes_max=landing_bytes)
        self._exporter = Exporter(settings, asleep=True)
        self.devices = devices
        self._landing_bytes = landing_bytes
        self._landings: dict[str, Landing] = {}
        self._leaving: dict[int, CpuExtent] = {}  # of landings, until they are unmapped
        self._next_landing = LANDING_FIRST
        self._now_ns = 0
        self.moved_bytes: Counter[str] = Counter()
        self._transfers: dict[int, _Transfer] = {}
        self._moving: dict[tuple[str | None, Tag | Part], list[int]] = {}  # blocks -> transfers
        self._unreached: set[int] = set()  # extents that the exporter could not map
        self._lost: list[Event] = []  # of those that were to be unmapped
        self._addresses: dict[int, int] = {}  # mapped, and peers were not told how to reach it
        self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # threads have results
        self._runner: Runner[_Sums | _Checks | _Make, Summed | Checked | _Made] = Runner(
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
        self._now_ns = now_ns
        events, self._lost = self._lost, []
        for event in self._exporter.poll(now_ns):
            events += self._on(event)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._told)
        for done in self._runner.poll():
            if isinstance(done, _Made):
                self._made(done)
            else:
                events.append(done)
        return events

    def _on(self, event: Said) -> Sequence[Event]:
        match event:
            case Ready(name, metadata):
                return [Up(name, metadata)]
            case Mapped(extent, address):
                self._addresses[extent] = address
            case Metadata(metadata):
                return self._reachable(metadata)
            case Unmapped(extent):
                return self._unmapped(extent)
            case NotMapped(extent, text):
                log.error("peers cannot reach extent %d: %s", extent, text)
                self._unreached.add(extent)
            case Ended(number, moved, _, error):
                return [self._ended(number, moved, error)]
            case Ended_(reason):
                self._addresses.clear()
                for landing in self._landings.values():
                    landing.base = 0
                return [Down(reason)]
            case _:
                pass  # refused peers fail their transfers; extents are mapped again
        return ()

    def _unmapped(self, extent: int) -> Sequence[Event]:
        landing = self._leaving.pop(extent, None)
        if landing is None:
            return [Unreachable(extent)]
        landing.close()
        return []

    def _reachable(self, metadata: bytes) -> list[Reachable]:
        addresses, self._addresses = self._addresses, {}
        for landing in self._landings.values():
            if landing.extent in addresses:
                landing.base, landing.metadata = addresses[landing.extent], metadata
        return [Reachable(extent, address, metadata) for extent, address in addresses.items()]

    def _ended(self, number: int, moved: int, error: ErrorClass | None) -> Event:
        found = self._transfers.pop(number)
        self.moved_bytes["pushed" if found.digest is None else "pulled"] += moved
        for tag in found.tags:
            moving = self._moving.get((found.digest, tag), [])
            if number in moving:  # else it was abandoned
                moving.remove(number)
            if not moving:
                self._moving.pop((found.digest, tag), None)
        if found.digest is None:
            return Written(found.tags, error is None, stopped=error == "stopped")  # type: ignore[arg-type]
        return Arrived(found.digest, found.tags, error is None)  # type: ignore[arg-type]

    def _start(
        self, move: Move | Filling, digest: str | None, tags: list[Tag] | list[Part]
    ) -> None:
        number = self._exporter.start(move)
        self._transfers[number] = _Transfer(digest, tags, len(tags))
        for tag in tags:
            self._moving.setdefault((digest, tag), []).append(number)

    def abandon(self, digest: str | None, tag: Tag | Part) -> None:
        """Nobody waits for a block any more; a transfer without any others is abandoned."""
        for number in self._moving.pop((digest, tag), ()):
            self._transfers[number].wanted -= 1
            if not self._transfers[number].wanted:
                self._exporter.abandon(number)

    def wake(self) -> None:
        """Start the exporter, unless it runs."""
        self._exporter.wake()

    @property
    def abandoned_bytes(self) -> int:
        """Memory of transfers of ours that nobody waits for and that have not ended."""
        return self._exporter.quarantined_bytes

    def restart(self, why: str) -> None:
        """Start the exporter afresh."""
        self._exporter.restart(why)

    def export(self, extent: int, fd: int, size: int) -> None:
        """Let peers read an extent."""
        self._exporter.map(extent, fd, size, writable=False)

    def unexport(self, extent: int) -> None:
        """Have Unreachable come once no transfer uses an extent."""
        if extent in self._unreached:
            self._unreached.discard(extent)
            self._lost += self._unmapped(extent)
        else:
            self._exporter.unmap(extent)

    def landing(self, namespace: str, slot_bytes: int) -> Landing:
        """Return a namespace's landing slots."""
        if namespace not in self._landings:
            self._landings[namespace] = Landing(slot_bytes, self._want)
        return self._landings[namespace]

    def _want(self, landing: Landing) -> None:
        """Make a landing's memory, as soon as the cap has room for it."""
        landing.used_ns = self._now_ns
        if landing.retry_ns is None or self._now_ns < landing.retry_ns:
            return
        landing.retry_ns = self._now_ns + RETRY_NS
        there = [found for found in self._landings.values() if found.retry_ns is None]
        if len(there) + len(self._leaving) >= LANDINGS_MAX:
            idle = [found for found in there if found.memory is not None and not found.used]
            if idle and not self._leaving:
                self._give_up(min(idle, key=lambda found: found.used_ns))
            landing.retry_ns = self._now_ns
            return
        landing.retry_ns = None
        size = max(self._landing_bytes, 2 * (landing.slot_bytes + GENERATION_BYTES))
        self._runner.submit(_Make(landing, size))

    def _made(self, made: _Made) -> None:
        landing, memory = made.landing, made.memory
        if isinstance(memory, TierFull):
            log.error("no landing memory: %s", memory)
            landing.retry_ns = self._now_ns + RETRY_NS
            return
        number, self._next_landing = self._next_landing, self._next_landing + 1
        landing.made(number, memory)
        self._exporter.map(number, memory.fd, memory.count * memory.slot_bytes, writable=True)

    def _give_up(self, landing: Landing) -> None:
        """Let another namespace have the memory of a landing that is not used."""
        memory = landing.unmade()
        if memory is not None:
            self._leaving[landing.extent] = memory
            self.unexport(landing.extent)

    def over_tcp(self, host: str) -> bool:
        """Tell whether bytes from and to a host travel over TCP."""
        return over_tcp(host, self.devices)

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Learn how to reach a peer's exporter now."""
        self._exporter.add_peer(agent, metadata)

    def remove_peer(self, agent: str) -> None:
        """Forget a peer's exporter; what is open with it fails."""
        self._exporter.remove_peer(agent)

    def sum(
        self, tags: list[Tag], namespace: str, blocks: list[tuple[BlockKey, memoryview]]
    ) -> None:
        """Take checksums, some blocks at a time."""
        for part in batches(len(tags), len(blocks[0][1])):
            self._runner.submit(_Sums(tags[part], namespace, blocks[part]))

    def check(
        self, tags: list[Part], namespace: str, blocks: list[tuple[Check, memoryview, memoryview]]
    ) -> None:
        """Copy landed blocks into their slots and take their checksums there."""
        for part in batches(len(tags), len(blocks[0][1])):
            self._runner.submit(_Checks(tags[part], namespace, blocks[part]))

    def write(self, tags: list[Tag], agent: str, write: Write) -> None:
        """Write to a peer's landing slots."""
        size, region = write.slot_bytes, write.landing
        local, remote = u32(write.numbers), u32(write.landing_slots)
        move = Move(
            agent, True, write.extent, region.base, region.slots * size, size, local, remote
        )
        self._start(move, None, tags)

    def fill(self, tags: list[Tag], fill: Fill) -> None:
        """Write to an engine of a peer's."""
        rank, parts, blocks = fill.rank, array("Q", fill.offsets).tobytes(), u32(fill.blocks)
        pages = rank.pages[fill.group]
        filling = Filling(rank.agent, fill.extent, pages, parts, blocks, rank.gpu)
        self._start(filling, None, tags)

    def read(self, tags: list[Part], agent: str, digest: str, read: Read) -> None:
        """Read a peer's slots into landing slots, some at a time."""
        landing, region = self._landings[digest], read.region
        size = landing.slot_bytes
        for part in batches(len(tags), size):
            local, remote = u32(read.landing[part]), u32(read.numbers[part])
            move = Move(
                agent, False, landing.extent, region.base, region.slots * size, size, local, remote
            )
            self._start(move, digest, tags[part])

    def close(self) -> None:
        """End the process and the threads, and free the landing slots."""
        self._exporter.close()
        self._runner.close()
        os.close(self._told)
        memories: list[object] = [landing.unmade() for landing in self._landings.values()]
        memories += [done.memory for done in self._runner.poll() if isinstance(done, _Made)]
        for memory in (*memories, *self._leaving.values()):
            if isinstance(memory, CpuExtent):
                memory.close()
        self._landings.clear()
        self._leaving.clear()
