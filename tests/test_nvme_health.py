"""The states of a disk, by the table at the top of tiers/nvme/health.py."""

from __future__ import annotations

import errno
import os

import pytest

from kvstore.core.errors import TierIOError
from tiers.nvme import health
from tiers.nvme.health import READ_ERRORS_MAX, RETRY_MAX_S, RETRY_S, Health, HealthState, Pace


@pytest.fixture
def disk() -> Health:
    return Health("/kv")


def now(disk: Health) -> HealthState:
    """Return the state, which a type checker takes for the one of the line before."""
    return disk.state


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_what_cannot_be_written_makes_it_read_only() -> None:
    for what in ("a write", "a commit", "making an extent"):
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            disk = Health("/kv")
            disk.write_failed(what, failure(number), 100.0)
            assert now(disk) is HealthState.READ_ONLY
            assert disk.online
            assert not disk.writable
            assert what in disk.reason
            assert os.strerror(number) in disk.reason


def test_lost_permissions_turn_it_off_at_once() -> None:
    for number in (errno.EACCES, errno.EPERM):
        disk, again = Health("/kv"), Health("/kv")
        disk.read(1, failure(number), 100.0, extents=5)
        again.write_failed("a write", failure(number), 100.0)
        assert now(disk) is now(again) is HealthState.OFF


def test_failed_reads_in_a_row_turn_it_off(disk: Health) -> None:
    for extent in range(READ_ERRORS_MAX - 1):
        disk.read(extent, failure(errno.EIO), 100.0, extents=5)
    assert now(disk) is HealthState.OK
    disk.read(7, None, 100.0, extents=5)
    for extent in range(READ_ERRORS_MAX - 1):
        disk.read(extent, failure(errno.EIO), 100.0, extents=5)
    assert now(disk) is HealthState.OK, "one was good"
    disk.read(1, failure(errno.EIO), 100.0, extents=5)
    assert now(disk) is HealthState.OFF
    assert not disk.online
    assert not disk.writable


def test_one_bad_extent_of_several_is_not_the_disk(disk: Health) -> None:
    for _ in range(10 * READ_ERRORS_MAX):
        disk.read(1, failure(errno.EIO), 100.0, extents=2)
    assert now(disk) is HealthState.OK
    for _ in range(READ_ERRORS_MAX):
        disk.read(1, failure(errno.EIO), 100.0, extents=1)
    assert now(disk) is HealthState.OFF


@pytest.mark.parametrize(
    ("error", "state"),
    [
        *((failure(n), HealthState.OFF) for n in (errno.ENOENT, errno.EIO, errno.EACCES)),
        (TierIOError("another directory is in its place"), HealthState.OFF),
        (failure(errno.EMFILE), HealthState.OK),  # says something about the process only
    ],
)
def test_a_directory_that_cannot_be_looked_at_turns_it_off(
    disk: Health, error: Exception, state: HealthState
) -> None:
    disk.look_failed(error, 100.0)
    assert disk.state is state


def test_off_goes_before_loading_and_loading_before_read_only(disk: Health) -> None:
    disk.only_reads("full", 100.0)
    disk.loading(on=True)
    assert now(disk) is HealthState.LOADING
    disk.lost("gone", 100.0)
    assert now(disk) is HealthState.OFF
    disk.back(200.0)
    assert now(disk) is HealthState.LOADING
    disk.loading(on=False)
    assert now(disk) is HealthState.OK


def test_it_is_tried_after_a_while_and_after_longer_when_the_trouble_is_back_at_once(
    disk: Health,
) -> None:
    now_s, waits = 100.0, []
    for _ in range(7):
        disk.lost("gone", now_s)
        waits.append(disk.due_at_s - now_s)
        now_s = disk.due_at_s
        disk.back(now_s)
    assert waits[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert waits[-1] == RETRY_MAX_S
    disk.lost("gone", now_s + 10 * RETRY_MAX_S)
    assert disk.due_at_s == now_s + 10 * RETRY_MAX_S + RETRY_S


def test_the_log_has_one_line_for_each_change_with_reason_and_what_is_next(
    disk: Health, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", health.__name__)
    for _ in range(3):
        disk.write_failed("a write", failure(errno.ENOSPC), 100.0)
    disk.lost("the directory is gone", 101.0)
    disk.not_yet("the directory is gone", 106.0)
    disk.back(111.0)
    assert [record.getMessage() for record in caplog.records] == [
        (
            "/kv: ok -> read_only: a write failed: [Errno 28] No space left on device;"
            " serves its blocks; tries to write again in 5.0 s"
        ),
        (
            "/kv: read_only -> off: the directory is gone;"
            " all its blocks are misses; closes its files and looks again in 5.0 s"
        ),
        "/kv: off -> ok; reads and writes",
    ]


def test_calls_hang_when_all_that_can_run_at_one_time_do() -> None:
    pace = Pace(2)
    pace.began(10.0)
    assert pace.stalled_s(99.0) == 0.0, "the other thread would go on"
    pace.began(20.0)
    assert pace.stalled_s(99.0) == 89.0
    pace.began(30.0)
    pace.ended(40.0)
    assert pace.stalled_s(99.0) == 59.0
    pace.ended(50.0)
    assert pace.stalled_s(99.0) == 0.0
