"""What systemd is told, by a socket as it makes one, and the unit file."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore import cli
from kvstore.store import health, server
from kvstore.store.health import Health
from kvstore.systemd import STATUS_MAX, Systemd
from kvstore.units import parse_duration_ns
from tests.bench.store import StoreProcess
from tests.harness import bad_tiers
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, client, engine, eventually, store_settings
from tests.harness.pages import ROOT
from tests.harness.patience import WAIT_S

UNIT = ROOT / "deploy/systemd/kvstore.service"


class Manager:
    """The socket of a service manager."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path.replace("@", "\0", 1) if path.name == self.path else self.path)
        self.sock.settimeout(WAIT_S)

    def next(self) -> list[str]:
        return self.sock.recv(4096).decode().split("\n")

    def take(self, line: str) -> list[str]:
        """Wait for a message with a line."""
        while line not in (found := self.next()):
            pass
        return found

    def rest(self) -> list[str]:
        """All that has come and was not taken."""
        self.sock.setblocking(False)
        found = []
        try:
            while True:
                found += self.next()
        except BlockingIOError:
            return found


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.sock.close()


def systemd(manager: Manager, **more: str) -> Systemd:
    return Systemd({"NOTIFY_SOCKET": manager.path, **more})


def test_Q16_a_store_tells_when_it_is_ready_lives_and_ends(
    tmp_path: Path, manager: Manager
) -> None:
    asked = {"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "300000"}
    nvme = f'[nvme]\npath = "{tmp_path}/kv"\ncapacity = "64MiB"\n'
    (tmp_path / "kv").mkdir(mode=0o700)
    with StoreProcess(tmp_path, "64MiB", nvme, environment=asked) as store:
        ready = manager.next()
        assert ready[0] == "READY=1", "the first that it tells"
        assert ready[1].startswith("STATUS=serving")
        with client(store):
            pass
        for _ in range(3):
            manager.take("WATCHDOG=1")
        children = psutil.Process(store.pid).children(recursive=True)
        assert children
        assert not any("NOTIFY_SOCKET" in child.environ() for child in children)
    assert "STATUS=the store is ending" in manager.take("STOPPING=1")
    assert "READY=1" not in manager.rest()


def test_Q16_a_loop_that_stands_still_gives_no_sign_of_life(
    tmp_path: Path, manager: Manager
) -> None:
    bad_tiers.Holds.go.clear()
    tier = {"class": "tests.harness.bad_tiers:Holds", "name": "bad", "options": {"waits": True}}
    made = LiveStore(store_settings(tmp_path / "store", tier=[tier]))
    told = systemd(manager, WATCHDOG_USEC="100000", WATCHDOG_PID=str(os.getpid()))
    made.server.health = Health(made.server.store.tier_states, told)
    with made as store:
        manager.take("READY=1")
        manager.take("WATCHDOG=1")
        try:
            with engine(store) as live:
                live.put(hashes(1))
                eventually(lambda: time.monotonic_ns() - store.server.health._turn_ns > 3 * 10**8)
                manager.rest()
                time.sleep(0.3)
                assert manager.rest() == []
                bad_tiers.Holds.go.set()
                manager.sock.settimeout(WAIT_S)
                manager.take("WATCHDOG=1")
        finally:
            bad_tiers.Holds.go.set()


def test_Q16_three_signs_of_life_are_given_in_the_time_that_is_asked_for(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_STATUS_NS", 1 << 62)
    found = Health(dict, systemd(manager, WATCHDOG_USEC="6000000"))
    for tick in range(100, 200):  # of 200 ms, as an idle loop
        found.turned(tick * 200_000_000)
    assert manager.rest() == ["WATCHDOG=1"] * 10


@pytest.mark.parametrize("asked", [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1" * 16}])
def test_Q16_no_sign_of_life_is_given_that_is_not_asked_for(
    manager: Manager, asked: dict[str, str]
) -> None:
    assert systemd(manager, **asked).watchdog_ns == 0
    assert systemd(manager, WATCHDOG_USEC="5", WATCHDOG_PID="1").watchdog_ns == 0
    assert systemd(manager, WATCHDOG_USEC="5").watchdog_ns == 5_000


def test_Q16_the_status_says_in_words_what_is_wrong(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_STATUS_NS", 0)
    states = {"nvme": "loading"}
    found = Health(lambda: states, systemd(manager))
    found.serves()
    assert manager.next() == ["READY=1", "STATUS=serving; tier nvme is reading its index"]
    assert found.not_ready() == [], "engines are taken, and compute what is not found yet"
    for state, words in (
        ("ok", "serving"),
        ("read_only", "serving; tier nvme is read only"),
        ("off", "serving; tier nvme is off"),
    ):
        states["nvme"] = state
        for _ in range(3):
            found.turned(time.monotonic_ns())
        assert manager.rest() == [f"STATUS={words}"], "once"
    found.ends()
    found.copied = "12 of 400"
    found.turned(time.monotonic_ns())
    assert manager.rest()[-1] == (
        "STATUS=the store is ending; copied 12 of 400 blocks that only memory had; tier nvme is off"
    )


def test_Q16_the_socket_can_have_a_name_without_a_file(tmp_path: Path) -> None:
    abstract = Manager(Path(f"@{tmp_path.name}-{os.getpid()}"))
    environment = {"NOTIFY_SOCKET": abstract.path}
    Systemd(environment).tell("READY=1", status="a\nb" + "c" * STATUS_MAX)
    ready, status = abstract.next()
    assert ready == "READY=1"
    assert status.startswith("STATUS=a\\nbc")
    assert not environment
    abstract.sock.close()


def test_Q16_a_manager_that_does_not_read_holds_nothing_up(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    told = systemd(manager)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for _ in range(10_000):
            told.tell("WATCHDOG=1")
    assert time.monotonic() - started < 5
    (line,) = caplog.messages
    assert line.startswith("systemd cannot be told WATCHDOG=1: ")
    manager.rest()
    told.tell("READY=1")
    assert manager.rest() == ["READY=1"], "it is told again as soon as it reads"
    Systemd({}).tell("READY=1")  # without one, nothing is told


# The unit file


def setting(name: str) -> str:
    (found,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(found)


def seconds(name: str) -> float:
    return parse_duration_ns(f"{setting(name)}s") / 1e9


def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        text = "there is no `systemd-analyze` (Debian: apt-get install systemd)"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return program


def test_Q18_systemd_takes_the_unit_file_without_a_word(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    program = shlex.split(setting("ExecStart"))[0]
    unit.write_text(UNIT.read_text().replace(program, "/bin/true"))
    done = subprocess.run(
        [analyze(), "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_Q18_the_unit_file_leaves_a_store_little_to_do_harm_with() -> None:
    command = [analyze(), "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "Overall exposure level" in done.stdout
    assert "exposure level below 2.0" in (ROOT / "docs/operate/install.md").read_text()


def test_Q18_the_unit_file_is_in_agreement_with_the_store() -> None:
    assert setting("ExecReload") == "/bin/kill -HUP $MAINPID"
    assert setting("Type") == "notify"
    program, *arguments = shlex.split(setting("ExecStart"))
    assert Path(program).name == "kvstore"
    assert cli._parser().parse_args(arguments).config == Path("/etc/kvstore/kvstore.toml")
    assert setting("RestartPreventExitStatus") == "2"
    assert seconds("TimeoutStopSec") >= server._FLUSH_LIMIT_S + 30
    assert seconds("WatchdogSec") > 2 * health.STILL_S
