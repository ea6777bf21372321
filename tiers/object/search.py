"""How many leading runs of a path are in the bucket: a few are asked for at a time.

Stores put a path from its beginning, so of the first full-attention group the runs that are there
come first, and several questions at a time narrow down where they end. That is a guess: a run that
is missing before the end makes its load fail, and the engine computes. Of the other groups only
those runs are asked for that a hit needs which ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvstore.core.types import BlockKey, Chain, GroupRule
from tiers.object.format import Format, Run

PARALLEL = 6  # questions at one time
RUNS_MAX = 4096  # of one path that are looked for
WINDOW_RUNS_MAX = 64  # of one other group

Told = Callable[[bool | None], None]
Look = Callable[[Run, Told, Callable[[], bool]], None]
"""Ask for a run; told: whether it is there, None if that is not known. It may be told at once.

The last one says, on any thread, whether the answer is still wanted.
"""


class Search:
    """One path that is looked for; over once `over` is True."""

    def __init__(
        self,
        form: Format,
        rules: Sequence[GroupRule],
        chain: Chain,
        first: int,
        blocks: int,
        look: Look,
        known: Callable[[str], bool | None],
    ) -> None:
        """first: the first block that is wanted; blocks: how many the path has.

        known(name): whether the object of a run is there, without asking; None: not known.
        """
        self.over = False
        self.found = self._runs()  # once it is over: they are there, as far as is known
        self._there: list[tuple[int, range]] = []  # of groups, the runs that are
        self._form, self._rules, self._chain = form, rules, chain
        self._look, self._known = look, known
        self._full = next(g for g, rule in enumerate(rules) if rule.trailing is None)
        self._begin = self._low = first // form.run_blocks
        self._high = min(blocks // form.run_blocks, self._begin + RUNS_MAX)
        self._told: dict[int, bool | None] = {}
        self._owed = 0

    def wanted(self) -> bool:
        """Tell whether its questions still matter."""
        return not self.over

    def begin(self) -> None:
        """Ask the first questions; none, if there is no run, or the first is known to be absent."""
        if self._low < self._high and self._known(self.run(self._full, self._low).name) is False:
            self._high = self._low
        self._narrow()

    def run(self, group: int, number: int) -> Run:
        """Return a run of the path."""
        kept = self._form.kept(self._rules[group], number)
        keys: list[BlockKey] = self._chain.keys_at(group, kept)
        return Run(self._form.name_of(keys[-1]), keys)

    def _runs(self) -> Iterator[Run]:
        """Yield the runs that are there; a long path has too many for one turn of the store."""
        for group, numbers in self._there:
            for number in numbers:
                yield self.run(group, number)

    def _narrow(self) -> None:
        """Ask for some runs between those that are there and the first that is not."""
        count = self._high - self._low
        if not count:
            self._find_others()
            return
        width = min(PARALLEL, count)
        after = self._low > self._begin  # at first the first one, too: most paths are not there
        numbers = [self._low + (n + after) * count // (width + after) for n in range(width)]
        self._told.clear()
        self._owed = len(numbers)
        for number in numbers:
            self._look(self.run(self._full, number), partial(self._tell, number), self.wanted)

    def _tell(self, number: int, there: bool | None) -> None:  # noqa: FBT001 - as Told
        self._told[number] = there
        self._owed -= 1
        if self._owed or self.over:
            return
        known = True
        for asked, answer in sorted(self._told.items()):
            if not answer:
                self._high, known = asked, answer is not None
                break
            self._low = asked + 1
        if not known:
            self._high = self._low  # what lies between cannot be found out now
        self._narrow()

    def _find_others(self) -> None:
        """Ask for what a hit up to here needs of the other groups."""
        end, size = self._low, self._form.run_blocks
        self._there.append((self._full, range(self._begin, end)))
        asked: list[tuple[int, range]] = []  # the last of each stands for all
        for group, rule in enumerate(self._rules) if end > self._begin else ():
            if rule.trailing is None and group != self._full:
                asked.append((group, range(self._begin, end)))
            elif rule.trailing is not None:
                first = rule.first_of(end * size, inside=0) // size
                numbers = range(max(first, end - WINDOW_RUNS_MAX), end)
                asked += [(group, range(number, number + 1)) for number in numbers]
        self._owed = len(asked)
        self.over = not asked
        for group, numbers in asked:
            told = partial(self._other, group, numbers)
            self._look(self.run(group, numbers[-1]), told, self.wanted)

    def _other(self, group: int, numbers: range, there: bool | None) -> None:  # noqa: FBT001 - as Told
        if there:
            self._there.append((group, numbers))
        self._owed -= 1
        self.over = self.over or not self._owed
