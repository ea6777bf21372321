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
READS = "from connectors.config import parse_extra; parse_extra({'store': '/store.sock'})"
SIDES = {
    "vllm_worker": (36, OF_THE_SCHEDULER),
    "vllm_scheduler": (41, (*OF_THE_WORKER, "connectors.weights", "connectors.vllm_pages")),
}


def test_a_side_loads_what_it_needs_and_neither_before_the_role_is_known() -> None:
    codes = [f"import connectors.vllm, connectors.{side}\n{READS}" for side in SIDES]
    neither, *sides = added("import connectors.vllm", *codes, before=BASE)
    assert not under(neither, *FORBIDDEN, *OF_THE_WORKER, *OF_THE_SCHEDULER, "kvstore.launch")
    for loaded, (modules_max, forbidden) in zip(sides, SIDES.values(), strict=True):
        assert not under(loaded, *FORBIDDEN, *forbidden, "kvstore.config", "kvstore.launch")
        ours = under(loaded, *PACKAGES)
        assert len(ours) <= modules_max, ours
