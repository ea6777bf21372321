"""What the index's process makes of the records that it finds, before it sends them."""

from __future__ import annotations

import random
import struct
from collections import deque
from typing import Any

from tiers.nvme.index_load import Sorted
from tiers.nvme.messages import NO_PARENT, NOWHERE, VALUE, row_format

SIZE = 4096
COUNTS = {1: 100, 3: 50}
Row = tuple[bytes, bytes]


def at(position: int, extent: int = 1) -> int:
    return extent << 32 | position


def row(name: bytes, place: int, above: int, generation: int, size: int = SIZE) -> Row:
    return name, VALUE.pack(place, above, generation, generation, size)


def sort(*rows: Row, counts: dict[int, int] = COUNTS) -> Sorted:
    return sort_all([[part for row in rows for part in row]] if rows else [], counts)


def sort_all(chunks: list[list[bytes]], counts: dict[int, int]) -> Sorted:
    found = Sorted(SIZE, counts)
    deque(found.sort(chunks), maxlen=0)
    return found


def rows_of(found: Sorted, first: int = 0, most: int = 1 << 20) -> list[tuple[Any, ...]]:
    page = found.page(first, most)
    rows = list(struct.iter_unpack(row_format(page.width), page.rows))
    assert page.count == len(rows)
    return rows


def names(found: Sorted, *part: int) -> list[bytes]:
    return [key[:length] for key, length, *_ in rows_of(found, *part)]


def refused(found: Sorted) -> set[tuple[bytes, int, str]]:
    return set(found.refused)


def test_parents_come_first_and_are_named_by_their_position() -> None:
    found = sort(
        row(b"c", at(2), at(1), 3), row(b"a", at(0), NOWHERE, 1), row(b"b", at(1), at(0), 2)
    )
    rows = rows_of(found)
    assert names(found) == [b"a", b"b", b"c"]
    assert [parent for *_, parent, _, _, _ in rows] == [NO_PARENT, 0, 1]
    assert [leaf for *_, leaf in rows] == [False, False, True]
    assert found.refused == []


def test_what_has_no_way_to_a_root_is_refused_and_its_slot_comes_back() -> None:
    found = sort(
        row(b"a", at(0), NOWHERE, 1),
        row(b"lost", at(1), at(9), 2),
        row(b"below", at(2), at(1), 3),
        row(b"deep", at(3), at(2), 4),
    )
    assert names(found) == [b"a"]
    assert refused(found) == {
        (name, at(n), "unreachable") for n, name in enumerate((b"lost", b"below", b"deep"), 1)
    }


def test_a_circle_and_a_parent_that_is_younger_are_refused() -> None:
    found = sort(row(b"a", at(0), at(1), 2), row(b"b", at(1), at(0), 1), row(b"c", at(2), at(2), 3))
    assert names(found) == []
    assert {cause for _, _, cause in found.refused} == {"unreachable"}


def test_of_two_records_in_one_place_the_newer_counts() -> None:
    found = sort(row(b"old", at(0), NOWHERE, 1), row(b"new", at(0), NOWHERE, 2))
    assert names(found) == [b"new"]
    assert refused(found) == {(b"old", NOWHERE, "foreign")}, "its slot is another's"


def test_what_cannot_stand_for_a_block_is_refused() -> None:
    found = sort(
        row(b"extent", at(0, 2), NOWHERE, 1),
        row(b"size", at(1), NOWHERE, 2, size=SIZE + 1),
        row(b"end", at(50, 3), NOWHERE, 3),
        (b"short", b"value"),
        row(b"fine", at(49, 3), NOWHERE, 4),
    )
    assert names(found) == [b"fine"]
    assert refused(found) == {
        (b"extent", NOWHERE, "foreign"),
        (b"size", NOWHERE, "foreign"),
        (b"short", NOWHERE, "foreign"),
        (b"end", at(50, 3), "beyond"),
    }


def test_keys_of_different_lengths_come_back_as_they_were() -> None:
    keys = [b"\0" * n + b"k" + b"\0" * (20 - n % 3) for n in range(20)]
    chunks = [list(row(name, at(n), NOWHERE, n)) for n, name in enumerate(keys)]
    assert names(sort_all(chunks, COUNTS)) == keys, "chunks of one width each"


def test_loading_goes_on_from_any_record() -> None:
    rng = random.Random(1)
    count, most = 207, 100
    rows = [row(b"%06d" % n, at(n), at(n - 1) if n % 9 else NOWHERE, n) for n in range(count)]
    rng.shuffle(rows)
    found = sort(*rows, counts={1: count})
    whole = names(found)
    assert whole == [b"%06d" % n for n in range(count)]
    for first in (0, 1, most, count - 1, count):
        assert names(found, first, most) == whole[first : first + most]
        assert (found.page(first, most).refused is None) is (first + most < count)


def test_nothing_is_sorted_too() -> None:
    assert names(sort()) == []
