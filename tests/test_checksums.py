"""A block's sum names the block: equal bytes of another one have another sum (promise 1)."""

from __future__ import annotations

from kvstore.core.types import BlockKey, Slot
from kvstore.handover.checksums import block_sum, copied_sum
from tiers.nvme.index import Record
from tiers.nvme.namespace import DiskNamespace

KEY, OTHER = BlockKey(b"k" * 34), BlockKey(b"l" * 34)
BLOCK, CHANGED = (memoryview(bytearray([value] * 4096)) for value in (1, 2))


def test_B19_the_sum_of_a_handed_over_block_is_of_its_namespace_key_and_bytes() -> None:
    names = [("a", KEY, BLOCK), ("b", KEY, BLOCK), ("a", OTHER, BLOCK), ("a", KEY, CHANGED)]
    sums = [block_sum(*name) for name in names]
    assert len(set(sums)) == len(names)
    assert [copied_sum(*name, memoryview(bytearray(4096))) for name in names] == sums


def test_O15_the_sum_of_a_block_on_disk_is_of_its_namespace_key_generation_and_bytes() -> None:
    here, there = (DiskNamespace(digest, 4096) for digest in ("a", "b"))
    record = Record(KEY, None, Slot(0), 1)
    sums = {
        here.checksum(record, BLOCK),
        there.checksum(record, BLOCK),
        here.checksum(Record(OTHER, None, Slot(0), 1), BLOCK),
        here.checksum(Record(KEY, None, Slot(0), 2), BLOCK),
        here.checksum(record, CHANGED),
    }
    assert len(sums) == 5
    assert here.checksum(Record(KEY, None, Slot(9), 1), BLOCK) in sums, "not of its place"
