"""Which engines share blocks: those, and only those, that read a page's bytes in the same way."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from kvstore.core.errors import NotSupported
from kvstore.core.layout import LayerGeometry, slot_layout
from kvstore.store import admin
from tests.engine.facts import IMPORTS_VLLM, with_weights
from tests.engine.views import HEAD_SIZE, HEADS, LAYERS, LAYOUTS, TOKENS, Engine
from tests.harness.fakes import hashes
from tests.harness.live import LiveEngine, LiveStore, eventually
from tests.harness.live import engine as live_engine
from tests.harness.patience import WAIT_S
from tests.harness.peers import address, config

pytestmark = IMPORTS_VLLM

HEADS_FIRST = ("LBHNC", "LHBNC", "BLHNC", "BHLNC")  # inside a page


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_weights(tmp_path / "model")


def content(seed: int = 0, heads: int = HEADS) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    shape = (LAYERS, heads, TOKENS, 2 * HEAD_SIZE)
    return torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=made).view(torch.bfloat16)


def engines(folder: Path, heads: int = HEADS) -> list[Engine]:
    """Every layout, kernel block and number of ranks that vLLM can combine."""
    found = []
    for layout, kernel, ranks in itertools.product(LAYOUTS, (TOKENS, TOKENS // 2), (1, 2, 4, 8)):
        # vLLM splits dense pages only.
        with contextlib.suppress(ValueError, AssertionError):
            found.append(Engine(folder, layout, kernel, ranks, heads=heads))
    assert len(found) > 24
    return found


@pytest.mark.parametrize("heads", [HEADS, 1])
def test_B3_engines_share_only_what_all_of_them_read_in_the_same_way(
    folder: Path, heads: int
) -> None:
    data = content(heads=heads)
    found = engines(folder, heads)
    slots = {}
    for engine in found:
        engine.fill(data, 1)
        slots[engine.name] = engine.stored(1)
    for one, other in itertools.product(found, repeat=2):
        if one.layout.digest != other.layout.digest:
            continue
        assert slots[one.name] == slots[other.name], f"{one.name} and {other.name} share"
        other.load(slots[one.name], 2)
        assert other.holds(data, 2), f"{other.name} reads what {one.name} wrote"
    by_bytes = defaultdict(set)
    for engine in found:
        by_bytes[slots[engine.name]].add(engine.layout.digest)
    assert len(by_bytes) > 1 or heads == 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B3_equal_engines_of_any_size_share(folder: Path, layout: str, ranks: int) -> None:
    """With heads outermost in a page its bytes are the same however many ranks hold them."""
    same = ("LBHNC", 1) if layout in HEADS_FIRST else (layout, ranks)
    one = Engine(folder, same[0], ranks=same[1], blocks=3)
    other = Engine(folder, layout, ranks=ranks, blocks=7)
    assert other.layout.digest == one.layout.digest
    assert other.layout.traits == one.layout.traits


def test_B3_one_head_left_on_each_rank_is_outermost_at_any_stride(folder: Path) -> None:
    """Only vLLM's logical order says where a dimension of one element is."""
    many = Engine(folder, "LBNHC", ranks=HEADS)
    assert many.layout.digest == Engine(folder, "LBHNC", ranks=1).layout.digest
    assert many.layout.digest != Engine(folder, "LBNHC", ranks=1).layout.digest


def test_B3_tokens_outside_of_heads_are_told_from_heads_outside_at_every_size(folder: Path) -> None:
    first, second = (r.geometry.groups[0].layers[0] for r in Engine(folder, "LBNHC", ranks=2).ranks)
    assert (first.head_major, first.heads_total, second.head_first) == (False, 2, 1)
    for ones, others in itertools.product((1, 2), repeat=2):
        one, other = Engine(folder, "LBNHC", ranks=ones), Engine(folder, "LBHNC", ranks=others)
        assert one.layout.digest != other.layout.digest


@pytest.mark.parametrize("ranks", [1, 2])
def test_B3_traits_name_the_order_and_the_kernel_block(folder: Path, ranks: int) -> None:
    traits = Engine(folder, "LBHNC", ranks=ranks).layout.traits
    assert traits["page order"] == "4 heads, 32 tokens, 64 bytes"
    assert (traits["kernel block"], traits["page content"]) == ("32", "K 16 V 16 bfloat16")
    traits = Engine(folder, "LBNHC", TOKENS // 2).layout.traits
    assert traits["page order"] == "2 kernel blocks, 16 tokens, 4 heads, 64 bytes"
    assert traits["kernel block"] == "16"


def test_B3_other_packing_of_the_same_sizes_is_another_namespace(folder: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

    plain = Engine(folder, "LBHNC").layout
    flash = Engine(folder, "LBHNC", backend=FlashAttentionBackend).layout
    assert flash == plain
    others = [
        Engine(folder, "LBHNC", backend=CPUAttentionBackend),
        Engine(folder, "LBHNC", dtype=torch.float16),
        Engine(folder, "LBHNC", head_size=24, head_size_v=8),
        Engine(folder, "LBHNC", state_content_bytes=64),
        Engine(folder, "LBHNC", num_head_slots=HEADS),
        Engine(folder, "LBHNC", heads=1, ranks=2, spec=MLAAttentionSpec, head_size=128),
        Engine(folder, "LBHNC", heads=1, spec=MLAAttentionSpec, head_size=128, cache_dtype_str="x"),
        Engine(folder, "LBHNC", dtype=torch.uint8, head_size=32, kv_quant_mode=KVQuantMode(1)),
        Engine(folder, "LBHNC", dtype=torch.uint8, head_size=32),
    ]
    digests = [plain.digest, *(engine.layout.digest for engine in others)]
    assert len(set(digests)) == len(digests)
    assert {engine.layout.slot_bytes for engine in others} == {plain.slot_bytes}


def test_B3_a_latent_is_the_same_on_every_rank(folder: Path) -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    digests = {
        Engine(folder, layout, heads=1, ranks=ranks, spec=MLAAttentionSpec).layout.digest
        for layout, ranks in itertools.product(("LBHNC", "LBNHC"), (1, 2, 4))
    }
    assert len(digests) == 1


def test_B3_packed_heads_are_kept_by_rank(folder: Path) -> None:
    """K and V as two planes: what vLLM calls heads there is not what ranks divide."""
    one, two = (
        Engine(folder, "LBHNC", ranks=ranks, num_head_slots=2, state_content_bytes=64)
        for ranks in (1, 2)
    )
    assert one.layout.digest != two.layout.digest
    first, second = (rank.geometry.groups[0].layers[0] for rank in two.ranks)
    assert (first.head_major, first.heads_total, second.head_first) == (False, 2, 1)


def test_B3_states_are_told_apart_by_shape_and_type() -> None:
    from types import SimpleNamespace

    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
    from vllm.v1.kv_cache_interface import MambaSpec

    from connectors.vllm_pages import layer_geometry

    layer = SimpleNamespace(get_attn_backend=lambda: Mamba2AttentionBackend)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2, rank=1),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
    )
    half, whole = torch.bfloat16, torch.float32

    def made(shapes: object, dtypes: object, **changes: object) -> LayerGeometry:
        spec = MambaSpec(block_size=TOKENS, shapes=shapes, dtypes=dtypes, **changes)
        blocks = torch.zeros(3, 1, 1, spec.page_size_bytes, dtype=torch.int8)
        return layer_geometry(config, "layer", spec, spec.page_size_bytes, blocks)

    forms = [
        made(((3, 8), (4, 4)), (half, whole)),
        made(((8, 3), (4, 4)), (half, whole)),
        made(((3, 8), (8, 4)), (half, half)),
    ]
    assert len({layer.form for layer in forms}) == 3
    assert len({layer.page_bytes for layer in forms}) == 1
    assert (forms[0].head_first, forms[0].heads_total, forms[0].head_major) == (1, 2, False)
    replicated = made(((3, 8), (4, 4)), (half, whole), tp_replicated=True)
    assert (replicated.heads_total, replicated.form) == (1, forms[0].form)


def test_B3_tensors_that_cannot_be_understood_are_refused() -> None:
    from connectors.vllm_pages import layer_geometry

    for tensor, text in (
        (torch.zeros(3, 64), r"shape \(3, 64\), expected 4 dimensions"),
        (torch.zeros(3, 2, 4, 6)[..., ::2], "content has stride 2, expected 1"),
    ):
        with pytest.raises(NotSupported, match=text):
            layer_geometry(None, "layer", None, 64, tensor)


# Real stores


def attached(store: LiveStore, engine: Engine) -> contextlib.AbstractContextManager[LiveEngine]:
    size, geometry = engine.layout.slot_bytes, engine.ranks[0].geometry
    return live_engine(store, engine.name, page_bytes=size, geometry=geometry)


def test_B3_what_one_layout_stored_another_does_not_find(folder: Path, tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "128MiB", "extent": "16MiB"}
    chain = hashes(6)
    first = Engine(folder, "LBHNC")
    others = [Engine(folder, layout) for layout in LAYOUTS]
    others += [Engine(folder, layout, TOKENS // 2) for layout in ("LBHNC", "LBNHC")]
    for made in (first, *others):
        made.fill(content(), 1)
    with LiveStore(config(tmp_path / "store", nvme=disk)) as store:
        with attached(store, first) as one:
            one.put(chain)
            eventually(lambda: len(one.ask(chain).hits))
        for other in others:
            with attached(store, other) as two:
                found = two.read(two.ask(chain))
                same = other.stored(1) == first.stored(1)
                assert len(found) == (6 if same else 0), other.name


def test_B3_a_hand_over_to_another_layout_is_refused_with_both_values(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = hashes(3)
    pairs = [
        (Engine(folder, "LBHNC"), Engine(folder, "LBNHC")),
        (Engine(folder, "LBNHC"), Engine(folder, "LBHNC")),
        (Engine(folder, "LBHNC"), Engine(folder, "LBHNC", TOKENS // 2)),
    ]
    for number, (one, other) in enumerate(pairs):
        caplog.clear()
        with (
            LiveStore(config(tmp_path / f"p{number}", engine={"promote": "1s"})) as prefill,
            LiveStore(config(tmp_path / f"d{number}", engine={"promote": "1s"})) as decode,
            attached(prefill, one) as giver,
            attached(decode, other) as taker,
        ):
            giver.put(chain)
            eventually(lambda: len(giver.ask(chain).hits))
            eventually(lambda: _refused(prefill, taker, chain))
        ours, theirs = one.layout.traits, other.layout.traits
        name = "page order"
        assert f"{name} is {theirs[name]}, expected {ours[name]}" in caplog.text
        if number == 2:
            assert "kernel block is 16, expected 32" in caplog.text


def _refused(prefill: LiveStore, taker: LiveEngine, chain: list[bytes]) -> float:
    assert not taker.ask(chain, peer=address(prefill), request="r").sources
    stats = admin.stats(f"unix://{prefill.path}", WAIT_S)
    events = [s for s in stats if s.name == "kvstore_side_channel_refused"]
    return sum(s.value for s in events if s.labels == {"reason": "refused"})


def test_B3_ranks_that_disagree_about_a_page_are_refused(folder: Path) -> None:
    from kvstore.core.errors import ConfigError

    one, other = (Engine(folder, layout, ranks=2) for layout in ("LBNHC", "LBHNC"))
    with pytest.raises(ConfigError, match=r"disagree about layer layer.0: .*tokens.*tokens"):
        slot_layout([one.ranks[0].geometry, other.ranks[1].geometry])
