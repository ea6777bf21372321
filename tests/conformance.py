"""What moves blocks between memory and extent files owes the NVMe tier, as tests."""

from __future__ import annotations

import mmap
import os
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.testing import SLOT_BYTES, content
from tests.harness.patience import WAIT_S
from tiers.nvme import block_io as threads_mover
from tiers.nvme import nixl_mover
from tiers.nvme.block_io import Move, Moved, Mover
from tiers.nvme.files import Descriptor, ExtentFile, open_direct

MOVED_SLOTS = 64
MOVER_MODULES = (threads_mover, nixl_mover)


class MoverContract:
    """What moves blocks between memory and extent files owes the tier."""

    @pytest.fixture
    def mover(self) -> Mover[Any]:
        raise NotImplementedError

    @pytest.fixture
    def extent(self, tmp_path: Path) -> Iterator[ExtentFile]:
        folder = os.open(tmp_path, os.O_RDONLY)
        ExtentFile.make(tmp_path / "000001.extent", MOVED_SLOTS * SLOT_BYTES, folder)
        os.close(folder)
        file = ExtentFile(tmp_path / "000001.extent", SLOT_BYTES, MOVED_SLOTS * SLOT_BYTES)
        yield file
        file.close()

    @pytest.fixture
    def pages(self) -> memoryview:
        """Memory that begins at a page."""
        return memoryview(mmap.mmap(-1, 2 * MOVED_SLOTS * SLOT_BYTES))

    @pytest.mark.parametrize("start", [0, 1])
    @pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, SLOT_BYTES - 8])
    def test_what_was_written_is_read_back(
        self, mover: Mover[Any], extent: ExtentFile, pages: memoryview, start: int, slot_bytes: int
    ) -> None:
        """Also to and from memory that direct I/O cannot use."""
        file = ExtentFile(extent.path, slot_bytes, extent.bytes)
        blocks = [
            pages[at : at + slot_bytes] for at in range(start, 6 * SLOT_BYTES, 2 * SLOT_BYTES)
        ]
        for number, block in enumerate(blocks):
            block[:] = content(number)[:slot_bytes]
        run_all(mover, [a_move(file, 4, blocks, store=True)])
        for block in blocks:
            block[:] = bytes(slot_bytes)
        run_all(mover, [a_move(file, 5, blocks[:2]), a_move(file, 4, blocks[2:])])
        assert [bytes(block) for block in blocks] == [
            content(number)[:slot_bytes] for number in (1, 2, 0)
        ]
        file.close()

    def test_runs_reach_their_own_slots_only(
        self, mover: Mover[Any], extent: ExtentFile, pages: memoryview
    ) -> None:
        blocks = cut(pages)
        for number, block in enumerate(blocks[:MOVED_SLOTS]):
            block[:] = content(number)
        places = list(range(0, MOVED_SLOTS, 4))
        random.Random(1).shuffle(places)
        run_all(mover, [a_move(extent, at, blocks[at : at + 4], store=True) for at in places])
        assert extent.path.read_bytes() == bytes(pages[: extent.bytes])
        away = blocks[MOVED_SLOTS:]
        run_all(mover, [a_move(extent, at, away[at : at + 4]) for at in reversed(places)])
        assert pages[extent.bytes :] == pages[: extent.bytes]

    def test_each_move_has_one_result_with_the_sums_of_its_blocks(
        self, mover: Mover[Any], extent: ExtentFile, pages: memoryview
    ) -> None:
        blocks = cut(pages)
        moves = [
            a_move(extent, at, [blocks[at if at % 3 else at + MOVED_SLOTS]], store=at % 3 == 0)
            for at in range(MOVED_SLOTS)
        ]
        results = run_all(mover, moves)
        assert sorted(id(moved.run) for moved in results) == sorted(map(id, moves))
        assert all(moved.sums == [zlib.crc32(moved.run.blocks[0])] for moved in results)
        assert mover.open == 0
        assert list(mover.poll()) == []

    def test_O15_sums_are_of_what_is_on_disk_not_of_what_was_in_memory(
        self, mover: Mover[Any], extent: ExtentFile, pages: memoryview
    ) -> None:
        block = pages[:SLOT_BYTES]
        block[:] = content(1)
        (written,) = run_all(mover, [a_move(extent, 0, [block], store=True)])
        with extent.path.open("r+b") as file:
            file.write(b"\xff")
        (read,) = run_all(mover, [a_move(extent, 0, [block])])
        assert written.sums == [zlib.crc32(content(1))]
        assert read.sums == [zlib.crc32(b"\xff" + content(1)[1:])]

    def test_O15_what_cannot_be_moved_fails_in_its_result_alone(
        self, mover: Mover[Any], extent: ExtentFile, pages: memoryview
    ) -> None:
        blocks = cut(pages)
        os.truncate(extent.path, 8 * SLOT_BYTES)
        moves = [a_move(extent, at, [blocks[at]]) for at in range(16)]
        moves.append(a_move(extent, 6, blocks[20:24]))  # two there, two not
        failed = {m.run.position for m in run_all(mover, moves, fail=True) if m.error is not None}
        assert failed == {6, *range(8, 16)}
        assert not any(m.error for m in run_all(mover, moves[:6]))

    def test_O15_a_bug_in_one_move_is_its_error(
        self, mover: Mover[Any], extent: ExtentFile, pages: memoryview
    ) -> None:
        blocks = cut(pages)
        moves = [a_move(extent, at, [blocks[at]], store=at % 2 == 0) for at in range(12)]
        for broken in (moves[4], moves[7]):
            broken.blocks = [memoryview(bytes(SLOT_BYTES))]  # cannot be written to
        results = run_all(mover, moves, fail=True)
        assert {m.run.position for m in results if m.error is not None} == {4, 7}
        assert len(results) == 12

    def test_reads_go_before_writes(
        self,
        mover: Mover[Any],
        extent: ExtentFile,
        pages: memoryview,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for module in MOVER_MODULES:
            monkeypatch.setattr(module, "READS_FIRST_S", WAIT_S)
        blocks, order = cut(pages), list[str]()
        written = noted(extent, order)
        moves = [a_move(extent, at, [blocks[at]]) for at in range(24)]
        for move in moves:
            move.seen = order
        moves += [a_move(written, at, [blocks[at]], store=True) for at in range(24, 32)]
        run_all(mover, moves)
        written.close()
        assert order == ["read"] * 24 + ["write"] * 8

    def test_reads_hold_a_write_for_a_moment_only(
        self,
        mover: Mover[Any],
        extent: ExtentFile,
        pages: memoryview,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for module in MOVER_MODULES:
            monkeypatch.setattr(module, "READS_FIRST_S", 0.005)
        blocks, order = cut(pages), list[str]()
        written = noted(extent, order)
        moves = [a_move(extent, at % 40, [blocks[at % 40]]) for at in range(12_000)]
        for move in moves:
            move.seen = order
        moves.insert(100, a_move(written, 40, [blocks[40]], store=True))
        run_all(mover, moves)
        written.close()
        assert order.index("write") < len(order) - 1

    def test_O17_closing_ends_what_was_started(
        self, mover: Mover[Any], extent: ExtentFile, pages: memoryview
    ) -> None:
        block = pages[:SLOT_BYTES]
        block[:] = content(9)
        for at in range(MOVED_SLOTS):
            mover.start(a_move(extent, at, [block], store=True))
        mover.close()
        mover.close()
        assert mover.open == 0
        assert extent.path.read_bytes() == content(9) * MOVED_SLOTS


class CheckedMove(Move, eq=False):
    """A move whose sums are CRC-32, and that notes when they were made."""

    seen: list[str] = msgspec.field(default_factory=list)

    def sums(self) -> list[int]:
        self.seen.append("write" if self.store else "read")
        return [zlib.crc32(block) for block in self.blocks]


class NotedDescriptor(Descriptor):
    """A file that notes when a write takes it."""

    def __init__(self, fd: int, seen: list[str]) -> None:
        super().__init__(fd)
        self._seen = seen

    def take(self) -> int:
        self._seen.append("write")
        return super().take()


def noted(extent: ExtentFile, seen: list[str]) -> ExtentFile:
    """Open an extent once more, only to be written to."""
    file = ExtentFile(extent.path, extent.slot_bytes, extent.bytes)
    file.descriptor.close()
    file.descriptor = NotedDescriptor(open_direct(extent.path), seen)
    return file


def a_move(
    file: ExtentFile, position: int, blocks: list[memoryview], *, store: bool = False
) -> CheckedMove:
    return CheckedMove(store, file, position, blocks)


def cut(pages: memoryview) -> list[memoryview]:
    return [pages[at : at + SLOT_BYTES] for at in range(0, len(pages), SLOT_BYTES)]


def run_all(
    mover: Mover[Any], moves: Sequence[CheckedMove], *, fail: bool = False
) -> list[Moved[Any]]:
    """Start all moves and wait for their results; without errors, unless some have to fail."""
    for move in moves:
        mover.start(move)
    results: list[Moved[Any]] = []
    end = time.monotonic() + WAIT_S
    while len(results) < len(moves) and time.monotonic() < end:
        results.extend(mover.poll())
        time.sleep(0.0005)
    assert len(results) == len(moves)
    assert fail or not any(moved.error for moved in results)
    return results
