"""Two stores on a bucket whose server misbehaves at random: right bytes, and nothing stranded.

KVSTORE_OBJECT_S: seconds of it (1800 for a long campaign); KVSTORE_OBJECT_SEED: another one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvstore.store import admin
from tests.bench.store import StoreProcess
from tests.harness.fakes import hashes
from tests.harness.live import LiveEngine, eventually
from tests.harness.patience import WAIT_S
from tests.harness.s3 import CREDENTIALS, URL, Proxy, S3Server

SECONDS = float(os.environ.get("KVSTORE_OBJECT_S", "8"))
SEED = int(os.environ.get("KVSTORE_OBJECT_SEED", "1"))
FAULTS = (
    "hang",
    "drop",
    "slow",
    "refuse",
    "quota",
    "fail",
    "gone",
    "short",
    "long",
    "flip",
    "other",
    "page",
    "archived",
)
PROMPTS = 12
BLOCKS = 4  # of a prompt, of 1 MiB each
ANSWER_S = 30.0  # of a machine that does other things, too


class Node:
    """A store process and its engine, which has what it computed in no cache of its own."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        folder.mkdir()
        self._folder, self._endpoint, self._lives = folder, endpoint, 0
        self.from_bucket = self.hits = 0
        self.start()

    def start(self) -> None:
        """With an empty disk, and memory for three prompts."""
        self._lives += 1
        folder = self._folder / str(self._lives)
        folder.mkdir()
        text = (
            f'[nvme]\npath = "{folder / "kv"}"\ncapacity = "64MiB"\n'
            f'[object]\nurl = "{URL}"\nendpoint = "{self._endpoint}"\ntimeout = "500ms"\n'
        )
        self.store = StoreProcess(folder, "16MiB", text, scraped=False, environment=CREDENTIALS)
        self.store.__enter__()
        self.engine = LiveEngine(self.store)

    def kill(self) -> None:
        psutil.Process(self.store.pid).kill()
        self.stop()

    def stop(self) -> None:
        self.engine.close()
        self.store.stop()
        log = self.store.log_path.read_text(errors="replace")
        assert "Traceback" not in log, log

    def request(self, name: str) -> None:
        """Do what an engine does with a prompt: load what is there, and store it all."""
        chain = hashes(BLOCKS, name)
        began_s = time.monotonic()
        granted = self.engine.ask(chain)
        found = self.engine.load(granted, 5.0)
        assert time.monotonic() - began_s < ANSWER_S, "an answer came late"
        assert found == [self.engine.content(block) for block in chain[: len(found)]], "wrong bytes"
        self.hits += len(found)
        self.from_bucket += granted.sources.get("object", 0) if found else 0
        if len(found) < BLOCKS:
            self.engine.put(chain)

    def stat(self, name: str) -> float:
        stats = admin.stats(self.store.address, timeout_s=WAIT_S)
        return sum(stat.value for stat in stats if stat.name == name)

    def is_at_rest(self) -> bool:
        """Tell whether no job is open, and no block pinned."""
        stats = admin.stats(self.store.address, timeout_s=WAIT_S)
        pinned = (s for s in stats if s.name == "kvstore_pinned_bytes")
        held = sum(stat.value for stat in pinned if stat.labels["cause"] != "credit")
        return not held and not self.stat("kvstore_jobs_open")


@contextmanager
def world(folder: Path) -> Iterator[tuple[S3Server, Proxy, list[Node]]]:
    with S3Server() as server, Proxy(server) as proxy:
        nodes = [Node(folder / name, proxy.endpoint) for name in ("a", "b")]
        try:
            yield server, proxy, nodes
        finally:
            proxy.ended.set()
            for node in nodes:
                node.stop()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 3 * WAIT_S)
def test_Q71_Q72_random_faults(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    again = f"KVSTORE_OBJECT_SEED={SEED} KVSTORE_OBJECT_S={SECONDS}"
    with world(tmp_path) as (server, proxy, nodes):
        share = 0.0

        def fault(_method: str, _path: str) -> str:
            return rng.choice(FAULTS) if rng.random() < share else ""

        proxy.fault, proxy.slow_s = fault, 0.1
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            share = rng.choice((0.0, 0.05, 0.3, 1.0))
            what = rng.random()
            if what < 0.1:
                with server.frozen():
                    rng.choice(nodes).request(f"p{rng.randrange(PROMPTS)}")
            elif what < 0.15:
                server.empty()
            elif what < 0.25:
                node = rng.choice(nodes)
                rng.choice((node.kill, node.stop))()
                node.start()
            for _ in range(rng.randrange(10)):
                rng.choice(nodes).request(f"p{rng.randrange(PROMPTS)}")
        share = 0.0
        for node in nodes:
            eventually(node.is_at_rest)
        # All is well again: what one store has used twice, the other one finds.
        chain = "at the end"

        def shared() -> bool:
            nodes[0].request(chain)
            return len(server.names()) > 0 and nodes[0].stat("kvstore_tier_blocks") > 0

        eventually(shared)
        before = nodes[1].from_bucket

        def found() -> bool:
            nodes[0].request(chain)
            nodes[1].kill()
            nodes[1].start()
            nodes[1].request(chain)
            return nodes[1].from_bucket > before

        eventually(found)
        assert sum(node.hits for node in nodes) > 0, again
