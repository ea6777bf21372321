"""What a start finds in a directory: the index, the extents that it names, and all its records.

The tables are read at once. The records come namespace by namespace, in pages, so that the tier
serves meanwhile what is there. Only an index that is damaged beyond doubt is set aside, and the
tier starts empty.

A tier that was off comes back the way a store starts: the directory is locked, the index opened,
and all its records are read and checked. What was not durable when it went off is lost.
"""

from __future__ import annotations

import enum
import gc
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.core.errors import TierIOError
from tiers.nvme.block_io import TaskThread
from tiers.nvme.directory import Directory
from tiers.nvme.files import stride_of
from tiers.nvme.index_client import IndexClient, IndexDamagedError
from tiers.nvme.messages import FOLDER, Commit, Page
from tiers.nvme.namespace import DiskNamespace, Loading

if TYPE_CHECKING:
    from tiers.nvme.disk import NvmeDisk

log = logging.getLogger(__name__)

LOAD_S = 0.006  # of each poll


def blocks_max_of(capacity_bytes: int) -> int:
    """Return how many blocks a capacity has room for, be they as small as can be."""
    return capacity_bytes // stride_of(1)


def spaces_of(extents: dict[int, tuple[int, str]]) -> dict[str, DiskNamespace]:
    """Make the namespaces of an index, by digest. Raises IndexDamagedError."""
    found: dict[str, DiskNamespace] = {}
    for slot_bytes, digest in extents.values():
        space = found.setdefault(digest, DiskNamespace(digest, slot_bytes))
        if not slot_bytes or slot_bytes != space.slot_bytes:
            raise IndexDamagedError("the sizes of its slots contradict each other")
    return found


class Startup:
    """The index file and the namespaces of one directory, from its start on."""

    def __init__(self, volume: Directory, capacity_bytes: int) -> None:
        self._volume = volume
        self._blocks_max = blocks_max_of(capacity_bytes)
        self.spaces: dict[str, DiskNamespace] = {}
        self.next_extent = 1
        self.generation = 1  # the highest that a write has had
        self.damage: TierIOError | None = None  # found while its records were read
        self._todo: deque[DiskNamespace] = deque()  # to be loaded
        self._steps: Iterator[bool] | None = None  # of the loading that has begun

    @property
    def loading(self) -> bool:
        """Tell whether records are still to come."""
        return bool(self._todo)

    def open(self, damage: TierIOError | None = None) -> None:
        """Open or make the index, and the extents it names; a damaged one is set aside.

        damage: known from before. Raises ConfigError, OSError or TierIOError when the directory
        cannot be used.
        """
        if damage is not None:
            self._start_empty(damage)
        try:
            self._open()
        except IndexDamagedError as exc:
            self._start_empty(exc)
            self._open()
        if not self.index_client.opened.clean:
            log.warning(
                "%s was not shut down in order; committed blocks are there", self._volume.path
            )
        newest = sorted(self.spaces.values(), key=lambda s: max(s.extents, default=0), reverse=True)
        for space in newest:
            space.loading = Loading(space)
            self._todo.append(space)
        if self._todo:
            gc.disable()

    def _open(self) -> None:
        self.index_client = IndexClient(self._volume.path, self._blocks_max, self._volume.lock_fd)
        try:
            self._open_extents()
        except BaseException:
            self.closing()()
            self.spaces.clear()
            raise

    def _start_empty(self, cause: Exception) -> None:
        self._volume.read_index()
        kept = set_aside(self._volume.path)
        log.error("the index is damaged (%s): kept as %s, the tier starts empty", cause, kept)
        self._volume.sweep(())

    def _open_extents(self) -> None:
        extents = self.index_client.opened.extents
        self.spaces = spaces_of(extents)
        for number, (slot_bytes, digest) in extents.items():
            self.next_extent = max(self.next_extent, number + 1)
            try:
                file = self._volume.open_extent(number, slot_bytes)
                self.spaces[digest].extents[number] = file
            except FileNotFoundError:
                log.error("%s and its blocks are lost", self._volume.extent(number))
        known = {number for space in self.spaces.values() for number in space.extents}
        removed = self._volume.sweep(known)
        # Without any, one may be left: a first extent whose store died before it was entered.
        if not extents and removed > (0 if self.index_client.opened.new else 1):
            log.error(
                "%s: the index is damaged or lost: the tier starts empty, and %d unknown extents"
                " are removed", self._volume.path, removed,
            )  # fmt: skip
        gone = [number for number in extents if number not in known]
        if gone:
            self.index_client.commit(Commit(extents_gone=gone))

    # Records

    def load_some(self, keeper: TaskThread) -> bool:
        """Take in records for a moment; True when they are all in now.

        Raises TierIOError when there is no more to come; damage says if the index is to blame.
        """
        if not self._todo:
            return False
        self._steps = self._steps or self._load_all(keeper)
        end_s = time.monotonic() + LOAD_S
        try:
            for waits in self._steps:
                if waits or time.monotonic() >= end_s:
                    return False
        except IndexDamagedError as exc:
            self.damage = exc
            raise
        gc.freeze()  # millions of records would be walked again and again
        gc.enable()
        return True

    def _load_all(self, keeper: TaskThread) -> Iterator[bool]:
        """Load each namespace. Yields after each step whether it waits for something."""
        while self._todo:
            space = self._todo[0]
            while space.dismantling:
                yield True
            if space.loading is not None:
                yield from self._load(space, space.loading, keeper)
            self._todo.popleft()

    def _load(self, space: DiskNamespace, loading: Loading, keeper: TaskThread) -> Iterator[bool]:
        """Take in pages until the last one, or until clear() comes."""
        pages = self.index_client.records(space.digest, space.slot_bytes, space.slot_counts)
        page = Page()
        while space.loading is loading:
            coming = _asked_for(pages, keeper)  # while this one is taken in
            for _ in loading.take(page):
                yield False
            while not coming:
                yield True
            if isinstance(coming[0], Exception):
                raise coming[0]
            page = coming[0]
        self.generation = max(self.generation, loading.newest + 1)

    def closing(self) -> Callable[[], None]:
        """Return what stops to read, and closes the index and the extents that are here now."""
        files = [file for space in self.spaces.values() for file in space.extents.values()]

        def close() -> None:
            if self._todo:
                self._todo.clear()
                gc.enable()
            self.index_client.close()
            for file in files:
                file.close()

        return close


def _asked_for(pages: Iterator[Page], keeper: TaskThread) -> list[Page | Exception]:
    """Have the next page read; it, or what went wrong, will be in the list."""
    coming: list[Page | Exception] = []

    def read() -> Page:
        try:
            return next(pages, Page())
        except OSError as exc:
            raise TierIOError(str(exc)) from exc

    keeper.submit(read, lambda found, _now_s: coming.append(found))
    return coming


def set_aside(folder: Path) -> Path:
    """Keep a damaged index for inspection, under another name."""
    kept = folder / f"{FOLDER}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 0
    while kept.exists():
        number += 1
        kept = kept.with_name(f"{kept.name}.{number}")
    shutil.move(folder / FOLDER, kept)
    return kept


class Phase(enum.Enum):
    """Where a tier is: with its directory open or closed, or on its way between these."""

    OPEN = "open"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"
    MENDING = "mending"


class Remount:
    """Closes the directory while the tier is off, opens it again, and mends what was read-only.

        OPEN --off--> LEAVING --all closed--> AWAY --time to look--> RETURNING --works--> OPEN
                                               ^------------------------+ does not
        OPEN --read-only, time to try--> MENDING --> OPEN

    One thing at a time, on the keeper's thread, after what is under way there.
    """

    def __init__(self, disk: NvmeDisk) -> None:
        self.phase = Phase.OPEN
        self._disk = disk

    @property
    def at_home(self) -> bool:
        """Tell whether the directory is open, and stays open."""
        return self.phase in (Phase.OPEN, Phase.MENDING)

    def step(self, now_s: float, *, writing: int, stalled: bool) -> None:
        """Go on. writing: calls that write blocks; stalled: calls hang, so trying is no use."""
        health = self._disk.health
        if self.phase is Phase.OPEN and not health.online:
            self._leave()
        elif stalled or not health.due(now_s):
            return
        elif self.phase is Phase.AWAY and writing:  # it could reach a slot that was given anew
            health.not_yet("writes hang", now_s)
        elif self.phase is Phase.AWAY:
            self._return()
        elif self.phase is Phase.OPEN and not health.writable:
            self._mend()

    def _leave(self) -> None:
        disk, self.phase = self._disk, Phase.LEAVING
        closing = disk.opening.closing()

        def leave() -> None:
            closing()
            disk.volume.close()

        def left(error: Exception | None, now_s: float) -> None:
            self.phase = Phase.AWAY
            if error is not None:
                disk.health.not_yet(str(error), now_s)

        disk.keeper.submit(leave, left)

    def _return(self) -> None:
        disk, self.phase = self._disk, Phase.RETURNING
        fresh = Startup(disk.volume, disk.capacity_bytes)
        damage = disk.opening.damage

        def open_again() -> None:
            disk.volume.open_again()
            with disk.volume.or_close():
                fresh.open(damage)

        def returned(error: Exception | None, now_s: float) -> None:
            if error is not None:
                self.phase = Phase.AWAY
                disk.health.not_yet(str(error), now_s)
                return
            self.phase = Phase.OPEN
            disk.replace(fresh)
            disk.health.back(now_s)

        disk.keeper.submit(open_again, returned)

    def _mend(self) -> None:
        """Try to write, and remove what could not be. The index has another process by itself."""
        disk, self.phase = self._disk, Phase.MENDING
        stuck, known = disk.room.stuck, disk.room.known

        def mend() -> None:
            if disk.volume.look().read_only:
                raise TierIOError("the file system is mounted read-only")
            disk.volume.try_write()
            if disk.opening.loading:
                return
            if stuck:
                disk.opening.index_client.commit(Commit(extents_gone=stuck))
            disk.volume.sweep(known)

        def mended(error: Exception | None, now_s: float) -> None:
            self.phase = Phase.OPEN
            if isinstance(error, IndexDamagedError):
                disk.write_failed("removing extents", error, now_s)
            elif error is not None:
                disk.health.not_yet(str(error), now_s)
            else:
                disk.room.swept(stuck)
                if disk.health.online:
                    disk.health.back(now_s)

        disk.keeper.submit(mend, mended)
