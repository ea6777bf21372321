"""How long a hit is: prefix, trailing and common rule, also against brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
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


def test_O1_a_rule_that_needs_nothing_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"trailing|>= 1"):
        msgspec.convert({"trailing": 0}, GroupRule)


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


# Windows and states


@pytest.mark.parametrize(
    ("blocks", "need", "local", "answer"),
    [
        ("....HH..", 2, 0, Answer(6)),
        ("HH..H...", 2, 0, Answer(2)),
        ("HHHHHHHH", 2, 0, Answer(8)),
        (".H.H.H.H", 2, 0, Answer(0)),
        ("HH.H.HHH", 2, 0, Answer(8)),
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


TWO = GroupRule(2)
THREE_KINDS = (FULL, WINDOW, STATE)


@pytest.mark.parametrize(
    ("rules", "lines", "local", "inside", "answer"),
    [
        # Full says 9, the first window 8, the second 6, then the first 5, and now the second too.
        ((FULL, TWO, GroupRule(3)), "HHHHHHHHH. HHHHH.HH.. HHHHHH....", 0, 0, Answer(5)),
        # A miss in any group beats pending.
        ((FULL, TWO), "PPPP ....", 0, 0, Answer(0)),
        ((FULL, TWO, STATE), "HHHH PPPP ....", 0, 0, Answer(0)),
        ((FULL, TWO, STATE), "HHHH .... PPPP", 0, 0, Answer(0)),
        ((FULL, TWO, STATE), ".... PPPP PPPP", 0, 0, Answer(0)),
        # Another group rules out what a pending block could bring.
        (THREE_KINDS, "HHHH.... HHHHHHPP HHHHHHHH", 0, 0, Answer(4)),
        (THREE_KINDS, "HHHHHHHH HHHHHHPP HHHH....", 0, 0, Answer(4)),
        (THREE_KINDS, "HHHHHHHH HHHHHPPP HHHHHHH.", 0, 0, Answer(5, pending=True)),
        (THREE_KINDS, "HHHHHHHH HHHH.HPH HHHHH.H.", 0, 0, Answer(4, pending=True)),
        (THREE_KINDS, "HHHHHHHH HHHH.HPH HHHHH...", 0, 0, Answer(4)),
        # Nothing beyond what the engine has is no hit.
        ((FULL,), "HHH.", 3, 0, Answer(3)),
        ((FULL,), "HHHP", 4, 0, Answer(4)),
        ((FULL, TWO), "HHHH HH..", 2, 0, Answer(2)),
        # All agree on the tokens of a last block, or do without it.
        (THREE_KINDS, "HHHHH ..HHH ....H", 0, 4, Answer(5)),
        (THREE_KINDS, "HHHH. ..HHH ...HH", 0, 4, Answer(4)),
        (THREE_KINDS, "HHHHH .HHH. ...HH", 0, 4, Answer(4)),
        (THREE_KINDS, "HHHHH .HHHH ...H.", 0, 4, Answer(4)),
        (THREE_KINDS, "HHHHH ...HH ...HH", 0, 4, Answer(0)),
        (THREE_KINDS, "HHHHP ..HHH ....H", 0, 4, Answer(5, pending=True)),
    ],
)
def test_O3_O4_the_hit_is_the_longest_that_all_groups_can_serve(
    rules: Sequence[GroupRule], lines: str, local: int, inside: int, answer: Answer
) -> None:
    assert common(rules, *lines.split(), local=local, inside=inside) == answer


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
