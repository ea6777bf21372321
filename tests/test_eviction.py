"""Leaf-first LRU, and what it costs; test_index_machine.py has it against a model."""

from __future__ import annotations

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

    def _unlink(self, entry: Node) -> None:
        self.changes += entry.next is not None
        super()._unlink(entry)


class Forest:
    """A policy at work on an index; a block's name is its path, one letter per block."""

    def __init__(self, *names: str) -> None:
        self.index = Index()
        self.policy = Counting()
        for name in names:
            self.store(name)

    def entry(self, name: str) -> Entry:
        entry = self.index.get(BlockKey(name.encode()))
        assert entry is not None
        return entry

    def add(self, name: str, above: Entry | None, state: State = State.READY) -> Entry:
        entry = Entry(BlockKey(name.encode()), above, Slot(0), state)
        self.index.insert(entry)
        return entry

    def store(self, name: str) -> None:
        above = self.entry(name[:-1]) if len(name) > 1 else None
        self.policy.touch(self.add(name, above))

    def line(self, blocks: int) -> list[Entry]:
        """Add a chain of blocks that were not used yet."""
        entries: list[Entry] = []
        for number in range(blocks):
            entries.append(self.add(str(number), entries[-1] if entries else None))
        return entries

    def gone(self, entry: Entry) -> None:
        self.index.remove(entry)
        self.policy.freed(entry.parent)

    def evict(self) -> str | None:
        entry = next(self.policy.victims(), None)
        if entry is None:
            return None
        assert isinstance(entry, Entry)
        self.gone(entry)
        return entry.key.decode()

    def evict_all(self) -> list[str]:
        return list(iter(self.evict, None))


@pytest.mark.parametrize(
    ("stored", "used", "order"),
    [
        ("a ab abc x xy", "", "abc ab a xy x"),  # leaves first, then their parents
        ("a ab abc x xy", "abc", "xy x abc ab a"),  # the whole path is used
        ("a ab x", "a", "ab x a"),  # a parent that was used by itself
        ("a x ab y", "", "x ab a y"),  # a and ab were last used between x and y
    ],
)
def test_O5_the_coldest_leaf_goes_first(stored: str, used: str, order: str) -> None:
    forest = Forest(*stored.split())
    for name in used.split():
        forest.policy.touch(forest.entry(name))
    assert forest.evict_all() == order.split()


def test_a_parent_takes_the_place_of_its_last_child_that_is_dropped() -> None:
    forest = Forest("x", "a", "ab", "y")
    dropped = forest.entry("ab")
    forest.policy.inherit(dropped)
    forest.gone(dropped)
    assert forest.evict_all() == ["x", "a", "y"]


@pytest.mark.parametrize("blocks", [100, 1000, 10_000])
def test_each_operation_changes_the_list_a_fixed_number_of_times(blocks: int) -> None:
    """The cold end is full of inner blocks: the worst case for a dict as LRU."""
    forest = Forest()
    entries = forest.line(blocks)
    for entry in entries * 2:
        forest.policy.touch(entry)
    assert len(forest.evict_all()) == blocks
    assert forest.policy.changes <= 4 * 3 * blocks


def test_one_search_passes_over_a_limited_number_of_blocks_and_the_next_goes_on() -> None:
    forest = Forest()
    entries = forest.line(SKIPS_MAX + 500)
    for entry in reversed(entries[:-1]):  # each was used by itself, and all before the leaf was
        forest.policy.touch(entry)
    forest.policy.touch(entries[-1])
    forest.policy.changes = 0
    assert next(forest.policy.victims(), None) is None
    assert forest.policy.changes == SKIPS_MAX
    assert next(forest.policy.victims(), None) is entries[-1]


def test_a_mark_tells_how_old_the_cold_end_is_also_once_it_was_passed_over() -> None:
    forest = Forest("a", "b")
    assert forest.policy.age() == 0
    forest.policy.mark(3)
    forest.policy.mark(5)  # nothing was used between them
    forest.store("x")
    forest.store("y")
    assert [forest.evict(), forest.policy.age()] == ["a", 0]
    assert [forest.evict(), forest.evict()] == ["b", "x"]
    assert forest.policy.age() == 5
    assert [forest.evict(), forest.evict()] == ["y", None]
