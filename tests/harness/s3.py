"""A real S3 server as a process, and a proxy before it that makes its answers bad.

The server is moto's, or with KVSTORE_S3=ceph the gateway of a Ceph cluster (`make test-ceph`).
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import boto3
import obstore
from botocore.config import Config as BotoConfig
from obstore.store import from_url

from tests.harness.ceph import Ceph
from tests.harness.patience import WAIT_S

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_REGION": "us-east-1",
}
BUCKET = "kv-tests"
URL = f"s3://{BUCKET}/cluster"
OF_CEPH = os.environ.get("KVSTORE_S3") == "ceph"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class S3Server:
    """Runs until the block ends."""

    def __init__(self) -> None:
        self.port = _free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.ceph: Ceph | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, empty, with the bucket."""
        if OF_CEPH:
            self.ceph = Ceph(self.port, _free_port())
            self.process = self.ceph.gateway
        else:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
            )
        end_s = time.monotonic() + WAIT_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                break
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < end_s, "the server does not listen"
            time.sleep(0.05)
        self.api.create_bucket(Bucket=BUCKET)

    def kill(self) -> None:
        """End it at once; it forgets all objects."""
        if self.ceph is not None:
            self.ceph.kill()
        elif self.process is not None:
            self.process.kill()
            self.process.wait()
        self.ceph = self.process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Have it answer nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def api(self) -> Any:  # noqa: ANN401 - boto3 makes its clients as it runs
        limits = BotoConfig(s3={"addressing_style": "path"}, retries={"total_max_attempts": 5})
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            config=limits,
            region_name="us-east-1",
            aws_access_key_id="tests",
            aws_secret_access_key="tests",  # noqa: S106 - moto takes any
        )

    @property
    def client(self) -> obstore.store.ObjectStore:
        """What a store uses, without its deadlines."""
        return from_url(
            URL,
            endpoint=self.endpoint,
            access_key_id="tests",
            secret_access_key="tests",  # noqa: S106 - moto takes any
            client_options={"allow_http": True},
        )

    def names(self) -> list[str]:
        """Return the names of all objects that stores have put."""
        return sorted(meta["path"] for page in obstore.list(self.client) for meta in page)

    def empty(self) -> None:
        """Delete them."""
        for name in self.names():
            obstore.delete(self.client, name)


Fault = Callable[[str, str], str]
"""From a request's method and path to what is wrong with its answer; "" for nothing."""


class Proxy:
    """Passes requests on to a server, until a fault says otherwise."""

    def __init__(self, server: S3Server) -> None:
        self.fault: Fault = lambda _method, _path: ""
        self.seen: Counter[str] = Counter()  # requests, by method
        self.slow_s = 0.3
        self.headers: list[tuple[str, str]] = []  # more of each answer
        self.ended = threading.Event()
        handler = type("Handler", (_Handler,), {"proxy": self, "port": server.port})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.ended.set()
        self._http.shutdown()
        self._thread.join(WAIT_S)
        self._http.server_close()

    def always(self, what: str, *methods: str) -> None:
        """Have every answer to these methods wrong in one way."""
        self.fault = lambda method, _path: what if method in methods else ""


_SAID = {
    "refuse": (403, "AccessDenied"),
    "quota": (403, "QuotaExceeded"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "archived": (403, "InvalidObjectState"),
    "fail": (500, "AccessDenied"),
    "gone": (404, "NoSuchKey"),
    "page": (200, "of a server in between"),
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    port: int

    def log_message(self, *_args: object) -> None:
        pass

    def _answer(self) -> None:
        self.proxy.seen[self.command] += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.fault(self.command, self.path)
        if fault == "hang":
            self.proxy.ended.wait()
        if fault in ("hang", "drop"):
            self.close_connection = True
            return
        if fault == "slow":
            self.proxy.ended.wait(self.proxy.slow_s)
        if fault in _SAID:
            status, code = _SAID[fault]
            text = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code></Error>'
            self._say(status, [], text.encode())
            return
        try:
            status, headers, data = self._passed_on(body)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        if fault == "short":
            data = data[: len(data) // 2]
        elif fault == "long":
            data += b"x" * 100
        elif fault == "flip" and data:
            at = len(data) // 2
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        elif fault == "other":
            data = os.urandom(len(data))
        self._say(status, headers, data)

    def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        onward = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            kept = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            onward.request(self.command, self.path, body, kept)
            answer = onward.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            onward.close()

    def _say(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        with suppress(OSError):
            self.send_response_only(status)
            length = str(len(data))
            for name, value in [*headers, *self.proxy.headers]:
                if name.lower() == "content-length":
                    length = value if self.command == "HEAD" else length
                elif name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer  # noqa: N815 - as its base has it
