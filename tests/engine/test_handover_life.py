"""Two real engines: what becomes of a hand-over that nobody wants any more, and of a next turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.bench.engine import Request, Result
from tests.bench.handover import HANDED
from tests.bench.models import prompt
from tests.bench.steal import Watch
from tests.engine.identity import assert_same
from tests.engine.support import ENGINE_BLOCK, Reference, eventually, forget, numbers, since
from tests.engine.test_handover import TOKENS_OUT, Patient

HELD = "kvstore_hand_over_bytes{held}"
PEER = "kvstore_hit_tokens{peer}"

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["llama_s", pytest.param("gemma3", marks=pytest.mark.long)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def nodes(
    name: str, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Patient, Patient]]:
    folder = tmp_path_factory.mktemp("life")
    with ExitStack() as ends:
        yield (
            Patient(model(name), folder / "p", ends, two_way=True),
            Patient(model(name), folder / "d", ends, two_way=True),
        )


def ids(tokens: list[int], which: str) -> Request:
    return Request(id=which, tokens=tokens)


def handed(result: Result) -> dict[str, Any]:
    assert result.kv_transfer_params is not None
    return result.kv_transfer_params


def test_B9_an_abort_before_it_was_scheduled_frees_the_prefill_node_within_a_second(
    nodes: tuple[Patient, Patient],
) -> None:
    prefill, decode = nodes
    requests = [ids(prompt(8000 + number, 300), f"aborted {number}") for number in range(4)]
    params = [handed(r) for r in prefill.run(requests, [HANDED] * len(requests), 1)]
    eventually(lambda: HELD in numbers(prefill.address))
    before = numbers(decode.address)
    watch = Watch()
    aborted = [Request(id=request.id, tokens=request.tokens, abort_step=0) for request in requests]
    results = decode.run(aborted, params, TOKENS_OUT)
    assert all(result.aborted and not result.tokens for result in results)
    eventually(lambda: HELD not in numbers(prefill.address))
    assert watch.own_s() < 1
    assert "kvstore_hand_over_blocks{fetched}" not in since(decode.address, before)


def test_L2_L4_a_next_turn_is_pulled_from_the_decode_node(
    nodes: tuple[Patient, Patient], name: str, reference: Reference
) -> None:
    prefill, decode = nodes
    for number in range(4):
        first = ids(prompt(8200 + number, 70 + 97 * number), f"first {number}")
        (computed,) = prefill.run([first], [HANDED], 1)
        (answer,) = decode.run([first], [handed(computed)], 100)
        back = handed(answer)
        assert (back["do_remote_prefill"], back["do_remote_decode"]) == (False, True)
        eventually(lambda: HELD in numbers(decode.address))
        tokens = first.tokens + answer.tokens + prompt(8300 + number, 40)
        second = ids(tokens, f"second {number}")
        (expected,) = reference(name, [second], TOKENS_OUT)
        forget(prefill.engine)
        before = numbers(prefill.address)
        (computed,) = prefill.run([second], [back], 1)
        decoded = (len(first.tokens) + 99) // ENGINE_BLOCK - len(first.tokens) // ENGINE_BLOCK
        assert since(prefill.address, before)[PEER] == decoded * ENGINE_BLOCK
        assert_same([expected], decode.run([second], [handed(computed)], TOKENS_OUT))
        eventually(lambda: HELD not in numbers(prefill.address))
