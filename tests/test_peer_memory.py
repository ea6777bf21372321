"""The mover of hand-overs, with an exporter that does what a test says: landings and transfers."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from kvstore.core.errors import TierFull
from kvstore.handover import transfers
from kvstore.handover.exported import ExportedMemory
from kvstore.handover.runs import Part
from kvstore.handover.transfers import Landing, Transfers, slot_move
from kvstore.units import MIB
from kvstore.wire import peer as m
from kvstore.wire.engine import Extent
from tests.harness.patience import WAIT_S
from tiers.cpu import CpuExtent
from tiers.nixl import supervisor
from tiers.nixl.messages import Mapped, Ready
from tiers.nixl.supervisor import Event

SLOT = MIB // 4


class Exporter:
    """Maps at once, moves nothing."""

    quarantined_bytes = 0

    def __init__(self, *_: object) -> None:
        self.events: list[Event] = []
        self.mapped: dict[int, bool] = {}
        self.failed: list[int] = []
        self.abandoned: list[int] = []
        self.started = 0
        self.fails = False

    def map(self, extent: int, _fd: int, _size: int, *, writable: bool) -> None:
        if self.fails:
            self.failed.append(extent)
            self.events.append(Mapped(extent, text="no"))
            return
        self.mapped[extent] = writable
        self.events += [Mapped(extent, 4096 * extent), Ready("agent", b"m")]

    def map_again(self) -> None:
        self.fails = False
        for extent in self.failed:
            self.map(extent, -1, 0, writable=True)

    def unmap(self, extent: int) -> None:
        del self.mapped[extent]
        self.events.append(Mapped(extent))

    def wake(self) -> None:
        """It is awake."""

    def start(self, _move: object) -> int:
        self.started += 1
        return self.started

    def abandon(self, number: int) -> None:
        self.abandoned.append(number)

    def poll(self, _now_ns: int) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self) -> list[Event]:
        return []


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    made = Exporter()
    monkeypatch.setattr(supervisor, "Exporter", lambda *_, **__: made)
    return made


@pytest.fixture
def mover(exporter: Exporter) -> Iterator[Transfers]:
    assert exporter is not None
    made = Transfers("test", "lo", MIB)
    yield made
    made.close()


def until(mover: Transfers, done: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end_s
        mover.poll(time.monotonic_ns())
        time.sleep(0.001)


def ready(mover: Transfers, name: str) -> Landing:
    landing = mover.landing(name, SLOT)
    until(mover, lambda: landing.open() or landing.base)  # type: ignore[func-returns-value]
    return landing


def test_landing_memory_is_made_when_it_is_wanted(mover: Transfers, exporter: Exporter) -> None:
    landing = mover.landing("a", SLOT)
    mover.poll(1)
    assert (landing.count, landing.used, exporter.mapped) == (0, 0, {})
    assert not landing.take(1)
    until(mover, lambda: landing.base)
    assert len(landing.take(99)) == landing.count == landing.used == 3
    assert list(exporter.mapped.values()) == [True]


def test_landing_memory_of_all_models_is_limited_and_the_one_unused_longest_makes_room(
    mover: Transfers, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "LANDINGS_MAX", 2)
    first, second = ready(mover, "first"), ready(mover, "second")
    slots = first.take(1)
    third = ready(mover, "third")
    assert (first.count, second.count, len(exporter.mapped)) == (3, 0, 2), "what is used stays"
    third.take(1)
    second.open()
    for _ in range(20):
        mover.poll(time.monotonic_ns())
        second.take(1)
    assert second.count == 0, "all are in use"
    first.give_back(slots)
    until(mover, lambda: second.take(1))
    assert (first.count, len(exporter.mapped)) == (0, 2)


def test_B15_landing_memory_that_could_not_be_mapped_is_used_once_it_is(
    mover: Transfers, exporter: Exporter
) -> None:
    """Nothing is fetched for its model until then."""
    exporter.fails = True
    landing = mover.landing("a", SLOT)
    until(mover, lambda: landing.open() or landing.failed)  # type: ignore[func-returns-value]
    assert not landing.take(1)
    exporter.map_again()
    until(mover, lambda: landing.take(1))
    assert not landing.failed
    assert list(exporter.mapped) == [landing.extent]


def test_B15_landing_memory_that_was_not_to_be_had_is_allocated_some_time_later(
    mover: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> CpuExtent:
        raise TierFull("a test")

    monkeypatch.setattr(transfers, "RETRY_NS", 10_000_000)
    landing = mover.landing("a", SLOT)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "CpuExtent", full)
        until(mover, lambda: landing.open() or landing.failed)  # type: ignore[func-returns-value]
    until(mover, lambda: landing.take(1))
    assert not landing.failed


def extent(number: int) -> Extent:
    return Extent(number, 0, 4, SLOT, MIB, MIB)


def test_L1_memory_that_is_leaving_is_not_named_to_peers(exporter: Exporter) -> None:
    """It may have been mapped just before."""
    memory = ExportedMemory(cast("supervisor.Exporter", exporter))
    memory.change(extent(7), 5)
    memory.change(Extent(7), None)
    for event in exporter.poll(1):
        if isinstance(event, Mapped):
            memory.mapped(event)
        elif isinstance(event, Ready):
            memory.ready(event)
    up = memory.introduce()
    assert up is not None
    assert up.regions == {}


def test_B20_a_transfer_is_abandoned_when_none_of_its_blocks_is_wanted(
    mover: Transfers, exporter: Exporter
) -> None:
    ready(mover, "a")
    region = m.Region(1, 4096, 8)
    for number in (1, 2):
        both = array("I", [0, 1])
        read = slot_move("peer", (2, both), (region, both), SLOT, write=False)
        mover.start(Part(1, number, range(2)), read, "a")
    for part in (Part(1, 1, [0]), Part(1, 1, [0]), Part(1, 2, [0]), Part(2, 1, [1])):
        mover.abandon(part)
    assert exporter.abandoned == []
    mover.abandon(Part(1, 1, [1]))
    assert exporter.abandoned == [1]
