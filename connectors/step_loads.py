"""Loads that end in the step that admits their request, before its forward pass.

An asynchronous load takes a step of its own, and then the engine waits. That is worth it where
other requests run meanwhile. Where nothing else can run, the step may as well wait for the copy.

The failure of such a load reaches the engine too late: its forward pass has read the blocks, and
the engine finds them by their hashes. So an engine that schedules steps ahead has no loads of this
kind, and where one fails, all that the request has from the first loaded block on is forgotten.
Only engines with one full group: they take failed blocks of one group only, and compute from the
first of them on, which needs all before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from connectors.kv_transfer_params import NO_REMOTE
from connectors.request_state import TrackedRequest
from connectors.store_client import Grant

COPY_S_MAX = 0.002
START_BYTES = 16 << 20  # that COPY_S_MAX is taken to be enough for, until a load is measured
MEASURED_BYTES_MIN = 1 << 20  # a smaller load says little of the rate
_Planned = tuple[TrackedRequest | None, Sequence[int]]


class StepLoads:
    """Decides which loads a step waits for, and remembers the last one until its step is over."""

    def __init__(self, block_bytes: int) -> None:
        """block_bytes: of a block, on one rank."""
        self._block_bytes = block_bytes
        self._bytes_max = START_BYTES
        # Whose load the next step waits for, and its engine blocks that are wrong if it fails.
        self._next: _Planned = None, ()
        self._current: _Planned = None, ()  # likewise, of the step under way

    def allows(self, tracked: TrackedRequest, grant: Grant, blocks: int) -> bool:
        """Return True if a load of so many blocks may hold up a step. Nothing else is there to run.

        All blocks must be readable now, and copying them must not take more than COPY_S_MAX, as
        far as is known.
        """
        return (
            (tracked.remote is NO_REMOTE or tracked.remote.hinted > 0)
            and tracked.repeatable
            and not grant.sources
            and blocks * self._block_bytes <= self._bytes_max
        )

    def measured(self, copied_bytes: int, seconds: float) -> None:
        """Take in what loads have copied, of any kind and on any rank, and how long it took."""
        if copied_bytes >= MEASURED_BYTES_MIN and seconds > 0:
            self._bytes_max = int(copied_bytes / seconds * COPY_S_MAX)

    def planned(self, tracked: TrackedRequest, blocks: Sequence[int]) -> None:
        """The next step waits for a request's load. blocks: from the first one on that it fills."""
        self._next = tracked, blocks

    def begin_step(self) -> None:
        """The step under way is the one that a load was planned for last, if one was since."""
        self._current, self._next = self._next, (None, ())

    def failed(self) -> _Planned:
        """Return the request whose load in the last step failed, if one can have.

        And its engine blocks that hold wrong bytes: those loaded, and those computed from them.
        """
        return self._current
