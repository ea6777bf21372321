"""Real engines on several nodes share a bucket: hits on what another one has computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.engine import Engine, Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    CAPACITY,
    ENGINE_BLOCK,
    TOKENS_OUT,
    attach,
    eventually,
    forget,
    grown,
    is_attached,
    numbers,
    servable,
)
from tests.harness.s3 import CREDENTIALS, URL, Proxy, S3Server

pytestmark = pytest.mark.vllm

RUN_TOKENS = 2 * ENGINE_BLOCK
EXTERNAL = "external_prefix_cache_hits"


def settings(endpoint: str) -> str:
    return (
        f'\n[object]\nurl = "{URL}"\nendpoint = "{endpoint}"\nrun = "128KiB"\n'
        '[engine]\npromote = "60s"\n'
    )


def test_Q70_Q72_what_one_node_has_computed_another_one_loads(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    """With the first node gone. A damaged object, and a dead bucket, are computed."""
    requests = [Request(id=f"o{n}", tokens=prompt(91_000 + n, 700 + n)) for n in range(3)]
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with S3Server() as server, Proxy(server) as proxy:
        with (
            StoreProcess(
                folders[0], CAPACITY, settings(proxy.endpoint), environment=CREDENTIALS
            ) as store,
            Engine(model("llama_s"), connector=attach(store)) as engine,
        ):
            reference = engine.run(requests, max_tokens=TOKENS_OUT)
            forget(engine)
            assert_same(reference, engine.run(requests, max_tokens=TOKENS_OUT))  # the second use
            queued = "kvstore_queued_blocks{object}"
            puts = "kvstore_object_requests{put_ok}"
            eventually(lambda: numbers(store.address).get(puts, 0) > 0)
            eventually(lambda: not numbers(store.address).get(queued, 0))
            eventually(lambda: len(server.names()) == numbers(store.address)[puts])
        with (
            StoreProcess(
                folders[1], CAPACITY, settings(proxy.endpoint), environment=CREDENTIALS
            ) as store,
            Engine(model("llama_s"), connector=attach(store)) as engine,
        ):
            before = engine.metrics()
            got = engine.run(requests, max_tokens=TOKENS_OUT)
            assert_same(reference, got)
            expected = sum(servable(len(one.tokens)) // RUN_TOKENS * RUN_TOKENS for one in requests)
            assert grown(engine, before, EXTERNAL) == expected
            assert numbers(store.address)["kvstore_hit_tokens{object}"] == expected
            forget(engine)
            store.stop()  # and with it all that it had
            store.__enter__()
            eventually(lambda: is_attached(engine, store.address))
            proxy.always("flip", "GET")
            assert_same(reference[:1], engine.run(requests[:1], max_tokens=TOKENS_OUT))
            corrupt = "kvstore_object_requests{get_corrupt}"
            eventually(lambda: numbers(store.address).get(corrupt, 0) > 0)
            proxy.always("")
            server.kill()
            assert_same(reference[1:], engine.run(requests[1:], max_tokens=TOKENS_OUT))
            eventually(lambda: numbers(store.address).get("kvstore_leases", 0) == 0)
