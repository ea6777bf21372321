"""A store and its disk tier: what the crash campaign has found."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.config import Config, parse
from kvstore.core.index import State
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule
from kvstore.store import admin
from kvstore.wire import engine as p
from tests.bench.steal import Watch
from tests.harness.live import LiveStore, client, engine, eventually, store_settings
from tests.harness.nvme_blocks import settings_for, shelf
from tests.harness.script import hashes
from tiers.nvme import NvmeDisk
from tiers.nvme.index import Durable, Record

WINDOW_S = 0.05


@pytest.fixture
def config(tmp_path: Path) -> Config:
    nvme = {"path": str(tmp_path / "kv"), "capacity": "64MiB", "durability": "50ms"}
    return store_settings(tmp_path, nvme=nvme)


def disk_of(store: LiveStore) -> NvmeDisk:
    disk = store.server._disk
    assert isinstance(disk, NvmeDisk)
    return disk


def records(store: LiveStore) -> list[Record]:
    return [record for space in disk_of(store).spaces for record in space.index]


def test_an_idle_store_commits_within_its_window(config: Config) -> None:
    with LiveStore(config) as store, engine(store) as one:
        one.put(hashes(1))  # makes the extent
        eventually(lambda: any(r.durable is Durable.YES for r in records(store)))
        took = []
        for text in "bcdef":
            one.put(hashes(1, text))
            eventually(lambda: any(r.durable is Durable.NO for r in records(store)))
            eventually(lambda: all(r.state is State.READY for r in records(store)))
            watch = Watch()
            eventually(lambda: all(r.durable is not Durable.NO for r in records(store)))
            took.append(watch.own_s())
        assert min(took) < WINDOW_S + 0.1, "it was looked at every 0.2 s"


@pytest.mark.parametrize("mib", [20, 16])
def test_O22_a_block_larger_than_an_extent_on_disk_is_refused_when_an_engine_attaches(
    config: Config, mib: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it was ever kept on disk, and nothing said so."""
    wide = msgspec.structs.replace(config.cpu, capacity_bytes=64 << 20, extent_bytes=32 << 20)
    with LiveStore(msgspec.structs.replace(config, cpu=wide)) as store, ExitStack() as stack:
        if mib <= 16:  # as large as an extent: it fits
            one = stack.enter_context(engine(store, page_bytes=mib << 20))
            one.put(hashes(1))
            eventually(lambda: any(r.state is State.READY for r in records(store)))
            return
        worker = stack.enter_context(client(store))
        layers = (LayerGeometry("layer", mib << 20),)
        geometry = RankGeometry(
            "model", 16, (1,), (GroupGeometry(GroupRule(), layers),), {"model": "model"}
        )
        worker.send(p.Hello(p.VERSION, "engine", "worker", 0, 1, geometry=geometry))
        refused = worker.take(p.Refused)
        assert not refused.retry
        expected = (
            "a block takes 20971520 bytes, an extent on disk has 16777216: use a larger [nvme]"
            " extent, or a smaller block_tokens"
        )
        assert refused.reason == expected
        assert expected in caplog.text
        assert not store.server.store.namespaces


def test_an_answer_does_not_wait_for_the_disk_to_be_looked_at(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveStore(config) as store, engine(store) as one:
        one.put(hashes(2))
        looks, unsent = disk_of(store).poll, list[int]()

        def look() -> None:
            unsent.extend(c.outbox_bytes for c in store.server._connections.values())
            looks()

        monkeypatch.setattr(disk_of(store), "poll", look)
        assert len(one.read(one.ask(hashes(2)))) == 2
        eventually(lambda: bool(unsent))
    assert not any(unsent)


def test_a_store_that_ends_writes_what_was_left_out(config: Config) -> None:
    assert config.nvme is not None
    frugal = msgspec.structs.replace(config.nvme, write_budget_bytes=24)
    with LiveStore(msgspec.structs.replace(config, nvme=frugal)) as store, engine(store) as one:
        one.put(hashes(1))  # takes all of an hour's budget
        eventually(lambda: len(records(store)) == 1)
        one.put(hashes(3))
        (namespace,) = store.server.store.namespaces.values()
        eventually(lambda: namespace.tiering.counts["nvme", "over_budget"] == 2)
        assert len(records(store)) == 1
    with LiveStore(config) as store, engine(store) as one:
        granted = one.ask(hashes(3))
        assert granted.sources == {"nvme": 3}
        assert one.read(granted) == [one.content(block) for block in hashes(3)]


def test_a_store_that_ends_while_a_peer_calls_writes_what_only_memory_has(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines stay for a moment; what is readable meanwhile is not only theirs."""
    assert config.nvme is not None
    frugal = msgspec.structs.replace(config.nvme, write_budget_bytes=24)
    peer = parse({"cpu": {"capacity": "16MiB"}, "peer": {}}).peer
    settings = msgspec.structs.replace(config, nvme=frugal, peer=peer)
    with ExitStack() as stack, LiveStore(settings) as store, engine(store) as one:
        peers, core = store.server._peers, store.server.store
        assert peers is not None
        host, _, port = peers.channel.address.rpartition(":")
        end_sessions = core.end_sessions

        def called_as_it_ends() -> None:
            stack.enter_context(socket.create_connection((host, int(port))))
            stack.enter_context(client(store))
            end_sessions()

        monkeypatch.setattr(core, "end_sessions", called_as_it_ends)
        one.put(hashes(1))  # takes all of an hour's budget
        eventually(lambda: len(records(store)) == 1)
        one.put(hashes(4))
        moved = core.numbers.moved
        eventually(lambda: moved["nvme", "stored"] + moved["nvme", "over_budget"] >= 4)
        assert moved["nvme", "stored"] < 4
        store.stop()
    with LiveStore(config) as store, engine(store) as one:
        granted = one.ask(hashes(4))
        assert granted.sources == {"nvme": 4}
        assert one.read(granted) == [one.content(block) for block in hashes(4)]


def test_a_store_that_ends_asks_the_kernel_for_engines_only(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing is done about would be readable again at once, and the loop would spin."""
    with ExitStack() as stack, LiveStore(config) as store, engine(store):
        server, end_sessions, looks = store.server, store.server.store.end_sessions, [0]
        select = server._selector.select

        def counted(timeout: float | None = None) -> list[Any]:
            looks[0] += 1
            return select(timeout)

        def called_as_it_ends() -> None:
            stack.enter_context(client(store))
            monkeypatch.setattr(server._selector, "select", counted)
            end_sessions()

        monkeypatch.setattr(server.store, "end_sessions", called_as_it_ends)
        store.stop()
        assert 0 < looks[0] <= 30, "a half second, in pieces of 50 ms"


def test_clear_empties_the_disk_of_models_that_are_not_attached(config: Config) -> None:
    with LiveStore(config) as store, engine(store) as one:
        one.put(hashes(3))
        eventually(lambda: len(records(store)) == 3)
    with LiveStore(config) as store:
        eventually(lambda: disk_of(store).state == "ok")
        assert len(records(store)) == 3
        admin.clear(store.path)
        assert not records(store)
    with LiveStore(config) as store:
        eventually(lambda: disk_of(store).state == "ok")
        assert not records(store)


def test_clear_while_the_index_is_read_empties_the_disk(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "kv")
    with shelf(settings) as made:
        made.put(0, 0, 3)
    disk = NvmeDisk(settings)
    assert disk.state == "loading"
    disk.clear()
    end_s = time.monotonic() + 600
    while disk.state == "loading" and time.monotonic() < end_s:
        disk.poll()
    assert disk.state == "ok"
    assert not [record for space in disk.spaces for record in space.index]
    disk.close()
