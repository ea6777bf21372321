"""One directory while it is used: the lock on it, and a descriptor that all its files go through.

A path can lead elsewhere tomorrow: when a disk is unmounted, its mount point is a directory of the
parent file system. So extents are made, opened and removed through a descriptor of the directory,
and whether the path still leads there is asked again and again (look). A directory that was closed
is taken back only if its lock file says that it is the same one:

    process id             of the store that uses it, for the message to a second one
    the directory's id     made once, with the lock file
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore.core.errors import ConfigError, TierFull, TierIOError
from kvstore.owned_files import open_file, refuse_folder
from tiers.nvme.files import ExtentFile, read_through
from tiers.nvme.messages import FOLDER

_LOCK = "lock"
_PROBE = "probe"
_ASIDE = f"{FOLDER}.damaged-"
EXTENT = re.compile(r"[0-9]{6,}\.extent")
# Others need room, too, and a file system that is full to the brim is slow.
SPARE_BYTES = 64 << 20
SPARE_PART = 100
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Look(NamedTuple):
    """What a directory and its file system are like."""

    free_bytes: int  # that extents may take, without the spare ones
    index_bytes: int
    aside_bytes: int  # of damaged indexes that are kept
    read_only: bool


def taken(path: Path, lock_fd: int) -> str:
    """Name the process that has a directory; lock_fd: of its lock file."""
    holder, _ = _marks(lock_fd)
    holder = holder or "unknown"
    return (
        f"{path} is in use by the store with process id {holder} or what is left of it;"
        " one store per directory"
    )


def _marks(lock_fd: int) -> tuple[str, str]:
    lines = os.pread(lock_fd, 200, 0).decode(errors="replace").split("\n")
    holder, known, *_ = [*lines, "", ""]
    return holder.strip(), known.strip()


class Directory:
    """A directory of a disk. All but the constructor touch it, and may hang with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self.lock_fd = -1  # which the index's process inherits: it keeps the lock, too
        self.id = ""

    # Its use

    def open(self, wait_s: float, expected: str = "") -> None:
        """Lock the directory. expected: its id; without one, make it if it is not there.

        Raises OSError, ConfigError when it is in use for longer, and TierIOError when another one
        is in its place.
        """
        with self.or_close():
            if not expected:
                self._make()
            self._attach(0 if expected else os.O_CREAT)
            deadline = time.monotonic() + wait_s
            while not self._locked():
                if time.monotonic() >= deadline:
                    raise ConfigError(taken(self.path, self.lock_fd))
                time.sleep(0.05)
            _, known = _marks(self.lock_fd)
            if expected and known != expected:
                raise TierIOError("another directory is in its place")
            self.id = known or secrets.token_hex(8)
            marks = f"{os.getpid()}\n{self.id}\n".encode()
            os.ftruncate(self.lock_fd, len(marks))
            os.pwrite(self.lock_fd, marks, 0)
            os.fsync(self.lock_fd)

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as exc:
            raise ConfigError(f"{self.path}: expected a directory, found a file there") from exc
        refuse_folder(str(self.path), self.path.stat())

    @contextlib.contextmanager
    def or_close(self) -> Iterator[None]:
        """Close it if what is done meanwhile raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it; safe to call twice."""
        for fd in (self._fd, self.lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self.lock_fd = -1

    def _attach(self, flags: int) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.lock_fd = open_file(_LOCK, os.O_RDWR | flags, self._fd)
        with contextlib.suppress(FileNotFoundError):
            os.close(self._open_index(os.O_RDWR))
        self._folder, self._lock = os.fstat(self._fd), os.fstat(self.lock_fd)

    def _open_index(self, flags: int) -> int:
        """Open the index's file. Raises OSError for one that is not ours: LMDB follows links."""
        folder_flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            folder = os.open(FOLDER, folder_flags, dir_fd=self._fd)
        except NotADirectoryError:
            raise OSError(
                errno.EPERM, f"{FOLDER}: expected a directory, found a symbolic link or a file"
            ) from None
        try:
            refuse_folder(f"{self.path}/{FOLDER}", os.fstat(folder))
            return open_file("data.mdb", flags, folder)
        except ConfigError as exc:
            raise OSError(errno.EPERM, str(exc)) from exc
        finally:
            os.close(folder)

    def _locked(self) -> bool:
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # How it is

    def look(self) -> Look:
        """Look at what the path leads to now, with a descriptor of its own.

        Raises OSError, and TierIOError when that is not our directory.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._compare(fd)
            found = os.fstatvfs(fd)
            spare = max(SPARE_BYTES, found.f_blocks * found.f_frsize // SPARE_PART)
            return Look(
                max(0, found.f_bavail * found.f_frsize - spare),
                _bytes_of(fd, FOLDER),
                sum(_bytes_of(fd, name) for name in _names(fd) if name.startswith(_ASIDE)),
                bool(found.f_flag & os.ST_RDONLY),
            )
        finally:
            os.close(fd)

    def _compare(self, fd: int) -> None:
        folder = os.fstat(fd)
        if folder.st_dev != self._folder.st_dev:
            raise TierIOError("another file system is in its place")
        if folder.st_ino != self._folder.st_ino:
            raise TierIOError("another directory is in its place")
        if os.stat(_LOCK, dir_fd=fd, follow_symlinks=False).st_ino != self._lock.st_ino:
            raise TierIOError("another lock file is in its place")

    def try_write(self) -> None:
        """Write a page durably, beside what counts. Raises OSError when that does not work."""
        with contextlib.suppress(FileNotFoundError):  # of a store that was killed
            os.unlink(_PROBE, dir_fd=self._fd)
        fd = open_file(_PROBE, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._fd)
        try:
            os.pwrite(fd, bytes(mmap.PAGESIZE), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
            os.unlink(_PROBE, dir_fd=self._fd)

    # Its index

    def read_index(self) -> None:
        """Read all of it, as plain bytes: what cannot be read is not damaged. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            fd = self._open_index(os.O_RDONLY)
            try:
                read_through(fd)
            finally:
                os.close(fd)

    # Its extents

    def extent(self, number: int) -> Path:
        """Return the path of an extent."""
        return self.path / f"{number:06d}.extent"

    def make_extent(self, number: int, slot_bytes: int, extent_bytes: int) -> ExtentFile:
        """Make an extent where our directory is, and only if there is room for it.

        Raises OSError, TierIOError when our directory is not there any more, TierFull when the
        file system has no room.
        """
        free_bytes = self.look().free_bytes
        if free_bytes < extent_bytes:
            raise TierFull(
                f"an extent takes {extent_bytes} bytes, the file system has {free_bytes}"
            )
        try:
            ExtentFile.make(self.extent(number), extent_bytes, self._fd)
        except OSError as exc:
            if exc.errno in _FULL:
                raise TierFull(f"the file system refuses it: {exc.strerror}") from exc
            raise
        try:
            return ExtentFile(self.extent(number), slot_bytes, extent_bytes, self._fd)
        except OSError:  # no descriptor is left, say
            self.remove_extent(number)
            raise

    def open_extent(self, number: int, slot_bytes: int, extent_bytes: int) -> ExtentFile:
        """Open an extent that is there. Raises OSError.

        extent_bytes: a file that says that it is longer counts for what it takes on disk; there is
        a list of its slots in memory.
        """
        found = os.stat(self.extent(number).name, dir_fd=self._fd, follow_symlinks=False)
        size = min(found.st_size, max(extent_bytes, found.st_blocks * 512))
        return ExtentFile(self.extent(number), slot_bytes, size, self._fd)

    def remove_extent(self, number: int) -> None:
        """Give an extent's space back; one that is not there is no error. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.extent(number).name, dir_fd=self._fd)

    def sync(self) -> None:
        """Make what was made and removed durable. Raises OSError."""
        os.fsync(self._fd)

    def sweep(self, known: Collection[int]) -> int:
        """Remove extents that are not known, such as one whose removal failed; return how many.

        Raises OSError.
        """
        with os.scandir(self._fd) as entries:
            files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        numbers = {int(name.removesuffix(".extent")) for name in files if EXTENT.fullmatch(name)}
        strangers = numbers.difference(known)
        for number in strangers:
            self.remove_extent(number)
        return len(strangers)


def _names(folder: int) -> list[str]:
    return os.listdir(folder)


def _bytes_of(folder: int, name: str) -> int:
    """Bytes that a file takes, or all files in a directory, whose names may go meanwhile."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            return found.st_blocks * 512
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return 0
    try:
        return found.st_blocks * 512 + sum(_bytes_of(fd, below) for below in _names(fd))
    finally:
        os.close(fd)
