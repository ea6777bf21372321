"""A real Prometheus that scrapes what a test runs, and the queries in the documentation.

It is Debian's package `prometheus`. Where it is missing a test of it is skipped, in CI it fails.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.bench.store import free_port, get
from tests.harness.pages import shown

WAIT_S = 120.0
SCRAPE_S = 0.5

Series = list[tuple[Mapping[str, str], float]]  # labels and value


def queries() -> list[str]:
    """Every query in the documentation."""
    return [query.strip() for _, query in shown("promql")]


def found_program(name: str) -> str:
    """Return the path of a program of Debian's package `prometheus`."""
    program = shutil.which(name)
    if program is None:
        text = f"there is no `{name}` (Debian: apt-get install prometheus)"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return program


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        return json.loads(get(self._port, path)[1])

    def ask(self, query: str) -> Series:
        """Evaluate a query now."""
        found = self.get(f"/api/v1/query?query={quote(query)}")
        assert found["status"] == "success", f"{query}: {found.get('error')}"
        return [(each["metric"], float(each["value"][1])) for each in found["data"]["result"]]

    def wait_for(
        self,
        query: str,
        what: str,
        right: Callable[[float], bool] = lambda value: value > 0,
        of: Callable[[Iterable[bool]], bool] = all,
    ) -> Series:
        """Ask until a query gives series whose values are right: all of them, or any."""
        end = time.monotonic() + WAIT_S
        while not ((found := self.ask(query)) and of(right(value) for _, value in found)):
            assert time.monotonic() < end, f"{what}: {query} gives {found}"
            time.sleep(SCRAPE_S / 2)
        return found

    def seen(self, count: int = 2) -> None:
        """Wait until each target has answered a few scrapes more."""
        began = time.time()
        query = f"min(sum_over_time(up[{max(1, int(WAIT_S))}s]))"
        before = max((value for _, value in self.ask(query)), default=0.0)
        while max((value for _, value in self.ask(query)), default=0.0) < before + count:
            assert time.time() < began + WAIT_S, f"not scraped: {self.get('/api/v1/targets')}"
            time.sleep(SCRAPE_S / 2)


@contextmanager
def prometheus(
    folder: Path, ports: Collection[int], rules: Path | None = None
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes these ports of this machine. rules: a file that it loads."""
    command = [found_program("prometheus")]
    targets = json.dumps([f"127.0.0.1:{port}" for port in ports])
    settings, every = folder / "prometheus.yml", f"{int(SCRAPE_S * 1000)}ms"
    settings.write_text(
        f"global: {{scrape_interval: {every}, scrape_timeout: {every}, "
        f"evaluation_interval: {every}}}\n"
        f"rule_files: {json.dumps([str(rules)] if rules else [])}\n"
        f"scrape_configs: [{{job_name: kvstore, static_configs: [{{targets: {targets}}}]}}]\n"
    )
    port = free_port()
    log = folder / "prometheus.log"
    command += [f"--config.file={settings}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=sink, stderr=sink
        )
    try:
        server = Prometheus(port)
        end = time.monotonic() + WAIT_S
        while True:
            assert child.poll() is None, log.read_text()
            try:
                if len(server.ask("up == 1")) == len(ports):
                    break
            except (OSError, ValueError):  # not ready yet: no answer, or no JSON
                pass
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        child.kill()
        child.wait()
