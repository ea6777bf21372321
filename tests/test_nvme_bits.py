"""Bits of the index that flip: a start is never refused, and no byte that is served is wrong.

KVSTORE_BITS=200 for a long campaign.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from kvstore.core.errors import ConfigError
from tests.harness.nvme_blocks import SLOT_BYTES, key, settings_for, shelf
from tests.harness.nvme_damage import change_table, opened
from tests.harness.nvme_trouble import wait, wait_for
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.index_server import IndexFile, failed, is_damage
from tiers.nvme.messages import EXTENTS, FORMAT, META, NUMBER

CHAINS, LENGTH = 40, 10
BITS = 40
pytestmark = pytest.mark.usefixtures("quick_disk")
SEEDS = int(os.environ.get("KVSTORE_BITS", "30"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that was shut down in order."""
    folder = tmp_path_factory.mktemp("filled") / "kv"
    with shelf(settings_for(folder)) as made:
        made.fill(CHAINS, LENGTH)
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(filled, tmp_path / "kv")
    yield tmp_path / "kv"
    shutil.rmtree(tmp_path / "kv")


def index_of(folder: Path) -> Path:
    return folder / "index" / "data.mdb"


def flip(path: Path, seed: int) -> None:
    data, chance = bytearray(path.read_bytes()), random.Random(seed)
    for _ in range(BITS):
        bit = chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_S2_flipped_bits_of_an_index_cost_blocks_and_nothing_else(
    filled: Path, tmp_path: Path
) -> None:
    """What is still found has the right bytes (get() looks), and new blocks are kept."""
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        shutil.copytree(filled, folder)
        flip(index_of(folder), seed)
        with shelf(settings_for(folder)) as found:
            for chain in range(CHAINS):
                there = [key(chain, n) for n in range(LENGTH) if found.has(chain, n)]
                assert found.get(there).done <= len(there)
            wait_for(found, "ok")  # what a read has found may have it set aside
            assert found.put(99, 0, 5).done == 5, f"seed {seed}"
            found.settle()
        with shelf(settings_for(folder)) as again:
            again.settle()
        shutil.rmtree(folder)


def test_S2_what_only_damage_makes_lmdb_say_is_damage() -> None:
    errors = (lmdb.BadTxnError, lmdb.CorruptedError, lmdb.BadValsizeError, lmdb.KeyExistsError)
    assert all(failed(error("what", 1)).damaged for error in errors)
    of_the_machine = (
        *(lmdb.Error, lmdb.MapFullError, lmdb.ReadersFullError, lmdb.DiskError, lmdb.MemoryError),
        *(lmdb.ReadonlyError, lmdb.LockError, lmdb.TlsFullError, lmdb.PanicError, OSError),
    )
    assert not any(is_damage(error("what", errno.ENOSPC)) for error in of_the_machine)
    assert is_damage(lmdb.Error("mdb_env_copyfd3: Bad address"))


def test_S2_an_error_behind_a_call_that_went_well_is_told_by_its_cause() -> None:
    outer = SystemError("returned a result with an exception set")
    assert not is_damage(outer)
    outer.__cause__ = lmdb.BadTxnError("mdb_cursor_get", 1)
    assert failed(outer).damaged
    assert "mdb_cursor_get" in failed(outer).text


def test_S2_a_format_with_flipped_bits_is_damage_and_another_one_is_not(folder: Path) -> None:
    data = index_of(folder).read_bytes()
    index_of(folder).write_bytes(data.replace(FORMAT, FORMAT[:-1] + bytes([FORMAT[-1] ^ 2])))
    with shelf(settings_for(folder)) as found:
        assert found.keys() == []
    index_of(folder).write_bytes(data.replace(FORMAT, b"x" * len(FORMAT)))
    with pytest.raises(ConfigError, match="use another directory"):
        NvmeDisk(settings_for(folder))


def test_an_index_of_the_first_format_is_set_aside(folder: Path) -> None:
    index_of(folder).unlink()
    for table in (b"meta", b"namespaces", b"extents", b"blocks"):
        with opened(settings_for(folder), table) as (txn, found):
            txn.put(b"format", b"kvstore-nvme-1", db=found)
    with shelf(settings_for(folder)) as after:
        assert after.keys() == []
    assert list(folder.glob("index.damaged*"))


def test_S2_a_table_whose_name_has_a_flipped_bit_is_damage(folder: Path) -> None:
    data = index_of(folder).read_bytes()
    index_of(folder).write_bytes(data.replace(META, b"kvstore.mepa"))
    with shelf(settings_for(folder)) as found:
        assert found.keys() == []


@pytest.mark.parametrize("page", [0, 1])
def test_S2_another_version_of_lmdb_in_its_first_pages_is_damage(folder: Path, page: int) -> None:
    """Each of the two has a magic number, then the version; the newer page is the one in use."""
    data = bytearray(index_of(folder).read_bytes())
    at = data.index(struct.pack("<II", 0xBEEFC0DE, 1), page * 4096)
    data[at + 4] ^= 8
    index_of(folder).write_bytes(data)
    with shelf(settings_for(folder)) as found:
        assert found.keys() == []
        wait_for(found, "ok")
        assert found.put(99, 0, 5).done == 5


def test_S2_a_namespace_whose_blocks_have_another_size_on_disk_is_damage(folder: Path) -> None:
    """Else its engines could never attach: the name follows from the size."""

    def enlarge(rows: list[list[bytes]]) -> None:
        for row in rows:
            size, digest = NUMBER.unpack_from(row[1])[0], row[1][NUMBER.size :]
            assert size == SLOT_BYTES
            row[1] = NUMBER.pack(size | 1 << 18) + digest

    change_table(settings_for(folder), EXTENTS, enlarge)
    with shelf(settings_for(folder)) as found:
        wait_for(found, "ok")
        assert found.put(1, 0, 3).done == 3
        found.settle()
    assert list(folder.glob("index.damaged*"))
    with shelf(settings_for(folder)) as again:
        assert again.whole(1, 3)


def test_S2_damage_that_a_commit_finds_sets_the_index_aside(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays as it is: to write again and again would be of no use."""
    with shelf(settings_for(folder)) as found:
        path = index_of(folder)
        data = path.read_bytes()
        head = 2 * os.sysconf("SC_PAGE_SIZE")
        flags = 10  # of a page: after its number and a pad
        for page in range(head, len(data), head // 2):
            data = data[: page + flags] + b"\xff\xff" + data[page + flags + 2 :]
        with path.open("r+b") as file:
            file.write(data)
        found.put(99, 0, 5)
        wait(found, lambda: list(folder.glob("index.damaged*")))
        wait_for(found, "ok")
        assert found.put(98, 0, 5).done == 5
        found.settle()
        assert found.whole(98, 5)
    assert "starts empty" in caplog.text


def test_S2_pages_that_lead_in_a_circle_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(IndexFile(folder / "index", 64 << 20)) as file:
        monkeypatch.setattr(IndexFile, "_rows_max", lambda _self: 1)
        with pytest.raises(lmdb.CorruptedError, match="more rows"):
            file._read_extents()
        with pytest.raises(lmdb.CorruptedError, match="more records"):
            list(file.rows("0123456789ab"))
