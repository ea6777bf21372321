"""Requests with LoRA adapters in real engines: served as without a store, and none of it is kept.

vLLM names an adapter by name and path, not by content, so its blocks may not outlive it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bench.engine import Engine, Request, Result
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    CAPACITY,
    TOKENS_OUT,
    attach,
    blocks_kept,
    forget,
    grown,
    numbers,
    servable,
    settled,
)

pytestmark = pytest.mark.vllm

RANK = 8
# One more than there are: on a CPU, vLLM 0.32 computes requests without an adapter with the last.
LORAS = 3
SETTINGS: dict[str, Any] = {
    "extra": {"enable_lora": True, "max_lora_rank": RANK, "max_loras": LORAS}
}
HITS = "external_prefix_cache_hits"
STORED = "kvstore_stored_blocks{stored}"


def make_adapter(folder: Path, model: Path, seed: int) -> str:
    """A random adapter of queries, keys and values, as peft writes it."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    sizes = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "k_proj": config["num_key_value_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, config["hidden_size"])), ("B", (size, RANK))):
                tensors[f"{where}.lora_{part}.weight"] = 0.1 * torch.randn(
                    shape, generator=generator
                )
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return str(folder)


@pytest.fixture(scope="module")
def adapters(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    one, other = (make_adapter(root / str(seed), model("llama_s"), seed) for seed in (1, 2))
    return one, other


@pytest.fixture(scope="module")
def plain_lora(model: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(model("llama_s"), **SETTINGS) as engine:
        yield engine


def requests(adapter: str | None) -> list[Request]:
    return [
        Request(id=f"{adapter}.{i}", tokens=prompt(97_000 + i, 150 + 83 * i), adapter=adapter)
        for i in range(4)
    ]


def alone(engine: Engine, prompts: Sequence[Request]) -> list[Result]:
    """What an engine answers with nothing in its own cache."""
    forget(engine)
    found = engine.run(prompts, max_tokens=TOKENS_OUT)
    forget(engine)
    return found


def test_B3_an_adapters_requests_are_served_and_never_stored(
    model: Callable[[str], Path], adapters: tuple[str, str], plain_lora: Engine, tmp_path: Path
) -> None:
    base, one, other = (requests(adapter) for adapter in (None, *adapters))
    expected = {id(prompts): alone(plain_lora, prompts) for prompts in (base, one, other)}
    tokens = {tuple(result.tokens) for results in expected.values() for result in results}
    assert len(tokens) == 3 * len(base), "each adapter does something"
    with StoreProcess(tmp_path, CAPACITY) as store:
        connector = attach(store)
        with Engine(model("llama_s"), connector=connector, **SETTINGS) as engine:

            def run(prompts: Sequence[Request], *, stored: int, hits: int) -> None:
                numbers_before = settled(lambda: numbers(store.address)).get(STORED, 0)
                metrics_before = engine.metrics()
                assert_same(expected[id(prompts)], alone(engine, prompts))
                assert grown(engine, metrics_before, HITS) == hits
                now = settled(lambda: numbers(store.address)).get(STORED, 0)
                assert now - numbers_before == stored

            everything = sum(servable(len(r.tokens)) for r in base)
            run(one, stored=0, hits=0)
            run(base, stored=blocks_kept(base, TOKENS_OUT), hits=0)
            run(one, stored=0, hits=0)
            run(other, stored=0, hits=0)  # another of the same name
            run(base, stored=0, hits=everything)
            mixed = [*one, *base]
            expected[id(mixed)] = expected[id(one)] + expected[id(base)]
            run(mixed, stored=0, hits=everything)
            told = "kvstore: requests with LoRA adapters are neither stored nor loaded"
            assert engine.log_path.read_text().count(told) == 1
