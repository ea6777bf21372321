"""One directory on a disk: its lock, its extents within the cap, its threads and its journal.

Shared by the tiers of all namespaces, and called from one thread, which is never blocked: data
moves on reader and writer threads, and whatever syncs runs on a keeper thread, one thing at a
time. Reads go before writes.

    loading --all records in--> ok
    ok --write or commit failed--> read-only --after a while--> ok
    ok --reads failed in a row--> off --after a while--> ok
"""

from __future__ import annotations

import logging
import math
import os
import time
from functools import partial
from pathlib import Path

from kvstore.config import NvmeConfig
from kvstore.errors import TierError, TierIOError
from kvstore.tier import TierContext
from kvstore.types import JobKind
from tiers.nvme.chores import Chore, run_chore
from tiers.nvme.files import ExtentFile, allow_files, lock_folder
from tiers.nvme.index import Record
from tiers.nvme.journal import NAMESPACE, Commit
from tiers.nvme.opening import Opening
from tiers.nvme.space import Space, cost
from tiers.nvme.tier import Moved, NvmeTier, Run
from tiers.runner import Runner

log = logging.getLogger(__name__)

WRITERS = 2
RETRY_S = 5.0
READ_ERRORS_MAX = 3  # in a row: then it is the disk, not a block
LOCK_WAIT_S = 10.0  # a store that ends still flushes
CLOSE_S = 20.0
READS_FIRST_S = 0.05
_BASE_BYTES = 1 << 20  # of the index, when it is empty
_FS_SPARE_BYTES = 64 << 20


class NvmeDisk:
    """The NVMe tier of a store process."""

    def __init__(self, settings: NvmeConfig) -> None:
        """Open or make the directory. Raises ConfigError when it cannot be used."""
        self._folder = Path(settings.path)
        self._settings = settings
        self.capacity_bytes = settings.capacity_bytes
        self._lock_fd = lock_folder(self._folder, LOCK_WAIT_S)
        self._making = 0
        self._clearing = False  # once the index is read
        self._committing = False
        self._hurry = False
        self._since_s: float | None = None  # the oldest change that is not durable
        self._read_errors = 0
        self._off_until = self._read_only_until = 0.0
        self._closed = False
        self._reads: Runner[Run, Moved] = Runner(
            "kvstore-nvme-read", self._read, lambda run, exc: Moved(run, [], exc), settings.threads
        )
        self._writes: Runner[Run, Moved] = Runner(
            "kvstore-nvme-write", self._write, lambda run, exc: Moved(run, [], exc), WRITERS
        )
        self._keeper: Runner[Chore, tuple[Chore, Exception | None]] = Runner(
            "kvstore-nvme-keeper", run_chore, lambda chore, exc: (chore, exc)
        )
        self._opening = Opening(self._folder, settings.capacity_bytes)
        self._spaces = self._opening.spaces
        allow_files()
        try:
            self._opening.open()
        except BaseException:
            self._close_files()
            raise

    # Tiers

    def tier(self, context: TierContext) -> NvmeTier:
        """Make a namespace's tier."""
        space = self._spaces.get(context.namespace)
        if space is None:
            numbers = [space.number for space in self._spaces.values()]
            space = Space(max(numbers, default=0) + 1, context.namespace, context.slot_bytes)
            self._spaces[context.namespace] = space
        if space.slot_bytes != context.slot_bytes:
            raise TierError(
                f"blocks of {context.slot_bytes} bytes, on disk they have {space.slot_bytes}"
            )
        return NvmeTier(context, space, self)

    def next_generation(self) -> int:
        """Number a write."""
        self._opening.generation += 1
        return self._opening.generation

    # State

    @property
    def online(self) -> bool:
        """Tell whether blocks can be read."""
        lost = self._opening.lost or self._closed
        return time.monotonic() >= self._off_until and not lost

    @property
    def writable(self) -> bool:
        """Tell whether blocks can be written."""
        return self.online and time.monotonic() >= self._read_only_until

    @property
    def state(self) -> str:
        """One word for operators."""
        if self._opening.loading:
            return "loading"
        return "ok" if self.writable else "read_only" if self.online else "off"

    @property
    def used_bytes(self) -> int:
        """Bytes that the tier may take on disk with the extents it has."""
        return sum(space.disk_bytes for space in self._spaces.values()) + _BASE_BYTES

    @property
    def spaces(self) -> list[Space]:
        """List the namespaces that have been seen."""
        return list(self._spaces.values())

    @property
    def busy(self) -> bool:
        """Tell whether something is under way that ends without anybody asking."""
        moving = self._reads.open or self._writes.open or self._keeper.open
        return bool(moving) or self._opening.loading

    @property
    def next_s(self) -> float:
        """Seconds until poll() is to be called again, at the latest; infinite: when asked."""
        if self.busy:
            return 0.0
        if self._since_s is None:
            return math.inf
        due_s = max(self._since_s + self._settings.durability_ns / 1e9, self._read_only_until)
        return max(0.0, due_s - time.monotonic())

    def clear(self) -> None:
        """Forget every block, of all namespaces, those that nobody uses included."""
        self._clearing = self._opening.loading  # again when all of them are known
        for space in self._spaces.values():
            space.clear()

    def resize(self, capacity_bytes: int) -> None:
        """Change the cap; extents that are too much are emptied and given back."""
        log.info(
            "%s: capacity is %d bytes now, was %d",
            self._folder,
            capacity_bytes,
            self.capacity_bytes,
        )
        self.capacity_bytes = capacity_bytes
        if not self._opening.loading:  # else when all is read
            self._shrink_to_cap()

    # Moving blocks

    def start(self, run: Run) -> None:
        """Move a run on a thread."""
        store = run.work.job.kind is JobKind.STORE
        (self._writes if store else self._reads).submit(run)

    def _read(self, run: Run) -> Moved:
        run.file.read(run.position, run.blocks)
        return Moved(run, run.sums())

    def _write(self, run: Run) -> Moved:
        if self._reads.open:
            self._reads.wait(lambda: self._reads.open == 0, READS_FIRST_S)
        sums = run.sums()
        run.file.write(run.position, run.blocks)
        return Moved(run, sums)

    def poll(self) -> None:
        """Take finished runs, and do what is due."""
        if self._opening.load_some():
            if self._clearing:
                self.clear()
            self._shrink_to_cap()
        for moved in self._reads.poll():
            self._after_read(moved.error)
            moved.run.tier.ended(moved)
        for moved in self._writes.poll():
            if moved.error is not None:
                self._pause_writes(moved.error)
            moved.run.tier.ended(moved)
        for chore, error in self._keeper.poll():
            chore.done(error)
        self._keep_room()
        self._maybe_commit()

    def _after_read(self, error: Exception | None) -> None:
        self._read_errors = 0 if error is None else self._read_errors + 1
        if self._read_errors >= READ_ERRORS_MAX:
            log.error("%s: off for %d s: %s", self._folder, RETRY_S, error)
            self._off_until = time.monotonic() + RETRY_S
            self._read_errors = 0

    def _pause_writes(self, error: Exception) -> None:
        if self.writable:
            log.error("%s: read-only for %d s: %s", self._folder, RETRY_S, error)
        self._read_only_until = time.monotonic() + RETRY_S

    # Room

    def make_room(self, space: Space, count: int) -> bool:
        """Try to get free slots: a new extent within the cap, else by eviction."""
        if self._opening.loading or self._grow(space):
            return True
        space.evict(count - space.free - space.leaving)
        self._hurry = self._hurry or bool(space.to_delete)
        if space.free + space.leaving:
            return True
        return self._take_from_another(space)

    def _grow(self, space: Space) -> bool:
        """Make an extent if the cap and the file system have room; True while one is made."""
        if space.growing:
            return True
        size = self._settings.extent_bytes
        if (
            self.used_bytes + self._making + cost(self._settings.extent_bytes, space.slot_bytes)
            > self.capacity_bytes
        ):
            return False
        try:
            found = os.statvfs(self._folder)
        except OSError as exc:
            self._pause_writes(exc)
            return False
        if found.f_bavail * found.f_frsize < size + _FS_SPARE_BYTES:
            return False
        number = self._opening.next_extent
        self._opening.next_extent += 1
        self._making += cost(self._settings.extent_bytes, space.slot_bytes)
        space.growing = True
        namespace = (space.digest.encode(), NAMESPACE.pack(space.number, space.slot_bytes))
        changes = Commit(namespaces=[namespace], extents=[(number, space.number)])

        def work() -> None:
            ExtentFile.make(self._opening.path(number), size)
            self._opening.journal.commit(changes)

        self._keeper.submit(Chore(work, partial(self._grown, space, number)))
        return True

    def _grown(self, space: Space, number: int, error: Exception | None) -> None:
        self._making -= cost(self._settings.extent_bytes, space.slot_bytes)
        space.growing = False
        if error is None:
            try:
                path, size = self._opening.path(number), self._settings.extent_bytes
                file = ExtentFile(path, space.slot_bytes, size)
                space.add_extent(number, file)
            except OSError as exc:
                error = exc
        if error is not None:
            self._pause_writes(error)

    def _take_from_another(self, needy: Space) -> bool:
        """Retire an extent of the namespace that has the most; True while one is going."""
        others = [space for space in self._spaces.values() if space is not needy]
        if any(space.retiring for space in others):
            return True
        unused = [space for space in others if space.extents and not space.attached]
        richer = [space for space in others if len(space.extents) > len(needy.extents) + 1]
        donor = max(unused or richer, key=lambda space: len(space.extents), default=None)
        number = None if donor is None else donor.coldest()
        if donor is None or number is None:
            return False
        donor.retire(number)
        self._hurry = True
        return True

    def _shrink_to_cap(self) -> None:
        """Retire extents until the cap holds: it may be smaller than when they were made."""
        while True:
            leaving = sum(space.retiring_bytes for space in self._spaces.values())
            if self.used_bytes - leaving <= self.capacity_bytes:
                return
            richest = max(self._spaces.values(), key=lambda s: s.disk_bytes - s.retiring_bytes)
            number = richest.coldest()
            if number is None:
                return
            richest.retire(number)
            self._hurry = True

    def _keep_room(self) -> None:
        """Evict ahead where the cap is reached, and let go of extents that are empty."""
        for space in self._spaces.values():
            for number, file in space.take_retired():
                self._keeper.submit(Chore(partial(self._remove, number, file), self._removed))
            low = space.total // 64
            coming = space.free + space.leaving
            if not space.attached or coming >= low or self._opening.loading:
                continue
            if not self._grow(space):
                space.evict(2 * low - coming)

    def _remove(self, number: int, file: ExtentFile) -> None:
        self._opening.journal.commit(Commit(extents_gone=[number]))
        file.close()
        file.path.unlink(missing_ok=True)

    def _removed(self, error: Exception | None) -> None:
        if error is not None:
            self._pause_writes(error)

    # Durability

    def _pending(self) -> bool:
        moved = any(space.to_put or space.to_delete for space in self._spaces.values())
        return moved or bool(self._opening.strays)

    def _maybe_commit(self) -> None:
        if self._committing or self._opening.loading or not self._pending():
            return
        now = time.monotonic()
        self._since_s = self._since_s or now
        window_s = self._settings.durability_ns / 1e9
        if now < self._read_only_until or not (self._hurry or now - self._since_s >= window_s):
            return
        self._since_s, self._hurry, self._committing = None, False, True
        batches = [(s, s.take_puts(), s.take_deletes()) for s in self._spaces.values()]
        strays, self._opening.strays = self._opening.strays, []
        files = {s.extents[r.slot >> 32] for s, puts, _ in batches for r in puts}
        changes = Commit(
            deletes=[*strays, *(s.journal_key(r) for s, _, gone in batches for r in gone)],
            puts=[(s.journal_key(r), s.value(r)) for s, puts, _ in batches for r in puts],
        )

        def work() -> None:
            for file in files:
                file.sync()
            self._opening.journal.commit(changes)

        self._keeper.submit(Chore(work, partial(self._committed, batches)))

    def _committed(
        self,
        batches: list[tuple[Space, list[Record], list[Record]]],
        error: Exception | None,
    ) -> None:
        self._committing = False
        for space, puts, deletes in batches:
            space.committed(puts, deletes, ok=error is None)
        if error is not None:
            self._pause_writes(error)

    def flush(self) -> None:
        """Go one step towards having everything durable; for those who wait."""
        self._hurry = True
        self.poll()
        time.sleep(0.001)

    def close(self) -> None:
        """Commit what is written and let go of the directory; safe to call twice."""
        if self._closed:
            return
        deadline = time.monotonic() + CLOSE_S
        while time.monotonic() < deadline and not self._quiet():
            self.flush()
        clean = self._quiet()
        self._closed = True
        unread = self._opening.loading or self._opening.lost
        self._opening.close()
        if not clean and (self._reads.open or self._writes.open or self._keeper.open):
            log.error("%s: I/O hangs; left without waiting for it", self._folder)
            return  # the lock goes with the process
        try:
            if not unread:
                self._opening.journal.mark(clean=clean)
        except TierIOError as exc:
            log.error("%s: not shut down in order: %s", self._folder, exc)
        self._opening.journal.close()
        self._close_files()

    def _close_files(self) -> None:
        for runner in (self._reads, self._writes, self._keeper):
            runner.close()
        for space in self._spaces.values():
            for file in space.extents.values():
                file.close()
        os.close(self._lock_fd)

    def _quiet(self) -> bool:
        busy = self._reads.open or self._writes.open or self._keeper.open or self._committing
        if self._opening.loading or time.monotonic() < self._read_only_until:
            return not busy
        return not busy and not self._pending()
