"""Where a bug ends: it is logged, counted, and costs what the place says, no more."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.rate_log import RateLog


def _nothing() -> None:
    """Cost nothing beyond what was being done."""


class Barrier:
    """The barriers of one part of the store.

    A broken invariant passes: it is not known what it costs.
    """

    def __init__(self, said: RateLog, count: Callable[[], None]) -> None:
        """count(): one more."""
        self._said = said
        self._count = count

    def around(self, what: str, cost: Callable[[], object] = _nothing) -> _Around:
        """End what nobody foresaw in a block; cost(): what is given up for it. It must not raise.

        what: the block, as the log names it.
        """
        return _Around(self, what, cost)

    def met(self, what: str, cost: Callable[[], object]) -> None:
        """Log the bug that is being handled, count it, and give up what it costs."""
        self._said.bug("bugs of the store", "a bug of the store in %s", what)
        self._count()
        cost()


class _Around:
    """One barrier; a generator would cost each turn of the loop several microseconds more."""

    __slots__ = ("_barrier", "_cost", "_what")

    def __init__(self, barrier: Barrier, what: str, cost: Callable[[], object]) -> None:
        self._barrier, self._what, self._cost = barrier, what, cost

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _trace: object
    ) -> bool:
        if kind is None or not isinstance(exc, Exception):
            return False
        self._barrier.met(self._what, self._cost)
        return True
