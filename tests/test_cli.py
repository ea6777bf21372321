"""The command line: what it prints, its exit status, and a real store behind it."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import cli
from kvstore.metrics import TABLE
from tests.bench import __main__ as bench
from tests.bench.engine import Result as Answer
from tests.bench.report import Result, as_json, paired_ratio, percentile, show
from tests.bench.store import StoreFailed, StoreProcess
from tests.demo import offload


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("store"), "64MiB") as process:
        yield process


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    def write(more: str = "", capacity: str = "64MiB") -> Path:
        path = tmp_path / "kvstore.toml"
        socket_path = tmp_path / "kv.sock"
        path.write_text(
            f'[server]\nsocket = "{socket_path}"\nmetrics = ""\n'
            f'[cpu]\ncapacity = "{capacity}"\n{more}'
        )
        return path

    return write


COMMANDS = ("serve", "check", "stats", "clear", "resize", "keygen", "fsck")


def ended(run: Callable[[list[str]], int], arguments: list[str]) -> object:
    """The status that argparse ends a command with."""
    with pytest.raises(SystemExit) as exit_info:
        run(arguments)
    return exit_info.value.code


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert ended(cli.main, [command, "--help"]) == 0
        assert re.search(rf"examples?:\n  kvstore {command}", capsys.readouterr().out)
    assert ended(cli.main, ["--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:\n  kvstore " in out
    assert not [command for command in COMMANDS if f"\n    {command} " not in out]


def test_wrong_arguments_end_with_status_2() -> None:
    plain_check = ["check", "--config", "x", "--seconds", "20"]
    for arguments in ([], ["stats"], ["serve"], ["check"], plain_check):
        assert ended(cli.main, arguments) == 2
    for arguments in ([], ["nothing"], ["attach", "--pairs", "0"]):
        assert ended(bench.main, arguments) == 2


def test_a_wrong_setting_is_one_line_and_status_2(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(more="extend = 1")
    for command in ("serve", "check"):
        assert cli.main([command, "--config", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kvstore: error: {path}: [cpu]")
        assert "extend" in line
        assert "did you mean extent?" in line


def test_check_says_what_a_store_would_do(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(more='[[tier]]\nclass = "tests.reference.memory_tier:MemoryTier"\nname = "shelf"')
    assert cli.main(["check", "--config", str(path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "capacity 64 MiB",
        "4 extents of 16 MiB",
        "huge pages",
        "locked memory",
        "tests.reference.memory_tier:MemoryTier loads",
    ):
        assert text in out
    assert not (path.parent / "kv.sock").exists()


def test_check_prints_the_same_as_json(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = '[[tier]]\nclass = "no.such:Tier"\nname = "disk"'
    for more, status in (("", 0), (wrong, 2)):
        path = str(config(more=more))
        assert cli.main(["check", "--config", path]) == status
        lines = capsys.readouterr().out.splitlines()
        assert cli.main(["check", "--config", path, "--json"]) == status
        rows = json.loads(capsys.readouterr().out)
        found = [line.split(maxsplit=1)[0] for line in lines]
        assert [row["level"] for row in rows] == found
        assert all(row["what"] in line for row, line in zip(rows, lines, strict=True))
        assert [row["what"] for row in rows if row["level"] == "fail"] == ["tier disk"] * (
            status // 2
        )


def test_S5_check_notes_that_the_capacity_is_not_there(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A store starts all the same, and takes what there is."""
    assert cli.main(["check", "--config", str(config(capacity="1000TiB"))]) == 0
    assert re.search(r"note  cpu .* are available now \(.*\); it stops", capsys.readouterr().out)


def test_check_notes_capacity_that_fills_no_extent(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--config", str(config(capacity="70MiB"))]) == 0
    assert "6 MiB of the capacity fill no extent" in capsys.readouterr().out


def test_check_looks_at_the_disk(
    config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = f'[nvme]\npath = "{tmp_path}/a/kv"\ncapacity = "1GiB"'
    assert cli.main(["check", "--config", str(config(more=disk))]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/a/kv: capacity 1 GiB" in out
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").write_text("a file")
    assert cli.main(["check", "--config", str(config(more=disk))]) == 2
    assert "expected a directory" in capsys.readouterr().out


def test_check_says_when_there_is_no_direct_io(
    config: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    disk = f'[nvme]\npath = "{tmp_path}/kv"\ncapacity = "1GiB"'
    assert cli.main(["check", "--config", str(config(more=disk))]) == 2
    assert "this file system has no direct I/O" in capsys.readouterr().out


def test_check_sees_a_running_store_and_a_taken_port(
    store: StoreProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--config", str(store.config_path)]) == 2
    out = capsys.readouterr().out
    assert "a store is running at" in out
    assert "Address already in use" in out


def test_a_second_store_at_the_same_socket_is_refused(
    store: StoreProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--config", str(store.config_path)]) == 2
    assert "a store is running at" in capsys.readouterr().err


def test_stats_are_a_table_or_json(store: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--store", store.address]) == 0
    out = capsys.readouterr().out
    assert "kvstore_capacity_bytes" in out
    assert "67,108,864" in out
    assert cli.main(["stats", "--store", store.address, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {
        "name": "kvstore_capacity_bytes",
        "labels": {"tier": "cpu"},
        "value": 64 << 20,
    } in rows


def test_the_endpoint_shows_what_stats_show(store: StoreProcess) -> None:
    metrics = store.metrics()
    assert metrics['kvstore_capacity_bytes{tier="cpu"}'] == 64 << 20
    assert {spec.name for spec in TABLE if not spec.labels} <= {
        name.removesuffix("_total") for name in metrics
    }


def test_clear_answers_with_what_stays(
    store: StoreProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["clear", "--store", store.address]) == 0
    assert capsys.readouterr().out.startswith("cleared; 0 blocks are in use")


def test_an_address_without_a_store_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix://{tmp_path}/none.sock"
    for command in ("stats", "clear"):
        assert cli.main([command, "--store", address]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert address in line
        assert "No such file or directory" in line


def test_a_wrong_address_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--store", "localhost:9400"]) == 2
    assert "absolute path" in capsys.readouterr().err


def test_something_else_at_the_address_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen(1)
        code = (
            "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]));"
            "c, _ = s.accept(); c.recv(100); c.sendall(b'HTTP/1.0 400 Bad Request')"
        )
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                str(other.fileno()),
            ],
            pass_fds=[other.fileno()],
        )
        assert cli.main(["stats", "--store", f"unix://{tmp_path}/other.sock"]) == 1
        assert child.wait(600) == 0
    assert "is no kvstore" in capsys.readouterr().err


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_store_in_order(sig: signal.Signals, tmp_path: Path) -> None:
    with StoreProcess(tmp_path, "64MiB") as process:
        os.kill(process.pid, sig)
        process.stop()
    log = process.log_path.read_text()
    assert log.rstrip().endswith("INFO stopped")
    assert "Traceback" not in log
    assert not (tmp_path / "kvstore.sock").exists()


def test_a_store_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreFailed, match="unknown nonsense"),
        StoreProcess(tmp_path, "64MiB", settings="nonsense = 1"),
    ):
        pass


def test_every_bench_is_there() -> None:
    names = ["attach", "export", "gpu", "handover", "index", "nvme", "nvme-index", "vllm"]
    assert sorted(bench.BENCHES) == names
    code = (
        "import importlib; from tests.bench.__main__ import BENCHES\n"
        "for module, _ in BENCHES.values(): print(callable(importlib.import_module(module).run))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.split() == ["True"] * len(bench.BENCHES)


RESULTS = [
    Result(
        name="ttft",
        value=12.3456,
        unit="ms",
        better="lower",
        reference=10.0,
        ratio=1.23,
        parameters={"system": "ours", "against": "native", "ratio_low": 1.1, "ratio_high": 1.3},
    ),
    Result(name="ttft", value=10.0, unit="ms", better="lower", parameters={"system": "native"}),
]


def test_results_as_json_are_one_flat_object() -> None:
    found = json.loads(as_json("vllm", RESULTS))
    assert found["bench"] == "vllm"
    assert found["stolen"] == 0.0
    assert found["results"][1] == {
        "name": "ttft",
        "value": 10.0,
        "unit": "ms",
        "better": "lower",
        "reference": None,
        "ratio": None,
        "system": "native",
    }
    assert found["results"][0]["ratio_high"] == 1.3


def test_results_as_a_table_show_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    show("vllm", RESULTS, json=False)
    out = capsys.readouterr().out
    assert "1.23 (1.1 to 1.3)" in out
    assert "native 10" in out
    assert "hypervisor" not in out


def test_a_measurement_that_was_disturbed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show("vllm", RESULTS, stolen=0.25, json=False)
    assert "a hypervisor gave 25% of the processors' time" in capsys.readouterr().out
    assert json.loads(as_json("vllm", RESULTS, 0.25))["stolen"] == 0.25


def test_a_table_in_a_pipe_is_whole_however_wide(capsys: pytest.CaptureFixture[str]) -> None:
    wide = {f"parameter{number}": f"value{number}" for number in range(20)}
    result = Result(
        name="n" * 60, value=1.5, unit="us", better="lower", reference=2.5, ratio=0.6,
        parameters={**wide, "against": "vLLM"},
    )  # fmt: skip
    show("index", [result], json=False)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "n" * 60 in line]
    of = " ".join(f"{name}={value}" for name, value in wide.items())
    assert row.split() == ["n" * 60, *of.split(), "1.5", "us", "vLLM", "2.5", "0.6"]
    heading = next(line for line in lines if "name" in line)
    assert heading.split() == ["name", "of", "value", "reference", "ratio"]


def test_a_paired_ratio_takes_out_what_both_sides_share() -> None:
    drift = [1.0, 3.0, 10.0, 2.0, 7.0, 5.0]
    pair = paired_ratio([1.1 * value for value in drift], drift)
    assert pair.median == pytest.approx(1.1)
    assert pair.low == pytest.approx(pair.high)


def test_percentiles_are_values_that_occur() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.99) == 99
    assert percentile(values, 0.5) == 50
    assert percentile([7.0], 0.01) == 7


def passes(**changes: object) -> list[offload.Pass]:
    """All five passes of the demo as they should be, the last one changed."""
    answer = Answer(
        id="p", tokens=[1, 2], margins=[1, 1], cached_tokens=0, ttft_s=0.1,
        steps_to_first_token=1, finish_reason="length",
    )  # fmt: skip
    found = [
        offload.Pass("pass", expected, expected, [answer])
        for expected in (
            offload.COLD,
            offload.FROM_GPU,
            offload.FROM_CPU,
            offload.FROM_CPU,
            offload.FROM_NVME,
        )
    ]
    last = {name: getattr(found[-1], name) for name in found[-1].__struct_fields__} | changes
    return [*found[:-1], offload.Pass(**last)]


HITS = {
    'kvstore_hit_tokens_total{tier="cpu"}': 2.0 * offload.REUSABLE,
    'kvstore_hit_tokens_total{tier="nvme"}': 1.0 * offload.REUSABLE,
}


def test_the_demo_is_content_when_all_is_as_promised() -> None:
    assert offload.problems(passes(), HITS) == []


def test_the_demo_fails_for_one_token_from_elsewhere() -> None:
    served = offload.Served(
        nvme=offload.REUSABLE - 32, computed=offload.ALL - offload.REUSABLE + 32
    )
    assert len(offload.problems(passes(served=served), HITS)) == 1


def test_the_demo_fails_for_another_output() -> None:
    other = Answer(
        id="p", tokens=[1, 3], margins=[1, 1], cached_tokens=0, ttft_s=0.1,
        steps_to_first_token=1, finish_reason="length",
    )  # fmt: skip
    assert offload.problems(passes(results=[other]), HITS) == [
        "pass: outputs differ from the cold run's"
    ]


def test_the_demo_fails_for_a_metric_that_disagrees() -> None:
    assert len(offload.problems(passes(), {})) == 2
