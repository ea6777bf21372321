"""Copies for a GPU, on a fake of CUDA that runs streams in any order it may (harness/fake_cuda.py).

The fake is what makes a missing wait fail: a device would mostly run things in the harmless order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from connectors.copies.gpu import device, measure
from connectors.copies.gpu.cuda import Launch
from connectors.copies.gpu.device import CudaDevice, GpuCopier, Queued
from connectors.copies.gpu.measure import Choice, chosen
from connectors.copies.gpu.pins import Pins, explain, pieces_of
from connectors.copies.gpu.plan import COPIES_MAX, Words, batches_of
from connectors.copies.host import SlotMap
from kvstore.core.errors import TierError
from kvstore.core.layout import Move
from tests.harness.fake_cuda import COMPUTE, FakeCuda
from tests.harness.gpu_layouts import (
    CHOICES,
    POISON,
    Bytes,
    Engine,
    engine_of,
    extent_of,
    fill_random,
    random_engine,
    some_moves,
)
from tests.harness.moves import rows
from tests.test_gpu_plan import BLOCKS, SLOTS, slots_for

KERNEL = CHOICES["kernel"]
NAME = "bf16, LBNHC"


class Rig:
    """A device with an engine's tensors and pinned slots."""

    def __init__(
        self,
        engine: Engine | None = None,
        choice: Choice = KERNEL,
        seed: int = 0,
        jobs: int = 1024,
        places: int = 1024,
    ) -> None:
        self.engine = engine_of(NAME, BLOCKS) if engine is None else engine
        fill_random(self.engine, seed)
        self.cuda = FakeCuda(self.engine.storages, seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "JOBS_MAX", jobs)
            patch.setattr(device, "PLACES_MAX", places)
            self.device = CudaDevice(self.engine.caches, lambda: self.cuda, choice)
        self.copier: GpuCopier = self.device.copier(self.engine.layout)
        self.slots, self.extents = slots_for(self.engine)
        for extent in self.extents:
            self.device.pin(extent, lambda: False)

    def copy(self, moves: list[Move], *, store: bool, after: int | None = None) -> Queued:
        mark = self.device.mark() if after is None else after
        return self.copier.copy(rows(moves), self.slots, store=store, after=mark)

    def finish(self, *copies: Queued) -> None:
        for copy in copies:
            until(copy.over)
        assert self.cuda.faults == []

    def slot(self, slot: int) -> torch.Tensor:
        size = self.engine.layout.slot_bytes
        number, position = divmod(slot, SLOTS)
        return self.extents[number].data[position * size : (position + 1) * size]

    def holds(self, slot: int, pages: dict[int, Bytes]) -> bool:
        found = self.slot(slot).numpy()
        return all((found[at : at + len(data)] == data).all() for at, data in pages.items())


def until(done: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if done():
            return
    pytest.fail("the fake has nothing left to run, and this is still not over")


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("seed", range(6))
def test_blocks_go_to_slots_and_back_whatever_runs_first(seed: int, choice: str) -> None:
    rng = random.Random(seed)
    rig = Rig(random_engine(rng, BLOCKS), CHOICES[choice], seed)
    moves = some_moves(rig.engine, rng, BLOCKS, 2 * SLOTS)
    rng.shuffle(moves)
    cuts = sorted(rng.sample(range(len(moves) + 1), min(2, len(moves))))
    jobs = [moves[a:b] for a, b in zip([0, *cuts], [*cuts, len(moves)], strict=True)]
    stores = [rig.copy(job, store=True) for job in jobs if job]
    rig.finish(*stores)
    pages = {
        (m.group, layer, m.block_id): rig.engine.groups[m.group].page(layer, m.block_id)
        for m in moves
        for layer in range(len(rig.engine.groups[m.group].names))
    }
    for storage in rig.engine.storages:
        storage.fill_(POISON)
    rig.finish(*[rig.copy(job, store=False) for job in jobs if job])
    for (group, layer, block), page in pages.items():
        assert (rig.engine.groups[group].page(layer, block) == page).all()
    moved = sum(copy.bytes for copy in stores)
    assert moved == sum(len(page) for page in pages.values()), (
        "bytes are what moved, neither gaps nor blocks that stay"
    )


@pytest.mark.parametrize("choice", CHOICES)
def test_a_store_waits_for_what_the_engine_computes(choice: str) -> None:
    rig = Rig(choice=CHOICES[choice])
    rig.cuda.held.add(COMPUTE)
    rig.cuda.compute(lambda: fill_random(rig.engine, 77))
    store = rig.copy([Move(0, 2, 1, 0)], store=True)
    rig.cuda.run()
    assert not store.over()
    assert bool((rig.slot(1) == POISON).all()), "it was copied before it was computed"
    rig.cuda.held.clear()
    rig.finish(store)
    assert rig.holds(1, rig.engine.slot_part(0, 2))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_load_waits_for_the_last_reader_of_its_blocks(choice: str) -> None:
    """With steps scheduled ahead a freed block may still be read by the step under way."""
    rig = Rig(choice=CHOICES[choice])
    rig.finish(rig.copy([Move(0, 2, 1, 0)], store=True))
    seen: list[bytes] = []
    old = rig.engine.groups[0].page(0, 5).tobytes()
    rig.cuda.held.add(COMPUTE)
    rig.cuda.compute(lambda: seen.append(rig.engine.groups[0].page(0, 5).tobytes()))
    load = rig.copy([Move(0, 5, 1, 0)], store=False)
    rig.cuda.run()
    rig.cuda.held.clear()
    rig.finish(load)
    rig.cuda.run()
    assert seen == [old]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("seed", range(4))
def test_O13_what_is_computed_behind_the_fence_waits_for_the_store(seed: int, choice: str) -> None:
    rig = Rig(choice=CHOICES[choice], seed=seed)
    expected = rig.engine.slot_part(0, 2)
    store = rig.copy([Move(0, 2, 1, 0)], store=True)
    asked = rig.cuda.asked
    rig.device.fence([store])
    assert rig.cuda.asked == asked, "the step thread does not wait, nor ask"
    rig.cuda.compute(lambda: rig.engine.storages[0].fill_(POISON))
    rig.cuda.run()
    rig.finish(store)
    assert rig.holds(1, expected), "the block's next owner is in the slot"
    assert bool((rig.engine.storages[0] == POISON).all())


def test_O13_a_fence_waits_for_the_last_of_several_stores_and_for_both_directions() -> None:
    rig = Rig()
    lanes = {True: rig.cuda.lane(1), False: rig.cuda.lane(2)}
    stores = [rig.copy([Move(0, block, block, 0)], store=True) for block in range(3)]
    load = rig.copy([Move(0, 4, 7, 0)], store=False)
    rig.cuda.held |= set(lanes.values())
    rig.device.fence([stores[2], stores[0], load])
    happened: list[int] = []
    rig.cuda.compute(lambda: happened.append(1))
    rig.cuda.run(COMPUTE)
    rig.cuda.run(lanes[True])
    rig.cuda.run(COMPUTE)
    assert happened == [], "the load is under way"
    rig.cuda.run(lanes[False])
    rig.cuda.run(COMPUTE)
    assert happened == [1]


@pytest.mark.parametrize("order", [(2, 0), (0, 2)])
def test_O13_a_fence_names_stores_in_any_order(order: tuple[int, int]) -> None:
    rig = Rig()
    lane = rig.cuda.lane(1)
    stores = [rig.copy([Move(0, block, block, 0)], store=True) for block in range(3)]
    rig.cuda.run(COMPUTE)
    rig.cuda.held.add(lane)
    rig.device.fence([stores[number] for number in order])
    happened: list[int] = []
    rig.cuda.compute(lambda: happened.append(1))
    while not stores[1].over():
        rig.cuda._step([lane])
        rig.cuda.run(COMPUTE)
    assert happened == [], "the last of them is under way"
    rig.cuda.run(lane)
    rig.cuda.run(COMPUTE)
    assert happened == [1]


def test_O13_a_fence_for_what_is_over_asks_nothing_of_the_compute_stream() -> None:
    rig = Rig()
    store = rig.copy([Move(0, 2, 1, 0)], store=True)
    rig.finish(store)
    rig.cuda.run()
    rig.cuda.held |= {rig.cuda.lane(1), rig.cuda.lane(2)}
    rig.device.fence([store])
    assert rig.cuda.idle


def test_a_copy_is_over_when_its_own_event_is_reached_not_before() -> None:
    rig = Rig()
    first = rig.copy([Move(0, 2, 1, 0)], store=True)
    second = rig.copy([Move(0, 3, 2, 0)], store=True)
    rig.cuda.pace = 0
    rig.cuda.run(COMPUTE)
    while not first.over():
        rig.cuda._step([rig.cuda.lane(1)])
        assert not second.over() or first.over()
    assert rig.holds(1, rig.engine.slot_part(0, 2))
    assert not second.over()
    rig.cuda.run()
    assert second.over()
    assert rig.holds(2, rig.engine.slot_part(0, 3))


def test_both_directions_run_at_once() -> None:
    rig = Rig()
    rig.finish(rig.copy([Move(0, 1, 1, 0)], store=True))
    rig.cuda.held.add(rig.cuda.lane(1))
    store = rig.copy([Move(0, 2, 2, 0)], store=True)
    rig.finish(rig.copy([Move(0, 3, 1, 0)], store=False))
    assert not store.over()
    rig.cuda.held.clear()
    rig.finish(store)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("jobs", "places"), [(2, 64), (64, 8), (3, 4)])
def test_rings_that_are_full_wait_and_nothing_is_overwritten(
    seed: int, jobs: int, places: int
) -> None:
    """Jobs larger than the ring of places, and more of them than there are events."""
    rng = random.Random(seed)
    rig = Rig(seed=seed, jobs=jobs, places=places)
    part = rig.engine.slot_part
    wanted: dict[int, dict[int, Bytes]] = {}
    copies = []
    for _ in range(6):
        chosen = rng.sample(range(2 * SLOTS), 5)
        moves = [Move(0, rng.randrange(BLOCKS), slot, 0) for slot in chosen]
        copies.append(rig.copy(moves, store=True))
        for move in moves:
            wanted[move.slot] = part(0, move.block_id)
    rig.finish(*copies)
    for slot, pages in wanted.items():
        assert rig.holds(slot, pages)


def test_no_job_makes_memory_streams_or_events() -> None:
    rig = Rig()
    made = rig.cuda._next, len(rig.cuda._kept)
    for _ in range(50):
        rig.finish(
            rig.copy([Move(0, 2, 1, 0)], store=True), rig.copy([Move(0, 3, 1, 0)], store=False)
        )
    assert (rig.cuda._next, len(rig.cuda._kept)) == made


def test_any_number_of_blocks_is_one_launch() -> None:
    rig = Rig()
    for count in (1, BLOCKS):
        before = rig.cuda.calls.get("launch", 0)
        rig.finish(rig.copy([Move(0, b, b, 0) for b in range(count)], store=True))
        assert rig.cuda.calls["launch"] == before + 1


@pytest.mark.parametrize("choice", CHOICES)
def test_what_fails_half_way_is_told_once_the_rest_has_ended(choice: str) -> None:
    """Else the store would give the slot away while it is still written."""
    groups = random_engine(random.Random(5), BLOCKS)
    assert len(groups.groups) > 1
    rig = Rig(groups, CHOICES[choice])
    call = {"kernel": "launch", "engines": "copy"}[choice]
    rig.cuda.refuse[call] = 1  # the first group goes, the second does not
    copy = rig.copy([Move(0, 1, 0, 0), Move(1, 1, 1, 0)], store=True)
    rig.cuda.pace = 0
    assert not copy.over()
    rig.cuda.run()
    with pytest.raises(TierError, match=f"refuses this {call}"):
        copy.over()
    assert rig.cuda.idle
    assert rig.holds(0, rig.engine.slot_part(0, 1))


def test_what_cannot_be_queued_at_all_leaves_nothing_queued() -> None:
    rig = Rig()
    rig.cuda.run()
    mark = rig.device.mark()
    rig.cuda.run()
    with pytest.raises(TierError, match="engine block 7"):
        rig.copy([Move(0, 1, 1, 0), Move(0, BLOCKS, 2, 0)], store=True, after=mark)
    with pytest.raises(TierError, match="not mapped"):
        rig.copy([Move(0, 1, 999, 0)], store=False, after=mark)
    assert rig.cuda.idle


def test_marks_go_round_and_each_stands_for_its_own_time_or_a_later_one() -> None:
    rig = Rig()
    rig.cuda.held.add(COMPUTE)
    early = rig.device.mark()
    for _ in range(300):
        rig.device.mark()
    store = rig.copy([Move(0, 2, 1, 0)], store=True, after=early)
    rig.cuda.run()
    assert not store.over()
    rig.cuda.held.clear()
    rig.finish(store)


def test_tables_are_made_once_for_a_layout() -> None:
    rig = Rig()
    made = len(rig.cuda._kept)
    assert rig.device.copier(rig.engine.layout) is rig.copier
    assert len(rig.cuda._kept) == made


# Pinned memory


def test_registrations_end_where_slots_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.copies.gpu.pins.PIECE_BYTES", 50_000)
    extent = extent_of(7, 12288)
    pieces = pieces_of(extent)
    assert len(pieces) == 2
    assert all((address - extent.address) % 12288 == 0 for address, _ in pieces)
    assert sum(size for _, size in pieces) == 7 * 12288
    starts = [address for address, _ in pieces]
    assert starts[1:] == [address + size for address, size in pieces[:-1]]


def test_copies_run_in_memory_registered_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.copies.gpu.pins.PIECE_BYTES", 1)
    rig = Rig(choice=CHOICES["engines"])
    assert len(rig.cuda.pinned_ranges) == 2 * SLOTS
    rig.finish(rig.copy([Move(0, b, b, 0) for b in range(BLOCKS)], store=True))


def test_what_was_registered_is_let_go_and_only_that() -> None:
    rig = Rig()
    first, second = rig.extents
    rig.cuda.run()
    rig.device.unpin(first)
    rig.device.unpin(first)
    held = set(rig.cuda.pinned_ranges)
    assert held == {address for address, _ in pieces_of(second)}
    rig.device.pin(first, lambda: False)
    rig.finish(rig.copy([Move(0, 2, 1, 0)], store=True))


def test_memory_that_cannot_be_registered_is_explained_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("connectors.copies.gpu.pins.PIECE_BYTES", 1)
    cuda = FakeCuda([])
    cuda.refuse["pin"] = 3
    with pytest.raises(TierError, match=r"refuses this pin; 0 of 0 MiB.*container.*ulimit -l"):
        Pins(cuda).pin(extent_of(7, 12288), lambda: False)
    assert cuda.pinned_ranges == {}


def test_what_cuda_does_not_let_go_of_stays_known_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("connectors.copies.gpu.pins.PIECE_BYTES", 1)
    cuda, extent = FakeCuda([]), extent_of(3, 12288)
    pins = Pins(cuda)
    pins.pin(extent, lambda: False)
    cuda.refuse["unpin"] = 1
    pins.unpin(extent)
    assert len(cuda.pinned_ranges) == 2
    assert pins.bytes == 2 * 12288
    assert "stay pinned: GPU 0: the fake refuses this unpin" in caplog.text
    with pytest.raises(TierError, match="registered already"):
        pins.pin(extent, lambda: False)  # another one that is mapped there
    cuda.refuse.clear()
    pins.pin(extent, lambda: False)
    assert pins.bytes == 3 * 12288
    pins.unpin(extent)
    assert cuda.pinned_ranges == {}
    assert pins.bytes == 0


def test_pinning_stops_when_the_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.copies.gpu.pins.PIECE_BYTES", 1)
    cuda, asked = FakeCuda([]), threading.Event()

    def stopped() -> bool:
        seen = asked.is_set()
        asked.set()
        return seen

    with pytest.raises(TierError, match="stopped"):
        Pins(cuda).pin(extent_of(7, 12288), stopped)
    assert cuda.pinned_ranges == {}


def test_progress_is_told_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = iter(range(0, 10_000, 6))
    caplog.set_level("INFO", "connectors.copies.gpu.pins")
    pins = Pins(FakeCuda([]), lambda: float(next(now)))
    for _ in range(4):
        pins.pin(extent_of(1, 12288), lambda: False)
    assert len([r for r in caplog.records if "pinning memory" in r.message]) == 2


def test_limits_are_named_in_the_explanation() -> None:
    text = explain("no", 5 << 20, 9 << 20, 8 << 20)
    assert "5 of 9 MiB" in text
    assert "ulimit -l: 8 MiB" in text
    assert "ulimit -l: unlimited" in explain("no", 0, 0, -1)


# Who moves what


def test_the_kernel_is_chosen_where_it_is_clearly_faster_with_few_thread_blocks() -> None:
    stores = {4096: {0: 10.0, 4: 20.0, 8: 34.0, 16: 40.0}, 65536: {0: 40.0, 4: 20.0, 8: 48.0}}
    stores[65536][16] = 48.5
    found = {True: stores, False: {size: {0: 50.0, 4: 10.0, 8: 10.0} for size in stores}}
    choice = chosen(found)
    assert choice.store == ((4096, 8), (65536, 0))
    assert choice.load == ((4096, 0), (65536, 0))
    sizes = (1, 4096, 16000, 17000, 10**7)
    assert [choice.thread_blocks(n, store=True) for n in sizes] == [8, 8, 8, 0, 0]


class Timed(FakeCuda):
    """What was queued since it was last asked decides how long that took."""

    taken_ms = 0.0

    def launch(self, launch: Launch, stream: int) -> None:
        super().launch(launch, stream)
        self.taken_ms += 10.0 / launch.blocks if launch.blocks < 8 else 1.0

    def copy(self, to: Words, source: Words, sizes: Words, stream: int) -> None:
        super().copy(to, source, sizes, stream)
        self.taken_ms += len(sizes) / 100

    def milliseconds(self, begin: int, end: int) -> float:
        assert begin != end
        taken_ms, self.taken_ms = self.taken_ms, 0.0
        return taken_ms


def test_copy_engines_begin_while_the_next_batch_is_made() -> None:
    """One batch of 4,096 copies took 1.4 times as long on an H200."""
    runs, places = np.ones((3, 4), np.uint64), np.ones((200, 2), np.uint64)
    batches = [len(sizes) for _, _, sizes in batches_of(runs, places, store=True)]
    assert sum(batches) == 600
    assert max(batches) <= COPIES_MAX < 600
    many = batches_of(np.ones((COPIES_MAX + 1, 4), np.uint64), places[:2], store=False)
    assert len(list(many)) == 2


def test_it_is_measured_with_a_cuda_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RUN_SIZES", (1024, 65536))
    for name in ("BYTES", "MOVED"):
        monkeypatch.setattr(measure, name, 1 << 20)
    made: list[Timed] = []

    def make() -> Timed:
        made.append(Timed([]))
        made[-1].pace = 10_000
        return made[-1]

    found = measure.measured(make)
    assert found == Choice(((1024, 8), (65536, 0)), ((1024, 8), (65536, 0)))
    assert [cuda.closed for cuda in made] == [True]
    assert made[0].faults == []


def test_what_cannot_be_measured_is_guessed_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """An engine may have left no memory; that is no reason to serve without tiers."""
    cuda = FakeCuda([])
    cuda.refuse["copy"] = 0
    assert measure.measured(lambda: cuda) == measure.GUESS
    assert cuda.closed
    assert "not measured" in caplog.text


def test_each_group_is_moved_by_who_is_fast_at_its_runs() -> None:
    engine = random_engine(random.Random(5), BLOCKS)
    rig = Rig(engine, Choice(((1, 4), (10**9, 0)), ((1, 4), (10**9, 0))))
    ways = rig.copier._ways[True]
    assert [way.blocks for way in ways] == [4] * len(engine.layout.groups)


def test_slots_are_found_in_any_extent() -> None:
    slots = SlotMap()
    first, second = extent_of(4, 4096), extent_of(4, 4096, first=4)
    slots.add(1, first)
    slots.add(2, second)
    found = slots.addresses(np.array([5, 0, 7, 3], np.int64)).tolist()
    assert found == [
        second.address + 4096, first.address, second.address + 3 * 4096, first.address + 3 * 4096,
    ]  # fmt: skip
