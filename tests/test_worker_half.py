"""The worker half against a store on a real socket, with real memory and tensors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from connectors.copies.host import Copying, HostCopier, LayerCache, MappedExtent, SlotMap
from connectors.step_meta import EngineSpec, LoadJob, StepMeta, StoreJob
from connectors.worker import WorkerHalf
from connectors.worker_copies import Copies, Session
from kvstore.config import Config, parse
from kvstore.core.layout import GroupLayout, LayerRun, Move, RankLayout
from kvstore.core.types import make_key
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.bench.steal import Watch
from tests.harness.live import LiveStore, eventually
from tests.harness.moves import rows
from tests.harness.script import hashes
from tests.harness.worker_rig import BLOCKS, LAYERS, POISON, Rank, Rig, heard

PAGE = 4096


@pytest.fixture
def config(tmp_path: Path) -> Config:
    server = {"socket": str(tmp_path / "store.sock"), "metrics": ""}
    return parse({"cpu": {"capacity": "16MiB", "extent": "16MiB"}, "server": server})


@pytest.fixture
def store(config: Config) -> Iterator[LiveStore]:
    with LiveStore(config) as made:
        yield made


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    """Engines to close at the end, in the order they were made."""
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.close()


@pytest.fixture
def rig(store: LiveStore, rigs: list[Rig]) -> Rig:
    return new_rig(store, rigs)


def new_rig(store: LiveStore, rigs: list[Rig], name: str = "engine", **how: int) -> Rig:
    rigs.append(Rig(store.path, name, **how))  # type: ignore[arg-type]
    rigs[-1].attach()
    return rigs[-1]


def two_blocks(rig: Rig, *, stale: int = 0) -> tuple[list[bytes], LoadJob]:
    """A chain is in the store, from blocks 1 and 2; a load of it into blocks 10 and 11."""
    chain = hashes(2)
    rig.put(chain, [1, 2])
    return chain, rig.load_job("r", rig.ask(chain), [10, 11], stale=stale)


def session_of(rig: Rig) -> Session:
    """What the first rank copies in."""
    session = rig.ranks[0].half._copies.session
    assert session is not None
    return session


# Bytes


@pytest.mark.parametrize(("world", "pad"), [(1, 0), (2, 0), (1, 64), (2, 192)])
def test_what_was_stored_is_loaded(store: LiveStore, rigs: list[Rig], world: int, pad: int) -> None:
    rig = new_rig(store, rigs, world=world, pad=pad)
    chain = hashes(4)
    rig.put(chain, [1, 3, 2, 7])
    others = [b for b in range(BLOCKS) if b not in (1, 3, 2, 7, 10, 20, 11, 12)]
    job = rig.load_job("r", rig.ask(chain), [10, 20, 11, 12])
    assert rig.load(job) == [False] * world
    for rank in rig.ranks:
        assert [rank.holds(b, of) for b, of in ((10, 1), (20, 3), (11, 2), (12, 7))] == [True] * 4
        assert rank.untouched(others)
        padding = rank.storage.view(BLOCKS, LAYERS, rank.page + pad)[:, :, rank.page :]
        assert bool((padding == POISON).all())


@pytest.mark.parametrize("first", range(4))
def test_O9_a_block_is_entered_part_way(store: LiveStore, rigs: list[Rig], first: int) -> None:
    rig = new_rig(store, rigs, per=2)
    chain = hashes(2)
    rig.put(chain, [1, 2, 3, 4])
    rig.load(rig.load_job("r", rig.ask(chain), range(10 + first, 14), first))
    (rank,) = rig.ranks
    assert [rank.holds(10 + i, 1 + i) for i in range(first, 4)] == [True] * (4 - first)
    assert rank.untouched(range(10, 10 + first))


def test_O18_ranks_of_another_size_read_the_same_slots(store: LiveStore, rigs: list[Rig]) -> None:
    two = new_rig(store, rigs, "two", world=2)
    chain = hashes(3)
    two.put(chain, [1, 2, 3])
    one = new_rig(store, rigs, "one")
    assert one.load(one.load_job("r", one.ask(chain), [5, 6, 7])) == [False]
    assert all(one.ranks[0].holds(4 + block, block) for block in (1, 2, 3))


def test_O18_a_block_is_present_when_every_rank_has_written_its_part(
    store: LiveStore, rigs: list[Rig]
) -> None:
    rig = new_rig(store, rigs, world=2)
    chain = hashes(1)
    job = rig.store_job(chain, [1])
    rig.ranks[0].half.after_forward(StepMeta(stores=(job,)))
    eventually(lambda: rig.collect() and rig.over)
    assert rig.ask(chain).lease == 0
    rig.ranks[1].half.after_forward(StepMeta(stores=(job,)))
    eventually(lambda: heard(rig.client) and make_key(chain[0], 0) in rig.client.known)
    assert rig.ask(chain).lease != 0


@pytest.mark.parametrize("writes", [True, False])
def test_B13_heads_that_another_rank_writes_are_read_only(writes: bool) -> None:
    size, slots = 1024, SlotMap()
    memory = os.memfd_create("slots")
    os.truncate(memory, 2 * PAGE)
    slots.add(1, MappedExtent(memory, p.Extent(0, 0, 1, PAGE, PAGE, 2 * PAGE)))
    engine = torch.ones(2 * size, dtype=torch.uint8)
    run = LayerRun("layer", 0, size, writes)
    layout = RankLayout(PAGE, (GroupLayout(size, (run,)),))
    copier = HostCopier({"layer": LayerCache(engine, 0, size, size)}, layout)
    assert copier.copy(rows([Move(0, 0, 0, 0)]), slots, store=True).bytes == (size if writes else 0)
    assert copier.copy(rows([Move(0, 1, 0, 0)]), slots, store=False).bytes == size
    assert engine[size:].tolist() == [int(writes)] * size


# What goes wrong


def test_O15_a_slot_that_was_reused_fails_the_load(rig: Rig) -> None:
    chain, job = two_blocks(rig, stale=-1)
    assert rig.load(job) == [True]
    assert rig.ranks[0].half.take_bad_blocks() == set(), "its request waits, and nothing was read"
    assert rig.ranks[0].half.take_stats()["failed_loads"] == 1
    assert rig.ask(chain).lease == 0, "the damaged copies are dropped"


@pytest.mark.parametrize("slot", [None, 10**6])
def test_S2_a_clients_request_id_is_short_and_escaped_in_a_log_line(
    rig: Rig, caplog: pytest.LogCaptureFixture, slot: int | None
) -> None:
    _, job = two_blocks(rig, stale=-1)
    slots = job.slots if slot is None else (slot, slot)
    named = msgspec.structs.replace(job, request_id="r\n" + "x" * 5000, slots=slots)
    assert rig.load(named) == [True]
    found = [line for line in caplog.messages if "load for" in line]
    assert found
    assert all(line.isprintable() and len(line) < 300 for line in found)


def test_O23_memory_is_given_back_while_a_load_waits_for_long(rig: Rig) -> None:
    """What it leases is not what goes; its store would end the session of who keeps it waiting."""
    _, waits = two_blocks(rig, stale=1)
    half, session = rig.ranks[0].half, session_of(rig)
    session.wait_ns = session.limit_ns = 600 * 10**9
    half.start_loads(StepMeta(loads=(waits,)))
    said: list[framing.Message] = []
    told = SimpleNamespace(link=SimpleNamespace(send=said.append), slots=session.slots)
    unmap = threading.Thread(target=half._handle, args=(told, [p.Extent(99)]), daemon=True)
    unmap.start()
    eventually(lambda: said == [p.Mapped(99, gone=True)])
    assert half._copies.loads_open == {"r"}


def test_a_request_that_loads_again_gets_what_the_second_job_names(rig: Rig) -> None:
    chain, other = hashes(2), hashes(2, "other")
    rig.put(chain, [1, 2])
    rig.put(other, [3, 4])
    assert rig.load(rig.load_job("r", rig.ask(chain), [10, 11])) == [False]
    assert rig.load(rig.load_job("r", rig.ask(other), [12, 13])) == [False]
    assert rig.ranks[0].holds(12, 3)
    assert rig.ranks[0].holds(13, 4)


def test_O15_a_load_whose_slot_is_never_filled_fails_in_time_and_holds_up_nobody(
    rig: Rig,
) -> None:
    chain, more = hashes(2), hashes(2, "more")
    rig.put(chain, [1, 2])
    half = rig.ranks[0].half
    session_of(rig).wait_ns = 1_000_000_000
    coming = rig.load_job("waits", rig.ask(chain), [10, 11], stale=1)
    half.start_loads(StepMeta(loads=(coming,)))
    started, watch = time.monotonic(), Watch()
    rig.put(more, [3, 4])  # the fence would wait for this one
    assert rig.load(rig.load_job("passes", rig.ask(more), [12, 13])) == [False]
    assert watch.own_s() < 1
    assert rig.ranks[0].untouched([10, 11])
    eventually(lambda: rig.collect() and ("waits", True) in [e[1:] for e in rig.ended])
    assert time.monotonic() - started >= 1
    assert rig.ask(chain).lease, "it was late, not damaged"


def test_O15_a_slot_that_is_not_mapped_fails_the_load(rig: Rig) -> None:
    chain = hashes(1)
    rig.put(chain, [1])
    grant = rig.ask(chain)
    whole = rig.load_job("r", grant, [10])
    wrong = LoadJob("r", whole.session, 0, whole.engine, (10**6,), (1,))
    assert rig.load(wrong) == [True]
    assert rig.ranks[0].untouched([10])
    assert rig.load(rig.load_job("again", grant, [11])) == [False]


def test_O15_a_job_that_contradicts_itself_is_reported_too(rig: Rig) -> None:
    _, whole = two_blocks(rig)
    wrong = LoadJob("r", whole.session, 0, whole.engine, whole.slots[:1], whole.generations[:1])
    assert rig.load(wrong) == [True]


def test_a_job_of_another_session_copies_nothing(rig: Rig) -> None:
    chain, other = hashes(1), hashes(1, "other")
    rig.put(chain, [1])
    grant = rig.ask(chain)
    mine = rig.load_job("r", grant, [10])
    theirs = LoadJob(
        "r", mine.session + 1, mine.lease, mine.engine, mine.slots, mine.generations
    )  # fmt: skip
    assert rig.load(theirs) == [True]
    assert rig.ranks[0].untouched([10])
    rig.ranks[0].fill(2)
    stolen = StoreJob(
        99, mine.session + 1, EngineSpec((2,), (1,), (0,)), mine.slots, (other[0],), (b"",)
    )  # fmt: skip
    rig.ranks[0].half.after_forward(StepMeta(stores=(stolen,)))
    eventually(lambda: rig.collect() and (0, 99) in rig.over)
    assert rig.ranks[0].half.take_stats()["failed_stores"] == 1
    assert rig.load(rig.load_job("again", grant, [11])) == [False]
    assert rig.ranks[0].holds(11, 1), "the slot was written by a job of another session"


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = HostCopier.copy

    def slow(*args: Any, **options: Any) -> Copying:  # noqa: ANN401 - passed on
        time.sleep(0.05)
        return copy(*args, **options)

    monkeypatch.setattr(HostCopier, "copy", slow)


@pytest.mark.usefixtures("slow_copies")
def test_O13_what_is_flushed_is_over_before_the_step(rig: Rig) -> None:
    chain = hashes(4)
    (rank,) = rig.ranks
    for block in (1, 2, 3, 4):
        rank.fill(block)
    job = rig.store_job(chain, [1, 2, 3, 4])
    rank.half.before_step(StepMeta(early=(job,), flush=(job.job_id,)))
    rank.storage.fill_(POISON)  # the next owner's forward
    eventually(lambda: heard(rig.client) and make_key(chain[-1], 0) in rig.client.known)
    assert rig.load(rig.load_job("r", rig.ask(chain), [5, 6, 7, 8])) == [False]
    assert all(rank.holds(4 + block, block) for block in (1, 2, 3, 4))


def test_O23_stores_of_a_step_whose_end_was_left_out_begin_with_the_next(rig: Rig) -> None:
    """vLLM does on all pipeline stages but the last, with speculative decoding."""
    (rank,) = rig.ranks
    first, second = hashes(1), hashes(1, "second")
    rank.fill(1)
    left = rig.store_job(first, [1])
    rank.half.before_step(StepMeta(stores=(left,)))
    told = StepMeta(stores=(rig.store_job(second, [2]),), flush=(left.job_id,))
    rank.half.before_step(told)
    rank.storage.fill_(POISON)  # the next owner's forward
    rank.half.after_forward(told)
    rank.half.before_step(StepMeta())
    rank.half._copies.runner.drain()
    rig.collect()
    assert [job for _, job in rig.over] == [left.job_id, told.stores[0].job_id], "each once"
    eventually(lambda: heard(rig.client) and make_key(first[0], 0) in rig.client.known)
    assert rig.load(rig.load_job("r", rig.ask(first), [5])) == [False]
    assert rank.holds(5, 1)


def test_O14_each_job_is_reported_once(rig: Rig) -> None:
    chain = hashes(2)
    job = rig.put(chain, [1, 2])
    grant = rig.ask(chain)
    (rank,) = rig.ranks
    loads = tuple(rig.load_job(f"r{i}", grant, [10, 11]) for i in range(50))
    rank.half.start_loads(StepMeta(loads=loads))
    eventually(lambda: rig.collect() and len(rig.ended) >= 50)
    rig.collect(idle=True)
    assert sorted(name for _, name, _ in rig.ended) == sorted(f"r{i}" for i in range(50))
    assert rig.over == [(0, job.job_id)]


def test_a_step_that_computes_nothing_waits_for_loads(rig: Rig) -> None:
    _, job = two_blocks(rig)
    rig.ranks[0].half.start_loads(StepMeta(loads=(job,)))
    rig.collect(idle=True)
    assert rig.ended == [(0, "r", False)]


# Loads that end in their step


def in_step(job: LoadJob) -> LoadJob:
    return msgspec.structs.replace(job, in_step=True)


def run_in_step(rig: Rig, job: LoadJob) -> set[int]:
    """Run a load in a step; the engine blocks that it did not fill, as its report has it."""
    half = rig.ranks[0].half
    half.start_loads(StepMeta(loads=(in_step(job),)))
    assert half._copies.loads_open == set()
    rig.collect()
    return half.take_bad_blocks()


@pytest.mark.usefixtures("slow_copies")
def test_O6_a_load_in_a_step_is_over_when_the_forward_pass_begins(rig: Rig) -> None:
    _, job = two_blocks(rig)
    half = rig.ranks[0].half
    half.start_loads(StepMeta(loads=(in_step(job),)))
    assert rig.ranks[0].holds(10, 1)
    assert rig.ranks[0].holds(11, 2)
    assert half.take_bad_blocks() == set()
    eventually(lambda: rig.collect() and half.take_stats()["load_bytes"])
    assert rig.ended == [], "its request does not wait for a report; vLLM ends for one"
    copied_bytes, seconds = half.take_copied()
    assert copied_bytes == 2 * LAYERS * rig.ranks[0].page
    assert seconds >= 0.05
    assert half.take_copied() == (0, 0.0)


def test_O20_a_load_in_a_step_ends_its_lease(store: LiveStore, rig: Rig) -> None:
    _, job = two_blocks(rig)
    assert run_in_step(rig, job) == set()
    namespace = store.server.store.sessions["engine"].namespace
    assert namespace is not None
    eventually(lambda: not len(namespace.manager.leases))


def test_O15_a_load_in_a_step_names_the_blocks_that_it_did_not_fill(rig: Rig) -> None:
    chain, job = two_blocks(rig, stale=-1)
    assert run_in_step(rig, job) == {10, 11}
    assert rig.ranks[0].half.take_bad_blocks() == set(), "each once"
    eventually(lambda: rig.collect() and rig.ranks[0].half.take_stats()["failed_loads"] == 1)
    assert rig.ended == []
    assert rig.ask(chain).lease == 0, "the damaged copies are dropped"


def test_O15_a_slot_that_is_reused_while_a_step_waits_for_its_copy_fails_the_load(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job = two_blocks(rig)
    copy, generations, copies = HostCopier.copy, SlotMap.generations, []

    def counted(*args: Any, **options: Any) -> Copying:  # noqa: ANN401 - passed on
        copies.append(args)
        return copy(*args, **options)

    monkeypatch.setattr(HostCopier, "copy", counted)
    monkeypatch.setattr(
        SlotMap, "generations", lambda *args: generations(*args) + np.uint32(len(copies))
    )
    assert run_in_step(rig, job) == {10, 11}


def test_O8_a_load_in_a_step_waits_for_no_block_that_is_still_to_come(rig: Rig) -> None:
    chain, job = two_blocks(rig, stale=1)
    session = session_of(rig)
    session.wait_ns = session.limit_ns = 30 * 10**9
    started = time.monotonic()
    assert run_in_step(rig, job) == {10, 11}
    assert time.monotonic() - started < 20
    assert rig.ask(chain).lease, "it was late, not damaged"


def test_O15_a_load_in_a_step_without_its_session_fails(rig: Rig) -> None:
    _, job = two_blocks(rig)
    assert run_in_step(rig, msgspec.structs.replace(job, session=0)) == {10, 11}
    assert rig.ranks[0].untouched([10, 11])


def test_O15_a_load_in_a_step_that_raises_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _, job = two_blocks(rig)

    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Copies, "_load", bug)
    assert run_in_step(rig, job) == {10, 11}


# The store goes, and comes back


@pytest.mark.parametrize("killed", [False, True])
def test_O14_loads_are_reported_once_when_the_store_goes(
    config: Config, rigs: list[Rig], killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = hashes(4)
    with LiveStore(config) as store:
        if killed:  # nobody is told, the sockets close
            monkeypatch.setattr(store.server, "_shut_down", lambda: None)
        rig = new_rig(store, rigs, world=2)
        rig.put(chain, [1, 2, 3, 4])
        grant = rig.ask(chain)
        loads = [rig.load_job(f"r{i}", grant, [8, 9, 10, 11]) for i in range(40)]
        for rank in rig.ranks:
            rank.half.start_loads(StepMeta(loads=tuple(loads[:20])))
        store.stop()
    for rank in rig.ranks:
        rank.half.start_loads(StepMeta(loads=tuple(loads[20:])))
    eventually(lambda: rig.collect() and len(rig.ended) >= 80)
    rig.collect(idle=True)
    names = [(rank, name) for rank, name, _ in rig.ended]
    assert len(names) == len(set(names)) == 80
    for number in {rank for rank, _, failed in rig.ended if not failed}:
        assert rig.ranks[number].holds(8, 1)
    with LiveStore(config) as store:
        eventually(lambda: heard(rig.client) and not rig.client.session)
        rig.attach()
        rig.put(chain, [1, 2, 3, 4])
        assert rig.load(rig.load_job("after", rig.ask(chain), [12, 13, 14, 15])) == [False, False]
        assert all(rank.holds(12, 1) for rank in rig.ranks)


def test_O23_the_connection_closes_after_the_last_copy(
    store: LiveStore, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the store may not reuse the slots that the copy writes."""
    copying, go_on = threading.Event(), threading.Event()
    copy = HostCopier.copy

    def slow(*args: Any, **options: Any) -> Copying:  # noqa: ANN401 - passed on
        copying.set()
        assert go_on.wait(600)
        return copy(*args, **options)

    monkeypatch.setattr(HostCopier, "copy", slow)
    job = rig.store_job(hashes(1), [1])
    rig.ranks[0].half.after_forward(StepMeta(stores=(job,)))
    assert copying.wait(600)
    rig.client.close()  # ends the session: the worker is told to detach
    sessions = store.server.store.sessions
    eventually(lambda: not rig.ranks[0].half._copies.session)
    time.sleep(0.2)
    assert "engine" in sessions
    assert set(job.slots) <= sessions["engine"].granted
    go_on.set()
    eventually(lambda: "engine" not in sessions or not sessions["engine"].granted)


def test_O17_shutdown_leaves_no_thread_and_no_descriptor(store: LiveStore) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def come_and_go(text: str) -> set[threading.Thread]:
        rig = Rig(store.path, world=2)
        rig.attach()
        rig.put(hashes(2, text), [1, 2])
        rig.close()
        rig.close()
        left = set(threading.enumerate())
        eventually(lambda: not store.server._connections)
        return left

    threads = come_and_go("a")  # the store has its memory now, in this process
    before = descriptors()
    assert come_and_go("b") <= threads
    eventually(lambda: descriptors() <= before)  # the store's thread may have one for a moment


@pytest.mark.usefixtures("slow_copies")
def test_O17_shutdown_finishes_the_copies_that_are_queued(store: LiveStore) -> None:
    rig = Rig(store.path, "first")
    rig.attach()
    chain = hashes(8)
    (rank,) = rig.ranks
    for block in range(1, 9):
        rank.fill(block)
    rig.credits(8)
    jobs = tuple(rig.store_job(chain, [1 + i], i) for i in range(8))
    rank.half.after_forward(StepMeta(stores=jobs))
    rig.close()
    rig.collect()
    assert [job for _, job in rig.over] == [job.job_id for job in jobs]
    assert rank.half.take_stats()["failed_stores"] == 0
    again = Rig(store.path, "second")
    again.attach()
    assert len(again.ask(chain).hits[0]) == 8
    again.close()


def test_without_a_store_every_job_fails_at_once(tmp_path: Path, rigs: list[Rig]) -> None:
    rig = Rig(str(tmp_path / "nobody.sock"))
    rigs.append(rig)
    spec = EngineSpec((1,), (1,), (0,))
    load = LoadJob("r", 0, 1, spec, (0,), (1,))
    save = StoreJob(5, 0, spec, (0,), (b"key",), (b"",))
    assert rig.load(load) == [True]
    rig.ranks[0].half.after_forward(StepMeta(stores=(save,)))
    eventually(lambda: rig.collect() and rig.over == [(0, 5)])
    rig.ranks[0].half.before_step(StepMeta(flush=(5,)))


def test_a_store_that_cannot_serve_us_says_why(config: Config) -> None:
    """Two ranks that both hold all the heads, and say that there are twice as many."""
    with LiveStore(config) as store:
        ranks = [Rank("engine", rank, 2, 1, 0, store.path) for rank in (0, 1)]
        wrong = Rank("other", 1, 2, 1, 0, store.path)
        alone = WorkerHalf(
            "wrong", 0, 1, wrong.geometry, wrong.caches, lambda: store.path
        )  # fmt: skip
        eventually(lambda: alone._attacher.refused)
        assert "heads" in str(alone._attacher.refused)
        for half in (alone, wrong.half, *(rank.half for rank in ranks)):
            half.shutdown()
