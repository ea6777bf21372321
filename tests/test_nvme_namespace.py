"""One namespace's records: clear and what goes in slices, what is durable, which slot is next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.config import NvmeConfig
from kvstore.core.types import BlockKey
from tests.harness.nvme_blocks import Shelf, content, key, shelf
from tests.harness.nvme_damage import row_count
from tiers.nvme.files import ExtentFile
from tiers.nvme.index import Durable, Record
from tiers.nvme.namespace import DiskNamespace

SLOTS = 8192


@pytest.fixture
def space(tmp_path: Path) -> DiskNamespace:
    """A namespace with one extent, of which nothing is on disk."""
    found = DiskNamespace("0123456789ab", 4096)
    with (tmp_path / "1.extent").open("wb") as file:
        os.truncate(file.fileno(), SLOTS * 4096)
    found.add_extent(1, ExtentFile(tmp_path / "1.extent", 4096, SLOTS * 4096))
    return found


def fill(space: DiskNamespace, count: int, *, durable: bool) -> list[BlockKey]:
    """Have a root, and count - 1 blocks that continue it."""
    keys = [key(1, index) for index in range(count)]
    root = None
    for generation, (name, place) in enumerate(zip(keys, space.take_places(count), strict=True)):
        record = space.begin(name, root, place, generation)
        space.written(record, 0, ok=True)
        root = root or record
    if durable:
        space.committed(space.take_puts(), [], ok=True)
    return keys


# Clear


def test_what_is_stored_after_a_clear_is_kept(settings: NvmeConfig) -> None:
    with shelf(settings) as found:
        found.fill(30)
        found.tier.clear()
        assert found.keys() == []
        assert found.put(1, 0, 5).done == 5
        assert found.whole(1, 5)
        found.settle()
        assert len(found.keys()) == 5
    with shelf(settings) as after:
        assert after.whole(1, 5)
        assert len(after.keys()) == 5
        assert after.tier.space.counts == {}
    assert row_count(settings) == 5


def test_cleared_slots_are_used_again_and_the_cap_holds(empty: Shelf, settings: NvmeConfig) -> None:
    for _ in range(3):
        for chain in range(200):
            assert empty.put(chain, 0, 30).done == 30
        empty.tier.clear()
    assert empty.put(1, 0, 30).done == 30
    assert empty.disk.used_bytes <= settings.capacity_bytes


def test_a_block_that_is_read_while_all_is_cleared_keeps_its_slot(empty: Shelf) -> None:
    empty.put(1, 0, 1)
    empty.settle()
    (record,) = empty.tier.space.index
    empty.tier.space.pin(record)
    file = empty.tier.space.extents[record.slot >> 32]
    empty.tier.clear()
    for chain in range(10, 13):
        empty.put(chain, 0, 30)
    block = memoryview(bytearray(empty.size))
    file.read(record.slot & 0xFFFFFFFF, [block])
    assert block == content(key(1, 0), empty.size)
    empty.tier.space.unpin(record)
    empty.settle()
    assert not empty.tier.space.cleared


def test_a_clear_that_was_not_committed_is_done_by_the_next_commit(space: DiskNamespace) -> None:
    fill(space, 10, durable=True)
    space.clear()
    assert space.take_clear()
    space.committed([], [], ok=False)
    assert space.pending
    assert space.free == 0, "a crash would bring the old blocks back"
    assert space.take_clear()
    space.committed([], [], ok=True)
    assert space.free == SLOTS
    assert not space.take_clear()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "stored again"])
def test_an_extent_that_goes_after_a_clear_takes_no_block_of_now_with_it(
    space: DiskNamespace, tmp_path: Path, *, again: bool
) -> None:
    fill(space, 10, durable=True)
    space.clear()
    space.retire(1)
    assert space.take_clear()
    space.committed([], [], ok=True)
    with (tmp_path / "2.extent").open("wb") as file:
        os.truncate(file.fileno(), SLOTS * 4096)
    space.add_extent(2, ExtentFile(tmp_path / "2.extent", 4096, SLOTS * 4096))
    keys = fill(space, 10, durable=True) if again else []
    while space.step():
        pass
    assert [number for number, _ in space.take_retired()] == [1]
    assert [space.index.get(name) is not None for name in keys] == [True] * len(keys)
    assert space.free == SLOTS - len(keys)


def test_a_clear_leaves_no_slot_of_what_was_leaving_taken(space: DiskNamespace) -> None:
    root = space.index.get(fill(space, 5000, durable=True)[0])
    assert root is not None
    space.drop(root, "damaged")  # the first part of it
    space.clear()
    assert space.take_clear()
    space.committed([], [], ok=True)
    assert space.free == SLOTS


# Slices


def test_a_block_with_many_below_it_leaves_in_slices_from_its_leaves_up(
    space: DiskNamespace,
) -> None:
    keys = fill(space, 5000, durable=True)
    root = space.index.get(keys[0])
    assert root is not None
    space.drop(root, "damaged")
    assert space.index.get(keys[0]) is None
    assert space.index.sinks(keys[0])
    assert len(space.index) > 2000, "one call takes a part only"
    assert root not in space.to_delete, "children leave the index file first"
    steps = 0
    while space.step():
        steps += 1
    assert steps
    assert len(space.index) == 0
    assert not space.index.sinks(keys[0])
    assert space.to_delete[-1] is root
    space.committed([], space.take_deletes(), ok=True)
    assert (space.free, space.leaving) == (SLOTS, 0)


def test_what_sinks_may_be_dropped_from_above_meanwhile(space: DiskNamespace) -> None:
    places = space.take_places(5000)
    top = space.begin(key(0, 0), None, places[0], 1)
    below = space.begin(key(0, 1), top, places[1], 2)
    for number, place in enumerate(places[2:], 2):
        space.written(space.begin(key(1, number), below, place, number + 1), 0, ok=True)
    for record in (top, below):
        space.written(record, 0, ok=True)
    space.drop(below, "damaged")
    space.drop(top, "evicted")
    while space.step():
        pass
    assert len(space.index) == 0
    assert (space.free, space.leaving) == (SLOTS, 0)


def test_an_extent_is_emptied_in_slices(space: DiskNamespace) -> None:
    keys = fill(space, 5000, durable=False)
    space.retire(1)
    assert len(space.index) == len(keys)
    assert space.take_retired() == []
    while space.step():
        pass
    assert len(space.index) == 0
    assert [number for number, _ in space.take_retired()] == [1]


def test_a_commit_of_which_nobody_knows_is_taken_back_when_its_block_leaves(
    space: DiskNamespace,
) -> None:
    (name,) = fill(space, 1, durable=False)
    puts = space.take_puts()
    space.committed(puts, [], ok=False)
    assert puts[0].durable is Durable.PERHAPS
    record = space.index.get(name)
    assert record is not None
    space.drop(record, "evicted")
    assert space.free == SLOTS - 1, "the index file may have it"
    assert space.to_delete == [record]
    space.committed([], space.take_deletes(), ok=True)
    assert space.free == SLOTS


def test_a_chain_whose_writes_end_in_any_order_is_durable_in_one_commit(
    space: DiskNamespace,
) -> None:
    above, chain = None, list[Record]()
    for number, place in enumerate(space.take_places(3)):
        above = space.begin(key(1, number), above, place, number + 1)
        chain.append(above)
    for record in reversed(chain):
        space.written(record, 0, ok=True)
    assert space.take_puts() == chain


# Slots


def test_the_slot_of_a_write_that_failed_is_the_last_to_be_taken_again(
    space: DiskNamespace,
) -> None:
    (place,) = space.take_places(1)
    space.written(space.begin(key(1, 0), None, place, 1), 0, ok=False)
    assert space.free == SLOTS
    assert place not in space.take_places(SLOTS - 1)
    assert space.take_places(1) == [place]


def test_an_extent_that_is_empty_already_goes_before_its_turn_to_be_emptied(
    space: DiskNamespace,
) -> None:
    space.retire(1)
    assert [number for number, _ in space.take_retired()] == [1]
    assert not space.step()
    assert not space.extents


def test_the_extent_that_was_given_blocks_last_stays_longest(settings: NvmeConfig) -> None:
    with shelf(settings) as found:
        found.fill(30)
        newest = max(found.tier.space.index, key=lambda record: record.generation).slot >> 32
        assert found.tier.space.coldest() != newest
        kept = found.tier.space.coldest()
    with shelf(settings) as after:
        assert after.tier.space.coldest() == kept, "a restart knows it, too"
