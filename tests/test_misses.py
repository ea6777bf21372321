"""Why tokens missed, as a store says it, and as an engine counts it."""

from __future__ import annotations

import random

import pytest

from kvstore.core.types import BlockKey, GroupRule, LookupResult
from kvstore.wire import engine as p
from tests.harness.fakes import Engine, Town, blocks, hashes, keys_of, settings, value_of
from tests.harness.script import Request, Script
from tests.reference.memory_tier import MemoryTier

MS = 1_000_000
HALF = GroupRule(2)


def fill(live: Engine, count: int = 40) -> None:
    """Store other blocks until all that was there before is evicted."""
    for number in range(count):
        live.put(hashes(1, f"other{number}"))


# The store's side: the answer says why it ends where it does, and up to which block


def test_Q2_what_was_never_seen() -> None:
    town = Town()
    live = town.attach()
    live.put(chain := hashes(5)[:3])
    assert live.hit(chain).missed == ("", 0)
    assert live.hit(hashes(5)).missed == ("never_seen", 3)
    assert live.hit(hashes(2, "another")).missed == ("never_seen", 0)


def test_Q2_what_was_evicted_and_how_much_of_it() -> None:
    town = Town()
    live = town.attach()
    live.put(hashes(6))
    town.tick(5_000)
    fill(live, 25)  # 32 slots, of which some are credits: the end of the path has left
    here = len(blocks(found := live.hit(hashes(9))))
    assert 0 < here < 6
    assert found.missed == ("evicted", 6), "and the last three were never seen"
    fill(live)
    assert live.hit(hashes(9)).missed == ("evicted", 6)
    assert live.hit(hashes(6)).missed == ("evicted", 6)


def test_Q2_what_is_being_written() -> None:
    town = Town(settings(defer="100ms"))
    writer, reader = town.attach("writer", world=2), town.attach("reader", world=2)
    chain = hashes(4)
    writer.put(chain[:1])
    keys = keys_of(chain)
    writer.report(0, writer.credits[:2], keys[1:3], keys[:2])  # its other rank has not yet
    ask = reader.ask(chain)
    town.tick(200)
    town.settle(reader)
    assert reader.granted[ask].missed == ("pending", 3)


def test_Q2_what_was_not_stored() -> None:
    town = Town(settings(policy="lru"))
    live = town.attach()
    chain = hashes(4)
    live.put(chain[:1])
    keys = keys_of(chain)
    live.report(0, [live.credits.pop(0)], keys[1:2], keys[:1], ok=False)
    assert live.hit(chain).missed == ("not_stored", 2)
    live.step(unstored=tuple(keys[1:]))
    assert live.hit(chain).missed == ("not_stored", 4)
    live.put(chain, 1)
    live.step(release=(live.hit(chain).lease,))
    town.tick(2_000)
    fill(live)
    assert live.hit(chain).missed == ("evicted", 4), "the later of the two"


class Undecided(MemoryTier):
    """A tier that does not know yet what it has."""

    def lookup(self, _: BlockKey) -> LookupResult:
        return LookupResult.RETRY


def test_Q2_what_a_tier_was_asked_for_too_late() -> None:
    town = Town(settings(promote="1s"), tiers=[("shelf", Undecided)])
    live = town.attach()
    ask = live.ask(hashes(3))
    town.tick(1_500)
    town.settle(live)
    assert live.granted[ask].missed == ("too_late", 3)


def test_Q2_what_no_slot_was_free_for() -> None:
    town = Town(settings(leased="100%", promote="50ms"), tiers=[("shelf", MemoryTier)])
    live = town.attach()
    live.put(hashes(30))
    fill(live)
    held = [live.hit(hashes(1, f"other{number}")) for number in range(16, 40)]
    assert sum(map(bool, (each.lease for each in held))) > 20, "most slots are pinned"
    ask = live.ask(hashes(30))
    town.tick(100)
    town.settle(live)
    found = live.granted[ask]
    assert found.missed == ("no_slot", 30)
    assert len(blocks(found)) < 30


def test_Q2_what_the_limit_of_leases_keeps_back() -> None:
    town = Town(settings(leased="4KiB"))
    live = town.attach()
    live.put(hashes(3))
    live.put(hashes(3, "second"))
    assert live.hit(hashes(3)).lease
    found = live.hit(hashes(4, "second"))
    assert (found.capped, found.missed) == (True, ("lease_limit", 3))


def test_Q2_a_window_that_has_left_is_what_ends_a_hit() -> None:
    town = Town()
    live = town.attach(rules=(GroupRule(), HALF))
    chain = hashes(6)
    live.put(chain[:4], groups=2)
    assert live.hit(chain[:4]).missed == ("", 0)
    (namespace,) = town.store.namespaces.values()
    window = [block + b"\0\1" for block in chain]
    for key in window[:4]:
        assert namespace.manager.drop(BlockKey(key), "resize")
    assert live.hit(chain).missed[0] in ("evicted", "never_seen")
    assert live.hit(chain[:4]).missed == ("evicted", 4)


# How long ago it left


def test_Q64_memory_tells_parts_of_a_second_from_one_another() -> None:
    town = Town(settings())
    town.attach()
    (namespace,) = town.store.namespaces.values()
    before_s = namespace.manager.now_s
    town.tick(250)
    assert namespace.manager.now_s == pytest.approx(before_s + 0.25)


def test_Q3_ages_at_eviction_and_the_gap_to_the_next_lookup_are_measured() -> None:
    town = Town(settings(policy="lru"), tiers=[("shelf", MemoryTier)])
    live = town.attach()
    numbers = town.store.numbers
    town.tick(1_000_000)
    live.put(hashes(20))
    town.tick(100_000)
    granted = live.hit(hashes(20))
    live.step(release=(granted.lease,))
    town.tick(50_000)
    fill(live, 20)  # 20 blocks that are 150 s old, and were used 50 s ago

    def count(name: str, least: str, most: str) -> float:
        return value_of(numbers, name, most) - value_of(numbers, name, least)

    gone = value_of(numbers, "kvstore_evicted_age_seconds", "+Inf")
    assert gone == sum(n.manager.evictions["capacity"] for n in town.store.namespaces.values()) > 4
    assert count("kvstore_evicted_age_seconds", "60.0", "300.0") == gone
    assert count("kvstore_evicted_idle_seconds", "10.0", "60.0") == gone
    town.tick(20_000)
    live.hit(hashes(20))
    assert count("kvstore_evicted_gap_seconds", "10.0", "60.0") == 1, "a tier has it: no miss"
    live.hit(hashes(20, "never"))
    assert value_of(numbers, "kvstore_evicted_gap_seconds", "+Inf") == 1


# The engine's side: each token of an admitted request is a hit, or missed for one reason


def missed(script: Script) -> dict[str, int]:
    (found,) = [step.missed_tokens for step in script.steps() if step.lookup_tokens]
    return found


def admit(script: Script, request: Request, computed: int = 0) -> None:
    """Let a request run with what was found for it."""
    tokens, _ = script.matched(request, computed)
    table = [range(1, 2 + request.num_tokens // 16)] if tokens else ()
    script.half.update_state_after_alloc("r", table, tokens or 0)


@pytest.mark.parametrize(
    ("computed", "hits", "why", "expected"),
    [
        (0, [], ("evicted", 3), {"evicted": 48, "never_seen": 16, "tail": 6}),
        (0, [0, 1], ("evicted", 3), {"evicted": 16, "never_seen": 16, "tail": 6}),
        (0, [0, 1, 2, 3], ("", 0), {"tail": 6}),
        (32, [0], ("evicted", 3), {"evicted": 16, "never_seen": 16, "tail": 6}),
        (64, [], ("evicted", 3), {"tail": 6}),
        (0, [], ("never_seen", 0), {"never_seen": 64, "tail": 6}),
    ],
)
def test_Q2_an_engine_counts_each_token_under_one_reason(
    computed: int, hits: list[int], why: tuple[str, int], expected: dict[str, int]
) -> None:
    script, request = Script(), Request("r", 70)
    script.half.on_new_request(request)
    (lookup,) = script.lookups()
    script.answer(lookup.ask, hits, missed=why)
    admit(script, request, computed)
    assert missed(script) == expected


@pytest.mark.parametrize(("capped", "reason"), [(False, "too_late"), (True, "lease_limit")])
def test_Q2_what_was_given_up_was_too_late_or_over_the_limit(capped: bool, reason: str) -> None:
    script, request = Script(), Request("r", 70)
    script.half.on_new_request(request)
    for _ in range(100):
        for lookup in script.lookups():
            if capped:
                script.answer(lookup.ask, capped=True)
        if script.matched(request) == (0, False):
            break
        script.now_ns += 200 * MS
    script.half.update_state_after_alloc("r", (), 0)
    script.attach()
    assert missed(script) == {reason: 64, "tail": 6}


def test_Q2_without_a_store_its_absence_is_the_reason() -> None:
    script, request = Script(), Request("r", 70)
    script.client.detach("a test")
    script.half.on_new_request(request)
    admit(script, request)
    script.attach()
    assert missed(script) == {"no_store": 64, "tail": 6}


def test_Q2_a_request_that_another_connector_loads_is_counted_once() -> None:
    script, request = Script(beside=True), Request("r", 70)
    script.arrive(request, [])
    script.admit(request, 0)
    request.num_computed_tokens = 64  # the other one loads them, and then vLLM allocates again
    script.half.update_state_after_alloc("r", [range(1, 6)], 0)
    assert missed(script) == {"never_seen": 64, "tail": 6}


def test_Q2_blocks_that_found_no_slot_are_told_at_the_end_of_their_request() -> None:
    script, request = Script(credits=2), Request("r", 70)
    script.arrive(request)
    script.admit(request)
    script.step(request, 70, [range(1, 6)])
    script.half.request_finished("r", [range(1, 6)])
    (told,) = [step.unstored for step in script.steps() if step.unstored]
    assert list(told) == [script.key(request, 2), script.key(request, 3)]


@pytest.mark.parametrize("seed", range(4))
def test_Q2_hit_and_missed_tokens_are_all_that_was_looked_up(seed: int) -> None:
    """Random traffic, with answers of all kinds; the wire refuses a step that does not add up."""
    rng, script, asked = random.Random(seed), Script(credits=20), 0
    for number in range(60):
        request = Request(f"r{number}", rng.randint(1, 150), rng.choice("abc"))
        cut = rng.random() < 0.1
        if cut:
            script.client.detach("a test")
        script.half.on_new_request(request)
        blocks = request.num_tokens // 16
        for lookup in script.lookups():
            hit = range(rng.randint(0, blocks))
            why = (rng.choice(("evicted", "pending", "never_seen", "")), rng.randint(0, 12))
            if rng.random() < 0.9:
                script.answer(lookup.ask, hit, missed=why, capped=rng.random() < 0.1)
        computed = rng.randint(0, request.num_tokens - 1) // 16 * 16
        for _ in range(100):
            tokens, _ = script.matched(request, computed)
            if tokens is not None:
                break
            script.now_ns += 500 * MS
            script.attach()
        assert tokens is not None
        table = [range(1, 2 + request.num_tokens // 16)] if tokens else ()
        script.half.update_state_after_alloc(request.request_id, table, tokens)
        asked += request.num_tokens - computed
        script.attach()
        script.half.request_finished(request.request_id, table)
    script.steps()
    told = [step for step in script.sent if isinstance(step, p.Step)]
    assert sum(step.lookup_tokens for step in told) == asked
    reasons = {reason for step in told for reason in step.missed_tokens}
    assert reasons >= {"evicted", "pending", "never_seen", "tail", "too_late"}
