"""Full collections walk every block: a store makes none, and must leave nothing for them."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.config import parse
from kvstore.core.manager import Manager
from kvstore.core.types import Chain, GroupRule, Slot
from kvstore.listener import listen
from kvstore.store import server
from tests.harness.fakes import generations_of


def test_old_objects_are_left_out_of_collections_and_few_are_young() -> None:
    code = (
        "import gc; from kvstore.gc_tuning import collect_young_only\n"
        "collect_young_only(); full = gc.get_stats()[2]['collections']; most, kept = 0, []\n"
        "for i in range(4000):\n"
        "    kept += [[i] for _ in range(100)]\n"
        "    if i < 400: most = max(most, len(gc.get_objects(0)) + len(gc.get_objects(1)))\n"
        "_, young, old = gc.get_stats()\n"
        "print(old['collections'] - full, young['collections'] > 9)\n"
        "print(gc.get_freeze_count() > 1000, 500 < most < 2500)"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split() == ["0", "True", "True", "True"]


def test_what_leaves_a_manager_is_freed_without_a_collection() -> None:
    rng = random.Random(1)
    manager = Manager([GroupRule(), GroupRule(2)], generations_of(40))
    manager.slots.add([Slot(number) for number in range(40)])
    gc.collect()
    gc.disable()
    try:
        for number in range(200):
            chain = Chain(rng.randbytes(8 * 6), 8, 2)
            for index in range(chain.blocks):
                for group in (0, 1):
                    (slot,) = manager.prepare_store(1)
                    above = chain.key(0, index - 1) if index and not group else None
                    manager.begin_store(chain.key(group, index), above, slot)
                    manager.complete_store(slot, ok=rng.random() < 0.9)
            lease = manager.prepare_load(chain, 6, 1, number)
            manager.drop(chain.key(0, rng.randrange(6)), "damaged")
            if lease is not None and rng.random() < 0.5:
                manager.complete_load(lease.lease_id)
            manager.expire(number)
            manager.take_changes()
            if number % 20 == 0:
                manager.clear()  # with a lease on some
        while manager.clearing:
            manager.clear_some()
        assert manager.evictions["capacity"] > 500
        assert manager.evictions["clear"] > 50
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_store_collects_young_objects_only_before_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    class Serving:
        def __init__(self, *_: object) -> None: ...

        def stop(self, *_: object) -> None: ...

        def hang_up(self, *_: object) -> None: ...

        def run(self) -> None:
            done.append("served")

    monkeypatch.setattr(server, "Server", Serving)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(server, "collect_young_only", lambda: done.append("collector set"))
    path = str(tmp_path / "kv.sock")
    server.serve(parse({"server": {"socket": path}, "cpu": {"capacity": "1GiB"}}), listen(path))
    assert done == ["collector set", "served"]
