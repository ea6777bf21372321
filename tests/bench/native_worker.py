"""The copying half of native.py; imports vLLM, so only an engine process loads it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies blocks at once, in the engine's step; finished before submit returns.

    A chunk is one block. The pool has, for each of vLLM's KV tensors, one row per chunk. All of it
    is touched at the start, as the pinned memory of the GPU worker would be.
    """

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self._device = [cache.tensor.numpy() for cache in kv_caches.tensors]
        self._pool = [
            np.full((chunks, cache.page_size_bytes), 0, dtype=np.int8)
            for cache in kv_caches.tensors
        ]
        self._tensors_of_group = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy device blocks to the chunks of dst_spec."""
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks to the device blocks of dst_spec."""
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Results since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever in flight."""

    def _copy(self, job_id: int, device: Any, chunk_ids: Any, *, store: bool) -> bool:
        started_s = time.perf_counter()
        copied_bytes = 0
        for group, block, row in self._pairs(device, chunk_ids):
            for index in self._tensors_of_group[group]:
                page, kept = self._device[index][block], self._pool[index][row]
                if store:
                    kept[:] = page
                else:
                    page[:] = kept
                copied_bytes += page.nbytes
        seconds = time.perf_counter() - started_s
        self._finished.append(TransferResult(job_id, True, copied_bytes, seconds))
        return True

    def _pairs(self, device: Any, chunk_ids: Any) -> Iterator[tuple[int, int, int]]:
        """Group, device block and pool row of each block to copy."""
        counts = enumerate(device.group_sizes)
        groups = [group for group, count in counts for _ in range(count)]
        return zip(groups, device.block_ids.tolist(), chunk_ids.tolist(), strict=True)


class MemcpySpec(CPUOffloadingSpec):
    """CPUOffloadingSpec, except for the worker."""

    _worker: MemcpyWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Make the worker on the first call."""
        if self._worker is None:
            self._worker = MemcpyWorker(kv_caches, self.num_chunks)
        return self._worker
