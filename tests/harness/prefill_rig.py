"""A scripted engine whose prompts another engine goes on with."""

from __future__ import annotations

from typing import Any

from connectors.engine_interface import Geometry
from connectors.kv_transfer_params import Transfer
from connectors.partial_block import partial_block_of
from kvstore.core.types import GroupRule
from kvstore.wire import engine as p
from tests.harness.script import BLOCK, ONE_GROUP, Request, Script

WINDOW = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule(2, reach=BLOCK)))
HANDED = {"do_remote_decode": True}


def prefill(
    tokens: int,
    table: list[list[int]],
    geometry: Geometry = ONE_GROUP,
    slots: int = 100,
    params: dict[str, Any] | None = None,
) -> tuple[Script, Request]:
    """Compute a prompt, and sample a token."""
    script = Script(geometry, credits=slots)
    script.client.side_channel = "127.0.0.1:9500"
    script.half._hand_overs._transfer = Transfer("engine")
    request = Request("p", tokens, hash_tokens=geometry.hash_tokens)
    script.half.on_new_request(request, HANDED if params is None else params)
    script.admit(request)
    script.step(request, tokens, table)
    request.num_tokens += 1
    script.steps()
    return script, request


def finish(script: Script, table: list[list[int]]) -> tuple[int, list[p.HandedOver]]:
    """End the request; return the tokens that are handed over, and what the store is told."""
    params = script.half.hand_over("p", table)
    script.half.request_finished("p", table)
    handing = [handing for step in script.steps() for handing in step.handed_over]
    return params["remote_num_tokens"] if params else 0, handing


def tail_hash(geometry: Geometry, request: Request, end: int) -> bytes:
    tail = partial_block_of(geometry, request, end, "p")
    assert tail is not None
    return tail.hash
