"""The worker half with a GPU that is a fake (harness/fake_cuda.py says why), against a real store.

The fake's streams move only when events are asked for, so a test can hold one and see what the
worker half does while a copy is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from connectors.copies.gpu import cuda as real
from connectors.copies.gpu.device import CudaDevice
from connectors.copies.host import Device, LayerCache, device_of
from connectors.step_meta import StepMeta
from kvstore.core.errors import NotSupported
from kvstore.core.types import make_key
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.fake_cuda import COMPUTE, FakeCuda
from tests.harness.gpu_layouts import CHOICES
from tests.harness.live import LiveStore, eventually, store_settings
from tests.harness.script import hashes
from tests.harness.worker_rig import BLOCKS, POISON, Rig, heard

LONG_S = 0.1  # enough for hundreds of looks at a copy


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    with LiveStore(store_settings(tmp_path)) as made:
        yield made


class GpuRig:
    """An engine on fake GPUs, one for each rank."""

    def __init__(self, path: str, choice: str = "kernel", seed: int = 0, world: int = 1) -> None:
        self.cudas: list[FakeCuda] = []

        def make(caches: dict[str, LayerCache]) -> Device:
            storage = next(iter(caches.values())).storage
            self.cudas.append(cuda := FakeCuda([storage], seed + len(self.cudas)))
            return CudaDevice(caches, lambda: cuda, CHOICES[choice])

        self.rig = Rig(path, world=world, pad=64, device=make)
        self.rig.attach()
        self.cuda, self.rank = self.cudas[0], self.rig.ranks[0]
        self.half = self.rank.half
        self.stores, self.loads = self.cuda.lane(1), self.cuda.lane(2)

    def known(self, chain: list[bytes]) -> bool:
        return heard(self.rig.client) and make_key(chain[-1], 0) in self.rig.client.known

    def load(self, chain: list[bytes], blocks: list[int]) -> list[bool]:
        return self.rig.load(self.rig.load_job("r", self.rig.ask(chain), blocks))

    def close(self) -> None:
        for cuda in self.cudas:
            cuda.held.clear()
        self.rig.close()
        for cuda in self.cudas:
            assert cuda.faults == []


Start = Callable[..., GpuRig]


@pytest.fixture
def start(store: LiveStore) -> Iterator[Start]:
    made: list[GpuRig] = []

    def make(**how: object) -> GpuRig:
        made.append(GpuRig(store.path, **how))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("seed", "world"), [(0, 1), (1, 1), (2, 2)])
def test_what_was_stored_is_loaded(start: Start, choice: str, seed: int, world: int) -> None:
    gpu = start(choice=choice, seed=seed, world=world)
    chain = hashes(4)
    gpu.rig.put(chain, [1, 3, 2, 7])
    assert gpu.load(chain, [10, 20, 11, 12]) == [False] * world
    others = [b for b in range(BLOCKS) if b not in (1, 3, 2, 7, 10, 20, 11, 12)]
    for rank in gpu.rig.ranks:
        assert [rank.holds(b, of) for b, of in ((10, 1), (20, 3), (11, 2), (12, 7))] == [True] * 4
        assert rank.untouched(others)


def test_a_store_begins_behind_the_forward_pass_and_is_told_when_it_has_ended(
    start: Start,
) -> None:
    gpu, chain = start(), hashes(1)
    gpu.cuda.held.add(COMPUTE)
    gpu.cuda.compute(lambda: gpu.rank.fill(1))
    job = gpu.rig.store_job(chain, [1])
    gpu.half.after_forward(StepMeta(stores=(job,)))
    time.sleep(LONG_S)
    assert not gpu.known(chain), "it was copied before it was computed"
    gpu.cuda.held.add(gpu.stores)
    gpu.cuda.held.discard(COMPUTE)
    time.sleep(LONG_S)
    assert not gpu.known(chain)
    gpu.rig.collect()
    assert gpu.rig.over == [], "its slot is still being written"
    gpu.cuda.held.clear()
    eventually(lambda: gpu.known(chain))
    assert gpu.load(chain, [5]) == [False]
    assert gpu.rank.holds(5, 1), "the block was copied before it was computed"


def test_a_load_is_reported_when_its_copy_has_ended(start: Start) -> None:
    gpu, chain = start(), hashes(2)
    gpu.rig.put(chain, [1, 2])
    gpu.cuda.held.add(gpu.loads)
    job = gpu.rig.load_job("r", gpu.rig.ask(chain), [10, 11])
    gpu.half.start_loads(StepMeta(loads=(job,)))
    time.sleep(LONG_S)
    gpu.rig.collect(idle=True)
    assert gpu.rig.ended == []
    gpu.cuda.held.clear()
    eventually(lambda: gpu.rig.collect() and gpu.rig.ended)
    assert gpu.rig.ended == [(0, "r", False)]
    assert gpu.rank.holds(10, 1)
    assert gpu.rank.holds(11, 2)


@pytest.mark.parametrize("choice", CHOICES)
def test_O13_the_compute_stream_waits_for_what_is_flushed_and_the_step_does_not(
    start: Start, choice: str
) -> None:
    gpu, chain = start(choice=choice), hashes(4)
    blocks = [1, 2, 3, 4]
    for block in blocks:
        gpu.rank.fill(block)
    gpu.cuda.held.add(gpu.stores)
    job = gpu.rig.store_job(chain, blocks)
    gpu.half.before_step(StepMeta(early=(job,), flush=(job.job_id,)))  # returns: that is the point
    gpu.cuda.compute(lambda: gpu.rank.storage.fill_(POISON))  # the next owner's forward
    gpu.cuda.run()
    assert gpu.rank.holds(1, 1), "the next owner did not wait"
    gpu.cuda.held.clear()
    eventually(lambda: gpu.known(chain))
    gpu.cuda.run()
    assert gpu.rank.untouched(blocks), "the next owner has written by now"
    assert gpu.load(chain, [5, 6, 7, 8]) == [False]
    assert all(gpu.rank.holds(4 + block, block) for block in blocks)


def test_O13_a_load_into_the_source_of_a_store_waits_for_it(start: Start) -> None:
    """The fence holds the compute stream, and a load's mark is behind the fence."""
    gpu, old, new = start(), hashes(1, "old"), hashes(1, "new")
    gpu.rig.put(old, [1])
    gpu.rank.fill(2)
    grant = gpu.rig.ask(old)
    gpu.cuda.held.add(gpu.stores)
    job = gpu.rig.store_job(new, [2])
    gpu.half.before_step(StepMeta(early=(job,), flush=(job.job_id,)))
    gpu.half.start_loads(StepMeta(loads=(gpu.rig.load_job("r", grant, [2]),)))
    time.sleep(LONG_S)
    gpu.rig.collect()
    assert gpu.rig.ended == []
    gpu.cuda.held.clear()
    eventually(lambda: gpu.known(new) and gpu.rig.collect() and gpu.rig.ended)
    assert gpu.load(new, [9]) == [False]
    assert gpu.rank.holds(9, 2), "what was loaded is in the slot of what was stored"
    assert gpu.rank.holds(2, 1)


def test_O13_direct_a_mark_is_passed_when_what_the_engine_computes_has_come_to_it(
    start: Start,
) -> None:
    gpu = start()
    device = gpu.rank.device
    assert device is not None
    gpu.cuda.held.add(COMPUTE)
    done: list[bool] = []
    gpu.cuda.compute(lambda: done.append(True))
    mark = device.mark()
    assert not any(device.passed(mark) for _ in range(100))
    gpu.cuda.held.discard(COMPUTE)
    eventually(lambda: device.passed(mark))
    assert done


def test_O15_a_slot_that_is_reused_under_a_copy_fails_the_load(
    start: Start,
) -> None:
    gpu, chain = start(), hashes(2)
    gpu.rig.put(chain, [1, 2])
    job = gpu.rig.load_job("r", gpu.rig.ask(chain), [10, 11])
    gpu.cuda.held.add(gpu.loads)
    gpu.half.start_loads(StepMeta(loads=(job,)))
    eventually(lambda: not gpu.cuda.idle)
    session = gpu.half._copies.session
    assert session is not None
    ((extent, _, positions),) = session.slots.places(np.array(job.slots[1:2]))
    extent.generations[positions] += 2
    gpu.cuda.held.clear()
    eventually(lambda: gpu.rig.collect() and gpu.rig.ended)
    assert gpu.rig.ended == [(0, "r", True)]
    extent.generations[positions] -= 2


@pytest.mark.parametrize("call", ["launch", "wait"])
def test_O15_what_the_device_refuses_fails_the_job_and_no_other(start: Start, call: str) -> None:
    gpu, chain, more = start(), hashes(2), hashes(2, "more")
    gpu.rig.put(chain, [1, 2])
    grant = gpu.rig.ask(chain)
    gpu.cuda.refuse[call] = 0
    assert gpu.rig.load(gpu.rig.load_job("r", grant, [10, 11])) == [True]
    job = gpu.rig.store_job(more, [3, 4])
    gpu.half.after_forward(StepMeta(stores=(job,)))
    eventually(lambda: gpu.rig.collect() and (0, job.job_id) in gpu.rig.over)
    assert gpu.half.take_stats()["failed_stores"] == 1
    gpu.cuda.refuse.clear()
    assert not gpu.known(more)
    gpu.rig.put(more, [3, 4])
    assert gpu.load(more, [12, 13]) == [False]
    assert gpu.rank.holds(12, 3)


def test_O23_the_connection_closes_after_the_last_copy_has_ended_on_the_device(
    store: LiveStore, start: Start
) -> None:
    """Until then the store may not reuse slots that are written, nor a request its blocks."""
    gpu, chain, other = start(), hashes(1), hashes(1, "other")
    gpu.rig.put(chain, [1])
    load = gpu.rig.load_job("r", gpu.rig.ask(chain), [10])
    job = gpu.rig.store_job(other, [2])
    gpu.cuda.held |= {gpu.loads, gpu.stores}
    gpu.half.after_forward(StepMeta(stores=(job,)))
    gpu.half.start_loads(StepMeta(loads=(load,)))
    eventually(lambda: gpu.half._copies.stores_open[job.job_id].copying is not None)
    eventually(lambda: len(gpu.cuda.calls) and gpu.cuda.calls["launch"] >= 3)
    gpu.rig.client.close()  # ends the session: the worker is told to detach
    sessions = store.server.store.sessions
    eventually(lambda: not gpu.half._copies.session)
    time.sleep(LONG_S)
    gpu.rig.collect()
    assert "engine" in sessions
    assert set(job.slots) <= sessions["engine"].granted
    assert gpu.rig.ended == []
    assert (0, job.job_id) not in gpu.rig.over
    assert gpu.cuda.pinned_ranges, "memory was unregistered under a copy"
    gpu.cuda.held.clear()
    eventually(lambda: gpu.rig.collect() and gpu.rig.ended and len(gpu.rig.over) == 2)
    assert gpu.rig.ended == [(0, "r", True)], "its lease went with the session"
    eventually(lambda: "engine" not in sessions or not sessions["engine"].granted)
    eventually(lambda: not gpu.cuda.pinned_ranges or gpu.half._copies.session)


def test_O17_the_store_hears_a_goodbye_before_memory_is_unregistered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes a moment for each GiB, and an engine that ends may be killed meanwhile."""
    gpu = start()
    session, unpin, closed = gpu.half._copies.session, gpu.cuda.unpin, []
    assert session is not None

    def seen(address: int) -> None:
        closed.append(session.link.fileno() < 0)
        unpin(address)

    monkeypatch.setattr(gpu.cuda, "unpin", seen)
    gpu.close()
    assert closed
    assert all(closed)


def test_a_graph_that_the_engine_captures_is_not_spoiled(store: LiveStore) -> None:
    """It captures as it starts, which is when a worker attaches, and pins memory."""
    cudas: list[FakeCuda] = []

    def make(caches: dict[str, LayerCache]) -> Device:
        cudas.append(cuda := FakeCuda([next(iter(caches.values())).storage]))
        device = CudaDevice(caches, lambda: cuda, CHOICES["kernel"])
        cuda.capturing = True
        return device

    rig = Rig(store.path, device=make)
    rig.attach()
    rig.put(hashes(1), [1])
    assert rig.load(rig.load_job("r", rig.ask(hashes(1)), [10])) == [False]
    rig.close()
    assert cudas[0].faults == []
    assert threading.get_ident() not in cudas[0].relaxed, "the engine's own thread captures"


def test_O17_shutdown_finishes_copies_and_unregisters_memory(store: LiveStore) -> None:
    gpu = GpuRig(store.path)
    chain = hashes(6)
    for block in range(1, 7):
        gpu.rank.fill(block)
    gpu.rig.credits(6)
    jobs = tuple(gpu.rig.store_job(chain, [1 + i], i) for i in range(6))
    gpu.half.after_forward(StepMeta(stores=jobs))
    gpu.close()
    gpu.rig.collect()
    assert [job for _, job in gpu.rig.over] == [job.job_id for job in jobs]
    assert gpu.cuda.pinned_ranges == {}
    assert gpu.cuda.closed
    gpu.close()


def test_memory_that_the_store_takes_back_is_unregistered_first(start: Start) -> None:
    gpu = start()
    assert gpu.cuda.pinned_ranges
    sent: list[framing.Message] = []
    session = gpu.half._copies.session
    assert session is not None
    session.link = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    (number,) = session.slots._extents
    assert gpu.half._handle(session, [p.Extent(number)])
    assert gpu.cuda.pinned_ranges == {}
    assert sent == [p.Mapped(number, gone=True)]


def test_memory_that_cannot_be_pinned_is_said_and_tried_again(
    store: LiveStore, caplog: pytest.LogCaptureFixture
) -> None:
    cudas: list[FakeCuda] = []

    def make(caches: dict[str, LayerCache]) -> Device:
        cudas.append(FakeCuda([next(iter(caches.values())).storage]))
        cudas[-1].refuse["pin"] = 0
        return CudaDevice(caches, lambda: cudas[-1], CHOICES["kernel"])

    rig = Rig(store.path, device=make)
    try:
        half = rig.ranks[0].half
        eventually(lambda: cudas[0].calls.get("pin", 0) >= 2)
        assert "ulimit -l" in str(half._attacher.refused)
        said = [r.name for r in caplog.records if "ulimit -l" in r.message]
        assert said.count("connectors.store_connection") == 1, "once, not at every attempt"
        assert "kvstore.store.sessions" in said, "the store hears why"
        cudas[0].refuse.clear()
        rig.attach()
        rig.put(hashes(1), [1])
        assert rig.load(rig.load_job("r", rig.ask(hashes(1)), [10])) == [False]
        assert rig.ranks[0].holds(10, 1)
    finally:
        rig.close()
    assert cudas[0].faults == []


def test_a_device_is_chosen_by_where_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.zeros(64, dtype=torch.uint8)
    elsewhere = torch.zeros(64, dtype=torch.uint8, device="meta")
    assert type(device_of({"a": LayerCache(here, 0, 8, 8)})) is Device
    assert type(device_of({})) is Device
    with pytest.raises(NotSupported, match=r"on meta, served are \['cpu', 'cuda'\]"):
        device_of({"a": LayerCache(elsewhere, 0, 8, 8)})
    with pytest.raises(NotSupported, match=r"on \['cpu', 'meta'\], expected one device"):
        device_of({"a": LayerCache(here, 0, 8, 8), "b": LayerCache(elsewhere, 0, 8, 8)})
    monkeypatch.setattr(real, "cupy", None)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda:0"))
    with pytest.raises(NotSupported, match=r"need cupy: pip install 'kvstore\[cuda\]'"):
        device_of({"a": LayerCache(on_gpu, 0, 8, 8)})
