"""What decides the bytes of a vLLM engine's blocks beside their geometry, as a digest."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from connectors.vllm_version import VERSION

# isort: split
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from connectors.vllm_length import decided_by_length
from connectors.vllm_private import values_of
from connectors.weights import UnnamedError, code_fingerprint, digest_of, fingerprint
from kvstore.core.layout import TRAIT_DIGITS

TRAIT_CHARACTERS = 100  # of one fact as others are told it
# These take all weights from the model's folder. Others make them up or have them from elsewhere.
LOAD_FORMATS = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache",
    "runai_streamer", "runai_streamer_sharded", "sharded_state", "bitsandbytes", "gguf",
)  # fmt: skip
# Fields of vLLM's configuration that are in the digest as they are. tests/engine/test_fields.py
# has all others, each with the reason why not. A field that a new version adds makes it fail.
FIELDS = {
    "model_config": ("code_revision", "dtype", "quantization", "quantization_config"),
    "multimodal_config": ("media_io_kwargs", "mm_encoder_attn_dtype", "mm_processor_kwargs"),
    "load_config": ("load_format", "model_loader_extra_config"),
    "cache_config": ("swa_bounded_replay",),
    "attention_config": (
        "disable_flashinfer_q_quantization",
        "use_non_causal",
        "use_prefill_query_quantization",
    ),
    "diffusion_config": ("canvas_length",),
    "speculative_config": (
        "index_share_for_mtp_iteration",
        "method",
        "parallel_drafting",
        "use_heterogeneous_vocab",
    ),
}
SETTINGS = ("cache_config", "attention_config", "diffusion_config")
# Variables of the environment likewise. They quantize, lay out pages, or pick a video's frames.
VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_VIDEO_LOADER_BACKEND",
)
ADDED_VARIABLES = ("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",)  # by vLLM 0.33
TOLD = (
    "code",
    "dtype",
    "load_format",
    "plug_in",
    "quantization",
    "weights",
)  # have traits of their own
_ELSEWHERE = re.compile(r'"([\w.-]+/[\w.-]+)--[\w.]+"')
OTHER_MODELS = ("audio_model_id", "text_model_id")  # in hf_config: they have a part's weights
SHORT = {"fp8": "fp8_e4m3"}  # data types with two names; vLLM writes either for its own default
DRAFTERLESS = ("ngram", "ngram_gpu", "suffix")  # drafts of these leave no KV


def identity(config: Any) -> tuple[str, dict[str, str], str]:
    """Name everything beside the geometry that decides a block's bytes or its hash.

    As a digest, for people to read, and why that is not all ("": it is). The model's name is for
    people only: another path, or another name of the same weights, is the same model.
    """
    model, cache, load = config.model_config, config.cache_config, config.load_config
    speculative = config.speculative_config
    if speculative is not None and speculative.method in DRAFTERLESS:
        speculative = None
    computing, unnamed = _model(model, load, (model.max_model_len,))
    drafter, drafts_unnamed = _drafter(speculative, load, model.max_model_len)
    own = f"torch.{cache.cache_dtype}" == str(model.dtype)
    algorithm = cache.prefix_caching_hash_algo
    settings = {name: _fields(getattr(config, name), name) for name in SETTINGS}
    facts = {
        "engine": VERSION,
        "model": computing,
        "drafter": drafter,
        "cache_dtype": "auto" if own else SHORT.get(cache.cache_dtype, str(cache.cache_dtype)),
        # Not get_none_hash_seed: in a worker it is vLLM's default, whatever PYTHONHASHSEED is.
        "hash": [algorithm, resolve_none_hash_seed(get_hash_fn_by_name(algorithm))],
        "settings": settings,
        "variables": values_of(envs, "vllm.envs", VARIABLES)
        | {name: getattr(envs, name, None) for name in ADDED_VARIABLES},
    }
    rest = [fact for name, fact in computing.items() if name not in TOLD]
    rest += [facts["settings"], facts["variables"]]
    traits = {
        "engine": f"vLLM {VERSION}, {computing['plug_in'][:TRAIT_DIGITS]} {computing['code']}",
        "model": Path(model.model).name if Path(model.model).exists() else model.model,
        "weights": computing["weights"][:TRAIT_DIGITS],
        "loading": str(load.load_format),
        "config": _digest(rest)[:TRAIT_DIGITS],
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache dtype": str(facts["cache_dtype"]),
        "quantization": str(model.quantization),
        "hash": algorithm,
        "hash seed": _digest(facts["hash"])[:TRAIT_DIGITS],
        "speculative": "none" if drafter is None else str(drafter["method"]),
        "drafter": "none" if drafter is None else _digest(drafter)[:TRAIT_DIGITS],
    }
    told = {name: text[:TRAIT_CHARACTERS] for name, text in traits.items()}
    return _digest(facts), told, unnamed or drafts_unnamed or _mixes_adapters(config)


def _mixes_adapters(config: Any) -> str:
    """Say whether adapters leak: vLLM corrected its code for CPUs in 0.33."""
    if config.lora_config is None or VERSION != "0.32" or not current_platform.is_cpu():
        return ""
    return (
        "with --enable-lora on a CPU, vLLM 0.32 computes requests without an adapter with one that"
        " others in their batch use"
    )


def _model(model: Any, load: Any, lengths: tuple[int, ...]) -> tuple[dict[str, Any], str]:
    """Say what computes, and why that is not all. lengths: of prompts that it may be made for."""
    code = model.registry.resolve_model_cls(model.architectures, model)[0]
    facts: dict[str, Any] = {
        "code": f"{code.__module__}.{code.__qualname__}",
        "hf_config": _config_of(model),
        "plug_in": "",
        "weights": "not named",
        **_fields(model, "model_config"),
        **_fields(load, "load_config"),
    }
    try:
        facts["plug_in"] = _code_of(code)
        facts["weights"] = weights_of(model, load)
        facts |= _code_elsewhere(model, load)
        facts["images"] = _images(model.multimodal_config)
        facts["lengths"] = [decided_by_length(model, code, length) for length in lengths]
    except UnnamedError as exc:
        return facts, str(exc)
    return facts, ""


def _code_of(code: type) -> str:
    """Digest the code of a model that is not vLLM's own, whose version is a trait of its own.

    Raises UnnamedError where it cannot be read.
    """
    package = code.__module__.partition(".")[0]
    if package == "vllm":
        return ""
    try:
        file = Path(inspect.getfile(code))
    except (OSError, TypeError) as exc:
        raise UnnamedError(f"the code of {code.__qualname__} is in no file: {exc}") from exc
    if "." in code.__module__ or file.name == "__init__.py":
        top = Path(getattr(sys.modules.get(package), "__file__", None) or "").parent
        file = top if file.is_relative_to(top) else file.parent
    return code_fingerprint(file)


def _code_elsewhere(model: Any, load: Any) -> dict[str, Any]:
    """Say which commits of other repositories a model takes code from: "repository--module.Class".

    One that is not in the local cache was not needed.
    """
    if not model.trust_remote_code:
        return {}
    folder = _place(model.model, model.revision, None, load.download_dir)
    texts = [(json.dumps(_config_of(model), default=str), model.code_revision)]
    processors = folder.glob("*processor*.json")
    texts += [(file.read_text("utf-8", "replace"), None) for file in processors]
    found = set()
    for text, revision in texts:
        for name in _ELSEWHERE.findall(text):
            with contextlib.suppress(UnnamedError):
                found.add((name, _place(name, revision, None, None).name))
    return {"code elsewhere": sorted(found)} if found else {}


def _drafter(speculative: Any, load: Any, length: int) -> tuple[dict[str, Any] | None, str]:
    """Say what drafts, if it leaves KV. length: the target's, by which vLLM makes some drafters."""
    if speculative is None:
        return None, ""
    settings = _fields(speculative, "speculative_config")
    model = speculative.draft_model_config
    if model is None:
        return settings, ""
    facts, unnamed = _model(
        model, speculative.draft_load_config or load, (length, model.max_model_len)
    )
    told = facts["hf_config"]
    there = max(told.get("n_predict") or 1, told.get("num_nextn_predict_layers") or 1)
    used = min(speculative.num_speculative_tokens, there)
    return facts | settings | {"modules": used}, unnamed


def _images(settings: Any) -> dict[str, Any]:
    """Say what becomes of images and the like, beside what vLLM has in their hashes.

    Raises UnnamedError for a file of scales that cannot be read.
    """
    facts = _fields(settings, "multimodal_config")
    if settings is None:
        return facts
    if settings.video_pruning_rate:
        facts["pruned"] = [settings.video_pruning_method, settings.video_pruning_rate]
    if settings.mm_encoder_fp8_scale_path is not None:
        facts["scales"] = digest_of(Path(settings.mm_encoder_fp8_scale_path))
    return facts


def _fields(part: Any, name: str) -> dict[str, Any]:
    return {} if part is None else values_of(part, name, FIELDS[name])


def _config_of(model: Any) -> dict[str, Any]:
    """Return the model's configuration. Some models write max_model_len into it as they load."""
    told = model.hf_config.to_dict()
    return {k: v for k, v in told.items() if k not in ("_name_or_path", "max_model_len")}


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def weights_of(model: Any, load: Any) -> str:
    """Digest the weight files that an engine loads. Raises UnnamedError."""
    if load.load_format not in LOAD_FORMATS:
        raise UnnamedError(f"load_format {load.load_format!r}, expected one that reads files")
    if model.model_weights:
        raise UnnamedError(f"the weights come from {model.model_weights}, expected local files")
    commit = vars(model.hf_config).get("_commit_hash")  # None without a hub
    parts = [(model.model, model.revision, commit)]
    others = [vars(model.hf_config).get(name) for name in OTHER_MODELS]
    parts += [(name, None, None) for name in others if name is not None]
    try:
        memory = Path.home() / ".cache" / "kvstore"
    except RuntimeError:  # without HOME, a user whom the system does not know
        memory = None
    found = [fingerprint(_place(*part, load.download_dir), memory) for part in parts]
    return found[0] if len(found) == 1 else _digest(found)


def _place(model: str, revision: str | None, commit: str | None, folder: str | None) -> Path:
    """Return the folder or file that an engine loads. commit: of its configuration; None: any."""
    if Path(model).exists():
        return Path(model)
    if envs.VLLM_USE_MODELSCOPE:
        raise UnnamedError(f"{model} comes from ModelScope, expected a path or Hugging Face")
    cache = Path(folder or constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    named = revision or constants.DEFAULT_REVISION
    try:
        place = cache / "snapshots" / named  # a commit in full
        if not place.is_dir():
            place = cache / "snapshots" / (cache / "refs" / named).read_text().strip()
            place.stat()
    except OSError as exc:
        raise UnnamedError(
            f"{model} at {named} is neither a path nor in the local Hugging Face cache"
        ) from exc
    if commit not in (None, place.name):
        raise UnnamedError(
            f"{model} moved while the engine started: its configuration is of commit"
            f" {commit}, its weights are of {place.name}"
        )
    return place
