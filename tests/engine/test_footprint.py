"""What we add to a vLLM process that has vLLM's connector base loaded: one side, and no server."""

from __future__ import annotations

import pytest

from tests.test_footprint import (
    FORBIDDEN,
    OF_THE_SCHEDULER,
    OF_THE_WORKER,
    PACKAGES,
    added,
    under,
)

pytestmark = pytest.mark.vllm

BASE = "import vllm.distributed.kv_transfer.kv_connector.v1.base"


@pytest.mark.parametrize(
    ("side", "modules_max", "forbidden"),
    [
        ("vllm_worker", 35, OF_THE_SCHEDULER),
        ("vllm_scheduler", 41, (*OF_THE_WORKER, "connectors.weights", "connectors.vllm_pages")),
    ],
)
def test_a_side_loads_what_it_needs(
    side: str, modules_max: int, forbidden: tuple[str, ...]
) -> None:
    reads = "from connectors.config import parse_extra; parse_extra({'store': '/store.sock'})"
    loaded = added(f"import connectors.vllm, connectors.{side}\n{reads}", BASE)
    assert not under(loaded, *FORBIDDEN, *forbidden, "kvstore.config", "kvstore.launch")
    ours = under(loaded, *PACKAGES)
    assert len(ours) <= modules_max, ours


def test_neither_side_is_loaded_before_the_role_is_known() -> None:
    loaded = added("import connectors.vllm", BASE)
    assert not under(loaded, *FORBIDDEN, *OF_THE_WORKER, *OF_THE_SCHEDULER, "kvstore.launch")
