"""vLLM's own router, unmodified, counts events in the form in which the connector makes them.

Needs vllm-router (seen with 0.1.17) at the path that KVSTORE_VLLM_ROUTER names, or in PATH.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connectors.engine_interface import Geometry
from connectors.events import BlockEvent
from connectors.store_client import DISK, MEMORY
from kvstore.core.types import GroupRule
from tests.bench.models import prompt
from tests.bench.store import free_port
from tests.engine.support import eventually

ROUTER = os.environ.get("KVSTORE_VLLM_ROUTER") or shutil.which("vllm-router")
pytestmark = pytest.mark.vllm

SIZE = 16
BLOCKS = 512  # of a prompt: with what leaves, a step has more than the router takes one by one
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CREDITED = re.compile(r"credited_prefix_tokens=(\d+)")
NAMES = ("one", "other")
CREDIT = {MEMORY: 0.8, DISK: 0.3}  # the router's defaults for what has to be loaded


class Worker:
    """Answers as an engine does that only says its name, and publishes events."""

    def __init__(self, name: str) -> None:
        import zmq

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                choice = {"index": 0, "text": name, "finish_reason": "length", "logprobs": None}
                said = {"id": "c", "object": "text_completion", "created": 1, "model": "tiny"}
                body = json.dumps({**said, "choices": [choice], "data": [{"id": "tiny"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer  # noqa: N815 - names of http.server

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self.events = f"tcp://127.0.0.1:{self._publisher.bind_to_random_port('tcp://127.0.0.1')}"
        self._sent = 0

    def is_subscribed(self) -> bool:
        """Tell whether the router hears what is published."""
        return bool(self._publisher.poll(0))

    def publish(self, events: Sequence[BlockEvent]) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        batch = KVEventBatch(ts=time.time(), events=as_vllm(events), data_parallel_rank=0)
        number = self._sent.to_bytes(8, "big")
        self._publisher.send_multipart([b"", number, msgspec.msgpack.encode(batch)])
        self._sent += 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._publisher.close(0)


def as_vllm(events: Sequence[BlockEvent]) -> list[Any]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from connectors.vllm_scheduler import kv_events

    spec = FullAttentionSpec(SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    return list(kv_events(events, Geometry(SIZE, SIZE, (SIZE,), (GroupRule(),)), cache))


def blocks(tokens: Sequence[int], seed: int, medium: str) -> list[BlockEvent]:
    names = [(seed * BLOCKS + at).to_bytes(32, "big") for at in range(BLOCKS)]
    parents = [None, *names]
    parts = [tokens[at * SIZE : (at + 1) * SIZE] for at in range(BLOCKS)]
    return [
        BlockEvent(medium, True, 0, [names[at]], parents[at], parts[at]) for at in range(BLOCKS)
    ]


def left(events: Sequence[BlockEvent]) -> list[BlockEvent]:
    return [BlockEvent(event.medium, False, 0, event.hashes) for event in events]


class Router:
    def __init__(self, workers: Sequence[Worker]) -> None:
        if ROUTER is None:
            pytest.skip("no vllm-router; set KVSTORE_VLLM_ROUTER to its path")
        self._port = free_port()
        said = [f"--kv-event-source={one.url}={one.events}" for one in workers]
        said += ["--policy=kv_aware", "--kv-event-model=tiny", f"--kv-event-block-size={SIZE}"]
        said += [f"--port={self._port}", f"--prometheus-port={free_port()}", "--worker-urls"]
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        environment["RUST_LOG"] = "info,vllm_router_rs=debug"
        self._process = subprocess.Popen(
            [ROUTER, *said, *(one.url for one in workers)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.credited = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        eventually(self._listens)
        for worker in workers:
            eventually(worker.is_subscribed)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if said := CREDITED.search(COLOUR.sub("", line)):
                    self.credited = int(said[1])

    def _listens(self) -> bool:
        assert self._process.poll() is None, "the router ended"
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self._port)) == 0

    def ask(self, tokens: Sequence[int]) -> str:
        body = json.dumps({"model": "tiny", "prompt": list(tokens), "max_tokens": 1})
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as one:
            one.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            return str(json.load(one.getresponse())["choices"][0]["text"])

    def until(self, tokens: Sequence[int], name: str, credited: int) -> None:
        """Ask until so many tokens are credited to this worker."""

        def is_so() -> bool:
            chosen = self.ask(tokens)
            assert not self.credited or chosen == name
            return self.credited == credited

        eventually(is_so)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with ExitStack() as ends:
        yield [ends.enter_context(closing(Worker(name))) for name in NAMES]


@pytest.mark.parametrize("medium", [MEMORY, DISK])
def test_O16_O24_vllms_router_counts_what_is_in_a_tier(workers: list[Worker], medium: str) -> None:
    tokens = [prompt(98_300 + seed, BLOCKS * SIZE) for seed in range(6)]
    here, there, *others = (blocks(one, seed, medium) for seed, one in enumerate(tokens))
    passing = [event for one in others for event in one]
    with closing(Router(workers)) as router:
        for seed, events in enumerate((here, there)):
            workers[seed].publish([*events, *passing, *left(passing)])
            router.until(tokens[seed], NAMES[seed], int(BLOCKS * SIZE * CREDIT[medium]))
            workers[seed].publish(left(events))
            router.until(tokens[seed], NAMES[seed], 0)
