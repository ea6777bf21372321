"""What a start finds in a directory: the index, the extents that it names, and all its records.

The tables are read at once; the records come in slices, so that the tier serves meanwhile. A
damaged index is set aside, and the tier starts empty.
"""

from __future__ import annotations

import gc
import logging
import time
from itertools import chain

from kvstore.errors import TierIOError
from tiers.nvme.files import stride_of
from tiers.nvme.journal import NUMBER, Commit, Journal, set_aside
from tiers.nvme.loader import Loader
from tiers.nvme.space import Space
from tiers.nvme.volume import Volume

log = logging.getLogger(__name__)

_LOAD_S = 0.01  # of each poll


class Opening:
    """The journal and the namespaces of one directory, from its start on."""

    def __init__(self, volume: Volume, capacity_bytes: int) -> None:
        """Nothing is read before open()."""
        self._volume = volume
        self._blocks_max = capacity_bytes // stride_of(1)
        self.spaces: dict[str, Space] = {}
        self.next_extent = 1
        self.generation = 1  # the highest that a write has had
        self.strays: list[bytes] = []  # keys of rows whose namespace nobody knows
        self.damage: TierIOError | None = None  # found while its records were read
        self._loader: Loader | None = None

    @property
    def loading(self) -> bool:
        """Tell whether records are still to come."""
        return self._loader is not None

    def open(self, damage: TierIOError | None = None) -> None:
        """Open or make the index, and the extents it names; a damaged one is set aside.

        damage: known from before. Raises ConfigError, OSError or TierIOError when the directory
        cannot be used.
        """
        if damage is not None:
            self._start_empty(damage)
        try:
            journal = self._journal()
        except TierIOError as exc:
            self._start_empty(exc)
            journal = self._journal()
        try:
            journal = self._open_with(journal)
        except BaseException:
            self._let_go(journal)
            raise
        self.journal = journal

    def _open_with(self, journal: Journal) -> Journal:
        """Go on with an index that could be opened; return the one that counts."""
        try:
            self._open_extents(journal)
        except TierIOError as exc:
            self._let_go(journal)
            self._start_empty(exc)
            journal = self._journal()
        if not journal.clean:
            log.warning(
                "%s was not shut down in order; it has what was committed", self._volume.path
            )
        if self.spaces:
            self._loader = Loader(journal.path)
            spaces = list(self.spaces.values())
            self._settling = chain.from_iterable(space.settle() for space in spaces)
            gc.disable()
        else:
            journal.mark(clean=False)
        self._volume.remember_index()
        return journal

    def _let_go(self, journal: Journal) -> None:
        journal.close()
        for space in self.spaces.values():
            for file in space.extents.values():
                file.close()
        self.spaces.clear()

    def open_journal(self) -> None:
        """Open the index again, whose records are known. Raises TierIOError, ConfigError."""
        self.journal = self._journal()

    def _journal(self) -> Journal:
        return Journal(self._volume.path, self._blocks_max)

    def _start_empty(self, cause: Exception) -> None:
        self._volume.read_index()
        kept = set_aside(self._volume.path)
        log.error("the index is damaged (%s): kept as %s, the tier starts empty", cause, kept)
        self._volume.sweep(())

    def _open_extents(self, journal: Journal) -> None:
        namespaces, extents = journal.tables()
        by_number = {}
        for digest, (number, slot_bytes) in namespaces.items():
            if slot_bytes == 0:
                raise TierIOError(f"namespace {digest[:12]} has blocks of 0 bytes")
            self.spaces[digest] = by_number[number] = Space(number, digest, slot_bytes)
        for number, owner in extents.items():
            self.next_extent = max(self.next_extent, number + 1)
            space = by_number.get(owner)
            try:
                if space is not None:
                    space.extents[number] = self._volume.open_extent(number, space.slot_bytes)
            except FileNotFoundError:
                log.error("%s is lost, and with it its blocks", self._volume.extent(number))
        known = {number for space in self.spaces.values() for number in space.extents}
        self._volume.sweep(known)
        gone = [number for number in extents if number not in known]
        if gone:
            journal.commit(Commit(extents_gone=gone))

    def load_some(self) -> bool:
        """Take in records for a moment; True when they are all in now.

        Raises TierIOError when there is no more to come; damage says if the index is to blame.
        """
        loader, end_s = self._loader, time.monotonic() + _LOAD_S
        if loader is None:
            return False
        try:
            self._take_rows(loader, end_s)
        except TierIOError as exc:
            if not loader.killed:
                self.damage = exc
            raise
        if not loader.done:
            return False
        for _ in self._settling:
            if time.monotonic() > end_s:
                return False
        self._loader = None
        gc.freeze()  # millions of records would be walked again and again
        gc.enable()
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

    def close(self) -> None:
        """Stop reading; safe to call twice."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
            gc.enable()
