"""A fetch whose blocks an engine's workers read: the consumer's side of it, without processes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from connectors.direct import GIVE_UP_NS, DirectReads, Reads
from connectors.jobs import EngineSpec, LoadJob, StoreSpec
from connectors.worker import Task, WorkerHalf
from kvstore import protocol as p
from kvstore.errors import ProtocolError, TierIOError
from kvstore.export import fetches
from kvstore.export import messages as m
from kvstore.layout import GroupLayout, LayerRun, Move, RankLayout
from kvstore.leases import GroupHit
from kvstore.service.direct import Direct, reaching_on, with_reads
from kvstore.service.namespace import Namespace
from kvstore.service.session import Session
from kvstore.types import GroupRule, LookupResult
from tests.export_rig import Pair
from tests.fakes import Engine, Town, from_u32, hashes, keys_of, u32
from tiers.copier import LayerCache
from tiers.direct import EngineReader, Reading
from tiers.exporter.errors import MoveError
from tiers.memory import MemoryTier

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


def test_B19_direct_a_block_is_good_once_it_was_read_and_the_peer_says_that_its_lease_held() -> (
    None
):
    pair, chain = Pair(), hashes(3)
    pair.put(chain)
    number = offered(pair, chain)
    assert pair.consumer.offered(number) == dict.fromkeys(range(3), "cpu")
    pair.run(20)
    assert not pair.passed_on, "nobody has claimed them"
    pair.consumer.claim(number, [0, 1, 2])
    pair.run(5)
    assert sorted(pair.passed_on) == [(number, 0), (number, 1), (number, 2)]
    assert not pair.passed
    pair.consumer.arrived(number, [0, 2], pair.taker.now_ns, ok=True)
    assert not pair.passed, "the peer has not said so"
    pair.run(5)
    assert pair.passed == {(number, 0): True, (number, 2): True}
    pair.consumer.arrived(number, [1], pair.taker.now_ns, ok=False)
    assert pair.passed[number, 1] is False
    pair.run(10)
    pair.check_nothing_left()


def test_B16_direct_what_is_read_when_its_lease_is_over_is_not_good() -> None:
    pair, chain = Pair(), hashes(2)
    pair.put(chain)
    number = offered(pair, chain)
    pair.consumer.claim(number, [0, 1])
    pair.run(5)
    pair.lose()
    pair.consumer.arrived(number, [0, 1], pair.taker.now_ns, ok=True)
    pair.run(5)
    assert pair.passed == {(number, 0): False, (number, 1): False}
    pair.check_nothing_left()


def test_B14_direct_blocks_are_of_one_fetch_and_offered_to_nobody_else() -> None:
    pair, chain = Pair(), hashes(2)
    pair.put(chain)
    number = offered(pair, chain)
    found = {pair.consumer.lookup(key) for key in keys_of(chain)}
    assert found == {LookupResult.MISS}
    pair.consumer.claim(number, [1])
    pair.run(5)
    assert pair.passed_on == [(number, 1)]
    pair.consumer.arrived(number, [1], pair.taker.now_ns, ok=True)
    pair.run(5)
    assert pair.passed == {(number, 1): True}
    pair.check_nothing_left()  # what was not claimed was let go of


def test_direct_blocks_that_nobody_reads_any_more_are_let_go_of() -> None:
    pair, chain = Pair(), hashes(2)
    pair.put(chain)
    number = offered(pair, chain)
    pair.consumer.claim(number, [0, 1])
    pair.consumer.let_go(number)
    assert pair.passed == {(number, 0): False, (number, 1): False}
    pair.run(5)
    pair.check_nothing_left()


@pytest.mark.parametrize("direct", [False, True])
def test_a_peer_that_names_memory_without_end_loses_no_block_that_it_has_told_of(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of a peer's memory has a limit; what was told is read from where it was."""
    monkeypatch.setattr(fetches, "REGIONS_MAX", 2)
    pair, chain = Pair(), hashes(3)
    pair.put(chain)
    if direct:
        number = offered(pair, chain)
    else:
        held, pair.landing.free = pair.landing.free, []
        pair.want(chain)
        pair.decode.ask(chain)
    pair.run(20)
    more = tuple(m.Region(100 + number, 4096, 1) for number in range(9))
    pair.consumer.on_message(pair.peer, m.Have(1, b"", b"", b"", b"", more), pair.taker.now_ns)
    if direct:
        pair.consumer.claim(number, [0, 1, 2])
        assert len(pair.passed_on) == 3
        pair.consumer.let_go(number)
    else:
        pair.landing.give(held)
        pair.run(20)
        assert pair.arrived(chain) == 3
    pair.run(5)
    pair.check_nothing_left()


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
            pair.consumer.claim(number, sorted(claimed))
        read, pair.passed_on = pair.passed_on, []
        for _, position in read:
            assert position in claimed
            pair.consumer.arrived(number, [position], pair.taker.now_ns, ok=rng.random() < 0.8)
        assert not ended.keys() & pair.passed.keys(), "a second end"
        ended |= pair.passed
        pair.passed.clear()
        if rng.random() < 0.03:
            pair.lose()
        if rng.random() < 0.03:
            pair.consumer.let_go(number)
    pair.consumer.let_go(number)
    ended |= pair.passed
    assert {position for _, position in ended} == claimed
    pair.run(20)
    pair.check_nothing_left()


# What the store tells its workers, and they it


def direct() -> tuple[Direct, list[tuple[int, p.Message]]]:
    sent: list[tuple[int, p.Message]] = []
    made = Direct(lambda connection, message, _: sent.append((connection, message)))
    made.begin("n", 5, 1, {0: 10, 1: 11}, [0, 1, 2])
    return made, sent


def test_B13_direct_a_block_is_read_once_all_ranks_have_read_it() -> None:
    made, _ = direct()
    assert made.arrived("n", 1, 0, p.Arrived(5, u32([0, 1]), 8, ok=True)) == ([], True)
    assert made.arrived("n", 1, 0, p.Arrived(5, u32([0]), 8, ok=True)) == ([], True), "a repeat"
    assert made.arrived("n", 1, 1, p.Arrived(5, u32([1]), 8, ok=True)) == ([1], True)
    assert made.arrived("n", 1, 1, p.Arrived(5, u32([2]), 0, ok=False)) == ([2], False)
    assert made.moved_bytes == 24
    made.end("n", 5)
    assert made.arrived("n", 1, 1, p.Arrived(5, u32([0]), 8, ok=True)) is None


@pytest.mark.parametrize(
    ("session", "position", "expected"),
    [(2, 0, "another engine's"), (1, 3, r"positions \[3\], which the engine has not claimed")],
)
def test_B2_direct_what_is_not_a_workers_to_tell_is_refused(
    session: int, position: int, expected: str
) -> None:
    made, _ = direct()
    with pytest.raises(ProtocolError, match=expected):
        made.arrived("n", session, 0, p.Arrived(5, u32([position]), 8, ok=True))


def test_workers_are_told_how_to_reach_a_peer_once_and_when_it_changes() -> None:
    made, sent = direct()
    for metadata in (b"a", b"a", b"b"):
        made.tell("n", 5, ("agent", metadata), REGION, [0], [7])
    told = [message for _, message in sent if isinstance(message, p.Places)]
    assert [message.metadata for message in told] == [b"a", b"a", b"", b"", b"b", b"b"]
    made.end_of(1)
    made.tell("n", 5, ("agent", b"b"), REGION, [0], [7])
    assert isinstance(sent[-1][1], p.Places)
    assert sent[-1][1].metadata == b"b", "another engine knows nothing"
    made.passed("n", 5, 0, ok=True)
    made.passed("n", 5, 1, ok=False)
    made.end("n", 5)
    passed = [(c, from_u32(x.positions), x.ok) for c, x in sent if isinstance(x, p.Passed)]
    assert sorted(passed) == [(10, [0], True), (10, [1], False), (11, [0], True), (11, [1], False)]


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

    def __init__(self, offers: dict[int, str]) -> None:
        self.wants: list[m.Want] = []
        self.offers = offers
        self.read_: list[list[int]] = []
        self.over: list[int] = []

    def fetch(
        self, namespace: Namespace, address: str, want: m.Want, now_ns: int, *, direct: bool = False
    ) -> int:
        assert (namespace, address, direct, now_ns) == (namespace, "x:1", True, now_ns)
        self.wants.append(want)
        return len(self.wants)

    def offered(self, _namespace: Namespace, _fetch: int) -> dict[int, str]:
        return self.offers

    def pushes(self, _address: str) -> bool:
        return True

    def read(
        self, _namespace: Namespace, _fetch: int, positions: list[int], _session: Session
    ) -> None:
        self.read_.append(positions)

    def read_no_more(self, _namespace: Namespace, fetch: int) -> None:
        self.over.append(fetch)

    def claimed(self, _namespace: Namespace, fetch: int) -> None:
        self.over.append(fetch)


def ask(offers: dict[int, str], blocks: int = 4) -> tuple[Others, Engine, p.Granted]:
    """An engine has stored all but the second of four blocks, and asks a peer for it."""
    town, chain = Town(tiers=[("shelf", MemoryTier)]), hashes(4)
    engine = town.attach("engine", direct=True)
    engine.put(chain)
    town.settle(engine)
    namespace = next(iter(town.store.namespaces.values()))
    namespace.manager.drop(keys_of(chain)[1], "test")
    for tier in namespace.tiering.tiers:
        tier.clear()
    others = Others(offers)
    town.store._desk._peers = others
    lookup = p.Lookup(77, b"".join(chain[:blocks]), 32, peer="x:1", direct=True)
    engine.step(lookups=(lookup,))
    town.settle(engine, turns=12)
    return others, engine, engine.granted[77]


def test_B6_direct_what_is_behind_a_gap_is_read_too_and_let_go_of_with_its_lease() -> None:
    others, engine, granted = ask({0: "cpu", 1: "cpu", 2: "cpu"})
    assert [from_u32(of) for of in others.wants[0].indices] == [[1, 2, 3]]
    assert not others.wants[0].push, "direct pulls, unless told otherwise"
    assert others.read_ == [[0, 1, 2]]
    assert granted.kept == 1
    assert from_u32(granted.hits[0].indices) == [0, 1, 2, 3]
    engine.step(release=(granted.lease,))
    engine.town.settle(engine)
    assert others.over == [1]


@pytest.mark.parametrize("offers", [{}, {0: "cpu"}])
def test_direct_what_cannot_be_read_whole_is_not_read(offers: dict[int, str]) -> None:
    """The blocks behind the gap are here, but no lease reaches them."""
    others, _, granted = ask(offers)
    assert (others.read_, others.over) == ([], [1])
    assert from_u32(granted.hits[0].indices) == [0]
    assert granted.kept is None


# The worker's side


class Reader(EngineReader):
    """Reads take as long as the test likes."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[Move, int]]] = []
        self.hangs = self.fails = False
        self.restarts = 0

    def open(self, layout: RankLayout, devices: str) -> None: ...

    def meet(self, peer: str, metadata: bytes) -> None: ...

    def restart(self) -> None:
        self.restarts += 1

    def read(self, peer: str, moves: Sequence[tuple[Move, int]]) -> Reading:
        assert peer == "agent"
        self.moves.append(list(moves))
        return Reading(64, 1, None)

    def over(self, reading: Reading) -> bool:
        assert reading.bytes == 64
        if self.fails:
            raise TierIOError("a test")
        return not self.hangs


class Worker:
    """One load of two blocks: the second one, and half of the third, come from a peer."""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self.reader = Reader()
            patch.setattr("connectors.direct.EngineReader", lambda _: self.reader)
            self.reads = DirectReads({})
        layout = RankLayout(64, (GroupLayout(32, (LayerRun("l", 0, 32, writes=True),)),))
        self.reads.open(layout, "lo")
        slots = (7, p.DIRECT + 4, p.DIRECT + 6)
        self.job = LoadJob(
            "r", 1, 1, EngineSpec((20, 21, 22, 23, 24), (5,), (0,)), StoreSpec("cpu", slots),
            (3, 9, 9),
        )  # fmt: skip
        found = self.reads.reads(self.job, (2,), 1000)
        assert found is not None
        self.load: Reads = found
        self.said: list[p.Arrived] = []

    def places(self, *positions: int) -> None:
        numbers = [position + 1 for position in positions]
        self.reads.told(p.Places(9, "agent", b"md", 4096, 8, u32(positions), u32(numbers)))

    def passed(self, *positions: int, ok: bool = True) -> None:
        self.reads.told(p.Passed(9, u32(positions), ok))

    def advance(self, now_ns: int = 0) -> bool:
        def tell(message: p.Message) -> None:
            assert isinstance(message, p.Arrived)
            self.said.append(message)

        return self.reads.advance(self.load, tell, now_ns)


def test_L1_direct_a_load_is_over_when_all_it_reads_is_good() -> None:
    worker = Worker()
    assert not worker.advance()
    worker.places(4)
    assert not worker.advance()
    first = 4096 + 5 * 64
    assert worker.reader.moves == [
        [(Move(0, 22, p.DIRECT + 4, 0), first), (Move(0, 23, p.DIRECT + 4, 1), first)]
    ]
    assert worker.said == [p.Arrived(9, u32([4]), 64, ok=True)]
    worker.passed(4)
    worker.places(6)
    assert not worker.advance()
    assert len(worker.reader.moves) == 2, "each is read once"
    worker.passed(6)
    assert worker.advance()
    assert not worker.load.failed
    assert worker.load.copied_bytes == 128


def test_what_comes_from_slots_only_reads_nothing_of_a_peer() -> None:
    worker = Worker()
    engine, store = EngineSpec((20, 21), (2,), (0,)), StoreSpec("cpu", (7,))
    assert worker.reads.reads(LoadJob("r", 1, 1, engine, store, (3,)), (2,), 1000) is None


@pytest.mark.parametrize("how", ["refused", "late", "read"])
def test_B15_direct_a_load_that_fails_is_over_when_nothing_is_read_any_more(how: str) -> None:
    worker = Worker()
    worker.reader.hangs = how != "read"
    worker.reader.fails = how == "read"
    worker.places(4)
    now_ns = 0
    if how != "read":
        assert not worker.advance()
        if how == "refused":
            worker.passed(4, ok=False)
        else:
            now_ns = 1000
        assert not worker.advance(now_ns), "it is still being read"
        worker.reader.hangs = False
    assert worker.advance(now_ns)
    assert worker.load.failed
    assert worker.reader.restarts == 0
    assert all(not said.ok for said in worker.said)


def test_B20_direct_a_read_that_does_not_end_ends_with_its_agent() -> None:
    worker = Worker()
    worker.reader.hangs = True
    worker.places(4, 6)
    assert not worker.advance()
    worker.passed(6, ok=False)
    assert not worker.advance()
    assert not worker.advance(GIVE_UP_NS - 1)
    assert worker.reader.restarts == 0
    assert worker.advance(GIVE_UP_NS)
    assert worker.reader.restarts == 1
    assert worker.load.failed


def test_O14_direct_a_load_whose_session_is_over_waits_for_what_is_being_read() -> None:
    worker = Worker()
    worker.reader.hangs = True
    worker.places(4)
    assert not worker.advance()
    half = WorkerHalf.__new__(WorkerHalf)
    half._direct = worker.reads
    task = Task(worker.job, 0, reads=worker.load)
    assert half._abandon(task, worker.job, 0) is None, "engine blocks are being written"
    worker.reader.hangs = False
    outcome = half._abandon(task, worker.job, 1)
    assert outcome is not None
    assert not outcome.ok


class Agent:
    """Knows peers; one of them cannot be reached."""

    def __init__(self, _name: str) -> None:
        self.known: list[str] = []

    def register(self, _address: int, _size: int) -> None: ...

    def add_peer(self, metadata: bytes) -> str:
        if metadata == b"gone":
            raise MoveError("a test", "failed")
        self.known.append(metadata.decode())
        return metadata.decode()

    def read(self, peer: str, *_places: object) -> tuple[int, bool]:
        assert peer in self.known
        return 1, True

    def let_go(self, _flight: int) -> None: ...


def test_B15_direct_a_peer_that_is_gone_keeps_no_other_from_being_read_after_a_restart() -> None:
    reader = EngineReader({"l": LayerCache(torch.zeros(64, dtype=torch.uint8), 0, 32, 32)})
    reader._make = Agent  # type: ignore[assignment]
    reader.open(RankLayout(64, (GroupLayout(32, (LayerRun("l", 0, 32, writes=True),)),)), "lo")
    moves = [(Move(0, 1, 0, 0), 4096)]
    for peer in ("gone", "there"):
        reader.meet(peer, peer.encode())
    for _ in range(2):
        with pytest.raises(TierIOError):
            reader.read("gone", moves)
        assert reader.over(reader.read("there", moves))
        reader.restart()
    reader.meet("there", b"another")
    with pytest.raises(TierIOError, match="metadata of another exporter than 'there'"):
        reader.read("there", moves)
