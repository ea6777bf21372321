"""Both sides of a hand-over against each other, with real managers and tierings between them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest

from kvstore.core.errors import ProtocolError
from kvstore.core.tier import Tier
from kvstore.core.types import BlockKey, LookupResult
from kvstore.handover import jobs, moves
from kvstore.handover import producer as o
from kvstore.handover.runs import Part
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.fakes import blocks, from_u32, hashes, keys_of, u32
from tests.harness.handover_pair import LANDING, Pair, stored
from tests.reference.memory_tier import MemoryTier


def test_what_a_peer_does_not_answer_in_time_is_a_miss() -> None:
    pair, chain = stored(3)
    pair.up.cut = True
    pair.want(chain)
    ask = pair.decode.ask(chain)
    pair.run(20, ms=10)
    assert ask not in pair.decode.granted, "it is waited for"
    pair.run(20, ms=100)
    assert blocks(pair.decode.granted[ask]) == []
    assert pair.consumer.counts["late"] == 1


@pytest.mark.parametrize("push", [False, True])
def test_B19_a_block_with_another_sum_is_not_ready_and_ends_the_load_there(push: bool) -> None:
    pair, chain = stored(6)
    pair.moves.damage.add(keys_of(chain)[3])
    pair.want(chain, push=push)
    ask = pair.decode.ask(chain)
    pair.run(60)
    assert len(blocks(pair.decode.granted[ask])) == 6
    assert pair.arrived(chain) == 3
    assert pair.consumer.counts["corrupt"] == 1
    pair.check_nothing_left()


@pytest.mark.parametrize("push", [False, True])
def test_P8_B20_a_landing_slot_is_abandoned_and_not_used_again_while_something_may_write_it(
    monkeypatch: pytest.MonkeyPatch, push: bool
) -> None:
    pair, chain = stored(3)
    moving: list[Callable[[], None]] = []
    move = pair.moves.start
    monkeypatch.setattr(pair.moves, "start", lambda *job: moving.append(partial(move, *job)))
    abandoned: list[Part] = []
    monkeypatch.setattr(pair.moves, "abandon", abandoned.append)
    number = pair.want(chain, push=push)
    pair.decode.ask(chain)
    while len(pair.landing._free) > LANDING - 3 or not moving:
        pair.run(1)
    fetch = pair.consumer._fetches[number]
    fetch.fail("test")
    pair.consumer._settle(fetch)
    assert pair.consumer.arrivals.quarantined == 3
    with pytest.raises(ProtocolError, match="is not this peer's"):
        pair.consumer.on_message(pair.peer + 1, m.Settled(number, end="all"), pair.taker.now_ns)
    pair.run(6)
    assert [list(part.positions) for part in abandoned] == [[0, 1, 2]]
    assert len(pair.landing._free) == 3
    for work in moving:
        work()
    pair.run(10)
    assert pair.consumer.arrivals.quarantined == 0
    pair.check_nothing_left()


def test_B14_fetches_that_wait_together_for_a_landing_slot_all_arrive() -> None:
    """Each has other blocks at the same positions, and one of them more than the others."""
    pair, chains = Pair(), [hashes(count, f"of {count}") for count in (1, 4, 2)]
    for chain in chains:
        pair.put(chain)
    free, pair.landing._free = pair.landing._free, array("I")  # the memory is not there yet
    for chain in chains:
        pair.want(chain)
        pair.decode.ask(chain)
    pair.run(20)
    pair.landing._free = free
    pair.run(20)
    assert [pair.arrived(chain) for chain in chains] == [1, 4, 2]
    assert not pair.consumer.counts["corrupt"]
    pair.check_nothing_left()


@pytest.mark.parametrize("turns", [0, 20], ids=["before the offer", "after it"])
def test_B14_what_two_requests_want_comes_for_one_when_the_other_is_aborted(turns: int) -> None:
    pair, chain = stored(3)
    pair.want(chain, request="one")
    pair.want(chain, request="two")
    pair.run(turns)
    pair.consumer.withdraw("one")
    pair.run(20)
    pair.decode.ask(chain)
    pair.run(20)
    assert pair.arrived(chain) == 3
    pair.check_nothing_left(10)


def test_B16_blocks_are_held_for_a_while_after_the_lease_and_confirmed_no_more() -> None:
    pair, chain = stored(2)
    pair.want(chain)
    pair.run(3)
    pair.up.cut = True
    end_ns = pair.giver.now_ns + 30 * 10**9
    pair.producer.tick(end_ns)
    assert pair.producer.counts["expired"] == 1
    said: list[framing.Message] = []
    pair.producer._send = lambda _peer, message: said.append(message)
    pair.producer.on_message(pair.peer, m.Settle(1, 1000, u32([0, 1])), end_ns)
    assert said == [m.Settled(1, end=m.LEASE_OVER)]
    assert pair.producer.counts["stale"] == 2
    pinned = [entry.pins for entry in pair.source.manager.index]
    assert pinned == [1, 1]
    pair.producer.tick(end_ns + o.GRACE_NS - 1_000_000_000)
    assert [entry.pins for entry in pair.source.manager.index] == [1, 1]
    pair.producer.tick(end_ns + o.GRACE_NS)
    assert [entry.pins for entry in pair.source.manager.index] == [0, 0]


def test_B11_heartbeats_keep_a_lease_and_never_shorten_it() -> None:
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    pair.put(chain[:2])
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(6)
    for _ in range(9):  # nothing else is said for longer than a lease
        pair.run(9, ms=1000)
        pair.put(hashes(1, "other"))
        pair.consumer._fetches[1].heard_ns = pair.taker.now_ns
    pair.put(chain)
    pair.run(20)
    assert pair.arrived(chain) == 3
    pair.want(chain)
    pair.run(2)
    (job,) = pair.producer._peers[pair.peer].jobs.values()
    before = job.deadline_ns
    pair.producer.on_message(pair.peer, m.Settle(job.number, 1), pair.giver.now_ns)
    assert job.deadline_ns == before


def test_a_peer_that_has_forgotten_a_fetch_says_so_within_two_seconds() -> None:
    """It could not be sent to for a moment, say; fuzzing met it: the fetch waited for ten."""
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(10)
    pair.producer.on_closed(pair.peer)
    with pytest.raises(ProtocolError, match="Settle before Hello"):  # told to whoever sent it
        pair.run(20, ms=100)


def test_what_a_peer_says_before_it_hears_that_our_exporter_ended_is_not_wrong() -> None:
    """Its heartbeat and our Refused cross; a simulated fleet met it."""
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    number = pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(10)
    pair.producer.on_exporter_lost("the exporter has ended")
    said = len(pair.down.sent)
    pair.producer.on_message(pair.peer, m.Settle(number, 1000), pair.giver.now_ns)
    assert len(pair.down.sent) == said, "it was told already"
    pair.producer.on_closed(pair.peer)
    with pytest.raises(ProtocolError, match="Settle before Hello"):
        pair.producer.on_message(pair.peer, m.Settle(number, 1000), pair.giver.now_ns)


def test_a_peer_speaks_for_its_own_jobs_only() -> None:
    pair, chain = stored(2)
    number = pair.want(chain)
    with pytest.raises(ProtocolError, match="is not this peer's"):
        pair.consumer.on_message(pair.peer + 1, m.Offer(number, b"", (), b""), 0)


def test_B19_a_peer_cannot_confirm_what_has_not_been_checked() -> None:
    pair, chain = stored(2)
    number = pair.want(chain)
    pair.decode.ask(chain)
    pair.run(2)
    with pytest.raises(ProtocolError, match="positions 0 to 0 were not all confirmed"):
        pair.consumer.on_message(pair.peer, m.Settled(number, u32([0])), pair.taker.now_ns)
    assert pair.arrived(chain) == 0


def test_S2_landing_slots_outside_of_their_region_are_refused() -> None:
    pair, chain = stored(2)
    number = pair.want(chain, push=True)
    pair.run(1)
    land = m.Land(number, u32([0, 1]), u32([2, 3]), m.Region(1, 4096, 3))
    with pytest.raises(ProtocolError, match="expected below 3"):
        pair.producer.on_message(pair.peer, land, pair.giver.now_ns)


def test_what_was_checked_after_its_peer_was_lost_is_not_waited_for() -> None:
    pair, chain = stored(2)
    number = pair.want(chain)
    pair.decode.ask(chain)
    while not pair.consumer._fetches[number].states.are((0, 2), moves.LANDED):
        pair.run(1)
    pair.lose()
    pair.run(3)
    assert not pair.consumer._fetches
    assert pair.arrived(chain) == 0


def test_what_is_staged_at_a_clear_is_not_handed_over() -> None:
    pair, chain = stored(2)
    for key in keys_of(chain)[::-1]:
        pair.source.manager.drop(key, "test")
    want = m.Want(1, b"".join(chain), 32, (u32([0, 1]),))
    pair.producer.on_message(pair.peer, want, pair.giver.now_ns)
    pair.producer.tick(pair.giver.now_ns)
    pair.source.tiering.clear()
    pair.run(4)
    assert pair.producer.counts["failed"] == 2
    pair.check_nothing_left()


class Chance:
    """One of the things that can happen to a pair."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair, self.rng = pair, random.Random(seed)
        self.chains = [hashes(self.rng.randint(1, 10), f"r{number}") for number in range(4)]
        self.acts = [self.put, self.want, self.want, self.ask, self.drop, self.lose, self.damage]
        self.acts += [self.clear, self.compute]

    def act(self) -> None:
        self.rng.choice(self.acts)(self.rng.choice(self.chains))

    def put(self, chain: Sequence[bytes]) -> None:
        self.pair.put(chain)

    def want(self, chain: Sequence[bytes]) -> None:
        some = chain[: self.rng.randint(1, len(chain))]
        request = self.rng.choice(["", "r"])
        self.pair.want(some, push=self.rng.random() < 0.5, request=request)
        self.ask(chain)

    def ask(self, chain: Sequence[bytes]) -> None:
        self.pair.decode.ask(chain)

    def drop(self, chain: Sequence[bytes]) -> None:
        manager = self.rng.choice([self.pair.source, self.pair.target]).manager
        for key in keys_of(chain)[::-1]:
            manager.drop(key, "test")

    def damage(self, chain: Sequence[bytes]) -> None:
        self.pair.moves.damage = (
            {self.rng.choice(keys_of(chain))} if self.rng.random() < 0.5 else set()
        )

    def clear(self, _chain: Sequence[bytes]) -> None:
        if self.rng.random() < 0.3:
            self.rng.choice([self.pair.source, self.pair.target]).tiering.clear()

    def lose(self, _chain: Sequence[bytes]) -> None:
        if self.rng.random() < 0.3:
            self.rng.choice([self.pair.consumer.on_exporter_lost, self.pair.lose])()

    def compute(self, _chain: Sequence[bytes]) -> None:
        if self.rng.random() < 0.5:
            self.pair.hand("r")
        else:
            self.pair.producer.request_leases.gone("r", self.pair.source.manager, 1)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_bytes_are_right_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(seed, delays=rng.choice([0, 1, 4]), held=rng.choice([1, 3, 64]))
    chance = Chance(pair, seed)
    pair.moves.fails = rng.choice([0, 0, 0.2])
    for _ in range(40):
        chance.act()
        pair.run(rng.randint(1, 8), ms=rng.choice([1, 1, 1, 400]))
        for chain in chance.chains:
            pair.arrived(chain)
    pair.moves.fails, pair.moves.damage = 0, set()
    pair.producer.request_leases.gone("r", pair.source.manager, 1)
    pair.run(80, ms=1000)
    pair.consumer.on_exporter_lost()  # the end of a quarantine whose peer was lost
    pair.check_nothing_left()


def finished(pair: Pair, request: str, chain: Sequence[bytes], lease_ns: int = 10**9) -> None:
    now_ns = pair.giver.now_ns
    pair.producer.request_leases.done(
        request, pair.source.manager, 1, keys_of(chain), now_ns + lease_ns, now_ns
    )


def pins(pair: Pair) -> list[int]:
    return [entry.pins for entry in pair.source.manager.index]


def test_what_a_request_has_computed_is_held_until_it_was_fetched() -> None:
    pair, chain = Pair(), hashes(4)
    pair.hand("r")
    pair.put(chain[:3])
    finished(pair, "r", chain)
    assert pins(pair) == [1, 1, 1]
    pair.put(chain)  # its last copy ends a little later than the request
    pair.run(1)
    assert pins(pair) == [1, 1, 1, 1]
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(20)
    assert pair.arrived(chain) == 4
    done = m.Keep(pair.source.layout.digest, "r", 0)
    pair.producer.on_message(pair.peer, done, pair.giver.now_ns)
    assert pins(pair) == [0, 0, 0, 0]
    assert len(pair.producer.request_leases) == 0
    pair.check_nothing_left()


def test_what_a_request_still_stores_is_looked_for_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, chain, asked = Pair(), hashes(100), list[int]()
    pair.hand("r")
    pair.want(chain, request="r")
    pair.run(5)
    leases, source = pair.producer.request_leases, pair.source
    now_ns = pair.giver.now_ns
    leases.done("r", source.manager, 1, keys_of(chain), now_ns + 10**9, now_ns)

    def leading(keys: Sequence[bytes], _first: int) -> tuple[LookupResult, None, int]:
        asked.append(len(keys))
        return LookupResult.MISS, None, len(keys)

    monkeypatch.setattr(source.tiering, "leading", leading)
    pair.producer.tick(now_ns)
    (job,) = pair.producer.jobs
    assert list(job.awaited) == list(range(100)), "they may come, in their order"
    assert asked == [64, 36]


def put_and_push_out(pair: Pair, chain: Sequence[bytes], blocks: int) -> None:
    """Store a chain; its last blocks leave memory at once, and the shelf below is full."""
    manager, (shelf, *_) = pair.source.manager, pair.giver.tiers
    assert isinstance(shelf, MemoryTier)
    shelf._blocks_max = 0
    pair.put(chain)
    manager.give_back(manager.prepare_store(len(manager.slots.free) + blocks))
    there = [manager.ready(key) is not None for key in keys_of(chain)]
    assert there == [at < len(chain) - blocks for at in range(len(chain))]


@pytest.mark.parametrize("ended", [False, True])
def test_B18_blocks_that_leave_memory_before_they_are_held_are_gone_at_once(*, ended: bool) -> None:
    """A fetch that waits for them ends, with what has come: a load would wait for two seconds."""
    pair, chain = Pair(), hashes(5)
    pair.hand("r")
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(10)
    if ended:
        finished(pair, "r", chain)
        pair.run(10)
    put_and_push_out(pair, chain[:4], 2)
    pair.prefill.put(chain, first=4)  # its parent is not there
    assert not ended or pair.consumer._fetches, "they may come"
    if not ended:
        finished(pair, "r", chain)
    pair.run(10)
    assert pair.producer.counts["gone"] == 3
    assert not pair.consumer._fetches
    assert pair.arrived(chain) == 2


def test_B18_a_request_that_has_ended_offers_no_block_that_left_memory() -> None:
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    put_and_push_out(pair, chain, 1)
    finished(pair, "r", chain)
    pair.want(chain, request="r")
    pair.run(3)
    (offer,) = [said for said in pair.down.sent if isinstance(said, m.Offer)]
    assert from_u32(offer.positions) == [0, 1]


def test_B18_a_block_that_left_memory_before_the_request_began_may_come() -> None:
    pair, chain = Pair(), hashes(3)
    put_and_push_out(pair, chain, 1)
    pair.run(40)
    pair.hand("r")
    pair.want(chain, request="r")
    finished(pair, "r", chain)
    pair.decode.ask(chain)
    pair.run(10)
    assert pair.consumer._fetches
    pair.put(chain)
    pair.run(10)
    assert pair.arrived(chain) == 3


@pytest.mark.parametrize("answer", [LookupResult.RETRY, LookupResult.PENDING])
def test_B18_a_block_that_a_lower_tier_may_have_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, answer: LookupResult
) -> None:
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    tiering, leading = pair.source.tiering, pair.source.tiering.leading

    def undecided(keys: Sequence[BlockKey], first: int) -> tuple[LookupResult, Tier | None, int]:
        found = leading(keys, first)
        return (answer, *found[1:]) if found[1] is None else found

    monkeypatch.setattr(tiering, "leading", undecided)
    put_and_push_out(pair, chain, 1)
    finished(pair, "r", chain)
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(10)
    assert pair.consumer._fetches
    monkeypatch.undo()
    pair.run(10)
    assert pair.producer.counts["gone"] == 1
    assert not pair.consumer._fetches


def test_a_request_whose_engine_is_gone_computes_nothing_more() -> None:
    pair, chain = Pair(), hashes(2)
    pair.hand("r")
    pair.hand("held")
    finished(pair, "held", chain)
    pair.producer.request_leases.end_of(1)
    assert not pair.producer.request_leases.may_come("r", pair.source.manager, keys_of(chain)[0])
    assert len(pair.producer.request_leases) == 1, "what was computed stays"


def test_jobs_of_a_peer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JOBS_MAX", 2)
    pair, chain = Pair(), hashes(2)
    pair.hand("r")
    for _ in range(2):
        pair.want(chain, request="r")
    pair.run(3)
    want = m.Want(9, chain[0], 32, (u32([0]),))
    with pytest.raises(ProtocolError, match="more than 2 jobs"):
        pair.producer.on_message(pair.peer, want, pair.giver.now_ns)


@pytest.mark.parametrize(
    "region", [(-1, 0, 1), (1 << 32, 0, 1), (1, -1, 1), (1, 1 << 63, 1), (1, 0, 0), (1, 0, 1 << 33)]
)
def test_a_region_that_cannot_be_is_no_message(region: tuple[int, int, int]) -> None:
    land = msgspec.msgpack.encode(m.Land(1, b"", b"", m.Region(1, 2, 3)))
    assert m.decode_for_producer(land) == m.Land(1, b"", b"", m.Region(1, 2, 3))
    raw = msgspec.msgpack.decode(land)
    with pytest.raises(ProtocolError, match="extent"):
        m.decode_for_producer(msgspec.msgpack.encode([*raw[:4], region, *raw[5:]]))


def test_P8_a_write_that_outlives_its_lease_lands_in_quarantine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, chain, moving = Pair(), hashes(2), list[Callable[[], None]]()
    pair.put(chain)
    move = pair.moves.start
    monkeypatch.setattr(pair.moves, "start", lambda *job: moving.append(partial(move, *job)))
    pair.want(chain, push=True)
    pair.decode.ask(chain)
    while not moving:
        pair.run(1)
    pair.producer.tick(pair.giver.now_ns + 31 * 10**9)
    pair.run(6)
    assert not pair.consumer._fetches
    assert pair.consumer.arrivals.quarantined == 2
    assert len(pair.landing._free) == LANDING - 2
    for work in moving:
        work()
    pair.run(6)
    assert pair.consumer.arrivals.quarantined == 0
    pair.check_nothing_left()


def test_an_offer_of_a_block_that_was_given_up_before_is_not_counted_again() -> None:
    pair, chain = stored(3)
    pair.wire.delays = 3
    number = pair.want(chain)
    pair.consumer.discard(keys_of(chain)[:1])
    assert pair.consumer._fetches[number].left == 2
    pair.run(12)
    assert pair.consumer._fetches[number].left == 2
    pair.consumer.claimed(number)
    pair.check_nothing_left(20)
