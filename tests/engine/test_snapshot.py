"""What a router hears of a warm store when a real engine, or the store, has started again."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.store import admin
from tests.bench.engine import Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.served import Served
from tests.engine.support import CAPACITY, TOKENS_OUT, eventually, forget, is_attached, numbers
from tests.engine.test_events import Block, removed, stored

pytestmark = pytest.mark.vllm

SETTINGS = '\n[engine]\nevent_tokens = "16MiB"\n\n[nvme]\npath = "{path}"\ncapacity = "256MiB"\n'
QUEUED = "kvstore_tier_queued_blocks{nvme}"


def prompts(seed: int, count: int = 4) -> list[Request]:
    shared = prompt(95_000 + seed, 96)
    return [
        Request(id=f"s{i}", tokens=shared + prompt(95_100 + 10 * seed + i, 70 + 60 * i))
        for i in range(count)
    ]


def heard(served: Served, medium: str, expected: dict[object, Block]) -> None:
    """Wait for all that is expected; nothing is published twice, and parents come first."""
    events: list[Any] = []

    def all_there() -> bool:
        events.extend(served.events())
        return len(stored(events, medium)) >= len(expected)

    eventually(all_there)
    found = stored(events, medium)
    assert {name: found.get(name) for name in expected} == expected
    assert parents_first(found)


def parents_first(blocks: dict[object, Block]) -> bool:
    before: set[object] = {None}
    for name, block in blocks.items():
        if block.parent not in before:
            return False
        before.add(name)
    return True


def own(served: Served, requests: Sequence[Request]) -> dict[object, Block]:
    """What the engine says of prompts that it computes, after its tick's own blocks."""
    served.events()
    served.engine.run(requests, max_tokens=TOKENS_OUT)
    served.stats()
    events: list[Any] = []

    def told() -> bool:
        events.extend(served.events())
        ours = stored(events, "GPU")
        return ours.keys() <= stored(events, "CPU").keys() & stored(events, "STORAGE").keys()

    eventually(told)
    return stored(events, "GPU")


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_O27_token_ids_are_compared_by_vllms_own_hash(algorithm: str) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as Prompt

    from connectors.vllm_scheduler import next_hash_of

    hashed = get_hash_fn_by_name(algorithm)
    init_none_hash(hashed)
    tokens, hasher = prompt(95_900, 70), get_request_block_hasher(16, hashed)
    plain = Prompt("p", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    salted = Prompt("s", tokens, plain.sampling_params, None, cache_salt="x", block_hasher=hasher)
    next_hash, found, last = next_hash_of(algorithm), list[bytes](), None
    for first in range(0, 64, 16):
        last = next_hash(last, array("I", tokens[first : first + 16]))
        found.append(last)
    assert found == plain.block_hashes
    assert found[0] != salted.block_hashes[0], "of a salt none is kept"


def test_O27_after_a_restart_of_engine_or_store_a_router_hears_what_is_there(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = SETTINGS.format(path=tmp_path / "kv")
    with (
        StoreProcess(tmp_path, CAPACITY, settings) as store,
        closing(Served("llama_s", model("llama_s"), tmp_path, store)) as served,
    ):
        blocks = own(served, prompts(1))
        assert len(blocks) > 20
        eventually(lambda: not numbers(store.address).get(QUEUED))

        served.restart()
        heard(served, "CPU", blocks)

        store.stop()
        store.__enter__()
        eventually(lambda: is_attached(served.engine, store.address))
        heard(served, "STORAGE", blocks)
        served.engine.run(prompts(1), max_tokens=TOKENS_OUT)  # loads them
        forget(served.engine)
        admin.clear(store.address)
        gone: list[object] = []

        def told() -> bool:
            gone.extend(removed(served.events(), "STORAGE"))
            return blocks.keys() <= set(gone)

        eventually(told)
        served.restart()
        assert not stored(served.events(), "CPU").keys() & blocks.keys()


def test_O27_each_engine_that_attaches_publishes_what_is_there(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = SETTINGS.format(path=tmp_path / "kv")
    with StoreProcess(tmp_path, CAPACITY, settings) as store, ExitStack() as ends:
        first = ends.enter_context(closing(served_in(model, tmp_path / "1", store)))
        blocks = own(first, prompts(2))
        others = [
            ends.enter_context(closing(served_in(model, tmp_path / name, store)))
            for name in ("2", "3")
        ]
        for other in others:
            heard(other, "CPU", blocks)
            assert not stored(first.events(), "CPU").keys() & blocks.keys()


def served_in(model: Callable[[str], Path], folder: Path, store: StoreProcess) -> Served:
    folder.mkdir()
    return Served("llama_s", model("llama_s"), folder, store)


def test_O24_engines_that_share_a_store_each_publish_their_own_blocks(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    with StoreProcess(tmp_path, CAPACITY) as store, ExitStack() as ends:
        engines = [
            ends.enter_context(closing(served_in(model, tmp_path / name, store)))
            for name in ("1", "2")
        ]
        found = []
        for seed, served in enumerate(engines):
            served.events()
            served.engine.run(prompts(10 + seed), max_tokens=TOKENS_OUT)
            served.stats()
            events: list[Any] = []

            def told(served: Served = served, events: list[Any] = events) -> bool:
                events.extend(served.events())
                return stored(events, "GPU").keys() == stored(events, "CPU").keys()

            eventually(told)
            found.append(stored(events, "CPU"))
            assert served.engine.metrics().get("kvstore_events{event=events_untold}", 0) == 0
        assert not found[0].keys() & found[1].keys()
