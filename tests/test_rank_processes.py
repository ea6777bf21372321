"""Rank processes: as those in the engine's own process, and gone when they should be."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from connectors.step_meta import StepMeta
from kvstore.core.errors import InvariantBroken
from tests.harness.patience import WAIT_S
from tests.harness.rank_faults import SIDE
from tests.harness.rank_rig import doze, wait_for
from tests.harness.reference_rig import Script, Side
from tests.reference import Engine, Group, LocalRank, Rank, Request, Shape, Span, WorkerResults
from tests.reference.processes import ProcessRank, RankLost, RankSpec, RankStarter, end_ranks
from tests.reference.ranks import RankStep
from tests.rows import ROOT

pytestmark = pytest.mark.slow  # processes by the dozen

SHAPE = Shape(groups=(Group(4), Group(4, window=9)), block_tokens=4, blocks=60, world=2, batches=2)
STEP = RankStep(StepMeta(), [], [])


class QuietSide(Side):
    """Copies nothing; ends as its options say. Loaded into the rank's process by its name."""

    def __init__(self, spec: RankSpec, _memory: bytearray) -> None:
        super().__init__()
        self._ends = spec.options.get("ends", "")

    def results(self, meta: StepMeta) -> WorkerResults:
        if self._ends:
            sys.exit(int(self._ends))
        return super().results(meta)

    def shutdown(self) -> None: ...


@pytest.fixture(scope="module")
def starter() -> Iterator[RankStarter]:
    with RankStarter(f"{__name__}:{QuietSide.__name__}") as made:
        yield made


@pytest.fixture
def start(starter: RankStarter) -> Iterator[Callable[..., ProcessRank]]:
    started: list[ProcessRank] = []
    processes: list[psutil.Process] = []

    def one(rank: int = 0, **options: str) -> ProcessRank:
        started.append(starter.start(RankSpec("engine", "model", SHAPE, rank, "", options)))
        processes.append(psutil.Process(started[-1].pid))
        started[-1].report_s = WAIT_S
        return started[-1]

    yield one
    end_ranks(started)
    assert not [process for process in processes if alive(process)]


def engine_of(ranks: list[Rank], script: Script) -> Engine:
    return Engine(SHAPE, script, ranks, random.Random(5))


def test_an_engine_cannot_tell_processes_from_ranks_of_its_own(
    start: Callable[..., ProcessRank],
) -> None:
    def run(ranks: list[Rank]) -> list[object]:
        engine, outputs = engine_of(ranks, Script()), []
        for number in range(6):
            engine.add(Request(f"r{number}", [number % 3] * 30, 9, SHAPE))
        while not engine.idle:
            outputs += engine.step()
        assert engine.counts["finished"] == 6
        return [(output.tokens, output.finished, output.connector) for output in outputs]

    own: list[Rank] = [LocalRank(SHAPE, rank, Side()) for rank in range(2)]
    assert run([start(0), start(1)]) == run(own)


def test_wrong_bytes_in_a_process_are_seen_by_the_engine(
    start: Callable[..., ProcessRank],
) -> None:
    rank = start()
    span = Span("r", 4, 5, 5, bytes(5 * 4), [[1, 2], [3, 4]])
    rank.submit(RankStep(StepMeta(), [1, 2, 3, 4], [span]))
    with pytest.raises(InvariantBroken, match="wrong bytes: r rank 0 group 0 token 0"):
        rank.collect()
    rank.submit(STEP)  # it can still be asked, say for its end
    assert rank.collect().ended == set()


def test_a_rank_that_fails_is_told_apart_from_one_that_was_killed(
    start: Callable[..., ProcessRank],
) -> None:
    failing, killed = start(0, ends="3"), start(1)
    failing.submit(STEP)
    with pytest.raises(RankLost, match=r"^rank 0 \(process \d+\) ended with status 3$"):
        failing.collect()
    with pytest.raises(RankLost, match="ended with status 3"):
        failing.submit(STEP)
    killed.submit(STEP)
    killed.collect()
    killed.signal(signal.SIGTERM)
    assert killed.gone(WAIT_S)
    killed.signal(signal.SIGTERM)  # of nobody
    with pytest.raises(RankLost, match=r"^rank 1 \(process \d+\) was killed by SIGTERM$"):
        killed.submit(STEP)


def test_a_rank_that_is_stopped_can_be_given_up_and_ended(
    start: Callable[..., ProcessRank],
) -> None:
    rank = start()
    rank.submit(STEP)
    rank.collect()
    rank.signal(signal.SIGSTOP)
    rank.report_s = 0.1
    rank.submit(STEP)
    with pytest.raises(RankLost, match=r"has not reported within 0\.1 s"):
        rank.collect()
    process = psutil.Process(rank.pid)
    end_ranks([rank], 0.1)
    assert not alive(process)


def test_a_step_is_not_sent_for_ever_to_a_rank_that_reads_nothing(
    start: Callable[..., ProcessRank],
) -> None:
    rank = start()
    rank.signal(signal.SIGSTOP)
    rank.report_s = 0.1
    more_than_a_socket_takes = Span("r", 0, 1, 1, bytes(8 << 20), [[1], [2]])
    with pytest.raises(RankLost, match=r"^rank 0 \(.*\) has not read its step within 0\.1 s$"):
        rank.submit(RankStep(StepMeta(), [], [more_than_a_socket_takes]))
    end_ranks([rank], 0.1)


def test_a_rank_that_was_closed_says_so(start: Callable[..., ProcessRank]) -> None:
    rank = start()
    rank.hang_up()
    with pytest.raises(RankLost, match="was closed"):
        rank.submit(STEP)
    assert rank.gone(WAIT_S)


def test_ranks_end_with_the_process_that_starts_them() -> None:
    with RankStarter(f"{__name__}:{QuietSide.__name__}") as starter:
        rank = starter.start(RankSpec("engine", "model", SHAPE, 0, ""))
        rank.signal(signal.SIGSTOP)
        psutil.Process(starter.pid).kill()
        assert rank.gone(WAIT_S)
        with pytest.raises(RankLost, match="the process that starts ranks is gone"):
            rank.submit(STEP)
        with pytest.raises(
            RankLost, match="rank 1 was not started: the process that starts ranks is gone"
        ):
            starter.start(RankSpec("engine", "model", SHAPE, 1, ""))


def test_a_side_that_does_not_exist_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with RankStarter("tests.harness.rank_faults:NoSide") as starter:
        assert starter._child.wait(WAIT_S) == 1
        with pytest.raises(RankLost, match="the process that starts ranks is gone"):
            starter.start(RankSpec("engine", "model", SHAPE, 0, ""))
    said = capfd.readouterr().err
    assert "'tests.harness.rank_faults:NoSide' cannot be loaded" in said
    assert "Traceback" not in said


ENGINE = f"""
import sys
from pathlib import Path
from tests.reference.processes import RankSpec, RankStarter
from tests.test_rank_processes import SHAPE
starter = RankStarter({SIDE!r})
folder = Path(sys.argv[1])
nobody = str(folder / "nobody.sock")
pids = [
    starter.start(
        RankSpec("engine", "model", SHAPE, rank, nobody, {{"faults": str(folder / str(rank))}})
    ).pid
    for rank in range(2)
]
print(starter.pid, *pids, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_an_engine_that_was_killed(tmp_path: Path) -> None:
    """Not of a stopped rank either, nor of one that is attaching in vain."""
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # ranks find ours where their parent does
    )
    with engine:
        assert engine.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
        assert len(processes) == 3
        processes[1].suspend()
        engine.kill()
        engine.wait(WAIT_S)
    try:
        wait_for(lambda: not any(map(alive, processes)), "all gone", doze)
    finally:
        for process in filter(alive, processes):
            process.kill()


def alive(process: psutil.Process) -> bool:
    """Whether it runs; whoever adopted it may not have asked yet how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
