"""Where a bug ends: it is logged, counted, and costs what the place says, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from kvstore.logs import RateLog

T = TypeVar("T")


class Ended:
    """A `with` that ends what is raised in it, where ended(exc) says so; may be used again.

    A generator would cost each turn of the loop several microseconds more.
    """

    __slots__ = ("_ended",)

    def __init__(self, ended: Callable[[BaseException], bool]) -> None:
        self._ended = ended

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> bool:
        return exc is not None and self._ended(exc)


class Barrier:
    """The barriers of one part of the store.

    A broken invariant passes: it is not known what it costs.
    """

    def __init__(self, said: RateLog, count: Callable[[], None]) -> None:
        """count(): one more."""
        self._said = said
        self._count = count

    def around(self, what: str, cost: Callable[[], object] = lambda: None) -> Ended:
        """End what nobody foresaw in a block; cost(): what is given up for it. It must not raise.

        what: the block, as the log names it.
        """

        def ended(exc: BaseException) -> bool:
            if isinstance(exc, Exception):
                self.met(what, cost)
                return True
            return False

        return Ended(ended)

    def each(
        self,
        things: Iterable[T],
        do: Callable[[T], object],
        cost: Callable[[T], object],
        what: Callable[[T], str],
    ) -> None:
        """Call do(thing) for each; cost(thing) and what(thing): as in around(), after a bug."""
        for thing in things:
            try:
                do(thing)
            except Exception:  # noqa: BLE001 - as around() does, without a cost for each thing
                self.met(what(thing), partial(cost, thing))

    def met(self, what: str, cost: Callable[[], object]) -> None:
        """Log the bug that is being handled, count it, and give up what it costs."""
        self._said.bug("bugs of the store", "a bug of the store in %s", what)
        self._count()
        cost()
