"""`tests.bench gpu` without a GPU: what it says, and its figures' arithmetic on a fake device."""

from __future__ import annotations

import pytest
import torch

from connectors.copies.gpu.measure import Choice
from kvstore.core.errors import NotSupported
from tests.bench import gpu
from tests.harness.fake_cuda import FakeCuda

KERNEL = Choice(((1, 4),), ((1, 4),))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> gpu.Memory:
    made: list[FakeCuda] = []
    empty = torch.empty

    def storage(*args: object, **options: object) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, **options)  # type: ignore[call-overload]
        if not made[0]._device:
            made[0]._device.append((tensor.data_ptr(), tensor.numel()))
        return tensor

    made.append(FakeCuda([]))
    monkeypatch.setattr(torch, "empty", storage)
    return gpu.Memory(1 << 20, "cpu", made[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(NotSupported, match="needs a GPU that torch can use, torch is 2"):
        gpu.run(1)


def test_every_size_length_direction_and_engine_is_measured(
    memory: gpu.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "BLOCKS", (1, 4))
    results = list(gpu.sizes(memory, KERNEL, 1, (4096, 65536)))
    names = [(r.name, r.parameters["run_kib"], r.parameters["blocks"], r.parameters["engine"])
             for r in results]  # fmt: skip
    assert len(set(names)) == len(names) == 2 * 2 * 2 * 3
    assert all(r.ratio and r.ratio > 0 for r in results)
    by = {r.parameters["engine"]: r.parameters["thread_blocks"] for r in results}
    assert by == {"chosen": 4, "kernel": 8, "engines": 0}
    assert isinstance(memory.cuda, FakeCuda)
    assert memory.cuda.faults == []
    assert memory.cuda.calls["copy"] > 0 < memory.cuda.calls["launch"]


def test_a_prompt_goes_both_ways(memory: gpu.Memory) -> None:
    results = {r.name: r for r in gpu.model(memory, KERNEL, 1, (4, 4096, 16))}
    assert set(results) == {
        "prompt_load", "prompt_store", "job_cpu_load", "job_cpu_store", "both_directions",
    }  # fmt: skip
    assert results["prompt_load"].parameters["blocks"] == 16
    assert isinstance(memory.cuda, FakeCuda)
    assert memory.cuda.faults == []
    memory.cuda.run()
    memory.close()
    assert memory.cuda.pinned_ranges == {}
