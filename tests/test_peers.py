"""Stores that hand over blocks to each other: real servers, side channels and exporters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import Config, parse
from tests.fakes import hashes
from tests.live import LiveStore, engine, eventually


def config(folder: Path, **more: Any) -> Config:  # noqa: ANN401 - sections
    folder.mkdir()
    return parse(
        {
            "cpu": {"capacity": "64MiB", "extent": "32MiB"},
            "server": {"socket": str(folder / "store.sock"), "metrics": ""},
            "engine": {"promote": "60s"},
            "peer": {},
            **more,
        }
    )


def address(store: LiveStore) -> str:
    peers = store.server._peers
    assert peers is not None
    return peers.channel.address


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveStore, LiveStore]]:
    folder = tmp_path_factory.mktemp("peers")
    disk = {"path": str(folder / "kv"), "capacity": "128MiB", "extent": "16MiB"}
    with (
        LiveStore(config(folder / "a", nvme=disk)) as prefill,
        LiveStore(config(folder / "b")) as decode,
    ):
        yield prefill, decode


@pytest.mark.parametrize("push", [False, True])
def test_L1_blocks_are_handed_over_from_memory(stores: Any, push: bool) -> None:
    prefill, decode = stores
    chain = hashes(12, f"memory {push}")
    with engine(prefill, f"p{push}") as one, engine(decode, f"d{push}") as two:
        one.put(chain)
        eventually(lambda: len(one.ask(chain).hits) and one.active)
        granted = two.ask(chain, peer=address(prefill), push=push)
        assert granted.sources == {"peer": 12}
        assert two.read(granted) == [two.content(block) for block in chain]
