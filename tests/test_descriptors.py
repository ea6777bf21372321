"""A metrics endpoint under load and with clients that stay; a store short of descriptors."""

from __future__ import annotations

import http.client
import logging
import os
import re
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore import config
from kvstore.config import Address
from kvstore.logs import LINES_MAX
from kvstore.store import metrics_endpoint
from kvstore.store.status import Status
from kvstore.wire import engine as p
from tests.bench.store import free_port
from tests.harness.fakes import blocks, hashes
from tests.harness.live import LiveStore, client, engine, eventually, store_settings

IDLE = 60


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def store(tmp_path: Path, port: int) -> Iterator[LiveStore]:
    with LiveStore(settings_for(tmp_path, port)) as made:
        yield made


def settings_for(folder: Path, port: int) -> config.Config:
    server = {"socket": f"{folder}/kv.sock", "metrics": f"127.0.0.1:{port}"}
    return store_settings(folder, server=server)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text: str = reply.read().decode()
    return text


def up(port: int) -> bool:
    try:
        return bool(scrape(port))
    except OSError:
        return False


def test_S2_probes_that_come_at_once_can_all_connect() -> None:
    with ExitStack() as stack:
        endpoint = metrics_endpoint.listen(Address("127.0.0.1", 0))
        stack.callback(endpoint.server_close)
        for _ in range(40):  # none is accepted yet
            sock = socket.create_connection(("127.0.0.1", endpoint.server_port), timeout=20)
            stack.enter_context(sock)


def test_S2_idle_clients_of_the_metrics_endpoint_take_few_threads(
    store: LiveStore, port: int
) -> None:
    eventually(lambda: up(port))
    before = threading.active_count()
    with ExitStack() as ends:
        for _ in range(IDLE):
            ends.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(3):
            assert "kvstore_lookups_total" in scrape(port), "the oldest makes room"
        assert threading.active_count() - before <= metrics_endpoint.CONNECTIONS_MAX + 1
    assert not store.server.store.sessions


def test_the_metrics_endpoint_asks_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer held each start of a store, and each check, for ten seconds."""

    def asked(*_: object) -> str:
        pytest.fail("a name was looked up")

    for call in ("getfqdn", "gethostbyaddr", "gethostname"):
        monkeypatch.setattr(socket, call, asked)
    server = metrics_endpoint.listen(Address("0.0.0.0", 0))  # noqa: S104 - closed at once
    assert server.server_port == server.server_address[1] > 0
    server.server_close()


def test_S2_a_client_of_the_metrics_endpoint_that_says_nothing_is_closed(
    store: LiveStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert metrics_endpoint._Handler.timeout == metrics_endpoint.SILENT_S
    monkeypatch.setattr(metrics_endpoint._Handler, "timeout", 0.2)
    eventually(lambda: up(port))
    assert not store.server.store.sessions
    with socket.create_connection(("127.0.0.1", port)) as idle:
        idle.settimeout(60)
        assert idle.recv(1) == b""


ODD_ACCEPT = ["application/openmetrics-text;version=abc", "text/plain; version=1.x"]


@pytest.mark.parametrize("accept", ODD_ACCEPT)
def test_S2_what_a_client_of_the_metrics_endpoint_wants_ends_in_no_traceback(
    store: LiveStore, port: int, accept: str, capfd: pytest.CaptureFixture[str]
) -> None:
    eventually(lambda: up(port))
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(asking):
        asking.request("GET", "/metrics", headers={"Accept": accept})
        assert b"kvstore_lookups_total" in asking.getresponse().read()
    assert not store.server.store.sessions
    assert capfd.readouterr().err == ""


def no_status() -> Status:
    raise NotImplementedError


class _Large(Collector):
    """More than the kernel takes for a client that does not read."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("large", "text " * (4 << 20), value=1)


class _Broken(Collector):
    def collect(self) -> Iterator[Metric]:
        raise KeyError("a bug")


@pytest.fixture
def at(port: int) -> config.Address:
    return config.Address("127.0.0.1", port)


def test_S2_an_answer_that_is_not_read_ends_in_no_traceback(
    at: config.Address, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_endpoint._Handler, "timeout", 0.2)
    before = threading.active_count()
    stop = metrics_endpoint.start(at, _Large(), {}, no_status)
    with socket.create_connection(("127.0.0.1", at.port)) as unread:
        unread.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        unread.recv(1)
        eventually(lambda: threading.active_count() == before + 1)
    stop()
    assert capfd.readouterr().err == ""


@pytest.mark.meets_bugs
def test_S2_a_bug_behind_the_metrics_endpoint_has_one_traceback_however_many_ask(
    at: config.Address, caplog: pytest.LogCaptureFixture
) -> None:
    stop = metrics_endpoint.start(at, _Broken(), {}, no_status)
    for _ in range(2 * LINES_MAX):
        with pytest.raises(urllib.error.HTTPError, match="500"):
            scrape(at.port)
    stop()
    bugs = [
        record
        for record in caplog.records
        if "bug of the store in what /metrics shows" in record.message
    ]
    assert len(bugs) == LINES_MAX
    assert sum(bool(record.exc_info) for record in bugs) == 1


def test_M3_a_scrape_under_load_answers_within_a_second(store: LiveStore, port: int) -> None:
    with engine(store) as live:
        live.put(chain := hashes(4))
        over = threading.Event()
        asked = 0

        def load() -> None:
            nonlocal asked
            while not over.is_set():
                granted = live.ask(chain)
                assert blocks(granted) == [0, 1, 2, 3]
                live.scheduler.send(p.Step(release=(granted.lease,)))
                asked += 1

        worker = threading.Thread(target=load)
        worker.start()
        eventually(lambda: up(port))
        seconds = []
        for _ in range(5):
            started = time.monotonic()
            found = scrape(port)
            seconds.append(time.monotonic() - started)
        over.set()
        worker.join()
    assert max(seconds) < 1
    assert asked > 10
    (hits,) = re.findall(r'^kvstore_lookups_total{outcome="hit"} (\S+)', found, re.MULTILINE)
    assert 0 < float(hits) <= asked


def test_S2_a_store_without_descriptors_waits_for_some_and_says_so_rarely(
    store: LiveStore, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with engine(store) as live, ExitStack() as ends, caplog.at_level(logging.WARNING):
        late = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ends.enter_context(late)
        used = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
        try:
            taken = []
            while True:
                try:
                    taken.append(os.dup(late.fileno()))
                except OSError:
                    break
            late.connect(store.path)
            before = time.process_time()
            time.sleep(2.0)
            spent_s = time.process_time() - before
            live.put(chain := hashes(2))
            assert blocks(live.ask(chain)) == [0, 1], "engines that are attached are served"
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with client(store) as another:
            another.sock.sendall(b"\xff" * 64)
            another.read_to_end()
    told = [text for text in caplog.messages if "cannot be taken" in text]
    assert 1 <= len(told) <= LINES_MAX
    assert spent_s < 1.0


def test_S2_wrong_messages_of_many_connections_are_few_lines(
    store: LiveStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(10 * LINES_MAX):
            with client(store) as stranger:
                stranger.sock.sendall(b"\xff" * 64)
                stranger.read_to_end()
    told = [text for text in caplog.messages if text.startswith("connection ")]
    assert 1 <= len(told) <= 2 * LINES_MAX
