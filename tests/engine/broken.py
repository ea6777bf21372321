"""Connectors that do something wrong or slowly, made from ours. Loaded by name in an engine.

Slow ones say what they are doing by making files in the folder named by MARKS, so that a test
can act in the middle of it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from connectors import vllm
from connectors.jobs import LoadJob, StepMeta, StoreJob, StoreSpec
from connectors.worker import Outcome, WorkerHalf
from tests.engine.support import MARKS

SLOW_S = 0.4
SLUGGISH_S = 0.004
UNMAPPED_SLOT = 1 << 30


class _Broken(vllm.TieredConnector):
    """Ours, with another worker half."""

    worker: type[WorkerHalf] = WorkerHalf

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        with patch.object(vllm, "WorkerHalf", self.worker):
            super().register_kv_caches(kv_caches)


class ForgetfulWorker(WorkerHalf):
    """Loads report success, yet one engine block of each stays empty."""

    def _load(self, job: LoadJob) -> Outcome:
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

    def _load(self, job: LoadJob) -> Outcome:
        *others, last = job.generations
        return super()._load(msgspec.structs.replace(job, generations=(*others, last + 1)))


class ReusedConnector(_Broken):
    worker = ReusedWorker


class FailingWorker(WorkerHalf):
    """Every load fails half-way: the memory of its last slot is not there."""

    def _load(self, job: LoadJob) -> Outcome:
        slots = (*job.store.slots[:-1], UNMAPPED_SLOT)
        return super()._load(msgspec.structs.replace(job, store=StoreSpec("cpu", slots)))


class FailingConnector(_Broken):
    worker = FailingWorker


class SluggishWorker(WorkerHalf):
    """Each copy takes a few steps of the engine, so that fences and waits have work."""

    def _load(self, job: LoadJob) -> Outcome:
        time.sleep(SLUGGISH_S)
        return super()._load(job)

    def _store(self, job: StoreJob) -> Outcome:
        time.sleep(SLUGGISH_S)
        return super()._store(job)


class SluggishConnector(_Broken):
    worker = SluggishWorker


class FencelessWorker(SluggishWorker):
    """Does not wait for stores whose sources are about to be overwritten."""

    def before_step(self, meta: StepMeta) -> None:
        super().before_step(msgspec.structs.replace(meta, flush=()))


class FencelessConnector(_Broken):
    worker = FencelessWorker


class SlowWorker(WorkerHalf):
    """Marks the start of a copy and takes long; the bytes move in the middle of that time."""

    def _load(self, job: LoadJob) -> Outcome:
        with _Marked("load"):
            return super()._load(job)

    def _store(self, job: StoreJob) -> Outcome:
        with _Marked("store"):
            return super()._store(job)


class SlowConnector(_Broken):
    worker = SlowWorker


class _Marked:
    """Spends SLOW_S around what is done in it, only while a test waits for the mark."""

    def __init__(self, what: str) -> None:
        self._wanted = Path(os.environ[MARKS]) / f"{what}.wanted"
        self._mark = Path(os.environ[MARKS]) / what
        self._slow = False

    def __enter__(self) -> None:
        self._slow = self._wanted.exists()
        if self._slow:
            self._mark.touch()
            time.sleep(SLOW_S / 2)

    def __exit__(self, *_error: object) -> None:
        if self._slow:
            time.sleep(SLOW_S / 2)


class ImpatientConnector(vllm.TieredConnector):
    """Waits for its store one second at start, not a minute."""

    def _start_scheduler(self) -> Any:  # noqa: ANN401 - the scheduler half
        with patch.object(vllm, "ATTACH_S", 1.0):
            return super()._start_scheduler()
