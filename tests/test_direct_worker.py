"""A load of which a part comes from a peer: the worker's side of it, without NIXL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from connectors.copies.host import Device, LayerCache
from connectors.direct_reads import CANCEL_NS, FETCHES_MAX, DirectTransfers, PeerLoad
from connectors.engine_agent import NETWORKS, AgentTransfer, EngineAgent
from connectors.load_progress import LoadDeadline
from connectors.step_meta import EngineSpec, LoadJob
from connectors.worker_copies import Copies, LoadTask
from kvstore.core.errors import NotSupported, TierIOError
from kvstore.core.layout import GroupLayout, LayerRun, Move, PageRun, RankLayout, RankPages
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.fakes import u32
from tiers.nixl.messages import MoveError

LAYOUT = RankLayout(64, (GroupLayout(32, (LayerRun("l", 0, 32, writes=True),)),))
THEIRS = (RankPages("theirs", b"md", ()),)


class Reader(EngineAgent):
    """PeerLoad take as long as the test likes."""

    gpu: int | None = None

    def __init__(self) -> None:
        self.moves: list[list[tuple[Move, int]]] = []
        self.engine_moves: list[tuple[Sequence[RankPages], list[tuple[Move, int]]]] = []
        self.hangs = self.fails = False
        self.restarts = 0
        self.part_bytes = [32]

    @property
    def name(self) -> str:
        return f"own-{self.restarts}"

    def open(self, layout: RankLayout, devices: str) -> None: ...

    def serves(self) -> tuple[RankPages, int]:
        return RankPages(self.name, b"", ()), 32

    def meet(self, peer: str, metadata: bytes) -> None: ...

    def restart(self) -> None:
        self.restarts += 1

    def read(self, peer: str, moves: Sequence[tuple[Move, int]]) -> AgentTransfer:
        assert peer == "agent"
        self.moves.append(list(moves))
        return AgentTransfer(64, 1, [])

    def read_engine(
        self, ranks: Sequence[RankPages], moves: Sequence[tuple[Move, int]]
    ) -> AgentTransfer:
        self.engine_moves.append((ranks, list(moves)))
        return AgentTransfer(64, 1, [])

    def over(self, reading: AgentTransfer) -> bool:
        if self.fails or reading.failure:
            raise TierIOError("a test")
        return not self.hangs


class Worker:
    """One load of two blocks: the second one, and half of the third, come from a peer."""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self.reader = Reader()
            patch.setattr("connectors.direct_reads.EngineAgent", lambda *_, **__: self.reader)
            self.reads = DirectTransfers({})
            self.said: list[framing.Message] = []
        self.reads.open(LAYOUT, "lo", self.said.append)
        assert self.said.pop() == p.Serves(*self.reader.serves())
        slots = (7, p.DIRECT + 4, p.DIRECT + 6)
        self.job = LoadJob(
            "r", 1, 1, EngineSpec((20, 21, 22, 23, 24), (5,), (0,)), slots,
            (3, 9, 9),
        )  # fmt: skip
        found = self.reads.start_load(self.job, (2,), LoadDeadline(1000, 10**6, 0))
        assert found is not None
        self.load: PeerLoad = found

    def places(self, *positions: int) -> None:
        numbers = [position + 1 for position in positions]
        self.reads.receive(p.Places(9, u32(positions), u32(numbers), "agent", b"md", 4096))

    def passed(self, *positions: int, ok: bool = True, written: bool = False) -> None:
        self.reads.receive(p.Passed(9, u32(positions), ok, written))

    def advance(self, now_ns: int = 0) -> bool:
        return self.reads.advance(self.load, now_ns)


def test_L1_direct_a_load_is_over_when_all_it_reads_is_good() -> None:
    worker = Worker()
    assert not worker.advance()
    worker.places(4)
    assert not worker.advance()
    first = 4096 + 5 * 64
    assert worker.reader.moves == [
        [(Move(0, 22, p.DIRECT + 4, 0), first), (Move(0, 23, p.DIRECT + 4, 1), first)]
    ]
    assert worker.said == [p.Arrived(9, u32([4]), 64, ok=True)]
    worker.passed(4)
    worker.places(6)
    assert not worker.advance()
    assert len(worker.reader.moves) == 2, "each is read once"
    worker.passed(6)
    assert worker.advance()
    assert not worker.load.failed
    assert worker.load.copied_bytes == 128


def test_L1_direct_a_load_that_waits_while_many_others_come_and_go_ends_well() -> None:
    """The peer still computes its last blocks while thousands of other fetches begin and end."""
    worker = Worker()
    worker.places(4)
    assert not worker.advance()
    worker.passed(4)
    for fetch in range(100, 100 + 2 * FETCHES_MAX):
        worker.reads.receive(p.Passed(fetch, u32([0]), True))
        assert not worker.advance()
    assert len(worker.reads._fetches) == FETCHES_MAX
    worker.places(6)
    worker.passed(6)
    assert worker.advance()
    assert not worker.load.failed


def test_L1_direct_a_load_reads_in_a_peers_engine_whose_memory_is_told_once() -> None:
    worker = Worker()
    worker.reads.receive(p.Places(9, u32([4]), u32([70, 71]), engine=5, ranks=THEIRS))
    assert not worker.advance()
    slot = p.DIRECT + 4
    moves = [(Move(0, 22, slot, 0), 70), (Move(0, 23, slot, 1), 71)]
    assert worker.reader.engine_moves == [(THEIRS, moves)]
    worker.reads.receive(p.Places(9, u32([6]), u32([80, 81]), engine=5, ranks=()))
    worker.passed(4, 6)
    assert worker.advance()
    assert worker.reader.engine_moves[1][0] == THEIRS
    assert worker.said == [p.Arrived(9, u32([at]), 64, ok=True) for at in (4, 6)]


def test_L1_direct_blocks_of_two_engines_are_each_read_in_their_own() -> None:
    worker = Worker()
    for position, engine in ((4, 5), (6, 7)):
        ranks = (RankPages(f"engine {engine}", b"md", ()),)
        worker.reads.receive(
            p.Places(9, u32([position]), u32([70, 71]), engine=engine, ranks=ranks)
        )
    assert not worker.advance()
    read = [(ranks[0].agent, moves[0][0].slot) for ranks, moves in worker.reader.engine_moves]
    assert read == [("engine 5", p.DIRECT + 4), ("engine 7", p.DIRECT + 6)]


def test_B19_direct_what_is_told_once_more_is_read_once_more() -> None:
    worker = Worker()
    worker.reads.receive(p.Places(9, u32([4, 6]), u32([70, 71, 80, 81]), engine=5, ranks=THEIRS))
    assert not worker.advance()
    worker.passed(6)
    worker.places(4)
    assert not worker.advance()
    assert [move.block_id for move, _ in worker.reader.moves[0]] == [22, 23]
    worker.passed(4)
    assert worker.advance()
    assert len(worker.said) == 2
    assert not worker.load.failed


@pytest.mark.parametrize("how", ["too few blocks", "unreadable"])
def test_B15_direct_what_cannot_be_read_in_an_engine_is_read_where_it_is_told_next(
    how: str,
) -> None:
    worker = Worker()
    blocks = [70] if how == "too few blocks" else [70, 71]
    worker.reader.fails = how == "unreadable"
    worker.reads.receive(p.Places(9, u32([4]), u32(blocks), engine=5, ranks=()))
    assert not worker.advance()
    assert worker.said == [p.Arrived(9, u32([4]), 0, ok=False)]
    worker.reader.fails = False
    worker.places(4, 6)
    assert not worker.advance()
    worker.passed(4, 6)
    assert worker.advance()
    assert not worker.load.failed


def test_B20_direct_a_place_that_cannot_be_used_ends_no_load_that_is_being_read() -> None:
    worker = Worker()
    worker.reader.hangs = True
    worker.places(4)
    assert not worker.advance()
    worker.reads.receive(p.Places(9, u32([6]), b"", "agent", b"", 4096))
    assert not worker.advance(), "it failed, and is still being read into engine blocks"
    assert worker.load.failed
    worker.reader.hangs = False
    assert worker.advance()


def test_an_engine_whose_pages_cannot_be_told_serves_nobody_and_reads_all_the_same() -> None:
    worker = Worker()

    def serves() -> tuple[RankPages, int]:
        raise ValueError("too many pieces")

    worker.reader.serves = serves  # type: ignore[method-assign]
    worker.reads.open(LAYOUT, "lo", worker.said.append)
    assert not worker.said


def test_what_comes_from_slots_only_reads_nothing_of_a_peer() -> None:
    worker = Worker()
    job = LoadJob("r", 1, 1, EngineSpec((20, 21), (2,), (0,)), (7,), (3,))
    assert worker.reads.start_load(job, (2,), LoadDeadline(1000, 10**6, 0)) is None


@pytest.mark.parametrize("how", ["refused", "late", "read"])
def test_B15_direct_a_load_that_fails_is_over_when_nothing_is_read_any_more(how: str) -> None:
    worker = Worker()
    worker.reader.hangs = how != "read"
    worker.reader.fails = how == "read"
    worker.places(4)
    now_ns = 0
    if how != "read":
        assert not worker.advance()
        if how == "refused":
            worker.passed(4, ok=False)
        else:
            now_ns = 1000
        assert not worker.advance(now_ns), "it is still being read"
        worker.reader.hangs = False
    assert worker.advance(now_ns)
    assert worker.load.failed
    assert worker.reader.restarts == 0
    assert all(isinstance(said, p.Arrived) and not said.ok for said in worker.said)


def test_B20_direct_a_read_that_does_not_end_ends_with_its_agent() -> None:
    worker = Worker()
    worker.reader.hangs = True
    worker.places(4, 6)
    assert not worker.advance()
    worker.passed(6, ok=False)
    assert not worker.advance()
    assert not worker.advance(CANCEL_NS - 1)
    assert worker.reader.restarts == 0
    assert worker.advance(CANCEL_NS)
    assert worker.reader.restarts == 1
    assert worker.load.failed
    assert p.Serves(*worker.reader.serves()) in worker.said, "peers read by the new one"


def pushed() -> Worker:
    """The load's engine blocks have been named to a peer that writes them."""
    worker = Worker()
    assert not worker.advance()
    assert not worker.said, "who reads names nothing"
    worker.reads.receive(p.Places(9, push=True))
    assert not worker.advance()
    return worker


def test_P8_direct_an_agent_that_is_written_to_is_reached_by_networks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another process of the machine copies could not be ended."""
    put: dict[str, str] = {}
    monkeypatch.setattr("connectors.engine_agent.os.putenv", put.__setitem__)
    cache = LayerCache(torch.zeros(64, dtype=torch.uint8), 0, 32, 32)
    for pushed, expected in ((False, None), (True, NETWORKS)):
        put.clear()
        reads = DirectTransfers({"l": cache}, pushed=pushed)
        reads._agent._make = Agent  # type: ignore[assignment]
        reads.open(LAYOUT, "lo", lambda _: None)
        assert put.get("UCX_TLS") == expected


def test_B20_direct_a_GPU_is_reached_over_RDMA_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is slower than by way of the store, and who is read dies with its reader."""
    reads = Worker().reads
    reads._agent.gpu = 1
    with pytest.raises(NotSupported, match="devices = 'eth0' names no RDMA device"):
        reads.open(LAYOUT, "eth0", lambda _: None)
    monkeypatch.setattr("connectors.engine_agent.has_rdma", lambda devices: devices == "mlx5_0:1")
    reads.open(LAYOUT, "mlx5_0:1", lambda _: None)


def test_L1_direct_a_pushed_load_names_its_engine_blocks_once() -> None:
    worker = pushed()
    named = p.Target(9, "own-0", u32([4, 6]), u32([22, 23, 24, 0]))
    assert worker.said == [named], "half of the last block is not wanted"
    worker.passed(4)
    assert not worker.advance()
    worker.passed(6)
    assert worker.advance()
    assert worker.said == [named]
    assert not worker.load.failed
    assert worker.advance(), "it may be looked at again: its other blocks come from a disk, say"
    assert worker.load.copied_bytes + worker.load.written_bytes == 3 * 32
    assert worker.reader.restarts == 0


def test_B20_direct_a_pushed_load_that_failed_is_over_when_its_peer_writes_no_more() -> None:
    worker = pushed()
    worker.said.clear()
    worker.passed(4, ok=False)
    for _ in range(2):
        assert not worker.advance(), "the other block may be written"
    assert worker.said == [p.Arrived(9, u32([6]), 0, ok=False)], "its peer is to stop"
    worker.passed(6, ok=False, written=True)
    assert not worker.advance()
    worker.passed(6, ok=False)
    assert worker.advance(CANCEL_NS - 1)
    assert worker.load.failed
    assert worker.reader.restarts == 0


@pytest.mark.parametrize("how", ["hangs", "may write", "late"])
def test_B20_direct_a_pushed_load_that_failed_ends_the_agent_that_may_be_written(how: str) -> None:
    worker = pushed()
    now_ns = 1000 if how == "late" else 0
    if how != "late":
        worker.passed(4, ok=False)
    if how == "may write":
        worker.passed(6, ok=False, written=True)
    assert not worker.advance(now_ns)
    assert not worker.advance(now_ns + CANCEL_NS - 1)
    assert worker.reader.restarts == 0
    assert worker.advance(now_ns + CANCEL_NS)
    assert worker.load.failed
    assert worker.reader.restarts == 1
    assert worker.said[-1] == p.Serves(*worker.reader.serves()), "peers write to the new one"
    assert worker.advance(now_ns + CANCEL_NS + 1), "it may be looked at again"
    assert worker.reader.restarts == 1


@pytest.mark.parametrize("push", [False, True])
def test_O14_direct_a_load_whose_session_is_over_waits_until_its_blocks_are_written_no_more(
    push: bool,
) -> None:
    """What is read ends by itself; what is pushed ends with the agent."""
    worker = pushed() if push else Worker()
    if not push:
        worker.reader.hangs = True
        worker.places(4)
        assert not worker.advance()
    copies = Copies(Device({}), (1,), worker.reads)
    task = LoadTask(worker.job, 0, peer=worker.load)
    assert not copies._abandon(task, 0), "engine blocks may be written"
    worker.reader.hangs = False
    assert copies._abandon(task, CANCEL_NS if push else 1)
    copies.runner.close()
    assert not task.ok
    assert worker.reader.restarts == push


class Agent:
    """Knows peers; one of them cannot be reached."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: list[str] = []
        self.flying = False
        self.gpu: int | None = None
        self.peer_gpus: list[int | None] = []

    def register(self, _address: int, _size: int, gpu: int | None) -> None:
        self.gpu = gpu

    def metadata(self) -> bytes:
        return b"md"

    def add_peer(self, metadata: bytes) -> str:
        if metadata == b"gone":
            raise MoveError("a test", "failed")
        self.known.append(metadata.decode())
        return metadata.decode()

    def move(
        self, peer: str, *_places: object, write: bool, gpu: int | None, peer_gpu: int | None
    ) -> tuple[int, bool]:
        assert not write
        assert gpu == self.gpu
        self.peer_gpus.append(peer_gpu)
        assert peer in self.known
        return 1, not self.flying

    def over(self, _flight: int) -> bool:
        return not self.flying

    def let_go(self, _flight: int) -> None: ...

    def remove_peer(self, peer: str) -> None:
        self.known.remove(peer)


def test_direct_the_agents_that_were_not_heard_of_for_longest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("connectors.engine_agent.PEERS_MAX", 3)
    reader = opened()
    for peer in ("a", "b", "c", "a", "d"):
        reader.meet(peer, peer.encode())
        assert reader.over(reader.read(peer, [(Move(0, 1, 0, 0), 4096)]))
    agent: Any = reader._agent
    assert agent.known == ["a", "c", "d"], "met once each"


def opened() -> EngineAgent:
    reader = EngineAgent({"l": LayerCache(torch.zeros(64, dtype=torch.uint8), 0, 32, 32)})
    reader._make = Agent  # type: ignore[assignment]
    reader.open(LAYOUT, "lo")
    return reader


def halves() -> tuple[EngineAgent, Any, list[RankPages]]:
    """A reader of a page whose halves two ranks have, and its agent."""
    reader = opened()
    ranks = [
        RankPages(name, name.encode(), ((PageRun(16 * n, 16, 1, 4096, 16, 0),),))
        for n, name in enumerate(("here", "gone"))
    ]
    return reader, reader._agent, ranks


def test_B19_direct_what_one_peer_says_of_anothers_engine_is_not_used_for_the_other() -> None:
    reader, agent, ranks = halves()
    ranks[1] = RankPages("there", b"there", ranks[1].pages)
    places: list[list[int]] = []

    def move(_: str, local: Any, remote: Any, **_how: object) -> tuple[int, bool]:  # noqa: ANN401
        places.append([*(local[:, 0] - reader._pages[0][0].base), *remote[:, 0]])
        return 1, True

    agent.move = move
    liar = RankPages("here", b"here", ((PageRun(0, 16, 1, 9999, 16, 0),),))
    for named in ([liar, ranks[1]], ranks, [liar, ranks[1]]):
        reader.read_engine(named, [(Move(0, 1, 0, 0), 3)])
    assert places[2:4] == [[32, 4096 + 3 * 16], [48, 4096 + 3 * 16]]
    assert places[0] == places[4] == [32, 9999 + 3 * 16]


def test_B20_direct_a_read_of_which_a_part_failed_is_over_when_the_rest_is() -> None:
    reader, agent, ranks = halves()
    agent.flying = True
    reading = reader.read_engine(ranks, [(Move(0, 1, 0, 0), 3)])
    assert not reader.over(reading), "the first rank's half is being read"
    agent.flying = False
    with pytest.raises(TierIOError, match="a test"):
        reader.over(reading)
    assert not reading.flights


def test_direct_an_engine_whose_agents_were_forgotten_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("connectors.engine_agent.PEERS_MAX", 2)
    reader, agent, ranks = halves()
    ranks[1] = RankPages("there", b"there", ranks[1].pages)
    for peer in ("x", "y"):
        assert reader.over(reader.read_engine(ranks, [(Move(0, 1, 0, 0), 3)]))
        for other in (peer, peer * 2):
            reader.meet(other, other.encode())
            assert reader.over(reader.read(other, [(Move(0, 1, 0, 0), 4096)]))
        assert agent.known == [peer, peer * 2]


def test_B15_direct_a_peer_that_is_gone_keeps_no_other_from_being_read_after_a_restart() -> None:
    reader = opened()
    moves = [(Move(0, 1, 0, 0), 4096)]

    def read(peer: str) -> bool:
        return reader.over(reader.read(peer, moves))

    for peer in ("gone", "there"):
        reader.meet(peer, peer.encode())
    for _ in range(2):
        with pytest.raises(TierIOError):
            read("gone")
        assert read("there")
        reader.restart()
    reader.meet("there", b"another")
    with pytest.raises(TierIOError, match="metadata of another exporter than 'there'"):
        read("there")
