"""A disk that hangs, as a frozen network mount does: requests go on, no slot is reused early."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvstore import config
from kvstore.core.types import LeaseId
from kvstore.wire import engine as p
from tests.bench.steal import Watch
from tests.harness.fakes import from_u32, hashes
from tests.harness.live import LiveStore, engine, eventually
from tests.harness.nvme_trouble import Gate

PROMOTE_S = 0.3


def stored(store: LiveStore) -> int:
    """Blocks that are on disk by now."""
    (namespace,) = store.server.store.namespaces.values()
    return namespace.tiering.counts["nvme", "stored"]


@pytest.fixture
def live(tmp_path: Path) -> config.Config:
    path = tmp_path / "kvstore.toml"
    path.write_text(f"""
[server]
socket = "{tmp_path}/kv.sock"
metrics = ""
[cpu]
capacity = "16MiB"
[engine]
promote = "{PROMOTE_S}s"
[nvme]
path = "{tmp_path}/kv"
capacity = "128MiB"
""")
    return config.load(path)


def test_O15_a_hung_read_fills_no_slot_and_its_slots_rest_until_it_returns(
    live: config.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = hashes(2, "wanted")
    hang = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", hang)
    with LiveStore(live) as store, engine(store) as attached, hang:
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
        assert set(from_u32(hit.slots)) <= set(namespace.manager.granted())
        hang.go_on.set()
        eventually(lambda: not namespace.tiering.busy)
        assert not any(namespace.manager._granted.values())
        assert attached.read(attached.ask(wanted)) == [attached.content(b) for b in wanted]
