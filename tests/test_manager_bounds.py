"""What one call of a manager may take is bounded, however many blocks there are."""

from __future__ import annotations

import pytest

from kvstore.core.eviction import SKIPS_MAX
from kvstore.core.types import Chain, LookupResult, Slot, StoreOutcome
from tests.test_manager import WIDTH, Rig


def filled(blocks: int) -> tuple[Rig, list[Chain]]:
    """Store so many requests of one block each, and leave one slot."""
    rig = Rig(blocks + 1)
    chains = [Chain(number.to_bytes(WIDTH, "big"), WIDTH, 1) for number in range(blocks)]
    for each in chains:
        rig.put(each)
    return rig, chains


def hold(rig: Rig, block: Chain, how: str) -> None:
    key = block.key(0, 0)
    if how == "pinned":
        rig.manager.pin(key)
        return
    if how != "leased":
        rig.manager.drop(key, "clear")
        (slot,) = rig.grant()
        assert rig.promote(key, None, slot)
    lease = rig.lease(block)
    if how == "coming":
        rig.manager.complete_load(lease.lease_id)
    elif how == "leased while coming":
        rig.arrive(slot, ok=True)


@pytest.mark.parametrize("how", ["leased", "pinned", "coming", "leased while coming"])
def test_no_grant_walks_over_blocks_that_cannot_go(how: str) -> None:
    rig, chains = filled(2 * SKIPS_MAX)
    for each in chains[:-1]:
        hold(rig, each, how)
    rig.manager.touch(chains[-1].key(0, 0))
    assert len(rig.grant(2)) == 2, "the only block that can go was not found at once"
    assert rig.probe(chains[-1]) is LookupResult.MISS


def test_slots_are_retired_in_slices_and_none_is_left_behind() -> None:
    rig, chains = filled(10_000)
    slots = [Slot(number) for number in range(10_001)]
    calls, dropped = 0, 0
    while rig.manager.retire_slots(slots):
        calls += 1
        now = rig.manager.evictions["resize"]
        assert 0 < now - dropped < 5000
        dropped = now
    assert calls >= 2
    assert rig.manager.evictions["resize"] == 10_000
    assert all(rig.probe(each) is LookupResult.MISS for each in chains)
    assert (rig.manager.slots_total, rig.manager.slots_free) == (0, 0)


def test_a_block_that_comes_ready_while_slots_are_retired_does_not_keep_its_slot() -> None:
    rig, _ = filled(10_000)
    late = Chain(bytes([255] * WIDTH), WIDTH, 1)
    slot = rig.begin(late, 0)
    slots = [Slot(number) for number in range(10_001)]
    assert rig.manager.retire_slots(slots) > 0
    assert rig.manager.complete_store(slot, ok=True) is StoreOutcome.STORED
    while rig.manager.retire_slots(slots):
        pass
    assert len(rig.manager.index) == 0


def test_a_slot_to_be_retired_is_not_granted_when_its_block_is_evicted_first() -> None:
    rig, _ = filled(10_000)
    slots = {Slot(number) for number in range(5000)}  # of the coldest blocks
    assert rig.manager.retire_slots(slots) > 0
    assert not slots & set(rig.grant(3000))
    while rig.manager.retire_slots(slots):
        pass
    assert rig.manager.slots_total == 5001
