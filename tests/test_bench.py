"""Benchmarks in small: their form, and that what they say is what happened; and their charts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil
import pytest
import torch

from connectors.copies.gpu.measure import Choice
from kvstore.core.errors import KVStoreError, NotSupported
from kvstore.units import KIB, MIB
from tests.bench import __main__ as bench
from tests.bench import (
    beside,
    charts,
    engine,
    export,
    gpu,
    handover,
    index,
    load,
    nvme,
    raw_disk,
    steal,
)
from tests.bench.clock import Clock
from tests.bench.report import Result, as_json
from tests.bench.ttft import COLD
from tests.harness.fake_cuda import FakeCuda
from tests.harness.live import eventually

ROOT = Path(__file__).parent.parent


def of(results: Sequence[Result], **wanted: object) -> list[Result]:
    return [r for r in results if wanted.items() <= {"name": r.name, **r.parameters}.items()]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder with a short path: sockets in it have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        monkeypatch.chdir(name)
        yield Path(name)
        monkeypatch.undo()


def test_a_round_that_was_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stolen, rounds = iter([0.0, 5.0, 0.0, 0.0]), iter("ab")  # at the start and end of each round
    monkeypatch.setattr(steal, "_stolen_s", lambda: next(stolen))
    assert steal.undisturbed(lambda: next(rounds)) == ("b", 1)


# The index of memory

INDEX_BLOCKS = 4000
NAMES = {
    "lookup_full_hit": "us",
    "lookup_half_hit": "us",
    "lookup_miss": "us",
    "store_evict": "blocks/s",
    "worst_call": "ms",
    "bytes_per_entry": "B",
}
CASES = {"next turn", "shared head, new tail", "shared head, next turn", "edited"}
CALLS = {"lookup", "begin_store", "complete_store", "pin", "unpin"} | {
    f"{when}_{what}" for when in ("prepare", "complete") for what in ("store", "load")
}


@pytest.fixture
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have the collector that Python has."""
    monkeypatch.setattr(index, "collect_young_only", lambda: None)
    monkeypatch.setattr(index, "LOOKUPS", 5)
    monkeypatch.setattr(index, "ROUNDS", 6)
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.mark.usefixtures("small_index")
def test_every_row_is_there_for_every_count() -> None:
    results = index.run([INDEX_BLOCKS, INDEX_BLOCKS + 2500])
    for count in (INDEX_BLOCKS, INDEX_BLOCKS + 2000):
        mine = [r for r in results if r.parameters["blocks"] == count]
        assert {r.name: r.unit for r in mine} == NAMES
        (maximum,) = of(mine, name="worst_call", statistic="maximum")
        slow = {r.parameters.get("statistic"): r.value for r in mine if r.name == "worst_call"}
        assert 0 < slow["p99.99"] <= slow["maximum"]
        assert maximum.parameters["pinned"] == count // 2
        for asked in ("first", "again"):
            half = of(mine, name="lookup_half_hit", asked=asked)
            times = {str(r.parameters["case"]): r.value for r in half}
            mix = times.pop("mix")
            assert set(times) == CASES
            assert min(times.values()) <= mix <= max(times.values())
        longest = maximum.parameters
        assert longest["call"] in CALLS
        assert 0 < longest["cpu_ms"] <= longest["most_cpu_ms"]
        (size,) = of(mine, name="bytes_per_entry")
        assert 100 < size.value <= size.parameters["peak"]
    assert all(row["value"] > 0 for row in json.loads(as_json("index", results))["results"])


# The disk

SMALL_DISK = nvme.Sizes(
    block_bytes=(MIB // 2, MIB), data_bytes=8 * MIB, job_bytes=2 * MIB, extent_bytes=4 * MIB
)
FIO = """#!/bin/sh
printf '%s\\n' "$@" >> {log}
echo '{{"jobs": [{{"read": {io}, "write": {io}, "job_runtime": 40, "usr_cpu": 5, "sys_cpu": 20}}]}}'
"""
IO = '{"io_bytes": 8388608, "bw_bytes": 2000000000}'


def install_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "fio").write_text(script, encoding="ascii")
    (folder / "fio").chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def blocks_of(size: int, count: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def test_every_result_has_a_reference_from_the_same_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    results = nvme.run(1, SMALL_DISK)
    for block_bytes in SMALL_DISK.block_bytes:
        for name in ("read", "write"):
            for checksum in (True, False):
                (one,) = of(results, name=name, block_bytes=block_bytes, checksum=checksum)
                assert one.unit == "GB/s"
                assert one.parameters["against"] == "O_DIRECT loop"
                assert one.parameters["cpu_us_per_block"] > 0
                assert one.parameters["reference_cpu_us_per_block"] > 0
                assert one.parameters["value_low"] <= one.value <= one.parameters["value_high"]
    assert len(results) == 2 * 2 * 2
    for row in json.loads(as_json("nvme", results))["results"]:
        assert row["value"] > 0
        assert row["reference"] > 0
        assert row["ratio"] > 0
    assert not list(here.iterdir())


@pytest.mark.parametrize("checked", [True, False])
def test_only_the_variant_goes_without_checksums(tmp_path: Path, checked: bool) -> None:
    ours = nvme.Ours(tmp_path, blocks_of(MIB, 8), SMALL_DISK, checked=checked)
    ours.write()
    sums = [record.checksum for record in ours._tier.space.index]
    ours.read()
    ours.close()
    assert len(sums) == 8
    assert all(sums) if checked else not any(sums)


def test_fio_is_the_reference_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    install_fio(tmp_path, monkeypatch, FIO.format(log=log, io=IO))
    system = raw_disk.reference(tmp_path, blocks_of(MIB, 8), raw_disk.Depth(4, 2, MIB))
    assert system.name == "fio"
    assert system.read() == raw_disk.Moved(2e9, 1250.0)  # a quarter of 40 ms for 8 blocks
    assert system.write().bytes_per_s == 2e9
    system.close()
    options = log.read_text(encoding="ascii").split()
    assert [o for o in options if "numjobs" in o] == ["--numjobs=4", "--numjobs=2"]
    assert {"--direct=1", f"--bs={MIB}", "--rw=read", "--rw=write", "--thread"} <= set(options)


def test_the_index_benchmark_measures_each_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["nvme-index", "--blocks", "300,5000", "--path", str(tmp_path), "--json"]
    assert bench.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [row["blocks"] for row in found] == [300] * 6 + [5000] * 6
    values = {row["name"]: row["value"] for row in found[6:]}
    assert set(values) == {
        *("index_first_hit", "index_all_known", "index_longest_poll"),
        *("index_cpu", "index_memory", "index_file"),
    }
    assert 0 < values["index_first_hit"] <= values["index_all_known"] < 60
    assert 0 < values["index_file"] < 1024
    assert not list(tmp_path.iterdir())


# Hand-over

SMALL_EXPORT = export.Sizes(
    block_bytes=(256 * KIB,), data_bytes=16 * MIB, transports=("shared memory", "tcp")
)
# Who moves the bytes of each system.
BYTES_MOVED_BY = {
    **{f"pull_{tier}": "decode_exporter" for tier in ("cpu", "nvme")},
    **{f"push_{tier}": "prefill_exporter" for tier in ("cpu", "nvme")},
    **{f"direct_{tier}": "engine" for tier in ("cpu", "nvme")},
    **{f"direct_push_{tier}": "prefill_exporter" for tier in ("cpu", "nvme")},
}
BUSY = "x = sum(i for i in range({count})); print(x, flush=True); input()"


@pytest.mark.slow
def test_a_benchmark_that_is_terminated_leaves_nothing_running(here: Path) -> None:
    command = [sys.executable, "-m", "tests.bench", "attach"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(here)}
    with subprocess.Popen(command, cwd=here, env=environment) as bench:
        try:
            eventually(lambda: [*here.glob("*/kvstore.sock")])
            started = psutil.Process(bench.pid).children(recursive=True)
            bench.terminate()
            assert bench.wait(60) == 130
        finally:
            bench.kill()
    assert started
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_every_hand_over_has_its_limit_from_the_same_run(here: Path) -> None:
    results = export.run(1, SMALL_EXPORT)
    processes = {"prefill_store", "prefill_exporter", "decode_store", "decode_exporter", "engine"}
    for transport in SMALL_EXPORT.transports:
        for name in export.SYSTEMS[transport]:
            (one,) = of(results, name=name, transport=transport, block_bytes=256 * KIB)
            assert one.unit == "GB/s"
            limit = "NIXL WRITE" if "push" in name else "NIXL READ"
            assert one.parameters["against"] in {limit, *(["disk"] if "nvme" in name else [])}
            assert one.ratio is not None
            assert one.reference is not None
            assert one.ratio == pytest.approx(one.value / one.reference)
            whole_ms = SMALL_EXPORT.data_bytes / one.value / 1e6
            assert 0 < one.parameters["first_block_ms"] <= whole_ms + 0.001  # rounded
            assert one.parameters["summed_ratio"] > 0
            by_process = one.parameters["cpu_us_by_process"]
            assert by_process.keys() == processes
            assert min(by_process.values()) >= 0  # a process with no part in it may rest
            assert all(by_process[each] > 0 for each in ("prefill_store", BYTES_MOVED_BY[name]))
            assert one.parameters["cpu_us"] == pytest.approx(sum(by_process.values()), abs=1)
        for name in ("pull_summed", "push_summed"):
            (one,) = of(results, name=name, transport=transport)
            assert one.reference is not None
            assert one.value > 0
    assert len(results) == sum(len(export.SYSTEMS[each]) + 2 for each in SMALL_EXPORT.transports)
    for name in export.INTO_ENGINE:
        assert [one.parameters["transport"] for one in of(results, name=name)] == ["tcp"]
    assert all(row["ratio"] > 0 for row in json.loads(as_json("export", results))["results"])
    assert not list(here.iterdir())


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


def answers(*turns: tuple[list[int], list[float], float]) -> list[engine.Result]:
    return [
        engine.Result("", tokens=tokens, margins=margins, ttft_s=ttft_s)
        for tokens, margins, ttft_s in turns
    ]


def test_waits_of_sessions_are_compared_within_rounds() -> None:
    clear = [1.0, 1.0]
    found: load.Numbers = defaultdict(list)
    for ttft_s in (1.0, 2.0, 4.0):
        plain = [answers(([1, 2], clear, ttft_s), ([3, 4], clear, 3 * ttft_s))]
        load._note(found, load.NONE, 10 * ttft_s, plain)
        load._note(found, load.NATIVE, 5 * ttft_s, plain)
        quick = [answers(([1, 2], clear, ttft_s / 2), ([3, 4], clear, ttft_s / 2))]
        load._note(found, load.OURS, 4 * ttft_s, quick)
    results = load.results(found, {load.OURS: 1})
    (mean,) = of(results, name="ttft_mean", system=load.OURS)
    assert (mean.value, mean.reference, mean.parameters["against"]) == (1000, 4000, load.NATIVE)
    assert mean.ratio == pytest.approx(0.25)
    assert mean.parameters["unlike"] == 1
    (slowest,) = of(results, name="ttft_p99", system=load.NONE)
    assert slowest.value == 6000
    (rate,) = of(results, name="output_tokens_per_s", system=load.OURS)
    assert rate.value == pytest.approx(0.5)
    assert rate.ratio == pytest.approx(1.25)
    assert rate.better == "higher"
    (wall,) = of(results, name="wall", system=load.NATIVE)
    assert wall.ratio == pytest.approx(0.5)
    assert wall.parameters["against"] == load.NONE


def test_an_answer_is_unlike_where_the_tokens_were_no_near_tie() -> None:
    plain = [answers(([1, 2, 3], [1.0, 0.01, 1.0], 1.0), ([4, 5, 6], [1.0] * 3, 1.0))]
    for tokens, later, unlike in (
        ([1, 2, 3], [4, 5, 6], 0),
        ([1, 2, 3], [4, 7, 6], 1),
        ([1, 9, 3], [4, 7, 6], 0),  # what follows a near tie has another prompt
        ([9, 2, 3], [4, 5, 6], 1),
    ):
        other = [answers((tokens, [1.0] * 3, 1.0), (later, [1.0] * 3, 1.0))]
        assert load._unlike(plain, other) == unlike


# A GPU that is not there

FOUR = Choice(((1, 4),), ((1, 4),))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> gpu.Memory:
    made: list[FakeCuda] = []
    empty = torch.empty

    def storage(*args: object, **options: object) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, **options)  # type: ignore[call-overload]
        if not made[0]._device:
            made[0]._device.append((tensor.data_ptr(), tensor.numel()))
        return tensor

    made.append(FakeCuda([]))
    monkeypatch.setattr(torch, "empty", storage)
    return gpu.Memory(1 << 20, "cpu", made[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(NotSupported, match="needs a GPU that torch can use, torch is 2"):
        gpu.run(1)


def test_every_size_length_direction_and_engine_is_measured(
    memory: gpu.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "BLOCKS", (1, 4))
    results = list(gpu.sizes(memory, FOUR, 1, (4096, 65536)))
    names = [(r.name, r.parameters["run_kib"], r.parameters["blocks"], r.parameters["engine"])
             for r in results]  # fmt: skip
    assert len(set(names)) == len(names) == 2 * 2 * 2 * 3
    assert all(r.ratio and r.ratio > 0 for r in results)
    by = {r.parameters["engine"]: r.parameters["thread_blocks"] for r in results}
    assert by == {"chosen": 4, "kernel": 8, "engines": 0}
    assert isinstance(memory.cuda, FakeCuda)
    assert memory.cuda.faults == []
    assert memory.cuda.calls["copy"] > 0 < memory.cuda.calls["launch"]


def test_a_prompt_goes_both_ways(memory: gpu.Memory) -> None:
    results = {r.name: r for r in gpu.model(memory, FOUR, 1, (4, 4096, 16))}
    assert set(results) == {
        "prompt_load", "prompt_store", "job_cpu_load", "job_cpu_store", "both_directions",
    }  # fmt: skip
    assert results["prompt_load"].parameters["blocks"] == 16
    assert isinstance(memory.cuda, FakeCuda)
    assert memory.cuda.faults == []
    memory.cuda.run()
    memory.close()
    assert memory.cuda.pinned_ranges == {}


# Charts

PAGE = (charts.FOLDER.parent / "benchmarks.md").read_text(encoding="utf-8")
CHART_NAMES = [chart.name for chart in charts.CHARTS]


def section(chart: charts.Chart) -> str:
    (found,) = [part for part in PAGE.split("\n## ") if f"(benchmarks/{chart.name}.svg)" in part]
    return found


@pytest.mark.parametrize("chart", charts.CHARTS, ids=CHART_NAMES)
def test_charts_are_drawn_from_the_data_that_is_there(chart: charts.Chart) -> None:
    drawn = charts.draw(chart)
    assert (charts.FOLDER / f"{chart.name}.svg").read_text(encoding="utf-8") == drawn
    root = ET.fromstring(drawn)  # noqa: S314 - our own
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {chart.title, chart.axis} <= set(texts)
    for row, _, value in charts.figures(chart):
        assert row.label in texts
        assert charts.shown(value) in texts


@pytest.mark.parametrize("chart", charts.CHARTS, ids=CHART_NAMES)
def test_tables_have_the_figures_of_their_chart(chart: charts.Chart) -> None:
    """And the section names the command, machine and date of the data."""
    cells = re.findall(r"[\d,.]*\d", section(chart))
    numbers = {float(cell.replace(",", "")) for cell in cells}
    missing = [row.label for row, _, value in charts.figures(chart) if value not in numbers]
    assert not missing
    found = json.loads((charts.FOLDER / f"{chart.name}.json").read_text(encoding="utf-8"))
    assert f"`{found['command']}`" in section(chart)
    assert found["date"] in section(chart)


def test_every_figure_that_is_kept_has_a_chart() -> None:
    kept = {path.stem for path in charts.FOLDER.iterdir()}
    assert kept == set(CHART_NAMES)


# Two trees


def test_two_trees_are_compared_round_by_round_and_an_interrupted_comparison_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(folder: Path, _command: str, _arguments: list[str]) -> beside.Rows:
        ran.append("this" if folder == beside.HERE else "other")
        if len(ran) == 4:
            raise KVStoreError("it ended with 1")
        slow = 2.0 if ran[-1] == "this" else 1.0
        return {"time": ([slow, 2 * slow], False), "rate": ([slow, 2 * slow], True)}

    monkeypatch.setattr(beside, "run", run)
    command = ["index", str(tmp_path), "--runs", "2", "--keep", str(tmp_path / "kept"), "--json"]
    assert beside.main(command) == 2
    assert "it ended with 1" in capsys.readouterr().err
    assert beside.main(command) == 1, "this tree takes twice as long"
    assert ran == ["other", "this", "this", "other", "other"]
    rows = json.loads(capsys.readouterr().out)["results"]
    assert beside.main(["nvme", *command[1:]]) == 2
    assert "found 'other tree: index', expected 'other tree: nvme'" in capsys.readouterr().err
    assert [(row["what"], row["slower"]) for row in rows] == [("time", 2.0), ("rate", 0.5)]
