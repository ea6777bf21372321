"""Small tests of what becomes durable and when; each was found by a crash or power campaign."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kvstore.errors import TierIOError
from tests.nvme_blocks import key
from tiers.nvme.journal import Commit, Journal
from tiers.nvme.loader import frames
from tiers.nvme.space import Space


def test_a_chain_whose_writes_end_in_any_order_is_durable_in_one_commit() -> None:
    space = Space(1, "0123456789ab", 4096)
    first = space.begin(key(1, 0), None, 0, 1)
    second = space.begin(key(1, 1), first, 1, 2)
    third = space.begin(key(1, 2), second, 2, 3)
    for record in (third, second, first):
        space.written(record, 0, ok=True)
    assert space.take_puts() == [first, second, third]


def shrunk(folder: Path) -> int:
    """Clear a full index until LMDB leaves its last pages unwritten; return the count of rows."""
    rng = random.Random(0)
    journal = Journal(folder, 10_000)
    rows: list[bytes] = []
    for _ in range(50):
        gone, rows = rows, [rng.randbytes(38) for _ in range(rng.choice((5, 50, 500)))]
        journal.commit(Commit(deletes=gone, puts=[(row, bytes(36)) for row in rows]))
        size = (journal.path / "data.mdb").stat().st_size
        if len(rows) > 5 and size < (journal._env.info()["last_pgno"] + 1) * 4096:
            journal.close()
            return len(rows)
    raise AssertionError("LMDB wrote all its pages")


def rows_in(folder: Path) -> int:
    return sum(body.count(bytes(36)) for body in frames(folder / "index"))


def test_an_index_that_ends_in_unwritten_free_pages_is_whole(tmp_path: Path) -> None:
    rows = shrunk(tmp_path)
    Journal(tmp_path, 10_000).close()
    assert rows_in(tmp_path) == rows


@pytest.mark.parametrize("share", [0.98, 0.9, 0.8, 0.6, 0.4, 0.2])
def test_an_index_that_was_cut_is_whole_or_refused(tmp_path: Path, share: float) -> None:
    rows = shrunk(tmp_path)
    path = tmp_path / "index" / "data.mdb"
    os.truncate(path, int(path.stat().st_size * share))
    try:
        Journal(tmp_path, 10_000).close()
    except TierIOError as exc:
        assert "expected" in str(exc)  # noqa: PT017 - whether it raises depends on the share
        return
    assert share > 0.5, "more than free pages is missing"
    assert rows_in(tmp_path) == rows
