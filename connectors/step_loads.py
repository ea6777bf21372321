"""Loads that end in the step that admits their request, before its forward pass.

An asynchronous load takes its request at least one step more, and its place in the batch is empty
meanwhile. A short copy from memory costs all requests of a step less than that costs one.

The failure of such a load reaches the engine too late: its forward pass has read the blocks, and
the engine finds them by their hashes. So an engine that schedules steps ahead has no loads of this
kind, a request that would read the same blocks in the same step waits for the next one, and where
one fails, all that its request has from the first loaded block on is forgotten. Only engines with
one full group: they take failed blocks of one group only, and compute from the first of them on,
which needs all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from connectors.kv_transfer_params import NO_REMOTE
from connectors.request_state import TrackedRequest
from connectors.store_client import Grant

COPY_S_MAX = 0.002  # of all such loads of a step together
ALONE_S_MAX = 0.02  # likewise, of an engine's only request: a step without one waits as long
START_RATE = 8 << 30  # bytes per second, until a load is measured
MEASURED_BYTES_MIN = 1 << 20  # a smaller load says little of the rate


class StepLoad(NamedTuple):
    """A load that a step waits for.

    blocks: of the engine, from the first one on that it fills: wrong if it fails. first: number of
    the first hash that names one of them. loaded: how many of the store's blocks it loads.
    """

    tracked: TrackedRequest
    blocks: Sequence[int]
    first: int
    loaded: int


class StepLoads:
    """Decides which loads a step waits for, and remembers them until their step is over."""

    def __init__(self, block_bytes: int) -> None:
        """block_bytes: of a block, on one rank."""
        self._block_bytes = block_bytes
        self._rate: float = START_RATE
        self._next: list[StepLoad] = []  # that the next step waits for
        self.current: list[StepLoad] = []  # likewise, the step under way, or the last one

    def allows(self, tracked: TrackedRequest, grant: Grant, blocks: int, *, alone: bool) -> bool:
        """Return True if a load of so many blocks may hold up the next step.

        All blocks must be readable now, and copying them, and what else that step waits for, must
        not take longer than the limit, as far as is known. alone: no other request is there.
        """
        blocks += sum(load.loaded for load in self._next)
        limit_s = ALONE_S_MAX if alone else COPY_S_MAX
        return (
            (tracked.remote is NO_REMOTE or tracked.remote.hinted > 0)
            and tracked.repeatable
            and not grant.sources
            and blocks * self._block_bytes <= self._rate * limit_s
        )

    def will_fill(self, hashes: Sequence[bytes], count: int) -> bool:
        """Return True if the next step loads a block that is among the first `count` of these."""
        return any(
            load.first < count
            and hashes[load.first] == load.tracked.request.block_hashes[load.first]
            for load in self._next
        )

    def measured(self, copied_bytes: int, seconds: float) -> None:
        """Take in what loads have copied, of any kind and on any rank, and how long it took."""
        if copied_bytes >= MEASURED_BYTES_MIN and seconds > 0:
            self._rate = copied_bytes / seconds

    def planned(self, load: StepLoad) -> None:
        """The next step waits for a load."""
        self._next.append(load)

    def begin_step(self) -> None:
        """The step under way is the one that loads were planned for since the last call."""
        self.current, self._next = self._next, []

    def failed(self, blocks: AbstractSet[int]) -> list[StepLoad]:
        """Return the loads of the last step that did not fill some of these engine blocks."""
        return [load for load in self.current if not blocks.isdisjoint(load.blocks)]
