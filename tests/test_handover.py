"""Prompts handed over between reference engines: every byte that they read is compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors import pd_scheduler
from kvstore.handover import consumer, request_leases
from tests.harness.handover_rig import Node, node, prompt
from tests.harness.live import LiveStore, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.peers import inside
from tests.reference import Group, Shape

FULL = Shape((Group(4),), 8, 400, budget=24)
WINDOW = Shape((Group(4), Group(4, window=9)), 4, 800, budget=24)
PARTS = Shape((Group(4), Group(4, window=20)), 8, 800, budget=24)
STATE = Shape((Group(4), Group(8, state=True)), 8, 800, budget=24)
ALL = Shape((Group(8), Group(8, window=10), Group(8, state=True)), 8, 900, budget=24)
SHAPES = {"full": FULL, "window": WINDOW, "parts": PARTS, "state": STATE, "all": ALL}
LONGEST = 35


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveStore, LiveStore]]:
    """Two stores, which wait for each other however slow the machine is."""
    folder = tmp_path_factory.mktemp("handover")

    def store(name: str) -> LiveStore:
        cpu, waits = {"capacity": "256MiB", "extent": "8MiB"}, {"promote": "60s"}
        peer = {"landing": "4MiB"}
        return LiveStore(store_settings(folder / name, cpu=cpu, engine=waits, peer=peer))

    with pytest.MonkeyPatch.context() as patch, store("p") as prefill, store("d") as decode:
        for module, limit in (
            (consumer, "ANSWER_NS"),
            (consumer, "STALL_NS"),
            (request_leases, "LATE_NS"),
        ):
            patch.setattr(module, limit, int(WAIT_S * 1e9))
        yield prefill, decode


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


def given(shape: Shape, tokens: int) -> int:
    """How many tokens of a prompt an engine is given that has none of them."""
    least = 1 if len(shape.groups) > 1 or tokens == 1 else 0
    return tokens - least


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_B5_B6_B17_prompts_of_every_length_are_handed_over_to_their_last_token(
    stores: tuple[LiveStore, LiveStore], shape: Shape, push: bool
) -> None:
    prompts = {f"{n} {push}": prompt((n, push), n) for n in range(1, LONGEST)}
    with (
        node(stores[0], f"p{push}", shape) as prefill,
        node(stores[1], f"d{push}", shape, push=push) as decode,
    ):
        params = prefill.compute(prompts)
        loaded = decode.run(prompts, 12, params)
        seen = prefill.events(), decode.events()
    assert loaded == {name: given(shape, len(text)) for name, text in prompts.items()}, seen


def test_B10_B12_prompts_that_end_before_their_blocks_have_slots_are_handed_over_whole(
    stores: tuple[LiveStore, LiveStore], shape: Shape
) -> None:
    """Each takes a step or two, and all of them many times the slots that there are at a time."""
    prompts = {f"{n} late": prompt((n, "late"), 4 * n + 3) for n in range(1, 9)}
    few = 2 * len(shape.groups)
    with (
        node(stores[0], "p late", shape, slots=few) as prefill,
        node(stores[1], "d late", shape) as decode,
    ):
        params = prefill.compute(prompts)
        kept = prefill.engine.counts["delayed_frees"]
        assert prefill.engine.free_blocks == shape.blocks - 1
        loaded = decode.run(prompts, 12, params)
        seen = prefill.events(), decode.events()
    assert loaded == {name: given(shape, len(text)) for name, text in prompts.items()}, seen
    assert kept >= 4


def test_B4_B12_a_block_that_the_window_has_left_before_it_had_a_slot_is_not_waited_for(
    stores: tuple[LiveStore, LiveStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has slots only after the prompt's end; the engine has freed a block by then."""
    prompts = {"left": prompt("left", 31)}
    monkeypatch.setattr(pd_scheduler, "STORE_LIMIT_NS", int(WAIT_S * 1e9))
    with (
        node(stores[0], "p left", PARTS, slots=4) as prefill,
        node(stores[1], "d left", PARTS) as d,
    ):
        free, step = prefill.half._client.credits, prefill._step
        kept = [free.popleft() for _ in range(len(free))]

        def step_and_see() -> None:
            step()
            if prefill.half._hand_overs.has_unstored():
                free.extend(kept)
                kept.clear()

        monkeypatch.setattr(prefill, "_step", step_and_see)
        before = prefill.blocks()
        params = prefill.compute(prompts)
        # An idle engine does not wait for its copies.
        eventually(lambda: prefill.blocks() == [before[0] + 4, before[1] + 3])
        assert d.run(prompts, 12, params) == {"left": 30}


@pytest.mark.parametrize("name", ["full", "window", "parts"])
def test_O4_of_a_prompt_that_ends_with_a_block_all_before_that_comes(
    stores: tuple[LiveStore, LiveStore], name: str
) -> None:
    """The last block is never loaded: what its window needs is not what that before it needs."""
    shape = SHAPES[name]
    lengths = [blocks * shape.block_tokens for blocks in range(2, 9)]
    prompts = {f"{n} whole": prompt((n, "whole"), n) for n in lengths}
    with (
        node(stores[0], f"p {name} whole", shape) as prefill,
        node(stores[1], f"d {name} whole", shape) as decode,
    ):
        params = prefill.compute(prompts)
        unsaid = {key: {**(how or {}), "remote_num_tokens": None} for key, how in params.items()}
        loaded = decode.run(prompts, 3, unsaid)
        seen = prefill.events(), decode.events()
    assert list(loaded.values()) == [n - shape.block_tokens for n in lengths], seen


@pytest.fixture
def nodes(
    request: pytest.FixtureRequest, stores: tuple[LiveStore, LiveStore]
) -> Iterator[tuple[Node, Node]]:
    """Engines of the shape that has all kinds of groups."""
    name = request.node.name
    with node(stores[0], f"p {name}", ALL) as prefill, node(stores[1], f"d {name}", ALL) as decode:
        yield prefill, decode


def test_B4_windows_and_states_move_only_what_the_next_token_needs(
    nodes: tuple[Node, Node],
) -> None:
    prefill, decode = nodes
    prompts = {"b4": prompt("b4", 60)}
    params = prefill.compute(prompts)
    eventually(lambda: prefill.held("b4") == (11, 0))
    fetched, before = decode.fetched(), decode.blocks()
    assert decode.run(prompts, 1, params) == {"b4": 59}
    after = decode.blocks()
    # Tokens 0..58 are in blocks 0..7. The last token looks back to token 50, in block 6.
    assert [now - then for now, then in zip(after, before, strict=True)] == [8, 2, 1]
    assert decode.fetched() - fetched == 11


def test_B6_only_what_the_decode_node_lacks_moves(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    text, before = prompt("b6", 45), decode.blocks()[0]
    decode.run({"own": text[:33]}, 1, {})
    eventually(lambda: decode.blocks()[0] == before + 4)
    params = prefill.compute({"b6": text})
    decode.engine.book.tables.forget_all()  # the engine has nothing of it, its store has
    fetched = decode.fetched()
    assert decode.run({"b6": text}, 3, params) == {"b6": 44}
    assert decode.fetched() - fetched == 2 + 2 + 1  # blocks 4 and 5, and the last state


def test_B17_another_request_finds_no_tail(nodes: tuple[Node, Node]) -> None:
    """Neither here nor there, though it has the same tokens."""
    prefill, decode = nodes
    text = prompt("b17", 38)
    params = prefill.compute({"b17": text})
    assert decode.run({"b17": text}, 1, params) == {"b17": 37}
    other = {**(params["b17"] or {}), "remote_request_id": "other"}
    decode.engine.book.tables.forget_all()
    assert decode.run({"other": text}, 1, {"other": other}) == {"other": 32}
    for one in nodes:
        assert one.tails()
        one.engine.book.tables.forget_all()
        assert one.run({"again": text}, 1, {}) == {"again": 32}


def test_B6_a_tail_that_has_gone_leaves_the_whole_blocks(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    text, before = prompt("gone", 38), set(prefill.tails())
    params = prefill.compute({"gone": text})
    eventually(lambda: len(set(prefill.tails()) - before) == len(ALL.groups))
    eventually(prefill.has_ended)  # until then what is not there may still come
    manager, tails = prefill.namespace.manager, set(prefill.tails()) - before
    inside(prefill.store, lambda: [manager.drop(key, "test") for key in tails])
    assert decode.run({"gone": text}, 9, params) == {"gone": 32}
