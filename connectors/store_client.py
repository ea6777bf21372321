"""The scheduler half's view of its store: answers, credits and known keys, never blocking.

DETACHED --attach thread was welcome--> ATTACHED
any --socket lost, Detach, no answer in time--> DETACHED (answers are misses; reconnecting)
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from connectors.store_connection import Attacher, Link, LinkLost
from kvstore.core import limits
from kvstore.wire import engine as p
from kvstore.wire import framing

T = TypeVar("T")

log = logging.getLogger(__name__)

HELD_COST = 4
HEARD = p.NEWS_MAX // 2  # keys dealt with are told to the store by so many
UNSTORED_MAX = 1024  # keys that wait to be told; each costs the store a microsecond
STEP_BYTES = 4 << 20
"""Of hashes in one message, and of what a store has not read when it is told more: many prompts
of a million tokens that come at once are no message that it takes, nor fit into what waits."""
TOKENS_BYTES = 128 << 10
"""Of token ids in one message: 1,300 blocks of 16 tokens, which the store takes some 2 ms for."""
TOKENS_BYTES_MAX = 8 << 20  # of those that wait
MEMORY, DISK = "memory", "disk"
ALL = 1 << 62  # more blocks than a request can have
_NOTHING = p.Step()
_Sized = p.Lookup | p.HandedOver | p.EngineBlocks | p.Prefix | p.BlockTokens
KNOWN_MAX = 19_000  # at 19,660 keys a set grows for 0.3 ms, the time before, at 4,915, for 0.07
FORGOTTEN_PER_KEY = 2  # so that all have gone before there are more to forget


class GroupHits:
    """Present blocks of one group: block index -> (slot, generation); indices ascend."""

    __slots__ = ("_generations", "_indices", "_slots", "end")

    def __init__(self, indices: Sequence[int], slots: Sequence[int], gens: Sequence[int]) -> None:
        """All three have one item per block. Raises ValueError if they do not."""
        if not len(indices) == len(slots) == len(gens):
            raise ValueError(f"{len(indices)} blocks, {len(slots)} slots, {len(gens)} generations")
        self._indices, self._slots, self._generations = indices, slots, gens
        self.end = indices[-1] + 1 if indices else 0  # behind the last one; most questions are

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, index: int) -> bool:
        if index >= self.end:
            return False
        return self._indices[bisect_left(self._indices, index)] == index

    @property
    def leading(self) -> int:
        """Count the blocks from the first on, up to the first that is missing."""
        at = self._indices
        if len(at) == self.end:
            return self.end
        return bisect_left(range(len(at)), 1, key=lambda n: at[n] > n)

    def before(self, end: int) -> GroupHits:
        """Return those of the blocks before this one."""
        if end >= self.end:
            return self
        at = bisect_left(self._indices, end)
        return GroupHits(self._indices[:at], self._slots[:at], self._generations[:at])

    def any_of(self, first: int, end: int) -> bool:
        """Return True if any of the blocks first..end-1 is present."""
        if first >= self.end:
            return False
        return self._indices[bisect_left(self._indices, first)] < end

    def run(self, first: int, end: int) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return slots and generations of blocks first..end-1; None if one is missing."""
        at = bisect_left(self._indices, first)
        stop = at + end - first
        if stop > len(self._indices) or (stop > at and self._indices[stop - 1] != end - 1):
            return None
        return self._slots[at:stop], self._generations[at:stop]


NO_HITS = GroupHits((), (), ())


class KnownKeys:
    """Keys of blocks that are in the store's memory, by its last messages.

    A set of all would stop a step for milliseconds when it grows, and again when it is dropped.
    So the keys are in two sets of a limited size. Once the newer one is full, the older one is
    forgotten, and emptied bit by bit. A block whose key is forgotten is copied once more.
    """

    __slots__ = ("_forgotten", "_newer", "_older")

    def __init__(self) -> None:
        self._newer: set[bytes] = set()
        self._older: set[bytes] = set()
        self._forgotten: set[bytes] = set()

    def add(self, keys: Sequence[bytes]) -> None:
        """Note that blocks are there now."""
        self._newer.update(keys)
        for _ in range(min(len(self._forgotten), FORGOTTEN_PER_KEY * len(keys))):
            self._forgotten.pop()
        if len(self._newer) >= KNOWN_MAX:
            self._forgotten, self._older, self._newer = self._older, self._newer, set()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Note that blocks are not there any more."""
        self._newer.difference_update(keys)
        self._older.difference_update(keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._newer or key in self._older

    def all(self) -> list[bytes]:
        """List every key once."""
        return [*(self._older - self._newer), *self._newer]

    def none_of(self, keys: Sequence[bytes]) -> bool:
        """Return True if no key is known."""
        return self._newer.isdisjoint(keys) and self._older.isdisjoint(keys)


class BlockVersions:
    """A version counter for each of an engine's blocks, in memory that its store can see.

    The store compares versions before and after a peer has read a block in the engine's memory. A
    message would come too late, since the next step overwrites the block. Written here only.
    """

    def __init__(self, fd: int, blocks: int) -> None:
        """Map the store's memory, one u32 for each block; takes over the descriptor."""
        try:
            memory = mmap.mmap(fd, blocks * framing.WORD)
        finally:
            os.close(fd)
        self.blocks = blocks
        self._versions = np.frombuffer(memory, np.uint32)

    def packed(self, blocks: Sequence[int]) -> bytes:
        """Return the versions of these blocks, u32."""
        found: bytes = self._versions[np.asarray(blocks)].tobytes()
        return found

    def advance(self, blocks: Iterable[int]) -> None:
        """Blocks get other content at once: what peers were offered of them is invalid."""
        found = np.fromiter(blocks, np.int64)
        self._versions[found[found < self.blocks]] += 1

    def invalidate_all(self) -> None:
        """End of the session: overwritten blocks advance no version from now on."""
        self._versions += 1


class BlockChange(NamedTuple):
    """A block entered (stored) or left a medium: MEMORY or DISK."""

    medium: str
    stored: bool
    key: bytes


class Grant(msgspec.Struct, frozen=True):
    """A lookup's answer: what is present, by group; valid until until_ns.

    kept: how many leading blocks the store has in its own tiers after the load.
    missed: why no block after the hit is one, and up to which block that is so.
    """

    lease: int
    until_ns: int
    hits: tuple[GroupHits, ...]
    sources: dict[str, int]
    capped: bool = False
    kept: int = ALL
    missed: tuple[str, int] = ("", 0)


class StoreClient:
    """Talks to the store from the engine's step thread; sends one batch per step."""

    def __init__(self, attacher: Attacher, clock: Callable[[], int]) -> None:
        """Start attaching. clock(): monotonic nanoseconds."""
        self.session = 0  # 0: not attached
        self.defer_ms = 0
        self.side_channel = ""  # host:port where other stores can ask ours
        self.credits: deque[int] = deque()
        self.collect_events = False
        self._changes: deque[BlockChange | p.Held] = deque()  # few: the store waits, see NEWS_MAX
        self._heard = 0  # keys that were dealt with, and the store has not heard of
        self.keeps_tokens = False  # the store does, of blocks that it is told of
        self.has_pages = False  # of its snapshot there is more, which has not been asked for
        self._tokens: list[p.BlockTokens] = []
        self._tokens_bytes = 0
        self._snapshot: p.Snapshot | None = None  # to be asked for
        self.stats: Counter[str] = Counter()  # events and blocks, since take_stats()
        self._counts: Counter[str] = Counter()  # events that the store has not heard of
        self._attacher = attacher
        self.clock = clock
        self._link: Link | None = None
        self.known = KnownKeys()  # blocks that are in the store's memory
        self._asked_ns: dict[int, int] = {}
        self._grants: dict[int, Grant] = {}
        self.answered: list[int] = []  # lookups that have an answer since the reader's last look
        self._lookups: list[p.Lookup] = []
        self._release: list[int] = []
        self._hand_overs: list[p.HandedOver] = []
        self._remote_releases: list[p.Unwanted] = []
        self._tenants: set[str] = set()  # of requests
        self._untold_tenants: list[str] = []  # the store has not heard of them
        self._pins: list[p.Prefix] = []
        self._readable_blocks: list[p.EngineBlocks] = []
        self._versions: BlockVersions | None = None
        self._usage_hits: Counter[str] = Counter()
        self._usage_missed: Counter[str] = Counter()
        self._unstored: list[bytes] = []
        self._next_ask = 1
        attacher.start()

    # Attaching

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait for the session to be active; at start-up only. Raises the store's refusal."""
        end_ns = self.clock() + int(timeout_s * 1e9)
        while self.clock() < end_ns:
            if self._attacher.refused is not None:
                raise self._attacher.refused
            self.receive(0.05)
            if self._link is None:
                time.sleep(0.01)
            if self.session:
                return True
        return False

    def detach(self, reason: str) -> None:
        """Forget everything of this session and start connecting again."""
        if self._link is None:
            return
        log.warning("kvstore: detached: %s; every lookup is a miss until the store is back", reason)
        self._invalidate_versions()
        self.count("detached")
        self._link.close(reason)
        self._link, self.session = None, 0
        self.credits.clear()
        if self.collect_events:  # the engine cannot load these: a router should not count them
            self._changes.extend(BlockChange(MEMORY, False, key) for key in self.known.all())
        self.known = KnownKeys()
        # The next session's store has not sent the keys that still wait here.
        self._heard = -sum(isinstance(change, BlockChange) for change in self._changes)
        self.keeps_tokens = self.has_pages = False
        self._tokens, self._tokens_bytes, self._snapshot = [], 0, None
        self._asked_ns.clear()
        self._grants.clear()
        self.answered.clear()
        self._lookups, self._release = [], []
        self._hand_overs, self._remote_releases, self._readable_blocks = [], [], []
        self._untold_tenants = sorted(self._tenants)
        self.side_channel = ""
        self._attacher.start()

    def close(self) -> None:
        """Close the connection and end the thread; safe to call twice."""
        self._attacher.close()
        self._invalidate_versions()
        if self._link is not None:
            self._link.close()
            self._link, self.session = None, 0

    # Engine blocks that peers may read in the engine's memory

    def publish_blocks(
        self, slots: Sequence[int], keys: Sequence[bytes], blocks: Sequence[int]
    ) -> None:
        """Let peers read engine blocks that are being copied to slots, if the store supports it.

        blocks: as many for each slot.
        """
        versions = self._versions
        if versions is not None and blocks and max(blocks) < versions.blocks:
            packed = versions.packed(blocks)
            self._readable_blocks.append(
                p.EngineBlocks(framing.u32(slots), tuple(keys), framing.u32(blocks), packed)
            )

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Engine blocks get other content at once: peers must not use what was in them."""
        if self._versions is not None:
            self._versions.advance(blocks)

    def _invalidate_versions(self) -> None:
        if self._versions is not None:
            self._versions.invalidate_all()
            self._versions = None

    # Asking

    def ask(self, lookup: p.Lookup) -> int:
        """Queue a lookup under a new number and return that; 0 while not attached."""
        if not self.session:
            return 0
        number = self._next_ask
        self._next_ask += 1
        self._lookups.append(msgspec.structs.replace(lookup, ask=number))
        self._asked_ns[number] = self.clock()
        return number

    def name_tenant(self, name: str) -> None:
        """Tell the store of a tenant, once, before anything of it is asked or stored."""
        if name not in self._tenants and len(self._tenants) < limits.TENANTS_MAX:
            self._tenants.add(name)
            self._untold_tenants.append(name)

    def pin(self, prefix: p.Prefix) -> None:
        """Have the store keep a prefix in memory, or no longer; while not attached, once it is."""
        self._pins.append(prefix)
        del self._pins[: -limits.PINS_MAX]

    def report_hand_over(self, state: p.HandedOver) -> None:
        """Tell the store the state of a request that another engine continues."""
        if self.session:
            self._hand_overs.append(state)

    def release_remote(self, peer: str, request: str) -> None:
        """Have a peer release what it holds for a request of this engine."""
        if self.session:
            self._remote_releases.append(p.Unwanted(peer, request))

    def asked_ns(self, ask: int) -> int | None:
        """Return when a lookup was asked; None if it was lost with its session."""
        return self._asked_ns.get(ask)

    def unanswered_ns(self, ask: int) -> int:
        """Return how long a lookup has been waiting for its answer; 0 if it is not."""
        if ask in self._grants:
            return 0
        now_ns = self.clock()
        return now_ns - self._asked_ns.get(ask, now_ns)

    def grant(self, ask: int) -> Grant | None:
        """Return the answer, if it is there; it stays until taken."""
        return self._grants.get(ask)

    def drop(self, ask: int) -> None:
        """Give up a lookup or its answer; an unused lease is released."""
        self._asked_ns.pop(ask, None)
        self._lookups = [lookup for lookup in self._lookups if lookup.ask != ask]
        grant = self._grants.pop(ask, None)
        if grant is not None and grant.lease:
            self._release.append(grant.lease)

    def take(self, ask: int) -> None:
        """Use an answer: its lease now ends when every worker has reported the load."""
        self._asked_ns.pop(ask, None)
        self._grants.pop(ask, None)

    def count_usage(self, hits: Mapping[str, int], missed: Mapping[str, int]) -> None:
        """Count the tokens of an admitted request: those served by tier, the others by reason."""
        self._usage_hits.update(hits)
        self._usage_missed.update(missed)

    def report_unstored(self, keys: Sequence[bytes]) -> None:
        """Tell the store which blocks found no slot; of many the first ones."""
        if self.session:
            self._unstored += keys[: UNSTORED_MAX - len(self._unstored)]

    def count(self, event: str, by: int = 1) -> None:
        """Count an event, for the engine's statistics and for the store's metrics."""
        self.stats[event] += by
        self._counts[event] += by

    def take_stats(self) -> Counter[str]:
        """Return what was counted since the last call."""
        stats, self.stats = self.stats, Counter()
        return stats

    # The wire

    def send_step(self) -> None:
        """Send what has gathered, as one message; nothing if nothing has.

        What does not fit in it waits for the next.
        """
        if self._link is None or not self.session:
            return
        try:
            if self._link.waiting_bytes >= STEP_BYTES:
                self._link.flush()
                return
            step = p.Step(
                lookups=_take(self._lookups, _fitting(self._lookups)),
                release=_take(self._release),
                lookup_tokens=self._usage_hits.total() + self._usage_missed.total(),
                hit_tokens=dict(self._usage_hits),
                missed_tokens=dict(self._usage_missed),
                counts=dict(self._counts),
                handed_over=_take(self._hand_overs, _fitting(self._hand_overs)),
                unwanted=_take(self._remote_releases),
                engine_blocks=_take(self._readable_blocks, _fitting(self._readable_blocks)),
                unstored=_take(self._unstored),
                tenants=_take(self._untold_tenants),
                pins=_take(self._pins, _fitting(self._pins)),
                heard=self._heard if self._heard >= HEARD else 0,
                tokens=_take(self._tokens, _fitting(self._tokens, TOKENS_BYTES)),
                snapshot=self._snapshot,
            )
            if step == _NOTHING:
                self._link.flush()
                return
            self._usage_hits.clear()
            self._usage_missed.clear()
            self._counts.clear()
            self._heard -= step.heard
            self._tokens_bytes -= sum(map(_bytes_of, step.tokens))
            self._snapshot = None
            self._link.send(step)
        except LinkLost as exc:
            self.detach(str(exc))

    @property
    def has_hand_overs_to_send(self) -> bool:
        """True while the store has yet to hear of a request that two engines share."""
        return bool(self._hand_overs or self._remote_releases)

    def receive(self, timeout_s: float = 0.0) -> None:
        """Take in what has arrived, waiting at most timeout_s for the first message."""
        attached = self._attacher.take() if self._link is None else None
        if attached is not None:
            self._link, welcome = attached
            self.session, self.defer_ms = welcome.session, welcome.defer_ms
            self.side_channel = welcome.side_channel
            if self.collect_events:
                self.keeps_tokens = self.has_pages = welcome.tokens
                if not welcome.tokens and welcome.there:
                    self.count("events_untold", welcome.there)
            if welcome.warning:
                log.warning("kvstore: %s", welcome.warning)
        if self._link is None:
            return
        try:
            for message in self._link.receive(timeout_s):
                self._handle(message)
                if self._link is None:
                    return
        except (LinkLost, ValueError) as exc:  # GroupHits: blocks, slots and generations differ
            self.detach(str(exc))

    def _handle(self, message: framing.Message) -> None:
        if isinstance(message, p.Answers):
            self._answers(message)
        elif isinstance(message, p.BlockVersions) and self._link is not None:
            self._invalidate_versions()
            try:
                self._versions = BlockVersions(self._link.take_fd(), message.blocks)
            except (OSError, ValueError) as exc:
                log.warning("kvstore: peers cannot read this engine's memory: %s", exc)
        elif isinstance(message, p.Detach | p.Refused):
            self.detach(message.reason)

    def _answers(self, answers: p.Answers) -> None:
        for granted in answers.granted:
            asked_ns = self._asked_ns.get(granted.ask)
            if asked_ns is None:
                if granted.lease:
                    self._release.append(granted.lease)
                continue
            self._grants[granted.ask] = Grant(
                lease=granted.lease,
                until_ns=asked_ns + granted.lease_ms * 1_000_000 * 3 // 4,
                hits=tuple(
                    GroupHits(
                        array(framing.U32, hit.indices),
                        array(framing.U32, hit.slots),
                        array(framing.U32, hit.generations),
                    )
                    for hit in granted.hits
                ),
                sources=granted.sources,
                capped=granted.capped,
                kept=ALL if granted.kept is None else granted.kept,
                missed=granted.missed,
            )
            self.answered.append(granted.ask)
        self.credits.extend(array(framing.U32, answers.credits))
        if answers.lost:  # blocks that have left may be among them
            self.known = KnownKeys()
        self._note_changes(answers)
        self.known.add(answers.added)
        self.known.remove(answers.removed)
        if answers.page is not None:
            self.has_pages = not answers.page.last
            self._changes.extend(answers.page.blocks)
            self.known.add([held.key for held in answers.page.blocks if held.memory])
        if answers.lost and self.collect_events:
            self.count("events_untold", answers.lost)

    def _note_changes(self, answers: p.Answers) -> None:
        """Keep what entered and left the tiers for take_changes(), if that is wanted."""
        added: Sequence[bytes] = answers.added
        if self.collect_events:  # a duplicate store has the store tell a key again: no event
            added = [key for key in added if key not in self.known]
            self._heard += len(answers.added) - len(added)
        for medium, stored, keys in (
            (MEMORY, True, added),
            (MEMORY, False, answers.removed),
            (DISK, True, answers.disk_added),
            (DISK, False, answers.disk_removed),
        ):
            if self.collect_events:
                self._changes.extend(BlockChange(medium, stored, key) for key in keys)
            else:
                self._heard += len(keys)

    def take_changes(self, most: int) -> list[BlockChange | p.Held]:
        """Return up to so many blocks that entered or left a tier, the first ones first.

        A block that was there before is more work, and counts as HELD_COST.
        """
        taken: list[BlockChange | p.Held] = []
        while self._changes and most > 0:
            taken.append(self._changes.popleft())
            held = isinstance(taken[-1], p.Held)
            most -= HELD_COST if held else 1
            self._heard += not held
        return taken

    def describe(self, told: p.BlockTokens) -> None:
        """Tell a store that keeps token ids those of some blocks, over several steps if need be.

        Of more than can wait the oldest are dropped: no engine that attaches can tell them.
        """
        self._tokens.append(told)
        self._tokens_bytes += _bytes_of(told)
        while self._tokens_bytes > TOKENS_BYTES_MAX:
            dropped = self._tokens.pop(0)
            self._tokens_bytes -= _bytes_of(dropped)
            self.count("events_untold", len(dropped.hashes) // dropped.width)

    def ask_page(self, width: int, scope: bytes) -> None:
        """Ask for the next page of what was there before, once what has come is dealt with."""
        if self.has_pages and not self._changes:
            self._snapshot, self.has_pages = p.Snapshot(width, scope), False


def _take(queue: list[T], count: int | None = None) -> tuple[T, ...]:
    """Take the first of what waits: as many as one message may have."""
    most = limits.STEP_ITEMS_MAX if count is None else min(count, limits.STEP_ITEMS_MAX)
    taken = tuple(queue[:most])
    del queue[:most]
    return taken


def _fitting(queue: Sequence[_Sized], most: int = STEP_BYTES) -> int:
    """Count the first of these that are so many bytes together; one in any case."""
    size = 0
    for count, item in enumerate(queue):
        size += _bytes_of(item)
        if size > most and count:
            return count
    return len(queue)


def _bytes_of(item: _Sized) -> int:
    if isinstance(item, p.BlockTokens):
        return len(item.hashes) + len(item.tokens)
    if isinstance(item, p.EngineBlocks):
        return sum(map(len, item.keys)) + len(item.slots) + 2 * len(item.blocks)
    return len(item.hashes)
