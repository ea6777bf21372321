"""The table of blocks that have left."""

from __future__ import annotations

import time

from kvstore.core.ghosts import ENTRY_BYTES, Ghosts
from kvstore.core.types import BlockKey, make_key
from kvstore.store.namespace import GHOSTS_MAX, _ghosts
from tests.harness.fakes import hashes


def keys(count: int, name: str = "request") -> list[BlockKey]:
    return [make_key(block, 0) for block in hashes(count, name)]


def test_Q3_a_key_that_left_is_found_with_the_last_time() -> None:
    ghosts = Ghosts(memoryview(bytearray(ENTRY_BYTES << 7)))
    first, second, never = keys(3)
    ghosts.add([first, second], 0)
    ghosts.add([first], 70)
    assert (ghosts.left_s(first), ghosts.left_s(second), ghosts.left_s(never)) == (70, 0, None)


def test_Q64_parts_of_a_second_are_told_from_one_another() -> None:
    """Up to the last time that has an entry's bits, after four years."""
    ghosts = Ghosts(memoryview(bytearray(ENTRY_BYTES << 7)))
    for at, key in zip((2.25, 2.3, 1e9), keys(3), strict=True):
        ghosts.add([key], at)
        left_s = ghosts.left_s(key)
        assert left_s is not None
        assert min(at, 2**27 - 1) - 1 / 32 < left_s <= at


def test_Q64_a_key_that_left_is_found_with_its_use_and_how_many_left_since() -> None:
    ghosts = Ghosts(memoryview(bytearray(ENTRY_BYTES << 7)))
    used, other, never = keys(3)
    assert ghosts.find(never) is None
    ghosts.add([used, other], 5, [1, 0], 2)
    assert ghosts.find(used) == (5, 1, True, 2)
    assert ghosts.find(other) == (5, 0, False, 2)
    ghosts.add(keys(7, "more"), 6, last_s=3)
    assert ghosts.find(used) == (5, 8, True, 2)
    ghosts._count += 1 << 32
    assert ghosts.find(used) == (5, 8, True, 2), "the count may be longer than its entry"
    ghosts.add([used], 7, [0], 6)
    assert ghosts.find(used) == (7, 0, False, 6)


def test_Q3_of_the_last_keys_nine_in_ten_are_found_and_no_others() -> None:
    ghosts = _ghosts(5000)
    assert ghosts.entries == 4096
    gone = keys(40_000)
    for number, key in enumerate(gone):
        ghosts.add([key], number, last_s=number + 1)
    recent = gone[-ghosts.entries // 2 :]
    found = [ghosts.find(key) for key in recent]
    assert sum(left is not None for left in found) > 0.88 * len(recent)
    for at, left in enumerate(found, len(gone) - len(recent)):
        assert left is None or (left.left_s, left.last_s) == (at, at + 1)
    assert sum(ghosts.left_s(key) is not None for key in gone[:-32_768]) < 40, "it is bounded"
    assert not [key for key in keys(10_000, "other") if ghosts.left_s(key) is not None]
    arrays = ghosts._table, ghosts._before, ghosts._last
    assert sum(each.nbytes for each in arrays) == ghosts.entries * ENTRY_BYTES


def test_Q3_a_large_table_stops_nothing_when_it_is_made_or_as_it_fills() -> None:
    """A dict of as many keys stops everything for 100 ms when it grows."""
    began = time.thread_time()
    ghosts = _ghosts(1 << 40)
    slowest = time.thread_time() - began
    assert ghosts.entries == GHOSTS_MAX
    added = [BlockKey(number.to_bytes(8, "big")) for number in range(1 << 16)]
    for first in range(0, len(added), 64):  # each into a page that was never written
        began = time.thread_time()
        ghosts.add(added[first : first + 64], first)
        slowest = max(slowest, time.thread_time() - began)
    assert slowest < 0.005
