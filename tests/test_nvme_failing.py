"""Calls of the disk that fail or hang under a running tier, and a directory that goes and comes."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore import clock
from kvstore.config import NvmeConfig
from kvstore.core.errors import ConfigError, TierIOError
from kvstore.core.types import LookupResult
from kvstore.metrics import Numbers
from kvstore.store.gauges import disk_gauges, state_gauges
from tests.bench.steal import Watch
from tests.harness.nvme_blocks import MIB, Shelf, disk_bytes, key, settings_for, shelf
from tests.harness.nvme_trouble import (
    Gate,
    Wrap,
    away,
    let_back,
    lose,
    moved_away,
    open_files,
    raise_eio,
    wait,
    wait_for,
)
from tiers.nvme import disk, health
from tiers.nvme.directory import Directory, Look
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.index_client import (
    IndexClient,
    IndexDamagedError,
    IndexProcess,
    IndexProcessDiedError,
)
from tiers.nvme.messages import Answer, Commit, Request

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def folder(settings: NvmeConfig) -> Path:
    return Path(settings.path)


def test_an_index_that_was_found_damaged_before_is_not_gone_on_with(
    found: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a commit has found is not found again when the index is opened."""

    def fail(*_: object) -> None:
        raise IndexDamagedError("for the test")

    before = found.tier.space
    with monkeypatch.context() as patched:
        patched.setattr(IndexClient, "commit", fail)
        found.put(2, 0, 5)
        away(found)
    wait(found, lambda: found.tier.space is not before)
    assert list(folder.glob("index.damaged-*")), "it is kept for inspection"
    wait_for(found, "ok")
    assert found.put(3, 0, 5).done == 5


def test_an_index_that_ends_each_commit_is_set_aside(
    found: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be read, but three processes in a row were ended by it."""
    real, left = IndexProcess.ask, [3]

    def ask(process: IndexProcess, request: Request) -> Answer:
        if left[0] and isinstance(request, Commit):
            left[0] -= 1
            process.close()
            raise IndexProcessDiedError("for the test", of_the_file=True)
        return real(process, request)

    monkeypatch.setattr(IndexProcess, "ask", ask)
    found.put(2, 0, 5)
    wait(found, lambda: list(folder.glob("index.damaged-*")))
    wait_for(found, "ok")
    assert found.put(3, 0, 5).done == 5


@contextmanager
def stuck(settings: NvmeConfig) -> Iterator[tuple[Shelf, pytest.MonkeyPatch]]:
    """A tier whose cap is smaller now, but extents cannot be removed until the patch is undone."""
    with shelf(settings) as found, pytest.MonkeyPatch.context() as patched:
        found.fill(40)
        found.settle()
        patched.setattr(os, "unlink", raise_eio)
        found.disk.resize(6 * MIB)
        wait(found, lambda: found.disk.attached.room.stuck)
        yield found, patched


def test_an_extent_whose_removal_fails_still_counts_and_goes_later(
    settings: NvmeConfig, folder: Path
) -> None:
    with stuck(settings) as (found, patched):
        wait_for(found, "read_only")
        assert found.disk.used_bytes > 6 * MIB
        patched.undo()
        wait(found, lambda: found.disk.used_bytes <= 6 * MIB)
        assert disk_bytes(folder) <= 6 * MIB
        assert found.disk.attached.room.stuck == []
        found.settle()
    known = {path.name for path in folder.glob("*.extent")}
    with shelf(settings_for(folder, 6 * MIB)) as after:
        assert {path.name for path in folder.glob("*.extent")} == known
        assert after.keys()


def test_an_extent_whose_removal_failed_is_forgotten_with_a_directory_that_went(
    settings: NvmeConfig, folder: Path
) -> None:
    """What the directory has is counted when it comes back: the sweep at its opening took it."""
    with stuck(settings) as (found, patched):
        with moved_away(found, folder):
            patched.undo()
        assert found.disk.attached.room.stuck == []
        wait(found, lambda: found.disk.used_bytes <= 6 * MIB)
        found.settle()
        used_bytes = found.disk.used_bytes
    with shelf(settings_for(folder, 6 * MIB)) as after:
        assert after.disk.used_bytes == used_bytes


def test_an_extent_that_the_index_does_not_know_leaves_no_file(
    empty: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TierIOError("no commit today")

    with monkeypatch.context() as patched:
        patched.setattr(IndexClient, "commit", fail)
        assert empty.put(1, 0, 5).done == 0
        assert empty.disk.state == "read_only"
        assert not list(folder.glob("*.extent"))
    wait_for(empty, "ok")
    assert empty.put(1, 0, 5).done == 5


def test_lost_permissions_turn_it_off(found: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse_folder(path: Any, *more: Any, **named: Any) -> Any:  # noqa: ANN401 - as os.open
        if isinstance(path, Path) and path.name == "kv":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *more, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse_folder)
        wait_for(found, "off")
        assert "Permission denied" in found.disk.health.reason
    wait_for(found, "ok")
    assert found.whole(1, 5)


def test_a_file_system_that_turns_read_only_is_seen(
    found: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Directory.look

    def read_only(volume: Directory) -> Look:
        return real(volume)._replace(read_only=True)

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "look", read_only)
        wait_for(found, "read_only")
        assert found.whole(1, 5)
    wait_for(found, "ok")


def test_a_bad_extent_costs_its_blocks_and_not_the_tier(
    empty: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chain in range(20):  # two extents and more
        empty.put(chain, 0, 30)
    empty.settle()
    bad = empty.tier.space.index.get(key(0, 0))
    assert bad is not None
    extent = empty.tier.space.extents[bad.slot >> 32]
    monkeypatch.setattr(extent, "read", raise_eio)
    for _ in range(5):
        empty.get([key(0, 0)])
        assert empty.disk.state == "ok"
    assert not empty.has(0, 0), "it is not tried for ever"
    assert empty.tier.space.counts["unreadable"] == 1
    index = empty.tier.space.index
    good = [record.key for record in index if record.slot >> 32 != bad.slot >> 32]
    assert good
    assert all(empty.get([name]).done == 1 for name in good)


def test_an_unreadable_disk_at_the_start_is_no_damage(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexDamagedError("for the test")

    with shelf(settings) as before:
        before.put(1, 0, 5)
    with monkeypatch.context() as patched:
        patched.setattr(IndexClient, "__init__", fail)
        patched.setattr(os, "read", raise_eio)
        with pytest.raises(ConfigError, match="cannot be used: Input/output error"):
            NvmeDisk(settings)
    assert not list(folder.glob("index.damaged-*"))
    with shelf(settings) as after:
        assert after.whole(1, 5)


# Calls that hang


@pytest.fixture
def short_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "HANG_S", 0.2)


@pytest.mark.usefixtures("short_hang")
def test_a_commit_that_hangs_stops_nothing_but_writes(
    found: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(os.fdatasync)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", gate)
        found.put(2, 0, 5)
        wait_for(found, "read_only")
        assert gate.waiting == 1
        shown = disk_gauges(found.disk, Numbers())
        assert shown["kvstore_tier_stalled_seconds", "nvme", "keeper"] > 0.2
        assert shown["kvstore_tier_stalled_seconds", "nvme", "reads"] == 0.0
        shown = state_gauges({"nvme": found.disk.state})
        assert shown["kvstore_tiers", "nvme", "read_only"] == 1.0
        assert shown["kvstore_tiers", "nvme", "ok"] == 0.0
        watch = Watch()
        assert found.whole(1, 5)
        found.disk.resize(32 * MIB)
        assert found.tier.lookup(key(2, 0)) is LookupResult.HIT
        assert watch.own_s() < 1.0
        gate.go_on.set()
    wait_for(found, "ok")
    assert found.disk.stalled_s["keeper"] == 0.0
    assert found.put(3, 0, 5).done == 5


@pytest.mark.usefixtures("short_hang")
def test_a_directory_that_cannot_be_looked_at_for_long_is_off(
    empty: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(os.fstatvfs)
    empty.put(1, 0, 5)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstatvfs", gate)
        wait_for(empty, "off")
        assert not empty.has(1, 0)
        gate.go_on.set()
    wait_for(empty, "ok")
    assert empty.whole(1, 5)


CALLS = (
    *("open", "stat", "fstat", "statvfs", "fstatvfs", "listdir", "unlink", "mkdir", "ftruncate"),
    *("fsync", "fdatasync", "posix_fallocate", "pread", "pwrite", "preadv", "pwritev", "close"),
)


def test_the_stores_thread_never_calls_the_file_system(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth, eviction, commits, resize, off and back: all of it on threads of the tier."""
    here, wrong = threading.get_ident(), set()

    def watched(name: str, real: Wrap) -> Wrap:
        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as the real one
            caller = sys._getframe(1).f_globals["__name__"]
            if threading.get_ident() == here and caller.startswith("tiers."):
                wrong.add(f"{caller}: {name}")
            return real(*arguments, **named)

        return call

    with shelf(settings_for(folder, 8 * MIB)) as found:
        with monkeypatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, watched(name, getattr(os, name)))
            for name in ("__init__", "commit", "close"):
                watching = watched(f"IndexClient.{name}", getattr(IndexClient, name))
                patched.setattr(IndexClient, name, watching)
            found.fill(40)
            assert found.tier.space.counts["evicted"]
            found.disk.resize(6 * MIB)
            wait(found, lambda: found.disk.used_bytes <= 6 * MIB)
            found.disk.resize(16 * MIB)
            for chain in range(40, 80):
                found.put(chain, 0, 30)
            with moved_away(found, folder):
                pass
            found.disk.health.write_failed("a write", OSError(5, "for the test"), clock.now_s())
            wait_for(found, "ok")
            assert found.put(99, 0, 5).done == 5
            found.settle()
        assert not wrong


# The directory goes, and comes back


def test_a_directory_that_goes_turns_it_off_and_it_comes_back_with_its_blocks(
    settings: NvmeConfig, folder: Path
) -> None:
    with shelf(settings) as found:
        found.fill(10, 5)
        found.settle()
        before = found.tier.space
        with moved_away(found, folder) as elsewhere:
            assert not found.has(1, 0)
            assert found.get([key(1, 0)]).done == 0
            assert isinstance(found.put(90, 0, 1).error, TierIOError)
            assert not open_files(elsewhere), "nothing is held"
        assert found.tier.space is not before, "its index is read, as at a start"
        assert all(found.whole(chain, 5) for chain in range(10))
        assert found.put(90, 0, 5).done == 5
        found.settle()
    with shelf(settings) as after:
        assert after.whole(90, 5)
        assert after.whole(3, 5)


def test_another_directory_in_its_place_is_not_touched(
    found: Shelf, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with moved_away(found, folder):
        folder.mkdir()  # as a mount point is, once the disk is unmounted
        wait(found, lambda: "'lock'" in found.disk.health.reason)
        assert list(folder.iterdir()) == []
        (folder / "lock").write_text("1\nanother\nuse\n")
        wait(found, lambda: "another directory" in found.disk.health.reason)
        assert (folder / "lock").read_text() == "1\nanother\nuse\n"
        assert [path.name for path in folder.iterdir()] == ["lock"]
        assert found.disk.state == "off"
        shutil.rmtree(folder)
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
            generation = found.disk.attached.next_generation()
        with moved_away(found, folder) as elsewhere, shelf(settings_for(elsewhere)) as other:
            other.tier.discard([key(1, 3)])
            other.put(3, 0, 5)
        assert found.whole(3, 5)
        assert found.whole(2, 5)
        assert [found.has(1, index) for index in range(5)] == [True] * 3 + [False] * 2
        assert found.tier.space.counts >= counted, "counters do not go back"
        changes = found.tier.take_changes()
        assert (changes.added, set(changes.removed)) == ([], {key(1, 3), key(1, 4)})
        assert found.disk.attached.next_generation() > generation
        assert found.tier.space.attached == 1
        assert found.put(4, 0, 5).done == 5
        found.settle()
        kept = set(found.keys())
    with shelf(settings) as after:
        assert set(after.keys()) == kept


def test_nothing_is_kept_of_what_was_known_before_a_return(
    settings: NvmeConfig, folder: Path
) -> None:
    """A start freezes what the collector of garbage has not seen: circles would stay for ever."""
    with shelf(settings) as found:
        found.fill(4)
        found.settle()
        with moved_away(found, folder):
            pass
        found.settle()  # threads remember what they have moved last: not of this space
        before = weakref.ref(found.tier.space)
        with moved_away(found, folder):
            pass
        found.settle()
        wait(found, lambda: before() is None)


def test_a_directory_that_another_store_is_using_is_left_to_it(found: Shelf, folder: Path) -> None:
    with moved_away(found, folder) as elsewhere, shelf(settings_for(elsewhere)) as other:
        folder.symlink_to(elsewhere)
        wait(found, lambda: "in use by" in found.disk.health.reason)
        assert other.whole(1, 5)
        folder.unlink()
    assert found.whole(1, 5)


def test_blocks_forgotten_while_it_is_off_stay_forgotten(
    settings: NvmeConfig, folder: Path
) -> None:
    with shelf(settings) as found:
        found.fill(4, 5)
        found.settle()
        with moved_away(found, folder):
            found.tier.discard([key(1, 2)])
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
                if found.disk.attached.room.making:
                    break
                found.put(chain, 0, 1)
            wait(found, lambda: gate.waiting)
            lose(found)
            found.disk.poll()
            assert not found.disk._remount.at_home
            assert found.disk.attached.directory.lock_fd >= 0
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
    with shelf(settings, settled=False) as found:
        assert found.disk.state == "loading"
        lose(found)
        away(found)
        assert not open_files(folder)
        let_back(found)
        wait_for(found, "ok")
        assert all(found.whole(chain, 20) for chain in range(10))


def test_O17_what_is_written_is_committed_as_a_disk_ends_that_takes_no_writes(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was dropped: a disk that is read-only for a moment was taken for one that is done."""
    monkeypatch.setattr(health, "RETRY_S", 600.0)
    slow = msgspec.structs.replace(settings, durability_ns=10**12)
    with shelf(slow) as found:
        found.put(1, 0, 5)
        found.settle()
        monkeypatch.setattr(NvmeDisk, "flush", NvmeDisk.poll)  # commits are in no hurry
        assert found.put(1, 5, 20).done == 15
        found.disk.health.only_reads("for the test", clock.now_s())
        began_s = time.monotonic()
        found.tier.close()
        found.disk.close()
        assert time.monotonic() - began_s < disk.CLOSE_S / 2, "nothing is waited for"
    with shelf(settings) as found:
        assert found.whole(1, 20)
