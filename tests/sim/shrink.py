"""Cuts a failing world: fewer steps, features, faults and requests, as long as it still fails.

Steps, faults and arrivals have random numbers of their own, so what is left out changes little
of the rest. Each kind is cut in turn until nothing more goes; lists as in Zeller's delta debugging
("Simplifying and Isolating Failure-Inducing Input", 2002): parts of half the size, then smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from tests.harness import bugs
from tests.sim.world import FEATURES, Cut

TRIES_MAX = 150

Fails = Callable[[Cut], bool]


class Cuttable(Protocol):
    """A world."""

    @property
    def fault_count(self) -> int: ...

    def run(self) -> None: ...


class _Tries:
    def __init__(self, fails: Fails) -> None:
        self.count = 0
        self._fails = fails

    def __call__(self, cut: Cut) -> bool:
        """Tell whether a cut world fails in the same way; False once there were enough tries."""
        if self.count >= TRIES_MAX:
            return False
        self.count += 1
        return self._fails(cut)


def shrink(make: Callable[[Cut], Cuttable], fails: Fails) -> tuple[Cut, int]:
    """Return what can be left out of a failing world, and how many worlds were tried.

    make(cut): the world. fails(cut): whether it still fails in the same way without that.
    """
    tries, cut = _Tries(fails), Cut()
    cut = _fewer(tries, cut, "steps", cut.steps)
    for feature in FEATURES:
        less = replace(cut, off=(*cut.off, feature))
        cut = less if tries(less) else cut
    cut = _without_faults(tries, cut, _count_faults(make(cut)))
    cut = _fewer(tries, cut, "requests", 64)
    return _fewer(tries, cut, "steps", cut.steps), tries.count


def _count_faults(world: Cuttable) -> int:
    with contextlib.suppress(BaseException), bugs.escaping():  # that it fails is known
        world.run()
    return world.fault_count


def _fewer(tries: _Tries, cut: Cut, what: str, most: int) -> Cut:
    """Search for the smallest number that fails, as if more of it always failed, too."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        less = replace(cut, **{what: middle})
        if tries(less):
            cut, high = less, middle
        else:
            low = middle + 1
    return cut


def _without_faults(tries: _Tries, cut: Cut, count: int) -> Cut:
    """Leave out the faults that do not matter."""
    left, size = list(range(1, count + 1)), count
    while size and left:
        for first in range(0, len(left), size):
            part = left[first : first + size]
            less = replace(cut, skipped=tuple(sorted({*cut.skipped, *part})))
            if tries(less):
                cut = less
        left = [number for number in left if number not in cut.skipped]
        size //= 2
    return cut
