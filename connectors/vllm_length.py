"""What max_model_len decides of a block's bytes. Engines that differ in it alone share the rest.

vLLM's code reads it in many places, mostly for the sizes of buffers. Places that compute with it
are here; tests/engine/test_length.py has all others, each with the reason why not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from connectors.weights import UnnamedError

# Their processors fit images and videos into what a prompt of max_model_len has room for.
FITTING = ("vllm.model_executor.models.nano_nemotron_vl", "vllm.models.dots3_note")
# Their rotary embedding has max_model_len positions, and "dynamic" scaling follows from these.
AS_LONG = (
    "vllm.model_executor.models.cohere_compass",
    "vllm.model_executor.models.minimax_m2",
    "vllm.model_executor.models.plamo3",
    "vllm.models.step5",
)
TRANSFORMERS = ("vllm.model_executor.models.transformers",)
LLAMA_4 = "llama4_text"
LLAMA_4_TUNED = 32768  # beyond, queries are scaled by position, unless the settings say otherwise


def decided_by_length(model: Any, code: type, length: int) -> dict[str, Any]:
    """Say what a model computes with a max_model_len. code: its class. Raises UnnamedError."""
    config = model.hf_config.to_dict()
    modules = frozenset(base.__module__ for base in code.__mro__)
    found: dict[str, Any] = {}
    for part, rope in _ropes(config):
        kind = rope.get("rope_type")
        limit = length  # up to here, Transformers' code rotates each key by its position alone
        if kind == "longrope":
            limit = rope["original_max_position_embeddings"]
            found.setdefault("long factors", []).append(length > limit)
        elif kind == "dynamic":
            limit = part.get("max_position_embeddings", 0)
            if _is_among(modules, AS_LONG):
                found["positions"] = length
        if length > limit and _is_among(modules, TRANSFORMERS):
            raise UnnamedError(
                f"max_model_len is {length}, expected up to {limit}: with {kind!r} scaling,"
                " Transformers' code rotates keys by the longest request of a batch"
            )
    if _is_among(modules, FITTING):
        found["prompt"] = length
    if any(part.get("model_type") == LLAMA_4 for part in _parts(config)):
        told = model.try_get_generation_config() | model.override_generation_config
        found["tuned"] = told.get("attn_temperature_tuning", length > LLAMA_4_TUNED)
    return found


def _is_among(modules: frozenset[str], packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for module in modules for package in packages)


def _ropes(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each part of a configuration with rotary embeddings, and their parameters."""
    for part in _parts(config):
        for rope in _parts(part.get("rope_parameters")):
            if "rope_type" in rope:
                yield part, rope


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a configuration and all that is nested in it."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parts(inner)
