"""A whole store whose files are damaged, while it is stopped or while it serves."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.config import NvmeConfig
from tests.harness import nvme_damage
from tests.harness.nvme_blocks import settings_for
from tests.harness.nvme_damage import extents, index
from tests.harness.served import CHAIN, Served, served

pytestmark = pytest.mark.slow  # whole stores on a disk that is made to fail

Damage = Callable[[NvmeConfig], None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, tmp_path / "kv") as made:
        yield made


def flip_bits(settings: NvmeConfig, count: int = 30, seed: int = 5) -> None:
    """Turn bits at random offsets of all extents."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(extents(settings))
        with path.open("r+b") as file:
            file.seek(rng.randrange(path.stat().st_size))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def cut(settings: NvmeConfig) -> None:
    """Leave one block and a half of an extent."""
    os.truncate(extents(settings)[0], (3 << 19) + 512)


def lose(store: Served, names: list[str]) -> int:
    """Ask for everything, bytes checked; how many blocks are not there any more."""
    return len(names) * CHAIN - sum(store.get(name)[0] for name in names)


STOPPED = [
    pytest.param(flip_bits, "damaged", id="bits flipped"),
    pytest.param(cut, "", id="extent cut"),
    pytest.param(nvme_damage.cut_to_nothing, "", id="extent empty"),
    pytest.param(nvme_damage.delete, "", id="extent deleted"),
    pytest.param(nvme_damage.swap, "damaged", id="extents swapped"),
]


@pytest.mark.parametrize(("damage", "counted"), STOPPED)
def test_a_store_that_finds_its_extents_damaged(
    store: Served, damage: Damage, counted: str
) -> None:
    names = store.fill()
    store.stop()
    damage(settings_for(store.disk))
    store.start()
    store.wait_for("ok")
    lost = lose(store, names[::-1])
    assert 0 < lost < len(names) * CHAIN
    if counted:
        assert store.count(counted)
    assert lose(store, names) <= lost, "what was whole is lost"
    store.assert_back(store.fill())


@pytest.mark.parametrize("damage", ["cut", "empty", "nothing", "rubbish", "head"])
def test_a_store_that_finds_its_index_damaged_starts_empty(store: Served, damage: str) -> None:
    names = store.fill()
    store.stop()
    nvme_damage.damage_index(settings_for(store.disk), damage)
    store.start()
    store.wait_for("ok")
    assert lose(store, names) == len(names) * CHAIN
    assert "the index is damaged" in store.log
    store.assert_back(store.fill())


def test_a_store_that_finds_an_old_index(tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    with served(tmp_path, disk, capacity="64MiB") as store:
        store.fill(6)
        store.stop()
        shutil.copy(index(settings_for(disk)), tmp_path / "old")
        store.start()
        store.fill(40)  # far more than fits: slots are used again
        assert store.count("evicted")
        store.stop()
        shutil.copy(tmp_path / "old", index(settings_for(disk)))
        store.start()
        store.wait_for("ok")
        lose(store, store.names[:6])
        assert store.count("damaged")
        store.assert_back(store.fill(10))


# While it serves


def test_bits_that_flip_while_it_serves(store: Served) -> None:
    names = store.fill()
    for seed in range(10):
        flip_bits(settings_for(store.disk), 3, seed)
        store.work(2)
        lose(store, names)
    assert store.count("damaged")
    store.assert_back(store.fill())


@pytest.mark.parametrize(
    "damage", [cut, nvme_damage.cut_to_nothing, nvme_damage.delete, nvme_damage.swap],
    ids=nvme_damage.name_of,
)  # fmt: skip
def test_extents_that_are_damaged_while_it_serves(store: Served, damage: Damage) -> None:
    names = store.fill()
    damage(settings_for(store.disk))
    for _ in range(3):
        store.work()
        lose(store, names)
    fresh = store.fill()
    store.assert_back(fresh)
    store.stop()
    store.start()
    store.wait_for("ok")
    lose(store, store.names)
    store.assert_back(store.fill())


@pytest.mark.parametrize("damage", ["cut", "nothing", "rubbish", "head"])
def test_an_index_that_is_damaged_while_it_serves(store: Served, damage: str) -> None:
    names = store.fill()
    nvme_damage.damage_index(settings_for(store.disk), damage)
    for _ in range(3):
        store.work()
        lose(store, names)
    store.stop()
    store.start()
    store.wait_for("ok")
    lose(store, store.names)
    store.assert_back(store.fill())


def test_an_index_process_that_is_killed(store: Served) -> None:
    names = store.fill()
    for _ in range(3):
        for child in psutil.Process(store.store.pid).children():
            child.kill()
        store.work()
    store.assert_back(names)
