"""A clear: at once out of reach, slots in slices, and what was under way does not come back."""

from __future__ import annotations

import pytest

from kvstore.core.lookup import Answer
from kvstore.core.manager import CLEAR_MAX
from kvstore.core.types import LookupResult, Slot, StoreOutcome
from kvstore.wire import engine as p
from tests.harness.fakes import Town, hashes
from tests.test_manager import Rig, chain, filled


def finish(rig: Rig) -> None:
    for _ in range(10):
        rig.manager.clear_some()
    assert not rig.manager.clearing


def test_a_clear_looks_at_no_stored_block_and_its_slices_at_so_many() -> None:
    blocks = 3 * CLEAR_MAX + 5
    rig, chains = filled(blocks)
    rig.manager.clear()
    assert rig.manager.evictions["clear"] == 0
    assert all(rig.probe(each) is LookupResult.MISS for each in chains)
    left, calls = blocks, 0
    while rig.manager.clearing:
        rig.manager.clear_some()
        now = blocks - rig.manager.evictions["clear"]
        assert 0 <= left - now <= CLEAR_MAX
        left, calls = now, calls + 1
    assert (left, rig.manager.slots.used, len(rig.manager.slots.free)) == (0, 0, blocks + 1)
    assert calls >= 4
    assert sorted(rig.manager.take_changes().removed) == sorted(each.key(0, 0) for each in chains)


def test_what_is_stored_while_slots_come_back_is_kept_and_is_not_said_to_have_left() -> None:
    rig, blocks = Rig(8), chain(3)
    rig.put(blocks)
    rig.manager.clear()
    rig.put(blocks)
    rig.manager.take_changes()
    finish(rig)
    assert rig.manager.lookup(blocks, 3) == Answer(3)
    assert rig.manager.take_changes().removed == []
    assert rig.manager.slots.used == 3


def test_cleared_blocks_make_room_before_any_other_goes() -> None:
    rig, old, new = Rig(6), chain(4, "a"), chain(2, "b")
    rig.put(old)
    rig.manager.clear()
    rig.put(new)
    assert len(rig.grant(4)) == 4
    assert rig.manager.lookup(new, 2) == Answer(2)
    assert rig.manager.evictions["capacity"] == 0


@pytest.mark.parametrize("swept_first", [True, False])
def test_leased_blocks_keep_their_slots_until_the_lease_ends(*, swept_first: bool) -> None:
    rig, blocks = Rig(4), chain(2)
    rig.put(blocks)
    lease = rig.lease(blocks)
    rig.manager.clear()
    if swept_first:
        finish(rig)
        assert (rig.manager.slots.used, len(rig.manager.slots.free)) == (2, 2)
    damaged = [Slot(slot) for slot in lease.groups[0].slots]
    rig.put(blocks)  # other copies: what was wrong with the old ones is not theirs
    rig.manager.complete_load(lease.lease_id, damaged)
    finish(rig)
    assert rig.manager.lookup(blocks, 2) == Answer(2)
    assert (rig.manager.slots.used, len(rig.manager.slots.free)) == (2, 2)
    assert len(rig.grant(4)) == 4, "cleared blocks are in the way of the order"


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("lease_first", [True, False])
def test_what_was_coming_does_not_become_ready(*, ok: bool, lease_first: bool) -> None:
    rig, blocks = Rig(3), chain(2)
    rig.put(chain(1))
    (slot,) = rig.grant()
    assert rig.promote(blocks.key(0, 1), blocks.key(0, 0), slot)
    lease, before = rig.lease(blocks), rig.generations[slot]
    rig.manager.clear()
    finish(rig)
    assert rig.manager.lookup(blocks, 2) == Answer(0)
    if lease_first:
        rig.manager.complete_load(lease.lease_id)
        assert slot not in rig.grant(3), "a tier is still writing into it"
        rig.manager.give_back([Slot(s) for s in rig.manager.slots.granted if s != slot])
    outcome = rig.arrive(slot, ok=ok)
    assert outcome is (StoreOutcome.ORPHAN if ok else StoreOutcome.FAILED)
    assert rig.generations[slot] == before + 2  # one that waits for it gives up
    if not lease_first:
        rig.manager.complete_load(lease.lease_id)
    assert (len(rig.manager.slots.free), len(rig.manager.index)) == (3, 0)


def test_a_promotion_starts_again_while_the_cleared_one_is_under_way() -> None:
    rig, blocks = Rig(3), chain(1)
    first, second = rig.grant(2)
    assert rig.promote(blocks.key(0, 0), None, first)
    rig.manager.clear()
    assert rig.promote(blocks.key(0, 0), None, second)
    assert rig.arrive(first, ok=True) is StoreOutcome.ORPHAN
    assert rig.arrive(second, ok=True) is StoreOutcome.STORED
    assert rig.manager.lookup(blocks, 1) == Answer(1)


@pytest.mark.parametrize("ok", [True, False])
def test_a_second_clear_leaves_what_the_first_put_out_of_reach(*, ok: bool) -> None:
    rig, blocks = Rig(8), chain(3)
    (coming,) = rig.grant()
    assert rig.promote(blocks.key(0, 0), None, coming)
    written = rig.begin(chain(1, "b"), 0)
    rig.manager.clear()
    rig.manager.clear()
    assert len(rig.manager.index) == 0
    expected = StoreOutcome.ORPHAN if ok else StoreOutcome.FAILED
    assert rig.arrive(coming, ok=ok) is expected
    expected = StoreOutcome.STORED if ok else StoreOutcome.FAILED
    assert rig.manager.complete_store(written, ok=ok) is expected
    finish(rig)
    assert rig.manager.slots.used == len(rig.manager.index) == int(ok)


def test_slots_to_be_retired_wait_for_the_clear() -> None:
    rig, _ = filled(2 * CLEAR_MAX)
    slots = [Slot(number) for number in range(2 * CLEAR_MAX + 1)]
    rig.manager.clear()
    assert rig.manager.retire_slots(slots) > 0
    finish(rig)
    assert rig.manager.retire_slots(slots) == 0
    assert (rig.manager.slots.total, len(rig.manager.slots.free)) == (0, 0)


def test_a_store_goes_on_while_it_clears_and_answers_when_all_slots_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.core.manager.Manager.clear_some.__defaults__", (2,))
    town = Town()
    engine, chain = town.attach(), hashes(6)
    engine.put(chain)
    (namespace,) = town.store.namespaces.values()
    admin, other = town.connect(), town.connect()
    town.say(admin, p.Query("clear"))
    town.say(other, p.Query("clear"))
    town.close(other)
    used = [namespace.manager.slots.used]
    while not (answers := town.take(admin, p.Report)) and len(used) < 9:
        assert town.store.busy, "nobody would come back to it"
        town.tick()
        used.append(namespace.manager.slots.used)
    assert (len(answers), used[:4], used[-1]) == (1, [6, 4, 2, 0], 0)
    assert engine.hit(chain).lease == 0
    assert other not in town.inbox, "told, though it has closed"


def test_a_cleared_block_whose_lease_ends_does_not_come_back_into_the_order() -> None:
    rig, blocks = Rig(4), chain(1)
    rig.put(blocks)
    lease = rig.lease(blocks)
    rig.manager.clear()
    rig.manager.complete_load(lease.lease_id)
    assert list(rig.manager._policy.victims()) == []
    finish(rig)
    assert len(rig.manager.slots.free) == 4


def test_O11_the_second_copy_of_a_block_knows_its_parent_after_a_clear() -> None:
    """`make sim`, seeds 2105 and 4691: it became ready as if its chain began with it."""
    rig, path = Rig(), chain(2)
    rig.begin(path, 0)
    head, made_for, first = rig.begin(path, 0), rig.begin(path, 1), rig.begin(path, 1)
    for slot in (head, first):
        assert rig.manager.complete_store(slot, ok=True) is StoreOutcome.STORED
    rig.manager.clear()
    finish(rig)
    assert rig.manager.complete_store(made_for, ok=True) is StoreOutcome.ORPHAN
    assert rig.probe(path, 1) is LookupResult.MISS
    assert len(rig.manager.index) == 0
