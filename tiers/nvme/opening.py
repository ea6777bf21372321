"""What a start finds in a directory: the index, the extents that it names, and all its records.

The tables are read at once. The records come namespace by namespace, in slices, so that the tier
serves meanwhile what is there. The process that sends them may end, or the disk fail: then they go
on from where they were. Only an index that is damaged beyond doubt is set aside, and the tier
starts empty.
"""

from __future__ import annotations

import gc
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.errors import ConfigError, TierIOError
from tiers.nvme.files import ExtentFile, stride_of
from tiers.nvme.journal import IndexDamagedError, Journal
from tiers.nvme.messages import FOLDER, Batch, Commit, Load, Loaded
from tiers.nvme.space import Space

log = logging.getLogger(__name__)

Done = Callable[[Exception | None], None]
Keep = Callable[[Callable[[], None], Done], None]
"""Runs something that waits for the disk, elsewhere, and then the second here."""

LOAD_S = 0.008  # of each poll
RETRY_S = 1.0


class Opening:
    """The journal and the namespaces of one directory, from its start on."""

    def __init__(self, folder: Path, capacity_bytes: int, lock_fd: int) -> None:
        """Nothing is read before open(). lock_fd: the lock on the directory."""
        self._folder = folder
        self._blocks_max = capacity_bytes // stride_of(1)
        self._lock_fd = lock_fd
        self.spaces: dict[str, Space] = {}
        self.next_extent = 1
        self.generation = 1  # the highest that a write has had
        self._next_number = 1
        self.strays: list[int] = []  # that records begin with, and no namespace has
        self._todo: deque[tuple[Space, int]] = deque()  # to be loaded, with the number it had
        self._asked = False
        self._streaming = False
        self._settling: Iterator[None] | None = None
        self._failed: TierIOError | None = None
        self._retry_s = 0.0

    @property
    def loading(self) -> bool:
        """Tell whether records are still to come."""
        return bool(self._todo)

    def path(self, number: int) -> Path:
        """Return where an extent lies."""
        return self._folder / f"{number:06d}.extent"

    def take_number(self) -> int:
        """Number a namespace: the journal has nothing under it."""
        self._next_number += 1
        return self._next_number - 1

    def open(self) -> None:
        """Open or make the index, and the extents it names; a damaged one is set aside.

        Raises ConfigError when the directory cannot be used, TierIOError when it cannot be read.
        """
        try:
            self._open()
        except IndexDamagedError as exc:
            self._close_extents()
            self.spaces.clear()
            self._start_empty(exc)
            self._open()
        if not self.journal.clean:
            log.warning("%s was not shut down in order; it has what was committed", self._folder)
        for space in sorted(self.spaces.values(), key=lambda space: space.number, reverse=True):
            space.start_loading()
            self._todo.append((space, space.number))
        if self._todo:
            gc.disable()

    def _open(self) -> None:
        self.journal = Journal(self._folder, self._blocks_max, self._lock_fd)
        try:
            self._open_extents()
        except BaseException:
            self.journal.close()
            raise
        self._next_number, self.strays = self.journal.next_number, self.journal.strays

    def _start_empty(self, cause: Exception) -> None:
        kept = set_aside(self._folder)
        log.error("the index is damaged (%s): kept as %s, the tier starts empty", cause, kept)
        for path in self._folder.glob("*.extent"):
            path.unlink()

    def _open_extents(self) -> None:
        namespaces, extents = self.journal.tables()
        by_number = {}
        for digest, (number, slot_bytes) in namespaces.items():
            if slot_bytes == 0:
                raise IndexDamagedError(f"namespace {digest[:12]} has blocks of 0 bytes")
            self.spaces[digest] = by_number[number] = Space(number, digest, slot_bytes)
        for number, owner in extents.items():
            self.next_extent = max(self.next_extent, number + 1)
            space, path = by_number.get(owner), self.path(number)
            try:
                if space is not None:
                    space.extents[number] = ExtentFile(path, space.slot_bytes, path.stat().st_size)
            except FileNotFoundError:
                log.error("%s is lost, and with it its blocks", path)
            except OSError as exc:
                raise ConfigError(f"{path}: cannot be opened: {exc.strerror}") from exc
        known = {self.path(n).name for space in self.spaces.values() for n in space.extents}
        for path in self._folder.glob("*.extent"):
            if path.name not in known:
                path.unlink()
        gone = [number for number in extents if self.path(number).name not in known]
        if gone:
            self.journal.commit(Commit(extents_gone=gone))

    # Records

    def load_some(self, keep: Keep) -> bool:
        """Take in records for a moment; True when they are all in now."""
        if not self._todo:
            return False
        end_s = time.monotonic() + LOAD_S
        try:
            while self._todo and time.monotonic() < end_s:
                if not self._go_on(keep):
                    return False
        except IndexDamagedError as exc:
            self._lose_all(exc)
            return False
        except TierIOError as exc:
            self._pause(exc)
            return False
        if self._todo:
            return False
        gc.freeze()  # millions of records would be walked again and again
        gc.enable()
        return True

    def _go_on(self, keep: Keep) -> bool:
        """Do one thing; False when there is nothing to do now."""
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error
        space, number = self._todo[0]
        if self._settling is not None:
            if next(self._settling, self) is self:
                self._settling = None
                self._todo.popleft()
            return True
        if self._streaming:
            return self._take(space, number)
        if space.number != number:  # it was cleared
            self._todo.popleft()
            return True
        if not self._asked and time.monotonic() >= self._retry_s:
            self._asked = True
            request = Load(number, space.slot_bytes, space.slot_counts, skip=space.loaded)
            keep(lambda: self.journal.load(request), self._loads)
        return False

    def _loads(self, error: Exception | None) -> None:
        """It sends records from now on, or does not."""
        self._asked = False
        self._streaming = error is None
        if error is not None:
            self._failed = error if isinstance(error, TierIOError) else TierIOError(str(error))

    def _pause(self, error: Exception) -> None:
        """Go on from here in a while: a disk, or a process that was killed, may be back."""
        log.error("%s is read again in %d s: %s", self._folder, RETRY_S, error)
        self._streaming = False
        self._retry_s = time.monotonic() + RETRY_S

    def _take(self, space: Space, number: int) -> bool:
        message = self.journal.take()
        if message is None:
            return False
        mine = space.number == number
        if isinstance(message, Batch):
            if mine:
                self.generation = max(self.generation, space.load(message) + 1)
            return True
        self._streaming = False
        if mine and isinstance(message, Loaded):
            space.refuse(message.refused)
            self._settling = space.settle()
        else:
            self._todo.popleft()
        return True

    def _lose_all(self, cause: Exception) -> None:
        """The index turned out to be damaged while it was read."""
        self.close()
        self.journal.close()
        self._close_extents()
        for space in self.spaces.values():
            space.lose()
        self._start_empty(cause)
        self.journal = Journal(self._folder, self._blocks_max, self._lock_fd)

    def _close_extents(self) -> None:
        for space in self.spaces.values():
            for file in space.extents.values():
                file.close()

    def close(self) -> None:
        """Stop reading; safe to call twice."""
        if self._todo:
            self._todo.clear()
            self._settling, self._streaming = None, False
            gc.enable()


def set_aside(folder: Path) -> Path:
    """Keep a damaged index for inspection, under another name."""
    kept = folder / f"{FOLDER}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 0
    while kept.exists():
        number += 1
        kept = kept.with_name(f"{kept.name}.{number}")
    shutil.move(folder / FOLDER, kept)
    return kept
