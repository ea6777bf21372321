"""What keeps a store from using a directory as its `[nvme]`, found out without changing it."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from kvstore.config import NvmeConfig
from kvstore.core.errors import ConfigError
from kvstore.open_files import files_max
from kvstore.owned_files import open_file, refuse_folder, writable_folder
from kvstore.units import sized
from tiers.nvme.attached import blocks_max_of
from tiers.nvme.directory import EXTENT, taken
from tiers.nvme.files import open_direct
from tiers.nvme.index_client import map_bytes_of

_OTHERS = 64  # files that a store has open besides extents


def refuse(settings: NvmeConfig) -> None:
    """Raise ConfigError where a store with these settings would not start.

    But for a store that has the directory now: a start waits for its end for a while.
    """
    path = Path(settings.path)
    try:
        folder = writable_folder(path, str(path))
        if folder == path:
            refuse_folder(str(path), path.stat())
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvstore-check-") as probe:
            os.close(open_direct(Path(probe.name)))
        with suppress(FileNotFoundError):
            os.close(open_file(str(path / "lock"), os.O_RDWR))
        count = sum(EXTENT.fullmatch(file.name) is not None for file in folder.iterdir())
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be used: {exc.strerror}") from exc
    if folder == path and count + _OTHERS > files_max():
        raise ConfigError(
            f"{path}: cannot be used: it has {count:,} extents, and the limit of open files is"
            f" {files_max():,}, expected at least {count + _OTHERS:,} (ulimit -n, LimitNOFILE)"
        )
    _refuse_index(path, settings.capacity_bytes)


def _refuse_index(path: Path, capacity_bytes: int) -> None:
    """Raise ConfigError where there are not as many addresses as LMDB maps the index at."""
    size = map_bytes_of(blocks_max_of(capacity_bytes))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # not to be written: it costs nothing
    try:
        mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ).close()
    except OSError as exc:
        raise ConfigError(
            f"{path}: cannot be used: a capacity of {sized(capacity_bytes)} takes {sized(size)} of"
            f" addresses for the index: {exc.strerror}; make it smaller, or ulimit -v larger"
        ) from exc


def user_of(path: Path) -> str | None:
    """Return the words with which a store refuses a directory that another one has, or None."""
    with suppress(OSError):
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return taken(path, fd)
        finally:
            os.close(fd)
    return None
