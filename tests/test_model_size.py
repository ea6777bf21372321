"""`kvstore size`: what tokens of known models cost, and what tiers hold of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore import cli
from kvstore.core.errors import ConfigError, NotSupported
from kvstore.model_size import ModelSize, TierSize, model_size
from kvstore.units import GIB, KIB, MIB
from tests.engine.sizes import MODELS

LLAMA = {  # Llama-3.1-8B
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {  # DeepSeek-V3
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}  # fmt: skip
GEMMA = {  # gemma-3-27b-it
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "sliding_window": 1024,
    },
}  # fmt: skip


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def size_of(folder: Path, config: dict[str, Any], **options: Any) -> ModelSize:  # noqa: ANN401
    return model_size(written(folder, config), **options)


def test_Q11_known_models_cost_what_their_papers_say(tmp_path: Path) -> None:
    assert size_of(tmp_path, LLAMA).token_bytes == 128 * KIB
    assert size_of(tmp_path, LLAMA, dtype="fp8").token_bytes == 64 * KIB
    assert size_of(tmp_path, DEEPSEEK, block_tokens=64).token_bytes == 61 * 576 * 2
    falcon = {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}
    assert size_of(tmp_path, falcon | {"multi_query": True}).slot_bytes == 16 * 32 * 64 * 2 * 2
    gemma = size_of(tmp_path, GEMMA)
    assert [(group.count, group.layers) for group in gemma.groups] == [(6, 9), (1, 10)]
    assert gemma.slot_bytes == 10 * 16 * (16 * 128 * 2 * 2)


def test_Q11_ranks_share_what_a_token_costs(tmp_path: Path) -> None:
    """Latent KV is the same on all; heads that are fewer than ranks are on several."""
    for config, ranks, times in ((LLAMA, 8, 1), (LLAMA, 16, 2), (DEEPSEEK, 8, 1)):
        one = size_of(tmp_path, config, block_tokens=64).token_bytes
        assert size_of(tmp_path, config, ranks=ranks, block_tokens=64).token_bytes == one * times
    with pytest.raises(ConfigError, match="--tp: expected a divisor of 8 KV heads, found 3"):
        size_of(tmp_path, LLAMA, ranks=3)


def sessions(found: TierSize) -> tuple[int, int]:
    return found.sessions, found.sessions_needed


def test_Q11_a_tier_holds_whole_blocks_in_whole_extents(tmp_path: Path) -> None:
    size = size_of(tmp_path, LLAMA)
    assert size.slot_bytes == 2 * MIB
    assert size.held("cpu", GIB, GIB // 8, 1000) == TierSize("cpu", GIB, 8192, 8, 8)  # 62 of 512
    assert size.held("cpu", GIB, 3 * MIB).tokens == 341 * 16
    windows = size_of(tmp_path, GEMMA)
    extent = 64 * windows.slot_bytes
    assert sessions(windows.held("cpu", extent, extent, 64 * 16)) == (0, 0)
    found = windows.held("cpu", 28 * extent, extent, 128 * 16)
    assert sessions(found) == (2, 1792 // (128 + 6 * 64))
    states = size_of(tmp_path, MODELS["gated delta net"])
    extent, prompt = 40 * states.slot_bytes, 10 * states.block_tokens
    assert sessions(states.held("cpu", extent, extent, prompt)) == (1, 40 // (10 + 3))
    larger = size.in_blocks_of(64)
    assert (larger.slot_bytes, larger.token_bytes) == (8 * MIB, size.token_bytes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_chunk_size": 8192}, "attention_chunk_size = 8192"),
        ({"layer_types": ["conv"] * 32}, "layers of .*conv"),
        ({"hybrid_override_pattern": "M?"}, "layers of"),
        ({"mamba_d_state": 16}, "states in layers that it does not name"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_Q11_a_model_of_an_unknown_kind_is_named_and_not_guessed(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(NotSupported, match=told):
        size_of(tmp_path, LLAMA | changes)


def test_Q11_the_table_and_the_json_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvstore.toml"
    nvme = f'[nvme]\npath = "{tmp_path}/kv"\ncapacity = "16GiB"\n'
    config.write_text('[cpu]\ncapacity = "8GiB"\n' + nvme)
    model = str(written(tmp_path, LLAMA))
    ways = (["--cpu", "8GiB", "--nvme", "16GiB"], ["--config", str(config)])
    for way in ways:
        assert cli.main(["size", model, *way, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["token_bytes"] == 128 * KIB
        assert [(row["tier"], row["tokens"]) for row in found["tiers"]] == [
            ("cpu", 65_536),
            ("nvme", 131_072),
        ]
        assert cli.main(["size", model, *way]) == 0
        out = capsys.readouterr().out
        assert "128 KiB a token" in out
        assert "65,536" in out
        assert "131,072" in out


def test_Q11_a_block_that_no_extent_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["size", str(written(tmp_path, LLAMA)), "--block-size", "256", "--cpu", "128MiB"]
    assert cli.main(arguments) == 2
    assert "expected an extent of at least 32 MiB" in capsys.readouterr().err


NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2.5, 10**30, "", "x", [], ["x"], {}, {"a": 1}, float("nan"),
)  # fmt: skip


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK, GEMMA["text_config"], *MODELS.values()])
def test_Q13_whatever_a_config_has_the_answer_is_a_size_or_a_line(
    config: dict[str, Any], tmp_path: Path
) -> None:
    told: list[str] = []
    for name in config:
        for value in NASTY:
            try:
                size = size_of(tmp_path, config | {name: value})
            except (ConfigError, NotSupported) as exc:
                told.append(str(exc))
            else:
                assert size.slot_bytes > 0
                assert size.token_bytes > 0
    assert told
    assert not [line for line in told if len(line.splitlines()) != 1]
