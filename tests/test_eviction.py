"""Leaf-first LRU against a brute-force model, and what it costs."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

import pytest

from kvstore.core.eviction import SKIPS_MAX, LeafLRU
from kvstore.core.index import Entry, Index, Node, State
from kvstore.core.types import BlockKey, Slot


class Counting(LeafLRU):
    """Counts changes of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def _link_after(self, entry: Node, at: Node | None) -> None:
        self.changes += 1
        super()._link_after(entry, at)

    def remove(self, entry: Node) -> None:
        self.changes += entry.next is not None
        super().remove(entry)


class Forest:
    """A policy at work on an index, and the times at which blocks were used, for brute force."""

    def __init__(self) -> None:
        self.index = Index()
        self.policy = Counting()
        self.used: dict[BlockKey, int] = {}
        self._names: list[str] = []  # in order, so that a seed's choices are the same each time
        self._now = 0

    def key(self, name: str) -> BlockKey:
        return BlockKey(name.encode())

    def entry(self, name: str) -> Entry:
        entry = self.index.get(self.key(name))
        assert entry is not None
        return entry

    def names(self) -> list[str]:
        return self._names.copy()

    def touch(self, name: str) -> None:
        """Use a block, and with it the path above: what a policy must behave like."""
        self._now += 1
        for end in range(1, len(name) + 1):
            self.used[self.key(name[:end])] = self._now
        self.policy.touch(self.entry(name))

    def store(self, name: str) -> None:
        """Add a block below its parent, whose name is one letter shorter."""
        above = self.index.get(self.key(name[:-1]))
        assert above is not None or len(name) == 1
        entry = Entry(self.key(name), above, Slot(0))
        self.insert(entry)
        entry.state = State.READY
        self.touch(name)

    def insert(self, entry: Entry) -> None:
        self.index.insert(entry)
        insort(self._names, entry.key.decode())

    def pin(self, name: str) -> None:
        """What a manager does, and in unpin."""
        entry = self.entry(name)
        entry.pins += 1
        if not entry.children:
            self.policy.remove(entry)

    def _remove(self, entry: Entry) -> None:
        self.index.remove(entry)
        del self._names[bisect_left(self._names, entry.key.decode())]

    def _gone(self, entry: Entry) -> None:
        self._remove(entry)
        if entry.parent is not None:
            self.policy.freed(entry.parent)

    def drop(self, name: str) -> None:
        entry = self.entry(name)
        self.policy.inherit(entry)
        self._gone(entry)

    def evict(self) -> str | None:
        entry = next(self.policy.victims(), None)
        if entry is None:
            return None
        assert isinstance(entry, Entry)
        self._gone(entry)
        return entry.key.decode()

    def evict_in_one_search(self, count: int) -> None:
        """What a manager does: it tells of the last parent only. Compare each with brute force."""
        victim: Node | None = None
        for victim in islice(self.policy.victims(), count):
            assert isinstance(victim, Entry)
            assert victim.key.decode() == self.coldest()
            self._remove(victim)
        if victim is not None and victim.parent is not None:
            self.policy.freed(victim.parent)

    def unpin(self, name: str) -> None:
        entry = self.entry(name)
        entry.pins -= 1
        if entry.pins == 0 and not entry.children:
            self.touch(name)

    def _leaves(self) -> Iterator[Entry]:
        return (entry for entry in self.index if entry.pins == 0 and entry.children == 0)

    def evictable(self) -> set[str]:
        return {entry.key.decode() for entry in self._leaves()}

    def coldest(self) -> str | None:
        """Brute force: of the leaves, the one whose last use is oldest."""
        found = min(self._leaves(), key=lambda entry: self.used[entry.key], default=None)
        return None if found is None else found.key.decode()


def test_the_coldest_leaf_goes_first_and_then_its_parents() -> None:
    forest = Forest()
    for name in ("a", "ab", "abc", "x", "xy"):
        forest.store(name)
    assert [forest.evict() for _ in range(6)] == ["abc", "ab", "a", "xy", "x", None]


def test_O5_touching_the_end_of_a_path_refreshes_the_whole_path() -> None:
    forest = Forest()
    for name in ("a", "ab", "abc", "x", "xy"):
        forest.store(name)
    forest.touch("abc")
    assert [forest.evict() for _ in range(5)] == ["xy", "x", "abc", "ab", "a"]


def test_a_parent_that_was_used_by_itself_outlives_its_childs_place() -> None:
    forest = Forest()
    for name in ("a", "ab", "x"):
        forest.store(name)
    forest.touch("a")
    assert [forest.evict() for _ in range(3)] == ["ab", "x", "a"]


def test_a_parent_takes_its_childs_place_when_that_is_younger_than_its_own() -> None:
    forest = Forest()
    for name in ("a", "x", "ab", "y"):
        forest.store(name)
    # a and b were last used between x and y.
    assert [forest.evict() for _ in range(4)] == ["x", "ab", "a", "y"]


def test_pinned_blocks_and_their_parents_stay() -> None:
    forest = Forest()
    for name in ("a", "ab", "x"):
        forest.store(name)
    forest.pin("ab")
    assert [forest.evict(), forest.evict()] == ["x", None]
    forest.unpin("ab")
    assert [forest.evict(), forest.evict(), forest.evict()] == ["ab", "a", None]


def test_a_block_being_written_keeps_its_parent() -> None:
    forest = Forest()
    forest.store("a")
    writing = Entry(forest.key("ab"), forest.entry("a"), Slot(0))
    forest.insert(writing)
    assert forest.evict() is None
    forest._gone(writing)
    assert forest.evict() == "a"


@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_that_of_lru_with_whole_paths(seed: int) -> None:
    rng = random.Random(seed)
    forest = Forest()
    for _ in range(400):
        names = forest.names()
        choice = rng.random()
        if choice < 0.45 or not names:
            above = rng.choice(["", *names])
            name = above + rng.choice("abc")
            if len(name) < 8 and name not in names:
                forest.store(name)
        elif choice < 0.7:
            forest.touch(rng.choice(names))
        else:
            before = len(forest.names())
            count = rng.randrange(1, 5)
            forest.evict_in_one_search(count)
            assert len(forest.names()) == max(0, before - count)
    while (expected := forest.coldest()) is not None:
        assert forest.evict() == expected
    assert forest.evict() is None


def random_pins_and_drops(forest: Forest, rng: random.Random, name: str) -> None:
    choice = rng.random()
    if choice < 0.4:
        forest.touch(name)
    elif choice < 0.65:
        forest.pin(name)
    elif forest.entry(name).pins:
        forest.unpin(name)
    elif choice > 0.9 and forest.entry(name).children == 0:
        forest.drop(name)


@pytest.mark.parametrize("seed", range(40))
def test_with_pins_and_drops_exactly_the_evictable_leaves_can_go(seed: int) -> None:
    rng = random.Random(seed)
    forest = Forest()
    for _ in range(400):
        names = forest.names()
        name = rng.choice(names) if names else ""
        choice = rng.random()
        if choice < 0.4 or not names:
            longer = rng.choice(["", name]) + rng.choice("abc")
            if len(longer) < 8 and longer not in names:
                forest.store(longer)
        elif choice < 0.85:
            random_pins_and_drops(forest, rng, name)
        else:
            leaves = forest.evictable()
            gone = forest.evict()
            assert gone in leaves if leaves else gone is None
    for name in forest.names():
        while forest.entry(name).pins:
            forest.unpin(name)
    while forest.names():
        leaves = forest.evictable()
        assert forest.evict() in leaves


@pytest.mark.parametrize("blocks", [100, 1000, 10_000])
def test_each_operation_changes_the_list_a_fixed_number_of_times(blocks: int) -> None:
    """The cold end is full of inner and pinned blocks: the worst case for a dict as LRU."""
    forest = Forest()
    root = Entry(forest.key("root"), None, Slot(0))
    entries = [root]
    for number in range(blocks):
        entries.append(Entry(forest.key(str(number)), entries[-1], Slot(0)))
    for entry in entries:
        forest.insert(entry)
        entry.state = State.READY
        forest.policy.touch(entry)
    for number in range(blocks):
        forest.policy.touch(entries[number % len(entries)])
    operations = 3 * blocks
    while forest.evict() is not None:
        pass
    assert not forest.names()
    assert forest.policy.changes <= 4 * operations


def test_one_search_passes_over_a_limited_number_of_blocks_and_the_next_goes_on() -> None:
    forest = Forest()
    entries: list[Entry] = []
    for number in range(SKIPS_MAX + 500):
        entries.append(Entry(forest.key(str(number)), entries[-1] if entries else None, Slot(0)))
        forest.insert(entries[-1])
        entries[-1].state = State.READY
    for entry in reversed(entries[:-1]):  # each was used by itself, and all before the leaf was
        forest.policy.touch(entry)
    forest.policy.touch(entries[-1])
    forest.policy.changes = 0
    assert next(forest.policy.victims(), None) is None
    assert forest.policy.changes == SKIPS_MAX
    assert next(forest.policy.victims(), None) is entries[-1]


def test_a_parent_takes_the_place_of_its_last_child_that_is_dropped() -> None:
    forest = Forest()
    for name in ("x", "a", "ab", "y"):
        forest.store(name)
    forest.drop("ab")
    assert [forest.evict() for _ in range(3)] == ["x", "a", "y"]


def test_what_was_pinned_is_as_young_as_its_last_pin() -> None:
    forest = Forest()
    for name in ("a", "ab", "x", "y"):
        forest.store(name)
    forest.pin("ab")
    forest.touch("x")
    forest.unpin("ab")
    assert [forest.evict() for _ in range(4)] == ["y", "x", "ab", "a"]
