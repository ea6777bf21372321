"""The manager's ways to an answer against a scan: one full group is not looked up as many are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.lookup import common_hit
from kvstore.core.types import Chain, GroupRule, LookupResult
from tests.harness.fakes import Lower
from tests.test_manager import Rig, chain

RULE = st.builds(GroupRule, st.none() | st.integers(1, 2), st.integers(0, 8), st.booleans())
RULES = st.lists(RULE, min_size=1, max_size=2)
LOWER = st.lists(st.sampled_from(list(LookupResult)), min_size=6, max_size=6)


def stored(rig: Rig, blocks: Chain, group: int, states: str) -> None:
    """H: here; P: being written; C: coming; the states of leading blocks, in this order."""
    for index, state in enumerate(states):
        if state == "C":
            (slot,) = rig.grant()
            parent = blocks.key(group, index - 1) if index else None
            assert rig.promote(blocks.key(group, index), parent, slot)
            continue
        slot = rig.begin(blocks, index, group)
        if state == "H":
            rig.manager.complete_store(slot, ok=True)


@given(
    rules=RULES,
    states=st.lists(st.from_regex("H{0,4}C{0,2}P{0,2}", fullmatch=True), min_size=2, max_size=2),
    lower=st.none() | LOWER,
    limit=st.integers(0, 7),
    local=st.integers(0, 6),
    coming=st.booleans(),
    inside=st.integers(0, 7),
)
def test_O4_a_lookup_answers_what_a_scan_of_all_groups_answers(
    rules: list[GroupRule],
    states: list[str],
    lower: list[LookupResult] | None,
    limit: int,
    local: int,
    *,
    coming: bool,
    inside: int,
) -> None:
    rig, blocks = Rig(20, rules), chain(6, groups=len(rules))
    blocks.inside = inside
    for group in range(len(rules)):
        stored(rig, blocks, group, states[group][:6])

    def below(group: int, index: int) -> LookupResult:
        return lower[index - group] if lower else LookupResult.MISS

    def probe(group: int, index: int) -> LookupResult:
        result = rig.manager.index.probe(blocks.key(group, index), coming=coming)
        return below(group, index) if result is LookupResult.MISS else result

    used = inside if limit >= 6 else 0
    expected = common_hit(rules, probe, min(limit, 6), local, inside=used)
    answer = rig.manager.lookup(
        blocks, limit, local, Lower(below) if lower is not None else None, coming=coming
    )
    assert answer == expected
