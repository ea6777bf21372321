"""What takes longer to load than to compute is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import cast

import pytest

from connectors.compute_pace import ComputePace
from kvstore.core.load_paces import LoadPaces
from kvstore.core.pace import Pace
from kvstore.core.tier import TierContext
from kvstore.core.tiering import Found, Tiering
from kvstore.core.types import Chain, GroupRule, JobKind, TransferJob
from kvstore.store.load_or_compute import ENDS_MAX, LOOKS_MAX, worth_loading
from kvstore.wire import engine as p
from tests.harness.fakes import Engine, Town, blocks, hashes, settings
from tests.harness.paced_tier import PacedTier
from tests.harness.script import Request, Script

MS = 1_000_000
SLOW, QUICK = 20 * MS, MS // 10  # ns, that a block is read in
COMPUTED = 2 * MS  # likewise computed


class Street:
    """A town whose blocks leave memory for tiers of a given pace."""

    def __init__(self, *rules: GroupRule, **paces: int) -> None:
        """paces: ns that a tier reads a block in, by its name; the first is asked first."""
        self._groups = len(rules) or 1
        made = [(name, partial(self._make, pace)) for name, pace in paces.items()]
        self.town = Town(settings(policy="lru", promote="60s", leased="100%"), tiers=made)
        self.live: Engine = self.town.attach(rules=rules)
        self.tiers = {tier.name: cast("PacedTier", tier) for tier in self.town.tiers}

    def _make(self, block_ns: int, context: TierContext) -> PacedTier:
        tier = PacedTier(context)
        tier.block_ns, tier.clock = block_ns, lambda: self.town.now_ns
        return tier

    @property
    def tiering(self) -> Tiering:
        (namespace,) = self.town.store.namespaces.values()
        return namespace.tiering

    def put(self, chain: list[bytes]) -> list[bytes]:
        """Store a chain; then other blocks, until it is in the lower tiers only."""
        self.live.put(chain, groups=self._groups)
        for _ in range(40):
            self.live.put([random.randbytes(32)], groups=self._groups)
        return chain

    def load(self, chain: list[bytes]) -> int:
        """Read whatever is there of a chain, until it is in memory; count the blocks."""
        found = self.live.hit(chain)
        while self.tiering.coming:
            self.town.tick(5)
        self.live.step(release=(found.lease,))
        return len(blocks(found))

    def hit(self, chain: list[bytes]) -> p.Granted:
        """Answer an engine that says how fast it is; it does not keep what it gets."""
        found = self.live.hit(chain, block_ns=COMPUTED)
        self.live.step(release=(found.lease,))
        return found

    def measured(self, count: int = 3) -> None:
        """Load some chains, so that it is known how long that takes."""
        for number in range(count):
            chain = self.put(hashes(3 + number, f"measured {number}"))
            assert self.load(chain) == len(chain)


# The store's side


def test_O21_what_takes_longer_to_load_than_to_compute_is_not_loaded() -> None:
    street = Street(disk=SLOW)
    street.measured()
    chain = street.put(hashes(6))
    found = street.hit(chain)
    assert blocks(found) == []
    assert found.missed == ("too_slow", 6)
    assert street.load(chain) == 6, "an engine that does not say how fast it is"


def test_O21_an_engine_that_has_computed_too_little_goes_by_what_another_one_took() -> None:
    street = Street(disk=SLOW)
    street.measured()
    chain = street.put(hashes(6))
    other = street.town.attach("other")
    for found in (other.hit(chain, block_ns=0), other.hit(chain)):
        assert len(blocks(found)) == 6, "no engine has said how fast it is"
        while street.tiering.coming:
            street.town.tick(5)
        other.step(release=(found.lease,))
    street.hit(hashes(1, "any"))
    chain = street.put(hashes(6, "second"))
    found = other.hit(chain, block_ns=0)
    assert found.missed == ("too_slow", 6)
    found = other.hit(chain, block_ns=1000 * SLOW)
    assert len(blocks(found)) == 6, "what it says itself counts"


def test_O21_what_loads_sooner_is_loaded() -> None:
    street = Street(disk=QUICK)
    street.measured()
    assert len(blocks(street.hit(street.put(hashes(6))))) == 6


def test_O21_before_anything_is_measured_all_is_loaded() -> None:
    street = Street(disk=SLOW)
    assert len(blocks(street.hit(street.put(hashes(6))))) == 6


def test_O21_a_load_is_cut_to_the_part_that_pays() -> None:
    street = Street(disk=QUICK, attic=SLOW)
    disk, attic = street.tiers["disk"], street.tiers["attic"]
    for number in range(3):
        for own, other in ((disk, attic), (attic, disk)):
            chain = street.put(hashes(3 + number, f"{own.name} {number}"))
            other.clear()
            assert street.load(chain) == len(chain)
    chain = street.put(hashes(8))
    disk.discard([Chain(b"".join(chain), 32, 1, b"").key(0, at) for at in range(5, 8)])
    found = street.hit(chain)
    assert blocks(found) == [0, 1, 2, 3, 4]
    assert found.missed == ("too_slow", 8)


def test_O21_a_slow_tier_with_the_last_blocks_of_a_window_is_read_where_that_saves_all() -> None:
    """Without them there is no hit, though they alone are computed sooner than read."""
    street = Street(GroupRule(), GroupRule(2), disk=QUICK, attic=SLOW)
    disk, attic = street.tiers["disk"], street.tiers["attic"]
    for number in range(3):
        for other in (attic, disk):
            chain = street.put(hashes(3 + number, f"{other.name} {number}"))
            other.clear()
            assert street.load(chain) == len(chain)
    for count, there in ((14, 14), (8, 0)):  # two blocks are read in as long as ten are computed
        chain = street.put(hashes(count, f"of {count}"))
        window = [Chain(b"".join(chain), 32, 2, b"").key(1, at) for at in range(count)]
        disk.discard(window)
        attic.discard(window[:-2])
        found = street.live.hit(chain, block_ns=SLOW // 5)
        assert len(blocks(found)) == there
        assert found.missed == (("", 0) if there else ("too_slow", count))
        street.live.step(release=(found.lease,))


def test_O21_blocks_in_memory_are_used_and_those_below_them_left() -> None:
    street = Street(disk=SLOW)
    street.measured()
    chain = street.put(hashes(8))
    street.load(chain[:3])
    found = street.hit(chain)
    assert blocks(found) == [0, 1, 2]
    assert found.missed == ("too_slow", 8)


def test_O21_a_queue_counts() -> None:
    street = Street(disk=MS)
    street.measured()
    first = street.put(hashes(24, "first"))
    chain = street.put(hashes(8))
    assert len(blocks(street.hit(chain))) == 8
    while street.tiering.coming:
        street.town.tick(1)
    street.put(hashes(1, "others"))
    street.live.ask(first)  # 24 ms of reading
    street.town.tick()
    found = street.hit(chain)
    assert (blocks(found), found.missed) == ([], ("too_slow", 8)), "8 are computed in 16 ms"


def test_O21_a_load_of_another_request_that_takes_long_is_not_waited_for() -> None:
    street = Street(disk=SLOW)
    street.measured()
    chain = street.put(hashes(6))
    assert len(blocks(street.live.hit(chain))) == 6
    assert street.tiering.coming
    assert blocks(street.hit(chain)) == []
    street.town.tick(3 * SLOW // MS)
    assert blocks(street.hit(chain)) == [], "three more blocks take 60 ms"
    street.town.tick(3 * SLOW // MS - 5)
    assert len(blocks(street.hit(chain))) == 6, "it is there in 5 ms"


def test_O21_a_load_of_before_a_clear_brings_nothing() -> None:
    """Its blocks were stored again, and taken for coming (simulation, seed 13701)."""
    street = Street(disk=SLOW)
    street.measured()
    chain = street.put(hashes(6))
    street.live.hit(chain)
    assert street.tiering.coming
    street.town.store.namespaces.clear_blocks()
    street.live.put(chain)
    assert street.tiering.coming, "what was read before the clear is still being read"
    found = street.hit(chain)
    assert (blocks(found), found.missed) == ([0, 1, 2, 3, 4, 5], ("", 0))
    assert found.sources == {}


def test_O21_a_load_that_is_late_is_taken_for_slow() -> None:
    street = Street(disk=QUICK)
    street.measured()
    chain = street.put(hashes(6))
    street.tiers["disk"].block_ns = 100 * SLOW
    assert len(blocks(street.hit(chain))) == 6
    street.town.tick(5)
    assert len(blocks(street.hit(chain))) == 6, "it may end soon"
    street.town.tick(20)
    assert blocks(street.hit(chain)) == []


def test_O21_a_slow_tier_is_measured_now_and_then_and_used_once_it_is_quick() -> None:
    street = Street(disk=SLOW)
    street.measured()
    submitted: list[int] = []
    disk = street.tiers["disk"]
    submit = disk.submit

    def counted(job: TransferJob) -> None:
        submitted.append(len(job.keys) if job.kind is JobKind.LOAD else 0)
        submit(job)

    disk.submit = counted  # type: ignore[method-assign]
    disk.block_ns = QUICK
    chains = [street.put(hashes(4, f"chain {number}")) for number in range(16)]
    began_ns = street.town.now_ns
    for number in range(100):
        if blocks(street.hit(chains[number % len(chains)])):
            break
        street.town.tick(1)
        street.town.tick(199)
    assert 1 <= number <= 90
    seconds = (street.town.now_ns - began_ns) / 1e9
    assert sum(map(bool, submitted[:-1])) <= seconds + 1


def test_O21_a_slow_tier_is_measured_for_a_twentieth_of_the_time() -> None:
    street = Street(disk=SLOW)
    street.measured()
    chains = [street.put(hashes(4, f"chain {number}")) for number in range(40)]
    loaded = street.tiering.counts["disk", "loaded"]
    for number in range(1000):
        street.hit(chains[number % len(chains)])
        street.town.tick(20)
    loaded = street.tiering.counts["disk", "loaded"] - loaded
    assert 0.02 <= loaded * SLOW / (1000 * 20 * MS) <= 0.06


def test_O21_a_slow_place_is_read_again_within_a_minute() -> None:
    """Whatever made it slow may have gone, and nothing but a load shows that."""
    loads = LoadPaces()
    loads.began("disk", 1000)
    loads.ended("disk", 1000, 1000, 10**12)
    assert not loads.too_slow("disk", 1000, 10**9, 0), "nobody has tried"
    assert loads.too_slow("disk", 1000, 10**9, 59 * 10**9)
    assert not loads.too_slow("disk", 1000, 10**9, 60 * 10**9)


def test_O21_a_place_that_has_become_quick_is_taken_for_quick_after_one_load() -> None:
    loads = LoadPaces()
    for count, took_ns in ((640, 64 * 10**9), (1280, 128 * 10**9)):
        loads.began("disk", count)
        loads.ended("disk", count, count, took_ns)
    assert loads.wait_ns("disk", 10) == pytest.approx(10**9, rel=0.1)
    assert loads.too_slow("disk", 10, 10**8, 0) is False, "tried"
    loads.began("disk", 10)
    assert loads.too_slow("disk", 10, 10**8, 10**12), "not twice at one time"
    loads.ended("disk", 10, 10, 10**7)
    assert loads.wait_ns("disk", 10) == pytest.approx(10**7, rel=0.1)


def test_O21_what_was_measured_of_little_does_not_speak_of_much() -> None:
    """All of it may have been the start: of a connection, say."""
    pace = Pace()
    pace.note(1, 1.0)
    assert pace.seconds(1) == pace.seconds(1000) == pytest.approx(1)
    for _ in range(20):
        pace.note(10, 1.01)
    assert pace.seconds(10) == pytest.approx(1.01, rel=0.05)
    assert pace.seconds(1000) < 1.2


class Counted(list[Found]):
    walks = 0

    def __iter__(self) -> Iterator[Found]:
        self.walks += 1
        return super().__iter__()


def test_O21_a_hit_with_many_holes_is_compared_at_few_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    street = Street(disk=QUICK)
    street.measured()
    asked = 0
    wait_ns = LoadPaces.wait_ns

    def counted(loads: LoadPaces, tier: str, count: int) -> int:
        nonlocal asked
        asked += 1
        return wait_ns(loads, tier, count)

    monkeypatch.setattr(LoadPaces, "wait_ns", counted)
    (namespace,) = street.town.store.namespaces.values()
    (disk,) = street.town.tiers
    below = Counted(Found(0, at, at + 1, disk, disk.name) for at in range(0, 2000, 2))
    chain = Chain(random.randbytes(32 * 2000), 32, 1, b"")
    assert worth_loading(namespace, chain, 2000, below, COMPUTED, street.town.now_ns) == 2000
    assert asked <= ENDS_MAX + 1
    assert below.walks <= 4 + LOOKS_MAX // 1000


# The engine's side


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def run(pace: ComputePace, clock: Clock, tokens: int, ms: float) -> None:
    pace.began([tokens])
    clock.now_ns += int(ms * MS)
    pace.ended()


def test_O21_an_engine_says_how_long_one_more_block_takes() -> None:
    clock = Clock()
    pace = ComputePace(clock)
    for tokens in (100, 300, 100, 100):
        assert pace.block_ns(16) == 0, "too little is known"
        run(pace, clock, tokens, 10 + tokens / 50)
        clock.now_ns += 10**9  # nothing to do
        pace.began(())
    for _ in range(100):
        run(pace, clock, 1, 10)
    assert pace.block_ns(16) == pytest.approx(16 * MS / 50, rel=0.05)


def test_O21_steps_that_were_scheduled_ahead_begin_when_the_one_before_has_ended() -> None:
    clock = Clock()
    pace = ComputePace(clock)
    pace.began([1000])
    for tokens in (2000, 1000, 3000):
        pace.began([tokens])  # while the one before computes
        pace.began(())
        clock.now_ns += 20 * MS + (1000 if tokens != 1000 else 2000) * MS // 50
        pace.ended()
    assert pace.block_ns(50) == pytest.approx(MS, rel=0.05)


def test_O21_steps_that_only_decode_say_nothing_of_computing() -> None:
    clock = Clock()
    pace = ComputePace(clock)
    for _ in range(100):
        pace.began([1] * 64)
        clock.now_ns += 10 * MS
        pace.ended()
    assert pace.block_ns(16) == 0
    for tokens in (600, 200):
        pace.began([*[1] * 64, tokens])
        clock.now_ns += 10 * MS + tokens * MS // 50
        pace.ended()
        for _ in range(500):
            pace.began([1] * 64)
            clock.now_ns += 10 * MS
            pace.ended()
    assert pace.block_ns(16) == pytest.approx(16 * MS / 50, rel=0.05)


def test_O21_lookups_say_it_once_the_engine_is_to_compare() -> None:
    script = Script()
    first, second, third = (Request(name, 1000, name) for name in ("a", "b", "c"))
    script.arrive(first)
    script.half.prefer_computing(ComputePace(script.client.clock))
    script.admit(first)
    script.step(first, 1000, [range(63)])
    script.half.on_new_request(second)
    assert [lookup.block_ns for lookup in script.lookups()] == [0], "its step goes on"
    script.now_ns += 100 * MS
    script.half.on_output({}, (), ())
    script.half.on_new_request(third)
    assert [lookup.block_ns for lookup in script.lookups()] == [1_600_000]


def test_O21_lookups_of_an_engine_that_is_to_load_in_any_case_say_nothing() -> None:
    script = Script()
    script.half.on_new_request(Request("a", 1000, "a"))
    assert [lookup.block_ns for lookup in script.lookups()] == [None]


# The line


def test_a_line_is_found_in_noise_and_follows_a_change() -> None:
    rng, pace = random.Random(1), Pace()
    for each in (0.002, 0.1, 0.002):
        for _ in range(80):
            amount = rng.randint(1, 64)
            pace.note(amount, (0.005 + amount * each) * rng.uniform(0.9, 1.1))
        assert pace.seconds(64) == pytest.approx(0.005 + 64 * each, rel=0.15)
    assert pace.line[:2] == pytest.approx((0.005, 0.002), rel=0.5)


def test_of_like_amounts_a_line_through_0_is_made() -> None:
    pace = Pace()
    assert pace.seconds(10) == 0
    for amount in (8, 8, 8):
        pace.note(amount, 0.016)
    assert pace.line[:2] == pytest.approx((0, 0.002))
    for amount, seconds in ((4, 0.030), (12, 0.010)):  # less for more: noise
        pace.note(amount, seconds)
    start, each, _ = pace.line
    assert start == 0
    assert each > 0
