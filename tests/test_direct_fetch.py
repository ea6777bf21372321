"""A fetch whose blocks an engine's workers read: the consumer's side of it, without processes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import PIECES_MAX, PageRun, RankPages
from kvstore.core.leases import GroupHit
from kvstore.core.lookup import Answer
from kvstore.core.manager import Manager
from kvstore.core.types import Chain, GroupRule, LookupResult
from kvstore.handover import transfers
from kvstore.handover.direct_fetches import DirectFetch, reaching_on, with_reads
from kvstore.store.namespace import Namespace
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.fakes import Engine, Town, from_u32, hashes, keys_of, settings, u32
from tests.harness.handover_pair import Pair, stored
from tests.reference.memory_tier import MemoryTier
from tests.test_direct_push import RANKS, claimed

REGION = m.Region(3, 4096, 8)


def fetch(pair: Pair, chain: list[bytes]) -> int:
    want = m.Want(1, b"".join(chain), 32, (u32(range(len(chain))),), b"")
    return pair.consumer.want(pair.peer, want, pair.taker.now_ns, direct=True)


def offered(pair: Pair, chain: list[bytes]) -> int:
    """A direct fetch whose offer has come."""
    number = fetch(pair, chain)
    while pair.consumer.offered(number) is None:
        pair.run(1)
    return number


def reading(pair: Pair, chain: list[bytes]) -> int:
    """A direct fetch all of whose blocks workers were told to read."""
    number = offered(pair, chain)
    pair.claim(number, range(len(chain)))
    pair.run(5)
    return number


def test_B19_direct_a_block_is_good_once_it_was_read_and_the_peer_says_that_its_lease_held() -> (
    None
):
    pair, chain = stored(3)
    number = offered(pair, chain)
    assert pair.consumer.offered(number) == dict.fromkeys(range(3), "cpu")
    pair.run(20)
    assert not pair.passed_on, "nobody has claimed them"
    pair.claim(number, [0, 1, 2])
    pair.run(5)
    assert sorted(pair.passed_on) == [(number, 0), (number, 1), (number, 2)]
    assert not pair.passed
    pair.read(number, [0, 2])
    assert not pair.passed, "the peer has not said so"
    pair.run(5)
    assert pair.passed == {(number, 0): True, (number, 2): True}
    pair.read(number, [1], ok=False)
    pair.run(1)
    assert pair.passed[number, 1] is False
    pair.check_nothing_left(10)


def test_B16_direct_what_is_read_when_its_lease_is_over_is_not_good() -> None:
    pair, chain = stored(2)
    number = reading(pair, chain)
    pair.lose()
    pair.read(number, [0, 1])
    pair.run(5)
    assert pair.passed == {(number, 0): False, (number, 1): False}
    pair.check_nothing_left()


def test_B14_direct_blocks_are_of_one_fetch_and_offered_to_nobody_else() -> None:
    pair, chain = stored(2)
    number = offered(pair, chain)
    found = {pair.consumer.lookup(key) for key in keys_of(chain)}
    assert found == {LookupResult.MISS}
    pair.claim(number, [1])
    pair.run(5)
    assert pair.passed_on == [(number, 1)]
    pair.read(number, [1])
    pair.run(5)
    assert pair.passed == {(number, 1): True}
    pair.check_nothing_left()  # what was not claimed was let go of


def test_S2_direct_memory_of_a_peer_that_workers_would_go_through_for_long_is_refused() -> None:
    pair, chain = stored(1)
    number = offered(pair, chain)
    run = PageRun(0, 1, PIECES_MAX, 4096, 1 << 20, 1)
    many = tuple(RankPages(f"rank {n}", b"", ((run,),)) for n in range(m.RANKS_MAX))
    have = m.Have(number, u32([0]), u32([1]), engine=3, ranks=many)
    with pytest.raises(ProtocolError, match="1048576 pieces of a block, expected up to 65536"):
        pair.consumer.on_message(pair.peer, have, pair.taker.now_ns)
    pair.claim(number, [0])
    assert not pair.in_engines, "no worker is told"


def test_direct_blocks_that_nobody_reads_any_more_are_let_go_of() -> None:
    pair, chain = stored(2)
    number = offered(pair, chain)
    pair.claim(number, [0, 1])
    pair.consumer.cancel(number)
    pair.run(1)
    assert pair.passed == {(number, 0): False, (number, 1): False}
    pair.check_nothing_left(5)


def test_B20_direct_what_is_given_up_when_its_lease_ends_is_told() -> None:
    pair, chain = stored(2)
    number = offered(pair, chain)
    pair.claim(number, [0, 1])
    assert not pair.passed
    pair.consumer.end(number)
    assert pair.passed == {(number, 0): False, (number, 1): False}
    pair.check_nothing_left(5)


def test_B20_direct_what_was_under_way_is_told_though_a_bug_ends_all_fetches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, chain = stored(2)
    number = offered(pair, chain)
    pair.claim(number, [0, 1])

    def settle(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pair.consumer, "_settle", settle)
    with pytest.raises(ZeroDivisionError):
        pair.consumer.clear()
    assert pair.passed == {(number, 0): False, (number, 1): False}


@pytest.mark.parametrize("direct", [False, True])
def test_a_peer_that_names_memory_without_end_loses_no_block_that_it_has_told_of(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of a peer's memory has a limit; what was told is read from where it was."""
    monkeypatch.setattr(transfers, "REGIONS_MAX", 2)
    pair, chain = stored(3)
    if direct:
        number = offered(pair, chain)
    else:
        held, pair.landing._free = pair.landing._free, array("I")
        pair.want(chain)
        pair.decode.ask(chain)
    pair.run(20)
    more = tuple(m.Region(100 + number, 4096, 1) for number in range(9))
    pair.consumer.on_message(pair.peer, m.Have(1, b"", b"", b"", more), pair.taker.now_ns)
    if direct:
        pair.claim(number, [0, 1, 2])
        assert len(pair.passed_on) == 3
        pair.consumer.cancel(number)
    else:
        pair.landing.give_back(held)
        pair.run(20)
        assert pair.arrived(chain) == 3
    pair.check_nothing_left(5)


@pytest.mark.parametrize("seed", range(30))
def test_B14_direct_each_claimed_block_ends_once_whatever_happens(seed: int) -> None:
    pair, rng = Pair(seed, delays=seed % 3), random.Random(seed)
    chain = hashes(rng.randint(1, 12))
    pair.put(chain[: rng.randint(0, len(chain))])
    number = fetch(pair, chain)
    claimed: set[int] = set()
    ended: dict[tuple[int, int], bool] = {}
    for _ in range(60):
        pair.run(1, rng.choice((1, 1, 200)))
        found = pair.consumer.offered(number)
        if found and not claimed and rng.random() < 0.3:
            claimed = {at for at in found if rng.random() < 0.8}
            pair.claim(number, sorted(claimed))
        read, pair.passed_on = pair.passed_on, []
        for _, position in read:
            assert position in claimed
            pair.read(number, [position], ok=rng.random() < 0.8)
        assert not ended.keys() & pair.passed.keys(), "a second end"
        ended |= pair.passed
        pair.passed.clear()
        if rng.random() < 0.03:
            pair.lose()
        if rng.random() < 0.03:
            pair.consumer.cancel(number)
    pair.consumer.cancel(number)
    ended |= pair.passed
    assert {position for _, position in ended} == claimed
    pair.check_nothing_left(20)


# What the store tells its workers, and they it


def direct(*, push: bool = False) -> tuple[DirectFetch, list[tuple[int, framing.Message]]]:
    """A claimed fetch of two ranks, and what their workers were told."""
    sent: list[tuple[int, framing.Message]] = []

    def send(connection: int, message: framing.Message, _fd: int | None) -> None:
        sent.append((connection, message))

    workers = {0: 10, 1: 11}
    return DirectFetch(
        send, lambda: ("agent", b"md"), 5, 1, workers, frozenset([0, 1, 2]), push
    ), sent


def arrived(*positions: int, ok: bool = True) -> p.Arrived:
    return p.Arrived(5, u32(positions), 8, ok)


def named(rank: int, *positions: int) -> p.Target:
    blocks = u32([10 + position for position in positions])
    return p.Target(5, f"rank {rank}", u32(positions), blocks)


def test_B13_direct_a_block_is_read_once_all_ranks_have_read_it() -> None:
    made, _ = direct()
    assert made.arrived(1, 0, arrived(0, 1)) == ([], True)
    assert made.arrived(1, 0, arrived(0)) == ([], True), "a repeat"
    assert made.arrived(1, 1, arrived(1)) == ([1], True)
    assert made.arrived(1, 1, arrived(2, ok=False)) == ([2], False)


def test_B20_direct_what_a_rank_cannot_read_in_an_engine_is_told_anew_when_all_have_ended() -> None:
    """Two reads of one rank into the same engine blocks could end in any order."""
    made, sent = direct()
    ranks = (RankPages("theirs", b"md", ()),)
    made.tell_engine(3, ranks, {0: [7], 1: [8]})
    made.tell_engine(3, ranks, {2: [9]})
    told = [message for connection, message in sent if connection == 10]
    assert told == [
        p.Places(5, u32([0, 1]), u32([7, 8]), engine=3, ranks=ranks),
        p.Places(5, u32([2]), u32([9]), engine=3, ranks=()),
    ]
    assert made.arrived(1, 0, arrived(0, 1, ok=False)) == ([], True)
    assert made.arrived(1, 1, arrived(0)) == ([0], False)
    made.tell_slots(("exporter", b"md"), REGION, [0], [2])
    assert made.arrived(1, 0, arrived(0)) == ([], True)
    assert made.arrived(1, 1, arrived(0)) == ([0], True)
    assert made.arrived(1, 1, arrived(0, ok=False)) == ([0], False), "at once"


@pytest.mark.parametrize(
    ("push", "session", "message", "expected"),
    [
        (False, 2, arrived(0), "fetch 5 is another engine's"),
        (False, 1, arrived(3), r"positions \[3\], which the engine has not claimed"),
        (True, 1, arrived(0), "written by its peer, not read"),
        (False, 1, named(1, 0), "engine blocks for fetch 5, which is not pushed"),
        (True, 2, named(1, 0), "another engine's"),
        (True, 1, named(1, 3), "which the engine has not claimed"),
        (True, 1, p.Target(5, "rank 1", u32([0, 1]), u32([1, 2, 3])), "3 engine blocks for 2"),
        (True, 1, p.Target(5, "rank 1", u32([0]), u32([99])), r"\[99\] of rank 1, others have"),
        (True, 1, p.Target(5, "rank 1", u32([1]), u32([0])), "no engine block for position 1"),
        (True, 1, p.Target(5, "rank 1", u32([1]), b""), "0 engine blocks for 1 positions"),
    ],
)
def test_B2_direct_what_is_not_a_workers_to_tell_is_refused(
    push: bool, session: int, message: p.Arrived | p.Target, expected: str
) -> None:
    made, _ = direct(push=push)
    if push:
        made.target(1, 0, named(0, 0), RANKS)
    with pytest.raises(ProtocolError, match=expected):  # noqa: PT012 - one of two
        if isinstance(message, p.Target):
            made.target(session, 1, message, RANKS)
        else:
            made.arrived(session, 1, message)


def test_workers_are_told_how_to_reach_a_peer_once_and_when_it_changes() -> None:
    made, sent = direct()
    for metadata in (b"a", b"a", b"b"):
        made.tell_slots(("agent", metadata), REGION, [0], [7])
    told = [message for _, message in sent if isinstance(message, p.Places)]
    assert [message.metadata for message in told] == [b"a", b"a", b"", b"", b"b", b"b"]


def test_B20_direct_workers_are_told_verdicts_the_last_of_each_block_last() -> None:
    """Block 1 may be written at first; its peer's End comes in the same turn."""
    made, sent = direct()
    made.passed([0], ok=False)
    made.passed([1], ok=False, written=True)
    made.passed([1], ok=False)
    made.passed([2], ok=True)
    made.passed([], ok=False)
    made.flush()
    assert [message for connection, message in sent if connection == 10] == [
        p.Passed(5, u32([2]), ok=True),
        p.Passed(5, u32([1]), ok=False, written=True),
        p.Passed(5, u32([0, 1]), ok=False),
    ]
    made.flush()
    assert len(sent) == 6, "once"


def test_B13_direct_a_peer_is_told_what_all_ranks_have_named() -> None:
    made, _ = direct(push=True)
    assert made.target(1, 0, named(0, 0, 1), RANKS) == {}
    assert made.target(1, 1, named(1, 1), RANKS) == {1: [11]}
    assert made.target(1, 1, named(1, 0), RANKS) == {0: [10]}


@pytest.mark.parametrize("ranks", [RANKS[:1], (), (RANKS[0], RankPages("new", b"", ()))])
def test_B20_direct_blocks_that_were_named_by_an_agent_that_has_ended_are_told_to_nobody(
    ranks: tuple[RankPages, ...],
) -> None:
    """Their load is over: they may be another request's by now."""
    pair, chain = stored(1)
    number = claimed(pair, chain)
    pair.ranks, named_by = ranks, RANKS
    for rank, pages in enumerate(named_by):
        target = p.Target(number, pages.agent, u32([0]), u32([10]))
        pair.consumer.of_worker(1, rank, target, pair.taker.now_ns)
    pair.run(1)
    assert pair.passed == {(number, 0): False}
    assert not pair.unsafe
    pair.consumer.of_worker(1, 0, target, pair.taker.now_ns)
    pair.consumer.end(number)
    pair.consumer.of_worker(1, 0, target, pair.taker.now_ns)
    pair.check_nothing_left(5)


def test_what_is_behind_a_gap_is_asked_for_though_it_is_here() -> None:
    rules = [GroupRule(), GroupRule(trailing=2)]
    assert reaching_on(rules, [[2, 4], []], 6) == [[2, 3, 4, 5], [3, 4, 5]]
    assert reaching_on(rules, [[], [4]], 6) == [[], [4]]
    hit = with_reads(9, GroupHit([0, 1], [30, 31], [4, 4]), {2: 0, 3: 5})
    assert from_u32(hit.indices) == [0, 1, 2, 3]
    assert from_u32(hit.slots) == [30, 31, p.DIRECT, p.DIRECT + 5]
    assert from_u32(hit.generations) == [4, 4, 9, 9]


class Others:
    """Peers of a desk: what they are asked, and what they have."""

    def __init__(self, offers: dict[int, str], owed: int = 0, *, direct: bool = True) -> None:
        """Be asked `owed` times in vain for what was offered."""
        self.direct, self.asked_ns, self.over_tcp = direct, 0, False
        self.wants: list[m.Want] = []
        self.offers = offers
        self.owed, self.asked = owed, 0
        self.read_: list[list[int]] = []
        self.over: list[int] = []

    def fetch(
        self,
        namespace: Namespace,
        address: str,
        want: m.Want,
        now_ns: int,
        *,
        direct: bool = False,
        hinted: bool = False,
    ) -> int:
        assert (namespace, address, direct) == (namespace, "x:1", self.direct)
        assert not hinted
        self.asked_ns = now_ns
        self.wants.append(want)
        return len(self.wants)

    def inlet(self, _namespace: Namespace) -> Others:
        return self

    def offered(self, _fetch: int) -> dict[int, str] | None:
        self.asked += 1
        return self.offers if self.asked > self.owed else None

    def pushes(self, _address: str) -> bool:
        return self.over_tcp

    def claim(
        self, _fetch: int, _session: int, _workers: Mapping[int, int], positions: list[int]
    ) -> None:
        self.read_.append(positions)

    def end(self, fetch: int) -> None:
        self.over.append(fetch)

    claimed = end

    def progress(self, *_: object) -> None:
        """Nothing is known of it."""


def asking(
    offers: dict[int, str],
    owed: int = 0,
    *,
    memory_only: bool = False,
    block_ns: int | None = None,
    push: bool | None = None,
    over_tcp: bool = False,
    direct: bool = True,
) -> tuple[Others, Engine]:
    """An engine has stored all but the second of four blocks, and asks a peer for it."""
    town, chain = Town(tiers=[("shelf", MemoryTier)]), hashes(4)
    engine = town.attach("engine", direct=True)
    engine.put(chain)
    town.settle(engine)
    namespace = next(iter(town.store.namespaces.values()))
    namespace.manager.drop(keys_of(chain)[1], "test")
    for tier in namespace.tiering.tiers:
        tier.clear()
    others = Others(offers, owed, direct=direct)
    others.over_tcp = over_tcp
    town.store._lookups._peers = others  # type: ignore[assignment]
    where = {
        "memory_only": memory_only,
        "peer": "x:1",
        "direct": True,
        "block_ns": block_ns,
        "push": push,
    }
    engine.step(lookups=(replace(p.Lookup(77, b"".join(chain), 32), **where),))
    return others, engine


def ask(offers: dict[int, str]) -> tuple[Others, Engine, p.Granted]:
    """As asking(), until it has its answer."""
    others, engine = asking(offers)
    engine.town.settle(engine, turns=12)
    return others, engine, engine.granted[77]


def test_little_is_looked_up_again_while_a_peer_owes_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look costs its prompt's length, and others wait meanwhile."""
    looks: list[int] = []
    look = Manager.lookup

    def counted(manager: Manager, chain: Chain, limit: int, *more: object, **how: object) -> Answer:
        looks.append(limit)
        return look(manager, chain, limit, *more, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Manager, "lookup", counted)
    others, engine = asking({0: "cpu", 1: "cpu", 2: "cpu"}, owed=10**9)
    engine.town.settle(engine)
    assert looks == []
    for _ in range(100):  # longer than other answers would be waited for
        engine.town.tick(2)
        engine.pump()
    assert 77 not in engine.granted
    assert 1 <= len(looks) <= 9, "once in 20 ms, then less often"
    others.owed = 0
    engine.town.settle(engine, turns=1)
    assert engine.granted[77].kept == 1, "at once"


@pytest.mark.parametrize(
    ("push", "over_tcp", "direct", "expected"),
    [
        (None, False, True, False),
        (None, True, False, True),
        (False, True, True, False),
        (True, False, True, True),
        (True, True, True, True),
    ],
)
def test_B20_direct_over_TCP_blocks_are_pushed_into_slots_unless_somebody_says_otherwise(
    push: bool | None, over_tcp: bool, direct: bool, expected: bool
) -> None:
    """Who is read over TCP may die with its reader; this agent is not one to be written to."""
    others, _ = asking({0: "cpu"}, push=push, over_tcp=over_tcp, direct=direct)
    assert [want.push for want in others.wants] == [expected]


def test_B6_direct_what_is_behind_a_gap_is_read_too_and_let_go_of_with_its_lease() -> None:
    others, engine, granted = ask({0: "cpu", 1: "cpu", 2: "cpu"})
    assert [from_u32(of) for of in others.wants[0].indices] == [[1, 2, 3]]
    assert others.read_ == [[0, 1, 2]]
    assert granted.kept == 1
    assert from_u32(granted.hits[0].indices) == [0, 1, 2, 3]
    engine.step(release=(granted.lease,))
    engine.town.settle(engine)
    assert others.over == [1]


def test_an_answer_that_came_since_the_last_look_counts_at_the_deadline() -> None:
    others, engine = asking({0: "cpu", 1: "cpu", 2: "cpu"}, owed=10**9)
    town = engine.town
    town.settle(engine)
    assert 77 not in engine.granted
    others.owed = 0
    (session,) = town.store.sessions.values()
    (granted,) = town.store._lookups.retry(session, session.asks[77].deadline_ns)
    assert granted is not None
    assert granted.kept == 1
    assert others.read_ == [[0, 1, 2]]


def test_what_its_own_store_gets_meanwhile_is_answered_though_a_peer_is_silent() -> None:
    _, engine = asking({}, owed=10**9)
    town, keys = engine.town, keys_of(hashes(4))
    town.settle(engine)
    engine.report(0, [engine.credits.pop(0)], [keys[1]], [keys[0]])
    for _ in range(20):
        town.tick(2)
        engine.pump()
    assert from_u32(engine.granted[77].hits[0].indices) == [0, 1, 2, 3]


def test_a_block_that_is_half_written_is_waited_for_no_longer_when_a_peer_has_answered() -> None:
    """By one rank of two: the peer, which lacks it, has nothing to do with that."""
    town, keys = Town(tiers=[("shelf", MemoryTier)]), keys_of(hashes(1))
    engine = town.attach("engine", world=2)
    engine.report(0, [engine.credits.pop(0)], [keys[0]], [b""])
    town.store._lookups._peers = others = Others({}, direct=False)  # type: ignore[assignment]
    engine.step(lookups=(p.Lookup(77, hashes(1)[0], 32, peer="x:1"),))
    while 77 not in engine.granted:
        town.tick(5)
        engine.pump()
    assert len(others.wants) == 1
    assert town.now_ns - others.asked_ns <= settings().engine.defer_ns + 10_000_000


def test_a_session_that_ends_lets_go_of_what_its_lookups_wait_for() -> None:
    others, engine = asking({0: "cpu"}, owed=10**9)
    engine.town.settle(engine)
    assert others.over == []
    engine.town.store.end_sessions()
    assert others.over == [1]


def test_direct_what_has_failed_between_offer_and_claim_is_told() -> None:
    pair, chain = stored(3)
    number = offered(pair, chain)
    pair.consumer._fetches[number].done((1, 2), ok=False)
    pair.claim(number, [0, 1, 2])
    assert pair.passed == {(number, 1): False}
    pair.claim(number + 1, [0])
    assert pair.passed[number + 1, 0] is False


def test_who_wants_nothing_but_memory_asks_no_peer() -> None:
    others, engine = asking({0: "cpu"}, owed=9, memory_only=True)
    engine.town.settle(engine, turns=1)
    assert others.wants == []
    assert from_u32(engine.granted[77].hits[0].indices) == [0]


@pytest.mark.parametrize("offers", [{}, {0: "cpu"}])
def test_direct_what_cannot_be_read_whole_is_not_read(offers: dict[int, str]) -> None:
    """The blocks behind the gap are here, but no lease reaches them."""
    others, _, granted = ask(offers)
    assert (others.read_, others.over) == ([], [1])
    assert from_u32(granted.hits[0].indices) == [0]
    assert granted.kept is None
