"""Stores that hand over blocks to each other: real servers, side channels and exporters."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from kvstore.core.types import LookupResult, make_key
from kvstore.handover import consumer
from kvstore.store import admin
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, engine, eventually
from tests.harness.patience import WAIT_S
from tests.harness.peers import address, config, exporter_of, inside


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveStore, LiveStore]]:
    folder = tmp_path_factory.mktemp("peers")
    disk = {"path": str(folder / "kv"), "capacity": "128MiB", "extent": "16MiB"}
    with (
        pytest.MonkeyPatch.context() as patch,
        LiveStore(config(folder / "a", nvme=disk)) as prefill,
        LiveStore(config(folder / "b")) as decode,
    ):
        for limit in ("ANSWER_NS", "STALL_NS"):  # a machine may stand still for longer
            patch.setattr(consumer, limit, int(WAIT_S * 1e9))
        yield prefill, decode


@pytest.mark.parametrize("push", [False, True])
def test_blocks_are_handed_over_from_memory(
    stores: tuple[LiveStore, LiveStore], push: bool
) -> None:
    prefill, decode = stores
    chain = hashes(12, f"memory {push}")
    with engine(prefill, f"p{push}") as one, engine(decode, f"d{push}") as two:
        one.put(chain)
        eventually(lambda: len(one.ask(chain).hits) and one.active)
        granted = two.ask(chain, peer=address(prefill), push=push)
        assert granted.sources == {"peer": 12}
        assert two.read(granted) == [two.content(block) for block in chain]
        found = [stat for stat in admin.stats(f"unix://{decode.path}", WAIT_S) if stat.value]
        assert sum(s.value for s in found if s.name == "kvstore_fetched_blocks") >= 12


def test_within_a_machine_blocks_are_pulled_unless_somebody_says_otherwise(
    stores: tuple[LiveStore, LiveStore],
) -> None:
    prefill, decode = stores

    def moved(direction: str) -> float:
        stats = [s for store in stores for s in admin.stats(f"unix://{store.path}", WAIT_S)]
        found = [s for s in stats if s.name == "kvstore_hand_over_moved_bytes"]
        return sum(s.value for s in found if s.labels == {"direction": direction})

    with engine(prefill, "p auto") as one, engine(decode, "d auto") as two:
        for push, direction in ((None, "pulled"), (True, "pushed")):
            chain, before = hashes(3, f"auto {push}"), moved(direction)
            one.put(chain)
            eventually(lambda: len(one.ask(chain).hits) and one.active)  # noqa: B023 - at once
            two.read(two.ask(chain, peer=address(prefill), push=push))
            size = sum(len(two.content(block)) for block in chain)
            assert moved(direction) - before == size, "as NIXL counts them"


@pytest.mark.parametrize("push", [False, True])
def test_blocks_are_handed_over_from_disk_and_merged_with_what_is_here(
    stores: tuple[LiveStore, LiveStore], push: bool
) -> None:
    prefill, decode = stores
    chain = hashes(12, f"disk {push}")
    with engine(prefill, f"q{push}") as one, engine(decode, f"e{push}") as two:
        one.put(chain)
        two.put(chain[:5])
        (namespace,) = prefill.server.store.namespaces.values()
        (disk,) = namespace.tiering.tiers
        keys = [make_key(block, 0) for block in chain]
        eventually(lambda: all(disk.lookup(key) is LookupResult.HIT for key in keys))
        inside(prefill, lambda: [namespace.manager.drop(key, "test") for key in keys[::-1]])
        granted = two.ask(chain, peer=address(prefill), push=push)
        assert granted.sources == {"peer": 7}
        assert two.read(granted) == [two.content(block) for block in chain]
        assert namespace.tiering.counts["nvme", "loaded"] >= 7
        assert all(namespace.manager.ready(key) is None for key in keys), "staged, not promoted"


def test_a_peer_that_is_not_there_costs_a_moment(stores: tuple[LiveStore, LiveStore]) -> None:
    _, decode = stores
    with engine(decode, "n") as two, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        granted = two.ask(hashes(2, "x"), peer=f"127.0.0.1:{nobody.getsockname()[1]}")
        assert granted.lease == 0


@pytest.mark.parametrize("whose", [0, 1])
def test_an_exporter_that_is_killed_is_started_again_and_blocks_come(
    stores: tuple[LiveStore, LiveStore], whose: int
) -> None:
    prefill, decode = stores
    chain = hashes(12, f"killed {whose}")
    with engine(prefill, f"k{whose}") as one, engine(decode, f"l{whose}") as two:
        one.put(chain)
        eventually(lambda: len(one.ask(chain).hits))
        assert two.read(two.ask(chain[:4], peer=address(prefill)))
        exporter = exporter_of(stores[whose])
        before = exporter.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        eventually(lambda: exporter._state == "up" and exporter.pid != before)
        found: list[bytes] = []
        while len(found) < len(chain):
            found = two.read(two.ask(chain, peer=address(prefill)))
        assert found == [two.content(block) for block in chain]
