"""Where blocks come from, and in which order the two sides may speak, pulled and pushed."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages
from kvstore.core.types import BlockKey
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.fakes import from_u32, hashes, keys_of, u32
from tests.harness.handover_pair import LANDING, Pair, content, stored

S = 10**9


def sent(pair: Pair, kind: type[framing.Message]) -> list[framing.Message]:
    return [message for message in (*pair.up.sent, *pair.down.sent) if isinstance(message, kind)]


def drop(pair: Pair, *keys: BlockKey) -> None:
    """Blocks leave the prefill store's memory; its shelf has them."""
    for key in keys:
        pair.source.manager.drop(key, "test")


@pytest.mark.parametrize("push", [False, True], ids=["L1", "P3"])
def test_L1_P3_each_block_comes_from_where_it_is_when_its_turn_comes(push: bool) -> None:
    """In memory, below it, on its way from memory to below it, or still to be computed."""
    pair, chain = Pair(held=4), hashes(8)
    keys = keys_of(chain)
    pair.hand("r")
    pair.put(chain[:6])
    drop(pair, *keys[5:1:-1])
    pair.want(chain, push=push, request="r")
    pair.decode.ask(chain)
    while not (offers := sent(pair, m.Offer)):
        pair.run(1)
    assert isinstance(offers[0], m.Offer)
    tiers = Counter(offers[0].tiers[which] for which in offers[0].which)
    assert tiers == {"cpu": 2, "shelf": 4, "prefill": 2}
    pair.put(chain[:7])
    pair.run(2)
    drop(pair, keys[6])  # only just computed, it is on the shelf when its turn comes
    pair.put(chain)
    pair.producer.request_leases.gone("r", pair.source.manager, 1)
    pair.run(60)
    assert pair.arrived(chain) == 8
    assert pair.consumer.fetched == {"cpu": 2, "other": 4, "prefill": 2}
    pair.check_nothing_left()


def test_P1_a_consumer_registers_once_and_each_block_has_one_place_to_go() -> None:
    pair, chain = Pair(), hashes(9)
    pair.put(chain[:8])
    pair.want(chain, push=True)
    pair.decode.ask(chain)
    pair.run(40)
    assert pair.arrived(chain) == 8
    (want,) = sent(pair, m.Want)
    assert isinstance(want, m.Want)
    assert (want.push, want.lease_ms) == (True, 30_000), "a duration"
    lands = [land for land in sent(pair, m.Land) if isinstance(land, m.Land)]
    places = [slot for land in lands for slot in from_u32(land.numbers)]
    named = [position for land in lands for position in from_u32(land.positions)]
    assert sorted(named) == list(range(8)), "what is not offered has none"
    assert len(places) == 8
    assert all(land.region == pair.landing.region()[0] for land in lands)
    pair.check_nothing_left()


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (m.Want(1, hashes(1)[0], 32, (u32([0]),), push=True), "job 1, expected a new number"),
        (m.Land(1, u32([0]), u32([5]), m.Region(900, 0, 6)), "a second landing slot in positions"),
        (m.Land(1, u32([1]), u32([6]), m.Region(900, 0, 6)), "expected below 6"),
        (
            m.Land(1, u32([1]), u32([1]), m.Region(900, 0, 6), (RankPages("r", b"md", ()),)),
            "engine blocks for job 1, expected a push",
        ),
    ],
)
def test_P1_what_is_registered_twice_or_nowhere_is_refused(
    again: framing.Message, expected: str
) -> None:
    pair, chain = Pair(), hashes(2)
    pair.hand("r")
    pair.want(chain, push=True, request="r")
    pair.run(3)
    at, now_ns = pair.peer, pair.giver.now_ns
    first = m.Land(1, u32([0]), u32([0]), m.Region(900, 0, 6))
    pair.producer.on_message(at, first, now_ns)
    with pytest.raises(ProtocolError, match=expected):
        pair.producer.on_message(at, again, now_ns)


@pytest.mark.parametrize("order", ["registered, begun, ended", "begun, ended, registered"])
@pytest.mark.parametrize("push", [False, True])
def test_P2_registration_and_finished_prefill_come_in_either_order(order: str, push: bool) -> None:
    pair, chain = Pair(), hashes(4)

    def register() -> None:
        pair.want(chain, push=push, request="r")
        pair.decode.ask(chain)

    def begin() -> None:
        pair.hand("r")
        pair.put(chain[:1])

    def end() -> None:
        now_ns = pair.giver.now_ns
        pair.producer.request_leases.done(
            "r", pair.source.manager, 1, keys_of(chain), now_ns + 10 * S, now_ns
        )
        pair.put(chain)

    steps = {"registered": register, "begun": begin, "ended": end}
    for step in order.split(", "):
        steps[step]()
        pair.run(20)
    assert pair.arrived(chain) == 4
    pair.producer.request_leases.gone("r", pair.source.manager, 1)
    pair.check_nothing_left()


class Held:
    """Messages to the consumer from the first of a kind on, kept until they are let through."""

    def __init__(self, pair: Pair, kind: type[framing.Message]) -> None:
        self.kept: list[framing.Message] = []
        self._take = pair.down.take
        self._kinds: tuple[type[framing.Message], ...] = (kind,)
        pair.down.take = self._sort

    def _sort(self, message: framing.Message) -> None:
        if self.kept or isinstance(message, self._kinds):
            self.kept.append(message)
        else:
            self._take(message)

    def let_through(self) -> None:
        kept, self.kept, self._kinds = self.kept, [], ()
        for message in kept:
            self._take(message)


@pytest.mark.parametrize("kind", [m.Have, m.Settled])
def test_P6_blocks_are_used_after_the_completion_only_which_clears_both_sides(
    kind: type[framing.Message],
) -> None:
    """What lies where it should, with the right sum, is not enough."""
    pair, chain = stored(4)
    pair.want(chain, push=True)
    held = Held(pair, kind)
    pair.decode.ask(chain)
    pair.run(40)
    assert held.kept
    if kind is m.Have:
        landed = [bytes(pair.landing.view(slot)) for slot in range(LANDING)]
        assert all(content(key) in landed for key in keys_of(chain)), "all was written"
    assert pair.arrived(chain) == 0
    assert pair.consumer._fetches
    held.let_through()
    pair.run(20)
    assert pair.arrived(chain) == 4
    pair.check_nothing_left()


@pytest.mark.parametrize("push", [False, True])
def test_P7_what_is_ready_goes_while_the_prefill_goes_on(push: bool) -> None:
    pair, chain = Pair(), hashes(5)
    pair.hand("r")
    pair.want(chain, push=push, request="r")
    pair.decode.ask(chain)
    for ready in range(6):
        pair.put(chain[:ready])
        pair.run(20)
        assert pair.consumer.counts["fetched"] == ready
        assert pair.producer.request_leases.computes("r", pair.source.manager)
    pair.producer.request_leases.gone("r", pair.source.manager, 1)
    pair.run(3)
    assert pair.arrived(chain) == 5
    pair.check_nothing_left()
