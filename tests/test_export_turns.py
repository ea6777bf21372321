"""When the two sides of a hand-over go on: as soon as they can, and with all there is at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.core.manager import Manager
from kvstore.core.types import BlockKey, Slot
from kvstore.handover import moves, producer
from kvstore.handover.consumer import STALL_NS
from kvstore.handover.runs import Part, Places
from kvstore.handover.transfers import Slots
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness import handover_pair
from tests.harness.fakes import from_u32, hashes, keys_of, u32
from tests.harness.handover_pair import LANDING, Pair, bare_fetch, content, stored


def looks(pair: Pair) -> list[int]:
    """How many blocks the producer looks for, from now on, by turn."""
    tiering, tick = pair.source.tiering, pair.producer.tick
    turns, find = list[int](), tiering.sources_of

    def counted(keys: Sequence[BlockKey]) -> Any:  # noqa: ANN401 - as tiering has it
        turns[-1] += len(keys)
        return find(keys)

    def turn(now_ns: int) -> None:
        turns.append(0)
        tick(now_ns)

    tiering.sources_of = counted  # type: ignore[method-assign,assignment]
    pair.producer.tick = turn  # type: ignore[method-assign,assignment]
    return turns


def offers(pair: Pair) -> dict[int, m.Offer]:
    return {said.job: said for said in pair.down.sent if isinstance(said, m.Offer)}


def test_S2_of_what_peers_want_a_turn_looks_for_a_few_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer, "LOOKS_MAX", 64)
    pair, chain = stored(20)
    numbers = [pair.want([*chain, *hashes(480, f"more {n}")]) for n in range(3)]
    turns = looks(pair)
    pair.run(1)
    assert pair.producer.looking, "the next turn comes at once"
    pair.run(40)
    assert max(turns) == 64
    assert sum(turns) == 3 * 500, "each block once"
    assert {number: len(offers(pair)[number].which) for number in numbers} == dict.fromkeys(
        numbers, 20
    )
    assert not pair.producer.looking


def test_S2_of_an_unknown_request_the_first_missing_block_is_looked_for_now_and_then() -> None:
    pair, chain = stored(20)
    numbers = [pair.want([*chain, *hashes(480, f"more {n}")], request="?") for n in range(3)]
    turns = looks(pair)
    pair.run(1)
    assert turns == [3 * 500], "once for all: what is missing is not known yet"
    assert not pair.producer.looking
    pair.run(200)
    assert sum(turns[1:]) == 3 * 10, "one of each, every 20 ms"
    assert not offers(pair)
    pair.run(120)
    assert set(offers(pair)) == set(numbers)
    assert pair.producer.counts["unknown"] == 3
    assert max(turns[1:]) == 3 * 480, "those after the missing ones, at the end"


def test_S2_a_peer_that_wants_much_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "LOOKS_MAX", 64)
    pair, chain = stored(2)
    said = dict[int, list[framing.Message]]()
    pair.producer._send = lambda peer, message: said.setdefault(peer, []).append(message)
    layout = pair.source.layout
    for peer in (50, 51):
        hello = m.Hello(m.VERSION, layout.digest, layout.traits, f"other {peer}", b"md")
        pair.producer.on_message(peer, hello, 0)
    much = hashes(500, "more")
    for job in range(1, 9):
        want = m.Want(job, b"".join(much), 32, (u32(range(500)),), b"")
        pair.producer.on_message(50, want, pair.giver.now_ns)
    want = m.Want(1, b"".join(chain), 32, (u32(range(2)),), b"")
    pair.producer.on_message(51, want, pair.giver.now_ns)
    pair.producer.tick(pair.giver.now_ns)
    assert any(isinstance(message, m.Offer) for message in said[51])
    assert not any(isinstance(message, m.Offer) for message in said[50])


@pytest.mark.parametrize("peers", [1, 3])
def test_S2_of_blocks_that_may_still_come_a_turn_passes_over_a_few(
    monkeypatch: pytest.MonkeyPatch, peers: int
) -> None:
    """A prompt's last blocks have slots long after its end, and each turn of the loop goes on."""
    monkeypatch.setattr(producer, "LATE_MAX", 8)
    pair, chain = Pair(), hashes(20)
    pair.hand("r")
    numbers = [pair.want(chain, request="r") for _ in range(peers)]
    while len(offers(pair)) < peers:
        pair.run(1)
    leases, asked = pair.producer.request_leases, list[BlockKey]()
    leases.done("r", pair.source.manager, 1, keys_of(chain), pair.giver.now_ns, pair.giver.now_ns)
    may_come = leases.may_come

    def counted(name: str, manager: Manager, key: BlockKey, *, undecided: bool = False) -> bool:
        asked.append(key)
        return may_come(name, manager, key, undecided=undecided)

    leases.may_come = counted  # type: ignore[method-assign]
    for _ in range(10):
        asked.clear()
        pair.producer.tick(pair.giver.now_ns)
        assert len(asked) == 8 + peers - 1, "one of each other job"
    pair.put(chain)
    pair.run(10)
    told = [said for said in pair.down.sent if isinstance(said, m.Have)]
    for number in numbers:
        found = [at for said in told if said.job == number for at in from_u32(said.positions)]
        assert sorted(found) == [*range(20)], "each once, in whatever order they came"


def test_B18_blocks_of_an_unknown_request_that_come_meanwhile_are_offered() -> None:
    pair, chain = Pair(), hashes(6)
    number = pair.want(chain, request="?")
    pair.run(30)
    pair.put(chain[:3])
    pair.run(30)
    assert not offers(pair)
    for index in range(3, 6):
        pair.source.view(Slot(pair.prefill.credits[0]))[:] = content(keys_of(chain)[index])
        pair.prefill.put(chain[: index + 1], first=index)
    pair.run(60)
    assert len(offers(pair)[number].which) == 6
    assert pair.producer.counts["unknown"] == 1


@pytest.mark.parametrize("push", [False, True])
def test_landing_slots_are_free_as_soon_as_their_blocks_are_copied(push: bool) -> None:
    pair, chain = stored(2 * LANDING)
    late, take = list[framing.Message](), pair.down.take

    def all_but_the_last_word(message: framing.Message) -> None:
        late.append(message) if isinstance(message, m.Settled) else take(message)

    pair.down.take = all_but_the_last_word
    number = pair.want(chain, push=push)
    pair.decode.ask(chain)
    pair.run(60)
    fetch = pair.consumer._fetches[number]
    assert fetch.states.are(fetch.all, moves.CHECKED), "more than there are landing slots"
    for message in late:
        take(message)
    pair.run(3)
    assert pair.arrived(chain) == len(chain)
    pair.check_nothing_left()


@pytest.mark.parametrize("push", [False, True])
def test_a_hand_over_ends_with_one_message_each_way(push: bool) -> None:
    pair, chain = stored(3)
    number = pair.want(chain, push=push)
    pair.decode.ask(chain)
    pair.run(40)
    assert pair.arrived(chain) == 3
    (asked,) = [message for message in pair.up.sent if isinstance(message, m.Settle)]
    assert asked.arrived == u32(range(3))
    answers = [message for message in pair.down.sent if isinstance(message, m.Settled)]
    assert answers == [m.Settled(number, u32(range(3)), end="all")]
    pair.check_nothing_left()


def test_B19_an_answer_to_what_was_given_up_meanwhile_is_no_fault_of_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clear ends the block that was checked; the copy of the other is still under way."""
    pair, chain = stored(2)
    late, take = list[framing.Message](), pair.down.take
    pair.down.take = lambda said: late.append(said) if isinstance(said, m.Settled) else take(said)
    check = pair.moves.check

    def first_alone(
        part: Part,
        namespace: str,
        keys: Sequence[BlockKey],
        sums: Sequence[int],
        there: Slots,
        here: Slots,
    ) -> None:
        one = slice(0, 1)
        check(part.cut(one), namespace, keys[one], sums[one], there.cut(one), here.cut(one))

    monkeypatch.setattr(pair.moves, "check", first_alone)
    number = pair.want(chain)
    pair.decode.ask(chain)
    pair.run(40)
    states = pair.consumer._fetches[number].states
    assert [states[0], states[1]] == [moves.CHECKED, moves.LANDED]
    pair.consumer.clear()
    (answer,) = late
    take(answer)
    assert [states[0], states[1]] == [moves.DONE, moves.LANDED]
    assert pair.consumer.counts["fetched"] == 0


def test_B19_an_answer_that_comes_late_makes_no_slot_valid() -> None:
    """The slots that the blocks were to fill have other blocks by then."""
    pair, chain = stored(2)
    late, take = list[framing.Message](), pair.down.take

    def all_but_answers(message: framing.Message) -> None:
        late.append(message) if isinstance(message, m.Settled) else take(message)

    pair.down.take = all_but_answers
    pair.want(chain)
    pair.decode.ask(chain)
    pair.run(40)
    assert late
    pair.consumer.tick(pair.taker.now_ns + STALL_NS)
    pair.run(3)
    assert pair.consumer.counts["late"] == 1
    (target,) = pair.taker.store.namespaces.values()
    others = target.manager.prepare_store(8)
    for message in late:
        take(message)
    pair.run(3)
    assert pair.arrived(chain) == 0
    assert not any(target.manager.index)
    target.manager.give_back(others)
    pair.down.take = take
    pair.check_nothing_left()


def test_what_ends_one_by_one_in_a_turn_is_gone_on_with_in_one_go() -> None:
    pair, chain, asked = Pair(), hashes(8), list[int]()
    pair.put(chain)
    for key in keys_of(chain)[::-1]:
        pair.source.manager.drop(key, "test")
    take = pair.moves.sum

    def counted(part: Part, *of: Any) -> None:  # noqa: ANN401 - as Transfers.sum has it
        asked.append(len(part.positions))
        take(part, *of)

    pair.moves.sum = counted  # type: ignore[method-assign,assignment]
    pair.want(chain)
    pair.decode.ask(chain)
    pair.run(40)
    assert pair.arrived(chain) == len(chain)
    assert asked == [len(chain)], "the shelf has given all of them in one turn"
    told = [message for message in pair.down.sent if isinstance(message, m.Have)]
    assert len(told) == 1


def test_B14_who_got_no_landing_slot_is_the_first_to_get_one() -> None:
    """Two peers that always want more leave no slot to a third, were it not for its turn."""
    pair, got = Pair(), list[tuple[int, int]]()
    arrivals = pair.consumer.arrivals
    pair.peer = 9

    def read(part: Part, *_: object) -> None:
        got.append((part.peer, len(part.positions)))

    arrivals._transfers.start = read  # type: ignore[method-assign,assignment]
    for peer, count in ((1, 9), (2, 9), (3, 1)):
        keys = keys_of(hashes(count, str(peer)))
        fetch = bare_fetch(arrivals, peer, keys)
        fetch.states.put(fetch.all, moves.CLAIMED)
        fetch.places.put(range(count), m.Region(0, 0, 1), array("I", [0] * count))
        arrivals._turns.queue(fetch, fetch.all)
    arrivals.start()
    assert got == [(1, 4), (2, 2)], "three quarters of six, and the rest"
    arrivals._turns.left(1, 1)
    arrivals.landing.give_back([5])
    arrivals.start()
    assert got[2:] == [(3, 1)]


def test_a_fetch_goes_on_once_a_quarter_of_the_landing_slots_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover_pair, "LANDING", 20)
    pair, got = Pair(), list[Part]()
    arrivals = pair.consumer.arrivals
    arrivals._transfers.start = lambda part, *_: got.append(part)  # type: ignore[method-assign]
    fetch = bare_fetch(arrivals, pair.peer, keys_of(hashes(23)))
    fetch.states.put(fetch.all, moves.CLAIMED)
    fetch.places.put(range(23), m.Region(0, 0, 1), array("I", [0] * 23))
    arrivals._turns.queue(fetch, fetch.all)
    first = 0
    for ended in (0, 3, 2, 3):
        arrivals._turns.left(pair.peer, ended)
        arrivals.landing.give_back(fetch.landing[first : first + ended])
        first += ended
        arrivals.start()
    assert [len(part.positions) for part in got] == [15, 5, 3], "and all that is left"


def test_B14_a_push_does_not_wait_for_landing_slots_of_what_is_still_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer may hold more than half of the slots for blocks that its engine has not computed."""
    monkeypatch.setattr(handover_pair, "LANDING", 20)
    pair, computed, there = Pair(), hashes(12, "computed"), hashes(6, "there")
    pair.put(there)
    pair.hand("r")
    pair.want(computed, push=True, request="r")
    pair.decode.ask(computed)
    pair.run(20)
    assert pair.landing.used == 12
    pair.want(there, push=True)
    pair.decode.ask(there)
    pair.run(60)
    assert pair.arrived(there) == 6


def test_B14_a_push_goes_on_beside_blocks_that_are_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer says so at the end only: were the rest to wait for their slots, none would come."""
    monkeypatch.setattr(handover_pair, "LANDING", 20)
    pair, chain = stored(24, held=4)
    number = pair.want(chain, push=True)
    while not pair.producer.jobs:
        pair.run(1)
    gone = keys_of(chain)[15:3:-1]
    for key in gone:
        pair.source.manager.drop(key, "test")
    pair.source.tiering.tiers[0].discard(gone)
    pair.decode.ask(chain)
    pair.run(100)
    assert pair.consumer.counts["fetched"] == 12
    assert number not in pair.consumer._fetches
    pair.check_nothing_left()


def test_S2_a_fetch_that_has_ended_does_not_wait_for_a_landing_slot() -> None:
    pair = Pair()
    arrivals = pair.consumer.arrivals
    taken = arrivals.landing.take(LANDING)
    made = [bare_fetch(arrivals, 1, keys_of(hashes(2, str(number)))) for number in range(3)]
    for fetch in made:
        fetch.states.put(fetch.all, moves.CLAIMED)
        arrivals._turns.queue(fetch, fetch.all)
    made[0].left = made[1].left = 0
    arrivals.start()
    assert [fetch for fetch, _ in arrivals._turns._waiting[1]] == made[2:]
    made[2].left = 0
    arrivals.start()
    assert not arrivals._turns._waiting
    arrivals.landing.give_back(taken)
    pair.check_nothing_left()


def test_B20_a_read_that_has_failed_leaves_no_landing_slot_in_quarantine() -> None:
    """Nothing writes there any more; what stays there has the exporter restarted, for all peers."""
    pair, chain = stored(4)
    pair.moves.fails = 1.0
    pair.want(chain)
    pair.run(5)
    pair.decode.ask(chain)
    pair.run(20)
    assert not pair.arrived(chain)
    pair.check_nothing_left()


def test_what_is_said_of_many_blocks_is_what_is_said_of_each() -> None:
    """Blocks 2 and 3 were asked for before, and that peer has not answered."""
    pair, chain = Pair(), hashes(5)
    keys, packed, now_ns = keys_of(chain), b"".join(chain), pair.taker.now_ns
    for indices, offered in (([2, 3], []), ([0, 1, 2, 3], range(4))):
        want = m.Want(1, packed, 32, (u32(indices),))
        number = pair.consumer.want(pair.peer, want, now_ns)
        if offered:
            offer = m.Offer(number, u32(offered), ("cpu",), bytes(len(offered)))
            pair.consumer.on_message(pair.peer, offer, now_ns)
    said = [pair.consumer.lookup(key) for key in keys]
    assert len(set(said)) == 3
    for first, result in enumerate(said):
        alike = next((n for n, other in enumerate(said[first:]) if other is not result), None)
        expected = len(keys) - first if alike is None else alike
        assert pair.consumer.leading(keys, first) == (result, expected)


def test_blocks_that_are_no_neighbours_are_checked_in_one_go() -> None:
    pair, asked = Pair(), list[tuple[list[int], list[int]]]()
    keys = keys_of(hashes(3))
    fetch = bare_fetch(pair.consumer.arrivals, pair.peer, keys)
    fetch.slots, fetch.sums = array("I", [4, 5, 6]), array("Q", [7, 8, 9])

    def check(part: Part, _digest: str, named: list[bytes], sums: array[int], *_: object) -> None:
        assert named == [keys[position] for position in part.positions]
        asked.append((list(part.positions), list(sums)))

    pair.consumer.arrivals._transfers.check = check  # type: ignore[method-assign,assignment]
    pair.consumer.arrivals.written(fetch, [(0, 1), (2, 3)])
    assert asked == [([0, 2], [7, 9])]


def test_S2_places_without_blocks_are_not_kept() -> None:
    places = Places(2)
    for extent in range(9):
        places.put((), m.Region(extent, 4096, 4), array("I"))
    places.put([1], m.Region(9, 4096, 4), array("I", [3]))
    assert list(places.by_region([1])) == [(m.Region(9, 4096, 4), [1], array("I", [3]))]
    assert len(places._regions) == 1
