"""Tenants in one namespace: what each has, may have and keeps, and whose block goes next."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.core import tenants
from kvstore.core.manager import QUOTA_SLICE, Manager
from kvstore.core.tenants import Share
from kvstore.core.types import BlockKey, Chain, GroupRule, Slot, StoreOutcome, tag_of
from tests.harness.fakes import generations_of

BYTES = 10  # of a block
WIDTH = 8


class Rig:
    """Memory of one namespace, and tenants a, b and so on; chains of "-" are nobody's."""

    def __init__(self, slots: int, names: str = "ab") -> None:
        self.manager = Manager((GroupRule(),), generations_of(slots))
        self.manager.slots.add([Slot(slot) for slot in range(slots)])
        self.shares = {name: Share() for name in names}
        self.tend()

    def tend(self) -> bool:
        shares = {tag_of(name): share for name, share in self.shares.items()}
        return self.manager.tend_tenants(shares, BYTES)

    def chain(self, tenant: str, name: str, blocks: int = 1) -> Chain:
        scope = b"" if tenant == "-" else tag_of(tenant)
        packed = b"".join(f"{name}/{index}".encode().ljust(WIDTH) for index in range(blocks))
        return Chain(packed, WIDTH, 1, scope)

    def put(self, tenant: str, name: str, blocks: int = 1) -> None:
        """Store what is lacking of a chain."""
        chain = self.chain(tenant, name, blocks)
        for index in range(blocks):
            if self.manager.ready(chain.key(0, index)) is None:
                (slot,) = self.manager.prepare_store(1)
                above = chain.key(0, index - 1) if index else None
                self.manager.begin_store(chain.key(0, index), above, slot)
                self.manager.complete_store(slot, ok=True)

    def here(self, tenant: str, name: str, blocks: int = 1) -> int:
        """Count the leading blocks that can be read."""
        return self.manager.lookup(self.chain(tenant, name, blocks), blocks).blocks

    def use(self, tenant: str, name: str, blocks: int = 1) -> None:
        assert self.manager.touch(self.chain(tenant, name, blocks).key(0, blocks - 1))

    def limit(self, tenant: str, quota: int | None = None, floor: int = 0) -> None:
        """Set limits, in blocks."""
        share = self.shares[tenant]
        share.quota_bytes = None if quota is None else quota * BYTES
        share.floor_bytes = floor * BYTES

    def used(self, tenant: str) -> int:
        return self.shares[tenant].used_bytes // BYTES


def test_Q40_no_tenant_finds_anothers_blocks() -> None:
    rig = Rig(10)
    rig.put("a", "same", 3)
    assert [rig.here(tenant, "same", 3) for tenant in "ab-"] == [3, 0, 0]


def test_Q41_of_a_read_that_ends_in_the_middle_only_what_can_be_read_already_is_taken() -> None:
    """The failed block's parent is not in the order before it has been told that it can be read."""
    rig = Rig(10)
    rig.limit("a", quota=1)
    rig.put("a", "first")
    keys, manager = rig.chain("a", "read", 3).keys(0, 3), rig.manager
    slots = manager.prepare_store(3)
    assert manager.begin_promotions(keys, [None, *keys[:2]], slots) == [0, 1, 2]
    manager.take_changes()
    manager.complete_promotions(slots, 2)
    changes = manager.take_changes()
    assert set(changes.removed) <= {rig.chain("a", "first").key(0, 0), *changes.added}
    assert changes.removed[0] == rig.chain("a", "first").key(0, 0), "the coldest"
    assert len(manager.prepare_store(10)) == 10, "all can leave"


def test_Q41_a_tenant_beyond_its_quota_loses_its_own_coldest_blocks() -> None:
    rig = Rig(10)
    rig.put("b", "other", 2)
    rig.put("-", "nobodys", 2)
    rig.limit("a", quota=3)
    for name in ("one", "two", "three"):
        rig.put("a", name)
    rig.use("a", "one")
    rig.put("a", "four")
    assert [rig.here("a", name) for name in ("one", "two", "three", "four")] == [1, 0, 1, 1]
    assert rig.here("b", "other", 2) == rig.here("-", "nobodys", 2) == 2
    assert rig.used("a") == 3
    assert rig.manager.evictions == {"quota": 1}


def test_Q41_a_chain_longer_than_the_quota_stays_a_prefix() -> None:
    rig = Rig(10)
    rig.limit("a", quota=3)
    rig.put("a", "long", 3)
    chain = rig.chain("a", "long", 4)
    (slot,) = rig.manager.prepare_store(1)
    rig.manager.begin_store(chain.key(0, 3), chain.key(0, 2), slot)
    assert rig.manager.complete_store(slot, ok=True) is StoreOutcome.STORED
    assert rig.here("a", "long", 4) == 3, "the last one is the only leaf"
    assert rig.used("a") == 3


def test_Q41_what_is_pinned_stays_and_goes_later() -> None:
    rig = Rig(10)
    rig.put("a", "held", 2)
    lease = rig.manager.prepare_load(rig.chain("a", "held", 2), 2, owner=1, deadline_ns=9)
    assert lease is not None
    rig.limit("a", quota=1)
    assert rig.tend(), "it is asked again"
    assert rig.here("a", "held", 2) == 2
    rig.manager.complete_load(lease.lease_id)
    assert not rig.tend()
    assert rig.here("a", "held", 2) == 1


def test_Q41_a_quota_that_is_lowered_is_met_in_slices() -> None:
    count = 3 * QUOTA_SLICE
    rig = Rig(count + 10)
    rig.put("a", "all", count)
    rig.limit("a", quota=10)
    calls = 1
    while rig.tend():
        calls += 1
    assert calls == 3
    assert rig.used("a") == rig.here("a", "all", count) == 10


def test_Q42_up_to_its_floor_a_tenant_keeps_what_it_has() -> None:
    rig = Rig(6)
    rig.limit("a", floor=2)
    rig.put("a", "cold", 3)
    rig.put("b", "warm", 3)
    rig.put("b", "hot", 4)
    assert rig.used("a") == 2, "one more than its floor went first"
    assert rig.here("a", "cold", 3) == 2
    assert rig.used("b") == 4


def test_Q42_floors_above_what_there_is_do_not_stop_a_tenants_own_blocks() -> None:
    """Then nothing can go, and what comes finds no slot until something may."""
    rig = Rig(4)
    rig.limit("a", floor=4)
    rig.put("a", "all", 4)
    assert rig.manager.prepare_store(1) == []
    rig.limit("a", floor=3)
    assert len(rig.manager.prepare_store(1)) == 1


@pytest.mark.parametrize("seed", range(40))
def test_Q41_Q42_whoevers_block_is_coldest_goes_next(seed: int) -> None:
    """Against a list of all in the order of their use."""
    rng = random.Random(seed)
    rig, order = Rig(12), list[tuple[str, str]]()
    for step in range(300):
        tenant, name = rng.choice("ab-"), str(rng.randrange(9))
        if (tenant, name) in order:
            rig.use(tenant, name)
            order.remove((tenant, name))
        elif rng.random() < 0.1 and order:
            tenant, name = rng.choice(order)
            key = rig.chain(tenant, name).key(0, 0)
            assert rig.manager.drop(key, "damaged")
            order.remove((tenant, name))
            continue
        elif rng.random() < 0.1:
            count = rng.randrange(2, 6)
            order = order[max(0, count - 12 + len(order)) :]
            rig.manager.give_back(rig.manager.prepare_store(count))
            continue
        else:
            rig.put(tenant, name)
            if len(order) == 12:
                del order[0]
        order.append((tenant, name))
        if step % 10 == 0:
            assert [rig.here(*each) for each in order] == [1] * len(order)
            assert len(rig.manager.index) == len(order)
            for each in "ab":
                assert rig.used(each) == sum(owner == each for owner, _ in order)
    rig.manager.clear()
    assert [rig.used(name) for name in "ab"] == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_Q41_Q42_whatever_happens_limits_hold_and_counts_are_right(seed: int) -> None:
    """Paths that fork, pins, clears, slots taken away, quotas and floors that change."""
    rng = random.Random(seed)
    rig, leases = Rig(40, "abc"), list[int]()
    total = 40
    for _ in range(600):
        tenant, name = rng.choice("abc-"), str(rng.randrange(5))
        blocks = rng.randrange(1, 8)
        what = rng.random()
        if what < 0.6:
            _put_some(rig, tenant, name, blocks)
        elif what < 0.75:
            lease = rig.manager.prepare_load(rig.chain(tenant, name, blocks), blocks, 1, 10)
            leases += [] if lease is None else [lease.lease_id]
        elif what < 0.88 and leases:
            rig.manager.complete_load(leases.pop(rng.randrange(len(leases))))  # type: ignore[arg-type]
        elif what < 0.93 and tenant != "-":
            quota = rng.choice([None, 3, 8, 20])
            rig.limit(tenant, quota, rng.choice([0, 0, 2, 5]))
        elif what < 0.95 and total > 20:
            total -= 1
            rig.manager.retire_slots([Slot(total)])
        elif what > 0.995:
            rig.manager.clear()
            rig.manager.clear_some()
        while rig.tend():
            if leases:
                rig.manager.complete_load(leases.pop())  # type: ignore[arg-type]
        _check(rig)


def _put_some(rig: Rig, tenant: str, name: str, blocks: int) -> None:
    chain = rig.chain(tenant, name, blocks)
    for index in range(blocks):
        if rig.manager.ready(chain.key(0, index)) is None:
            slots = rig.manager.prepare_store(1)
            if not slots:
                return
            above = chain.key(0, index - 1) if index else None
            rig.manager.begin_store(chain.key(0, index), above, slots[0])
            rig.manager.complete_store(slots[0], ok=True)


def _check(rig: Rig) -> None:
    keys = [entry.key for entry in rig.manager.index if rig.manager.ready(entry.key)]
    for name, share in rig.shares.items():
        has = _tagged(keys, tag_of(name))
        assert share.used_bytes == has * BYTES, name
        assert not share.is_over, name


def _tagged(keys: Sequence[BlockKey], tag: bytes) -> int:
    return sum(key.endswith(tag) for key in keys)


@pytest.mark.parametrize("seed", range(20))
def test_Q41_a_tenant_that_comes_later_has_the_blocks_it_stored_before(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of an engine of before, say. Meanwhile blocks come, go and are used."""
    rng = random.Random(seed)
    rig = Rig(60, "")
    for number in range(60):
        _put_some(rig, rng.choice("ab-"), str(number % 9), rng.randrange(1, 6))
    for name in "ab":
        rig.shares[name] = Share()
    rig.limit("a", quota=7)
    rig.limit("b", floor=3)
    monkeypatch.setattr(tenants, "ADOPT_BLOCKS", 1)  # one table in each call
    for _ in range(3000):
        tenant, name = rng.choice("ab-"), str(rng.randrange(9))
        blocks = rng.randrange(1, 6)
        if rng.random() < 0.5:
            _put_some(rig, tenant, name, blocks)
        else:
            key = rig.chain(tenant, name, blocks).key(0, blocks - 1)
            rig.manager.touch(key) if rng.random() < 0.9 else rig.manager.drop(key, "damaged")
        rig.tend()
    assert not rig.tend()
    _check(rig)
