"""Both movers against their contract, how one is chosen, and what each needs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvstore.config import MOVERS, NvmeConfig
from kvstore.core.errors import ConfigError
from tests.conformance import CheckedMove, MoverContract
from tests.harness.nvme_blocks import MIB, key, settings_for, shelf
from tiers.nvme import NvmeDisk, nixl_mover
from tiers.nvme.block_io import Mover, ThreadMover, mover_of, writers_of
from tiers.nvme.files import ExtentFile
from tiers.nvme.nixl_mover import NixlMover
from tiers.nvme.tier import Run


class TestThreads(MoverContract):
    @pytest.fixture(params=[(1, 1), (4, 2)], ids=["1", "4"])
    def mover(self, request: pytest.FixtureRequest) -> Iterator[Mover[Any]]:
        made: Mover[Any] = ThreadMover(*request.param)
        yield made
        made.close()


class TestNixl(MoverContract):
    @pytest.fixture(params=[*nixl_mover.ENGINES, "1"])
    def mover(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Mover[Any]]:
        """Each engine, and the first of them with one transfer at a time."""
        if request.param in nixl_mover.ENGINES:
            monkeypatch.setattr(nixl_mover, "ENGINES", (request.param,))
        made: NixlMover[Any] = NixlMover(*((1, 1) if request.param == "1" else (4, 2)))
        assert request.param in {"1", f"use_{made.engine}"}
        yield made
        made.close()


def disk_with(path: Path, mover: str, threads: int = 4, extent: int = 2 * MIB) -> NvmeConfig:
    return replace(settings_for(path), extent_bytes=extent, threads=threads, mover=mover)


@pytest.mark.parametrize(("mover", "kind"), [("threads", ThreadMover), ("nixl", NixlMover)])
def test_the_setting_chooses(tmp_path: Path, mover: str, kind: type) -> None:
    assert mover in MOVERS
    made: Mover[Any] = mover_of(disk_with(tmp_path, mover))
    assert isinstance(made, kind)
    made.close()


@pytest.mark.parametrize("mover", MOVERS)
def test_a_tier_written_with_one_is_read_with_the_other(tmp_path: Path, mover: str) -> None:
    other = next(name for name in MOVERS if name != mover)
    with shelf(disk_with(tmp_path / "kv", mover)) as before:
        before.put(1, 0, 30)
    with shelf(disk_with(tmp_path / "kv", other)) as after:
        assert after.get([key(1, index) for index in range(30)]).done == 30


def test_half_as_many_writes_as_reads_but_two() -> None:
    assert [writers_of(threads) for threads in (1, 4, 8, 64)] == [2, 2, 4, 32]


class Held:
    """A file whose writes are held; under: how many are under way."""

    def __init__(self) -> None:
        self.under = 0
        self.most = 0
        self.go = threading.Event()
        self.changes = threading.Lock()

    def write(self, _position: int, _blocks: list[memoryview]) -> None:
        with self.changes:
            self.under += 1
            self.most = max(self.most, self.under)
        self.go.wait(600)
        with self.changes:
            self.under -= 1


def test_sums_of_the_next_runs_are_taken_while_others_write() -> None:
    mover, file, seen = ThreadMover[CheckedMove](4, 2), Held(), list[str]()
    block = memoryview(bytes(512))
    for _ in range(6):
        move = CheckedMove(True, cast("ExtentFile", file), 0, [block])
        move.seen = seen
        mover.start(move)
    end = time.monotonic() + 600
    while (len(seen), file.under) != (6, 2):
        assert time.monotonic() < end, (seen, file.under)
        time.sleep(0.001)
    file.go.set()
    mover.close()
    assert (len(mover.poll()), file.most) == (6, 2)


# One request's blocks


@pytest.mark.parametrize(
    ("threads", "slots", "runs"),
    [
        (4, 64, [16, 16, 16, 16]),  # 8 MiB: all threads read
        (4, 6, [4, 2]),  # a run has 512 KiB at least
        (1, 64, [32, 32]),  # and 4 MiB at most
        (64, 64, [4] * 16),
    ],
)
def test_one_request_is_spread_over_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, slots: int, runs: list[int]
) -> None:
    settings = disk_with(tmp_path / "kv", "threads", threads, 16 * MIB)
    with shelf(settings, slot_bytes=128 << 10) as found:
        found.put(1, 0, 64)
        seen: list[int] = []
        start = found.disk.start

        def counted(run: Run) -> None:
            seen.append(len(run.blocks))
            start(run)

        monkeypatch.setattr(found.disk, "start", counted)
        assert found.get([key(1, index) for index in range(slots)]).done == slots
        assert seen == runs


# Without the plugin

SCRIPT = """
from tests.test_nvme_movers import disk_with
from kvstore.core.errors import ConfigError
from pathlib import Path
from tiers.nvme import NvmeDisk
import sys
try:
    NvmeDisk(disk_with(Path(sys.argv[1]), "nixl"))
except ConfigError as exc:
    print(exc)
NvmeDisk(disk_with(Path(sys.argv[1]), "threads")).close()
"""


def test_without_plugins_the_setting_is_refused_and_the_directory_is_free(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "kv")],
        env={**os.environ, "NIXL_PLUGIN_DIR": str(tmp_path / "plugins")},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'mover = "nixl": expected NIXL 1.5.1 or newer with its POSIX plugin' in done.stdout
    assert "No plugins available" in done.stdout
    assert len(done.stdout.splitlines()) == 1, "nothing else on standard output"


def test_engines_that_do_not_load_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_mover, "PLUGIN", "NONE")
    with pytest.raises(ConfigError, match=r"NONE plugin, found .*use_uring: .*use_aio: "):
        NvmeDisk(disk_with(tmp_path / "kv", "nixl"))


def test_an_old_nixl_is_refused_since_it_calls_short_reads_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: "1.5.0")
    with pytest.raises(ConfigError, match=r"expected NIXL 1\.5\.1 or newer.*found 1\.5\.0"):
        NvmeDisk(disk_with(tmp_path / "kv", "nixl"))
