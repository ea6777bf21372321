"""Grouped durability: what was written and what has left becomes durable together.

A change waits for the window at most, and for the commit under way when the window ends; then it
is part of the next one. A hurried commit does not wait for the window: slots come back with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tiers.nvme.index import Record
from tiers.nvme.messages import Commit, token_row
from tiers.nvme.namespace import DiskNamespace

if TYPE_CHECKING:
    from tiers.nvme.attached import Attached
    from tiers.nvme.disk import NvmeDisk

Batch = tuple[DiskNamespace, list[Record], list[Record]]
NEVER = float("inf")


class Commits:
    """One commit at a time, on the keeper's thread."""

    def __init__(self, disk: NvmeDisk, attached: Attached) -> None:
        self._disk = disk
        self._attached = attached
        self._window_s = disk.settings.durability_ns / 1e9
        self._since_s = NEVER  # the oldest change that is in no commit
        self._hurry = False
        self.under_way = False

    def hurry(self) -> None:
        """Do not wait for the window."""
        self._hurry = True

    @property
    def pending(self) -> bool:
        """Tell whether there is anything that is in no commit."""
        return any(space.pending for space in self._attached.awake)

    @property
    def due_at_s(self) -> float:
        """When the next commit is to begin."""
        return NEVER if self.under_way else self._since_s + self._window_s

    def step(self, now_s: float) -> None:
        """Begin a commit if it is time."""
        if self.pending:
            self._since_s = min(self._since_s, now_s)
        else:
            self._since_s, self._hurry = NEVER, False
        if not self._disk.health.writable or self._attached.loading:
            return
        due = self.pending and (self._hurry or now_s >= self._since_s + self._window_s)
        if due and not self.under_way:
            self._begin()

    def _begin(self) -> None:
        self._since_s, self._hurry, self.under_way = NEVER, False, True
        batches, work = self.take()
        self._disk.keeper.submit(work, partial(self._ended, batches))

    def take(self, *, clean: bool = False) -> tuple[list[Batch], Callable[[], None]]:
        """Take what is in no commit; return it, and what commits it. clean: all is in order."""
        spaces = self._attached.awake
        # The index clears first: the puts that are taken next were stored after the clear.
        cleared = [space.digest for space in spaces if space.take_clear()]
        batches = [(s, s.take_puts(), s.take_deletes()) for s in spaces]
        files = {s.extents[r.slot >> 32] for s, puts, _ in batches for r in puts}
        changes = Commit(
            cleared=cleared,
            deletes={s.digest: [r.key for r in gone] for s, _, gone in batches if gone},
            puts={s.digest: [(r.key, s.value(r)) for r in puts] for s, puts, _ in batches if puts},
            clean=clean,
        )
        if self._disk.keeps_tokens:
            changes.tokens = {s.digest: _token_rows(s, puts) for s, puts, _ in batches if puts}

        def work() -> None:
            for file in files:
                file.sync()
            self._attached.index.commit(changes)

        return batches, work

    def _ended(self, batches: list[Batch], error: Exception | None, now_s: float) -> None:
        self.under_way = False
        for space, puts, deletes in batches:
            self._attached.wake(space)
            space.committed(puts, deletes, ok=error is None)
        if error is not None:
            self._disk.write_failed("a commit", error, now_s)


def _token_rows(space: DiskNamespace, puts: list[Record]) -> list[tuple[int, bytes]]:
    """Return what the index file keeps of records' token ids, where these are known."""
    found = ((record, space.tokens_of(record.key)) for record in puts)
    return [(r.generation, token_row(r.key, tokens)) for r, tokens in found if tokens]
