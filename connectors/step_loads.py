"""Loads that end in the step that admits their request, before its forward pass.

An asynchronous load takes a step of its own, and then the engine waits. That is worth it where
other requests run meanwhile. Where nothing else can run, the step may as well wait for the copy.

The failure of such a load reaches the engine too late: its forward pass has read the blocks, and
the engine finds them by their hashes. So an engine that schedules steps ahead has no loads of this
kind, and where one fails, all that the request has from the first loaded block on is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.types import GroupRule

COPY_S_MAX = 0.002
START_BYTES = 16 << 20  # that COPY_S_MAX is taken to be enough for, until a load is measured
MEASURED_BYTES_MIN = 1 << 20  # a smaller load says little of the rate


class StepLoads:
    """How much an engine may load in a step."""

    def __init__(self, block_bytes: int) -> None:
        """block_bytes: of a block, on one rank."""
        self._block_bytes = block_bytes
        self._bytes_max = START_BYTES

    @staticmethod
    def serves(rules: Sequence[GroupRule]) -> bool:
        """Return True for one group that needs the whole prefix.

        Engines take failed blocks of one group only, and compute from the first of them on, which
        needs all before it.
        """
        return len(rules) == 1 and rules[0].trailing is None and not rules[0].exact

    def fits(self, blocks: int) -> bool:
        """Return True if copying so many blocks takes COPY_S_MAX at most, as far as is known."""
        return blocks * self._block_bytes <= self._bytes_max

    def measured(self, copied_bytes: int, seconds: float) -> None:
        """Take in what loads have copied, of any kind and on any rank, and how long it took."""
        if copied_bytes >= MEASURED_BYTES_MIN and seconds > 0:
            self._bytes_max = int(copied_bytes / seconds * COPY_S_MAX)
