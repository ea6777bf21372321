"""A turn costs the same however many namespaces there were; unused ones are forgotten."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from kvstore import visits
from kvstore.handover.consumer import Consumer
from kvstore.handover.line import Line
from kvstore.handover.peers import Peers
from kvstore.logs import LINES_MAX, WINDOW_NS, RateLog
from kvstore.store import store as stores
from kvstore.store.lookups import Lookups
from kvstore.store.namespace import Namespace
from kvstore.store.server import Server
from kvstore.store.store import Store
from kvstore.visits import RESTING_MAX, RESTING_NS, Visits
from kvstore.wire import engine as p
from kvstore.wire.framing import Frames
from tests.harness.fakes import HeapPool, Town, blocks, geometry, hashes, value_of
from tests.harness.live import Client, LiveStore, engine, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.peers import exporter_of, inside
from tiers.nixl.supervisor import Child
from tiers.nvme.block_io import ThreadMover
from tiers.nvme.disk import IDLE_S, NvmeDisk
from tiers.nvme.index import Durable
from tiers.nvme.namespace import DiskNamespace
from tiers.nvme.tier import NvmeTier, Run

PAGE = 1 << 16
FEW, MANY = 20, 120
TURNS = 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    nvme = {"path": f"{tmp_path}/kv", "capacity": "64MiB", "extent": "2MiB", "durability": "10ms"}
    cpu = {"capacity": "64MiB", "extent": "16MiB"}
    with LiveStore(store_settings(tmp_path, cpu=cpu, nvme=nvme, peer={})) as made:
        yield made


def hello(store: LiveStore, model: str) -> Client:
    """A worker of a model of its own, welcomed: a namespace."""
    client = Client(store.path)
    shape = geometry(model, page_bytes=PAGE)
    client.send(p.Hello(p.VERSION, model, "worker", 0, 1, geometry=shape))
    client.take(p.Welcome)
    return client


def add_namespaces(store: LiveStore, numbers: range) -> None:
    """Engines of so many models come, and go."""
    for number in numbers:
        hello(store, f"model{number}").close()
    core, disk = store.server.store, cast(NvmeDisk, store.server._disk)
    eventually(lambda: len(core.namespaces) > numbers[-1])
    eventually(lambda: sum(not n.at_rest for n in list(core.namespaces.values())) <= 1)
    eventually(lambda: not core.busy and not disk.busy)


@contextmanager
def counted(store: LiveStore) -> Iterator[list[Counter[str]]]:
    """Yield what each of TURNS turns of a store calls, by name; empty before they are over."""
    found: list[Counter[str]] = []
    over: list[Counter[str]] = []
    turn = store.server._turn

    def counting() -> None:
        calls: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _value: object) -> None:
            if event == "call":
                calls[frame.f_code.co_qualname] += 1

        sys.setprofile(note)
        try:
            turn()
        finally:
            sys.setprofile(None)
        if len(found) < TURNS:
            found.append(calls)
        else:
            over[:] = found

    inside(store, lambda: setattr(store.server, "_turn", counting))
    yield over
    inside(store, lambda: setattr(store.server, "_turn", turn))


def stored_on_disk(store: LiveStore) -> float:
    store.server.await_gauges()
    return value_of(store.server.store.numbers, "kvstore_tier_blocks", "nvme", "stored")


def of_lookups(store: LiveStore) -> list[Counter[str]]:
    """Count the calls of each turn while an engine asks for what memory has."""
    with engine(store, page_bytes=PAGE) as live:
        live.put(chain := hashes(4))
        eventually(lambda: stored_on_disk(store) >= len(chain))
        with counted(store) as over:
            while not over:
                live.read(live.ask(chain))
        return over


def visited_in(calls: Counter[str]) -> tuple[int, ...]:
    """How many namespaces a turn visited, in memory and on disk."""
    return tuple(calls[f.__qualname__] for f in (Store._tick_namespace, DiskNamespace.step))


def heard_in(calls: Counter[str]) -> tuple[int, ...]:
    """How many frames, questions and ends of leases a turn had."""
    return tuple(calls[f.__qualname__] for f in (Frames.feed, Lookups.ask, Lookups.lease_ended))


def test_S4_a_turn_calls_no_more_for_a_hundred_namespaces_more(store: LiveStore) -> None:
    add_namespaces(store, range(FEW))
    few = of_lookups(store)
    add_namespaces(store, range(FEW, MANY))
    many = of_lookups(store)
    assert len(store.server.store.namespaces) > MANY
    for verb in (Store._tick_namespace, DiskNamespace.step):
        for calls in (*few, *many):
            assert calls[verb.__qualname__] <= 4 * RESTING_MAX, verb
    # Of those at rest a turn visits the more the longer the one before it took.
    alike = [(a, b) for a in few for b in many if visited_in(a) == visited_in(b)]
    assert alike
    least, most = min(alike, key=lambda pair: (pair[1] - pair[0]).total())
    more = most - least
    assert more.total() < MANY - FEW, more.most_common(5)


def test_S4_a_turn_calls_no_more_for_engines_that_ask_nothing(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took three calls of every turn; now only of one in 10 ms."""
    monkeypatch.setattr(stores, "SELDOM_NS", 10**18)
    alone = of_lookups(store)
    with ExitStack() as stack:
        for number in range(FEW):
            stack.enter_context(engine(store, f"other{number}", page_bytes=PAGE))
        among = of_lookups(store)
    # A turn may have the end of the lease before in it, too.
    alike = [(a, b) for a in alone for b in among if heard_in(a) == heard_in(b)]
    assert alike
    more = min((b - a for a, b in alike), key=Counter.total)
    assert more.total() < FEW, more.most_common(5)


def test_a_turn_asks_nothing_of_an_exporter_or_a_disk_that_has_nothing_to_say(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it asks the system: in a hand-over of small blocks the loop's turns cost most."""
    with engine(store, page_bytes=PAGE) as live:
        peers = store.server._peers
        assert peers is not None
        inside(store, peers._mover.exporter.wake)
        exporter = exporter_of(store)
        eventually(lambda: exporter._state == "up" and live.active)
        disk = cast(NvmeDisk, store.server._disk)
        eventually(lambda: not disk.busy)
        asked: Counter[str] = Counter()
        for of, verb in (
            (Child, "receive"),
            (Child, "ended"),
            (os, "eventfd_read"),
            (NvmeDisk, "_look"),
            (NvmeDisk, "poll"),
            (NvmeTier, "take_changes"),  # no engine wants events
            (Peers, "poll"),
            (Line, "receive"),
        ):
            note_calls(monkeypatch, of, verb, asked)
        before, turns = time.monotonic(), 300
        for _ in range(turns):
            live.scheduler.send(p.Step())
            live.ask(hashes(1), memory_only=True)
        rarely = (time.monotonic() - before) / IDLE_S + 5  # the directory, and a Ping now and then
        assert max(asked.values(), default=0) <= rarely, asked
        asked.clear()  # a hand-over has them polled in each turn
        inside(store, lambda: poll(peers, turns))
        told = asked["Child.receive"] + asked["Child.ended"] + asked["os.eventfd_read"]
        assert told < turns / 10, asked


def poll(peers: Peers, times: int) -> None:
    """Have what hand-overs wait for looked at, as the loop does."""
    for _ in range(times):
        peers.poll(time.monotonic_ns())


def note_calls(
    monkeypatch: pytest.MonkeyPatch,
    of: Any,  # noqa: ANN401 - a class or a module
    verb: str,
    asked: Counter[str],
) -> None:
    """Count the calls of a function."""
    real = getattr(of, verb)

    def noted(*of_it: Any) -> Any:  # noqa: ANN401
        asked[f"{of.__name__}.{verb}"] += 1
        return real(*of_it)

    monkeypatch.setattr(of, verb, noted)


def test_L1_peers_have_each_turn_while_a_request_is_held_for_them(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is handed over is pinned once it is ready: later it may have been evicted."""
    with engine(store, page_bytes=PAGE) as live:
        live.read(live.ask(hashes(1)))
        asked: Counter[str] = Counter()
        note_calls(monkeypatch, Peers, "poll", asked)
        note_calls(monkeypatch, Server, "_turn", asked)
        live.scheduler.send(p.Step(handed_over=(p.HandedOver("r", "running"),)))
        live.read(live.ask(hashes(1)))
        asked.clear()
        for _ in range(100):
            live.ask(hashes(1), memory_only=True)
        # The first turn may have begun before it was counted, and the last have not ended yet.
        assert asked["Peers.poll"] >= asked["Server._turn"] - 1 >= 97


def test_a_log_that_left_nothing_out_asks_no_clock() -> None:
    now_ns, asked = 0, Counter[str]()

    def clock() -> int:
        asked["clock"] += 1
        return now_ns

    said = RateLog(logging.getLogger(__name__), clock)
    for kind in ("a", "a", "b"):
        said.warn(kind, "a line")
    asked.clear()
    said.tick()
    assert not asked
    for _ in range(LINES_MAX):
        said.warn("a", "a line")
    said.tick()
    assert asked["clock"] == LINES_MAX + 1, "two lines of one kind were left out"
    now_ns = WINDOW_NS
    said.tick()  # tells of them
    asked.clear()
    said.tick()
    assert not asked


def test_S4_what_is_at_rest_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "RESTING_MAX", 3)
    things = {f"{number}": number for number in range(8)}
    made = Visits()
    made.wake("5")
    made.wake("gone")
    seen: Counter[int] = Counter()
    for number in range(1, 9):
        turn = made.take(things, number * 10 * RESTING_NS)
        assert turn[0] == 5
        assert len(turn) == len(set(turn)) <= 4
        seen.update(turn[1:])
    assert set(seen) == set(range(8)) - {5}, "each has its turn"
    assert made.awake(things) == [5]
    del things["2"]
    made.rest("5")
    began_ns = 10**12
    assert len(made.take(things, began_ns)) <= 3
    assert not made.take(things, began_ns + RESTING_NS - 1)
    turns = [made.take(things, began_ns + number * RESTING_NS) for number in range(1, 20)]
    assert all(len(turn) <= 1 for turn in turns)
    assert {thing for turn in turns for thing in turn} == set(things.values())


def test_S4_a_namespace_is_visited_in_each_turn_until_nothing_goes_on_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visits, "RESTING_MAX", 0)
    town = Town()
    one, other = (town.attach(name, identity=name) for name in ("one", "other"))
    one.put(chain := hashes(3))
    town.settle(one, other)
    visited: Counter[str] = Counter()
    tick = Store._tick_namespace

    def counting(store: Store, namespace: Namespace) -> None:
        visited[namespace.layout.digest] += 1
        tick(store, namespace)

    monkeypatch.setattr(Store, "_tick_namespace", counting)
    of_one, of_other = town.store.namespaces
    one.leave()
    town.tick()
    visited.clear()
    for _ in range(10):
        town.tick()
    assert visited == {of_other: 10}
    back = town.attach("one", identity="one")
    assert blocks(back.hit(chain)) == [0, 1, 2], "an engine wakes it"
    back.leave()
    for _ in range(3):
        town.tick()
    town.store._query(0, p.Query("clear"))
    town.tick()
    assert not list(town.store.namespaces[of_one].manager.index)
    assert not town.store.namespaces[of_one].manager.clearing, "a clear wakes it"


@pytest.mark.usefixtures("no_resting")
def test_S4_a_namespace_wakes_when_its_memory_is_taken() -> None:
    town = Town(pool=HeapPool(extents=1))
    one = town.attach("one", identity="one")
    one.put(hashes(3))
    one.leave()
    town.settle()
    other = town.attach("other", identity="other")
    town.settle(other, turns=10)
    assert other.active is not None
    assert len(town.pool.released) == 1  # type: ignore[attr-defined]


@pytest.fixture
def no_resting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is at rest has no turns."""
    monkeypatch.setattr(visits, "RESTING_MAX", 0)


@pytest.mark.usefixtures("no_resting")  # before the store is made
def test_S4_what_is_written_becomes_durable_and_then_the_disk_is_at_rest(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among many namespaces it is long until one at rest has its turn: here it has none."""
    monkeypatch.setattr(visits, "RESTING_NS", 10**18)
    write = ThreadMover._write

    def slowly(mover: ThreadMover[Run], run: Run) -> Run:
        time.sleep(0.05)  # some turns
        return write(mover, run)

    monkeypatch.setattr(ThreadMover, "_write", slowly)
    with engine(store, page_bytes=PAGE) as live:
        disk = cast(NvmeDisk, store.server._disk)
        for count, name in ((3, "a"), (6, "b")):
            live.put(hashes(3, name))
            until_durable(disk, count)
        disk.clear()
        (space,) = disk.spaces
        eventually(lambda: not space.clearing and not disk.attached.awake)
        assert space.counts["cleared"] == 6
        live.put(hashes(3, "c"))
        until_durable(disk, 3)


def until_durable(disk: NvmeDisk, count: int) -> None:
    """Wait until so many blocks are durable, and nothing else is left to do."""
    (space,) = disk.spaces
    eventually(lambda: len(space.index) == count)
    eventually(lambda: all(record.durable is Durable.YES for record in space.index))
    eventually(lambda: not disk.attached.awake)


def test_S4_only_what_is_fetched_for_has_turns_of_hand_overs(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[Consumer] = []
    tick = Consumer.tick

    def counting(consumer: Consumer, now_ns: int) -> None:
        ticks.append(consumer)
        tick(consumer, now_ns)

    monkeypatch.setattr(Consumer, "tick", counting)
    with engine(store, page_bytes=PAGE) as live:
        add_namespaces(store, range(FEW))
        live.read(live.ask(hashes(1)))
        assert not ticks
        with socket.create_server(("127.0.0.1", 0)) as silent:
            peer = f"127.0.0.1:{silent.getsockname()[1]}"
            live.ask(hashes(2), peer=peer, request="r")
            assert len(set(ticks)) == 1
        eventually(lambda: store.server._peers is not None and not store.server._peers._used)


# Namespaces that are not used any more


def shown(store: LiveStore) -> set[tuple[str, ...]]:
    """The series at /metrics."""
    store.server.await_gauges()
    return set(store.server.store.numbers.gauges)


def test_M3_a_scrape_does_not_wait_for_a_loop_that_hangs(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait()

    with monkeypatch.context() as patch:
        patch.setattr(store.server, "_turn", hang)
        assert hangs.wait(WAIT_S)
        scrape = threading.Thread(target=store.server.await_gauges, daemon=True)
        scrape.start()
        scrape.join(WAIT_S)
        answered = not scrape.is_alive()
    goes_on.set()
    assert answered
    eventually(lambda: shown(store))


def test_S4_namespaces_without_blocks_and_engines_are_forgotten(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "FORGET_NS", 10_000_000, raising=False)
    eventually(lambda: shown(store))
    before = shown(store)
    for number in range(300):
        hello(store, f"model{number}").close()
    eventually(lambda: not store.server.store.namespaces)
    assert store.server._pool.used_bytes == 0, "their memory is given back"
    eventually(lambda: shown(store) <= before)


def forget_blocks(core: Store) -> None:
    """Have nothing in memory."""
    for namespace in core.namespaces.values():
        namespace.manager.clear()
        core.namespaces.wake(namespace)


def test_S4_a_disk_forgets_namespaces_that_left_nothing_there(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left 74 KB, for ever. What was counted of it stays counted."""
    monkeypatch.setattr(stores, "FORGET_NS", 10_000_000, raising=False)
    core, disk = store.server.store, cast(NvmeDisk, store.server._disk)
    with engine(store, page_bytes=PAGE) as live:
        live.put(hashes(3))
        eventually(lambda: stored_on_disk(store) == 3)
    for number in range(30):
        hello(store, f"model{number}").close()
    inside(store, lambda: forget_blocks(core))
    eventually(lambda: not core.namespaces)
    eventually(lambda: len(disk.spaces) == 1)
    assert disk.spaces[0].index, "it has blocks"
    with engine(store, page_bytes=PAGE) as live:
        assert len(live.read(live.ask(hashes(3)))) == 3
        disk.clear()
        eventually(lambda: not disk.spaces[0].clearing)
        inside(store, lambda: disk.spaces[0].retire(*disk.spaces[0].extents))
    inside(store, lambda: forget_blocks(core))
    eventually(lambda: not disk.spaces)
    store.server.await_gauges()
    assert value_of(core.numbers, "kvstore_tier_blocks", "nvme", "cleared") == 3
    assert stored_on_disk(store) >= 3


def test_S4_a_namespace_with_blocks_or_an_engine_stays_and_what_is_on_disk_comes_back(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "FORGET_NS", 10_000_000, raising=False)
    chain = hashes(2)
    spaces = store.server.store.namespaces
    with engine(store, page_bytes=PAGE) as live:
        live.put(chain)
        eventually(lambda: stored_on_disk(store) == 2)
        time.sleep(0.1)
        assert len(spaces) == 1, "it has an engine"
    time.sleep(0.1)
    (kept,) = spaces.values()
    with engine(store, page_bytes=PAGE) as live:
        assert list(spaces.values()) == [kept], "it had blocks"
    tick = store.server.store.on_tick

    def evict(now_ns: int) -> None:
        for key in [entry.key for entry in kept.manager.index]:
            kept.manager.drop(key, "evicted")
        tick(now_ns)

    monkeypatch.setattr(store.server.store, "on_tick", evict)
    eventually(lambda: not spaces)
    monkeypatch.setattr(store.server.store, "on_tick", tick)
    with engine(store, page_bytes=PAGE) as live:
        granted = live.ask(chain)
        assert live.read(granted) == [live.content(block) for block in chain]
        assert granted.sources == {"nvme": 2}
