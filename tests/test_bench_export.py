"""The hand-over benchmarks in small: their form, and that what they say is what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from connectors.config import parse_extra
from kvstore.core.errors import KVStoreError
from kvstore.units import KIB, MIB
from tests.bench import export, handover
from tests.bench.clock import Clock
from tests.bench.report import Result, as_json
from tests.bench.store import StoreProcess
from tests.bench.ttft import COLD
from tests.harness.live import eventually

ROOT = Path(__file__).parent.parent
SMALL = export.Sizes(
    block_bytes=(256 * KIB,), data_bytes=16 * MIB, transports=("shared memory", "tcp")
)
BUSY = "x = sum(i for i in range({count})); print(x, flush=True); input()"


def of(results: Sequence[Result], **wanted: object) -> list[Result]:
    return [r for r in results if wanted.items() <= {"name": r.name, **r.parameters}.items()]


@pytest.fixture
def here() -> Iterator[Path]:
    """An empty folder with a short path: sockets in it have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        yield Path(name)


@pytest.mark.slow
def test_a_benchmark_that_is_terminated_leaves_nothing_running(here: Path) -> None:
    command = [sys.executable, "-m", "tests.bench", "export", "--pairs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=here, env=environment) as bench:
        try:
            eventually(lambda: len([*here.glob("*/*/kvstore.sock")]) == 2)
            started = psutil.Process(bench.pid).children(recursive=True)
            bench.terminate()
            assert bench.wait(60) == 130
        finally:
            bench.kill()
    assert len(started) >= 2
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_every_hand_over_has_its_limit_from_the_same_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    results = export.run(1, SMALL)
    processes = {"prefill_store", "prefill_exporter", "decode_store", "decode_exporter", "engine"}
    for transport in SMALL.transports:
        for name in export.SYSTEMS[transport]:
            (one,) = of(results, name=name, transport=transport, block_bytes=256 * KIB)
            assert one.unit == "GB/s"
            limit = "NIXL WRITE" if "push" in name else "NIXL READ"
            assert one.parameters["against"] in {limit, *(["disk"] if "nvme" in name else [])}
            assert one.ratio is not None
            assert one.reference is not None
            assert one.ratio == pytest.approx(one.value / one.reference)
            whole_ms = SMALL.data_bytes / one.value / 1e6
            assert 0 < one.parameters["first_block_ms"] <= whole_ms + 0.001  # rounded
            assert one.parameters["summed_ratio"] > 0
            by_process = one.parameters["cpu_us_by_process"]
            assert by_process.keys() == processes
            assert all(cpu_us > 0 for cpu_us in by_process.values())
            assert one.parameters["cpu_us"] == pytest.approx(sum(by_process.values()), abs=1)
        for name in ("pull_summed", "push_summed"):
            (one,) = of(results, name=name, transport=transport)
            assert one.reference is not None
            assert one.value > 0
    assert len(results) == sum(len(export.SYSTEMS[each]) + 2 for each in SMALL.transports)
    for name in export.INTO_ENGINE:
        assert [one.parameters["transport"] for one in of(results, name=name)] == ["tcp"]
    assert all(row["ratio"] > 0 for row in json.loads(as_json("export", results))["results"])
    assert not list(here.iterdir())


def test_too_little_space_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KVStoreError, match="free, the benchmark needs"):
        export.run(1, export.Sizes(data_bytes=1 << 60))


def test_the_clock_of_another_process_counts_what_it_runs() -> None:
    command = [sys.executable, "-c", BUSY.format(count=3_000_000)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        clock = Clock(child.pid)
        assert child.stdout is not None
        child.stdout.readline()
        used_us = clock.now_us()
        time.sleep(0.05)
        assert 10_000 < used_us <= clock.now_us() < used_us + 20_000, "waiting costs nothing"
        child.communicate(b"\n")
    with pytest.raises(KVStoreError, match="has ended"):
        clock.now_us()


def test_times_of_a_hand_over_are_compared_within_rounds() -> None:
    rounds = {  # seconds that computing took, and going on
        "pull": ([1.0, 2.0, 4.0], [0.01, 0.04, 0.12]),
        "push": ([1.0, 1.0, 1.0], [0.01, 0.02, 0.03]),
        "direct": ([1.0, 1.0, 1.0], [0.01, 0.01, 0.01]),
        "direct_push": ([1.0, 1.0, 1.0], [0.03, 0.02, 0.03]),
        handover.NATIVE: ([1.0, 1.0, 1.0], [0.02, 0.02, 0.03]),
    }
    times = {(COLD, system): cold for system, (cold, _) in rounds.items()}
    times |= {(handover.HANDED_OVER, system): handed for system, (_, handed) in rounds.items()}
    results = handover.results(times)
    (share,) = of(results, name=handover.HANDED_OVER, system="pull")
    assert (share.value, share.reference) == (40.0, 2000.0)
    assert share.ratio == pytest.approx(0.02)
    (native,) = of(results, name=handover.AGAINST_NATIVE, system="push")
    assert native.reference == 20.0
    assert native.ratio == pytest.approx(1.0)
    assert native.parameters["against"] == "NixlConnector"
    assert not of(results, name=handover.AGAINST_NATIVE, system=handover.NATIVE)
    (written,) = of(results, name=handover.AGAINST_NATIVE, system="direct_push")
    assert written.ratio == pytest.approx(1.0)
    for one in results:
        expected = "tcp" if one.parameters["system"] == "direct_push" else "shared memory"
        assert one.parameters.get("transport") == (None if one.name == COLD else expected)


@pytest.mark.parametrize(
    ("way", "transfer", "into_engine"),
    [
        ("pull", "pull", ""),
        ("push", "push", ""),
        ("direct", "pull", "pull"),
        ("direct_push", "push", "push"),
    ],
)
def test_an_engine_that_a_prompt_goes_to_has_the_settings_of_its_way(
    tmp_path: Path, way: str, transfer: str, into_engine: str
) -> None:
    assert way in handover.OURS
    connector = handover.ours(StoreProcess(tmp_path, "1GiB"), way)
    found = parse_extra(connector["kv_connector_extra_config"])
    assert (found.transfer, found.direct_way) == (transfer, into_engine)
