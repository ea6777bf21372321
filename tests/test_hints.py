"""Hints at the store: which are followed, how long a source is waited for, what is fetched."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvstore.core import limits
from kvstore.store import hints as h
from kvstore.store.hints import PART, RESTS, WAIT_NS, WAIT_NS_MIN, Hints
from kvstore.store.lookups import Lookups
from kvstore.store.namespace import Namespace
from kvstore.store.session import Ask
from kvstore.wire import engine as p
from kvstore.wire import peer as m
from tests.harness.fakes import Engine, Town, from_u32, hashes, value_of
from tests.harness.live import LiveEngine, LiveStore, engine, eventually
from tests.harness.patience import WAIT_S
from tests.harness.peers import address, config
from tests.test_direct_fetch import Others

PLACE = "10.0.0.7:9500"
MS = 1_000_000
OUTCOMES = ("offered", "nothing", "late", "resting", "refused", "needless")


class Sources(Others):
    """Stores at any address, none of which has anything."""

    def fetch(
        self,
        _namespace: Namespace,
        _address: str,
        want: m.Want,
        _now_ns: int,
        *,
        direct: bool = False,
        hinted: bool = False,
    ) -> int:
        assert hinted
        assert not direct, "what has a source that others may have, too, goes into the store"
        self.wants.append(want)
        return len(self.wants)


class Asker:
    """An engine whose store may follow hints to one network, in a time that is the test's."""

    def __init__(self, blocks: int = 8, *, owed: int = 10**9) -> None:
        self.town, self.chain = Town(), hashes(blocks)
        self.engine: Engine = self.town.attach("engine", direct=True)
        self.town.settle(self.engine)
        self.others = Sources({}, owed)
        self.lookups = self.town.store._lookups
        self.lookups._peers = self.others  # type: ignore[assignment]
        self.lookups._hints = Hints(["10.0.0.0/24", "Prefill-1"], self.town.store.numbers)
        self._asks = 100

    def ask(self, block_ns: int | None = 10 * MS, peer: str = PLACE, hinted: int = 8) -> int:
        self._asks += 1
        lookup = p.Lookup(self._asks, b"".join(self.chain), 32)
        lookup = replace(lookup, peer=peer, hinted=hinted, block_ns=block_ns, direct=True)
        self.engine.step(lookups=(lookup,))
        return self._asks

    def waited_ms(self, ask: int, limit_ms: int = 3000) -> int:
        """How long a lookup waits for its answer."""
        for waited in range(limit_ms):
            self.engine.pump()
            if ask in self.engine.granted:
                return waited
            self.town.tick(1)
        raise AssertionError("no answer in time")

    @property
    def counts(self) -> dict[str, float]:
        numbers = self.town.store.numbers
        found = {outcome: value_of(numbers, "kvstore_hints", outcome) for outcome in OUTCOMES}
        return {outcome: count for outcome, count in found.items() if count}


@pytest.mark.parametrize(
    ("block_ns", "expected_ms"),
    [(10 * MS, 8 * 10 // PART), (200 * MS, 8 * 200 // PART), (0, WAIT_NS // MS), (10**12, 1000)],
)
def test_O26_a_source_is_waited_for_a_tenth_of_what_computing_takes(
    block_ns: int, expected_ms: int
) -> None:
    asker = Asker()
    waited_ms = asker.waited_ms(asker.ask(block_ns))
    assert expected_ms <= waited_ms <= expected_ms + 2
    assert asker.counts == {"late": 1}
    assert asker.others.over == [1], "and let go of"


def test_O26_an_answer_is_used_at_once() -> None:
    asker = Asker(owed=3)
    assert asker.waited_ms(asker.ask(10**9)) <= 6
    assert asker.counts == {"nothing": 1}


def test_O26_a_source_that_was_late_is_not_waited_for_by_the_next_requests() -> None:
    asker = Asker()
    wait_ms = asker.waited_ms(asker.ask(200 * MS))
    for _ in range(3):
        assert asker.waited_ms(asker.ask(200 * MS)) <= 1
    assert asker.waited_ms(asker.ask(200 * MS, "10.0.0.8:9500")) >= wait_ms - 2, "another one"
    assert asker.counts == {"late": 2, "resting": 3}
    assert len(asker.others.wants) == 2
    asker.town.tick(RESTS * wait_ms + 2)
    assert asker.waited_ms(asker.ask(200 * MS)) >= wait_ms - 2, "after a while it is asked again"


def test_O26_what_is_soon_computed_is_not_asked_for() -> None:
    asker = Asker()
    assert asker.waited_ms(asker.ask(WAIT_NS_MIN * PART // 8 - 1)) <= 1
    assert asker.waited_ms(asker.ask(10 * MS, hinted=4)) <= 1, "nor the few that a hint names"
    assert (asker.counts, asker.others.wants) == ({"needless": 2}, [])


@pytest.mark.parametrize("block_ns", [10**9, 0])
def test_O26_what_is_here_is_not_asked_for(block_ns: int) -> None:
    asker = Asker(3)
    asker.engine.put(asker.chain)
    asker.town.settle(asker.engine)
    ask = asker.ask(block_ns)
    assert asker.waited_ms(ask) <= 1
    assert from_u32(asker.engine.granted[ask].hits[0].indices) == [0, 1, 2]
    assert (asker.counts, asker.others.wants) == ({"needless": 1}, [])


def test_O26_no_more_is_asked_for_than_a_hint_names_and_a_turn_has_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asker = Asker(200)
    asker.ask(10**9, hinted=150)
    monkeypatch.setattr("kvstore.store.lookups.HINT_BLOCKS_MAX", 4)
    for here in (3, 6, 8):
        asker.engine.put(asker.chain[:here])
        asker.town.settle(asker.engine)
        asker.ask(10**9, hinted=150)
    asker.ask(10**9, hinted=10)
    wanted = [[from_u32(group) for group in want.indices] for want in asker.others.wants]
    assert wanted == [[[*range(150)]], [[3, 4, 5, 6]], [[6, 7, 8, 9]], [[8, 9, 10, 11]], [[8, 9]]]
    assert [len(want.hashes) // 32 for want in asker.others.wants] == [150, 7, 10, 12, 10]


def test_O26_what_memory_has_of_a_hint_is_not_gone_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.store.lookups.HINT_BLOCKS_MAX", 4)
    looked, lacking = list[tuple[int, int]](), Lookups._lacking

    def seen(ask: Ask, blocks: int, *, direct: bool = False, first: int = 0) -> list[Sequence[int]]:
        looked.append((first, blocks))
        return lacking(ask, blocks, direct=direct, first=first)

    monkeypatch.setattr(Lookups, "_lacking", staticmethod(seen))
    for here, expected in ((12, [(12, 12)]), (7, [(7, 11)])):
        asker = Asker(12)
        asker.engine.put(asker.chain[:here])
        asker.town.settle(asker.engine)
        looked.clear()
        asker.ask(10**9, hinted=12)
        assert looked == expected


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("10.0.0.255:1", True),
        ("prefill-1:9500", True),
        ("PREFILL-1:9500", True),
        ("10.0.1.7:9500", False),
        ("prefill-10:9500", False),
        ("[::1]:9500", False),
        ("10.0.0.7", False),
        ("10.0.0.7:0", False),
        ("10.0.0.7:99999", False),
        ("10.0.0.0/24:9500", False),
        ("", False),
        ("\0:1", False),
    ],
)
def test_O26_only_hosts_that_are_named_are_asked(place: str, allowed: bool) -> None:
    asker = Asker()
    ask = asker.ask(10**9, place)
    assert len(asker.others.wants) == allowed
    if not allowed:
        assert asker.waited_ms(ask) <= 1
        assert asker.counts == ({"refused": 1} if place else {})


def test_O26_addresses_that_rest_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h, "RESTING_MAX", 3)
    asker = Asker()
    for host in range(8):
        asker.waited_ms(asker.ask(10 * MS, f"10.0.0.{host}:1"))
    assert list(asker.lookups._hints._resting) == [f"10.0.0.{host}:1" for host in (5, 6, 7)]


# Real stores


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveStore, LiveStore]]:
    """One that has blocks, and one that follows hints."""
    folder = tmp_path_factory.mktemp("hints")
    with (
        pytest.MonkeyPatch.context() as patch,
        LiveStore(config(folder / "a")) as source,
        LiveStore(config(folder / "b", peer={"hints": ["127.0.0.0/8"]})) as asking,
    ):
        patch.setattr(h, "WAIT_NS_MAX", int(WAIT_S * 1e9))  # a machine may stand still for longer
        yield source, asking


def hinted(
    one: LiveEngine, chain: Sequence[bytes], place: str, count: int = 0, s: float = WAIT_S
) -> p.Granted:
    """Ask with a hint whose answer is waited for so long."""
    blocks = count or len(chain)
    block_ns = min(int(s * PART * 1e9 / blocks), limits.BLOCK_NS_MAX)
    return one.ask(chain, peer=place, hinted=blocks, block_ns=block_ns)


def counted(store: LiveStore) -> dict[str, float]:
    numbers = store.server.store.numbers
    return {outcome: value_of(numbers, "kvstore_hints", outcome) for outcome in OUTCOMES}


def grown(store: LiveStore, before: dict[str, float]) -> dict[str, float]:
    now = counted(store)
    return {name: now[name] - before[name] for name in now if now[name] != before[name]}


@pytest.mark.parametrize("count", [5, 3])
def test_O26_blocks_come_from_the_store_that_a_hint_names(
    stores: tuple[LiveStore, LiveStore], count: int
) -> None:
    source, asking = stores
    before, chain = counted(asking), hashes(5, f"named {count}")
    with engine(source, f"a{count}") as one, engine(asking, f"b{count}") as two:
        one.put(chain)
        eventually(lambda: len(one.ask(chain).hits) and one.active)
        granted = hinted(two, chain, address(source), count)
        assert granted.sources == {"peer": count}
        assert two.read(granted) == [two.content(block) for block in chain[:count]]
        again = two.ask(chain)
        assert (again.sources, len(two.read(again))) == ({}, count), "they are here now"
    assert grown(asking, before) == {"offered": 1}


@pytest.mark.parametrize("other_model", [False, True])
def test_O26_a_source_that_has_nothing_for_the_model_is_not_waited_for(
    stores: tuple[LiveStore, LiveStore], *, other_model: bool
) -> None:
    source, asking = stores
    before, chain = counted(asking), hashes(3, f"nobody's {other_model}")
    model = "another" if other_model else "model"
    with engine(source, f"a {model}") as one, engine(asking, f"b {model}", model=model) as two:
        if other_model:
            one.put(chain)
        assert hinted(two, chain, address(source)).lease == 0
    assert grown(asking, before) == {"nothing": 1}


def test_O26_where_nobody_listens_nothing_is_waited_for(
    stores: tuple[LiveStore, LiveStore],
) -> None:
    _, asking = stores
    before = counted(asking)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        place = f"127.0.0.1:{sock.getsockname()[1]}"
    with engine(asking, "b dead") as two:
        assert hinted(two, hashes(3, "dead"), place).lease == 0
    assert grown(asking, before) == {"nothing": 1}


def test_O26_a_source_that_says_nothing_is_late(stores: tuple[LiveStore, LiveStore]) -> None:
    _, asking = stores
    before = counted(asking)
    with socket.create_server(("127.0.0.1", 0)) as sock, engine(asking, "b mute") as two:
        place = f"127.0.0.1:{sock.getsockname()[1]}"
        for name in ("first", "second"):
            assert hinted(two, hashes(3, name), place, s=0.2).lease == 0
    assert grown(asking, before) == {"late": 1, "resting": 1}


def test_O26_a_source_that_is_waited_for_holds_up_no_other_request(
    stores: tuple[LiveStore, LiveStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No peer has offered the blocks yet: another request of the same prompt is answered."""
    _, asking = stores
    monkeypatch.setattr("kvstore.handover.consumer.ANSWER_NS", int(WAIT_S * 1e9))
    chain = hashes(3, "waited for")
    block_ns = 5 * 10**9 * PART // 3  # 5 s are waited for the source
    with socket.create_server(("127.0.0.1", 0)) as sock, engine(asking, "b waits") as two:
        place = f"127.0.0.1:{sock.getsockname()[1]}"
        waiting = p.Lookup(1001, b"".join(chain), 32, peer=place, hinted=3, block_ns=block_ns)
        two.scheduler.send(p.Step((waiting, p.Lookup(1002, b"".join(chain), 32))))
        granted: tuple[p.Granted, ...] = ()
        while not granted:
            granted = two.scheduler.take(p.Answers).granted
        assert [(each.ask, each.missed[0]) for each in granted] == [(1002, "never_seen")]


def test_O26_without_hosts_no_hint_is_followed(
    stores: tuple[LiveStore, LiveStore], tmp_path: Path
) -> None:
    source, _ = stores
    chain = hashes(3, "not followed")
    with LiveStore(config(tmp_path)) as store:
        with engine(source, "a not") as one, engine(store, "b not") as two:
            one.put(chain)
            assert hinted(two, chain, address(source)).lease == 0
            peers = store.server._peers
            assert peers is not None
            assert not peers.links.all, "nor is anybody called"
        assert {name for name, count in counted(store).items() if count} == {"refused"}
