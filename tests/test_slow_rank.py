"""One of two ranks halts in the middle of a copy, or loses its connection: a real store sees it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from connectors.copies.host import Copying, Device, HostCopier, SlotMap
from connectors.step_meta import Moves, StepMeta
from kvstore.core.layout import RankLayout
from kvstore.core.types import make_key
from tests.harness.live import LiveStore, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.script import hashes
from tests.harness.worker_rig import Rig, heard

SLOW = 1  # the rank that something happens to


class Halting(Device):
    """Its copies stop half-way while `go_on` is not set."""

    halted = False

    def copier(self, layout: RankLayout) -> HostCopier:
        self.go_on = threading.Event()
        self.go_on.set()
        return HalfWay(self, layout)


class HalfWay(HostCopier):
    def __init__(self, device: Halting, layout: RankLayout) -> None:
        super().__init__(device._caches, layout)
        self._device = device

    def copy(self, moves: Moves, slots: SlotMap, *, store: bool, after: int = 0) -> Copying:
        half = len(moves) // 2
        copied = super().copy(moves[:half], slots, store=store, after=after).bytes
        self._device.halted = not self._device.go_on.is_set()
        assert self._device.go_on.wait(WAIT_S)
        self._device.halted = False
        return Copying(copied + super().copy(moves[half:], slots, store=store, after=after).bytes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    with LiveStore(store_settings(tmp_path)) as made:
        yield made


@pytest.fixture
def start(store: LiveStore) -> Iterator[Callable[[str], Rig]]:
    made: list[Rig] = []

    def one(name: str) -> Rig:
        made.append(Rig(store.path, name, world=2, device=Halting))
        made[-1].attach()
        return made[-1]

    yield one
    for rig in made:
        slow_device(rig).go_on.set()
        rig.close()


def slow_device(rig: Rig) -> Halting:
    device = rig.ranks[SLOW].device
    assert isinstance(device, Halting)
    return device


def put(rig: Rig, chain: list[bytes]) -> None:
    """Store a chain from blocks 1.., and forget the reports of it."""
    rig.put(chain, range(1, 1 + len(chain)))
    eventually(lambda: rig.collect() and len(rig.over) == len(rig.ranks))
    rig.over.clear()


def begin(rig: Rig, meta: StepMeta) -> None:
    """Plan copies on all ranks; wait until one of them has halted, and the other is through."""
    device = slow_device(rig)
    device.go_on.clear()
    for rank in rig.ranks:
        rank.half.start_loads(meta)
        rank.half.after_forward(meta)
    eventually(lambda: rig.collect() and device.halted and (rig.ended or rig.over))


def stored(rig: Rig, chain: list[bytes]) -> bool:
    return rig.ask(chain).lease != 0


def test_O14_a_load_is_over_and_its_slots_are_free_when_its_slowest_rank_says_so(
    store: LiveStore, start: Callable[[str], Rig]
) -> None:
    rig, chain = start("engine"), hashes(4)
    put(rig, chain)
    grant = rig.ask(chain)
    (namespace,) = store.server.store.namespaces.values()
    begin(rig, StepMeta(loads=(rig.load_job("slow", grant, [8, 9, 10, 11]),)))
    assert rig.ended == [(0, "slow", False)]
    assert len(namespace.manager.leases) == 1
    slow_device(rig).go_on.set()
    eventually(lambda: rig.collect() and len(rig.ended) == 2)
    assert all(rank.holds(7 + block, block) for rank in rig.ranks for block in (1, 2, 3, 4))
    eventually(lambda: len(namespace.manager.leases) == 0)


def test_O18_O13_a_block_is_there_and_its_source_free_once_its_slowest_rank_has_stored_its_part(
    start: Callable[[str], Rig],
) -> None:
    rig, other, chain = start("engine"), start("other"), hashes(4)
    for rank in rig.ranks:
        for block in (1, 2, 3, 4):
            rank.fill(block)
    job = rig.store_job(chain, [1, 2, 3, 4])
    begin(rig, StepMeta(stores=(job,)))
    assert not stored(other, chain)
    fence = StepMeta(flush=(job.job_id,))
    rig.ranks[0].half.before_step(fence)
    with ThreadPoolExecutor(1) as pool:
        fenced = pool.submit(rig.ranks[SLOW].half.before_step, fence)
        assert not wait([fenced], 0.1).done
        slow_device(rig).go_on.set()
        fenced.result(WAIT_S)
    last = make_key(chain[-1], 0)
    eventually(lambda: heard(rig.client) and last in rig.client.known)
    loaded = other.load(other.load_job("r", other.ask(chain), [8, 9, 10, 11]))
    assert loaded == [False, False]
    assert all(rank.holds(7 + block, block) for rank in other.ranks for block in (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("loads", "lost"), [(True, 0), (False, 0), (False, SLOW)], ids=["load", "store", "slow-store"]
)
def test_O14_O23_a_lost_connection_ends_all_and_slots_wait_for_the_slowest_copy(
    store: LiveStore, start: Callable[[str], Rig], loads: bool, lost: int
) -> None:
    rig, chain, fresh = start("engine"), hashes(4), hashes(4, "fresh")
    put(rig, chain)
    job = rig.store_job(fresh, [1, 2, 3, 4])
    load = rig.load_job("slow", rig.ask(chain), [8, 9, 10, 11])
    begin(rig, StepMeta(loads=(load,)) if loads else StepMeta(stores=(job,)))
    sessions, session = store.server.store.sessions, rig.client.session
    attached = rig.ranks[lost].half._copies.session
    assert attached is not None
    attached.link._sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: heard(rig.client) and rig.client.session != session)
    if lost != SLOW:  # whose end of process is not waited for: it is the store's own
        assert set(job.slots) <= sessions["engine"].granted
    slow_device(rig).go_on.set()
    eventually(lambda: rig.collect() and len(rig.ended if loads else rig.over) == len(rig.ranks))
    assert {rank for rank, *_ in (rig.ended if loads else rig.over)} == {0, SLOW}
    rig.attach()
    if loads or lost == SLOW:
        assert not stored(rig, fresh), "one of its ranks has not said that it is whole"
    else:
        assert rig.load(rig.load_job("fresh", rig.ask(fresh), [12, 13, 14, 15])) == [False, False]
        assert all(rank.holds(11 + block, block) for rank in rig.ranks for block in (1, 2, 3, 4))
    assert rig.load(rig.load_job("after", rig.ask(chain), [12, 13, 14, 15])) == [False, False]
