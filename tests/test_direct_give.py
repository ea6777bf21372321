"""What an engine still has, written by its workers into a peer's engine: stores, workers, NIXL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from connectors.direct_reads import DirectTransfers, WriteEnd
from connectors.worker_copies import StoreTask, WriteTask
from tests.harness.live import eventually
from tests.harness.worker_rig import BLOCKS
from tests.test_direct import Nodes, nodes
from tests.test_direct_engine import CPU, GPU, overwrite

PUSHED, GIVEN = (f"kvstore_hand_over_moved_bytes{{{way}}}" for way in ("pushed", "engine"))


def moved(made: Nodes) -> tuple[int, int]:
    """Bytes that the prefill store's exporter and its engine's workers have written."""
    found = made.numbers(0)
    return int(found.get(PUSHED, 0)), int(found.get(GIVEN, 0))


def part(made: Nodes) -> int:
    """Bytes of a block, in all of the decode engine's ranks."""
    return sum(c.page_bytes for rank in made.rigs[1].ranks for c in rank.caches.values())


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_L1_direct_a_prompt_is_pushed_from_engine_memory_into_engine_memory(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    with nodes(tmp_path, ranks, serving=True, push=True, stored=5) as made:
        found = made.brings(made.ask(), range(9, 14))
        assert all(rank.untouched([*range(9), *range(14, BLOCKS)]) for rank in made.rigs[1].ranks)
        assert (found[GPU], found.get(CPU)) == (5, None)
        assert moved(made) == (0, 5 * part(made))
        results = made.rigs[0].ranks[0].half._copies.runner._results
        assert all(isinstance(task, StoreTask) for task in results), (
            "nobody takes them while it is idle"
        )
    ended = [rank.half._copies.direct for rig in made.rigs for rank in rig.ranks]
    assert not any(direct is None or direct._agent.name for direct in ended), "UCX's threads go on"


def test_L1_direct_what_the_engine_has_overwritten_is_pushed_from_slots(tmp_path: Path) -> None:
    with nodes(tmp_path, serving=True, push=True, stored=6) as made:
        overwrite(made, [1, 4])
        found = made.brings(made.ask(), range(9, 15))
        assert (found[GPU], found[CPU]) == (4, 2)
        assert moved(made) == (2 * part(made), 4 * part(made))


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)])
def test_B19_direct_what_is_overwritten_while_it_is_written_is_written_again_from_slots(
    tmp_path: Path, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = DirectTransfers.advance_write, list[int]()

    def late(
        self: DirectTransfers, giving: WriteTask, now_ns: int, *, session_over: bool
    ) -> WriteEnd | None:
        if not done:
            done.append(giving.message.write)
            overwrite(made, [0, 3])
        return real(self, giving, now_ns, session_over=session_over)

    with nodes(tmp_path, ranks, serving=True, push=True, stored=6) as made:
        monkeypatch.setattr(DirectTransfers, "advance_write", late)
        found = made.brings(made.ask(), range(9, 15))
        assert done
        assert (found[GPU], found[CPU]) == (4, 2)
        assert moved(made) == (2 * part(made), 6 * part(made))


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
def test_B15_direct_what_an_engine_whose_agent_is_gone_has_is_pushed_from_slots(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    with nodes(tmp_path, ranks, serving=True, push=True, stored=4) as made:
        direct = made.rigs[0].ranks[0].half._copies.direct
        assert direct is not None
        direct._agent._agent = None  # of one rank
        assert made.brings(made.ask(), range(9, 13))[CPU] == 4


@pytest.mark.parametrize("raises", [False, True])
def test_B15_direct_a_write_that_fails_has_its_load_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, raises: bool
) -> None:
    """Some of it may still come, so the decode engine's agent ends; the next load is good."""
    real = DirectTransfers.advance_write
    with nodes(tmp_path, serving=True, push=True, stored=4) as made:
        reader = made.rigs[1].ranks[0].half._copies.direct
        assert reader is not None
        agent = reader._agent.name
        failed: Mapping[object, str] = {} if raises else defaultdict(lambda: "failed")
        monkeypatch.setattr(DirectTransfers, "advance_write", lambda *_, **__: failed[0])
        assert made.load(made.ask(), range(9, 13)) == [True]
        assert reader._agent.name != agent
        eventually(lambda: not made.left())
        monkeypatch.setattr(DirectTransfers, "advance_write", real)
        made.brings(made.ask(), range(4, 8), "again")


def test_B15_direct_a_prompt_whose_engine_detaches_is_pushed_from_slots(tmp_path: Path) -> None:
    with nodes(tmp_path, serving=True, push=True, stored=4) as made:
        grant = made.ask()
        made.rigs[0].client.detach("a test")
        for rank in made.rigs[0].ranks:
            rank.storage.fill_(0x55)
        assert made.brings(grant, range(9, 13))[CPU] == 4


def test_L1_direct_blocks_of_several_engine_blocks_are_pushed_from_engine_memory(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path, serving=True, per=2, push=True, stored=3) as made:
        found = made.brings(made.ask(), range(10, 16))
        assert made.rigs[1].ranks[0].untouched(range(10))
        assert found[GPU] == 3


def test_B15_direct_what_is_written_as_its_engine_detaches_comes_from_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers end what they have begun and say so, and nobody tells of overwritten blocks."""
    real, done = DirectTransfers.advance_write, list[WriteEnd | None]()

    def late(
        self: DirectTransfers, giving: WriteTask, now_ns: int, *, session_over: bool
    ) -> WriteEnd | None:
        if not done:
            done.append(real(self, giving, now_ns, session_over=False))
            made.rigs[0].client.detach("a test")
            eventually(lambda: not made.numbers(0).get("kvstore_sessions{active}"))
        return real(self, giving, now_ns, session_over=session_over)

    with nodes(tmp_path, serving=True, push=True, stored=4) as made:
        monkeypatch.setattr(DirectTransfers, "advance_write", late)
        found = made.brings(made.ask(), range(9, 13))
        assert done
        assert found[CPU] == 4
