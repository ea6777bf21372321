"""Which namespace gets which extent: growth within the cap, eviction ahead, giving space back.

The cap counts what the directory takes: extents, what their index entries can take (or the index
does take, if that is more), and damaged indexes that are kept. An extent is made only while all
this, and what the file system has free, is known to allow it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvstore.core.errors import TierFull
from tiers.nvme.directory import Look
from tiers.nvme.files import ExtentFile
from tiers.nvme.health import scarce
from tiers.nvme.messages import Commit
from tiers.nvme.namespace import DiskNamespace, cost

if TYPE_CHECKING:
    from tiers.nvme.attached import Attached
    from tiers.nvme.disk import NvmeDisk

log = logging.getLogger(__name__)

BASE_BYTES = 1 << 20  # of the index, when it is empty
# Of a namespace's slots. Eviction ahead of need begins below the low mark: a slot comes back only
# with a commit, and what is stored meanwhile needs the rest. It goes on to the high mark, so that
# slots come back in runs of neighbours and commits are few.
LOW_PART = 64
HIGH_PART = 32
FULL_PART = 16  # with fewer of them free, and none to come, a namespace is as good as full
SLICE_BLOCKS = 256  # evicted ahead in each poll: about a millisecond
FULL_S = 5.0  # a file system that had no room is asked again after that


class ExtentAllocator:
    """Extents of all namespaces, under one cap."""

    def __init__(self, disk: NvmeDisk, attached: Attached, look: Look) -> None:
        self._disk = disk
        self._attached = attached
        self._look = look
        self.making: dict[int, int] = {}  # extent -> what it will take
        self._removing: dict[int, int] = {}  # extent -> what it takes until it is gone
        self._stuck: dict[int, int] = {}  # the same, of which making or removing has failed
        self._evicting: set[str] = set()  # namespaces between the low and the high mark
        self._full_until_s = float("-inf")
        self._now_s = 0.0
        # Of all extents: bytes, those of their entries, and how many there are.
        self._counted: tuple[int, int, int] | None = None

    # What is taken

    @property
    def used_bytes(self) -> int:
        """Bytes that the directory takes, or may take with the extents it has."""
        coming = [*self.making.values(), *self._removing.values(), *self._stuck.values()]
        return self._taken() + sum(coming)

    def _count(self) -> tuple[int, int, int]:
        if self._counted is None:
            files = [file for space in self._disk.spaces for file in space.extents.values()]
            extents = sum(file.bytes for file in files)
            entries = sum(cost(file.bytes, file.slot_bytes) for file in files) - extents
            self._counted = extents, entries + BASE_BYTES, len(files)
        return self._counted

    def _taken(self) -> int:
        extents, entries, _ = self._count()
        return extents + max(entries, self._look.index_bytes) + self._look.aside_bytes

    def recount(self) -> None:
        """Count the extents anew: one has come or gone."""
        self._counted = None

    def seen(self, look: Look) -> None:
        """Take in what the directory is like."""
        self._look = look
        self.shrink()

    @property
    def known(self) -> set[int]:
        """Numbers of the extents that are there, or on their way to or fro."""
        here = {number for space in self._disk.spaces for number in space.extents}
        return here | set(self.making) | set(self._removing)

    # Asked for

    def make(self, space: DiskNamespace, count: int) -> bool:
        """Try to get free slots: a new extent, else by eviction; False when none will come."""
        if self._attached.loading or space.clearing or self._grow(space):
            return True
        space.evict(count - space.free - space.leaving)
        if space.to_delete:
            self._attached.commits.hurry()
        if space.leaving:
            return True
        return space.free == 0 and (bool(space.cleared) or self._take_from_another(space))

    def full(self, space: DiskNamespace) -> bool:
        """Tell whether a namespace has no free slots to speak of, and gets no extent."""
        if self._attached.loading or space.growing or space.free > space.total // FULL_PART:
            return False
        return not self._fits(cost(self._disk.settings.extent_bytes, space.slot_bytes))

    def _fits(self, size: int) -> bool:
        open_files = self._count()[2] + len(self.making) + len(self._removing)
        fits = self.used_bytes + size <= self._disk.capacity_bytes
        fits = fits and open_files < self._disk.extents_max
        return fits and self._now_s >= self._full_until_s

    def _grow(self, space: DiskNamespace) -> bool:
        """Make an extent if the cap and the file system have room; True while one is made."""
        disk, attached = self._disk, self._attached
        if space.growing:
            return True
        size = disk.settings.extent_bytes
        takes = cost(size, space.slot_bytes)
        if not self._fits(takes):
            return False
        number = attached.next_extent
        attached.next_extent += 1
        self.making[number] = takes
        space.growing = True
        changes = Commit(extents=[(number, space.slot_bytes, space.digest)])

        def make() -> ExtentFile:
            """Leave no file that the index does not know."""
            file = attached.directory.make_extent(number, space.slot_bytes, size)
            try:
                attached.index.commit(changes)
            except BaseException:
                file.close()
                attached.directory.remove_extent(number)
                raise
            return file

        disk.keeper.submit(make, partial(self._made, space, number))
        return True

    def _made(
        self, space: DiskNamespace, number: int, made: ExtentFile | Exception, now_s: float
    ) -> None:
        takes = self.making.pop(number)
        space.growing = False
        if isinstance(made, ExtentFile):
            if not self._disk.health.online:
                made.close()  # all that is open is about to be closed, or is
                return
            space.add_extent(number, made)
            self.recount()
            self.shrink()  # the cap may be smaller by now
        elif isinstance(made, TierFull) or scarce(made):
            if self._full_until_s < now_s - FULL_S:
                log.warning("%s: no new extent: %s", self._attached.directory.path, made)
            self._full_until_s = now_s + FULL_S
        else:
            self._stuck[number] = takes
            self._disk.write_failed("making an extent", made, now_s)

    def _take_from_another(self, needy: DiskNamespace) -> bool:
        """Retire an extent of the namespace that has the most; True while one is going."""
        if self._removing or any(s.retiring for s in self._attached.awake if s is not needy):
            return True
        others = [space for space in self._disk.spaces if space is not needy]
        unused = [space for space in others if space.extents and not space.attached]
        richer = [space for space in others if len(space.extents) > len(needy.extents) + 1]
        donor = max(unused or richer, key=lambda space: len(space.extents), default=None)
        number = None if donor is None else donor.coldest()
        if donor is None or number is None:
            return False
        self._retire(donor, number)
        return True

    def shrink(self) -> None:
        """Retire extents until the cap holds: it may be smaller than when they were made."""
        while self._disk.health.writable and not self._attached.loading:
            leaving = sum(space.retiring_bytes for space in self._attached.awake)
            if self._taken() - leaving <= self._disk.capacity_bytes:
                return
            richest = max(self._disk.spaces, key=lambda s: s.disk_bytes - s.retiring_bytes)
            number = richest.coldest()
            if number is None:
                return
            self._retire(richest, number)

    def _retire(self, space: DiskNamespace, number: int) -> None:
        space.retire(number)
        self._attached.wake(space)
        self._attached.commits.hurry()

    # In every poll

    def step(self, visited: Sequence[DiskNamespace], now_s: float) -> None:
        """Evict ahead where the cap is reached, and remove extents that are empty.

        visited: the namespaces of this poll, all of those among them that are awake.
        """
        self._now_s = now_s
        works = self._disk.health.writable and not self._attached.loading
        for space in visited:
            restless = works and self._look_after(space)
            if space.at_rest and not restless and space.digest not in self._evicting:
                self._attached.visits.rest(space.digest)
                if space.unused:
                    self._attached.forget(space)
            else:
                self._attached.wake(space)

    def _look_after(self, space: DiskNamespace) -> bool:
        """Do what is due; True: look again soon."""
        for number, file in space.take_retired():
            self.recount()
            self._removing[number] = cost(file.bytes, file.slot_bytes)
            removal = partial(self._remove, number, file)
            self._disk.keeper.submit(removal, partial(self._removed, number))
        if space.attached and not space.cleared:
            self._evict_ahead(space)
        else:
            self._evicting.discard(space.digest)
        return space.tend_tenants(self._disk.tenants)

    def _evict_ahead(self, space: DiskNamespace) -> None:
        coming = space.free + space.leaving
        if coming >= space.total // HIGH_PART:
            self._evicting.discard(space.digest)
        elif coming < space.total // LOW_PART and not self._grow(space):
            self._evicting.add(space.digest)
        if space.digest in self._evicting:
            space.evict(min(SLICE_BLOCKS, space.total // HIGH_PART - coming))

    def _remove(self, number: int, file: ExtentFile) -> None:
        file.close()
        self._attached.index.commit(Commit(extents_gone=[number]))
        self._attached.directory.remove_extent(number)

    def _removed(self, number: int, error: Exception | None, now_s: float) -> None:
        takes = self._removing.pop(number)
        if error is not None:
            self._stuck[number] = takes
            self._disk.write_failed("removing an extent", error, now_s)

    @property
    def stuck(self) -> list[int]:
        """Numbers of extents that are of no use, and may be on the disk and in the index."""
        return list(self._stuck)

    def swept(self, numbers: Collection[int]) -> None:
        """These are gone from both."""
        for number in numbers:
            self._stuck.pop(number, None)
