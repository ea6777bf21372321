"""Exporters of two stores, as real processes: blocks arrive whole, and what is wrong is said."""

from __future__ import annotations

import os
import random
import resource
import select
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvstore.wire import framing
from kvstore.wire.framing import Message, u32
from tests.harness.exporter_rig import (
    EXPORT,
    KIB,
    LANDING,
    MIB,
    Side,
    end,
    filled,
    shuffled,
    start_all,
    wait,
)
from tests.harness.patience import WAIT_S
from tiers.nixl import messages as m
from tiers.nixl.supervisor import Child

TRANSPORTS = {"cma": None, "tcp": "tcp,self"}
BLOCKS = (4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB, 5000)


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    transports = TRANSPORTS[request.param]
    sides = Side("decode", transports, seed=1), Side("prefill", transports, seed=2)
    start_all(*sides)
    yield sides
    for side in sides:
        side.close()


@pytest.mark.parametrize("block_bytes", BLOCKS)
@pytest.mark.parametrize("write", [False, True])
def test_blocks_arrive_whole_where_they_should_and_nowhere_else(
    pair: tuple[Side, Side], block_bytes: int, write: bool
) -> None:
    ours, theirs = pair
    source, target = (ours, theirs) if write else (theirs, ours)
    target.clear()
    rng = random.Random(block_bytes)
    of = ours.size // block_bytes
    pairs = shuffled(rng, max(1, of // 2), of)
    done = end(ours, ours.start(theirs, pairs, write=write, block_bytes=block_bytes))
    assert (done.error, done.bytes) == (None, len(pairs) * block_bytes), done.text
    moved = {(there if write else here): (here if write else there) for here, there in pairs}
    for position in range(of):
        found = target.block(LANDING, position, block_bytes)
        if position in moved:
            assert found == source.block(EXPORT, moved[position], block_bytes)
        else:
            assert not any(found)


def test_many_transfers_both_ways_at_once(pair: tuple[Side, Side]) -> None:
    """B14: completion of each is reported exactly once."""
    ours, theirs = pair
    ours.clear()
    theirs.clear()
    rng = random.Random(3)
    quarters = [
        [(here + at, there + at) for here, there in shuffled(rng, 20, ours.count // 4)]
        for at in range(0, ours.count - 3, ours.count // 4)
    ]
    numbers = {
        side: [side.start(other, quarter, write=False) for quarter in quarters]
        for side, other in ((ours, theirs), (theirs, ours))
    }
    wait(ours, lambda: not ours.exporter._open and not theirs.exporter._open)
    for side, other in ((ours, theirs), (theirs, ours)):
        for number, quarter in zip(numbers[side], quarters, strict=True):
            assert side.ended[number].error is None
            for here, there in quarter:
                block = side.memory[LANDING].slot(here)
                assert block == other.memory[EXPORT].slot(there)


def moves(ours: Side, theirs: Side) -> dict[str, tuple[m.Transfer, str, str]]:
    """What is wrong, the error's class, and what it has to name."""
    at, size = theirs.addresses[EXPORT], theirs.size
    good = m.Transfer(0, theirs.name, False, LANDING, at, size, 64 * KIB, u32([0]), u32([1]))
    of = ours.size // (64 * KIB)

    but = partial(msgspec.structs.replace, good)
    return {
        "peer": (but(peer="nobody"), "refused", "peer 'nobody', expected one of"),
        "extent": (but(extent=9), "refused", "extent 9, expected one of [1, 2]"),
        "read-only": (but(extent=EXPORT), "refused", "a read into extent 1, expected a writable"),
        "local": (but(local=u32([of])), "refused", f"local position {of}, expected 0 to {of - 1}"),
        "remote": (but(remote=u32([of])), "refused", f"remote position {of}, expected 0 to"),
        "negative": (but(local=u32([(1 << 32) - 1])), "refused", "local position 4294967295"),
        "counts": (but(local=u32([0, 1])), "refused", "2 local and 1 remote blocks"),
        "nothing": (but(local=b"", remote=b""), "refused", "0 local and 0 remote blocks"),
        "odd": (but(remote=b"12345"), "refused", "5 bytes of remote positions"),
        "no block": (but(block_bytes=0), "refused", "blocks of 0 bytes, expected 1 to"),
        "large block": (but(block_bytes=1 << 40), "refused", f"blocks of {1 << 40} bytes"),
        "address": (but(address=0), "refused", "bytes at 0x0, expected 1 to 2^63"),
        "overflow": (but(address=(1 << 64) - 1), "refused", "at 0xffffffffffffffff"),
        "elsewhere": (but(address=1 << 20), "refused", "are not registered memory of prefill"),
        "too long": (but(region_bytes=2 * theirs.size), "refused", "are not registered memory"),
    }


def test_what_is_asked_wrongly_is_refused_with_found_and_expected(pair: tuple[Side, Side]) -> None:
    ours, theirs = pair
    for what, (move, error, text) in moves(ours, theirs).items():
        done = end(ours, ours.exporter.start(move))
        assert (done.error, done.bytes) == (error, 0), what
        assert text in done.text, what
    assert end(ours, ours.start(theirs, [(0, 1)])).error is None


def test_metadata_that_is_none_or_anothers_is_refused(pair: tuple[Side, Side]) -> None:
    ours, theirs = pair
    ours.exporter.add_peer("random", random.Random(1).randbytes(400))
    ours.exporter.add_peer("alias", theirs.metadata)
    ours.exporter.add_peer("empty", b"")
    ours.exporter.add_peer(ours.name, ours.metadata)
    for peer in ("random", "alias", "empty", ours.name):
        done = end(ours, ours.start(theirs, [(0, 1)], name=peer))
        assert done.error == "gone", peer
        if peer == "alias":
            assert done.text == f"metadata of '{theirs.name}', expected 'alias'"
        ours.exporter.remove_peer(peer)
    assert end(ours, ours.start(theirs, [(0, 1)])).error is None
    ours.events.clear()


NOT_FOR_PEERS = "only-for-the-store"


class Told:
    """A process that is told anything."""

    def __init__(self) -> None:
        self.child = Child(select.epoll(), "told", "lo", None)
        self.said: list[Message] = []
        self.until(m.Ready)

    def hear(self) -> None:
        self.said += self.child.receive()
        self.child.flush()

    def until(self, kind: type[Message], count: int = 1) -> list[Message]:
        """Listen until there are so many messages of a kind."""
        started = time.monotonic()
        while len(found := [one for one in self.said if isinstance(one, kind)]) < count:
            assert time.monotonic() - started < WAIT_S
            time.sleep(0.001)
            self.hear()
        return found

    def close(self) -> None:
        self.child.kill()
        assert self.child.ended(WAIT_S)
        self.child.close()


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTER_KEY", NOT_FOR_PEERS)
        told = Told()
    yield told
    told.close()


def test_only_sealed_memory_that_is_there_is_mapped(told: Told) -> None:
    extent = filled(MIB, 4 * KIB, 1)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, MIB)
    pipe, pipe_in = os.pipe()
    told.said.clear()
    told.child.send(m.Map(9))  # it could not be mapped, say, before its store knew
    for number, (fd, size) in enumerate([(extent.fd, extent.bytes + 1), (loose, MIB), (pipe, 1)]):
        told.child.send(m.Map(10 + number, size), fd)
    found = [one.text for one in told.until(m.Mapped, 3) if isinstance(one, m.Mapped)]
    assert found[0] == f"{extent.bytes + 1} bytes to map, expected 1 to {extent.bytes}, its size"
    assert found[1] == "seals 0x0, expected F_SEAL_SHRINK among them"
    assert found[2].startswith("expected a memfd, found none")
    descriptors = Path(f"/proc/{told.child.pid}/fd")
    assert not [one for one in descriptors.iterdir() if "memfd" in str(one.readlink())]
    for fd in (loose, pipe, pipe_in):
        os.close(fd)
    extent.close()


def test_none_of_the_stores_environment_is_in_its_memory(told: Told) -> None:
    """Peers can read all of that."""
    found = Path(f"/proc/{told.child.pid}/environ").read_bytes()
    assert b"UCX_NET_DEVICES=lo" in found
    assert b"UCX_USE_MT_MUTEX=y" in found, "its threads sleep on UCX's lock"
    assert NOT_FOR_PEERS.encode() not in found


WRONG = {
    struct.pack("<I", 1 << 30): f"frame of {1 << 30} bytes, at most {framing.FRAME_BYTES_MAX}",
    struct.pack("<I", 7)
    + b"nothing": "not a message of this protocol: Expected `array`, got `int`",
}


@pytest.mark.parametrize("said", WRONG, ids=["no frame", "no message"])
def test_it_ends_after_what_its_store_cannot_say(said: bytes) -> None:
    told = Told()
    told.child.outbox.put(said)
    told.child.flush()
    (fatal,) = told.until(m.Fatal)
    assert isinstance(fatal, m.Fatal)
    assert fatal.text.startswith(WRONG[said])
    assert told.child.ended(WAIT_S) == "it ended with 1"
    told.close()


def test_S2_it_ends_when_the_descriptor_of_an_extent_was_lost() -> None:
    """Else another extent's memory would be found under its number."""
    told, extent = Told(), filled(MIB, 4 * KIB, 1)
    used = len(list(Path(f"/proc/{told.child.pid}/fd").iterdir()))
    resource.prlimit(told.child.pid, resource.RLIMIT_NOFILE, (used, used))
    told.child.send(m.Map(1, extent.bytes), extent.fd)
    assert told.until(m.Fatal) == [m.Fatal("a descriptor was lost: none is left here")]
    told.close()
    extent.close()
