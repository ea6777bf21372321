"""Extent files: preallocated, equal slots, direct I/O straight from and to memory.

O_DIRECT needs memory, offset and length aligned to a page of the device; slots on disk are.
Memory that is not (a block whose size is no multiple of 4 KiB) goes through a buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kvstore.core.errors import ConfigError, TierIOError
from kvstore.owned_files import open_file

PAGE_BYTES = 4096
RUN_BLOCKS_MAX = 256  # a vectored call takes up to 1,024 pieces
_READ_BYTES = 1 << 20
_buffers = threading.local()
T = TypeVar("T")


def stride_of(slot_bytes: int) -> int:
    """Return how far apart slots of this size lie on disk."""
    return -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES


def open_direct(path: Path, *, make: bool = False, folder: int | None = None) -> int:
    """Open a file for direct I/O. Raises ConfigError where its file system has none.

    folder: descriptor of its directory, which counts then, whatever the path leads to by now.
    """
    name = str(path) if folder is None else path.name
    flags = os.O_RDWR | os.O_DIRECT
    if make:  # a new file, whatever has the name
        flags |= os.O_CREAT | os.O_EXCL
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
    try:
        return open_file(name, flags, folder)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise ConfigError(
                f"{path.parent}: this file system has no direct I/O (O_DIRECT); use a disk's, such"
                " as ext4 or xfs"
            ) from exc
        raise


class ExtentFile:
    """count slots of one namespace's blocks, in one file.

    It is closed once its last user is done: a call that hangs still has it.
    """

    def __init__(
        self, path: Path, slot_bytes: int, extent_bytes: int, folder: int | None = None
    ) -> None:
        """Open a file that make() has made; folder as in open_direct(). Raises OSError."""
        self.path = path
        self.slot_bytes = slot_bytes
        self.stride = stride_of(slot_bytes)
        self.bytes = extent_bytes
        self.count = extent_bytes // self.stride
        self._fd = open_direct(path, folder=folder)
        self._users = 0
        self._closing = False
        self._lock = threading.Lock()

    @staticmethod
    def make(path: Path, extent_bytes: int, folder: int) -> None:
        """Take the space on disk, durably; leaves nothing behind when there is none.

        folder: descriptor of the directory in which to make it. Raises OSError.
        """
        try:
            fd = open_direct(path, make=True, folder=folder)
            try:
                os.posix_fallocate(fd, 0, extent_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.fsync(folder)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            raise

    def __enter__(self) -> int:
        """Keep it open meanwhile. Raises TierIOError when it was closed."""
        with self._lock:
            if self._closing:
                raise TierIOError("the tier has closed its files")
            self._users += 1
        return self._fd

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and self._users == 0
        if last:
            os.close(self._fd)

    def close(self) -> None:
        """Have no new users, and close when there are none; safe to call twice."""
        with self._lock:
            last = not self._closing and self._users == 0
            self._closing = True
        if last:
            os.close(self._fd)

    def read(self, position: int, blocks: Sequence[memoryview]) -> None:
        """Fill blocks from neighbouring slots. Raises OSError, or TierIOError at the file's end."""
        self._move(position, blocks, store=False)

    def write(self, position: int, blocks: Sequence[memoryview]) -> None:
        """Write blocks into neighbouring slots. Raises OSError, or TierIOError when cut short."""
        self._move(position, blocks, store=True)

    def _move(self, position: int, blocks: Sequence[memoryview], *, store: bool) -> None:
        at = position * self.stride
        with self as fd:
            if all(aligned(block) for block in blocks):
                self._call(fd, list(blocks), at, store=store)
                return
            buffer = _buffer(self.stride)
            for number, block in enumerate(blocks):
                if store:
                    buffer[: self.slot_bytes] = block
                self._call(fd, [buffer], at + number * self.stride, store=store)
                if not store:
                    block[:] = buffer[: self.slot_bytes]

    def _call(self, fd: int, pieces: list[memoryview], at: int, *, store: bool) -> None:
        left = sum(len(piece) for piece in pieces)
        while left:
            moved = os.pwritev(fd, pieces, at) if store else os.preadv(fd, pieces, at)
            if moved == 0 or (moved < left and moved % PAGE_BYTES):
                raise TierIOError(f"{self.path.name}: {moved} of {left} bytes at {at}")
            left -= moved
            at += moved
            while pieces and moved >= len(pieces[0]):
                moved -= len(pieces.pop(0))
            if moved:
                pieces[0] = pieces[0][moved:]

    def sync(self) -> None:
        """Make all that is written durable. Raises OSError, TierIOError when it was closed."""
        with self as fd:
            os.fdatasync(fd)


def read_through(fd: int) -> None:
    """Read a file once, for the errors that it has; its holes, which may be long, have none.

    Raises OSError.
    """
    end = 0
    while True:
        try:
            at = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # the rest is a hole, or there is none
                return
            raise
        end = os.lseek(fd, at, os.SEEK_HOLE)
        os.lseek(fd, at, os.SEEK_SET)
        while at < end:
            at += len(os.read(fd, min(_READ_BYTES, end - at))) or end


def runs_of(items: Iterable[T], place: Callable[[T], int], longest: int) -> Iterator[list[T]]:
    """Yield items in the order of their places, neighbours together, up to so many."""
    run: list[T] = []
    for item in sorted(items, key=place):
        if run and (len(run) == longest or place(item) != place(run[-1]) + 1):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


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
