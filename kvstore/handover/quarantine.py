"""How long memory of transfers that nobody waits for is waited for: then the exporter is restarted.

After that nothing of before is written any more.
"""

from __future__ import annotations

CROWDED_NS = 1_000_000_000  # more than half of a model's landing slots
QUIET_NS = 60_000_000_000  # anything, while nothing else goes on


class Quarantine:
    """That of one store."""

    def __init__(self) -> None:
        """Nothing is in there."""
        self._crowded_ns: int | None = None  # since when
        self._quiet_ns: int | None = None

    def stir(self) -> None:
        """Something goes on."""
        self._quiet_ns = None

    def lasts(self, now_ns: int, *, crowded: bool, quiet: bool) -> bool:
        """Tell whether it has lasted for too long; asked now and then."""
        self._crowded_ns = (self._crowded_ns or now_ns) if crowded else None
        self._quiet_ns = (self._quiet_ns or now_ns) if quiet else None
        late = (self._crowded_ns is not None and now_ns - self._crowded_ns >= CROWDED_NS) or (
            self._quiet_ns is not None and now_ns - self._quiet_ns >= QUIET_NS
        )
        if late:
            self._crowded_ns = self._quiet_ns = None
        return late
