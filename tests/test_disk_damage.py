"""A whole store whose files are damaged, while it is stopped or while it serves."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.config import NvmeConfig
from tests.harness import nvme_damage
from tests.harness.nvme_blocks import settings_for
from tests.harness.nvme_damage import extents
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


@pytest.mark.parametrize(("damage", "counted"), [(flip_bits, "damaged"), (cut, "")])
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


# While it serves


def test_bits_that_flip_while_it_serves(store: Served) -> None:
    names = store.fill()
    for seed in range(10):
        flip_bits(settings_for(store.disk), 3, seed)
        store.work(2)
        lose(store, names)
    assert store.count("damaged")
    store.assert_back(store.fill())


def test_extents_that_are_damaged_while_it_serves(store: Served) -> None:
    for damage in (cut, nvme_damage.cut_to_nothing, nvme_damage.delete, nvme_damage.swap):
        names = store.fill()
        damage(settings_for(store.disk))
        store.work()
        lose(store, names)
    store.assert_back(store.fill())
    restart(store)


def test_an_index_that_is_damaged_while_it_serves(store: Served) -> None:
    for damage in ("cut", "nothing", "rubbish", "head"):
        names = store.fill()
        nvme_damage.damage_index(settings_for(store.disk), damage)
        store.work()
        lose(store, names)
        restart(store)


def restart(store: Served) -> None:
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
