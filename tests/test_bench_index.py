"""The index benchmark in small: its rows, what it compares with, and that it checks the order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from kvstore.core.errors import InvariantBroken
from kvstore.core.eviction import LeafLRU
from kvstore.core.index import Node
from tests.bench import __main__ as bench
from tests.bench import index
from tests.bench.report import Result, as_json

BLOCKS = 4000
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


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have the collector that Python has."""
    monkeypatch.setattr(index, "collect_young_only", lambda: None)
    monkeypatch.setattr(index, "LOOKUPS", 5)
    monkeypatch.setattr(index, "ROUNDS", 6)


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)


def of(results: Sequence[Result], name: str, **wanted: object) -> Result:
    (one,) = (r for r in results if r.name == name and wanted.items() <= r.parameters.items())
    return one


def test_every_row_is_there_for_every_count(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    results = index.run([BLOCKS, BLOCKS + 2500])
    for count in (BLOCKS, BLOCKS + 2000):
        mine = [r for r in results if r.parameters["blocks"] == count]
        assert {r.name: r.unit for r in mine} == NAMES
        slow = {r.parameters.get("statistic"): r.value for r in mine if r.name == "worst_call"}
        assert 0 < slow["p99.99"] <= slow["maximum"]
        assert of(mine, "worst_call", statistic="maximum").parameters["pinned"] == count // 2
        for asked in ("first", "again"):
            half = [
                r for r in mine if r.name == "lookup_half_hit" and r.parameters["asked"] == asked
            ]
            times = {str(r.parameters["case"]): r.value for r in half}
            mix = times.pop("mix")
            assert set(times) == CASES
            assert min(times.values()) <= mix <= max(times.values())
        longest = of(mine, "worst_call", statistic="maximum").parameters
        assert longest["call"] in CALLS
        assert 0 < longest["cpu_ms"] <= longest["most_cpu_ms"]
        size = of(mine, "bytes_per_entry")
        assert 100 < size.value <= size.parameters["peak"]
    assert all(row["value"] > 0 for row in json.loads(as_json("index", results))["results"])


def test_without_vllm_the_table_and_the_rows_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_vllm(monkeypatch)
    assert bench.main(["index", "--blocks", str(BLOCKS)]) == 0
    shown = capsys.readouterr()
    assert "vllm=not installed" in shown.out.replace("\n", " ")
    assert "not installed" in shown.err
    assert bench.main(["index", "--blocks", str(BLOCKS), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert all(row["vllm"].startswith("not installed") for row in rows)
    assert {row["reference"] for row in rows} == {row["ratio"] for row in rows} == {None}


@pytest.mark.vllm
def test_vllms_managers_run_beside_ours_in_the_same_run() -> None:
    command = ["index", "--blocks", str(BLOCKS), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *command], capture_output=True, check=True
    )
    rows = json.loads(done.stdout)["results"]
    assert {row["against"] for row in rows} == {"LRU", "ARC"}
    for row in rows:
        if row["name"] != "store_evict":  # that is a median of pairs
            assert row["ratio"] == pytest.approx(row["value"] / row["reference"])
        if row["name"] == "lookup_full_hit":
            assert row["ratio"] < 0.5, "one search against a thousand calls"


def test_evictions_in_another_order_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)

    def first_come(self: LeafLRU, entry: Node) -> None:
        if entry.next is None:
            self._link_after(entry, self._root)

    monkeypatch.setattr(LeafLRU, "touch", first_come)
    with pytest.raises(InvariantBroken, match="leaf-first"):
        index.run([BLOCKS])


def test_too_few_blocks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["index", "--blocks", "10000,300"]) == 2
    assert "--blocks: expected at least 4000, found 300" in capsys.readouterr().err
