"""How long something takes, by how long it took: a line over its amount. And how long loads take.

    seconds = start + amount x each

The line is the one with the least squares to what was measured, of which the last measurements
count most. Where all had about the same amount, or noise turns the line round, it starts at 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvstore.core.tier import Placing, Tier
from kvstore.core.types import BlockKey

SHARE = 1 / 8
_ALONE_SHARE = 1 / 4  # that a load counts which began while no other was under way
PLACES_MAX = 256  # whose paces are known
_SPREAD = 1 / 64  # of the mean's square: a smaller variance says nothing of the line's direction


class Pace:
    """What was measured of one thing, as sums that do not grow."""

    __slots__ = ("_amounts", "_products", "_seconds", "_squares", "weight")

    def __init__(self) -> None:
        """Start without measurements."""
        self.weight = 0.0  # 1 in the end
        self._amounts = self._seconds = self._squares = self._products = 0.0

    def note(self, amount: float, seconds: float, share: float = SHARE) -> None:
        """Take in a measurement; share: its weight, of all that were taken in until then."""
        kept = 1 - share
        self.weight = self.weight * kept + share
        self._amounts = self._amounts * kept + amount * share
        self._seconds = self._seconds * kept + seconds * share
        self._squares = self._squares * kept + amount * amount * share
        self._products = self._products * kept + amount * seconds * share

    @property
    def line(self) -> tuple[float, float]:
        """Return the seconds that any amount takes, and those of each unit; 0 if not known."""
        if not self._amounts:
            return 0.0, 0.0
        amount, seconds = self._amounts / self.weight, self._seconds / self.weight
        square, product = self._squares / self.weight, self._products / self.weight
        variance = square - amount * amount
        if variance > square * _SPREAD:
            each = (product - amount * seconds) / variance
            start = seconds - amount * each
            if each > 0 and start >= 0:
                return start, each
        return 0.0, product / square

    def seconds(self, amount: float) -> float:
        """Return how long so much takes, as far as is known."""
        start, each = self.line
        return start + amount * each


class LoadPaces:
    """How long it takes to read blocks at each place after all that are being read.

    A place is a tier, or a tier of a peer; None: one that is not measured.
    """

    def __init__(self, tiers: Iterable[Tier] = ()) -> None:
        """tiers: that read the blocks."""
        self._placing = {tier.name: tier for tier in tiers if isinstance(tier, Placing)}
        self._paces: dict[str, Pace] = {}  # those that were read last come last
        self._reading: Counter[str] = Counter()  # blocks of loads under way

    def place_of(self, tier: Tier, key: BlockKey) -> str | None:
        """Name the place where a tier reads a block."""
        placing = self._placing.get(tier.name)
        return tier.name if placing is None else placing.place(key)

    def wait_ns(self, place: str | None, blocks: int) -> int:
        """Return how long it takes until so many more blocks are read; 0: not known."""
        pace = None if place is None else self._paces.get(place)
        if place is None or pace is None:
            return 0
        return int(pace.seconds(self._reading[place] + blocks) * 1e9)

    def idle(self, place: str | None) -> bool:
        """Tell whether at a place that was measured nothing is being read."""
        return place in self._paces and place not in self._reading

    def began(self, place: str | None, blocks: int) -> tuple[int, int]:
        """Note a load; return how long it will take, or 0, and how many blocks are being read."""
        if place is None:
            return 0, blocks
        wait_ns = self.wait_ns(place, blocks)
        self._reading[place] += blocks
        return wait_ns, self._reading[place]

    def ended(self, place: str | None, blocks: int, ahead: int, took_ns: int | None) -> None:
        """Note its end. ahead: as began() said. took_ns: None for one that failed."""
        if place is None:
            return
        self._reading[place] -= blocks
        if not self._reading[place]:
            del self._reading[place]
        if took_ns is not None:
            pace = self._paces.pop(place, None) or Pace()
            if len(self._paces) >= PLACES_MAX:
                del self._paces[next(iter(self._paces))]
            self._paces[place] = pace
            pace.note(ahead, took_ns / 1e9, _ALONE_SHARE if ahead == blocks else SHARE)
