"""CUDA graphs, which an engine captures as it starts: a worker that attaches meanwhile spoils none.

Takes all that a store needs, so packages are imported by the test: without them it fails alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

NUMBERS = 1024


def harness(module: str, name: str) -> Any:  # noqa: ANN401 - what a module has
    return getattr(import_module(f"tests.harness.{module}"), name)


def test_a_worker_attaches_while_its_engine_captures_a_graph(tmp_path: Path) -> None:
    """It measures the GPU, and makes and pins memory, all on a thread of its own."""
    settings = harness("live", "store_settings")(tmp_path)
    rig = harness("worker_rig", "Rig")(settings.server.socket, place="cuda:0")  # no store yet
    (rank,) = rig.ranks
    numbers = torch.arange(NUMBERS, device="cuda:0")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ExitStack() as stack:
        with torch.cuda.graph(graph, capture_error_mode="global"):  # as vLLM does
            doubled = numbers * 2
            stack.enter_context(harness("live", "LiveStore")(settings))
            stack.callback(rig.close)
            rig.attach()
            assert rank.half._copies.session.slots._extents, "nothing was pinned meanwhile"
            added = doubled + 1
        graph.replay()
        assert added.tolist() == list(range(1, 2 * NUMBERS, 2))
        chain = harness("script", "hashes")(2)
        rig.put(chain, [1, 2])
        assert rig.load(rig.load_job("r", rig.ask(chain), [10, 11])) == [False]
        assert rank.holds(10, 1)
