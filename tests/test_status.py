"""`kvstore status`, `kvstore top` and the status page, of real stores."""

from __future__ import annotations

import fcntl
import html
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from setuptools.dist import Distribution

from kvstore import cli
from kvstore.config import ServerConfig
from kvstore.metrics import Numbers
from kvstore.settings import settings_of
from kvstore.store import admin
from kvstore.store.status import (
    HISTORY_S,
    SAMPLE_S,
    EngineStatus,
    Finding,
    History,
    ModelStatus,
    Prediction,
    Status,
    TenantStatus,
    TierStatus,
    Tokens,
    status_of,
)
from kvstore.store.top import rates_of
from kvstore.wire import engine as p
from tests.harness import browser
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, engine, eventually, store_settings
from tests.harness.pages import ROOT, text
from tests.harness.patience import WAIT_S
from tests.test_health import Port

EVIL = "<img src=x onerror=document.title='owned'>[red]\x1b[31m"  # a model's name
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Watched:
    """A store with a disk and an endpoint, and what its commands print."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str] | None = None) -> None:
        self.port, self._folder, self._capsys = Port(), folder, capsys
        nvme = {"path": f"{folder}/disk", "capacity": "64MiB", "extent": "4MiB"}
        server = {"socket": f"{folder}/kv.sock", "metrics": f"127.0.0.1:{self.port.number}"}
        cpu = {"capacity": "256MiB", "extent": "16MiB"}
        self.settings = store_settings(folder, server=server, nvme=nvme, cpu=cpu)
        self.path = self.settings.server.socket

    def __call__(self, *arguments: str) -> str:
        assert self._capsys is not None
        assert cli.main([*arguments, "--store", self.path]) == 0
        return self._capsys.readouterr().out

    def page(self) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.port.get("/status.json")[1])


@pytest.fixture
def watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Watched:
    return Watched(tmp_path, capsys)


def test_Q43_commands_find_the_store_at_its_default_socket(
    capsys: pytest.CaptureFixture[str],
) -> None:
    default = settings_of(ServerConfig)["socket"].default
    if Path(str(default)).exists():
        pytest.skip(f"there is a store at {default}")
    for command in ("status", "top", "stats", "clear", "drain", "reload"):
        assert cli.main([command]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"no store answers at unix://{default}: No such file" in line
        assert line.endswith("--store names another one")


def used(store: LiveStore, live: Any, hit: int = 60) -> None:  # noqa: ANN401 - an engine
    """Store three blocks, and look up a hundred tokens."""
    before = admin.status(store.path)
    live.put(hashes(3))
    missed = {"never_seen": 100 - hit}
    live.scheduler.send(
        p.Step((), lookup_tokens=100, hit_tokens={"cpu": hit}, missed_tokens=missed)
    )

    def done() -> bool:
        now = admin.status(store.path)
        memory, disk = now.tiers
        tokens = now.since_start.since(before.since_start)
        stored_bytes = memory.stored_bytes - before.tiers[0].stored_bytes
        return (tokens.looked_up, stored_bytes, disk.stored_bytes) == (100, 3 << 20, 3 << 20)

    eventually(done)


def test_Q44_Q48_status_says_how_a_store_is_in_words_and_as_one_object(watched: Watched) -> None:
    with LiveStore(watched.settings) as store, engine(store, "9f0c", model=EVIL) as live:
        used(store, live)
        out = watched("status")
        shown = EVIL.replace("\x1b", "?")
        for words in (
            "ready, nothing wrong now",
            "60.0 % of 100 tokens (cpu 60.0 %) since the start",
            "in the last",
            "never_seen 40.0 %",
        ):
            assert words in out
        assert re.search(r"^cpu +ok +[#.]+ +16 MiB +256 MiB", out, re.MULTILINE)
        assert re.search(r"^nvme +ok +#\.+ .* 64 MiB +3 MiB +0 B +0.0 s", out, re.MULTILINE)
        line = rf"^{re.escape(shown)}  ([0-9a-f]{{12}}) +(.*)$"
        (model,) = re.findall(line, out, re.MULTILINE)
        assert model[1].split()[:7] == ["3", "MiB", "3", "MiB", "100", "60.0", "%"]
        assert "16 tokens  1 MiB" in model[1]
        line = rf"^{re.escape(shown)} +{os.getpid()} +1  active  {model[0]}  9f0c *$"
        assert re.search(line, out, re.MULTILINE), out
        as_json, page = json.loads(watched("status", "--json")), watched.page()
        for told in (as_json, page):
            assert told["since_start"]["hit"] == {"cpu": 60, "nvme": 0}
            assert told["engines"][0]["pid"] == os.getpid()
            assert told["engines"][0]["worker_pids"] == [os.getpid()]
        assert as_json.keys() == page.keys()


def test_every_field_of_the_object_is_explained() -> None:
    page = text("docs/operate/status.md").partition("## As JSON")[2]
    for kind in (
        Status,
        Tokens,
        TierStatus,
        ModelStatus,
        EngineStatus,
        TenantStatus,
        Prediction,
        Finding,
    ):
        missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in page]
        assert not missing, kind


def test_Q44_the_last_minute_is_apart_from_all_since_the_start() -> None:
    numbers = Numbers()
    numbers.start(["cpu"])
    history = History(numbers)
    second = 1_000_000_000
    for now_s in range(1, 3 * HISTORY_S, SAMPLE_S // 2):
        hit = 10 if now_s > 3 * HISTORY_S - 120 else 1
        numbers.add("kvstore_lookup_tokens", "ns", by=10)
        numbers.add("kvstore_hit_tokens", "ns", "cpu", by=hit)
        history.tick(now_s * second)
    assert len(history.samples) == HISTORY_S // SAMPLE_S, "an hour, however long it runs"
    apart = {
        later.seconds - sooner.seconds
        for sooner, later in zip(history.samples, history.samples[1:], strict=False)
    }
    assert apart == {SAMPLE_S}
    up_s = history.uptime_s(now_s * second)
    found = status_of(numbers.values(), ["cpu"], [], [], history.samples, up_s)
    assert found.last_minute.hit["cpu"] == found.last_minute.looked_up > 0
    assert found.last_minute.seconds == pytest.approx(60, abs=SAMPLE_S)
    since_start = found.since_start
    assert since_start.hit["cpu"] / since_start.looked_up == pytest.approx(0.1, abs=0.01)


def test_Q45_what_is_wrong_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = Port()
    with LiveStore(port.settings(tmp_path, "Bad", raises=["poll"])) as store:
        with engine(store) as live:
            live.put(hashes(1))
            eventually(lambda: not admin.status(store.path).ready)
            live.worker.close()  # without a goodbye
        eventually(lambda: len(admin.status(store.path).findings) == 2)
        next(admin.drain(store.path))
        assert cli.main(["status", "--store", store.path]) == 0
        head, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert head.endswith("not ready, 2 wrong now")
    for line, what, todo in zip(
        lines,
        (
            "the store is draining",
            "tier bad is off",
            "engines that were killed or crashed: 1 since",
        ),
        ("--cancel takes engines again", "after a restart", "out-of-memory killer"),
        strict=True,
    ):
        assert line.startswith(f"  {what}")
        assert todo in line


def test_Q48_a_number_of_an_engine_that_is_none_is_0() -> None:
    for tokens, expected in (("16", 16), ("9" * 90, 0), ("-1", 0), ("many", 0)):
        info: dict[tuple[str, ...], float] = {
            ("kvstore_namespace_info", "ns", "model", "dtype", tokens, "4096"): 1
        }
        found = status_of(info, ["cpu"], [], [], (), 1.0)
        as_json = json.loads(msgspec.json.encode(found))
        assert as_json["models"][0]["block_tokens"] == expected


@pytest.mark.parametrize(
    ("name", "labels", "value", "words"),
    [
        ("kvstore_tiers", ("nvme", "read_only"), 1, "tier nvme is read_only"),
        ("kvstore_tiers", ("nvme", "loading"), 1, "tier nvme is loading"),
        ("kvstore_queue_seconds", ("nvme",), 9.4, "queue nvme has waited for 9 s"),
        ("kvstore_tier_stalled_seconds", ("nvme", "read"), 7, "no read has returned for 7 s"),
        ("kvstore_write_budget_bytes", ("nvme", "left"), -5, "the write budget of tier nvme is"),
        ("kvstore_refused", ("user",), 3, "connections of users without permission: 3"),
        ("kvstore_tier_blocks", ("ns", "nvme", "damaged"), 2, "blocks that a lower tier lost: 2"),
    ],
)
def test_Q45_each_trouble_has_a_way_out(
    name: str, labels: tuple[str, ...], value: float, words: str
) -> None:
    well: dict[tuple[str, ...], float] = {
        ("kvstore_write_budget_bytes", "nvme", "day"): 9,
        ("kvstore_write_budget_bytes", "nvme", "left"): 9,
        ("kvstore_queue_seconds", "nvme"): 0,
        ("kvstore_tiers", "nvme", "ok"): 1,
    }

    def findings(values: dict[tuple[str, ...], float]) -> list[Finding]:
        return status_of(values, ["cpu", "nvme"], [], [], (), 1.0).findings

    assert findings(well) == []
    troubled = {**well, (name, *labels): value}
    if name == "kvstore_tiers":
        del troubled["kvstore_tiers", "nvme", "ok"]
    (found,) = findings(troubled)
    assert words in found.what
    assert len(found.todo) > 10
    assert found.now == (name not in {"kvstore_refused", "kvstore_tier_blocks"})


class Terminal:
    """`kvstore top` in a terminal of 80 columns and 24 lines."""

    def __init__(self, store: str, term: str = "xterm") -> None:
        self._main, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._child = child
        self.before = termios.tcgetattr(child)
        environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
        command = [sys.executable, "-m", "kvstore.cli", "top", "--every", "200ms", "--store", store]
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env={**environment, "TERM": term}
        )
        self.output = ""

    def wait_for(self, what: str, times: int = 1) -> None:
        """Read until something was printed so often after what was asked for before."""
        from_here = len(self.output)
        end = time.monotonic() + WAIT_S
        while self.output.count(what, from_here) < times:
            assert time.monotonic() < end, self.output
            if select.select([self._main], [], [], 0.1)[0]:
                self.output += os.read(self._main, 1 << 16).decode()

    def frames(self) -> list[list[str]]:
        """What was shown, as lines, without the last frame, which may not have ended."""
        _, *frames = self.output.split("\x1b[H")
        return [ANSI.sub("", frame).replace("\r", "").split("\n") for frame in frames[:-1]]

    def ends(self) -> int:
        """Wait for its end; the terminal is as it was."""
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end
            if select.select([self._main], [], [], 0.05)[0]:
                self.output += os.read(self._main, 1 << 16).decode()
        assert termios.tcgetattr(self._child) == self.before
        return self.process.returncode

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._child)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for each in opened:
        each.close()


def opened(terminals: list[Terminal], store: str, term: str = "xterm") -> Terminal:
    terminals.append(Terminal(store, term))
    return terminals[-1]


def test_Q46_top_keeps_within_80_columns_and_24_lines(
    watched: Watched, terminals: list[Terminal]
) -> None:
    with LiveStore(watched.settings) as store, ExitStack() as stack:
        for number in range(11):
            name = f"{number}-{'long' * 60}"
            live = stack.enter_context(engine(store, name, model=f"{EVIL} {name}"))
            live.put(hashes(2, name))
        top = opened(terminals, store.path)
        top.wait_for("nothing wrong now", 4)
        for lines in (frames := top.frames()):
            assert len(lines) <= 24
            assert max(map(len, lines)) <= 80, lines
        shown = "\n".join(frames[-1])
        for words in ("a second: 0 tokens looked up", "cpu ", "nvme ", "not shown: ", EVIL[:20]):
            assert words in shown
        assert re.search(r"\S+… +\d+ +1  active", shown), "an engine by model, process, ranks"
        top.press("q")
        assert top.ends() == 0


def test_Q46_top_shows_a_store_that_is_gone_and_waits_for_it(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    settings = store_settings(tmp_path)
    with LiveStore(settings) as store:
        top = opened(terminals, store.path)
        top.wait_for("nothing wrong now", 2)
    top.wait_for("no store answers at")
    with LiveStore(settings):
        top.wait_for("nothing wrong now", 2)
        assert "no store answers" not in "".join(top.frames()[-1])
        top.process.send_signal(signal.SIGINT)
        assert top.ends() == 130
    assert "Traceback" not in top.output
    assert top.output.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_Q46_top_needs_no_terminal_and_no_clever_one(
    watched: Watched, terminals: list[Terminal]
) -> None:
    with LiveStore(watched.settings) as store, engine(store) as live:
        used(store, live)
        dumb = opened(terminals, store.path, "dumb")
        dumb.wait_for("nothing wrong now", 2)
        dumb.press("q")
        assert dumb.ends() == 0
        assert "\x1b" not in dumb.output
        assert max(map(len, dumb.output.splitlines())) <= 80
        once = watched("top", "--once", "--every", "100ms")
        assert once.count("kvstore ") == 1
        assert "a second: 0 tokens looked up" in once
        found = json.loads(watched("top", "--once", "--json", "--every", "100ms"))
        assert found["each_second"]["looked_up_tokens"] == 0
        assert found["each_second"]["seconds"] >= 0.1


def test_Q46_rates_are_what_came_between_two_looks(watched: Watched) -> None:
    with LiveStore(watched.settings) as store, engine(store) as live:
        used(store, live)
        before = admin.status(store.path)
        used(store, live, hit=100)
        now = admin.status(store.path)
    rates = rates_of(now, before)
    assert rates is not None
    assert rates.looked_up_tokens * rates.seconds == pytest.approx(100)
    assert rates.hit_tokens * rates.seconds == pytest.approx(100)
    assert rates.tiers["cpu"][0] * rates.seconds == pytest.approx(3 << 20)
    assert rates_of(before, now) is None, "another store's start is no rate"


def test_Q47_the_page_loads_nothing_and_lets_nothing_load(watched: Watched) -> None:
    with LiveStore(watched.settings):
        eventually(watched.port.ready)
        answer, body = watched.port.ask("/")
        assert watched.port.get("/status.html")[0] == 404
    policy = dict(
        part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["script-src"])
    assert "unsafe" not in str(policy)
    assert not re.search(rb"https?:|//[a-z]|@import|url\(|innerHTML|insertAdjacent|eval\(", body)
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"


def test_Q47_the_page_is_in_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = Distribution()
    found.parse_config_files()
    build: Any = found.get_command_obj("build_py")
    build.ensure_finalized()
    build.manifest_files = {}  # what is there without package-data: nothing
    assert "kvstore.store" in build.packages
    found_there = build.find_data_files("kvstore.store", "kvstore/store")
    assert found_there == ["kvstore/store/status.html"]


def rows_of(page: str, table: str) -> list[list[str]]:
    """The cells of a table in a browser's document."""
    body = (
        page.partition(f'<table id="{table}"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    )
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("</tr>")]
    return [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells if row]


def test_Q48_the_page_shows_the_store_in_a_real_browser(watched: Watched, tmp_path: Path) -> None:
    chromium = browser.program()
    url = f"http://127.0.0.1:{watched.port.number}/"
    with LiveStore(watched.settings) as store:
        with engine(store, EVIL, model=EVIL) as live:
            used(store, live)
            live.ask(hashes(1, "mine"))
            page = browser.browse(chromium, tmp_path, url, "--dump-dom")
        store.stop()
        gone = tmp_path / "gone.html"
        gone.write_bytes((ROOT / "kvstore/store/status.html").read_bytes())
    assert "<title>kvstore</title>" in page, "no name is run as a script"
    assert "<img" not in page
    assert "ready, up 0.0 h; nothing wrong now" in page
    assert [row[:2] for row in rows_of(page, "tiers")] == [["cpu", "ok"], ["nvme", "ok"]]
    assert rows_of(page, "from")[0] == ["hit in cpu", "60", "60", "60.0 %"]
    assert ["missed: never_seen", "-", "40", "40.0 %"] in rows_of(page, "from")
    curves = rows_of(page, "curves")
    shown = EVIL.replace("\x1b", "?")
    assert [row[:2] for row in curves] == [[shown, "cpu"], [shown, "nvme"]]
    assert all(re.search(r"\d\.\d %$", cell) for row in curves for cell in row[2:])
    (model,) = rows_of(page, "models")
    (who,) = rows_of(page, "engines")
    assert model[0] == EVIL.replace("\x1b", "?")
    assert (model[4:8], who[1:4]) == (
        ["3", "3", "100", "60.0 %"],
        [str(os.getpid()), "1", "active"],
    )
    assert who[5] == EVIL.replace("\x1b", "?")
    silent = browser.browse(chromium, tmp_path, gone.as_uri(), "--dump-dom")
    assert "no answer from the store" in silent
