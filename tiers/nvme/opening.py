"""What a start finds in a directory: the index, the extents that it names, and all its records.

The tables are read at once; the records come in slices, so that the tier serves meanwhile. A
damaged index is set aside, and the tier starts empty.
"""

from __future__ import annotations

import gc
import logging
import time
from itertools import chain
from pathlib import Path

from kvstore.errors import ConfigError, TierIOError
from tiers.nvme.files import ExtentFile, stride_of
from tiers.nvme.journal import NUMBER, Commit, Journal, set_aside
from tiers.nvme.loader import Loader
from tiers.nvme.space import Space

log = logging.getLogger(__name__)

_LOAD_S = 0.01  # of each poll


class Opening:
    """The journal and the namespaces of one directory, from its start on."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        """Nothing is read before open()."""
        self._folder = folder
        self._blocks_max = capacity_bytes // stride_of(1)
        self.spaces: dict[str, Space] = {}
        self.next_extent = 1
        self.generation = 1  # the highest that a write has had
        self.strays: list[bytes] = []  # keys of rows whose namespace nobody knows
        self.lost = False  # the records cannot be read until the store is restarted
        self._loader: Loader | None = None

    @property
    def loading(self) -> bool:
        """Tell whether records are still to come."""
        return self._loader is not None

    def path(self, number: int) -> Path:
        """Return where an extent lies."""
        return self._folder / f"{number:06d}.extent"

    def open(self) -> None:
        """Open or make the index, and the extents it names; a damaged one is set aside.

        Raises ConfigError when the directory cannot be used.
        """
        try:
            journal = Journal(self._folder, self._blocks_max)
        except TierIOError as exc:
            self._start_empty(exc)
            journal = Journal(self._folder, self._blocks_max)
        try:
            self._open_extents(journal)
        except TierIOError as exc:
            journal.close()
            self.spaces.clear()
            self._start_empty(exc)
            journal = Journal(self._folder, self._blocks_max)
        except BaseException:
            journal.close()
            raise
        if not journal.clean:
            log.warning("%s was not shut down in order; it has what was committed", self._folder)
        if self.spaces:
            self._loader = Loader(journal.path)
            spaces = list(self.spaces.values())
            self._settling = chain.from_iterable(space.settle() for space in spaces)
            gc.disable()
        else:
            journal.mark(clean=False)
        self.journal = journal

    def _start_empty(self, cause: Exception) -> None:
        kept = set_aside(self._folder)
        log.error("the index is damaged (%s): kept as %s, the tier starts empty", cause, kept)
        for path in self._folder.glob("*.extent"):
            path.unlink()

    def _open_extents(self, journal: Journal) -> None:
        namespaces, extents = journal.tables()
        by_number = {}
        for digest, (number, slot_bytes) in namespaces.items():
            if slot_bytes == 0:
                raise TierIOError(f"namespace {digest[:12]} has blocks of 0 bytes")
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
            journal.commit(Commit(extents_gone=gone))

    def load_some(self) -> bool:
        """Take in records for a moment; True when they are all in now."""
        loader, end_s = self._loader, time.monotonic() + _LOAD_S
        if loader is None:
            return False
        try:
            self._take_rows(loader, end_s)
        except TierIOError as exc:
            self.close()
            if loader.killed:
                log.error("off until the store is restarted: %s", exc)
                self.lost = True
            else:
                self._lose_all(exc)
            return False
        if not loader.done:
            return False
        for _ in self._settling:
            if time.monotonic() > end_s:
                return False
        self._loader = None
        gc.freeze()  # millions of records would be walked again and again
        gc.enable()
        self.journal.mark(clean=False)
        return True

    def _take_rows(self, loader: Loader, end_s: float) -> None:
        spaces = {NUMBER.pack(space.number): space for space in self.spaces.values()}
        while not loader.done and time.monotonic() < end_s:
            rows = loader.take()
            for key, value in rows:
                space = spaces.get(key[: NUMBER.size])
                if space is None:
                    self.strays.append(key)
                else:
                    found = space.load(key[NUMBER.size :], value)
                    self.generation = max(self.generation, found + 1)
            if not rows:
                return

    def _lose_all(self, cause: Exception) -> None:
        """The index turned out to be damaged while it was read."""
        self.journal.close()
        for space in self.spaces.values():
            for file in space.extents.values():
                file.close()
            space.start_empty()
        self._start_empty(cause)
        self.journal = Journal(self._folder, self._blocks_max)
        self.journal.mark(clean=False)

    def close(self) -> None:
        """Stop reading; safe to call twice."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
            gc.enable()
