"""Which of four ways to evict hits more, tried on a sample of what is asked for."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.eviction import LRU
from kvstore.core.manager import Manager
from kvstore.core.segmented import SEGMENTED
from kvstore.core.slots import Slots
from kvstore.core.trial import BLOCKS, Cache, Trial
from kvstore.core.types import BlockKey, Chain, Slot
from kvstore.replay import Request, Trace, replay
from kvstore.replay_policies import Arc
from kvstore.store import asked
from kvstore.store.asked import Asked
from kvstore.wire import engine as p
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, engine, eventually, store_settings

MEMORY = 4 * BLOCKS


def memory(blocks: int = MEMORY) -> Manager:
    return Cache(blocks, SEGMENTED).manager


def path(name: str, blocks: int) -> list[BlockKey]:
    return Chain(b"".join(hashes(blocks, name)), 32, 1).keys(0, blocks)


def in_turns(trial: Trial, paths: int, blocks: int) -> Iterator[None]:
    """Ask for each path once in every one of 40 rounds."""
    keys = [path(f"turn {number}", blocks) for number in range(paths)]
    for turn in range(40):
        for number in range(paths):
            trial.use(trial.sampled(keys[number]), turn * paths + number)
        yield


def used_again(trial: Trial, now_s: float, requests: int) -> None:
    """Ask for one of a few paths, or, three times as often, for one that never comes again."""
    chance = random.Random(1)
    for number in range(requests):
        again = chance.random() < 0.25
        name = f"again {chance.randrange(8)}" if again else f"once {number}"
        trial.use(trial.sampled(path(name, 64)), now_s + number)


def test_Q64_memory_goes_by_recency_where_that_hits_more_and_back_where_it_does_not() -> None:
    slots = memory().slots
    trial = Trial(slots)
    used_again(trial, 0, 400)
    assert not slots.by_recency
    assert any(slots.by_recency for _ in in_turns(trial, 30, 64))
    used_again(trial, 10_000, 2_000)
    assert not slots.by_recency


def tried(
    monkeypatch: pytest.MonkeyPatch, *hits: int
) -> tuple[Slots, dict[int, int], Callable[[], None]]:
    """Return slots, what each way hits of 64 blocks, by its place, and what asks 2,000 times."""
    slots, found = memory().slots, dict(enumerate(hits))
    trial = Trial(slots)
    places = {id(cache): place for place, cache in enumerate(trial._caches)}
    monkeypatch.setattr(Cache, "use", lambda cache, _: (found[places[id(cache)]], 0))

    def ask() -> None:
        for _ in range(2_000):
            trial.use(path("any", 64), 0)

    return slots, found, ask


def test_Q64_a_difference_of_less_than_an_eighth_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, hits, ask = tried(monkeypatch, 10, 17, 10, 10)
    ask()
    assert not slots.by_recency
    hits[1] = 20
    ask()
    assert slots.by_recency


def popular(requests: int) -> list[Request]:
    """Few of many prompts have most uses, and each has an end of its own."""
    chance = random.Random(1)
    weights = [(number + 1) ** -0.5 for number in range(40)]
    prompts = chance.choices(range(40), weights, k=requests)
    ends = itertools.count(40 * 16, 8)
    return [
        Request([*range(16 * at, 16 * at + 16), *range(end := next(ends), end + 8)], 1000.0 * now)
        for now, at in enumerate(prompts)
    ]


def test_Q64_what_was_used_has_nearly_all_where_few_blocks_have_most_uses() -> None:
    """With 80 % it hit .537."""
    trace = Trace(popular(3000), 40 * 16 + 8 * 3000, 24 * 3000)
    default, arc = (replay(trace, 600, policy=which) for which in ("segmented", Arc))
    assert default.block_hit_ratio == pytest.approx(0.5933, abs=0.0001)
    assert default.block_hit_ratio > 0.95 * arc.block_hit_ratio


def test_Q64_a_difference_of_less_than_a_64th_keeps_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, hits, ask = tried(monkeypatch, 20, 10, 21, 20)
    ask()
    assert not slots.keeps_more
    hits[2] = 22
    ask()
    assert slots.keeps_more
    assert not slots.keeps_longer
    hits[0] = 26
    ask()
    assert not slots.keeps_more


def test_Q64_of_what_comes_back_in_turns_and_does_not_fit_a_part_stays() -> None:
    """LRU and ARC hit nothing: each prompt leaves just before its turn."""
    requests = [
        Request([*range(16 * at, 16 * at + 16)], 1000.0 * now)
        for now, at in enumerate([*range(60)] * 20)
    ]
    trace = Trace(requests, 60 * 16, 20 * 60 * 16)
    default, lru = (replay(trace, 480, policy=which) for which in ("segmented", LRU))
    assert lru.block_hit_ratio == 0
    assert default.block_hit_ratio == pytest.approx(0.3510, abs=0.0001)


def test_Q64_where_all_fits_both_ways_are_one_and_nothing_changes() -> None:
    slots = memory().slots
    trial = Trial(slots)
    assert not any(slots.by_recency for _ in in_turns(trial, 10, 64))
    assert not any(trial._more)


def test_Q64_a_sample_stands_for_memory_of_any_size() -> None:
    keys = [key for number in range(100) for key in path(f"{number}", 64)]
    for times, groups in ((1, 1), (4, 1), (16, 1), (8, 2)):
        chosen = Trial(memory(times * BLOCKS).slots, groups).sampled(keys)
        expected = len(keys) * groups / times
        assert expected * 0.8 < len(chosen) < expected * 1.2 or len(chosen) == len(keys) == expected
        assert [key for key in keys if key in set(chosen)] == chosen, "in their order"


@pytest.mark.parametrize(("blocks", "groups"), [(BLOCKS - 1, 1), (2 * BLOCKS - 1, 2)])
def test_Q64_a_small_memory_is_not_tried(blocks: int, groups: int) -> None:
    trial = Trial(memory(blocks).slots, groups)
    assert trial.sampled(path("any", 64)) == []
    trial.use([], 0)


def test_Q64_a_memory_that_becomes_small_keeps_what_was_used_again() -> None:
    manager = memory()
    trial = Trial(manager.slots)
    manager.slots.by_recency = True
    trial.use(trial.sampled(path("any", 64)), 0)
    assert manager.slots.by_recency
    assert manager.slots.odds
    manager.retire_slots([Slot(slot) for slot in range(BLOCKS - 1, MEMORY)])
    trial.use(trial.sampled(path("any", 64)), 0)
    assert not manager.slots.by_recency
    assert not manager.slots.odds


def test_Q64_a_trial_takes_memory_once_something_is_tried_and_no_more_with_each_request() -> None:
    slots = memory().slots
    keys = path("any", 8)
    tracemalloc.start()
    try:
        trials = [Trial(slots) for _ in range(100)]
        assert tracemalloc.get_traced_memory()[0] < 100 * 2_000
        trial = trials[0]
        for now_s in range(100):
            trial.use(keys, now_s)
        before = tracemalloc.get_traced_memory()[0]
        for now_s in range(1_000):
            trial.use(keys, now_s)
        assert tracemalloc.get_traced_memory()[0] < before + 10_000
    finally:
        tracemalloc.stop()


def test_Q64_blocks_on_credit_are_no_part_of_what_memory_can_hold() -> None:
    manager = memory(BLOCKS)
    trial = Trial(manager.slots)
    assert len(trial.sampled(path("any", 64))) == 64
    manager.prepare_store(1)
    assert trial.sampled(path("any", 64)) == []


def test_Q64_where_requests_are_handed_over_it_is_tried_so() -> None:
    slots = memory().slots
    trial = Trial(slots)
    slots.hands_over = True
    trial.use(path("any", 8), 0)
    assert all(cache.manager.slots.hands_over for cache in trial._caches)


def test_Q64_a_store_tries_each_prompt_once_and_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "TURN_BLOCKS", 3)
    with LiveStore(store_settings(tmp_path)) as store, engine(store) as live:
        live.ask(hashes(1, "other"))
        namespace = store.server.store.sessions["engine"].namespace
        assert namespace is not None
        trial = namespace.trial
        assert trial is not None
        eventually(lambda: not store.server.store.asked.waits)
        tried: list[list[BlockKey]] = []
        monkeypatch.setattr(trial, "sampled", list)
        monkeypatch.setattr(trial, "use", lambda keys, _now_s: tried.append(keys))
        waiting = Asked()
        for name in ("one", "two"):
            chain = hashes(8, name)
            waiting.note(namespace, p.Lookup(1, b"".join(chain), len(chain[0])))
        while waiting.waits:
            waiting.feed()
    assert tried == [path("one", 8), path("two", 8)]
