"""Every transition of a slot's life, leases, the way out, and lookups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import manager
from kvstore.core.errors import InvariantBroken
from kvstore.core.eviction import SKIPS_MAX
from kvstore.core.index import Entry, State
from kvstore.core.leases import Lease, hit_of
from kvstore.core.lookup import Answer, common_hit
from kvstore.core.manager import Manager
from kvstore.core.types import BlockKey, Chain, GroupRule, LookupResult, Slot, StoreOutcome
from tests.harness.fakes import Lower, generations_of

WIDTH = 4
FULL = GroupRule()


def chain(length: int, name: str = "a", groups: int = 1) -> Chain:
    packed = b"".join(f"{name}{index:03}".encode() for index in range(length))
    return Chain(packed, WIDTH, groups)


class Rig:
    """A manager whose generations can be read."""

    def __init__(self, slots: int = 8, rules: Sequence[GroupRule] = (FULL,)) -> None:
        self.generations = generations_of(slots)
        self.manager = Manager(rules, self.generations)
        self.manager.slots.add([Slot(number) for number in range(slots)])

    def grant(self, count: int = 1) -> list[Slot]:
        return self.manager.prepare_store(count)

    def begin(self, of: Chain, index: int, group: int = 0) -> Slot:
        (slot,) = self.grant()
        chained = index and self.manager.rules[group].trailing is None  # a window has no path
        parent = of.key(group, index - 1) if chained else None
        self.manager.begin_store(of.key(group, index), parent, slot)
        return slot

    def put(self, of: Chain, first: int = 0, group: int = 0) -> list[Slot]:
        """Store blocks first.. of a chain."""
        slots = []
        for index in range(first, of.blocks):
            slots.append(self.begin(of, index, group))
            assert self.manager.complete_store(slots[-1], ok=True) is StoreOutcome.STORED
        return slots

    def lease(self, of: Chain, deadline_ns: int = 100) -> Lease:
        lease = self.manager.prepare_load(of, of.blocks, 7, deadline_ns)
        assert lease is not None
        return lease

    def promote(self, key: BlockKey, parent: BlockKey | None, slot: Slot) -> bool:
        return bool(self.manager.begin_promotions([key], [parent], [slot]))

    def arrive(self, slot: Slot, *, ok: bool) -> StoreOutcome:
        (outcome,) = self.manager.complete_promotions([slot], int(ok))
        return outcome

    def probe(self, of: Chain, index: int = 0) -> LookupResult:
        return self.manager.index.probe(of.key(0, index))


# FREE -> GRANTED


def test_slots_are_granted_lowest_first_and_no_more_than_there_are() -> None:
    rig = Rig(3)
    assert rig.grant(2) == [0, 1]
    assert rig.grant(5) == [2]
    assert rig.grant(1) == []
    assert (len(rig.manager.slots.free), len(rig.manager.slots.granted)) == (0, 3)


def test_O20_each_grant_of_a_slot_gives_it_a_new_generation() -> None:
    rig = Rig(1)
    rig.generations.grow([0], 0xFFFFFFFD)  # of 32 bits
    seen = []
    for _ in range(4):
        (slot,) = rig.grant()
        seen.append(rig.generations[slot])
        rig.manager.give_back([slot])
    assert seen == [0xFFFFFFFE, 0xFFFFFFFF, 0, 1]


def test_what_ends_must_have_begun() -> None:
    rig, blocks = Rig(3), chain(2)
    with pytest.raises(InvariantBroken, match="a slot came back that was not granted"):
        rig.manager.give_back([Slot(0)])
    with pytest.raises(InvariantBroken, match="a store into a slot that was not granted"):
        rig.manager.begin_store(blocks.key(0, 0), None, Slot(0))
    (slot,) = rig.grant()
    with pytest.raises(InvariantBroken, match="store"):
        rig.manager.complete_store(slot, ok=True)
    for begun in (slot, rig.begin(blocks, 0)):
        with pytest.raises(InvariantBroken, match="promotion"):
            rig.arrive(begun, ok=True)


def test_a_hit_has_the_generation_that_a_coming_block_will_have() -> None:
    entries = [Entry(chain(1).key(0, 0), None, Slot(slot)) for slot in range(3)]
    entries[0].state, entries[1].state = State.READY, State.COMING
    entries[2].state = State.COMING
    generations = generations_of(3)
    generations.grow([0, 1], 7)
    generations.grow([2], 0xFFFFFFFF)
    hit = hit_of(range(3), entries, generations, ready=False)
    assert (list(hit.slots), list(hit.generations)) == ([0, 1, 2], [7, 8, 0])


# GRANTED -> WRITING -> READY


def test_O2_a_block_is_pending_while_written_then_a_hit() -> None:
    rig, blocks = Rig(), chain(1)
    slot = rig.begin(blocks, 0)
    assert rig.probe(blocks) is LookupResult.PENDING
    assert rig.manager.lookup(blocks, 1) == Answer(1, pending=True)
    assert rig.manager.complete_store(slot, ok=True) is StoreOutcome.STORED
    assert rig.probe(blocks) is LookupResult.HIT
    assert rig.manager.lookup(blocks, 1) == Answer(1)
    assert slot not in rig.manager.slots.granted


def test_O16_what_becomes_ready_and_what_leaves_is_told_once_in_order() -> None:
    rig, blocks = Rig(2), chain(2)
    rig.put(blocks)
    rig.grant(1)
    first, second = blocks.key(0, 0), blocks.key(0, 1)
    changes = rig.manager.take_changes()
    assert (changes.added, changes.removed) == ([first, second], [second])
    assert not rig.manager.take_changes().added


# WRITING -> FREE


def test_O11_the_first_complete_copy_wins_and_the_other_slot_goes_back() -> None:
    rig, blocks = Rig(2), chain(1)
    first, second = rig.begin(blocks, 0), rig.begin(blocks, 0)
    assert rig.manager.complete_store(second, ok=True) is StoreOutcome.STORED
    assert rig.manager.complete_store(first, ok=True) is StoreOutcome.DUPLICATE
    assert rig.lease(blocks).groups[0].slots == [second]
    assert rig.grant() == [first]


@pytest.mark.parametrize("fails", [0, 1])
def test_O11_one_failed_copy_does_not_take_the_other_along(fails: int) -> None:
    rig, blocks = Rig(2), chain(1)
    slots = [rig.begin(blocks, 0), rig.begin(blocks, 0)]
    assert rig.manager.complete_store(slots[fails], ok=False) is StoreOutcome.FAILED
    pending = LookupResult.PENDING if fails else LookupResult.MISS  # of the first copy
    assert rig.probe(blocks) is pending
    assert rig.manager.complete_store(slots[1 - fails], ok=True) is StoreOutcome.STORED
    assert rig.lease(blocks).groups[0].slots == [slots[1 - fails]]


def test_a_block_without_its_parent_is_an_orphan() -> None:
    rig, blocks = Rig(2), chain(2)
    slot = rig.begin(blocks, 1)
    assert rig.probe(blocks, 1) is LookupResult.MISS
    assert rig.manager.complete_store(slot, ok=True) is StoreOutcome.ORPHAN
    assert (len(rig.manager.slots.free), len(rig.manager.index)) == (2, 0)


def test_a_block_is_no_orphan_when_its_parent_came_while_it_was_written() -> None:
    rig, blocks = Rig(2), chain(2)
    slot = rig.begin(blocks, 1)
    rig.put(chain(1))
    assert rig.manager.complete_store(slot, ok=True) is StoreOutcome.STORED
    assert rig.manager.lookup(blocks, 2) == Answer(2)


def test_a_block_is_ready_only_when_its_parent_is() -> None:
    rig, blocks = Rig(2), chain(2)
    rig.begin(blocks, 0)
    child = rig.begin(blocks, 1)
    assert rig.manager.complete_store(child, ok=True) is StoreOutcome.ORPHAN


# READY -> FREE


def test_O20_a_leased_block_is_not_evicted() -> None:
    rig, blocks = Rig(2), chain(2)
    rig.put(blocks)
    lease = rig.lease(blocks)
    assert rig.grant(2) == []
    rig.manager.complete_load(lease.lease_id)
    assert sorted(rig.grant(2)) == [0, 1]


def test_a_block_dropped_while_leased_keeps_its_slot_until_the_lease_ends() -> None:
    rig, blocks = Rig(1), chain(1)
    (slot,) = rig.put(blocks)
    lease = rig.lease(blocks)
    assert rig.manager.drop(blocks.key(0, 0), "clear")
    assert rig.probe(blocks) is LookupResult.MISS
    assert rig.grant() == []
    rig.manager.complete_load(lease.lease_id)
    assert rig.grant() == [slot]


@pytest.mark.parametrize("leaves", [0, 1, 2, "clear", "promotion"])
def test_O20_a_leased_path_keeps_its_slots_whichever_block_leaves(leaves: int | str) -> None:
    """A lease pins its last block only, until a block leaves that eviction does not take."""
    rig, blocks = Rig(4), chain(3)
    rig.put(Chain(blocks.packed[: 2 * WIDTH], WIDTH, 1))
    (last,) = rig.grant()
    assert rig.promote(blocks.key(0, 2), blocks.key(0, 1), last)
    if leaves != "promotion":
        rig.arrive(last, ok=True)
    leases = [rig.lease(blocks), rig.lease(Chain(blocks.packed[:WIDTH], WIDTH, 1))]
    assert [entry.pins for entry in leases[0].entries] == [1, 0, 1]
    if leaves == "promotion":
        rig.arrive(last, ok=False)
    elif leaves == "clear":
        rig.manager.clear()
    else:
        assert rig.manager.drop(blocks.key(0, int(leaves)), "damaged")
    assert [entry.pins for entry in leases[0].entries] == [2, 1, 1]
    assert rig.grant(4) == [3], "a leased slot was granted"
    for lease in leases:
        rig.manager.complete_load(lease.lease_id)
    assert sorted(rig.grant(3)) == [0, 1, 2]


def test_O20_a_lease_holds_blocks_that_do_not_hang_one_below_the_other() -> None:
    """An engine names the parents of what it stores: a wrong one costs nobody a slot."""
    rig, blocks = Rig(3), chain(2)
    (slot,) = rig.grant()
    rig.manager.begin_store(blocks.key(0, 1), None, slot)  # it has a parent
    rig.manager.complete_store(slot, ok=True)
    (first,) = rig.grant()
    assert rig.promote(blocks.key(0, 0), None, first)
    lease = rig.lease(blocks)
    assert lease.groups[0].generations == [rig.generations[first] + 1, rig.generations[slot]]
    rig.arrive(first, ok=True)
    assert len(rig.grant(3)) == 1, "a leased slot was granted"


def test_O20_a_lease_holds_its_path_when_a_write_leaves_a_hole() -> None:
    """From then on a lookup of made-up hashes may hang blocks elsewhere."""
    rig, blocks = Rig(5), chain(2)
    rig.put(blocks)
    lease = rig.lease(blocks)
    written = chain(2, "w")
    above = rig.begin(written, 0)
    rig.begin(written, 1)
    rig.manager.complete_store(above, ok=False)
    assert rig.manager.index.holes == 1
    assert [entry.pins for entry in lease.entries] == [1, 1]


def test_what_is_not_ready_cannot_be_dropped_or_pinned() -> None:
    rig, blocks = Rig(1), chain(1)
    assert not rig.manager.drop(blocks.key(0, 0), "clear")
    rig.begin(blocks, 0)
    assert not rig.manager.drop(blocks.key(0, 0), "clear")
    assert rig.manager.pin(blocks.key(0, 0)) is None


def test_a_block_pinned_for_a_lower_tier_stays_until_it_is_copied() -> None:
    rig, blocks = Rig(1), chain(1)
    rig.put(blocks)
    entry = rig.manager.pin(blocks.key(0, 0))
    assert entry is not None
    assert rig.grant() == []
    rig.manager.unpin([entry], used=False)
    assert rig.grant() == [0]
    with pytest.raises(InvariantBroken):
        rig.manager.unpin([entry])


def test_a_copy_is_no_use() -> None:
    hit, miss = LookupResult.HIT, LookupResult.MISS
    rig, chains = filled(3)
    coldest = rig.manager.pin(chains[0].key(0, 0))
    hottest = rig.manager.pin(chains[2].key(0, 0))
    assert coldest is not None
    assert hottest is not None
    rig.manager.unpin([hottest], used=False)
    assert len(rig.grant(2)) == 2, "it passed over the one that is being copied"
    assert [rig.probe(each) for each in chains] == [hit, miss, hit]
    rig.manager.unpin([coldest], used=False)
    assert len(rig.grant(1)) == 1
    assert [rig.probe(each) for each in chains] == [miss, miss, hit]


def test_a_load_that_ends_during_a_copy_is_one() -> None:
    hit, miss = LookupResult.HIT, LookupResult.MISS
    rig, chains = filled(2)
    entry = rig.manager.pin(chains[0].key(0, 0))
    assert entry is not None
    rig.manager.complete_load(rig.lease(chains[0]).lease_id)
    rig.manager.unpin([entry], used=False)
    assert len(rig.grant(2)) == 2
    assert [rig.probe(each) for each in chains] == [hit, miss]


# Leases


def test_O20_a_lease_names_slots_and_generations_of_every_group() -> None:
    rig = Rig(8, [FULL, GroupRule(1)])
    blocks = chain(3, groups=2)
    full = rig.put(blocks, group=0)
    state = rig.begin(blocks, 2, group=1)
    rig.manager.complete_store(state, ok=True)
    lease = rig.lease(blocks)
    assert [list(group.indices) for group in lease.groups] == [[0, 1, 2], [2]]
    assert [list(group.slots) for group in lease.groups] == [full, [state]]
    assert list(lease.groups[1].generations) == [rig.generations[state]]
    assert not set(rig.grant(8)) & {*full, state}, "blocks of each group are held"


def test_O20_nothing_present_is_no_lease() -> None:
    rig, blocks = Rig(2), chain(2)
    assert rig.manager.prepare_load(blocks, 2, 7, 100) is None
    rig.begin(blocks, 0)
    assert rig.manager.prepare_load(blocks, 2, 7, 100) is None
    assert len(rig.manager.leases) == 0
    windows_only = Rig(2, [GroupRule(1)])
    assert windows_only.manager.prepare_load(blocks, 2, 7, 100) is None
    assert len(windows_only.manager.leases) == 0


def test_O5_a_lookup_changes_nothing_and_a_load_refreshes_the_path() -> None:
    rig, old, new = Rig(4), chain(2, "a"), chain(2, "b")
    rig.put(old)
    rig.put(new)
    assert rig.manager.lookup(old, 2) == rig.manager.lookup(old, 2)
    rig.manager.complete_load(rig.lease(old).lease_id)
    rig.grant(2)
    assert (rig.manager.lookup(old, 2), rig.manager.lookup(new, 2)) == (Answer(2), Answer(0))


def test_O5_a_load_of_a_prefix_refreshes_its_path_and_not_what_hangs_below() -> None:
    rig, long, other = Rig(8), chain(4, "a"), chain(4, "b")
    rig.put(long)
    rig.put(other)
    lease = rig.manager.prepare_load(long, 2, 7, 100)
    assert lease is not None
    rig.manager.complete_load(lease.lease_id)
    rig.grant(6)
    assert rig.manager.lookup(long, 4) == Answer(2)
    assert rig.manager.lookup(other, 4) == Answer(0)


def test_O5_a_load_refreshes_the_blocks_of_a_window() -> None:
    rig, old, new = Rig(8, [FULL, GroupRule(1)]), chain(2, "a", 2), chain(2, "b", 2)
    for blocks in (old, new):
        rig.put(blocks)
        rig.put(blocks, group=1)
    rig.manager.complete_load(rig.lease(old).lease_id)
    rig.grant(4)
    assert (rig.manager.lookup(old, 2), rig.manager.lookup(new, 2)) == (Answer(2), Answer(0))


def test_O15_damaged_blocks_are_dropped_and_counted() -> None:
    rig, blocks = Rig(3), chain(3)
    slots = rig.put(blocks)
    lease = rig.lease(blocks)
    rig.manager.complete_load(lease.lease_id, [slots[1]])
    assert rig.manager.lookup(blocks, 3) == Answer(1)
    assert rig.manager.evictions == {"damaged": 1}
    assert rig.grant() == [slots[1]]


def test_O15_what_lies_below_a_damaged_block_is_used_again_when_that_is_stored_anew() -> None:
    rig, blocks = Rig(4), chain(3)
    slots = rig.put(blocks)
    rig.manager.complete_load(rig.lease(blocks).lease_id, [slots[1]])
    again = rig.begin(blocks, 1)
    assert rig.manager.complete_store(again, ok=True) is StoreOutcome.STORED
    lease = rig.lease(blocks)
    assert lease.groups[0].slots == [slots[0], again, slots[2]]
    assert rig.manager.index.holes == 0
    rig.manager.complete_load(lease.lease_id)
    rig.grant(2)
    assert rig.manager.lookup(blocks, 3) == Answer(2)  # the leaf went, not the block above it


# Taking slots away


def test_retired_slots_leave_at_once_when_nothing_uses_them() -> None:
    rig, blocks = Rig(4), chain(2)
    rig.put(blocks)
    assert rig.manager.retire_slots([Slot(1), Slot(2)]) == 0
    assert (rig.manager.slots.total, rig.manager.slots.used) == (2, 1)
    assert rig.manager.lookup(blocks, 2) == Answer(1)
    assert sorted(rig.grant(4)) == [0, 3]
    assert rig.manager.evictions["resize"] == 1


def test_retired_slots_wait_for_leases_and_for_credits() -> None:
    rig, blocks = Rig(2), chain(1)
    rig.put(blocks)
    lease, (credit,) = rig.lease(blocks), rig.grant()
    both = [Slot(0), Slot(1)]
    assert rig.manager.retire_slots(both) == 2
    assert (rig.manager.slots.total, rig.manager.slots.used) == (0, 0)
    rig.manager.complete_load(lease.lease_id)
    assert rig.manager.retire_slots(both) == 1
    rig.manager.give_back([credit])
    assert rig.manager.retire_slots(both) == 0
    assert (rig.manager.slots.total, len(rig.manager.slots.free), rig.grant()) == (0, 0, [])


def test_a_write_that_ends_in_a_retired_slot_does_not_keep_it() -> None:
    rig, blocks = Rig(1), chain(1)
    slot = rig.begin(blocks, 0)
    assert rig.manager.retire_slots([slot]) == 1
    rig.manager.complete_store(slot, ok=True)
    assert rig.probe(blocks) is LookupResult.MISS
    assert rig.manager.retire_slots([slot]) == 0


def test_nothing_becomes_ready_below_a_block_whose_slot_is_to_go() -> None:
    """Of a path that arrives in one go: it could not be found, and lookups were linear."""
    rig, path = Rig(4), chain(4)
    slots, keys = rig.grant(4), path.keys(0, 4)
    assert rig.manager.begin_promotions(keys, [None, *keys[:-1]], slots) == [0, 1, 2, 3]
    assert rig.manager.retire_slots(slots[1:2]) == 1
    stored, orphan = StoreOutcome.STORED, StoreOutcome.ORPHAN
    assert rig.manager.complete_promotions(slots, 4) == [stored, stored, orphan, orphan]
    assert (rig.manager.index.holes, len(rig.manager.index)) == (0, 1)
    assert sorted(rig.manager.slots.free) == [slots[2], slots[3]]
    assert rig.manager.retire_slots(slots[1:2]) == 0


# What one call may take is bounded, however many blocks there are


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
        rig.manager.pin_run([key])
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


def test_a_search_passes_each_block_that_is_copied_once() -> None:
    rig, chains = filled(3 * SKIPS_MAX)
    pinned = [rig.manager.pin(each.key(0, 0)) for each in chains[:-1]]
    found = [len(rig.grant(2)) for _ in range(4)]
    assert found == [1, 0, 1, 0]
    rig.manager.unpin(filter(None, pinned), used=False)
    assert len(rig.grant(3)) == 3


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
    assert (rig.manager.slots.total, len(rig.manager.slots.free)) == (0, 0)


@pytest.mark.parametrize("rules", [(FULL,), (FULL, GroupRule(1))], ids=["full", "window"])
def test_O20_what_is_in_slots_that_are_to_go_is_not_leased(
    rules: Sequence[GroupRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that comes now does not map them (seed 9047 of the simulation)."""
    monkeypatch.setattr(manager, "_SWEEP_MAX", 0)  # later calls drop the blocks
    rig, blocks = Rig(16, rules), chain(4, groups=len(rules))
    windows = [rig.put(blocks, group=group)[1] for group in range(1, len(rules))]
    kept = rig.put(chain(2, groups=len(rules)))
    assert len(kept) == 2
    coming = rig.grant(2)
    for index, slot in zip((2, 3), coming, strict=True):
        assert rig.promote(blocks.key(0, index), blocks.key(0, index - 1), slot)
    before = rig.lease(blocks)
    assert list(before.groups[0].indices) == [0, 1, 2, 3]
    rig.manager.retire_slots([coming[0], *windows])
    lease = rig.lease(blocks)
    assert list(lease.groups[0].indices) == [0, 1]
    assert [list(hit.indices) for hit in lease.groups[1:]] == [[0]] * len(windows)
    rig.manager.retire_slots(kept)
    assert rig.manager.prepare_load(blocks, 4, 7, 100) is None


def test_a_slot_to_be_retired_is_not_granted_when_its_block_is_evicted_first() -> None:
    rig, _ = filled(10_000)
    slots = {Slot(number) for number in range(5000)}  # of the coldest blocks
    assert rig.manager.retire_slots(slots) > 0
    assert not slots & set(rig.grant(3000))
    while rig.manager.retire_slots(slots):
        pass
    assert rig.manager.slots.total == 5001


# The ways to an answer against a scan: one full group is not looked up as many are

RULE = st.builds(GroupRule, st.none() | st.integers(1, 2), st.integers(0, 8), st.booleans())
RULES = st.lists(RULE, min_size=1, max_size=2)
LOWER = st.lists(st.sampled_from(list(LookupResult)), min_size=6, max_size=6)


def stored(rig: Rig, blocks: Chain, group: int, states: str) -> None:
    """H: here; P: being written; C: coming; the states of leading blocks, in this order."""
    for index, state in enumerate(states):
        if state == "C":
            (slot,) = rig.grant()
            parent = blocks.key(group, index - 1) if index else None
            assert rig.promote(blocks.key(group, index), parent, slot)
            continue
        slot = rig.begin(blocks, index, group)
        if state == "H":
            rig.manager.complete_store(slot, ok=True)


@given(
    rules=RULES,
    states=st.lists(st.from_regex("H{0,4}C{0,2}P{0,2}", fullmatch=True), min_size=2, max_size=2),
    lower=st.none() | LOWER,
    limit=st.integers(0, 7),
    coming=st.booleans(),
    inside=st.integers(0, 7),
)
def test_O4_a_lookup_answers_what_a_scan_of_all_groups_answers(
    rules: list[GroupRule],
    states: list[str],
    lower: list[LookupResult] | None,
    limit: int,
    *,
    coming: bool,
    inside: int,
) -> None:
    rig, blocks = Rig(20, rules), chain(6, groups=len(rules))
    blocks.inside = inside
    for group in range(len(rules)):
        stored(rig, blocks, group, states[group][:6])

    def below(group: int, index: int) -> LookupResult:
        return lower[index - group] if lower else LookupResult.MISS

    def probe(group: int, index: int) -> LookupResult:
        result = rig.manager.index.probe(blocks.key(group, index), coming=coming)
        return below(group, index) if result is LookupResult.MISS else result

    used = inside if limit >= 6 else 0
    expected = common_hit(rules, probe, min(limit, 6), inside=used)
    tiers = Lower(below) if lower is not None else None
    assert rig.manager.lookup(blocks, limit, tiers, coming=coming) == expected
