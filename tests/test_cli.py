"""The command line: what it prints, its exit status, and a real store behind it."""

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import cli
from kvstore.check import refuse_file_limit, refuse_socket
from kvstore.config import parse
from kvstore.core.errors import ConfigError
from kvstore.metrics import TABLE
from kvstore.printing import share
from kvstore.wire import framing
from kvstore.wire.engine import Report
from tests.bench import __main__ as bench
from tests.bench.report import Result, as_json, paired_ratio, percentile, show
from tests.bench.store import StoreFailed, StoreProcess


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("store"), "64MiB") as process:
        yield process


class Check:
    """Runs `kvstore check`."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capsys = capsys

    def config(self, more: str = "", capacity: str = "64MiB") -> Path:
        path = self._folder / "kvstore.toml"
        path.write_text(
            f'[server]\nsocket = "{self._folder}/kv.sock"\nmetrics = ""\n'
            f'[cpu]\ncapacity = "{capacity}"\n{more}'
        )
        return path

    def __call__(self, more: str = "", capacity: str = "64MiB", *options: str) -> tuple[int, str]:
        """Return its status and output."""
        status = cli.main(["check", "--config", str(self.config(more, capacity)), *options])
        return status, self._capsys.readouterr().out


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(tmp_path, capsys)


NAMES = (
    "serve",
    "check",
    "status",
    "top",
    "stats",
    "clear",
    "resize",
    "keygen",
    "fsck",
    "log-level",
)


def ended(run: Callable[[list[str]], int], arguments: list[str]) -> object:
    """The status that argparse ends a command with."""
    with pytest.raises(SystemExit) as exit_info:
        run(arguments)
    return exit_info.value.code


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in NAMES:
        assert ended(cli.main, [command, "--help"]) == 0
        assert re.search(rf"examples?:\n  kvstore {command}", capsys.readouterr().out)
    assert ended(cli.main, ["--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:\n  kvstore " in out
    assert not [command for command in NAMES if not re.search(rf"\n    {command}\s", out)]


def test_wrong_arguments_end_with_status_2() -> None:
    plain_check = ["check", "--config", "x", "--seconds", "20"]
    for arguments in ([], ["stats", "--every"], ["serve"], ["check"], plain_check):
        assert ended(cli.main, arguments) == 2
    for arguments in ([], ["nothing"], ["attach", "--pairs", "0"]):
        assert ended(bench.main, arguments) == 2


def test_a_wrong_setting_is_one_line_and_status_2(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    path = check.config(more="extend = 1")
    for command in ("serve", "check"):
        assert cli.main([command, "--config", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kvstore: error: {path}: [cpu]")
        assert "extend" in line
        assert "did you mean extent?" in line


def test_check_says_what_a_store_would_do(check: Check, tmp_path: Path) -> None:
    tier = "tests.reference.memory_tier:MemoryTier"
    status, out = check(f'[[tier]]\nclass = "{tier}"\nname = "shelf"')
    assert status == 0
    told = ("capacity 64 MiB", "4 extents of 16 MiB", "huge pages")
    assert not [text for text in (*told, f"{tier} loads") if text not in out]
    assert not (tmp_path / "kv.sock").exists()


def test_check_prints_the_same_as_json(check: Check) -> None:
    wrong = '[[tier]]\nclass = "no.such:Tier"\nname = "disk"'
    for more, status, failing in (("", 0, []), (wrong, 2, ["tier disk"])):
        found, out = check(more)
        found_json, as_rows = check(more, "64MiB", "--json")
        assert (found, found_json) == (status, status)
        rows = json.loads(as_rows)
        for row, line in zip(rows, out.splitlines(), strict=True):
            assert line.startswith(row["level"])
            assert row["what"] in line
        assert [row["what"] for row in rows if row["level"] == "fail"] == failing


def test_S5_check_notes_capacity_that_is_not_there_or_fills_no_extent(check: Check) -> None:
    """A store starts all the same, and takes what there is."""
    status, out = check(capacity="1000TiB")
    assert status == 0
    assert re.search(r"note  cpu .* are available now \(.*\); it stops", out)
    status, out = check(capacity="70MiB")
    assert status == 0
    assert "6 MiB of the capacity fill no extent" in out


def test_check_looks_at_the_disk(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = f'[nvme]\npath = "{tmp_path}/a/kv"\ncapacity = "1GiB"'
    status, out = check(disk)
    assert status == 0
    assert f"{tmp_path}/a/kv: capacity 1 GiB" in out
    assert not (tmp_path / "a").exists()
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        status, out = check(disk)
    assert status == 2
    assert "this file system has no direct I/O" in out
    (tmp_path / "a").write_text("a file")
    status, out = check(disk)
    assert status == 2
    assert "expected a directory" in out


def test_a_second_store_at_the_same_address_is_refused(
    store: StoreProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--config", str(store.config_path)]) == 2
    out = capsys.readouterr().out
    assert "a store is running at" in out
    assert "Address already in use" in out
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.0 400 Bad Request", "is no kvstore"),
        (framing.encode(Report(b'{"of": "another version"}')), "is of another version"),
        (framing.encode(Report(b"\xff")), "is of another version"),
        (framing.encode(Report(b'[["\xff", 1]]')), "is of another version"),  # no UTF-8
    ],
)
def test_something_else_at_the_address_is_said(
    answer: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen(1)
        code = (
            "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]));"
            f"c, _ = s.accept(); c.recv(100); c.sendall({answer!r})"
        )
        command = [sys.executable, "-c", code, str(other.fileno())]
        child = subprocess.Popen(command, pass_fds=[other.fileno()])
        assert cli.main(["stats", "--store", f"unix://{tmp_path}/other.sock"]) == 1
        assert child.wait(600) == 0
    assert expected in capsys.readouterr().err


def test_a_store_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreFailed, match="unknown nonsense"),
        StoreProcess(tmp_path, "64MiB", settings="nonsense = 1"),
    ):
        pass


# Whatever is given to it, what comes back is a line and a status, no traceback

WAIT_S = 60.0
KINDS = (
    *("none", "folder", "device", "pipe", "binary", "empty", "deep", "huge", "long"),
    *("socket", "loop", "below a file"),
)
COMMANDS = (
    ("serve", "--config", "{}"),
    ("check", "--config", "{}"),
    ("check", "--disk", "--config", "{}"),
    ("check", "--disk", "--path", "{}"),
    ("fsck", "{}"),
    ("fsck", "{}", "--repair"),
    ("stats", "--store", "{}"),
    ("stats", "--store", "unix://{}"),
    ("clear", "--store", "{}"),
    ("resize", "nvme", "1GiB", "--store", "{}"),
    ("resize", "nvme", "{}", "--store", "unix:///none.sock"),
    ("keygen", "{}/key"),
    ("log-level", "debug", "--store", "{}"),
)  # fmt: skip


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths that are not what a command wants."""
    folder = tmp_path_factory.mktemp("nasty")
    os.mkfifo(folder / "pipe")
    (folder / "binary").write_bytes(bytes(range(256)) * 100)
    (folder / "empty").touch()
    (folder / "deep").write_text("a = " + "[" * 5000 + "]" * 5000 + "\n")
    with (folder / "huge").open("wb") as file:
        file.truncate(10 << 30)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    (folder / "loop").symlink_to(folder / "loop")
    paths = {kind: str(folder / kind) for kind in KINDS}
    (folder / "empty-folder").mkdir()
    paths["folder"] = str(folder / "empty-folder")
    return paths | {
        "device": "/dev/zero",
        "long": "/" + "x" * 5000,
        "below a file": str(folder / "empty" / "x"),
    }


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_S6_a_command_ends_in_words(
    command: tuple[str, ...], nasty: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    works = {("check", "--disk", "--path", "{}"), ("keygen", "{}/key")}
    wrong = []
    for kind in KINDS:
        if kind == "folder" and command in works:
            continue
        try:
            status = cli.main([part.format(nasty[kind]) for part in command])
        except SystemExit as exc:  # argparse
            status = int(exc.code or 0)
        error = capsys.readouterr().err
        said = error.splitlines()[-1].startswith("kvstore") if error else False
        if status not in (1, 2) or not said or "Traceback" in error or "internal error" in error:
            wrong.append((kind, status, error))
    assert not wrong


def test_S6_a_mark_before_utf_8_is_read_over(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    path = check.config()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert cli.main(["check", "--config", str(path)]) == 0
    assert "capacity 64 MiB" in capsys.readouterr().out


def test_S6_resize_refuses_a_capacity_as_the_file_does(capsys: pytest.CaptureFixture[str]) -> None:
    for capacity in ("900000TB", "257TiB", "1MiB", "a lot"):
        assert cli.main(["resize", "nvme", capacity, "--store", "unix:///none.sock"]) == 2
        error = capsys.readouterr().err
        assert "capacity: expected" in error
        assert f'"{capacity}"' in error


def test_S6_a_bug_is_a_line_and_with_debug_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_chosen: object) -> int:
        raise ZeroDivisionError("a bug\nof two lines")

    monkeypatch.setitem(cli._COMMANDS, "stats", broken)
    assert cli.main(["stats", "--store", "unix:///none.sock"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "internal error" in line
    assert "ZeroDivisionError: a bug of two lines" in line
    assert "--debug" in line
    with pytest.raises(ZeroDivisionError):
        cli.main(["--debug", "stats", "--store", "unix:///none.sock"])


def test_S6_who_reads_no_further_gets_no_traceback(check: Check) -> None:
    out, into = os.pipe()
    os.close(out)
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "check", "--config", str(check.config())],
        stdout=into, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    os.close(into)
    assert done.stderr == ""
    assert done.returncode == 1


def _python(code: str, **how: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401 - of run()
    command = [sys.executable, "-c", code]
    return subprocess.run(command, text=True, timeout=WAIT_S, check=False, **how)


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_S6_streams_that_are_closed_are_no_bug(
    closed: str, store: StoreProcess, tmp_path: Path
) -> None:
    """As `kvstore ... >&-` and `<&-` have it; the command does the same, and says it nowhere."""
    code = (
        "import os, sys\n"
        f"for fd in {closed!r}:\n"
        "    os.close(int(fd)); setattr(sys, ('stdin', 'stdout', 'stderr')[int(fd)], None)\n"
        "from kvstore.cli import main\n"
        f"status = main(['top', '--once', '--every', '100ms', '--store', {store.address!r}])\n"
        f"folder = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
        "sys.exit(status or 10 * (folder < 3))"
    )
    done = _python(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, "10: a file has the number of a standard stream"
    assert done.stderr == ""
    assert done.stdout.startswith("kvstore ") is ("1" not in closed)


def test_S6_paths_and_terminals_that_are_not_utf_8_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.mkdir()
    text = '{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4,'
    (folder / "config.json").write_text(text + '"num_key_value_heads": 2, "hidden_size": 64}')
    trace = folder / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n' * 2)
    for encoding in ("utf-8:strict", "ascii", "latin-1"):
        for arguments, expected in (
            (["size", str(folder)], "m\\udcff: 512 B a token"),
            (["size", str(folder), "--json"], '{"model":"m\\udcff",'),
            (["keygen", str(folder / encoding)], "m\\udcff/"),
            (["replay", str(trace), "--cpu", "1,2"], "100.0%  0.5000"),
            (["status", "--store", str(folder / "sock")], "m\\udcff/sock: No such file"),
        ):
            code = f"import sys; from kvstore.cli import main; sys.exit(main({arguments!r}))"
            environment = {**os.environ, "PYTHONIOENCODING": encoding}
            done = _python(code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
            assert expected in done.stdout


@pytest.mark.parametrize(
    ("bug", "expected"),
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("can't start new thread"), "raise the limit of tasks"),
    ],
)
def test_S6_what_the_machine_lacks_is_no_bug(
    bug: Exception,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lacking(_chosen: object) -> int:
        raise bug

    monkeypatch.setitem(cli._COMMANDS, "stats", lacking)
    assert cli.main(["stats", "--store", "unix:///none.sock"]) == 1
    told = capsys.readouterr().err
    assert expected in told
    assert "internal error" not in told


def test_S6_a_full_disk_below_standard_output_is_said_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text('{"hash_ids": [1, 2]}\n' * 2)
    arguments = ["replay", str(trace), "--cpu", "1"]
    code = f"from kvstore.cli import main; raise SystemExit(main({arguments!r}))"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        done = _python(code, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.stderr == "kvstore: error: standard output: No space left on device\n"
    assert done.returncode == 1


def test_S6_a_folder_of_a_read_only_file_system_is_named_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "access", lambda *_: False)  # as the system says then
    monkeypatch.setattr("tempfile.NamedTemporaryFile", refused)
    with pytest.raises(ConfigError, match=f"made in {tmp_path}: Read-only file system"):
        refuse_socket(str(tmp_path / "kv.sock"))


def test_S6_a_limit_of_files_below_an_extent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({"cpu": {"capacity": "64MiB", "extent": "16MiB"}})
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    with pytest.raises(ConfigError, match=r"up to 16 MiB, .*, found a limit of 1 KiB"):
        refuse_file_limit(config)
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    refuse_file_limit(config)


def test_S6_names_are_text_and_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with share() as tell:
        tell(0.5, "a[/bold]")
    assert "a[/bold]" in capsys.readouterr().err
    text = '{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4,'
    path = tmp_path / "[bold]m.json"
    path.write_text(text + '"num_key_value_heads": 2, "hidden_size": 64}')
    assert cli.main(["size", str(path)]) == 0
    assert capsys.readouterr().out.startswith("[bold]m: 512 B a token")


def test_S6_a_file_of_pins_that_nests_deep_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pins.json"
    path.write_text('[{"x":' + "[" * 100_000)
    for command in ("pin", "warm"):
        assert cli.main([command, str(path), "--store", "unix:///none.sock"]) == 2
        assert "expected what `kvstore pin --json` prints" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="another user's folder takes root to be made")
def test_S6_a_folder_that_one_may_not_read_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    code = (
        "import os, sys, rich.progress, tiers.nvme.fsck; from kvstore import cli, check\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"sys.exit(cli.main(['fsck', {str(tmp_path / 'kv' / 'x')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode in (1, 2)
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


# What benches print


def test_results_are_one_flat_object_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    interval = {"against": "native", "ratio_low": 1.1, "ratio_high": 1.3}
    theirs = Result("ttft", 10.0, "ms", parameters={"system": "native"})
    ours = Result(
        "ttft", 12.3456, "ms", reference=10.0, parameters={"system": "ours", **interval}, ratio=1.23
    )
    found = json.loads(as_json("vllm", [ours, theirs], 0.25))
    assert (found["bench"], found["stolen"]) == ("vllm", 0.25)
    assert found["results"][0]["ratio_high"] == 1.3
    assert found["results"][1] == {
        "name": "ttft", "value": 10.0, "unit": "ms", "better": "lower",
        "reference": None, "ratio": None, "system": "native",
    }  # fmt: skip
    show("vllm", [ours, theirs], json=False)
    out = capsys.readouterr().out
    assert "1.23 (1.1 to 1.3)" in out
    assert "native 10" in out
    assert "hypervisor" not in out
    show("vllm", [ours, theirs], stolen=0.25, json=False)
    assert "a hypervisor gave 25% of the processors' time" in capsys.readouterr().out


def test_a_table_in_a_pipe_is_whole_however_wide(capsys: pytest.CaptureFixture[str]) -> None:
    wide = {f"parameter{number}": f"value{number}" for number in range(20)}
    result = Result("n" * 60, 1.5, "us", parameters=wide)
    show("index", [result], json=False)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "n" * 60 in line]
    of = [f"{name}={value}" for name, value in wide.items()]
    assert row.split() == ["n" * 60, *of, "1.5", "us", "-", "-"]


def test_a_paired_ratio_takes_out_what_both_sides_share() -> None:
    drift = [1.0, 3.0, 10.0, 2.0, 7.0, 5.0]
    pair = paired_ratio([1.1 * value for value in drift], drift)
    assert pair.median == pytest.approx(1.1)
    assert pair.low == pytest.approx(pair.high)


def test_percentiles_are_values_that_occur() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.99), percentile(values, 0.5), percentile([7.0], 0.01)) == (
        99, 50, 7,
    )  # fmt: skip
