"""An index that can be read, and is wrong: by a bug, or by bits that flipped in the right place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.config import NvmeConfig
from kvstore.core.errors import ConfigError
from tests.harness.nvme_blocks import MIB, key, settings_for, shelf
from tiers.nvme import NvmeDisk, directory
from tiers.nvme.index_server import IndexFile
from tiers.nvme.messages import NAMESPACE, VALUE

Table = Any  # lmdb has no name for it


@pytest.fixture
def settings(tmp_path: Path) -> NvmeConfig:
    return settings_for(tmp_path / "kv")


def extents(settings: NvmeConfig) -> list[Path]:
    return sorted(Path(settings.path).glob("*.extent"))


def change(settings: NvmeConfig, edit: Callable[[lmdb.Transaction, Table, Table], None]) -> None:
    """Edit the index of a tier that nobody uses: edit(transaction, blocks, namespaces)."""
    path = str(Path(settings.path) / "index")
    with lmdb.open(path, max_dbs=4, lock=False, map_size=256 * MIB) as env:
        blocks, namespaces = env.open_db(b"blocks"), env.open_db(b"namespaces")
        with env.begin(write=True) as txn:
            edit(txn, blocks, namespaces)


def rows(txn: lmdb.Transaction, blocks: Table) -> list[tuple[bytes, tuple[int, ...]]]:
    return [(bytes(key), VALUE.unpack(value)) for key, value in txn.cursor(blocks)]


def test_a_row_of_another_size_is_forgotten(settings: NvmeConfig) -> None:
    def edit(txn: lmdb.Transaction, blocks: Table, _: Table) -> None:
        txn.put(rows(txn, blocks)[0][0], b"short", db=blocks)

    with shelf(settings) as before:
        before.put(1, 0, 1)
        before.put(2, 0, 1)
    change(settings, edit)
    with shelf(settings) as after:
        assert len(after.keys()) == 1
        assert after.tier.space.counts["foreign"] == 1
    with shelf(settings) as again:
        assert again.tier.space.counts["foreign"] == 0


def test_a_circle_of_parents_is_cut(settings: NvmeConfig) -> None:
    def edit(txn: lmdb.Transaction, blocks: Table, _: Table) -> None:
        found = {place: key for key, (place, *_) in rows(txn, blocks)}
        one, two = sorted(found)[:2]
        for place, above in ((one, two), (two, one)):
            _, _, *rest = VALUE.unpack(txn.get(found[place], db=blocks) or b"")
            txn.put(found[place], VALUE.pack(place, above, *rest), db=blocks)

    with shelf(settings) as before:
        before.put(1, 0, 4)
        before.put(2, 0, 1)
    change(settings, edit)
    with shelf(settings) as after:
        assert after.keys() == [key(2, 0)]
        assert after.put(1, 0, 4).done == 4


def test_rows_of_a_namespace_that_nobody_knows_are_deleted(settings: NvmeConfig) -> None:
    def edit(txn: lmdb.Transaction, _: Table, namespaces: Table) -> None:
        for digest, _size in list(txn.cursor(namespaces)):
            if bytes(digest).startswith(b"a"):
                txn.delete(digest, db=namespaces)

    for namespace in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        with shelf(settings, namespace) as found:
            found.put(1, 0, 3)
    files = len(extents(settings))
    change(settings, edit)
    with shelf(settings, "bbbbbbbbbbbb") as found:
        assert found.get([key(1, index) for index in range(3)]).done == 3
        found.settle()
    assert len(extents(settings)) == files - 1
    change(settings, lambda txn, blocks, _: check_count(txn, blocks, 3))


def check_count(txn: lmdb.Transaction, blocks: Table, expected: int) -> None:
    assert len(rows(txn, blocks)) == expected


def test_a_namespace_of_empty_blocks_is_damage(
    settings: NvmeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(txn: lmdb.Transaction, _: Table, namespaces: Table) -> None:
        for digest, _value in list(txn.cursor(namespaces)):
            txn.put(digest, NAMESPACE.pack(1, 0), db=namespaces)

    with shelf(settings) as before:
        before.put(1, 0, 3)
    change(settings, edit)
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


def test_a_store_killed_before_its_first_commit_has_lost_nothing(
    settings: NvmeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    index = Path(settings.path) / "index"
    index.mkdir(parents=True)
    IndexFile(index, 64 * MIB).close()
    (Path(settings.path) / "000000.extent").write_bytes(bytes(4096))
    with shelf(settings):
        assert extents(settings) == []
    assert "damaged or lost" not in caplog.text


def test_an_extent_that_may_not_be_opened_is_an_error_not_a_loss(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shelf(settings) as before:
        before.put(1, 0, 3)
    with monkeypatch.context() as patched:
        patched.setattr(directory, "ExtentFile", _raise_emfile)
        with pytest.raises(ConfigError, match="Too many open files"):
            NvmeDisk(settings)
    with shelf(settings) as after:
        assert after.get([key(1, index) for index in range(3)]).done == 3


def _raise_emfile(*_: object) -> int:
    raise OSError(24, "Too many open files")
