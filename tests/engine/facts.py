"""What the connector reads of vLLM's configuration to name an engine's blocks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

WEIGHTS = "model.safetensors"


def model(folder: Path | str, **changes: object) -> Any:  # noqa: ANN401 - stands for ModelConfig
    known: dict[str, object] = {
        "model": str(folder),
        "revision": None,
        "model_weights": "",
        "model_impl": "auto",
        "multimodal_config": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_config": hf_config(layers=4, _name_or_path=str(folder)),
    }
    return SimpleNamespace(**known | changes)


def hf_config(**values: object) -> SimpleNamespace:
    return SimpleNamespace(to_dict=lambda: dict(values))


def facts(folder: Path | str, **changes: object) -> Any:  # noqa: ANN401 - stands for VllmConfig
    """changes: by the name of a field of the model, the cache, how it is loaded, or the whole."""
    cache: dict[str, object] = {"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256"}
    load: dict[str, object] = {
        "load_format": "auto",
        "model_loader_extra_config": {},
        "download_dir": None,
    }
    of_model = {k: v for k, v in changes.items() if k in vars(model(folder))}
    return SimpleNamespace(
        model_config=model(folder, **of_model),
        cache_config=SimpleNamespace(**cache | {k: v for k, v in changes.items() if k in cache}),
        load_config=SimpleNamespace(**load | {k: v for k, v in changes.items() if k in load}),
        speculative_config=changes.get("speculative_config"),
    )


def with_weights(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(content)
    return folder
