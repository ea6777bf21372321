"""Turns, chunks and ends of transfers, with an agent that does as it is told."""

from __future__ import annotations

import ctypes
import itertools
import random
import resource
import socket
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.wire.framing import Decoder, Message, u32
from tiers.cpu import CpuExtent
from tiers.nixl import exporter as under_test
from tiers.nixl.agent import Agent, Blocks, Flight, Indices, Places, Region
from tiers.nixl.exporter import FLIGHTS_MAX, LONG_NAP_S, NAP_S, Extent, TransferLoop
from tiers.nixl.messages import (
    Ended,
    ErrorClass,
    Mapped,
    Meets,
    MoveError,
    Peer,
    ToStore,
    Transfer,
)

SLOT = 4096
SIZE = 64 * SLOT
PER_CHUNK = 4


class FakeAgent(Agent):
    """Peers by name: their metadata is that name. Moves nothing."""

    def __init__(self) -> None:
        self.name = "fake"
        self.numbers = itertools.count(1)
        self.regions: set[int] = set()
        self.lists: dict[int, str | None] = {}
        self.flights: dict[int, tuple[str, int]] = {}  # whose, bytes
        self.started: list[tuple[str, int]] = []  # whose, blocks
        self.placed: list[tuple[list[int], list[int]]] = []  # addresses here and there
        self.gpus: list[int | None] = []  # that these are on there
        self.peers: dict[str, int] = {}  # how often met since it was last forgotten
        self.forgotten: Counter[str] = Counter()
        self.slow: set[str] = set()  # what is started with them is not over at once
        self.broken: dict[str, ErrorClass] = {}
        self.unknown: set[str] = set()  # whose memory is not where it should be, until met afresh

    def register(self, address: int, size: int, gpu: int | None = None) -> Region:
        assert size > 0
        assert gpu is None
        self.regions.add(address)
        return address

    def deregister(self, region: Region) -> None:
        self.regions.remove(region)

    def add_peer(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name.startswith("bad"):
            raise MoveError("bad", "refused")
        self.peers[name] = self.peers.get(name, 0) + 1
        return name

    def remove_peer(self, name: str) -> None:
        assert not [one for one, _ in self.flights.values() if one == name], "something under way"
        assert name not in self.lists.values(), "a list of its memory is kept"
        if self.peers.pop(name, None) is None:
            raise MoveError("unknown", "refused")
        self.unknown.discard(name)
        self.forgotten[name] += 1

    def blocks(self, peer: str | None, address: int, block_bytes: int, count: int) -> Blocks:
        assert address > 0
        assert block_bytes * count > 0
        if peer in self.unknown:
            raise MoveError("not registered", "refused")
        number = next(self.numbers)
        self.lists[number] = peer
        return Blocks(number)

    def drop(self, blocks: Blocks) -> None:
        del self.lists[blocks]

    def start(
        self,
        local: Blocks,
        local_indices: Indices,
        remote: Blocks,
        remote_indices: Indices,
        *,
        write: bool,  # noqa: ARG002 - as the real one
    ) -> tuple[Flight, bool]:
        assert self.lists[local] is None
        peer = self.lists[remote]
        assert peer is not None
        assert len(local_indices) == len(remote_indices) > 0
        assert local_indices.dtype == np.int32
        self.started.append((peer, len(local_indices)))
        if peer in self.broken and peer not in self.slow:
            raise MoveError("broken", self.broken[peer])
        flight = next(self.numbers)
        self.flights[flight] = (peer, len(local_indices) * SLOT)
        return Flight(flight), peer not in self.slow

    def move(
        self,
        peer: str,
        local: Places,
        remote: Places,
        *,
        write: bool,
        gpu: int | None = None,
        peer_gpu: int | None = None,
    ) -> tuple[Flight, bool]:
        assert write
        assert gpu is None
        self.gpus.append(peer_gpu)
        assert local[:, 1].tolist() == remote[:, 1].tolist()
        self.placed.append((local[:, 0].tolist(), remote[:, 0].tolist()))
        if peer in self.broken and peer not in self.slow:
            raise MoveError("broken", self.broken[peer])
        flight = next(self.numbers)
        self.flights[flight] = (peer, int(local[:, 1].sum()))
        return Flight(flight), peer not in self.slow

    def over(self, flight: Flight) -> bool:
        peer, _ = self.flights[flight]
        if peer in self.slow:
            return False
        if peer in self.broken:
            raise MoveError("broken", self.broken[peer])
        return True

    def moved_bytes(self, flight: Flight) -> int:
        return self.flights[flight][1]

    def let_go(self, flight: Flight) -> None:
        del self.flights[flight]


class Rig:
    """A mover with two extents of one memory: 1 to export, 2 to land in."""

    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.said: list[Ended | Mapped] = []
        self.now_s = 0.0
        self.met: list[str | None] = []
        self.mover = TransferLoop(self.agent, self._say, lambda: self.now_s)
        self.memory = CpuExtent(SIZE + SLOT, SLOT)
        self.ids = itertools.count(1)
        for number in (1, 2):
            self.map(number)

    def _say(self, message: Ended | Mapped | Meets) -> None:
        if isinstance(message, Meets):
            self.met.append(message.peer)
        else:
            self.said.append(message)

    def map(self, number: int) -> None:
        extent = Extent(self.agent, self.memory.fd, SIZE, writable=number == 2)
        self.mover.extents[number] = extent

    def start(self, peer: str, blocks: int, extent: int = 2) -> int:
        number = next(self.ids)
        positions = u32(range(blocks))
        asked = Transfer(number, peer, extent == 1, extent, SLOT, SIZE, SLOT, positions, positions)
        self.mover.start(asked)
        return number

    def steps(self, count: int = 200) -> None:
        for _ in range(count):
            if self.mover.nap_s is None:
                return
            self.mover.step()

    def ended(self) -> dict[int, Ended]:
        found = [one for one in self.said if isinstance(one, Ended)]
        assert len({one.id for one in found}) == len(found), "each ends once"
        return {one.id: one for one in found}

    def close(self) -> None:
        self.memory.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(under_test, "CHUNK_BYTES", PER_CHUNK * SLOT)
    rig = Rig()
    for peer in ("a", "b"):
        rig.mover.add_peer(peer, peer.encode())
    yield rig
    rig.close()


def test_peers_take_turns_and_so_do_the_transfers_of_a_peer(rig: Rig) -> None:
    sizes = {rig.start(peer, blocks): blocks for peer, blocks in (
        ("a", 12), ("a", 3), ("b", 4), ("b", 1)
    )}  # fmt: skip
    rig.steps()
    assert rig.agent.started == [("a", 4), ("b", 4), ("a", 3), ("b", 1), ("a", 4), ("a", 4)]
    ended = rig.ended()
    assert {number: done.bytes // SLOT for number, done in ended.items()} == sizes
    assert list(ended) == [3, 2, 4, 1], "the small ones do not wait for the large one"
    assert rig.mover.nap_s is None


def test_a_block_larger_than_a_chunk_is_one(rig: Rig) -> None:
    number, size = next(rig.ids), SLOT * 16
    positions = u32([0, 1, 2])
    asked = Transfer(number, "a", False, 2, SLOT, SIZE, size, positions, positions)
    rig.mover.start(asked)
    rig.steps()
    assert rig.agent.started == [("a", 1)] * 3
    assert rig.ended()[number].error is None


def test_a_peer_that_hangs_is_in_nobodys_way(rig: Rig) -> None:
    rig.agent.slow.add("a")
    stuck = rig.start("a", 64)
    fine = rig.start("b", 64)
    for _ in range(40):
        rig.mover.step()
    assert Counter(peer for peer, _ in rig.agent.started) == {"a": FLIGHTS_MAX, "b": 16}
    assert set(rig.ended()) == {fine}
    assert rig.mover.nap_s == NAP_S
    rig.now_s += 1
    assert rig.mover.nap_s == LONG_NAP_S, "and takes no core"
    rig.agent.slow.clear()
    rig.now_s += 4
    rig.steps()
    assert rig.ended()[stuck] == Ended(stuck, 64 * SLOT)


def test_nothing_is_asked_of_a_peer_that_is_gone_until_it_is_met_afresh(rig: Rig) -> None:
    rig.start("a", 4)
    rig.steps()
    rig.agent.broken["a"] = "gone"
    numbers = [rig.start("a", 64) for _ in range(5)]
    other = rig.start("b", 64)
    rig.steps()
    numbers.append(rig.start("a", 1))
    ended = rig.ended()
    assert {ended[number].error for number in numbers} == {"gone"}
    assert ended[other].error is None
    assert [peer for peer, _ in rig.agent.started].count("a") == 2, "asked once"
    rig.agent.broken.clear()
    rig.mover.add_peer("a", b"a")
    assert rig.agent.forgotten == {"a": 1}
    number = rig.start("a", 1)
    rig.steps()
    assert rig.ended()[number].error is None


def test_what_fails_ends_when_nothing_of_it_is_under_way(rig: Rig) -> None:
    rig.agent.slow.add("a")
    number = rig.start("a", 3 * PER_CHUNK)
    rig.mover.step()
    rig.mover.step()
    rig.mover.abandon(number)
    rig.mover.step()
    assert not rig.ended()
    assert len(rig.agent.started) == 2, "nothing more is started"
    rig.agent.slow.clear()
    rig.agent.broken["a"] = "gone"
    rig.steps()
    (ended,) = rig.ended().values()
    assert (ended.error, ended.bytes) == ("gone", 0), "what was under way has not ended well"


def test_what_is_stopped_says_so_when_what_had_begun_has_ended_well(rig: Rig) -> None:
    rig.agent.slow.add("a")
    number = rig.start("a", 3 * PER_CHUNK)
    rig.mover.step()
    rig.mover.abandon(number)
    rig.mover.step()
    assert not rig.ended()
    rig.agent.slow.clear()
    rig.steps()
    (ended,) = rig.ended().values()
    assert (ended.error, ended.bytes) == ("stopped", PER_CHUNK * SLOT)


def test_a_peer_is_forgotten_once_nothing_is_under_way(rig: Rig) -> None:
    rig.agent.slow.add("a")
    number = rig.start("a", 64)
    rig.mover.step()
    rig.mover.remove_peer("a")
    rig.mover.step()
    assert not rig.agent.forgotten
    refused = rig.start("a", 1)
    assert rig.ended()[refused].error == "refused"
    rig.agent.slow.clear()
    rig.steps()
    assert rig.agent.forgotten == {"a": 1}
    assert rig.ended()[number].error == "gone"
    assert list(rig.mover._peers) == ["b"]


def test_what_a_peer_adds_is_added_and_met_afresh_only_where_it_has_to_be(rig: Rig) -> None:
    rig.start("a", 8)
    rig.steps()
    rig.mover.add_peer("a", b"a")
    assert "a" not in rig.agent.lists.values(), "its memory may be elsewhere"
    assert rig.agent.peers["a"] == 2
    assert not rig.agent.forgotten
    rig.agent.unknown.add("a")  # what NIXL knew before is in the way
    rig.agent.slow.add("a")
    number = rig.start("a", 8)
    rig.steps(20)
    assert rig.agent.forgotten == {"a": 1}
    rig.agent.slow.clear()
    rig.steps()
    assert rig.ended()[number].error is None
    rig.agent.unknown.add("a")
    rig.mover._drop_blocks(rig.mover._peers["a"])
    number = rig.start("a", 8)
    rig.steps()
    assert rig.ended()[number].error == "refused", "afresh it is what it is"
    assert rig.agent.forgotten == {"a": 1}


def test_S2_the_store_is_told_whose_metadata_is_read_before_it_is() -> None:
    """For that may end the process."""
    store, ours = socket.socketpair()
    agent = FakeAgent()
    heard: list[Message] = []

    def add_peer(metadata: bytes) -> str:
        heard.extend(Decoder(ToStore).feed(store.recv(4096)))
        raise MoveError(metadata.decode(), "refused")

    agent.add_peer = add_peer  # type: ignore[method-assign]
    store.setblocking(False)
    with store, ours:
        server = under_test.Server(ours, agent)
        server._do(Peer("a", b"no"))
        assert heard == [Meets("a")]
        heard += Decoder(ToStore).feed(store.recv(4096))
        assert heard[1:] == [Meets()], "and when it has been read"


def test_metadata_that_cannot_be_used_or_is_anothers(rig: Rig) -> None:
    rig.mover.add_peer("bad", b"bad")
    rig.mover.add_peer("alias", b"another")
    rig.mover.add_peer("alias2", b"a")
    assert rig.met == ["a", None, "b", None, "bad", None, "alias", None, "alias2", None]
    assert rig.agent.forgotten == {"another": 1}, "and a is still known"
    wrong = {
        "bad": "bad",
        "alias": "metadata of 'another', expected 'alias'",
        "alias2": "metadata of 'a', expected 'alias2'",
    }
    for peer, text in wrong.items():
        number = rig.start(peer, 1)
        assert rig.ended()[number] == Ended(number, 0, "gone", text)


def test_memory_is_unmapped_once_nothing_is_under_way_there(rig: Rig) -> None:
    rig.agent.slow.add("a")
    number = rig.start("a", 64)
    other = rig.start("a", 4, extent=1)
    rig.mover.step()
    waiting = rig.start("b", 64)
    rig.mover.remove_extent(2)
    assert rig.ended()[waiting].error == "refused"
    rig.steps(10)
    assert Mapped(2) not in rig.said
    assert len(rig.agent.regions) == 2
    late = rig.start("b", 1)
    assert rig.ended()[late].error == "refused"
    rig.agent.slow.clear()
    rig.steps()
    assert rig.said.index(Mapped(2)) > rig.said.index(rig.ended()[number])
    assert rig.ended()[other].error is None
    assert len(rig.agent.regions) == 1
    rig.mover.remove_extent(2)
    assert rig.said.count(Mapped(2)) == 1


class Anything:
    """Things that happen to a mover, by chance."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig()
        self.started: list[int] = []
        often = (self.start, self.start, self.start, self.add, self.slow, self.heals)
        self.things = (*often, self.remove, self.breaks, self.abandon, self.remap, self.lost)

    @property
    def seldom(self) -> bool:
        return self.rng.random() < 0.3

    def happens(self) -> None:
        self.rng.choice(self.things)(self.rng.choice("abcd"))
        self.rig.mover.step()

    def start(self, peer: str) -> None:
        extent = self.rng.choice((1, 2, 2))
        self.started.append(self.rig.start(peer, self.rng.randrange(1, 40), extent))

    def add(self, peer: str) -> None:
        self.rig.mover.add_peer(peer, peer.encode())

    def remove(self, peer: str) -> None:
        if self.seldom and peer in self.rig.mover._peers:
            self.rig.mover.remove_peer(peer)

    def slow(self, peer: str) -> None:
        self.rig.agent.slow ^= {peer}

    def breaks(self, peer: str) -> None:
        if self.seldom:
            self.rig.agent.broken[peer] = self.rng.choice(("gone", "refused", "failed"))

    def heals(self, peer: str) -> None:
        self.rig.agent.broken.pop(peer, None)

    def abandon(self, _peer: str) -> None:
        if self.started:
            self.rig.mover.abandon(self.rng.choice(self.started))

    def remap(self, _peer: str) -> None:
        number = self.rng.choice((1, 2))
        if self.seldom:
            self.rig.mover.remove_extent(number)
            if number not in self.rig.mover.extents:
                self.rig.map(number)

    def lost(self, peer: str) -> None:
        if self.seldom:
            self.rig.agent.unknown ^= {peer}


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_each_transfer_ends_once_and_nothing_is_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "CHUNK_BYTES", PER_CHUNK * SLOT)
    anything = Anything(seed)
    rig = anything.rig
    for _ in range(400):
        anything.happens()
    rig.agent.slow.clear()
    rig.steps(5000)
    assert sorted(rig.ended()) == anything.started
    assert not rig.agent.flights
    for peer in list(rig.mover._peers):
        rig.mover.remove_peer(peer)
    for number in (1, 2):
        rig.mover.remove_extent(number)
    assert not rig.agent.regions
    assert not rig.agent.lists
    assert not rig.agent.peers
    rig.close()


def test_the_first_transfer_over_an_extent_does_not_wait_for_its_pages() -> None:
    size = 16 << 20
    memory = CpuExtent(size + 8192, size)
    for writable in (True, False):
        extent = Extent(FakeAgent(), memory.fd, size, writable=writable)
        pages = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(extent.address))[::4096]
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        if writable:
            pages[:] = 1
        else:
            assert pages.sum() == size // 4096
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        del pages  # it is memory that is unmapped now
        extent.close()
        assert faults < size // 4096 // 64
    memory.close()
