"""What sessions do in the store: storing, looking up, waiting, leases and credits."""

from __future__ import annotations

import pytest

from kvstore.core.types import BlockKey, GroupRule, LeaseId, make_key
from kvstore.store.session import Phase
from kvstore.wire import engine as p
from tests.harness.fakes import (
    SLOT_BYTES,
    HeapPool,
    Town,
    blocks,
    from_u32,
    hashes,
    pending_town,
    phase,
    settings,
    u32,
    value_of,
)

# Storing and looking up


def test_O2_what_was_stored_is_hit_with_its_slots_and_generations() -> None:
    town = Town()
    engine, chain = town.attach(), hashes(3)
    slots = engine.put(chain)
    granted = engine.hit(hashes(5))
    assert blocks(granted) == [0, 1, 2]
    assert from_u32(granted.hits[0].slots) == slots
    namespace = next(iter(town.store.namespaces.values()))
    assert from_u32(granted.hits[0].generations) == [namespace.generations[s] for s in slots]
    assert granted.lease
    assert not granted.sources


def test_O16_the_engines_that_have_to_do_with_a_block_hear_when_it_is_ready_and_leaves() -> None:
    town = Town()
    first, second = town.attach("first"), town.attach("second")
    other = town.attach("other", identity="another model")
    chain = hashes(2)
    assert not blocks(second.hit(chain)), "it is to compute them, and another does so first"
    first.put(chain)
    town.settle(first, second, other)
    expected = [make_key(block, 0) for block in chain]
    assert (first.added, second.added, other.added) == (expected, expected, [])
    town.say(town.connect(), p.Query("clear"))
    town.settle(first, second, other)
    assert sorted(first.removed) == sorted(second.removed) == sorted(expected)
    assert not other.removed


def test_O16_an_engine_that_stores_a_block_once_more_is_told_again_that_it_is_there() -> None:
    """It has forgotten that it was, and would copy it each time."""
    town = Town()
    engine, other = town.attach("first"), town.attach("second")
    engine.put(chain := hashes(2))
    other.put(chain)
    engine.added.clear()
    engine.put(chain)
    expected = [make_key(block, 0) for block in chain]
    assert (engine.added, other.added) == (expected, expected)


def test_O18_replicas_store_whole_blocks_and_hit_each_others() -> None:
    town = Town()
    one, two = town.attach("engine_dp0", world=2), town.attach("engine_dp1", world=2)
    one.put(first := hashes(2, "first"))
    two.put(second := hashes(2, "second"))
    assert len(town.store.namespaces) == 1
    assert [blocks(engine.hit(chain)) for engine in (one, two) for chain in (first, second)] == [
        [0, 1]
    ] * 4
    one.leave()
    assert blocks(two.hit(first)) == [0, 1]


@pytest.mark.parametrize("ok", [True, False])
def test_O18_a_block_is_present_only_when_every_ranks_part_is(ok: bool) -> None:
    town = Town()
    engine = town.attach(world=2)
    (block,) = hashes(1)
    slot, key = engine.credits.pop(0), make_key(block, 0)
    engine.report(0, [slot], [key], [b""], ok=ok)
    town.settle(engine)
    assert not engine.added
    engine.report(1, [slot], [key], [b""])
    assert blocks(engine.hit([block])) == ([0] if ok else [])
    assert value_of(town.store.numbers, "kvstore_stored_blocks", "failed") == int(not ok)


def test_O18_ranks_that_name_different_keys_for_one_slot_store_nothing() -> None:
    town = Town()
    engine = town.attach(world=2)
    one, other = hashes(1, "one"), hashes(1, "other")
    slot = engine.credits.pop(0)
    engine.report(0, [slot], [make_key(one[0], 0)], [b""])
    engine.report(1, [slot], [make_key(other[0], 0)], [b""])
    town.settle(engine)
    assert "another key" in engine.detached[0]
    assert not engine.added


def test_O18_a_load_is_over_when_every_rank_has_reported_it() -> None:
    town = Town()
    engine, chain = town.attach(world=2), hashes(1)
    engine.put(chain)
    lease = engine.hit(chain).lease
    leases = next(iter(town.store.namespaces.values())).manager.leases
    town.say(engine.workers[0], p.Loaded(lease, 10, 0.1))
    town.say(engine.workers[0], p.Loaded(lease, 10, 0.1))
    assert len(leases) == 1
    town.say(engine.workers[1], p.Loaded(lease, 10, 0.1))
    assert len(leases) == 0


def test_O15_what_a_worker_found_damaged_is_dropped_before_the_next_answer() -> None:
    town = Town()
    engine, chain = town.attach(), hashes(3)
    slots = engine.put(chain)
    lease = engine.hit(chain).lease
    town.say(engine.workers[0], p.Loaded(lease, 0, 0.1, u32(slots[1:2])))
    assert blocks(engine.hit(chain)) == [0]


def test_S2_slots_that_a_worker_calls_damaged_and_that_no_lease_has_are_not_kept() -> None:
    town = Town()
    engine, chain = town.attach(world=2), hashes(3)
    slots = engine.put(chain)
    lease = engine.hit(chain).lease
    for first in range(1 << 20, (1 << 20) + 10_000, 1_000):
        damaged = u32([*range(first, first + 1_000), *slots[1:2]])
        town.say(engine.workers[0], p.Loaded(lease, 0, 0.1, damaged))
    (session,) = town.store.sessions.values()
    assert session.loading[LeaseId(lease)].damaged <= set(slots), "each message took megabytes"
    town.say(engine.workers[1], p.Loaded(lease, 0, 0.1))
    assert blocks(engine.hit(chain)) == [0]


def test_two_engines_of_unequal_size_share_what_fits_both() -> None:
    town = Town()
    one = town.attach("one", world=1)
    two = town.attach("two", world=2)
    assert [len(town.store.namespaces), two.active is not None] == [1, True]
    one.put(chain := hashes(2))
    assert blocks(two.hit(chain)) == [0, 1]
    layouts = [welcome.layout for welcome in two.layouts if welcome.layout]
    runs = [layout.groups[0].runs[0] for layout in layouts]
    assert [(run.offset, run.length) for run in runs] == [(0, 2048), (2048, 2048)]


# Waiting


@pytest.mark.parametrize("ok", [True, False])
def test_O8_a_lookup_of_a_pending_block_is_answered_once_when_its_write_ends(ok: bool) -> None:
    town, engine, chain, slot = pending_town()
    ask = engine.ask(chain)
    town.settle(engine)
    assert ask not in engine.granted
    engine.report(1, [slot], [make_key(chain[0], 0)], [b""], ok=ok)
    town.settle(engine)
    assert blocks(engine.granted.pop(ask)) == ([0] if ok else [])
    town.tick(ms=1000)
    engine.pump()
    assert not engine.granted


def test_O8_a_lookup_of_a_pending_block_is_answered_once_at_the_deadline() -> None:
    """The store's loop, which turns slowly unless it is busy, does not sleep past it."""
    town, engine, chain, slot = pending_town()
    assert not town.store.busy
    ask = engine.ask(chain)
    town.tick(ms=99)
    engine.pump()
    assert ask not in engine.granted
    assert town.store.busy
    town.tick(ms=1)
    engine.pump()
    assert engine.granted.pop(ask).lease == 0
    assert not town.store.busy
    engine.report(1, [slot], [make_key(chain[0], 0)], [b""])
    town.settle(engine)
    assert not engine.granted


def test_O8_at_the_deadline_what_is_ready_is_answered() -> None:
    town = Town(settings(defer="100ms"))
    engine, chain = town.attach(world=2), hashes(2)
    engine.put(chain[:1])
    keys = [make_key(block, 0) for block in chain]
    engine.report(0, [engine.credits.pop(0)], keys[1:], keys[:1])
    ask = engine.ask(chain)
    town.tick(ms=100)
    engine.pump()
    assert blocks(engine.granted[ask]) == [0]


# Leases and credits


def test_O20_leases_are_capped_in_bytes_and_come_back() -> None:
    town = Town(settings(leased=2 * SLOT_BYTES))
    engine, first, second = town.attach(), hashes(2, "a"), hashes(2, "b")
    engine.put(first)
    engine.put(second)
    granted = engine.hit(first)
    assert blocks(granted) == [0, 1]
    refused = engine.hit(second)
    assert (refused.lease, refused.capped) == (0, True)
    assert town.attach("another").hit(second).lease, "its cap is its own"
    engine.step(release=(granted.lease,))
    again = engine.hit(second)
    assert (blocks(again), again.capped) == ([0, 1], False)
    assert value_of(town.store.numbers, "kvstore_lookups", "capped") == 1


def test_O20_a_lease_runs_out() -> None:
    town = Town(settings(lease="1s"))
    engine, chain = town.attach(), hashes(1)
    engine.put(chain)
    granted = engine.hit(chain)
    manager = next(iter(town.store.namespaces.values())).manager
    assert granted.lease_ms == 1000
    town.tick(ms=999)
    assert len(manager.leases) == 1
    town.tick(ms=1)
    assert len(manager.leases) == 0
    assert value_of(town.store.numbers, "kvstore_lookups", "expired") == 1
    engine.step(release=(granted.lease,))  # too late, and no harm done
    assert phase(town, engine) is Phase.ACTIVE


def test_O20_an_engine_cannot_end_another_engines_lease() -> None:
    town = Town()
    one, two, chain = town.attach("one"), town.attach("two"), hashes(1)
    slots = one.put(chain)
    lease = one.hit(chain).lease
    two.step(release=(lease,))
    town.say(two.workers[0], p.Loaded(lease, 0, 0.0, u32(slots)))
    leases = next(iter(town.store.namespaces.values())).manager.leases
    assert len(leases) == 1
    assert blocks(two.hit(chain)) == [0]


@pytest.mark.parametrize(
    ("credit_bytes", "wants", "gets"),
    [(3 * SLOT_BYTES, 100, 3), (100 * SLOT_BYTES, 2, 2), (100 * SLOT_BYTES, 100, 8), (1, 5, 1)],
)
def test_O23_credits_are_capped_in_bytes_and_by_need_and_by_size(
    credit_bytes: int, wants: int, gets: int
) -> None:
    town = Town(settings(credit=credit_bytes), HeapPool(extents=1, slots_per_extent=32))
    engine = town.attach(credit_slots=wants)
    town.settle(engine, turns=20)
    assert len(engine.credits) == gets


def test_O23_credits_are_enough_for_a_block_of_each_group_however_little_memory_there_is() -> None:
    """Simulation seed 0: a block of three groups takes three slots, a quarter of eight is two."""
    rules = (GroupRule(), GroupRule(1), GroupRule(2))
    town = Town(settings(credit=1), HeapPool(extents=1, slots_per_extent=8))
    engine = town.attach(credit_slots=100, rules=rules)
    town.settle(engine, turns=20)
    assert len(engine.credits) == len(rules)


def test_O23_credits_are_filled_up_as_they_are_used() -> None:
    town = Town()
    engine = town.attach(credit_slots=2)
    engine.put(hashes(5))
    assert len(engine.credits) == 2
    assert len(town.store.sessions["engine"].granted) == 2


def test_O23_a_report_about_another_engines_slot_ends_the_session_that_sent_it() -> None:
    town = Town()
    owner, thief, chain = town.attach("owner"), town.attach("thief"), hashes(2)
    slot = owner.credits.pop(0)
    thief.report(0, [slot], [make_key(chain[0], 0)], [b""])
    town.settle(owner, thief)
    assert set(thief.detached) == {f"slot {slot} was written without a credit"}
    assert not owner.added
    owner.report(0, [slot], [make_key(chain[1], 0)], [b""])
    assert blocks(owner.hit(chain[1:])) == [0]


def test_O17_the_same_hashes_in_another_scope_are_other_blocks() -> None:
    """A copy that was under way at a reset completes in the scope that is left."""
    town = Town()
    engine, chain = town.attach(), hashes(1)
    slot = engine.credits.pop(0)
    engine.report(0, [slot], [BlockKey(make_key(chain[0], 0, b"scope"))], [b""])
    town.settle(engine)
    assert engine.hit(chain).lease == 0
    engine.step(lookups=(p.Lookup(99, chain[0], 32, b"scope"),))
    town.tick()
    engine.pump()
    assert blocks(engine.granted[99]) == [0]
