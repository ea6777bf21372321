"""Set engine processes right for tests and benchmarks; found by being first on PYTHONPATH.

Waiting processes leave the CPU: vLLM's shared-memory readers spin on os.sched_yield, which on a
machine with few cores starves the very process they wait for: steps that take milliseconds then
take tens of seconds.

With KVSTORE_NO_TILES set, vLLM does not multiply in tiles (AMX): there the sums of a prompt depend
on what runs beside it so much that outputs with and without a cache cannot be compared.
"""

import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def _sleep_instead() -> None:
    time.sleep(50e-6)  # long enough to be descheduled, short beside one engine step


os.sched_yield = _sleep_instead


class _WithoutTiles(MetaPathFinder, Loader):
    """Changes torch.cpu when it has been loaded."""

    def find_spec(self, name: str, path: object, _target: object = None) -> ModuleSpec | None:
        if name != "torch.cpu":
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None:
            self._inner = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if self._inner is None else self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._inner is not None:
            self._inner.exec_module(module)
        vars(module)["_is_amx_tile_supported"] = lambda: False


if os.environ.get("KVSTORE_NO_TILES"):
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    sys.meta_path.insert(0, _WithoutTiles())
