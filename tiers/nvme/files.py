"""Extent files: preallocated, equal slots, direct I/O straight from and to memory.

O_DIRECT needs memory, offset and length aligned to a page of the device; slots on disk are.
Memory that is not (a block whose size is no multiple of 4 KiB) goes through a buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError, TierIOError

PAGE_BYTES = 4096
RUN_BLOCKS_MAX = 256  # a vectored call takes up to 1,024 pieces
_buffers = threading.local()


def stride_of(slot_bytes: int) -> int:
    """Return how far apart slots of this size lie on disk."""
    return -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES


def open_direct(path: Path, *, create: bool = False) -> int:
    """Open a file for direct I/O. Raises ConfigError where its file system has none."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT | (os.O_CREAT if create else 0)
    try:
        return os.open(path, flags, 0o600)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise ConfigError(
                f"{path.parent}: this file system has no direct I/O (O_DIRECT); use a disk's, such"
                " as ext4 or xfs"
            ) from exc
        raise


class ExtentFile:
    """count slots of one namespace's blocks, in one file."""

    def __init__(self, path: Path, slot_bytes: int, extent_bytes: int) -> None:
        """Open a file that make() has made. Raises OSError."""
        self.path = path
        self.slot_bytes = slot_bytes
        self.stride = stride_of(slot_bytes)
        self.bytes = extent_bytes
        self.count = extent_bytes // self.stride
        self._fd = open_direct(path)

    @staticmethod
    def make(path: Path, extent_bytes: int) -> None:
        """Take the space on disk, durably; leaves nothing behind when there is none."""
        try:
            fd = open_direct(path, create=True)
            try:
                os.posix_fallocate(fd, 0, extent_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_folder(path.parent)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def read(self, position: int, blocks: Sequence[memoryview]) -> None:
        """Fill blocks from neighbouring slots. Raises OSError, or TierIOError at the file's end."""
        self._move(position, blocks, store=False)

    def write(self, position: int, blocks: Sequence[memoryview]) -> None:
        """Write blocks into neighbouring slots. Raises OSError, or TierIOError when cut short."""
        self._move(position, blocks, store=True)

    def _move(self, position: int, blocks: Sequence[memoryview], *, store: bool) -> None:
        at = position * self.stride
        if all(aligned(block) for block in blocks):
            self._call(list(blocks), at, store=store)
            return
        buffer = _buffer(self.stride)
        for number, block in enumerate(blocks):
            if store:
                buffer[: self.slot_bytes] = block
            self._call([buffer], at + number * self.stride, store=store)
            if not store:
                block[:] = buffer[: self.slot_bytes]

    def _call(self, pieces: list[memoryview], at: int, *, store: bool) -> None:
        left = sum(len(piece) for piece in pieces)
        while left:
            moved = os.pwritev(self._fd, pieces, at) if store else os.preadv(self._fd, pieces, at)
            if moved == 0 or (moved < left and moved % PAGE_BYTES):
                raise TierIOError(f"{self.path.name}: {moved} of {left} bytes at {at}")
            left -= moved
            at += moved
            while pieces and moved >= len(pieces[0]):
                moved -= len(pieces.pop(0))
            if moved:
                pieces[0] = pieces[0][moved:]

    def fileno(self) -> int:
        """Return the descriptor, for who moves blocks by other means."""
        return self._fd

    def sync(self) -> None:
        """Make all that is written durable. Raises OSError."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def allow_files() -> None:
    """Let this process open as many files as the system allows it: every extent is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lock_folder(path: Path, wait_s: float) -> int:
    """Make a directory ours until the descriptor is closed. Raises ConfigError if it is taken."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be used: {exc.strerror}") from exc
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ConfigError(
                f"{path} is in use by the store with process id {holder}; one store per directory"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd


def sync_folder(path: Path) -> None:
    """Make a directory's entries durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def address_of(block: memoryview) -> int:
    """Return where writable memory is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def aligned(block: memoryview) -> bool:
    """Tell whether direct I/O can go straight to and from this memory."""
    return len(block) % PAGE_BYTES == 0 and address_of(block) % PAGE_BYTES == 0


def _buffer(size: int) -> memoryview:
    """Return this thread's page-aligned buffer."""
    found: memoryview | None = getattr(_buffers, "view", None)
    if found is None or len(found) < size:
        found = memoryview(mmap.mmap(-1, size))
        _buffers.view = found
    return found[:size]
