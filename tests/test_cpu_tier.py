"""Shared memory: sealed, populated, capped, and passed on between namespaces."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import TierFull
from kvstore.store.session import Phase
from kvstore.wire import engine as p
from tests.harness.fakes import SLOT_BYTES, Engine, HeapPool, Town, blocks, hashes, phase, settings
from tiers.cpu import CpuExtent, CpuMemory

EXTENT = 64 * 1024


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def extent() -> Iterator[CpuExtent]:
    made = CpuExtent(EXTENT, SLOT_BYTES)
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[CpuMemory]:
    made = CpuMemory(3 * EXTENT + 1000, EXTENT)
    yield made
    made.close()


def wait_for(pool: CpuMemory, count: int = 1) -> list[tuple[str, CpuExtent | Exception]]:
    found: list[tuple[str, CpuExtent | Exception]] = []
    end = time.monotonic() + 600
    while len(found) < count and time.monotonic() < end:
        found.extend(pool.poll())
        time.sleep(0.001)
    return found


# One extent


def test_nobody_waits_for_pages_when_slots_are_written() -> None:
    size = 16 << 20
    made = CpuExtent(size + 2 * mmap.PAGESIZE, size)
    slot = np.frombuffer(made.slot(0), np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    slot[:: mmap.PAGESIZE] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    del slot
    made.close()
    assert faults < size // mmap.PAGESIZE // 8


def test_no_holder_of_the_descriptor_can_shrink_or_grow_it(extent: CpuExtent) -> None:
    copy = os.dup(extent.fd)
    try:
        for size in (0, extent.bytes - 1, extent.bytes + mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(copy, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        extent.slot(extent.count - 1)[:] = b"x" * SLOT_BYTES
    finally:
        os.close(copy)


def test_every_page_is_there_before_anybody_maps_it(extent: CpuExtent) -> None:
    found = os.fstat(extent.fd)
    assert found.st_size == extent.bytes
    assert found.st_blocks * 512 >= extent.bytes


def test_slots_and_generations_lie_side_by_side_and_fit(extent: CpuExtent) -> None:
    assert extent.count == EXTENT // (SLOT_BYTES + 4)
    assert extent.bytes <= EXTENT
    assert extent.generations_offset + 4 * extent.count <= extent.bytes
    for position in range(extent.count):
        extent.slot(position)[:] = bytes([position + 1]) * SLOT_BYTES
        extent.generations[position] = 1000 + position
    with mmap.mmap(extent.fd, extent.bytes) as seen, memoryview(seen) as view:
        for position in range(extent.count):
            start = position * SLOT_BYTES
            assert view[start : start + SLOT_BYTES] == bytes([position + 1]) * SLOT_BYTES
        with view[extent.generations_offset :] as tail, tail.cast("I") as generations:
            assert list(generations[: extent.count]) == [1000 + i for i in range(extent.count)]


def test_the_bytes_outlive_the_store_where_they_are_mapped() -> None:
    made = CpuExtent(EXTENT, SLOT_BYTES)
    made.slot(0)[:4] = b"kept"
    with mmap.mmap(made.fd, made.bytes) as seen:
        made.close()
        assert seen[:4] == b"kept"


def test_Q22_memory_is_given_back_while_somebody_keeps_a_view(pool: CpuMemory) -> None:
    """A tier of others may, after its job: it counts no more, and is unmapped with the view."""
    assert pool.request("a", SLOT_BYTES)
    ((_, made),) = wait_for(pool)
    assert isinstance(made, CpuExtent)
    before, view, mapped = descriptors(), made.slot(0), weakref.ref(made._map)
    view[:4] = b"kept"
    pool.release(made)
    assert (pool.used_bytes, bytes(view[:4])) == (0, b"kept")
    del made, view
    assert (mapped(), descriptors()) == (None, before - 2)


def test_a_slot_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(TierFull, match=r"takes 65536 bytes, an extent has 65536"):
        CpuExtent(EXTENT, EXTENT)


def test_without_memory_an_extent_is_refused_and_nothing_leaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(_fd: int, _start: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    with pytest.raises(TierFull, match="No space left"):
        CpuExtent(EXTENT, SLOT_BYTES)
    assert descriptors() == before


# The pool


def test_the_cap_is_never_exceeded(pool: CpuMemory) -> None:
    assert [pool.request("a", SLOT_BYTES) for _ in range(5)] == [True, True, True, False, False]
    made = wait_for(pool, 3)
    held = [extent for _, extent in made if isinstance(extent, CpuExtent)]
    physical = sum(os.fstat(extent.fd).st_blocks * 512 for extent in held)
    assert len(held) == 3
    assert physical <= pool.used_bytes == 3 * EXTENT <= pool.capacity_bytes
    pool.release(held[0])
    assert pool.request("b", SLOT_BYTES)
    assert not pool.request("b", SLOT_BYTES)
    ((tag, fourth),) = wait_for(pool)
    assert tag == "b"
    for extent in (held[1], held[2], fourth):
        assert isinstance(extent, CpuExtent)
        pool.release(extent)
    assert pool.used_bytes == 0


def test_an_extent_that_could_not_be_made_does_not_count(pool: CpuMemory) -> None:
    assert pool.request("a", EXTENT)
    ((tag, error),) = wait_for(pool)
    assert (tag, type(error), pool.used_bytes) == ("a", TierFull, 0)


def test_closing_gives_back_what_nobody_fetched() -> None:
    before = descriptors()
    made = CpuMemory(2 * EXTENT, EXTENT)
    made.request("a", SLOT_BYTES)
    made.request("a", SLOT_BYTES)
    made.close()
    assert (made.used_bytes, descriptors()) == (0, before)


# Several namespaces


def fill(engine: Engine, requests: int = 16, name: str = "") -> list[list[bytes]]:
    """Store more than there is room for, and return the hashes of each request."""
    chains = [hashes(4, f"{engine.name}{name}{number}") for number in range(requests)]
    for chain in chains:
        engine.put(chain)
    return chains


def heap(extents: int = 4) -> tuple[Town, HeapPool]:
    memory = HeapPool(extents=extents)
    return Town(pool=memory), memory


def extents_of(town: Town) -> list[int]:
    return [len(namespace.extents) for namespace in town.store.namespaces.values()]


def test_a_namespace_grows_to_the_cap_and_not_beyond() -> None:
    town, memory = heap()
    fill(town.attach("a"))
    assert extents_of(town) == [4]
    assert memory.used_bytes_max == memory.capacity_bytes


def test_an_idle_namespace_gives_memory_to_one_in_use() -> None:
    town, memory = heap(extents=2)
    first = town.attach("first", identity="first")
    chains = fill(first)
    first.leave()
    second = town.attach("second", identity="second")
    town.settle(second, turns=20)
    assert second.active is not None
    assert extents_of(town) == [1, 1]
    assert memory.used_bytes_max <= memory.capacity_bytes
    again = town.attach("first", identity="first")
    assert any(blocks(again.hit(chain)) for chain in chains)  # the other extent's are still there


def test_a_richer_namespace_gives_memory_to_a_poorer_one() -> None:
    town, memory = heap()
    first = town.attach("first", identity="first")
    fill(first)
    second = town.attach("second", identity="second")
    for number in range(4):
        fill(first, 4, f"again{number}")
        fill(second, 4, f"again{number}")
        town.settle(first, second)
    assert second.active is not None
    assert extents_of(town) == [2, 2]
    assert memory.used_bytes_max <= memory.capacity_bytes
    assert not first.detached


def join_poor(town: Town) -> Engine:
    """An engine of a model that has no memory yet."""
    poor = Engine(town, "poor", identity="poor")
    poor.join()
    return poor


def poor_and_rich(*, slow: bool = False) -> tuple[Town, HeapPool, Engine, Engine]:
    """A rich engine that keeps memory which is taken back, and a poor one that needs it.

    slow: another one of the rich one's model has not mapped anything yet.
    """
    town, memory = heap(extents=3)
    rich = town.attach("rich", identity="rich")
    fill(rich)
    rich.maps = False
    if slow:
        Engine(town, "slow", identity="rich", maps=False).join()
    poor = join_poor(town)
    town.settle(poor, turns=10)
    return town, memory, rich, poor


@pytest.mark.parametrize("gone", [False, True])
def test_O23_memory_moves_only_when_every_worker_has_unmapped_it_or_is_gone(*, gone: bool) -> None:
    town, memory, rich, poor = poor_and_rich()
    (withdrawn,) = town.take(rich.workers[0], p.Extent)
    assert not memory.released
    assert poor.active is None
    if gone:
        town.close(rich.workers[0])
    else:
        town.say(rich.workers[0], p.Mapped(withdrawn.extent, gone=True))
    town.settle(poor, turns=10)
    assert len(memory.released) == 1
    assert poor.active is not None
    assert memory.used_bytes_max <= memory.capacity_bytes


def test_a_worker_that_does_not_unmap_in_time_ends_its_session() -> None:
    town, memory, rich, poor = poor_and_rich()
    town.tick(ms=61_000)
    town.settle(poor)
    rich.pump()
    assert rich.detached
    assert not memory.released


def test_O23_a_frozen_engine_does_not_keep_its_models_memory_from_growing() -> None:
    """Others waited two seconds for each answer, for as long as it was frozen."""
    town, _ = heap(extents=4)
    good, frozen = town.attach("good"), town.attach("frozen")
    frozen.maps = False
    before = extents_of(town)[0]
    while extents_of(town) == [before]:
        good.put(hashes(1, f"{len(good.added)}"))
    (mapping,) = [*next(iter(town.store.namespaces.values())).extents.values()][before:]
    assert (mapping.state, {*mapping.waiting}) == ("mapping", {*frozen.workers})
    town.tick(ms=30_000)
    late = Engine(town, "late", maps=False)
    late.join()
    town.tick(ms=31_000)
    assert phase(town, frozen) is Phase.ENDING, "however many come after it"
    assert phase(town, late) is Phase.JOINING, "it has a minute of its own"
    late.leave()
    fill(good)
    assert frozen.workers[0] in mapping.told, "it may map this one yet"
    assert extents_of(town) == [4]
    assert len(good.extents) == 4
    assert len(town.take(frozen.workers[0], p.Extent)) == 1, "none, after it had ended"
    assert {m.state for n in town.store.namespaces.values() for m in n.extents.values()} == {"live"}


def test_O23_memory_that_a_frozen_engine_may_have_mapped_moves_when_it_is_gone() -> None:
    """Also where its session had ended before anybody needed that."""
    town, memory = heap(extents=2)
    good, frozen = town.attach("good"), town.attach("frozen")
    fill(good)
    town.say(frozen.scheduler, p.Arrived(1, b"", 0, ok=True))  # no worker's: it ends
    assert phase(town, frozen) is Phase.ENDING
    frozen.maps = False
    poor = join_poor(town)
    for number in range(4):
        good.put(hashes(2, f"more{number}"))  # uses up credits in the extent that goes
        town.settle(poor, good, turns=5)
    assert not memory.released
    town.say(frozen.workers[0], p.Mapped(2, gone=True))
    town.settle(poor, good, turns=5)
    assert not memory.released, "nobody knows what who has ended means"
    town.close(frozen.workers[0])
    town.settle(poor, good, turns=10)
    assert len(memory.released) == 1
    assert poor.active is not None


def test_O23_who_maps_memory_as_it_is_to_be_unmapped_still_has_to_unmap_it() -> None:
    town, memory, rich, poor = poor_and_rich(slow=True)
    (withdrawn,) = town.take(rich.workers[0], p.Extent)
    slow = town.store.sessions["slow"].workers[0]
    town.say(rich.workers[0], p.Mapped(withdrawn.extent, gone=True))
    town.say(slow, p.Mapped(withdrawn.extent))
    town.settle(rich, poor, turns=10)
    assert not memory.released
    town.say(slow, p.Mapped(withdrawn.extent, gone=True))
    town.settle(rich, poor, turns=10)
    assert len(memory.released) == 1


def test_O23_a_frozen_engine_does_not_keep_memory_of_others_from_moving() -> None:
    town, memory = heap(extents=6)
    frozen = town.attach("frozen", identity="frozen")
    rich = town.attach("rich", identity="rich")
    for number in range(6):
        fill(frozen, 2, f"{number}")
        fill(rich, 2, f"{number}")
    assert extents_of(town) == [3, 3]
    frozen.maps = False
    poor = join_poor(town)
    town.settle(poor, rich, turns=10)
    assert (poor.active, extents_of(town)) == (None, [3, 3, 0])
    town.tick(ms=3_100)
    town.settle(poor, rich, turns=10)
    assert poor.active is not None
    assert extents_of(town) == [3, 2, 1], "one that it keeps is enough"
    assert memory.used_bytes_max <= memory.capacity_bytes


def test_O20_memory_under_a_lease_stays_until_the_lease_ends() -> None:
    town, memory = heap(extents=2)
    rich = town.attach("rich", identity="rich")
    chain = hashes(16, "rich")
    rich.put(chain)
    granted = rich.hit(chain)
    assert len(blocks(granted)) > 8
    poor = join_poor(town)
    town.settle(poor, rich, turns=10)
    assert not memory.released
    rich.step(release=(granted.lease,))
    for number in range(4):
        rich.put(hashes(4, f"more{number}"))  # uses up credits in the extent that goes
    town.settle(poor, rich, turns=20)
    assert len(memory.released) == 1
    assert poor.active is not None


def test_O20_where_leases_keep_memory_for_long_no_more_of_the_same_model_is_taken() -> None:
    """It would go extent by extent, and nobody would have it."""
    town, _ = heap(extents=4)
    rich = town.attach("rich", identity="rich")
    chain = hashes(24, "rich")
    rich.put(chain)
    assert len(blocks(rich.hit(chain))) == 24
    (namespace,) = town.store.namespaces.values()
    poor = join_poor(town)

    def retiring() -> int:
        town.settle(poor, rich)
        return [mapping.state for mapping in namespace.extents.values()].count("retiring")

    assert retiring() == 1
    town.tick(ms=3_100)
    assert retiring() == 1


def test_S5_that_memory_is_short_is_said_once_until_there_was_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    town, memory = heap()
    memory.fail = TierFull("a test leaves 1 B")
    engine = town.attach()
    for _ in range(10):
        town.tick(ms=5_100)
        town.settle(engine)
    assert caplog.text.count("a test leaves 1 B; the store keeps its 0 B") == 1
    memory.fail = None
    town.tick(ms=5_100)
    town.settle(engine)
    assert engine.active is not None, "it grows again"
    assert caplog.text.count("there is memory for another extent again") == 1


@pytest.mark.parametrize("enough", [True, False])
def test_S5_where_memory_is_short_a_model_without_any_gets_some_of_another(
    monkeypatch: pytest.MonkeyPatch, *, enough: bool
) -> None:
    """As where the cap is reached; one extent, as nobody knows whether that will do."""
    town, memory = heap(extents=8)
    rich = town.attach("rich", identity="rich")
    rich.put(hashes(24, "rich"))
    town.settle(rich)
    assert extents_of(town)[0] > 2
    memory.fail = TierFull("no memory")
    release = memory.release

    def released(extent: CpuExtent) -> None:
        release(extent)
        memory.fail = None if enough else memory.fail

    monkeypatch.setattr(memory, "release", released)
    poor = join_poor(town)
    for _ in range(10):  # long before it would look again
        town.tick(ms=100)
        town.settle(poor, rich)
    assert len(memory.released) == 1
    assert (poor.active is not None) is enough


def test_real_memory_is_shared_the_same_way() -> None:
    memory = CpuMemory(2 * EXTENT, EXTENT)
    town = Town(settings(), memory)

    def until(done: Callable[[], object], *engines: Engine) -> None:
        end = time.monotonic() + 600
        while not done() and time.monotonic() < end:
            town.settle(*engines, turns=1)
            assert memory.used_bytes <= memory.capacity_bytes
            time.sleep(0.001)
        assert done()

    first = town.attach("first", identity="first")
    until(lambda: first.active, first)
    for number in range(20):
        until(lambda: first.credits, first)
        first.put(hashes(1, f"first{number}"))
    until(lambda: extents_of(town) == [2], first)
    first.leave()
    second = town.attach("second", identity="second")
    until(lambda: second.active, second)
    assert extents_of(town) == [1, 1]
    town.store.namespaces.close()
    for namespace in town.store.namespaces.values():
        for mapping in namespace.extents.values():
            memory.release(mapping.memory)
    memory.close()
