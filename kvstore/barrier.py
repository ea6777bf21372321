"""Where a bug ends: it is logged, counted, and costs what the place says, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    @contextmanager
    def around(self, what: str, cost: Callable[[], object] = _nothing) -> Iterator[None]:
        """End what nobody foresaw in a block; cost(): what is given up for it. It must not raise.

        what: the block, as the log names it.
        """
        try:
            yield
        except Exception:  # noqa: BLE001 - this is what barriers are
            self._said.bug("bugs of the store", "a bug of the store in %s", what)
            self._count()
            cost()
