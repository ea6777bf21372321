"""A turn costs the same however many namespaces there were; unused ones are forgotten."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule
from kvstore.store import sessions as stores
from kvstore.wire import engine as p
from tests.harness.fakes import hashes
from tests.harness.live import Client, LiveStore, engine, eventually, store_settings
from tiers.nvme.disk import NvmeDisk

PAGE = 1 << 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    cpu, disk = {"capacity": "64MiB", "extent": "16MiB"}, {"path": str(tmp_path / "kv")}
    nvme = disk | {"capacity": "64MiB", "extent": "2MiB", "durability": "10ms"}
    with LiveStore(store_settings(tmp_path, cpu=cpu, nvme=nvme)) as made:
        yield made


def hello(store: LiveStore, model: str) -> Client:
    """A worker of a model of its own, welcomed: a namespace."""
    groups = (GroupGeometry(GroupRule(), (LayerGeometry("layer", PAGE),)),)
    geometry = RankGeometry(model, 16, (1,), groups, {"model": model})
    client = Client(store.path)
    client.send(p.Hello(p.VERSION, model, "worker", 0, 1, geometry=geometry))
    client.take(p.Welcome)
    return client


def shown(store: LiveStore) -> set[tuple[str, ...]]:
    """The series at /metrics."""
    store.server.await_gauges()
    return set(store.server.store.numbers.gauges)


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


def test_S4_a_turn_polls_the_disk_once_however_many_namespaces_there_are(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = cast(NvmeDisk, store.server._disk)
    clients = [hello(store, f"model{number}") for number in range(30)]
    eventually(lambda: not store.server.store.busy and not disk.busy)
    polls, turns = [0], [0]
    poll, tick = disk.poll, store.server.store.on_tick

    def counted() -> None:
        polls[0] += 1
        poll()

    def turn(now_ns: int) -> None:
        tick(now_ns)
        turns[0] += 1

    monkeypatch.setattr(store.server.store, "on_tick", turn)
    monkeypatch.setattr(disk, "poll", counted)
    eventually(lambda: turns[0] >= 5)
    assert polls[0] <= turns[0] + 1, f"{polls[0]} polls in {turns[0]} turns"
    for client in clients:
        client.close()


def test_S4_a_namespace_with_blocks_or_an_engine_stays_and_what_is_on_disk_comes_back(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "FORGET_NS", 10_000_000, raising=False)
    chain = hashes(2)
    spaces = store.server.store.namespaces
    with engine(store, page_bytes=PAGE) as live:
        live.put(chain)
        eventually(lambda: store.server.store.numbers.moved["nvme", "stored"] == 2)
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
