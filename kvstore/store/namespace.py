"""One namespace in the store: its slots' memory, its manager and its lower tiers."""

from __future__ import annotations

import logging
import mmap
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvstore.barrier import Ended
from kvstore.core.eviction import LRU
from kvstore.core.ghosts import ENTRY_BYTES, Ghosts
from kvstore.core.hit_curve import HitCurve
from kvstore.core.layout import SlotLayout
from kvstore.core.leases import PINS, Generations
from kvstore.core.manager import Manager
from kvstore.core.segmented import SEGMENTED
from kvstore.core.tiering import Tiering
from kvstore.core.trial import Trial
from kvstore.core.types import BlockKey, Slot
from kvstore.handover.engine_blocks import Engines
from kvstore.metrics import WAYS, Numbers
from kvstore.store.plugins import find_policy
from tiers.cpu import CpuExtent

if TYPE_CHECKING:
    from kvstore.store.session import Session
    from kvstore.store.token_ids import TokenIds

log = logging.getLogger(__name__)

GHOSTS_MIN, GHOSTS_MAX = 1 << 12, 1 << 22  # entries: 64 KiB to 64 MiB, taken as they are written


def _ghosts(entries: int) -> Ghosts:
    """Make a table of so many entries, within limits; its pages come one by one."""
    most = 1 << max(GHOSTS_MIN, min(GHOSTS_MAX, entries)).bit_length() - 1
    memory = mmap.mmap(-1, most * ENTRY_BYTES)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # to clear a huge one takes longer than a turn
    return Ghosts(memoryview(memory))


def _tokens_of(layout: SlotLayout, known: TokenIds, key: BlockKey) -> bytes:
    width = known.width
    # No engine may have said any yet, of any width.
    return known.of(key[:width]) if width and layout.is_full(key, width) else b""


class Mapping(msgspec.Struct, eq=False):
    """An extent in a namespace. waiting: connections that have to map or unmap it, since when.

    told: who may have it mapped. held: slots in use that keep it from being given back.
    look_ns: there is nothing to do about it before.
    """

    memory: CpuExtent
    first: int
    waiting: dict[int, int]
    since_ns: int
    told: set[int]
    held: int = 0
    look_ns: int = 0
    state: str = "mapping"  # -> "live" -> "retiring" -> "unmapping" -> gone


class Namespace:
    """Everything that shares one layout digest."""

    def __init__(
        self,
        layout: SlotLayout,
        numbers: Numbers,
        make_tiering: Callable[[Namespace], Tiering],
        remembered_bytes: int = 0,
        policy: str = LRU,
        tokens: TokenIds | None = None,
    ) -> None:
        """numbers: of the store, which go on when this one is forgotten.

        remembered_bytes: how many evicted blocks are remembered, and when. policy: which of those
        in memory leaves next; ours, or a dotted name. tokens: of blocks of all namespaces.
        """
        self.layout = layout
        self._numbers, self._policy = numbers, policy
        self.generations = Generations()
        evicted = _ghosts(remembered_bytes // layout.slot_bytes)
        self.manager = Manager(
            layout.rules,
            self.generations,
            evicted,
            self._aged,
            find_policy(policy),
            self._policy_failed,
        )
        self.manager.unkept = _ghosts(0)
        self.unstored = _ghosts(0)  # blocks that were offered, and not stored
        self.curve = HitCurve()
        self.trial = Trial(self.manager.slots, len(layout.rules)) if policy == SEGMENTED else None
        self.hash_bytes = 0  # of a block's hash, once an engine has asked for one
        self._tokens = tokens
        self.tiering = make_tiering(self)  # which may refuse
        if tokens is not None and self.tiering.describing is not None:
            # Records of a disk outlive the namespace, and are not to keep it.
            self.tiering.describing.describe(partial(_tokens_of, layout, tokens))
        self.label = numbers.open_namespace(layout.digest)
        self.around_tiers = Ended(lambda _: False)  # ends what they raise, in a store
        self.engines = Engines()
        self.extents: dict[int, Mapping] = {}
        self.sessions: dict[int, Session] = {}  # by number
        self.growing = False
        self.over_quota = False  # a tenant has more than it may, or that is not known yet
        self.slots_wanted = 0  # free ones, for what comes from lower tiers
        self.block_ns = 0  # that an engine takes to compute a block, as one said last
        self.peer_block_ns = 0  # likewise one of a peer
        self.retry_ns = 0  # no extent could be made: ask for none before
        self.look_ns = 0  # look for an extent of another namespace, not before
        self.used_ns = 0
        rules = layout.rules  # groups, those first that need all leading blocks
        self.full_first = sorted(range(len(rules)), key=lambda g: rules[g].trailing is not None)
        self._places: list[int] = []  # slot // slots per extent -> extent id
        self._per_extent = 0

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes (SlotMemory, for tiers)."""
        extent, position = self.place(slot)
        return self.extents[extent].memory.slot(position)

    def place(self, slot: Slot) -> tuple[int, int]:
        """Return a slot's extent and its number in there."""
        number, position = divmod(slot, self._per_extent)
        return self._places[number], position

    def places(self, slots: array[int]) -> tuple[array[int], array[int]]:
        """Return the extent of each slot, and its number in there; u32."""
        per = max(1, self._per_extent)
        extents = array("I", [self._places[slot // per] for slot in slots])
        return extents, array("I", [slot % per for slot in slots])

    @property
    def blocks(self) -> int:
        """Count the blocks in memory, and those on disk as far as they are known."""
        disk = self.tiering.describing
        return len(self.manager.index) + (0 if disk is None else disk.blocks)

    def tokens_of(self, key: BlockKey) -> bytes:
        """Return a block's token ids, u32; b"" if they are not known, or for no KV event."""
        return b"" if self._tokens is None else _tokens_of(self.layout, self._tokens, key)

    def add_extent(self, extent: int, memory: CpuExtent, waiting: set[int], now_ns: int) -> Mapping:
        """Number the slots of new memory; they are used once everybody has mapped them."""
        self._per_extent = memory.count  # the same for all extents: slot size and extent size are
        first = len(self._places) * memory.count
        self._places.append(extent)
        self.generations.add(memory.generations)
        mapping = Mapping(memory, first, dict.fromkeys(waiting, now_ns), now_ns, waiting)
        self.extents[extent] = mapping
        self.growing = False
        return mapping

    def slots_of(self, mapping: Mapping) -> range:
        """Return the slots of an extent."""
        return range(mapping.first, mapping.first + mapping.memory.count)

    def settle(self, extent: int, connection: int, *, unmapped: bool | None = None) -> None:
        """Note that a connection has mapped or unmapped an extent; None: or is gone.

        Who was asked to unmap an extent before it had mapped it says both.
        """
        mapping = self.extents.get(extent)
        if mapping is None or unmapped not in (None, mapping.state == "unmapping"):
            return
        waited = mapping.waiting.pop(connection, None) is not None
        if waited and not mapping.waiting and mapping.state == "mapping":
            self.go_live(mapping)

    def go_live(self, mapping: Mapping) -> None:
        """Start using an extent's slots."""
        mapping.state = "live"
        self.manager.slots.add([Slot(slot) for slot in self.slots_of(mapping)])
        for session in self.sessions.values():
            session.stirred = True  # it may have more credits

    @property
    def live_extents(self) -> int:
        """Count the extents that are in use, and not on their way."""
        return sum(mapping.state == "live" for mapping in self.extents.values())

    def shrinkable(self) -> Mapping | None:
        """Return a live extent to give up: one without pinned blocks, if there is any.

        Of these the newest of those with the fewest slots on credit.
        """
        live = [mapping for mapping in self.extents.values() if mapping.state == "live"]
        per = max(1, self._per_extent)
        on_credit = Counter(slot // per * per for slot in self.manager.slots.granted)
        pinned = (e for lease in self.manager.leases.of_owner(PINS) for e in lease.entries)
        kept = Counter(entry.slot // per * per for entry in pinned)

        def cost(mapping: Mapping) -> tuple[int, int]:
            return kept[mapping.first], on_credit[mapping.first]

        return min(reversed(live), key=cost, default=None)

    def _aged(self, idle_s: float, age_s: float, count: int) -> None:
        self._numbers.observe("kvstore_evicted_idle_seconds", idle_s, count)
        self._numbers.observe("kvstore_evicted_age_seconds", age_s, count)

    def _policy_failed(self, verb: str, exc: BaseException) -> None:
        log.error("policy %s is off: %s failed; lru from now on", self._policy, verb, exc_info=exc)
        self._numbers.add("kvstore_policy_bugs")

    def count(self) -> None:
        """Add what its manager and its tiers have counted since the last call."""
        numbers, label = self._numbers, self.label
        evictions, moved = self.manager.evictions, self.tiering.counts
        for reason, count in evictions.items():
            numbers.add("kvstore_evicted_blocks", label, reason, by=count)
        for (tier, event), count in moved.items():
            numbers.add("kvstore_tier_blocks", label, tier, event, by=count)
            if event in ("stored", "loaded"):
                way, size = WAYS[event == "loaded"], count * self.layout.slot_bytes
                numbers.add("kvstore_tier_bytes", label, tier, way, by=size)
        evictions.clear()
        moved.clear()

    def end_count(self) -> None:
        """Count for the last time: it is forgotten, or given up."""
        self.count()
        self._numbers.close_namespace(self.label)

    @property
    def at_rest(self) -> bool:
        """Tell whether no engine has it, and nothing goes on there that a turn has to move on."""
        manager, tiering = self.manager, self.tiering
        if self.sessions or self.growing or manager.clearing or self.over_quota:
            return False
        if len(manager.leases):
            return False
        settled = all(m.state == "live" and not m.waiting for m in self.extents.values())
        return settled and not (tiering.jobs_open or tiering.queued)

    @property
    def unused(self) -> bool:
        """Tell whether it is at rest, and nothing is in it."""
        return self.at_rest and not (len(self.manager.index) or self.manager.slots.granted)

    @property
    def coming(self) -> bool:
        """Tell whether an extent is being made or mapped."""
        return self.growing or any(m.state == "mapping" for m in self.extents.values())
