"""A broken peer: loads report success, yet one block of each stays empty. Loaded by name."""

from __future__ import annotations

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstore.bench.native_worker import MemcpySpec, MemcpyWorker


class ForgetfulWorker(MemcpyWorker):
    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        done = super().submit_load(job_id, src_spec, dst_spec)
        pairs = list(self._pairs(dst_spec, src_spec.block_ids))
        group, block, _ = pairs[len(pairs) // 2]
        for index in self._tensors_of_group[group]:
            self._device[index][block] = 0
        return done


class ForgetfulSpec(MemcpySpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = ForgetfulWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)
        return self._worker
