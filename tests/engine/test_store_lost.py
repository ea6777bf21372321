"""The store dies or freezes in the middle of a copy: the engine goes on, then uses it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.bench.engine import Request, Result
from tests.bench.models import prompt
from tests.bench.steal import Watch
from tests.engine.identity import assert_same
from tests.engine.support import (
    TOKENS_OUT,
    Reference,
    Trouble,
    Troubled,
    eventually,
    forget,
    grown,
    meanwhile,
    only_long,
    private_store_of,
    servable,
)
from tests.harness.handover_nodes import gone

pytestmark = pytest.mark.vllm

EXTERNAL = "external_prefix_cache_hits"
DETACHED = "kvstore_events{event=detached}"
FAILED = {
    "store": "kvstore_events{event=failed_stores}",
    "load": "kvstore_events{event=load_failed}",
}
SLOW = {"store": Trouble.SLOW_STORE, "load": Trouble.SLOW_LOAD}
FROZEN_RUN_S = 30.0  # 5 s on a quiet machine, 8 s were seen on a busy one


def store_process(one: Troubled) -> psutil.Process:
    if one.store is not None:
        return psutil.Process(one.store.pid)
    return private_store_of(one.engine)


def restart_store(one: Troubled) -> None:
    """A shared store is started again by whoever runs it, a private one by the connector."""
    if one.store is not None:
        one.store.stop()
        one.store.__enter__()


@contextmanager
def during(one: Troubled, kind: Trouble, act: Callable[[], None]) -> Iterator[None]:
    """Make the next copy of a kind slow, and act in the middle of it."""

    def wait() -> None:
        eventually(lambda: one.has_begun(kind))
        one.end(kind)
        act()

    with one.trouble(kind), meanwhile(wait):
        yield


def run(one: Troubled, requests: list[Request]) -> list[Result]:
    return one.engine.run(requests, max_tokens=TOKENS_OUT)


def assert_hits_come_again(one: Troubled, requests: list[Request], reference: list[Result]) -> None:
    deadline_s = time.monotonic() + 600
    expected = sum(servable(len(request.tokens)) for request in requests)
    hits = 0
    while hits < expected:
        assert time.monotonic() < deadline_s, f"{hits} of {expected} tokens"
        before = one.engine.metrics()
        assert_same(reference, run(one, requests))
        forget(one.engine)
        hits = grown(one.engine, before, EXTERNAL)
        time.sleep(0.1)
    assert hits == expected


def prompts(seed: int) -> list[Request]:
    return [Request(id=f"p{i}", tokens=prompt(seed * 100 + i, 200 + 90 * i)) for i in range(6)]


@pytest.fixture(scope="module", params=["shared", "private"])
def patient(
    request: pytest.FixtureRequest,
    model: Callable[[str], Path],
    troubled: Callable[[str], Troubled],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Troubled]:
    if request.param == "shared":
        yield troubled("llama_s")
        return
    with closing(Troubled(model("llama_s"), tmp_path_factory.mktemp("lost"))) as private:
        yield private


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_store_that_is_killed_in_a_copy(
    patient: Troubled, reference: Reference, what: str
) -> None:
    requests = prompts(10 if what == "store" else 11)
    expected = reference("llama_s", requests, TOKENS_OUT)
    if what == "load":
        assert_hits_come_again(patient, requests, expected)
    before, process = patient.engine.metrics(), store_process(patient)
    with during(patient, SLOW[what], process.kill):
        got = run(patient, requests)
    assert_same(expected, got)
    eventually(lambda: gone(process))
    forget(patient.engine)
    restart_store(patient)
    assert_hits_come_again(patient, requests, expected)
    assert grown(patient.engine, before, FAILED[what]) > 0  # it really was in the middle
    assert grown(patient.engine, before, DETACHED) == 1


@pytest.mark.parametrize("patient", ["shared", only_long("private")], indirect=True, scope="module")
@pytest.mark.parametrize("what", ["store", "load", "lookup"])
def test_a_store_that_freezes_in_a_copy(patient: Troubled, reference: Reference, what: str) -> None:
    requests = prompts(12 + ["store", "load", "lookup"].index(what))
    expected = reference("llama_s", requests, TOKENS_OUT)
    if what != "store":
        assert_hits_come_again(patient, requests, expected)
    before, process = patient.engine.metrics(), store_process(patient)
    watch = Watch()
    try:
        if what == "lookup":
            process.suspend()
            got = run(patient, requests)
        else:
            with during(patient, SLOW[what], process.suspend):
                got = run(patient, requests)
        assert_same(expected, got)
        forget(patient.engine)
        assert_same(expected, run(patient, requests))
        forget(patient.engine)
        assert watch.own_s() < FROZEN_RUN_S
    finally:
        process.resume()
    assert_hits_come_again(patient, requests, expected)
    assert process.is_running()
    assert grown(patient.engine, before, DETACHED) >= 1
