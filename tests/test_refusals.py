"""`kvstore check` and `kvstore serve` refuse the same, with the same words, and neither hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from connectors import config as extra
from kvstore import cli, config
from kvstore.core.errors import ConfigError
from kvstore.handover.cluster_key import ClusterKey
from kvstore.listener import listen
from kvstore.settings import Section, settings_of
from kvstore.store import server
from tests.harness.nvme_blocks import settings_for
from tiers.nvme.disk import NvmeDisk

WAIT_S = 120.0
SECTIONS: dict[str, type[Section]] = {
    "server": config.ServerConfig,
    "cpu": config.CpuConfig,
    "engine": config.EngineConfig,
    "nvme": config.NvmeConfig,
    "peer": config.PeerConfig,
    "tier": config.TierConfig,
}
NUMBERS: tuple[Any, ...] = (
    "8 GB of it",
    -1,
    1.5,
    True,
    [],
    "99999999999999999999TiB",
    "-1GiB",
    "8gib",
)
FLAGS = (1, "true", None)
MOMENTS = ("soon", 30, -1, "1 fortnight", "99999999999999999h")
# Placeholders: {here} the test's folder, {port} a port in use, {dead} an address without a host.
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "server": {
        "socket": (
            1, "", "relative.sock", "{here}/", "{here}/file/kv.sock", "{here}/file", "{here}/full",
            "/proc/kv.sock", "/" + "x" * 107, "/a\0b",
        ),
        "allow": ("root", [-1], ["no such user"], [True], [1.5], {}),
        "metrics": (9400, "9400", "127.0.0.1:70000", "127.0.0.1:{port}", "{dead}:9400", "a b:1"),
        "group": (-1, 1 << 32, 1.5, True, "", "no-such-group", "a\0b", ["staff"]),
        "mode": ("0777", "0640", "660", "rw-rw----", 0o660, True, ""),
    },
    "cpu": {
        "capacity": (*NUMBERS, "1MiB", 0),
        "extent": (*NUMBERS, "3MiB", "1TiB", "Auto"),
        "numa": (-1, 2.5, "0", 1023, 5000, True),
        "policy": ("LRU", "", 1, True, ["lru"]),
    },
    "engine": {
        "credit": (*NUMBERS, 0, "1TiB"),
        "lease": (*MOMENTS, "0s"),
        "leased": (*NUMBERS, "101%", "0%", "-5%"),
        "pinned": (*NUMBERS, "101%", "0%", "-5%"),
        "defer": MOMENTS,
        "promote": MOMENTS,
        "promote_limit": MOMENTS,
        "event_tokens": NUMBERS,
    },
    "nvme": {
        "path": (
            1, "", "kv", "/a\0b", "{here}/file", "{here}/file/kv", "/proc/kv", "/" + "x" * 300,
            "{here}/locked",
        ),
        "capacity": (*NUMBERS, "1MiB", "900TiB"),
        "extent": (*NUMBERS, "3MiB", "1TiB"),
        "durability": MOMENTS,
        "threads": (0, 65, "4", 1.5, True),
        "backlog": (*MOMENTS, "0s"),
        "write_budget": (*NUMBERS, 0),
    },
    "peer": {
        "listen": ("", 9500, "0.0.0.0:9500", "{dead}:9500", "127.0.0.1:{port}", "10.0.0.1:9500"),
        "key": (1, "", "key", "{here}/none", "{here}/file", "{here}/open.key", "{here}"),
        "held": (*NUMBERS, "101%", 0),
        "landing": (*NUMBERS, "1MiB"),
        "devices": ("", "*", 1, "eth77", "lo,eth77"),
        "eager": FLAGS[:2],
        "hints": (
            "10.0.0.0/8", {}, 1, [1], [""], ["10.0.0.1/8"], ["a b"], ["h/8"], ["h:1"], ["h"] * 257,
        ),
    },
    "object": {
        "url": (1, "", "bucket", "http://storage/bucket", "s3://", "s3://a b", "s3://a/../b?x"),
        "endpoint": (1, "storage:9000", "ftp://storage", "http://", "http://a/b"),
        "key": (1, "", "key", "{here}/none", "{here}/file", "{here}/open.key", "{here}"),
        "run": (*NUMBERS, "1KiB", "1GiB"),
        "timeout": (*MOMENTS, "0s"),
        "threads": (0, 65, "4", 1.5, True),
        "write_budget": (*NUMBERS, 0),
        "requests": (0, 100_001, "5", 1.5, True),
    },
    "tier": {
        "class": (
            1, "", "os", "os:getcwd", "os:environ", "no.such:Tier", "os:nothing",
            "json:JSONDecoder",
            "tests.harness.broken_plugin:Tier", "tests.harness.bad_tiers:Closed",
            "tests.harness.bad_tiers:Exits",
        ),
        "name": (1, "", "CPU", "cpu", "nvme", "x" * 33, "a b"),
        "options": (1, "a", [], {"blocks": "many"}, {"blocks": {}}),
        "backlog": (*MOMENTS, "0s"),
    },
}  # fmt: skip


def test_S6_every_setting_has_wrong_values() -> None:
    """A new one fails here until it has some."""
    for section, kind in SECTIONS.items():
        assert set(WRONG[section]) == set(settings_of(kind))
        assert all(WRONG[section].values())


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A folder with files, sockets and a disk that are in the way."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "file").write_text("a file\n")
    ClusterKey.make(folder / "open.key")
    (folder / "open.key").chmod(0o644)
    with ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        full = stack.enter_context(closing(listen(str(folder / "full"))))
        full.sock.listen(0)
        for _ in range(2):  # a frozen store, and its backlog is full
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            caller.connect_ex(str(folder / "full"))
        disk = NvmeDisk(settings_for(folder / "locked"))
        stack.callback(disk.close)
        yield {"here": str(folder), "port": str(port), "dead": "192.0.2.1"}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.nvme.attached.LOCK_WAIT_S", 0.1)


def toml(table: dict[str, Any]) -> str:
    def shown(value: Any) -> str:  # noqa: ANN401 - of TOML
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {shown(one)}" for key, one in value.items()) + "}"
        return json.dumps(value)

    lines = []
    for name, section in table.items():
        lines.append("[[tier]]" if name == "tier" else f"[{name}]")
        lines += [f"{key} = {shown(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def write(folder: Path, section: str, name: str, value: object) -> Path:
    """Write a configuration that is right but for one setting."""
    table: dict[str, dict[str, Any]] = {
        "server": {"socket": f"{folder}/kv.sock", "metrics": ""},
        "cpu": {"capacity": "64MiB"},
        "engine": {},
        "nvme": {"path": f"{folder}/kv", "capacity": "64MiB"},
        "peer": {"eager": False},
        "tier": {"class": "tests.reference.memory_tier:MemoryTier", "name": "shelf"},
    }
    if section == "object":  # each check asks it, so it is not in the others
        table[section] = {"url": "s3://bucket/folder", "endpoint": "http://127.0.0.1:1"}
    if section:
        table[section][name] = value
    path = folder / "kvstore.toml"
    path.write_text(toml(table), encoding="utf-8")
    return path


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Server, "_turn", lambda _: None)
    monkeypatch.setattr(server, "collect_young_only", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    run = server.Server.run

    def brief(one: server.Server) -> None:
        one._stopping = True
        run(one)

    monkeypatch.setattr(server.Server, "run", brief)


def both(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, int, str, str]:
    """Return the statuses of check and serve, and what they print."""
    capsys.readouterr()
    checked = cli.main(["check", "--config", str(path)])
    found = capsys.readouterr()
    served = cli.main(["serve", "--config", str(path)])
    return checked, served, found.out + found.err, capsys.readouterr().err


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("section", WRONG)
def test_S6_what_check_refuses_serve_refuses_with_the_same_words(
    section: str, here: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for name, values in WRONG[section].items():
        for value in values:
            placed = value.format(**here) if isinstance(value, str) and "{" in value else value
            path = write(tmp_path, section, name, placed)
            checked, served, said, error = both(path, capsys)
            text = error.removeprefix("kvstore: error: ").strip()
            lines = len(error.splitlines())
            if (checked, served, lines) != (2, 2, 1) or text not in said:
                wrong.append((name, placed, checked, served, text, said))
    assert not wrong
    assert not (tmp_path / "kv.sock").exists()


@pytest.mark.usefixtures("stopped")
def test_S6_what_is_right_is_right_for_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both accept the configuration that the wrong values are put into."""
    checked, served, said, error = both(write(tmp_path, "", "", 0), capsys)
    assert (checked, served) == (0, 0), said + error


def test_S6_an_engines_settings_are_read_by_the_same_code() -> None:
    """Those of a private store: what its file would not take, its engine does not."""
    wrong: dict[str, Callable[[], tuple[Any, ...]]] = {
        "store": lambda: ("relative", 1),
        "cpu": lambda: WRONG["cpu"]["capacity"],
        "listen": lambda: ("9500", 1, "0.0.0.0:1"),
        "tenant": lambda: ({}, -1, "a b"),
    }
    for name in set(settings_of(extra.ExtraConfig)) - {"nvme"}:
        base = {} if name == "store" else {"cpu": "64MiB"}
        for value in wrong.get(name, lambda: ({}, -1, "what"))():
            with pytest.raises(ConfigError, match=name):
                extra.parse_extra({**base, name: value})


def test_S6_a_private_stores_disk_is_read_by_the_same_code() -> None:
    right = {"path": "/nvme/kv", "capacity": "64MiB"}
    for name, values in WRONG["nvme"].items():
        for value in values:
            if isinstance(value, str) and ("{" in value or value in ("/proc/kv", "/" + "x" * 300)):
                continue  # the file system says so
            with pytest.raises(ConfigError, match=name):
                extra.parse_extra({"cpu": "64MiB", "nvme": {**right, name: value}})


def test_S6_a_frozen_store_holds_neither(here: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path, "server", "socket", here["here"] + "/full")
    for command in ("check", "serve"):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", command, "--config", str(path)],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
            env={**os.environ},
        )  # fmt: skip
        assert done.returncode == 2
        assert "a store is running at" in done.stdout + done.stderr
        assert time.monotonic() - began < WAIT_S
