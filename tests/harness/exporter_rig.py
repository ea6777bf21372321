"""Exporters of several stores in one test: real processes, and memory whose bytes are known."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvstore.wire.framing import u32
from tests.bench.steal import Watch
from tests.harness.patience import WAIT_S
from tiers.cpu import CpuExtent
from tiers.nixl.messages import Ended, Mapped, Ready, Transfer
from tiers.nixl.supervisor import Down, Event, Exporter

EXPORT, LANDING = 1, 2
KIB = 1 << 10
MIB = 1 << 20
E = TypeVar("E")


def filled(size: int, slot_bytes: int, seed: int | None) -> CpuExtent:
    """An extent of random bytes; without a seed, of zeros."""
    extent = CpuExtent(size, slot_bytes)
    if seed is not None:
        rng = random.Random(seed)
        for position in range(extent.count):
            extent.slot(position)[:] = rng.randbytes(slot_bytes)
    return extent


class Side:
    """One store's exporter, with an extent to export and one to land in."""

    def __init__(
        self,
        service: str,
        transports: str | None = None,
        *,
        extent_bytes: int = 16 * MIB,
        seed: int = 0,
    ) -> None:
        self.exporter = Exporter(service, "lo", transports)
        self.slot_bytes = 64 * KIB
        self.memory = {
            EXPORT: filled(extent_bytes, self.slot_bytes, seed),
            LANDING: filled(extent_bytes, self.slot_bytes, None),
        }
        self.count = self.memory[EXPORT].count
        self.size = self.memory[EXPORT].generations_offset
        self.name = ""  # the last one
        self.addresses: dict[int, int] = {}
        self.metadata = b""
        self.ended: dict[int, Ended] = {}
        self.events: list[Event] = []
        self.world: Sequence[Side] = [self]  # all are served while one waits
        self.stopped = False  # by the test: not served, since its store would end its process
        for number, extent in self.memory.items():
            self.exporter.map(number, extent.fd, self.size, writable=number == LANDING)

    @property
    def ready(self) -> bool:
        """All is mapped, and it is known how to reach it."""
        return len(self.addresses) == len(self.memory) and bool(self.metadata)

    def poll(self) -> None:
        self.take(self.exporter.poll(time.monotonic_ns()))

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case Ended(number):
                    assert number not in self.ended, "a transfer ends once"
                    self.ended[number] = event
                case Mapped(extent, int(address)):
                    self.addresses[extent] = address
                    self.metadata = b""  # until it is said how to reach it
                case Ready(name, metadata):
                    if name != self.name:
                        self.addresses.clear()
                    self.name, self.metadata = name, metadata
                case Down():
                    self.metadata = b""

    def of(self, kind: type[E]) -> list[E]:
        """Its events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def unmapped(self) -> list[Mapped]:
        """What it said of extents that are not mapped."""
        return [event for event in self.of(Mapped) if event.address is None]

    def meet(self, peer: Side) -> None:
        self.exporter.add_peer(peer.name, peer.metadata)

    def start(
        self,
        peer: Side,
        pairs: Sequence[tuple[int, int]],
        *,
        write: bool = False,
        block_bytes: int | None = None,
        name: str | None = None,
    ) -> int:
        """Move blocks: pairs of a position here and one there. name: instead of the peer's."""
        ours, theirs = (EXPORT, LANDING) if write else (LANDING, EXPORT)
        move = Transfer(
            0,
            name or peer.name,
            write,
            ours,
            peer.addresses[theirs],
            peer.size,
            block_bytes or self.slot_bytes,
            u32([here for here, _ in pairs]),
            u32([there for _, there in pairs]),
        )
        return self.exporter.start(move)

    def block(self, extent: int, position: int, block_bytes: int) -> memoryview:
        start = position * block_bytes
        return memoryview(self.memory[extent]._map)[start : start + block_bytes]

    def clear(self) -> None:
        """Zeros where blocks land."""
        for position in range(self.count):
            self.memory[LANDING].slot(position)[:] = bytes(self.slot_bytes)

    def close(self) -> None:
        self.take(self.exporter.close())
        assert not self.exporter._open
        for extent in self.memory.values():
            extent.close()


def shuffled(rng: random.Random, count: int, of: int) -> list[tuple[int, int]]:
    """Pairs of different positions."""
    return list(zip(rng.sample(range(of), count), rng.sample(range(of), count), strict=True))


def wait(side: Side, until: Callable[[], object], limit_s: float = WAIT_S) -> None:
    """Serve exporters, by what their descriptors and waits say, until something holds."""
    watch = Watch()
    while not until():
        assert watch.own_s() < limit_s, "nothing came of it"
        now_ns = time.monotonic_ns()
        served = [one for one in side.world if not one.stopped]
        nap_s = min([0.5, *(one.exporter.wait_s(now_ns) for one in served)])
        select.select([one.exporter.fileno() for one in served], [], [], nap_s)
        for one in served:
            one.poll()


def end(side: Side, *numbers: int, limit_s: float = WAIT_S) -> Ended:
    """Serve until transfers have ended; returns the last one's end."""
    wait(side, lambda: all(number in side.ended for number in numbers), limit_s)
    return side.ended[numbers[-1]]


def start_all(*sides: Side) -> None:
    """Start exporters, and tell each of all others."""
    for side in sides:
        side.world = sides
    wait(sides[0], lambda: all(side.ready for side in sides))
    for side in sides:
        for other in sides:
            if other is not side:
                side.meet(other)
