"""The thread pool: what waits, what is new, and who is told."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter

import pytest

from tests.harness.patience import WAIT_S
from tiers import runner
from tiers.runner import NOTHING, Runner


def failed(job: str, error: Exception) -> str:
    return f"{job}: {error}"


def test_new_jobs_and_those_that_wait_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many copies under way are asked about all the time; a new one has to begin, too."""
    monkeypatch.setattr(runner, "AGAIN_S", 0.0)
    calls: list[str] = []
    held, gate, end = threading.Event(), threading.Event(), threading.Event()

    def work(job: str) -> str | None:
        if job == "gate":
            held.set()
            gate.wait(60)
            return job
        calls.append(job)
        return job if job.startswith("new") or end.is_set() else None

    made: Runner[str, str] = Runner("test", work, failed)
    for number in range(5):
        made.submit(f"waits {number}")
    assert made.wait(lambda: len(calls) >= 20, 60)
    made.submit("gate")
    assert held.wait(60)
    for number in range(20):
        made.submit(f"new {number}")
    before = len(calls)
    gate.set()
    assert made.wait(lambda: made.open == 5, 60)
    end.set()
    made.drain()
    made.close()
    first = Counter(name.split()[0] for name in calls[before : before + 40])
    assert first["new"] == 20
    assert first["waits"] >= 15


def test_who_waits_is_told_of_work_that_is_not_over() -> None:
    """The fence waits until a copy has begun, not until it has ended."""
    begun, end = threading.Event(), threading.Event()

    def work(job: str) -> str | None:
        begun.set()
        return job if end.is_set() else None

    made: Runner[str, str] = Runner("test", work, failed)
    made.submit("copy")
    assert made.wait(begun.is_set, 60)
    assert made.poll() == []
    end.set()
    made.close()
    assert made.poll() == ["copy"]


def test_a_panic_of_a_client_in_rust_is_a_result() -> None:
    """It is no Exception. The thread goes on, or the job's slots would stay pinned."""

    class PanicException(BaseException):
        pass

    def work(job: str) -> str:
        if job == "panic":
            raise PanicException("capacity overflow")
        return job

    made: Runner[str, str] = Runner("test", work, lambda _, error: repr(error))
    for job in ("panic", "next"):
        made.submit(job)
    assert made.wait(lambda: made.open == 0, WAIT_S)
    assert made.poll() == ["RuntimeError(\"PanicException('capacity overflow')\")", "next"]
    made.close()


def test_a_result_that_nobody_asks_for_is_not_kept() -> None:
    made: Runner[str, str] = Runner("test", lambda job: NOTHING if job == "quiet" else job, failed)
    for job in ("quiet", "said", "quiet"):
        made.submit(job)
    made.drain()
    assert made.poll() == ["said"]
    made.close()


def test_a_thread_that_waits_keeps_no_job() -> None:
    """A job may have views of memory that is to be given back."""

    class Job:
        pass

    made: Runner[Job, Job] = Runner("test", lambda job: job, lambda job, _: job)
    job = Job()
    kept = weakref.ref(job)
    made.submit(job)
    made.drain()
    assert made.poll() == [job]
    del job
    end = time.monotonic() + WAIT_S
    while kept() is not None:
        assert time.monotonic() < end, "it is kept"
        time.sleep(0.001)
    made.close()
