"""The NVMe tier against the contract of all tiers, and what a disk adds to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import NvmeConfig
from kvstore.core.errors import BlockCorrupt, ConfigError
from kvstore.core.tier import Tier, TierContext
from kvstore.testing import TierContract
from tests.harness.nvme_blocks import MIB, Shelf, content, disk_bytes, key, settings_for, shelf
from tests.harness.nvme_damage import (
    CHAINS,
    COUNT,
    LENGTH,
    PART,
    WHOLE,
    cut,
    cut_to_nothing,
    damage_index,
    delete,
    extents,
    flip,
    make_a_loop_of_one,
    swap,
)
from tests.harness.nvme_trouble import wait_for
from tiers.nvme.disk import NvmeDisk


class TestNvmeTier(TierContract):
    @pytest.fixture
    def tier(self, context: TierContext, tmp_path: Path) -> Iterator[Tier]:
        disk = NvmeDisk(settings_for(tmp_path / "kv"))
        made = disk.tier(context)
        yield made
        made.close()
        disk.close()


# Restart


def test_any_block_size_comes_back_whole_after_a_restart(tmp_path: Path) -> None:
    for slot_bytes in (4096, 5000, 100_000):
        settings = settings_for(tmp_path / str(slot_bytes))
        with shelf(settings, slot_bytes=slot_bytes) as before:
            assert before.put(1, 0, 9).done == 9
        with shelf(settings, slot_bytes=slot_bytes) as after:
            assert after.whole(1, 9)


def test_two_namespaces_do_not_see_each_others_blocks(settings: NvmeConfig) -> None:
    with shelf(settings, "aaaaaaaaaaaa") as one:
        one.put(1, 0, 2)
    with shelf(settings, "bbbbbbbbbbbb", slot_bytes=4096) as other:
        assert not other.has(1, 0)
        other.put(1, 0, 2)
    with shelf(settings, "aaaaaaaaaaaa") as one:
        assert one.get([key(1, 0), key(1, 1)]).done == 2


def test_a_block_whose_parent_is_not_here_is_not_kept(empty: Shelf) -> None:
    result = empty.put(1, 3, 5)
    assert (result.done, result.error) == (0, None)
    assert empty.keys() == []
    assert empty.tier.space.counts["unplaced"] == 2


def test_only_one_process_uses_a_directory(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.nvme.attached.LOCK_WAIT_S", 0.1)
    with shelf(settings), pytest.raises(ConfigError, match=f"process id {os.getpid()}"):
        NvmeDisk(settings)


# Cap


def test_the_cap_holds_and_the_coldest_leaf_goes_first(settings: NvmeConfig) -> None:
    with shelf(settings) as found:
        for chain in range(300):
            found.put(chain, 0, 30)
            found.tier.touch(key(0, 29))
            assert disk_bytes(Path(settings.path)) <= settings.capacity_bytes
        assert found.has(0, 29), "used all the time"
        assert not found.has(1, 29)
        assert found.has(299, 29)
        assert found.tier.space.counts["evicted"]
        kept = set(found.keys())
    with shelf(settings) as after:
        assert set(after.keys()) == kept
        assert after.tier.space.counts["unreachable"] == 0
        for chain in (0, 298, 299):
            assert after.whole(chain, 30)


def test_a_smaller_cap_gives_space_back_at_the_next_start(settings: NvmeConfig) -> None:
    with shelf(settings) as before:
        before.fill(200)
    small = settings_for(Path(settings.path), 16 * MIB)
    with shelf(small) as after:
        after.settle()
        assert disk_bytes(Path(settings.path)) <= 16 * MIB
        assert after.keys()
        assert all(after.get([name]).done == 1 for name in after.keys()[:50])


def test_a_namespace_that_nobody_uses_makes_room(settings: NvmeConfig) -> None:
    with shelf(settings, "aaaaaaaaaaaa") as one:
        one.fill(300)
    with shelf(settings, "bbbbbbbbbbbb") as other:
        assert other.put(1, 0, 30).done == 30
        assert disk_bytes(Path(settings.path)) <= settings.capacity_bytes


# Damage


def test_O15_a_flipped_bit_is_a_miss_and_takes_what_hangs_below_it(
    empty: Shelf, settings: NvmeConfig
) -> None:
    empty.put(1, 0, 6)
    empty.put(2, 0, 2)
    flip(settings, 1, 2)
    result = empty.get([key(1, index) for index in range(6)])
    assert (result.done, type(result.error)) == (2, BlockCorrupt)
    assert [empty.has(1, index) for index in range(6)] == [True, True] + [False] * 4
    assert empty.has(2, 1)
    assert empty.tier.space.counts["damaged"] == 1
    assert empty.tier.space.counts["unlinked"] == 3
    assert empty.put(1, 2, 6).done == 4, "and it can be stored again"
    assert empty.whole(1, 6)


def test_swapped_blocks_are_misses(empty: Shelf, settings: NvmeConfig) -> None:
    empty.put(1, 0, 1)
    empty.put(2, 0, 1)
    one, two = content(key(1, 0)), content(key(2, 0))
    (path,) = extents(settings)
    data = path.read_bytes()
    with path.open("r+b") as file:
        for at, other in ((data.find(one), two), (data.find(two), one)):
            file.seek(at)
            file.write(other)
    assert empty.get([key(1, 0)]).done == 0
    assert empty.get([key(2, 0)]).done == 0


def test_any_damage_to_files_costs_its_blocks_and_nothing_else(tmp_path: Path) -> None:
    """Files and rows change while the store is away; get() checks what it calls whole."""
    for damage in (*WHOLE, *PART):
        if damage is make_a_loop_of_one:  # a store refuses it
            continue
        settings = settings_for(tmp_path / damage.__name__)
        with shelf(settings) as before:
            before.fill(CHAINS, LENGTH)
        damage(settings)
        with shelf(settings) as after:
            for name in after.keys():  # noqa: SIM118
                after.get([name])
            assert after.put(900, 0, 5).done == 5
            assert after.whole(900, 5)
        with shelf(settings) as again:
            left = len(again.keys()) - 5
            assert left == WHOLE[damage]["blocks.ok"] if damage in WHOLE else left < COUNT, damage
            assert all(again.get([name]).done == 1 for name in again.keys())  # noqa: SIM118
            assert not again.tier.space.counts, "what was wrong is forgotten"


def test_extents_that_are_damaged_while_it_serves_cost_their_blocks(tmp_path: Path) -> None:
    for damage in (cut, cut_to_nothing, delete, swap):
        settings = settings_for(tmp_path / damage.__name__)
        with shelf(settings) as found:
            found.fill(CHAINS, LENGTH)
            damage(settings)
            came = [name for name in found.keys() if found.get([name]).done]  # noqa: SIM118
            assert came, "another extent is whole"
            assert found.put(900, 0, 5).done == 5
            assert found.whole(900, 5)
        with shelf(settings) as again:
            for name in again.keys():  # noqa: SIM118
                again.get([name])
            assert again.put(901, 0, 5).done == 5
            assert again.whole(901, 5)


@pytest.mark.usefixtures("quick_disk")
def test_an_index_that_is_damaged_while_it_serves_costs_blocks_and_nothing_else(
    tmp_path: Path,
) -> None:
    """The file under a live map; get() checks what it calls whole."""
    for damage in ("cut", "nothing", "rubbish", "head"):
        settings = settings_for(tmp_path / damage)
        with shelf(settings) as found:
            found.fill(CHAINS, LENGTH)
            found.settle()
            damage_index(settings, damage)
            for chain in range(100, 110):
                found.put(chain, 0, 30)
            for name in found.keys():  # noqa: SIM118
                found.get([name])
            wait_for(found, "ok")
        with shelf(settings) as again:
            for name in again.keys():  # noqa: SIM118
                again.get([name])
            assert again.put(900, 0, 5).done == 5, damage
            assert again.whole(900, 5)


def test_a_damaged_index_is_set_aside_and_the_tier_starts_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for damage in ("cut", "empty", "rubbish", "head"):
        settings = settings_for(tmp_path / damage)
        caplog.clear()
        with shelf(settings) as before:
            before.fill(20)
        damage_index(settings, damage)
        with shelf(settings) as after:
            assert after.keys() == [], damage
            assert "the index is damaged" in caplog.text
            assert after.put(1, 0, 5).done == 5
            assert after.whole(1, 5)
        assert list(Path(settings.path).glob("index.damaged-*"))


def test_a_stale_index_never_gives_wrong_bytes(settings: NvmeConfig) -> None:
    with shelf(settings) as first:
        first.fill(100)
    path = Path(settings.path) / "index" / "data.mdb"
    old = path.read_bytes()
    with shelf(settings) as second:
        for chain in range(100, 400):
            second.put(chain, 0, 30)
    path.write_bytes(old)
    with shelf(settings) as third:
        for name in list(third.keys()):
            third.get([name])
        assert third.tier.space.counts["damaged"]
        assert third.put(900, 0, 5).done == 5
