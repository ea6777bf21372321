"""What takes longer to fetch from another store than to compute is computed."""

from __future__ import annotations

import pytest

from kvstore.core.load_paces import TRY_EVERY
from kvstore.wire import engine as p
from tests.harness.fakes import blocks, hashes, keys_of
from tests.harness.handover_pair import Pair, stored
from tests.test_direct_fetch import asking, offered, reading

MS = 1_000_000
SLOW = 40  # turns of 1 ms that a message or a transfer takes
COMPUTED = 5 * MS  # a block


def fetched(pair: Pair, chain: list[bytes]) -> None:
    """Fetch blocks into the decode store, until they are there."""
    before = pair.arrived(chain)
    wait_offered(pair, chain)
    ask = pair.decode.ask(chain)
    while pair.arrived(chain) < len(chain):
        pair.run(1)
    assert before < len(chain)
    pair.decode.step(release=(pair.decode.granted[ask].lease,))
    pair.run(3 * SLOW)


def wait_offered(pair: Pair, chain: list[bytes], request: str = "") -> int:
    number = pair.want(chain, request=request)
    while pair.consumer.offered(number) is None:
        pair.run(1)
    return number


def answer(pair: Pair, chain: list[bytes]) -> p.Granted:
    """Answer an engine that computes a block in 5 ms."""
    return pair.decode.hit(chain, block_ns=COMPUTED)


@pytest.mark.parametrize("least", [0, SLOW])
def test_O21_what_a_slow_peer_has_is_computed_and_what_a_quick_one_has_is_fetched(
    least: int,
) -> None:
    pair, chain = stored(6)
    pair.wire.least = least
    fetched(pair, chain[:3])
    number = wait_offered(pair, chain)
    found = answer(pair, chain)
    if least:
        assert blocks(found) == [0, 1, 2]
        assert found.missed == ("too_slow", 6)
    else:
        assert blocks(found) == [0, 1, 2, 3, 4, 5]
    pair.consumer.claimed(number)
    pair.run(4 * SLOW)
    pair.decode.step(release=(found.lease,))


def test_O21_before_a_peer_is_measured_all_that_it_has_is_fetched() -> None:
    pair, chain = stored(3)
    pair.wire.least = SLOW
    wait_offered(pair, chain)
    assert len(blocks(answer(pair, chain))) == 3


def test_O21_a_slow_peer_is_measured_now_and_then_and_used_once_it_is_quick() -> None:
    pair, chain = stored(8)
    pair.wire.least = SLOW
    fetched(pair, chain[:3])
    pair.wire.least = 0
    tried = 0
    while tried < 100:
        tried += 1
        number = wait_offered(pair, chain)
        found = answer(pair, chain)
        pair.consumer.claimed(number)
        pair.decode.step(release=(found.lease,))
        if len(blocks(found)) == 8:
            break
        pair.run(200)
    assert 2 <= tried < 100


def test_O21_what_a_peer_still_computes_is_waited_for() -> None:
    pair, chain = stored(3)
    pair.wire.least = SLOW
    fetched(pair, chain)
    for request in ("first", "second"):
        new = hashes(3, request)
        pair.hand(request)
        number = wait_offered(pair, new, request)
        assert set((pair.consumer.offered(number) or {}).values()) == {"prefill"}
        found = answer(pair, new)
        assert len(blocks(found)) == 3, "what the first one took was mostly computing"
        pair.run(4 * SLOW)
        pair.put(new)
        while pair.arrived(new) < 3:
            pair.run(1)
        pair.decode.step(release=(found.lease,))


# Read by workers, into an engine


def test_O21_direct_a_slow_peer_is_left_and_tried_a_twentieth_of_the_time() -> None:
    pair, chain = stored(3)
    pair.wire.least = SLOW
    number = offered(pair, chain)
    pair.claim(number, [0, 1, 2])
    pair.run(SLOW)
    while len(pair.passed_on) < 3:
        pair.run(1)
    pair.read(number, [0, 1, 2])
    pair.run(3 * SLOW)
    assert pair.passed == dict.fromkeys([(number, 0), (number, 1), (number, 2)], True)

    consumer = pair.consumer

    def slow(saved_ns: int) -> bool:
        return consumer.paces.too_slow(fetch, [0, 1, 2], saved_ns, pair.taker.now_ns)

    fetch = offered(pair, chain)
    assert [slow(0), slow(0)] == [False, True], "tried once more"
    took_ns = next(ns for ns in range(0, 10**10, MS) if not slow(ns))
    assert SLOW * MS <= took_ns <= 6 * SLOW * MS
    pair.wire.least = 0
    pair.run(1, TRY_EVERY * took_ns // MS - 100)
    fetch = offered(pair, chain)
    assert slow(COMPUTED)
    pair.run(100)
    assert [slow(COMPUTED), slow(COMPUTED)] == [False, True]


def test_O21_direct_reads_that_failed_say_nothing_of_a_peers_pace() -> None:
    pair, chain = stored(3)
    pair.wire.least = SLOW
    number = reading(pair, chain)
    pair.run(2 * SLOW)
    pair.read(number, [0, 1])
    pair.read(number, [2], ok=False)
    pair.run(3 * SLOW)
    fetch = offered(pair, chain)
    assert not pair.consumer.paces.too_slow(fetch, [0, 1, 2], 0, pair.taker.now_ns)
    assert not pair.consumer.paces.too_slow(fetch, [0, 1, 2], 0, pair.taker.now_ns)


@pytest.mark.parametrize("slow", [False, True])
def test_O21_direct_what_workers_would_read_for_longer_is_left(slow: bool) -> None:
    offers = {0: "cpu", 1: "cpu", 2: "cpu"}
    others, engine = asking(offers, block_ns=COMPUTED, slow=slow)
    engine.town.settle(engine, turns=12)
    found = engine.granted[77]
    assert others.saved_ns == [3 * COMPUTED]
    if slow:
        assert blocks(found) == [0]
        assert found.missed == ("too_slow", 4)
        assert (others.read_, others.over) == ([], [1])
    else:
        assert [sorted(positions) for positions in others.read_] == [[0, 1, 2]]


# An engine that has computed too little to know its pace


def test_O21_a_peer_says_how_long_its_engine_computes_a_block() -> None:
    pair, chain = stored(3)
    assert pair.consumer.paces.block_ns(wait_offered(pair, chain)) == 0
    pair.prefill.hit(chain, block_ns=COMPUTED)
    number = wait_offered(pair, chain)
    assert pair.consumer.paces.block_ns(number) == COMPUTED
    pair.consumer.claimed(number)
    pair.run(SLOW)
    assert pair.consumer.paces.block_ns(number) == 0, "it is over"


@pytest.mark.parametrize(("own", "counts"), [(0, 3 * COMPUTED), (MS, 3 * MS), (None, None)])
def test_O21_an_engine_without_a_pace_of_its_own_goes_by_the_peers(
    own: int | None, counts: int | None
) -> None:
    offers = {0: "cpu", 1: "cpu", 2: "cpu"}
    others, engine = asking(offers, block_ns=own, computed_ns=COMPUTED, slow=True)
    engine.town.settle(engine, turns=12)
    found = engine.granted[77]
    assert others.saved_ns == ([] if counts is None else [counts])
    assert len(blocks(found)) == (4 if counts is None else 1)


# Lower tiers of the peer


@pytest.mark.parametrize(
    ("theirs", "its", "offered"),
    [
        (COMPUTED, 0, False),
        (0, COMPUTED, False),
        (None, COMPUTED, True),
        (2 * SLOW * MS, COMPUTED, True),
        (0, 0, True),
    ],
)
def test_O21_a_peer_does_not_offer_what_its_disk_reads_for_longer_than_it_takes_to_compute(
    theirs: int | None, its: int, offered: bool
) -> None:
    """theirs: as the engine that goes on says; its: as the one that computed the prompt does."""
    pair, chain = stored(6)
    below = keys_of(chain)[2:]
    for key in reversed(below):
        pair.source.manager.drop(key, "test")
    pair.source.tiering.loads.ended("shelf", 1, 1, SLOW * MS)
    pair.source.block_ns = its
    found = []
    for _ in range(2):
        number = pair.want(chain, block_ns=theirs)
        while (offers := pair.consumer.offered(number)) is None:
            pair.run(1)
        found.append(dict(offers))
        pair.consumer.claimed(number)
        pair.run(10)
    some = dict.fromkeys([0, 1], "cpu")
    everything = some | dict.fromkeys(range(2, 6), "shelf")
    assert found == [everything, everything if offered else some], "tried once"
    pair.run(1, TRY_EVERY * 4 * SLOW)
    number = pair.want(chain, block_ns=theirs)
    while (offers := pair.consumer.offered(number)) is None:
        pair.run(1)
    assert dict(offers) == everything, "and now and then"
