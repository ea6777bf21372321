"""How long something takes, by how long it took: a line over its amount.

    seconds = start + amount x each

The line is the one with the least squares to what was measured, of which the last measurements
count most. Where all had about the same amount, or noise turns the line round, it starts at 0.
"""

from __future__ import annotations

SHARE = 1 / 8
_REACH = 8  # times the mean amount: what is more takes at least as long
_SPREAD = 1 / 64  # of the mean's square: a smaller variance says nothing of the line's direction


class Pace:
    """What was measured of one thing, as sums that do not grow."""

    __slots__ = ("_amounts", "_products", "_seconds", "_squares", "weight")

    def __init__(self) -> None:
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
    def line(self) -> tuple[float, float, float]:
        """Return start, seconds of each (0: not known), and up to what amount they are believed."""
        if not self._amounts:
            return 0.0, 0.0, 0.0
        amount, seconds = self._amounts / self.weight, self._seconds / self.weight
        square, product = self._squares / self.weight, self._products / self.weight
        variance = square - amount * amount
        most = amount
        if variance > square * _SPREAD:
            each = (product - amount * seconds) / variance
            start = seconds - amount * each
            most *= _REACH if each > 0 else 1
            if each > 0 and start >= 0:
                return start, each, most
        return 0.0, product / square, most

    def seconds(self, amount: float) -> float:
        """Return how long so much takes at least, as far as is known.

        What was measured of little says little of much: all of it may have been the start.
        """
        start, each, most = self.line
        return start + min(amount, most) * each
