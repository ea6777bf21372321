"""Fixtures for tests with real engines: most of them share a few that stay healthy.

An engine is started at its first use and ends with the session; `forget` leaves it with nothing in
its cache, and prompts that no other test uses find nothing in its store.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.bench.engine import Engine, Request, Result
from tests.bench.models import make_model
from tests.bench.store import StoreProcess
from tests.engine.forked import forked_engine
from tests.engine.served import Served
from tests.engine.support import CAPACITY, ENVIRONMENT, GROUPS, Reference, Troubled, forget


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a model by its name, made at its first use in this session."""
    root = tmp_path_factory.mktemp("models")
    return lambda name: make_model(name, root)


@pytest.fixture(scope="session", autouse=True)
def _how_engines_start(forking: None) -> Iterator[None]:  # noqa: ARG001 - the server is needed
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(Engine, "launch", staticmethod(forked_engine))
        yield


@pytest.fixture(autouse=True)
def _logs_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that fail leave their logs where pytest removes them in time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of weights' files lies here."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session", params=list(GROUPS))
def model_name(request: pytest.FixtureRequest) -> str:
    """Each model in turn; all that is to be done with one is done before the next."""
    return str(request.param)


@pytest.fixture(scope="session")
def plain(model: Callable[[str], Path]) -> Iterator[Callable[[str], Engine]]:
    """An engine without connector, by its model, with nothing in its cache."""
    with contextlib.ExitStack() as ends:
        started = cache(lambda name: ends.enter_context(Engine(model(name))))

        def emptied(name: str) -> Engine:
            forget(started(name))
            return started(name)

        yield emptied


@pytest.fixture(scope="session")
def reference(plain: Callable[[str], Engine]) -> Reference:
    """What an engine without connector answers, with nothing in its cache, and no abort."""
    known: dict[tuple[str, bytes, int], list[Result]] = {}

    def results(name: str, requests: Sequence[Request], tokens_out: int) -> list[Result]:
        whole = [msgspec.structs.replace(request, abort_step=None) for request in requests]
        asked = name, msgspec.msgpack.encode(whole), tokens_out
        if asked not in known:
            known[asked] = plain(name).run(whole, max_tokens=tokens_out)
        return known[asked]

    return results


@pytest.fixture(scope="session")
def served(
    model_name: str, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """An engine on a shared store, with KV events; everything fits."""
    folder = tmp_path_factory.mktemp("served")
    with (
        StoreProcess(folder, CAPACITY) as store,
        contextlib.closing(Served(model_name, model(model_name), folder, store)) as served,
    ):
        yield served


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store of one test, into which everything fits."""
    with StoreProcess(tmp_path, CAPACITY) as store:
        yield store


@pytest.fixture(scope="session")
def troubled(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Troubled]]:
    """An engine on a shared store, by its model, that gets into trouble when asked."""
    with contextlib.ExitStack() as ends:

        @cache
        def started(name: str) -> Troubled:
            folder = tmp_path_factory.mktemp("troubled")
            store = ends.enter_context(StoreProcess(folder, CAPACITY))
            return ends.enter_context(contextlib.closing(Troubled(model(name), folder, store)))

        yield started
