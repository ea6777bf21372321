"""A real store process that can be killed, and the cap that its directory must keep."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20
SAMPLE_S = 0.01
KEPT_S = 0.3
END_S = 600.0
START_S = 600.0
ORDERLY_S = 900.0


def physical_bytes(folder: Path) -> int:
    """Bytes that everything in a directory takes on disk."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


class StoreProcess:
    """One life of the store; ends with a SIGKILL, by its own hand or ours, or in order."""

    def __init__(
        self, config: Path, log: Path, errors: Path, kill_at: tuple[str, int] | None = None
    ) -> None:
        log.unlink(missing_ok=True)
        self._log, self._errors = log, errors
        self._read = b""
        self._lines: list[str] = []
        arguments = [str(config), str(log), *map(str, kill_at or ())]
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.store_child", *arguments],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def lines(self) -> list[str]:
        """What it has said so far, whole lines."""
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(sum(len(line) + 1 for line in self._lines))
                fresh = file.read()
            self._lines += fresh[: fresh.rfind(b"\n") + 1].decode().splitlines()
        return self._lines

    def said(self, word: str) -> bool:
        return any(line.split(" ")[1] == word for line in self.lines)

    def wait(self, done: Callable[[], object], seconds: float) -> bool:
        """Wait until something holds; False when it took longer, or the process ended."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self.ended:
            if done():
                return True
            time.sleep(0.001)
        return False

    def kill(self) -> float:
        """End it at once, if it has not done so itself; return when it was alive for sure."""
        alive_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._end(-signal.SIGKILL, "it ended by itself")
        return alive_s

    def abandon(self) -> None:
        """End it, whatever it has come to; safe to call twice."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it in order."""
        self._process.terminate()
        self._end(0, "it did not end in order")

    def _end(self, expected: int, text: str) -> None:
        code = self._process.wait(ORDERLY_S)
        errors = self._errors.read_text()
        assert code == expected, f"{text}, exit status {code}:\n{errors}"
        wrong = [line for line in errors.splitlines() if " ERROR " in line or "Traceback" in line]
        assert not wrong, errors
        # Whatever it has started ends by itself once its parent is gone.
        end_s = time.monotonic() + END_S
        while left := self._family():
            assert time.monotonic() < end_s, f"processes are left over: {left}"
            time.sleep(0.005)

    def _family(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) == self._process.pid:
                    found.append(" ".join(process.cmdline()))
        return found


class Cap:
    """Watches from a thread that a directory takes no more than it may.

    After a change to less, the old cap holds until the new one has been reached, and kept for a
    moment: an extent may be under way that was begun before.
    """

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = capacity_bytes
        self.largest_bytes = self.samples = self.shrunk = 0
        self.largest_part = 0.0
        self.error: str | None = None
        self._over_s = 0.0  # when it was last over the cap, or that changed
        self._folder = folder
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cap")
        self._thread.start()

    def change(self, capacity_bytes: int) -> None:
        with self._lock:
            self._over_s = time.monotonic()
            self.capacity_bytes = capacity_bytes
            self.limit_bytes = max(self.limit_bytes, capacity_bytes)

    @property
    def reached(self) -> bool:
        return self.limit_bytes == self.capacity_bytes

    def sample(self) -> None:
        with self._lock:
            used = physical_bytes(self._folder)
            if used > self.limit_bytes:  # one file may have gone, and another come, meanwhile
                used = min(used, physical_bytes(self._folder))
            self.samples += 1
            if used > self.limit_bytes and self.error is None:
                parts = {
                    path.name: path.lstat().st_blocks * 512
                    for path in self._folder.rglob("*")
                    if path.exists()
                }
                self.error = f"{used} bytes on disk, the cap is {self.limit_bytes}: {parts}"
            self.largest_bytes = max(self.largest_bytes, used)
            self.largest_part = max(self.largest_part, used / self.limit_bytes)
            now_s = time.monotonic()
            if used > self.capacity_bytes:
                self._over_s = now_s
            if self.capacity_bytes < self.limit_bytes and now_s - self._over_s > KEPT_S:
                self.limit_bytes = self.capacity_bytes
                self.shrunk += 1

    def check(self) -> None:
        self.sample()
        assert self.error is None, self.error

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.sample()
