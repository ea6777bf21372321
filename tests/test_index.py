"""The forest of present blocks: what a search costs, holes, and how they heal.

That its answers are those of a scan is shown by random histories, in test_index_machine.py.
"""

from __future__ import annotations

import math
from functools import cache
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.index import STRANDS_MAX, Entry, Index, State, Strand
from kvstore.core.types import BlockKey, Chain, Slot

WIDTH = 8


def add(index: Index, name: BlockKey, parent: Entry | None, state: State = State.READY) -> Entry:
    entry = Entry(name, parent, Slot(0))
    index.insert(entry)
    entry.state = state
    return entry


class Counting(dict[bytes, Entry]):
    """A table that knows how often it was asked."""

    asked = 0

    def get(self, name: bytes, default: Any = None) -> Any:  # noqa: ANN401 - the dict's own
        Counting.asked += 1
        return super().get(name, default)


@cache
def below(above: bytes, name: str) -> bytes:
    return blake2b(above + name.encode(), digest_size=WIDTH).digest()


def path_of(*parts: tuple[str, int]) -> Chain:
    """Return a prompt of so many blocks of this content, then of that; a hash names all above."""
    hashes = [b""]
    for name, length in parts:
        for _ in range(length):
            hashes.append(below(hashes[-1], name))
    return Chain(b"".join(hashes), WIDTH, 1)


def store(index: Index, chain: Chain) -> list[Entry]:
    """Look up, and add what is not here, as engines do."""
    here, _ = index.prefix(chain, 0, chain.blocks)
    above = index.get(chain.key(0, here - 1)) if here else None
    added: list[Entry] = []
    for number in range(here, chain.blocks):
        above = add(index, chain.key(0, number), above)
        added.append(above)
    return added


def count_probes(index: Index) -> None:
    index._tables = [Counting(table) for table in index._tables]
    Counting.asked = 0


def probes(index: Index, chain: Chain) -> tuple[int, int]:
    """Return how many blocks a search finds, and how often it asks for that."""
    count_probes(index)
    found, _ = index.prefix(chain, 0, chain.blocks)
    return found, Counting.asked


@pytest.mark.parametrize("ready", [1, 2, 1000, 2000, 3999, 4000])
def test_a_prompt_that_goes_on_where_the_stored_one_ends_is_found_in_three_probes(
    ready: int,
) -> None:
    index = Index()
    store(index, path_of(("a", ready)))
    assert probes(index, path_of(("a", 4000))) == (ready, min(3, 1 + ready, 4000 - ready + 2))


def test_nothing_is_found_in_one_probe_and_all_in_two() -> None:
    index = Index()
    assert probes(index, path_of(("a", 4000))) == (0, 1)
    store(index, path_of(("a", 4000)))
    assert probes(index, path_of(("a", 4000))) == (4000, 2)
    assert probes(index, path_of(("a", 3000))) == (3000, 2)
    assert probes(index, path_of(("a", 4000), ("x", 9))) == (4000, 3)


def test_a_head_that_many_share_is_found_in_three_probes_and_what_follows_it_in_four() -> None:
    index = Index()
    head = ("a", 500)
    tails = {"b": 300, "c": 200, "d": 100}
    for tail in tails.items():
        store(index, path_of(head, tail))
    assert probes(index, path_of(head, ("x", 500))) == (500, 3)
    for tail in tails.items():
        assert probes(index, path_of(head, tail, ("x", 200))) == (500 + tail[1], 4)


def test_a_search_follows_forks_below_forks() -> None:
    index = Index()
    above, middle = ("a", 100), ("b", 110)
    store(index, path_of(above, ("z", 500)))
    for name in "cde":
        store(index, path_of(above, middle, (name, 120)))
    assert probes(index, path_of(above, middle, ("x", 800))) == (210, 4)
    assert probes(index, path_of(above, middle, ("d", 120), ("x", 800))) == (330, 5)


@pytest.mark.parametrize("gone", [1, 100, 298])
def test_after_evictions_the_end_is_still_found_in_three_probes(gone: int) -> None:
    index = Index()
    for entry in store(index, path_of(("a", 300)))[: -gone - 1 : -1]:
        index.remove(entry)
    assert probes(index, path_of(("a", 4000))) == (300 - gone, 3)


def test_a_prompt_that_leaves_a_stored_one_at_a_new_place_is_bisected_and_at_an_old_one_not() -> (
    None
):
    index = Index()
    store(index, path_of(("a", 4000)))
    for place in (1234, 1, 3999, 2500):
        edited = path_of(("a", place), ("x", 4000 - place))
        found, asked = probes(index, edited)
        assert found == place
        assert asked <= math.log2(4000) + 5
        assert probes(index, edited) == (place, min(3, place + 1))


def test_a_fork_at_each_block_does_not_make_the_search_a_scan() -> None:
    index = Index()
    for length in range(1, 400):  # each leaves the one before it at its end but one
        store(index, path_of(("a", length), ("b", 1)))
    found, asked = probes(index, path_of(("a", 1000)))
    assert found == 399
    assert asked <= math.log2(1000) + 2 + 4 * STRANDS_MAX


@given(
    lengths=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=9),
    hints=st.lists(st.tuples(st.integers(-3, 40), st.integers(-3, 40)), min_size=1, max_size=20),
    kept=st.integers(0, 9),
    new=st.integers(0, 30),
)
def test_hints_that_are_wrong_in_any_way_cost_probes_only(
    lengths: list[tuple[str, int]], hints: list[tuple[int, int]], kept: int, new: int
) -> None:
    """Any block may be said to begin a strand, or be of another's, of any length and fork."""
    index = Index()
    for end in range(1, len(lengths) + 1):
        store(index, path_of(*lengths[:end]))
        store(index, path_of(*lengths[: end - 1], ("z", 2)))
    strands = []
    for blocks, fork in hints:
        strands.append(Strand())
        strands[-1].blocks, strands[-1].fork = blocks, fork
    for number, entry in enumerate(index):
        entry.strand = [*strands, None][number % (len(strands) + 1)]
    chain = path_of(*lengths[:kept], ("y", new))
    expected = next(
        (i for i in range(chain.blocks) if index.get(chain.key(0, i)) is None), chain.blocks
    )
    found, count = probes(index, chain)
    assert found == expected
    assert count <= math.log2(max(1, chain.blocks)) + 2 + 4 * STRANDS_MAX


def test_a_hole_is_gone_with_its_last_child() -> None:
    index = Index()
    entries = store(index, path_of(("a", 3)))
    other = add(index, path_of(("b", 3)).key(0, 2), entries[1])
    index.remove(entries[1])
    index.remove(entries[2])
    assert index.holes == 1
    index.remove(other)
    assert index.holes == 0


def test_a_hole_heals_when_the_block_is_there_again_and_its_path_is_walked() -> None:
    index = Index()
    entries = store(index, path_of(("a", 4)))
    index.remove(entries[1])
    again = add(index, path_of(("a", 9)).key(0, 1), entries[0])
    assert (index.holes, again.children) == (1, 0)
    assert index.run(path_of(("a", 4)), 0, 4).entries == [entries[0], again, entries[2], entries[3]]
    assert (index.holes, again.children, entries[2].parent) == (0, 1, again)
    assert entries[1].children == 0


def test_what_is_ready_does_not_hang_below_what_is_only_coming() -> None:
    """Else a search among what is ready, with no hole left, would find it beyond the gap."""
    index = Index()
    entries = store(index, path_of(("a", 3)))
    index.remove(entries[1])
    again = add(index, path_of(("a", 9)).key(0, 1), entries[0], State.COMING)
    assert index.run(path_of(("a", 3)), 0, 3).entries == [entries[0], again, entries[2]]
    assert (index.holes, again.children) == (1, 0)
    assert index.prefix(path_of(("a", 3)), 0, 3, coming=False)[0] == 1
    again.state = State.READY
    index.run(path_of(("a", 3)), 0, 3)
    assert (index.holes, again.children) == (0, 1)


@pytest.mark.parametrize("other", ["above", "nothing", "a longer path", "another path"])
def test_a_block_that_hangs_in_a_wrong_place_does_not_mislead_a_run(other: str) -> None:
    """Whoever stored it may have named another block as its parent."""
    index = Index()
    entries = store(index, path_of(("a", 3)))
    strange = store(index, path_of(("b", 6)))
    above = {
        "above": entries[1],
        "nothing": None,
        "a longer path": strange[5],
        "another path": strange[2],  # as long as it should be
    }[other]
    entries.append(add(index, path_of(("a", 9)).key(0, 3), above))
    assert index.run(path_of(("a", 4)), 0, 4).entries == entries


def test_the_same_bytes_cut_elsewhere_are_other_names() -> None:
    chain = path_of(("a", 3))
    names = chain.keys(0, 2)
    both = b"".join(names)
    cut = [BlockKey(both[: len(names[0]) - 1]), BlockKey(both[len(names[0]) - 1 :])]
    assert chain.starts_with(0, names)
    assert not chain.starts_with(0, cut)
    assert not chain.starts_with(0, [*chain.keys(0, 3), names[0]])


def test_a_run_asks_for_few_keys() -> None:
    index = Index()
    entries = store(index, path_of(("a", 1000)))
    count_probes(index)
    assert index.run(path_of(("a", 2000)), 0, 2000).entries == entries
    assert Counting.asked == 4
