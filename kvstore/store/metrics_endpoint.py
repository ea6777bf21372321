"""The HTTP endpoint, metrics, probes and a status page: few connections, and none that stays.

Each connection takes a thread and a descriptor, and engines need descriptors, too. So beyond a few
the oldest one is closed: it has had its time, or leaves its answer unread.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore.barrier import Barrier
from kvstore.config import Address
from kvstore.core.errors import ConfigError
from kvstore.logs import RateLog
from kvstore.metrics import TABLE, Numbers
from kvstore.store.status import Status

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16
PAGE, STATUS, METRICS = "/", "/status.json", "/metrics"
SILENT_S = 5.0  # without a byte from a client, or one that it takes
PAUSE_S = 0.5  # after a connection could not be taken, for want of descriptors say
_LOOK_S = 0.05  # how often it looks whether it is to end


Probe = Callable[[], Sequence[str]]  # says why not; nothing if all is well
_Answer = tuple[str, dict[str, str], bytes]  # status, headers, body


class StoreCollector(Collector):
    """Shows Numbers to Prometheus: a copy. The loop brings the gauges up to date, no more."""

    def __init__(self, numbers: Numbers, refresh: Callable[[], object]) -> None:
        """numbers: written by the store's thread, read here. refresh(): has it renew the gauges."""
        self._numbers = numbers
        self._refresh = refresh

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the table, present or not."""
        self._refresh()
        values, histograms = self._numbers.values(), self._numbers.histograms
        for spec in TABLE:
            if spec.kind == "histogram":
                *counts, (_, total) = histograms[spec.name].rows()
                yield HistogramMetricFamily(spec.name, spec.help, counts, total)
                continue
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = kind(spec.name, spec.help, labels=spec.labels)
            for key, value in values.items():
                if key[0] == spec.name:
                    family.add_metric(key[1:], value)
            if not spec.labels and not family.samples:
                family.add_metric((), 0)
            yield family


class _Handler(WSGIRequestHandler):
    """One request; writes no log."""

    timeout = SILENT_S

    def log_message(self, *_: object) -> None: ...

    def get_stderr(self) -> io.StringIO:
        """Drop what wsgiref prints when a client closes the connection or does not read."""
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, up to a number of them."""

    daemon_threads = True
    request_queue_size = 128  # a client beyond it is tried again after 1 s, then 3 s

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: dict[int, socket.socket] = {}  # oldest first
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, and ask no name server for the host's name, as the base class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection; a pause after one that cannot be taken, instead of a busy loop."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = self._open.pop(next(iter(self._open)))
                self.shutdown_request(oldest)
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        """End a connection: its thread first, if it still reads or writes."""
        with contextlib.suppress(OSError):  # its client was faster
            request.shutdown(socket.SHUT_RDWR)
        request.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(id(request), None)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002
        log.debug("metrics client %s: %s", client_address, sys.exception())


def listen(address: Address) -> WSGIServer:
    """Make the endpoint, which serves nothing yet. Raises ConfigError if it cannot listen."""
    try:
        return _Server((address.host, address.port))
    except OSError as exc:
        place = f"{address.host}:{address.port}"
        raise ConfigError(f"metrics endpoint {place}: {exc.strerror}") from exc


def _scrape(registry: CollectorRegistry, asked: WSGIEnvironment) -> _Answer:
    try:
        encode, kind = choose_encoder(asked.get("HTTP_ACCEPT", ""))
    except (TypeError, ValueError):  # it names a version that is none
        encode, kind = choose_encoder("")
    headers, body = {"Content-Type": kind}, encode(registry)
    if "gzip" in asked.get("HTTP_ACCEPT_ENCODING", ""):
        return "200 OK", {**headers, "Content-Encoding": "gzip"}, gzip.compress(body)
    return "200 OK", headers, body


def _probe(look: Probe, _asked: WSGIEnvironment) -> _Answer:
    reasons = look()
    return _in_words("503 Service Unavailable" if reasons else "200 OK", *(reasons or ["ok"]))


def _in_words(status: str, *lines: str) -> _Answer:
    body = "".join(f"{line}\n" for line in lines)
    return status, {"Content-Type": "text/plain; charset=utf-8"}, body.encode()


def _status_page() -> _Answer:
    """Read the page. Its policy lets it run its own script and style, and ask this server alone."""
    body = resources.files("kvstore.store").joinpath("status.html").read_bytes()
    policy = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'"]
    for name in (b"script", b"style"):
        for inner in re.findall(b"<%b>(.*?)</%b>" % (name, name), body, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(inner).digest()).decode()
            policy.append(f"{name.decode()}-src 'sha256-{digest}'")
    policy += ["form-action 'none'", "frame-ancestors 'none'"]
    kind = {"Content-Type": "text/html; charset=utf-8", "X-Content-Type-Options": "nosniff"}
    return "200 OK", {**kind, "Content-Security-Policy": "; ".join(policy)}, body


def _in_json(look: Callable[[], Status]) -> _Answer:
    kind = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    return "200 OK", kind, msgspec.json.encode(look())


def _pages(
    registry: CollectorRegistry, probes: Mapping[str, Probe], status: Callable[[], Status]
) -> WSGIApplication:
    """Make the application: the status page and its data, metrics, and each probe at its path."""
    page = _status_page()
    barrier = Barrier(RateLog(log), lambda: None)  # of several threads: a line more or less
    pages: dict[str, Callable[[WSGIEnvironment], _Answer]] = {
        PAGE: lambda _: page,
        STATUS: lambda _: _in_json(status),
        METRICS: partial(_scrape, registry),
        **{path: partial(_probe, look) for path, look in probes.items()},
    }

    def answer(asked: WSGIEnvironment) -> _Answer:
        path = asked["PATH_INFO"]
        if path not in pages:
            return _in_words("404 Not Found", f"pages: {', '.join(pages)}")
        if asked["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status, headers, body = _in_words("405 Method Not Allowed", "methods: GET, HEAD")
            return status, {**headers, "Allow": "GET, HEAD"}, body
        return pages[path](asked)

    def serve(asked: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        status, headers, body = _in_words("500 Internal Server Error", "see the store's log")
        with barrier.around(f"what {asked['PATH_INFO']} shows"):
            status, headers, body = answer(asked)
        start_response(status, [*headers.items(), ("Content-Length", str(len(body)))])
        return [] if asked["REQUEST_METHOD"] == "HEAD" else [body]

    return serve


def start(
    address: Address,
    collector: Collector,
    probes: Mapping[str, Probe],
    status: Callable[[], Status],
) -> Callable[[], None]:
    """Serve all pages on a thread; return what ends that. Raises ConfigError.

    probes: by path. status(): what the status page shows.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    server = listen(address)
    server.set_app(_pages(registry, probes, status))
    thread = threading.Thread(
        target=server.serve_forever, args=(_LOOK_S,), name="kvstore-metrics", daemon=True
    )
    thread.start()
    host = f"[{address.host}]" if ":" in address.host else address.host
    log.info("metrics at http://%s:%d/metrics", host, server.server_port)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
