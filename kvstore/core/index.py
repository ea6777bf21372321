"""The blocks of one namespace that are in memory, as a forest (parent = previous block).

A block of a full-attention group hangs below its parent, and the set of present blocks is
closed under "parent of": a block enters READY only below a READY parent, and leaves only
without children. So the present part of a request's chain is a prefix, and a binary search
finds its end. Blocks of sliding-window and state groups have no parent here: what they are
good for does not depend on what lies before them. A COMING block enters below a READY or COMING
one and becomes READY below a READY one: both sets are closed.

Closure is a speed-up and never a safety argument. Dropping a damaged block may leave a hole;
whoever plans a load verifies every block of the chain, so a hole costs hits, never bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from itertools import chain as chained
from typing import NamedTuple

from kvstore.core.lookup import Answer, Below, Probe, prefix_hit
from kvstore.core.types import BlockKey, Chain, LookupResult, Slot

TABLES = 1024
"""Dicts that share the entries of an index: one dict of 10^7 keys stops everything for 300 ms when
it grows, one of 10^4 for a third of a millisecond."""
STRANDS_MAX = 6
"""Strands that one search takes hints from: a path with a fork at each block is bisected."""
TABLE_SHIFT = 54  # of a hash of 64 bits: -512..511, which are the indices of the tables


class State(enum.Enum):
    """WRITING or COMING -> READY -> DROPPED, or -> DROPPED; absent is not being in the index."""

    WRITING = "writing"
    COMING = "coming"  # being read from a lower tier: a lease may name what is not there yet
    READY = "ready"
    DROPPED = "dropped"  # out of the index; its slot is freed with its last pin


# Reading a member of an enum class takes 0.1 us in Python 3.11, and each block needs a dozen.
_WRITING, _COMING, _READY, _DROPPED = State
_HIT, _PENDING, _MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS


class Strand:
    """Blocks that hang one below the other, from a first block or a fork down to a leaf.

    A hint for searches and no more: they are right with any numbers. blocks: how many are here.
    fork: where the last request went that left it before its end, as a count of its blocks.
    """

    __slots__ = ("blocks", "fork")

    def __init__(self) -> None:
        self.blocks, self.fork = 1, 0


class Node:
    """A block's place in a forest, and in an order of eviction, to which prev and next belong.

    kept: of an order in segments (segmented.py); without one it may be missing.
    """

    __slots__ = ("children", "kept", "key", "next", "parent", "pins", "prev", "slot", "state")

    def __init__(
        self, key: BlockKey, parent: Node | None, slot: Slot, state: State = _WRITING
    ) -> None:
        self.key = key
        self.parent = parent
        self.slot = slot
        self.state = state
        self.children = self.pins = self.kept = 0
        self.prev: Node | None = None
        self.next: Node | None = None


class Entry(Node):
    """One block in memory. strand: None before it has a first child, unless it is one."""

    __slots__ = ("strand",)
    parent: Entry | None

    def __init__(  # flat: each block that is stored makes one
        self, key: BlockKey, parent: Entry | None, slot: Slot, state: State = _WRITING
    ) -> None:
        """Hang below a parent; start without pins or children."""
        self.key = key
        self.parent = parent
        self.slot = slot
        self.state = state
        self.children = self.pins = self.kept = 0
        self.prev = self.next = None
        self.strand: Strand | None = None
        if parent is not None:
            if not parent.children:  # else a strand of its own begins here
                strand = parent.strand
                if strand is None:
                    strand = parent.strand = Strand()
                strand.blocks += 1
                self.strand = strand
            parent.children += 1


class Path(NamedTuple):
    """Entries of a chain's leading blocks.

    linked: each hangs below the one before, and nothing is cut off. ready: none is coming, as far
    as is known.
    """

    entries: list[Entry]
    linked: bool
    ready: bool


class Index:
    """Finds entries by key and keeps the count of children."""

    def __init__(self, covered: Callable[[Entry], None] = lambda _: None) -> None:
        """Start empty. covered(): what was cut off hangs below an entry again."""
        self.covered = covered
        self._tables: list[dict[bytes, Entry]] = [{} for _ in range(TABLES)]
        self.holes = 0  # dropped entries that still have children; > 0 makes lookups linear

    def __len__(self) -> int:
        """Count the entries, those being written included."""
        return sum(map(len, self._tables))

    def __iter__(self) -> Iterator[Entry]:
        """Go through all entries, in no order; each table's as they are when it is reached."""
        return chained.from_iterable(self.parts())

    def parts(self) -> Iterator[list[Entry]]:
        """Go through all entries in parts, for many calls; what enters meanwhile may be missed."""
        return (list(table.values()) for table in self._tables)

    def table(self, number: int) -> list[Entry]:
        """Return the entries of one of the TABLES."""
        return list(self._tables[number].values())

    def get(self, key: BlockKey) -> Entry | None:
        """Return the entry, ready or being written."""
        return self._tables[hash(key) >> TABLE_SHIFT].get(key)

    def holds(self, entry: Entry) -> bool:
        """Return True if this entry is the one that its key finds: it may have been cleared."""
        return self.get(entry.key) is entry

    def find(self, keys: Iterable[BlockKey]) -> list[Entry | None]:
        """Return the entry of each key, ready or not."""
        tables = self._tables
        return [tables[hash(key) >> TABLE_SHIFT].get(key) for key in keys]

    def probe(self, key: BlockKey, *, coming: bool = True) -> LookupResult:
        """Say what is known about one key; coming: what is on its way up counts as here."""
        entry = self._tables[hash(key) >> TABLE_SHIFT].get(key)
        if entry is None:
            return _MISS
        state = entry.state
        if state is _READY:
            return _HIT
        if state is _COMING:
            return _HIT if coming else _MISS
        return _PENDING

    def hang(self, key: BlockKey, above: Entry | None, slot: Slot, state: State) -> Entry | None:
        """Add an entry below another one, and return it; None if its key is here."""
        table = self._tables[hash(key) >> TABLE_SHIFT]
        if key in table:
            return None
        entry = table[key] = Entry(key, above, slot, state)
        return entry

    def insert(self, entry: Entry) -> None:
        """Add an entry; its parent knows of it."""
        key = entry.key
        self._tables[hash(key) >> TABLE_SHIFT][key] = entry

    def remove(self, entry: Entry) -> None:
        """Take an entry out; its children, if any, are cut off from now on."""
        key = entry.key
        del self._tables[hash(key) >> TABLE_SHIFT][key]
        entry.state = _DROPPED
        strand = entry.strand
        if strand is not None:
            strand.blocks -= 1
        if entry.children:
            self.holes += 1
        parent = entry.parent
        if parent is not None:
            parent.children -= 1
            if parent.state is _DROPPED and not parent.children:
                self.holes -= 1

    def take(self, count: int) -> list[Entry]:
        """Take up to `count` entries out of an index that nobody looks into any more."""
        taken: list[Entry] = []
        while self._tables and len(taken) < count:
            if table := self._tables[-1]:
                taken.append(table.popitem()[1])
            else:
                self._tables.pop()
        return taken

    def relink(self, entry: Entry, parent: Entry | None) -> None:
        """Hang an entry below the entry that now holds its parent's key."""
        before = entry.parent
        if before is not parent:
            if before is not None:
                before.children -= 1
                if before.state is _DROPPED and not before.children:
                    self.holes -= 1
            entry.parent = parent
            if parent is not None:
                parent.children += 1
                self.covered(parent)

    def prefix(
        self, chain: Chain, group: int, limit: int, *, coming: bool = True
    ) -> tuple[int, Entry | None]:
        """Count a chain's leading blocks that are here: O(log limit) probes, O(limit) with holes.

        Also returns what is known of the next block. The first block is asked for first: most
        requests find nothing. Its strand then says where to look: where others left it, where it
        ends. What no hint helps with is bisected. coming: see probe.
        """
        tables, also, holes = self._tables, _COMING if coming else _READY, self.holes
        packed, width, suffix = chain.packed, chain.width, chain.suffixes[group]
        low, middle, high = 0, 0, limit
        after: Entry | None = None
        strand: Strand | None = None
        base = fork = 0  # blocks above the strand, and above the next one that may begin
        guesses: list[int] = []
        strands = STRANDS_MAX
        while low < high:
            start = middle * width
            key = packed[start : start + width] + suffix
            entry = tables[hash(key) >> TABLE_SHIFT].get(key)
            if entry is None:
                high, after = middle, None
            elif entry.state is _READY or entry.state is also:
                low = middle + 1
                if middle == fork and strands and (not strand or entry.strand is not strand):
                    strand = entry.strand
                    strands -= 1
                    if strand is None:
                        guesses = [low]
                    else:
                        base, fork = middle, middle + strand.fork
                        end = middle + strand.blocks
                        guesses = [end, min(end, limit) - 1, fork - 1, fork]
            else:
                high, after = middle, entry
            if holes:
                middle = low
                continue
            while guesses:
                middle = guesses.pop()
                if low <= middle < high:
                    break
            else:
                middle = (low + high) >> 1
        if strand is not None and low < limit and low < base + strand.blocks:
            strand.fork = low - base
        return low, after

    def prober(self, chain: Chain, below: Below | None = None, *, coming: bool = True) -> Probe:
        """Return what asks for single blocks of a chain; below: asked for what is not here."""

        def probe(group: int, index: int) -> LookupResult:
            result = self.probe(chain.key(group, index), coming=coming)
            if result is _MISS and below is not None:
                return below.probe(group, index)
            return result

        return probe

    def hit(
        self, chain: Chain, group: int, limit: int, below: Below | None, *, coming: bool = True
    ) -> Answer:
        """Say what prefix_hit would: a search for what is here, and a scan only from there on."""
        here, after = self.prefix(chain, group, limit, coming=coming)
        if here == limit or (after is None and below is None):
            return Answer(here)
        if after is None and below is not None and not self.holes:  # nor is any block after it
            rest = below.prefix(group, here, limit)
            return Answer(here + rest.blocks, rest.pending)
        probe = self.prober(chain, below, coming=coming)
        rest = prefix_hit(lambda g, index: probe(g, here + index), group, limit - here)
        return Answer(here + rest.blocks, rest.pending)

    def present(
        self, chain: Chain, group: int, limit: int, *, coming: bool = True
    ) -> list[tuple[int, Entry]]:
        """Return which of a chain's blocks are here, wherever they are, with their indices."""
        also = _COMING if coming else _READY
        entries = ((index, self.get(chain.key(group, index))) for index in range(limit))
        return [(index, e) for index, e in entries if e and (e.state is _READY or e.state is also)]

    def run(self, chain: Chain, group: int, limit: int, *, coming: bool = True) -> Path:
        """Return the entries of a chain's leading blocks up to the first that is not here.

        They are what hangs above the last one that a search finds; all are compared with the chain.
        While there is a hole, or if one is not the chain's, they are looked up one by one.
        """
        also = _COMING if coming else _READY
        if not self.holes:
            end, _ = self.prefix(chain, group, limit, coming=coming)
            at = self.get(chain.key(group, end - 1)) if end else None
            path: list[Entry] = []
            ready = True
            while at is not None:
                if at.state is not _READY:
                    if at.state is not also:
                        break
                    ready = False
                path.append(at)
                at = at.parent
            path.reverse()
            if len(path) == end and (not end or chain.starts_with(group, [e.key for e in path])):
                return Path(path, linked=True, ready=ready)
        return Path(self._scan(chain, group, limit, also), linked=False, ready=False)

    def _scan(self, chain: Chain, group: int, limit: int, also: State) -> list[Entry]:
        """Do as run, whatever the entries say of their parents.

        Blocks that were cut off by a drop hang below the new copy of their parent from now on; what
        is ready only once that copy is ready, too.
        """
        found: list[Entry] = []
        for key in chain.keys(group, limit):
            entry = self.get(key)
            if entry is None or ((state := entry.state) is not _READY and state is not also):
                break
            if self.holes and found and (state is not _READY or found[-1].state is _READY):
                self.relink(entry, found[-1])
            found.append(entry)
        return found
