"""What moves a hand-over's bytes, by itself: its threads, and when it wants to be polled."""

from __future__ import annotations

import random
import select
import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.core.layout import PageRun
from kvstore.core.types import BlockKey
from kvstore.handover.checksums import block_sum, copied_sum
from kvstore.handover.peers import Peers
from kvstore.handover.runs import Part
from kvstore.handover.side_channel import Channel
from kvstore.handover.transfers import (
    Checked,
    Event,
    Slots,
    Summed,
    Transfers,
    Written,
    batch_blocks,
    pieces,
)
from kvstore.units import KIB, MIB
from kvstore.wire import peer as m
from kvstore.wire.framing import u32
from tests.harness.patience import WAIT_S
from tiers.nixl.messages import Fill

KEY = BlockKey(b"k" * 34)


@pytest.fixture
def mover() -> Iterator[Transfers]:
    made = Transfers("test", "lo", 4 * MIB)
    yield made
    made.close()


def block(size: int, seed: int = 1) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


def woken(mover: Transfers, kind: type[Event]) -> list[Event]:
    """What polls bring until one of a kind comes; between them only descriptors are watched."""
    found: list[Event] = []
    while not any(isinstance(event, kind) for event in found):
        ready, _, _ = select.select(mover.fds(), [], [], WAIT_S)
        assert ready, "nobody was woken up"
        found += mover.poll(time.monotonic_ns())
    return [event for event in found if isinstance(event, kind)]


def test_a_sum_that_was_taken_wakes_the_loop_and_is_not_looked_for(mover: Transfers) -> None:
    part, data = Part(1, 1, range(1)), block(MIB)
    mover.sum(part, "namespace", [KEY], Slots(lambda _: data, [0]), MIB)
    expected = array("Q", [block_sum("namespace", KEY, data)])
    assert woken(mover, Summed) == [Summed(part, expected)]
    _, told = mover.fds()
    end = time.monotonic() + WAIT_S
    while select.select([told], [], [], 0)[0]:  # the thread may still be waking the loop
        assert time.monotonic() < end, "it would be woken up for ever"
        mover.poll(time.monotonic_ns())


@pytest.mark.parametrize("size", [1, 4 * KIB, 256 * KIB, 256 * KIB + 1, 3 * MIB])
def test_a_landed_block_is_copied_and_its_sum_is_that_of_the_copy(
    mover: Transfers, size: int
) -> None:
    landed, slots = block(size), [memoryview(bytearray(size)) for _ in range(2)]
    right = block_sum("namespace", KEY, landed)
    mover.landing("namespace", size)
    sums = [right, right ^ 1]
    views = Slots(lambda _: landed, [0, 1]), Slots(lambda slot: slots[slot], [0, 1])
    mover.check(Part(1, 1, range(2)), "namespace", [KEY, KEY], sums, *views)
    right_of: dict[int, bool] = {}
    while len(right_of) < len(sums):
        for event in woken(mover, Checked):
            assert isinstance(event, Checked)
            right_of |= zip(event.part.positions, event.right, strict=True)
    assert right_of == {0: True, 1: False}
    assert slots[0] == landed


def test_what_is_written_after_the_copy_is_neither_in_it_nor_in_its_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, target, copy = block(600 * KIB), memoryview(bytearray(600 * KIB)), np.copyto
    expected, right = bytes(data), block_sum("namespace", KEY, data)

    def late(to: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> None:
        copy(to, of)
        of[:] ^= 1  # a peer that writes for too long

    monkeypatch.setattr(np, "copyto", late)
    assert copied_sum("namespace", KEY, data, target) == right
    assert target == expected


@pytest.mark.parametrize(
    ("count", "block_bytes", "expected"),
    [
        (1, 4 * KIB, [1]),
        (255, 64 * KIB, [64, 64, 64, 63]),
        (128, 64 * KIB, [64, 64]),
        (160, 64 * KIB, [64, 64, 32]),  # no less than 4 MiB
        (128, 2 * MIB, [16] * 8),  # no more than 32
        (3, 16 * MIB, [1, 1, 1]),
    ],
)
def test_batches_are_small_enough_to_begin_and_large_enough_to_be_worth_it(
    count: int, block_bytes: int, expected: list[int]
) -> None:
    blocks = range(count)
    parts = [blocks[part] for part in pieces(count, batch_blocks(block_bytes, count))]
    assert [len(part) for part in parts] == expected
    assert [number for part in parts for number in part] == list(blocks)


def test_a_sum_names_its_block() -> None:
    data, target = block(300 * KIB), memoryview(bytearray(300 * KIB))
    right = copied_sum("namespace", KEY, data, target)
    assert right == block_sum("namespace", KEY, data) == block_sum("namespace", KEY, target)
    assert right != copied_sum("other", KEY, data, target)
    assert right != copied_sum("namespace", BlockKey(b"l" * 34), data, target)
    data[-1] ^= 1
    assert right != copied_sum("namespace", KEY, data, target)


def test_what_has_arrived_on_the_side_channel_is_not_slept_over(mover: Transfers) -> None:
    peers, other = Peers(None, mover, MIB), Channel(None, lambda *_: None, lambda *_: None)
    try:
        peers.channel.listen("127.0.0.1", 0)
        number = other.connect(peers.channel.address)
        mover.poll(time.monotonic_ns())  # the exporter is starting, and nothing is known of it yet
        assert peers.wait_s(time.monotonic_ns()) != 0
        other.send(number, m.Settle(1, 0))
        ready, _, _ = select.select([peers], [], [], WAIT_S)
        assert ready
    finally:
        peers.channel.close()
        other.close()


class Exporter:
    """Takes note of what is started, and abandoned."""

    def __init__(self) -> None:
        self.started: list[Fill] = []
        self.abandoned: list[int] = []

    def start(self, move: Fill) -> int:
        self.started.append(move)
        return len(self.started)

    def abandon(self, number: int) -> None:
        self.abandoned.append(number)


def test_a_block_that_goes_to_several_ranks_is_abandoned_in_each_write(mover: Transfers) -> None:
    real, fake = mover.exporter, Exporter()
    mover.exporter = fake  # type: ignore[assignment]
    pages = (PageRun(0, 64, 1, 1 << 20, 64, 0),)
    part = Part(1, 1, range(2))
    for rank in range(3):
        parts = array("Q", [0, 4096]).tobytes()
        mover.start(part, Fill(0, f"rank {rank}", 9, pages, parts, u32([5, 6])))
    assert [filling.moved_bytes for filling in fake.started] == [128] * 3
    mover._ended(1, 128, None)
    mover.abandon(Part(1, 1, [0]))
    assert not fake.abandoned, "the other block is wanted"
    mover.abandon(Part(1, 1, [1]))
    assert fake.abandoned == [2, 3]
    assert mover._ended(2, 64, "stopped") == Written(part, ok=False, stopped=True)
    assert mover._ended(3, 0, "failed") == Written(part, ok=False)
    assert not mover._moving
    assert mover.moved_bytes == {"pushed": 192}
    mover.exporter = real
