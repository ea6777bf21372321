"""The one thread pool: jobs in, results out, nothing shared."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")

log = logging.getLogger(__name__)


AGAIN_S = 0.0003


class Nothing(enum.Enum):
    """A result that nobody asks for: poll() leaves it out."""

    NOTHING = enum.auto()


NOTHING = Nothing.NOTHING


class Runner(Generic[J, R]):
    """Runs `work` on threads; each job gives exactly one result, also when work has a bug.

    Work that answers None is not over: it is called again a moment later, other jobs in between.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[J], R | Nothing | None],
        failed: Callable[[J, Exception], R | Nothing],
        threads: int = 1,
        told: Callable[[], None] | None = None,
    ) -> None:
        """failed(job, error): the result of a job whose work raised.

        told(): called on a thread when there is a result for poll().
        """
        self._work = work
        self._told = told
        self._failed = failed
        self._jobs: deque[J] = deque()
        self._again: deque[tuple[float, J]] = deque()  # with when to call
        self._new_is_next = False  # they take turns with those that are called again
        self._results: list[R] = []
        self.open = 0  # jobs whose result is not there yet
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: J, *, first: bool = False) -> None:
        """Queue a job, behind all others or before them. Raises RuntimeError when closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("runner is closed")
            (self._jobs.appendleft if first else self._jobs.append)(job)
            self.open += 1
            self._changed.notify_all()

    def poll(self) -> list[R]:
        """Take the results that are there."""
        if not self._results:
            return []
        with self._changed:
            results, self._results = self._results, []
            return results

    def wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Sleep until done(), asked after every call of work; False when the time is over."""
        with self._changed:
            return self._changed.wait_for(done, timeout_s)

    def drain(self) -> None:
        """Wait until every job has its result."""
        self.wait(lambda: self.open == 0)

    def close(self) -> None:
        """Finish what is queued and end the threads; safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _next(self) -> J | None:
        """Wait for something to do; None when closed and nothing is left. Called with the lock."""
        while True:
            now = time.monotonic()
            due = bool(self._again) and self._again[0][0] <= now
            if due and not (self._jobs and self._new_is_next):
                self._new_is_next = True
                return self._again.popleft()[1]
            if self._jobs:
                self._new_is_next = False
                return self._jobs.popleft()
            if self._closed and not self._again:
                return None
            self._changed.wait(self._again[0][0] - now if self._again else None)

    def _loop(self) -> None:
        while self._do_next():  # whose variables are gone while a thread waits
            pass

    def _do_next(self) -> bool:
        """Wait for a job, and call work once; False when closed and nothing is left."""
        with self._changed:
            job = self._next()
        if job is None:
            return False
        try:
            result: R | Nothing | None = self._work(job)
        except BaseException as exc:  # a bug must still release the job's slots: also one in Rust,
            log.exception("a job raised")  # whose panic is no Exception
            known = exc if isinstance(exc, Exception) else RuntimeError(repr(exc))
            result = self._failed(job, known)
        with self._changed:
            if result is None:
                self._again.append((time.monotonic() + AGAIN_S, job))
                self._changed.notify_all()
                return True
            if result is not NOTHING:
                self._results.append(result)
            self.open -= 1
            self._changed.notify_all()
        if self._told is not None:
            self._told()
        return True
