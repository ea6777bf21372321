"""Which of four ways to evict hits more: each is tried on a sample of what is asked for.

Four small caches stand for memory (miniature simulation: Waldspurger et al., USENIX ATC 2017).
They have a part of its capacity, and of all blocks asked for the same part, chosen by hash. A
sampled path has fewer blocks and the same order, so what hangs below what stays as it is. One cache
keeps what was used again, one evicts by recency alone (`Slots.by_recency`), one keeps more of what
was used again (`Slots.keeps_more`), and one keeps that for longer, too (`Slots.keeps_longer`).

Memory goes another way once that has hit as many blocks more as its cache can hold, or half as many
between two that keep. What it hits fewer counts against it, and all fades: a difference of less
than an eighth of what is asked for changes nothing, nor, between two that keep, one of less than a
64th. So nothing has to be known of what is asked for, and a wrong way costs a part of what a full
memory holds. The sample also says how likely blocks are to be used (`kvstore/core/odds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from xxhash import xxh3_64_intdigest

from kvstore.core.eviction import LRU
from kvstore.core.ghosts import ENTRY_BYTES, Ghosts
from kvstore.core.leases import NEVER_NS, Generations
from kvstore.core.manager import Manager
from kvstore.core.odds import Odds
from kvstore.core.policy import MakePolicy
from kvstore.core.segmented import GHOSTS, SEGMENTED
from kvstore.core.slots import Slots
from kvstore.core.types import BlockKey, Chain, GroupRule, Slot

BLOCKS = 256
"""What a cache holds. A smaller memory is not tried: it keeps what was used again."""
STEP_BLOCKS = 8  # that an engine computes in a step
_FADES = 8 * BLOCKS  # while so many blocks are asked for, by all but 1/e
_FADES_SLOWLY = 32 * BLOCKS  # between two ways that are more alike
_KNOWN = 16 * BLOCKS  # when they were asked for
_RECENT = 1
_WAYS = (
    (False, False, False),  # by recency, keeps more, keeps longer
    (True, False, False),
    (False, True, False),
    (False, True, True),
)
_HASHES = 1 << 64


class Cache:
    """A manager over slots without memory, which holds blocks of one group in name only."""

    def __init__(
        self,
        blocks: int,
        policy: str | MakePolicy = LRU,
        failed: Callable[[str, BaseException], None] = lambda *_: None,
    ) -> None:
        """policy, failed: as of a Manager."""
        generations = Generations()
        generations.add(memoryview(bytearray(4 * blocks)).cast("I"))
        left = Ghosts(memoryview(bytearray(ENTRY_BYTES << (GHOSTS * blocks).bit_length())))
        rules = (GroupRule(),)
        self.manager = Manager(rules, generations, left, policy=policy, failed=failed)
        self.manager.slots.add([Slot(slot) for slot in range(blocks)])

    def use(self, chain: Chain) -> tuple[int, int]:
        """Use what is here of a path and store the rest while there is room; count both."""
        found = self.manager.lookup(chain, chain.blocks).blocks
        lease = self.manager.prepare_load(chain, found, 0, NEVER_NS) if found else None
        rest = chain.keys_at(0, range(found, chain.blocks))
        stored = self.store(rest, chain.key(0, found - 1) if found else None)
        if lease is not None:
            self.manager.complete_load(lease.lease_id)
        return found, stored

    def store(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> int:
        """Store blocks of a path as an engine computes them, while there is room; count them."""
        stored = 0
        while stored < len(keys):
            part = self._store(keys[stored : stored + STEP_BLOCKS], parent)
            if not part:
                break
            stored += part
            parent = keys[stored - 1]
        return stored

    def _store(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> int:
        manager = self.manager
        slots = manager.prepare_store(len(keys))
        if not slots:
            return 0
        keys = keys[: len(slots)]
        began = manager.begin_promotions(keys, [parent, *keys[:-1]], slots)
        filled = [slots[at] for at in began]
        manager.give_back(set(slots).difference(filled))
        manager.complete_promotions(filled, len(filled))
        return len(began)


class Trial:
    """Sets the way of one namespace's memory."""

    def __init__(self, slots: Slots, groups: int = 1) -> None:
        """slots: of the memory, which has blocks of so many groups; those of one are tried."""
        self._slots, self._groups = slots, groups
        self._more = [0.0] * len(_WAYS)  # blocks that each has hit more than memory's way

    @cached_property
    def _caches(self) -> list[Cache]:  # made when they are asked for: each takes 110 KB
        caches = [Cache(BLOCKS, SEGMENTED) for _ in _WAYS]
        for cache, way in zip(caches, _WAYS, strict=True):
            _go(cache.manager.slots, way)
            cache.manager.slots.odds = self._odds
        return caches

    @cached_property
    def _odds(self) -> Odds:  # likewise: 130 KB
        return Odds(_KNOWN, _FADES)

    def sampled(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Choose those that are tried, of keys that follow one another."""
        capacity = self._slots.capacity // self._groups
        if capacity < BLOCKS:
            self._go(_WAYS[0])  # it may have been larger
            self._slots.odds = None
            return []
        limit = _HASHES // capacity * BLOCKS
        return [key for key in keys if xxh3_64_intdigest(key) < limit]

    def use(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """A request asks for a path, of which these were chosen; and stores what is not here."""
        keys, slots = keys[:BLOCKS], self._slots
        if not keys:
            return
        chain, hits = Chain(b"".join(keys), len(keys[0]), 1), list[int]()
        self._odds.note(keys, now_s)
        slots.odds = self._odds
        for cache in self._caches:
            cache.manager.slots.hands_over = slots.hands_over
            cache.manager.now_s = now_s
            hits.append(cache.use(chain)[0])
            cache.manager.take_changes()
        mine = _WAYS.index((slots.by_recency, slots.keeps_more, slots.keeps_longer))
        for way, more in enumerate(self._more):
            fades = _FADES if _RECENT in (way, mine) else _FADES_SLOWLY
            stays = 1 - len(keys) / fades
            self._more[way] = max(0.0, more * stays + hits[way] - hits[mine])
        most = max(self._more)
        way = self._more.index(most)
        if most > (BLOCKS if _RECENT in (way, mine) else BLOCKS // 2):
            self._go(_WAYS[way])

    def _go(self, way: tuple[bool, ...]) -> None:
        _go(self._slots, way)
        self._more = [0.0] * len(_WAYS)


def _go(slots: Slots, way: tuple[bool, ...]) -> None:
    slots.by_recency, slots.keeps_more, slots.keeps_longer = way
