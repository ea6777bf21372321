"""What a full tier is given, and when; what a write budget lets through."""

from __future__ import annotations

import pytest

from kvstore.core.late_writes import LateWrites
from kvstore.core.tier import Bounded
from kvstore.core.tiering import Tiering
from kvstore.core.types import BlockKey, Changes
from kvstore.core.write_budget import WriteBudget
from tests.test_tiering import Rig, SlowTier


class FullTier(SlowTier):
    """A tier that says it is full; tests change that."""

    full = True


class FullRig(Rig):
    """Memory above a tier that is full."""

    def __init__(self, slots: int, budget: int | None = None) -> None:
        super().__init__(slots)
        self.tier: FullTier = FullTier()
        budgets = {"slow": WriteBudget(budget)}
        self.tiering = Tiering(self.manager, [self.tier], 1, budgets=budgets)

    def drain(self) -> None:
        while self.tier.jobs:
            super().drain()

    def fill(self, name: str, blocks: int) -> None:
        """Store blocks one request at a time, each written as soon as it may be."""
        for number in range(blocks):
            self.store(self.chain(f"{name}{number}", 1))
            self.drain()

    @property
    def unwritten(self) -> int:
        return sum(
            entry.key not in self.tier.keys for part in self.manager.index.parts() for entry in part
        )


def test_Q65_a_full_tier_is_given_blocks_late_and_loses_few() -> None:
    rig = FullRig(slots=100)
    rig.fill("a", 80)
    assert 3 <= rig.unwritten <= 6, "it holds a block back for each 16 that were there in time"
    rig.fill("b", 4000)
    assert 60 <= rig.unwritten <= 100, "it gave blocks away that memory keeps anyway"
    lost = rig.tiering.counts["slow", "held_too_long"]
    assert lost <= 4080 / 60
    assert len(rig.tier.keys) == 4080 - lost - rig.unwritten


def test_Q65_a_tier_with_room_is_given_blocks_at_once() -> None:
    rig = FullRig(slots=100)
    rig.fill("a", 1000)
    assert rig.unwritten
    rig.tier.full = False
    rig.fill("b", 1)
    assert not rig.unwritten
    rig.tier.full = True
    rig.fill("c", 20)
    assert rig.unwritten <= 2, "it went on where it was"


def test_Q65_a_tier_that_does_not_say_whether_it_is_full_is_given_blocks_at_once() -> None:
    assert isinstance(FullTier(), Bounded)
    assert not isinstance(SlowTier(), Bounded)
    rig = Rig(slots=100)
    for number in range(300):
        chain = rig.chain(str(number), 1)
        rig.store(chain)
        assert [list(job.keys) for job in rig.tier.jobs] == [rig.keys(chain)]
        rig.drain()


def test_Q65_what_is_used_again_is_held_for_longer_and_written_with_its_path() -> None:
    rig = FullRig(slots=200)
    rig.fill("a", 400)
    path = rig.chain("path", 3)
    rig.store(path)
    rig.drain()
    assert not rig.tier.keys.intersection(rig.keys(path))
    for number in range(60):
        rig.tiering.used(path, rig.lease(path, 3))
        rig.fill(f"b{number}", 1)
    assert path.key(0, 2) not in rig.tier.keys
    rig.fill("c", 100)
    assert rig.tier.keys.issuperset(rig.keys(path))


def test_Q65_what_is_held_is_written_when_the_store_ends_and_forgotten_by_a_clear() -> None:
    rig = FullRig(slots=100)
    rig.fill("a", 1000)
    assert rig.unwritten
    rig.look()
    rig.drain()
    assert not rig.unwritten
    rig.fill("b", 30)
    rig.manager.clear()
    rig.tiering.clear()
    rig.tier.full = False
    rig.manager.take_changes()
    late = rig.tiering.counts["slow", "late"]
    rig.fill("c", 1)
    assert rig.tier.keys == {rig.chain("c0", 1).key(0, 0)}
    assert rig.tiering.counts["slow", "late"] == late


def test_Q65_what_leaves_memory_was_in_use_until_then() -> None:
    rig = FullRig(slots=10)
    keys = [BlockKey(b"a"), BlockKey(b"b")]
    rig.tiering.changed(Changes(removed=keys))
    assert rig.tier.touched == keys
    rig.tier.full = False
    rig.tiering.changed(Changes(removed=keys))
    assert rig.tier.touched == keys, "a tier with room evicts nothing"


def test_beyond_the_write_budget_what_was_evicted_and_is_stored_again_is_written() -> None:
    rig = FullRig(slots=4, budget=24)
    rig.tier.full = False
    rig.fill("a", 1)
    rig.fill("b", 8)
    assert len(rig.tier.keys) == 1, "an hour's budget is one block"
    written = rig.chain("b0", 1)
    assert not rig.ready(written)
    rig.store(written)
    rig.drain()
    assert written.key(0, 0) in rig.tier.keys


@pytest.mark.parametrize("again", [False, True])
def test_blocks_ripen_the_coldest_first(again: bool) -> None:
    held = LateWrites()
    keys = [BlockKey(bytes([number])) for number in range(4)]
    held.written(3 * 16)
    held.add(keys)
    held.add(keys[:1], again=again)
    assert held.ripe(100) == [(keys[1], False)]
    held.lost(1)
    assert held.ripe(100) == [(keys[2], False), (keys[3], False), (keys[0], again)]
