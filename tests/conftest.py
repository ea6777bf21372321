"""What every test session needs: the rules for tests that want an engine or a device."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.faults import build

# Other work beside the tests makes them slow, not wrong.
settings.register_profile("kvstore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvstore")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail tests without their engine, skip tests without their device.

    `make setup` installs vLLM, so a missing one is a broken environment: a skip would hide that
    nothing real was tested. A GPU is hardware, which not every machine has.
    """
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.fail("vLLM is not installed here: run `make setup`", pytrace=False)
    if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA device on this machine")


@pytest.fixture(scope="session")
def fault_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that injects faults into I/O calls, made at its first use."""
    return build(tmp_path_factory.mktemp("fault_library"))
