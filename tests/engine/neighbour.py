"""A connector beside ours that is always wrong: its loads fail, which it says after the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

LEAST = 64


@dataclass
class Promised(KVConnectorMetadata):
    """Engine blocks that this step's loads would fill."""

    blocks: set[int] = field(default_factory=set)


class FailingConnector(KVConnectorBase_V1, SupportsHMA):
    """Claims all but the last block of each prompt, once, loads nothing, and says so in the end."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._promised: set[int] = set()
        self._served: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        size = self._vllm_config.cache_config.block_size
        tokens = (request.num_tokens - 1) // size * size - computed
        if tokens < LEAST or request.request_id in self._served:
            return 0, False
        return tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            self._served.add(request.request_id)
            size = self._vllm_config.cache_config.block_size
            (ids,) = blocks.get_block_ids()
            self._promised.update(ids[: (request.num_tokens - 1) // size])

    def build_connector_meta(self, _output: Any) -> KVConnectorMetadata:
        promised, self._promised = self._promised, set()
        return Promised(promised)

    def request_finished_all_groups(self, _request: Any, _ids: Any) -> tuple[bool, None]:
        return False, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        metadata = self._get_connector_metadata()
        return set(metadata.blocks) if isinstance(metadata, Promised) else set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
