"""What decides the bytes of a vLLM engine's blocks beside their geometry, as a digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from connectors.vllm_version import VERSION

# isort: split
from vllm.v1.core.kv_cache_utils import get_none_hash_seed

from connectors.weights import UnnamedError, fingerprint
from kvstore.core.layout import TRAIT_DIGITS

TRAIT_CHARACTERS = 100  # of one fact as others are told it
# These take all weights from the model's folder. Others make them up or have them from elsewhere.
LOAD_FORMATS = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache"),
    *("runai_streamer", "runai_streamer_sharded", "sharded_state", "bitsandbytes", "gguf"),
)


def identity(config: Any) -> tuple[str, dict[str, str], str]:
    """Name everything beside the geometry that decides a block's bytes or its hash.

    As a digest, for people to read, and why that is not all ("": it is). The model's name is for
    people only: another path, or another name of the same weights, is the same model.
    """
    model, cache = config.model_config, config.cache_config
    speculative = config.speculative_config
    drafter = None if speculative is None else speculative.draft_model_config
    unnamed = ""
    weights, drafts = "not named", None
    try:
        weights = weights_of(model, config.load_config)
        if drafter is not None:
            drafts = weights_of(drafter, speculative.draft_load_config or config.load_config)
    except UnnamedError as exc:
        unnamed = str(exc)
    own = f"torch.{cache.cache_dtype}" == str(model.dtype)
    images = model.multimodal_config
    facts = {
        "engine": VERSION,
        "implementation": str(model.model_impl),
        "hf_config": _config_of(model),
        "weights": weights,
        "loading": [config.load_config.load_format, config.load_config.model_loader_extra_config],
        "dtype": str(model.dtype),
        "cache_dtype": "auto" if own else str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "hash": [cache.prefix_caching_hash_algo, get_none_hash_seed()],
        "speculative": None if speculative is None else str(speculative.method),
        "drafter": None if drafter is None else [_config_of(drafter), drafts],
        "images": None if images is None else [images.mm_processor_kwargs, images.media_io_kwargs],
    }
    traits = {
        "engine": f"vLLM {facts['engine']}, {facts['implementation']}",
        "model": Path(model.model).name if Path(model.model).exists() else model.model,
        "weights": weights[:TRAIT_DIGITS],
        "loading": str(config.load_config.load_format),
        "config": _digest([facts["hf_config"], facts["images"]])[:TRAIT_DIGITS],
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache dtype": str(facts["cache_dtype"]),
        "quantization": str(facts["quantization"]),
        "hash": cache.prefix_caching_hash_algo,
        "hash seed": _digest(facts["hash"])[:TRAIT_DIGITS],
        "speculative": str(facts["speculative"]),
        "drafter": "none" if drafter is None else _digest(facts["drafter"])[:TRAIT_DIGITS],
    }
    told = {name: text[:TRAIT_CHARACTERS] for name, text in traits.items()}
    return _digest(facts), told, unnamed


def _config_of(model: Any) -> dict[str, Any]:
    return {k: v for k, v in model.hf_config.to_dict().items() if k != "_name_or_path"}


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def weights_of(model: Any, load: Any) -> str:
    """Digest the weight files that an engine loads. Raises UnnamedError."""
    if load.load_format not in LOAD_FORMATS:
        raise UnnamedError(f"load_format {load.load_format!r}, expected one that reads files")
    if model.model_weights:
        raise UnnamedError(f"the weights come from {model.model_weights}, expected local files")
    place = Path(model.model)
    if not place.exists():
        place = _snapshot(model, load.download_dir)
    return fingerprint(place, Path.home() / ".cache" / "kvstore")


def _snapshot(model: Any, folder: str | None) -> Path:
    """Return the folder of the hub's commit that the engine has loaded."""
    cache = Path(folder or constants.HF_HUB_CACHE) / f"models--{model.model.replace('/', '--')}"
    named = model.revision or constants.DEFAULT_REVISION
    try:
        place = cache / "snapshots" / named  # a commit in full
        if not place.is_dir():
            place = cache / "snapshots" / (cache / "refs" / named).read_text().strip()
            place.stat()
    except OSError as exc:
        raise UnnamedError(
            f"{model.model} at {named} is neither a path nor in the local Hugging Face cache"
        ) from exc
    commit = vars(model.hf_config).get("_commit_hash")  # None without a hub
    if commit not in (None, place.name):
        raise UnnamedError(
            f"{model.model} moved while the engine started: its configuration is of commit"
            f" {commit}, its weights are of {place.name}"
        )
    return place
