"""What a tier of another size would hit: a curve over capacities, learned from what is asked for.

A cache that evicts leaf-first by recency hits a block if fewer other blocks were used since its
last use than it holds: the block's distance. So one histogram of distances tells the hit ratio of
every capacity. Distances are measured on a sample: of all blocks those whose hash is low enough
(SHARDS, Waldspurger et al., FAST 2015). When there are too many, those with the highest hashes
leave, and each one that stays stands for more; once the sample stands for several times what the
tiers hold, the one that was used longest ago leaves instead. Few blocks, as those of a system
prompt, can have a large share of all uses, and a sample has all of a block's uses or none. So
blocks that are found several times among every 8th use are counted themselves from then on,
however high their hash.

A request uses its blocks from the last to the first: what hangs below another is never used later.
What is stored without having been asked for, as what a model generates, is used, but not asked for.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

SAMPLES = 6144
HOT_MAX = 256
_EVERY = 8
_WINDOW = 2048  # uses that are looked at for hot blocks in one go, of every 8th
_HOT = 3  # of them
_STEPS = 16  # of the histogram, in each doubling
_OCTAVES = 34
_HASHES = 1 << 64
_USES_MAX = 1 << 26  # then all that was counted counts half


class HitCurve:
    """The uses of one namespace's blocks; about 1.5 MB however many there are."""

    def __init__(self) -> None:
        self.uses = 0
        self.covered = math.inf  # blocks that the sample is to stand for, at most
        self._distances = array("d", bytes(8 * _STEPS * _OCTAVES))
        self._limit = _HASHES  # of the hashes that are sampled
        self._clock = 0
        self._last: dict[int, int] = {}  # when each sampled block was used, in this order
        self._times: list[int] = []  # the same, ascending
        self._hot: dict[int, int] = {}
        self._hot_times: list[int] = []
        self._window: Counter[int] = Counter()
        self._looked = self._first = 0
        self._began = 0  # the window: by the clock

    def use(self, hashes: Sequence[int]) -> None:
        """A request asks for these blocks, each named by 64 bits that are as good as random."""
        self.uses += len(hashes)
        self._look(hashes)
        limit, hot = self._limit, self._hot
        for hashed in reversed([h for h in hashes if h < limit or h in hot]):
            self._used(hashed)
        if self.uses > _USES_MAX:
            self.uses //= 2
            self._distances = array("d", [count / 2 for count in self._distances])

    def stored(self, hashes: Iterable[int]) -> None:
        """These blocks were stored; those that were asked for are known."""
        limit, last = self._limit, self._last
        for hashed in [h for h in hashes if h < limit and h not in last]:
            if hashed not in self._hot:
                self._used(hashed)

    def _used(self, hashed: int) -> None:
        if hashed in self._hot:
            last, times, weight = self._hot, self._hot_times, 1.0
        elif self._has_room(hashed):
            last, times, weight = self._last, self._times, _HASHES / self._limit
        else:
            return
        before = last.pop(hashed, 0)
        if before:
            del times[bisect_left(times, before)]
            step = math.ceil(math.log2(self._since(before) + 1) * _STEPS)
            self._distances[min(step, len(self._distances) - 1)] += weight
        self._clock += 1
        last[hashed] = self._clock
        times.append(self._clock)

    def _since(self, time: int) -> float:
        """Count the blocks that were used since then."""
        sampled = len(self._times) - bisect_left(self._times, time)
        hot = len(self._hot_times) - bisect_left(self._hot_times, time)
        return sampled * (_HASHES / self._limit) + hot

    def _has_room(self, hashed: int) -> bool:
        """Make room in the sample for a block that is not in it; False if its hash is too high."""
        if len(self._last) >= SAMPLES and hashed not in self._last:
            lower = self._limit - self._limit // 8
            if SAMPLES * (_HASHES / lower) <= self.covered:
                self._limit = lower
                self._last = {h: time for h, time in self._last.items() if h < lower}
                self._times = list(self._last.values())
            else:
                self._leave(self._last, self._times, next(iter(self._last)))
        return hashed < self._limit

    @staticmethod
    def _leave(last: dict[int, int], times: list[int], hashed: int) -> None:
        time = last.pop(hashed, 0)
        if time:
            del times[bisect_left(times, time)]

    def _look(self, hashes: Sequence[int]) -> None:
        """Look for blocks that are used again and again, and for those that are no more."""
        some = hashes[self._first :: _EVERY]
        self._first = (5 * self._first + 3) % _EVERY  # each of 0 to 7 in turn
        self._window.update(some)
        self._looked += len(some)
        if self._looked < _WINDOW:
            return
        for hashed in [h for h, time in self._hot.items() if time < self._began]:
            self._leave(self._hot, self._hot_times, hashed)
            self._hot.pop(hashed, None)
        for hashed, count in self._window.most_common(HOT_MAX):
            if count < _HOT or len(self._hot) >= HOT_MAX:
                break
            if hashed not in self._hot:
                self._hot[hashed] = self._last.get(hashed, 0)
                if self._hot[hashed]:
                    self._leave(self._last, self._times, hashed)
                    self._hot_times.append(self._hot[hashed])
        self._hot_times.sort()
        self._window.clear()
        self._looked, self._began = 0, self._clock

    def ratios(self, capacities: Iterable[float]) -> list[float]:
        """Return which part of the blocks asked for each capacity, in blocks, would have hit."""
        hits, found = [0.0, *accumulate(self._distances)], []
        for blocks in capacities:
            end = min(math.log2(max(1.0, blocks)) * _STEPS, len(self._distances) - 2)
            whole = int(end)
            count = hits[whole + 1] + self._distances[whole + 1] * (end - whole)
            found.append(min(1.0, count / self.uses) if blocks >= 1 and self.uses else 0.0)
        return found
