"""A router's hint: a real engine gets a prompt's KV from the store of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.store import admin
from tests.bench.engine import Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess, free_port
from tests.engine.identity import assert_same
from tests.engine.served import Node, Served
from tests.engine.support import (
    CAPACITY,
    ENGINE_BLOCK,
    Reference,
    eventually,
    forget,
    numbers,
    only_long,
    servable,
    settled,
    since,
)

pytestmark = pytest.mark.vllm

TOKENS_OUT = 8
PATIENT = '[engine]\npromote = "60s"\n'


def chain(events: Sequence[Any], tokens: Sequence[int]) -> list[int]:
    """The hashes of a prompt's blocks, as a router learns them of the events of an engine."""
    known: dict[tuple[Any, tuple[int, ...]], int] = {}
    for event in events:
        if type(event).__name__ == "BlockStored" and event.medium == "CPU":
            parent = event.parent_block_hash
            for at, name in enumerate(event.block_hashes):
                block = tuple(event.token_ids[at * ENGINE_BLOCK : (at + 1) * ENGINE_BLOCK])
                known[parent, block] = name
                parent = name
    found: list[int] = []
    for at in range(0, len(tokens) - ENGINE_BLOCK + 1, ENGINE_BLOCK):
        block = tuple(tokens[at : at + ENGINE_BLOCK])
        found.append(known[found[-1] if found else None, block])
    return found


def hint(place: str, blocks: Sequence[int]) -> dict[str, Any]:
    payload = {"source_control_endpoint": place, "block_hashes": list(blocks), "mode": "copy"}
    kind = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0"}
    actions = [kind | {"payload": payload}]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


@pytest.mark.parametrize("name", ["llama_s", only_long("gemma3")])
def test_O26_an_engine_gets_what_a_router_says_that_another_store_has(
    name: str, model: Callable[[str], Path], reference: Reference, tmp_path: Path
) -> None:
    ports = free_port(), free_port()
    places = [f"127.0.0.1:{port}" for port in ports]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    settings = [f'{PATIENT}[peer]\nlisten = "{place}"\n' for place in places]
    settings[1] += 'hints = ["127.0.0.1"]\n'
    requests = [Request(id=f"h{n}", tokens=prompt(96_000 + n, 400 + 77 * n)) for n in range(4)]
    expected = reference(name, requests, TOKENS_OUT)
    with ExitStack() as ends:
        first = ends.enter_context(StoreProcess(tmp_path / "a", CAPACITY, settings[0]))
        source = ends.enter_context(
            closing(Served(name, model(name), tmp_path / "a", first, transfer="auto"))
        )
        patient = "tests.harness.serve_patient"
        second = StoreProcess(tmp_path / "b", CAPACITY, settings[1], module=patient)
        asking = Node(model(name), second, ends)
        source.events()
        source.engine.run(requests, max_tokens=TOKENS_OUT)
        source.stats()
        events = source.events()
        blocks = [chain(events, one.tokens) for one in requests]

        # Hints of all kinds that are wrong: each is counted, and the prompt is computed.
        dead = f"127.0.0.1:{free_port()}"
        wrong = {
            "refused": hint("192.0.2.1:9500", blocks[0]),
            "nothing": hint(dead, blocks[1]),
            "malformed": hint(places[0], []),
            "other": hint(places[0], blocks[0]),
        }
        before = numbers(asking.address)
        params = [{"kv_hint": each} for each in wrong.values()]
        assert_same(expected, asking.run(requests, params, TOKENS_OUT))
        found = settled(lambda: since(asking.address, before))
        assert found["kvstore_hints{refused}"] == found["kvstore_hints{nothing}"] == 1
        assert found["kvstore_engine_events{hint_refused}"] == 2
        assert not found.get("kvstore_hit_tokens{peer}")
        admin.clear(asking.address)
        forget(asking.engine)

        # Right ones, as vLLM's own field and as an older bridge sends them.
        before = numbers(asking.address)
        eventually(lambda: numbers(asking.address)["kvstore_exporter_up"])
        got = asking.run(
            [
                Request(id=r.id, tokens=r.tokens, kv_hints=hint(places[0], hashes))
                for r, hashes in zip(requests[:2], blocks[:2], strict=True)
            ],
            [None, None],
            TOKENS_OUT,
        )
        params = [{"kv_hint": hint(places[0], hashes)} for hashes in blocks[2:]]
        got += asking.run(requests[2:], params, TOKENS_OUT)
        assert_same(expected, got)
        found = settled(lambda: since(asking.address, before))
        assert found["kvstore_hints{offered}"] == len(requests), found
        hits = sum(servable(len(one.tokens)) for one in requests)
        assert found["kvstore_hit_tokens{peer}"] == hits
        forget(asking.engine)
