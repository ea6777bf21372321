"""A `kvstore serve` process of one's own, on a temporary socket, gone after the context."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from kvstore.core.errors import KVStoreError
from kvstore.store import admin

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 300.0  # it keeps on disk what only memory has
ANSWER_S = 600.0  # however busy the machine is
PRODUCT = "kvstore.cli"


class StoreFailed(KVStoreError):
    """The store process did not start; the message has its log."""


class StoreProcess:
    """Runs on entering the context. folder: keeps configuration, socket and log."""

    def __init__(
        self,
        folder: Path,
        capacity: str,
        settings: str = "",
        *,
        module: str = PRODUCT,
        environment: Mapping[str, str] | None = None,
        scraped: bool = True,
        options: Sequence[str] = (),
    ) -> None:
        """capacity: of the CPU tier, as in the file; settings: more sections of the file.

        module: has the command line, which tests change (one of theirs is found in the working
        folder, where the product looks for nothing); environment: added to ours. scraped: it has
        a metrics endpoint. options: of the command.
        """
        self.config_path = folder / "kvstore.toml"
        self.log_path = folder / "store.log"
        self.address = f"unix://{folder / 'kvstore.sock'}"
        self.metrics_port = free_port()
        metrics = f"127.0.0.1:{self.metrics_port}" if scraped else ""
        self._text = (
            f'[server]\nsocket = "{self.address}"\nmetrics = "{metrics}"\n\n'
            f'[cpu]\ncapacity = "{capacity}"\n{settings}'
        )
        self._module, self._options = module, options
        self._environment = os.environ | (environment or {})
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.config_path.write_text(self._text, encoding="utf-8")
        command = [
            sys.executable,
            *(("-P",) if self._module == PRODUCT else ()),
            "-m",
            self._module,
            "serve",
            "--config",
            str(self.config_path),
            *self._options,
        ]
        with self.log_path.open("wb") as sink:
            # A session of its own: Ctrl-C reaches our process, which then stops it in order.
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def path(self) -> str:
        """Of its socket."""
        return self.address.removeprefix("unix://")

    @property
    def pid(self) -> int:
        """The store's process id. Raises StoreFailed when it does not run."""
        if self._child is None:
            raise StoreFailed("the store is not running")
        return self._child.pid

    def stop(self) -> None:
        """End the process; safe to call twice."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def metrics(self) -> dict[str, float]:
        """Scrape the endpoint: values by name{label="value"}; namespaces are added up."""
        found: dict[str, float] = {}
        for name, by_label, value in scraped(self.metrics_port):
            told = sorted((k, v) for k, v in by_label.items() if k != "namespace")
            labels = ",".join(f'{k}="{v}"' for k, v in told)
            shown = f"{name}{{{labels}}}" if labels else name
            found[shown] = found.get(shown, 0) + value
        return found

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._child is None or self._child.poll() is not None:
                break
            try:
                admin.stats(self.address, timeout_s=1.0)
            except admin.StoreUnreachable:
                time.sleep(0.02)
            else:
                return
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        raise StoreFailed(f"the store did not start:\n{text}")


def get(port: int, path: str, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """Return status and body of a page of this machine. Raises OSError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def scraped(port: int) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each sample of a metrics endpoint. Raises OSError."""
    for family in text_string_to_metric_families(get(port, "/metrics")[1].decode()):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def numbers(address: str, timeout_s: float = ANSWER_S) -> dict[str, float]:
    """Ask a store for its statistics: by name{label,label}; namespaces are added up."""
    found: dict[str, float] = {}
    for stat in admin.stats(address, timeout_s=timeout_s):
        labels = [value for name, value in stat.labels.items() if name != "namespace"]
        name = f"{stat.name}{{{','.join(labels)}}}" if labels else stat.name
        found[name] = found.get(name, 0) + stat.value
    return found


def end_as_interrupted() -> None:
    """Have SIGTERM end this process as Ctrl-C does: what it started is stopped on the way out."""

    def interrupt(*_signal: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def free_port() -> int:
    """Find a TCP port that nobody has, and that the system gives nobody: it is bound much later."""
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
