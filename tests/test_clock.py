"""The time that a process has been running: what its machine stood still for is not waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.clock import MOMENT_NS, Clock
from tests.harness.fakes import hashes
from tests.harness.live import LiveEngine, LiveStore, eventually, store_settings
from tests.harness.nvme_blocks import settings_for, shelf
from tests.harness.nvme_trouble import Gate, wait, wait_for
from tests.harness.standstill import machine

US = 1_000


def test_a_standstill_counts_as_a_moment_and_all_other_time_as_it_is() -> None:
    read = [5 * US]
    now_ns = Clock(lambda: read[0])
    began_ns = now_ns()
    for _ in range(1_000):
        read[0] += MOMENT_NS - 1
        now_ns()
    assert now_ns() - began_ns == 1_000 * (MOMENT_NS - 1)
    began_ns = now_ns()
    read[0] += 1_000 * MOMENT_NS
    assert now_ns() - began_ns == MOMENT_NS
    read[0] += US
    assert now_ns() - began_ns == MOMENT_NS + US


def test_O20_a_lease_does_not_expire_while_the_machine_stands_still(tmp_path: Path) -> None:
    """Its engine stood still as well, and copies from the slots as it goes on."""
    chain = hashes(3)
    with (
        machine() as running,
        LiveStore(store_settings(tmp_path)) as store,
        LiveEngine(store) as engine,
    ):
        engine.put(chain)
        granted = engine.ask(chain)
        assert granted.lease
        running.stands_still()
        engine.ask(hashes(1, "another"))  # some turns later
        engine.ask(hashes(1, "yet another"))
        assert not store.server.store.numbers.values()["kvstore_lookups", "expired"]
        assert len(engine.read(granted)) == len(chain)
        eventually(lambda: not next(iter(store.server.store.namespaces.values())).manager.leases)


@pytest.mark.parametrize(("call", "then"), [("fdatasync", "read_only"), ("fstatvfs", "off")])
def test_a_disk_does_not_hang_because_the_machine_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, then: str
) -> None:
    """A call that was under way returns a moment later; one that never does is noticed."""
    with machine() as running, shelf(settings_for(tmp_path / "kv")) as found:
        found.put(1, 0, 5)
        with Gate(getattr(os, call)) as gate, monkeypatch.context() as patched:
            patched.setattr(os, call, gate)
            if call == "fdatasync":
                found.put(2, 0, 5)
            wait(found, lambda: gate.waiting)
            running.stands_still()
            for _ in range(20):
                found.disk.flush()
            assert found.disk.state == "ok"
            monkeypatch.setattr("tiers.nvme.disk.HANG_S", 0.6)
            wait_for(found, then)
        wait_for(found, "ok")
        assert found.whole(1, 5)
