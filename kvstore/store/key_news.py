"""What one engine is told of blocks that enter and leave the tiers: those it has to do with.

An engine has to do with a block that it stores, that it asked for and that was not in memory, and
that it has been told of. With the blocks of all engines of a busy store, each would hear of many
times as many as it can use, and lose its own among them.

What waits is the net change of each block, in order. Up to NEWS_MAX blocks are sent that the
engine has not dealt with; so a burst waits here, and not in the engine's step.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.core.types import BlockKey, Changes
from kvstore.wire import engine as p

TABLES = 256  # a table of all would stop a turn for milliseconds when it grows
TABLE_SHIFT = 56  # of a hash of 64 bits: -128..127, which are the indices of the tables
KEYS_MAX = 1 << 20  # of an engine; the oldest are forgotten, and no end of theirs is told
WAITING_MAX = 100_000
MEMORY, DISK = 1, 2  # in bits: where the engine knows a block to be


def net_of(changes: Changes) -> Changes:
    """Return what is different after a turn: the two lists are in no order to one another."""
    if not changes.added or not changes.removed:
        return changes
    net = Counter(changes.added)
    net.subtract(changes.removed)
    return Changes(
        [key for key, count in net.items() if count > 0],
        [key for key, count in net.items() if count < 0],
    )


class Told(NamedTuple):
    """Keys for one message."""

    added: list[BlockKey]
    removed: list[BlockKey]
    disk_added: list[BlockKey]
    disk_removed: list[BlockKey]


class KeyNews:
    """The blocks that an engine has to do with, and what it has not been told of them."""

    def __init__(self) -> None:
        self._tables: list[dict[BlockKey, int]] = [{} for _ in range(TABLES)]
        # Stored or not; None: as the engine was told before, and seems to have forgotten.
        self._waiting: OrderedDict[tuple[int, BlockKey], bool | None] = OrderedDict()
        self._unheard = 0  # keys sent
        self.lost = 0

    def follow(self, keys: Iterable[BlockKey]) -> None:
        """The engine has to do with these blocks from now on."""
        for key in keys:
            table = self._tables[hash(key) >> TABLE_SHIFT]
            if key not in table:
                table[key] = 0
                if len(table) > KEYS_MAX // TABLES:
                    self.lost += table.pop(next(iter(table))) > 0

    def entered(self, keys: Iterable[BlockKey], medium: int) -> None:
        """Blocks can be read now in MEMORY, or on DISK."""
        for key in keys:
            table = self._tables[hash(key) >> TABLE_SHIFT]
            known = table.get(key)
            if known is not None and not known & medium:
                table[key] = known | medium
                self._note(medium, key, stored=True)

    def there(self, key: BlockKey) -> None:
        """The engine has stored once more a block that memory has: tell it, though it was told."""
        if self._tables[hash(key) >> TABLE_SHIFT].get(key, 0) & MEMORY:
            self._waiting.setdefault((MEMORY, key))
            self._drop_oldest()
        else:
            self.entered((key,), MEMORY)

    def left(self, keys: Iterable[BlockKey], medium: int) -> None:
        """Blocks are not there any more; those that are nowhere are of no interest."""
        for key in keys:
            table = self._tables[hash(key) >> TABLE_SHIFT]
            known = table.get(key, 0)
            if known & medium:
                table[key] = known & ~medium
                if known == medium:
                    del table[key]
                self._note(medium, key, stored=False)

    def _note(self, medium: int, key: BlockKey, *, stored: bool) -> None:
        if self._waiting.pop((medium, key), None) is None:  # else it is as the engine knows it
            self._waiting[medium, key] = stored
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        if len(self._waiting) > WAITING_MAX:
            self._waiting.popitem(last=False)
            self.lost += 1

    def tell(self, key: BlockKey, medium: int) -> bool:
        """Note that the engine is told by other means where a block is; False: it knows that."""
        self.follow((key,))
        table = self._tables[hash(key) >> TABLE_SHIFT]
        known, table[key] = table[key], table[key] | medium
        # What waits is then the end of what the engine knows, and true no more.
        return not known & medium and self._waiting.pop((medium, key), None) is None

    def heard(self, count: int) -> None:
        """The engine has dealt with so many keys."""
        self._unheard = max(0, self._unheard - count)

    def take(self) -> Told | None:
        """Return what can be sent now; None if nothing can."""
        count = min(len(self._waiting), p.NEWS_MAX - self._unheard)
        if count <= 0:
            return None
        told = Told([], [], [], [])
        for _ in range(count):
            (medium, key), stored = self._waiting.popitem(last=False)
            told[2 * (medium == DISK) + (stored is False)].append(key)
        self._unheard += count
        return told
