"""A folder of a disk that somebody else has prepared, or can write in: nothing is followed."""

from __future__ import annotations

import os
import shutil
from itertools import product
from pathlib import Path

import pytest

from kvstore import cli
from kvstore.config import NvmeConfig
from kvstore.core.errors import ConfigError, KVStoreError
from tests.harness.nvme_blocks import key, settings_for, shelf
from tiers.nvme import fsck
from tiers.nvme.directory import Directory
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.files import ExtentFile

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
PRECIOUS = b"precious" * 1000


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that is none of the store's business."""
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> NvmeConfig:
    """A directory with some blocks, closed in order."""
    made = settings_for(tmp_path / "kv")
    with shelf(made) as before:
        before.put(0, 0, 8)
    return made


def replace(path: Path, target: Path, how: str) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if how == "hard link":
        path.hardlink_to(target)
    else:
        path.symlink_to(target)


def test_S1_a_link_in_the_folder_is_refused_and_not_written_through(
    settings: NvmeConfig, precious: Path, tmp_path: Path
) -> None:
    cases = product(("lock", "000001.extent", "index/data.mdb"), ("symbolic link", "hard link"))
    for name, how in cases:
        folder = Path(shutil.copytree(settings.path, tmp_path / f"{Path(name).name}-{how}"))
        replace(folder / name, precious, how)
        with pytest.raises(ConfigError, match=f"expected a regular file .*{how}"):
            NvmeDisk(settings_for(folder))
        assert precious.read_bytes() == PRECIOUS
        if (name, how) == ("000001.extent", "symbolic link"):  # lost, and the link is removed
            found = fsck.examine(folder, repair=True)
            assert (found.extents["lost"].count, found.extents["orphan"].count) == (1, 1)
        else:
            with pytest.raises(KVStoreError, match=f"expected a regular file .*{how}"):
                fsck.examine(folder, repair=True)
        assert precious.read_bytes() == PRECIOUS


def test_S1_an_index_that_is_a_link_is_refused(settings: NvmeConfig, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(Path(settings.path) / "index", elsewhere)
    before = (elsewhere / "data.mdb").read_bytes()
    replace(Path(settings.path) / "index", elsewhere, "symbolic link")
    for use in (NvmeDisk, lambda s: fsck.examine(Path(s.path), repair=True)):
        with pytest.raises(KVStoreError, match=r"index: expected a directory, found a symbolic"):
            use(settings)
        assert (elsewhere / "data.mdb").read_bytes() == before


def test_S1_links_with_the_names_of_extents_and_probes_are_not_followed(
    settings: NvmeConfig, precious: Path
) -> None:
    """They lie where the next extent comes, and where a disk that fails is tried."""
    folder = Path(settings.path)
    for number in range(2, 40):
        (folder / f"{number:06d}.extent").symlink_to(precious)
    (folder / "probe").symlink_to(precious)
    with shelf(settings) as again:
        again.disk.attached.directory.try_write()
        again.put(1, 0, 8)
        again.put(2, 0, 8)
        assert again.tier.lookup(key(1, 7)) is not None
    assert precious.read_bytes() == PRECIOUS


def test_S1_only_our_files_are_removed_as_unknown(settings: NvmeConfig, precious: Path) -> None:
    folder = Path(settings.path)
    (folder / "000077.extent").symlink_to(precious)
    (folder / "000078.extent").mkdir()
    (folder / "mine.extent").write_text("not one of ours")
    (folder / "000079.extent").write_bytes(bytes(4096))
    with shelf(settings):
        pass
    left = {path.name for path in folder.glob("*.extent")}
    assert left == {"000001.extent", "000077.extent", "000078.extent", "mine.extent"}
    (folder / "000079.extent").write_bytes(bytes(4096))
    assert fsck.examine(folder, repair=True).ok is False  # which removes links, too
    assert {path.name for path in folder.glob("*.extent")} == left - {"000077.extent"}
    assert precious.read_bytes() == PRECIOUS


def test_S1_an_extent_is_made_anew_whatever_has_its_name(tmp_path: Path, precious: Path) -> None:
    volume = Directory(tmp_path / "kv")
    volume.open(0)
    try:
        volume.extent(1).symlink_to(precious)
        volume.make_extent(1, 4096, 1 << 21).close()
        assert not volume.extent(1).is_symlink()
        volume.extent(2).symlink_to(precious)
        with pytest.raises(OSError, match="symbolic link"):
            ExtentFile(volume.extent(2), 4096, 1 << 21)
    finally:
        volume.close()
    assert precious.read_bytes() == PRECIOUS


def test_S1_a_folder_that_others_can_write_in_is_refused(
    settings: NvmeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(settings.path)
    config = folder.parent / "kv.toml"
    config.write_text(
        f'[server]\nsocket = "{folder.parent}/kv.sock"\nmetrics = ""\n[cpu]\ncapacity = "16MiB"\n'
        f'[nvme]\npath = "{folder}"\ncapacity = "64MiB"\n'
    )
    for mode in (0o777, 0o1777, 0o775, 0o757):
        folder.chmod(mode)
        expected = f"no other user can write in, found mode {mode:04o}: chmod {mode & ~0o022:04o}"
        with pytest.raises(ConfigError, match=expected):
            NvmeDisk(settings)
        assert cli.main(["fsck", settings.path]) == 2
        assert expected in capsys.readouterr().err
        assert cli.main(["check", "--config", str(config)]) != 0
        assert expected in capsys.readouterr().out
    below = settings_for(folder / "own")  # made by the store itself
    with shelf(below) as again:
        again.put(0, 0, 8)
    folder.chmod(0o755)
    with shelf(settings) as again:
        assert again.tier.lookup(key(0, 0)) is not None


@as_root
def test_S1_what_another_user_owns_is_refused(settings: NvmeConfig) -> None:
    for name in ("", "index", "lock", "000001.extent", "index/data.mdb"):
        os.chown(Path(settings.path) / name, STRANGER, STRANGER)
        with pytest.raises(ConfigError, match=rf"expected a .* of uid 0.*uid {STRANGER}"):
            NvmeDisk(settings)
        os.chown(Path(settings.path) / name, 0, 0)


def test_a_file_in_the_place_of_the_folder_is_said(precious: Path) -> None:
    for path in (precious, precious / "kv"):
        with pytest.raises(ConfigError, match="expected a directory, found a file there"):
            NvmeDisk(settings_for(path))
