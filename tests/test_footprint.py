"""What a connector half brings into an engine's process: what it needs of ours, and no server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("connectors", "kvstore", "tiers")
# What only stores, tools, and engines with `direct` load.
FORBIDDEN = (
    *("kvstore.store", "kvstore.handover", "kvstore.cli", "kvstore.check", "kvstore.metrics"),
    *(
        "tiers.nvme",
        "tiers.nixl",
        "tiers.object",
        "tiers.cpu",
        "obstore",
        "connectors.copies.gpu",
        "connectors.direct_reads",
    ),
    *(
        "aiofiles",
        "cupy",
        "lmdb",
        "nixl_cu12",
        "nixl_cu13",
        "prometheus_client",
        "rich",
        "cryptography",
    ),
)
OF_THE_WORKER = (
    "connectors.copies",
    "connectors.load_progress",
    "connectors.worker",
    "connectors.worker_copies",
)
OF_THE_SCHEDULER = (
    "connectors.late_stores",
    "connectors.load_planner",
    "connectors.request_lookups",
    "connectors.scheduler",
    "connectors.store_client",
    "connectors.store_planner",
)

WORKER = """
from connectors.worker import WorkerHalf
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule

geometry = RankGeometry("model", 16, (1,), (GroupGeometry(GroupRule(), ()),))
WorkerHalf("engine", 0, 1, geometry, {}, lambda: "/nowhere").shutdown()
"""
SCHEDULER = """
from connectors.engine_interface import Geometry
from connectors.scheduler import SchedulerHalf
from connectors.store_client import StoreClient
from time import monotonic_ns
from connectors.store_connection import Attacher
from kvstore.core.types import GroupRule
from kvstore.wire import engine

hello = engine.Hello(engine.VERSION, "engine", "scheduler", 0, 1)
client = StoreClient(Attacher(lambda: "/nowhere", hello), monotonic_ns)
SchedulerHalf(Geometry(16, 16, (16,), (GroupRule(),)), client).shutdown()
"""


def added(*codes: str, before: str = "pass") -> list[list[str]]:
    """Run each code in a fork of one process that has run `before`; the modules that each loads."""
    whole = (
        f"import json, os, sys\n{before}\nthere = set(sys.modules)\n"
        f"for code in {codes}:\n"
        "    if not os.fork():\n"
        "        exec(code, {})\n"
        "        print(json.dumps(sorted(set(sys.modules) - there)), flush=True)\n"
        "        os._exit(0)\n"
        "    if os.wait()[1]:\n"
        "        sys.exit(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", whole],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]


def under(names: list[str], *parents: str) -> list[str]:
    """Return those of the modules that are one of these, or lie below one."""
    return [name for name in names if any(f"{name}.".startswith(f"{p}.") for p in parents)]


@pytest.mark.parametrize(
    ("code", "modules_max", "forbidden"),
    [
        (WORKER, 22, (*OF_THE_SCHEDULER, "kvstore.config")),
        (SCHEDULER, 34, (*OF_THE_WORKER, "kvstore.config", "torch")),
    ],
    ids=["worker", "scheduler"],
)
def test_a_half_loads_what_it_needs(
    code: str, modules_max: int, forbidden: tuple[str, ...]
) -> None:
    (loaded,) = added(code)
    assert not under(loaded, *FORBIDDEN, *forbidden)
    ours = under(loaded, *PACKAGES)
    assert len(ours) <= modules_max, ours
