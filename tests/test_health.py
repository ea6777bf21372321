"""Probes of a store: alive, ready, and the words for why not."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.store import health
from kvstore.systemd import Systemd
from tests.bench.store import free_port
from tests.harness import bad_tiers
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, engine, eventually, store_settings

OK = (200, b"ok\n")


class Port:
    """A store's endpoint."""

    def __init__(self) -> None:
        self.number = free_port()

    def settings(self, folder: Path, tier: str = "", **options: object) -> Config:
        server = {"socket": f"{folder}/kv.sock", "metrics": f"127.0.0.1:{self.number}"}
        tiers = [{"class": f"tests.harness.bad_tiers:{tier}", "name": "bad", "options": options}]
        return store_settings(folder, server=server, **({"tier": tiers} if tier else {}))

    def ask(
        self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.number, timeout=60)) as asked:
            asked.request(method, path, headers=headers or {})
            answer = asked.getresponse()
            return answer, answer.read()

    def get(self, path: str) -> tuple[int, bytes]:
        answer, body = self.ask(path)
        return answer.status, body

    def ready(self) -> bool:
        try:
            return self.get("/readyz") == OK
        except OSError:
            return False


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    """The endpoint of a store that serves."""
    port = Port()
    with LiveStore(port.settings(tmp_path_factory.mktemp("store"))):
        eventually(port.ready)
        yield port


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Lets bad_tiers.Holds go on."""
    bad_tiers.Holds.go.clear()
    yield bad_tiers.Holds.go
    bad_tiers.Holds.go.set()


def test_Q15_a_store_that_serves_is_alive_and_ready(serving: Port) -> None:
    assert serving.get("/healthz") == serving.get("/readyz") == OK


@pytest.mark.parametrize("path", ["/status", "/metric", "/metrics/", "/status.html"])
def test_Q15_other_paths_are_not_there(serving: Port, path: str) -> None:
    assert serving.get(path) == (404, b"pages: /, /status.json, /metrics, /healthz, /readyz\n")


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz"])
def test_Q15_a_page_can_be_read_and_nothing_else(serving: Port, path: str) -> None:
    _, whole = serving.ask(path)
    with socket.create_connection(("127.0.0.1", serving.number)) as asked:
        asked.settimeout(60)
        asked.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        with asked.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
    assert (head.split()[1], body) == (b"200", b"")
    (length,) = re.findall(rb"Content-Length: (\d+)", head)
    assert int(length) == pytest.approx(len(whole), rel=0.1)
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer, _ = serving.ask(path, method)
        assert (answer.status, answer.getheader("Allow")) == (405, "GET, HEAD")


def test_metrics_are_compressed_for_those_that_ask(serving: Port) -> None:
    answer, body = serving.ask("/metrics", headers={"Accept-Encoding": "gzip, deflate"})
    assert answer.getheader("Content-Encoding") == "gzip"
    assert len(body) < len(serving.get("/metrics")[1]) / 2


def test_Q15_a_loop_that_stands_still_is_not_alive_and_the_reason_is_told(
    tmp_path: Path, port: Port, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 < health.STILL_S < 10
    monkeypatch.setattr(health, "STILL_S", 1.0)
    with LiveStore(port.settings(tmp_path, "Holds", waits=True)) as store:
        eventually(port.ready)
        with engine(store) as live:
            live.put(hashes(1))
            eventually(lambda: port.get("/healthz")[0] == 503)
            for path in ("/healthz", "/readyz"):
                status, text = port.get(path)
                assert status == 503
                assert b"loop has not turned for" in text
                assert b"expected 1 s at most" in text
            go.set()
            eventually(lambda: port.get("/healthz") == OK)
            eventually(port.ready)


def test_Q15_a_store_whose_tier_is_off_is_alive_and_not_ready(tmp_path: Path, port: Port) -> None:
    with LiveStore(port.settings(tmp_path, "Bad", raises=["poll"])) as store:
        eventually(port.ready)
        with engine(store) as live:
            live.put(hashes(1))
            eventually(lambda: not port.ready())
            assert port.get("/readyz") == (503, b"tier bad is off\n")
            assert port.get("/healthz") == OK


def test_Q15_a_store_that_starts_or_ends_is_alive_and_not_ready(
    tmp_path: Path, port: Port, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STILL_S", 1.0)
    with LiveStore(port.settings(tmp_path, "Holds")) as store:
        assert health.Health(dict, Systemd({})).not_ready() == ["the store is starting"]
        eventually(port.ready)
        with engine(store) as live:
            live.put(hashes(1))
            eventually(lambda: store.server.store.namespaces.queued_blocks)
        store.server.stop()
        eventually(lambda: not port.ready())
        assert port.get("/readyz") == (503, b"the store is ending\n")
        time.sleep(1.5)  # of copying down what only memory has
        eventually(lambda: port.get("/healthz") == OK)
        go.set()
