"""An engine's agent reads a peer's engine. Its NIXL is a fake, which the tests steer."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from connectors import engine_agent
from connectors.copies.host import LayerCache
from connectors.engine_agent import EngineAgent, gpu_of
from kvstore.core.errors import NotSupported, TierIOError
from kvstore.core.layout import GroupLayout, LayerRun, Move, PageRun, RankLayout, RankPages
from tests.test_direct_worker import Agent
from tiers.nixl import agent as nixl
from tiers.nixl.agent import _bindings  # type: ignore[attr-defined]
from tiers.nixl.messages import MoveError

PAGE = 32


class Reading(Agent):
    """Takes note of what is read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[tuple[str, list[int], list[int], list[int]]] = []
        self.wrong: Exception | None = None  # of the second read
        self.late: MoveError | None = None

    def move(
        self,
        peer: str,
        *places: Any,  # noqa: ANN401
        write: bool,
        gpu: int | None,
        peer_gpu: int | None,
    ) -> tuple[int, bool]:
        if self.wrong is not None and self.begun:
            raise self.wrong
        here, there = places
        assert np.array_equal(here[:, 1], there[:, 1])
        found = here[:, 0].tolist(), there[:, 0].tolist(), here[:, 1].tolist()
        self.begun.append((peer, *found))
        return super().move(peer, *places, write=write, gpu=gpu, peer_gpu=peer_gpu)

    def over(self, flight: int) -> bool:
        if self.late is not None:
            raise self.late
        return super().over(flight)


def engine() -> tuple[EngineAgent, Any, int]:
    """One of two layers; its NIXL, and its memory."""
    storage = torch.zeros(8 * PAGE, dtype=torch.uint8)
    caches = {name: LayerCache(storage, at * PAGE, 2 * PAGE, PAGE) for at, name in enumerate("ab")}
    runs = LayerRun("a", 0, PAGE, writes=True), LayerRun("b", PAGE, PAGE, writes=False)
    made = EngineAgent(caches)
    made._make = Reading  # type: ignore[assignment]
    made.open(RankLayout(4 * PAGE, (GroupLayout(2 * PAGE, runs),)), "lo")
    return made, made._agent, storage.data_ptr()


def rank(name: str, offset: int = 0, size: int = PAGE) -> RankPages:
    return RankPages(name, name.encode(), ((PageRun(offset, size, 1, 1 << 20, 4096, 0),),))


HALVES = [rank("one"), rank("two", PAGE)]  # of an engine of two ranks
MOVES = [(Move(0, 1, 0, 0), 7), (Move(0, 3, 0, 0), 5)]


def test_O20_direct_of_each_rank_what_it_has_is_read() -> None:
    made, nixl, base = engine()
    reading = made.read_engine(HALVES, MOVES)
    assert made.over(reading)
    there = [(1 << 20) + 7 * 4096, (1 << 20) + 5 * 4096]
    assert nixl.begun == [
        (peer, [base + 2 * PAGE + at, base + 6 * PAGE + at], there, [PAGE] * 2)
        for peer, at in (("one", 0), ("two", PAGE))
    ]
    assert reading.bytes == 4 * PAGE


def test_how_a_peer_is_reached_is_told_once() -> None:
    made, nixl, _ = engine()
    for _ in range(3):
        assert made.over(made.read_engine(HALVES, MOVES))
    assert nixl.known == ["one", "two"]


def test_another_layout_or_many_peers_leave_nothing_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_agent, "ENGINES_MAX", 2)
    made, _, _ = engine()
    for name in ("one", "two", "three"):
        made.read_engine([rank(name, size=2 * PAGE)], MOVES)
        assert len(made._overlaps) <= 2
    made.open(RankLayout(PAGE, (GroupLayout(PAGE, (LayerRun("b", 0, PAGE, writes=True),)),)), "lo")
    assert not made._overlaps


@pytest.mark.parametrize(
    "wrong", [MoveError("a test", "refused"), TypeError("a test, of the bindings")]
)
def test_B20_direct_a_read_of_which_a_part_was_not_begun_is_waited_for(wrong: Exception) -> None:
    made, nixl, _ = engine()
    nixl.wrong, nixl.flying = wrong, True
    reading = made.read_engine(HALVES, MOVES)
    assert not made.over(reading), "the first rank's is under way"
    nixl.flying = False
    with pytest.raises(TierIOError, match="a test"):
        made.over(reading)


def test_B20_direct_a_read_of_which_a_part_failed_on_its_way_says_so() -> None:
    made, nixl, _ = engine()
    nixl.flying = True
    reading = made.read_engine(HALVES, MOVES)
    nixl.late = MoveError("on its way", "failed")
    with pytest.raises(TierIOError, match="on its way"):
        made.over(reading)


def test_an_agent_ends_when_it_is_closed() -> None:
    made, _, _ = engine()
    made.close()
    assert (made._agent, made.name) == (None, "")
    with pytest.raises(TierIOError, match="no agent"):
        made.read_engine(HALVES, MOVES)


def test_B20_direct_a_read_whose_agent_has_ended_is_over() -> None:
    made, nixl, _ = engine()
    nixl.flying = True
    reading = made.read_engine(HALVES, MOVES)
    made.restart()
    with pytest.raises(TierIOError, match="its agent has ended"):
        made.over(reading)


class OnGpu:
    """Says what a tensor on a GPU would; nobody looks into it."""

    nbytes = 8 * PAGE

    def __init__(self, device: str = "cuda:2") -> None:
        self.device = device

    def data_ptr(self) -> int:
        return 1 << 21


def on_gpu() -> tuple[EngineAgent, Any]:
    caches: Any = {"a": LayerCache(OnGpu(), 0, PAGE, PAGE)}  # type: ignore[arg-type]
    made = EngineAgent(caches)
    made._make = Agent  # type: ignore[assignment]
    layout = RankLayout(PAGE, (GroupLayout(PAGE, (LayerRun("a", 0, PAGE, writes=True),)),))
    made.open(layout, "lo")
    return made, made._agent


def test_direct_a_GPU_engine_reads_slots_and_engines_into_its_GPU() -> None:
    made, agent = on_gpu()
    made.meet("store", b"store")
    assert made.over(made.read("store", [(Move(0, 1, 0, 0), 4096)]))
    for gpu in (None, 5):
        ranks = [msgspec.structs.replace(rank(f"engine {gpu}"), gpu=gpu)]
        assert made.over(made.read_engine(ranks, [(Move(0, 1, 0, 0), 7)]))
    assert agent.gpu == 2
    assert agent.peer_gpus == [None, None, 5], "slots are host memory"
    serves = made.serves()
    assert serves is not None
    assert serves[0].gpu == 2


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(["cpu"], None), (["cuda"], 0), (["cuda:0"], 0), (["cuda:3", "cuda:3"], 3)],
)
def test_direct_an_engines_memory_is_the_hosts_or_one_GPUs(
    devices: list[str], expected: int | None
) -> None:
    assert gpu_of(caches_on(devices)) == expected


@pytest.mark.parametrize("devices", [[], ["cpu", "cuda:0"], ["cuda:0", "cuda:1"], ["xpu:0"]])
def test_direct_other_memory_is_refused(devices: list[str]) -> None:
    with pytest.raises(NotSupported, match="expected 'cpu' or one GPU"):
        gpu_of(caches_on(devices))


def caches_on(devices: list[str]) -> dict[str, LayerCache]:
    storages: list[Any] = [OnGpu(device) for device in devices]
    return {f"{at}": LayerCache(storage, 0, PAGE, PAGE) for at, storage in enumerate(storages)}


class Backend:
    """In place of NIXL's agent: takes note of which memory it is told of."""

    def __init__(self) -> None:
        self.told: list[tuple[object, Any]] = []

    def registerMem(self, region: Any, _backends: object) -> None:  # noqa: ANN401
        self.told.append((region.getType(), region[0][:3]))

    def createXferReq(self, _: object, here: Any, there: Any, *_more: object) -> int:  # noqa: ANN401
        self.told += [(places.getType(), places[0]) for places in (here, there)]
        return 7

    def postXferReq(self, *_: object) -> object:
        return _bindings.NIXL_SUCCESS


def test_NIXL_is_told_which_memory_is_a_GPUs(monkeypatch: pytest.MonkeyPatch) -> None:
    made, backend = nixl.Agent("a test"), Backend()
    with monkeypatch.context() as patch:
        patch.setattr(made, "_agent", backend)
        made.register(4096, 64, 3)
        made.register(4096, 64)
        here, there = (np.array([[at, 32, 0]], np.uint64) for at in (4096, 8192))
        assert made.move("peer", here, there, write=False, gpu=3, peer_gpu=None) == (7, True)
        assert made.move("peer", here, there, write=True, gpu=None, peer_gpu=0) == (7, True)
    gpu, host = _bindings.VRAM_SEG, _bindings.DRAM_SEG
    assert backend.told == [
        (gpu, (4096, 64, 3)),
        (host, (4096, 64, 0)),
        (gpu, (4096, 32, 3)),
        (host, (8192, 32, 0)),
        (host, (4096, 32, 0)),
        (gpu, (8192, 32, 0)),
    ]


def test_B2_direct_a_peer_that_says_its_memory_is_on_a_GPU_where_it_is_not_is_refused() -> None:
    ours, theirs = nixl.Agent("ours"), nixl.Agent("theirs")
    memory = np.zeros((2, 4096), np.uint8)
    for agent, own in zip((ours, theirs), memory, strict=True):
        agent.register(own.ctypes.data, own.nbytes)
    assert ours.add_peer(theirs.metadata()) == "theirs"
    here, there = (np.array([[own.ctypes.data, 64, 0]], np.uint64) for own in memory)
    with pytest.raises(MoveError) as refused:
        ours.move("theirs", here, there, write=False, peer_gpu=3)
    assert refused.value.error == "refused"
