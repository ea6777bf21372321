"""`kvstore check --disk`: what it measures, suggests and leaves behind, and how it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore import cli
from kvstore.config import parse
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.units import GIB, MIB
from tests.harness.nvme_blocks import settings_for
from tiers.nvme import drive_check
from tiers.nvme.block_io import Move, ThreadMover
from tiers.nvme.drive_check import DriveReport, Sample, suggest

pytestmark = pytest.mark.slow  # measures a drive

DEPTHS = (1, 2, 4, 8, 16)


def samples(reads: dict[int, float], writes: dict[int, float]) -> list[Sample]:
    return [
        Sample(kind, pattern, depth, rate * 1e9, 100.0)
        for kind, rates in (("read", reads), ("write", writes))
        for depth, rate in rates.items()
        for pattern in ("sequential", "random")
    ]


FLAT = dict.fromkeys(DEPTHS, 1.0)


def test_threads_are_the_fewest_that_nearly_fill_the_drive() -> None:
    for reads, writes, threads in (
        (FLAT, FLAT, 2),  # one slow read holds no other
        ({1: 1.0, 2: 1.9, 4: 3.4, 8: 3.5, 16: 3.4}, FLAT, 4),
        (FLAT, {1: 1.0, 2: 2.0, 4: 4.0, 8: 4.1, 16: 4.0}, 8),  # half as many writes
        ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0}, 2),  # too slow to go on
        ({1: 1.0, 2: 2.0, 4: 3.0}, {1: 1.0, 2: 1.0, 4: 9.0}, 4),  # never enough writes
    ):
        assert suggest(samples(reads, writes), GIB).threads == threads


def test_the_budget_is_a_drive_write_per_day_and_says_so() -> None:
    for drive_bytes, rate, budget in (
        (252 * GIB, 2.0, "252GiB"),  # one drive write per day
        (10**18, 0.001, "80GiB"),  # more cannot be written in a day
        (600 * MIB, 1.0, "600MiB"),
    ):
        found = suggest(samples(FLAT, dict.fromkeys(DEPTHS, rate)), drive_bytes)
        assert f'write_budget = "{budget}"' in found.toml
        assert "1 write of its capacity per day" in found.assumption
        assert f"{drive_bytes / GIB:.0f} GiB" in found.assumption
        given = tomllib.loads(found.toml)["nvme"]
        parsed = parse(
            {"cpu": {"capacity": "8GiB"}, "nvme": {"path": "/k", "capacity": "1GiB", **given}}
        )
        assert parsed.nvme is not None
        assert parsed.nvme.threads == found.threads


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_check, "FILE_BYTES", 256 * MIB)
    monkeypatch.setattr(drive_check, "DEPTHS", (1, 4))
    monkeypatch.setattr(cli, "SECONDS", 0.5)


@pytest.mark.usefixtures("quick")
def test_reads_and_writes_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    heard: list[tuple[float, str]] = []
    report = drive_check.measure(tmp_path, 1.5, lambda share, what: heard.append((share, what)))
    assert len({(s.kind, s.pattern) for s in report.samples}) == 4
    assert all(s.bytes_per_s > 0 and s.cpu_us_per_block > 0 for s in report.samples)
    assert report.seconds < 10
    assert report.drive_bytes == shutil.disk_usage(tmp_path).total
    shares = [share for share, _ in heard]
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_only_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading space that was never written is no I/O, and no rate of the drive."""
    monkeypatch.setattr(drive_check, "AREA_BLOCKS_MIN", 8)
    written: set[int] = set()
    stray: list[int] = []
    start = ThreadMover.start

    def watched(mover: ThreadMover[Move], run: Move) -> None:
        if run.store:
            written.add(run.position)
        elif run.position not in written:
            stray.append(run.position)
        start(mover, run)

    monkeypatch.setattr(ThreadMover, "start", watched)
    drive_check.measure(tmp_path, 0.02, lambda _share, _what: None)
    assert 8 <= len(written) < 128, "the time was over before the file was full"
    assert not stray


@pytest.mark.usefixtures("quick")
def test_a_case_whose_time_passes_before_it_begins_moves_blocks_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z and fg: it has a rate."""
    monkeypatch.setattr(drive_check, "AREA_BLOCKS_MIN", 8)

    def pause(_share: float, what: str) -> None:
        time.sleep(0.02 * (what != "preparing"))

    report = drive_check.measure(tmp_path, 0.02, pause)
    assert all(sample.bytes_per_s > 0 for sample in report.samples)


# Refusals


def test_no_space_is_refused_with_what_is_needed_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=10 * GIB, used=0, free=123456)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    needed = drive_check.FILE_BYTES + drive_check.SPARE_BYTES
    with pytest.raises(ConfigError, match=f"needed are {needed} bytes .* found 123456 free"):
        drive_check.measure(tmp_path, 5, lambda _share, _what: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_an_error_of_the_drive_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", refuse)
    assert cli.main(["check", "--disk", "--path", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "Input/output error" in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_a_drive_that_does_not_answer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_check, "SILENCE_S", 0.2)
    monkeypatch.setattr(ThreadMover, "poll", lambda _mover: [])
    with pytest.raises(KVStoreError, match="no answer from the disk"):
        drive_check.measure(tmp_path, 1, lambda _share, _what: None)
    assert not list(tmp_path.iterdir())


# The command


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("by", ["path", "config", "here"])
def test_the_command_prints_an_object_or_a_table(
    tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["check", "--disk"]
    if by == "path":
        arguments += ["--path", str(tmp_path)]
    elif by == "config":  # a directory that the store will make
        path = settings_for(tmp_path / "kv").path
        text = f'[cpu]\ncapacity = "1GiB"\n[nvme]\npath = "{path}"\ncapacity = "1GiB"\n'
        (tmp_path / "kv.toml").write_text(text, encoding="ascii")
        arguments += ["--config", str(tmp_path / "kv.toml")]
    else:
        monkeypatch.chdir(tmp_path)
    assert cli.main([*arguments, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["path"] == str(tmp_path)
    assert set(table) == set(DriveReport.__struct_fields__)
    assert "nvme" in tomllib.loads(table["toml"])
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "[nvme]\nthreads = " in printed
    assert "1 write of its capacity per day" in printed
    assert not list(tmp_path.glob(".*"))


COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests
from kvstore import cli
sys.exit(cli.main(["check", "--disk", "--path", sys.argv[1]]))
"""


def test_ctrl_c_and_kill_leave_nothing_behind(tmp_path: Path) -> None:
    """The space is given back, too: the file has no name while it is measured."""
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [sys.executable, "-c", COMMAND, str(tmp_path)]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        held = Path(f"/proc/{child.pid}/fd")
        end = time.monotonic() + 600
        while time.monotonic() < end and not _deleted(held):
            time.sleep(0.01)
        assert _deleted(held), "it measures now"
        child.send_signal(number)
        _, error = child.communicate(timeout=600)
        assert child.returncode == (130 if number is signal.SIGINT else -number)
        assert "Traceback" not in error
        assert not list(tmp_path.iterdir())


def _deleted(folder: Path) -> bool:
    for link in list(folder.glob("*")):
        try:
            if ".kvstore-check-" in str(link.readlink()) and "deleted" in str(link.readlink()):
                return True
        except OSError:
            continue
    return False
