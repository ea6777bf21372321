"""What is durable: an index beside the extent files, in a process of its own (index_server.py).

A page of the index that cannot be read ends that process, not the store. Another does what it was
asked for. What kills twice, or says that it is damaged, is damaged; a disk that gives errors, or a
process that was killed, says nothing about the index.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from kvstore.core.errors import ConfigError, TierIOError
from tiers.nvme.messages import (
    FOLDER,
    RECORD_BYTES,
    Answer,
    Commit,
    Connection,
    Failed,
    Load,
    Open,
    Opened,
    Page,
    Request,
    TokenPage,
    Tokens,
    answers,
)

log = logging.getLogger(__name__)

PAGE_ROWS = 8192  # a store takes them in several of its turns, while the next ones come
_MAP_BYTES_MIN = 64 << 20
_TRIES_MAX = 3  # of one call
_DEATHS_MAX = 3  # of what it reads, although it can be read
_END_S = 5.0
_OF_THE_FILE = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
R = TypeVar("R")


class IndexDamagedError(TierIOError):
    """What the index's file says is wrong, beyond doubt."""


def map_bytes_of(blocks_max: int) -> int:
    """Return the addresses that an index for so many blocks is mapped at."""
    return max(_MAP_BYTES_MIN, 2 * RECORD_BYTES * blocks_max)


class IndexProcessDiedError(TierIOError):
    """The process has ended. of_the_file: of what it read, as far as one can tell."""

    def __init__(self, text: str, *, of_the_file: bool) -> None:
        super().__init__(text)
        self.of_the_file = of_the_file


class IndexProcess:
    """The process, and the socket to it. One call at a time, from any thread."""

    @staticmethod
    def start(fd: int, lock_fd: int) -> subprocess.Popen[bytes]:
        """Start index_server.py with its end of a socket. Raises OSError."""
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "tiers.nvme.index_server", str(fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a reader of the store's would wait for this one
            pass_fds=(fd, lock_fd),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the store, which still commits
        )

    def __init__(self, lock_fd: int) -> None:
        """Start it. It inherits the directory's lock. Raises TierIOError when it does not start."""
        ours, its = socket.socketpair()
        with its:
            try:
                self._process = type(self).start(its.fileno(), lock_fd)
            except OSError as exc:
                ours.close()
                raise TierIOError(f"cannot start the index's process: {exc}") from exc
        self.pid = self._process.pid
        self._connection = Connection(ours, answers)

    @property
    def ended(self) -> bool:
        """Tell whether it has ended."""
        return self._process.poll() is not None

    def ask(self, request: Request) -> Answer:
        """Have a request done. Raises IndexProcessDiedError when it may be done or not."""
        try:
            self._connection.send(request)
            return self._connection.receive()
        except (OSError, EOFError):
            raise self._death() from None

    def _death(self) -> IndexProcessDiedError:
        """Wait for its end, and say what it died of."""
        self.close()
        code, what = self._process.returncode, "hangs"
        if code is not None:
            what = (
                f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
        of_the_file = code is not None and -code in _OF_THE_FILE
        return IndexProcessDiedError(f"the index's process {what}", of_the_file=of_the_file)

    def close(self) -> None:
        """Close the socket, at which it ends; kill it if it does not."""
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)


class IndexClient:
    """The index on disk. Calls come from one thread, and wait for the disk."""

    def __init__(
        self,
        folder: Path,
        blocks_max: int,
        lock_fd: int,
        *,
        read_only: bool = False,
        tokens: bool = True,
    ) -> None:
        """Open or make it.

        blocks_max: that the tier can hold; the index file can grow to what these need. lock_fd:
        the lock on the directory, which lasts as long as a process can still write there.
        read_only: change nothing, and read all of it first. tokens: keep token ids; else those
        that are there are removed.

        Raises IndexDamagedError, ConfigError when it is of another kind, and TierIOError when it
        cannot be read now.
        """
        self.path = folder / FOLDER
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._map_bytes = map_bytes_of(blocks_max)
        self._lock_fd = lock_fd
        self._read_only = self._verify = read_only
        self._tokens = tokens
        self._deaths = 0  # of what was read, since a commit went well
        self._closed = False
        self.process: IndexProcess | None = None
        self.opened: Opened  # what the last process has found
        self._outlive(self._start)

    def commit(self, changes: Commit) -> None:
        """Make changes durable, all or none.

        Raises TierIOError: then it is not known which, and the same commit may be tried again.
        """
        answer = self._ask(changes)
        if answer is not None:
            raise self._error(answer)
        self._deaths = 0

    def records(self, digest: str, slot_bytes: int, counts: Mapping[int, int]) -> Iterator[Page]:
        """Yield a namespace's records; counts: slots of its extents. Raises TierIOError."""
        first, ended = 0, False
        while not ended:
            page = self._ask(Load(digest, slot_bytes, dict(counts), first, PAGE_ROWS))
            if not isinstance(page, Page):
                raise self._error(page)
            first, ended = first + page.count, page.refused is not None
            yield page

    def tokens(self, digest: str, after: int, most: int) -> TokenPage:
        """Return blocks' token ids, as TokenPage says. Raises TierIOError."""
        page = self._ask(Tokens(digest, after, most))
        if not isinstance(page, TokenPage):
            raise self._error(page)
        return page

    def close(self) -> None:
        """End the process, and with it its hold on the lock; safe to call twice."""
        self._closed = True
        self._end()

    def _ask(self, request: Request) -> Answer:
        """Have a request done. Raises TierIOError."""

        def ask() -> Answer:
            process = self.process
            if process is None or process.ended:
                process = self._start()
            return process.ask(request)

        return self._outlive(ask)

    def _outlive(self, call: Callable[[], R]) -> R:
        """Call, and again with another process if one ends meanwhile."""
        if self._closed:
            raise TierIOError(f"{self.path} is not open")
        for _ in range(_TRIES_MAX):
            try:
                return call()
            except IndexProcessDiedError as exc:
                last = exc
                self._died(exc)
        raise TierIOError(f"{self.path}: {last}") from last

    def _start(self) -> IndexProcess:
        self._end()
        process = self.process = IndexProcess(self._lock_fd)
        where = str(self.path)
        how = self._verify, self._read_only, self._tokens
        answer = process.ask(Open(where, self._map_bytes, *how))
        if not isinstance(answer, Opened):
            raise self._error(answer)
        self._verify, self.opened = False, answer
        return process

    def _died(self, exc: IndexProcessDiedError) -> None:
        """Remember a death. Raises IndexDamagedError when the index is what it died of."""
        log.warning("%s: %s; another one does what it was asked for", self.path, exc)
        self.process = None
        self._deaths += exc.of_the_file
        read = self._verify or self._read_only  # by plain calls, which a failing disk would fail
        if exc.of_the_file and (read or self._deaths >= _DEATHS_MAX):
            raise IndexDamagedError(f"{self.path}: {exc}") from exc
        self._verify = self._verify or exc.of_the_file

    def _error(self, answer: Answer) -> Exception:
        """Turn an unexpected answer into an error, and end its process, which is of no more use."""
        self._end()
        if not isinstance(answer, Failed):
            return TierIOError(f"{self.path}: {type(answer).__name__} is no answer")
        if answer.format:
            return ConfigError(answer.text)
        kind = IndexDamagedError if answer.damaged else TierIOError
        return kind(f"{self.path}: {answer.text}")

    def _end(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None
