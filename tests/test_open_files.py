"""Each extent is an open file: of those that a process may have, some are left for connections."""

from __future__ import annotations

import contextlib
import itertools
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore import check, clock, config
from kvstore.check import Level
from kvstore.core.errors import ConfigError
from kvstore.open_files import DISK_PART, MEMORY_PART, extents_max, files_max
from kvstore.store import admin
from tests.harness.fakes import hashes
from tests.harness.live import LiveEngine, LiveStore, engine, eventually, store_settings
from tests.harness.nvme_blocks import MIB, settings_for, shelf
from tests.harness.nvme_trouble import wait
from tests.harness.patience import WAIT_S
from tiers.nvme import files
from tiers.nvme.directory import Directory
from tiers.nvme.refusals import refuse


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the system allow so many open files, as far as it is asked."""
    real = resource.getrlimit

    def limit(most: int) -> None:
        limits = {resource.RLIMIT_NOFILE: (most, most)}
        monkeypatch.setattr(resource, "getrlimit", lambda what: limits.get(what) or real(what))

    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    return limit


def test_S5_a_store_with_few_open_files_takes_engines_and_its_disk_goes_on(
    tmp_path: Path,
) -> None:
    """Extents took all, the disk was read-only for ever, and no engine got in."""
    settings = tmp_path / "kvstore.toml"
    settings.write_text(
        f'[server]\nsocket = "{tmp_path}/kv.sock"\nmetrics = ""\n'
        '[cpu]\ncapacity = "16MiB"\n'
        f'[nvme]\npath = "{tmp_path}/kv"\ncapacity = "512MiB"\nextent = "2MiB"\n'
    )
    serve = f"ulimit -n 96; exec {sys.executable} -m kvstore.cli serve --config {settings}"
    log = tmp_path / "log"
    with log.open("w") as told:
        process = subprocess.Popen(["/bin/bash", "-c", serve], stderr=told)
    try:
        eventually(lambda: "listening at" in log.read_text())
        store = SimpleNamespace(path=f"{tmp_path}/kv.sock")
        with engine(store, page_bytes=MIB // 2) as live:
            address = f"unix://{tmp_path}/kv.sock"
            for number in range(300):
                live.put(hashes(1, f"{number}"))
            more = itertools.count(300)  # a slow disk takes some of them only
            while number_of(address, "kvstore_tier_blocks", "nvme", "stored") < 60:
                live.put(hashes(1, f"{next(more)}"))
            files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            assert files < 96 - 8, "some are left"
            assert number_of(address, "kvstore_tiers", "nvme", "ok") == 1
            assert number_of(address, "kvstore_slots", "used") > 0
        with engine(store, "another", page_bytes=MIB // 2) as live:
            assert live.active is not None
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
    text = log.read_text()
    assert "read_only" not in text
    assert "a connection cannot be taken" not in text
    assert "256 extents of 2 MiB; the limit of 96 open files allows 48" in text


def number_of(address: str, name: str, *labels: str) -> float:
    """Add the numbers of this name that have these labels."""
    found = admin.stats(address)
    return sum(
        one.value for one in found if one.name == name and set(labels) <= set(one.labels.values())
    )


def test_S5_memory_gets_a_part_of_the_open_files(
    tmp_path: Path, limited: Callable[[int], None]
) -> None:
    limited(12)
    cpu = {"capacity": "64MiB", "extent": "2MiB"}
    config = store_settings(tmp_path, cpu=cpu)
    with LiveStore(config) as store, engine(store, page_bytes=MIB // 8) as live:
        mapping = threading.Thread(target=map_all, args=(live,))
        mapping.start()
        for number in range(100):
            live.put(hashes(1, f"{number}"))
        (namespace,) = store.server.store.namespaces.values()
        assert namespace.live_extents == 12 // MEMORY_PART
        assert store.server._pool.used_bytes == 12 // MEMORY_PART * 2 * MIB
        live.worker.sock.shutdown(socket.SHUT_RDWR)
        mapping.join()


def map_all(live: LiveEngine) -> None:
    """Map extents as they come, until its worker's connection is closed."""
    with contextlib.suppress(AssertionError):
        while True:
            live.map_extent()


def test_S5_a_disk_gets_a_part_of_the_open_files_and_evicts(
    tmp_path: Path, limited: Callable[[int], None]
) -> None:
    limited(6)
    with shelf(settings_for(tmp_path / "kv")) as found:
        found.fill(40)
        found.settle()
        assert len(found.tier.space.extents) == 6 // DISK_PART
        assert found.tier.space.counts["evicted"]


def test_a_disk_is_full_while_no_file_can_be_opened_and_not_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections may have taken all."""
    with shelf(settings_for(tmp_path / "kv")) as found:
        found.put(0, 0, 5)

        def scarce(*_: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(Directory, "make_extent", scarce)
            found.fill(20)
            assert found.disk.state == "ok"
            assert len(found.tier.space.extents) == 1
        room = found.disk.attached.room
        assert not room.stuck
        room._full_until_s = clock.now_s()
        found.fill(20)
        wait(found, lambda: len(found.tier.space.extents) > 1)


def test_an_extent_that_cannot_be_opened_once_it_is_made_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try left one, which nobody counted, beyond the capacity."""
    opened = files.open_direct

    def scarce(path: Path, *, make: bool = False, folder: int | None = None) -> int:
        if not make:
            raise OSError(24, "Too many open files")
        return opened(path, make=make, folder=folder)

    with shelf(settings_for(tmp_path / "kv")) as found:
        found.put(0, 0, 5)
        monkeypatch.setattr(files, "open_direct", scarce)
        found.fill(20)
        assert found.disk.state == "ok"
        assert len(list((tmp_path / "kv").glob("*.extent"))) == 1


def test_S6_a_disk_with_more_extents_than_files_can_be_opened_is_refused(
    tmp_path: Path, limited: Callable[[int], None]
) -> None:
    settings = settings_for(tmp_path / "kv")
    with shelf(settings) as found:
        found.fill(20)
    count = len(list((tmp_path / "kv").glob("*.extent")))
    refuse(settings)
    limited(count + 63)
    expected = f"it has {count} extents, and the limit of open files is {count + 63}, expected"
    with pytest.raises(ConfigError, match=expected):
        refuse(settings)
    limited(count + 64)
    refuse(settings)


def test_S6_check_says_how_much_of_a_capacity_the_limit_of_open_files_leaves(
    tmp_path: Path, limited: Callable[[int], None]
) -> None:
    limited(1024)
    nvme = {"path": f"{tmp_path}/kv", "capacity": "1TiB"}
    settings = config.parse({"cpu": {"capacity": "300GiB"}, "nvme": nvme})
    noted = {f.what: f.text for f in check.notes(settings) if "open files" in f.text}
    limit = "the limit of 1,024 open files allows"
    way_out = "raise it (ulimit -n, LimitNOFILE), or use larger extents"
    assert noted == {
        "cpu": f"300 extents of 1 GiB; {limit} 256, 256 GiB: {way_out}",
        "nvme": f"1,024 extents of 1 GiB; {limit} 512, 512 GiB: {way_out}",
    }
    limited(2048)
    assert not [f for f in check.notes(settings) if "open files" in f.text]
    assert {f.level for f in check.notes(settings)} == {Level.NOTE}


def test_all_files_that_the_system_allows_can_be_opened() -> None:
    asks = "from kvstore.open_files import *; print(files_max(), extents_max(2))"
    script = f"ulimit -S -n 40; ulimit -H -n 100; {sys.executable} -c '{asks}'"
    command = ["/bin/bash", "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "100 50\n"


def test_no_limit_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (endless, endless))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert files_max() > 1 << 60
    assert extents_max(DISK_PART) > 1 << 60
