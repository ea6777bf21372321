"""Copies on a real GPU: every layout bit for bit, racing compute, a million blocks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from connectors.copies.gpu.cuda import Cuda, Launch
from connectors.copies.gpu.device import CudaDevice, Queued
from connectors.copies.gpu.measure import RUN_SIZES, Choice, chosen, rates
from connectors.copies.gpu.plan import plans
from connectors.copies.host import Copying, HostCopier, LayerCache, SlotMap
from kvstore.core.errors import TierError
from kvstore.core.layout import Move
from tests.harness.gpu_layouts import (
    CHOICES,
    PAGE,
    POISON,
    Engine,
    Group,
    cases,
    engine_of,
    extent_of,
    fill_random,
    make_engine,
    make_group,
    random_engine,
    some_moves,
)
from tests.harness.gpu_twin import items
from tests.harness.moves import rows

pytestmark = pytest.mark.gpu

BLOCKS, SLOTS = 64, 48
LIMIT_S = 60.0


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < limit, "a copy has not ended"
        time.sleep(0.0001)


class Rig:
    """An engine on the GPU, one of the same shape on the host, and pinned slots."""

    def __init__(self, on_host: Engine, on_gpu: Engine, choice: Choice, slots: int = SLOTS) -> None:
        self.host, self.gpu = on_host, on_gpu
        self.device = CudaDevice(on_gpu.caches, choice=choice)
        self.copier = self.device.copier(on_gpu.layout)
        self.slots, self.expected = SlotMap(), SlotMap()
        self.size = on_gpu.layout.slot_bytes
        self.extent, self.truth = (extent_of(slots, self.size) for _ in range(2))
        self.slots.add(0, self.extent)
        self.expected.add(0, self.truth)
        self.device.pin(self.extent, lambda: False)

    def fill(self, seed: int) -> None:
        fill_random(self.host, seed)
        for here, there in zip(self.host.storages, self.gpu.storages, strict=True):
            there.copy_(here)

    def copy(self, moves: list[Move], *, store: bool) -> Queued:
        return self.copier.copy(rows(moves), self.slots, store=store, after=self.device.mark())

    def same_slots(self) -> bool:
        return torch.equal(self.extent.data, self.truth.data)

    def same_engine(self) -> bool:
        pairs = zip(self.host.storages, self.gpu.storages, strict=True)
        return all(torch.equal(here, there.cpu()) for here, there in pairs)

    def close(self) -> None:
        self.device.unpin(self.extent)
        self.device.close()


Make = Callable[[Engine, Engine, Choice], Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Rig] = []

    def one(host: Engine, gpu: Engine, choice: Choice) -> Rig:
        made.append(Rig(host, gpu, choice))
        return made[-1]

    yield one
    for rig in made:
        rig.close()


def there_and_back(rig: Rig, rng: random.Random) -> None:
    """The copier for host memory says what is right: slots filled, then blocks, gaps untouched."""
    rig.fill(rng.randrange(1000))
    moves = some_moves(rig.gpu, rng, BLOCKS, SLOTS, least=1)
    host = HostCopier(rig.host.caches, rig.host.layout)
    done: Copying = host.copy(rows(moves), rig.expected, store=True)
    queued = rig.copy(moves, store=True)
    until(queued.over)
    assert queued.bytes == done.bytes
    assert rig.same_slots()
    for storage in (*rig.host.storages, *rig.gpu.storages):
        storage.fill_(POISON)
    host.copy(rows(moves), rig.expected, store=False)
    until(rig.copy(moves, store=False).over)
    assert rig.same_engine()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", cases())
def test_each_layout_goes_to_slots_and_back(name: str, choice: str, make: Make) -> None:
    rng = random.Random(name + choice)
    per = rng.choice([1, 2])
    rig = make(engine_of(name, BLOCKS, per), engine_of(name, BLOCKS, per, "cuda"), CHOICES[choice])
    there_and_back(rig, rng)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("seed", range(20))
def test_any_layout_goes_to_slots_and_back(seed: int, choice: str, make: Make) -> None:
    host = random_engine(random.Random(seed), BLOCKS)
    gpu = random_engine(random.Random(seed), BLOCKS, "cuda")
    there_and_back(make(host, gpu, CHOICES[choice]), random.Random(seed + 1))


@pytest.mark.parametrize("seed", range(10))
def test_the_kernel_moves_what_its_twin_says(seed: int) -> None:
    rng = random.Random(seed)
    engine = random_engine(rng, BLOCKS, "cuda")
    fill_random(engine, seed)
    cuda = Cuda(0)
    stream, event = cuda.new_stream(), cuda.new_event()
    slots = cuda.pinned(SLOTS * engine.layout.slot_bytes)
    for plan in plans(engine.layout, engine.caches, store=True):
        places = cuda.pinned(16 * SLOTS).view(np.uint64).reshape(SLOTS, 2)
        places[:, 0] = slots.ctypes.data + np.arange(SLOTS) * engine.layout.slot_bytes
        places[:, 1] = rng.sample(range(BLOCKS), SLOTS)
        slots[:] = POISON
        table = cuda.table(plan.tiles, stream)
        blocks = rng.choice([1, 3, 64])
        launch = Launch(table, len(plan.tiles), places.ctypes.data, SLOTS, True, blocks)
        cuda.launch(launch, stream)
        cuda.record(event, stream)
        until(lambda: cuda.reached(event))
        expected = np.full_like(slots, POISON)
        storage = {s.data_ptr(): s.cpu().numpy() for s in engine.storages}
        for e, s, n in zip(*(c.tolist() for c in items(plan.tiles, places)), strict=True):
            base = max(address for address in storage if address <= e)
            at = s - slots.ctypes.data
            expected[at : at + n] = storage[base][e - base : e - base + n]
        assert (slots == expected).all()
    cuda.close()


def busy(seconds: float) -> None:
    """Keep the compute stream busy, so that what does not wait for it comes too early."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("choice", CHOICES)
def test_copies_race_compute_in_the_order_of_the_streams(choice: str, make: Make) -> None:
    """Each block is computed, stored, fenced, overwritten, loaded and read, a hundred times."""
    name = "bf16, LBHNC"
    rig = make(engine_of(name, BLOCKS), engine_of(name, BLOCKS, device="cuda"), CHOICES[choice])
    storage, rng = rig.gpu.storages[0], random.Random(1)
    stores: list[tuple[int, int, Queued]] = []
    for step in range(100):
        value, slot = step % 251, step % SLOTS
        busy(rng.choice([0, 0.0005, 0.002]))
        storage.fill_(value)
        job = rig.copy([Move(0, step % BLOCKS, slot, 0)], store=True)
        rig.device.fence([job])
        storage.fill_(252)  # the next owner
        stores.append((slot, value, job))
    for slot, value, job in stores[-SLOTS:]:
        until(job.over)
        used = rig.gpu.layout.groups[0].stride
        found = rig.extent.data[slot * rig.size : slot * rig.size + used]
        assert bool((found == value).all()), "the next owner's bytes, or those of the one before"
    seen = torch.empty(0, device="cuda")
    for step in range(50):
        slot = step % SLOTS
        busy(0.001)
        before = storage.clone()  # reads the old content behind `busy`
        job = rig.copy([Move(0, 5, slot, 0)], store=False)
        rig.device.fence([job])
        seen = storage.clone()
        torch.cuda.current_stream().synchronize()
        assert job.over()
        page = torch.from_numpy(_host_view(rig, before).page(0, 5))
        assert step == 0 or bool((page == stores_value(stores, (step - 1) % SLOTS)).all())
        page = torch.from_numpy(_host_view(rig, seen).page(0, 5))
        assert bool((page == stores_value(stores, slot)).all())


def stores_value(stores: list[tuple[int, int, Queued]], slot: int) -> int:
    return [value for at, value, _ in stores if at == slot][-1]


def _host_view(rig: Rig, storage: torch.Tensor) -> Group:
    rig.host.storages[0].copy_(storage.cpu())
    return rig.host.groups[0]


def test_a_million_blocks_move_and_come_back() -> None:
    """Pages of 1 KiB, so that it is a million of them and not of bytes on the bus."""
    blocks = 1 << 20
    shape = (1, blocks, 1, 1, 1024)
    host = make_engine([make_group(shape, "LBHNC")], [4])
    gpu = make_engine([make_group(shape, "LBHNC", device="cuda")], [4])
    rig = Rig(host, gpu, CHOICES["kernel"], slots=blocks // 4)
    rig.fill(3)
    order = np.random.default_rng(3).permutation(blocks)
    moves = [Move(0, int(block), at // 4, at % 4) for at, block in enumerate(order)]
    until(rig.copy(moves, store=True).over)
    stored = rig.extent.data[: blocks * 1024].view(blocks, 1024)
    assert torch.equal(stored, host.storages[0].view(blocks, 1024)[torch.from_numpy(order)])
    gpu.storages[0].fill_(POISON)
    until(rig.copy(moves, store=False).over)
    assert rig.same_engine()
    rig.close()


def test_nothing_is_measured_as_faster_than_it_can_be() -> None:
    cuda = Cuda(0)
    found = rates(cuda)
    cuda.close()
    for by_size in found.values():
        assert tuple(by_size) == RUN_SIZES
        assert all(1e6 < rate < 1e12 for speeds in by_size.values() for rate in speeds.values())
    choice = chosen(found)
    assert len(choice.store) == len(choice.load) == len(RUN_SIZES)


def test_jobs_leave_device_memory_as_it_was(make: Make) -> None:
    name = "bf16, LBHNC"
    rig = make(engine_of(name, BLOCKS), engine_of(name, BLOCKS, device="cuda"), CHOICES["kernel"])
    rig.fill(1)
    until(rig.copy([Move(0, 1, 1, 0)], store=True).over)
    free = torch.cuda.mem_get_info()[0]
    for _ in range(2000):
        job = rig.copy([Move(0, 1, 1, 0)], store=True)
    until(job.over)
    assert torch.cuda.mem_get_info()[0] == free


def test_pinning_is_refused_with_an_explanation() -> None:
    """Memory that is registered already is the one refusal that every machine has."""
    storage = torch.empty(PAGE, dtype=torch.uint8, device="cuda")
    device = CudaDevice({"a": LayerCache(storage, 0, PAGE, PAGE)}, choice=CHOICES["kernel"])
    extent = extent_of(8, PAGE)
    device.pin(extent, lambda: False)
    other = CudaDevice({"a": LayerCache(storage, 0, PAGE, PAGE)}, choice=CHOICES["kernel"])
    with pytest.raises(TierError, match="ulimit -l"):
        other.pin(extent, lambda: False)
    other.close()
    device.unpin(extent)
    device.pin(extent, lambda: False)
    device.unpin(extent)
    device.close()
