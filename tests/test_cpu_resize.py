"""`kvstore resize cpu`: more and less memory while engines are attached."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvstore import cli
from kvstore.config import CpuConfig
from kvstore.store import admin, extents
from tests.harness.fakes import Engine, HeapPool, Town, blocks, from_u32, hashes, settings
from tests.harness.live import LiveStore, eventually, store_settings
from tests.harness.worker_rig import Rig, heard
from tests.test_cpu_tier import fill

MIB = 1 << 20


def town_of(extents: int) -> tuple[Town, HeapPool, Engine]:
    """A store, and an engine that has filled its memory."""
    memory = HeapPool(extents=extents)
    cpu = CpuConfig(memory.capacity_bytes, memory.extent_bytes, None, "segmented")
    town = Town(msgspec.structs.replace(settings(), cpu=cpu), pool=memory)
    rich = town.attach("rich", identity="rich")
    fill(rich, 4 * extents)
    assert memory.used_bytes == extents * memory.extent_bytes
    return town, memory, rich


def resize(town: Town, extents: int) -> None:
    town.store.settings.resize("cpu", extents * town.pool.extent_bytes)


def test_Q22_less_memory_is_given_back_extent_by_extent_and_the_cap_holds() -> None:
    town, memory, rich = town_of(8)
    resize(town, 2)
    assert memory.used_bytes == 8 * memory.extent_bytes, "nothing is taken in the call"
    for number in range(8):
        rich.put(hashes(2, f"meanwhile{number}"))  # uses up credits in what goes
        town.tick(ms=200)
        town.settle(rich)
    assert memory.used_bytes == 2 * memory.extent_bytes
    fill(rich, 16, "after")
    assert memory.used_bytes == 2 * memory.extent_bytes
    assert not rich.detached
    resize(town, 5)
    fill(rich, 20, "more")
    assert memory.used_bytes == 5 * memory.extent_bytes


def test_Q22_no_slot_that_is_read_or_on_credit_is_taken() -> None:
    town, memory, rich = town_of(4)
    (namespace,) = town.store.namespaces.values()
    chain = hashes(16, "long")
    rich.put(chain)
    leased = rich.hit(chain)
    assert len(blocks(leased)) == 16, "two extents of it at least"
    read = [from_u32(part) for part in (leased.hits[0].slots, leased.hits[0].generations)]
    resize(town, 1)
    town.tick(ms=2_500)
    town.settle(rich, turns=10)
    held = sum(mapping.held for mapping in namespace.extents.values())
    assert held > 0
    assert memory.used_bytes > memory.capacity_bytes
    assert namespace.generations.of(read[0]) == read[1]
    assert set(rich.credits) <= set(namespace.manager.slots.granted)
    rich.step(release=(leased.lease,))
    for number in range(6):
        rich.put(hashes(2, f"more{number}"))
        town.tick(ms=100)
        town.settle(rich)
    assert memory.used_bytes == memory.capacity_bytes
    assert sum(mapping.held for mapping in namespace.extents.values()) == 0


def test_Q22_models_without_engines_give_memory_first() -> None:
    town, memory, rich = town_of(3)
    rich.leave()
    resize(town, 7)
    other = town.attach("other", identity="other")
    gone, kept = town.store.namespaces.values()
    number = 0
    while kept.live_extents < 4:  # and no block more: it would take what the other one has
        fill(other, 1, f"other{number}")
        number += 1
    assert gone.live_extents == 3
    resize(town, 4)
    town.tick()
    assert all(mapping.state == "live" for mapping in kept.extents.values())
    for _ in range(8):
        town.tick(ms=200)
        town.settle(other)
    assert (gone.live_extents, kept.live_extents) == (0, 4)
    assert memory.used_bytes == memory.capacity_bytes


def test_Q22_an_extent_that_is_being_made_meanwhile_is_given_back_too() -> None:
    town, memory, rich = town_of(2)
    (namespace,) = town.store.namespaces.values()
    resize(town, 3)
    namespace.slots_wanted = 100
    town.tick()
    assert namespace.growing
    resize(town, 1)
    for number in range(8):
        rich.put(hashes(2, f"b{number}"))
        town.tick(ms=200)
        town.settle(rich)
    assert memory.used_bytes == memory.extent_bytes


def test_Q22_a_capacity_below_an_extent_is_refused_and_parts_keep_their_share() -> None:
    town, memory, _ = town_of(4)
    live = town.store.settings
    with pytest.raises(Exception, match=r"expected at least .* \(one extent of the running store"):
        live.resize("cpu", memory.extent_bytes - 1)
    whole = live.running.engine.leased_bytes
    resize(town, 2)
    assert live.running.engine.leased_bytes == whole // 2
    resize(town, 1)
    resize(town, 8)
    assert live.running.engine.leased_bytes == whole


def test_Q22_the_command_resizes_a_live_store_and_says_what_it_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine keeps its credits, and is asked to attach again after a while."""
    monkeypatch.setattr(extents, "_RETIRE_LIMIT_NS", 300_000_000)
    config = store_settings(tmp_path, cpu={"capacity": "64MiB", "extent": "16MiB"})
    with LiveStore(config) as store:
        rig = Rig(store.path)
        try:
            rig.attach()
            (namespace,) = store.server.store.namespaces.values()
            namespace.slots_wanted = 1 << 30  # as a load from below may
            pool = store.server._pool

            def grown(extents: int) -> bool:
                namespace.slots_wanted = 1 << 30
                return heard(rig.client) and pool.used_bytes == extents * 16 * MIB

            eventually(lambda: grown(4))
            where = ("--store", f"unix://{store.path}")
            assert cli.main(["resize", "cpu", "32MiB", *where]) == 0
            assert capsys.readouterr().out == "cpu: capacity 32 MiB, 32 MiB in use\n"
            assert cli.main(["resize", "cpu", "48MiB", *where]) == 0
            eventually(lambda: grown(3) and namespace.live_extents == 3)
            per = namespace._per_extent
            kept = namespace.manager.slots.grant(3 * per)
            assert cli.main(["resize", "cpu", "16MiB", *where, "--wait", "300ms"]) == 1
            told = capsys.readouterr()
            assert "cpu: capacity 16 MiB, 48 MiB in use" in told.out
            assert "slots that requests or engines hold; the store goes on" in told.err
            namespace.manager.give_back(kept)
            assert cli.main(["resize", "cpu", "16MiB", *where]) == 0
            assert cli.main(["resize", "cpu", "8MiB", *where]) == 2
            with pytest.raises(admin.StoreRefused, match="expected at least 16MiB"):
                list(admin.resize(where[1], "cpu", 1))
        finally:
            rig.close()


def test_Q22_no_lookup_fails_while_memory_goes_up_and_down(tmp_path: Path) -> None:
    """A real worker maps and unmaps, stores and loads meanwhile; all bytes are right."""
    config = store_settings(tmp_path, cpu={"capacity": "64MiB", "extent": "16MiB"})
    with LiveStore(config) as store:
        rig = Rig(store.path)
        try:
            rig.attach()
            live = store.server.store.settings
            for number in range(12):
                chain = [b"%016d%016d" % (number, block) for block in range(2)]
                rig.put(chain, (1, 2))
                live.resize("cpu", (16, 64, 32)[number % 3] * MIB)
                eventually(lambda: heard(rig.client) and rig.client.session)
                assert len(rig.ask(chain).hits[0]) in (0, 2)
            assert live.running.cpu.capacity_bytes == 32 * MIB
            eventually(lambda: store.server._pool.used_bytes <= 32 * MIB)
        finally:
            rig.close()
