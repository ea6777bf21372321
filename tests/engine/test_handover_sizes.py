"""Blocks that as many ranks computed as one engine has, for an engine with another number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.bench.engine import Engine, Request
from tests.bench.handover import HANDED
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import CAPACITY, ENGINE_BLOCK, TOKENS_OUT, attach, given, numbers, since

PROMPTS = 8


def engine(model: Path, ranks: int, store: StoreProcess, **extra: str) -> Engine:
    settings: dict[str, Any] = {} if ranks == 1 else {"tensor_parallel_size": ranks}
    connector = attach(store, **extra)
    return Engine(model, connector=connector, in_process=ranks == 1, **settings)


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "prefill_ranks", "decode_ranks", "transfer"),
    [
        ("llama_s", 1, 2, "pull"),
        ("llama_s", 4, 1, "push"),  # two KV heads, so that two ranks hold the same ones
        ("gemma3", 2, 1, "pull"),
        ("gemma3", 1, 2, "push"),
    ],
)
def test_B13_ranks_of_another_number_find_their_heads(
    model: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    prefill_ranks: int,
    decode_ranks: int,
    transfer: str,
) -> None:
    requests = [
        Request(id=f"p{number}", tokens=prompt(8100 + number, ENGINE_BLOCK * (2 + 3 * number) + 1))
        for number in range(PROMPTS)
    ]
    for folder in ("p", "d"):
        (tmp_path / folder).mkdir()
    with (
        StoreProcess(tmp_path / "p", CAPACITY, "[peer]\n") as theirs,
        StoreProcess(tmp_path / "d", CAPACITY, "[peer]\n") as ours,
    ):
        with engine(model(name), prefill_ranks, theirs) as prefill:
            handed = [msgspec.structs.replace(r, kv_transfer_params=HANDED) for r in requests]
            computed = prefill.run(handed, max_tokens=1)
            prefill.go_idle()
        params = [result.kv_transfer_params for result in computed]
        assert [back and back["tp_size"] for back in params] == [prefill_ranks] * PROMPTS
        # The same ranks with the same bytes, but no hand-over: what is computed here depends on
        # how many ranks there are, with or without a connector. That is the last token in both
        # cases, since no prompt has more than one behind its last whole block.
        with engine(model(name), decode_ranks, theirs) as local:
            expected = local.run(requests, max_tokens=TOKENS_OUT)
        with engine(model(name), decode_ranks, ours, transfer=transfer) as decode:
            before = numbers(ours.address)
            wanted = [
                msgspec.structs.replace(r, kv_transfer_params=back)
                for r, back in zip(requests, params, strict=True)
            ]
            got = decode.run(wanted, max_tokens=TOKENS_OUT)
            found = since(ours.address, before)
        assert found["kvstore_hit_tokens{peer}"] == sum(
            given(name, len(r.tokens)) for r in requests
        )
        assert_same(expected, got)
