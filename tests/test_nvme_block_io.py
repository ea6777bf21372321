"""Blocks between memory and extent files: the threads that move them, and how many there are."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.config import NvmeConfig
from kvstore.testing import SLOT_BYTES, content
from tests.harness.nvme_blocks import MIB, shelf
from tests.harness.nvme_trouble import raise_eio
from tests.harness.patience import WAIT_S
from tiers.nvme import block_io
from tiers.nvme.block_io import Move, ThreadMover
from tiers.nvme.files import ExtentFile
from tiers.nvme.tier import Run

MOVED_SLOTS = 64
Mover = ThreadMover[Any]


class CheckedMove(Move, eq=False):
    """A move whose sums are CRC-32, and that counts how often they were made."""

    summed: int = 0

    def checksums(self) -> list[int]:
        self.summed += 1
        return [zlib.crc32(block) for block in self.blocks]


class FakeFile:
    """An extent that notes calls and moves nothing; writes wait for go."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.under = self.most = 0  # writes under way
        self.go = threading.Event()
        self._lock = threading.Lock()

    def read(self, _position: int, _blocks: list[memoryview]) -> None:
        time.sleep(0.0005)
        self.calls.append("read")

    def write(self, _position: int, _blocks: list[memoryview]) -> None:
        with self._lock:
            self.under += 1
            self.most = max(self.most, self.under)
        self.go.wait(600)
        with self._lock:
            self.under -= 1
            self.calls.append("write")

    def moves(self, count: int, *, store: bool) -> list[CheckedMove]:
        block = memoryview(bytearray(512))
        return [a_move(cast("ExtentFile", self), 0, [block], store=store) for _ in range(count)]


def a_move(
    file: ExtentFile, position: int, blocks: list[memoryview], *, store: bool = False
) -> CheckedMove:
    return CheckedMove(store, file, position, blocks)


def cut(pages: memoryview) -> list[memoryview]:
    return [pages[at : at + SLOT_BYTES] for at in range(0, len(pages), SLOT_BYTES)]


def run_all(mover: Mover, moves: Sequence[CheckedMove], *, fail: bool = False) -> list[CheckedMove]:
    """Start all moves and wait for their results; without errors, unless some have to fail."""
    for move in moves:
        mover.start(move)
    results: list[CheckedMove] = []
    end = time.monotonic() + WAIT_S
    while len(results) < len(moves) and time.monotonic() < end:
        results.extend(mover.poll())
        time.sleep(0.0005)
    assert len(results) == len(moves)
    assert fail or not any(moved.error for moved in results)
    return results


@pytest.fixture
def mover() -> Iterator[Mover]:
    made = Mover(4, 2)
    yield made
    made.close()


@pytest.fixture
def extent(tmp_path: Path) -> Iterator[ExtentFile]:
    folder = os.open(tmp_path, os.O_RDONLY)
    ExtentFile.make(tmp_path / "000001.extent", MOVED_SLOTS * SLOT_BYTES, folder)
    os.close(folder)
    file = ExtentFile(tmp_path / "000001.extent", SLOT_BYTES, MOVED_SLOTS * SLOT_BYTES)
    yield file
    file.close()


@pytest.fixture
def pages() -> memoryview:
    """Memory that begins at a page."""
    return memoryview(mmap.mmap(-1, 2 * MOVED_SLOTS * SLOT_BYTES))


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, SLOT_BYTES - 8])
def test_what_was_written_is_read_back(
    mover: Mover, extent: ExtentFile, pages: memoryview, start: int, slot_bytes: int
) -> None:
    """Also to and from memory that direct I/O cannot use."""
    file = ExtentFile(extent.path, slot_bytes, extent.bytes)
    blocks = [pages[at : at + slot_bytes] for at in range(start, 6 * SLOT_BYTES, 2 * SLOT_BYTES)]
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


def test_each_move_has_one_result_with_the_sums_of_its_blocks(
    mover: Mover, extent: ExtentFile, pages: memoryview
) -> None:
    blocks = cut(pages)
    moves = [
        a_move(extent, at, [blocks[at if at % 3 else at + MOVED_SLOTS]], store=at % 3 == 0)
        for at in range(MOVED_SLOTS)
    ]
    results = run_all(mover, moves)
    assert sorted(map(id, results)) == sorted(map(id, moves))
    assert all(moved.sums == [zlib.crc32(moved.blocks[0])] for moved in results)
    assert mover.open == 0
    assert list(mover.poll()) == []


def test_O15_sums_are_of_what_is_on_disk_not_of_what_was_in_memory(
    mover: Mover, extent: ExtentFile, pages: memoryview
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
    mover: Mover, extent: ExtentFile, pages: memoryview
) -> None:
    blocks = cut(pages)
    os.truncate(extent.path, 8 * SLOT_BYTES)
    moves = [a_move(extent, at, [blocks[at]]) for at in range(16)]
    moves.append(a_move(extent, 6, blocks[20:24]))  # two there, two not
    failed = {m.position for m in run_all(mover, moves, fail=True) if m.error is not None}
    assert failed == {6, *range(8, 16)}
    assert not any(m.error for m in run_all(mover, moves[:6]))


def test_O15_a_bug_in_one_move_is_its_error(
    mover: Mover, extent: ExtentFile, pages: memoryview
) -> None:
    blocks = cut(pages)
    moves = [a_move(extent, at, [blocks[at]], store=at % 2 == 0) for at in range(12)]
    for broken in (moves[4], moves[7]):
        broken.blocks = [memoryview(bytes(SLOT_BYTES))]  # cannot be written to
    results = run_all(mover, moves, fail=True)
    assert {m.position for m in results if m.error is not None} == {4, 7}
    assert len(results) == 12


@pytest.mark.parametrize("store", [False, True])
def test_Q22_a_move_that_failed_keeps_no_memory(
    mover: Mover, extent: ExtentFile, monkeypatch: pytest.MonkeyPatch, *, store: bool
) -> None:
    """Its error is kept, and is in a circle that no collection looks for."""
    memory = mmap.mmap(-1, MOVED_SLOTS * SLOT_BYTES)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", raise_eio)
        patched.setattr(os, "preadv", raise_eio)
        move = a_move(extent, 0, cut(memoryview(memory))[:4], store=store)
        gc.disable()
        try:
            (failed,) = run_all(mover, [move], fail=True)
            assert isinstance(failed.error, OSError)
            failed.blocks.clear()  # as a tier does
            memory.close()
        finally:
            gc.enable()


def test_reads_go_before_writes(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_io, "READS_FIRST_S", WAIT_S)
    file = FakeFile()
    file.go.set()
    run_all(mover, [*file.moves(24, store=False), *file.moves(8, store=True)])
    assert file.calls == ["read"] * 24 + ["write"] * 8


def test_reads_hold_a_write_for_a_moment_only(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_io, "READS_FIRST_S", 0.005)
    file = FakeFile()
    file.go.set()
    reads = file.moves(2000, store=False)
    run_all(mover, [*reads[:100], *file.moves(1, store=True), *reads[100:]])
    assert file.calls.index("write") < len(file.calls) - 100


def test_sums_of_the_next_runs_are_taken_while_others_write(mover: Mover) -> None:
    file = FakeFile()
    moves = file.moves(6, store=True)
    for move in moves:
        mover.start(move)
    end = time.monotonic() + WAIT_S
    while (sum(move.summed for move in moves), file.under) != (6, 2):
        assert time.monotonic() < end, file.under
        time.sleep(0.001)
    file.go.set()
    mover.close()
    assert (len(mover.poll()), file.most) == (6, 2)


# One request's blocks


@pytest.mark.parametrize(
    ("threads", "slots", "runs"),
    [
        (4, 64, [16, 16, 16, 16]),  # 8 MiB: all threads read
        (4, 6, [4, 2]),  # a run has 512 KiB at least
        (1, 64, [32, 32]),  # and 4 MiB at most
        (64, 64, [4] * 16),
    ],
)
def test_one_request_is_spread_over_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, slots: int, runs: list[int]
) -> None:
    settings = NvmeConfig(
        str(tmp_path / "kv"), 64 * MIB, 16 * MIB, 20_000_000, threads, 10**10, None
    )
    with shelf(settings, slot_bytes=128 << 10) as found:
        found.put(1, 0, 64)
        seen: list[int] = []
        start = found.disk.start

        def counted(run: Run) -> None:
            seen.append(len(run.blocks))
            start(run)

        monkeypatch.setattr(found.disk, "start", counted)
        assert found.whole(1, slots)
        assert seen == runs
