"""A disk that is pulled, exchanged or forbidden under a running tier."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvstore.config import NvmeConfig
from kvstore.core.errors import TierIOError
from tests.harness.nvme_blocks import Shelf, key, settings_for, shelf
from tests.harness.nvme_trouble import (
    Gate,
    away,
    be_quick,
    let_back,
    lose,
    open_files,
    wait,
    wait_for,
)
from tiers.nvme import NvmeDisk, disk
from tiers.nvme.remount import Phase


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


@pytest.fixture
def folder(settings: NvmeConfig) -> Path:
    return Path(settings.path)


def test_a_directory_that_goes_turns_it_off_and_it_comes_back_with_its_blocks(
    settings: NvmeConfig, folder: Path
) -> None:
    with shelf(settings) as found:
        found.fill(10, 5)
        found.settle()
        folder.rename(folder.with_name("elsewhere"))
        wait_for(found, "off")
        before = found.tier.space
        assert not found.has(1, 0)
        assert found.get([key(1, 0)]).done == 0
        assert isinstance(found.put(90, 0, 1).error, TierIOError)
        away(found)
        assert not open_files(folder.with_name("elsewhere")), "nothing is held"
        folder.with_name("elsewhere").rename(folder)
        wait_for(found, "ok")
        assert found.tier.space is not before, "its index is read, as at a start"
        assert all(found.whole(chain, 5) for chain in range(10))
        assert found.put(90, 0, 5).done == 5
        found.settle()
    with shelf(settings) as after:
        assert after.whole(90, 5)
        assert after.whole(3, 5)


def test_another_directory_in_its_place_is_not_touched(
    settings: NvmeConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        folder.rename(folder.with_name("elsewhere"))
        folder.mkdir()  # as a mount point is, once the disk is unmounted
        away(found)
        wait(found, lambda: "No such file" in found.disk._health.reason)
        assert list(folder.iterdir()) == []
        (folder / "lock").write_text("1\nanother\nuse\n")
        wait(found, lambda: "another directory" in found.disk._health.reason)
        assert (folder / "lock").read_text() == "1\nanother\nuse\n"
        assert [path.name for path in folder.iterdir()] == ["lock"]
        assert found.disk.state == "off"
        shutil.rmtree(folder)
        folder.with_name("elsewhere").rename(folder)
        wait_for(found, "ok")
        assert found.whole(1, 5)
    assert "is off" not in caplog.text


def test_no_extent_is_made_in_the_directory_below_a_mount_point(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOOK_EVERY_S", 1000.0)  # it has not been seen yet
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        made = len(list(folder.glob("*.extent")))
        folder.rename(folder.with_name("elsewhere"))
        shutil.copytree(folder.with_name("elsewhere"), folder)
        for chain in range(2, 40):  # more than an extent
            found.put(chain, 0, 30)
        assert found.disk.state != "ok"
        assert len(list(folder.glob("*.extent"))) == made
        shutil.rmtree(folder)
        folder.with_name("elsewhere").rename(folder)
        monkeypatch.setattr(disk, "LOOK_EVERY_S", 0.05)
        wait_for(found, "ok")
        assert found.whole(1, 5)


def test_a_directory_that_another_store_has_used_comes_back_as_it_is_now(
    settings: NvmeConfig, folder: Path
) -> None:
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.put(2, 0, 5)
        found.put(9, 3, 5)
        found.settle()
        counted = found.tier.space.counts.copy()
        assert counted["unplaced"] == 2
        found.tier.tell()
        for _ in range(100):
            generation = found.disk.next_generation()
        elsewhere = folder.with_name("elsewhere")
        folder.rename(elsewhere)
        away(found)
        with shelf(settings_for(elsewhere)) as other:
            other.tier.discard([key(1, 3)])
            other.put(3, 0, 5)
        elsewhere.rename(folder)
        wait_for(found, "ok")
        assert found.whole(3, 5)
        assert found.whole(2, 5)
        assert [found.has(1, index) for index in range(5)] == [True] * 3 + [False] * 2
        assert found.tier.space.counts >= counted, "counters do not go back"
        changes = found.tier.take_changes()
        assert (changes.added, set(changes.removed)) == ([], {key(1, 3), key(1, 4)})
        assert found.disk.next_generation() > generation
        assert found.tier.space.attached == 1
        assert found.put(4, 0, 5).done == 5
        found.settle()
        kept = set(found.keys())
    with shelf(settings) as after:
        assert set(after.keys()) == kept


def test_a_directory_that_another_store_is_using_is_left_to_it(
    settings: NvmeConfig, folder: Path
) -> None:
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        elsewhere = folder.with_name("elsewhere")
        folder.rename(elsewhere)
        away(found)
        with shelf(settings_for(elsewhere)) as other:
            folder.symlink_to(elsewhere)
            wait(found, lambda: "in use by" in found.disk._health.reason)
            assert other.whole(1, 5)
        wait_for(found, "ok")
        assert found.whole(1, 5)
    folder.unlink()


def test_blocks_forgotten_while_it_is_off_stay_forgotten(
    settings: NvmeConfig, folder: Path
) -> None:
    with shelf(settings) as found:
        found.fill(4, 5)
        found.settle()
        folder.rename(folder.with_name("elsewhere"))
        away(found)
        found.tier.discard([key(1, 2)])
        folder.with_name("elsewhere").rename(folder)
        wait_for(found, "ok")
        assert [found.has(1, index) for index in range(3)] == [True, True, False]
        found.settle()
    with shelf(settings) as after:
        assert [after.has(1, index) for index in range(3)] == [True, True, False]
        assert after.whole(2, 5)


def test_an_extent_that_is_being_made_is_let_go_of_too(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(os.posix_fallocate)
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", gate)
            for chain in range(2, 400):
                if found.disk._room.making:
                    break
                found.put(chain, 0, 1)
            wait(found, lambda: gate.waiting)
            lose(found)
            found.disk.poll()
            assert found.disk._recovery.phase is Phase.LEAVING
            gate.go_on.set()
            away(found)
            assert not open_files(folder)
        let_back(found)
        wait_for(found, "ok")
        assert found.whole(1, 5)
        found.put(50, 0, 30)
        assert found.whole(50, 30)
    assert not open_files(folder)


def test_it_comes_back_while_its_index_is_being_read(settings: NvmeConfig, folder: Path) -> None:
    with shelf(settings) as before:
        before.fill(10, 20)
    made = NvmeDisk(settings)
    found = Shelf(made)
    assert made.state == "loading"
    lose(found)
    away(found)
    assert not open_files(folder)
    let_back(found)
    wait_for(found, "ok")
    assert all(found.whole(chain, 20) for chain in range(10))
    found.tier.close()
    made.close()
