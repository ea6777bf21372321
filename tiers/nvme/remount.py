"""Closes a directory while the tier is off, opens it again, and mends what was read-only.

    OPEN --off--> LEAVING --all closed--> AWAY --time to look--> RETURNING --works--> OPEN
                                           ^------------------------+ does not
    OPEN --read-only, time to try--> MENDING --> OPEN

All of it runs on the keeper's thread, after what is under way there. The way back is the way a
store starts: the directory is locked, the index opened, and all its records are read and checked.
What was not durable when the tier went off is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

from kvstore.core.errors import TierIOError
from tiers.nvme.commits import DiskContext
from tiers.nvme.extent_allocator import ExtentAllocator
from tiers.nvme.index_client import IndexDamagedError
from tiers.nvme.messages import Commit
from tiers.nvme.startup import Startup


class Phase(enum.Enum):
    """Where the tier is."""

    OPEN = "open"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"
    MENDING = "mending"


class Remount:
    """Runs one thing at a time, on the keeper's thread."""

    def __init__(
        self, shared: DiskContext, room: ExtentAllocator, replace: Callable[[Startup], None]
    ) -> None:
        """replace(opening): the disk goes on with this one; no block is being written then."""
        self.phase = Phase.OPEN
        self._shared = shared
        self._room = room
        self._replace = replace

    @property
    def at_home(self) -> bool:
        """Tell whether the directory is open, and stays open."""
        return self.phase in (Phase.OPEN, Phase.MENDING)

    def step(self, now_s: float, *, writing: int, stalled: bool) -> None:
        """Go on. writing: calls that write blocks; stalled: calls hang, so trying is no use."""
        shared, health = self._shared, self._shared.health
        if self.phase is Phase.OPEN and not health.online:
            self.phase = Phase.LEAVING
            work = partial(_leave, shared, shared.opening.closing())
            shared.keeper.submit(work, self._left)
        elif stalled or not health.due(now_s):
            return
        elif self.phase is Phase.AWAY and writing:  # it could reach a slot that was given anew
            health.not_yet("writes hang", now_s)
        elif self.phase is Phase.AWAY:
            self.phase = Phase.RETURNING
            fresh = Startup(shared.volume, shared.capacity_bytes)
            work = partial(_return, shared, fresh, shared.opening.damage)
            shared.keeper.submit(work, partial(self._returned, fresh))
        elif self.phase is Phase.OPEN and not health.writable:
            self.phase = Phase.MENDING
            stuck = self._room.stuck
            work = partial(_mend, shared, stuck, self._room.known)
            shared.keeper.submit(work, partial(self._mended, stuck))

    def _left(self, error: Exception | None, now_s: float) -> None:
        self.phase = Phase.AWAY
        if error is not None:
            self._shared.health.not_yet(str(error), now_s)

    def _returned(self, fresh: Startup, error: Exception | None, now_s: float) -> None:
        if error is not None:
            self.phase = Phase.AWAY
            self._shared.health.not_yet(str(error), now_s)
            return
        self.phase = Phase.OPEN
        self._room.start_over()
        self._replace(fresh)
        self._shared.health.back(now_s)

    def _mended(self, stuck: list[int], error: Exception | None, now_s: float) -> None:
        self.phase = Phase.OPEN
        if isinstance(error, IndexDamagedError):
            self._shared.write_failed("removing extents", error, now_s)
        elif error is not None:
            self._shared.health.not_yet(str(error), now_s)
        else:
            self._room.swept(stuck)
            if self._shared.health.online:
                self._shared.health.back(now_s)


def _leave(shared: DiskContext, closing: Callable[[], None]) -> None:
    """Close all that is open."""
    closing()
    shared.volume.close()


def _return(shared: DiskContext, fresh: Startup, damage: TierIOError | None) -> None:
    """Open all again."""
    shared.volume.open_again()
    try:
        fresh.open(damage)
    except BaseException:
        shared.volume.close()
        raise


def _mend(shared: DiskContext, stuck: list[int], known: set[int]) -> None:
    """Try to write, and remove what could not be. The index has another process by itself."""
    if shared.volume.look().read_only:
        raise TierIOError("the file system is mounted read-only")
    shared.volume.try_write()
    if shared.opening.loading:
        return
    if stuck:
        shared.opening.index_client.commit(Commit(extents_gone=stuck))
    shared.volume.sweep(known)
