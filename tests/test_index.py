"""The forest of present blocks: the binary search, holes, and how they heal."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from kvstore.index import Entry, Index, State
from kvstore.types import BlockKey, Chain, LookupResult, Slot

WIDTH = 8


def path(length: int, name: str = "a") -> Chain:
    return Chain(b"".join(f"{name}{i:07}".encode() for i in range(length)), WIDTH, 1)


def key(index: int, name: str = "a") -> BlockKey:
    return path(index + 1, name).key(0, index)


def prefix(index: Index, limit: int) -> int:
    return index.prefix(path(limit), 0, limit)[0]


def add(index: Index, name: BlockKey, parent: Entry | None, state: State = State.READY) -> Entry:
    entry = Entry(name, parent, Slot(0))
    index.insert(entry)
    entry.state = state
    return entry


def chain_of(index: Index, length: int, name: str = "a") -> list[Entry]:
    entries: list[Entry] = []
    blocks = path(length, name)
    for number in range(length):
        entries.append(add(index, blocks.key(0, number), entries[-1] if entries else None))
    return entries


def linear(index: Index, limit: int) -> int:
    for number in range(limit):
        if index.probe(key(number)) is not LookupResult.HIT:
            return number
    return limit


class Counting(dict[bytes, Entry]):
    """A table that knows how often it was asked."""

    asked = 0

    def get(self, name: bytes, default: Any = None) -> Any:  # noqa: ANN401 - the dict's own
        Counting.asked += 1
        return super().get(name, default)


def test_a_block_is_pending_while_written_and_a_hit_when_ready() -> None:
    index = Index()
    entry = add(index, key(0), None, State.WRITING)
    assert index.probe(key(0)) is LookupResult.PENDING
    entry.state = State.READY
    assert index.probe(key(0)) is LookupResult.HIT
    index.remove(entry)
    assert (index.probe(key(0)), entry.state) == (LookupResult.MISS, State.DROPPED)


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 20])
@pytest.mark.parametrize("ready", [0, 1, 2, 7, 8])
def test_O2_the_binary_search_finds_what_a_scan_finds(ready: int, limit: int) -> None:
    index = Index()
    chain_of(index, ready)
    assert prefix(index, limit) == linear(index, limit) == min(ready, limit)


def test_a_block_being_written_ends_the_prefix() -> None:
    index = Index()
    entries = chain_of(index, 5)
    add(index, key(5), entries[-1], State.WRITING)
    assert prefix(index, 8) == 5


@pytest.mark.parametrize("ready", [0, 1, 1000, 2000, 3999, 4000])
def test_the_search_asks_for_few_keys_and_for_one_or_two_of_all_or_nothing(ready: int) -> None:
    index = Index()
    chain_of(index, ready)
    index._tables = [Counting(table) for table in index._tables]
    Counting.asked = 0
    assert prefix(index, 4000) == ready
    assert Counting.asked <= {0: 1, 4000: 2}.get(ready, math.log2(4000) + 3)


def test_with_a_hole_the_search_is_a_scan_and_stops_at_the_hole() -> None:
    index = Index()
    entries = chain_of(index, 9)
    index.remove(entries[4])
    assert index.holes == 1
    assert prefix(index, 9) == linear(index, 9) == 4


def test_a_hole_is_gone_with_its_last_child() -> None:
    index = Index()
    entries = chain_of(index, 3)
    other = add(index, key(2, "b"), entries[1])
    index.remove(entries[1])
    index.remove(entries[2])
    assert index.holes == 1
    index.remove(other)
    assert index.holes == 0


def test_dropping_a_leaf_makes_no_hole() -> None:
    index = Index()
    entries = chain_of(index, 3)
    index.remove(entries[2])
    assert (index.holes, entries[1].children) == (0, 0)


def test_a_hole_heals_when_the_block_is_there_again_and_its_path_is_walked() -> None:
    index = Index()
    entries = chain_of(index, 4)
    index.remove(entries[1])
    again = add(index, key(1), entries[0])
    assert (index.holes, again.children) == (1, 0)
    assert index.run(path(4), 0, 4) == [entries[0], again, entries[2], entries[3]]
    assert (index.holes, again.children, entries[2].parent) == (0, 1, again)
    assert entries[1].children == 0


def test_what_is_ready_does_not_hang_below_what_is_only_coming() -> None:
    """Else a search among what is ready, with no hole left, would find it beyond the gap."""
    index = Index()
    entries = chain_of(index, 3)
    index.remove(entries[1])
    again = add(index, key(1), entries[0], State.COMING)
    assert index.run(path(3), 0, 3) == [entries[0], again, entries[2]]
    assert (index.holes, again.children) == (1, 0)
    assert index.prefix(path(3), 0, 3, coming=False)[0] == 1
    again.state = State.READY
    index.run(path(3), 0, 3)
    assert (index.holes, again.children) == (0, 1)


def test_relinking_moves_a_child_once() -> None:
    index = Index()
    entries = chain_of(index, 2)
    index.remove(entries[0])
    again = add(index, key(0), None)
    index.relink(entries[1], again)
    index.relink(entries[1], again)
    assert (again.children, entries[0].children, index.holes) == (1, 0, 0)


def test_ready_run_stops_at_what_is_not_ready() -> None:
    index = Index()
    entries = chain_of(index, 4)
    entries[2].state = State.WRITING
    assert index.run(path(4), 0, 4) == entries[:2]


@pytest.mark.parametrize("seed", range(30))
def test_the_search_agrees_with_a_scan_after_random_drops_and_stores(seed: int) -> None:
    rng = random.Random(seed)
    index = Index()
    for _ in range(300):
        number = rng.randrange(16)
        entry = index.get(key(number))
        parent = index.get(key(number - 1)) if number else None
        if entry is not None:
            index.remove(entry)
        elif number == 0 or parent is not None:
            add(index, key(number), parent)
        if rng.random() < 0.1:
            index.run(path(16), 0, 16)
        assert prefix(index, 16) == linear(index, 16)
        cut_off = [
            entry
            for entry in index
            if entry.parent is not None and index.get(entry.parent.key) is not entry.parent
        ]
        assert bool(cut_off) == bool(index.holes)
        for entry in index:
            assert entry.children == sum(other.parent is entry for other in index)
