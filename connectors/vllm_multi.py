"""What differs for a child of vLLM's MultiConnector from a connector on its own."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvstore.core.errors import NotSupported


def register(name: str, module: str) -> None:
    """Make a connector known to vLLM by its class's name.

    A MultiConnector finds the classes of its children's reports by name, and an engine whose
    reports have no class ends. Again is as good as once.
    """
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(name, module, name)


def transfer_of_engine(child: KVConnectorBase_V1) -> Any:
    """Return the kv_transfer_config that vLLM's scheduler reads.

    It is that of the outermost connector that is being made. A MultiConnector gives its children
    copies of the configuration, and the call that makes them is the only way from there to its own.
    """
    frame, outermost = sys._getframe(1), child  # noqa: SLF001 - there is no other way
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, KVConnectorBase_V1):
            outermost = maker
        frame = frame.f_back  # type: ignore[assignment]
    try:
        return outermost._vllm_config.kv_transfer_config  # noqa: SLF001 - vLLM's base class has it
    except AttributeError:
        raise NotSupported(
            f"kvstore cannot see the kv_load_failure_policy of {type(outermost).__name__}, which"
            " makes this connector: expected a connector that calls vLLM's base class before it"
            " makes others"
        ) from None
