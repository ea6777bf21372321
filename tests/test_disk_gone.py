"""A whole store on a real file system that is filled, frozen, shut down, or pulled away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.live import eventually
from tests.harness.loopfs import LoopDisk, loop_disk
from tests.harness.served import CHAIN, PROMOTE_S, Served, served

pytestmark = pytest.mark.slow  # whole stores on a disk that is made to fail


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path) as made:
        made.pull()
        (made.folder / "kv").mkdir()  # of a start without the disk, say; the disk hides it
        made.mount()
        yield made


@pytest.fixture
def store(disk: LoopDisk, tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, disk.folder / "kv") as made:
        yield made


def assert_nothing_behind(disk: LoopDisk) -> None:
    """Nothing is written to the folder that the disk was mounted on."""
    assert not disk.mounted
    assert list(disk.folder.rglob("*")) == [disk.folder / "kv"]


def test_a_full_file_system(store: Served, disk: LoopDisk) -> None:
    store.fill()
    disk.fill()
    before = store.disk_bytes
    for _ in range(3):
        store.work()
        eventually(lambda: store.disk_bytes == before)  # an extent counts while it is tried
    assert store.state in {"ok", "read_only"}
    disk.empty()
    store.work_until(lambda: store.disk_bytes > before, "growth")
    evicted = store.count("evicted")
    names = store.fill()
    # On a busy machine room may come later than what it is for.
    store.assert_back(names, lost_max=min(CHAIN, int(store.count("evicted") - evicted)))


def test_a_file_system_that_turned_read_only(store: Served, disk: LoopDisk) -> None:
    names = store.fill()
    disk.turn_read_only()
    store.wait_for("read_only")
    store.work()
    assert sum(store.get(name)[1] for name in names), "it can still be read"
    disk.pull()
    store.wait_for("off")
    disk.wait_unused()
    disk.mount()
    store.assert_back(names)


def test_a_device_that_is_gone(store: Served, disk: LoopDisk) -> None:
    names = store.fill()
    disk.shut_down()
    store.wait_for("off")
    store.work()
    disk.pull()
    disk.wait_unused()
    disk.mount()
    store.assert_back(names)


def test_a_mount_that_is_pulled_and_given_back(store: Served, disk: LoopDisk) -> None:
    names = store.fill()
    for _ in range(2):
        disk.pull()
        store.wait_for("off")
        disk.wait_unused()
        assert sum(store.get(name)[1] for name in names) == 0, "from a disk that is not there"
        store.work()
        assert_nothing_behind(disk)
        disk.mount()
        store.assert_back(names)


def test_a_mount_that_is_back_at_once(store: Served, disk: LoopDisk) -> None:
    names = store.fill()
    disk.pull()
    disk.mount()
    store.work()
    store.assert_back(names)


def test_a_store_that_ends_while_its_disk_is_gone(store: Served, disk: LoopDisk) -> None:
    names = store.fill()
    disk.pull()
    store.wait_for("off")
    store.stop()
    assert "Traceback" not in store.log
    assert_nothing_behind(disk)
    disk.wait_unused()
    disk.mount()
    store.start()
    store.assert_back(names)


def test_writes_that_hang_in_the_kernel(store: Served, disk: LoopDisk) -> None:
    names = store.fill()
    with disk.frozen():
        started = time.monotonic()
        while time.monotonic() - started < 3 * PROMOTE_S:
            store.work(1)
        assert sum(store.get(name)[1] for name in names), "it can still be read"
    store.assert_back(names)
