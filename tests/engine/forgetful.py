"""A peer that can be broken: loads report success, yet one block of each stays empty."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.bench.native_worker import MemcpySpec, MemcpyWorker
from tests.engine.support import TROUBLES, Trouble, wanted_file


class ForgetfulWorker(MemcpyWorker):
    """vLLM's own, until a test asks for trouble. Loaded by name in an engine."""

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        done = super().submit_load(job_id, src_spec, dst_spec)
        if wanted_file(Path(os.environ[TROUBLES]), Trouble.FORGETFUL).exists():
            pairs = list(self._pairs(dst_spec, src_spec.block_ids))
            group, block, _ = pairs[len(pairs) // 2]
            for index in self._tensors_of_group[group]:
                self._device[index][block] = 0
        return done


class ForgetfulSpec(MemcpySpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = ForgetfulWorker(kv_caches, self.num_chunks)
        return self._worker
