"""A disk that is pulled, exchanged, full, forbidden or slow, under a running tier."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import config
from kvstore.config import NvmeConfig
from kvstore.errors import ConfigError, TierFull, TierIOError
from kvstore.types import LookupResult
from tests.live import LiveStore, eventually
from tests.nvme_blocks import MIB, WAIT_S, Shelf, disk_bytes, key, settings_for, shelf
from tiers.nvme import NvmeDisk, disk, health, watch
from tiers.nvme.journal import Commit, Journal
from tiers.nvme.recovery import Phase
from tiers.nvme.volume import Look, Volume

Wrap = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RETRY_S", 0.1)
    monkeypatch.setattr(watch, "EVERY_S", 0.05)


@pytest.fixture
def settings(tmp_path: Path) -> NvmeConfig:
    return settings_for(tmp_path / "kv")


@pytest.fixture
def folder(settings: NvmeConfig) -> Path:
    return Path(settings.path)


def wait(found: Shelf, done: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end, f"{found.disk.state}: {found.disk._health.reason}"
        found.disk.flush()


def wait_for(found: Shelf, state: str) -> None:
    wait(found, lambda: found.disk.state == state)


def away(found: Shelf) -> None:
    """Wait until it is off and has let go of everything."""
    wait(found, lambda: found.disk._recovery.phase is Phase.AWAY)


def whole(found: Shelf, chain: int, count: int) -> bool:
    return found.get([key(chain, index) for index in range(count)]).done == count


def open_files(folder: Path) -> list[str]:
    """Files in a directory that this process has open, by whatever name it has now."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if Path(target).is_relative_to(folder):
            found.append(target)
    return found


# The directory goes, and comes back


def test_a_directory_that_goes_turns_it_off_and_it_comes_back_with_its_blocks(
    settings: NvmeConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with shelf(settings) as found:
        for chain in range(10):
            found.put(chain, 0, 5)
        found.settle()
        folder.rename(folder.with_name("elsewhere"))
        wait_for(found, "off")
        assert not found.has(1, 0)
        assert found.get([key(1, 0)]).done == 0
        assert isinstance(found.put(90, 0, 1).error, TierIOError)
        away(found)
        assert not open_files(folder.with_name("elsewhere")), "nothing is held"
        folder.with_name("elsewhere").rename(folder)
        wait_for(found, "ok")
        assert all(whole(found, chain, 5) for chain in range(10))
        assert found.put(90, 0, 5).done == 5
        found.settle()
    assert "read anew" not in caplog.text, "it knew its blocks"
    with shelf(settings) as after:
        assert whole(after, 90, 5)
        assert whole(after, 3, 5)


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
        assert whole(found, 1, 5)
    assert "is off" not in caplog.text


def test_no_extent_is_made_in_the_directory_below_a_mount_point(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 1000.0)  # it has not been seen yet
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
        monkeypatch.setattr(watch, "EVERY_S", 0.05)
        wait_for(found, "ok")
        assert whole(found, 1, 5)


def test_a_directory_that_another_store_has_used_is_read_anew(
    settings: NvmeConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.put(2, 0, 5)
        found.settle()
        counted = found.tier.space.counts.copy()
        elsewhere = folder.with_name("elsewhere")
        folder.rename(elsewhere)
        away(found)
        with shelf(settings_for(elsewhere)) as other:
            other.tier.discard([key(1, 3)])
            other.put(3, 0, 5)
        elsewhere.rename(folder)
        wait_for(found, "ok")
        assert "read anew" in caplog.text
        assert whole(found, 3, 5)
        assert whole(found, 2, 5)
        assert [found.has(1, index) for index in range(5)] == [True] * 3 + [False] * 2
        assert found.tier.space.counts >= counted, "counters do not go back"
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
            assert whole(other, 1, 5)
        wait_for(found, "ok")
        assert whole(found, 1, 5)
    folder.unlink()


def test_blocks_forgotten_while_it_is_off_stay_forgotten(
    settings: NvmeConfig, folder: Path
) -> None:
    with shelf(settings) as found:
        for chain in range(4):
            found.put(chain, 0, 5)
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
        assert whole(after, 2, 5)


def test_it_comes_back_while_its_index_is_being_read(settings: NvmeConfig, folder: Path) -> None:
    with shelf(settings) as before:
        for chain in range(10):
            before.put(chain, 0, 20)
    made = NvmeDisk(settings)
    found = Shelf(made)
    assert made.state == "loading"
    made._health.lost("for the test", time.monotonic())
    away(found)
    assert not open_files(folder)
    wait_for(found, "ok")
    assert all(whole(found, chain, 20) for chain in range(10))
    found.tier.close()
    made.close()


# Writes, commits and reads that fail


def test_a_commit_that_fails_makes_it_read_only_and_is_made_up_for(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TierIOError("no commit today")

    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "commit", fail)
            found.put(2, 0, 5)
            wait_for(found, "read_only")
            assert whole(found, 1, 5)
            assert whole(found, 2, 5)
            assert isinstance(found.put(3, 0, 5).error, TierIOError)
        found.settle()
        assert found.put(3, 0, 5).done == 5
        found.settle()
    with shelf(settings) as after:
        assert all(whole(after, chain, 5) for chain in (1, 2, 3))


def test_after_a_commit_that_failed_the_index_is_opened_anew(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB refuses all commits once it could not write its head."""
    real, broken = Journal.commit, set()

    def commit(journal: Journal, changes: Commit) -> None:
        if id(journal) in broken:
            raise TierIOError("MDB_PANIC")
        real(journal, changes)

    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        monkeypatch.setattr(Journal, "commit", commit)
        broken.add(id(found.disk._shared.opening.journal))
        found.put(2, 0, 5)
        wait_for(found, "read_only")
        found.settle()
        assert found.put(3, 0, 5).done == 5
        found.settle()
    with shelf(settings) as after:
        assert all(whole(after, chain, 5) for chain in (1, 2, 3))


def test_an_index_that_may_have_a_commit_that_failed_is_read_anew(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Journal.commit

    def land_and_fail(journal: Journal, changes: Commit) -> None:
        real(journal, changes)
        raise TierIOError("for the test")

    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "commit", land_and_fail)
            found.put(2, 0, 5)
            wait_for(found, "read_only")
            folder.rename(folder.with_name("elsewhere"))
            away(found)
        before = found.tier.space
        folder.with_name("elsewhere").rename(folder)
        wait_for(found, "ok")
        assert found.tier.space is not before
        assert whole(found, 1, 5)
        assert whole(found, 2, 5)


def test_an_extent_whose_removal_fails_still_counts_and_goes_later(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shelf(settings) as found:
        for chain in range(40):
            found.put(chain, 0, 30)
        found.settle()
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", _raise_eio)
            found.disk.resize(6 * MIB)
            wait_for(found, "read_only")
            assert found.disk.used_bytes > 6 * MIB
        wait(found, lambda: found.disk.used_bytes <= 6 * MIB)
        assert disk_bytes(folder) <= 6 * MIB
        assert found.disk._room.stuck == []
        found.settle()
    known = {path.name for path in folder.glob("*.extent")}
    with shelf(settings_for(folder, 6 * MIB)) as after:
        assert {path.name for path in folder.glob("*.extent")} == known
        assert after.keys()


def test_an_extent_that_the_index_does_not_know_leaves_no_file(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TierIOError("no commit today")

    with shelf(settings) as found:
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "commit", fail)
            assert found.put(1, 0, 5).done == 0
            assert found.disk.state == "read_only"
            assert not list(folder.glob("*.extent"))
        wait_for(found, "ok")
        assert found.put(1, 0, 5).done == 5


def test_lost_permissions_turn_it_off(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refuse(os.open, "kv", errno.EACCES))
            wait_for(found, "off")
            assert "Permission denied" in found.disk._health.reason
        wait_for(found, "ok")
        assert whole(found, 1, 5)


def refuse(real: Wrap, name: str, number: int) -> Wrap:
    def call(path: Any, *more: Any, **named: Any) -> Any:  # noqa: ANN401 - as os.open
        if isinstance(path, str | Path) and Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *more, **named)

    return call


def test_a_file_system_that_turns_read_only_is_seen(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Volume.look

    def read_only(volume: Volume) -> Look:
        return real(volume)._replace(read_only=True)

    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        with monkeypatch.context() as patched:
            patched.setattr(Volume, "look", read_only)
            wait_for(found, "read_only")
            assert whole(found, 1, 5)
        wait_for(found, "ok")


def test_a_bad_extent_costs_its_blocks_and_not_the_tier(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shelf(settings) as found:
        for chain in range(20):  # two extents and more
            found.put(chain, 0, 30)
        found.settle()
        bad = found.tier.space.index.get(key(0, 0))
        assert bad is not None
        extent = found.tier.space.extents[bad.slot >> 32]
        monkeypatch.setattr(extent, "read", _raise_eio)
        for _ in range(5):
            found.get([key(0, 0)])
            assert found.disk.state == "ok"
        assert not found.has(0, 0), "it is not tried for ever"
        assert found.tier.space.counts["unreadable"] == 1
        index = found.tier.space.index
        good = [record.key for record in index if record.slot >> 32 != bad.slot >> 32]
        assert good
        assert all(found.get([name]).done == 1 for name in good)


def _raise_eio(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_an_unreadable_disk_at_the_start_is_no_damage(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TierIOError("data.mdb: Input/output error")

    with shelf(settings) as before:
        before.put(1, 0, 5)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "__init__", fail)
        patched.setattr(os, "read", _raise_eio)
        with pytest.raises(ConfigError, match="cannot be used: Input/output error"):
            NvmeDisk(settings)
    assert not list(folder.glob("index.damaged-*"))
    with shelf(settings) as after:
        assert whole(after, 1, 5)


# Calls that hang


class Gate:
    """Calls that hang until the gate opens."""

    def __init__(self, real: Wrap) -> None:
        self.go_on = threading.Event()
        self.waiting = 0
        self._real = real

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as the real one
        self.waiting += 1
        self.go_on.wait(30)
        return self._real(*arguments, **named)


@pytest.fixture
def short_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "HANG_S", 0.2)


@pytest.mark.usefixtures("short_hang")
def test_a_commit_that_hangs_stops_nothing_but_writes(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(os.fdatasync)
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", gate)
            found.put(2, 0, 5)
            wait_for(found, "read_only")
            assert gate.waiting == 1
            assert found.disk.stalled_s["keeper"] > 0.2
            started = time.monotonic()
            assert whole(found, 1, 5)
            found.disk.resize(32 * MIB)
            assert found.tier.lookup(key(2, 0)) is LookupResult.HIT
            assert time.monotonic() - started < 1.0
            gate.go_on.set()
        wait_for(found, "ok")
        assert found.disk.stalled_s["keeper"] == 0.0
        assert found.put(3, 0, 5).done == 5


@pytest.mark.usefixtures("short_hang")
def test_a_directory_that_cannot_be_looked_at_for_long_is_off(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(os.fstatvfs)
    with shelf(settings) as found:
        found.put(1, 0, 5)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fstatvfs", gate)
            wait_for(found, "off")
            assert not found.has(1, 0)
            gate.go_on.set()
        wait_for(found, "ok")
        assert whole(found, 1, 5)


def test_a_keeper_that_hangs_does_not_hold_the_end(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "CLOSE_S", 0.3)
    gate = Gate(os.fdatasync)
    made = NvmeDisk(settings)
    found = Shelf(made)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", gate)
        found.put(2, 0, 5)
        wait(found, lambda: gate.waiting)
        started = time.monotonic()
        made.close()
        assert time.monotonic() - started < 2.0
        assert "I/O hangs" in caplog.text
        gate.go_on.set()


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
            for name in ("__init__", "commit", "mark", "close", "tables"):
                watching = watched(f"Journal.{name}", getattr(Journal, name))
                patched.setattr(Journal, name, watching)
            for chain in range(40):
                found.put(chain, 0, 30)
            assert found.tier.space.counts["evicted"]
            found.disk.resize(6 * MIB)
            wait(found, lambda: found.disk.used_bytes <= 6 * MIB)
            found.disk.resize(16 * MIB)
            for chain in range(40, 80):
                found.put(chain, 0, 30)
            folder.rename(folder.with_name("elsewhere"))
            away(found)
            folder.with_name("elsewhere").rename(folder)
            wait_for(found, "ok")
            found.disk._health.write_failed("a write", OSError(5, "for the test"), time.monotonic())
            wait_for(found, "ok")
            assert found.put(99, 0, 5).done == 5
            found.settle()
        assert not wrong


# Room


def test_damaged_indexes_that_are_kept_count(folder: Path) -> None:
    with shelf(settings_for(folder, 16 * MIB)) as found:
        for chain in range(80):
            found.put(chain, 0, 30)
        found.settle()
        assert found.disk.used_bytes > 12 * MIB
        (folder / "index.damaged-19990101-000000").mkdir()
        (folder / "index.damaged-19990101-000000" / "data.mdb").write_bytes(b"x" * 9 * MIB)
        wait(found, lambda: disk_bytes(folder) <= 16 * MIB)
        wait(found, lambda: 9 * MIB < found.disk.used_bytes <= 16 * MIB)
        assert found.tier.space.counts["resize"]
        assert found.keys()


def test_a_file_system_without_room_gets_no_extents_and_the_tier_goes_on(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Volume.look

    def full(volume: Volume) -> Look:
        return real(volume)._replace(free_bytes=settings.extent_bytes - 1)

    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        made = len(list(folder.glob("*.extent")))
        with monkeypatch.context() as patched:
            patched.setattr(Volume, "look", full)
            for chain in range(2, 40):
                assert found.put(chain, 0, 30).done == 30
        assert found.disk.state == "ok"
        assert len(list(folder.glob("*.extent"))) == made
        assert found.tier.space.counts["evicted"]


def test_a_file_system_of_which_nothing_is_known_gets_no_extent(
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shelf(settings) as found:
        with monkeypatch.context() as patched:
            patched.setattr(watch, "EVERY_S", 1000.0)
            patched.setattr(os, "fstatvfs", _raise_eio)
            assert found.put(1, 0, 5).done == 0
        assert not list(folder.glob("*.extent"))
        wait_for(found, "ok")
        assert found.put(1, 0, 5).done == 5


def test_the_reserve_of_the_file_system_is_not_free(settings: NvmeConfig, folder: Path) -> None:
    with shelf(settings):
        found = os.statvfs(folder)
        seen = _look(folder)
        assert seen.free_bytes <= found.f_bavail * found.f_frsize - 64 * MIB


def _look(folder: Path) -> Look:
    volume = Volume(folder.with_name("another"))
    volume.open(0.0)
    try:
        return volume.look()
    finally:
        volume.close()


def test_eviction_ahead_begins_below_the_low_mark_and_goes_on_to_the_high_one(
    folder: Path,
) -> None:
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
    settings: NvmeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(os.posix_fallocate)
    with shelf(settings) as found:
        for chain in range(16):  # fills an extent, almost
            found.put(chain, 0, 15)
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", gate)
            for chain in range(16, 40):
                if gate.waiting:
                    break
                found.put(chain, 0, 1)
            wait(found, lambda: gate.waiting)
            small = 4 * MIB
            found.disk.resize(small)
            gate.go_on.set()
        found.settle()
        wait(found, lambda: disk_bytes(folder) <= small and found.disk.used_bytes <= small)


@pytest.mark.parametrize("state", ["off", "read_only", "loading"])
def test_a_smaller_cap_in_any_state_holds_in_the_end(
    settings: NvmeConfig, folder: Path, state: str
) -> None:
    with shelf(settings) as before:
        for chain in range(60):
            before.put(chain, 0, 30)
    made = NvmeDisk(settings)
    found = Shelf(made)
    if state != "loading":
        found.settle()
    if state == "off":
        made._health.lost("for the test", time.monotonic())
        away(found)
    elif state == "read_only":
        made._health.only_reads("for the test", time.monotonic())
    made.resize(8 * MIB)
    found.settle()
    wait(found, lambda: disk_bytes(folder) <= 8 * MIB)
    found.settle()
    assert found.keys()
    assert all(found.get([name]).done == 1 for name in found.keys())  # noqa: SIM118
    found.tier.close()
    made.close()


# Jobs


def test_a_job_larger_than_the_disk_ends(tmp_path: Path) -> None:
    small = settings_for(tmp_path / "small", 8 * MIB)
    with shelf(small, slot_bytes=MIB // 2) as found:
        result = found.put(1, 0, 40)
        assert result.done < 40
        assert isinstance(result.error, TierFull)
        found.settle()
        assert found.put(2, 0, 1).done == 1


def test_blocks_without_their_parent_are_not_reported_as_stored(settings: NvmeConfig) -> None:
    with shelf(settings) as found:
        result = found.put(1, 3, 5)
        assert (result.done, result.error) == (0, None)
        assert found.tier.space.counts["unplaced"] == 2


# Durability


def test_a_change_that_just_missed_a_commit_waits_for_the_window_once(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    window_s = settings.durability_ns / 1e9
    with shelf(settings) as found:
        found.settle()
        commits = found.disk._commits
        commits._hurry = False
        began: list[float] = []
        now_s = 1000.0
        monkeypatch.setattr(commits, "_begin", lambda: began.append(now_s))
        commits.under_way = True
        found.tier.space.to_delete.append(object())  # type: ignore[arg-type]
        commits.step(now_s)
        now_s += window_s / 2
        commits.under_way = False
        commits.step(now_s)
        assert not began
        now_s = 1000.0 + window_s
        assert commits.due_at_s == now_s
        commits.step(now_s)
        assert began == [now_s], "not a window after the commit before has ended"
        found.tier.space.to_delete.clear()


def test_an_idle_store_commits_when_the_window_ends(folder: Path) -> None:
    settings = NvmeConfig(str(folder), 64 * MIB, 2 * MIB, durability_ns=500_000_000, threads=2)
    with shelf(settings) as found:
        found.put(1, 0, 1)
        while found.disk.busy:
            found.disk.poll()
        assert found.disk._commits.pending
        assert 0 < found.disk.next_s <= 0.5
        found.settle()
        assert found.disk.next_s > 10.0


def test_the_server_polls_when_the_disk_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(
        f'[server]\nsocket = "{tmp_path}/kv.sock"\nmetrics = ""\n[cpu]\ncapacity = "16MiB"\n'
        f'[nvme]\npath = "{tmp_path}/kv"\ncapacity = "128MiB"\n'
    )
    monkeypatch.setattr(NvmeDisk, "next_s", 0.0123)
    with LiveStore(config.load(path)) as store:
        waits: list[float] = []
        real = store.server._selector.select

        def watched(timeout: float) -> Any:  # noqa: ANN401 - as it comes
            waits.append(timeout)
            return real(timeout)

        monkeypatch.setattr(store.server._selector, "select", watched)
        eventually(lambda: waits)
        assert max(waits) == 0.0123
