"""Dynamo's own indexer, unmodified, counts what a real engine with a store publishes.

Needs ai-dynamo-runtime (seen with 1.6.1), in this interpreter or in the one of another virtual
environment that KVSTORE_DYNAMO_PYTHON names.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.store import admin
from tests.bench.engine import Engine, Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess, free_port
from tests.engine.support import (
    CAPACITY,
    ENGINE_BLOCK,
    attach,
    eventually,
    grown,
    is_attached,
    numbers,
    since,
)

PYTHON = os.environ.get("KVSTORE_DYNAMO_PYTHON", sys.executable)
pytestmark = pytest.mark.vllm

QUEUED = "kvstore_tier_queued_blocks{nvme}"
HIT = "kvstore_hit_tokens"
SMALL = 4 << 20  # of the engine's memory: the first prompts leave it


class Found(NamedTuple):
    """Tokens in the engine; there or in memory; there, in memory or on disk."""

    own: int
    cpu: int
    disk: int


class Indexer:
    """Dynamo's, in a process of its own."""

    def __init__(self) -> None:
        self._port = free_port()
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [PYTHON, "-m", "dynamo.indexer", "--port", str(self._port)], env=environment
        )

    def _post(self, path: str, asked: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            body = json.dumps({"model_name": "tiny", **asked})
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status < 300, answer.read()
            return json.load(answer)
        finally:
            connection.close()

    def register(self, events: dict[str, Any]) -> None:
        """Listen to an engine, by its `--kv-events-config`."""
        asked = {"instance_id": 1, "block_size": ENGINE_BLOCK}
        for name in ("endpoint", "replay_endpoint"):
            asked[name] = events[name].replace("*", "127.0.0.1")
        self._post("/register", asked)

    def unregister(self) -> None:
        """Forget the engine: it ends."""
        self._post("/unregister", {"instance_id": 1})

    def tokens(self, tokens: Sequence[int]) -> Found:
        """How many of a prompt's tokens are where, from the first one on."""
        found = self._post("/query", {"token_ids": list(tokens)})["instances"].get("1", {})
        return Found(*(found.get(name, 0) for name in ("gpu", "cpu", "disk")))

    def blocks(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many of a prompt's blocks are in the engine; and there or in memory."""
        own, cpu, _ = self.tokens(tokens)
        return own // ENGINE_BLOCK, cpu // ENGINE_BLOCK

    def listens(self) -> bool:
        assert self.process.poll() is None, "the indexer ended"
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self._port)) == 0


@contextmanager
def indexing() -> Iterator[Indexer]:
    if not has_dynamo():
        pytest.skip(f"{PYTHON} has no ai-dynamo-runtime; set KVSTORE_DYNAMO_PYTHON to one that has")
    indexer = Indexer()
    try:
        eventually(indexer.listens)
        yield indexer
    finally:
        indexer.process.terminate()
        indexer.process.wait()


def publishing() -> dict[str, Any]:
    """An engine's `--kv-events-config`; what was published before one listens can be had again."""
    ends = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    return {"enable_kv_cache_events": True, **ends}


def has_dynamo() -> bool:
    done = subprocess.run([PYTHON, "-c", "import dynamo.indexer"], check=False, capture_output=True)
    return done.returncode == 0


def test_O16_dynamos_indexer_counts_what_enters_and_leaves_the_store(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    events = publishing()
    extra = {"kv_events_config": events, "max_model_len": 1024}
    prompts = [prompt(98_000 + i, 200 + 56 * i) for i in range(8)]
    whole = [len(tokens) // ENGINE_BLOCK for tokens in prompts]
    with (
        indexing() as indexer,
        StoreProcess(tmp_path, CAPACITY) as store,
        Engine(
            model("llama_s"), connector=attach(store), kv_cache_bytes=SMALL, extra=extra
        ) as engine,
    ):
        indexer.register(events)

        def found() -> list[tuple[int, int]]:
            engine.run([Request(id="tick", tokens=[3, 4, 5])], max_tokens=2)
            engine.go_idle()
            return [indexer.blocks(tokens) for tokens in prompts]

        for index, tokens in enumerate(prompts):
            engine.run([Request(id=str(index), tokens=tokens)], max_tokens=2)
        eventually(lambda: [stored for _, stored in found()] == whole)
        here = [own for own, _ in found()]
        assert here[:3] == [0, 0, 0], "these have left the engine and count from the store"
        assert here[-1] == whole[-1]
        admin.clear(store.address)
        eventually(lambda: found() == [(own, own) for own in here])


DISK = '\n[engine]\nevent_tokens = "16MiB"\n\n[nvme]\npath = "{}"\ncapacity = "256MiB"\n'
PROMPTS = [prompt(98_100 + i, 201 + 56 * i) for i in range(14)]  # none ends with a block


class Listened:
    """An engine with a store of little memory and a disk, and an indexer that listens to it."""

    def __init__(self, model: Path, store: StoreProcess, indexer: Indexer) -> None:
        self._model, self.store, self.indexer = model, store, indexer
        self._start()

    def _start(self) -> None:
        events = publishing()
        extra = {"kv_events_config": events, "max_model_len": 1024}
        connector = attach(self.store)
        made = Engine(self._model, connector=connector, kv_cache_bytes=SMALL, extra=extra)
        self.engine = made.__enter__()
        self.indexer.register(events)

    def restart(self) -> None:
        self.close()
        self.indexer.unregister()
        self._start()

    def close(self) -> None:
        self.engine.close()

    def run(self, name: str, tokens: Sequence[int]) -> None:
        self.engine.run([Request(id=name, tokens=list(tokens))], max_tokens=1)
        self.engine.go_idle()

    def told(self) -> list[Found]:
        """What the indexer knows once nothing is under way and nothing new is published."""
        before: list[Found] = []
        while True:
            eventually(lambda: not numbers(self.store.address).get(QUEUED))
            self.engine.run([Request(id="tick", tokens=[3, 4, 5])], max_tokens=20)
            self.engine.go_idle()
            time.sleep(0.5)
            found = [self.indexer.tokens(tokens) for tokens in PROMPTS]
            if found == before:
                return found
            before = found

    def check(self) -> list[Found]:
        """Each prompt comes from where the indexer says that it is; returns what it said."""
        said = []
        for number, tokens in enumerate(PROMPTS):
            expected = self.told()[number]
            engine, store = self.engine.metrics(), numbers(self.store.address)
            self.run(f"c{number}", tokens)
            served = since(self.store.address, store)
            own = grown(self.engine, engine, "prefix_cache_hits")
            cpu, disk = (hit_tokens(served, tier) for tier in ("cpu", "nvme"))
            assert Found(own, own + cpu, own + cpu + disk) == expected, served
            said.append(expected)
        return said


def hit_tokens(served: dict[str, float], tier: str) -> int:
    return sum(int(n) for name, n in served.items() if HIT in name and tier in name)


@pytest.mark.long
def test_O16_its_counts_are_what_the_engine_and_its_store_serve(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    """After blocks were stored, evicted and promoted, both were restarted, and all was cleared."""
    whole = [len(tokens) // ENGINE_BLOCK * ENGINE_BLOCK for tokens in PROMPTS]
    with (
        indexing() as indexer,
        StoreProcess(tmp_path, "16MiB", DISK.format(tmp_path / "kv")) as store,
        closing(Listened(model("llama_s"), store, indexer)) as listened,
    ):
        for number, tokens in enumerate(PROMPTS):
            listened.run(str(number), tokens)
        said = listened.told()
        assert [found.disk for found in said] == whole
        assert any(found.cpu < found.disk for found in said), "evicted"
        assert any(found.own for found in said)
        assert listened.check() != said, "some of it was promoted meanwhile"

        listened.restart()
        said = listened.told()
        assert [found.disk for found in said] == whole
        assert not any(found.own for found in said)
        assert any(found.cpu for found in said)
        listened.check()

        store.stop()
        store.__enter__()
        eventually(lambda: is_attached(listened.engine, store.address))
        said = listened.told()
        assert [found.disk for found in said] == whole
        assert all(found.cpu == found.own for found in said), "its memory is empty"
        listened.check()

        admin.clear(store.address)
        assert all(own == cpu == disk for own, cpu, disk in listened.told())
