"""Processes that are forked for tests end, fail and are killed as those that are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.forked import Forked


def tell(fds: list[int], word: str) -> None:
    os.write(fds[0], f"{word} {os.getpid()} {os.getsid(0)}".encode())


def stay(_fds: list[int]) -> None:
    time.sleep(600)


def test_it_has_what_it_is_given_and_a_session_of_its_own() -> None:
    ours, theirs = os.pipe()
    process = Forked(tell, [theirs], "here")
    os.close(theirs)
    with os.fdopen(ours, "rb") as told:
        assert told.read().decode() == f"here {process.pid} {process.pid}"
    assert process.wait(600) == 0
    assert process.pid != os.getpid()


def test_one_that_stays_is_waited_for_and_killed() -> None:
    process = Forked(stay, [])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is process.returncode is None
    process.kill()
    assert process.wait(600) == -signal.SIGKILL


SCRIPT = """
from tests.harness.forked import Forked, start_server
from tests.test_forked import stay
start_server([], {})
print(Forked(stay, []).pid, flush=True)
"""


def test_what_is_left_over_ends_with_the_process_that_started_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    end = time.monotonic() + 600
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
