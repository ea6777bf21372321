"""Two real engines: one computes prompts, the other goes on with them from its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.bench.engine import Engine, Request, Result
from kvstore.bench.models import prompt
from kvstore.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    CAPACITY,
    Reference,
    attach,
    forget,
    given,
    numbers,
    since,
)

TOKENS_OUT = 16
HANDED = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPTS = 20


class Node:
    """A store, and an engine attached to it."""

    def __init__(self, model: Path, folder: Path, ends: ExitStack, **extra: Any) -> None:  # noqa: ANN401 - settings
        folder.mkdir()
        self.store = ends.enter_context(StoreProcess(folder, CAPACITY, "[peer]\n"))
        self.engine = ends.enter_context(Engine(model, connector=attach(self.store, **extra)))

    def run(self, requests: Sequence[Request], params: Sequence[Any], tokens: int) -> list[Result]:
        made = [
            msgspec.structs.replace(request, kv_transfer_params=given)
            for request, given in zip(requests, params, strict=True)
        ]
        results = self.engine.run(made, max_tokens=tokens)
        self.engine.idle_steps(3)  # what the store has to be told is in a step
        return results

    def compute(self, requests: Sequence[Request]) -> list[Result]:
        """Compute prompts for another engine, many more of them at once than there are slots."""
        return self.run(requests, [HANDED] * len(requests), 1)


@pytest.fixture(scope="module", params=["pull", "push"])
def nodes(
    request: pytest.FixtureRequest,
    model_name: str,
    model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Node, Node]]:
    folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as ends:
        yield (
            Node(model(model_name), folder / "p", ends),
            Node(model(model_name), folder / "d", ends, transfer=request.param),
        )


@pytest.mark.vllm
def test_a_prompt_computed_elsewhere_gives_the_same_tokens(
    nodes: tuple[Node, Node], model_name: str, reference: Reference
) -> None:
    prefill, decode = nodes
    requests = [
        Request(id=f"handed {number}", tokens=prompt(7000 + number, 40 + 37 * number))
        for number in range(PROMPTS)
    ]
    expected = reference(model_name, requests, TOKENS_OUT)
    computed = prefill.compute(requests)
    params = [result.kv_transfer_params for result in computed]
    handed = [(back or {}).get("remote_num_tokens") for back in params]
    assert handed == [len(r.tokens) for r in requests]
    forget(prefill.engine)  # its blocks are the engine's no more
    before = numbers(decode.store.address)
    got = decode.run(requests, params, TOKENS_OUT)
    assert_same(expected, got)
    found = since(decode.store.address, before)
    expected_tokens = sum(given(model_name, len(request.tokens)) for request in requests)
    assert found["kvstore_hit_tokens{peer}"] == expected_tokens
