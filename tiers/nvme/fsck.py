"""Verifies the directory of an NVMe tier that no store uses, and can drop what is wrong.

Nothing needs it: a store checks every block that it reads, and starts with any directory. It says
in advance, and for all blocks, what a store would find out one by one. It reads the index as a
store does, through its process, which a damaged file may end.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from kvstore.core.errors import ConfigError, TierError, TierIOError
from kvstore.core.index import State
from kvstore.open_files import files_max
from tiers.nvme.attached import set_aside, spaces_of
from tiers.nvme.directory import EXTENT, Directory
from tiers.nvme.files import RUN_BLOCKS_MAX, ExtentFile, runs_of, stride_of
from tiers.nvme.fsck_report import Amount, FsckReport, Repair
from tiers.nvme.index import Record
from tiers.nvme.index_client import IndexClient, IndexDamagedError
from tiers.nvme.messages import FOLDER, RECORD_BYTES, Commit
from tiers.nvme.namespace import POSITION, DiskNamespace, Loading
from tiers.nvme.tier import RUN_BYTES_MAX

LOCK_WAIT_S = 1.0
EXTENT_BYTES = 64 << 30  # no file with holes is taken to be longer
READERS = 8  # disks are flat beyond
_BATCH_RUNS = 8 * READERS  # which a Ctrl-C waits for
# That an extent cannot be opened for one of these says nothing about it.
_NOT_ITS_FAULT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}

Refused = tuple[bytes, int, str]
Progress = Callable[[Amount, Amount], None]
"""Called with what is read, and with what there is to read."""


def examine(
    folder: Path, *, repair: bool, watch: Progress = lambda _done, _all: None
) -> FsckReport:
    """Verify all that is in a directory; with repair, drop what is wrong.

    Raises ConfigError when it is no tier's or in use, TierError when it cannot be looked at.
    """
    refuse_others(folder)
    volume = Directory(folder)
    try:
        volume.open(LOCK_WAIT_S)
    except OSError as exc:
        raise ConfigError(f"{folder}: cannot be used: {exc.strerror}") from exc
    report = FsckReport(str(folder))
    known = Known(volume, report)
    try:
        known.read()
        known.verify(watch)
        report.ok = not report.wrong()
        if repair:
            report.repair = known.repair()
            _look_again(volume, report.repair)
    except OSError as exc:
        raise TierError(f"{folder}: {exc}") from exc
    finally:
        known.close()
        volume.close()
    return report


def _look_again(volume: Directory, done: Repair) -> None:
    """Set the index aside if what was dropped from it has shown damage that reading did not."""
    if not done.blocks_dropped and not done.extents_dropped:
        return
    known = Known(volume, FsckReport(str(volume.path)))
    try:
        known.read()
        if not known.readable:
            more = known.repair()
            done.index_kept_as = more.index_kept_as
            done.files_removed += more.files_removed
    finally:
        known.close()


def refuse_others(folder: Path) -> None:
    """Raise ConfigError for what no tier has made: a lock file, or worse, has no place there."""
    if not folder.is_dir():
        what = "is no directory" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}, expected a directory of [nvme] path")
    left_over = (folder / "lock").is_file() and any(folder.glob("*.extent"))
    if not (folder / FOLDER / "data.mdb").is_file() and not left_over:
        raise ConfigError(f"{folder} is no NVMe tier's directory: it has no {FOLDER}/data.mdb")


class Known:
    """What the index says, brought together with what is on disk."""

    def __init__(self, volume: Directory, report: FsckReport) -> None:
        self._volume = volume
        self._report = report
        self._spaces: list[DiskNamespace] = []
        self._strays = 0  # rows that no space takes
        self._gone: list[int] = []  # extents in the index that blocks cannot be in
        self._orphans: list[Path] = []
        self._deletes: dict[str, list[bytes]] = {}  # by namespace

    # Reading the index

    def read(self) -> None:
        """Read the index, and open the extents. Raises ConfigError for another format."""
        data = self._volume.path / FOLDER / "data.mdb"
        refused: list[list[Refused]] = []
        if data.exists():
            self._report.used_bytes += on_disk(data)
            try:
                refused = self._read_index()
            except IndexDamagedError as exc:
                self._report.index_error = str(exc)
                self.close()
                self._spaces, self._strays, self._gone = [], 0, []
            except TierIOError as exc:
                raise TierError(f"{data.parent} could not be looked at: {exc}") from exc
        self._find_orphans()
        for space, mine in zip(self._spaces, refused, strict=True):
            self._count(space, mine)
        self._report.namespaces = len(self._spaces)
        self._report.blocks["foreign"].add(0, self._strays)
        self._report.extents["lost"].add(0, len(self._gone))

    def _read_index(self) -> list[list[Refused]]:
        """Have each space take its records, as a store does; return what each has refused."""
        volume = self._volume
        with closing(IndexClient(volume.path, 0, volume.lock_fd, read_only=True)) as client:
            found = client.opened
            spaces = spaces_of(found.extents)
            self._spaces = list(spaces.values())
            files_max()  # all are open at one time
            for number, (slot_bytes, digest) in sorted(found.extents.items()):
                file = self._open(number, slot_bytes)
                if file is None:
                    self._gone.append(number)
                else:
                    spaces[digest].extents[number] = file
            self._strays, self._report.in_order = found.strays, found.clean
            return [load(client, space) for space in self._spaces]

    def _open(self, number: int, slot_bytes: int) -> ExtentFile | None:
        """Return None when it is not there. Raises TierError for a cause outside of it."""
        try:
            return self._volume.open_extent(number, slot_bytes, EXTENT_BYTES)
        except OSError as exc:
            if exc.errno in _NOT_ITS_FAULT:
                path = self._volume.extent(number)
                raise TierError(f"{path} cannot be opened: {exc.strerror}") from exc
            return None

    def _find_orphans(self) -> None:
        known = {file.path.name for space in self._spaces for file in space.extents.values()}
        with os.scandir(self._volume.path) as entries:
            names = sorted(e.name for e in entries if not e.is_dir(follow_symlinks=False))
        for name in names:
            if EXTENT.fullmatch(name) and name not in known:
                self._orphans.append(self._volume.path / name)
                self._report.extents["orphan"].add(on_disk(self._orphans[-1]))
        self._report.used_bytes += self._report.extents["orphan"].bytes

    def _count(self, space: DiskNamespace, refused: list[Refused]) -> None:
        """Count the rows that stand for nothing, and the extents."""
        blocks, extents = self._report.blocks, self._report.extents
        for _, _, cause in refused:
            blocks["unreadable" if cause == "beyond" else cause].add(space.slot_bytes)
        short = {place >> 32 for _, place, cause in refused if cause == "beyond"}
        for number, extent in space.extents.items():
            size = on_disk(extent.path)
            extents["short" if number in short else "ok"].add(size)
            self._report.used_bytes += size

    # Reading the blocks

    def verify(self, watch: Progress) -> None:
        """Read every block and compare its checksum."""
        done, whole = Amount(), Amount()
        for space in self._spaces:
            whole.add(space.slot_bytes, len(space.index))
        watch(done, whole)
        start_s = time.monotonic()
        for space in self._spaces:
            bad: list[Record] = []
            for records, causes in verified(space):
                for record, cause in zip(records, causes, strict=True):
                    if cause != "ok":
                        self._report.blocks[cause].add(space.slot_bytes)
                        bad.append(record)
                    done.add(space.slot_bytes)
                    watch(done, whole)
            self._drop(space, bad)
        self._report.read_bytes = done.bytes
        self._report.read_s = time.monotonic() - start_s

    def _drop(self, space: DiskNamespace, bad: list[Record]) -> None:
        """Take bad blocks out, with what hangs below them."""
        before = len(space.index)
        for record in bad:
            if record.state is not State.DROPPED:
                space.drop(record, "damaged")
        blocks = self._report.blocks
        blocks["unreachable"].add(space.slot_bytes, before - len(space.index) - len(bad))
        blocks["ok"].add(space.slot_bytes, len(space.index))
        if deletes := space.take_deletes():
            self._deletes[space.digest] = [record.key for record in deletes]

    @property
    def readable(self) -> bool:
        """Tell whether the index could be read."""
        return self._report.index_error is None

    # Repairing

    def repair(self) -> Repair:
        """Drop from the index what is wrong, and remove files that are not in it."""
        done, folder = Repair(), self._volume.path
        if not self.readable:
            done.index_kept_as = str(set_aside(folder))
        index = folder / FOLDER / "data.mdb"
        size = index.stat().st_size if index.exists() else 0
        done.blocks_dropped = self._strays + sum(map(len, self._deletes.values()))
        done.extents_dropped = len(self._gone)
        if done.blocks_dropped or self._gone or not size:
            with closing(IndexClient(folder, size // RECORD_BYTES, self._volume.lock_fd)) as client:
                gone = Commit(deletes=self._deletes, extents_gone=self._gone, clean=not size)
                client.commit(gone)
        for path in self._orphans:  # a link is removed itself, not what it leads to
            path.unlink(missing_ok=True)
        done.files_removed = len(self._orphans)
        self._volume.sync()
        return done

    def close(self) -> None:
        """Close the extents."""
        for space in self._spaces:
            for file in space.extents.values():
                file.close()


def on_disk(path: Path) -> int:
    """Bytes that a file takes on disk."""
    return path.lstat().st_blocks * 512


def load(client: IndexClient, space: DiskNamespace) -> list[Refused]:
    """Have a space take its records; return those that it cannot have."""
    loading = space.loading = Loading(space)
    refused: list[Refused] = []
    for page in client.records(space.digest, space.slot_bytes, space.slot_counts):
        deque(loading.take(page), maxlen=0)
        refused += page.refused or ()
    return refused


def verified(space: DiskNamespace) -> Iterator[tuple[list[Record], list[str]]]:
    """Read all blocks of a space, on threads; yield some with what causes_of() says of them."""
    stride = stride_of(space.slot_bytes)
    longest = max(1, min(RUN_BLOCKS_MAX, RUN_BYTES_MAX // stride))
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(READERS):
        buffers.put(memoryview(mmap.mmap(-1, longest * stride)))

    def read(run: list[Record]) -> list[str]:
        buffer = buffers.get()
        try:
            return causes_of(space, run, buffer)
        finally:
            buffers.put(buffer)

    runs = runs_of(space.index, lambda record: record.slot, longest)
    with ThreadPoolExecutor(READERS) as pool:
        while some := list(islice(runs, _BATCH_RUNS)):
            yield from zip(some, pool.map(read, some), strict=True)


def causes_of(space: DiskNamespace, run: list[Record], buffer: memoryview) -> list[str]:
    """Read neighbours in one call; return for each "ok", "damaged" or "unreadable".

    What cannot be read together is read one by one.
    """
    place, stride = run[0].slot, stride_of(space.slot_bytes)
    blocks = [buffer[n * stride :][: space.slot_bytes] for n in range(len(run))]
    try:
        space.extents[place >> 32].read(place & POSITION, blocks)
    except (OSError, TierError):
        if len(run) == 1:
            return ["unreadable"]
        return [cause for record in run for cause in causes_of(space, [record], buffer)]
    sums = [space.checksum(record, block) for record, block in zip(run, blocks, strict=True)]
    return ["ok" if r.checksum == found else "damaged" for r, found in zip(run, sums, strict=True)]
