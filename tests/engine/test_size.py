"""`kvstore size` against vLLM: the groups and bytes that an engine's connector registers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.model_size import BLOCK_SIZE_CPU, model_size
from tests.engine.sizes import MODELS
from tests.engine.support import BLOCK_BYTES, ENGINE_BLOCK, GROUPS

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def registered() -> dict[str, Any]:
    """What vLLM makes of each model, in a process of its own: it has one model at a time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.sizes"],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_Q11_a_models_groups_and_bytes_are_those_that_vllm_has(
    name: str, registered: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    # Without AMX vLLM has a kernel of 16 tokens only for latent attention on a CPU.
    narrow = name == "latent" and not torch.cpu._is_amx_tile_supported()
    block = 16 if narrow else BLOCK_SIZE_CPU
    # With AVX-512 for bfloat16 vLLM's CPU platform keeps the states of such layers in float32.
    states = "float32" if torch.cpu._is_avx512_bf16_supported() else "auto"
    size = model_size(tmp_path, state_dtype=states, block_tokens=block)
    rows = [
        [group.layers, None if blocks == 10**6 else blocks]
        for group in size.groups
        for blocks in [group.session_blocks(10**6, size.block_tokens)] * group.count
    ]
    assert registered[name] == {
        "block_tokens": size.block_tokens,
        "slot_bytes": size.slot_bytes,
        "groups": registered[name]["groups"],
    }
    assert sorted(rows, key=str) == sorted(registered[name]["groups"], key=str)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_Q11_running_engines_have_blocks_of_that_size(
    name: str, ranks: int, model: Callable[[str], Path]
) -> None:
    """Other tests compare the same numbers with what stores of real engines hold."""
    size = model_size(model(name), ranks=ranks, block_tokens=ENGINE_BLOCK)
    assert (size.slot_bytes, size.blocks) == (BLOCK_BYTES[name], GROUPS[name])
