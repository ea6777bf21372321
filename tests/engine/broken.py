"""Connectors that do something wrong or slowly, made from ours. Loaded by name in an engine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from connectors import vllm, vllm_scheduler, worker, worker_copies
from connectors.copies.host import LayerCache
from connectors.step_loads import StepLoads
from connectors.step_meta import StepMeta
from connectors.worker import WorkerHalf
from connectors.worker_copies import LoadTask, StoreTask
from tests.engine.support import TROUBLES, Trouble, seen_file, wanted_file

SLOW_S = 0.4
PAUSE_S = {Trouble.PAUSES: 0.012, Trouble.LONG_PAUSES: 0.2}
UNMAPPED_SLOT = 1 << 30


def wants(trouble: Trouble) -> bool:
    return wanted_file(Path(os.environ[TROUBLES]), trouble).exists()


class TroubledWorker(WorkerHalf):
    """Ours, until a test asks for trouble; see support.Trouble."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with patch.object(worker, "Copies", TroubledCopies):
            super().__init__(*args, **options)
        assert isinstance(self._copies, TroubledCopies)
        self._copies.caches = args[4]

    def before_step(self, meta: StepMeta) -> None:
        if wants(Trouble.NO_FENCE):
            meta = msgspec.structs.replace(meta, flush=())
        super().before_step(meta)


class TroubledCopies(worker_copies.Copies):
    """Its copies."""

    caches: dict[str, LayerCache]

    def _store(self, task: StoreTask) -> bool:
        with self._paused(Trouble.SLOW_STORE):
            return super()._store(task)

    def _load(self, task: LoadTask) -> bool:
        job = wanted = task.job
        if wants(Trouble.REUSED):
            *others, last = job.generations
            job = msgspec.structs.replace(job, generations=(*others, last - 1))
        if wants(Trouble.FAILING):
            slots = (*job.slots[:-1], UNMAPPED_SLOT)
            job = msgspec.structs.replace(job, slots=slots)
        task.job = job
        try:
            with self._paused(Trouble.SLOW_LOAD):
                over = super()._load(task)
        finally:
            task.job = wanted
        if wants(Trouble.FORGETFUL):
            self._forget_one(job.engine.block_ids)
        return over

    def _loaded(self, task: LoadTask, *args: Any) -> None:
        """Leave what fits in a step as it is at first, however slow this machine copies."""
        super()._loaded(task, *args)
        task.seconds = 0.0

    def _forget_one(self, blocks: Sequence[int]) -> None:
        for cache in self.caches.values():
            start = cache.offset + blocks[len(blocks) // 2] * cache.block_stride
            cache.storage[start : start + cache.page_bytes] = 0

    @contextmanager
    def _paused(self, slow: Trouble) -> Iterator[None]:
        pause_s = sum(s for trouble, s in PAUSE_S.items() if wants(trouble))
        if wants(slow):
            seen_file(Path(os.environ[TROUBLES]), slow).touch()
            pause_s = SLOW_S
        time.sleep(pause_s / 2)
        yield
        time.sleep(pause_s / 2)


class TroubledStepLoads(StepLoads):
    """Its loads that a step waits for."""

    def allows(self, *what: Any, **how: Any) -> bool:
        return not wants(Trouble.OUTSIDE) and super().allows(*what, **how)


class TroubledConnector(vllm.TieredConnector):
    """Ours, with such halves."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with patch.object(vllm_scheduler, "StepLoads", TroubledStepLoads):
            super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        with patch.object(worker, "WorkerHalf", TroubledWorker):
            super().register_kv_caches(kv_caches)


class ImpatientConnector(vllm.TieredConnector):
    """Waits for its store one second at start, not a minute."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with patch.object(vllm_scheduler, "ATTACH_S", 1.0):
            super().__init__(vllm_config, role, kv_cache_config)


# In a MultiConnector reports go by the name of a class, which has to be known to vLLM.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector("TroubledConnector", __name__, "TroubledConnector")
