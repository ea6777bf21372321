"""Loads that take long: they go on while blocks arrive, or a peer computes them, and no longer.

Reference engines with real worker halves, on store processes whose disk or peer is slow or stalls.
Whatever happens every byte that an engine reads is compared, and its tokens are.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest

from connectors.step_meta import StepMeta
from tests.bench.store import StoreProcess, free_port, numbers
from tests.harness.faults import Call, Faults, Kind
from tests.harness.handover_nodes import exporter_of
from tests.harness.handover_rig import HANDED, Node, node, prompt
from tests.harness.live import LiveStore, eventually
from tests.harness.patience import WAIT_S
from tests.harness.standstill import machine
from tests.reference import Group, Shape

SHAPE = Shape((Group(4),), 8, 1200, budget=4000)
TOKENS = 8 * 40 + 3
WHOLE = TOKENS // 8 * 8  # in whole blocks
GIVEN_UP = re.compile(
    r"load for request .* given up: (\d+) of (\d+) blocks from .* came, the last sign of one"
    r" (\d+\.\d) s ago, in (\d+\.\d) s"
)

both_ways = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


class Store(StoreProcess):
    """A store that others hand over to, with these lines in [engine], and with more settings."""

    def __init__(self, folder: Path, waits: str, more: str = "", **how: Any) -> None:  # noqa: ANN401
        folder.mkdir(exist_ok=True)
        self.listen = f"127.0.0.1:{free_port()}"
        settings = f'extent = "16MiB"\n[engine]\n{waits}{more}[peer]\nlisten = "{self.listen}"\n'
        how = {"module": "tests.harness.serve_brief", "scraped": False} | how
        super().__init__(folder, "64MiB", settings, **cast("Any", how))

    def numbers(self) -> dict[str, float]:
        return numbers(self.address)

    @property
    def given_up(self) -> float:
        return self.numbers().get("kvstore_engine_events{load_given_up}", 0)

    def let_go(self) -> bool:
        """Tell whether nothing is pinned, or held for a hand-over."""
        found = self.numbers()
        names = ["kvstore_leases", "kvstore_jobs_open"]
        names += [f"kvstore_hand_over_open{{{what}}}" for what in ("fetches", "jobs", "requests")]
        states = ("held", "landing", "quarantined")
        names += [f"kvstore_hand_over_bytes{{{state}}}" for state in states]
        return not any(found.get(name) for name in names)

    def freeze(self, *, store: bool = True, go_on: bool = False) -> None:
        """Stop the exporter, and the store; or have them go on."""
        process = psutil.Process(self.pid)
        exporter = exporter_of(process)
        assert exporter is not None
        for each in (process, exporter) if store else (exporter,):
            each.send_signal(signal.SIGCONT if go_on else signal.SIGSTOP)


@contextmanager
def stores(folder: Path, waits: str, **how: str) -> Iterator[tuple[Store, Store]]:
    folder.mkdir(exist_ok=True)
    with Store(folder / "p", waits, **how) as prefill, Store(folder / "d", waits, **how) as decode:
        yield prefill, decode


@contextmanager
def pair(
    folder: Path, waits: str, *, push: bool = False, shape: Shape = SHAPE, **how: str
) -> Iterator[tuple[Store, Store, Node, Node]]:
    """Two stores that know each other, each with an engine: of prefill, and of decode."""
    with (
        stores(folder, waits, **how) as (left, right),
        engine_on(left, "p", shape=shape) as prefill,
        engine_on(right, "d", push=push, shape=shape) as decode,
    ):
        meet(prefill, decode)
        yield left, right, prefill, decode


def engine_on(
    store: Store, name: str, *, push: bool = False, shape: Shape = SHAPE
) -> AbstractContextManager[Node]:
    return node(cast("LiveStore", store), name, shape, push=push)


class Computing:
    """A prompt that one engine computes, slowly, and another one is asked for at the same time."""

    def __init__(
        self, prefill: Node, store: Store, text: Sequence[int], step_s: float = 60.0
    ) -> None:
        """step_s: of each step that does not go on earlier; a step's blocks come at its end."""
        self.prefill, self.store, self.text = prefill, store, text
        submit, self._steps = prefill.side.after_forward, threading.Semaphore(0)

        def slow(meta: StepMeta) -> None:
            if meta.stores:
                self._steps.acquire(timeout=step_s)
            submit(meta)

        prefill.side.after_forward = slow
        self._thread = threading.Thread(target=self._compute)

    def _compute(self) -> None:
        self.prefill.run({"r": self.text}, 1, {"r": HANDED})

    def __enter__(self) -> dict[str, Any]:
        """Begin; return what the other engine is given."""
        self._thread.start()
        eventually(lambda: self.prefill.engine.book.tables)
        time.sleep(0.1)  # its store knows of it
        host, _, port = self.store.listen.rpartition(":")
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p",
            "remote_request_id": "r", "remote_host": host, "remote_port": int(port),
            "remote_block_ids": [[1]], "tp_size": 1,
        }  # fmt: skip

    def go_on(self, steps: int) -> None:
        """Have so many steps end."""
        self._steps.release(steps)

    def __exit__(self, *_: object) -> None:
        self.go_on(1000)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def given_up(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int, float, float]]:
    """What is said of loads that were given up: blocks that came, of how many, quiet, in all."""
    found = [GIVEN_UP.search(record.getMessage()) for record in caplog.records]
    assert all(r.levelno == logging.WARNING for r in caplog.records if "given up" in r.getMessage())
    return [(int(m[1]), int(m[2]), float(m[3]), float(m[4])) for m in found if m is not None]


def meet(prefill: Node, decode: Node) -> None:
    """Have two stores know each other, whose exporters take a second or two to start."""
    loaded, count = 0, 0
    while not loaded:
        count += 1
        name = f"meet {count}"
        prompts = {name: prompt(name, 20)}
        loaded = decode.run(prompts, 1, prefill.compute(prompts))[name]


def long_prefill(
    folder: Path,
    waits: str,
    step_s: float,
    *,
    push: bool,
    module: str = "tests.harness.serve_brief",
) -> float:
    """A prompt is computed in one step of so many seconds; return how long it was waited for."""
    text = prompt(folder, TOKENS)
    made = pair(folder, waits, push=push, module=module)
    came = "kvstore_fetched_blocks{prefill}"
    with made as (left, right, prefill, decode):
        before = right.numbers().get(came, 0)  # what they met over may have been under way, too
        with Computing(prefill, left, text, step_s) as params:
            started = time.monotonic()
            loaded = decode.run({"d": text}, 3, {"d": params})
            took = time.monotonic() - started
        assert loaded == {"d": WHOLE}, right.numbers()
        assert right.numbers()[came] - before == WHOLE // 8
        assert right.given_up == 0
        eventually(lambda: right.let_go() and left.let_go())
    return took


@both_ways
def test_P2_P7_B15_blocks_of_a_prompt_that_a_peer_computes_for_long_are_waited_for(
    tmp_path: Path, push: bool
) -> None:
    took = long_prefill(tmp_path / "n", 'promote = "500ms"\n', 3, push=push)
    assert took > 2.5


@pytest.mark.slow
@both_ways
def test_P2_P7_B15_a_prefill_of_ten_seconds_is_waited_for_with_all_settings_as_they_are(
    tmp_path: Path, push: bool
) -> None:
    assert long_prefill(tmp_path / "n", "", 10, push=push, module="kvstore.cli") > 9


def test_B15_a_load_is_not_given_up_because_the_machine_stood_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it waits for stood still, too, and comes a moment later."""
    text, waits = prompt("stood still", TOKENS), 'promote = "2s"\n'
    with machine() as running, pair(tmp_path, waits) as (left, _, prefill, decode):
        with Computing(prefill, left, text, 1.0) as params:
            half = threading.Timer(0.5, running.stands_still)
            half.start()
            loaded = decode.run({"d": text}, 3, {"d": params})
            half.join()
        assert loaded == {"d": WHOLE}
        assert not given_up(caplog)


MUCH_S = 30.0  # more than a busy machine takes, less than a limit that a test has not set
MANY = 8 * 200 + 3  # tokens whose blocks come in several jobs, computed in several steps
CHUNKED = msgspec.structs.replace(SHAPE, budget=8 * 16)


@both_ways
@pytest.mark.parametrize("whole", [True, False], ids=["store", "exporter"])
def test_B15_a_peer_that_stalls_in_mid_transfer_is_given_up_after_a_time_without_an_arrival(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, push: bool, whole: bool
) -> None:
    """Some blocks have come, its engine goes on to compute more, and nothing of them comes."""
    text, waits = prompt("stalls", MANY), 'promote = "1s"\n'
    made = pair(tmp_path, waits, push=push, shape=CHUNKED)
    with made as (left, right, prefill, decode):
        with Computing(prefill, left, text, 0.4) as params:
            stalled_s: list[float] = []

            def stall() -> None:
                came = "kvstore_fetched_blocks{prefill}"
                eventually(lambda: right.numbers().get(came, 0) >= 64)
                (left if whole or push else right).freeze(store=whole)
                stalled_s.append(time.monotonic())

            staller = threading.Thread(target=stall)
            staller.start()
            loaded = decode.run({"d": text}, 3, {"d": params})  # the same tokens
            took_s = time.monotonic() - stalled_s[0]
            staller.join()
            (left if whole or push else right).freeze(store=whole, go_on=True)
        # On a busy machine the last block may have come some time before the count of it.
        assert 0.5 < took_s < 3.3, "the prefill goes on for longer"
        assert loaded["d"] < MANY // 8 * 8
        [(came, blocks, quiet_s, whole_s)] = given_up(caplog)
        assert 64 <= came < blocks == MANY // 8
        assert 1 <= quiet_s < 3
        assert whole_s > quiet_s
        assert right.given_up == 1
        assert decode.worker.take_stats()["given_up_loads"] <= 1
        eventually(lambda: right.let_go() and left.let_go())


def test_B15_an_engine_that_hangs_behind_a_store_that_lives_is_given_up_at_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store says for ever that the request runs."""
    text, waits = prompt("hangs", TOKENS), 'promote = "500ms"\npromote_limit = "2s"\n'
    with pair(tmp_path, waits) as (left, right, prefill, decode):
        with Computing(prefill, left, text) as params:
            decode.run({"d": text}, 3, {"d": params})
        [(came, blocks, quiet_s, whole_s)] = given_up(caplog)
        assert (came, blocks) == (0, WHOLE // 8)
        assert quiet_s < whole_s
        assert 2 <= whole_s < MUCH_S
        assert right.given_up == 1
        eventually(lambda: right.let_go() and left.let_go())


def test_B11_B15_a_request_that_is_aborted_waits_no_longer_for_what_a_peer_computes(
    tmp_path: Path,
) -> None:
    text, waits = prompt("aborted", TOKENS), 'promote = "500ms"\n'
    with pair(tmp_path, waits) as (left, right, prefill, decode):
        with Computing(prefill, left, text) as params:
            started = time.monotonic()
            step, aborted = decode.engine.step, list[str]()

            def abort_later() -> None:
                step()
                if time.monotonic() - started > 1 and not aborted:
                    aborted.append("d")
                    decode.engine.abort("d")

            decode.engine.step = abort_later  # type: ignore[method-assign,assignment]
            with pytest.raises(AssertionError, match=r"^d"):  # it has not all of its tokens
                decode.run({"d": text}, 3, {"d": params})
        eventually(lambda: right.let_go() and left.let_go())


# A disk


@pytest.fixture
def faults(fault_library: Path, tmp_path: Path) -> Faults:
    (tmp_path / "kv").mkdir()
    return Faults(fault_library, tmp_path / "control", tmp_path / "kv")


ON_DISK = 8 * 500 + 3
BLOCKS = ON_DISK // 8


@contextmanager
def on_disk(folder: Path, faults: Faults, waits: str) -> Iterator[tuple[Store, Node, list[int]]]:
    """An engine on a store that has a prompt on its disk, and nothing of it in memory."""
    disk = f'[nvme]\npath = "{faults.folder}"\ncapacity = "256MiB"\nextent = "4MiB"\nthreads = 1\n'
    text = prompt(folder, ON_DISK)
    store = Store(folder / "s", waits, disk, environment=faults.environment)
    shape = msgspec.structs.replace(SHAPE, budget=512, blocks=4 * BLOCKS)
    with store, engine_on(store, "e", shape=shape) as first:
        first.run({"first": text}, 1, {})
        eventually(lambda: store.numbers().get("kvstore_tier_blocks{nvme,stored}", 0) >= BLOCKS)
    with store, engine_on(store, "e", shape=shape) as second:
        yield store, second, text


@pytest.mark.slow
def test_B15_O8_a_disk_that_is_slow_and_goes_on_is_waited_for(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes longer than `promote` in all, and than a lease."""
    with on_disk(tmp_path, faults, 'promote = "1s"\nlease = "1s"\n') as (store, engine, text):
        with faults.of(Call.READ, Kind.EXTENTS, delay_ms=400) as fault:
            started = time.monotonic()
            loaded = engine.run({"slow": text}, 3, {})
            took_s = time.monotonic() - started
            assert fault.hurt
        assert took_s > 2, "a test of nothing"
        assert loaded == {"slow": ON_DISK // 8 * 8}
        assert not store.numbers().get("kvstore_lookups{expired}")
        assert given_up(caplog) == []
        assert store.given_up == 0
        eventually(store.let_go)


@pytest.mark.slow
def test_B15_a_disk_that_stalls_is_given_up_after_a_time_without_an_arrival(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    with on_disk(tmp_path, faults, 'promote = "1s"\n') as (store, engine, text):
        with faults.of(Call.READ, Kind.EXTENTS, delay_ms=400) as slow:
            hung = faults.of(Call.READ, Kind.EXTENTS, hang=True)

            def stall() -> None:
                eventually(lambda: over.is_set() or slow.hurt >= 4)
                hung.__enter__()

            staller, over = threading.Thread(target=stall), threading.Event()
            staller.start()
            loaded = engine.run({"stalls": text}, 3, {})
            over.set()
            staller.join()
            hung.__exit__(None, None, None)
        assert loaded["stalls"] < ON_DISK // 8 * 8
        [(came, blocks, quiet_s, whole_s)] = given_up(caplog)
        assert 0 < came < blocks == BLOCKS
        assert 1 <= quiet_s < MUCH_S
        assert whole_s > quiet_s + 0.3  # some came, one in 0.4 s
        assert store.given_up == 1
        eventually(store.let_go)


@pytest.mark.slow
def test_B15_what_only_drips_is_given_up_at_the_limit_for_all(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    waits = 'promote = "2s"\npromote_limit = "3s"\n'
    with on_disk(tmp_path, faults, waits) as (store, engine, text):
        with faults.of(Call.READ, Kind.EXTENTS, delay_ms=500):
            engine.run({"drips": text}, 3, {})
        [(came, blocks, quiet_s, whole_s)] = given_up(caplog)
        assert 0 < came < blocks == BLOCKS
        assert quiet_s < 2
        assert 3 <= whole_s < MUCH_S
        assert store.given_up == 1
        eventually(store.let_go)
