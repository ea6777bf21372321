"""The disk benchmark in small: its form, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.core.errors import KVStoreError
from tests.bench import __main__ as bench
from tests.bench import nvme, raw_disk, steal
from tests.bench.raw_disk import filled
from tests.bench.report import Result, as_json
from tests.harness.nvme_blocks import MIB

SMALL = nvme.Sizes(
    block_bytes=(MIB // 2, MIB), data_bytes=8 * MIB, job_bytes=2 * MIB, extent_bytes=4 * MIB
)
FIO = """#!/bin/sh
printf '%s\\n' "$@" >> {log}
echo '{{"jobs": [{{"read": {io}, "write": {io}, "job_runtime": 40, "usr_cpu": 5, "sys_cpu": 20}}]}}'
"""
IO = '{"io_bytes": 8388608, "bw_bytes": 2000000000}'


def of(results: Sequence[Result], **wanted: object) -> list[Result]:
    return [r for r in results if wanted.items() <= {"name": r.name, **r.parameters}.items()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


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
    results = nvme.run(1, SMALL)
    for block_bytes in SMALL.block_bytes:
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
    ours = nvme.Ours(tmp_path, blocks_of(MIB, 8), SMALL, checked=checked)
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


def test_fio_and_the_loop_make_calls_as_long_as_the_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    install_fio(tmp_path, monkeypatch, FIO.format(log=log, io=IO))
    depth = raw_disk.Depth(4, 2, 2 * MIB)
    memory, _ = filled(8 * MIB)
    blocks = [memory[at : at + MIB // 2] for at in range(0, len(memory), MIB // 2)]
    raw_disk.Fio(tmp_path, blocks, depth).read()
    assert {f"--bs={2 * MIB}", f"--size={2 * MIB}"} <= set(log.read_text("ascii").split())
    loop = raw_disk.ThreadLoop(tmp_path, blocks, depth)
    lengths: list[int] = []
    real = os.pwritev

    def counted(fd: int, pieces: Sequence[memoryview], at: int) -> int:
        lengths.append(sum(map(len, pieces)))
        return real(fd, pieces, at)

    monkeypatch.setattr(os, "pwritev", counted)
    loop.write()
    loop.close()
    assert lengths == [2 * MIB] * 4


@pytest.mark.parametrize("script", ["#!/bin/sh\necho {}", "#!/bin/sh\necho no >&2; exit 1"])
def test_fio_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    install_fio(tmp_path, monkeypatch, script)
    system = raw_disk.reference(tmp_path, blocks_of(MIB, 8), raw_disk.Depth(4, 2, MIB))
    with pytest.raises(KVStoreError, match="fio"):
        system.read()


@pytest.mark.usefixtures("here")
def test_too_little_space_is_said_before_anything_is_made() -> None:
    with pytest.raises(KVStoreError, match="free, the benchmark needs"):
        nvme.run(1, nvme.Sizes(data_bytes=1 << 60))


# The index


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["attach", "--blocks", "10"], "expected with index or nvme-index, found attach"),
        (["index", "--path", "."], "expected with nvme-index, found index"),
        (["index", "--pairs", "3"], "expected without index"),
        (["nvme-index", "--pairs", "3"], "expected without nvme-index"),
        (["nvme-index", "--path", "/nowhere/at/all"], "expected a directory"),
    ],
)
def test_wrong_arguments_of_benchmarks_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert bench.main([*arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_round_that_was_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stolen, rounds = iter([0.0, 5.0, 0.0, 0.0]), iter("ab")  # at the start and end of each round
    monkeypatch.setattr(steal, "_stolen_s", lambda: next(stolen))
    assert steal.undisturbed(lambda: next(rounds)) == ("b", 1)
