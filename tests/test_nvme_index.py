"""An index that can be read, and is wrong: by a bug, or by bits that flipped in the right place."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from kvstore.config import NvmeConfig
from tests.harness.nvme_blocks import SLOT_BYTES, settings_for, shelf
from tests.harness.nvme_damage import change_table, extents, row_count
from tiers.nvme.index_client import IndexClient, IndexDamagedError
from tiers.nvme.index_server import IndexFile, IndexServer
from tiers.nvme.messages import EXTENTS, FOLDER, NOWHERE, NUMBER, VALUE, Commit, Load, Open, Page

MAP_BYTES = 64 << 20
SPACE = "0123456789ab"


def test_rows_of_a_namespace_that_nobody_knows_are_deleted(settings: NvmeConfig) -> None:
    for namespace in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        with shelf(settings, namespace) as found:
            found.put(1, 0, 3)
    files = len(extents(settings))
    change_table(settings, EXTENTS, lambda rows: rows.pop(0))
    with shelf(settings, "bbbbbbbbbbbb") as found:
        assert found.whole(1, 3)
        found.settle()
    assert len(extents(settings)) == files - 1
    assert row_count(settings, "bbbbbbbbbbbb") == 3
    assert row_count(settings, "aaaaaaaaaaaa") == 0


def test_a_namespace_of_empty_blocks_is_damage(
    settings: NvmeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with shelf(settings) as before:
        before.put(1, 0, 3)
    empty = NUMBER.pack(0) + b"0123456789ab"
    change_table(settings, EXTENTS, lambda rows: rows[0].__setitem__(1, empty))
    with shelf(settings) as after:
        assert after.keys() == []
        assert "the index is damaged" in caplog.text


def test_extents_without_an_index_are_a_loss_but_for_one_that_was_being_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for count, lost in ((1, False), (1, True), (2, False), (2, True)):
        settings = settings_for(tmp_path / f"{count}-{lost}")
        caplog.clear()
        with shelf(settings):
            pass
        for number in range(count):
            (Path(settings.path) / f"{number:06}.extent").write_bytes(bytes(4096))
        if lost:
            shutil.rmtree(Path(settings.path) / "index")
        with shelf(settings):
            assert extents(settings) == []
        assert ("the index is damaged or lost" in caplog.text) is (lost or count > 1)


# Its file


def shrunk(folder: Path) -> int:
    """Clear a full index until LMDB leaves its last pages unwritten; return the count of rows."""
    rng = random.Random(0)
    path = folder / FOLDER
    path.mkdir()
    file = IndexFile(path, MAP_BYTES)
    rows: list[bytes] = []
    for _ in range(50):
        gone, rows = rows, [rng.randbytes(34) for _ in range(rng.choice((10, 100, 1000)))]
        puts = [(row, bytes(36)) for row in rows]
        file.commit(
            Commit(deletes={SPACE: gone}, puts={SPACE: puts}, extents=[(1, SLOT_BYTES, SPACE)])
        )
        size = (path / "data.mdb").stat().st_size
        if size < (file._env.info()["last_pgno"] + 1) * 4096:
            file.close()
            return len(rows)
    raise AssertionError("LMDB wrote all its pages")


def rows_in(folder: Path) -> int:
    file = IndexFile(folder / FOLDER, MAP_BYTES)
    found = sum(len(chunk) // 2 for chunk in file.rows(SPACE))
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


def test_the_process_keeps_no_records_that_it_has_sent(tmp_path: Path) -> None:
    """Of an idle store it would keep them for ever: a tenth of a gigabyte for a million."""
    server, count = IndexServer(), 10
    server.answer(Open(str(tmp_path), MAP_BYTES))
    rows = [(bytes([n]) * 34, VALUE.pack(1 << 32 | n, NOWHERE, n, 0, 4096)) for n in range(count)]
    server.answer(Commit(puts={SPACE: rows}, extents=[(1, 4096, SPACE)]))
    for first, refused in ((0, None), (6, [])):
        page = server.answer(Load(SPACE, 4096, {1: count}, first, 6))
        assert isinstance(page, Page)
        assert (page.count, page.refused) == (min(6, count - first), refused)
        assert (server._sorted is None) is (refused == [])
    assert server.file is not None
    server.file.close()
    os.close(server.lock_fd)
