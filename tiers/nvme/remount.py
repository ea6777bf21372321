"""How a disk that has failed is tried again.

off        all is closed, and attached again as at a start once that works
read-only  is over once a page can be written beside the blocks

One thing at a time, on the keeper's thread, after what is under way there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvstore.core.errors import TierIOError
from tiers.nvme.attached import Attached
from tiers.nvme.index_client import IndexDamagedError
from tiers.nvme.messages import Commit

if TYPE_CHECKING:
    from tiers.nvme.disk import NvmeDisk

T = TypeVar("T")


class Remount:
    """Detaches a disk that is off, attaches it again, and mends one that is read-only."""

    def __init__(self, disk: NvmeDisk) -> None:
        self.at_home = True  # the directory is open, and stays open
        self._disk = disk
        self._now_s = 0.0
        self._due = False  # it is time to try something
        self._writing = 0
        self._steps = self._run()

    def step(self, now_s: float, *, writing: int, stalled: bool) -> None:
        """Go on. writing: calls that write blocks; stalled: calls hang, so trying is no use."""
        self._now_s, self._writing = now_s, writing
        self._due = now_s >= self._disk.health.due_at_s and not stalled
        next(self._steps)

    def _run(self) -> Iterator[None]:
        health = self._disk.health
        while True:
            if not health.online:
                yield from self._leave()
                yield from self._return()
            elif self._due and not health.writable:
                yield from self._mend()
            yield

    def _leave(self) -> Iterator[None]:
        self.at_home = False
        error = yield from self._on_keeper(self._disk.attached.closing())
        if error is not None:
            self._disk.health.not_yet(str(error), self._now_s)

    def _return(self) -> Iterator[None]:
        disk = self._disk
        old = disk.attached
        while not self.at_home:
            yield
            if not self._due:
                continue
            if self._writing:  # it could reach a slot that was given anew
                disk.health.not_yet("writes hang", self._now_s)
                continue
            attach = partial(Attached, disk, old.directory.id, old.damage)
            found = yield from self._on_keeper(attach)
            if isinstance(found, Attached):
                self.at_home = True
                disk.replace(found)
                disk.health.back(self._now_s)
            else:
                disk.health.not_yet(str(found), self._now_s)

    def _mend(self) -> Iterator[None]:
        """Try to write, and remove what could not be. The index has another process by itself."""
        disk, attached = self._disk, self._disk.attached
        stuck, known = attached.room.stuck, attached.room.known

        def mend() -> None:
            if attached.directory.look().read_only:
                raise TierIOError("the file system is mounted read-only")
            attached.directory.try_write()
            if attached.loading:
                return
            if stuck:
                attached.index.commit(Commit(extents_gone=stuck))
            attached.directory.sweep(known)

        error = yield from self._on_keeper(mend)
        if isinstance(error, IndexDamagedError):
            disk.write_failed("removing extents", error, self._now_s)
        elif error is not None:
            disk.health.not_yet(str(error), self._now_s)
        else:
            attached.room.swept(stuck)
            if disk.health.online:
                disk.health.back(self._now_s)

    def _on_keeper(self, work: Callable[[], T]) -> Generator[None, None, T | Exception]:
        """Have work done; return what it returned or raised."""
        done: list[T | Exception] = []
        self._disk.keeper.submit(work, lambda found, _now_s: done.append(found))
        while not done:
            yield
        return done[0]
