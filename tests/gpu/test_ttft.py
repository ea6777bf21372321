"""The stand-in engine of `tests.bench gpu-ttft` on a real GPU, with a store process, in small.

What these need beside the other tests here is imported by each: without it they fail by themselves.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


@torch.no_grad()
def test_chunks_in_pages_give_what_the_whole_gives() -> None:
    from tests.bench.paged import PagedModel, Shape
    from tests.bench.paged_engine import Prompt
    from tests.test_bench_gpu_ttft import computed, dense

    shape = Shape(2, 2, 8, 64, 64, 64, prompt_blocks=5)
    model, prompt = PagedModel(shape, 20, torch.device("cuda")), Prompt(shape, 1)
    expected = dense(model, prompt)
    for cuts in ([0, 80, 81], [0, 32, 64, 80, 81], [0, 81], [0, 7, 50, 80, 81]):
        found = computed(model, prompt, [3, 9, 1, 17, 4, 8], cuts)
        assert torch.allclose(found.float(), expected, atol=0.02), cuts


def test_a_prompt_is_the_same_from_each_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of the benchmark's own if not, or if a place was another one."""
    from rich.console import Console
    from rich.progress import Progress

    from tests.bench import gpu_ttft
    from tests.bench.paged import Shape

    monkeypatch.chdir(tmp_path)
    shape = Shape(layers=4, prompt_blocks=256, step_tokens=1024)  # 64 MiB
    with Progress(console=Console(file=io.StringIO())) as progress:
        results = gpu_ttft.measure(shape, 5, torch.device("cuda", 0), progress)
    assert len(results) == 5
    assert all(result.parameters["pairs"] == 5 for result in results)
