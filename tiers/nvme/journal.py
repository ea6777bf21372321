"""What is durable: an LMDB index beside the extent files. It never holds payload.

meta        "format", "clean"
namespaces  digest -> number (u32), slot bytes (u32)
extents     number (u32) -> namespace (u32)
blocks      namespace (u32), block key -> VALUE

A record is put after its data was synced, and taken out before its slot is written again. Records
that go together (a block and what hangs below it) go in one transaction.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import msgspec

from kvstore.errors import ConfigError, TierIOError

FORMAT = b"kvstore-nvme-1"
NAMESPACE = struct.Struct(">II")
NUMBER = struct.Struct(">I")
VALUE = struct.Struct("<QQQQI")
"""Place (extent << 32 | position), parent's place, generation, checksum, payload bytes."""
RECORD_BYTES = 512  # of the index file for each block, with room for half-full pages
FOLDER = "index"
_MAP_BYTES_MIN = 64 << 20


class Commit(msgspec.Struct):
    """Changes that become durable together, in this order."""

    deletes: list[bytes] = []
    puts: list[tuple[bytes, bytes]] = []
    namespaces: list[tuple[bytes, bytes]] = []
    extents: list[tuple[int, int]] = []  # number, namespace
    extents_gone: list[int] = []

    def __bool__(self) -> bool:
        """Tell whether there is any change."""
        return any((self.deletes, self.puts, self.namespaces, self.extents, self.extents_gone))


class Journal:
    """The index on disk. Commits come from one thread; reading at start is the loader's."""

    def __init__(self, folder: Path, blocks_max: int) -> None:
        """Open or make it. Raises TierIOError when it is damaged, ConfigError when of another kind.

        blocks_max: that the tier can hold; the index file can grow to what these need.
        """
        self.path = folder / FOLDER
        self.path.mkdir(mode=0o700, exist_ok=True)
        size = max(_MAP_BYTES_MIN, 2 * RECORD_BYTES * blocks_max)
        try:
            # Our own lock on the directory is the only one: no reader of ours lives elsewhere
            # while we write.
            self._env = lmdb.open(
                str(self.path), map_size=size, max_dbs=4, lock=False, readahead=False
            )
            refuse_truncated(self._env, self.path)
            self._meta = self._env.open_db(b"meta")
            self._namespaces = self._env.open_db(b"namespaces")
            self._extents = self._env.open_db(b"extents")
            self._blocks = self._env.open_db(b"blocks")
            with self._env.begin() as txn:
                found = txn.get(b"format", db=self._meta)
                self.clean = found is None or txn.get(b"clean", db=self._meta) == b"1"
        except lmdb.Error as exc:
            if hasattr(self, "_env"):
                self._env.close()
            raise TierIOError(f"{self.path}: {exc}") from exc
        if found not in (None, FORMAT):
            self._env.close()
            raise ConfigError(
                f"{self.path}: format {found!r}, this version has {FORMAT!r}; use another directory"
            )

    @property
    def file_bytes(self) -> int:
        """Bytes that the index takes on disk."""
        return (self.path / "data.mdb").stat().st_blocks * 512

    def tables(self) -> tuple[dict[str, tuple[int, int]], dict[int, int]]:
        """Return namespaces (digest -> number, slot bytes) and extents (number -> namespace)."""
        with self._env.begin() as txn:
            namespaces = {
                bytes(digest).decode(): NAMESPACE.unpack(value)
                for digest, value in txn.cursor(self._namespaces)
            }
            extents = {
                NUMBER.unpack(number)[0]: NUMBER.unpack(value)[0]
                for number, value in txn.cursor(self._extents)
            }
        return namespaces, extents

    def mark(self, *, clean: bool) -> None:
        """Say durably whether all is in order. Raises TierIOError."""
        try:
            with self._env.begin(write=True) as txn:
                txn.put(b"format", FORMAT, db=self._meta)
                txn.put(b"clean", b"1" if clean else b"0", db=self._meta)
        except lmdb.Error as exc:
            raise TierIOError(f"{self.path}: {exc}") from exc

    def commit(self, changes: Commit) -> None:
        """Make changes durable, all or none. Raises TierIOError."""
        try:
            with self._env.begin(write=True) as txn:
                for key in changes.deletes:
                    txn.delete(key, db=self._blocks)
                for digest, value in changes.namespaces:
                    txn.put(digest, value, db=self._namespaces)
                for number, namespace in changes.extents:
                    txn.put(NUMBER.pack(number), NUMBER.pack(namespace), db=self._extents)
                for number in changes.extents_gone:
                    txn.delete(NUMBER.pack(number), db=self._extents)
                for key, value in changes.puts:
                    txn.put(key, value, db=self._blocks)
        except lmdb.Error as exc:
            raise TierIOError(f"{self.path}: {exc}") from exc

    def close(self) -> None:
        """Close the files."""
        self._env.close()


def refuse_truncated(env: lmdb.Environment, path: Path) -> None:
    """Raise lmdb.CorruptedError for a file that is too short: reading on would be a SIGBUS.

    A whole file may be short as well: pages that one commit took and gave back are never written.
    So a process of its own tries, and that is rare.
    """
    size = (path / "data.mdb").stat().st_size
    expected = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if size < expected and not _readable(path):
        raise lmdb.CorruptedError(f"index of {size} bytes, expected {expected}")


def _readable(path: Path) -> bool:
    """Try in a process of its own. Raises ConfigError when that cannot tell."""
    code = f"import sys; from {__name__} import read_whole; read_whole(sys.argv[1])"
    try:
        child = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            check=False,
        )
    except OSError as exc:
        raise ConfigError(f"cannot start a process to read {path}: {exc}") from exc
    if child.returncode == -signal.SIGKILL:
        raise ConfigError(f"{path}: the process that reads it was killed, for memory perhaps")
    return child.returncode == 0


def read_whole(path: str) -> None:
    """Read every page in use, free lists included. Raises lmdb.Error, or dies of a SIGBUS."""
    env = lmdb.open(path, readonly=True, lock=False, create=False)
    with Path(os.devnull).open("wb") as nowhere:
        env.copyfd(nowhere.fileno(), compact=True)
    env.close()


def set_aside(folder: Path) -> Path:
    """Keep a damaged index for inspection, under another name."""
    kept = folder / f"{FOLDER}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 0
    while kept.exists():
        number += 1
        kept = kept.with_name(f"{kept.name}.{number}")
    shutil.move(folder / FOLDER, kept)
    return kept
