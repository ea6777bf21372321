"""`kvstore serve` for the crash campaign: the real server, whose disk tells what it does.

python -m tests.harness.store_child CONFIG LOG [POINT NUMBER]

Lines are appended to LOG, which lies outside of the tier's directory, each with the time:

    loading | serving            the index is being read | all of it is known
    stored NAMESPACE KEY...      acknowledged, and can be read
    gone NAMESPACE REASON KEY... said before it can be durable
    commit | committed           planned | durable
    resize BYTES | cleared NAMESPACE
    lag SECONDS                  this process was kept waiting as long as that, and never longer
    killed POINT                 the last line, when it was this process that killed itself

With POINT, it sends itself a SIGKILL when it gets there for the NUMBERth time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore import cli
from kvstore.config import NvmeConfig
from kvstore.core.tier import TierContext
from kvstore.core.types import JobId, JobKind, JobResult, LookupResult, TransferJob
from tiers import nvme
from tiers.nvme import NvmeDisk
from tiers.nvme.commits import Commits
from tiers.nvme.files import ExtentFile
from tiers.nvme.index import DiskIndex, Record
from tiers.nvme.index_client import IndexClient
from tiers.nvme.messages import Commit
from tiers.nvme.namespace import DiskNamespace
from tiers.nvme.tier import NvmeTier

POINTS = (
    "load",  # a turn while the index is read
    "loaded",
    "read",
    "half-written",  # of several blocks that one call writes
    "written",
    "sync",  # data written, not synced
    "commit",  # data synced, the index not written
    "amid",  # at any time while the index is written
    "committed",  # and nobody told
    "made",  # an extent file is there, the index does not know it
    "known",  # it does
    "forgotten",  # the index has forgotten an extent, the file is there
    "gone",
    "resize",
    "clear",
)
AMID_S = 0.004
LAG_S = 0.02


class Watch:
    """Where lines go, and where the process ends."""

    def __init__(self, log: Path, point: str, number: int) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._point, self._left = point, number
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        os.write(self._log, f"{time.monotonic():.6f} {line}\n".encode())

    def reach(self, point: str) -> None:
        if self.passes(point):
            self.die()

    def passes(self, point: str) -> bool:
        """True at the NUMBERth time that POINT is reached."""
        if point != self._point:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0

    def die(self) -> None:
        self.say(f"killed {self._point}")
        os.kill(os.getpid(), signal.SIGKILL)

    def watch_lag(self) -> None:
        """Tell when this process does not get the processor in time."""
        longest = LAG_S
        while True:
            began = time.monotonic()
            time.sleep(0.005)
            if time.monotonic() - began > longest:
                longest = time.monotonic() - began
                self.say(f"lag {longest:.6f}")


WATCH: Watch  # of this process


class WatchedDisk(NvmeDisk):
    """The real one, and says what it does."""

    def __init__(self, settings: NvmeConfig) -> None:
        super().__init__(settings)
        self._told = ""

    def poll(self) -> None:
        super().poll()
        now = "loading" if self.state == "loading" else "serving"
        if now != self._told:
            self._told = now
            WATCH.say(now)
            if now == "serving":
                WATCH.reach("loaded")
        if now == "loading":
            WATCH.reach("load")

    def tier(self, context: TierContext) -> NvmeTier:
        """Make a tier that tells what it acknowledges."""
        tier = super().tier(context)
        jobs: dict[JobId, TransferJob] = {}
        submit, poll = tier.submit, tier.poll

        def told_submit(job: TransferJob) -> None:
            if job.kind is JobKind.STORE:
                jobs[job.job_id] = job
            submit(job)

        def told_poll() -> Sequence[JobResult]:
            results = poll()
            for result in results:
                job = jobs.pop(result.job_id, None)
                if job is not None:
                    here = [
                        k for k in job.keys[: result.done] if tier.lookup(k) is LookupResult.HIT
                    ]
                    if here:
                        keys = " ".join(key.hex() for key in here)
                        WATCH.say(f"stored {context.namespace} {keys}")
            return results

        for name, told in (("submit", told_submit), ("poll", told_poll)):
            setattr(tier, name, told)
        return tier

    def resize(self, capacity_bytes: int) -> None:
        """Change the cap."""
        WATCH.say(f"resize {capacity_bytes}")
        super().resize(capacity_bytes)
        WATCH.reach("resize")


def _nothing(*_: object) -> None:
    """Stand for what is not done before or after a call."""


def _watch(
    owner: type,
    name: str,
    before: Callable[..., object] = _nothing,
    after: Callable[..., object] = _nothing,
) -> None:
    """Have a method's arguments seen before and after each call; this process is ours alone."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any) -> object:  # noqa: ANN401 - as the original
        before(*arguments)
        result: object = original(*arguments)
        after(*arguments)
        return result

    setattr(owner, name, wrapped)


def _watch_leaving() -> None:
    """Have every block that leaves told, with the reason, before that can become durable."""
    reasons: list[tuple[DiskNamespace, str]] = []
    take_subtree = DiskIndex.take_subtree

    def told_subtree(index: DiskIndex, record: Record) -> Iterator[Record]:
        gone = list(take_subtree(index, record))
        space, reason = reasons[-1]
        keys = " ".join(each.key.hex() for each in gone)
        WATCH.say(f"gone {space.digest} {reason} {keys}")
        WATCH.reach("gone")
        return iter(gone)

    setattr(DiskIndex, "take_subtree", told_subtree)  # noqa: B010 - mypy: it is a method
    _watch(
        DiskNamespace,
        "drop",
        before=lambda space, _record, reason: reasons.append((space, reason)),
        after=lambda *_: reasons.pop(),
    )
    _watch(
        DiskNamespace,
        "clear",
        before=lambda space: WATCH.say(f"cleared {space.digest}"),
        after=lambda *_: WATCH.reach("clear"),
    )


def _watch_files() -> None:
    write = ExtentFile.write

    def half(file: ExtentFile, position: int, blocks: Sequence[memoryview]) -> None:
        if WATCH.passes("half-written"):
            whole = len(blocks) // 2
            write(file, position, [*blocks[:whole], blocks[whole][: file.stride // 2]])
            WATCH.die()

    _watch(ExtentFile, "write", before=half, after=lambda *_: WATCH.reach("written"))
    _watch(ExtentFile, "read", after=lambda *_: WATCH.reach("read"))
    _watch(ExtentFile, "sync", before=lambda *_: WATCH.reach("sync"))


def _watch_commits() -> None:
    def begins(_client: IndexClient, changes: Commit) -> None:
        if changes.extents:
            WATCH.reach("made")
        if changes.puts:
            WATCH.reach("commit")
            if WATCH.passes("amid"):
                delay_s = AMID_S * (time.monotonic_ns() % 1000) / 1000
                threading.Timer(delay_s, WATCH.die).start()

    def ended(_client: IndexClient, changes: Commit) -> None:
        if changes.extents:
            WATCH.reach("known")
        if changes.extents_gone:
            WATCH.reach("forgotten")
        if changes.puts:
            WATCH.reach("committed")

    _watch(IndexClient, "commit", before=begins, after=ended)
    _watch(Commits, "_begin", before=lambda *_: WATCH.say("commit"))
    _watch(Commits, "_ended", after=lambda *_: WATCH.say("committed"))


def main() -> int:
    global WATCH  # noqa: PLW0603 - one process, one watch
    config, log, *point = sys.argv[1:]
    WATCH = Watch(Path(log), point[0] if point else "", int(point[1]) if point else 0)
    _watch_leaving()
    _watch_files()
    _watch_commits()
    threading.Thread(target=WATCH.watch_lag, daemon=True).start()
    nvme.NvmeDisk = WatchedDisk  # type: ignore[misc]
    return cli.main(["serve", "--config", config])


if __name__ == "__main__":
    sys.exit(main())
