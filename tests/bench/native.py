"""vLLM's own offloading, made to run on a machine without a GPU, as the peer to compare with.

It exists only because the worker that vLLM ships copies by GPU streams and refuses to start
without one. Its scheduler, lookup and eviction are untouched; native_worker.py does the copying.
"""

from __future__ import annotations

from typing import Any


def native_config(cpu_bytes: int) -> dict[str, Any]:
    """The kv_transfer_config of vLLM's OffloadingConnector with cpu_bytes of host memory."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "MemcpySpec",
            "spec_module_path": "tests.bench.native_worker",
            "cpu_bytes_to_use": cpu_bytes,
            "blocks_per_chunk": 1,
        },
    }
