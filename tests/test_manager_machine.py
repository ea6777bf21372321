"""Random histories of a manager: what must hold after each step, whatever happened."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstore.core.eviction import LRU, LeafLRU, Mark
from kvstore.core.index import Entry, Node, State
from kvstore.core.leases import Lease
from kvstore.core.lookup import Answer, common_hit
from kvstore.core.manager import Manager
from kvstore.core.policy import PluginOrder
from kvstore.core.segmented import SEGMENTED, SegmentedLRU
from kvstore.core.tenants import Share, TenantOrder
from kvstore.core.types import BlockKey, Chain, GroupRule, LookupResult, Slot, StoreOutcome, tag_of
from tests.harness.fakes import generations_of

WIDTH = 8
RULES = (GroupRule(), GroupRule(2))
PATHS = st.text("xy", min_size=1, max_size=3)


SLOTS_MAX = 12
TAG = tag_of("tenant")
BYTES = 10


def chain_of(path: str) -> Chain:
    names = [path[: index + 1].ljust(WIDTH).encode() for index in range(len(path))]
    return Chain(b"".join(names), WIDTH, len(RULES), TAG if path[0] == "x" else b"")


def parent_of(key: BlockKey) -> BlockKey | None:
    """Return the key above in a full group; window blocks have none."""
    name, group, scope = key[:WIDTH].rstrip(), key[WIDTH : WIDTH + 2], key[WIDTH + 2 :]
    if int.from_bytes(group, "big") or len(name) == 1:
        return None
    return BlockKey(name[:-1].ljust(WIDTH) + group + scope)


class ManagerMachine(RuleBasedStateMachine):
    """Engines, tiers and an operator at work on few slots."""

    leases = Bundle("leases")
    pins = Bundle("pins")
    policy = LRU

    def __init__(self) -> None:
        super().__init__()
        self.generations = generations_of(SLOTS_MAX)
        self.manager = Manager(RULES, self.generations, policy=self.policy)
        self.slots: set[Slot] = set()
        self.granted: dict[Slot, BlockKey | None] = {}  # None: nobody has said what is written
        self.content: dict[Slot, BlockKey] = {}
        self.open: dict[int, tuple[Lease, tuple[tuple[BlockKey, Slot], ...]]] = {}
        self.pinned: Counter[int] = Counter()
        self.now_ns = 0
        self.share = Share()
        self.tenants = False

    # Steps

    @initialize()
    def start(self) -> None:
        self.add_slots(5)

    @rule(path=PATHS, groups=st.integers(1, 2))
    def store_path(self, path: str, groups: int) -> None:
        """What engines mostly do; the single steps below do the rest."""
        for length in range(1, len(path) + 1):
            for group in range(groups):
                key = chain_of(path[:length]).key(group, length - 1)
                if self.manager.index.probe(key) is LookupResult.MISS:
                    self.grant(1)
                if None in self.granted.values():
                    self.begin(path[:length], group)
                    self.complete(ok=True, last=True)

    @rule(quota=st.none() | st.integers(0, 6), floor=st.integers(0, 3))
    def limit(self, quota: int | None, floor: int) -> None:
        """A tenant has the paths that begin with x."""
        self.share.quota_bytes = None if quota is None else quota * BYTES
        self.share.floor_bytes = floor * BYTES
        self.tenants = True
        self.manager.tend_tenants({TAG: self.share}, BYTES)

    @rule(count=st.integers(1, 3))
    def add_slots(self, count: int) -> None:
        first = max(self.slots, default=-1) + 1
        new = [Slot(number) for number in range(first, first + count)]
        if len(self.slots) + count <= SLOTS_MAX:
            self.manager.slots.add(new)
            self.slots.update(new)

    @rule(count=st.integers(1, 4))
    def grant(self, count: int) -> None:
        before, holes = self.generations.of(range(SLOTS_MAX)), self.manager.index.holes
        held = [e for lease, _ in self.open.values() for e in lease.entries]
        held = [entry for entry in held if self.manager.ready(entry.key) is entry]
        for slot in self.manager.prepare_store(count):
            assert slot not in self.granted
            assert self.generations[slot] != before[slot]
            self.granted[slot] = None
            self.content.pop(slot, None)
        assert self.manager.index.holes <= holes, "evicted a block with children"
        assert all(entry.state is State.READY for entry in held), "evicted a leased block"

    @precondition(lambda self: None in self.granted.values())
    @rule(path=PATHS, group=st.integers(0, 1))
    def begin(self, path: str, group: int) -> None:
        slot = next(slot for slot, key in reversed(self.granted.items()) if key is None)
        key = chain_of(path).key(group, len(path) - 1)
        self.manager.begin_store(key, parent_of(key), slot)
        self.granted[slot] = key

    @precondition(lambda self: any(self.granted.values()))
    @rule(ok=st.booleans(), last=st.booleans())
    def complete(self, *, ok: bool, last: bool) -> None:
        writing = [(slot, key) for slot, key in self.granted.items() if key is not None]
        slot, key = writing[-1 if last else 0]
        del self.granted[slot]
        was_ready = self.manager.index.probe(key) is LookupResult.HIT
        parent = parent_of(key)
        reachable = parent is None or self.manager.index.probe(parent) is LookupResult.HIT
        outcome = self.manager.complete_store(slot, ok=ok)
        if not ok:
            assert outcome is StoreOutcome.FAILED
        elif was_ready:
            assert outcome is StoreOutcome.DUPLICATE
        else:
            assert outcome is (StoreOutcome.STORED if reachable else StoreOutcome.ORPHAN)
        if outcome is StoreOutcome.STORED:
            self.content[slot] = key

    @rule(count=st.integers(1, 3))
    def give_back(self, count: int) -> None:
        for slot in list(self.granted)[:count]:
            self.manager.give_back([slot])
            del self.granted[slot]

    @rule(target=leases, path=PATHS, time=st.integers(1, 5), owner=st.integers(1, 2))
    def load(self, path: str, time: int, owner: int) -> int:
        chain = chain_of(path)
        expected = self.brute_force(chain)
        assert self.manager.lookup(chain, chain.blocks) == expected
        lease = self.manager.prepare_load(chain, chain.blocks, owner, self.now_ns + time)
        if lease is None:
            return 0
        held = []
        for group, hit in enumerate(lease.groups):
            for index, slot in zip(hit.indices, hit.slots, strict=True):
                held.append((chain.key(group, index), Slot(slot)))
        self.open[lease.lease_id] = (lease, tuple(held))
        return lease.lease_id

    @rule(lease_id=leases, damage=st.integers(0, 3))
    def end_load(self, lease_id: int, damage: int) -> None:
        found = self.open.pop(lease_id, None)
        if found is not None:
            lease, held = found
            bad = {slot for _, slot in held[:damage]}
            assert self.manager.complete_load(lease.lease_id, bad)
            assert not self.manager.complete_load(lease.lease_id, bad)
            for key, slot in held[:damage]:
                entry = self.manager.index.get(key)
                assert entry is None or entry.slot != slot or entry.state is State.WRITING

    @rule(ns=st.integers(1, 4))
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns
        late = {
            number for number, (lease, _) in self.open.items() if lease.deadline_ns <= self.now_ns
        }
        assert set(self.manager.expire(self.now_ns)) == late
        for number in late:
            del self.open[number]

    @rule(target=pins, path=PATHS, group=st.integers(0, 1))
    def pin(self, path: str, group: int) -> Entry | None:
        entry = self.manager.pin(chain_of(path).key(group, len(path) - 1))
        if entry is not None:
            self.pinned[id(entry)] += 1
        return entry

    @rule(entry=pins)
    def unpin(self, entry: Entry | None) -> None:
        if entry is not None and self.pinned[id(entry)]:
            self.pinned[id(entry)] -= 1
            self.manager.unpin([entry], used=False)

    @rule(path=PATHS, group=st.integers(0, 1))
    def drop(self, path: str, group: int) -> None:
        self.manager.drop(chain_of(path).key(group, len(path) - 1), "clear")

    @rule()
    def clear(self) -> None:
        self.manager.clear()
        assert not len(self.manager.index)

    @precondition(lambda self: self.manager.clearing)
    @rule(count=st.integers(1, 3))
    def clear_some(self, count: int) -> None:
        before = self.manager.evictions["clear"]
        self.manager.clear_some(count)
        assert 0 <= self.manager.evictions["clear"] - before <= count

    @precondition(lambda self: len(self.slots) > 4)
    @rule(count=st.integers(1, 4))
    def retire(self, count: int) -> None:
        wanted = sorted(self.slots)[-count:]
        if self.manager.retire_slots(wanted) == 0:
            self.slots.difference_update(wanted)
            for slot in wanted:
                self.content.pop(slot, None)

    # What must hold

    def brute_force(self, chain: Chain) -> Answer:
        def probe(group: int, index: int) -> LookupResult:
            return self.manager.index.probe(chain.key(group, index))

        return common_hit(RULES, probe, chain.blocks)

    @invariant()
    def no_slot_is_owned_twice_and_none_is_lost(self) -> None:
        manager = self.manager
        cleared = [entry for index in manager._cleared for entry in index]
        assert all(entry.state is State.READY for entry in cleared)
        ready = [e.slot for e in (*manager.index, *cleared) if e.state is State.READY]
        owned = [*manager.slots.free, *self.granted, *ready, *manager.slots.lingering]
        assert len(owned) == len(set(owned))
        assert set(owned) | manager.slots.retiring >= self.slots >= set(owned)
        in_use = {*self.granted, *ready, *manager.slots.lingering} & manager.slots.retiring
        assert manager.slots.total == len(owned) - len(in_use)
        assert not manager.slots.retiring & set(manager.slots.free)
        assert len(manager.slots.granted) == len(self.granted)

    @invariant()
    def pins_are_those_of_leases_and_transfers(self) -> None:
        pins = Counter(id(e) for lease, _ in self.open.values() for e in lease.pinned)
        for entry in self.manager.index:
            assert entry.pins == pins[id(entry)] + self.pinned[id(entry)]
        for lease, _ in self.open.values():
            for entry in lease.entries:
                assert entry.pins or entry.children, "what a lease names is held by no pin"
        assert len(self.manager.leases) == len(self.open)
        for owner in (1, 2):
            entries = [len(le.entries) for le, _ in self.open.values() if le.owner == owner]
            assert self.manager.leases.blocks_of(owner) == sum(entries)

    @invariant()
    def ready_blocks_hang_below_ready_blocks_or_there_is_a_hole(self) -> None:
        index = self.manager.index
        children = Counter(id(e.parent) for e in index if e.parent is not None)
        for entry in index:
            assert entry.state is State.READY or entry.slot in self.granted
            assert entry.children == children[id(entry)]
            name = parent_of(entry.key)
            above = None if name is None else index.get(name)
            if index.holes == 0:
                assert entry.parent is above
            if index.holes == 0 and name is not None and entry.state is State.READY:
                assert above is not None
                assert above.state is State.READY
        cut_off = {id(e.parent) for e in index if e.parent and e.parent.state is State.DROPPED}
        assert index.holes == len(cut_off)

    @invariant()
    def leased_bytes_are_what_the_lease_said(self) -> None:
        for lease, held in self.open.values():
            for key, slot in held:
                assert self.content[slot] == key
            for hit in lease.groups:
                assert list(hit.generations) == [self.generations[slot] for slot in hit.slots]

    @invariant()
    def what_can_go_does_go(self) -> None:
        """The policy knows every evictable block: list it, and compare."""
        policy = self.manager._policy
        orders: list[LeafLRU] = []
        if isinstance(policy, TenantOrder):
            orders += policy._orders.values()
            policy = policy._rest
        if isinstance(policy, SegmentedLRU):
            self._check_kept(policy)
            orders += policy, policy._kept
        elif isinstance(policy, PluginOrder):
            orders.append(policy)
            assert policy._entered <= set(self.manager.index)
        else:
            orders.append(policy)
        listed = set()
        for order in orders:
            root: Node = order._root
            at = root.next
            while at is not None and at is not root:
                if not isinstance(at, Mark):
                    found: Node | None = self.manager.index.get(at.key)
                    assert found is at, "in the order, and not in the index"
                    listed.add(id(at))
                at = at.next
        for entry in self.manager.index:
            if entry.state is State.READY and not entry.pins and not entry.children:
                assert id(entry) in listed

    def _check_kept(self, order: SegmentedLRU) -> None:
        """What is used is kept, with all above it; each counts those of its children that are."""
        below: Counter[int] = Counter()
        kept = [entry for entry in self.manager.index if entry.kept]
        for entry in kept:
            assert entry.state is State.READY
            below[id(entry.parent)] += 1
            above = entry.parent
            if not self.manager.index.holes:
                assert above is None or above.kept
        if not self.manager.index.holes:
            assert [entry.kept for entry in kept] == [1 + below[id(entry)] for entry in kept]
        assert order.kept == len(kept)

    @invariant()
    def tenants_have_what_is_counted(self) -> None:
        if self.tenants:
            ready = [e.key for e in self.manager.index if e.state is State.READY]
            has = sum(key.endswith(TAG) for key in ready) * BYTES
            assert self.share.used_bytes == has


ManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestManager = pytest.mark.slow(ManagerMachine.TestCase)


class SegmentedMachine(ManagerMachine):
    """The same with the other policy, either way."""

    policy = SEGMENTED

    @rule()
    def go_the_other_way(self) -> None:
        self.manager.slots.by_recency = not self.manager.slots.by_recency


SegmentedMachine.TestCase.settings = ManagerMachine.TestCase.settings
TestSegmented = pytest.mark.slow(SegmentedMachine.TestCase)
