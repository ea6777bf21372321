"""Every tier against the contract, and one from outside of this repository's packages at work."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from kvstore import config
from kvstore.core.errors import TierFull
from kvstore.core.leases import NEVER_NS, PINS
from kvstore.core.tier import SlotMemory, Tier, TierContext
from kvstore.core.tiering import Tiering
from kvstore.core.types import BlockKey, Chain, JobKind, JobResult, LookupResult, Slot
from kvstore.testing import (
    SLOT_BYTES,
    ArrayMemory,
    ReadOnlyTierContract,
    TierContract,
    content,
    finish,
    key,
)
from kvstore.wire import engine as p
from tests.harness.fakes import Engine, HeapPool, Town, blocks, from_u32, hashes, keys_of, settings
from tests.harness.handover_pair import Pair
from tests.harness.live import LiveStore, engine, eventually, store_settings
from tests.harness.pages import write_modules
from tests.reference.faulty_tier import FaultyTier
from tests.reference.memory_tier import MemoryTier


@pytest.fixture
def folder_tier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tier of docs/how-to/write-a-tier.md; what an operator does with PYTHONPATH or pip."""
    write_modules(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


class TestMemoryTier(TierContract):
    """The reference."""

    @pytest.fixture
    def tier(self, context: TierContext) -> Iterator[Tier]:
        made = MemoryTier(context)
        yield made
        made.close()

    def test_a_full_tier_fails_the_rest_of_a_job_and_says_so(
        self, context: TierContext, memory: ArrayMemory
    ) -> None:
        small = MemoryTier(TierContext("small", "n", context.slot_bytes, memory, {"blocks": 2}))
        memory.view(Slot(0))[:] = content(1)
        small.submit(self.job(1, JobKind.STORE, [1, 2, 3], [0, 1, 2]))
        (result,) = finish(small, 1)
        assert (result.done, type(result.error)) == (2, TierFull)


class TestFaultyTier(TierContract):
    """Without failures the wrapper keeps the contract: it only delays and reorders."""

    @pytest.fixture
    def tier(self, context: TierContext) -> Iterator[Tier]:
        made = FaultyTier(MemoryTier(context), random.Random(1), fail_ratio=0.0)
        yield made
        made.close()


class PeerTier:
    """Another store as a tier: a consumer, and the pair of stores that moves when it is polled."""

    def __init__(self, memory: SlotMemory) -> None:
        self.pair = StockedPair(memory)
        self.consumer = self.pair.consumer
        self.name = self.consumer.name

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a verb of the consumer
        return getattr(self.consumer, name)

    def poll(self) -> Sequence[JobResult]:
        self.pair.advance()
        return self.consumer.poll()


class StockedPair(Pair):
    """Two stores, of which the decode store's slots are the contract's."""

    def __init__(self, memory: SlotMemory) -> None:
        super().__init__()
        self.memory = memory

    @property
    def target(self) -> Any:  # noqa: ANN401 - as much of a namespace as the consumer's work uses
        return self.memory

    def advance(self) -> None:
        """Let a turn pass without the decode store, which would take the results."""
        self.wire.step()
        self.giver.tick(1)
        self.prefill.pump()
        self.producer.tick(self.giver.now_ns)
        self.consumer.tick(self.giver.now_ns)

    def offer(self, numbers: Sequence[int]) -> None:
        """Have the prefill store hold these blocks, and the decode store ask for them."""
        for number in numbers:
            if self.source.manager.ready(key(number)) is None:
                self.source.view(Slot(self.prefill.credits[0]))[:] = content(number)
                self.prefill.put([number.to_bytes(32, "big")])
        fetch = self.want([number.to_bytes(32, "big") for number in numbers])
        while self.consumer.offered(fetch) is None:
            self.advance()


class TestPeerTier(ReadOnlyTierContract):
    """A peer is read, and never written to."""

    @pytest.fixture
    def tier(self, memory: SlotMemory) -> Iterator[Tier]:
        made = PeerTier(memory)
        yield made
        made.close()

    def stock(self, tier: Tier, memory: SlotMemory, numbers: Sequence[int]) -> None:
        del memory
        assert isinstance(tier, PeerTier)
        tier.pair.offer(numbers)


class Repeats(MemoryTier):
    def poll(self) -> Sequence[JobResult]:
        return [result for result in super().poll() for _ in range(2)]


class Flips(MemoryTier):
    def poll(self) -> Sequence[JobResult]:
        self._blocks = {name: block[:-1] + b"?" for name, block in self._blocks.items()}
        return super().poll()


class Spills(MemoryTier):
    def poll(self) -> Sequence[JobResult]:
        self._memory.view(Slot(20))[:1] = b"?"
        return super().poll()


class Keeps(MemoryTier):
    def discard(self, keys: Collection[BlockKey]) -> None:
        """Forget nothing."""

    def clear(self) -> None:
        """Forget nothing."""


class Stays(MemoryTier):
    def close(self) -> None:
        """Go on."""


class Wears(MemoryTier):
    def lookup(self, key: BlockKey) -> LookupResult:
        found = super().lookup(key)
        self.discard([key])
        return found


class Invents(MemoryTier):
    def poll(self) -> Sequence[JobResult]:
        return [JobResult(result.job_id, result.done, None) for result in super().poll()]


BROKEN: dict[type[MemoryTier], str] = {
    Repeats: "test_each_job_is_reported_exactly_once",
    Flips: "test_a_block_that_is_here_is_a_hit_and_comes_back_byte_for_byte",
    Spills: "test_a_load_touches_no_other_slot",
    Keeps: "test_O17_clear_forgets_every_block",
    Stays: "test_O17_a_closed_tier_moves_no_bytes",
    Wears: "test_O5_a_lookup_changes_no_answer",
    Invents: "test_O15_a_load_of_an_unknown_block_fails_in_its_result",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_the_contract_fails_a_tier_that_breaks_it(kind: type[MemoryTier]) -> None:
    failed = []
    for name in (name for name in dir(TierContract) if name.startswith("test_")):
        memory, contract = ArrayMemory(), TierContract()
        tier = kind(TierContext("broken", "n", SLOT_BYTES, memory, {}))
        check = getattr(contract, name)
        given = {"tier": tier, "memory": memory}
        try:
            check(**{needed: given[needed] for needed in signature(check).parameters})
        except AssertionError:
            failed.append(name)
    assert BROKEN[kind] in failed
    assert "test_the_name_is_a_metric_label" not in failed


# In the store


def with_folder(folder: Path) -> config.Config:
    options = {"path": f"{folder}/blocks"}
    tier = {"class": "folder_tier:FolderTier", "name": "directory", "options": options}
    return store_settings(folder, engine={"defer": "10s"}, tier=[tier])


def stored(folder: Path) -> list[Path]:
    return list(folder.rglob("*.block"))


@pytest.mark.usefixtures("folder_tier")
def test_a_tier_named_in_the_settings_serves_what_memory_has_let_go(tmp_path: Path) -> None:
    chain = hashes(4, "wanted")
    with LiveStore(with_folder(tmp_path)) as store, engine(store) as live:
        (namespace,) = store.server.store.namespaces.values()
        assert namespace.manager.slots.total == 15
        live.put(chain)
        folder = tmp_path / "blocks"
        for number in range(20):  # memory has room for 15
            live.put(hashes(1, f"other{number}"))
            eventually(lambda: len(stored(folder)) == 5 + number)  # noqa: B023 - asked at once
        eventually(lambda: not store.server.store.busy)  # and no block is pinned any more
        granted = live.ask(chain)
        assert granted.sources == {"directory": 4}
        assert live.read(granted) == [live.content(block) for block in chain]
        again = live.ask(chain)
        assert (again.sources, blocks(again)) == ({}, [0, 1, 2, 3])  # it is in memory now
        live.read(again)
    with LiveStore(with_folder(tmp_path)) as store, engine(store) as live:  # after a restart
        granted = live.ask(chain)
        assert granted.sources == {"directory": 4}
        assert live.read(granted) == [live.content(block) for block in chain]


def drop_from_memory(town: Town) -> None:
    manager = next(iter(town.store.namespaces.values())).manager
    for entry in list(manager.index):
        manager.drop(entry.key, "test")
    assert len(manager.index) == 0


def shelved(count: int, **of_engine: object) -> tuple[Town, Engine, list[bytes]]:
    """A store, its engine, and a chain of blocks that only the lower tier has."""
    town = Town(settings(**of_engine), tiers=[("shelf", MemoryTier)])
    live, chain = town.attach(credit_slots=2), hashes(count)
    live.put(chain)
    drop_from_memory(town)
    return town, live, chain


def test_M1_an_answer_names_the_tier_that_each_block_came_from() -> None:
    town, live, chain = shelved(4)
    live.put(chain[:1])
    ask = live.ask(chain)
    town.settle(live)
    assert live.granted[ask].sources == {"shelf": 3}
    assert blocks(live.granted[ask]) == [0, 1, 2, 3]


def test_O15_what_does_not_arrive_is_left_out_of_the_next_answer() -> None:
    town, live, chain = shelved(4)
    (tier,) = town.tiers
    ask = live.ask(chain)
    tier.discard(keys_of(chain[2:]))
    town.settle(live)
    assert blocks(live.granted[ask]) == [0, 1, 2, 3]
    assert live.granted[ask].sources == {"shelf": 4}
    again = live.ask(chain, memory_only=True)
    town.settle(live)
    assert blocks(live.granted[again]) == [0, 1]
    assert live.granted[again].sources == {}


def test_a_question_about_memory_only_starts_no_reading() -> None:
    town, live, chain = shelved(4)
    live.put(chain[:1])
    ask = live.ask(chain, memory_only=True)
    assert not town.store.busy
    live.ask(chain)
    assert town.store.busy
    coming = live.ask(chain, memory_only=True)
    town.settle(live)
    assert blocks(live.granted[ask]) == [0]
    assert blocks(live.granted[coming]) == [0], "blocks on their way are not in memory yet"


def test_O17_a_copy_under_way_at_a_clear_does_not_come_back() -> None:
    town = Town(tiers=[("shelf", MemoryTier)])
    live, chain = town.attach(), hashes(2)
    (name,) = keys_of(chain[:1])
    live.report(0, [live.credits.pop(0)], [name], [b""])
    town.tick()  # it is ready, and on its way to the shelf
    (tier,) = town.tiers
    assert tier.lookup(name) is LookupResult.PENDING
    town.say(town.connect(), p.Query("clear"))
    town.settle(live)
    assert tier.lookup(name) is LookupResult.MISS
    assert live.hit(chain).lease == 0
    live.put(chain)
    town.settle(live)
    assert tier.lookup(name) is LookupResult.HIT, "blocks stored after a clear are kept"


def test_O17_a_promotion_under_way_at_a_clear_does_not_come_back() -> None:
    town, live, chain = shelved(2)
    (tier,) = town.tiers
    poll, read = tier.poll, list[JobResult]()
    tier.poll = lambda: read.extend(poll()) or []  # type: ignore[method-assign,func-returns-value]
    ask = live.ask(chain)
    town.settle(live)
    granted = live.granted[ask]
    assert granted.sources == {"shelf": 2}
    town.say(town.connect(), p.Query("clear"))
    tier.poll = lambda: [read.pop()] if read else []  # type: ignore[method-assign]
    town.settle(live)
    namespace = next(iter(town.store.namespaces.values()))
    leased = from_u32(granted.hits[0].generations)
    found = [namespace.generations[slot] for slot in from_u32(granted.hits[0].slots)]
    assert found == [generation + 1 for generation in leased], (
        "a waiting worker sees the new generation"
    )
    assert live.hit(chain).lease == 0


def test_O20_what_an_engine_may_not_lease_now_is_not_read_either() -> None:
    town, live, chain = shelved(2, leased=3 * SLOT_BYTES)
    other = hashes(2, "other")
    live.put(other)
    drop_from_memory(town)
    live.hit(chain)
    town.settle(live)
    assert not town.store.busy
    ask = live.ask(other)
    assert not town.store.busy
    town.settle(live)
    assert live.granted[ask].capped


def test_O20_a_hit_waits_for_memory_that_other_requests_lease() -> None:
    town, live, chain = shelved(12, leased="100%")
    other, long = town.attach("another", credit_slots=2), hashes(20, "long")
    live.put(long)
    held = other.hit(long)
    assert held.lease
    (namespace,) = town.store.namespaces.values()
    for _ in range(2):
        ask = live.ask(chain)
        town.settle(live)
        assert live.granted[ask].capped, "28 slots, of which 20 are leased"
        assert not namespace.tiering.coming, "nothing is read for an answer that is not given"
    other.step(release=(held.lease,))
    town.settle(other)
    assert blocks(live.hit(chain)) == [*range(12)]


def test_O20_a_hit_does_not_wait_for_memory_that_stays_pinned() -> None:
    town, live, chain = shelved(12, leased="100%")
    long = hashes(20, "long")
    live.put(long)
    (namespace,) = town.store.namespaces.values()
    packed = Chain(b"".join(long), len(long[0]), 1, b"")
    assert namespace.manager.prepare_load(packed, 20, PINS, NEVER_NS)
    found = live.hit(chain)
    assert not found.capped
    assert 0 < len(blocks(found)) < 12


def test_O20_a_hit_longer_than_memory_does_not_wait_for_the_few_that_are_leased() -> None:
    town, live, chain = shelved(40, leased="100%")
    other = town.attach("another", credit_slots=2)
    live.put(hashes(2, "brief"))
    assert other.hit(hashes(2, "brief")).lease
    found = live.hit(chain)
    assert not found.capped
    assert 20 < len(blocks(found)) < 40


def test_a_tier_that_does_not_know_yet_is_waited_for_as_long_as_for_a_promotion() -> None:
    town, live, chain = shelved(4, defer="10ms", promote="1s")
    (tier,) = town.tiers
    real, unsure = tier.lookup, set(keys_of(chain[2:]))
    found = dict.fromkeys(unsure, LookupResult.RETRY)
    tier.lookup = lambda key: found.get(key) or real(key)  # type: ignore[method-assign]
    ask = live.ask(chain)
    town.tick(ms=500)
    live.pump()
    assert ask not in live.granted
    town.tick(ms=501)
    live.pump()
    assert blocks(live.granted[ask]) == [0, 1], "after the wait, the known blocks count"
    again = live.ask(chain)
    town.tick(ms=500)
    found.clear()
    town.tick(ms=100)
    live.pump()
    assert blocks(live.granted[again]) == [0, 1, 2, 3]


def test_a_hit_below_waits_for_memory_that_is_coming() -> None:
    """Found by an engine after a restart of its store: the first hits from disk found no slots."""
    before, chain = Town(pool=HeapPool(4, 8), tiers=[("shelf", MemoryTier)]), hashes(20)
    live = before.attach(credit_slots=8)
    live.put(chain)
    kept = before.tiers[0]
    assert isinstance(kept, MemoryTier)

    def make(context: TierContext) -> MemoryTier:
        tier = MemoryTier(context)
        tier._blocks = kept._blocks
        return tier

    town = Town(pool=HeapPool(4, 8), tiers=[("shelf", make)])
    live = town.attach(credit_slots=8)
    ask = live.ask(chain)
    town.settle(live, turns=20)
    assert blocks(live.granted[ask]) == list(range(20))
    assert live.granted[ask].sources == {"shelf": 20}


def test_a_question_that_waits_is_looked_at_less_and_less_often() -> None:
    town = Town(settings(defer="1s", promote="1s"), tiers=[("shelf", MemoryTier)])
    live, chain = town.attach(credit_slots=2), hashes(1)
    (tier,) = town.tiers
    asked = []
    tier.lookup = lambda key: asked.append(key) or LookupResult.RETRY  # type: ignore[func-returns-value,method-assign]
    live.ask(chain)
    for _ in range(900):
        town.tick(ms=1)
    assert 20 < len(asked) < 80


def test_lower_tiers_are_asked_once_about_what_only_they_have_and_not_about_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a look finds is what is read: an engine waits for the answer."""
    town, live, chain = shelved(24)
    live.put(chain[:16])
    (tier,), asked = town.tiers, Counter[BlockKey]()
    looked = tier.lookup

    def counted(key: BlockKey) -> LookupResult:
        asked[key] += 1
        return looked(key)

    monkeypatch.setattr(tier, "lookup", counted)
    live.ask(chain)
    deep = keys_of(chain[16:])
    assert [asked.pop(key) for key in deep] == [1] * 7 + [2], "the deepest for its recency, too"
    assert not asked
    town.settle(live)
    asked.clear()
    monkeypatch.setattr(Tiering, "promote", None)  # nothing to read: no block is looked at
    ask = live.ask(chain)
    assert asked == {deep[-1]: 1}
    town.settle(live)
    assert blocks(live.granted[ask]) == list(range(24))


def test_a_promotion_does_not_push_out_the_prefix_it_continues() -> None:
    town = Town(tiers=[("shelf", MemoryTier)])
    live, chain = town.attach(credit_slots=1), hashes(6)
    manager = next(iter(town.store.namespaces.values())).manager
    live.put(chain)
    drop_from_memory(town)
    live.put(chain[:3])
    number = 0
    while len(manager.slots.free):
        live.put(hashes(1, f"filler{(number := number + 1)}"))
    ask = live.ask(chain)
    town.settle(live)
    assert blocks(live.granted[ask]) == [0, 1, 2, 3, 4, 5]


def test_O15_a_lower_tier_that_loses_blocks_costs_hits_only() -> None:
    made: list[FaultyTier] = []

    def faulty(context: TierContext) -> Tier:
        made.append(FaultyTier(MemoryTier(context), random.Random(3), fail_ratio=0.5))
        return made[-1]

    town = Town(settings(defer="1s"), tiers=[("shelf", faulty)])
    live = town.attach()
    for number in range(30):
        chain = hashes(5, f"request{number % 7}")
        ask = live.ask(chain)
        for _ in range(20):
            town.settle(live)
        granted = live.granted[ask]
        found = blocks(granted)
        assert found == list(range(len(found)))
        if granted.lease:
            live.step(release=(granted.lease,))
        live.put(chain, first=len(found))
        if number % 3 == 0:
            drop_from_memory(town)
    town.store.namespaces.close()
    manager = next(iter(town.store.namespaces.values())).manager
    assert all(entry.pins == 0 for entry in manager.index)
    assert not town.store.busy
