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
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb
import msgspec

from kvstore.errors import ConfigError, TierError, TierIOError
from kvstore.fsck import Amount, Repair, Report
from kvstore.index import State
from tiers.nvme.files import ExtentFile, stride_of, sync_folder
from tiers.nvme.index import NOWHERE, Record
from tiers.nvme.journal import (
    FOLDER,
    FORMAT,
    NAMESPACE,
    NUMBER,
    RECORD_BYTES,
    VALUE,
    Commit,
    Journal,
    refuse_truncated,
    set_aside,
)
from tiers.nvme.loader import Loader
from tiers.nvme.space import Space
from tiers.nvme.tier import RUN_BYTES_MAX
from tiers.nvme.volume import Volume
from tiers.runner import Runner

LOCK_WAIT_S = 1.0
READERS = 8  # disks are flat beyond
_BUFFERS = 2 * READERS
_DAMAGED = 3  # exit status of the child
_OURS = {b"meta", b"namespaces", b"extents", b"blocks"}
# That an extent cannot be opened for one of these says nothing about it.
_NOT_ITS_FAULT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Head(msgspec.Struct):
    """The small tables of the index."""

    format: bytes | None = None
    clean: bool = True
    namespaces: list[tuple[str, int, int]] = []  # digest, number, slot bytes
    extents: list[tuple[int, int]] = []  # number, namespace
    blocks: int = 0
    tables: list[bytes] = []


class Row(NamedTuple):
    """A record as the journal has it."""

    key: bytes
    value: bytes
    place: int
    above: int
    generation: int


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
    known = Known(folder, report)
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

    def __init__(self, folder: Path, report: Report) -> None:
        """Counts go to the report."""
        self._folder = folder
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
        files = {path.name: path for path in sorted(self._folder.glob("*.extent"))}
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
        """Sort rows into spaces: newest first, as of two in one place that one wrote last."""
        blocks = self._report.blocks
        sound: list[Row] = []
        for key, value in rows:
            space = self._spaces.get(key[: NUMBER.size])
            if space is None or len(value) != VALUE.size:
                self._strays.append(key)
                blocks.foreign.add(0 if space is None else space.slot_bytes)
            else:
                place, above, generation, _, _ = VALUE.unpack(value)
                sound.append(Row(key, value, place, above, generation))
        sound.sort(key=lambda row: row.generation, reverse=True)
        born: dict[tuple[bytes, int], int] = {}
        for row in sound:
            born.setdefault((row.key[: NUMBER.size], row.place), row.generation)
        for row in sound:
            prefix, key = row.key[: NUMBER.size], row.key[NUMBER.size :]
            if row.above != NOWHERE and born.get((prefix, row.above), 0) >= row.generation:
                self._strays.append(row.key)  # a parent is older; this could be a circle
                blocks.unreachable.add(self._spaces[prefix].slot_bytes)
            else:
                self._spaces[prefix].load(key, row.value)
        for space in self._spaces.values():
            self._count_refused(space)
            before = len(space.index)
            deque(space.settle(), maxlen=0)
            blocks.unreachable.add(space.slot_bytes, before - len(space.index))

    def _count_refused(self, space: Space) -> None:
        """Count the rows that a space did not take, and its extents."""
        short = set()
        for ghost in space.to_delete:
            file = space.extents.get(ghost.slot >> 32)
            beyond = file is not None and ghost.slot & 0xFFFFFFFF >= file.count
            blocks = self._report.blocks
            (blocks.unreadable if beyond else blocks.foreign).add(space.slot_bytes)
            if beyond:
                short.add(ghost.slot >> 32)
        for number, extent in space.extents.items():
            size = on_disk(extent.path)
            extents = self._report.extents
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
            journal = Journal(self._folder, size // RECORD_BYTES)
            try:
                journal.commit(changes)
                if size == 0:
                    journal.mark(clean=True)
            finally:
                journal.close()
        done.blocks_dropped, done.extents_dropped = len(changes.deletes), len(self._gone)
        for path in self._orphans:
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
        return ExtentFile(path, slot_bytes, path.stat().st_size)
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
    head = read_head(path)
    refuse_format(path, head)
    if not head.blocks:
        return head, []
    try:
        loader = Loader(path)
    except TierIOError as exc:  # that no process starts is not the index's fault
        raise TierError(str(exc)) from exc
    try:
        return head, list(records(loader))
    finally:
        loader.close()


def records(loader: Loader) -> Iterator[tuple[bytes, bytes]]:
    """Yield all rows of the index. Raises TierIOError when they cannot be read."""
    last = b""
    while not loader.done:
        rows = loader.take()
        for key, value in rows:
            if key <= last:
                raise TierIOError("its keys are out of order")
            last = key
            yield key, value
        if not rows and not loader.done:
            time.sleep(0.001)


def read_head(path: Path) -> Head:
    """Read the small tables. Raises TierIOError when damaged, else TierError."""
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "tiers.nvme.fsck", str(path)],
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
    head = msgspec.msgpack.decode(done.stdout, type=Head)
    numbers = {number for _, number, _ in head.namespaces}
    if len(numbers) < len(head.namespaces) or not all(size for _, _, size in head.namespaces):
        raise TierIOError(f"{path} cannot be read: its namespaces contradict each other")
    return head


def refuse_format(path: Path, head: Head) -> None:
    """Raise ConfigError for an index that is another program's, or another version's."""
    if head.format not in (None, FORMAT):
        raise ConfigError(f"{path}: format {head.format!r}, this version has {FORMAT!r}")
    if head.format is None and not _OURS.issuperset(head.tables):
        raise ConfigError(f"{path}: an LMDB file, but not an index of kvstore")
    if head.format is not None and not _OURS.issubset(head.tables):
        raise TierIOError(f"{path} cannot be read: a table is missing")


def head_of(path: Path) -> Head:
    """Read the small tables in this process. Raises lmdb.Error, struct.error, ValueError."""
    with lmdb.open(str(path), readonly=True, max_dbs=len(_OURS), lock=False, create=False) as env:
        refuse_truncated(env, path)
        with env.begin() as txn:
            names = {bytes(name) for name, _ in txn.cursor()}
        tables = {name: env.open_db(name, create=False) for name in names & _OURS}
        with env.begin() as txn:
            small = {
                name: [(bytes(key), bytes(value)) for key, value in txn.cursor(tables[name])]
                for name in names & {b"meta", b"namespaces", b"extents"}
            }
            blocks = txn.stat(tables[b"blocks"])["entries"] if b"blocks" in tables else 0
    meta = dict(small.get(b"meta", ()))
    return Head(
        format=meta.get(b"format"),
        clean=b"format" not in meta or meta.get(b"clean") == b"1",
        namespaces=[(d.decode(), *NAMESPACE.unpack(v)) for d, v in small.get(b"namespaces", ())],
        extents=[
            (NUMBER.unpack(n)[0], NUMBER.unpack(owner)[0]) for n, owner in small.get(b"extents", ())
        ],
        blocks=blocks,
        tables=sorted(names),
    )


def main() -> int:
    """Run as the child that read_head starts."""
    try:
        head = head_of(Path(sys.argv[1]))
    except (lmdb.Error, struct.error, ValueError) as exc:
        sys.stderr.write(f"{exc}\n")
        return _DAMAGED
    sys.stdout.buffer.write(msgspec.msgpack.encode(head))
    return 0


if __name__ == "__main__":
    sys.exit(main())
