"""Exporters of two stores, as real processes: blocks arrive whole, and what is wrong is said."""

from __future__ import annotations

import os
import random
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
    wait(ours, lambda: len(ours.of(m.Wrong)) == 4)
    assert {event.peer for event in ours.of(m.Wrong)} == {
        "random", "alias", "empty", ours.name
    }  # fmt: skip
    alias = next(event for event in ours.of(m.Wrong) if event.peer == "alias")
    assert alias.text == f"metadata of '{theirs.name}', expected 'alias'"
    for peer in ("random", "alias", "empty", ours.name):
        ours.exporter.remove_peer(peer)
    assert end(ours, ours.start(theirs, [(0, 1)])).error is None
    ours.events.clear()


NOT_FOR_PEERS = "only-for-the-store"


class Told:
    """A process that is told anything."""

    def __init__(self) -> None:
        self.child = Child(select.epoll(), "told", "lo", None)
        self.said: list[Message] = []

    def raw(self, body: bytes, fd: int | None = None) -> None:
        self.child.outbox.put(struct.pack("<I", len(body)) + body, fd)
        self.child.flush()
        self.hear()

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


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTER_KEY", NOT_FOR_PEERS)
        told = Told()
    told.until(m.Ready)
    yield told
    told.child.kill()
    assert told.child.ended(WAIT_S)
    told.child.close()


def random_message(rng: random.Random) -> Message:
    """One that can be read, and says anything."""
    number = rng.choice((0, 1, 5, -1, 1 << 31, 1 << 62, (1 << 64) - 1))
    other = rng.choice((0, 1, 4096, 1 << 33, (1 << 63) - 1))
    data = rng.randbytes(rng.randrange(40))
    name = rng.choice(("", "told", "x" * 300, "\0"))
    return rng.choice(
        (
            m.Map(number, number, other, rng.random() < 0.5),
            m.Map(number, None),
            m.Peer(name, data),
            m.Peer(name, None),
            m.Abandon(number),
            m.Transfer(number, name, rng.random() < 0.5, 1, other, number, other, data, data),
        )
    )


def test_anything_that_is_said_is_answered_and_ends_nothing(told: Told) -> None:
    rng = random.Random(5)
    for _ in range(4000):
        body = bytearray(framing.encode(random_message(rng))[4:])
        for _ in range(rng.choice((0, 0, 1, 3))):
            body[rng.randrange(len(body))] = rng.randrange(256)
        told.raw(rng.randbytes(rng.randrange(60)) if rng.random() < 0.2 else bytes(body))
    told.child.send(m.Map(424242, None))
    wrong = "extent 424242 to unmap, expected one of []"
    while m.Wrong(wrong) not in told.until(m.Wrong):  # all before has been read
        told.hear()
    told.said.clear()
    extent = filled(MIB, 4 * KIB, 1)
    told.raw(b"nothing, with something", extent.fd)
    told.child.send(m.Map(77, 1, extent.bytes), extent.fd)
    assert [one.extent for one in told.until(m.Mapped) if isinstance(one, m.Mapped)] == [77]
    assert told.child.ended() is None
    told.child.send(m.Map(77, 2, extent.bytes), extent.fd)
    told.child.send(m.Map(77, None))
    already = "extent 77 is mapped already"
    assert told.until(m.Mapped, 3)[1:] == [m.Mapped(77, text=already), m.Mapped(77)]
    extent.close()


def test_only_sealed_memory_that_is_there_is_mapped(told: Told) -> None:
    extent = filled(MIB, 4 * KIB, 1)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, MIB)
    pipe, pipe_in = os.pipe()
    told.said.clear()
    first = 3  # descriptors were passed in the test before
    for number, (fd, size) in enumerate(
        [(extent.fd, 0), (extent.fd, extent.bytes + 1), (loose, MIB), (pipe, 1)]
    ):
        told.child.send(m.Map(10 + number, first + number, size), fd)
    told.child.send(m.Map(20, first + 9, MIB))  # comes without
    found = [one.text for one in told.until(m.Mapped, 5) if isinstance(one, m.Mapped)]
    assert found[0] == f"0 bytes to map, expected 1 to {extent.bytes}, its size"
    assert found[1] == f"{extent.bytes + 1} bytes to map, expected 1 to {extent.bytes}, its size"
    assert found[2] == "seals 0x0, expected F_SEAL_SHRINK among them"
    assert found[3].startswith("expected a memfd, found none")
    assert found[4].startswith("descriptor 12, expected 7 or a later one")
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


def test_it_ends_when_it_cannot_tell_messages_apart(told: Told) -> None:
    told.said.clear()
    told.child.outbox.put(struct.pack("<I", 1 << 30))
    told.child.flush()
    text = f"frame of {1 << 30} bytes, at most {framing.FRAME_BYTES_MAX}"
    assert told.until(m.Wrong) == [m.Wrong(text, last=True)]
    assert told.child.ended(WAIT_S) == "it ended with 1"
