"""Stores with peers that run in threads of the test: their settings, addresses and exporters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.config import Config
from kvstore.handover.transfers import Transfers
from tests.harness.live import LiveStore, store_settings
from tests.harness.patience import WAIT_S
from tiers.nixl.supervisor import Exporter


def config(folder: Path, **more: Any) -> Config:  # noqa: ANN401 - sections
    cpu, engine = {"capacity": "64MiB", "extent": "64MiB"}, {"promote": "60s"}
    return store_settings(folder, **{"cpu": cpu, "engine": engine, "peer": {}, **more})


def address(store: LiveStore) -> str:
    peers = store.server._peers
    assert peers is not None
    return peers.channel.address


def exporter_of(store: LiveStore) -> Exporter:
    peers = store.server._peers
    assert peers is not None
    assert isinstance(peers._mover, Transfers)
    return peers._mover.exporter


def inside(store: LiveStore, work: Callable[[], object]) -> None:
    """Do something in the store's own thread, between two of its turns."""
    done, core = threading.Event(), store.server.store
    tick = core.on_tick

    def once(now_ns: int) -> None:
        core.on_tick = tick  # type: ignore[method-assign]
        work()
        done.set()
        tick(now_ns)

    core.on_tick = once  # type: ignore[method-assign]
    assert done.wait(WAIT_S)
