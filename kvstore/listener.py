"""The unix socket of a store: a path, and the lock beside it that says whose the path is.

Binding a path is no lock: a socket file outlives its process, and to ask whether anybody answers
there hangs when that one does. So PATH.lock is locked for the store's life. Who has the lock
replaces the socket file that is there, and takes its own away at the end, then the lock file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from kvstore.core.errors import ConfigError
from kvstore.owned_files import open_file

BACKLOG = 128
_LOCK = ".lock"
OWN_MODE = 0o600
_FOLDER_MODES = {OWN_MODE: 0o700, 0o660: 0o750, 0o666: 0o755}  # of a socket's mode


class TakenError(ConfigError):
    """A store has that path."""


class Listener:
    """A bound socket and its lock."""

    def __init__(self, path: str, sock: socket.socket, lock_fd: int) -> None:
        """Take over what listen() has made, in this process or in the one that started it."""
        self.path = path
        self.sock = sock
        self.lock_fd = lock_fd
        found = os.lstat(path)
        self._file = found.st_dev, found.st_ino
        self._mode, self._group = stat.S_IMODE(found.st_mode), found.st_gid

    def start(self) -> None:
        """Let clients connect; what they say waits until somebody accepts."""
        self.sock.listen(BACKLOG)

    def renew(self) -> socket.socket | None:
        """Make a new socket if somebody has removed the file of this one; return the old socket.

        None: a file is there. Raises OSError, ConfigError where none can be made, TakenError when
        another store has the path.
        """
        if os.path.lexists(self.path):
            return None
        before, lock = self.sock, self.path + _LOCK
        _make_folder(Path(self.path).parent, self._mode, self._group)
        if not os.path.lexists(lock) or _identity(lock) != _identity(self.lock_fd):
            lock_fd = _lock(self.path)
            os.close(self.lock_fd)
            self.lock_fd = lock_fd
        self.sock = _bind(self.path, self._mode, self._group)
        self._file = _identity(self.path)
        self.start()
        return before

    def release(self) -> None:
        """Close it here: it is another process's from now on."""
        self.sock.close()
        os.close(self.lock_fd)

    def close(self) -> None:
        """Take the files away that are ours, the lock last; safe to call twice."""
        if self.sock.fileno() < 0:
            return
        self.sock.close()
        with contextlib.suppress(OSError):  # the folder is gone, or it is not ours any more
            if _identity(self.path) == self._file:
                Path(self.path).unlink()
        _unlock(self.path, self.lock_fd)


def listen(path: str, mode: int = OWN_MODE, group: int | None = None) -> Listener:
    """Take a path and bind it; nobody can connect before start().

    mode, group: of the socket; a folder that is made for it can be entered by the same users.
    Raises TakenError when a store has the path, ConfigError when it cannot be used.
    """
    if group is not None:
        refuse_group(group)
    lock_fd = -1
    try:
        _make_folder(Path(path).parent, mode, group)
        lock_fd = _lock(path)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError(f"cannot listen at {path}: it exists and is no socket")
            Path(path).unlink()
        return Listener(path, _bind(path, mode, group), lock_fd)
    except BaseException as exc:
        if lock_fd >= 0:
            _unlock(path, lock_fd)
        if isinstance(exc, OSError):
            raise ConfigError(f"cannot listen at {path}: {exc.strerror}") from exc
        raise


def taken(path: str) -> bool:
    """Tell whether a store has this path, without asking it. Raises OSError."""
    try:
        fd = open_file(path + _LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def sweep(folder: Path) -> None:
    """Take away what stores have left that were killed. Raises OSError."""
    for lock in folder.glob(f"*{_LOCK}"):
        path = str(lock).removesuffix(_LOCK)
        try:
            lock_fd = _lock(path)
        except TakenError:
            continue
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
        _unlock(path, lock_fd)


def refuse_group(group: int) -> None:
    """Raise ConfigError for a group that a file of ours cannot get."""
    fd = os.memfd_create("kvstore-group")
    try:
        os.chown(fd, -1, group)
    except OSError:
        ours = ", ".join(map(str, sorted({os.getegid(), *os.getgroups()})))
        user = f"uid {os.geteuid()}, which runs the store"
        raise ConfigError(
            f"[server] group: expected a group of {user} ({ours}), found {group}"
        ) from None
    finally:
        os.close(fd)


def _bind(path: str, mode: int, group: int | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        _give(Path(path), mode, group)
    except OSError:
        sock.close()
        raise
    return sock


def _give(path: Path, mode: int, group: int | None) -> None:
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(mode)


def _make_folder(folder: Path, mode: int, group: int | None) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except (FileExistsError, NotADirectoryError):
        if folder.is_dir():
            return
        file = next(parent for parent in (folder, *folder.parents) if parent.exists())
        raise ConfigError(
            f"cannot listen at a path in {folder}: expected a directory, found the file {file}"
        ) from None
    _give(folder, _FOLDER_MODES[mode], group)


def _lock(path: str) -> int:
    """Lock the path. Raises TakenError, OSError."""
    while True:
        fd = open_file(path + _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _identity(path + _LOCK) == _identity(fd):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise TakenError(f"a store is running at {path} already") from None
        except FileNotFoundError:
            pass  # who had it took it away; the next one made is another
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _unlock(path: str, lock_fd: int) -> None:
    """Delete the lock file, unless another store has made a new one at its path."""
    with contextlib.suppress(OSError):
        if _identity(path + _LOCK) == _identity(lock_fd):
            Path(path + _LOCK).unlink()
    os.close(lock_fd)


def _identity(place: str | int) -> tuple[int, int]:
    found = os.fstat(place) if isinstance(place, int) else os.lstat(place)
    return found.st_dev, found.st_ino
