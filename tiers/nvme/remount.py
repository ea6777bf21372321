"""Letting go of a directory while the tier is off, taking it back, and mending what was read-only.

    OPEN --off--> LEAVING --all closed--> AWAY --time to look--> RETURNING --works--> OPEN
                                           ^------------------------+ does not
    OPEN --read-only, time to try--> MENDING --> OPEN

All of it runs on the keeper's thread, after what is under way there. Back in the same directory,
with the same index, the tier goes on with the blocks it knows. If only the index differs (somebody
else has used the directory, or a commit failed half-way) it is read anew, as at a start.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from kvstore.core.errors import TierIOError
from tiers.nvme.commits import commit
from tiers.nvme.context import Shared
from tiers.nvme.extent_allocator import Room
from tiers.nvme.files import ExtentFile
from tiers.nvme.index_client import IndexDamagedError
from tiers.nvme.messages import Commit
from tiers.nvme.startup import Opening


class Phase(enum.Enum):
    """Where the tier is."""

    OPEN = "open"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"
    MENDING = "mending"


class Recovery:
    """Runs one thing at a time, on the keeper's thread."""

    def __init__(self, shared: Shared, room: Room, replace: Callable[[Opening], None]) -> None:
        """replace(opening): the disk goes on with this one; no block is being moved then."""
        self.phase = Phase.OPEN
        self._shared = shared
        self._room = room
        self._replace = replace

    @property
    def at_home(self) -> bool:
        """Tell whether the directory is open, and nobody is closing it."""
        return self.phase in (Phase.OPEN, Phase.MENDING)

    def step(self, now_s: float, *, moving: int, stalled: bool) -> None:
        """Go on. moving: blocks are being moved; stalled: calls hang, so that trying is no use."""
        health, keeper = self._shared.health, self._shared.keeper
        if self.phase is Phase.OPEN and not health.online:
            self.phase = Phase.LEAVING
            keeper.submit(_Leaving(self._shared, self._room).work, self._left)
        elif stalled or not health.due(now_s):
            return
        elif self.phase is Phase.AWAY:
            self.phase = Phase.RETURNING
            coming = _Return(self._shared, self._room, quiet=not moving)
            keeper.submit(coming.work, lambda exc, at_s: self._returned(coming, exc, at_s))
        elif self.phase is Phase.OPEN and not health.writable:
            self.phase = Phase.MENDING
            mending = _Mending(self._shared, self._room)
            keeper.submit(mending.work, lambda exc, at_s: self._mended(mending, exc, at_s))

    def _left(self, error: Exception | None, now_s: float) -> None:
        self.phase = Phase.AWAY
        if error is not None:
            self._shared.health.not_yet(str(error), now_s)

    def _returned(self, coming: _Return, error: Exception | None, now_s: float) -> None:
        if error is not None:
            self.phase = Phase.AWAY
            self._shared.health.not_yet(str(error), now_s)
            return
        self.phase = Phase.OPEN
        if coming.found is not None:
            self._room.start_over()
            self._replace(coming.found)
        else:
            self._room.swept(coming.stuck)
        self._shared.health.back(now_s)

    def _mended(self, mending: _Mending, error: Exception | None, now_s: float) -> None:
        self.phase = Phase.OPEN
        if isinstance(error, IndexDamagedError):
            self._shared.write_failed("opening the index", error, now_s)
            return
        if error is not None:
            self._shared.health.not_yet(str(error), now_s)
            return
        self._room.swept(mending.stuck)
        if self._shared.health.online:
            self._shared.health.back(now_s)


class _Leaving:
    """Closes all that is open."""

    def __init__(self, shared: Shared, room: Room) -> None:
        self._shared = shared
        self._files = _files(shared)
        self._growths = list(room.growths)

    def work(self) -> None:
        made = [growth.file for growth in self._growths if growth.file is not None]
        for file in [*self._files, *made]:
            file.close()
        opening = self._shared.opening
        if opening.loading:
            opening.close()
            self._shared.volume.forget_index()  # half of it is not enough
        opening.journal.close()
        self._shared.volume.close()


class _Return:
    """Opens all again."""

    def __init__(self, shared: Shared, room: Room, *, quiet: bool) -> None:
        """quiet: no block is being moved."""
        self.found: Opening | None = None  # if the index is not as it was left
        self.stuck = room.stuck
        self._shared = shared
        self._files = _files(shared)
        self._known = room.known
        self._quiet = quiet

    def work(self) -> None:
        volume = self._shared.volume
        unused = volume.open_again()
        try:
            whole = self._shared.opening.damage is None
            if not (whole and unused and volume.knows_index() and self._continue()):
                self._read_anew()
        except BaseException:
            volume.close()
            raise

    def _continue(self) -> bool:
        """Go on with what is known; False when an extent is not there any more."""
        shared = self._shared
        try:
            shared.volume.open_extents(self._files)
        except FileNotFoundError:
            self._close()
            return False
        except BaseException:
            self._close()
            raise
        try:
            shared.opening.open_journal()
        except IndexDamagedError:
            self._close()
            return False
        except BaseException:
            self._close()
            raise
        try:
            _sweep(shared, self._known, self.stuck)
        except BaseException:
            self._close()
            shared.opening.journal.close()
            raise
        return True

    def _close(self) -> None:
        for file in self._files:
            file.close()

    def _read_anew(self) -> None:
        if not self._quiet:
            raise TierIOError("waits for calls that hang")
        fresh = Opening(self._shared.volume, self._shared.capacity_bytes)
        fresh.open(self._shared.opening.damage)
        self.found = fresh


class _Mending:
    """Tries to write, and opens the index anew: after a commit that failed, none may work."""

    def __init__(self, shared: Shared, room: Room) -> None:
        self.stuck = room.stuck
        self._shared = shared
        self._known = room.known

    def work(self) -> None:
        volume, opening = self._shared.volume, self._shared.opening
        if volume.look().read_only:
            raise TierIOError("the file system is mounted read-only")
        volume.try_write()
        if opening.loading:
            return
        opening.journal.close()
        opening.open_journal()
        _sweep(self._shared, self._known, self.stuck)


def _files(shared: Shared) -> list[ExtentFile]:
    return [file for space in shared.spaces for file in space.extents.values()]


def _sweep(shared: Shared, known: set[int], stuck: list[int]) -> None:
    if stuck:
        commit(shared, Commit(extents_gone=stuck))
    shared.volume.sweep(known)
