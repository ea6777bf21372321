"""Prefixes that stay in memory: pinned by requests, listed, made again and let go by operators."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore import cli, clock
from kvstore.config import Config, CpuConfig
from kvstore.core import limits
from kvstore.core.errors import KVStoreError
from kvstore.core.types import make_key, tag_of
from kvstore.store import admin
from kvstore.store.pins import Pinned
from kvstore.store_commands import PINS_FILE_MAX
from kvstore.wire import engine as p
from tests.harness import fakes
from tests.harness.fakes import HeapPool, Town, u32
from tests.harness.live import LiveEngine, LiveStore, engine, eventually, store_settings
from tests.harness.script import hashes
from tests.test_cpu_tier import fill as cpu_fill

MIB = 1 << 20  # of a block: CPU memory has 16, some bytes less


def settings(folder: Path, pinned: str = "100%", *, disk: bool = False, **more: Any) -> Config:  # noqa: ANN401 - sections
    if disk:
        more["nvme"] = {
            "path": str(folder / "kv"),
            "capacity": "128MiB",
            "extent": "16MiB",
            "durability": "10ms",
        }
    cpu = {"capacity": "16MiB", "extent": "16MiB", "policy": "lru"}
    allowed = {"pinned": pinned, "lease": "1s"}
    return store_settings(folder, **{"cpu": cpu, "engine": allowed, **more})


def pin(one: LiveEngine, name: str, chain: list[bytes], scope: bytes = b"") -> None:
    prefix = p.Prefix(name, b"".join(chain), len(chain[0]), scope) if chain else p.Prefix(name)
    one.scheduler.send(p.Step(pins=(prefix,)))


def fill(one: LiveEngine, text: str, blocks: int = 40) -> None:
    """Store so many other blocks that all that may leave memory does."""
    for number in range(blocks):
        one.put(hashes(1, f"{text} {number}"))


def here(one: LiveEngine, chain: list[bytes], scope: bytes = b"") -> int:
    """Count the leading blocks that are in memory."""
    granted = one.ask(chain, memory_only=True, scope=scope)
    if not granted.lease:
        return 0
    one.worker.send(p.Loaded(granted.lease, 0, 0.0))
    return len(granted.hits[0].slots) // 4


def pins(store: LiveStore) -> dict[str, int]:
    return {each.name: each.blocks for each in admin.pins(store.path)}


def pinned_bytes(store: LiveStore) -> float:
    return sum(
        stat.value
        for stat in admin.stats(store.path)
        if stat.name == "kvstore_pinned_bytes" and stat.labels["cause"] == "pin"
    )


def test_Q50_a_pinned_prefix_stays_until_it_is_let_go(tmp_path: Path) -> None:
    kept, other = hashes(3, "kept"), hashes(3, "other")
    with LiveStore(settings(tmp_path)) as store, engine(store) as one:
        one.put(kept)
        one.put(other)
        pin(one, "system", kept)
        eventually(lambda: pins(store) == {"system": 3})
        assert pinned_bytes(store) == 3 * MIB
        fill(one, "more")
        assert (here(one, kept), here(one, other)) == (3, 0)
        assert one.read(one.ask(kept)) == [one.content(block) for block in kept]
        longer = [*kept, *hashes(5)[3:]]
        one.put(longer)
        pin(one, "system", longer)
        eventually(lambda: pins(store) == {"system": 5})
        fill(one, "more")
        assert here(one, longer) == 5
        pin(one, "system", [])
        eventually(lambda: pins(store) == {})
        assert pinned_bytes(store) == 0
        fill(one, "again")
        assert here(one, kept) == 0


def test_Q50_blocks_that_are_stored_after_the_pin_are_pinned_too(tmp_path: Path) -> None:
    kept = hashes(4, "kept")
    with LiveStore(settings(tmp_path)) as store, engine(store) as one:
        pin(one, "system", kept)
        eventually(lambda: pins(store) == {"system": 0})
        one.put(kept[:2])
        eventually(lambda: pins(store) == {"system": 2})
        fill(one, "more")
        one.put(kept)
        eventually(lambda: pins(store) == {"system": 4})
        fill(one, "again")
        assert here(one, kept) == 4


def test_Q50_pins_have_a_cap_and_leave_half_of_the_memory(tmp_path: Path) -> None:
    first, second = hashes(4, "first"), hashes(4, "second")
    with LiveStore(settings(tmp_path, "6MiB")) as store, engine(store) as one:
        for name, chain in (("first", first), ("second", second)):
            one.put(chain)
            pin(one, name, chain)
            eventually(lambda: pins(store).get(name, 0) > 1)  # noqa: B023 - at once
        assert pins(store) == {"first": 4, "second": 2}
        assert pinned_bytes(store) == 6 * MIB
        pin(one, "first", [])
        one.put(second)
        eventually(lambda: pins(store) == {"second": 4})
    with LiveStore(settings(tmp_path)) as store, engine(store) as one:
        chain = hashes(12, "long")
        one.put(chain)
        pin(one, "long", chain)
        eventually(lambda: pins(store) == {"long": 7})
        fill(one, "more")
        assert here(one, chain) == 7


def test_Q50_a_tenants_pins_are_within_its_quota_and_its_own(tmp_path: Path) -> None:
    chain, tag = hashes(4, "same"), tag_of("a")
    quota = {"name": "a", "cpu": "3MiB"}

    def put(one: LiveEngine) -> None:
        for index, block in enumerate(chain):
            while not one.credits:
                one.answers([])
                fill(one, "for credits", 0)
                one.ask(hashes(1, "none"))
            parent = make_key(chain[index - 1], 0, tag) if index else b""
            keys = (make_key(block, 0, tag),)
            one.worker.send(p.Stored(u32([one.credits.pop(0)]), keys, (parent,), True, 0.001))

    with LiveStore(settings(tmp_path, tenant=[quota])) as store, engine(store) as one:
        one.scheduler.send(p.Step(tenants=("a",)))
        pin(one, "mine", chain, tag)
        put(one)
        eventually(lambda: pins(store) == {"mine": 3})
        (found,) = admin.pins(store.path)
        assert (found.tenant, found.asked, found.bytes) == ("a", 4, 3 * MIB)
        pin(one, "mine", [])  # the same name without a tenant: another pin
        fill(one, "more")
        assert here(one, chain, tag) == 3
        admin.set_quota(store.path, "a", "cpu", MIB)
        eventually(lambda: pins(store) == {"mine": 1})
        eventually(lambda: here(one, chain, tag) == 1)


def test_Q50_extents_without_pinned_blocks_go_first() -> None:
    memory = HeapPool(extents=4)
    cpu = CpuConfig(memory.capacity_bytes, memory.extent_bytes, None, "segmented")
    held = msgspec.structs.replace(fakes.settings().engine, pinned_bytes=memory.capacity_bytes)
    town = Town(msgspec.structs.replace(fakes.settings(), cpu=cpu, engine=held), pool=memory)
    rich = town.attach("rich", identity="rich")
    cpu_fill(rich, 16)
    (namespace,) = town.store.namespaces.values()
    for number in range(100):  # until a block lies in what would go first
        chain = hashes(1, f"kept{number}")
        rich.put(chain)
        (entry,) = namespace.manager.index.find([make_key(chain[0], 0)])
        first = namespace.shrinkable()
        assert first is not None
        if entry is not None and entry.slot in namespace.slots_of(first):
            break
    rich.step(pins=(p.Prefix("system", chain[0], len(chain[0])),))
    town.tick()
    assert [pin.blocks for pin in town.store.pins.every()] == [1]
    assert namespace.shrinkable() is not first
    town.store.settings.resize("cpu", memory.extent_bytes)
    for turn in range(12):
        rich.put(hashes(2, f"meanwhile{turn}"))
        town.tick(ms=200)
        town.settle(rich)
    assert memory.used_bytes == memory.extent_bytes
    assert [pin.blocks for pin in town.store.pins.every()] == [1]


def test_Q50_a_clear_and_damage_end_what_they_must(tmp_path: Path) -> None:
    chain = hashes(4, "kept")
    with LiveStore(settings(tmp_path)) as store, engine(store) as one:
        one.put(chain)
        pin(one, "system", chain)
        eventually(lambda: pins(store) == {"system": 4})
        admin.clear(store.path)
        eventually(lambda: pins(store) == {"system": 0})
        assert pinned_bytes(store) == 0
        one.put(chain)
        eventually(lambda: pins(store) == {"system": 4})
        granted = one.ask(chain)
        one.worker.send(p.Loaded(granted.lease, 0, 0.0, granted.hits[0].slots[4:8]))
        eventually(lambda: pins(store) == {"system": 1})
        one.put(chain)
        eventually(lambda: pins(store) == {"system": 4})


def test_Q51_after_a_restart_a_list_warms_memory_and_pins_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, other = hashes(4, "kept"), hashes(3, "other")
    file = tmp_path / "pins.json"
    with LiveStore(settings(tmp_path, disk=True)) as store, engine(store) as one:
        for name, blocks in (("system", chain), ("other", other)):
            one.put(blocks)
            pin(one, name, blocks)
        eventually(lambda: pins(store) == {"system": 4, "other": 3})
        run = runner(store, capsys)
        file.write_text(run("pin", "--json"))
        table = run("pin").splitlines()
        assert table[0].split() == ["name", "tenant", "model", "namespace", "blocks", "of", "size"]
        assert table[1].split()[0] == "system"
    with LiveStore(settings(tmp_path, disk=True)) as store, engine(store) as one:
        run = runner(store, capsys)
        assert here(one, chain) == 0
        shown = run("warm", str(file))
        assert shown == "system: 4 of 4 blocks in memory\nother: 3 of 3 blocks in memory\n"
        eventually(lambda: here(one, chain) == 4)
        assert pins(store) == {}
        run("pin", str(file))
        eventually(lambda: pins(store) == {"system": 4, "other": 3})
        shown = run("unpin", "other")
        assert shown == "other may leave memory from now on; 1 pins are left\n"
        time.sleep(1.1)  # the leases of what was warmed
        fill(one, "more")
        assert (here(one, chain), here(one, other)) == (4, 0)


def test_Q51_a_pin_made_before_its_engine_comes_waits_for_it(tmp_path: Path) -> None:
    chain = hashes(2, "kept")
    with LiveStore(settings(tmp_path, disk=True)) as store, engine(store) as one:
        one.put(chain)
        pin(one, "system", chain)
        eventually(lambda: pins(store) == {"system": 2})
        (found,) = admin.pins(store.path)
    with LiveStore(settings(tmp_path, disk=True)) as store:
        assert [each.blocks for each in admin.pin(store.path, found)] == [0]
        with engine(store) as one:
            eventually(lambda: pins(store) == {"system": 2})
            assert here(one, chain) == 2


def runner(store: LiveStore, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        capsys.readouterr()
        assert cli.main([*words, "--store", f"unix://{store.path}"]) == 0
        return capsys.readouterr().out

    return run


def test_Q50_Q51_wrong_pins_say_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PINS_MAX", 20)
    bytes_max = 2 * limits.PIN_BYTES_MAX
    monkeypatch.setattr(limits, "PINS_BYTES_MAX", bytes_max)
    with LiveStore(settings(tmp_path)) as store:
        right = Pinned("x", "0" * 64, "", "", 0, 0, 0, "ab" * 32, 32, "")

        def fails(*words: str) -> str:
            assert cli.main([*words, "--store", f"unix://{store.path}"]) == 2
            told = capsys.readouterr().err
            assert told.count("\n") == 1
            return told

        assert "expected the name of a pin, there are none" in fails("unpin", "x")
        file = tmp_path / "pins.json"
        assert "cannot be read" in fails("warm", str(file))
        os.mkfifo(tmp_path / "pipe")
        for endless in ("/dev/zero", str(tmp_path / "pipe")):
            assert "expected a file, found a device or pipe" in fails("warm", endless)
        file.touch()
        os.truncate(file, PINS_FILE_MAX + 1)
        assert f"expected a file of {PINS_FILE_MAX} bytes at most" in fails("pin", str(file))
        for text in ("", "{}", '[{"name": 1}]', "\udcff"):
            file.write_bytes(text.encode(errors="surrogateescape"))
            assert "expected what `kvstore pin --json` prints" in fails("pin", str(file))
        for change, expected in (
            ({"hashes": "xy"}, "expected hexadecimal digits"),
            ({"width": 31}, "32 bytes of hashes, 31 each"),
            ({"width": 0}, "32 bytes of hashes, 0 each"),
            ({"name": "[red]x"}, "name of a pin: expected up to 63 letters"),
            ({"name": "x\x1b[2J"}, "name of a pin: expected up to 63 letters"),
        ):
            wrong = msgspec.structs.replace(right, **change)
            file.write_bytes(msgspec.json.encode([wrong]))
            assert expected in fails("pin", str(file))
        file.write_bytes(msgspec.json.encode([right]))
        assert "no engine of namespace '000000000000'" in fails("warm", str(file))
        large = msgspec.structs.replace(right, hashes="ab" * limits.PIN_BYTES_MAX)
        for number in range(2):
            admin.pin(store.path, msgspec.structs.replace(large, name=str(number)))
        with pytest.raises(KVStoreError, match=f"expected up to {bytes_max} bytes of hashes"):
            admin.pin(store.path, right)
        for number in range(20):
            admin.pin(store.path, msgspec.structs.replace(right, name=str(number)))
        with pytest.raises(KVStoreError, match="there are 20 already"):
            admin.pin(store.path, right)
        assert fails("unpin", "x").endswith("16, 17, ...\n")


def test_Q50_an_incomplete_pin_is_looked_at_less_and_less_often(tmp_path: Path) -> None:
    with LiveStore(settings(tmp_path)) as store, engine(store) as one:
        pin(one, "system", hashes(4, "never stored"))
        eventually(lambda: pins(store) == {"system": 0})
        held = store.server.store.pins
        (found,) = held._pins.values()
        eventually(lambda: (found.look_ns or 0) - clock.now_ns() > 150_000_000)
