"""Engine memory, on a GPU or not, moved by NIXL from and to another process, bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from kvstore.core.layout import Move, RankPages
from tests.gpu.peer import BLOCKS, LAYERS, LIMIT_S, PAGE, SLOT, Engine, Peer, Slots, truth
from tests.harness.child import Child

places = pytest.mark.parametrize(
    ("device", "theirs"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda:0", "cuda:0", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "cpu", marks=pytest.mark.gpu),
        pytest.param("cpu", "cuda:0", marks=pytest.mark.gpu),
    ],
)
WRITTEN = truth(2)  # by peers
SOME = [(3, 7), (4, 1), (20, 0), (0, 23)]  # a block there, and one here


class There:
    """A peer in another process, with its engine on a device."""

    def __init__(self, device: str, *, written: bool = False) -> None:
        self.child = Child(partial(Peer, written=written), device, environment={})
        self.rank: RankPages
        self.slots: Slots
        self.rank, self.slots = self.child.call("describe")

    def blocks(self) -> torch.Tensor:
        """What its engine holds now."""
        found = np.frombuffer(self.child.call("blocks"), np.uint8)
        return torch.from_numpy(found.copy()).view(BLOCKS, LAYERS, PAGE)


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, There]]:
    """Those that run, by their device: to start one takes seconds."""
    made: dict[str, There] = {}
    yield made
    for one in made.values():
        one.child.__exit__()


@pytest.fixture
def peer(peers: dict[str, There], theirs: str) -> There:
    if theirs not in peers:
        peers[theirs] = There(theirs)
    return peers[theirs]


def expected(before: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What is there once SOME blocks of a source are, and nothing else has changed."""
    found = before.clone()
    for there, here in SOME:
        found[here] = source[there]
    return found


@places
def test_L1_direct_slots_are_read_into_engine_memory(peer: There, device: str) -> None:
    engine = Engine(device, 5, written=False)
    engine.agent.meet(peer.slots.agent, peer.slots.metadata)
    moves = [(Move(0, here, 0, 0), peer.slots.address + there * SLOT) for there, here in SOME]
    engine.over(engine.agent.read(peer.slots.agent, moves))
    assert torch.equal(engine.blocks(), expected(truth(5), truth(2)))


@places
def test_L1_direct_a_peers_engine_is_read_into_engine_memory(peer: There, device: str) -> None:
    engine = Engine(device, 5, written=False)
    moves = [(Move(0, here, 0, 0), there) for there, here in SOME]
    engine.over(engine.agent.read_engine([peer.rank], moves))
    assert torch.equal(engine.blocks(), expected(truth(5), peer.blocks()))


@places
def test_L1_direct_slots_are_written_to_engine_memory(peer: There, device: str) -> None:
    engine = Engine(device, 5, written=True)
    os.unsetenv("UCX_TLS")  # set for that agent
    peer.child.call("write", engine.rank, SOME)
    assert torch.equal(engine.blocks(), expected(truth(5), truth(2)))


def written_on(writer: There, target: There) -> None:
    """Return while a peer writes all its slots to another one, again and again."""
    writer.child.tell("write_on", target.rank)
    limit = time.monotonic() + LIMIT_S
    while not torch.equal(target.blocks(), WRITTEN):
        assert time.monotonic() < limit, "no block comes"


@places
def test_B20_direct_engines_outlive_their_writers_and_writers_outlive_engines(
    device: str, theirs: str
) -> None:
    """Over a network, and killed in the middle. One that is read does not always outlive that."""
    writer = There(device, written=True)
    for victim in ("target", "writer"):
        target = There(theirs, written=True)
        target.child.call("clear")
        written_on(writer, target)
        if victim == "target":
            target.child.__exit__()
            assert writer.child.answer(), "a failure, and not an end of the process"
            writer.child.call("describe")
        else:
            writer.child.__exit__()
            time.sleep(1.0)  # it hears of it
            assert torch.equal(target.blocks(), WRITTEN)
            target.child.__exit__()
