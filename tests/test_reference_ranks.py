"""Four rank processes and a real store: one of them is killed, hangs or is slow, amid a copy.

An engine that has lost a rank is over, as with vLLM. Its blocks are gone with it; what counts is
what becomes of its slots and leases, and of the other engines of its store. Every rank compares
all that it reads with what must be there, so wrong bytes end any of these tests.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.harness.patience import WAIT_S
from tests.harness.rank_faults import LOAD, SIDE, STORE
from tests.harness.rank_rig import (
    BLOCK_TOKENS,
    BLOCKS,
    SLOTS,
    WORLD,
    RankedEngine,
    Site,
    doze,
    site,
    wait_for,
)
from tests.reference import State
from tests.reference.processes import RankLost, RankStarter, end_ranks

pytestmark = pytest.mark.slow  # processes by the dozen

TOKENS = BLOCKS * BLOCK_TOKENS  # of a prompt that can be loaded
ONE = 2  # the rank that something happens to
AMID = pytest.mark.parametrize("kind", [STORE, LOAD], ids=["store", "load"])
LOST = pytest.mark.parametrize("how", ["killed", "hung"])


@pytest.fixture(scope="module")
def starter() -> Iterator[RankStarter]:
    with RankStarter(SIDE) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does other things is no store that does not answer."""
    monkeypatch.setattr("connectors.scheduler.ANSWER_LIMIT_NS", int(WAIT_S * 1e9))


@pytest.fixture
def here(starter: RankStarter, tmp_path: Path) -> Iterator[Site]:
    with site(starter, tmp_path) as made:
        yield made


def begin(engine: RankedEngine, kind: int, *ranks: int, number: int = 1) -> None:
    """Get these ranks half-way into storing or loading a prompt, the others through with it."""
    engine.hold(kind, *ranks)
    engine.add("slow", number)
    engine.step_until_held(*ranks)
    if kind == LOAD:
        engine.step_until(lambda: engine.unreported("slow") == set(ranks), "the others' reports")
    else:
        others = len(engine.ranks) - len(ranks)
        engine.step_until(lambda: others in engine.half.over.values(), "the others' reports")


def lose(engine: RankedEngine, how: str) -> None:
    """Kill or stop a rank; the engine says which it is, and that is its end."""
    rank = engine.ranks[ONE]
    if how == "killed":
        rank.signal(signal.SIGKILL)
        said = "was killed by SIGKILL"
    else:
        rank.signal(signal.SIGSTOP)
        rank.report_s = 0.5
        said = r"has not reported within 0\.5 s"
    for _ in range(2):
        with pytest.raises(RankLost, match=rf"^rank {ONE} \(process {rank.pid}\) {said}$"):
            engine.step()


def fill(engine: RankedEngine, first: int = 100) -> range:
    """Use every slot that can be had for new prompts; return them, the newest of them last."""
    numbers = range(first, first + 2 * SLOTS // BLOCKS)
    for number in numbers:
        engine.catch_up()
        engine.store(number)
    return numbers


def reread(engine: RankedEngine, numbers: range) -> int:
    """Load what is still there of these prompts; return how many of them that is."""
    there = [number for number in numbers if engine.ready(number) == BLOCKS]
    for number in there:
        assert engine.compute(number, f"again{number}") == TOKENS
    return len(there)


def test_nothing_is_left_of_a_test_that_fails(starter: RankStarter, tmp_path: Path) -> None:
    left: list[psutil.Process] = []

    def fail() -> None:
        with site(starter, tmp_path) as here:
            engine = here.engine("engine")
            left.extend(psutil.Process(pid) for pid in (here.store.pid, *engine.pids))
            begin(engine, STORE, ONE)
            engine.ranks[1].signal(signal.SIGSTOP)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(left) == 1 + WORLD
    wait_for(lambda: not any(process.is_running() for process in left), "all gone", doze)


# O14: reports, releases, pins


@AMID
@LOST
def test_O14_an_engine_that_lost_a_rank_leaves_nothing_pinned(
    here: Site, kind: int, how: str
) -> None:
    other = here.engine("other")
    alone = here.granted()
    engine = here.engine("engine")
    engine.store(1)
    if kind == STORE:
        begin(engine, kind, ONE, number=2)
    else:
        begin(engine, kind, ONE)
        assert here.gauge("kvstore_leases") == 1
    lose(engine, how)
    assert other.compute(1) == TOKENS  # the lost rank may still be there
    engine.close()
    here.wait("kvstore_sessions", "ending", 0)
    here.wait("kvstore_leases", "", 0)
    here.wait("kvstore_slots", "granted", alone)
    engine = here.engine("engine")
    assert engine.compute(1) == TOKENS
    assert engine.compute(2) == 0
    wait_for(lambda: other.ready(2) == BLOCKS, "stored after all", doze)
    assert other.compute(2) == TOKENS


def test_O14_a_load_is_over_when_its_slowest_rank_says_so(here: Site) -> None:
    engine = here.engine("engine")
    engine.store(1)
    begin(engine, LOAD, ONE)
    assert engine.compute(2) == 0  # who does not need it goes on
    assert engine.state("slow") is State.LOADING
    assert here.gauge("kvstore_leases") == 1
    engine.release()
    engine.finish("slow")
    assert engine.engine.counts["loaded_tokens"] == TOKENS
    assert engine.all_free
    here.wait("kvstore_leases", "", 0)


def test_O14_a_request_aborted_while_a_rank_loads_keeps_its_blocks_that_long(here: Site) -> None:
    engine = here.engine("engine")
    engine.store(1)
    begin(engine, LOAD, ONE)
    engine.engine.abort("slow")
    assert engine.compute(2) == 0
    assert not engine.all_free
    assert here.gauge("kvstore_leases") == 1
    engine.release()
    engine.finish("slow")
    assert engine.all_free
    here.wait("kvstore_leases", "", 0)
    assert engine.compute(1) == TOKENS


def test_O14_a_store_on_a_slow_rank_keeps_no_engine_block(here: Site) -> None:
    """They get new owners at once; the first step that would overwrite them waits for the rank."""
    other, engine = here.engine("other"), here.engine("engine", reuse_newest=True)
    begin(engine, STORE, ONE)
    assert engine.all_free
    engine.add("next", 2)
    faults = engine.faults[ONE]
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(engine.step)
        try:
            wait_for(lambda: faults.fencing or step.done(), "the step", doze)
            fenced = faults.fencing and not step.done()
        finally:
            engine.release()
        step.result(WAIT_S)
    assert fenced
    engine.finish("next")
    wait_for(lambda: other.ready(1) == BLOCKS, "stored", doze)
    assert other.compute(1) == TOKENS


def test_O14_a_rank_that_hung_beyond_its_lease_reports_a_failed_load(
    starter: RankStarter, tmp_path: Path
) -> None:
    """The slots are another engine's by then, and it has read half of them."""
    with site(starter, tmp_path, lease="1s") as here:
        other, engine = here.engine("other"), here.engine("engine")
        engine.store(1)
        begin(engine, LOAD, ONE)
        engine.ranks[ONE].signal(signal.SIGSTOP)
        here.wait("kvstore_leases", "", 0)
        fill(other)
        assert other.ready(1) == 0
        engine.ranks[ONE].signal(signal.SIGCONT)
        engine.release()
        engine.finish("slow")
        assert engine.engine.counts["loads_failed"] == 1
        assert engine.engine.counts["loaded_tokens"] == 0
        assert engine.all_free


@AMID
def test_O14_every_rank_reports_once_after_one_has_lost_its_connection(
    here: Site, kind: int
) -> None:
    engine = here.engine("engine")
    engine.store(1)
    session = engine.client.session
    begin(engine, kind, ONE, number=1 if kind == LOAD else 2)
    engine.add("queued", 1)  # its load waits for the held copy
    engine.step_until(lambda: engine.unreported("queued"), "a load is planned")
    engine.faults[0].cut = 1
    engine.step_until(lambda: engine.client.session != session, "detached")
    assert engine.compute(3) == 0  # without a store
    assert engine.state("queued") is State.LOADING
    engine.release()
    engine.finish("queued", "slow")
    assert engine.all_free
    assert engine.client.wait_attached(WAIT_S)
    engine.catch_up()
    assert engine.compute(1) == TOKENS
    here.wait("kvstore_leases", "", 0)


def test_O14_slow_ranks_report_everything_in_the_end(here: Site) -> None:
    """Steps are scheduled ahead, requests come and go, and two ranks are behind."""
    engine = here.engine("engine", batches=2, prefix_cache=True, reuse_newest=True, budget=30)
    engine.faults[1].report_ms = 3
    engine.faults[3].copy_ms = 5
    rng = random.Random(1)
    for number in range(40):
        aborted = number % 4 == 0
        engine.add(f"r{number}", rng.randrange(7), new=20 if aborted else 5)
        for _ in range(1 + rng.randrange(7)):
            engine.step()
        if aborted:
            engine.engine.abort(f"r{number}")
    engine.step_until(lambda: engine.engine.idle, "all requests ended")
    counts = engine.engine.counts
    assert counts["loads"] >= 5
    assert counts["aborted"] == 10
    assert not counts["loads_failed"]
    assert engine.all_free
    here.wait("kvstore_leases", "", 0)
    other = here.engine("other")
    assert reread(other, range(7)) >= 1


# O18: parts of a block


def test_O18_a_block_is_there_once_its_slowest_rank_has_stored_its_part(here: Site) -> None:
    other, engine = here.engine("other"), here.engine("engine")
    begin(engine, STORE, ONE)
    assert other.ready(1) == 0
    engine.release()
    wait_for(lambda: other.ready(1) == BLOCKS, "stored", doze)
    assert other.compute(1) == TOKENS


@LOST
def test_O18_a_block_that_a_lost_rank_did_not_store_is_never_there(here: Site, how: str) -> None:
    other, engine = here.engine("other"), here.engine("engine")
    engine.store(1)
    begin(engine, STORE, ONE, number=2)
    assert (other.ready(1), other.ready(2)) == (BLOCKS, 0)
    lose(engine, how)
    assert (other.ready(1), other.ready(2)) == (BLOCKS, 0)
    engine.close()
    here.wait("kvstore_sessions", "ending", 0)
    assert (other.ready(1), other.ready(2)) == (BLOCKS, 0)
    assert other.compute(2) == 0


def test_O18_a_loads_slots_are_kept_for_its_slowest_rank(here: Site) -> None:
    other, engine = here.engine("other"), here.engine("engine")
    engine.store(1)
    begin(engine, LOAD, ONE)
    fill(other)
    engine.release()
    engine.finish("slow")
    assert engine.engine.counts["loads_failed"] == 0
    assert engine.engine.counts["loaded_tokens"] == TOKENS


# O23: slots of an engine that is gone


def test_O23_slots_wait_for_the_slowest_rank_of_an_engine_that_is_gone(here: Site) -> None:
    """One rank is killed, and another is still writing."""
    other = here.engine("other")
    alone = here.granted()
    engine = here.engine("engine")
    begin(engine, STORE, 1, ONE)
    lose(engine, "killed")
    engine.half.shutdown()
    here.wait("kvstore_sessions", "ending", 1)
    numbers = fill(other)
    assert here.gauge("kvstore_sessions", "ending") == 1
    engine.release()  # it writes the other half of its slots
    here.wait("kvstore_sessions", "ending", 0)
    here.wait("kvstore_slots", "granted", alone)
    assert reread(other, numbers) >= 3
    assert other.ready(1) == 0


def test_O23_slots_wait_for_a_rank_that_hangs_longer_than_its_engine_lives(here: Site) -> None:
    other = here.engine("other")
    alone = here.granted()
    engine = here.engine("engine")
    begin(engine, STORE, ONE)
    lose(engine, "hung")
    engine.half.shutdown()
    hung = engine.ranks.pop(ONE)
    end_ranks(engine.ranks, WAIT_S)
    here.wait("kvstore_sessions", "ending", 1)
    numbers = fill(other)
    assert here.gauge("kvstore_sessions", "ending") == 1
    engine.release()
    hung.signal(signal.SIGCONT)  # it writes the other half of its slots
    hung.hang_up()
    assert hung.gone(WAIT_S)
    here.wait("kvstore_sessions", "ending", 0)
    here.wait("kvstore_slots", "granted", alone)
    assert reread(other, numbers) >= 3
    assert other.ready(1) == 0


def test_O23_slots_wait_for_a_slow_rank_when_another_lost_its_connection(here: Site) -> None:
    """The engine lives, goes on without its store, and gets new slots when it is back."""
    other = here.engine("other")
    alone = here.granted()
    engine = here.engine("engine")
    both, session = here.granted(), engine.client.session
    begin(engine, STORE, ONE)
    engine.faults[0].cut = 1
    engine.step_until(lambda: engine.client.session != session, "detached")
    numbers = fill(other)
    assert here.gauge("kvstore_sessions", "ending") == 1
    assert both > alone
    engine.release()
    assert engine.client.wait_attached(WAIT_S)
    here.wait("kvstore_slots", "granted", both)
    assert reread(other, numbers) >= 3
    assert other.ready(1) == 0


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_O23_an_engine_lost_amid_a_load_gives_its_slots_back(here: Site, how: str) -> None:
    other = here.engine("other")
    alone = here.granted()
    engine = here.engine("engine")
    engine.store(1)
    begin(engine, LOAD, ONE)
    lose(engine, how)
    engine.half.shutdown()
    lost = engine.ranks.pop(ONE)
    end_ranks(engine.ranks, WAIT_S)
    if how == "hung":
        here.wait("kvstore_sessions", "ending", 1)
        assert here.granted() > alone
        lost.signal(signal.SIGKILL)
    assert lost.gone(WAIT_S)
    here.wait("kvstore_sessions", "ending", 0)
    here.wait("kvstore_slots", "granted", alone)
    assert other.compute(1) == TOKENS
