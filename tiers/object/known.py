"""What a store knows of a bucket: runs that are there, and names that are not.

It is bounded, and counts for a while only: other stores put, and a bucket lets objects expire.
"""

from __future__ import annotations

from kvstore.core.types import BlockKey
from tiers.object.format import Run

THERE_NS = 300_000_000_000
ABSENT_NS = 10_000_000_000
DAMAGED_NS = 600_000_000_000  # of what could not be used
BLOCKS_MAX = 1 << 18
ABSENT_MAX = 1 << 16


class Known:
    """Runs by name and by block."""

    def __init__(self, *, cleared: bool = False) -> None:
        """Know nothing. cleared: what this store does not put from now on does not count."""
        self.cleared = cleared
        self._runs: dict[str, Run] = {}  # that learned last is last
        self._places: dict[BlockKey, tuple[Run, int]] = {}
        self._absent: dict[str, int] = {}  # until when
        self._gone_ns = -1  # when one was missing that was known to be there

    def there(self, run: Run, now_ns: int) -> None:
        """The object of a run is there."""
        self._forget(run.name)
        self._absent.pop(run.name, None)
        run.seen_ns = now_ns
        self._runs[run.name] = run
        self._places.update((key, (run, at)) for at, key in enumerate(run.keys))
        while len(self._places) > BLOCKS_MAX:
            self._forget(next(iter(self._runs)))

    def absent(self, name: str, until_ns: int) -> None:
        """There is no object of this name, or none that is of use."""
        self._forget(name)
        self._absent.pop(name, None)
        if len(self._absent) >= ABSENT_MAX:
            del self._absent[next(iter(self._absent))]
        self._absent[name] = until_ns

    def gone(self, name: str, now_ns: int) -> None:
        """An object is not there any more; so others may not be, and are asked for anew."""
        self.absent(name, now_ns + ABSENT_NS)
        self._gone_ns = now_ns

    def state(self, name: str, now_ns: int) -> bool | None:
        """Tell whether an object is there; None: not known."""
        run = self._runs.get(name)
        if run is not None and self._fresh(run, now_ns) and run.seen_ns > self._gone_ns:
            return True
        if self.cleared or now_ns < self._absent.get(name, 0):
            return False
        return None

    def has(self, key: BlockKey, now_ns: int) -> bool:
        """Tell whether state() of the run that has a block is True, without its name."""
        found = self.place(key, now_ns)
        return found is not None and found[0].seen_ns > self._gone_ns

    def place(self, key: BlockKey, now_ns: int) -> tuple[Run, int] | None:
        """Return the run that has a block, and its position there."""
        found = self._places.get(key)
        return found if found is not None and self._fresh(found[0], now_ns) else None

    def clear(self) -> None:
        """Count nothing that is there now."""
        self.cleared = True
        self._runs.clear()
        self._places.clear()
        self._absent.clear()

    def _fresh(self, run: Run, now_ns: int) -> bool:
        return self.cleared or now_ns - run.seen_ns < THERE_NS

    def _forget(self, name: str) -> None:
        run = self._runs.pop(name, None)
        if run is not None:
            for key in run.keys:
                self._places.pop(key, None)
