"""The index and the order of eviction against models that walk everything."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.core.eviction import LeafLRU
from kvstore.core.index import Entry, Index, State, Strand
from kvstore.core.types import BlockKey, Chain, LookupResult, Slot

WIDTH = 8
DEEPEST = 5
PATHS = st.text("ab", min_size=1, max_size=DEEPEST)
FULL = [f"{number:0{DEEPEST}b}".translate({48: "a", 49: "b"}) for number in range(1 << DEEPEST)]


def key(name: str) -> BlockKey:
    return chain(name).key(0, len(name) - 1)


def chain(name: str) -> Chain:
    return Chain(b"".join(name[: i + 1].ljust(WIDTH).encode() for i in range(len(name))), WIDTH, 1)


class Naive:
    """What a block is, and when it or anything below it was last used."""

    def __init__(self, state: State, used: int) -> None:
        self.state = state
        self.used = used
        self.pins = 0


class IndexMachine(RuleBasedStateMachine):
    """One full-attention group; a block's name is its path, one letter per block."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.order = LeafLRU()
        self.model: dict[str, Naive] = {}
        self.now = 0
        self.drops = True
        self.exact = True  # a drop of a block with a sibling leaves its parent's place a guess

    def entry(self, name: str) -> Entry:
        found = self.index.get(key(name))
        assert found is not None
        return found

    def linked(self, name: str) -> bool:
        """Tell whether no block above was dropped, or dropped and stored again."""
        entry = self.entry(name)
        return len(name) == 1 or entry.parent is self.index.get(key(name[:-1]))

    def children(self, name: str) -> list[str]:
        below = [n for n in self.model if n[:-1] == name]
        return [n for n in below if self.linked(n)]

    def touch(self, name: str) -> None:
        self.now += 1
        for end in range(1, len(name) + 1):
            if name[:end] in self.model:
                self.model[name[:end]].used = self.now
        self.order.touch(self.entry(name))

    def can_go(self) -> list[str]:
        return [
            name
            for name, found in self.model.items()
            if found.state is State.READY and not found.pins and not self.children(name)
        ]

    # Steps

    @initialize(drops=st.booleans())
    def start(self, *, drops: bool) -> None:
        self.drops = drops

    @rule(name=PATHS, state=st.sampled_from([State.WRITING, State.COMING, State.READY]))
    def enter(self, name: str, state: State) -> None:
        """Begin a store, begin a promotion, or store all at once."""
        above = self.index.get(key(name[:-1])) if name[:-1] else None
        if name in self.model or (name[:-1] and above is None):
            return
        allowed = {
            State.WRITING: list(State),
            State.COMING: [State.COMING, State.READY],
            State.READY: [State.READY],
        }
        if above is not None and above.state not in allowed[state]:
            return
        self.index.insert(Entry(key(name), above, Slot(0), state))
        self.model[name] = Naive(state, self.now)
        if state is State.READY:
            self.touch(name)

    @rule(name=PATHS)
    def store(self, name: str) -> None:
        """Store a whole path, so that trees get deep."""
        for end in range(1, len(name) + 1):
            self.enter(name[:end], State.READY)

    @rule(name=PATHS, ok=st.booleans())
    def end_write(self, name: str, *, ok: bool) -> None:
        found = self.model.get(name)
        if found is None or found.state is State.READY:
            return
        entry, above = self.entry(name), name[:-1]
        ready = not above or (self.linked(name) and self.model[above].state is State.READY)
        if ok and ready:
            entry.state = found.state = State.READY
            self.touch(name)
        else:
            self.exact = self.exact and not self.children(name)
            self.index.remove(entry)
            del self.model[name]
            self.order.freed(entry.parent)

    @rule(name=PATHS)
    def use(self, name: str) -> None:
        if name in self.model and self.model[name].state is State.READY:
            self.touch(name)

    @rule(name=PATHS)
    def pin(self, name: str) -> None:
        """As a manager does."""
        if name in self.model and self.model[name].state is State.READY:
            entry = self.entry(name)
            entry.pins += 1
            self.model[name].pins += 1
            if not entry.children:
                self.order.remove(entry)

    @rule(name=PATHS)
    def unpin(self, name: str) -> None:
        if name in self.model and self.model[name].pins:
            entry = self.entry(name)
            entry.pins -= 1
            self.model[name].pins -= 1
            if not entry.pins and not entry.children:
                self.touch(name)

    @rule(name=PATHS)
    def drop(self, name: str) -> None:
        found = self.model.get(name)
        if not self.drops or found is None or found.state is not State.READY or found.pins:
            return
        self.exact = False
        entry = self.entry(name)
        self.order.inherit(entry)
        self.index.remove(entry)
        del self.model[name]
        self.order.freed(entry.parent)

    @rule(name=PATHS, of=st.none() | PATHS, blocks=st.integers(-2, 8), fork=st.integers(-2, 8))
    def mislead(self, name: str, of: str | None, blocks: int, fork: int) -> None:
        """Give a block a wrong hint, or another block's."""
        if name in self.model and of in self.model:
            self.entry(name).strand = self.entry(of).strand
        elif name in self.model:
            strand = self.entry(name).strand = None if of else Strand()
            if strand is not None:
                strand.blocks, strand.fork = blocks, fork

    @rule(name=st.sampled_from(FULL))
    def walk(self, name: str) -> None:
        """What a lease does: holes on its way are closed, but above what is ready only by that."""
        found = self.index.run(chain(name), 0, DEEPEST).entries
        assert len(found) == self.scan(name, coming=True)
        for at, entry in enumerate(found):
            assert entry is self.entry(name[: at + 1])
            early = at and entry.state is State.READY and found[at - 1].state is State.COMING
            assert self.linked(name[: at + 1]) != early

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        """As a manager does: in one search, which gets only the last parent."""
        gone, victim = 0, None
        for victim in islice(self.order.victims(), count):
            assert isinstance(victim, Entry)
            name = victim.key[: WIDTH * DEEPEST].split()[0].decode()
            can_go = self.can_go()
            assert name in can_go
            if self.exact:
                assert name == min(can_go, key=lambda n: self.model[n].used)
            self.index.remove(victim)
            del self.model[name]
            gone += 1
        assert gone == count or not self.can_go()
        if victim is not None and victim.parent is not None:
            self.order.freed(victim.parent)

    # What must hold

    def scan(self, name: str, *, coming: bool) -> int:
        good = {State.READY, State.COMING} if coming else {State.READY}
        for end in range(1, len(name) + 1):
            if name[:end] not in self.model or self.model[name[:end]].state not in good:
                return end - 1
        return len(name)

    @invariant()
    def every_prefix_is_what_a_scan_finds(self) -> None:
        for name in FULL:
            for coming in (True, False):
                ends, after = self.index.prefix(chain(name), 0, DEEPEST, coming=coming)
                assert ends == self.scan(name, coming=coming)
                following = name[: ends + 1] if ends < DEEPEST else ""
                assert after is (self.index.get(key(following)) if following else None)

    @invariant()
    def every_probe_is_what_the_model_knows(self) -> None:
        results = {
            State.READY: (LookupResult.HIT, LookupResult.HIT),
            State.COMING: (LookupResult.HIT, LookupResult.MISS),
            State.WRITING: (LookupResult.PENDING, LookupResult.PENDING),
        }
        for full in FULL:
            for end in range(1, DEEPEST + 1):
                found = self.model.get(full[:end])
                miss = (LookupResult.MISS, LookupResult.MISS)
                wanted = miss if found is None else results[found.state]
                name = key(full[:end])
                assert (self.index.probe(name), self.index.probe(name, coming=False)) == wanted
        assert len(self.index) == len(self.model) == len(list(self.index))

    @invariant()
    def children_and_holes_are_counted(self) -> None:
        for name in self.model:
            assert self.entry(name).children == len(self.children(name))
        cut_off = {id(e.parent) for e in self.index if e.parent and e.parent.state is State.DROPPED}
        assert self.index.holes == len(cut_off)


@pytest.mark.slow
def test_index_and_order_agree_with_models_that_walk_everything() -> None:
    run_state_machine_as_test(
        IndexMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
