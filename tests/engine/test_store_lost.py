"""The store dies or freezes in the middle of a copy: the engine goes on, then uses it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvstore.bench.engine import Engine, Request, Result
from kvstore.bench.models import prompt
from kvstore.bench.steal import Watch
from kvstore.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    CAPACITY,
    MARKS,
    TOKENS_OUT,
    attach,
    broken,
    eventually,
    forget,
    gone,
    grown,
    private_store_of,
    servable,
)

pytestmark = pytest.mark.vllm

EXTERNAL = "external_prefix_cache_hits"
DETACHED = "kvstore_events{event=detached}"
FAILED = {
    "store": "kvstore_events{event=failed_stores}",
    "load": "kvstore_events{event=load_failed}",
}
FROZEN_RUN_S = 8.0  # such a run takes less than one second otherwise


class Patient:
    """An engine whose copies can be made slow, and its store, which can be killed and restarted."""

    def __init__(self, model: Path, marks: Path, store: StoreProcess | None) -> None:
        self.marks = marks
        self.store = store
        connector = attach(store, by=broken("SlowConnector"))
        self.engine = Engine(model, connector=connector, env={MARKS: str(marks)})
        self.engine.__enter__()
        self._private: psutil.Process | None = None

    @property
    def store_process(self) -> psutil.Process:
        if self.store is not None:
            return psutil.Process(self.store.pid)
        return private_store_of(self.engine)

    @contextmanager
    def during(self, what: str, act: Callable[[], None]) -> Iterator[None]:
        """Make the next copy of a kind slow, and act in the middle of it."""
        (self.marks / f"{what}.wanted").touch()
        acted: list[bool] = []

        def wait() -> None:
            eventually((self.marks / what).exists, within_s=600)
            (self.marks / f"{what}.wanted").unlink()
            act()
            acted.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            (self.marks / what).unlink(missing_ok=True)
        assert acted, f"no {what} was seen"

    def restart_store(self) -> None:
        """A shared store is started again by whoever runs it, a private one by the connector."""
        if self.store is not None:
            self.store.stop()
            self.store.__enter__()

    def run(self, requests: list[Request]) -> list[Result]:
        return self.engine.run(requests, max_tokens=TOKENS_OUT)

    def assert_hits_come_again(self, requests: list[Request], reference: list[Result]) -> None:
        deadline_s = time.monotonic() + 600
        expected = sum(servable(len(request.tokens)) for request in requests)
        hits = 0
        while hits < expected:
            assert time.monotonic() < deadline_s, f"{hits} of {expected} tokens"
            before = self.engine.metrics()
            assert_same(reference, self.run(requests))
            forget(self.engine)
            hits = grown(self.engine, before, EXTERNAL)
            time.sleep(0.1)
        assert hits == expected


def prompts(seed: int) -> list[Request]:
    return [Request(id=f"p{i}", tokens=prompt(seed * 100 + i, 200 + 90 * i)) for i in range(6)]


@pytest.fixture(scope="module")
def reference(model: Callable[[str], Path]) -> Iterator[Callable[[list[Request]], list[Result]]]:
    with Engine(model("llama_s")) as engine:
        yield lambda requests: engine.run(requests, max_tokens=TOKENS_OUT)


@pytest.fixture(scope="module", params=["shared", "private"])
def patient(
    request: pytest.FixtureRequest,
    model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Patient]:
    folder = tmp_path_factory.mktemp("lost")
    store = StoreProcess(folder, CAPACITY) if request.param == "shared" else None
    if store is not None:
        store.__enter__()
    patient = Patient(model("llama_s"), folder, store)
    try:
        yield patient
    finally:
        patient.engine.close()
        if store is not None:
            store.stop()


Reference = Callable[[list[Request]], list[Result]]


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_store_that_is_killed_in_a_copy(
    patient: Patient, reference: Reference, what: str
) -> None:
    requests = prompts(10 if what == "store" else 11)
    expected = reference(requests)
    if what == "load":
        patient.assert_hits_come_again(requests, expected)
    before, process = patient.engine.metrics(), patient.store_process
    with patient.during(what, process.kill):
        got = patient.run(requests)
    assert_same(expected, got)
    eventually(lambda: gone(process))
    forget(patient.engine)
    patient.restart_store()
    patient.assert_hits_come_again(requests, expected)
    assert grown(patient.engine, before, FAILED[what]) > 0  # it really was in the middle
    assert grown(patient.engine, before, DETACHED) == 1


@pytest.mark.parametrize("what", ["store", "load", "lookup"])
def test_a_store_that_freezes_in_a_copy(patient: Patient, reference: Reference, what: str) -> None:
    requests = prompts(12 + ["store", "load", "lookup"].index(what))
    expected = reference(requests)
    if what != "store":
        patient.assert_hits_come_again(requests, expected)
    before, process = patient.engine.metrics(), patient.store_process
    watch = Watch()
    try:
        if what == "lookup":
            process.suspend()
            got = patient.run(requests)
        else:
            with patient.during(what, process.suspend):
                got = patient.run(requests)
        assert_same(expected, got)
        forget(patient.engine)
        assert_same(expected, patient.run(requests))
        forget(patient.engine)
        assert watch.own_s() < FROZEN_RUN_S
    finally:
        process.resume()
    patient.assert_hits_come_again(requests, expected)
    assert process.is_running()
    assert grown(patient.engine, before, DETACHED) >= 1
