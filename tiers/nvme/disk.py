"""One directory on a disk, shared by the tiers of all namespaces.

Called from one thread, the store's, which never touches the file system after the start: blocks
are moved by the mover, what changes the directory is done by the keeper, the watch looks at it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from kvstore import clock
from kvstore.config import NvmeConfig
from kvstore.core.errors import ConfigError, TierError, TierIOError
from kvstore.core.tenants import Share
from kvstore.core.tier import TierContext
from kvstore.logs import RateLog
from kvstore.open_files import DISK_PART, extents_max
from tiers.nvme.attached import Attached
from tiers.nvme.block_io import TaskThread, ThreadMover, writers_of
from tiers.nvme.directory import Look
from tiers.nvme.health import HANG_S, Health, HealthState, Pace
from tiers.nvme.index_client import IndexDamagedError
from tiers.nvme.namespace import DiskNamespace
from tiers.nvme.remount import Remount
from tiers.nvme.tier import NvmeTier, Run

log = logging.getLogger(__name__)

CLOSE_S = 20.0
LOOK_EVERY_S = 1.0  # at the directory
SLICES_S = 0.005  # of each poll
IDLE_S = 0.005  # between two polls in which something is done, when nothing is under way
_NEVER_S = float("inf")
_BUSY_S = 0.001  # between two polls while something is under way


class NvmeDisk:
    """The NVMe tier of a store process."""

    def __init__(self, settings: NvmeConfig, *, tokens: bool = False) -> None:
        """Open or make the directory. Raises ConfigError when it cannot be used.

        tokens: keep token ids of blocks beside their records.
        """
        self.extents_max = extents_max(DISK_PART)
        writers = writers_of(settings.threads)
        self.settings = settings
        self.keeps_tokens = tokens
        self.capacity_bytes = settings.capacity_bytes
        self.tenants: dict[bytes, Share] = {}  # by tag
        try:
            self.attached = Attached(self)  # another one after each return to the directory
        except (OSError, TierError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise ConfigError(f"{settings.path}: cannot be used: {why}") from exc
        self._mover: ThreadMover[Run] = ThreadMover(settings.threads, writers)
        self.health = Health(settings.path)
        self.keeper = TaskThread("keeper")
        self._watch = TaskThread("watch")
        self._next_look_s = 0.0
        self._idle_until_s = 0.0
        self._remount = Remount(self)
        self._reads, self._writes = Pace(settings.threads), Pace(writers)
        self._paces = {
            "reads": self._reads,
            "writes": self._writes,
            "keeper": self.keeper.pace,
            "watch": self._watch.pace,
        }
        self._tiers: list[NvmeTier] = []
        self._closed = False
        self._given_up = False
        self._said = RateLog(log)
        self._sliced = False  # something that concerns many records is under way
        self.health.loading(on=self.attached.loading)
        self.attached.room.shrink()

    # Tiers

    def tier(self, context: TierContext) -> NvmeTier:
        """Make a namespace's tier."""
        space = self.attached.space(context.namespace, context.slot_bytes)
        if space.slot_bytes != context.slot_bytes:
            self._resized(space, context.slot_bytes)
            space = self.attached.space(context.namespace, context.slot_bytes)
        made = NvmeTier(context, space, self)
        self.attached.wake(space)
        self._tiers = [tier for tier in self._tiers if not tier.closed]
        self._tiers.append(made)
        return made

    def _resized(self, space: DiskNamespace, slot_bytes: int) -> None:
        """Have an index read anew that gives a namespace another size of blocks than it has.

        Its name follows from that size among others, so that the index is what is wrong.
        """
        del self.attached.spaces[space.digest]
        space.index.let_go()
        self.attached.room.recount()
        for file in space.extents.values():
            file.close()
        wrong = IndexDamagedError(
            f"namespace {space.digest[:12]} has blocks of {space.slot_bytes} bytes, expected"
            f" {slot_bytes}"
        )
        self.write_failed("reading the index", wrong, clock.now_s())

    def replace(self, fresh: Attached) -> None:
        """Go on with what was found in the directory, and not with what was known."""
        old, self.attached = self.attached, fresh
        fresh.succeed(old)
        for tier in self._tiers:
            space = fresh.spaces.get(tier.space.digest)
            if space is not None and space.slot_bytes == tier.space.slot_bytes:
                tier.use(space)
        self.health.loading(on=fresh.loading)

    def wake(self) -> None:
        """Look after all namespaces: what tenants may have has changed."""
        for space in self.spaces:
            self.attached.wake(space)

    # State

    def write_failed(self, what: str, error: Exception, now_s: float) -> None:
        """Something that changes the disk has failed; a damaged index is read anew, and set aside.

        It stays as it is, so that to try again would be of no use.
        """
        if isinstance(error, IndexDamagedError):
            self.attached.damage = error
            self.health.lost(f"{what} failed: {error}", now_s)
        else:
            self.health.write_failed(what, error, now_s)

    @property
    def online(self) -> bool:
        """Tell whether blocks can be read."""
        return self.health.online and not self._closed and not self._given_up

    @property
    def writable(self) -> bool:
        """Tell whether blocks can be written."""
        return self.health.writable and not self._closed and not self._given_up

    @property
    def fails(self) -> bool:
        """Tell whether it takes no blocks now, and will be asked again whether it does."""
        return bool(self.health.reason) and not self._closed and not self._given_up

    @property
    def retry_s(self) -> float:
        """Seconds until one that fails is tried again."""
        return self.health.due_at_s - clock.now_s()

    @property
    def state(self) -> str:
        """One word for operators."""
        return HealthState.OFF.value if self._given_up else self.health.state.value

    @property
    def used_bytes(self) -> int:
        """Bytes that the tier may take on disk with the extents it has."""
        return self.attached.room.used_bytes

    @property
    def spaces(self) -> list[DiskNamespace]:
        """List the namespaces that have been seen."""
        return list(self.attached.spaces.values())

    @property
    def stalled_s(self) -> dict[str, float]:
        """Seconds since the last result of each kind of call, while all of its threads are busy."""
        now_s = clock.now_s()
        return {name: pace.stalled_s(now_s) for name, pace in self._paces.items()}

    @property
    def busy(self) -> bool:
        """Tell whether something is under way that ends by itself."""
        if self._given_up:
            return bool(self._mover.open)
        moving = self._mover.open or self.keeper.open
        return bool(moving) or self.attached.loading or self._sliced

    @property
    def next_s(self) -> float:
        """Seconds until poll() is to be called again."""
        if self.busy:
            return _BUSY_S
        if self._given_up:
            return _NEVER_S
        due_at_s = self.health.due_at_s
        if self.writable:
            due_at_s = min(due_at_s, self.attached.commits.due_at_s)
        return max(_BUSY_S, due_at_s - clock.now_s())

    def resize(self, capacity_bytes: int) -> None:
        """Change the cap; extents that are too much are emptied and given back."""
        log.info(
            "%s: capacity is %d bytes now, was %d",
            self.attached.directory.path, capacity_bytes, self.capacity_bytes,
        )  # fmt: skip
        self.capacity_bytes = capacity_bytes
        self.attached.room.shrink()

    # Moving blocks

    def lanes(self, *, store: bool) -> int:
        """Count the runs that are moved at one time."""
        threads = self.settings.threads
        return writers_of(threads) if store else threads

    def start(self, run: Run) -> None:
        """Move a run."""
        (self._writes if run.store else self._reads).began(clock.now_s())
        self._mover.start(run)

    def poll(self) -> None:
        """Take finished runs, and do what is due; after a bug runs end, and it is off."""
        try:
            if self._given_up:
                for run in self._mover.poll():
                    run.tier.ended(run)
            else:
                self._poll()
        except Exception:  # noqa: BLE001 - the barrier of the disk: the store goes on without it
            path = self.attached.directory.path
            self._said.bug("bugs", "%s is off until the store is started again: a bug", path)
            self._given_up = True

    def _poll(self) -> None:
        now_s = clock.now_s()
        under_way = any(pace.open for pace in self._paces.values()) or self.busy
        if now_s < self._idle_until_s and not (under_way or self.attached.visits):
            return
        self._idle_until_s = now_s + IDLE_S
        self._load_some(now_s)
        for run in self._mover.poll():
            pace = self._writes if run.store else self._reads
            pace.ended(now_s)
            self._judge(run, run.error, now_s)
            run.tier.ended(run)
        self.keeper.poll(now_s)
        self._look(now_s)
        spaces = self.attached.spaces
        visited = self.attached.visits.take(spaces, int(now_s * 1e9))
        self._do_slices(visited, now_s)
        self.attached.room.step(visited, now_s)
        self.attached.commits.step(now_s)
        stalled = any(pace.stalled_s(now_s) > HANG_S for pace in self._paces.values())
        self._remount.step(now_s, writing=self._writes.open, stalled=stalled)

    def _load_some(self, now_s: float) -> None:
        if not self.health.online:
            return
        try:
            if not self.attached.load_some(self.keeper):
                return
        except TierIOError as exc:
            self.health.lost(f"its index cannot be read: {exc}", now_s)
            return
        self.health.loading(on=False)
        for space in self.spaces:
            self.attached.wake(space)
        self.attached.room.shrink()

    def _do_slices(self, visited: Sequence[DiskNamespace], now_s: float) -> None:
        """Go on for a moment with what concerns many records."""
        self._sliced = False
        for space in visited:
            while space.step():
                if clock.now_s() > now_s + SLICES_S:
                    self._sliced = True
                    return

    def clear(self) -> None:
        """Forget all blocks of all namespaces, at once; those stored from now on are kept."""
        for space in self.spaces:
            self.attached.clear(space)

    def _judge(self, run: Run, error: Exception | None, now_s: float) -> None:
        if not self.health.online:
            return  # it is known
        if run.store and error is not None:
            self.health.write_failed("a write", error, now_s)
        elif not run.store:
            # Counted for a read that failed only: it takes a look at all namespaces.
            extents = 0 if error is None else sum(len(s.extents) for s in self.spaces)
            self.health.read(int(run.file.path.stem), error, now_s, extents)

    def _look(self, now_s: float) -> None:
        """Have the directory looked at, and see that calls come back."""
        self._watch.poll(now_s)
        if self._remount.at_home and not self._watch.open and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_EVERY_S
            looked = partial(self._looked, self.attached)
            self._watch.submit(self.attached.directory.look, looked)
        for name, pace in self._paces.items():
            if (seconds := pace.stalled_s(now_s)) > HANG_S:
                reads = name in ("reads", "watch")
                hangs = self.health.lost if reads else self.health.only_reads
                hangs(f"no call of its {name} has returned for {seconds:.0f} s", now_s)

    def _looked(self, at: Attached, seen: Look | Exception, now_s: float) -> None:
        if self._closed or not self._remount.at_home or at is not self.attached:
            return
        if isinstance(seen, Exception):
            self.health.look_failed(seen, now_s)
            return
        at.room.seen(seen)
        if seen.read_only:
            self.health.only_reads("the file system is mounted read-only", now_s)

    # Durability and the end

    def flush(self) -> None:
        """Go one step towards having everything durable, and sleep for a moment."""
        self.attached.commits.hurry()
        self.poll()
        time.sleep(_BUSY_S)

    def close(self) -> None:
        """Commit what is written and close the directory; safe to call twice.

        A disk that takes no writes just now is not waited for: the last commit is tried once.
        """
        if self._closed:
            return
        deadline = clock.now_s() + CLOSE_S
        while clock.now_s() < deadline and not self._quiet():
            self.flush()
        clean = self._quiet()
        self._closed = True
        ended: list[Exception | None] = []
        if not self._mover.open and not self.keeper.open:
            close = self.attached.closing()
            if self._remount.at_home and not self.attached.loading and not self._given_up:
                close = self.attached.closing(self.attached.commits.take(clean=clean)[1])
            self.keeper.submit(close, lambda exc, _now_s: ended.append(exc))
            while (not ended or self._watch.open) and clock.now_s() < deadline + CLOSE_S:
                time.sleep(_BUSY_S)
                self.keeper.poll(clock.now_s())
                self._watch.poll(clock.now_s())
        if not ended or self._watch.open:  # the lock goes with the process
            log.error("%s: I/O hangs; the store ends without it", self.attached.directory.path)
            return
        if ended[0] is not None:
            log.error("%s: not shut down in order: %s", self.attached.directory.path, ended[0])
        self._mover.close()
        self.keeper.close()
        self._watch.close()

    def _quiet(self) -> bool:
        if self._given_up:
            return not self._mover.open
        if self._mover.open or self.keeper.open:
            return False
        idle = self.attached.loading or not self.writable
        return idle or not self.attached.commits.pending
