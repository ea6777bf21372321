"""Bad input of every kind is one line: what was found, what is expected, and a way out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore import cli
from tests.test_engine_check import RIGHT, extra
from tests.test_model_size import LLAMA

CPU = '[cpu]\ncapacity = "64MiB"\n'
# What is typed, what of it the line names, and what it says is expected. {file}: of the last
# column; {here}: an empty folder; {model}: a model's config.json.
ARGUMENTS: list[tuple[str, str, str]] = [
    ("", "none", "expected command"),
    ("stat", "stat", "did you mean stats"),
    ("serve", "none", "expected --config"),
    ("serve --confg x", "--confg", "did you mean --config"),
    ("serve --config", "--config", "expected one argument"),
    ("serve --config {here}/none.toml", "none.toml", "No such file.*expected a TOML file"),
    ("serve --config {here}", "{here}", "Is a directory; expected a TOML file"),
    ("serve --config {model} more", "more", "unrecognized arguments"),
    ("check", "none of them", "expected --config FILE, --engine JSON, or --disk"),
    ("check --config x --engine {{}}", "both", "expected one of --engine and --config"),
    ("check --config x --seconds 5", "no --disk", "--seconds are for --disk"),
    ("check --config x --model y", "no --engine", "--model .* for --engine"),
    ("check --disk --seconds 3", "3", "expected a whole number from 5 to 600"),
    ("check --disk --path {here}/none", "{here}/none", "expected a directory"),
    ("check --engine {{cpu}}", "cpu", "expected JSON such as"),
    ("check --engine []", "a list", "expected an object such as"),
    ("check --engine 7", "7", "expected an object such as"),
    ("check --engine {{}} --block-size 0", "0", "expected a whole number from 1"),
    ("size", "none", "expected model"),
    ("size {here}/none", "{here}/none", "expected the directory of a model"),
    ("size {here}", "{here}", "expected the directory of a model"),
    ("size {model} --dtype fp9", "fp9", "did you mean fp8"),
    ("size {model} --tp 3", "3", "expected a divisor of 8 KV heads"),
    ("size {model} --tp many", "many", "expected a whole number from 1"),
    ("size {model} --cpu 8gb", "8gb", "expected a size.*did you mean 8GB"),
    ("size {model} --cpu 1MiB", "1MiB", "expected at least 16MiB"),
    ("size {model} --nvme lots", "lots", "expected a size"),
    ("size {model} --tokens -1", "-1", "expected a whole number from 1"),
    ("size {model} --cpu 1GiB --config x", "both", "expected --config, or --cpu"),
    ("top --every 1ms", "1ms", 'expected "100ms" to'),
    ("top --every often", "often", "expected a duration"),
    ("stats --store localhost:9400", "localhost:9400", "expected an absolute path"),
    ("stats --store engine:none --user 1x", "1x", "expected"),
    ("clear --store relative.sock", "relative.sock", "expected an absolute path"),
    ("resize nvme --store /x", "none", "expected capacity"),
    ("resize disk 1GiB --store /x", "disk", "invalid choice.*nvme"),
    ("resize nvme plenty --store /x", "plenty", "expected a size"),
    ("resize nvme 900TiB --store /x", "900TiB", "expected at most"),
    ("fsck", "none", "expected directory"),
    ("fsck {here}/none", "{here}/none", "expected"),
    ("fsck {model}", "config.json", "expected a directory"),
    ("fsck {here} --repiar", "--repiar", "did you mean --repair"),
    ("keygen", "none", "expected path"),
    ("keygen {here}/none/key", "{here}/none/key", "expected a new file in a folder that is there"),
    ("keygen {model}", "config.json", "File exists.*expected a new file"),
]
CONFIGS: list[tuple[str, str, str]] = [
    ("", "missing", r"\[cpu\] capacity: is required .* for example capacity = "),
    ("cpu = 8", "8", "expected a table"),
    ("[cpu", "end of document", "not valid TOML.*Expected"),
    (CPU + CPU, "line 3", "not valid TOML.*twice|once"),
    ("[cpus]\n", "cpus", "did you mean cpu"),
    ('[cpu]\ncapacty = "8GiB"\n', "capacty", "did you mean capacity"),
    ('[cpu]\ncapacity = "8 gib"\n', "8 gib", "did you mean 8GiB"),
    ("[cpu]\ncapacity = -1\n", "-1", 'expected a size such as "8GiB"'),
    ("[cpu]\ncapacity = 1e9\n", "1000000000.0", 'expected a size such as "8GiB"'),
    ('[cpu]\ncapacity = "64MiB"\nextent = "3MiB"\n', "3MiB", "a multiple of 2MiB"),
    (CPU + "[engine]\nlease = 30\n", "30", 'expected a duration such as "30s"'),
    (CPU + '[engine]\nlease = "0s"\n', "0s", "expected more than 0"),
    (CPU + '[engine]\nleased = "120%"\n', "120%", "at most the capacity"),
    (CPU + '[nvme]\ncapacity = "1GiB"\n', "missing", "path: is required .* for example path"),
    (CPU + '[nvme]\npath = "kv"\ncapacity = "1GiB"\n', "kv", "expected an absolute path such as"),
    (CPU + '[nvme]\npath = "/x"\ncapacity = "1GiB"\nthreads = 0\n', "0", "number from 1 to 64"),
    (CPU + '[peer]\nlisten = "0.0.0.0:9500"\n', "0.0.0.0:9500", "at which other stores reach this"),
    (CPU + '[peer]\ndevices = "eth77"\n', "eth77", r"\[peer\] devices: expected some of"),
    (CPU + '[peer]\nkey = "{here}/none"\n', "{here}/none", "kvstore keygen makes one"),
    (CPU + '[server]\nmetrics = "9400"\n', "9400", 'expected "host:port"'),
    (CPU + '[server]\nmetrics = "a\\u0000b:1"\n', "a\\u0000b:1", 'expected "host:port"'),
    (CPU + '[server]\nmetrics = "\u00fc..x:1"\n', "\u00fc..x:1", 'expected "host:port"'),
    (CPU + '[server]\nsocket = "kv.sock"\n', "kv.sock", "expected an absolute path such as"),
    (CPU + '[server]\nallow = ["no such user"]\n', "no such user", "expected"),
    (CPU + '[[tier]]\nname = "x"\n', "missing", "class: is required .* for example class"),
    (CPU + '[[tier]]\nclass = "os:getcwd"\nname = "x"\n', "os:getcwd", "expected a class"),
]
ENGINES: list[tuple[dict[str, Any], str, str]] = [
    (extra(), "neither", "expected one of store and cpu"),
    (extra(cpu="64MiB", store="/x"), "both", "expected one of store and cpu"),
    (extra(cpu=True), "true", 'expected a size such as "8GiB"'),
    (extra(cpu="1MiB"), "1MiB", "expected at least 16MiB"),
    (extra(store="x"), "x", "expected an absolute path such as"),
    (extra(store="/x", nvme={"path": "/x", "capacity": "1GiB"}), "nvme", "is for a private store"),
    (extra(cpu="64MiB", block_token=16), "block_token", "did you mean block_tokens"),
    (extra(cpu="64MiB", block_tokens="16"), "16", "expected a whole number from 1"),
    (extra(cpu="64MiB", transfer="shove"), "shove", 'expected "auto" or "pull" or "push"'),
    (extra(cpu="64MiB", lease="2d"), "2d", "expected a duration"),
    (extra(cpu="64MiB", lease="25h"), "25h", 'expected a duration from "1ms" to "24h"'),
    (extra(cpu="64MiB", two_way=1), "1", "expected true or false"),
    (extra(cpu="64MiB", recompute_threshold=5), "false here", "two_way = true"),
    (extra(cpu="64MiB", store_user="root"), "store_user", "is for a shared store"),
    (extra(cpu="64MiB", nvme=1), "1", "expected a table with path and capacity"),
    (RIGHT | {"kv_role": "kv_consumer"}, "kv_consumer", 'expected "kv_both"'),
    (RIGHT | {"kv_connecter": "x"}, "kv_connecter", "did you mean kv_connector"),
    (RIGHT | {"two\nlines\x1b[31m": 1}, "two\\nlines\\x1b", "known are kv_connector"),
]


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """An empty folder, and a model's config.json."""
    (tmp_path / "here").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return {"here": str(tmp_path / "here"), "model": str(tmp_path / "config.json")}


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        status = cli.main(arguments)
    except SystemExit as exc:  # argparse
        status = int(exc.code or 0)
    found = capsys.readouterr()
    return status, found.out, found.err


def assert_told(text: str, found: str, expected: str) -> None:
    """The line names what was found, and says what is expected."""
    assert found in text, text
    assert re.search(expected, text), text
    assert len(text) < 1200, "one line that people read"


@pytest.mark.parametrize(("typed", "found", "expected"), ARGUMENTS)
def test_Q13_wrong_arguments_are_one_line(
    typed: str, found: str, expected: str, place: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [part.format(**place) for part in typed.split()]
    status, _, error = run(arguments, capsys)
    (line,) = error.splitlines()
    assert status == 2, line
    assert line.startswith("kvstore: error: ")
    assert_told(line, found.format(**place), expected)


@pytest.mark.parametrize(("text", "found", "expected"), CONFIGS)
def test_Q13_a_wrong_configuration_is_one_line(
    text: str, found: str, expected: str, place: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(place["here"]) / "kvstore.toml"
    server = "" if "[server]" in text or not text.startswith(CPU) else (
        f'[server]\nsocket = "{place["here"]}/kv.sock"\nmetrics = ""\n'
    )  # fmt: skip
    path.write_text(text.replace("{here}", place["here"]) + server)
    status, _, error = run(["serve", "--config", str(path)], capsys)
    (line,) = error.splitlines()
    assert status == 2, line
    assert line.startswith("kvstore: error: ")
    assert_told(line, found.format(**place), expected)


@pytest.mark.parametrize(("table", "found", "expected"), ENGINES)
def test_Q13_wrong_settings_of_an_engine_are_one_line(
    table: dict[str, Any], found: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, error = run(["check", "--engine", json.dumps(table)], capsys)
    assert status == 2
    assert error == f"1 of {len(out.splitlines())} checks failed: the engine would not start\n"
    (line,) = [line for line in out.splitlines() if line.startswith("fail ")]
    assert_told(line, found, expected)


@pytest.mark.parametrize("arguments", [["stat"], ["serve", "--config", "/none"], ["size", "/none"]])
def test_Q13_a_shell_sees_one_line_and_status_2(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
