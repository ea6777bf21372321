"""I/O calls of a whole store fail, are slow or hang: misses and counts, and it comes back."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.steal import Watch
from tests.bench.store import StoreFailed
from tests.harness.faults import Call, Faults, Kind
from tests.harness.served import PROMOTE_S, Served, served

pytestmark = pytest.mark.slow  # whole stores on a disk that is made to fail

FULL = (errno.ENOSPC, errno.EDQUOT)
ERRORS = (
    (Call.READ, Kind.EXTENTS, (errno.EIO,), "off"),
    (Call.WRITE, Kind.EXTENTS, (errno.EIO, *FULL, errno.EROFS), "read_only"),
    (Call.SYNC, Kind.EXTENTS, (errno.EIO,), "read_only"),
    (Call.SPACE, Kind.EXTENTS, (errno.EIO,), "read_only"),
    (Call.WRITE, Kind.INDEX, (errno.EIO, *FULL), "read_only"),
    (Call.SYNC, Kind.INDEX, (errno.EIO,), "read_only"),
)
HANGS = (
    (Call.READ, Kind.EXTENTS),
    (Call.WRITE, Kind.EXTENTS),
    (Call.SYNC, Kind.EXTENTS),
    (Call.OPEN | Call.SPACE | Call.META, Kind.ALL),
    (Call.ALL, Kind.INDEX),
    (Call.ALL, Kind.ALL),
)


@pytest.fixture
def faults(fault_library: Path, tmp_path: Path) -> Faults:
    (tmp_path / "kv").mkdir()
    return Faults(fault_library, tmp_path / "control", tmp_path / "kv")


@pytest.fixture
def store(faults: Faults, tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, faults.folder, faults) as made:
        yield made


def test_calls_that_fail_are_misses_until_they_work_again(store: Served, faults: Faults) -> None:
    for calls, kinds, numbers, state in ERRORS:
        names = store.fill()
        for number in numbers:
            with faults.of(calls, kinds, error=number) as fault:
                store.work_until(lambda: fault.hurt and store.state == state, state)  # noqa: B023
                store.work()
                assert os.strerror(number) in store.log
            store.assert_back(names)


def test_a_store_that_is_killed_serves_what_was_durable(store: Served) -> None:
    for _ in range(2):
        names = store.fill()
        store.work()
        store.kill()
        store.assert_back(names)


def test_calls_that_fail_now_and_then(store: Served, faults: Faults) -> None:
    names = store.fill()
    calls = Call.READ | Call.WRITE | Call.SYNC
    with faults.of(calls, Kind.EXTENTS, error=errno.EIO, chance=0.2) as fault:
        store.work_until(lambda: fault.hurt > 8, "calls that failed")
        store.work()
    store.wait_for("ok")
    # What could not be read several times is given up, and what hangs below it.
    counted = ("evicted", "unlinked", "unreadable")
    store.assert_back(names, lost_max=sum(int(store.count(event)) for event in counted))


def test_a_disk_that_fails_in_every_call_is_off(store: Served, faults: Faults) -> None:
    names = store.fill()
    for _ in range(2):
        with faults.of(Call.ALL, error=errno.EIO):
            store.wait_for("off")
            assert sum(store.get(name)[1] for name in names) == 0
            store.work()
        store.assert_back(names)


def test_a_disk_that_hangs_holds_up_nobody(store: Served, faults: Faults) -> None:
    for calls, kinds in HANGS:
        names = store.fill()
        with faults.of(calls, kinds, hang=True) as fault:
            store.work_until(lambda: fault.waiting, "a call that hangs")
            started = time.monotonic()
            while time.monotonic() - started < 2 * PROMOTE_S:
                store.work(1)
            assert fault.waiting
        store.assert_back(names)


def test_a_store_whose_disk_hangs_still_ends(store: Served, faults: Faults) -> None:
    store.fill()
    with faults.of(Call.ALL, hang=True) as fault:
        store.work_until(lambda: fault.waiting, "a call that hangs")
        watch = Watch()
        store.stop()
        assert watch.own_s() < 15
        assert "I/O hangs" in store.log


def test_a_slow_disk_is_slow_and_no_more(store: Served, faults: Faults) -> None:
    names = store.fill()
    with faults.of(Call.ALL, delay_ms=40) as fault:
        store.work()
        assert fault.hurt
        assert store.state == "ok"
    store.assert_back(names)


def test_a_store_that_ends_keeps_its_blocks_as_long_as_a_slow_disk_takes_them(
    store: Served, faults: Faults
) -> None:
    with faults.of(Call.WRITE, Kind.EXTENTS, delay_ms=300):
        names = store.put(5)  # memory has room for them
        kept = {name: store.get(name)[0] for name in names}  # of which none may be lost
        store.stop()
    assert sum(kept.values()) >= 8, kept
    told = re.search(r"(\d+) blocks were only in memory: copied (\d+)", store.log)
    assert told is not None
    assert told[1] == told[2], "it takes longer than a time without one"
    assert int(told[1]) >= 4
    store.start()
    store.assert_back(names, lost_max=2 * len(names) - sum(kept.values()))


@pytest.mark.parametrize("before", [False, True])
def test_a_store_that_ends_waits_for_a_disk_that_fails_for_a_moment(
    store: Served, faults: Faults, before: bool
) -> None:
    """Blocks that failed were counted as copied, and were lost."""
    with faults.of(Call.WRITE, Kind.EXTENTS, error=errno.EIO) as fault:
        names = store.put(5)
        kept = {name: store.get(name)[0] for name in names}
        if before:
            store.work_until(lambda: fault.hurt and store.state == "read_only", "read_only")
        ending = threading.Thread(target=store.stop)
        ending.start()
        time.sleep(0.3)
        assert fault.hurt
    ending.join()
    assert sum(kept.values()) >= 8, kept
    told = re.search(r"(\d+) blocks were only in memory: copied (\d+)", store.log)
    assert told is not None
    assert told[1] == told[2]
    store.start()
    store.assert_back(names, lost_max=2 * len(names) - sum(kept.values()))


# Permission


def test_a_store_that_may_not_open_its_files_loses_none(store: Served, faults: Faults) -> None:
    for kinds, number in (
        (Kind.EXTENTS, errno.EMFILE),
        (Kind.INDEX, errno.EACCES),
        (Kind.ALL, errno.EACCES),
    ):
        names = store.fill()
        store.stop()
        with faults.of(Call.OPEN, kinds, error=number), pytest.raises(StoreFailed) as failed:
            store.start()
        assert os.strerror(number) in str(failed.value)
        assert "Traceback" not in str(failed.value)
        store.start()
        store.assert_back(names)
