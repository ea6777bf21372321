"""A worker that was killed: its slots are not free before its process has ended."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.store import endings
from kvstore.store.server import Server
from tests.harness.live import LiveStore, eventually, store_settings

EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # the system call that ends one thread
DYING = f"""
import ctypes, os, sys, threading, time
from types import SimpleNamespace
from tests.harness.live import LiveEngine

engine = LiveEngine(SimpleNamespace(path=sys.argv[1]), "dying")
engine.put([b"a" * 32])
first = threading.get_native_id()

def last():
    while open(f"/proc/{{first}}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    engine.scheduler.close()
    engine.worker.close()
    print("closed", flush=True)
    sys.stdin.read()
    os._exit(9)

threading.Thread(target=last).start()
ctypes.CDLL(None).syscall({EXIT}, 0)
"""


@contextmanager
def dying(store: LiveStore) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that ends: its connections are closed, and its process is there until told.

    As when the kernel ends a process: its first thread has gone before the last closes its files.
    """
    command = [sys.executable, "-c", DYING, store.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"closed\n"
        yield process
        process.kill()


def test_O23_slots_of_a_killed_worker_are_free_when_its_process_has_ended(tmp_path: Path) -> None:
    """Its GPU goes on writing for a moment: into blocks of others, if they had the slots."""
    with LiveStore(store_settings(tmp_path)) as store, dying(store) as process:
        sessions = store.server.store.sessions
        granted = sessions["dying"].granted
        time.sleep(0.3)
        assert granted
        assert "dying" in sessions
        process.kill()
        eventually(lambda: "dying" not in sessions)


def test_O23_a_process_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "WAIT_S", 0.5)
    with LiveStore(store_settings(tmp_path)) as store, dying(store):
        eventually(lambda: "dying" not in store.server.store.sessions)


def test_O23_a_store_ends_while_a_worker_ends(tmp_path: Path) -> None:
    with LiveStore(store_settings(tmp_path)) as store, dying(store):
        server: Server = store.server
        eventually(lambda: len(server._endings))
        store.stop()
        assert store.seconds < 5
        assert not len(server._endings)
