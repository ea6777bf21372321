"""What every test session needs: the rules for tests that want an engine or a device."""

import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from xdist.scheduler import LoadScopeScheduling

from kvstore.config import NvmeConfig
from tests.harness import bugs
from tests.harness.faults import build
from tests.harness.forked import OF_ENGINES, OF_INDEXES, fork_index, start_server
from tests.harness.nvme_blocks import Shelf, settings_for, shelf
from tests.harness.nvme_trouble import be_quick
from tiers.nvme.index_client import IndexProcess

ENGINES = "tests/engine/"
OURS = ("connectors", "kvstore", "tiers")  # loggers

# Other work beside the tests makes them slow, not wrong.
settings.register_profile("kvstore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvstore")
# Whether a test fails is all that counts there: what fails is not made small, which takes minutes.
settings.register_profile(
    "mutants", settings.get_profile("kvstore"), phases=[Phase.explicit, Phase.generate]
)


class ByFile(LoadScopeScheduling):
    """Which tests one process of pytest-xdist runs.

    A file stays together, as its fixtures want it. So do all files with real engines, which share
    some: a machine has memory for a few.
    """

    def _split_scope(self, nodeid: str) -> str:
        path: str = nodeid.partition("::")[0]
        return ENGINES if path.startswith(ENGINES) else path

    def schedule(self) -> None:
        """Give the first files to gw0, whichever process is ready first: engines can start there.

        See `forking`, below.
        """
        for node in sorted(self.assigned_work, key=lambda node: node.gateway.id != "gw0"):
            self.assigned_work[node] = self.assigned_work.pop(node)
        super().schedule()


def pytest_configure() -> None:
    """Have processes that tests start hear Ctrl-C, also where a shell runs us in the background."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """Have ByFile say it, whatever --dist is."""
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: real engines, then files with slow tests."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: (not item.nodeid.startswith(ENGINES), item.path not in slow))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail tests without their engine, skip tests without their device.

    `make setup` installs vLLM, so a missing one is a broken environment: a skip would hide that
    nothing real was tested. A GPU is hardware, which not every machine has.
    """
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.fail("vLLM is not installed here: run `make setup`", pytrace=False)
    if not item.nodeid.startswith(ENGINES):  # an engine in this process has them log as vLLM
        for name in OURS:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
    if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA device on this machine")


@pytest.fixture(scope="session")
def fault_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that injects faults into I/O calls, made at its first use."""
    return build(tmp_path_factory.mktemp("fault_library"))


@pytest.fixture(name="settings")
def _disk_settings(tmp_path: Path) -> NvmeConfig:
    """Of a small NVMe tier."""
    return settings_for(tmp_path / "kv")


@pytest.fixture
def empty(settings: NvmeConfig) -> Iterator[Shelf]:
    """A small NVMe tier, open."""
    with shelf(settings) as made:
        yield made


@pytest.fixture
def found(empty: Shelf) -> Shelf:
    """One with five blocks of chain 1 on disk."""
    empty.put(1, 0, 5)
    empty.settle()
    return empty


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails is looked at often."""
    be_quick(monkeypatch)


@pytest.fixture(scope="session")
def forking(request: pytest.FixtureRequest) -> None:
    """Processes can be forked from one that has imported what they need."""
    imports, environment = [*OF_INDEXES], dict(os.environ)
    # ByFile gives all engines to the first process; each process knows of all tests.
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if first and any(item.get_closest_marker("vllm") for item in request.session.items):
        from tests.bench import engine
        from tests.engine.support import ENVIRONMENT

        imports += OF_ENGINES
        environment = engine.environment(in_process=True) | ENVIRONMENT
    start_server(imports, environment)


@pytest.fixture(scope="session", autouse=True)
def _how_indexes_start(forking: None) -> Iterator[None]:  # noqa: ARG001 - the server is needed
    """Stores that are processes of their own start the process of their index by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexProcess, "start", staticmethod(fork_index))
        yield


@pytest.fixture(autouse=True)
def _no_bugs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail tests in whose process a barrier has ended a bug, but for tests of barriers."""
    with bugs.noted() as found:
        yield
    if not request.node.get_closest_marker("meets_bugs"):
        assert not found, "barriers have ended these: see the log"
