"""How long a hit is: prefix, trailing and common rule, also against brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.lookup import Answer, Probe, common_hit, prefix_hit, trailing_hit
from kvstore.core.types import GroupRule, LookupResult, window_rule

FULL = GroupRule()
STATE = GroupRule(1, exact=True)
WINDOW = GroupRule(2, reach=5)  # of a third block, if less of the last one is used
LETTERS = {
    "H": LookupResult.HIT,
    "P": LookupResult.PENDING,
    "R": LookupResult.RETRY,
    ".": LookupResult.MISS,
}


def world(*groups: str) -> Probe:
    """Each group is a line of letters: hit, pending, retry, or a dot for a miss."""
    return lambda group, index: LETTERS[groups[group][index]]


def common(rules: Sequence[GroupRule], *groups: str, local: int = 0, inside: int = 0) -> Answer:
    return common_hit(rules, world(*groups), len(groups[0]), local, inside=inside)


# Kinds are data


@pytest.mark.parametrize(
    ("window", "block", "blocks"),
    [(1, 16, 1), (2, 16, 1), (17, 16, 1), (18, 16, 2), (128, 16, 8), (129, 16, 8), (130, 16, 9)],
)
def test_O1_a_window_needs_the_blocks_that_the_next_token_attends_to(
    window: int, block: int, blocks: int
) -> None:
    assert window_rule(window, block).trailing == blocks


def test_O1_a_rule_that_needs_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="trailing is 0"):
        GroupRule(0)


def test_O1_one_call_serves_full_window_and_state_groups() -> None:
    rules = [FULL, WINDOW, STATE]
    assert common(rules, "HHHHHHHH", "...HHH.H", ".....H.H") == Answer(6)


# Full attention


@pytest.mark.parametrize(
    ("blocks", "answer"),
    [
        ("", Answer(0)),
        ("....", Answer(0)),
        ("HHHH", Answer(4)),
        ("HH.H", Answer(2)),
        ("HHPH", Answer(4, pending=True)),
        ("HHRH.", Answer(4, pending=True)),
        ("HP.P", Answer(2, pending=True)),
        ("H.PP", Answer(1)),
        (".PPP", Answer(0)),
    ],
)
def test_O2_leading_blocks_count_until_the_first_definite_miss(blocks: str, answer: Answer) -> None:
    assert prefix_hit(world(blocks), 0, len(blocks)) == answer


def test_O2_the_scan_goes_on_behind_pending_blocks_and_ends_at_the_miss() -> None:
    asked: list[int] = []

    def probe(group: int, index: int) -> LookupResult:
        asked.append(index)
        return world("PPH.H")(group, index)

    prefix_hit(probe, 0, 5)
    assert asked == [0, 1, 2, 3]


# Windows and states


@pytest.mark.parametrize(
    ("blocks", "need", "local", "answer"),
    [
        ("....HH..", 2, 0, Answer(6)),
        ("HH..H...", 2, 0, Answer(2)),
        ("HHHHHHHH", 2, 0, Answer(8)),
        (".H.H.H.H", 2, 0, Answer(0)),
        ("H.......", 2, 0, Answer(1)),  # short, but reaches the first block
        ("...H....", 2, 3, Answer(4)),  # likewise behind what is computed already
        ("...H....", 2, 2, Answer(2)),
        ("HH......", 2, 3, Answer(3)),  # nothing beyond what is local
        ("HHHHH.P.", 2, 0, Answer(5, pending=True)),
        ("HH.P.HH.", 2, 0, Answer(7)),  # not looked at
        ("...PPP..", 2, 0, Answer(0, pending=True)),
        ("HHRHH", 3, 0, Answer(2, pending=True)),
    ],
)
def test_O3_the_last_long_enough_run_counts(
    blocks: str, need: int, local: int, answer: Answer
) -> None:
    assert trailing_hit(world(blocks), 0, len(blocks), need, local) == answer


# All groups together


def test_O4_groups_shrink_one_another_until_all_agree() -> None:
    rules = [FULL, GroupRule(2), GroupRule(3)]
    # Full says 9, the first window 8, the second 6, then the first 5, and now the second too.
    assert common(rules, "HHHHHHHHH.", "HHHHH.HH..", "HHHHHH....") == Answer(5)


def test_O4_the_order_of_the_groups_does_not_matter() -> None:
    assert common([GroupRule(2), FULL], "HHHHHH", "HHH...") == Answer(3)


@pytest.mark.parametrize(
    "groups",
    [
        ("PPPP", "...."),
        ("HHHH", "PPPP", "...."),
        ("HHHH", "....", "PPPP"),
        ("....", "PPPP", "PPPP"),
    ],
)
def test_O4_a_definite_miss_in_any_group_beats_pending(groups: tuple[str, ...]) -> None:
    rules = [FULL, GroupRule(2), STATE][: len(groups)]
    assert common(rules, *groups) == Answer(0)


def test_O4_all_groups_are_asked_even_when_one_is_pending() -> None:
    asked: set[int] = set()

    def probe(group: int, index: int) -> LookupResult:
        asked.add(group)
        return world("PPPP", "PPPP", "HHHH")(group, index)

    assert common_hit([FULL, GroupRule(2), STATE], probe, 4).pending
    assert asked == {0, 1, 2}


@pytest.mark.parametrize("rule", [FULL, GroupRule(2), STATE])
def test_O4_a_group_that_is_all_pending_makes_the_answer_ask_again_later(rule: GroupRule) -> None:
    assert common([FULL, rule], "HHHH", "PPPP").pending
    assert common([FULL, rule], "HHHH", ".PPP").pending == (rule.trailing is not None)


def test_O4_waiting_for_what_another_group_cannot_use_is_no_reason_to_wait() -> None:
    assert common([FULL, STATE], "H...", ".PPP") == Answer(0)
    assert common([FULL, GroupRule(2)], "HHHP", "HHH.") == Answer(3)


@pytest.mark.parametrize(
    ("line", "local", "answer"),
    [
        ("HHHHH.P.", 0, Answer(5)),  # it would be a window's only block
        ("HHHHH.PP", 0, Answer(5, pending=True)),
        ("HHHHHP..", 0, Answer(5, pending=True)),
        ("HHH.P.H.", 0, Answer(3)),
        ("P.......", 0, Answer(0, pending=True)),  # short, but reaches the first block
        ("...P....", 3, Answer(3, pending=True)),
        ("...P....", 2, Answer(2)),
        ("HHPH.RHH", 0, Answer(8)),  # a longer hit than the first one can become
    ],
)
def test_O3_a_pending_block_behind_a_gap_does_not_make_the_answer_wait(
    line: str, local: int, answer: Answer
) -> None:
    assert common([GroupRule(2)], line, local=local) == answer
    assert common([FULL, GroupRule(2)], "H" * 8, line, local=local) == answer


def test_O3_a_pending_block_that_another_group_rules_out_does_not_make_the_answer_wait() -> None:
    rules = [FULL, WINDOW, STATE]
    assert common(rules, "HHHH....", "HHHHHHPP", "HHHHHHHH") == Answer(4)
    assert common(rules, "HHHHHHHH", "HHHHHHPP", "HHHH....") == Answer(4)
    assert common(rules, "HHHHHHHH", "HHHHHPPP", "HHHHHHH.") == Answer(5, pending=True)
    assert common(rules, "HHHHHHHH", "HHHH.HPH", "HHHHH.H.") == Answer(4, pending=True)
    assert common(rules, "HHHHHHHH", "HHHH.HPH", "HHHHH...") == Answer(4)


def test_O4_nothing_beyond_what_the_engine_has_is_no_hit() -> None:
    assert common([FULL], "HHH.", local=3) == Answer(3)
    assert common([FULL], "HHHP", local=4) == Answer(4)
    assert common([FULL, GroupRule(2)], "HHHH", "HH..", local=2) == Answer(2)


# Hits that end inside of their last block


@pytest.mark.parametrize(
    ("rule", "line", "local", "blocks"),
    [
        (WINDOW, "...HHH", 0, 6),
        (WINDOW, "....HH", 0, 0),  # the window begins inside of a block that is missing
        (WINDOW, "..HHH.", 0, 5),  # one that ends with a block does not
        (WINDOW, "HH..HH", 0, 2),
        (WINDOW, "....HH", 4, 6),  # the engine has that block
        (WINDOW, "HH", 0, 2),  # it begins before the first token
        (STATE, ".....H", 0, 6),
        (STATE, "..H...", 0, 3),
    ],
)
def test_O3_a_window_that_begins_inside_of_a_block_needs_that_one_too(
    rule: GroupRule, line: str, local: int, blocks: int
) -> None:
    assert common([rule], line, local=local, inside=4) == Answer(blocks)


def test_O4_all_groups_agree_on_the_tokens_of_a_last_block_or_do_without_it() -> None:
    rules = [FULL, WINDOW, STATE]
    assert common(rules, "HHHHH", "..HHH", "....H", inside=4) == Answer(5)
    assert common(rules, "HHHH.", "..HHH", "...HH", inside=4) == Answer(4)
    assert common(rules, "HHHHH", ".HHH.", "...HH", inside=4) == Answer(4)
    assert common(rules, "HHHHH", ".HHHH", "...H.", inside=4) == Answer(4)
    assert common(rules, "HHHHH", "...HH", "...HH", inside=4) == Answer(0)
    assert common(rules, "HHHHP", "..HHH", "....H", inside=4) == Answer(5, pending=True)


@pytest.mark.parametrize("window", [1, 2, 9, 16, 17, 18, 20, 24, 25, 32, 33])
@pytest.mark.parametrize("block", [8, 16])
def test_O3_a_hit_needs_the_blocks_that_the_window_of_the_next_token_covers(
    window: int, block: int
) -> None:
    rule = window_rule(window, block)
    for tokens in range(1, 10 * block):
        first = max(0, min(tokens - window + 1, tokens - 1)) // block
        assert rule.first_of(-(-tokens // block), inside=tokens % block) == first, tokens


# Against brute force


def longest(good: Callable[[int], bool], local: int, limit: int) -> int:
    return max((blocks for blocks in range(local + 1, limit + 1) if good(blocks)), default=local)


def serves(
    rule: GroupRule, line: str, blocks: int, local: int, *, hopeful: bool, inside: int = 0
) -> bool:
    """Tell whether a group has what a hit of `blocks` blocks needs, by the contract's words.

    inside: tokens that it uses of the last one.
    """
    if rule.trailing is None:
        return "." not in line[:blocks]
    more = 1 if inside and inside < rule.reach else 0
    needed = line[max(local, blocks - rule.trailing - more) : blocks]
    return "." not in needed if hopeful else set(needed) <= {"H"}


LINE = st.text("HHHPR.", min_size=8, max_size=8)
GAPS = st.text("HHPR..", min_size=8, max_size=8)
RULE = st.one_of(
    st.builds(GroupRule, st.none()),
    st.builds(GroupRule, st.integers(1, 5), st.integers(0, 8)),
    st.just(STATE),
)


@given(LINE, st.integers(0, 8))
def test_O2_prefix_hit_agrees_with_brute_force(line: str, limit: int) -> None:
    blocks = longest(lambda n: serves(FULL, line, n, 0, hopeful=True), 0, limit)
    assert prefix_hit(world(line), 0, limit) == Answer(
        blocks, pending=bool(set(line[:blocks]) & set("PR"))
    )


@given(LINE, st.integers(0, 8), st.integers(1, 5), st.integers(0, 8))
def test_O3_trailing_hit_agrees_with_brute_force(
    line: str, limit: int, need: int, local: int
) -> None:
    rule = GroupRule(need)
    blocks = longest(lambda n: serves(rule, line, n, local, hopeful=False), local, limit)
    answer = trailing_hit(world(line), 0, limit, need, local)
    assert answer.blocks == blocks
    longer = longest(lambda n: serves(rule, line, n, local, hopeful=True), local, limit)
    if longer > blocks:
        assert answer.pending
    if not set(line) & set("PR"):
        assert not answer.pending


@given(
    st.lists(st.tuples(RULE, LINE | GAPS), min_size=1, max_size=4),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 7),
)
def test_O3_an_answer_waits_only_where_a_pending_block_could_change_it(
    groups: list[tuple[GroupRule, str]], limit: int, local: int, inside: int
) -> None:
    rules, limit = [rule for rule, _ in groups], max(limit, local)

    def ends(as_letter: str) -> Answer:
        lines = [line.replace("P", as_letter).replace("R", as_letter) for _, line in groups]
        return common_hit(rules, world(*lines), limit, local, inside=inside)

    answer = common_hit(rules, world(*(line for _, line in groups)), limit, local, inside=inside)
    failed, came = ends("."), ends("H")
    assert not failed.pending
    assert not came.pending
    assert answer.pending == (failed.blocks != came.blocks)
    if not answer.pending:
        assert answer.blocks == came.blocks
    assert failed.blocks <= answer.blocks <= came.blocks


@given(
    st.lists(st.tuples(RULE, LINE), min_size=1, max_size=4),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 7),
)
def test_O4_common_hit_agrees_with_brute_force(
    groups: list[tuple[GroupRule, str]], limit: int, local: int, inside: int
) -> None:
    rules, lines = [rule for rule, _ in groups], [line for _, line in groups]
    limit = max(limit, local)

    def all_serve(blocks: int, *, hopeful: bool) -> bool:
        used = inside if blocks == limit else 0
        return all(
            serves(rule, line, blocks, local, hopeful=hopeful, inside=used) for rule, line in groups
        )

    now = longest(lambda n: all_serve(n, hopeful=False), local, limit)
    later = longest(lambda n: all_serve(n, hopeful=True), local, limit)
    probe = world(*lines)
    answer = common_hit(rules, probe, limit, local, inside=inside)
    assert answer.blocks == now
    full = [line[:now] for rule, line in groups if rule.trailing is None]
    counted = now > local and any(set(line) & set("PR") for line in full)
    assert answer.pending == (later > now or counted)
    quick = partial(prefix_hit, probe)
    faster = common_hit(rules, probe, limit, local, quick, inside=inside)
    assert faster == answer
