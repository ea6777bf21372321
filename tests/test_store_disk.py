"""A store and its disk tier: what is committed and when, its end, a disk that hangs, resize."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore import cli
from kvstore.config import Config, parse
from kvstore.core.index import State
from kvstore.core.types import LeaseId
from kvstore.store import admin, server
from kvstore.wire import engine as p
from tests.bench.steal import Watch
from tests.harness.fakes import from_u32, geometry
from tests.harness.live import LiveStore, client, engine, eventually, store_settings
from tests.harness.nvme_blocks import MIB, disk_bytes
from tests.harness.nvme_trouble import Gate
from tests.harness.patience import WAIT_S
from tests.harness.script import hashes
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.index import Durable, Record

WINDOW_S = 0.05
PROMOTE_S = 0.3


@pytest.fixture
def config(tmp_path: Path) -> Config:
    nvme = {
        "path": str(tmp_path / "kv"),
        "capacity": "128MiB",
        "extent": "16MiB",
        "durability": "50ms",
    }
    return store_settings(tmp_path, nvme=nvme)


def disk_of(store: LiveStore) -> NvmeDisk:
    disk = store.server._disk
    assert isinstance(disk, NvmeDisk)
    return disk


def records(store: LiveStore) -> list[Record]:
    return [record for space in disk_of(store).spaces for record in space.index]


def stored(store: LiveStore) -> int:
    """Blocks that are on disk by now."""
    (namespace,) = store.server.store.namespaces.values()
    return namespace.tiering.counts["nvme", "stored"]


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
        shape = geometry(page_bytes=mib << 20)
        worker.send(p.Hello(p.VERSION, "engine", "worker", 0, 1, geometry=shape))
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
            unsent.extend(c.outbox.bytes for c in store.server._connections.values())
            looks()

        monkeypatch.setattr(disk_of(store), "poll", look)
        assert len(one.read(one.ask(hashes(2)))) == 2
        eventually(lambda: bool(unsent))
    assert not any(unsent)


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
        (moved,) = (n.tiering.counts for n in core.namespaces.values())  # nothing takes them
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


def test_O15_a_hung_read_fills_no_slot_and_its_slots_rest_until_it_returns(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = hashes(2, "wanted")
    config = msgspec.structs.replace(
        config, engine=msgspec.structs.replace(config.engine, promote_ns=int(PROMOTE_S * 1e9))
    )
    hang = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", hang)
    with LiveStore(config) as store, engine(store) as attached, hang:
        hang.go_on.set()
        attached.put(wanted)
        for number in range(20):  # memory has room for 15
            attached.put(hashes(1, f"other{number}"))
            eventually(lambda: stored(store) == 3 + number)  # noqa: B023 - asked at once
        hang.go_on.clear()
        watch = Watch()
        granted = attached.ask(wanted)
        assert watch.own_s() < PROMOTE_S, "the answer does not wait for the disk"
        hit = granted.hits[0]
        (namespace,) = store.server.store.namespaces.values()
        time.sleep(2 * PROMOTE_S)
        for slot, leased in zip(from_u32(hit.slots), from_u32(hit.generations), strict=True):
            assert attached.generation(slot) == leased - 1, "nobody may read it yet"
        assert attached.ask(wanted, memory_only=True).lease == 0
        assert attached.ask(hashes(1, "other19")).lease, "what is in memory is served"
        attached.worker.send(p.Loaded(granted.lease, 0, 0.0))  # it was too late for the engine
        lease = LeaseId(granted.lease)
        eventually(lambda: not namespace.manager.leases.owned_by(lease, 1))
        assert set(from_u32(hit.slots)) <= set(namespace.manager.slots.granted)
        hang.go_on.set()
        eventually(lambda: not namespace.tiering.jobs_open)
        assert not any(namespace.manager.slots.granted.values())
        assert attached.read(attached.ask(wanted)) == [attached.content(b) for b in wanted]


# kvstore resize


def test_the_command_changes_a_running_store(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveStore(config) as store, engine(store) as attached:
        address = f"unix://{store.path}"
        for number in range(40):
            attached.put(hashes(1, f"request{number}"))
            eventually(lambda: not store.server.store.namespaces.queued_blocks)
        assert disk_bytes(tmp_path / "kv") > 64 * MIB * 0.5
        assert cli.main(["resize", "nvme", "64MiB", "--store", address]) == 0
        assert "nvme: capacity 64 MiB" in capsys.readouterr().out
        assert disk_bytes(tmp_path / "kv") <= 64 * MIB
        found = {s.name: s.value for s in admin.stats(address) if s.labels.get("tier") == "nvme"}
        assert found["kvstore_capacity_bytes"] == 64 * MIB


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("1MiB", "expected at least 64MiB"), ("many", "such as"), ("-5", "such as")],
)
def test_a_wrong_capacity_is_refused(
    config: Config, capsys: pytest.CaptureFixture[str], wrong: str, says: str
) -> None:
    with LiveStore(config) as store:
        arguments = ["resize", "--store", f"unix://{store.path}", "nvme", "--", wrong]
        assert cli.main(arguments) in (1, 2)
        assert says in capsys.readouterr().err


def test_a_store_without_a_disk_says_so(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveStore(msgspec.structs.replace(config, nvme=None)) as store:
        assert cli.main(["resize", "nvme", "1GiB", "--store", f"unix://{store.path}"]) == 2
        assert "expected [nvme] in the store's configuration, found none" in capsys.readouterr().err


def test_O17_what_workers_have_copied_as_the_store_ends_is_kept(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they said was not looked at once they had been told of the end."""
    monkeypatch.setattr(server, "_CLOSE_S", WAIT_S)
    chain = hashes(3)
    with LiveStore(config) as store:
        live = engine(store)
        while len(live.credits) < len(chain):
            live.credits.extend(from_u32(live.scheduler.take(p.Answers).credits))
        store.server.stop()
        live.worker.take(p.Detach)
        live.put(chain)
        live.close()
        store.stop()
    with LiveStore(config) as store, engine(store) as live:
        granted = live.ask(chain)
        assert live.read(granted) == [live.content(block) for block in chain]
