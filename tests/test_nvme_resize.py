"""Live resize: the cap changes while blocks come and go; what is too much is given back."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvstore import cli, config
from kvstore.store import admin
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, engine, eventually
from tests.harness.nvme_blocks import MIB, Shelf, disk_bytes, key, settings_for, shelf
from tests.harness.patience import WAIT_S

ROUNDS = 50


def wait_for_cap(found: Shelf, folder: Path) -> None:
    end = time.monotonic() + WAIT_S
    while disk_bytes(folder) > found.disk.capacity_bytes:
        assert time.monotonic() < end, f"{disk_bytes(folder)} of {found.disk.capacity_bytes}"
        found.disk.flush()  # a tier without jobs asks nothing of its disk


@pytest.mark.slow
def test_up_and_down_under_load(tmp_path: Path) -> None:
    rng = random.Random(5)
    settings = settings_for(tmp_path / "kv", 32 * MIB)
    chains: dict[int, int] = {}
    with shelf(settings) as found:
        for number in range(ROUNDS):
            found.disk.resize(rng.randrange(6, 48) * MIB)
            for _ in range(6):
                chain = rng.choice([*chains, number])
                known = chains.get(chain, 0)
                found.put(chain, known, known + rng.randrange(1, 20))
                chains[chain] = sum(found.has(chain, index) for index in range(known + 20))
                found.get([key(chain, index) for index in range(min(64, chains[chain]))])
            wait_for_cap(found, tmp_path / "kv")
            chains = {c: sum(found.has(c, i) for i in range(300)) for c in chains}
        counts = found.tier.space.counts
        assert counts["resize"]
        assert not counts["damaged"]
        assert not counts["io_error"]
        found.settle()
        kept = set(found.keys())
        assert kept
    with shelf(settings_for(tmp_path / "kv", 64 * MIB)) as after:
        assert set(after.keys()) == kept
        assert all(after.get([name]).done == 1 for name in kept)


def test_a_block_that_is_being_read_is_read_to_its_end(tmp_path: Path) -> None:
    with shelf(settings_for(tmp_path / "kv", 32 * MIB)) as found:
        found.put(1, 0, 30)
        held = list(found.tier.space.index)
        for record in held:
            found.tier.space.pin(record)
        found.disk.resize(1)
        for _ in range(50):
            found.disk.flush()
        files = list((tmp_path / "kv").glob("*.extent"))
        assert files, "somebody reads there"
        for record in held:
            found.tier.space.unpin(record)
        assert found.keys() == []


def test_growing_brings_room_at_once(tmp_path: Path) -> None:
    with shelf(settings_for(tmp_path / "kv", 8 * MIB)) as found:
        found.fill(60)
        small = len(found.keys())
        found.disk.resize(64 * MIB)
        found.fill(60)
        assert len(found.keys()) > 2 * small


@pytest.fixture
def live(tmp_path: Path) -> config.Config:
    path = tmp_path / "kvstore.toml"
    path.write_text(f"""
[server]
socket = "{tmp_path}/kv.sock"
metrics = ""
[cpu]
capacity = "16MiB"
[nvme]
path = "{tmp_path}/kv"
capacity = "128MiB"
extent = "16MiB"
""")
    return config.load(path)


def test_the_command_changes_a_running_store(
    live: config.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix://{tmp_path}/kv.sock"
    with LiveStore(live) as store, engine(store) as attached:
        for number in range(40):
            attached.put(hashes(1, f"request{number}"))
            eventually(lambda: not store.server.store.queued_blocks)
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
    live: config.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str, says: str
) -> None:
    with LiveStore(live):
        arguments = ["resize", "--store", f"unix://{tmp_path}/kv.sock", "nvme", "--", wrong]
        assert cli.main(arguments) in (1, 2)
        assert says in capsys.readouterr().err


def test_a_store_without_a_disk_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(
        f'[server]\nsocket = "{tmp_path}/kv.sock"\nmetrics = ""\n[cpu]\ncapacity = "16MiB"\n'
    )
    with LiveStore(config.load(path)):
        assert cli.main(["resize", "nvme", "1GiB", "--store", f"unix://{tmp_path}/kv.sock"]) == 1
        assert "no such tier" in capsys.readouterr().err
