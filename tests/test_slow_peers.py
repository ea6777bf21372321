"""What takes longer to fetch from another store than to compute is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.core.load_paces import TRY_EVERY
from kvstore.core.types import GroupRule
from kvstore.handover.jobs import Job
from kvstore.wire import engine as p
from tests.harness.fakes import blocks, hashes, keys_of
from tests.harness.handover_pair import Pair, stored
from tests.test_direct_fetch import asking

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


# An engine that has computed too little to know its pace


def test_O21_a_peer_says_how_long_its_engine_computes_a_block() -> None:
    pair, chain = stored(6)
    pair.wire.least = SLOW
    fetched(pair, chain[:3])
    number = wait_offered(pair, chain)
    assert len(blocks(pair.decode.hit(chain, block_ns=0))) == 6, "nobody has said it"
    pair.consumer.claimed(number)
    pair.run(4 * SLOW)
    pair.prefill.hit(chain, block_ns=COMPUTED)
    more = [*chain, *hashes(4, "more")]
    pair.put(more)
    number = wait_offered(pair, more)
    assert (pair.target.block_ns, pair.target.peer_block_ns) == (0, COMPUTED)
    found = pair.decode.hit(more, block_ns=0)
    assert (len(blocks(found)), found.missed) == (6, ("too_slow", 10))
    pair.prefill.hit(chain, block_ns=MS)
    wait_offered(pair, more)
    assert pair.target.peer_block_ns == MS, "as it said last"
    pair.decode.hit(chain, block_ns=100 * SLOW * MS)
    number = wait_offered(pair, more)
    found = pair.decode.hit(more, block_ns=0)
    assert len(blocks(found)) == 10, "an engine of its own store counts more"


def test_O21_direct_what_a_peer_has_is_read_in_any_case() -> None:
    others, engine = asking({0: "cpu", 1: "cpu", 2: "cpu"}, block_ns=1)
    engine.town.settle(engine, turns=12)
    assert blocks(engine.granted[77]) == [0, 1, 2, 3]
    assert [sorted(positions) for positions in others.read_] == [[0, 1, 2]]
    assert others.wants[0].block_ns == 1


# Lower tiers of the peer


def measured(pair: Pair) -> None:
    """Have the prefill store know its shelf for slow, whatever that is here."""
    loads = pair.source.tiering.loads
    for count in (1, 4, 1, 4):
        loads.began("shelf", count)
        loads.ended("shelf", count, count, count * SLOW * MS)


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
    measured(pair)
    pair.source.block_ns = its
    found = []
    for _ in range(2):
        number = pair.want(chain, block_ns=theirs)
        while (offers := pair.consumer.offered(number)) is None:
            pair.run(1)
        found.append(dict(offers))
        pair.consumer.claimed(number)
        pair.run(10)
        measured(pair)
    some = dict.fromkeys([0, 1], "cpu")
    everything = some | dict.fromkeys(range(2, 6), "shelf")
    assert found == [everything, everything if offered else some], "tried once"
    pair.run(1, TRY_EVERY * 4 * SLOW + 10)
    number = pair.want(chain, block_ns=theirs)
    while (offers := pair.consumer.offered(number)) is None:
        pair.run(1)
    assert dict(offers) == everything, "and now and then"


def test_O21_a_peer_offers_all_that_a_request_which_still_runs_has() -> None:
    """Its engine may compute anew what the disk is too slow for, and the other one waits for it."""
    pair, chain = stored(6)
    for key in reversed(keys_of(chain)[2:]):
        pair.source.manager.drop(key, "test")
    measured(pair)
    pair.hand("runs")
    for _ in range(3):
        number = pair.want(chain, request="runs", block_ns=COMPUTED)
        while (offers := pair.consumer.offered(number)) is None:
            pair.run(1)
        assert len(offers) == 6
        pair.consumer.claimed(number)
        pair.run(10)
        measured(pair)


def test_O21_a_peer_counts_what_can_be_computed_up_to_the_first_block_that_nobody_has() -> None:
    pair, chain = stored(3)
    pair.source.manager.drop(keys_of(chain)[2], "test")
    measured(pair)
    longer = [*chain, *hashes(400, "nobody has these")]
    for tiers in ({0: "cpu", 1: "cpu", 2: "shelf"}, {0: "cpu", 1: "cpu"}):
        number = pair.want(longer, block_ns=COMPUTED)
        while (offers := pair.consumer.offered(number)) is None:
            pair.run(1)
        assert dict(offers) == tiers
        pair.consumer.claimed(number)
        pair.run(10)
        measured(pair)


@pytest.mark.parametrize(("count", "slow"), [(40, set()), (4, {"shelf"})])
def test_O21_a_peer_compares_the_last_blocks_of_a_window_with_all_that_they_save(
    count: int, slow: set[str]
) -> None:
    """Without them there is no hit: what they alone would be computed in says nothing."""
    pair, _ = stored(1)
    measured(pair)
    layout = SimpleNamespace(rules=(GroupRule(), GroupRule(2)))
    source = SimpleNamespace(layout=layout, tiering=pair.source.tiering, manager=None)
    leases = SimpleNamespace(computes=lambda _request, _manager: False)
    wanted = [range(count), range(count - 2, count)]
    job = SimpleNamespace(
        source=source, leases=leases, request="", block_ns=COMPUTED, wanted=wanted
    )
    tiers = ["cpu"] * count + ["shelf"] * 2
    found = [Job.too_slow(cast("Job", job), tiers, 0) for _ in range(2)]
    assert found == [set(), slow], "tried once"
