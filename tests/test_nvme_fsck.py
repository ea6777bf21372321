"""`kvstore fsck`: what it finds in a tier's directory, what it drops, and what is left."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvstore import cli
from kvstore.config import NvmeConfig
from kvstore.core.errors import ConfigError, TierError
from tests.harness.nvme_blocks import SLOT_BYTES, SLOTS, key, settings_for, shelf
from tests.harness.nvme_damage import (
    CHAINS,
    COUNT,
    LENGTH,
    PART,
    SPACE,
    WHOLE,
    damage_index,
    extents,
    flip,
    index,
    opened,
    table_of,
)
from tiers.nvme import fsck
from tiers.nvme.fsck_report import Amount, FsckReport
from tiers.nvme.index_client import IndexProcess
from tiers.nvme.messages import EXTENTS, META

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with chains over two extents, closed in order."""
    path = tmp_path_factory.mktemp("filled") / "kv"
    with shelf(settings_for(path)) as before:
        before.fill(CHAINS, LENGTH)
    return path


@pytest.fixture
def settings(filled: Path, tmp_path: Path) -> NvmeConfig:
    """A copy of it."""
    return copy_of(filled, tmp_path / "kv")


def copy_of(filled: Path, path: Path) -> NvmeConfig:
    return settings_for(Path(shutil.copytree(filled, path)))


def examine(settings: NvmeConfig, *, repair: bool = False) -> FsckReport:
    return fsck.examine(Path(settings.path), repair=repair)


def counts(report: FsckReport) -> dict[str, int]:
    """All that is not zero."""
    return {f"{what}.{state}": a.count for what, state, a in report.rows() if a.count}


def contents(settings: NvmeConfig) -> dict[str, bytes]:
    folder = Path(settings.path)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def readable(settings: NvmeConfig) -> int:
    """Open the tier, read every block that it has, store more, and say how many there were."""
    with shelf(settings) as after:
        assert not after.tier.space.counts
        names = after.keys()
        for first in range(0, len(names), SLOTS):
            some = names[first : first + SLOTS]
            assert after.get(some).done == len(some)
        assert after.put(900, 0, 5).done == 5
        assert after.whole(900, 5)
    return len(names)


# What is found


def test_a_clean_directory_is_in_order_and_stays_as_it_is(settings: NvmeConfig) -> None:
    before = contents(settings)
    found = examine(settings)
    assert found.ok
    assert found.in_order
    assert counts(found) == {"blocks.ok": COUNT, "extents.ok": len(extents(settings))}
    assert found.blocks["ok"].bytes == found.read_bytes == COUNT * SLOT_BYTES
    assert found.extents["ok"].bytes == len(extents(settings)) * settings.extent_bytes
    assert found.used_bytes > found.extents["ok"].bytes
    assert contents(settings) == before


def test_any_block_size_and_several_namespaces(tmp_path: Path) -> None:
    for slot_bytes in (5000, 100_000, 6_000_000):
        settings = settings_for(tmp_path / str(slot_bytes), 256 << 20)
        settings = replace(settings, capacity_bytes=256 << 20, extent_bytes=32 << 20)
        for number, namespace in enumerate(("aaaaaaaaaaaa", "bbbbbbbbbbbb")):
            with shelf(settings, namespace, slot_bytes=slot_bytes if number else 8192) as made:
                made.put(1, 0, 9 if slot_bytes < 1 << 20 else 3)
        found = examine(settings)
        assert found.ok, counts(found)
        assert found.namespaces == 2
        assert found.blocks["ok"].count in (18, 12, 6)


def test_S2_an_extent_that_says_that_it_is_huge_fills_no_memory(settings: NvmeConfig) -> None:
    """A list of its slots took gigabytes, or ended the store before it served."""
    (longer, *_) = sorted(Path(settings.path).glob("*.extent"))
    os.truncate(longer, 128 << 30)
    assert examine(settings).ok
    with shelf(settings) as after:
        held = after.tier.space.held.values()
        assert sum(map(len, held)) == len(held) * settings.extent_bytes // SLOT_BYTES
        assert after.disk.used_bytes < settings.capacity_bytes
    assert readable(settings) == CHAINS * LENGTH


def test_S2_an_index_with_a_huge_hole_holds_nothing_up(settings: NvmeConfig) -> None:
    """All of the hole was read: fsck took an hour, and so did a start that found damage."""
    file = index(settings)
    os.truncate(file, 8 << 40)
    assert examine(settings).ok
    assert readable(settings) == CHAINS * LENGTH
    with file.open("r+b") as data:
        data.write(os.urandom(8192))
    with shelf(settings) as after:
        assert not after.keys()
        assert after.put(0, 0, 5).done == 5


def test_a_directory_without_blocks_is_in_order(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "kv")
    with shelf(settings):
        pass
    assert examine(settings).ok
    assert counts(examine(settings)) == {}


def test_the_watcher_sees_every_block(settings: NvmeConfig) -> None:
    seen: list[tuple[int, int, int]] = []

    def watch(done: Amount, whole: Amount) -> None:
        seen.append((done.count, done.bytes, whole.bytes))

    fsck.examine(Path(settings.path), repair=False, watch=watch)
    assert seen[0] == (0, 0, COUNT * SLOT_BYTES)
    assert seen[-1] == (COUNT, COUNT * SLOT_BYTES, COUNT * SLOT_BYTES)


def test_a_store_that_was_killed_leaves_a_directory_in_order(settings: NvmeConfig) -> None:
    code = (
        "import os, signal\nfrom pathlib import Path\n"
        "from tests.harness.nvme_blocks import settings_for, shelf\n"
        f"with shelf(settings_for(Path({settings.path!r}))) as found:\n"
        "    found.put(500, 0, 9)\n"
        "    found.settle()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    found = examine(settings)
    assert (found.ok, found.in_order, found.blocks["ok"].count) == (True, False, COUNT + 9)


# Damage


def test_each_block_has_its_cause_and_a_repair_drops_it(filled: Path, tmp_path: Path) -> None:
    for damage in (*WHOLE, *PART):
        settings = copy_of(filled, tmp_path / damage.__name__)
        damage(settings)
        before = contents(settings)
        looked = examine(settings)
        seen = counts(looked)
        assert not looked.ok
        assert contents(settings) == before
        if damage in WHOLE:
            seen.pop("extents.ok")
            assert seen == WHOLE[damage]
        else:
            assert set(PART[damage]) <= set(seen)
            assert sum(count for name, count in seen.items() if "blocks" in name) == COUNT

        repaired = examine(settings, repair=True)
        assert counts(repaired) == counts(looked)
        assert repaired.repair is not None
        every = sum(count for name, count in seen.items() if "blocks" in name)
        assert repaired.repair.blocks_dropped == every - looked.blocks["ok"].count
        assert repaired.repair.extents_dropped == looked.extents["lost"].count
        assert repaired.repair.files_removed == looked.extents["orphan"].count

        after = examine(settings)
        assert after.ok, counts(after)
        assert after.blocks["ok"] == looked.blocks["ok"]
        assert readable(settings) == looked.blocks["ok"].count
        assert examine(settings).blocks["ok"].count == looked.blocks["ok"].count + 5


def test_blocks_that_cannot_be_read_are_told_from_their_neighbours(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(fd: int, pieces: list[memoryview], at: int) -> int:
        if at <= 50 * SLOT_BYTES < at + sum(len(piece) for piece in pieces):
            raise OSError(5, "Input/output error")
        return real(fd, pieces, at)

    monkeypatch.setattr(os, "preadv", preadv)
    found = examine(settings)
    bad = len([path for path in extents(settings) if path.stat().st_size > 50 * SLOT_BYTES])
    assert 1 <= found.blocks["unreadable"].count <= bad
    assert found.blocks["ok"].count > COUNT - LENGTH * bad


# The index


def test_a_damaged_index_is_said_and_set_aside_by_a_repair(filled: Path, tmp_path: Path) -> None:
    for damage in ("cut", "empty", "nothing", "rubbish", "head"):
        settings = copy_of(filled, tmp_path / damage)
        damage_index(settings, damage)
        before = contents(settings)
        found = examine(settings)
        assert not found.ok
        assert found.index_error is not None
        assert found.extents["orphan"].count == len(extents(settings))
        assert contents(settings) == before
        done = examine(settings, repair=True).repair
        assert done is not None
        assert done.index_kept_as is not None
        assert Path(done.index_kept_as, "data.mdb").is_file()
        assert extents(settings) == []
        assert examine(settings).ok
        assert readable(settings) == 0


FOUND = (
    43,  # in one start of three: a run of pages that ends beyond all addresses
    23,  # the version of LMDB in its first page
    126,  # a page that LMDB dies of once records are read
    185,  # a page that can be read, and is wrong once rows are deleted from it
)


def test_no_rubbish_in_the_index_ends_it(filled: Path, tmp_path: Path) -> None:
    """KVSTORE_BITS=200 for a long campaign."""
    long = int(os.environ.get("KVSTORE_BITS", "4"))
    for seed in (*range(long), *(seed for seed in FOUND if seed >= long)):
        settings, rng = copy_of(filled, tmp_path / str(seed)), random.Random(seed)
        data = bytearray(index(settings).read_bytes())
        for _ in range(rng.choice([1, 30])):
            page = rng.randrange(len(data) // 4096) * 4096
            if seed % 2:
                data[page + rng.randrange(64)] ^= 1 << rng.randrange(8)
            else:
                data[page + 16 : page + 4096] = rng.randbytes(4080)
        index(settings).write_bytes(data)
        try:
            examine(settings, repair=True)
        except ConfigError:  # what was hit says that this is another format
            continue
        assert examine(settings).ok, f"seed {seed}"
        shutil.rmtree(settings.path)


def test_a_reader_that_dies_of_the_index_makes_it_damaged_and_one_that_is_killed_does_not(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> subprocess.Popen[bytes]:
        code = f"import os; os.kill(os.getpid(), {number:d})"
        return subprocess.Popen([sys.executable, "-c", code])

    monkeypatch.setattr(IndexProcess, "start", staticmethod(start))
    number = signal.SIGBUS
    assert examine(settings).index_error is not None
    number = signal.SIGKILL
    with pytest.raises(TierError, match="could not be looked at"):
        examine(settings, repair=True)
    assert extents(settings)


def test_an_index_that_was_deleted_leaves_orphans(settings: NvmeConfig) -> None:
    index(settings).unlink()
    index(settings).parent.rmdir()
    found = examine(settings, repair=True)
    assert counts(found) == {"extents.orphan": found.extents["orphan"].count}
    assert examine(settings).ok
    assert readable(settings) == 0


def test_another_version_or_program_is_left_alone(settings: NvmeConfig) -> None:
    for table, says in (
        (META, "format b'kvstore-drum-1', this version has"),
        (b"theirs", "not an index of kvstore"),
    ):
        if table == b"theirs":
            index(settings).unlink()
        with opened(settings, table) as (txn, found):
            txn.put(b"format", b"kvstore-drum-1", db=found)
        before = contents(settings)
        with pytest.raises(ConfigError, match=says):
            examine(settings, repair=True)
        assert contents(settings) == before


def test_a_missing_table_is_damage(settings: NvmeConfig) -> None:
    with opened(settings, EXTENTS) as (txn, extents_known):
        txn.drop(extents_known)
    found = examine(settings)
    assert found.index_error is not None
    assert found.index_error.endswith("a table is missing")


def test_keys_out_of_order_are_damage(settings: NvmeConfig) -> None:
    """Two rows change places, each as long as the other."""
    data = index(settings).read_bytes()
    with opened(settings, table_of(SPACE)) as (txn, blocks):
        first, second, *_ = [bytes(name) for name, _ in txn.cursor(blocks)]
    data = data.replace(first, b"\0" * len(first)).replace(second, first)
    index(settings).write_bytes(data.replace(b"\0" * len(first), second))
    found = examine(settings)
    assert found.index_error is not None
    assert found.index_error.endswith("out of order")


def test_an_extent_that_may_not_be_opened_is_not_lost(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, *more: int, dir_fd: int | None = None) -> int:
        if str(path).endswith(".extent"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *more, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TierError, match="cannot be opened: Permission denied"):
        examine(settings, repair=True)
    monkeypatch.setattr(os, "open", real)
    assert examine(settings).ok


# The command


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(settings: NvmeConfig, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*options: str, path: Path | None = None) -> tuple[int, str, str]:
        status = cli.main(["fsck", str(path or settings.path), *options])
        return status, *capsys.readouterr()

    return command


def test_a_table_and_the_status(settings: NvmeConfig, run: Run) -> None:
    status, out, err = run()
    assert (status, err) == (0, "")
    assert "all is in order" in out
    flip(settings, 3, 10)
    status, out, _ = run()
    assert status == 1
    assert "--repair" in out
    status, out, _ = run("--repair")
    assert status == 0
    assert "repaired: 20 blocks" in out
    assert run()[0] == 0


def test_json_is_one_object(settings: NvmeConfig, run: Run) -> None:
    flip(settings, 3, 10)
    status, out, err = run("--json")
    found = json.loads(out)
    assert (status, err) == (1, "")
    assert found["ok"] is False
    assert found["blocks"]["damaged"] == {"count": 1, "bytes": SLOT_BYTES}
    assert found["repair"] is None
    status, out, _ = run("--json", "--repair")
    assert (status, json.loads(out)["repair"]["blocks_dropped"]) == (0, 20)
    assert json.loads(run("--json")[1])["ok"] is True


def test_a_damaged_index_is_shown(settings: NvmeConfig, run: Run) -> None:
    damage_index(settings, "cut")
    status, out, _ = run()
    assert status == 1
    assert "the index is damaged: " in out
    status, out, _ = run("--repair")
    assert status == 0
    assert "is kept as" in out


def test_a_directory_in_use_names_the_store(
    settings: NvmeConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsck, "LOCK_WAIT_S", 0.1)
    with shelf(settings) as store:
        status, out, err = run("--repair")
        assert (status, out) == (2, "")
        assert err == (
            f"kvstore: error: {settings.path} is in use by the store with process id"
            f" {os.getpid()} or what is left of it; one store per directory\n"
        )
        assert store.get([key(1, 0)]).done == 1


def test_what_is_no_tiers_directory_is_one_line_and_stays_as_it_is(
    run: Run, tmp_path: Path
) -> None:
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.touch()
    (tmp_path / "other" / "index").mkdir(parents=True)
    (tmp_path / "other" / "1.extent").touch()
    for path, text in (
        (tmp_path / "none", "does not exist, expected a directory of [nvme] path"),
        (file, "is no directory, expected a directory of [nvme] path"),
        (empty, "is no NVMe tier's directory: it has no index/data.mdb"),
        (tmp_path / "other", "is no NVMe tier's directory: it has no index/data.mdb"),
    ):
        assert run("--repair", path=path) == (2, "", f"kvstore: error: {path} {text}\n")
    assert not (tmp_path / "none").exists()
    assert not list(empty.iterdir())
    assert (tmp_path / "other" / "1.extent").exists()
