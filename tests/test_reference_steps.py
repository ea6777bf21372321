"""The reference engine's failed loads, statistics, resets, steps ahead: by rows of contract E."""

from __future__ import annotations

import random

import pytest

from connectors.events import BlockEvent
from connectors.step_meta import StepMeta
from tests.harness.reference_rig import FULL, Rig, but, loading
from tests.reference import Group, Shape, State, WorkerResults

# Failed loads


def test_E4_a_failed_request_frees_its_blocks_and_is_looked_up_afresh() -> None:
    rig = loading(FULL, (0, False))
    rig.load_over("a", failed=True)
    rig.step(expect={})
    assert rig.script.outputs[-1] == (["a"], {"a"})
    rig.step(expect={"a": 17})
    assert rig.script.asked == [("a", 0), ("a", 0)]
    rig.run()
    assert rig.all_free


def test_E4_failed_blocks_are_remembered_over_several_reports() -> None:
    rig = Rig()
    request = rig.add("a", 33, 1, (32, True))
    rig.step()
    rig.fill()
    blocks = list(request.table[0])
    rig.report(WorkerResults(invalid={blocks[6]}))
    rig.step(expect={})
    rig.report(WorkerResults(invalid={blocks[3], blocks[5]}))
    rig.step(expect={})
    rig.report(WorkerResults(invalid={blocks[4]}))
    rig.step(expect={})
    assert request.state is State.LOADING
    rig.load_over("a")
    rig.step(expect={})
    output = rig.output(expect={"a": 21})  # from the first bad block on
    assert rig.script.asked == [("a", 0)]
    assert output.hits.external == 12
    rig.run()


def test_E4_one_rank_that_fails_is_enough() -> None:
    rig = loading(but(world=2), (0, False))
    rig.report(WorkerResults({"a"}, {"a"}), 1)
    rig.step()
    rig.report(WorkerResults({"a"}), 0)
    rig.step(expect={})
    assert rig.script.outputs[-1] == (["a"], {"a"})
    rig.step(expect={"a": 17})


def sync_load(rig: Rig, *bad: int) -> None:
    """Fill the last load that was planned while its step runs, but for these blocks."""
    side, results = rig.sides[0], rig.sides[0].next

    def start_loads(meta: StepMeta) -> None:  # noqa: ARG001 - the engine decides
        if rig.script.loads and side.next is results:
            rig.fill()
            table = rig.script.loads[-1][3][0]
            for index in bad:
                at = table[index] * rig.shape.page_bytes
                rig.ranks[0].memory[at] ^= 1
            side.next = WorkerResults(invalid={table[index] for index in bad})

    side.start_loads = start_loads


def test_E4_a_synchronous_load_is_used_in_its_own_step() -> None:
    rig = Rig()
    rig.add("a", 20, 2, (16, False))
    sync_load(rig)
    output = rig.output(expect={"a": 4})
    assert output.hits.external == 16
    assert len(rig.tokens["a"]) == 1


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_E4_after_a_failed_synchronous_load_the_output_is_skipped(bad: int) -> None:
    rig = Rig()
    rig.add("a", 20, 2, (16, False))
    sync_load(rig, bad)
    output = rig.output(expect={"a": 4})
    assert rig.tokens["a"] == []
    assert rig.running == ["a"]
    assert output.hits.external == 4 * bad  # what was lost is no hit
    rig.sides[0].start_loads = lambda meta: None  # noqa: ARG005
    rig.step(expect={"a": 20 - 4 * bad})
    rig.run()
    twin = Rig()
    twin.add("a", 20, 2)
    twin.run()
    assert rig.tokens["a"] == twin.tokens["a"]


def test_E4_a_shared_bad_block_is_computed_again_by_the_first_only() -> None:
    rig = Rig()
    prompt = list(range(16))
    rig.add("a", [*prompt, 20], 2, (16, False))
    rig.add("b", [*prompt, 30, 31], 2)
    sync_load(rig, 1)
    rig.step(expect={"a": 1, "b": 2})
    assert rig.tokens == {"a": [], "b": []}
    rig.sides[0].start_loads = lambda meta: None  # noqa: ARG005
    rig.step(expect={"a": 13, "b": 2})
    assert [len(tokens) for tokens in rig.tokens.values()] == [1, 1]


# Statistics, events, resets


def test_E8_hits_are_counted_when_a_request_starts_running() -> None:
    rig = Rig()
    rig.add("a", 17, 1, (16, True))
    first = rig.output()
    rig.fill()
    rig.load_over("a")
    second, third = rig.output(), rig.output()
    assert (first.hits.asked, second.hits.asked) == (0, 0)
    assert (third.hits.asked, third.hits.external) == (17, 16)
    assert third.hits.sources == {"cpu": 16}


def test_E8_statistics_of_both_sides_are_one() -> None:
    rig = Rig(but(world=2))
    rig.add("a", 8, 3)
    rig.script.stats.update(deferred=1, shared=1)
    rig.report(WorkerResults(stats={"bytes": 3, "shared": 1}), 0)
    rig.report(WorkerResults(stats={"bytes": 4}), 1)
    output = rig.output()
    assert output.connector == {"deferred": 1, "shared": 2, "bytes": 7}
    following = rig.output()
    assert not following.connector


def test_E8_events_of_engine_and_connector_go_out_together() -> None:
    rig = Rig()
    request = rig.add("a", 9, 1)
    there = BlockEvent("memory", stored=True, group=0, hashes=[b"there"])
    rig.script.events = [there]
    output = rig.output()
    own = [(True, request.hash_at(4), 0), (True, request.hash_at(8), 0)]
    assert output.events == [*own, there]
    rig.engine.reset(1, b"n")
    rig.add("b", 4, 1)
    output = rig.output()
    assert [event[0] for event in output.events] == [False, False, True]


@pytest.mark.parametrize("by_priority", [False, True])
def test_E8_a_reset_preempts_all_and_keeps_their_order(by_priority: bool) -> None:
    rig = Rig(but(by_priority=by_priority))
    for name in "abc":
        rig.add(name, 9, 5)
    rig.step()
    rig.engine.reset(7, b"nonce")
    assert rig.waiting == ["a", "b", "c"]
    assert rig.script.resets == [b"nonce"]
    assert rig.all_free
    rig.step(expect={"a": 10, "b": 10, "c": 10})
    rig.run()


def test_E8_a_reset_drops_placeholders_and_what_is_under_way() -> None:
    rig = Rig(but(batches=2))
    request = rig.add("a", 9, 6)
    rig.step()
    rig.step()
    assert request.placeholders
    known = list(rig.tokens["a"])
    rig.engine.reset(7, b"nonce")
    assert (request.placeholders, request.num_tokens) == (0, 9 + len(known))
    rig.run()
    twin = Rig()
    twin.engine.reset(7, b"nonce")
    twin.add("a", [*request.text.tokens[: 9 + len(known)]], 6 - len(known))
    twin.run()
    assert rig.tokens["a"] == known + twin.tokens["a"]


def test_E8_a_reset_while_a_load_holds_blocks_is_an_error() -> None:
    rig = loading()
    with pytest.raises(RuntimeError, match="4 engine blocks"):
        rig.engine.reset(7, b"nonce")
    assert not rig.script.resets
    rig.fill()
    rig.load_over("a")
    rig.run()


# Steps ahead


@pytest.mark.parametrize("new", [1, 2, 5])
@pytest.mark.parametrize("drafts", [0, 2])
def test_E9_no_step_is_made_past_the_last_token(new: int, drafts: int) -> None:
    rig = Rig(but(batches=2, drafts=drafts), accepted=0.0)
    rig.add("a", 9, new)
    rig.run()
    assert len(rig.tokens["a"]) == new
    scheduled = [dict(step.scheduled) for step in rig.script.steps]
    assert [step for step in scheduled if step] == [{"a": 9}] + [{"a": 1 + drafts}] * (new - 1)


def test_E9_a_step_is_scheduled_before_the_last_ones_tokens_are_known() -> None:
    rig = Rig(but(batches=2))
    request = rig.add("a", 9, 6)
    assert rig.step(expect={"a": 9}) is None
    assert (request.num_tokens, request.num_computed_tokens, request.placeholders) == (9, 9, 1)
    rig.step(expect={"a": 1})
    assert (request.num_tokens, request.num_computed_tokens, request.placeholders) == (10, 10, 1)


def test_E9_a_rejected_draft_takes_progress_and_placeholders_back() -> None:
    rig = Rig(but(batches=2, drafts=2), accepted=0.0)
    request = rig.add("a", 9, 9)
    rig.step(expect={"a": 9})
    rig.step(expect={"a": 3})
    assert (request.num_computed_tokens, request.placeholders) == (12, 3)
    rig.step(expect={"a": 3})
    assert (request.num_computed_tokens, request.placeholders) == (13, 3)  # two came back


def test_E9_blocks_of_drafts_are_offered_only_when_they_are_accepted() -> None:
    """What the prefix cache and the connector may name ends at the tokens that are known."""
    rig = Rig(but(drafts=3), accepted=0.0)
    request = rig.add("a", 4, 6)
    rig.step()
    rig.step(expect={"a": 4})  # tokens 4..7, of which one is right
    assert (request.num_tokens, request.num_computed_tokens) == (6, 5)
    assert len(request.block_hashes) == 1
    assert len(rig.engine.book.tables.pool.cached) == 1


@pytest.mark.parametrize("seed", range(60))
def test_E9_whatever_the_engine_the_tokens_are_the_same(seed: int) -> None:
    """Every read is checked on the way: sharing, preemption, windows, states, drafts, steps."""
    rng = random.Random(seed)
    windows = ((Group(4),), (Group(4), Group(4, window=6)), (Group(8), Group(4, window=10)))
    groups = rng.choice((*windows, (Group(4), Group(8, state=True))))
    state = groups[-1].state
    shape = Shape(
        groups=groups,
        block_tokens=8,
        blocks=18 * len(groups),
        world=rng.choice((1, 2)),
        budget=rng.choice((8, 20, 100)),
        running_max=rng.choice((2, 5)),
        lookahead=rng.choice((0, 3)),
        batches=rng.choice((1, 2, 3)),
        drafts=0 if state else rng.choice((0, 2)),
        by_priority=rng.random() < 0.5,
        prefix_cache=state or rng.random() < 0.7,
        defer_frees=rng.random() < 0.5,
        reuse_newest=rng.random() < 0.5,
    )
    rig, twin = Rig(shape, accepted=0.5, seed=seed), Rig(but(blocks=999, prefix_cache=False))
    common = [rng.randrange(50) for _ in range(30)]
    for number in range(8):
        prompt = common[: rng.randrange(30)] + [rng.randrange(50) for _ in range(5)]
        new, priority = rng.randrange(1, 15), rng.randrange(3)
        rig.add(f"r{number}", prompt, new, priority=priority)
        twin.add(f"r{number}", prompt, new)
        for _ in range(rng.randrange(4)):
            rig.step()
    rig.run(500)
    twin.run()
    assert rig.tokens == twin.tokens
    assert rig.all_free
    assert all(rank.reads for rank in rig.ranks)


def test_E9_blocks_that_a_step_may_still_write_are_freed_after_it() -> None:
    rig = Rig(but(batches=2, defer_frees=True))
    rig.add("a", 9, 9)
    rig.step()
    rig.step()
    rig.engine.abort("a")
    assert not rig.all_free
    rig.step()
    assert rig.all_free
    now = Rig(but(batches=2))
    now.add("a", 9, 9)
    now.step()
    now.engine.abort("a")
    assert now.all_free


@pytest.mark.parametrize("lookahead", [0, 3, 5])
def test_E10_lookahead_tokens_get_blocks(lookahead: int) -> None:
    rig = Rig(but(lookahead=lookahead))
    request = rig.add("a", 8, 3)
    rig.step()
    assert len(request.table[0]) == -(-(8 + lookahead) // 4)
    rig.run()
    assert rig.all_free
