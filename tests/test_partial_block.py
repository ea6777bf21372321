"""The partly filled last block of a prompt that is handed over, at both ends."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.engine_interface import Geometry
from connectors.kv_transfer_params import Remote, Transfer, parameters
from connectors.partial_block import is_partial_block, partial_block_of, query_for
from connectors.step_meta import pieces
from kvstore.core.errors import ProtocolError
from kvstore.core.layout import Move
from kvstore.core.types import Chain, GroupRule, make_key, window_rule
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.moves import listed
from tests.harness.prefill_rig import HANDED, WINDOW, finish, prefill, tail_hash
from tests.harness.script import BLOCK, ONE_GROUP, Request, Script

FULL, STATE = GroupRule(), GroupRule(1, exact=True)
PARTS = Geometry(BLOCK, 8, (8,), (FULL,))  # two engine blocks in a block
STATES = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (FULL, STATE))
REMOTE = Remote("10.0.0.7:9500", "p", tokens=40)


def given(tokens: int) -> dict[str, Any]:
    """Hand-over parameters of a prompt of which another engine has computed so many tokens."""
    return parameters(Transfer("engine"), "p", REMOTE.address, [[1, 2]], tokens, 1)


# Its name


def test_B17_a_tails_name_is_bound_to_request_parent_tokens_and_their_number() -> None:
    names = {
        partial_block_of(geometry, request, end, handed)
        for geometry, request, end, handed in (
            (ONE_GROUP, Request("d", 48), 40, "p"),
            (ONE_GROUP, Request("d", 48), 39, "p"),
            (ONE_GROUP, Request("d", 48), 40, "q"),
            (ONE_GROUP, Request("d", 48, "other"), 40, "p"),
        )
    }
    other = Request("d", 48)
    other.all_token_ids = [*range(39), 99, *range(40, 48)]
    names.add(partial_block_of(ONE_GROUP, other, 40, "p"))
    assert None not in names
    assert len({name.hash for name in names if name}) == 5
    longer = partial_block_of(ONE_GROUP, Request("another name", 50), 40, "p")
    assert longer in names, "what comes behind it does not matter"


def test_B17_a_tail_has_the_engines_width_and_is_known_as_one() -> None:
    for width in (16, 32):
        geometry = Geometry(BLOCK, BLOCK, (BLOCK,), (FULL,), width)
        tail = partial_block_of(geometry, Request("p", 5), 5, "p")
        assert tail is not None
        assert (tail.block, len(tail.hash), tail.end) == (0, width, 5)
        assert is_partial_block(tail.hash)
        assert is_partial_block(make_key(tail.hash, 3))
    assert not any(map(is_partial_block, Request("p", 4096).block_hashes))


def test_there_is_no_tail_behind_a_whole_block_or_behind_one_without_a_hash() -> None:
    request = Request("p", 40)
    assert partial_block_of(ONE_GROUP, request, 32, "p") is None
    request.block_hashes = request.block_hashes[:1]
    assert partial_block_of(ONE_GROUP, request, 40, "p") is None


# The engine that computed the prompt


def test_B17_the_tail_is_stored_below_the_last_whole_block_and_held_with_the_others() -> None:
    table = [[5, 6, 7]]
    script, request = prefill(40, table)
    tail = tail_hash(ONE_GROUP, request, 40)
    tokens, handing = finish(script, table)
    assert tokens == 40
    held = b"".join([*request.block_hashes, tail])
    assert handing == [p.HandedOver("p", "done", held, 32, b"", 30_000)]
    (job,) = script.step().early
    assert job.engine.block_ids == (7,)
    assert job.keys == (make_key(tail, 0),)
    assert job.parents == (script.key(request, 1),)


def test_B17_a_prompt_shorter_than_a_block_is_handed_over() -> None:
    script, request = prefill(5, [[9]])
    tokens, (handing,) = finish(script, [[9]])
    assert (tokens, handing.hashes) == (5, tail_hash(ONE_GROUP, request, 5))
    (job,) = script.step().early
    assert (job.engine.block_ids, job.parents) == ((9,), (b"",))


def test_B17_only_what_was_computed_counts() -> None:
    """The token that was sampled last has no KV yet, though a step under way may count it."""
    script, request = prefill(39, [[5, 6, 7]])
    request.num_computed_tokens = 41
    tokens, _ = finish(script, [[5, 6, 7]])
    assert tokens == 39


@pytest.mark.parametrize(("tokens", "parts"), [(36, 1), (40, 1), (41, 2), (47, 2)])
def test_O10_only_the_engine_blocks_of_a_tail_that_have_tokens_are_copied(
    tokens: int, parts: int
) -> None:
    table = [[1, 2, 3, 4, 5, 6]]
    script, _ = prefill(tokens, table, PARTS)
    slot = script.client.credits[0]
    assert finish(script, table)[0] == tokens
    (job,) = script.step().early
    moves = listed(pieces(job.engine, job.slots, (2,)))
    assert moves == [Move(0, 5 + part, slot, part) for part in range(parts)]


def test_a_tail_is_the_last_of_its_job() -> None:
    """Behind a block that lacks its end, others would land in the wrong place."""
    script = Script(PARTS)
    script.client.side_channel = "127.0.0.1:9500"
    script.half._hand_overs._transfer = Transfer("engine")
    requests = {name: Request(name, 20, name, 8) for name in ("p", "q")}
    for request in requests.values():
        script.half.on_new_request(request, HANDED)
        script.admit(request)
        script.step(request, 1, [[1, 2, 3, 4]])
    for name, request in requests.items():
        request.num_computed_tokens, request.num_tokens = 20, 21
        assert script.half.hand_over(name, [[1, 2, 3, 4]])
    script.half.request_finished("p", [[1, 2, 3, 4]])
    jobs = script.step().early
    assert [job.engine.group_sizes for job in jobs] == [(3,), (3,)]


@pytest.mark.parametrize("table", [[[1, 2, 3], [4, 5, 0]], [[1, 2, 3], [4, 5]]])
def test_O10_a_tail_of_which_a_part_is_missing_is_not_handed_over(table: list[list[int]]) -> None:
    script, request = prefill(40, [[1, 2, 3], [4, 5, 6]], WINDOW)
    tokens, (handing,) = finish(script, table)
    assert (tokens, handing.hashes) == (32, b"".join(request.block_hashes))
    assert not script.step().early


def test_O17_what_was_computed_before_a_reset_is_not_handed_over() -> None:
    script, _ = prefill(40, [[1, 2, 3]])
    script.half.reset_cache(b"epoch")
    assert finish(script, [[1, 2, 3]]) == (0, [p.HandedOver("p", "gone")])
    assert not script.step().early


def test_O13_the_fence_covers_a_tail() -> None:
    script, _ = prefill(40, [[1, 2, 3]])
    finish(script, [[1, 2, 3]])
    meta = script.step(written=[3])
    assert meta.flush == tuple(job.job_id for job in meta.early)
    assert script.step(written=[3]).flush == meta.flush
    script.half.on_output({meta.flush[0]: 1}, [], [])
    assert script.step(written=[3]).flush == ()


def test_O16_a_tail_is_no_event() -> None:
    script, request = prefill(40, [[1, 2, 3]])
    script.client.collect_events = True
    script.half.events.stored(request, 0, 2)
    tail = tail_hash(ONE_GROUP, request, 40)
    finish(script, [[1, 2, 3]])
    script.changed(added=[script.key(request, 0), make_key(tail, 0)])
    script.changed(removed=[make_key(tail, 0)])
    script.step()
    told = [(event.stored, event.hashes) for event in script.half.take_events()]
    assert told == [(True, [request.block_hashes[0]])]


# The engine that goes on with it


def decode(
    tokens: int,
    computed_there: int,
    geometry: Geometry = ONE_GROUP,
    present: tuple[list[int], ...] = (),
) -> tuple[Script, Request, p.Lookup]:
    """A request whose prompt was computed elsewhere is looked up; present: by group."""
    script, request = Script(geometry), Request("d", tokens, hash_tokens=geometry.hash_tokens)
    script.half.on_new_request(request, given(computed_there))
    (lookup,) = script.lookups()
    if present:
        script.answer(lookup.ask, *present, sources={"peer": len(present[0])})
    return script, request, lookup


def test_B6_all_tokens_of_a_prompt_are_announced_the_tail_included() -> None:
    script, request, lookup = decode(40, 40, present=([0, 1, 2],))
    assert lookup.hashes == b"".join([*request.block_hashes, tail_hash(ONE_GROUP, request, 40)])
    assert (lookup.peer, lookup.request, lookup.inside) == ("10.0.0.7:9500", "p", 8)
    assert script.matched(request) == (40, True)
    (job,) = script.load(request, [[1, 2, 3, 4]]).loads
    assert job.engine.block_ids == (1, 2, 3), "no lookahead block"
    assert job.slots == (0, 1, 2)
    usage = [(step.lookup_tokens, step.hit_tokens) for step in script.steps() if step.hit_tokens]
    assert usage == [(40, {"peer": 40})]


def test_B6_only_what_is_lacked_is_loaded_if_it_is_less_than_a_block() -> None:
    script, request, _ = decode(40, 40, present=([0, 1, 2],))
    assert script.matched(request, 32) == (8, True)
    (job,) = script.load(request, [[1, 2, 3]], computed=32).loads
    assert (job.engine.block_ids, job.engine.block_indices, job.slots) == ((3,), (2,), (2,))


def test_B6_a_token_that_is_computed_in_any_case_is_not_loaded_alone() -> None:
    script, request, _ = decode(33, 33, present=([0, 1, 2],))
    assert script.matched(request, 32) == (0, False)
    assert script.matched(request, 16) == (17, True)


@pytest.mark.parametrize(
    ("tokens", "present", "matched"), [(40, [0, 1], 32), (32, [0, 1], 32), (5, [0], 5)]
)
def test_B6_what_is_there_is_loaded(tokens: int, present: list[int], matched: int) -> None:
    """A prompt without its tail, one that ends with a block, one shorter than that."""
    script, request, lookup = decode(tokens, tokens, present=(present,))
    assert lookup.hashes.startswith(b"".join(request.block_hashes))
    assert (len(lookup.hashes) // 32, lookup.inside) == (-(-tokens // BLOCK), tokens % BLOCK)
    assert script.matched(request) == (matched, True)
    (job,) = script.load(request, [[4, 5, 6]]).loads
    assert job.engine.block_ids == (4, 5)[: len(present)]


def test_B6_parts_of_a_tail_that_have_no_tokens_are_not_filled() -> None:
    script, request, _ = decode(36, 36, PARTS, ([0, 1, 2],))
    (job,) = script.load(request, [[1, 2, 3, 4, 5, 6]]).loads
    assert job.engine.block_ids == (1, 2, 3, 4, 5)
    assert listed(pieces(job.engine, job.slots, (2,)))[-1] == Move(0, 5, 2, 0)


@pytest.mark.parametrize(("there", "asked"), [(0, 2), (32, 2), (38, 2), (41, 2), (39, 3), (40, 3)])
def test_a_tail_is_asked_for_where_it_is_of_this_prompt(there: int, asked: int) -> None:
    """Computed there: less than all but one token, or more than there are: another prompt."""
    _, _, lookup = decode(40, there)
    assert len(lookup.hashes) // 32 == asked
    assert lookup.inside == (there % BLOCK if asked == 3 else 0)


def test_B6_a_tail_is_no_block_of_the_request_which_is_stored_when_it_is_full() -> None:
    script, request, _ = decode(40, 40, present=([0, 1, 2],))
    script.load(request, [[1, 2, 3]])
    script.half.on_output({}, ["d"], [])
    script.half.update_state_after_alloc("d", (), 0)
    request.num_computed_tokens = 39
    assert script.step(request, 1, [[1, 2, 3]]).stores == ()
    request.num_tokens, request.block_hashes = 48, Request("d", 48).block_hashes
    (job,) = script.step(request, 8, [[1, 2, 3]]).stores
    assert (job.engine.block_ids, job.keys) == ((3,), (script.key(request, 2),))


def test_O7_a_tail_that_is_being_loaded_is_waited_for() -> None:
    script, request, _ = decode(5, 5, present=([0],))
    script.load(request, [[4]])
    twin = Request("e", 5)
    script.half.on_new_request(twin, given(5))
    script.answer(script.lookups()[0].ask, [0])
    assert script.matched(twin) == (None, False)


# Windows and states


def test_B4_a_window_loads_the_block_in_which_it_begins() -> None:
    """What the last token reaches: the engine would drop that block if it had all tokens."""
    script, request, _ = decode(72, 72, WINDOW, ([0, 1, 2, 3, 4], [2, 3, 4]))
    assert script.matched(request) == (71, True)
    (job,) = script.load(request, [[1, 2, 3, 4, 5], [0, 0, 6, 7, 8]]).loads
    assert job.engine.block_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert job.engine.block_indices == (0, 2)


def test_B4_a_window_that_lacks_its_first_block_ends_before_the_tail() -> None:
    script, request, _ = decode(72, 72, WINDOW, ([0, 1, 2, 3, 4], [0, 1, 3, 4]))
    assert script.matched(request) == (32, True)


def test_B4_a_window_of_a_prompt_that_ends_with_a_block() -> None:
    script, request, lookup = decode(64, 64, WINDOW, ([0, 1, 2, 3], [1, 2, 3]))
    assert (lookup.hashes, lookup.inside) == (b"".join(request.block_hashes), 15)
    assert script.matched(request) == (63, True)
    (job,) = script.load(request, [[1, 2, 3, 4], [0, 6, 7, 8]]).loads
    assert job.engine.block_ids == (1, 2, 3, 4, 6, 7, 8)


def test_B5_of_a_model_with_states_all_tokens_but_the_last_are_announced() -> None:
    script, request, lookup = decode(40, 39, STATES, ([0, 1, 2], [1, 2]))
    assert lookup.hashes[-32:] == tail_hash(STATES, request, 39)
    assert script.matched(request) == (39, True)
    (job,) = script.load(request, [[1, 2, 3], [0, 0, 9]]).loads
    assert job.engine.block_ids == (1, 2, 3, 9)
    assert job.slots == (0, 1, 2, 1002), "the last state and no other"


def test_B5_a_prompt_that_ends_with_a_block_ends_before_it() -> None:
    """Its last block has a hash, which names a state that is one token further."""
    script, request, lookup = decode(48, 47, STATES, ([0, 1, 2], [2]))
    assert lookup.hashes == b"".join([*request.block_hashes[:2], tail_hash(STATES, request, 47)])
    assert script.matched(request) == (47, True)


def test_B5_a_state_of_another_length_is_not_asked_for() -> None:
    """Nobody left out the last token there."""
    _, request, lookup = decode(40, 40, STATES)
    assert lookup.hashes == b"".join(request.block_hashes)


def test_B5_a_state_at_a_blocks_end_is_an_ordinary_one() -> None:
    script, request, lookup = decode(33, 32, STATES, ([0, 1], [1]))
    assert (lookup.hashes, lookup.inside) == (b"".join(request.block_hashes), 0)
    assert script.matched(request) == (32, True)


@pytest.mark.parametrize("geometry", [ONE_GROUP, WINDOW, STATES])
def test_B5_a_prompt_of_one_token_is_left_alone(geometry: Geometry) -> None:
    script, request = Script(geometry), Request("d", 1)
    script.half.on_new_request(request, given(1))
    assert script.lookups() == []
    assert script.matched(request) == (0, False)


def test_B5_the_last_state_is_handed_over_with_the_tail() -> None:
    script, request = prefill(39, [[1, 2, 3], [0, 8, 0]], STATES)
    tail = tail_hash(STATES, request, 39)
    assert finish(script, [[1, 2, 3], [0, 0, 9]])[0] == 39
    (job,) = script.step().early
    assert job.engine.block_ids == (3, 9)
    assert job.keys == (make_key(tail, 0), make_key(tail, 1))
    assert job.parents == (script.key(request, 1), b""), "a state hangs below nothing"


# What is asked, in general


@pytest.mark.parametrize("geometry", [ONE_GROUP, PARTS, WINDOW, STATES])
def test_a_question_fits_its_prompt_whatever_was_computed_elsewhere(geometry: Geometry) -> None:
    for tokens in range(1, 70):
        request = Request("d", tokens, hash_tokens=geometry.hash_tokens)
        ordinary = (tokens - 1) // BLOCK * BLOCK
        for there in range(tokens + 3):
            asked = query_for(geometry, request, REMOTE._replace(tokens=there))
            assert asked.own <= len(asked.hashes) <= asked.own + 1
            assert asked.blocks <= len(asked.hashes)
            assert ordinary <= asked.end <= geometry.loadable(tokens) or not asked.blocks
            assert asked.end <= asked.blocks * BLOCK < asked.end + BLOCK
            assert asked.inside == asked.end % BLOCK
            fits = there == tokens - 1 or (there == tokens and not geometry.exact)
            if fits and tokens > 1:
                assert asked.end == min(there, geometry.loadable(tokens))


@pytest.mark.parametrize(
    ("rule", "blocks", "indices"),
    [
        (FULL, 9, range(9)),
        (GroupRule(2), 9, range(6, 9)),  # one more: it may begin inside of that
        (STATE, 9, range(7, 9)),  # the one before, should the last one not be there
        (GroupRule(5), 4, range(4)),
        (STATE, 0, range(0)),
    ],
)
def test_B4_of_each_group_what_may_be_needed_is_asked_for(
    rule: GroupRule, blocks: int, indices: range
) -> None:
    assert list(m.clip(rule, blocks)) == list(indices)


def test_B4_a_wrong_number_of_groups_is_refused() -> None:
    want = m.Want(1, bytes(64), 32, (framing.u32([0, 1]),))
    assert m.wanted_of(want, 1) == [range(2)]
    with pytest.raises(ProtocolError, match="indices of 1 groups, this model has 2"):
        m.wanted_of(want, 2)


def test_B4_only_a_hit_of_all_blocks_ends_inside_of_one() -> None:
    chain, rule = Chain(bytes(5 * 32), 32, 1, inside=5), window_rule(2 * BLOCK, BLOCK)
    assert [chain.first_of(rule, blocks) for blocks in (5, 4, 1)] == [2, 2, 0]
    assert [chain.first_of(STATE, blocks) for blocks in (5, 4)] == [4, 3]
    assert [chain.first_of(FULL, blocks) for blocks in (5, 4)] == [0, 0]
