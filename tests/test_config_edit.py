"""`kvstore resize --persist`: one value of the file changes, and nothing else of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from kvstore import cli
from kvstore.config import ConfigFile
from kvstore.config_edit import NotWritten, persist, with_value
from tests.test_reload import Reloads

PAGE = """# memory of this node; capacity = "1GiB" was too little
[server]   # where
socket = "/run/kv.sock"

[nvme]
path = '/nvme/capacity = "2GiB"'
capacity = "128GiB"   # of the disk

[cpu]
extent = "16MiB"
  capacity="64MiB" # capacity = 5
"""


def test_Q23_one_value_changes_and_every_other_byte_stays() -> None:
    assert with_value(PAGE, "cpu", "capacity", '"8GiB"') == PAGE.replace('"64MiB"', '"8GiB"')
    assert with_value(PAGE, "nvme", "capacity", "5000") == PAGE.replace('"128GiB"', "5000")


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("cpu.capacity = 67108864", 'cpu.capacity = "8GiB"'),
        ("cpu = { capacity = '64MiB', numa = 0 }", 'cpu = { capacity = "8GiB", numa = 0 }'),
        ('[cpu]\r\n"capacity" = "64MiB"\r\n', '[cpu]\r\n"capacity" = "8GiB"\r\n'),
        ('[nvme]\ncapacity="64MiB"\n[cpu]\ncapacity="64MiB"', None),
    ],
)
def test_Q23_however_it_is_written(text: str, changed: str | None) -> None:
    expected = changed or '[nvme]\ncapacity="64MiB"\n[cpu]\ncapacity="8GiB"'
    assert with_value(text, "cpu", "capacity", '"8GiB"') == expected


def test_Q23_what_is_written_otherwise_is_left_to_an_editor() -> None:
    with pytest.raises(NotWritten, match="only an editor can change"):
        with_value('[cpu]\ncapacity = """64MiB"""', "cpu", "capacity", '"8GiB"')


def test_Q23_the_file_keeps_mode_owner_and_link(tmp_path: Path) -> None:
    path, link = tmp_path / "kvstore.toml", tmp_path / "link.toml"
    path.write_text(PAGE)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 4711, 4712)
    link.symlink_to(path)
    before = path.stat()
    persist(ConfigFile.of(link, path.read_bytes()), "cpu", "capacity", '"80MiB"')
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode, before.st_uid, before.st_gid,
    )  # fmt: skip
    assert link.is_symlink()
    assert path.read_text() == PAGE.replace('"64MiB"', '"80MiB"')
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_Q23_a_value_that_the_file_may_not_have_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(PAGE + '[engine]\nleased = "48MiB"\n')
    before = path.read_bytes()
    with pytest.raises(NotWritten, match=r"\[engine\] leased: expected more than 0 and at most"):
        persist(ConfigFile.of(path, before), "cpu", "capacity", '"32MiB"')
    assert path.read_bytes() == before


def test_Q23_the_command_writes_the_file_and_a_restart_would_find_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reloads = Reloads(tmp_path)
    with reloads.store:
        for size in ("48MiB", "67108864"):
            where = ("--store", reloads.address, "--persist")
            assert cli.main(["resize", "cpu", size, *where]) == 0
            out = capsys.readouterr().out
            assert f"{reloads.path}: [cpu] capacity = " in out
        expected = reloads.text.replace('"32MiB"', "67108864")
        assert reloads.path.read_text() == expected
        assert cli.main(["reload", "--store", reloads.address]) == 0
        assert capsys.readouterr().out == "nothing differs from the file\n"


def test_Q23_a_file_that_has_changed_is_left_and_the_resize_is_told_as_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reloads = Reloads(tmp_path)
    with reloads.store:
        reloads.path.write_text(reloads.text + "# somebody edits it\n")
        arguments = ["resize", "cpu", "48MiB", "--store", reloads.address, "--persist"]
        assert cli.main(arguments) == 1
        told = capsys.readouterr()
        assert told.out == "cpu: capacity 48 MiB, 0 B in use\n"
        assert "it has changed since the store read it" in told.err
        assert len(told.err.splitlines()) == 1
        assert reloads.path.read_text() == reloads.text + "# somebody edits it\n"
        assert reloads.running.cpu.capacity_bytes == 48 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_Q23_a_file_that_is_not_writable_is_an_error() -> None:
    """The folder would allow it: whoever may not write the file may not replace it either."""
    code = """
        import os, sys
        from kvstore.config import ConfigFile
        from kvstore.config_edit import persist
        path = sys.argv[1]
        "a".encode("idna").decode("utf-8-sig")  # nobody could load these
        os.setgid(65534); os.setuid(65534)
        persist(ConfigFile.of(path, open(path, "rb").read()), "cpu", "capacity", "90000000")
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kvstore.toml"
        path.write_text(PAGE)
        Path(folder).chmod(0o777)
        command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stderr.splitlines()[-1].endswith("not written: Permission denied")
        assert path.read_text() == PAGE
