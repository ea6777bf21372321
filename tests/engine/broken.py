"""Connectors that do something wrong or slowly, made from ours. Loaded by name in an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from connectors import vllm
from connectors.jobs import LoadJob, StepMeta, StoreJob, StoreSpec
from connectors.worker import Outcome, WorkerHalf
from tests.engine.support import MARKS

SLOW_S = 0.4
UNMAPPED_SLOT = 1 << 30


class _Broken(vllm.TieredConnector):
    """Ours, with another worker half."""

    worker: type[WorkerHalf] = WorkerHalf

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        with patch.object(vllm, "WorkerHalf", self.worker):
            super().register_kv_caches(kv_caches)


class PlainConnector(_Broken):
    """Ours as it is."""


class ForgetfulWorker(WorkerHalf):
    """Loads report success, yet one engine block of each stays empty."""

    def _load(self, job: LoadJob) -> Outcome | None:
        outcome = super()._load(job)
        for cache in self._caches.values():
            block = job.engine.block_ids[len(job.engine.block_ids) // 2]
            start = cache.offset + block * cache.block_stride
            cache.storage[start : start + cache.page_bytes] = 0
        return outcome


class ForgetfulConnector(_Broken):
    worker = ForgetfulWorker


class ReusedWorker(WorkerHalf):
    """Every load finds that one slot has another generation than the store promised."""

    def _load(self, job: LoadJob) -> Outcome | None:
        *others, last = job.generations
        return super()._load(msgspec.structs.replace(job, generations=(*others, last - 1)))


class ReusedConnector(_Broken):
    worker = ReusedWorker


class FailingWorker(WorkerHalf):
    """Every load fails half-way: the memory of its last slot is not there."""

    def _load(self, job: LoadJob) -> Outcome | None:
        slots = (*job.store.slots[:-1], UNMAPPED_SLOT)
        return super()._load(msgspec.structs.replace(job, store=StoreSpec("cpu", slots)))


class FailingConnector(_Broken):
    worker = FailingWorker


class SlowWorker(WorkerHalf):
    """Each copy takes a few steps of the engine, so that fences and waits have work.

    While a test asks for it, by a file "load.wanted" or "store.wanted" in the folder that MARKS
    names, such a copy takes SLOW_S instead, and its start is shown by a file "load" or "store".
    """

    pause_s = 0.004

    def _load(self, job: LoadJob) -> Outcome | None:
        with self._slowly("load"):
            return super()._load(job)

    def _store(self, job: StoreJob) -> Outcome:
        with self._slowly("store"):
            return super()._store(job)

    @contextmanager
    def _slowly(self, what: str) -> Iterator[None]:
        marks = Path(os.environ[MARKS])
        wanted = (marks / f"{what}.wanted").exists()
        if wanted:
            (marks / what).touch()
        pause_s = SLOW_S if wanted else self.pause_s
        time.sleep(pause_s / 2)
        yield
        time.sleep(pause_s / 2)


class SlowConnector(_Broken):
    worker = SlowWorker


class FencelessWorker(SlowWorker):
    """Does not wait for stores whose sources are about to be overwritten."""

    pause_s = 0.05

    def before_step(self, meta: StepMeta) -> None:
        super().before_step(msgspec.structs.replace(meta, flush=()))


class FencelessConnector(_Broken):
    worker = FencelessWorker


class FencedWorker(FencelessWorker):
    """As slow, but waits."""

    def before_step(self, meta: StepMeta) -> None:
        WorkerHalf.before_step(self, meta)


class FencedConnector(_Broken):
    worker = FencedWorker


class ImpatientConnector(vllm.TieredConnector):
    """Waits for its store one second at start, not a minute."""

    def _start_scheduler(self) -> Any:  # noqa: ANN401 - the scheduler half
        with patch.object(vllm, "ATTACH_S", 1.0):
            return super()._start_scheduler()
