"""Whatever is given to the command line, what comes back is a line and a status, no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import cli

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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvstore.toml"
    text = f'[server]\nsocket = "{tmp_path}/kv.sock"\nmetrics = ""\n[cpu]\ncapacity = "64MiB"\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
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

    monkeypatch.setattr(cli, "_stats", broken)
    assert cli.main(["stats", "--store", "unix:///none.sock"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "internal error" in line
    assert "ZeroDivisionError: a bug of two lines" in line
    assert "--debug" in line
    with pytest.raises(ZeroDivisionError):
        cli.main(["--debug", "stats", "--store", "unix:///none.sock"])


def test_S6_who_reads_no_further_gets_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(f'[server]\nsocket = "{tmp_path}/kv.sock"\n[cpu]\ncapacity = "64MiB"\n')
    out, into = os.pipe()
    os.close(out)
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "check", "--config", str(path)],
        stdout=into, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    os.close(into)
    assert done.stderr == ""
    assert done.returncode == 1


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
