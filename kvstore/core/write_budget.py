"""How much is written to a lower tier: a backlog in seconds, a budget in bytes per day."""

from __future__ import annotations

_DAY_NS = 86_400_000_000_000
_BLOCKS_MIN = 256  # may always wait: some jobs, so that a slow tier is not an idle one
_BLOCKS_FIRST = 16_384  # before anything was measured
_MEASURED_NS = 200_000_000
_KEPT_NS = 20_000_000_000  # what is older counts half


class Backlog:
    """Bounds what waits to be written by what the tier has shown to write in that time."""

    def __init__(self, limit_ns: int) -> None:
        """limit_ns: how long a block may wait."""
        self.limit_ns = limit_ns
        self._busy_ns = 0
        self._blocks = 0
        self._last_ns: int | None = None

    def measure(self, blocks: int, now_ns: int, *, busy: bool) -> None:
        """Note how many blocks were written since the last call; busy: writes were under way."""
        if self._last_ns is not None and busy:
            self._busy_ns += now_ns - self._last_ns
        self._last_ns = now_ns
        self._blocks += blocks
        if self._busy_ns > _KEPT_NS:
            self._busy_ns //= 2
            self._blocks //= 2

    @property
    def blocks_max(self) -> int:
        """Most blocks that may wait."""
        if self._busy_ns < _MEASURED_NS:
            return _BLOCKS_FIRST
        return max(_BLOCKS_MIN, self._blocks * self.limit_ns // self._busy_ns)


class WriteBudget:
    """Bytes per day that a tier is to take, however they come over the day.

    A bucket of one day's bytes that fills steadily; at first it holds an hour's. What was used
    again is written beyond it, and paid for later.
    """

    def __init__(self, day_bytes: int | None, day_ns: int = _DAY_NS) -> None:
        """day_bytes: None for no limit. day_ns: another length of a day, for replay."""
        self._day_ns = day_ns
        self.day_bytes = day_bytes
        # What may be written now; below 0 where more was.
        self.left_bytes = 0 if day_bytes is None else day_bytes // 24
        self._spare_ns = 0  # since the last byte was added
        self._last_ns: int | None = None

    def change(self, day_bytes: int | None) -> None:
        """Have another limit from now on; what was spent beyond the last one is not forgotten."""
        if day_bytes is not None:
            first = day_bytes // 24
            self.left_bytes = first if self.day_bytes is None else min(self.left_bytes, day_bytes)
        self.day_bytes, self._spare_ns = day_bytes, 0

    def left(self, now_ns: int) -> bool:
        """Tell whether blocks that were used once may be written."""
        if self.day_bytes is None:
            return True
        if self._last_ns is not None:
            self._spare_ns += now_ns - self._last_ns
            earned = self.day_bytes * self._spare_ns // self._day_ns
            self._spare_ns -= earned * self._day_ns // self.day_bytes
            self.left_bytes = min(self.day_bytes, self.left_bytes + earned)
        self._last_ns = now_ns
        return self.left_bytes > 0

    def spend(self, size: int) -> None:
        """Note bytes that are being written."""
        self.left_bytes -= size
