"""Fixtures for tests with real engines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.bench.models import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a model by its name, made at its first use in this session."""
    root = tmp_path_factory.mktemp("models")
    return lambda name: make_model(name, root)


@pytest.fixture(scope="session", autouse=True)
def _sums_that_can_be_compared() -> Iterator[None]:
    """Without them half of the prompts differ at near ties where the processor has AMX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_NO_TILES", "1")
        yield


@pytest.fixture(autouse=True)
def _logs_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that fail leave their logs where pytest removes them in time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
