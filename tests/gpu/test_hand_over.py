"""A hand-over between engines on GPUs: real stores, exporters, their disks, and workers.

Takes all that a store needs, so packages are imported by the tests: without them these fail alone.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
DISK = '[nvme]\npath = "{folder}/kv"\ncapacity = "64MiB"\n'
ways = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


@pytest.fixture(autouse=True)
def rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines on GPUs be reached by `lo`, as if that was RDMA: no such device is here."""
    monkeypatch.setattr("connectors.engine_agent.has_rdma", lambda _: True)


def rig(name: str) -> Any:  # noqa: ANN401 - what a module has
    return getattr(import_module("tests.test_direct"), name)


@ways
@pytest.mark.parametrize("place", ["cpu", GPU])
@pytest.mark.parametrize("serving", [False, True], ids=["slots", "engine"])
def test_L1_direct_a_prompt_goes_into_a_GPU(
    tmp_path: Path, place: str, *, push: bool, serving: bool
) -> None:
    """place: where the prefill engine is."""
    chain = rig("hashes")(6)
    with rig("nodes")(tmp_path, serving=serving, push=push, place=(place, GPU)) as made:
        made.rigs[0].put(chain, range(6))
        found = made.brings(made.ask(chain), range(10, 16))
        assert (
            found["kvstore_fetched_blocks{gpu}" if serving else "kvstore_fetched_blocks{cpu}"] == 6
        )
        assert made.rigs[1].ranks[0].untouched([*range(10), *range(16, 24)])


@ways
def test_L1_direct_a_prompt_goes_from_a_disk_into_a_GPU(tmp_path: Path, *, push: bool) -> None:
    chain = rig("hashes")(6)
    with rig("nodes")(tmp_path, more=DISK, push=push, place=(GPU, GPU)) as made:
        made.rigs[0].put(chain, range(6))
        rig("eventually")(lambda: made.numbers(0).get("kvstore_tier_blocks{nvme,stored}") == 6)
        made.stores[0].stop()
        made.stores[0].__enter__()
        client = made.rigs[0].client
        rig("eventually")(lambda: rig("heard")(client) and client.session)
        found = made.brings(made.ask(chain), range(10, 16))
        assert found["kvstore_fetched_blocks{nvme}"] == 6
