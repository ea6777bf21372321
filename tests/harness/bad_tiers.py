"""Tiers that somebody else wrote badly. What they do wrong is in their options."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.core.errors import BlockCorrupt, TierError, check
from kvstore.core.tier import TierContext
from kvstore.core.types import (
    BlockKey,
    Changes,
    JobId,
    JobKind,
    JobResult,
    LookupResult,
    TransferJob,
)
from tests.reference.memory_tier import MemoryTier


class Panic(BaseException):
    """Of a module in another language: PyO3's PanicException is such a one."""


RAISED = {
    "SystemExit": SystemExit(3),
    "CancelledError": asyncio.CancelledError(),
    "Panic": Panic("index out of bounds"),
}


class Bad(MemoryTier):
    """Raises in the methods options["raises"], from call number options["after"] on."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._raises = context.options.get("raises", [])
        self._after = context.options.get("after", 0)
        self._how = context.options.get("how", "RuntimeError")
        self._calls = 0
        if "constructor" in self._raises and context.slot_bytes >= 1 << 20:
            raise RuntimeError("the constructor of a bad tier")

    def _maybe(self, verb: str) -> None:
        self._calls += 1
        if self._calls > self._after:
            if self._how in RAISED:
                raise RAISED[self._how]
            if self._how == "InvariantBroken":
                check(condition=False, broken=f"{verb} of a bad tier")
            kind = TierError if self._how == "TierError" else RuntimeError
            raise kind(f"{verb} of a bad tier")

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - of a method, say
        found = super().__getattribute__(name)
        if name.startswith("_") or name not in self._raises:
            return found
        # A tier that has nothing is left alone: there is a trial at the start.
        idle = not (self._jobs or self._results) if name == "poll" else not self._blocks
        if idle and name in ("poll", "close"):
            return found

        def does_it_and_raises(*given: object) -> object:
            done = found(*given)
            self._maybe(name)
            return done

        return does_it_and_raises


class Corrupt(Bad):
    """Keeps nothing whole."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._loads: set[JobId] = set()

    def poll(self) -> Sequence[JobResult]:
        return [
            JobResult(r.job_id, 0, BlockCorrupt("all of it")) if r.job_id in self._loads else r
            for r in super().poll()
        ]

    def submit(self, job: TransferJob) -> None:
        super().submit(job)
        if job.kind is JobKind.LOAD:
            self._loads.add(job.job_id)


WRONG: dict[str, Callable[[list[JobResult]], Any]] = {
    "twice": lambda found: [*found, *found],
    "unknown": lambda found: [*found, JobResult(JobId(9999), 1)],
    "more": lambda found: [JobResult(r.job_id, r.done + 1) for r in found],
    "negative": lambda found: [JobResult(r.job_id, -1) for r in found],
    "words": lambda found: [JobResult(r.job_id, "all") for r in found],  # type: ignore[arg-type]
    "no_result": lambda found: [r.job_id for r in found],
    "no_list": lambda found: 7 if found else [],
    "unhashable": lambda found: [JobResult([], 1) for _ in found],  # type: ignore[arg-type]
}


class Wrong(MemoryTier):
    """Reports what WRONG[options["what"]] makes of its results, and of a lookup."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._what = context.options["what"]

    def lookup(self, key: BlockKey) -> LookupResult:
        return True if self._what == "lookup" else super().lookup(key)  # type: ignore[return-value]

    def poll(self) -> Sequence[JobResult]:
        found = list(super().poll())
        return WRONG[self._what](found) if found and self._what in WRONG else found


class Slow(MemoryTier):
    """Its thread writes into what it was lent until it is let go, and poll raises meanwhile."""

    go = threading.Event()
    writing = threading.Event()
    ended = threading.Event()

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._close = context.options.get("close", True)
        self._thread: threading.Thread | None = None

    def submit(self, job: TransferJob) -> None:
        super().submit(job)
        if job.kind is JobKind.LOAD:
            self._thread = threading.Thread(target=self._write, args=(job,))
            self._thread.start()

    def _write(self, job: TransferJob) -> None:
        view = self._memory.view(job.slots[0])
        self.writing.set()
        self.go.wait()
        view[:] = b"?" * len(view)
        self.ended.set()

    def poll(self) -> Sequence[JobResult]:
        if self._thread is not None:
            raise RuntimeError("poll of a bad tier")
        return super().poll()

    def drain(self) -> None:
        if self._thread is not None:
            if not self._close:
                raise RuntimeError("drain of a bad tier")
            self._thread.join()

    def close(self) -> None:
        if self._thread is not None and not self._close:
            raise RuntimeError("close of a bad tier")
        super().close()


class Waits(Bad):
    """Has slots by their address, so that no view tells of it, until it is drained."""

    go = threading.Event()

    def drain(self) -> None:
        self.go.wait()


class Closes(MemoryTier):
    """Takes its time before it closes, if it has blocks, though no job is under way."""

    go = threading.Event()
    closing = threading.Event()

    def drain(self) -> None:
        if self._blocks:
            self.closing.set()
            self.go.wait()
        super().drain()


class Tells(Bad):
    """Says what enters it."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._new: list[BlockKey] = []

    def tell(self) -> None:
        """All is noted in any case."""

    def submit(self, job: TransferJob) -> None:
        super().submit(job)
        self._new += job.keys

    def take_changes(self) -> Changes:
        new, self._new = self._new, []
        return Changes(added=new)


TOLD: dict[str, Callable[[], Any]] = {
    "numbers": lambda: Changes(added=[1, 2]),  # type: ignore[list-item]
    "text": lambda: Changes(removed=["key"]),  # type: ignore[list-item]
    "short": lambda: Changes(added=[BlockKey(b"k" * 2)]),
    "long": lambda: Changes(removed=[BlockKey(b"k" * 257)]),
    "no_list": lambda: Changes(added=b"k" * 34),  # type: ignore[arg-type]
    "no_changes": lambda: ([], []),
}


class TellsWrong(MemoryTier):
    """Says TOLD[options["what"]] of what enters and leaves it."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._what = context.options["what"]

    def tell(self) -> None:
        """All is noted in any case."""

    def take_changes(self) -> Changes:
        return TOLD[self._what]()  # type: ignore[no-any-return]


class Hides(MemoryTier):
    """Raises as it is looked at."""

    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"{name} is not there yet")


class Closed(MemoryTier):
    """Cannot be made."""

    def __init__(self, context: TierContext) -> None:
        raise RuntimeError(f"no server for\n{context.name}")


class Exits(MemoryTier):
    """A script more than a class."""

    def __init__(self, context: TierContext) -> None:
        raise SystemExit(f"usage: {context.name}")


class Holds(MemoryTier):
    """Ends no job before it may; poll waits for that if options["waits"]."""

    go = threading.Event()

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self._waits = context.options.get("waits", False)

    def poll(self) -> Sequence[JobResult]:
        if self._jobs and self._waits:
            self.go.wait()
        return super().poll() if self.go.is_set() else []


class Dawdles(MemoryTier):
    """Polls slowly."""

    seconds = 0.0

    def poll(self) -> Sequence[JobResult]:
        time.sleep(self.seconds)
        return super().poll()
