"""S2: what nobody foresaw costs the connection, the tier or the model that it is met by; no more.

Each of these once ended the store. A broken invariant still does.
"""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import config
from kvstore.core.errors import InvariantBroken
from kvstore.core.manager import Manager
from kvstore.core.tiering import Tiering
from kvstore.handover.consumer import Consumer
from kvstore.handover.exported import ExportedMemory
from kvstore.handover.heartbeats import Requests
from kvstore.handover.jobs import Job
from kvstore.handover.moves import MOVING, SUMMING
from kvstore.handover.peers import Peers
from kvstore.handover.producer import Producer
from kvstore.handover.request_leases import RequestLeases
from kvstore.store import admin, server
from kvstore.store import store as stores
from kvstore.store.extents import Memory
from kvstore.store.lookups import Lookups
from kvstore.store.namespace import Namespace
from kvstore.store.sessions import Sessions
from kvstore.wire import engine as p
from kvstore.wire import peer as m
from tests.harness.fakes import blocks, hashes, u32, value_of
from tests.harness.live import Client, LiveEngine, LiveStore, engine, eventually, store_settings
from tests.harness.peers import inside
from tests.test_local_limits import broken, surprised
from tests.test_peer_limits import Place, wanted
from tiers.nvme import tier
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.namespace import DiskNamespace

pytestmark = pytest.mark.meets_bugs
PAGE = 1 << 16


def tracebacks(caplog: pytest.LogCaptureFixture) -> int:
    return sum(bool(record.exc_info) for record in caplog.records)


# Hand-overs, without sockets


@pytest.fixture
def place() -> Place:
    return Place()


def internal(place: Place, *, decode: bool = False) -> float:
    site = place.decode if decode else place.prefill
    return site.peers.gauges()["kvstore_hand_over_bugs", "internal"]


@pytest.mark.parametrize("verb", ["_want", "_hello", "_of_request"])
def test_S2_what_a_peers_message_meets_costs_its_connection(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    good = getattr(Producer, verb)
    bad: set[int] = set()

    def maybe(producer: Producer, of: Any, *rest: Any) -> None:  # noqa: ANN401 - of these verbs
        if (of if isinstance(of, int) else of.number) in bad:
            surprised()
        good(producer, of, *rest)

    monkeypatch.setattr(Producer, verb, maybe)
    place.good.hand_over(hashes(2, "before"), push=False)
    for number in range(20):
        say = place.caller()
        bad.add(max(place.prefill.wire.lines.all))
        message: Any = place.hello()
        if verb == "_of_request":
            message = m.Keep("namespace", "request", 0)
        say(message)
        say(wanted(hashes(2, f"{number}")))
        place.turns(2)
    assert internal(place) == 20
    assert not bad & set(place.prefill.wire.lines.all), "they were hung up on"
    assert not bad & set(place.prefill.peers.producer._peers)
    place.good.hand_over(hashes(2, "after"), push=False)
    assert tracebacks(caplog) == 1


def test_S2_what_a_peers_jobs_meet_in_a_turn_costs_its_connection(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.good.hand_over(hashes(2, "before"), push=False)
    place.caller(place.hello())(wanted(hashes(2, "before")))
    place.turns(1)
    number = max(place.prefill.peers.producer._peers)
    advance, release = Producer._advance, Producer._release

    def maybe(good: Callable[..., None]) -> Callable[..., None]:
        def wrapped(producer: Producer, job: Job) -> None:
            if job.peer.number == number:
                surprised()
            good(producer, job)

        return wrapped

    monkeypatch.setattr(Producer, "_advance", maybe(advance))
    monkeypatch.setattr(Producer, "_release", maybe(release))  # what is held stays held
    place.turns(3)
    assert number not in place.prefill.peers.producer._peers
    assert number not in place.prefill.wire.lines.all
    met = internal(place)
    assert met >= 1
    place.good.hand_over(hashes(2, "after"), push=True)
    assert internal(place) == met
    assert not place.prefill.peers.off


@pytest.mark.parametrize("verb", ["tick", "moved", "checked"])
def test_S2_what_fetches_meet_costs_the_namespace_its_fetches(
    place: Place, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    place.good.hand_over(hashes(2, "before"), push=False)
    bad = place.decode.peers.inlet(place.decode.namespace(place.good.taker))
    real = getattr(Consumer, verb)

    def maybe(consumer: Consumer, *rest: Any, **how: Any) -> None:  # noqa: ANN401
        if consumer is bad:
            surprised()
        real(consumer, *rest, **how)

    monkeypatch.setattr(Consumer, verb, maybe)
    chain = hashes(4, "after")
    place.good.put(chain)
    if verb == "checked":  # its copy may still be under way: the engine gives it up by itself
        with pytest.raises(AssertionError, match="no block in time"):
            place.good._fetched(chain, push=False)
        chain = hashes(4, "later")
    else:
        assert not place.good._fetched(chain, push=False), "it is computed"
    place.turns(3)
    assert internal(place, decode=True) >= 1
    assert not place.decode.peers.off
    assert place.decode.peers._off == {place.decode.namespace(place.good.taker).layout.digest}
    assert bad.open == (verb == "checked")
    met = internal(place, decode=True)
    place.turns(20)
    assert internal(place, decode=True) == met, "it is left alone"
    taker = place.good.taker
    taker.put(chain)
    assert blocks(taker.hit(chain)) == [0, 1, 2, 3], "memory goes on"


@pytest.mark.parametrize(
    "verb",
    [(Requests, "tick"), (RequestLeases, "tick"), (Peers, "_sweep"), (ExportedMemory, "change")],
)
def test_S2_what_is_no_peers_costs_all_hand_overs_and_nothing_else(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    verb: tuple[type, str],
) -> None:
    place.good.hand_over(hashes(2, "before"), push=False)
    monkeypatch.setattr(*verb, surprised)
    decode, taker = place.decode, place.good.taker
    if verb[1] == "change":
        decode.attach("other", identity="another model")
    place.turns(3, ms=300)
    assert decode.peers.off
    assert tracebacks(caplog) <= 2, "one of each store"
    assert decode.peers.wait_s(decode.now_ns) == math.inf
    assert not select.select([decode.peers], [], [], 0)[0]
    chain = hashes(4, "after")
    taker._asks += 1
    packed = b"".join(chain)
    taker.step(lookups=(p.Lookup(taker._asks, packed, 32, peer="h:1", request="r"),))
    place.good.until(lambda: taker._asks in taker.granted, "answer")
    assert taker.granted[taker._asks].lease == 0
    taker.put(chain)
    assert blocks(taker.hit(chain)) == [0, 1, 2, 3]
    grown = decode.attach("third", identity="a third model")
    assert grown.active is not None, "its memory does not wait for the exporter"
    decode.peers.close()
    assert internal(place, decode=True) >= 1


def test_S2_nothing_stays_pinned_once_hand_overs_are_off(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn ends leases any more, and engines go on to hand over."""
    prefill, chain = place.prefill, hashes(3, "held")
    place.good.put(chain)
    place.turns(5)
    place.caller(place.hello())(wanted(chain))

    def hand_over(request: str) -> None:
        done = p.HandedOver(request, "done", b"".join(chain), 32, lease_ms=30_000)
        place.good.giver.step(handed_over=(p.HandedOver(request, "running"), done))
        place.turns(2)

    hand_over("before")
    own, manager = prefill.peers.producer, prefill.namespace(place.good.giver).manager
    assert own.request_leases.held_bytes == own.held.bytes > 0
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "tick", surprised)
        place.turns(1)
    assert prefill.peers.off
    hand_over("after")
    assert own.request_leases.held_bytes == own.held.bytes == 0
    assert len(own.request_leases) == 0
    assert all(entry.pins == 0 for entry in manager.index)


@pytest.mark.parametrize("under_way", ["sum", "start"])
def test_S2_what_was_under_way_is_not_pinned_once_hand_overs_are_off(
    place: Place, monkeypatch: pytest.MonkeyPatch, under_way: str
) -> None:
    """No turn hears of its end any more: threads and the exporter have ended."""
    prefill, chain, push = place.prefill, hashes(3, "held"), under_way == "start"
    place.good.put(chain)
    place.turns(5)
    monkeypatch.setattr(prefill.mover, under_way, lambda *_: None)
    say = place.caller(place.hello("exporter"))
    say(wanted(chain, push=push))
    place.turns(3)
    if push:
        say(m.Land(1, u32(range(3)), u32(range(3)), m.Region(1, 4096, 3)))
        place.turns(1)
    own, manager = prefill.peers.producer, prefill.namespace(place.good.giver).manager
    states = [set(job.states.within(job.all, bytes((MOVING, SUMMING)))) for job in own.jobs]
    assert states == [{(0, 3)}]
    assert own.held.bytes > 0
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "tick", surprised)
        place.turns(1)
    assert prefill.peers.off
    assert own.held.bytes == 0
    assert all(entry.pins == 0 for entry in manager.index)
    assert not own.jobs


def test_S2_what_is_held_for_requests_ends_though_what_is_held_for_peers_cannot(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, chain = place.prefill.peers.producer, hashes(3, "held")
    place.good.put(chain)
    place.turns(5)
    place.caller(place.hello())(wanted(chain))
    done = p.HandedOver("r", "done", b"".join(chain), 32, lease_ms=30_000)
    place.good.giver.step(handed_over=(p.HandedOver("r", "running"), done))
    place.turns(2)
    assert own.request_leases.held_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "tick", surprised)
        patch.setattr(Producer, "_release", surprised)
        place.turns(1)
    assert place.prefill.peers.off
    assert own.request_leases.held_bytes == 0


def test_S2_what_the_end_of_a_peer_meets_costs_nothing_more(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.good.hand_over(hashes(2, "before"), push=False)
    place.caller(place.hello())
    place.turns(2)
    with monkeypatch.context() as patch:
        patch.setattr(Producer, "on_closed", surprised)
        place.prefill.wire.drop(max(place.prefill.wire.lines.all))
    place.turns(2)
    assert internal(place) == 1
    place.good.hand_over(hashes(2, "after"), push=False)


# Stores


@pytest.fixture
def settings(tmp_path: Path) -> config.Config:
    nvme = {"path": f"{tmp_path}/kv", "capacity": "64MiB", "extent": "2MiB"}
    return store_settings(tmp_path, cpu={"capacity": "64MiB", "extent": "16MiB"}, nvme=nvme)


@pytest.fixture
def store(settings: config.Config) -> Iterator[LiveStore]:
    with LiveStore(settings) as made:
        yield made


def bugs(store: LiveStore) -> float:
    return value_of(store.server.store.numbers, "kvstore_refused", "internal")


def bugs_of_a_scrape(store: LiveStore) -> float:
    """As bugs(), with the gauges brought up to date first, as for a scrape."""
    store.server.await_gauges()
    return bugs(store)


def serves(live: LiveEngine, name: str) -> None:
    live.put(chain := hashes(2, name))
    eventually(lambda: blocks(live.ask(chain, memory_only=True)) == [0, 1])


@pytest.mark.parametrize("where", [(Lookups, "end"), (Memory, "forget"), (Sessions, "_give_back")])
def test_S2_what_the_end_of_an_engine_meets_costs_what_it_had(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    with engine(store, "good", page_bytes=PAGE) as good:
        bad = LiveEngine(store, "bad", page_bytes=PAGE)
        serves(bad, "before")
        with monkeypatch.context() as patch:
            patch.setattr(*where, surprised)
            bad.close()
            eventually(lambda: "bad" not in store.server.store.sessions and bugs(store) >= 1)
        serves(good, "after")
        with engine(store, "bad", page_bytes=PAGE) as again:
            serves(again, "again")


@pytest.mark.parametrize("verb", ["poll", "take_changes", "cascade"])
def test_S2_what_the_tiers_of_a_model_meet_costs_that_model_its_tiers(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    with (
        engine(store, "good", page_bytes=PAGE) as good,
        engine(store, "bad", page_bytes=PAGE, model="bad") as bad,
    ):
        serves(bad, "before")
        spaces = store.server.store.namespaces
        one = spaces[store.server.store.sessions["bad"].namespace.layout.digest].tiering  # type: ignore[union-attr]
        real = getattr(Tiering, verb)

        def maybe(tiering: Tiering, *rest: Any) -> Any:  # noqa: ANN401
            return surprised() if tiering is one else real(tiering, *rest)

        monkeypatch.setattr(Tiering, verb, maybe)
        serves(bad, "after")
        eventually(lambda: bugs(store) >= 1)
        eventually(lambda: not one.sources)
        assert not one.to_poll, "the loop would spin for them"
        monkeypatch.setattr(Tiering, verb, real)
        serves(bad, "more")
        met = bugs(store)
        serves(bad, "and more")
        assert bugs(store) == met, "tiers that are off have met another one"
        serves(good, "after")
        others = [n.tiering for n in spaces.values() if n.tiering is not one]
        eventually(lambda: sum(t.counts["nvme", "stored"] for t in others) >= 2)
        assert admin.stats(f"unix://{store.path}")


def test_S2_what_a_model_meets_in_a_turn_costs_that_model(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(store, "good", page_bytes=PAGE) as good:
        bad = LiveEngine(store, "bad", page_bytes=PAGE, model="bad")
        serves(bad, "before")
        namespace = store.server.store.sessions["bad"].namespace
        assert namespace is not None
        expire = Manager.expire

        def maybe(manager: Manager, now_ns: int) -> Any:  # noqa: ANN401
            return surprised() if manager is namespace.manager else expire(manager, now_ns)

        monkeypatch.setattr(Manager, "expire", maybe)
        bad.scheduler.send(p.Step())
        assert "a bug of the store" in bad.scheduler.take(p.Detach).reason
        bad.close()
        serves(good, "after")
        again = Client(store.path)
        groups = namespace.layout
        assert groups.digest not in store.server.store.namespaces
        again.send(hello_of("bad", bad))
        assert "a bug of the store" in again.take(p.Refused).reason
        again.close()
        assert bugs(store) == 1
    assert tracebacks(caplog) == 1


def hello_of(name: str, live: LiveEngine) -> p.Hello:
    return p.Hello(p.VERSION, name, "worker", 0, 1, geometry=live.geometry)


@pytest.mark.parametrize("where", [(NvmeDisk, "_look"), (DiskNamespace, "written")])
def test_S2_what_the_disk_meets_costs_the_disk(
    settings: config.Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: tuple[type, str],
) -> None:
    monkeypatch.setattr(server, "_FLUSH_S", 1.0)  # for what hangs as it ends
    monkeypatch.setattr(tier, "DRAIN_S", 1.0)
    with LiveStore(settings) as store, engine(store, page_bytes=PAGE) as live:
        serves(live, "before")
        monkeypatch.setattr(*where, surprised)
        serves(live, "after")
        disk = store.server._disk
        assert disk is not None
        eventually(lambda: disk.state == "off")
        serves(live, "more")
        chain = hashes(2, "before")
        live.load(live.ask(chain), within_s=1.0)
        found = {(s.name, *s.labels.values()): s.value for s in admin.stats(f"unix://{store.path}")}
        assert found["kvstore_tiers", "nvme", "off"] == 1
        store.stop()
    assert tracebacks(caplog) == 1


@pytest.mark.parametrize("where", [(stores, "gauges"), (Memory, "_grow")])
def test_S2_what_serves_all_goes_on_after_a_bug(
    store: LiveStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: tuple[Any, str],
) -> None:
    with engine(store, page_bytes=PAGE) as live:
        with monkeypatch.context() as patch:
            patch.setattr(*where, surprised)
            eventually(lambda: bugs_of_a_scrape(store) >= 3)
            serves(live, "meanwhile")
        serves(live, "after")
    assert tracebacks(caplog) == 1


@pytest.mark.parametrize(
    "where",
    [
        (stores, "gauges"),
        (Namespace, "settle"),
        (Tiering, "poll"),
        (Manager, "expire"),
        (Requests, "tick"),
        (Consumer, "tick"),
        (NvmeDisk, "_look"),
    ],
)
def test_S2_no_barrier_keeps_a_broken_invariant_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    nvme = {"path": f"{tmp_path}/kv", "capacity": "64MiB"}
    store = LiveStore(store_settings(tmp_path, nvme=nvme, peer={}))
    ended: list[BaseException] = []

    def run() -> None:
        try:
            store.server.run()
        except BaseException as exc:  # noqa: BLE001 - that it comes is what is shown
            ended.append(exc)

    store._thread._target = run  # type: ignore[attr-defined]
    with store, socket.create_server(("127.0.0.1", 0)) as silent:
        live = LiveEngine(store, page_bytes=PAGE)
        peer, peers = f"127.0.0.1:{silent.getsockname()[1]}", store.server._peers
        live.scheduler.send(p.Step((p.Lookup(1, hashes(1)[0], 32, peer=peer, request="r"),)))
        eventually(lambda: peers is not None and peers._used)
        monkeypatch.setattr(*where, broken)
        live.scheduler.close()
        eventually(lambda: bugs_of_a_scrape(store) < 0 or ended)
        live.close()
    assert isinstance(ended[0], InvariantBroken)


def test_S2_a_client_may_get_a_descriptor_that_hand_overs_had_before_they_were_off(
    tmp_path: Path,
) -> None:
    clients: list[Client] = []
    with LiveStore(store_settings(tmp_path, peer={})) as store:
        peers = store.server._peers
        assert peers is not None
        had = {peers.channel.fileno(), *peers._mover.fds()}

        def off() -> None:  # the loop takes the clients afterwards
            clients.extend(Client(store.path) for _ in range(8))
            peers._switch_off()

        inside(store, off)
        for each in clients:
            each.send(p.Query("stats"))
            assert each.take(p.Report)
        served = {c.sock.fileno() for c in store.server._connections.values()}
        assert had & served, "no client has such a descriptor"
        for each in clients:
            each.close()
