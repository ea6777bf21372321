"""A worker that was killed: its slots are not free before its process has ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.store import endings
from tests.harness.live import LiveStore, eventually, store_settings
from tests.harness.standstill import machine

DYING = """
import os
import signal
import sys
from types import SimpleNamespace
from kvstore.wire import engine as p
from tests.harness.live import LiveEngine

engine = LiveEngine(SimpleNamespace(path=sys.argv[1]), "dying")
engine.put([b"a" * 32])
sys.stdin.readline()
if sys.argv[2] == "forked":
    if not os.fork():
        os.kill(os.getppid(), signal.SIGKILL)
    sys.stdin.read()  # the fork, with both sockets, until the test is over
    os._exit(0)
if sys.argv[2] == "goodbye":
    engine.worker.send(p.Detach(""))
elif "turned away" in sys.argv[2]:
    engine.worker.sock.sendall(b"no message" * 9)
    engine.worker.read_to_end()
    if "goodbye" in sys.argv[2]:
        engine.worker.send(p.Detach(""))
engine.scheduler.close()
engine.worker.close()
sys.stdin.read()
"""


@contextmanager
def dying(store: LiveStore, how: str = "killed") -> Iterator[subprocess.Popen[bytes]]:
    """Run an engine that closes its connections on a signal, and whose process lives on.

    So it is for a moment when the kernel ends a process, which closes its files one by one.
    """
    command = [sys.executable, "-c", DYING, store.path, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        sessions = store.server.store.sessions
        eventually(lambda: "dying" in sessions and sessions["dying"].granted)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        yield process
        process.kill()


@pytest.mark.parametrize("how", ["killed", "turned away"])
def test_O23_slots_of_a_killed_worker_are_free_when_its_process_has_ended(
    tmp_path: Path, how: str
) -> None:
    """Its GPU goes on writing for a moment: into blocks of others, if they had the slots."""
    with LiveStore(store_settings(tmp_path)) as store, dying(store, how) as process:
        sessions = store.server.store.sessions
        session = sessions["dying"]
        eventually(lambda: not session.workers)
        time.sleep(0.5)
        assert sessions["dying"] is session
        assert session.granted
        process.kill()
        eventually(lambda: "dying" not in sessions)


def test_O23_a_killed_worker_is_waited_for_although_the_machine_stood_still(
    tmp_path: Path,
) -> None:
    """Its process stood still, too: its end is as near as it was before."""
    with (
        machine() as running,
        LiveStore(store_settings(tmp_path)) as store,
        dying(store) as process,
    ):
        session = store.server.store.sessions["dying"]
        eventually(lambda: not session.workers)
        running.stands_still()
        time.sleep(0.5)
        assert store.server.store.sessions["dying"] is session
        assert session.granted
        process.kill()
        eventually(lambda: "dying" not in store.server.store.sessions)


@pytest.mark.parametrize("how", ["goodbye", "turned away, goodbye"])
def test_O23_a_worker_that_says_goodbye_is_not_waited_for(tmp_path: Path, how: str) -> None:
    """Workers do so after their last copy, also when they are turned away for a wrong message."""
    with LiveStore(store_settings(tmp_path)) as store, dying(store, how):
        sessions = store.server.store.sessions
        eventually(lambda: not sessions["dying"].workers if "dying" in sessions else True)
        time.sleep(0.3)
        assert "dying" not in sessions


def test_O23_a_killed_engine_is_gone_though_a_fork_of_it_keeps_its_sockets(tmp_path: Path) -> None:
    """So its leases and slots come back, and another engine can have its name."""
    with LiveStore(store_settings(tmp_path)) as store, dying(store, "forked") as process:
        process.wait()
        eventually(lambda: "dying" not in store.server.store.sessions)


def test_O23_a_process_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "WAIT_S", 0.5)
    with LiveStore(store_settings(tmp_path)) as store, dying(store) as process:
        eventually(lambda: "dying" not in store.server.store.sessions)
        assert process.poll() is None, "it has not ended"


def test_O23_a_store_ends_while_a_worker_ends(tmp_path: Path) -> None:
    with LiveStore(store_settings(tmp_path)) as store, dying(store):
        waiting = store.server.store.sessions.endings._waiting
        eventually(lambda: waiting)
        store.stop()
        assert store.seconds < 5
        assert not waiting
