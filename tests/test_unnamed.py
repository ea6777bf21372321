"""Engines that cannot say what decides their blocks' bytes: what they store is theirs only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.core.layout import RankGeometry, slot_layout
from kvstore.store import admin
from tests.harness.fakes import geometry, hashes
from tests.harness.live import LiveEngine, LiveStore, engine, eventually
from tests.harness.patience import WAIT_S
from tests.harness.peers import address, config

WHY = "load_format 'dummy', expected one that reads files"
PAGE = 1 << 20


def unnamed(why: str = WHY) -> RankGeometry:
    return geometry(page_bytes=PAGE, unnamed=why)


def stat(store: LiveStore, name: str, **labels: str) -> float:
    found = [s for s in admin.stats(f"unix://{store.path}", WAIT_S) if s.name == name]
    return sum(s.value for s in found if labels.items() <= s.labels.items())


@pytest.fixture
def stores(tmp_path: Path) -> Callable[[str], LiveStore]:
    def store(name: str) -> LiveStore:
        disk = {"path": str(tmp_path / f"{name}-kv"), "capacity": "128MiB", "extent": "16MiB"}
        memory = {"capacity": "256MiB", "extent": "16MiB"}
        return LiveStore(config(tmp_path / name, cpu=memory, nvme=disk, engine={"promote": "1s"}))

    return store


def get(engine: LiveEngine, chain: list[bytes], **how: object) -> int:
    return len(engine.read(engine.ask(chain, **how)))


def test_B3_blocks_without_a_name_are_for_their_engine_in_this_session_only(
    stores: Callable[[str], LiveStore], caplog: pytest.LogCaptureFixture
) -> None:
    chain = hashes(6)
    with stores("a") as store, caplog.at_level(logging.WARNING):
        with engine(store, "one", geometry=unnamed()) as one:
            one.put(chain)
            eventually(lambda: get(one, chain) == 6)
            for name, geometry_ in (("same", unnamed()), ("named", unnamed(""))):
                with engine(store, name, geometry=geometry_) as other:
                    assert get(other, chain) == 0
            assert get(one, chain) == 6
            text = f"its blocks stay in memory, for itself only, until it detaches: {WHY!r}"
            said = [r.getMessage() for r in caplog.records if "engine 'one'" in r.getMessage()]
            assert len(said) == 1
            assert said[0].endswith(f" {text}")
            assert one.active.warning == text
        with engine(store, "one", geometry=unnamed()) as again:
            assert get(again, chain) == 0
        eventually(lambda: stat(store, "kvstore_slots", state="used") == 0)


def test_B3_blocks_without_a_name_stay_off_the_disk(stores: Callable[[str], LiveStore]) -> None:
    chain = hashes(6)
    with stores("a") as store:
        with engine(store, "named", geometry=unnamed("")) as one:
            one.put(chain)
            eventually(lambda: stat(store, "kvstore_tier_slots", state="used") == 6)
        with engine(store, "unnamed", geometry=unnamed()) as two:
            two.put(chain)
            eventually(lambda: get(two, chain) == 6)
    with stores_again(store) as store, engine(store, "named", geometry=unnamed("")) as one:
        eventually(lambda: get(one, chain) == 6)
        assert stat(store, "kvstore_tier_slots", state="used") == 6


def stores_again(store: LiveStore) -> LiveStore:
    return LiveStore(store.server._config)


@pytest.mark.parametrize("giver_named", [True, False])
def test_B3_blocks_without_a_name_are_not_handed_over(
    stores: Callable[[str], LiveStore], giver_named: bool
) -> None:
    chain = hashes(3)
    with (
        stores("a") as prefill,
        stores("b") as decode,
        engine(prefill, "p", geometry=unnamed("" if giver_named else WHY)) as giver,
        engine(decode, "d", geometry=unnamed(WHY if giver_named else "")) as taker,
    ):
        giver.put(chain)
        eventually(lambda: get(giver, chain) == 3)
        for _ in range(3):
            assert get(taker, chain, peer=address(prefill), request="r") == 0
        refused = stat(prefill, "kvstore_side_channel_refused", reason="refused")
        beats = stat(decode, "kvstore_hand_over_requests", event="heartbeats")
        if giver_named:  # who has no name asks nobody
            assert (refused, beats) == (0, 0)
            assert stat(decode, "kvstore_hand_over_open", what="asked") == 0
        else:
            assert refused > 0


def test_B3_an_engine_without_a_name_is_told_of_no_side_channel(
    stores: Callable[[str], LiveStore],
) -> None:
    """So it says of no request where its blocks are."""
    with stores("a") as store:
        for why, told in (("", address(store)), (WHY, "")):
            with engine(store, f"engine {why}", geometry=unnamed(why)) as one:
                assert one.active.side_channel == told


def test_B3_one_rank_without_a_name_is_enough() -> None:
    ranks = [geometry(rank=rank, world=2) for rank in range(2)]
    layout = slot_layout([ranks[0], geometry(rank=1, world=2, unnamed=WHY)])
    assert (layout.unnamed, slot_layout(ranks).unnamed) == (WHY, "")
    one, two = layout.of_session(1), layout.of_session(2)
    assert len({layout.digest, one.digest, two.digest}) == 3
    assert (one.ranks, one.traits) == (layout.ranks, layout.traits)
