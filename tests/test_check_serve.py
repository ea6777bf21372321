"""`kvstore check` and a real `kvstore serve` on the same configurations: one verdict."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore import cli
from kvstore.handover.cluster_key import ClusterKey
from kvstore.listener import listen
from kvstore.units import GIB
from tests.harness.nvme_blocks import settings_for
from tests.test_refusals import toml
from tiers.nvme.disk import NvmeDisk

WAIT_S = 300.0
WORKS, WARNS, REFUSES = "works", "warns", "refuses"
# Placeholders: {here} the folder of all, {mine} that of one, {port} a port in use, {free} one that
# is not, {much} GiB more than the disk has.
DISK = {"path": "{mine}/kv", "capacity": "64MiB"}
PEER = {"eager": False}
TIER = {"name": "shelf", "class": "tests.reference.memory_tier:MemoryTier"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (WORKS, {}),
    "disk": (WORKS, {"nvme": DISK}),
    "side channel": (WORKS, {"peer": PEER}),
    "plug-in": (WORKS, {"tier": TIER}),
    "more memory than there is": (WARNS, {"cpu": {"capacity": "8TiB", "extent": "64GiB"}}),
    "a part that fills no extent": (WARNS, {"cpu": {"capacity": "70MiB"}}),
    "more disk than there is": (WARNS, {"nvme": DISK | {"capacity": "{much}GiB"}}),
    "a file instead of a disk": (REFUSES, {"nvme": DISK | {"path": "{here}/file"}}),
    "a disk without files": (REFUSES, {"nvme": DISK | {"path": "/proc/kv"}}),
    "a store at the socket": (REFUSES, {"server": {"socket": "{here}/taken.sock"}}),
    "a file at the socket": (REFUSES, {"server": {"socket": "{here}/file"}}),
    "metrics port in use": (REFUSES, {"server": {"metrics": "127.0.0.1:{port}"}}),
    "metrics at the port of the side channel": (
        REFUSES,
        {"server": {"metrics": "127.0.0.1:{free}"}, "peer": PEER | {"listen": "127.0.0.1:{free}"}},
    ),
    "metrics at all addresses of the side channel's port": (
        REFUSES,
        {"server": {"metrics": "0.0.0.0:{free}"}, "peer": PEER | {"listen": "127.0.0.1:{free}"}},
    ),
    "ports that are chosen": (
        WORKS,
        {"server": {"metrics": "127.0.0.1:0"}, "peer": PEER | {"listen": "127.0.0.1:0"}},
    ),
    "metrics of another machine": (REFUSES, {"server": {"metrics": "192.0.2.1:9400"}}),
    "side channel of another machine": (
        REFUSES,
        {"peer": PEER | {"listen": "192.0.2.1:9500", "key": "{here}/key"}},
    ),
    "side channel port in use": (REFUSES, {"peer": PEER | {"listen": "127.0.0.1:{port}"}}),
    "a device that is not there": (REFUSES, {"peer": PEER | {"devices": "eth77"}}),
    "no key": (REFUSES, {"peer": PEER | {"key": "{here}/none"}}),
    "a key for all to read": (REFUSES, {"peer": PEER | {"key": "{here}/open.key"}}),
    "a class that is no tier": (REFUSES, {"tier": TIER | {"class": "json:JSONDecoder"}}),
    "a function for a tier": (REFUSES, {"tier": TIER | {"class": "os:getcwd"}}),
    "a disk of another store": (REFUSES, {"nvme": DISK | {"path": "{here}/locked"}}),
    "a node that is not there": (REFUSES, {"cpu": {"capacity": "64MiB", "numa": 1023}}),
}


class Served(NamedTuple):
    """A `kvstore serve` on one of the configurations."""

    config: Path
    process: subprocess.Popen[str]
    log: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """All of them at once, among files, ports and sockets that are in their way."""
    here = tmp_path_factory.mktemp("here")
    (here / "file").write_text("a file\n")
    ClusterKey.make(here / "key")
    ClusterKey.make(here / "open.key")
    (here / "open.key").chmod(0o644)
    much = str(shutil.disk_usage(here).total // GIB + 64)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        stack.enter_context(contextlib.closing(listen(str(here / "taken.sock"))))
        stack.enter_context(contextlib.closing(NvmeDisk(settings_for(here / "locked"))))
        found = {}
        for number, (name, (_, changes)) in enumerate(CASES.items()):
            mine = here / str(number)
            mine.mkdir()
            with socket.create_server(("127.0.0.1", 0)) as sock:  # one for each: all start at once
                free = str(sock.getsockname()[1])
            table: dict[str, Any] = {
                "server": {"socket": f"{mine}/kv.sock", "metrics": ""},
                "cpu": {"capacity": "64MiB"},
            }
            for section, settings in changes.items():
                table[section] = table.get(section, {}) | settings
            text = toml(table).replace("{here}", str(here)).replace("{mine}", str(mine))
            (mine / "kvstore.toml").write_text(
                text.replace("{port}", str(port)).replace("{free}", free).replace("{much}", much)
            )
            log = stack.enter_context((mine / "log").open("w"))
            command: list[str | Path] = [
                sys.executable,
                "-m",
                "kvstore.cli",
                "serve",
                "--config",
                mine / "kvstore.toml",
            ]
            process = subprocess.Popen(command, stderr=log, text=True, env={**os.environ})
            found[name] = Served(mine / "kvstore.toml", process, mine / "log")
            stack.callback(process.wait, WAIT_S)
            stack.callback(process.send_signal, signal.SIGTERM)
        yield found


def begun(one: Served) -> str:
    """Its log, once it has listened or ended."""
    deadline_s = time.monotonic() + WAIT_S
    while one.process.poll() is None and "listening at" not in one.log.read_text():
        assert time.monotonic() < deadline_s, one.log.read_text()
        time.sleep(0.02)
    return one.log.read_text()


@pytest.mark.parametrize("name", CASES)
def test_Q12_check_says_what_serve_does(
    name: str, served: dict[str, Served], capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = CASES[name]
    one = served[name]
    log = begun(one)
    if expected != REFUSES:  # what it has made is its own again
        one.process.send_signal(signal.SIGTERM)
        one.process.wait(WAIT_S)
    status = cli.main(["check", "--config", str(one.config), "--json"])
    rows = json.loads(capsys.readouterr().out)
    failed = [row["text"] for row in rows if row["level"] == "fail"]
    notes = [row for row in rows if row["level"] == "note" and row["what"] in ("cpu", "nvme")]
    if expected == REFUSES:
        assert (status, one.process.returncode) == (2, 2)
        (line,) = [line for line in log.splitlines() if line.startswith("kvstore: error: ")]
        assert line.removeprefix("kvstore: error: ") in failed
        assert "listening at" not in log
        return
    assert (status, failed) == (0, [])
    assert "listening at" in log
    assert bool(notes) == (expected == WARNS)
    logged = [line for line in log.splitlines() if " WARNING " in line]
    assert len(logged) == len(notes)
    for row, line in zip(notes, logged, strict=True):
        _, _, happens = row["text"].partition("; ")
        assert happens, "a warning says what will happen"
        assert line.endswith(f"; {happens}")
        assert f" {row['what']}: " in line
