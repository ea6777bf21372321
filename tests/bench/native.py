"""vLLM's own offloading, made to run on a machine without a GPU, as the peer to compare with.

It exists only because the worker that vLLM ships copies by GPU streams and refuses to start
without one. Its scheduler, lookup and eviction are untouched; native_worker.py does the copying.
"""

from __future__ import annotations

from typing import Any


def native_config(
    cpu_bytes: int,
    *,
    blocks_per_chunk: int = 1,
    offload_prompt_only: bool = True,
    eviction_policy: str = "lru",
) -> dict[str, Any]:
    """The kv_transfer_config of vLLM's OffloadingConnector with cpu_bytes of host memory.

    offload_prompt_only is vLLM's default: blocks filled while decoding are not kept.
    """
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "MemcpySpec",
            "spec_module_path": "tests.bench.native_worker",
            "cpu_bytes_to_use": cpu_bytes,
            "blocks_per_chunk": blocks_per_chunk,
            "offload_prompt_only": offload_prompt_only,
            "eviction_policy": eviction_policy,
        },
    }
