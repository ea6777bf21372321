"""Live resize: the cap changes while blocks come and go; what is too much is given back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.harness.nvme_blocks import MIB, disk_bytes, key, settings_for, shelf
from tests.harness.nvme_trouble import wait

ROUNDS = 50


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
            wait(found, lambda: disk_bytes(tmp_path / "kv") <= found.disk.capacity_bytes)
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
