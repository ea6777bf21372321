"""Ways to damage an NVMe tier's directory, and what `kvstore fsck` counts for each."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from kvstore.config import NvmeConfig
from tests.harness.nvme_blocks import SLOT_BYTES, content, key
from tiers.nvme.files import ExtentFile
from tiers.nvme.messages import BLOCKS, VALUE

CHAINS, LENGTH = 10, 30  # more than one extent has
COUNT = CHAINS * LENGTH
SPACE = "0123456789ab"  # the namespace of a shelf
Damage = Callable[[NvmeConfig], None]


def extents(settings: NvmeConfig) -> list[Path]:
    return sorted(Path(settings.path).glob("*.extent"))


def index(settings: NvmeConfig) -> Path:
    return Path(settings.path) / "index" / "data.mdb"


def flip(settings: NvmeConfig, chain: int, number: int) -> None:
    """Turn one bit of a block."""
    for path in extents(settings):
        data = bytearray(path.read_bytes())
        at = data.find(content(key(chain, number)))
        if at >= 0:
            data[at + 1234] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError("not on disk")


@contextmanager
def opened(settings: NvmeConfig, table: bytes) -> Iterator[tuple[lmdb.Transaction, Any]]:
    """Open a table of the index for reading and writing; made if it is not there."""
    with lmdb.open(str(index(settings).parent), max_dbs=8, lock=False, map_size=64 << 20) as env:
        found = env.open_db(table)
        with env.begin(write=True) as txn:
            yield txn, found


def change_table(
    settings: NvmeConfig, table: bytes, change: Callable[[list[list[bytes]]], object]
) -> None:
    """Edit a table: a list of [key, value]."""
    with opened(settings, table) as (txn, found):
        rows = [[bytes(key), bytes(value)] for key, value in txn.cursor(found)]
        txn.drop(found, delete=False)
        change(rows)
        for key, value in rows:
            txn.put(key, value, db=found)


def change_rows(settings: NvmeConfig, change: Callable[[list[list[bytes]]], object]) -> None:
    """Edit the records of blocks."""
    change_table(settings, table_of(SPACE), change)


def table_of(space: str) -> bytes:
    """Name the table of a namespace's blocks."""
    return BLOCKS + space.encode()


def row_count(settings: NvmeConfig, space: str = SPACE) -> int:
    """Return how many blocks of a namespace the index names."""
    with opened(settings, table_of(space)) as (txn, blocks):
        return int(txn.stat(blocks)["entries"])


def row_of(rows: list[list[bytes]], chain: int, number: int) -> list[bytes]:
    return next(row for row in rows if row[0].endswith(key(chain, number)))


def put(row: list[bytes], **changes: int) -> None:
    """Change fields of a row's value."""
    names = ("place", "above", "generation", "checksum", "size")
    fields = dict(zip(names, VALUE.unpack(row[1]), strict=True)) | changes
    row[1] = VALUE.pack(*(fields[name] for name in names))


def flip_one(settings: NvmeConfig) -> None:
    flip(settings, 3, 10)


def flip_two_of_a_chain(settings: NvmeConfig) -> None:
    flip(settings, 3, 10)
    flip(settings, 3, 20)


def cut(settings: NvmeConfig) -> None:
    os.truncate(extents(settings)[0], 100 * SLOT_BYTES + 512)


def cut_to_nothing(settings: NvmeConfig) -> None:
    os.truncate(extents(settings)[0], 0)


def delete(settings: NvmeConfig) -> None:
    extents(settings)[0].unlink()


def make_a_loop_of_one(settings: NvmeConfig) -> None:
    path = extents(settings)[0]
    path.unlink()
    path.symlink_to(path)  # there, but it cannot be opened


def swap(settings: NvmeConfig) -> None:
    one, two = extents(settings)[:2]
    one.rename(one.with_suffix(".aside"))
    two.rename(one)
    one.with_suffix(".aside").rename(two)


def add_an_orphan(settings: NvmeConfig) -> None:
    folder = os.open(settings.path, os.O_RDONLY)
    ExtentFile.make(Path(settings.path) / "000999.extent", settings.extent_bytes, folder)
    os.close(folder)


def forget_a_row(settings: NvmeConfig) -> None:
    change_rows(settings, lambda rows: rows.remove(row_of(rows, 3, 10)))


def claim_a_taken_place(settings: NvmeConfig) -> None:
    def change(rows: list[list[bytes]]) -> None:
        place, *_ = VALUE.unpack(row_of(rows, 4, 0)[1])
        put(row_of(rows, 3, LENGTH - 1), place=place)

    change_rows(settings, change)


def resize_a_row(settings: NvmeConfig) -> None:
    change_rows(settings, lambda rows: put(row_of(rows, 3, LENGTH - 1), size=4096))


def make_a_circle(settings: NvmeConfig) -> None:
    """A block hangs below itself, another below its child."""

    def change(rows: list[list[bytes]]) -> None:
        own, *_ = VALUE.unpack(row_of(rows, 3, LENGTH - 1)[1])
        put(row_of(rows, 3, LENGTH - 1), above=own)
        child, *_ = VALUE.unpack(row_of(rows, 4, LENGTH - 1)[1])
        put(row_of(rows, 4, LENGTH - 2), above=child)

    change_rows(settings, change)


def add_rows_of_nobody(settings: NvmeConfig) -> None:
    def change(rows: list[list[bytes]]) -> None:
        rows.append([key(999, 999), value[:-1]])
        rows.append([b"x", b""])

    value = VALUE.pack(1 << 32, 0, 1, 0, SLOT_BYTES)
    change_rows(settings, change)
    with opened(settings, table_of("nobody")) as (txn, blocks):
        txn.put(key(1, 1), value, db=blocks)


WHOLE: dict[Damage, dict[str, int]] = {
    flip_one: {"blocks.ok": COUNT - 20, "blocks.damaged": 1, "blocks.unreachable": 19},
    flip_two_of_a_chain: {"blocks.ok": COUNT - 20, "blocks.damaged": 2, "blocks.unreachable": 18},
    add_an_orphan: {"blocks.ok": COUNT, "extents.orphan": 1},
    forget_a_row: {"blocks.ok": COUNT - 20, "blocks.unreachable": 19},
    claim_a_taken_place: {"blocks.ok": COUNT - 1, "blocks.foreign": 1},
    resize_a_row: {"blocks.ok": COUNT - 1, "blocks.foreign": 1},
    make_a_circle: {"blocks.ok": COUNT - 3, "blocks.unreachable": 3},
    add_rows_of_nobody: {"blocks.ok": COUNT, "blocks.foreign": 3},
}
PART: dict[Damage, tuple[str, ...]] = {
    cut: ("blocks.unreadable", "extents.short"),
    cut_to_nothing: ("blocks.unreadable", "extents.short"),
    delete: ("blocks.foreign", "extents.lost"),
    make_a_loop_of_one: ("blocks.foreign", "extents.lost", "extents.orphan"),
    swap: ("blocks.damaged",),
}


def damage_index(settings: NvmeConfig, damage: str) -> None:
    path, size = index(settings), index(settings).stat().st_size
    if damage == "cut":
        os.truncate(path, size // 2)
    elif damage == "empty":
        os.truncate(path, 100)
    elif damage == "nothing":
        os.truncate(path, 0)
    elif damage == "rubbish":
        with path.open("r+b") as file:
            file.seek(8192)
            file.write(random.Random(1).randbytes(size - 8192))
    else:
        path.write_bytes(b"not an index" * 1000)
