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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.store import admin
from tests.bench.engine import Engine, Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess, free_port
from tests.engine.support import CAPACITY, ENGINE_BLOCK, attach, eventually

PYTHON = os.environ.get("KVSTORE_DYNAMO_PYTHON", sys.executable)
pytestmark = pytest.mark.vllm

SMALL = 4 << 20  # of the engine's memory: the first prompts leave it


class Indexer:
    """Dynamo's, in a process of its own, listening to one engine."""

    def __init__(self, events: int, port: int) -> None:
        told = {
            "--port": port,
            "--block-size": ENGINE_BLOCK,
            "--workers": f"1=tcp://127.0.0.1:{events}",
        }
        arguments = [str(part) for pair in told.items() for part in pair]
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        self._port = port
        self.process = subprocess.Popen(
            [PYTHON, "-m", "dynamo.indexer", *arguments], env=environment
        )

    def blocks(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many of a prompt's blocks are in the engine; and there or in memory."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            asked = json.dumps({"token_ids": list(tokens), "model_name": "default"})
            connection.request("POST", "/query", asked, {"Content-Type": "application/json"})
            found = json.load(connection.getresponse())["instances"].get("1", {})
        finally:
            connection.close()
        return found.get("gpu", 0) // ENGINE_BLOCK, found.get("cpu", 0) // ENGINE_BLOCK

    def listens(self) -> bool:
        assert self.process.poll() is None, "the indexer ended"
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self._port)) == 0


@contextmanager
def indexing(events: int) -> Iterator[Indexer]:
    indexer = Indexer(events, free_port())
    try:
        eventually(indexer.listens)
        yield indexer
    finally:
        indexer.process.terminate()
        indexer.process.wait()


def has_dynamo() -> bool:
    done = subprocess.run([PYTHON, "-c", "import dynamo.indexer"], check=False, capture_output=True)
    return done.returncode == 0


def test_O16_dynamos_indexer_counts_what_enters_and_leaves_the_store(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    if not has_dynamo():
        pytest.skip(f"{PYTHON} has no ai-dynamo-runtime; set KVSTORE_DYNAMO_PYTHON to one that has")
    port = free_port()
    extra = {
        "kv_events_config": {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"},
        "max_model_len": 1024,
    }
    prompts = [prompt(98_000 + i, 200 + 56 * i) for i in range(8)]
    whole = [len(tokens) // ENGINE_BLOCK for tokens in prompts]
    with (
        StoreProcess(tmp_path, CAPACITY) as store,
        Engine(
            model("llama_s"), connector=attach(store), kv_cache_bytes=SMALL, extra=extra
        ) as engine,
        indexing(port) as indexer,
    ):

        def found() -> list[tuple[int, int]]:
            engine.run([Request(id="tick", tokens=[3, 4, 5])], max_tokens=2)
            engine.go_idle()
            return [indexer.blocks(tokens) for tokens in prompts]

        numbers = iter(range(1000))

        def met() -> bool:
            """An engine's publisher and a new listener do after a while; the first is lost."""
            number = next(numbers)
            tokens = prompt(98_500 + number, 3 * ENGINE_BLOCK)
            engine.run([Request(id=f"m{number}", tokens=tokens)], max_tokens=2)
            engine.go_idle()
            return indexer.blocks(tokens) == (3, 3)

        eventually(met)
        for index, tokens in enumerate(prompts):
            engine.run([Request(id=str(index), tokens=tokens)], max_tokens=2)
        eventually(lambda: [stored for _, stored in found()] == whole)
        here = [own for own, _ in found()]
        assert here[:3] == [0, 0, 0], "these have left the engine and count from the store"
        assert here[-1] == whole[-1]
        admin.clear(store.address)
        eventually(lambda: found() == [(own, own) for own in here])
