"""A disk while it is attached: the lock on its directory, its index, its extents and namespaces.

The same code makes it at a start and at each return to the directory, so nothing of it is reset: it
is thrown away when the disk goes off, and with it what was not durable.

The tables are read at once. The records come namespace by namespace, in pages, so that the tier
serves meanwhile what is there. Only an index that is damaged beyond doubt is set aside, and the
tier starts empty.
"""

from __future__ import annotations

import gc
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.core.errors import TierIOError
from kvstore.visits import Visits
from tiers.nvme.block_io import TaskThread
from tiers.nvme.commits import Commits
from tiers.nvme.directory import Directory
from tiers.nvme.extent_allocator import ExtentAllocator
from tiers.nvme.files import ExtentFile, stride_of
from tiers.nvme.index_client import IndexClient, IndexDamagedError
from tiers.nvme.messages import FOLDER, Commit, Page
from tiers.nvme.namespace import DiskNamespace, Loading

if TYPE_CHECKING:
    from tiers.nvme.disk import NvmeDisk

log = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0  # a store that ends still flushes
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


class Attached:
    """The directory of a disk, open and locked, and all that it has."""

    def __init__(
        self, disk: NvmeDisk, known_id: str = "", damage: TierIOError | None = None
    ) -> None:
        """Attach the directory; open or make the index, and open the extents that it names.

        known_id: of the directory, at a return. damage: found in its index before; a damaged index
        is set aside. Raises ConfigError, OSError or TierIOError when the directory cannot be used.
        """
        self.directory = Directory(Path(disk.settings.path))
        self.spaces: dict[str, DiskNamespace] = {}
        self.visits = Visits()  # of namespaces
        self._left: Counter[str] = Counter()  # counts of those that are forgotten
        self.next_extent = 1
        self.generation = 1  # the highest that a write has had
        self.damage: TierIOError | None = None  # found while it was attached
        self._keeps_tokens = disk.keeps_tokens
        self._extent_bytes = disk.settings.extent_bytes
        self._blocks_max = blocks_max_of(disk.capacity_bytes)
        self._todo: deque[DiskNamespace] = deque()  # to be loaded
        self._steps: Iterator[bool] | None = None  # of the loading that has begun
        self.directory.open(0.0 if known_id else LOCK_WAIT_S, known_id)
        with self.directory.or_close():
            look = self.directory.look()
            if damage is not None:
                self._start_empty(damage)
            try:
                self._open()
            except IndexDamagedError as exc:
                self._start_empty(exc)
                self._open()
        self.commits = Commits(disk, self)
        self.room = ExtentAllocator(disk, self, look)
        if not self.index.opened.clean:
            path = self.directory.path
            log.warning("%s was not shut down in order; committed blocks are there", path)
        newest = sorted(self.spaces.values(), key=lambda s: max(s.extents, default=0), reverse=True)
        for space in newest:
            space.loading = Loading(space)
            self._todo.append(space)
        if self._todo:
            gc.disable()

    def _open(self) -> None:
        where = self.directory.path, self._blocks_max, self.directory.lock_fd
        self.index = IndexClient(*where, tokens=self._keeps_tokens)
        if removed := self.index.opened.tokens_removed:
            log.info("%s: token ids of %d blocks removed: not kept now", where[0], removed)
        try:
            self._open_extents()
        except BaseException:
            self.index.close()
            for file in self._files:
                file.close()
            self.spaces.clear()
            raise

    def _start_empty(self, cause: Exception) -> None:
        self.directory.read_index()
        kept = set_aside(self.directory.path)
        log.error("the index is damaged (%s): kept as %s, the tier starts empty", cause, kept)
        self.directory.sweep(())

    def _open_extents(self) -> None:
        extents, extent_bytes = self.index.opened.extents, self._extent_bytes
        self.spaces = spaces_of(extents)
        for number, (slot_bytes, digest) in extents.items():
            self.next_extent = max(self.next_extent, number + 1)
            try:
                file = self.directory.open_extent(number, slot_bytes, extent_bytes)
                self.spaces[digest].extents[number] = file
            except FileNotFoundError:
                log.error("%s and its blocks are lost", self.directory.extent(number))
        known = {number for space in self.spaces.values() for number in space.extents}
        removed = self.directory.sweep(known)
        # Without any, one may be left: a first extent whose store died before it was entered.
        if not extents and removed > (0 if self.index.opened.new else 1):
            log.error(
                "%s: the index is damaged or lost: the tier starts empty, and %d unknown extents"
                " are removed", self.directory.path, removed,
            )  # fmt: skip
        gone = [number for number in extents if number not in known]
        if gone:
            self.index.commit(Commit(extents_gone=gone))

    @property
    def _files(self) -> list[ExtentFile]:
        return [file for space in self.spaces.values() for file in space.extents.values()]

    # Namespaces

    def space(self, digest: str, slot_bytes: int) -> DiskNamespace:
        """Return a namespace, a new one if need be."""
        return self.spaces.setdefault(digest, DiskNamespace(digest, slot_bytes))

    def wake(self, space: DiskNamespace) -> None:
        """Look after a namespace in every poll from now on, until it is at rest."""
        self.visits.wake(space.digest)

    @property
    def awake(self) -> list[DiskNamespace]:
        """List the namespaces with something to do: to commit, to empty, to remove."""
        return self.visits.awake(self.spaces)

    def clear(self, space: DiskNamespace) -> None:
        """Forget all blocks of a namespace, at once."""
        if space.extents:
            space.clear()
            self.wake(space)
            self.commits.hurry()

    def forget(self, space: DiskNamespace) -> None:
        """Forget a namespace that no tier uses and that has nothing on disk."""
        del self.spaces[space.digest]
        self._left.update(space.counts)

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Return what was counted since the last call, by namespace, "" if forgotten, and event."""
        found = Counter({("", event): count for event, count in self._left.items()})
        self._left.clear()
        for space in self.spaces.values():
            found.update({(space.digest, event): n for event, n in space.counts.items()})
            space.counts.clear()
        return found

    def next_generation(self) -> int:
        """Number a write."""
        self.generation += 1
        return self.generation

    def succeed(self, old: Attached) -> None:
        """Go on for what was thrown away: what it had forgotten stays so.

        Nothing in it leads in a circle then, as gc.freeze() would keep all its records for ever.
        """
        self.generation = max(self.generation, old.generation)
        self.next_extent = max(self.next_extent, old.next_extent)
        for known in old.spaces.values():
            space = self.space(known.digest, known.slot_bytes)
            space.succeed(known)
            self.wake(space)
            if known.clearing:  # it was cleared, and that was not durable
                self.clear(space)
            known.loading = None
        self._left = old._left
        old.spaces, old._steps = {}, None

    # Records

    @property
    def loading(self) -> bool:
        """Tell whether records are still to come."""
        return bool(self._todo)

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
        pages = self.index.records(space.digest, space.slot_bytes, space.slot_counts)
        page = Page()
        while space.loading is loading:
            coming = _asked_for(pages, keeper)  # while this one is taken in
            for _ in loading.take(page):
                # At once: a namespace takes blocks as soon as it has slots, and others still load.
                self.generation = max(self.generation, loading.newest + 1)
                yield False
            while not coming:
                yield True
            (found,) = coming
            if isinstance(found, Exception):
                raise found if isinstance(found, TierIOError) else TierIOError(str(found))
            page = found

    def closing(self, last: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Return what closes all that is open now, after a last commit; safe to call twice."""
        files = self._files

        def close() -> None:
            try:
                last()
            finally:
                if self._todo:
                    self._todo.clear()
                    gc.enable()
                self.index.close()
                for file in files:
                    file.close()
                self.directory.close()

        return close


def _asked_for(pages: Iterator[Page], keeper: TaskThread) -> list[Page | Exception]:
    """Have the next page read; it, or what went wrong, will be in the list."""
    coming: list[Page | Exception] = []
    keeper.submit(lambda: next(pages, Page()), lambda found, _now_s: coming.append(found))
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
