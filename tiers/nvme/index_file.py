"""The LMDB file of the index, as the process that owns it uses it (see messages.py).

A record is put after its data was synced, and taken out before its slot is written again. Records
that go together (a block and what hangs below it) go in one transaction.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import lmdb

from tiers.nvme.messages import FORMAT, NAMESPACE, NUMBER, Commit

_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 1 << 15
_NUMBER_MAX = (1 << 8 * NUMBER.size) - 1
_ROW_BYTES_MIN = 16  # of the file: no table has more rows than it has room for
_NOT_ITS_FAULT = (  # they say something about the machine, or about an error before
    lmdb.MapFullError,
    lmdb.ReadersFullError,
    lmdb.TlsFullError,
    lmdb.DbsFullError,
    lmdb.TxnFullError,
    lmdb.PanicError,
    lmdb.LockError,
    lmdb.MemoryError,
    lmdb.DiskError,
    lmdb.ReadonlyError,
)
FORMAT_BITS = 4
"""Another version's format differs from ours in more bits; in fewer, these have flipped."""


class OtherFormatError(Exception):
    """The index is of another program, or version."""


def is_damage(exc: Exception) -> bool:
    """Tell whether an error says that the file's content is wrong; a failing disk says nothing.

    All of LMDB's own errors do but for a few. What the system says to it is a plain lmdb.Error.
    A SystemError comes from its binding: a call that went well, with an error behind it.
    """
    if isinstance(exc, SystemError):
        return isinstance(exc.__cause__, Exception) and is_damage(exc.__cause__)
    if isinstance(exc, lmdb.Error):
        return type(exc) is not lmdb.Error and not isinstance(exc, _NOT_ITS_FAULT)
    return isinstance(exc, ValueError)


class IndexFile:
    """The open file. Raises lmdb.Error; what is_damage() tells apart."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        """Open or make it. Raises OtherFormatError."""
        self._path = path
        # The store's lock on the directory is the only one: nobody else reads while we write.
        self._env = lmdb.open(str(path), map_size=map_bytes, max_dbs=4, lock=False, readahead=False)
        try:
            if shorter_than_it_says(self._env, path):
                read_whole(self._env)
            self._open_tables(path)
        except BaseException:
            self._env.close()
            raise

    def _open_tables(self, path: Path) -> None:
        self._meta = self._env.open_db(b"meta")
        self._namespaces = self._env.open_db(b"namespaces")
        self._extents = self._env.open_db(b"extents")
        self._blocks = self._env.open_db(b"blocks")
        with self._env.begin() as txn:
            found = txn.get(b"format", db=self._meta)
            self.new = found is None
            self.clean = self.new or txn.get(b"clean", db=self._meta) == b"1"
            cursor = txn.cursor(self._blocks)
            last = bytes(cursor.key()) if cursor.last() else b""
        if found not in (None, FORMAT):
            if _bits_apart(found, FORMAT) <= FORMAT_BITS:
                raise lmdb.CorruptedError(f"format {found!r}, expected {FORMAT!r}")
            raise OtherFormatError(
                f"{path}: format {found!r}, this version has {FORMAT!r}; use another directory"
            )
        self._marked = self.clean
        self.last_number = _number_of(last)
        if self.new:  # one that was lost must not look like one that nothing was in yet
            self.mark(clean=False)

    def tables(self) -> tuple[dict[str, tuple[int, int]], dict[int, int]]:
        """Return namespaces (digest -> number, slot bytes) and extents (number -> namespace)."""
        most = self._rows_max()
        with self._env.begin() as txn:
            namespaces = list(islice(txn.cursor(self._namespaces), most))
            extents = list(islice(txn.cursor(self._extents), most))
        if most in (len(namespaces), len(extents)):
            raise lmdb.CorruptedError("more rows than there is room for")
        if any(len(v) != NAMESPACE.size for _, v in namespaces) or any(
            len(row) != NUMBER.size for row in chain.from_iterable(extents)
        ):
            raise ValueError("a table's row has a wrong size")
        return (
            {bytes(digest).decode(): NAMESPACE.unpack(value) for digest, value in namespaces},
            {NUMBER.unpack(number)[0]: NUMBER.unpack(owner)[0] for number, owner in extents},
        )

    def _rows_max(self) -> int:
        """Return what no table has as many rows as; pages that lead in a circle would never end."""
        return (self._path / "data.mdb").stat().st_size // _ROW_BYTES_MIN

    def mark(self, *, clean: bool) -> None:
        """Say durably whether all is in order."""
        with self._env.begin(write=True) as txn:
            self._put_mark(txn, clean=clean)
        self._marked = clean

    def _put_mark(self, txn: lmdb.Transaction, *, clean: bool) -> None:
        txn.put(b"format", FORMAT, db=self._meta)
        txn.put(b"clean", b"1" if clean else b"0", db=self._meta)

    def commit(self, changes: Commit) -> None:
        """Make changes durable, all or none; from then on it is not in order before mark()."""
        with self._env.begin(write=True) as txn:
            if self._marked:
                self._put_mark(txn, clean=False)
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
        self._marked = False

    def purge(self, number: int, rows_max: int) -> bool:
        """Delete records of a namespace; tell whether there are more."""
        with self._env.begin(write=True) as txn:
            cursor = txn.cursor(self._blocks)
            there = cursor.set_range(NUMBER.pack(number).rstrip(b"\0"))
            for _ in range(rows_max):
                if not there or _number_of(cursor.key()) != number:
                    return False
                cursor.delete()
                there = bool(cursor.key())  # it stands at the next one, if there is any
        return True

    def rows(self, number: int) -> Iterator[list[bytes]]:
        """Yield the records of a namespace in chunks: key, value, key, value, ..."""
        prefix = NUMBER.pack(number)
        with self._env.begin() as txn:
            left = min(txn.stat(self._blocks)["entries"], self._rows_max())
            cursor = txn.cursor(self._blocks)
            if not cursor.set_range(prefix):
                return
            pairs = cursor.iternext()
            while chunk := list(chain.from_iterable(islice(pairs, _CHUNK_ROWS))):
                left -= len(chunk) // 2
                if left < 0:
                    raise lmdb.CorruptedError("more records than it says")
                if not chunk[-2].startswith(prefix):
                    end = next(
                        n for n in range(0, len(chunk), 2) if not chunk[n].startswith(prefix)
                    )
                    yield chunk[:end]
                    return
                yield chunk

    def strays(self, known: set[int]) -> list[int]:
        """List the numbers that records begin with and no namespace has."""
        found = []
        with self._env.begin() as txn:
            cursor = txn.cursor(self._blocks)
            there = cursor.first()
            while there:
                number = _number_of(cursor.key())
                if number not in known:
                    found.append(number)
                if number == _NUMBER_MAX:
                    break
                there = cursor.set_range(NUMBER.pack(number + 1))
                if there and _number_of(cursor.key()) <= number:
                    raise lmdb.CorruptedError("keys are not in order")
        return found

    def close(self) -> None:
        """Close the file."""
        self._env.close()


def _number_of(key: bytes) -> int:
    return int(NUMBER.unpack(key[: NUMBER.size].ljust(NUMBER.size, b"\0"))[0])


def _bits_apart(one: bytes, other: bytes) -> int:
    if len(one) != len(other):
        return 8 * max(len(one), len(other))
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def shorter_than_it_says(env: lmdb.Environment, path: Path) -> bool:
    """Tell whether reading on may be a SIGBUS.

    A whole file may be short as well: pages that one commit took and gave back are never written.
    """
    expected = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    return (path / "data.mdb").stat().st_size < int(expected)


def read_whole(env: lmdb.Environment) -> None:
    """Read every page in use, free lists included. Raises lmdb.Error, or dies of a SIGBUS."""
    with Path(os.devnull).open("wb") as nowhere:
        env.copyfd(nowhere.fileno(), compact=True)


def verify(path: Path) -> None:
    """Read all of it, first without LMDB.

    Raises OSError where the disk cannot give it, lmdb.Error where it is damaged; or dies of that.
    """
    if not (path / "data.mdb").exists():
        return
    with (path / "data.mdb").open("rb", buffering=0) as file:
        while file.read(_CHUNK_BYTES):
            pass
    with lmdb.open(str(path), readonly=True, lock=False, create=False) as env:
        read_whole(env)
