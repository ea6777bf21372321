"""The Tier contract as tests: a tier's tests subclass TierContract and give it a `tier`.

class TestMyTier(TierContract):
    @pytest.fixture
    def tier(self, context: TierContext) -> Iterator[Tier]:
        made = MyTier(context)
        yield made
        made.close()
"""

from __future__ import annotations

import mmap
import os
import random
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.core.errors import TierError
from kvstore.core.tier import Tier, TierContext
from kvstore.core.types import BlockKey, JobId, JobKind, JobResult, LookupResult, Slot, TransferJob
from tests.harness.patience import WAIT_S
from tiers.nvme import block_io as threads_mover
from tiers.nvme import nixl_mover
from tiers.nvme.block_io import Move, Moved, Mover
from tiers.nvme.files import Descriptor, ExtentFile, open_direct

SLOT_BYTES = 4096
SLOTS = 32
MOVED_SLOTS = 64
MOVER_MODULES = (threads_mover, nixl_mover)


class ArrayMemory:
    """SlotMemory in one array."""

    def __init__(self) -> None:
        self._data = memoryview(bytearray(SLOTS * SLOT_BYTES))

    def view(self, slot: Slot) -> memoryview:
        return self._data[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big") + b"\0\0")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SLOT_BYTES)


def finish(tier: Tier, count: int) -> list[JobResult]:
    """Poll until `count` results are there."""
    results: list[JobResult] = []
    end = time.monotonic() + WAIT_S
    while len(results) < count and time.monotonic() < end:
        results.extend(tier.poll())
    return results


class TierContract:
    """What every tier owes its caller."""

    @pytest.fixture
    def memory(self) -> ArrayMemory:
        return ArrayMemory()

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        return {}

    @pytest.fixture
    def context(self, memory: ArrayMemory, options: Mapping[str, Any]) -> TierContext:
        return TierContext("shelf", "0123456789abcdef", SLOT_BYTES, memory, options)

    @pytest.fixture
    def tier(self, context: TierContext) -> Tier:
        raise NotImplementedError

    # Helpers

    def job(
        self, number: int, kind: JobKind, keys: Sequence[int], slots: Sequence[int]
    ) -> TransferJob:
        names = tuple(key(name) for name in keys)
        return TransferJob(JobId(number), kind, names, tuple(Slot(slot) for slot in slots))

    def put(self, tier: Tier, memory: ArrayMemory, keys: Sequence[int]) -> None:
        """Store blocks through the first slots, and wipe those."""
        for slot, name in enumerate(keys):
            memory.view(Slot(slot))[:] = content(name)
        tier.submit(self.job(1000, JobKind.STORE, keys, range(len(keys))))
        (result,) = finish(tier, 1)
        assert (result.job_id, result.done, result.error) == (1000, len(keys), None)
        for slot in range(len(keys)):
            memory.view(Slot(slot))[:] = bytes(SLOT_BYTES)

    # What holds

    def test_the_name_is_a_label(self, tier: Tier) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", tier.name)

    def test_what_was_never_stored_is_a_miss(self, tier: Tier) -> None:
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert list(tier.poll()) == []

    def test_what_was_stored_is_a_hit_and_comes_back_byte_for_byte(
        self, tier: Tier, memory: ArrayMemory
    ) -> None:
        self.put(tier, memory, [1, 2, 3])
        assert {tier.lookup(key(name)) for name in (1, 2, 3)} == {LookupResult.HIT}
        tier.submit(self.job(1, JobKind.LOAD, [3, 1], [10, 11]))
        (result,) = finish(tier, 1)
        assert (result.done, result.error) == (2, None)
        assert memory.view(Slot(10)) == content(3)
        assert memory.view(Slot(11)) == content(1)

    def test_a_load_touches_no_other_slot(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, [1])
        tier.submit(self.job(1, JobKind.LOAD, [1], [5]))
        finish(tier, 1)
        others = [slot for slot in range(SLOTS) if slot != 5]
        assert all(memory.view(Slot(slot)) == bytes(SLOT_BYTES) for slot in others)

    def test_a_store_is_seen_whole_or_not_at_all(self, tier: Tier, memory: ArrayMemory) -> None:
        memory.view(Slot(0))[:] = content(1)
        tier.submit(self.job(1, JobKind.STORE, [1], [0]))
        assert tier.lookup(key(1)) in (LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT)
        finish(tier, 1)
        assert tier.lookup(key(1)) is LookupResult.HIT

    def test_a_block_stored_twice_is_there_once(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, [1])
        self.put(tier, memory, [1])
        tier.submit(self.job(1, JobKind.LOAD, [1], [0]))
        assert finish(tier, 1)[0].done == 1
        assert memory.view(Slot(0)) == content(1)
        tier.discard([key(1)])
        assert tier.lookup(key(1)) is LookupResult.MISS

    def test_O5_asking_changes_no_answer(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, [1])
        assert [tier.lookup(key(1)) for _ in range(3)] == [LookupResult.HIT] * 3
        assert [tier.lookup(key(2)) for _ in range(3)] == [LookupResult.MISS] * 3

    def test_O15_a_load_of_what_is_not_there_fails_in_its_result(self, tier: Tier) -> None:
        tier.submit(self.job(1, JobKind.LOAD, [7], [0]))
        (result,) = finish(tier, 1)
        assert (result.job_id, result.done) == (1, 0)
        assert isinstance(result.error, TierError)

    def test_O15_what_arrived_before_a_failure_is_whole(
        self, tier: Tier, memory: ArrayMemory
    ) -> None:
        self.put(tier, memory, [1, 2, 4])
        tier.submit(self.job(1, JobKind.LOAD, [1, 2, 3, 4], [10, 11, 12, 13]))
        (result,) = finish(tier, 1)
        assert isinstance(result.error, TierError)
        assert result.done <= 2
        for place in range(result.done):
            assert memory.view(Slot(10 + place)) == content(1 + place)

    def test_discarded_blocks_are_gone_and_unknown_ones_ignored(
        self, tier: Tier, memory: ArrayMemory
    ) -> None:
        self.put(tier, memory, [1, 2])
        tier.discard([key(1), key(99)])
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert tier.lookup(key(2)) is LookupResult.HIT

    def test_O17_clear_forgets_every_block(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, [1, 2])
        tier.clear()
        assert tier.lookup(key(1)) is LookupResult.MISS
        assert tier.lookup(key(2)) is LookupResult.MISS
        self.put(tier, memory, [1])
        assert tier.lookup(key(1)) is LookupResult.HIT

    def test_each_job_is_reported_exactly_once(self, tier: Tier, memory: ArrayMemory) -> None:
        self.put(tier, memory, range(8))
        for number in range(60):
            kind = JobKind.STORE if number % 3 == 0 else JobKind.LOAD
            name = number % 12  # some are not there
            tier.submit(self.job(number, kind, [name], [number % SLOTS]))
        results = finish(tier, 60)
        tier.drain()
        results.extend(tier.poll())
        assert sorted(result.job_id for result in results) == list(range(60))

    def test_after_drain_every_result_can_be_fetched(self, tier: Tier, memory: ArrayMemory) -> None:
        memory.view(Slot(0))[:] = content(1)
        for number in range(5):
            tier.submit(self.job(number, JobKind.STORE, [number], [0]))
        tier.drain()
        assert sorted(result.job_id for result in finish(tier, 5)) == list(range(5))

    def test_O17_closing_twice_is_harmless_and_a_closed_tier_takes_no_job(
        self, tier: Tier, memory: ArrayMemory
    ) -> None:
        self.put(tier, memory, [1])
        tier.close()
        tier.close()
        with pytest.raises(TierError):
            tier.submit(self.job(1, JobKind.STORE, [1], [0]))

    def test_O17_closing_with_jobs_under_way_ends(self, tier: Tier) -> None:
        for number in range(5):
            tier.submit(self.job(number, JobKind.STORE, [number], [number]))
        tier.close()


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
