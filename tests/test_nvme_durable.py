"""Small tests of what becomes durable and when; each was found by a crash or power campaign."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.harness.nvme_blocks import key
from tiers.nvme.files import ExtentFile
from tiers.nvme.index_client import IndexClient, IndexDamagedError
from tiers.nvme.index_server import IndexFile
from tiers.nvme.messages import FOLDER, Commit
from tiers.nvme.namespace import Space

MAP_BYTES = 64 << 20
PREFIX = b"\0\0\0\1"


def small_space(path: Path) -> Space:
    """Four slots."""
    folder = os.open(path, os.O_RDONLY)
    ExtentFile.make(path / "extent", 16384, folder)
    os.close(folder)
    space = Space(1, "0123456789ab", 4096)
    space.add_extent(0, ExtentFile(path / "extent", 4096, 16384))
    return space


def test_the_slot_of_a_write_that_failed_is_the_last_to_be_taken_again(tmp_path: Path) -> None:
    space = small_space(tmp_path)
    (place,) = space.take_places(1)
    space.written(space.begin(key(1, 0), None, place, 1), 0, ok=False)
    assert space.free == 4
    assert place not in space.take_places(3)
    assert space.take_places(1) == [place]


def test_an_extent_that_is_empty_already_goes_before_its_turn_to_be_emptied(tmp_path: Path) -> None:
    """Found by the crash campaign, seed 1, life 73."""
    space = small_space(tmp_path)
    space.retire(0)
    assert [number for number, _ in space.take_retired()] == [0]
    assert not space.step()
    assert not space.extents


def test_a_chain_whose_writes_end_in_any_order_is_durable_in_one_commit(tmp_path: Path) -> None:
    space = small_space(tmp_path)
    space.take_places(3)
    first = space.begin(key(1, 0), None, 0, 1)
    second = space.begin(key(1, 1), first, 1, 2)
    third = space.begin(key(1, 2), second, 2, 3)
    for record in (third, second, first):
        space.written(record, 0, ok=True)
    assert space.take_puts() == [first, second, third]


def shrunk(folder: Path) -> int:
    """Clear a full index until LMDB leaves its last pages unwritten; return the count of rows."""
    rng = random.Random(0)
    path = folder / FOLDER
    path.mkdir()
    file = IndexFile(path, MAP_BYTES)
    rows: list[bytes] = []
    for _ in range(50):
        gone, rows = rows, [PREFIX + rng.randbytes(34) for _ in range(rng.choice((5, 50, 500)))]
        file.commit(Commit(deletes=gone, puts=[(row, bytes(36)) for row in rows]))
        size = (path / "data.mdb").stat().st_size
        if len(rows) > 5 and size < (file._env.info()["last_pgno"] + 1) * 4096:
            file.close()
            return len(rows)
    raise AssertionError("LMDB wrote all its pages")


def rows_in(folder: Path) -> int:
    file = IndexFile(folder / FOLDER, MAP_BYTES)
    found = sum(len(chunk) // 2 for chunk in file.rows(1))
    file.close()
    return found


def look(folder: Path) -> None:
    """Open it as a store does."""
    lock_fd = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        IndexClient(folder, 10_000, lock_fd).close()
    finally:
        os.close(lock_fd)


def test_an_index_that_ends_in_unwritten_free_pages_is_whole(tmp_path: Path) -> None:
    rows = shrunk(tmp_path)
    look(tmp_path)
    assert rows_in(tmp_path) == rows


def test_an_index_that_was_cut_is_whole_or_refused(tmp_path: Path) -> None:
    for share in (0.98, 0.9, 0.8, 0.6, 0.4, 0.2):
        folder = tmp_path / str(share)
        folder.mkdir()
        rows = shrunk(folder)
        path = folder / FOLDER / "data.mdb"
        os.truncate(path, int(path.stat().st_size * share))
        try:
            look(folder)
        except IndexDamagedError:
            continue  # whether it raises depends on the share
        assert share > 0.5, "more than free pages is missing"
        assert rows_in(folder) == rows
