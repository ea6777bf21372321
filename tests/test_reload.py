"""SIGHUP and `kvstore reload`: what changes in a running store, what is named, what may hang."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from kvstore import cli
from kvstore.config import Config, ConfigFile, TierConfig, of_text
from kvstore.core.errors import ConfigError
from kvstore.core.limits import TENANTS_MAX
from kvstore.settings import settings_of
from kvstore.store import admin, edge_thread
from kvstore.store.live_settings import LIVE, LiveSettings
from kvstore.wire import engine as p
from kvstore.wire.credentials import Process
from tests.bench.store import StoreProcess
from tests.harness.live import Client, LiveEngine, LiveStore, engine, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.script import hashes

END_S = 5.0  # that a store may take to end
BEFORE = """
[server]
socket = "{socket}"
metrics = ""
[cpu]
capacity = "32MiB"
extent = "16MiB"
[nvme]
path = "{folder}/kv"
capacity = "128MiB"
extent = "16MiB"
[peer]
[[tier]]
class = "tests.reference.memory_tier:MemoryTier"
name = "shelf"
"""


class Reloads:
    """A file of settings, and a store that was started with it."""

    def __init__(self, folder: Path, server: str = "") -> None:
        self.path = folder / "kvstore.toml"
        self.text = BEFORE.format(socket=folder / "kv.sock", folder=folder)
        self.text = self.text.replace("[cpu]", f"{server}\n[cpu]")
        self.path.write_text(self.text)
        data = self.path.read_bytes()
        self.store = LiveStore(of_text(data, self.path), ConfigFile.of(self.path, data))
        self.address = f"unix://{self.store.path}"

    @property
    def running(self) -> Config:
        return self.store.server.store.settings.running

    def change(self, *pairs: tuple[str, str]) -> dict[str, tuple[str, str, bool]]:
        """Write other settings, and reload them: found and running value by setting."""
        for old, new in pairs:
            assert old in self.text
            self.text = self.text.replace(old, new)
        self.path.write_text(self.text)
        found = admin.reload(self.address)
        return {d.setting: (d.found, d.running, d.live) for d in found.differing}


@pytest.fixture
def reloads(tmp_path: Path) -> Reloads:
    return Reloads(tmp_path)


def test_Q21_what_can_change_does_while_engines_are_attached(reloads: Reloads) -> None:
    with reloads.store as store, engine(store) as one:
        one.put(hashes(2))
        found = reloads.change(
            ('capacity = "32MiB"', 'capacity = "64MiB"'),
            ('capacity = "128MiB"', 'capacity = "256MiB"\nbacklog = "3s"\nwrite_budget = "1GiB"'),
            ("[peer]", '[engine]\nlease = "7s"\npromote = "3s"\ndefer = "1s"\n[peer]\nheld="8MiB"'),
            ('name = "shelf"', 'name = "shelf"\nbacklog = "4s"'),
        )
        assert all(live for *_, live in found.values()), found
        assert found["cpu capacity"] == ("64MiB", "32MiB", True)
        assert found["engine promote"] == ("3s", "2s", True)
        assert found["nvme write_budget"] == ("1GiB", "none", True)
        server = store.server
        (namespace,) = server.store.namespaces.values()
        assert server._pool.capacity_bytes == 64 << 20
        assert server._disk is not None
        assert server._disk.capacity_bytes == 256 << 20
        assert {n: q.backlog.limit_ns for n, q in namespace.tiering.queues.items()} == {
            "nvme": 3 * 10**9,
            "shelf": 4 * 10**9,
        }
        assert namespace.tiering.queues["nvme"].budget.day_bytes == 1 << 30
        assert server.store.settings.running.engine.lease_ns == 7 * 10**9
        assert server._peers is not None
        assert server._peers.producer.held.bytes_max == 8 << 20
        assert server._peers.producer.request_leases.held_bytes_max == 8 << 20
        assert server._peers.waits.quiet_ns == 3 * 10**9
        assert one.ask(hashes(2)).lease_ms == 7_000
        assert reloads.change() == {}, "nothing differs any more"
        found = reloads.change(('capacity = "64MiB"', "capacity = 67108865"))
        assert found["cpu capacity"] == ("67108865", "67108864", True), "rounded, they are equal"


def test_Q21_what_cannot_change_is_named_with_both_values(
    reloads: Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with reloads.store:
        before = reloads.running
        found = reloads.change(
            ('extent = "16MiB"\n[nvme]', 'extent = "32MiB"\n[nvme]'),
            ('metrics = ""', 'metrics = "127.0.0.1:1"\nallow = [12345]'),
            ("[peer]\n", ""),
            ('name = "shelf"', 'name = "other"'),
        )
        assert not any(live for *_, live in found.values())
        assert found["server metrics"][:2] == ("127.0.0.1:1", "none")
        assert found["server allow"][:2] == ("12345", "none")
        assert found["cpu extent"][:2] == ("32MiB", "16MiB")
        assert found["peer listen"][:2] == ("none", "127.0.0.1:0")
        assert found["tier shelf backlog"][:2] == ("none", "10s")
        assert found["tier order"][:2] == ("other", "shelf")
        assert reloads.running == before
    text = "cpu extent: the file has 32MiB, the store runs with 16MiB until it is started again"
    assert sum(text in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('capacity = "32MiB"', 'capacity = "8MiB"', "[cpu] capacity: expected at least 16MiB"),
        ('capacity = "128MiB"', 'capacities = "1GiB"', "[nvme]: unknown capacities"),
        ("[peer]", "[peer", "not valid TOML"),
    ],
)  # fmt: skip
def test_Q21_a_wrong_file_changes_nothing_and_is_told_by_its_place(
    reloads: Reloads, capsys: pytest.CaptureFixture[str], old: str, new: str, says: str
) -> None:
    with reloads.store:
        before = reloads.running
        reloads.path.write_text(reloads.text.replace(old, new))
        status = cli.main(["reload", "--store", reloads.address])
        error = capsys.readouterr().err
        assert status == 2
        assert error.startswith(f"kvstore: error: nothing has changed: {reloads.path}: ")
        assert says in error
        assert len(error.splitlines()) == 1
        assert reloads.running is before


def test_Q21_a_tenant_too_many_changes_nothing(reloads: Reloads) -> None:
    """Memory had its new size then, and what runs was said to be what the file says."""
    with reloads.store:
        for number in range(TENANTS_MAX):
            admin.set_quota(reloads.address, f"t{number}", "cpu", 1 << 30)
        before = reloads.running
        more = reloads.text.replace('capacity = "32MiB"', 'capacity = "64MiB"')
        reloads.path.write_text(more + '\n[[tenant]]\nname = "new"\n')
        for _ in range(2):
            with pytest.raises(ConfigError, match="257 with those named since"):
                admin.reload(reloads.address)
        assert reloads.running is before
        reloads.path.write_text(reloads.text)
        assert not admin.reload(reloads.address).differing


def test_Q21_a_pipe_in_the_place_of_the_file_is_an_error_at_once(reloads: Reloads) -> None:
    with reloads.store:
        reloads.path.unlink()
        os.mkfifo(reloads.path)
        with pytest.raises(Exception, match="expected a file, found a device or pipe"):
            admin.reload(reloads.address)


def test_Q21_capacity_below_an_extent_of_the_running_store_is_refused() -> None:
    text = b'[cpu]\ncapacity = "64MiB"\nextent = "32MiB"'
    used: list[Config] = []
    settings = LiveSettings(of_text(text, "a"), 32 << 20, lambda config, _: used.append(config))
    with pytest.raises(Exception, match=r"at least 32MiB \(one extent of the running store\)"):
        settings.take_over(of_text(b'[cpu]\ncapacity = "16MiB"', "b"))
    assert not used


def test_Q21_every_setting_that_is_live_is_one_of_the_file() -> None:
    sections = {field.encode_name: field.type for field in _fields(Config)}
    for name, live in LIVE.items():
        kind: Any = TierConfig if name == "tier" else _kind(sections[name])
        assert set(live) <= set(settings_of(kind)), name


def _fields(kind: Any) -> Any:  # noqa: ANN401 - msgspec's
    import msgspec

    return msgspec.structs.fields(kind)


def _kind(hint: Any) -> Any:  # noqa: ANN401 - a section, or None
    return next((part for part in getattr(hint, "__args__", ()) if part is not type(None)), hint)


def test_Q21_users_who_are_not_allowed_any_more_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads = Reloads(tmp_path, "allow = [4711, 4712]")
    with reloads.store:
        found = reloads.change(("allow = [4711, 4712]", "allow = [4711]"))
        assert found == {"server allow": ("4711", "4711, 4712", True)}
        monkeypatch.setattr("kvstore.store.server.peer_process", lambda _: Process(1, 4712))
        with pytest.raises(admin.StoreRefused, match="uid 4712 may not attach"):
            admin.stats(reloads.address)


def test_a_private_store_says_that_it_has_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveStore(store_settings(tmp_path)) as store:
        store.server.hang_up()
        assert cli.main(["reload", "--store", f"unix://{store.path}"]) == 2
        assert "this store has no file of settings" in capsys.readouterr().err


# Processes


def in_time(done: Callable[[], object]) -> float:
    started = time.monotonic()
    done()
    return time.monotonic() - started


def test_Q20_a_file_system_that_hangs_holds_neither_lookups_nor_the_end(tmp_path: Path) -> None:
    """A FIFO without a writer: whoever opens it waits for ever."""
    store = StoreProcess(tmp_path, "16MiB", module="tests.harness.serve_hanging", scraped=False)
    with store, LiveEngine(store) as one:
        one.put(hashes(2))
        store.config_path.unlink()
        os.mkfifo(store.config_path)
        for _ in range(2):
            os.kill(store.pid, signal.SIGHUP)
            slowest = max(in_time(lambda: one.read(one.ask(hashes(2)))) for _ in range(50))
            assert slowest < 1
        with pytest.raises(Exception, match=r"not read within 0.5 s: its file system hangs"):
            admin.reload(store.address)
        for _ in range(2):
            with pytest.raises(Exception, match="nothing has changed"):
                admin.reload(store.address)
        with pytest.raises(Exception, match="calls of the file system hang: none is added"):
            admin.reload(store.address)
        process = psutil.Process(store.pid)
        process.terminate()
        try:
            assert in_time(lambda: process.wait(END_S)) < END_S
        finally:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert "Traceback" not in store.log_path.read_text()
    assert store.log_path.read_text().count("settings not reloaded") >= 4


def test_Q20_a_reload_without_a_thread_is_refused_and_the_next_one_works(
    reloads: Reloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under TasksMax. A name of the store's threads: those that cannot start."""
    start, refused = threading.Thread.start, {"kvstore-edge"}

    def scarce(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with reloads.store as store:
        for name in ("kvstore-edge", "kvstore-file"):
            refused.add(name)
            store.server.hang_up()
            for _ in range(5):  # more than may hang
                with pytest.raises(
                    ConfigError, match=r"nothing has changed: can't start .*TasksMax"
                ):
                    admin.reload(reloads.address)
            refused.clear()
            assert admin.reload(reloads.address).differing == []


def test_Q20_a_reload_for_which_no_descriptor_is_left_is_an_error_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short() -> NoReturn:
        raise OSError(24, "Too many open files")

    edge, file, told = edge_thread.EdgeThread(), tmp_path / "kvstore.toml", list[Future[Any]]()
    file.write_text('[cpu]\ncapacity = "64MiB"\n')
    for fails in (True, False):
        with monkeypatch.context() as patched:
            if fails:
                patched.setattr("asyncio.events.new_event_loop", short)
            edge.read_settings(file, told.append)
            eventually(lambda: edge.ended)
        edge.poll()
    assert isinstance(told[0].exception(), ConfigError)
    assert "Too many open files" in str(told[0].exception())
    assert told[1].result()[1].cpu.capacity_bytes == 64 << 20


def test_Q20_a_file_system_that_answers_after_all_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, bugs, told = threading.Event(), list[object](), list[Future[Any]]()

    def slow(_path: str, _flags: int) -> NoReturn:
        answers.wait(WAIT_S)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(threading, "excepthook", bugs.append)
    monkeypatch.setattr(edge_thread, "READ_S", 0.01)
    monkeypatch.setattr(edge_thread, "open_settings", slow)
    edge, file = edge_thread.EdgeThread(), tmp_path / "kvstore.toml"
    file.write_text('[cpu]\ncapacity = "64MiB"\n')
    edge.read_settings(file, told.append)
    eventually(lambda: edge.ended)
    edge.poll()
    assert "its file system hangs" in str(told[0].exception())
    answers.set()
    ours = {"kvstore-edge", "kvstore-file"}
    eventually(lambda: ours.isdisjoint(each.name for each in threading.enumerate()))
    assert not bugs


def test_Q20_many_reloads_at_once_are_read_once_or_twice_and_all_answered(tmp_path: Path) -> None:
    """The last of them sees what the file has by then; no file system is said to hang."""
    with StoreProcess(tmp_path, "16MiB", scraped=False) as store:
        asking = [Client(store.path) for _ in range(3)]
        for each in asking:
            each.send(*[p.Query("reload")] * 20)
            os.kill(store.pid, signal.SIGHUP)
        text = store.config_path.read_text()
        store.config_path.write_text(text.replace("16MiB", "48MiB"))
        os.kill(store.pid, signal.SIGHUP)
        for each in asking:
            for _ in range(20):
                assert b'"error":""' in each.take(p.Report).body
            each.close()
        eventually(lambda: "cpu capacity: 48MiB now, was 16MiB" in store.log_path.read_text())
    assert "file system hang" not in store.log_path.read_text()
    assert store.log_path.read_text().count("settings reloaded") < 20


def test_Q20_sighup_reloads_and_ends_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StoreProcess(tmp_path, "16MiB", scraped=False) as store, LiveEngine(store) as one:
        text = store.config_path.read_text()
        store.config_path.write_text(text.replace("16MiB", "48MiB"))
        os.kill(store.pid, signal.SIGHUP)
        log = store.log_path
        eventually(lambda: "cpu capacity: 48MiB now, was 16MiB" in log.read_text())
        one.put(hashes(2))
        assert len(one.read(one.ask(hashes(2)))) == 2
        capsys.readouterr()
        store.config_path.write_text(text.replace("16MiB", "32MiB"))
        assert cli.main(["reload", "--store", store.address, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [each["setting"] for each in told] == [
            *("cpu capacity", "engine credit", "engine leased", "engine pinned"),
        ]
        assert told[0] == {
            "setting": "cpu capacity",
            "found": "32MiB",
            "running": "48MiB",
            "live": True,
        }


def test_Q21_the_settings_page_lists_what_is_live() -> None:
    page = (Path(__file__).parent.parent / "docs/reference/config.md").read_text()
    rows = re.findall(
        r"^\| `\[+(\w+)\]+` \| (.+) \|$", page.partition("\n## Reload\n")[2], re.MULTILINE
    )
    assert {name: tuple(re.findall(r"`(\w+)`", row)) for name, row in rows} == LIVE
