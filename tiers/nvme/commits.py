"""Grouped durability: what was written and what has left becomes durable together.

A change waits for the window at most, and for the commit under way when the window ends; then it
is part of the next one. A hurried commit does not wait for the window: slots come back with it.
"""

from __future__ import annotations

from functools import partial

from tiers.nvme.context import Shared
from tiers.nvme.index import Record
from tiers.nvme.index_gc import Purge
from tiers.nvme.messages import Commit
from tiers.nvme.namespace import Space

Batch = tuple[Space, list[Record], list[Record]]
NEVER = float("inf")


class Commits:
    """One commit at a time, on the keeper's thread."""

    def __init__(self, shared: Shared, purge: Purge) -> None:
        """Nothing is under way."""
        self._shared = shared
        self._purge = purge
        self._window_s = shared.settings.durability_ns / 1e9
        self._since_s = NEVER  # the oldest change that is in no commit
        self._hurry = False
        self.under_way = False

    def hurry(self) -> None:
        """Do not wait for the window."""
        self._hurry = True

    @property
    def pending(self) -> bool:
        """Tell whether there is anything that is in no commit."""
        return any(space.pending for space in self._shared.spaces)

    @property
    def due_at_s(self) -> float:
        """When the next commit is to begin."""
        return NEVER if self.under_way else self._since_s + self._window_s

    def step(self, now_s: float) -> None:
        """Begin a commit if it is time."""
        if not self.pending:
            self._since_s, self._hurry = NEVER, False
            return
        self._since_s = min(self._since_s, now_s)
        if self.under_way or not self._shared.health.writable or self._shared.opening.loading:
            return
        if self._hurry or now_s >= self._since_s + self._window_s:
            self._begin()

    def _begin(self) -> None:
        self._since_s, self._hurry, self.under_way = NEVER, False, True
        renumbered = [space.take_renumbering() for space in self._shared.spaces]
        batches = [(s, s.take_puts(), s.take_deletes()) for s in self._shared.spaces]
        files = {s.extents[r.slot >> 32] for s, puts, _ in batches for r in puts}
        changes = Commit(
            deletes=[s.journal_key(r) for s, _, gone in batches for r in gone],
            puts=[(s.journal_key(r), s.value(r)) for s, puts, _ in batches for r in puts],
            namespaces=[entry for entries, _ in renumbered for entry in entries],
            extents=[extent for _, extents in renumbered for extent in extents],
        )

        def work() -> None:
            for file in files:
                file.sync()
            self._shared.opening.journal.commit(changes)

        self._shared.keeper.submit(work, partial(self._ended, batches))

    def _ended(self, batches: list[Batch], error: Exception | None, now_s: float) -> None:
        self.under_way = False
        for space, puts, deletes in batches:
            self._purge.add(space.committed(puts, deletes, ok=error is None))
        if error is not None:
            self._shared.write_failed("a commit", error, now_s)
