"""Tenants on disk: what each has there is counted and limited, also what it stored before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.index import State
from kvstore.core.tenants import Share
from kvstore.core.types import BlockKey, JobKind, Slot, tag_of
from tests.harness.nvme_blocks import MIB, SLOT_BYTES, Shelf, content, settings_for, shelf
from tests.harness.nvme_blocks import key as plain
from tests.harness.nvme_trouble import moved_away, wait, wait_for

TAG = tag_of("a")


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Shelf]:
    with shelf(settings_for(tmp_path / "kv", 64 * MIB)) as made:
        yield made


def names(chain: int, blocks: int, tag: bytes = TAG) -> list[BlockKey]:
    return [BlockKey(plain(chain, index) + tag) for index in range(blocks)]


def put(found: Shelf, keys: Sequence[BlockKey]) -> None:
    """Store the blocks of a chain, one below the other."""
    for slot, name in enumerate(keys):
        found.memory.view(Slot(slot))[:] = content(name, found.size)
    assert found.run(JobKind.STORE, keys, None).done == len(keys)


def used(share: Share) -> int:
    return share.used_bytes // SLOT_BYTES


def counted(found: Shelf, tag: bytes = TAG) -> int:
    records = found.tier.space.index
    return sum(r.key.endswith(tag) for r in records if r.state is State.READY)


def polled(found: Shelf, share: Share, blocks: int) -> None:
    wait(found, lambda: used(share) == counted(found) == blocks)


def test_Q41_a_quota_on_disk_takes_the_tenants_own_coldest_blocks(found: Shelf) -> None:
    share = found.disk.tenants[TAG] = Share(quota_bytes=12 * SLOT_BYTES)
    put(found, [plain(9, index) for index in range(10)])
    for chain in range(2):
        put(found, names(chain, 10))
    polled(found, share, 12)
    assert found.tier.space.counts["quota"] == 8
    assert found.whole(9, 10), "nobody's"
    assert found.get(names(1, 10)).done == 10, "the newer chain"
    assert found.get(names(0, 3)).done == 2, "a prefix of the older one"


def test_Q41_what_a_tenant_had_on_disk_before_is_counted(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "kv", 64 * MIB)
    with shelf(settings) as found:
        put(found, names(0, 20))
        put(found, [plain(1, index) for index in range(20)])
        found.settle()
    with shelf(settings) as found:
        found.settle()
        put(found, names(2, 5))
        share = found.disk.tenants[TAG] = Share()
        polled(found, share, 25)
        share.quota_bytes = 7 * SLOT_BYTES
        found.tier.space.index.tenants.exceeded = True  # type: ignore[union-attr]
        polled(found, share, 7)
        assert found.whole(1, 20)


def test_Q41_counts_are_right_after_a_clear_and_a_directory_that_comes_back(
    found: Shelf, tmp_path: Path
) -> None:
    share = found.disk.tenants[TAG] = Share()
    put(found, names(0, 10))
    polled(found, share, 10)
    found.settle()
    with moved_away(found, tmp_path / "kv"):
        pass
    wait_for(found, "ok")
    polled(found, share, 10)
    found.tier.clear()
    polled(found, share, 0)
    put(found, names(1, 4))
    polled(found, share, 4)
