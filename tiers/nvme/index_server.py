"""The process that owns the index of a store, and the LMDB file (see messages.py).

A page that cannot be read kills this process only. One thread does what the store asks for, in its
order. It ends when the store does, and at once: the lock on the directory, which it has inherited,
is then free for the next.

A record is put after its data was synced, and taken out before its slot is written again. Records
that go together (a block and what hangs below it) go in one transaction.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from tiers.nvme.files import read_through
from tiers.nvme.messages import (
    BLOCKS,
    EXTENTS,
    FORMAT,
    GENERATION,
    META,
    NUMBER,
    TOKENS,
    VALUE,
    Answer,
    Commit,
    Connection,
    Failed,
    Load,
    Open,
    Opened,
    Page,
    Request,
    TokenPage,
    Tokens,
    of_token_row,
    requests,
)

if TYPE_CHECKING:
    from tiers.nvme.index_load import Sorted

_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 1 << 15
_STEPS_S = 1.0  # of one answer: what does not answer for ten counts as hanging
_TABLES_MAX = 1 << 14  # that a process opens; the next one opens those that have an extent
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
_WRONG = (  # in plain errors
    "LMDB data format",  # of another version
    os.strerror(errno.EFAULT),  # a page or a run of them is said to be where no memory can be
)
_FIRST_FORMAT = b"namespaces"  # a table that only that one had
FORMAT_BITS = 4
"""Another version's format differs from ours in more bits; in fewer, these have flipped."""


class OtherFormatError(Exception):
    """The index is of another program, or version."""


_ERRORS = (lmdb.Error, OSError, MemoryError, ValueError, SystemError, OtherFormatError)


def is_damage(exc: Exception) -> bool:
    """Tell whether an error says that the file's content is wrong; a failing disk says nothing.

    All of LMDB's own errors do but for a few. What the system says to it is a plain lmdb.Error, and
    is about the content only where LMDB gave it a wrong address. The binding says itself, as a
    plain one, that the first page has another version of LMDB's format. A SystemError comes from
    the binding: a call that went well, with an error behind it.
    """
    if isinstance(exc, SystemError):
        return isinstance(exc.__cause__, Exception) and is_damage(exc.__cause__)
    if isinstance(exc, lmdb.Error):
        if type(exc) is lmdb.Error:
            return any(text in str(exc) for text in _WRONG)
        return not isinstance(exc, _NOT_ITS_FAULT)
    return isinstance(exc, ValueError)


class IndexFile:
    """The open file. Raises lmdb.Error; what is_damage() tells apart."""

    def __init__(
        self,
        path: Path,
        map_bytes: int,
        *,
        verify: bool = False,
        read_only: bool = False,
        tokens: bool = True,
    ) -> None:
        """Open it, or make it unless it is only to be read.

        verify: read all of it, first without LMDB. tokens: keep token ids. Raises
        OtherFormatError, and OSError where the disk cannot give it; where it is damaged, the
        process may die of that.
        """
        self._path = path
        self._read_only = read_only
        self._keeps_tokens = tokens or read_only
        self._blocks: dict[bytes, lmdb._Database] = {}  # tables by name
        self.extents: dict[int, tuple[int, str]] = {}  # number -> slot bytes, digest
        self.strays = 0  # records in tables of no namespace
        self.tokens_removed = 0  # rows of token ids
        if verify:
            _read_plain(path / "data.mdb")
        # The store's lock on the directory is the only one: no other process reads meanwhile.
        self._env = lmdb.open(
            str(path),
            map_size=map_bytes,
            max_dbs=_TABLES_MAX,
            lock=False,
            readahead=False,
            readonly=read_only,
            create=not read_only,
        )
        try:
            if verify or self._shorter_than_it_says():
                with Path(os.devnull).open("wb") as nowhere:  # every page in use, free lists, too
                    self._env.copyfd(nowhere.fileno(), compact=True)
            self._open_tables(path)
        except BaseException:
            self._env.close()
            raise

    def _shorter_than_it_says(self) -> bool:
        """Tell whether reading on may be a SIGBUS.

        A whole file may be short as well: pages that one commit took and gave back are never
        written.
        """
        expected = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        return self._file_bytes() < int(expected)

    def _file_bytes(self) -> int:
        return (self._path / "data.mdb").stat().st_size

    def _open_tables(self, path: Path) -> None:
        with self._env.begin() as txn:
            names = {bytes(name) for name, _ in txn.cursor()}
        found = None
        if META in names:
            self._meta = self._env.open_db(META, create=False)
            with self._env.begin() as txn:
                found = txn.get(b"format", db=self._meta)
                self.clean = txn.get(b"clean", db=self._meta) == b"1"
        self._refuse(path, found, names)
        self.new = found is None
        self.clean = self.new or self.clean
        self._marked = self.clean
        if self.new and self._read_only:
            return
        self._meta, self._extents = map(self._env.open_db, (META, EXTENTS))
        if self.new:  # one that was lost must not look like one that nothing was in yet
            self.commit(Commit())
            return
        self.extents = self._read_extents()
        digests = {digest.encode() for _, digest in self.extents.values()}
        known = {kind + digest for kind in (BLOCKS, TOKENS) for digest in digests}
        tokens = {name for name in names if name.startswith(TOKENS)}
        gone = tokens - known if self._keeps_tokens else tokens
        self.tokens_removed = self._drop(gone)
        for name in known & names - gone:
            self._blocks[name] = self._env.open_db(name, create=False)
        self.strays = self._drop(names - known - tokens - {META, EXTENTS})

    def _drop(self, names: Iterable[bytes]) -> int:
        """Take out tables, and count their records; of a file only to be read, count them."""
        tables = [self._env.open_db(name, create=False) for name in names]
        with self._env.begin(write=not self._read_only) as txn:
            count = sum(int(txn.stat(table)["entries"]) for table in tables)
            for table in () if self._read_only else tables:
                txn.drop(table)
        return count

    def _refuse(self, path: Path, found: bytes | None, names: set[bytes]) -> None:
        """Raise OtherFormatError for what is another's, lmdb.CorruptedError for what is not whole.

        found: its format; names: its tables.
        """
        if found is None and names - {META, EXTENTS}:
            if any(
                name.startswith((META, EXTENTS, BLOCKS, TOKENS, _FIRST_FORMAT)) for name in names
            ):
                raise lmdb.CorruptedError(f"no table {META!r}, or an empty one")
            raise OtherFormatError(f"{path}: an LMDB file, but not an index of kvstore")
        if found not in (None, FORMAT):
            if _bits_apart(found, FORMAT) <= FORMAT_BITS:
                raise lmdb.CorruptedError(f"format {found!r}, expected {FORMAT!r}")
            raise OtherFormatError(
                f"{path}: format {found!r}, this version has {FORMAT!r}; use another directory"
            )
        if found is not None and EXTENTS not in names:
            raise lmdb.CorruptedError("a table is missing")

    def _read_extents(self) -> dict[int, tuple[int, str]]:
        """Return number -> slot bytes, digest of the namespace. Raises ValueError."""
        most = self._rows_max()
        with self._env.begin() as txn:
            rows = list(islice(txn.cursor(self._extents), most))
        if len(rows) == most:
            raise lmdb.CorruptedError("more rows than there is room for")
        if any(len(key) != NUMBER.size or len(value) <= NUMBER.size for key, value in rows):
            raise ValueError("a table's row has a wrong size")
        return {
            NUMBER.unpack(key)[0]: (NUMBER.unpack_from(value)[0], value[NUMBER.size :].decode())
            for key, value in rows
        }

    def _rows_max(self) -> int:
        """Return what no table has as many rows as; pages that lead in a circle would never end."""
        return self._file_bytes() // _ROW_BYTES_MIN

    def commit(self, changes: Commit) -> None:
        """Make changes durable, all or none."""
        with self._env.begin(write=True) as txn:
            if self._marked or changes.clean:
                txn.put(b"format", FORMAT, db=self._meta)
                txn.put(b"clean", b"1" if changes.clean else b"0", db=self._meta)
            for digest in changes.cleared:
                txn.drop(self._table(txn, digest), delete=False)
                if TOKENS + digest.encode() in self._blocks:
                    txn.drop(self._table(txn, digest, TOKENS), delete=False)
            for digest, keys in changes.deletes.items():
                self._delete(txn, digest, keys)
            for digest, rows in changes.puts.items():
                table = self._table(txn, digest)
                for key, value in rows:
                    txn.put(key, value, db=table)
            self._commit_tokens(txn, changes)
            for number, slot_bytes, digest in changes.extents:
                owner = NUMBER.pack(slot_bytes) + digest.encode()
                txn.put(NUMBER.pack(number), owner, db=self._extents)
            for number in changes.extents_gone:
                txn.delete(NUMBER.pack(number), db=self._extents)
        self._marked = changes.clean

    def _delete(self, txn: lmdb.Transaction, digest: str, keys: Iterable[bytes]) -> None:
        """Take out records, each with its token ids."""
        table, tokens = self._table(txn, digest), self._blocks.get(TOKENS + digest.encode())
        for key in keys:
            value = txn.pop(key, db=table)
            if tokens is not None and value is not None and len(value) == VALUE.size:
                txn.delete(GENERATION.pack(VALUE.unpack(value)[2]), db=tokens)

    def _commit_tokens(self, txn: lmdb.Transaction, changes: Commit) -> None:
        for digest, rows in changes.tokens.items():
            table = self._table(txn, digest, TOKENS)
            for generation, row in rows:
                txn.put(GENERATION.pack(generation), row, db=table)

    def tokens(self, digest: str, after: int, most: int) -> TokenPage:
        """Return rows of token ids, those of higher generations than `after`, the lowest first."""
        page, size = TokenPage([], last=True), 0
        table = self._blocks.get(TOKENS + digest.encode())
        if table is None:
            return page
        with self._env.begin(table) as txn, txn.cursor() as cursor:
            there = cursor.set_range(GENERATION.pack(after + 1))
            while there and len(page.rows) < most and size < _CHUNK_BYTES:
                name, row = cursor.item()
                page.rows.append((GENERATION.unpack(name)[0], *of_token_row(row)))
                size += len(row)
                there = cursor.next()
        page.last = not there
        return page

    def _table(self, txn: lmdb.Transaction, digest: str, kind: bytes = BLOCKS) -> lmdb._Database:
        """Return a namespace's table, made if it is not there."""
        name = kind + digest.encode()
        if name not in self._blocks:
            self._blocks[name] = self._env.open_db(name, txn=txn)
        return self._blocks[name]

    def rows(self, digest: str) -> Iterator[list[bytes]]:
        """Yield the records of a namespace in chunks: key, value, key, value, ..."""
        table = self._blocks.get(BLOCKS + digest.encode())
        if table is None:
            return
        with self._env.begin(table) as txn:
            left = min(txn.stat(table)["entries"], self._rows_max())
            pairs = iter(txn.cursor())
            while chunk := list(chain.from_iterable(islice(pairs, _CHUNK_ROWS))):
                left -= len(chunk) // 2
                if left < 0:
                    raise lmdb.CorruptedError("more records than its table counts")
                if not all(chunk[::2]):
                    raise lmdb.CorruptedError("a key is empty")
                if self._read_only and any(one >= two for one, two in pairwise(chunk[::2])):
                    raise lmdb.CorruptedError("its keys are out of order")
                yield chunk

    def close(self) -> None:
        """Close the file."""
        self._env.close()


def _bits_apart(one: bytes, other: bytes) -> int:
    if len(one) != len(other):
        return 8 * max(len(one), len(other))
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def _read_plain(file: Path) -> None:
    """Read a file that may be there. Raises OSError, and lmdb.CorruptedError for an empty one."""
    if not file.exists():
        return
    if file.stat().st_size == 0:
        raise lmdb.CorruptedError("it is empty")
    with file.open("rb", buffering=0) as content:
        read_through(content.fileno())


class IndexServer:
    """Does what requests say, on one file."""

    def __init__(self) -> None:
        self.file: IndexFile | None = None
        self.lock_fd = -1  # kept until this process ends
        self.broken = False  # LMDB takes no more writes after one that failed
        self._sorted: Sorted | None = None  # records of a namespace that is being loaded
        self._digest = ""
        self._steps: Iterator[None] = iter(())

    def answer(self, request: Request) -> Answer:
        """Do a request."""
        try:
            if isinstance(request, Open):
                return self._open(request)
            if self.file is None:
                return Failed("the index is not open")
            if isinstance(request, Load):
                return self._page(self.file, request)
            if isinstance(request, Tokens):
                return self.file.tokens(request.digest, request.after, request.most)
            self._sorted = None
            self.file.commit(request)
        except _ERRORS as exc:
            self.broken = True
            return failed(exc)
        return None

    def _page(self, file: IndexFile, request: Load) -> Page:
        """Return the next records; none while they are still read and sorted for long."""
        # It takes as long as all else here, and a store that starts empty needs none of it.
        from tiers.nvme.index_load import Sorted  # noqa: PLC0415

        if self._sorted is None or self._digest != request.digest:
            self._digest = request.digest
            self._sorted = Sorted(request.slot_bytes, request.counts)
            self._steps = self._sorted.sort(file.rows(request.digest))
        end_s = time.monotonic() + _STEPS_S
        for _ in self._steps:
            if time.monotonic() > end_s:
                return Page()
        page = self._sorted.page(request.first, request.most)
        if page.refused is not None:  # the last
            self._sorted = None
        return page

    def _open(self, request: Open) -> Opened:
        path = Path(request.path)
        self.lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one before may hang in a write
        file = self.file = IndexFile(
            path,
            request.map_bytes,
            verify=request.verify,
            read_only=request.read_only,
            tokens=request.tokens,
        )
        return Opened(file.new, file.clean, file.strays, file.extents, file.tokens_removed)


def failed(exc: Exception) -> Failed:
    """Put an error into words, and say whether the file is damaged or of another kind."""
    return Failed(
        str(exc.__cause__ or exc) or type(exc).__name__,
        damaged=is_damage(exc),
        format=isinstance(exc, OtherFormatError),
    )


def end_with(fd: int) -> None:
    """Wait for the store's end of a socket to close, which it does however the store ends."""
    watched = select.poll()
    watched.register(fd, 0)  # a hang-up is always reported
    watched.poll()
    os._exit(0)


def main() -> int:
    """Run as the process that tiers.nvme.index_client starts. Argument: its end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they mean the store, which still commits
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=end_with, args=(end.fileno(),), daemon=True).start()
    store, server = Connection(end, requests), IndexServer()
    with contextlib.suppress(EOFError, OSError):  # the store is ending
        while not server.broken:
            store.send(server.answer(store.receive()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
