"""Who gets how much of the disk, and when it is durable."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvstore import clock
from kvstore.config import NvmeConfig
from kvstore.core.errors import TierFull
from tests.harness.nvme_blocks import MIB, Shelf, disk_bytes, key, settings_for, shelf
from tests.harness.nvme_trouble import (
    Gate,
    away,
    let_back,
    lose,
    raise_eio,
    wait,
    wait_for,
)
from tiers.nvme import disk, extent_allocator
from tiers.nvme.directory import Directory, Look

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def folder(settings: NvmeConfig) -> Path:
    return Path(settings.path)


def test_damaged_indexes_that_are_kept_count(folder: Path) -> None:
    with shelf(settings_for(folder, 16 * MIB)) as found:
        found.fill(80)
        found.settle()
        assert found.disk.used_bytes > 12 * MIB
        (folder / "index.damaged-19990101-000000").mkdir()
        (folder / "index.damaged-19990101-000000" / "data.mdb").write_bytes(b"x" * 9 * MIB)
        wait(found, lambda: disk_bytes(folder) <= 16 * MIB)
        wait(found, lambda: 9 * MIB < found.disk.used_bytes <= 16 * MIB)
        assert found.tier.space.counts["resize"]
        assert found.keys()


def test_a_file_system_without_room_gets_no_extents_and_the_tier_goes_on(
    found: Shelf, settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Directory.look

    def full(volume: Directory) -> Look:
        return real(volume)._replace(free_bytes=settings.extent_bytes - 1)

    made = len(list(folder.glob("*.extent")))
    with monkeypatch.context() as patched:
        patched.setattr(Directory, "look", full)
        for chain in range(2, 40):
            assert found.put(chain, 0, 30).done == 30
    assert found.disk.state == "ok"
    assert len(list(folder.glob("*.extent"))) == made
    assert found.tier.space.counts["evicted"]


def test_a_file_system_of_which_nothing_is_known_gets_no_extent(
    empty: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(disk, "LOOK_EVERY_S", 1000.0)
        patched.setattr(os, "fstatvfs", raise_eio)
        assert empty.put(1, 0, 5).done == 0
    assert not list(folder.glob("*.extent"))
    wait_for(empty, "ok")
    assert empty.put(1, 0, 5).done == 5


def test_the_reserve_of_the_file_system_is_not_free(empty: Shelf, folder: Path) -> None:
    found = os.statvfs(folder)
    seen = empty.disk.attached.directory.look()
    assert seen.free_bytes <= found.f_bavail * found.f_frsize - 64 * MIB


@pytest.mark.parametrize("slice_blocks", [1, extent_allocator.SLICE_BLOCKS])
def test_eviction_ahead_begins_below_the_low_mark_and_goes_on_to_the_high_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slice_blocks: int
) -> None:
    monkeypatch.setattr(extent_allocator, "SLICE_BLOCKS", slice_blocks)
    with shelf(settings_for(folder, 8 * MIB)) as found:
        space, chain = found.tier.space, 0
        free: list[int] = []
        while len(free) < 100:
            found.put(chain, 0, 4)
            found.settle()
            chain += 1
            if space.counts["evicted"]:
                free.append(space.free)
        low, high = space.total // 64, space.total // 32
        assert max(free) >= high, "it goes on"
        assert min(free) >= low, "ahead of need"
        assert any(low <= count < high - 4 for count in free), "not before the low mark"


def test_a_resize_while_an_extent_is_made_leaves_it_within_its_cap(
    empty: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(os.posix_fallocate)
    for chain in range(16):  # fills an extent, almost
        empty.put(chain, 0, 15)
    empty.disk._next_look_s = float("inf")  # it is not the watch that sees it
    empty.settle()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", gate)
        for chain in range(16, 40):
            if empty.disk.attached.room.making:
                break
            empty.put(chain, 0, 1)
        wait(empty, lambda: gate.waiting)
        small = 4 * MIB
        empty.disk.resize(small)
        gate.go_on.set()
    empty.settle()
    wait(empty, lambda: disk_bytes(folder) <= small and empty.disk.used_bytes <= small)


@pytest.mark.parametrize("state", ["off", "read_only", "loading"])
def test_a_smaller_cap_in_any_state_holds_in_the_end(
    settings: NvmeConfig, folder: Path, state: str
) -> None:
    with shelf(settings) as before:
        before.fill(60)
    with shelf(settings, settled=state != "loading") as found:
        if state == "off":
            lose(found)
            away(found)
        elif state == "read_only":
            found.disk.health.only_reads("for the test", clock.now_s())
        found.disk.resize(8 * MIB)
        if state == "off":
            let_back(found)
        found.settle()
        wait(found, lambda: disk_bytes(folder) <= 8 * MIB)
        found.settle()
        assert found.keys()
        assert all(found.get([name]).done == 1 for name in found.keys())  # noqa: SIM118


def test_a_block_that_is_being_read_is_read_to_its_end(folder: Path) -> None:
    with shelf(settings_for(folder, 32 * MIB)) as found:
        found.put(1, 0, 30)
        held = list(found.tier.space.index)
        for record in held:
            found.tier.space.pin(record)
        found.disk.resize(1)
        for _ in range(50):
            found.disk.flush()
        files = list(folder.glob("*.extent"))
        assert files, "somebody reads there"
        for record in held:
            found.tier.space.unpin(record)
        assert found.keys() == []


def test_growing_brings_room_at_once(folder: Path) -> None:
    with shelf(settings_for(folder, 8 * MIB)) as found:
        found.fill(60)
        small = len(found.keys())
        found.disk.resize(64 * MIB)
        found.fill(60)
        assert len(found.keys()) > 2 * small


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_file_system_that_refuses_an_extent_its_room_is_full_and_not_at_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of a quota, or of inodes, the free space tells nothing: it took no block any more."""
    with shelf(settings_for(folder)) as found:
        found.fill(4)

        def refuse(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        for chain in range(10, 30):
            assert found.put(chain, 0, 30).done == 30
            assert found.disk.state == "ok"
        assert found.whole(29, 30)
        assert found.tier.space.counts["evicted"]
        assert len(list(folder.glob("*.extent"))) == len(found.tier.space.extents)
        monkeypatch.undo()
        found.disk.attached.room._full_until_s = clock.now_s()
        before = len(found.tier.space.extents)
        found.fill(20)
        assert len(found.tier.space.extents) > before


# Jobs


def test_a_job_larger_than_the_disk_ends(tmp_path: Path) -> None:
    small = settings_for(tmp_path / "small", 8 * MIB)
    with shelf(small, slot_bytes=MIB // 2) as found:
        result = found.put(1, 0, 40)
        assert result.done < 40
        assert isinstance(result.error, TierFull)
        found.settle()
        assert found.put(2, 0, 1).done == 1


# Durability


def test_a_change_that_just_missed_a_commit_waits_for_the_window_once(
    empty: Shelf, settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    window_s = settings.durability_ns / 1e9
    empty.settle()
    commits = empty.disk.attached.commits
    commits._hurry = False
    began: list[float] = []
    now_s = 1000.0
    monkeypatch.setattr(commits, "_begin", lambda: began.append(now_s))
    commits.under_way = True
    empty.tier.space.to_delete.append(object())  # type: ignore[arg-type]
    empty.disk.attached.wake(empty.tier.space)
    commits.step(now_s)
    now_s += window_s / 2
    commits.under_way = False
    commits.step(now_s)
    assert not began
    now_s = 1000.0 + window_s
    assert commits.due_at_s == now_s
    commits.step(now_s)
    assert began == [now_s], "not a window after the commit before has ended"
    empty.tier.space.to_delete.clear()


def test_an_idle_store_commits_when_the_window_ends(folder: Path) -> None:
    settings = replace(settings_for(folder), durability_ns=500_000_000)
    with shelf(settings) as found:
        found.put(1, 0, 1)
        while found.disk.busy:
            found.disk.poll()
        assert found.disk.attached.commits.pending
        assert 0 < found.disk.next_s <= 0.5
        found.settle()
        assert found.disk.next_s > 10.0


def test_a_disk_that_takes_no_writes_does_not_ask_to_be_polled_for_a_commit(folder: Path) -> None:
    settings = replace(settings_for(folder), durability_ns=1)
    with shelf(settings) as found:
        found.put(1, 0, 1)
        found.settle()
        found.disk.health.only_reads("for the test", clock.now_s() + 1000.0)
        found.tier.discard([key(1, 0)])
        wait(found, lambda: not found.disk.busy)
        found.disk.poll()
        assert found.disk.attached.commits.pending
        assert found.disk.next_s > 100.0
        found.disk.health.back(clock.now_s())


def test_Q65_a_namespace_is_full_once_no_extent_and_few_slots_are_left(folder: Path) -> None:
    with shelf(settings_for(folder, 8 * MIB)) as found:
        space, chain = found.tier.space, 0
        while not found.tier.full:
            assert not space.counts["evicted"]
            found.put(chain, 0, 4)
            found.settle()
            chain += 1
        assert space.free <= space.total // extent_allocator.FULL_PART
        for number in range(chain, 2 * chain):
            found.put(number, 0, 4)
            found.settle()
            assert found.tier.full
        assert space.counts["evicted"]
        found.disk.resize(16 * MIB)
        assert not found.tier.full, "it can have another extent"
