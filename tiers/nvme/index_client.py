"""What is durable: an index beside the extent files, in a process of its own.

A page of the index that cannot be read ends that process, not the store. The next call starts
another. What kills twice, or says that it is damaged, is damaged; a disk that gives errors, or a
process that somebody killed, says nothing about the index.
"""

from __future__ import annotations

from pathlib import Path

from kvstore.core.errors import ConfigError, TierIOError
from tiers.nvme.index_process import Child, IndexProcessDiedError
from tiers.nvme.messages import (
    FOLDER,
    RECORD_BYTES,
    Answer,
    Apply,
    Commit,
    Done,
    Failed,
    Load,
    Mark,
    Open,
    Opened,
    Purge,
    Request,
    Stream,
    Tables,
    TablesFound,
    Unreadable,
)

_MAP_BYTES_MIN = 64 << 20
_STARTS_MAX = 3  # of one call
_DEATHS_MAX = 3  # of what it reads, although it can be read


class IndexDamagedError(TierIOError):
    """What the index's file says is wrong, beyond doubt."""


def map_bytes_of(blocks_max: int) -> int:
    """Return the addresses that an index for so many blocks is mapped at."""
    return max(_MAP_BYTES_MIN, 2 * RECORD_BYTES * blocks_max)


class Journal:
    """The index on disk. Calls come from one thread, and wait for the disk.

    But for take(): it is another thread's, while no other call is under way, and never waits.
    """

    def __init__(self, folder: Path, blocks_max: int, lock_fd: int) -> None:
        """Open or make it.

        blocks_max: that the tier can hold; the index file can grow to what these need. lock_fd:
        the lock on the directory, which lasts as long as anybody can still write there.

        Raises IndexDamagedError, ConfigError when it is of another kind, and TierIOError when it
        cannot be read now.
        """
        self.path = folder / FOLDER
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._map_bytes = map_bytes_of(blocks_max)
        self._lock_fd = lock_fd
        self._verify = False
        self._deaths = 0
        self._closed = False
        self._child: Child | None = None
        _, opened = self._start()
        self.new = opened.new
        self.clean = opened.clean
        self.next_number = opened.next_number
        self.strays = opened.strays

    @property
    def pid(self) -> int | None:
        """The process id of the index's process, None without one."""
        return None if self._child is None else self._child.pid

    def _start(self) -> tuple[Child, Opened]:
        """Start a process that opens the index."""
        if self._closed:
            raise TierIOError(f"{self.path} is not open")
        for _ in range(_STARTS_MAX):
            self._end()
            child = self._child = Child(self._lock_fd)
            try:
                answer = child.ask(Open(str(self.path), self._map_bytes, self._verify))
            except IndexProcessDiedError as exc:
                last = exc
                self._died(exc, verified=self._verify)
                continue
            self._verify = False
            if isinstance(answer, Opened):
                return child, answer
            raise self._error(answer)
        raise TierIOError(f"{self.path} cannot be opened: {last}") from last

    def _died(self, exc: IndexProcessDiedError, *, verified: bool) -> None:
        """Remember a death. Raises IndexDamagedError when the index is what it died of."""
        self._child = None
        self._deaths += exc.of_the_file
        if exc.of_the_file and (verified or self._deaths >= _DEATHS_MAX):
            raise IndexDamagedError(f"{self.path}: {exc}") from exc
        self._verify = self._verify or exc.of_the_file

    def _ask(self, request: Request) -> Answer:
        """Have a request done; once more if its process was killed, which may be long ago."""
        try:
            answer = self._ask_once(request)
        except IndexProcessDiedError as exc:
            if exc.of_the_file:
                raise
            answer = self._ask_once(request)
        if isinstance(answer, Failed):
            raise self._error(answer)
        return answer

    def _ask_once(self, request: Request) -> Answer:
        child = self._child
        if child is None or child.ended:
            child, _ = self._start()
        try:
            return child.ask(request)
        except IndexProcessDiedError as exc:
            self._died(exc, verified=False)
            raise

    def _error(self, answer: Answer) -> Exception:
        """Turn an answer that was not hoped for into an error; its process is of no more use."""
        self._end()
        if not isinstance(answer, Failed):
            return TierIOError(f"{self.path}: {answer} is no answer")
        if answer.format:
            return ConfigError(answer.text)
        kind = IndexDamagedError if answer.damaged else TierIOError
        return kind(f"{self.path}: {answer.text}")

    def tables(self) -> tuple[dict[str, tuple[int, int]], dict[int, int]]:
        """Return namespaces (digest -> number, slot bytes) and extents (number -> namespace)."""
        answer = self._ask(Tables())
        if not isinstance(answer, TablesFound):
            raise self._error(answer)
        return answer.namespaces, answer.extents

    def mark(self, *, clean: bool) -> None:
        """Say durably whether all is in order. Raises TierIOError."""
        self._ask(Mark(clean))

    def commit(self, changes: Commit) -> None:
        """Make changes durable, all or none; the index is not in order until mark().

        Raises TierIOError: then nobody knows which, and the same commit may be tried again.
        """
        self._ask(Apply(changes))

    def purge(self, number: int, rows_max: int) -> bool:
        """Delete records of a number that is no namespace's; tell whether there are more."""
        answer = self._ask(Purge(number, rows_max))
        return isinstance(answer, Done) and answer.left

    def load(self, request: Load) -> None:
        """Have a namespace's records sent, for take(). Raises TierIOError."""
        self._ask(request)

    def take(self) -> Stream | None:
        """Return the next records; None: not there yet. Raises TierIOError when there are none."""
        if self._child is None:
            raise IndexProcessDiedError("the index's process has ended", of_the_file=False)
        try:
            message = self._child.take()
        except IndexProcessDiedError as exc:
            self._died(exc, verified=False)
            raise
        if isinstance(message, Unreadable):
            raise self._error(message.why)
        return message

    def close(self) -> None:
        """Have the process end, and let go of the lock; safe to call twice."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
