"""The memory pool of one namespace: which block is in which slot, and who may use it.

A slot's states:

    FREE --prepare_store--> GRANTED --begin_store--> WRITING --complete_store(ok)--> READY
      ^                        |                        |                              |
      +------give_back---------+----not ok, duplicate, orphan                          |
      +--------------------------------evicted or dropped, only at 0 pins--------------+

GRANTED slots are credits: an engine writes into them without asking again, and the store learns
the key when the copy is done. A slot's generation grows on FREE -> GRANTED, so whoever read a
slot after its lease can tell.

    GRANTED --begin_promotions--> COMING --complete_promotions, arrived: generation + 1--> READY
                                    +----late, orphan: generation + 2, free at 0 pins

A clear puts all blocks out of reach at once and gives their slots back in slices.

A slot that is being filled from a lower tier can be leased before it is ready. The lease names
the generation that the slot will have then: a reader that finds one less waits, and one that
finds any other gives up.

Pure: no clock, thread, file or socket. Time comes in as now_ns, on one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

from kvstore.core.errors import InvariantBroken, check
from kvstore.core.eviction import LRU, LeafLRU
from kvstore.core.ghosts import ENTRY_BYTES, Ghosts
from kvstore.core.index import Entry, Index, Node, Path, State
from kvstore.core.leases import Generations, GroupHit, Lease, LeaseBook, hit_of
from kvstore.core.lookup import Answer, Below, common_hit
from kvstore.core.policy import MakePolicy, PluginOrder
from kvstore.core.segmented import SEGMENTED, SegmentedLRU
from kvstore.core.slots import Slots
from kvstore.core.tenants import Share, TenantOrder, with_tenants
from kvstore.core.types import BlockKey, Chain, Changes, GroupRule, LeaseId, Slot, StoreOutcome

_WRITING, _COMING, _READY, _DROPPED = State  # a member of an enum takes 0.1 us to read
_HERE = (_READY, _COMING)
_STORED = StoreOutcome.STORED
_SAMPLED = 4  # blocks of one eviction whose age and idle time are recorded
_SWEEP_MAX = 4096  # blocks that one call looks at when slots are taken away
QUOTA_SLICE = 256  # blocks that one call takes from a tenant that has too much
CLEAR_MAX = 1024  # cleared blocks whose slots one call gives back


class Manager:
    """Decides for one namespace; moves nothing."""

    def __init__(
        self,
        rules: Sequence[GroupRule],
        generations: Generations,
        ghosts: Ghosts | None = None,
        aged: Callable[[float, float, int], object] = lambda *_: None,
        policy: str | MakePolicy = LRU,
        failed: Callable[[str, BaseException], None] = lambda *_: None,
    ) -> None:
        """generations: has a counter for every slot added; the caller sees to that.

        ghosts: of blocks that were evicted. aged(idle_s, age_s, count): blocks are evicted that
        were last used and stored so long ago, as far as one of them tells. policy: which block
        leaves next. failed(call, why): a policy of others is used no more.
        """
        self.rules = tuple(rules)
        self._one_full = [rule.trailing for rule in rules] == [None]
        self.index = Index(lambda entry: self._policy.covered(entry))  # noqa: PLW0108 - which may change
        self.leases = LeaseBook()
        self.evictions: Counter[str] = Counter()  # of blocks, by reason; may be emptied
        self.slots = Slots(generations)
        self._tenants: TenantOrder | None = None  # the same, once there is a tenant
        self._sweep: Iterator[list[Entry]] = iter(())  # for blocks in slots to be retired
        self._cleared: list[Index] = []  # ready blocks that no lookup finds any more
        self._outdated: dict[Slot, Entry] = {}  # was coming when all was cleared
        self._changes = Changes([], [])
        self.now_s = 0.0  # the caller's clock
        self.ghosts = Ghosts(memoryview(bytearray(ENTRY_BYTES << 7))) if ghosts is None else ghosts
        self.unkept = Ghosts(memoryview(bytearray(ENTRY_BYTES << 7)))
        """Blocks whose copy failed, or whose parent had left by its end; the caller adds them."""
        self._aged = aged
        self._policy: LeafLRU | TenantOrder = LeafLRU()
        if policy == SEGMENTED:
            self._policy = SegmentedLRU(self.slots, self.ghosts)
        elif not isinstance(policy, str):
            self._policy = PluginOrder(
                policy, lambda: self.slots.capacity, lambda: self.now_s, failed
            )

    # Slots

    def prepare_store(self, count: int, *, wanted: bool = False) -> list[Slot]:
        """Grant up to `count` empty slots, evicting as needed; fewer if nothing can go.

        Also fewer when what can go was not found soon enough; then the next call finds more.
        wanted: for blocks that a request uses, which may displace others that were used.
        """
        free = self.slots.free
        if len(free) < count and self._cleared:
            self.clear_some(count + CLEAR_MAX)
        if len(free) < count:
            self._evict(self._policy.victims(wanted=wanted), "capacity", count)
        return self.slots.grant(count)

    def _evict(self, victims: Iterator[Node], reason: str, count: int) -> None:
        """Take blocks out until `count` slots are free, or there is no other."""
        removed, free, retiring = self._changes.removed, self.slots.free, self.slots.retiring
        before, had, tenants = len(removed), len(free), self._tenants
        was_used, used = self.slots.was_used, bytearray()
        victim: Entry | None = None
        for victim in cast("Iterator[Entry]", victims):
            self.index.remove(victim)
            removed.append(victim.key)
            used.append(was_used[victim.slot])
            if tenants is not None:
                tenants.left(victim.key)
            if victim.slot not in retiring:
                free.append(victim.slot)
            if len(free) >= count:
                break
        if victim is None:
            return
        above, count = victim.parent, len(removed) - before
        self._policy.freed(above)
        self.evictions[reason] += count
        last_s, some = self.now_s, free[had : had + _SAMPLED]
        if some:
            used_s, stored_s = self.slots.used_s, self.slots.stored_s
            last_s = max(max(used_s[slot], stored_s[slot]) for slot in some)
            if above is not None:  # it was used with what hung below it
                used_s[above.slot] = max(used_s[above.slot], last_s)
            self._aged(self.now_s - last_s, self.now_s - stored_s[some[0]], count)
        self.ghosts.add(removed[before:], self.now_s, used, last_s)

    def tend_tenants(self, new: Mapping[bytes, Share], block_bytes: int) -> bool:
        """Take out some blocks of tenants that have more than they may; True: call again soon.

        new: by tag, of tenants not known here, and any others.
        """
        if new and (self._tenants is None or not self._tenants.knows(new)):
            blocks = len(self.index)
            self._policy = self._tenants = with_tenants(self._policy, new, blocks, block_bytes)
        return self._tenants is not None and self._tenants.tend(self.index.table, self._evict_slice)

    def _evict_slice(self, victims: Iterator[Node]) -> None:
        self._evict(victims, "quota", len(self.slots.free) + QUOTA_SLICE)

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Return granted slots that nobody writes any more."""
        for slot in slots:
            check(slot in self.slots.granted, "a slot came back that was not granted")
            self._abandon_write(slot)
            self.slots.release(slot)

    # Storing

    def begin_store(self, key: BlockKey, parent: BlockKey | None, slot: Slot) -> None:
        """Note that a granted slot is being written; lookups of key are pending from now."""
        if slot not in self.slots.granted:
            raise InvariantBroken("a store into a slot that was not granted")
        above = None if parent is None else self.index.get(parent)
        entry = None
        if parent is None or above is not None:
            entry = self.index.hang(key, above, slot, _WRITING)
        self.slots.granted[slot] = entry or (key, parent)
        if entry is not None:
            self._policy.covered(entry.parent)

    def complete_store(self, slot: Slot, *, ok: bool) -> StoreOutcome:
        """End a write: the first complete copy of a key wins, other slots go back."""
        granted = self.slots.granted
        write = granted[slot]
        if write is None:
            raise InvariantBroken("a store ended that had not begun")
        if isinstance(write, Entry):
            key, parent = write.key, write.parent.key if write.parent else None
            entry = write if write.state is _WRITING else self.index.get(key)
        else:
            key, parent = write
            entry = self.index.get(key)
        above = self._above(entry, parent)
        outcome = _STORED
        if not ok:
            outcome = StoreOutcome.FAILED
        elif entry is not None and entry.state is not _WRITING:
            outcome = StoreOutcome.DUPLICATE  # leases may name the slot that is coming
        elif parent is not None and (above is None or above.state is not _READY):
            outcome = StoreOutcome.ORPHAN
        if outcome is not _STORED:
            self._abandon_write(slot)
            self.slots.release(slot)
            return outcome
        del granted[slot]
        if entry is None:
            entry = Entry(key, above, slot)
            self.index.insert(entry)
        elif entry.parent is not above:
            self.index.relink(entry, above)
        if entry.slot != slot:  # the copy that it was made for will be a duplicate
            granted[entry.slot] = (key, parent)
            entry.slot = slot
        entry.state = _READY
        self._became_ready(entry)
        return outcome

    def _above(self, entry: Entry | None, parent: BlockKey | None) -> Entry | None:
        """Return what an entry, or a new one, hangs below: what is here under its parent's key."""
        above = None if entry is None else entry.parent
        if parent is not None and (above is None or above.key != parent or above.state is _DROPPED):
            return self.index.get(parent)
        return above

    def _abandon_write(self, slot: Slot) -> None:
        """A slot is not on credit any more, and nothing is being written into it."""
        entry = self.slots.granted.pop(slot)
        if isinstance(entry, Entry) and entry.state is _WRITING:
            if entry.children:  # a hole: lookups may hang entries elsewhere from now on
                self.leases.pin_all()
            self.index.remove(entry)
            self._policy.freed(entry.parent)

    # Promoting: a lower tier fills a slot

    def begin_promotions(
        self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None], slots: Sequence[Slot]
    ) -> list[int]:
        """Note that a lower tier fills granted slots; leases may name the blocks from now on.

        Returns the positions of those that begin. The others could not be reached, and their slots
        stay granted: their parent has left, or the key is here by now.
        """
        granted, index, began = self.slots.granted, self.index, list[int]()
        entry: Entry | None = None
        for at, (key, parent, slot) in enumerate(zip(keys, parents, slots, strict=True)):
            if slot not in granted:
                raise InvariantBroken("a promotion into a slot that was not granted")
            above, before = None, entry
            if parent is not None:
                above = entry
                if entry is None or entry.key is not parent:  # else it follows, as in a chain
                    above = index.get(parent)
                    if above is None or above.state not in _HERE:
                        continue
            entry = index.hang(key, above, slot, _COMING)
            if entry is not None:
                granted[slot] = entry
                began.append(at)
                if above is not before:
                    self._policy.covered(above)
        return began

    def complete_promotions(self, slots: Sequence[Slot], done: int) -> list[StoreOutcome]:
        """End promotions, the first `done` of which have arrived; a slot's generation tells how."""
        outcomes: list[StoreOutcome] = []
        ready: list[Entry] = []
        above_failed: list[Entry | None] = []
        granted, outdated = self.slots.granted, self._outdated
        retiring = self.slots.retiring  # what becomes ready there is dropped at once
        for at, slot in enumerate(slots):
            entry = granted.pop(slot)
            late = outdated.pop(slot, None) if outdated else None
            if not isinstance(entry, Entry) or entry.state is not _COMING:
                raise InvariantBroken("a promotion ended whose block is not coming")
            above = entry.parent
            reached = above is None or (above.state is _READY and above.slot not in retiring)
            if at < done and late is None and reached:
                entry.state = _READY
                ready.append(entry)
                outcomes.append(_STORED)
                continue
            self.slots.generations.grow((slot,), 2)
            self.leases.pin_all()
            if late is None:
                self.index.remove(entry)
            entry.state = _DROPPED
            self.slots.vacate(slot, pinned=entry.pins > 0)
            above_failed.append(entry.parent)
            outcomes.append(StoreOutcome.ORPHAN if at < done else StoreOutcome.FAILED)
        self.slots.generations.grow([entry.slot for entry in ready], 1)
        for entry in ready:
            self._became_ready(entry)
        for parent in above_failed:  # what has just become ready is in the order only now
            self._policy.freed(parent)
        return outcomes

    def _became_ready(self, entry: Entry) -> None:
        self.slots.stored_s[entry.slot] = self.now_s
        self.slots.was_used[entry.slot] = 0
        tenants = self._tenants
        if tenants is not None:
            tenants.entered(entry.key)
        self._policy.stored(entry, self.now_s)
        self._changes.added.append(entry.key)
        if entry.slot in self.slots.retiring:
            self.drop(entry.key, "resize")
        if tenants is not None and tenants.exceeded:
            self.tend_tenants({}, 0)

    # Looking up and loading

    def lookup(
        self, chain: Chain, limit: int, below: Below | None = None, *, coming: bool = True
    ) -> Answer:
        """Say how many leading blocks of a chain can be served; changes nothing.

        below: asked for what is not in memory, when there are lower tiers.
        coming: what is on its way up counts as here.
        """
        limit = min(chain.blocks, limit)
        if self._one_full:  # as most models: nothing shrinks
            return self.index.hit(chain, 0, limit, below, coming=coming)
        probe = self.index.prober(chain, below, coming=coming)
        prefix = partial(self.index.hit, chain, below=below, coming=coming)
        inside = chain.inside_of(limit)
        return common_hit(self.rules, probe, limit, prefix=prefix, inside=inside)

    def prepare_load(
        self, chain: Chain, limit: int, owner: int, deadline_ns: int, *, coming: bool = True
    ) -> Lease | None:
        """Pin what is present of the first `limit` blocks, or coming; None if nothing is.

        Groups that need the whole prefix are pinned as far as every one of them reaches, the
        others wherever a block of theirs is present in that range: which of these a request
        needs depends on what its engine has computed itself. Recency is refreshed now for the paths
        of the former, whose last block others may hang below, and with the last pin for leaves.
        What is in slots that are to go is not pinned any more: engines that come now do not map
        them.
        """
        limit = min(limit, chain.blocks)
        full = [group for group, rule in enumerate(self.rules) if rule.trailing is None]
        paths: dict[int, Path] = {}
        for group in full:
            paths[group] = self.index.run(chain, group, limit, coming=coming)
            limit = _before(self.slots.retiring, paths[group].entries, limit)
        if limit == 0:
            return None
        hits: list[GroupHit] = []
        entries: list[Entry] = []
        pinned: list[Entry] = []
        for group in range(len(self.rules)):
            linked = ready = False
            if group in paths:
                run, linked, ready = paths[group]
                present = run[:limit]
                indices: Sequence[int] = range(len(present))
            else:
                found = self.index.present(chain, group, limit, coming=coming)
                if retiring := self.slots.retiring:
                    found = [each for each in found if each[1].slot not in retiring]
                indices = [index for index, _ in found]
                present = [entry for _, entry in found]
            hits.append(hit_of(indices, present, self.slots.generations, ready=ready))
            entries += present
            pinned += present[-1:] if linked else present
        if not entries:
            return None
        for group in full:
            self.touch(chain.key(group, limit - 1))
        lease = self.leases.add(owner, deadline_ns, tuple(hits), entries, pinned)
        for entry in pinned:
            if entry.next is not None and not entry.children:  # a pinned leaf is in no order
                self._policy.remove(entry)
        return lease

    def touch(self, key: BlockKey) -> bool:
        """Refresh the recency of a block, and with it of the path above it; False: not ready."""
        entry = self.ready(key)
        if entry is not None:
            self._policy.used(entry, self.now_s)
            self.slots.used_s[entry.slot] = self.now_s
        return entry is not None

    def complete_load(self, lease_id: LeaseId, damaged: Collection[Slot] = ()) -> bool:
        """End a lease; False if it had ended before. Blocks in damaged slots are dropped."""
        lease = self.leases.end(lease_id)
        if lease is None:
            return False
        for entry in lease.pinned:
            if entry.state is _READY and self.index.holds(entry):  # else it was cleared
                self._policy.keep(entry)
                if not entry.children:
                    self._used_until_now(entry)
            elif entry.state is _DROPPED and not entry.pins:
                self.slots.release(entry.slot)
        if damaged:
            bad = set(damaged)
            for entry in lease.entries:
                if entry.slot in bad and entry.state is _READY and self.index.holds(entry):
                    self.drop(entry.key, "damaged")
        return True

    def _used_until_now(self, entry: Entry) -> None:
        """One pin of a leaf is gone; while it has others a search for victims passes over it."""
        self._policy.unpinned(entry)
        self.slots.used_s[entry.slot] = self.now_s

    def expire(self, now_ns: int) -> list[LeaseId]:
        """End the leases that nobody completed in time, and name them."""
        late = self.leases.due(now_ns)
        for lease_id in late:
            self.complete_load(lease_id)
        return late

    def ready(self, key: BlockKey) -> Entry | None:
        """Return a block that can be read."""
        entry = self.index.get(key)
        return entry if entry is not None and entry.state is _READY else None

    def pin(self, key: BlockKey) -> Entry | None:
        """Hold one ready block for a copy to a lower tier, until unpin(): no use of it."""
        entry = self.ready(key)
        if entry is not None:
            entry.pins += 1
        return entry

    def unpin(self, entries: Iterable[Entry], *, used: bool = True) -> None:
        """End one pin of each; used: which was a use, until now.

        Of the others one whose turn to be evicted came meanwhile is the next to go.
        """
        for entry in entries:
            entry.pins = pins = entry.pins - 1
            if pins:
                check(pins > 0, "pins of an entry below zero")
            elif entry.state is _DROPPED:
                self.slots.release(entry.slot)
            elif entry.children or entry.state is not _READY or not self.index.holds(entry):
                continue
            elif used:
                self._used_until_now(entry)
            else:
                self._policy.freed(entry)

    def pin_run(self, keys: Iterable[BlockKey]) -> list[Entry]:
        """Pin the blocks of these keys up to the first that is not ready, until unpin."""
        pinned: list[Entry] = []
        find = self.index.get
        for key in keys:
            entry = find(key)
            if entry is None or entry.state is not _READY:
                break
            entry.pins += 1
            if entry.next is not None and not entry.children:  # a pinned leaf is in no order
                self._policy.remove(entry)
            pinned.append(entry)
        return pinned

    # Leaving

    def drop(self, key: BlockKey, reason: str) -> bool:
        """Take a ready block out; a pinned one is unlinked now, its slot freed later."""
        entry = self.ready(key)
        if entry is None:
            return False
        self.leases.pin_all()
        self._policy.inherit(entry)
        self.index.remove(entry)
        if self._tenants is not None:
            self._tenants.left(key)
        self.evictions[reason] += 1
        if reason == "resize":
            used = (self.slots.was_used[entry.slot],)
            self.ghosts.add((entry.key,), self.now_s, used, last_s=self.now_s)
        self._changes.removed.append(entry.key)
        self.slots.vacate(entry.slot, pinned=entry.pins > 0)
        self._policy.freed(entry.parent)
        return True

    def retire_slots(self, slots: Collection[Slot]) -> int:
        """Empty these slots for good and return how many are in use, as far as is known.

        Each call drops some thousand blocks; once the answer is 0 the memory may go.
        """
        if self.slots.retire(slots):
            self._sweep = self.index.parts()
        swept = not self._cleared and self._swept()
        busy = self.slots.unsettled(slots)
        if swept and not busy:
            self.slots.retiring.difference_update(slots)
        return busy if swept else max(1, busy)

    def _swept(self) -> bool:
        """Drop some of the blocks in slots to be retired; True when none is ready any more."""
        looked = 0
        for part in self._sweep:
            for entry in part:
                if entry.slot in self.slots.retiring and entry.state is _READY:
                    self.drop(entry.key, "resize")
            looked += len(part)
            if looked >= _SWEEP_MAX:
                return False
        return True

    def clear(self) -> None:
        """Put every block out of reach; the time depends on open writes and leases only.

        What is coming does not become ready. clear_some gives the slots back.
        """
        self.leases.pin_all()
        for slot, entry in self.slots.granted.items():
            if not isinstance(entry, Entry) or slot in self._outdated:
                continue
            if (state := entry.state) is _WRITING or state is _COMING:
                self.index.remove(entry)
            if state is _COMING:
                entry.state, entry.parent, self._outdated[slot] = state, None, entry
        self._policy.clear()
        self._cleared.append(self.index)
        self.index = Index(self.index.covered)

    @property
    def clearing(self) -> bool:
        """Tell whether cleared blocks still have their slots."""
        return bool(self._cleared)

    def clear_some(self, count: int = CLEAR_MAX) -> None:
        """Give back the slots of up to `count` cleared blocks."""
        while self._cleared and count > 0:
            gone = self._cleared[-1].take(count)
            if not gone:
                self._cleared.pop()
            count -= len(gone)
            self.evictions["clear"] += len(gone)
            for entry in gone:
                entry.state = _DROPPED
                entry.parent = entry.prev = entry.next = None
                if self.ready(entry.key) is None:  # else it was stored again since then
                    self._changes.removed.append(entry.key)
                self.slots.vacate(entry.slot, pinned=entry.pins > 0)

    def take_changes(self) -> Changes:
        """Return what became ready and what left since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes


def _before(retiring: Collection[Slot], entries: Sequence[Entry], limit: int) -> int:
    """Count the first entries, up to a limit, that are not in slots to be retired."""
    limit = min(limit, len(entries))
    if not retiring:
        return limit
    some = entries[:limit]
    return next((at for at, entry in enumerate(some) if entry.slot in retiring), limit)
