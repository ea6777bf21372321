"""Stores that hand over blocks to each other: real servers, side channels and exporters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.core.types import LookupResult, make_key
from kvstore.handover import consumer
from kvstore.store import admin
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, engine, eventually
from tests.harness.patience import WAIT_S
from tests.harness.peers import address, config, inside


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
