"""Requests that are handed over: by which name, until when, and who lets go of them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstore.core.errors import ProtocolError
from kvstore.core.limits import LOOKUP_BLOCKS_MAX
from kvstore.core.manager import Manager
from kvstore.core.types import GroupRule
from kvstore.handover import producer
from kvstore.handover import request_leases as h
from kvstore.handover.fetches import LEASE_MS
from kvstore.handover.heartbeats import Requests
from kvstore.handover.jobs import OwnExporter
from kvstore.handover.links import Links
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.fakes import SLOT_BYTES, from_u32, generations_of, hashes, keys_of, u32
from tests.harness.handover_pair import Pair, stored

S = 10**9


class Rig(Pair):
    """A pair to whose producer somebody else speaks, too."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = hashes(3)
        self.request_leases = self.producer.request_leases

    def say(self, message: framing.Message) -> framing.Message | None:
        """Tell the producer something as one that did not say Hello; its answer."""
        heard: list[framing.Message] = []
        send, self.producer._send = self.producer._send, lambda _, said: heard.append(said)
        try:
            self.producer.on_message(99, message, self.giver.now_ns)
        finally:
            self.producer._send = send
        return heard[0] if heard else None

    def report(self, request: str = "r", rank: int = 0, consumers: int = 1) -> str:
        answer = self.say(m.Keep(self.source.layout.digest, request, 0, rank, consumers))
        assert isinstance(answer, m.Noted)
        assert answer.request == request
        return answer.state

    def keep(self, request: str, lease_ms: int) -> None:
        assert self.say(m.Keep(self.source.layout.digest, request, lease_ms)) is None

    def begin(self, request: str = "r", common: str = "") -> None:
        self.request_leases.running(request, self.source.manager, SLOT_BYTES, 1, common)

    def hold(self, request: str = "r", lease_ns: int = S, *, fixed: bool = False) -> None:
        """End a request whose blocks are all there."""
        self.begin(request)
        self.put(self.chain)
        now_ns = self.giver.now_ns
        self.request_leases.done(
            request,
            self.source.manager,
            1,
            keys_of(self.chain),
            now_ns + lease_ns,
            now_ns,
            fixed=fixed,
        )

    def end(self, lease_ns: int = S) -> int:
        """End request r, whose blocks may come later; return the time."""
        now_ns = self.giver.now_ns
        self.request_leases.done(
            "r", self.source.manager, 1, keys_of(self.chain), now_ns + lease_ns, now_ns
        )
        return now_ns

    @property
    def held(self) -> int:
        return self.request_leases.held_bytes // SLOT_BYTES

    def after(self, ns: int) -> int:
        """What is held some time from now."""
        self.request_leases.tick(self.giver.now_ns + ns)
        return self.held


# Letting go


def test_L6_blocks_go_when_every_consumer_has_reported_and_repeats_do_not_count() -> None:
    rig = Rig()
    rig.hold()
    assert [rig.report("r", rank, 3) for rank in (0, 2, 2, 0)] == ["waits"] * 4
    assert rig.held == 3
    assert rig.report("r", 1, 3) == "released"
    assert rig.held == 0
    assert [entry.pins for entry in rig.source.manager.index] == [0, 0, 0]
    assert rig.report("r", 1, 3) == "released", "said again, it changes nothing"
    assert rig.producer.counts["released"] == 1


def test_S2_no_more_is_held_for_requests_than_is_configured() -> None:
    rig = Rig()
    rig.request_leases.held_bytes_max = 2 * SLOT_BYTES
    rig.hold()
    assert rig.held == 2
    assert sorted(entry.pins for entry in rig.source.manager.index) == [0, 1, 1]


def test_L6_consumers_agree_how_many_they_are() -> None:
    rig = Rig()
    rig.hold()
    rig.report("r", 0, 2)
    with pytest.raises(ProtocolError, match="3 consumers, others said 2"):
        rig.report("r", 1, 3)
    assert rig.held == 3


@pytest.mark.parametrize(("rank", "consumers"), [(-1, 1), (1, 1), (0, 0), (0, 1025)])
def test_L6_a_rank_is_one_of_so_many(rank: int, consumers: int) -> None:
    done = msgspec.msgpack.decode(msgspec.msgpack.encode(m.Keep("n", "r", 0)))
    done[-2:] = rank, consumers
    with pytest.raises(ProtocolError, match=r"rank .* of .*, at most 1024"):
        m.decode_for_producer(msgspec.msgpack.encode(done))


def test_L6_who_only_fetches_lets_go_of_nothing() -> None:
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    pair.put(chain)
    now_ns = pair.giver.now_ns
    pair.producer.request_leases.done(
        "r", pair.source.manager, 1, keys_of(chain), now_ns + 10 * S, now_ns
    )
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(20)
    assert pair.arrived(chain) == 3
    assert len(pair.producer.request_leases) == 1, "another consumer may come"


def test_B18_a_report_on_a_running_request_waits_for_its_end() -> None:
    rig = Rig()
    rig.begin()
    rig.put(rig.chain)
    key = keys_of(hashes(4))[3]
    assert rig.request_leases.may_come("r", rig.source.manager, key)
    assert rig.report() == "waits"
    assert not rig.request_leases.may_come("r", rig.source.manager, key), "nobody waits for it"
    assert len(rig.request_leases) == 1
    rig.end()
    assert (len(rig.request_leases), rig.held) == (0, 0)
    assert rig.producer.counts["released"] == 1


def test_B18_what_ended_without_blocks_is_gone_at_once() -> None:
    rig = Rig()
    rig.begin()
    rig.request_leases.gone("r", rig.source.manager, 1)
    rig.begin("of a lost engine")
    rig.request_leases.end_of(1)
    assert rig.report() == rig.report("of a lost engine") == "gone"
    assert rig.producer.counts["unknown"] == 0


def test_B18_an_unknown_request_is_refused_and_counted() -> None:
    rig = Rig()
    assert rig.report("nobody's") == "unknown"
    rig.keep("nobody's", 1000)
    assert rig.producer.counts["unknown"] == 2


def test_B18_another_models_request_is_unknown() -> None:
    rig = Rig()
    rig.hold()
    other = rig.giver.attach("other", identity="another model")
    assert other.active
    (digest,) = rig.giver.store.namespaces.keys() - {rig.source.layout.digest}
    assert rig.say(m.Keep(digest, "r", 0)) == m.Noted("r", "unknown")
    assert rig.say(m.Keep("no model's", "r", 0)) == m.Noted("r", "unknown")
    rig.say(m.Keep(digest, "r", 60_000))
    assert rig.held == 3
    assert rig.after(S) == 0


def test_B18_how_requests_ended_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h, "PAST_MAX", 2)
    rig = Rig()
    for name in "abc":
        rig.begin(name)
        rig.request_leases.gone(name, rig.source.manager, 1)
    assert [rig.report(name) for name in "abc"] == ["unknown", "gone", "gone"]


@pytest.mark.parametrize("owner", [1, 2])
def test_B18_an_id_that_comes_again_is_another_requests(owner: int) -> None:
    """Of the same engine, or of one that takes the place of an engine that is gone."""
    rig = Rig()
    rig.hold()
    rig.report("r", 0, 2)
    if owner == 2:
        rig.request_leases.end_of(1)
        assert rig.held == 3, "what was computed stays"
    rig.request_leases.running("r", rig.source.manager, SLOT_BYTES, owner)
    assert rig.held == 0
    key = keys_of(hashes(9, "new"))[8]
    assert rig.request_leases.may_come("r", rig.source.manager, key)
    assert rig.report("r", 0, 1) == "waits", "nobody has reported on this one"


def test_B18_a_request_is_its_engines_and_its_namespaces() -> None:
    """An id is unique in one engine; what another one says under it is of another request."""
    rig = Rig()
    other = rig.giver.attach("other", identity="another model")
    (digest,) = rig.giver.store.namespaces.keys() - {rig.source.layout.digest}
    elsewhere, here = rig.giver.store.namespaces[digest].manager, rig.source.manager
    assert other.active
    rig.hold()
    leases = rig.request_leases
    leases.running("r", elsewhere, SLOT_BYTES, 2)
    leases.gone("r", elsewhere, 2)
    leases.running("r", here, SLOT_BYTES, 3)
    leases.gone("r", here, 3)
    assert rig.held == 3
    rig.begin("computes")
    leases.done("computes", here, 3, [], 0, 0)
    assert leases.computes("computes", here)
    assert rig.producer.counts["ambiguous"] == 1
    assert rig.say(m.Keep(digest, "r", 0)) == m.Noted("r", "gone")
    assert rig.say(m.Keep("not served", "r", 0)) == m.Noted("r", "unknown")
    assert rig.report() == "released"


def test_B18_a_routers_name_is_one_of_each_model() -> None:
    rig = Rig()
    other = rig.giver.attach("other", identity="another model")
    (digest,) = rig.giver.store.namespaces.keys() - {rig.source.layout.digest}
    assert other.active
    rig.begin("r-1", "r")
    elsewhere = rig.giver.store.namespaces[digest].manager
    rig.request_leases.running("r-2", elsewhere, SLOT_BYTES, 2, "r")
    assert rig.report() == "waits"


def test_B18_a_request_that_is_told_of_twice_is_one() -> None:
    rig = Rig()
    rig.begin("r-0-1a2b3c4d", "r-0")
    rig.report("r-0", 0, 2)
    rig.begin("r-0-1a2b3c4d", "r-0")
    assert rig.report("r-0", 1, 2) == "waits"
    now_ns = rig.giver.now_ns
    rig.request_leases.done(
        "r-0-1a2b3c4d", rig.source.manager, 1, keys_of(rig.chain), now_ns + S, now_ns
    )
    assert len(rig.request_leases) == 0, "both have reported"


def test_ended_requests_are_remembered_without_their_namespace() -> None:
    def made() -> Manager:
        return Manager((GroupRule(),), generations_of(1))

    leases, namespace = h.RequestLeases(0, Counter()), made()
    leases.running("r", namespace, SLOT_BYTES, 1)
    leases.gone("r", namespace, 1)
    assert leases.knows("r", namespace)
    assert leases.report(namespace, "r", 0, 1) == "gone"
    assert leases.report(None, "r", 0, 1) == "unknown"
    kept = weakref.ref(namespace)
    del namespace
    gc.collect()
    assert kept() is None
    assert not leases.knows("r", made()), "it is another one"


# Leases


def test_B11_a_heartbeat_makes_a_lease_longer_and_never_shorter() -> None:
    rig = Rig()
    rig.hold()
    rig.keep("r", 5000)
    rig.keep("r", 1)
    assert rig.after(5 * S - 1) == 3
    assert rig.after(5 * S) == 0
    assert rig.producer.counts["extended"] == 2
    assert rig.producer.counts["lapsed"] == 1
    assert rig.report() == "lapsed"


def test_B11_a_heartbeat_before_the_end_counts_after_it() -> None:
    rig = Rig()
    rig.begin()
    rig.keep("r", 5000)
    rig.hold()
    assert rig.after(4 * S) == 3


@pytest.mark.parametrize("lease_ms", [0, -1, 600_001])
def test_B11_a_lease_is_bounded(lease_ms: int) -> None:
    rig = Rig()
    rig.hold()
    want = m.Want(1, rig.chain[0], 32, (u32([0]),), lease_ms=lease_ms)
    with pytest.raises(ProtocolError, match=f"a lease of {lease_ms} ms"):
        rig.producer.on_message(rig.peer, want, rig.giver.now_ns)
    if lease_ms:  # to keep for 0 is to be done
        with pytest.raises(ProtocolError, match=f"a lease of {lease_ms} ms"):
            rig.keep("r", lease_ms)


def test_L4_a_heartbeat_does_not_move_a_time_to_live() -> None:
    rig = Rig()
    rig.begin()
    rig.keep("r", 60_000)
    rig.hold(fixed=True)
    rig.keep("r", 60_000)
    assert rig.after(S - 1) == 3
    assert rig.after(S) == 0


class Waiting:
    """Requests that wait, and what the store that holds them is told: their name, for how long."""

    def __init__(self) -> None:
        self._said: list[tuple[str, int]] = []
        leases = h.RequestLeases(0, Counter())
        links: Any = SimpleNamespace(tell=self._tell)
        self._namespace: Any = SimpleNamespace(layout=SimpleNamespace(digest="n"))
        self.requests = Requests(leases, lambda: None, links, lambda _: "")

    def _tell(self, address: str, namespace: str, keep: m.Keep) -> bool:
        assert (address, namespace, keep.namespace) == ("a:1", "n", "n")
        self._said.append((keep.request, keep.lease_ms))
        return True

    def _take(self) -> list[tuple[str, int]]:
        said, self._said = self._said, []
        return said

    def begin(self, request: str, session: int, now_s: int) -> list[tuple[str, int]]:
        step = p.Step(lookups=(p.Lookup(1, b"", 1, peer="a:1", request=request),))
        self.requests.on_step(self._namespace, session, step, now_s * S)
        return self._take()

    def end(self, request: str) -> list[tuple[str, int]]:
        step = p.Step(unwanted=(p.Unwanted("a:1", request),))
        self.requests.on_step(self._namespace, 1, step, 0)
        return self._take()

    def due(self, now_s: int) -> list[tuple[str, int]]:
        self.requests.tick(now_s * S)
        return self._take()


def test_B11_heartbeats_are_sent_at_a_period_until_the_request_or_its_engine_ends() -> None:
    waiting = Waiting()
    assert waiting.begin("1", session=1, now_s=0) == [("1", LEASE_MS)]
    assert waiting.begin("1", session=1, now_s=0) == []
    waiting.begin("2", session=2, now_s=5)
    one, two = ("1", LEASE_MS), ("2", LEASE_MS)
    assert [waiting.due(at) for at in (9, 10, 14, 15, 20, 25)] == [
        [], [one], [], [two], [one], [two]
    ]  # fmt: skip
    assert waiting.end("1") == [("1", 0)]
    assert waiting.due(100) == [two]
    waiting.requests.end_of(2)
    assert waiting.due(1000) == []


def test_B11_who_waits_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.handover.heartbeats.WAITING_MAX", 1)
    waiting = Waiting()
    waiting.begin("1", session=1, now_s=0)
    assert waiting.begin("2", session=1, now_s=0) == []
    assert waiting.due(10) == [("1", LEASE_MS)]


# Names


def test_P9_a_request_is_found_by_its_id_or_by_what_both_engines_call_it() -> None:
    rig = Rig()
    rig.begin("r-0-1a2b3c4d", "r-0")
    key = keys_of(rig.chain)[0]
    assert rig.request_leases.may_come("r-0-1a2b3c4d", rig.source.manager, key)
    assert rig.request_leases.may_come("r-0", rig.source.manager, key)
    assert not rig.request_leases.may_come("r", rig.source.manager, key)
    assert rig.report("r-0") == "waits"
    rig.request_leases.gone("r-0-1a2b3c4d", rig.source.manager, 1)
    assert not rig.request_leases.may_come("r-0", rig.source.manager, key)
    assert not rig.request_leases._common


def test_P9_an_id_of_its_own_comes_before_a_common_one() -> None:
    rig = Rig()
    rig.begin("r-0")
    rig.begin("r-0-1a2b3c4d", "r-0")
    rig.request_leases.gone("r-0", rig.source.manager, 1)
    assert rig.report("r-0") == "waits", "the other one's name now"


def test_P9_an_ambiguous_id_is_refused() -> None:
    rig = Rig()
    for suffix in ("1a2b3c4d", "deadbeef"):
        rig.begin(f"r-0-{suffix}", "r-0")
    assert rig.report("r-0") == "ambiguous"
    assert not rig.request_leases.may_come("r-0", rig.source.manager, keys_of(rig.chain)[0])
    rig.keep("r-0", 1000)
    assert rig.producer.counts["unknown"] == 1, "neither of them is meant"
    number = rig.want(rig.chain, request="r-0")
    ask = rig.decode.ask(rig.chain)
    rig.run(6)
    assert number not in rig.consumer._fetches
    assert rig.decode.granted[ask].lease == 0
    assert m.Settled(number, end="ambiguous") in rig.down.sent
    assert rig.producer.counts["ambiguous"] == 2
    assert rig.report("r-0-deadbeef") == "waits"
    rig.request_leases.gone("r-0-deadbeef", rig.source.manager, 1)
    assert rig.request_leases.may_come("r-0", rig.source.manager, keys_of(rig.chain)[0])


def test_P9_who_asks_before_the_request_is_known_waits_for_it_a_moment() -> None:
    rig, chain = Pair(), hashes(3)
    rig.want(chain, request="r-0")
    ask = rig.decode.ask(chain)
    rig.run(9)
    assert ask not in rig.decode.granted
    manager = rig.source.manager
    rig.producer.request_leases.running("r-0-1a2b3c4d", manager, SLOT_BYTES, 1, "r-0")
    rig.run(9)
    assert len(from_u32(rig.decode.granted[ask].hits[0].indices)) == 3
    rig.put(chain)
    rig.run(9)
    assert rig.arrived(chain) == 3
    rig.check_nothing_left()


def test_B18_who_asks_for_a_request_that_does_not_come_gets_what_there_is() -> None:
    rig, chain = Pair(), hashes(3)
    rig.put(chain[:1])
    rig.want(chain, request="nobody's")
    ask = rig.decode.ask(chain)
    rig.run(2, ms=100)
    assert ask not in rig.decode.granted
    rig.run(9, ms=100)
    assert len(from_u32(rig.decode.granted[ask].hits[0].indices)) == 1
    assert rig.producer.counts["unknown"] == 1
    rig.run(20)
    rig.check_nothing_left()


def test_B18_what_is_here_is_offered_at_once_whatever_the_request() -> None:
    rig, chain = stored(3)
    rig.want(chain, request="nobody's")
    ask = rig.decode.ask(chain)
    rig.run(3)
    assert len(from_u32(rig.decode.granted[ask].hits[0].indices)) == 3


def test_a_fetch_that_is_withdrawn_before_its_offer_is_over() -> None:
    rig, chain = Pair(), hashes(3)
    rig.want(chain, request="r")
    rig.run(2)
    rig.consumer.withdraw("r")
    rig.run(4)
    rig.check_nothing_left()


# Exporters that start late


def test_who_comes_before_the_exporter_is_told_to_wait_and_welcome_later() -> None:
    pair, said = Pair(), list[framing.Message]()
    pair.producer._send = lambda _, message: said.append(message)
    up: list[OwnExporter] = []
    pair.producer._exporter = lambda: up[0] if up else None
    layout = pair.source.layout
    hello = m.Hello(m.VERSION, layout.digest, layout.traits, "other", b"md")
    pair.producer.on_message(50, hello, 0)
    for _ in range(2):
        pair.producer.tick(pair.giver.now_ns)
    assert said == [m.Welcome()]
    with pytest.raises(ProtocolError, match="a second Hello"):
        pair.producer.on_message(50, hello, 0)
    up.append(OwnExporter("agent", b"md", {}))
    pair.producer.tick(pair.giver.now_ns)
    pair.producer.tick(pair.giver.now_ns)
    assert said[1:] == [m.Welcome("agent", b"md")]


def test_those_who_wait_for_the_exporter_are_limited_and_others_may_ask_again() -> None:
    pair, said = Pair(), dict[int, framing.Message]()
    pair.producer._send = said.__setitem__
    pair.producer._exporter = lambda: None
    layout = pair.source.layout
    hello = m.Hello(m.VERSION, layout.digest, layout.traits, "other", bytes(1 << 20))
    for number in range(100, 101 + producer.EARLY_MAX):
        pair.producer.on_message(number, hello, 0)
    last = said.pop(100 + producer.EARLY_MAX)
    assert isinstance(last, m.Refused)
    assert last.retry
    assert all(one == m.Welcome() for one in said.values())
    assert len(pair.producer._early) == producer.EARLY_MAX
    pair.producer.on_closed(100)
    pair.producer.on_message(100 + producer.EARLY_MAX, hello, 0)
    assert said[100 + producer.EARLY_MAX] == m.Welcome()


def test_a_peer_that_asks_for_patience_gets_it_until_it_is_there() -> None:
    pair, chain = Pair(), hashes(2)
    pair.up.cut = True
    pair.want(chain)
    other = pair.consumer.want(99, m.Want(1, chain[0], 32, (u32([0]),)), pair.taker.now_ns)
    pair.consumer.heard(pair.peer, pair.taker.now_ns, 10 * S)
    pair.run(5, ms=1000)
    assert len(pair.consumer._fetches) == 1
    assert other not in pair.consumer._fetches
    pair.consumer.heard(pair.peer, pair.taker.now_ns)
    pair.run(1, ms=1000)
    assert not pair.consumer._fetches


# What a consumer takes back


def test_P8_what_is_not_being_loaded_is_not_fetched_once_its_request_is_gone() -> None:
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    pair.put(chain)
    number = pair.want(chain, request="r")
    other = pair.want(hashes(2, "other"), request="r2")
    pair.run(4)
    pair.consumer.withdraw("r")
    assert number not in pair.consumer._fetches
    assert m.Settle(number, 0) in pair.up.sent
    assert m.Settle(other, 0) not in pair.up.sent
    pair.producer.request_leases.gone("r", pair.source.manager, 1)
    pair.run(6)
    assert pair.arrived(chain) == 0
    assert all(entry.pins == 0 for entry in pair.source.manager.index)


def test_P8_what_is_being_loaded_arrives_though_its_request_is_gone() -> None:
    pair, chain = stored(3)
    pair.want(chain, push=True, request="r")
    pair.decode.ask(chain)
    pair.run(3)
    pair.consumer.withdraw("r")
    pair.run(20)
    assert pair.arrived(chain) == 3
    pair.check_nothing_left()


# The time that engine blocks are needed


def test_how_long_blocks_are_copied_after_a_requests_end_is_told_once() -> None:
    rig = Rig()
    rig.begin()
    rig.put(rig.chain[:2])
    ended_ns = rig.end(S)
    assert rig.request_leases.take_stored_ns() == []
    rig.put(rig.chain)
    rig.request_leases.tick(ended_ns + 3000)
    rig.request_leases.tick(ended_ns + 4000)
    assert rig.request_leases.take_stored_ns() == [3000]
    assert rig.request_leases.take_stored_ns() == []
    rig.hold("there already")
    assert rig.request_leases.take_stored_ns() == [0]


def test_B12_a_lease_begins_when_the_last_block_is_there() -> None:
    rig = Rig()
    rig.begin()
    rig.put(rig.chain[:1])
    rig.end(2 * S)
    rig.put(rig.chain[:2])
    assert rig.after(4 * S) == 2, "nothing has lapsed meanwhile"
    assert rig.after(4 * S + h.LATE_NS - 1) == 2
    assert rig.request_leases.may_come("r", rig.source.manager, keys_of(rig.chain)[2])
    rig.put(rig.chain)
    assert rig.after(8 * S) == 3
    assert rig.after(10 * S - 1) == 3
    assert rig.after(10 * S) == 0


def test_B12_a_lease_does_not_wait_for_blocks_that_do_not_come() -> None:
    rig = Rig()
    rig.begin()
    rig.put(rig.chain[:1])
    rig.end(2 * S)
    assert rig.after(h.LATE_NS - 1) == 1
    assert rig.after(h.LATE_NS) == 0
    assert rig.request_leases.take_stored_ns() == [], "what never comes tells no time"


def test_B12_an_abort_in_mid_prefill_drops_what_was_pending() -> None:
    pair, chain = Pair(), hashes(3)
    pair.hand("r")
    pair.put(chain[:1])
    pair.want(chain, request="r")
    pair.decode.ask(chain)
    pair.run(10)
    assert pair.consumer._fetches, "blocks 1 and 2 may come"
    pair.producer.request_leases.gone("r", pair.source.manager, 1)
    pair.run(10)
    assert pair.arrived(chain) == 1
    assert pair.producer.counts["gone"] == 2
    assert not pair.consumer._fetches
    pair.check_nothing_left()


def test_S2_requests_that_are_handed_over_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h, "REQUESTS_MAX", 2)
    rig = Rig()
    for request in ("a", "b", "c"):
        rig.begin(request)
    assert len(rig.request_leases) == 2
    rig.put(rig.chain)
    rig.begin("a")  # is known, and may begin again
    assert len(rig.request_leases) == 2


def hand_over(rig: Rig, request: str, packed: bytes, width: int) -> None:
    """Say as the engine of session 1 that a request ran, and has ended with these blocks."""
    requests = Requests(rig.request_leases, lambda: None, cast("Links", None), lambda _: "")
    done = p.HandedOver(request, "done", packed, width, lease_ms=1000)
    step = p.Step(handed_over=(p.HandedOver(request, "running"), done))
    requests.on_step(rig.source, 1, step, rig.giver.now_ns)


def test_S2_what_requests_that_are_held_name_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h, "KEYS_MAX", 10)
    rig, six = Rig(), b"".join(hashes(6))
    for name in "abc":
        hand_over(rig, name, six, 32)
    assert len(rig.request_leases) == 1, "there is no room for what the others name"
    assert rig.report("b") == "gone"
    assert rig.report("a") == "released"
    hand_over(rig, "d", six, 32)
    assert len(rig.request_leases) == 1, "there is room again"


def test_S2_a_request_of_more_blocks_than_a_lookup_has_is_refused() -> None:
    with pytest.raises(ProtocolError, match=f"expected up to {LOOKUP_BLOCKS_MAX}"):
        hand_over(Rig(), "r", bytes(LOOKUP_BLOCKS_MAX + 1), 1)


def test_S2_of_blocks_that_do_not_come_a_few_are_looked_for_in_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(h, "LOOKS_MAX", 10)
    rig, looks = Rig(), Counter[bytes]()
    ready = rig.source.manager.ready
    hand_over(rig, "many", b"".join(hashes(100, "never")), 32)
    hand_over(rig, "few", b"".join(rig.chain), 32)
    rig.put(rig.chain)
    with monkeypatch.context() as patch:
        patch.setattr(rig.source.manager, "ready", lambda key: looks.update([key]) or ready(key))
        rig.request_leases.tick(rig.giver.now_ns)
        assert sum(looks.values()) <= 12
        assert rig.held == 3, "another request does not wait"
        for _ in range(20):
            rig.request_leases.tick(rig.giver.now_ns)
    assert len(looks) == 103, "each has its turn"
