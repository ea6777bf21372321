"""Verifies the directory of an NVMe tier that no store uses, and can drop what is wrong.

Nothing needs it: a store checks every block that it reads, and starts with any directory. It says
in advance, and for all blocks, what a store would find out one by one.

The index is read in processes of their own, which a damaged LMDB file may end. Only once these
have seen all of it does a repair open it here.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import BinaryIO

import lmdb
import msgspec

from kvstore.core.errors import ConfigError, TierError, TierIOError
from kvstore.core.index import State
from tiers.nvme.directory import EXTENT, Volume
from tiers.nvme.files import ExtentFile, stride_of, sync_folder
from tiers.nvme.fsck_report import Amount, Repair, Report
from tiers.nvme.index import Record
from tiers.nvme.index_client import Journal
from tiers.nvme.index_file import is_damage, verify
from tiers.nvme.index_load import Refused, Sorted, packed
from tiers.nvme.messages import FOLDER, FORMAT, NAMESPACE, NUMBER, RECORD_BYTES, Commit
from tiers.nvme.namespace import Space
from tiers.nvme.startup import set_aside
from tiers.nvme.tier import RUN_BYTES_MAX
from tiers.runner import Runner

LOCK_WAIT_S = 1.0
READERS = 8  # disks are flat beyond
_BUFFERS = 2 * READERS
_DAMAGED = 3  # exit status of the child
_CHUNK_ROWS = 1 << 14
_OURS = {b"meta", b"namespaces", b"extents", b"blocks"}
# That an extent cannot be opened for one of these says nothing about it.
_NOT_ITS_FAULT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Head(msgspec.Struct):
    """The small tables of the index."""

    format: bytes | None = None
    clean: bool = True
    namespaces: list[tuple[str, int, int]] = []  # digest, number, slot bytes
    extents: list[tuple[int, int]] = []  # number, namespace
    tables: list[bytes] = []


class Batch(msgspec.Struct, eq=False):
    """Neighbouring blocks of one extent, read in one call."""

    space: Space
    records: list[Record]
    buffer: memoryview = memoryview(b"")


class Read(msgspec.Struct, eq=False):
    """What became of a batch: per block, "ok" or the cause why not."""

    batch: Batch
    causes: list[str]
    bug: Exception | None = None


Watch = Callable[[Amount, Amount], None]
"""Called with what is read, and with what there is to read."""


def examine(folder: Path, *, repair: bool, watch: Watch = lambda _done, _all: None) -> Report:
    """Verify all that is in a directory; with repair, drop what is wrong.

    Raises ConfigError when it is no tier's or in use, TierError when it cannot be looked at.
    """
    refuse_others(folder)
    volume = Volume(folder)
    volume.open(LOCK_WAIT_S)
    report = Report(str(folder))
    known = Known(folder, report, volume.lock_fd)
    try:
        known.read()
        known.verify(watch)
        report.ok = not report.wrong()
        if repair:
            report.repair = known.repair()
    except OSError as exc:
        raise TierError(f"{folder}: {exc}") from exc
    finally:
        known.close()
        volume.close()
    return report


def refuse_others(folder: Path) -> None:
    """Raise ConfigError for what no tier has made: a lock file, or worse, has no place there."""
    if not folder.is_dir():
        what = "is no directory" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}")
    left_over = (folder / "lock").is_file() and any(folder.glob("*.extent"))
    if not (folder / FOLDER / "data.mdb").is_file() and not left_over:
        raise ConfigError(f"{folder} is no NVMe tier's directory: it has no {FOLDER}/data.mdb")


class Known:
    """What the index says, brought together with what is on disk."""

    def __init__(self, folder: Path, report: Report, lock_fd: int) -> None:
        """Counts go to the report."""
        self._folder = folder
        self._lock_fd = lock_fd
        self._report = report
        self._spaces: dict[bytes, Space] = {}  # by the beginning of their keys
        self._strays: list[bytes] = []  # keys of rows that no space takes
        self._gone: list[int] = []  # extents in the index that blocks cannot be in
        self._orphans: list[Path] = []
        self._deletes: list[bytes] = []

    # Reading the index

    def read(self) -> None:
        """Read the index and open the extents. Raises ConfigError for another format."""
        path = self._folder / FOLDER
        head, rows = Head(), list[tuple[bytes, bytes]]()
        if path.exists():
            try:
                head, rows = read_index(path)
            except TierIOError as exc:
                self._report.index_error = str(exc)
            data = path / "data.mdb"
            self._report.used_bytes += on_disk(data) if data.exists() else 0
        self._report.in_order, self._report.namespaces = head.clean, len(head.namespaces)
        self._open_extents(head)
        self._load(rows)

    def _open_extents(self, head: Head) -> None:
        for digest, number, slot_bytes in head.namespaces:
            self._spaces[NUMBER.pack(number)] = Space(number, digest, slot_bytes)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # all are open at one time
        with os.scandir(self._folder) as entries:
            names = sorted(e.name for e in entries if not e.is_dir(follow_symlinks=False))
        files = {name: self._folder / name for name in names if EXTENT.fullmatch(name)}
        for number, owner in sorted(head.extents):
            space, name = self._spaces.get(NUMBER.pack(owner)), f"{number:06d}.extent"
            file = None if space is None else open_extent(self._folder / name, space.slot_bytes)
            if space is None or file is None:
                self._gone.append(number)
                self._report.extents.lost.add(0)
            else:
                space.extents[number] = file
                del files[name]
        self._orphans = list(files.values())
        for path in self._orphans:
            self._report.extents.orphan.add(on_disk(path))
        self._report.used_bytes += self._report.extents.orphan.bytes

    def _load(self, rows: list[tuple[bytes, bytes]]) -> None:
        """Have each space take its rows, as a store does."""
        mine: dict[bytes, list[tuple[bytes, bytes]]] = {prefix: [] for prefix in self._spaces}
        for key, value in rows:
            if key[: NUMBER.size] in mine:
                mine[key[: NUMBER.size]].append((key, value))
            else:
                self._strays.append(key)
                self._report.blocks.foreign.add(0)
        for prefix, space in self._spaces.items():
            found = Sorted(space.number, space.slot_bytes, space.slot_counts, packed(mine[prefix]))
            space.start_loading()
            for batch in found.batches():
                space.load(batch)
            self._count_refused(space, found.refused)
            space.refuse(found.refused)
            deque(space.settle(), maxlen=0)

    def _count_refused(self, space: Space, refused: list[Refused]) -> None:
        """Count the rows that stand for nothing, and the extents."""
        blocks, extents = self._report.blocks, self._report.extents
        for _, _, cause in refused:
            amount = blocks.unreadable if cause == "beyond" else getattr(blocks, cause)
            amount.add(space.slot_bytes)
        short = {place >> 32 for _, place, cause in refused if cause == "beyond"}
        for number, extent in space.extents.items():
            size = on_disk(extent.path)
            (extents.short if number in short else extents.ok).add(size)
            self._report.used_bytes += size

    # Reading the blocks

    def verify(self, watch: Watch) -> None:
        """Read every block and compare its checksum."""
        done, whole = Amount(), Amount()
        for space in self._spaces.values():
            whole.add(space.slot_bytes, len(space.index))
        watch(done, whole)
        start_s = time.monotonic()
        bad: list[tuple[Space, Record]] = []
        todo = [batch for space in self._spaces.values() for batch in batches(space)]
        with closing(verified(todo)) as reads:
            for read in reads:
                space, batch = read.batch.space, read.batch.records
                for record, cause in zip(batch, read.causes, strict=True):
                    if cause != "ok":
                        getattr(self._report.blocks, cause).add(space.slot_bytes)
                        bad.append((space, record))
                done.add(space.slot_bytes, len(batch))
                watch(done, whole)
        self._report.read_bytes = done.bytes
        self._report.read_s = time.monotonic() - start_s
        self._drop(bad)

    def _drop(self, bad: list[tuple[Space, Record]]) -> None:
        """Take bad blocks out, with what hangs below them."""
        blocks = self._report.blocks
        for space in self._spaces.values():
            before = len(space.index)
            mine = [record for owner, record in bad if owner is space]
            for record in mine:
                if record.state is not State.DROPPED:
                    space.drop(record, "damaged")
            blocks.unreachable.add(space.slot_bytes, before - len(space.index) - len(mine))
            blocks.ok.add(space.slot_bytes, len(space.index))
            self._deletes += [space.journal_key(record) for record in space.take_deletes()]

    # Repairing

    def repair(self) -> Repair:
        """Drop from the index what is wrong, and remove files that are not in it."""
        done = Repair()
        if self._report.index_error is not None:
            done.index_kept_as = str(set_aside(self._folder))
        index = self._folder / FOLDER / "data.mdb"
        size = index.stat().st_size if index.exists() else 0
        changes = Commit(deletes=self._strays + self._deletes, extents_gone=self._gone)
        if changes or size == 0:
            journal = Journal(self._folder, size // RECORD_BYTES, self._lock_fd)
            try:
                journal.commit(changes)
                if size == 0:
                    journal.mark(clean=True)
            finally:
                journal.close()
        done.blocks_dropped, done.extents_dropped = len(changes.deletes), len(self._gone)
        for path in self._orphans:  # a link is removed itself, not what it leads to
            path.unlink(missing_ok=True)
            done.files_removed += 1
        sync_folder(self._folder)
        return done

    def close(self) -> None:
        """Close the extents."""
        for space in self._spaces.values():
            for file in space.extents.values():
                file.close()


def on_disk(path: Path) -> int:
    """Bytes that a file takes on disk."""
    return path.lstat().st_blocks * 512


def open_extent(path: Path, slot_bytes: int) -> ExtentFile | None:
    """Open an extent; None when it is not there. Raises TierError when that is not its fault."""
    try:
        return ExtentFile(path, slot_bytes, path.lstat().st_size)
    except OSError as exc:
        if exc.errno in _NOT_ITS_FAULT:
            raise TierError(f"{path} cannot be opened: {exc.strerror}") from exc
        return None


def batches(space: Space) -> Iterator[Batch]:
    """Yield the blocks of a space in the order of their places, neighbours together."""
    longest = max(1, RUN_BYTES_MAX // stride_of(space.slot_bytes))
    run: list[Record] = []
    for record in sorted(space.index, key=lambda record: record.slot):
        if run and (len(run) == longest or record.slot != run[-1].slot + 1):
            yield Batch(space, run)
            run = []
        run.append(record)
    if run:
        yield Batch(space, run)


def verified(todo: list[Batch]) -> Generator[Read, None, None]:
    """Read batches on several threads, and yield each when it is done."""
    size = max((len(b.records) * stride_of(b.space.slot_bytes) for b in todo), default=0)
    if not size:
        return
    free = [memoryview(mmap.mmap(-1, size)) for _ in range(min(_BUFFERS, len(todo)))]
    buffers = len(free)
    runner: Runner[Batch, Read] = Runner(
        "kvstore-fsck", read_batch, lambda batch, exc: Read(batch, [], exc), READERS
    )
    waiting = iter(todo)
    try:
        while True:
            for batch in islice(waiting, len(free)):
                batch.buffer = free.pop()
                runner.submit(batch)
            if len(free) == buffers:
                return
            runner.wait(lambda: runner.open < buffers - len(free))
            for read in runner.poll():
                if read.bug is not None:
                    raise TierError(f"a bug in fsck: {read.bug!r}") from read.bug
                free.append(read.batch.buffer)
                yield read
    finally:
        runner.close()


def read_batch(batch: Batch) -> Read:
    """Read blocks and compare their checksums; one by one where they cannot be read together."""
    space, records = batch.space, batch.records
    place = records[0].slot
    file = space.extents[place >> 32]
    try:
        file.read(place & 0xFFFFFFFF, [batch.buffer[: len(records) * file.stride]])
    except (OSError, TierIOError):
        if len(records) == 1:
            return Read(batch, ["unreadable"])
        alone = [Batch(space, [record], batch.buffer) for record in records]
        return Read(batch, [cause for one in alone for cause in read_batch(one).causes])
    causes = []
    for number, record in enumerate(records):
        at = number * file.stride
        found = space.checksum(record, batch.buffer[at : at + space.slot_bytes])
        causes.append("ok" if found == record.checksum else "damaged")
    return Read(batch, causes)


# The index, read elsewhere


def read_index(path: Path) -> tuple[Head, list[tuple[bytes, bytes]]]:
    """Return tables and rows. Raises TierIOError when damaged, ConfigError when not ours."""
    frames = frames_of(path)
    head = msgspec.msgpack.decode(next(frames), type=Head)
    refuse_format(path, head)
    numbers = {number for _, number, _ in head.namespaces}
    if len(numbers) < len(head.namespaces) or not all(size for _, _, size in head.namespaces):
        raise TierIOError(f"{path} cannot be read: its namespaces contradict each other")
    rows: list[tuple[bytes, bytes]] = []
    for frame in frames:
        chunk = msgspec.msgpack.decode(frame, type=list[bytes])
        rows += zip(chunk[::2], chunk[1::2], strict=True)
    if any(one[0] >= two[0] for one, two in pairwise(rows)):
        raise TierIOError(f"{path} cannot be read: its keys are out of order")
    return head, rows


def frames_of(path: Path) -> Iterator[bytes]:
    """Yield what the child says of the index. Raises TierIOError when damaged, else TierError."""
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", "tiers.nvme.fsck", str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    why = lines[-1] if lines else f"its reader ended with {done.returncode}"
    if done.returncode in (_DAMAGED, -signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT):
        raise TierIOError(f"{path} cannot be read: {why}")
    if done.returncode:
        raise TierError(f"{path} could not be looked at: {why}")
    at = 0
    while at < len(done.stdout):
        (size,) = NUMBER.unpack_from(done.stdout, at)
        yield done.stdout[at + NUMBER.size : at + NUMBER.size + size]
        at += NUMBER.size + size


def refuse_format(path: Path, head: Head) -> None:
    """Raise ConfigError for an index that is another program's, or another version's."""
    if head.format not in (None, FORMAT):
        raise ConfigError(f"{path}: format {head.format!r}, this version has {FORMAT!r}")
    if head.format is None and not _OURS.issuperset(head.tables):
        raise ConfigError(f"{path}: an LMDB file, but not an index of kvstore")
    if head.format is not None and not _OURS.issubset(head.tables):
        raise TierIOError(f"{path} cannot be read: a table is missing")


def say(path: Path, out: BinaryIO) -> None:
    """Write the small tables and all rows. Raises lmdb.Error, OSError, struct.error, ValueError."""
    if (path / "data.mdb").stat().st_size == 0:
        raise lmdb.CorruptedError("it is empty")
    verify(path)
    with lmdb.open(str(path), readonly=True, max_dbs=len(_OURS), lock=False, create=False) as env:
        with env.begin() as txn:
            names = {bytes(name) for name, _ in txn.cursor()}
        tables = {name: env.open_db(name, create=False) for name in names & _OURS}
        with env.begin() as txn:
            small = {
                name: [(bytes(key), bytes(value)) for key, value in txn.cursor(tables[name])]
                for name in names & {b"meta", b"namespaces", b"extents"}
            }
            out.write(framed(head_of(small, sorted(names))))
            if b"blocks" in tables:
                rows = chain.from_iterable(txn.cursor(tables[b"blocks"]))
                while chunk := list(islice(rows, 2 * _CHUNK_ROWS)):
                    out.write(framed(chunk))


def head_of(small: dict[bytes, list[tuple[bytes, bytes]]], names: list[bytes]) -> Head:
    """Put the small tables into a Head. Raises struct.error, ValueError."""
    meta = dict(small.get(b"meta", ()))
    return Head(
        format=meta.get(b"format"),
        clean=b"format" not in meta or meta.get(b"clean") == b"1",
        namespaces=[(d.decode(), *NAMESPACE.unpack(v)) for d, v in small.get(b"namespaces", ())],
        extents=[
            (NUMBER.unpack(n)[0], NUMBER.unpack(owner)[0]) for n, owner in small.get(b"extents", ())
        ],
        tables=names,
    )


def framed(message: Head | list[bytes]) -> bytes:
    """Encode, with its length before it."""
    body = msgspec.msgpack.encode(message)
    return NUMBER.pack(len(body)) + body


def main() -> int:
    """Run as the child that frames_of starts."""
    try:
        say(Path(sys.argv[1]), sys.stdout.buffer)
    except (lmdb.Error, struct.error, ValueError, SystemError) as exc:
        sys.stderr.write(f"{exc}\n")
        return _DAMAGED if is_damage(exc) or isinstance(exc, struct.error) else 1
    except OSError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
