"""`tests.bench gpu-ttft` in host memory and in small: a real store, both halves, a real disk."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from connectors.copies.host import Copying, HostCopier, SlotMap
from connectors.store_client import StoreClient
from kvstore.core.errors import KVStoreError, NotSupported
from kvstore.core.layout import Move
from tests.bench import gpu_ttft
from tests.bench.paged import DTYPE, PagedModel, Shape
from tests.bench.paged_engine import Answer, PagedEngine, Prompt
from tests.bench.report import Result

SMALL = Shape(2, 16, 16, 128, 64, 512, prompt_blocks=32, step_tokens=128)  # 8 MiB
TINY = Shape(2, 2, 4, 16, 32, 64, prompt_blocks=5, step_tokens=32)
CPU = torch.device("cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measure(rounds: int = 1) -> list[Result]:
    with Progress(console=Console(file=io.StringIO())) as progress:
        return gpu_ttft.measure(SMALL, rounds, CPU, progress)


def test_it_measures_a_prompt_from_each_place(here: Path) -> None:
    found = {result.name: result for result in measure(2)}
    assert list(found) == [
        "ttft_cold", "ttft_gpu_hit", "ttft_cpu_hit", "cpu_hit_beyond_gpu_hit", "ttft_nvme_hit",
    ]  # fmt: skip
    assert all(result.parameters["pairs"] == 2 for result in found.values())
    assert all(result.ratio for name, result in found.items() if name != "ttft_cold")
    assert found["ttft_cpu_hit"].parameters["against"] == "one copy"
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("here")
def test_a_hit_in_the_engine_is_none_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = gpu_ttft.Rounds.fill

    def then_keep(rounds: gpu_ttft.Rounds, tell: Callable[[str], None]) -> None:
        fill(rounds, tell)
        monkeypatch.setattr(PagedEngine, "drop_cache", lambda _engine: None)

    monkeypatch.setattr(gpu_ttft.Rounds, "fill", then_keep)
    with pytest.raises(KVStoreError, match=r"cpu_hit, .*\{'gpu': 512\}, expected \{'cpu': 512\}"):
        measure()


@pytest.mark.usefixtures("here")
def test_a_hit_in_memory_is_none_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more memory the prompt of two rounds before has not left it as a whole."""
    monkeypatch.setattr(gpu_ttft, "MEMORY_PROMPTS", 3)
    with pytest.raises(KVStoreError, match=r"nvme_hit, .*'cpu': \d+.*, .*\{'nvme': 512\}"):
        measure()


@pytest.mark.usefixtures("here")
def test_what_the_connector_says_is_what_the_store_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreClient, "count_usage", lambda *_: None)
    monkeypatch.setattr(gpu_ttft, "TOLD_S", 0.2)
    with pytest.raises(KVStoreError, match=r"cpu_hit, .* the store says: \{\}, .*'cpu': 512"):
        measure()


@pytest.mark.usefixtures("here")
def test_a_load_that_copies_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HostCopier.copy

    def copy(
        self: HostCopier, moves: Iterable[Move], slots: SlotMap, *, store: bool, after: int = 0
    ) -> Copying:
        return right(self, moves, slots, store=store, after=after) if store else Copying(1)

    monkeypatch.setattr(HostCopier, "copy", copy)
    with pytest.raises(KVStoreError, match=r"cpu_hit, prompt 1: 32 of 32 blocks are not as"):
        measure()


def test_another_token_or_block_is_an_error() -> None:
    first = Answer(3, (1, 2, 3), 0.1, {})
    gpu_ttft.same_answer("hit", msgspec.structs.replace(first, seconds=0.2), first)
    with pytest.raises(KVStoreError, match="hit: token 4, computed was 3"):
        gpu_ttft.same_answer("hit", msgspec.structs.replace(first, token=4), first)
    with pytest.raises(KVStoreError, match=r"hit: 1 of 3 blocks are .* the first is 2"):
        gpu_ttft.same_answer("hit", msgspec.structs.replace(first, fingerprint=(1, 2, 4)), first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(NotSupported, match="gpu-ttft needs a GPU that torch can use, torch is 2"):
        gpu_ttft.run(1)


def test_the_usual_shape_is_that_of_a_7b_model() -> None:
    shape = Shape()
    assert (shape.page_bytes, shape.block_bytes) == (64 << 10, 2 << 20)
    assert (shape.whole_tokens, shape.prompt_bytes) == (32 << 10, 4 << 30)


# The model


def computed(model: PagedModel, prompt: Prompt, table: list[int], cuts: list[int]) -> Tensor:
    tokens, blocks = model.upload(prompt.tokens), model.upload(table)
    for first, end in itertools.pairwise(cuts):
        found = model.forward(tokens[first:end], first, blocks)
    return found


def dense(model: PagedModel, prompt: Prompt) -> Tensor:
    """The same without pages, chunks or torch's attention, in single precision.

    On a GPU, too: tests/gpu/test_ttft.py.
    """
    shape, count = model.shape, len(prompt.tokens)

    def normal(of: Tensor) -> Tensor:
        return of * (of.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    hidden = model._embedding[model.upload(prompt.tokens)].float()
    hide = torch.ones(count, count, device=model.device).triu(1).bool()
    of = torch.arange(shape.query_heads) // (shape.query_heads // shape.kv_heads)
    heads = [shape.query_heads, shape.kv_heads, shape.kv_heads]
    for into, out in zip(model._into, model._out, strict=True):
        mixed = (normal(hidden) @ into.float()).view(count, -1, shape.head)
        query, key, value = torch.split(mixed, heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key[:, of]) / shape.head**0.5
        weights = scores.masked_fill(hide, float("-inf")).softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", weights, value[:, of]).reshape(count, -1)
        hidden = hidden + seen @ out.float()
    return normal(hidden[-1]) @ model._tokens.float()


@torch.no_grad()
def test_chunks_in_pages_give_what_the_whole_gives() -> None:
    model, prompt = PagedModel(TINY, 20, CPU), Prompt(TINY, 1)
    expected = dense(model, prompt)
    for cuts in ([0, 80, 81], [0, 32, 64, 80, 81], [0, 81], [0, 7, 50, 80, 81]):
        found = computed(model, prompt, [3, 9, 1, 17, 4, 8], cuts)
        assert found.dtype is DTYPE
        assert torch.allclose(found.float(), expected, atol=0.02), cuts


def test_where_its_blocks_are_changes_nothing_and_one_bit_does() -> None:
    model, prompt = PagedModel(TINY, 20, CPU), Prompt(TINY, 1)
    tables = [3, 9, 1, 17, 4, 8], [5, 6, 7, 10, 11, 12]
    logits = [computed(model, prompt, table, [0, 32, 64, 80, 81]) for table in tables]
    prints = [model.fingerprint(model.upload(table[:5])) for table in tables]
    assert torch.equal(*logits)
    assert torch.equal(*prints)
    model.pages[1].view(torch.int16)[10, 1, 15, 1, 15] ^= 1
    other = model.fingerprint(model.upload(tables[1][:5]))
    assert (other != prints[0]).tolist() == [False, False, False, True, False]
