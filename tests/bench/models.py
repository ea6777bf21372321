"""Small models made from nothing but a config and a seed, for tests, the demo and benchmarks.

A default initialisation gives a model that repeats one token whatever it attends to, and such a
model cannot show a wrong KV block. The weights here are scaled so that attention picks out a few
tokens, outweighs the embedding of the last token, and logits reach about 10.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError

SEED = 20
VOCAB = 4096
HEAD_DIM = 64
CONTEXT_MAX = 16384
GEMMA_WINDOW = 128

QUERY_KEY_GAIN = 1.5  # attention scores of about 2: sharp, yet not on one token only
OUTPUT_GAIN = 3.0  # an attended value is an average, so it needs help against the residual
LOGIT_STD = 3.2
GEMMA_FULL_LOUDNESS = 3.0  # or the windows drown what the full layers remember


class Shape(NamedTuple):
    """How large a model is; heads have HEAD_DIM dimensions."""

    layers: int
    hidden: int = 256
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2


class Weight(NamedTuple):
    """One tensor: normal with mean and std, drawn from a generator seeded by its name."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def make_model(name: str, root: Path) -> Path:
    """Return the directory of model name under root, writing it first if it is not there.

    Holds config.json and model.safetensors, no tokenizer. The directory's name contains a digest
    of what decides its bytes, and it appears by rename, so two makers at once do no harm.
    """
    if name not in RECIPES:
        raise ConfigError(f"model {name!r}, expected one of {', '.join(sorted(RECIPES))}")
    config, weights = RECIPES[name]
    recipe = json.dumps([SEED, config, [tuple(w) for w in weights]], sort_keys=True)
    target = root / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(work / "model.safetensors", weights)
        work.chmod(0o755)
        work.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise somebody else was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def prompt(seed: int, tokens_count: int) -> list[int]:
    """Pseudo-random token ids that any of the models takes; equal seeds share a prefix."""
    tokens: list[int] = []
    for index in range(math.ceil(tokens_count / 16)):
        block = hashlib.shake_256(f"{seed}/{index}".encode()).digest(32)
        tokens += [3 + int.from_bytes(block[i : i + 2]) % (VOCAB - 3) for i in range(0, 32, 2)]
    return tokens[:tokens_count]


def _write_weights(path: Path, weights: list[Weight]) -> None:
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for weight in weights:
        seed = int.from_bytes(hashlib.sha256(f"{SEED}/{weight.name}".encode()).digest()[:6])
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(weight.shape, generator=generator) * weight.std + weight.mean
        tensors[weight.name] = values.to(torch.bfloat16)
    save_file(tensors, os.fspath(path), metadata={"format": "pt"})


def _linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Weight:
    return Weight(f"{name}.weight", (outputs, inputs), gain / math.sqrt(inputs))


def _layer(prefix: str, shape: Shape) -> Iterator[Weight]:
    """Attention and MLP, which all models share."""
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, queries, keys = shape.hidden, shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
    yield _linear(f"{attn}.q_proj", queries, hidden, QUERY_KEY_GAIN)
    yield _linear(f"{attn}.k_proj", keys, hidden, QUERY_KEY_GAIN)
    yield _linear(f"{attn}.v_proj", keys, hidden)
    yield _linear(f"{attn}.o_proj", hidden, queries, OUTPUT_GAIN)
    yield _linear(f"{mlp}.gate_proj", shape.intermediate, hidden)
    yield _linear(f"{mlp}.up_proj", shape.intermediate, hidden)
    yield _linear(f"{mlp}.down_proj", hidden, shape.intermediate)


def _frame(hidden: int, embedding_std: float) -> list[Weight]:
    """Embedding and head: separate, or the model would like to repeat its input."""
    return [
        Weight("model.embed_tokens.weight", (VOCAB, hidden), embedding_std),
        Weight("lm_head.weight", (VOCAB, hidden), LOGIT_STD / math.sqrt(hidden)),
    ]


def _base_config(architecture: str, model_type: str, shape: Shape) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_MAX,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def _llama(shape: Shape) -> tuple[dict[str, Any], list[Weight]]:
    """Every token visible: one KV group."""
    config = _base_config("LlamaForCausalLM", "llama", shape) | {
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    weights = _frame(shape.hidden, embedding_std=1.0)
    norms = ["model.norm"]
    for index in range(shape.layers):
        prefix = f"model.layers.{index}"
        weights += _layer(prefix, shape)
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    weights += [Weight(f"{norm}.weight", (shape.hidden,), 0.1, mean=1.0) for norm in norms]
    return config, weights


def _gemma3() -> tuple[dict[str, Any], list[Weight]]:
    """Two times three sliding-window layers and a full one: four KV groups."""
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    shape = Shape(len(kinds))
    config = _base_config("Gemma3ForCausalLM", "gemma3_text", shape) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": GEMMA_WINDOW,
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    # The model multiplies embeddings by sqrt(hidden), and its norms by 1 + weight.
    hidden = shape.hidden
    weights = _frame(hidden, embedding_std=1.0 / math.sqrt(hidden))
    norms = [("model.norm", hidden, 0.0)]
    for index, kind in enumerate(kinds):
        prefix = f"model.layers.{index}"
        loudness = GEMMA_FULL_LOUDNESS if kind == "full_attention" else 1.0
        weights += _layer(prefix, shape)
        norms += [
            (f"{prefix}.self_attn.q_norm", HEAD_DIM, QUERY_KEY_GAIN - 1),
            (f"{prefix}.self_attn.k_norm", HEAD_DIM, QUERY_KEY_GAIN - 1),
            (f"{prefix}.input_layernorm", hidden, 0.0),
            (f"{prefix}.post_attention_layernorm", hidden, loudness - 1),
            (f"{prefix}.pre_feedforward_layernorm", hidden, 0.0),
            (f"{prefix}.post_feedforward_layernorm", hidden, 0.0),
        ]
    weights += [Weight(f"{name}.weight", (size,), 0.1, mean=mean) for name, size, mean in norms]
    return config, weights


RECIPES: dict[str, tuple[dict[str, Any], list[Weight]]] = {
    "llama_s": _llama(Shape(4)),
    "llama": _llama(Shape(8, 512, 1536, 8, 4)),  # 29 million parameters, 8 KiB of KV per token
    "gemma3": _gemma3(),
}


if __name__ == "__main__":
    import sys

    sys.stdout.write(f"{make_model(sys.argv[1], Path(sys.argv[2]))}\n")
