"""Files and folders that nobody else can have put there: looked at when they are opened.

Who prepares a folder for another user, or can write in it, could have a symbolic link or a file of
their own lie where ours is expected. So a folder has to be ours, or root's, and closed to others,
and what is opened in it has to be a regular file of ours.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from kvstore.core.errors import ConfigError

WRITABLE = stat.S_IWGRP | stat.S_IWOTH
OPEN = stat.S_IRWXG | stat.S_IRWXO


def refuse_folder(path: str, found: os.stat_result, closed: int = WRITABLE) -> None:
    """Raise ConfigError unless a directory is ours or root's, without these rights for others."""
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path}: expected a directory, found something else")
    ours = os.geteuid()
    if found.st_uid not in (ours, 0):
        raise ConfigError(
            f"{path}: expected a directory of uid {ours} or 0, found one of uid {found.st_uid},"
            " a user that can replace its files"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & closed:
        raise ConfigError(
            f"{path}: expected a directory that no other user can"
            f" {'write in' if closed == WRITABLE else 'look into'}, found mode {mode:04o}:"
            f" chmod {mode & ~closed:04o}, or take a directory of its own below it"
        )


def open_file(name: str, flags: int, folder: int | None = None) -> int:
    """Open a regular file of ours, never through a symbolic link, never waiting. Raises OSError.

    folder: descriptor of its directory.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _wrong(exc.errno, name, "a symbolic link") from None
        raise
    found = os.fstat(fd)
    what = ""
    if not stat.S_ISREG(found.st_mode):
        what = "something else"
    elif found.st_uid not in (os.geteuid(), 0):
        what = f"one of uid {found.st_uid}"
    elif found.st_nlink > 1:
        what = f"one with {found.st_nlink} names (hard links)"
    if what:
        os.close(fd)
        raise _wrong(errno.EPERM, name, what)
    return fd


def _wrong(number: int, name: str, found: str) -> OSError:
    expected = f"expected a regular file of uid {os.geteuid()}"
    return OSError(number, f"{name}: {expected}, found {found}")


def writable_folder(folder: Path, what: str) -> Path:
    """Return the folder that is to be written in, or the first above it that there is.

    Raises ConfigError, which begins with `what`, and OSError.
    """
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not there.is_dir():
        raise ConfigError(f"{what}: expected a directory, found a file there ({there})")
    try:  # a permission may be worth nothing: in /proc, say, or where the file system is read-only
        tempfile.NamedTemporaryFile(dir=there, prefix=".kvstore-check-").close()
    except OSError as exc:
        raise ConfigError(f"{what}: nothing can be made in {there}: {exc.strerror}") from exc
    return there
