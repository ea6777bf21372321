"""What waits to be copied from memory to one lower tier, and in which order it goes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from kvstore.core.index import Entry
from kvstore.core.late_writes import LateWrites
from kvstore.core.leases import Lease
from kvstore.core.manager import Manager
from kvstore.core.tier import Bounded, Sharing, Tier
from kvstore.core.types import BlockKey, Chain, LookupResult
from kvstore.core.write_budget import Backlog, WriteBudget

_WALK_MAX = 4096  # ancestors that are looked at in one go
_THERE = (LookupResult.HIT, LookupResult.PENDING)


class _Waiting(NamedTuple):
    key: BlockKey
    walk: bool  # what the tier lacks above it is wanted, too
    since_ns: int


class CopyQueue:
    """Blocks that a tier is to be given: held back while it is full, then queued.

    kept_off, of its methods: blocks that are not copied.
    """

    def __init__(
        self,
        tier: Tier,
        manager: Manager,
        counts: Counter[tuple[str, str]],
        backlog: Backlog,
        budget: WriteBudget,
    ) -> None:
        """counts: of blocks, by tier and event. budget: other namespaces share it."""
        self.tier, self.backlog, self.budget = tier, backlog, budget
        self._manager, self._counts = manager, counts
        self._bounded = tier if isinstance(tier, Bounded) else None
        self._held = LateWrites()
        self._queue: deque[_Waiting] = deque()

    def __len__(self) -> int:
        """Count the blocks that wait their turn."""
        return len(self._queue)

    @property
    def held(self) -> int:
        """Count the blocks that the tier is given later; some may have left memory."""
        return len(self._held)

    @property
    def full(self) -> bool:
        """Tell whether the tier evicts a block for each that it is given."""
        return self._bounded is not None and self._bounded.full

    @property
    def first(self) -> _Waiting:
        """Return whose turn it is."""
        return self._queue[0]

    def add(self, keys: Iterable[BlockKey], now_ns: int, *, again: bool = False) -> None:
        """Have blocks copied once they may be: they were stored, or used again."""
        self._held.add(keys, again=again)
        full = self.full
        ripe = self._held.ripe(self._manager.slots.total if full else 0)
        here = [each for each in ripe if self._manager.ready(each[0]) is not None]
        if full:
            self._held.written(len(here))
            self._held.lost(len(ripe) - len(here))
        self._count("held_too_long" if full else "late", len(ripe) - len(here))
        keys = [key for key, _ in here]
        if not self.budget.left(now_ns):
            seen = self._manager.ghosts.left_s
            keys = [key for key, twice in here if twice or seen(key) is not None]
            self._count("over_budget", len(here) - len(keys))
        room = max(0, self.backlog.blocks_max - len(self._queue))
        self.put(keys[:room], now_ns)
        self._count("skipped", len(keys[room:]))

    def put(self, keys: Iterable[BlockKey], now_ns: int) -> None:
        """Have blocks copied in any case."""
        self._queue.extend(_Waiting(key, True, now_ns) for key in keys)

    def take(self, room: int, kept_off: Container[BlockKey]) -> dict[BlockKey, Entry]:
        """Pin up to so many next blocks that the tier lacks, each after those above it."""
        pinned: dict[BlockKey, Entry] = {}
        while self._queue and len(pinned) < room:
            self._gather(self._queue.popleft(), pinned, room - len(pinned), kept_off)
        return pinned

    def _gather(
        self,
        waiting: _Waiting,
        pinned: dict[BlockKey, Entry],
        room: int,
        kept_off: Container[BlockKey],
    ) -> None:
        """Pin a block that the tier lacks, after those above it that it lacks, if wanted.

        When these are more than there is room for they are queued, the first of them first. They
        are not walked from again: a tier that fails would never see the end of it.
        """
        key, walk, since_ns = waiting
        above = self._manager.ready(key)
        if above is None:
            self._count("late", 1)
            self._held.lost(1)
        path: list[Entry] = []
        while above is not None and above.key not in pinned and above.key not in kept_off:
            if self.tier.lookup(above.key) in _THERE:
                break  # RETRY is not: a tier that cannot tell yet passes over what it has
            path.append(above)
            if not walk or len(path) == _WALK_MAX:
                break
            above = self._manager.ready(above.parent.key) if above.parent else None
        if len(path) > room:
            on = len(path) == _WALK_MAX
            self._queue.extendleft(_Waiting(e.key, on and e is path[-1], since_ns) for e in path)
            return
        for lacking in reversed(path):
            self._manager.pin(lacking.key)
            pinned[lacking.key] = lacking

    def left(self, removed: Sequence[BlockKey]) -> None:
        """Blocks have left memory: what a full tier has of them was in use until now."""
        if self.full:
            for key in removed:
                self.tier.touch(key)

    def clear(self) -> None:
        """Forget all."""
        self._queue.clear()
        self._held.clear()

    def _count(self, event: str, count: int) -> None:
        if count:
            self._counts[self.tier.name, event] += count


class RunQueue:
    """Runs of blocks that a shared tier is given, each whole or not at all."""

    def __init__(
        self, tier: Tier, sharing: Sharing, manager: Manager, counts: Counter[tuple[str, str]]
    ) -> None:
        """sharing: the tier itself. counts: of blocks, by tier and event."""
        self.tier, self.sharing = tier, sharing
        self._manager, self._counts = manager, counts

    def use(self, chain: Chain, lease: Lease, now_ns: int) -> None:
        """Offer the tier the path that a lease has."""
        rules = self._manager.rules
        pairs = zip(rules, lease.groups, strict=True)
        blocks = max((len(hit.indices) for r, hit in pairs if r.trailing is None), default=0)
        skipped = self.sharing.use(rules, chain, blocks, now_ns)
        self._counts[self.tier.name, "skipped"] += skipped

    def take(self, limit: int, kept_off: AbstractSet[BlockKey], now_ns: int) -> list[Entry]:
        """Pin the blocks of the next run, up to a limit; none, if there is none now."""

        def here(keys: Sequence[BlockKey]) -> bool:
            wanted = len(keys) <= limit and kept_off.isdisjoint(keys)
            if wanted and all(self._manager.ready(key) is not None for key in keys):
                return True
            self._counts[self.tier.name, "late"] += len(keys)
            return False

        return self._manager.pin_run(self.sharing.offered(now_ns, here))
