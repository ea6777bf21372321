"""Edge threads: an asyncio loop each, for what is slow and rare, and never holds the store's.

A call of the system that hangs, as on a network file system that has gone, holds a thread of its
own. Those threads are daemons: the end of the process waits for asyncio's own, and not for these.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import ParamSpec, TypeVar

import aiofiles

from kvstore.config import (
    FILE_BYTES_MAX,
    Config,
    ConfigFile,
    of_text,
    open_settings,
    refuse_no_settings,
    unreadable,
)
from kvstore.core.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
Settings = tuple[ConfigFile, Config]

READ_S = 5.0  # for a file of settings; a disk that spins up takes less
THREADS_MAX = 4  # that hang


class _Daemons(Executor):
    """A thread for each call, up to a number of them at one time."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(THREADS_MAX)

    def submit(self, call: Callable[P, R], /, *values: P.args, **named: P.kwargs) -> Future[R]:
        """Raises ConfigError where too many calls hang, or there is no thread for this one."""
        if not self._free.acquire(blocking=False):
            raise ConfigError(f"{THREADS_MAX} calls of the file system hang: none is added")
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()  # a caller that gives up cannot cancel it

        def run() -> None:
            try:
                future.set_result(call(*values, **named))
            except BaseException as exc:  # noqa: BLE001 - the caller's, as in every executor
                future.set_exception(exc)
            finally:
                self._free.release()

        try:
            _start("kvstore-file", run)
        except ConfigError:
            self._free.release()
            raise
        return future


def _start(name: str, work: Callable[[], object]) -> None:
    """Start a thread. Raises ConfigError where the system has none left."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as exc:
        raise ConfigError(f"{exc}: raise the limit of tasks (TasksMax, ulimit -u)") from exc


class EdgeThread:
    """Reads files of settings, each on a thread; the thread that calls poll() hears of it."""

    def __init__(self) -> None:
        self._daemons = _Daemons()
        self.ended: deque[Callable[[], None]] = deque()  # of what poll() tells

    def read_settings(self, path: Path, done: Callable[[Future[Settings]], None]) -> None:
        """Begin to read a file; done() gets it, or a ConfigError, in a later poll()."""
        future: Future[Settings] = Future()
        future.add_done_callback(lambda ended: self.ended.append(lambda: done(ended)))

        def run() -> None:
            try:
                with asyncio.Runner() as runner:
                    try:
                        future.set_result(runner.run(self._read_in_time(path)))
                    except BaseException as exc:  # noqa: BLE001 - as above; then the end of what hangs
                        future.set_exception(exc)
            except OSError as exc:  # no descriptor is left for its loop
                future.set_exception(ConfigError(f"nothing can be read: {exc.strerror}"))

        try:
            _start("kvstore-edge", run)
        except ConfigError as exc:
            future.set_exception(exc)

    def poll(self) -> None:
        """Tell of what has ended."""
        while self.ended:
            self.ended.popleft()()

    async def _read_in_time(self, path: Path) -> Settings:
        reading = asyncio.ensure_future(self._read(path))
        done, _ = await asyncio.wait([reading], timeout=READ_S)
        if not done:
            reading.cancel()  # and not waited for: its thread hangs
            raise ConfigError(f"{path}: not read within {READ_S:g} s: its file system hangs")
        data = reading.result()
        return ConfigFile.of(path, data), of_text(data, path)

    async def _read(self, path: Path) -> bytes:
        loop, daemons = asyncio.get_running_loop(), self._daemons
        try:
            async with aiofiles.open(path, "rb", opener=open_settings, executor=daemons) as file:
                found = await loop.run_in_executor(daemons, os.fstat, file.fileno())
                refuse_no_settings(path, found)
                data: bytes = await file.read(FILE_BYTES_MAX)
                return data
        except OSError as exc:
            raise unreadable(path, exc) from exc
