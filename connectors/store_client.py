"""The scheduler half's view of its store: answers, credits and known keys, never blocking.

DETACHED --attach thread connected--> JOINING --Active--> ATTACHED
any --socket lost, Detach, no answer in time--> DETACHED (answers are misses; reconnecting)
"""

from __future__ import annotations

import logging
import time
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from connectors.block_versions import Board
from connectors.store_connection import LinkLost
from kvstore.core import limits
from kvstore.core.errors import KVStoreError
from kvstore.wire import engine as p
from kvstore.wire import framing

T = TypeVar("T")

log = logging.getLogger(__name__)

KNOWN_KEYS_MAX = 100_000
EVENTS_MAX = 100_000
STEP_BYTES = 4 << 20
"""Of hashes in one message, and of what a store has not read when it is told more: many prompts
of a million tokens that come at once are no message that it takes, nor fit into what waits."""
MEMORY, DISK = "memory", "disk"


class Places:
    """Present blocks of one group: block index -> (slot, generation); indices ascend."""

    __slots__ = ("_end", "_generations", "_indices", "_slots")

    def __init__(self, indices: Sequence[int], slots: Sequence[int], gens: Sequence[int]) -> None:
        """All three have one item per block. Raises ValueError if they do not."""
        if not len(indices) == len(slots) == len(gens):
            raise ValueError(f"{len(indices)} blocks, {len(slots)} slots, {len(gens)} generations")
        self._indices, self._slots, self._generations = indices, slots, gens
        self._end = indices[-1] + 1 if indices else 0  # most questions are about blocks behind it

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self._indices)

    def __contains__(self, index: int) -> bool:
        """Tell whether a block is present."""
        if index >= self._end:
            return False
        return self._indices[bisect_left(self._indices, index)] == index

    @property
    def leading(self) -> int:
        """Count the blocks from the first on, up to the first that is missing."""
        at = self._indices
        if len(at) == self._end:
            return self._end
        return bisect_left(range(len(at)), 1, key=lambda n: at[n] > n)

    def before(self, end: int) -> Places:
        """Return those of the blocks before this one."""
        if end >= self._end:
            return self
        at = bisect_left(self._indices, end)
        return Places(self._indices[:at], self._slots[:at], self._generations[:at])

    def all_of(self, first: int, end: int) -> bool:
        """Tell whether every one of the blocks first..end-1 is present."""
        return self.run(first, end) is not None

    def any_of(self, first: int, end: int) -> bool:
        """Tell whether one of the blocks first..end-1 is present."""
        if first >= self._end:
            return False
        return self._indices[bisect_left(self._indices, first)] < end

    def run(self, first: int, end: int) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return slots and generations of blocks first..end-1; None if one is missing."""
        at = bisect_left(self._indices, first)
        stop = at + end - first
        if stop > len(self._indices) or (stop > at and self._indices[stop - 1] != end - 1):
            return None
        return self._slots[at:stop], self._generations[at:stop]


NOWHERE = Places((), (), ())


class Happened(NamedTuple):
    """A block entered (stored) or left a medium: MEMORY or DISK."""

    medium: str
    stored: bool
    key: bytes


class Grant(msgspec.Struct, frozen=True):
    """A lookup's answer: what is present, by group; valid until until_ns.

    kept: how many leading blocks the store has itself, then.
    """

    lease: int
    until_ns: int
    hits: tuple[Places, ...]
    sources: dict[str, int]
    capped: bool = False
    kept: int = 1 << 62


class Wire(Protocol):
    """A connection to a store; Link is the real one."""

    def send(self, message: framing.Message) -> None:
        """Queue a message. Raises LinkLost."""
        ...

    @property
    def waiting_bytes(self) -> int:
        """Count what is queued and not sent."""
        ...

    def flush(self) -> None:
        """Send what is queued. Raises LinkLost."""
        ...

    def receive(self, timeout_s: float = 0.0) -> list[framing.Message]:
        """Return what has arrived. Raises LinkLost."""
        ...

    def take_fd(self) -> int:
        """Return the descriptor that came with a message."""
        ...

    def close(self) -> None:
        """Close."""
        ...


class Connections(Protocol):
    """Makes connections in the background; Attacher is the real one."""

    refused: KVStoreError | None

    def start(self) -> None:
        """Start making one."""
        ...

    def take(self) -> tuple[Wire, p.Welcome] | None:
        """Return it when it is there."""
        ...

    def close(self) -> None:
        """Stop making connections."""
        ...


class StoreClient:
    """Talks to the store from the engine's step thread; one batch out per step."""

    def __init__(self, attacher: Connections, clock: Callable[[], int]) -> None:
        """Start attaching. clock(): monotonic nanoseconds."""
        self.session = 0  # 0: not attached
        self.defer_ms = 0
        self.side_channel = ""  # host:port where other stores can ask ours
        self.credits: deque[int] = deque()
        self.events: deque[Happened] = deque(maxlen=EVENTS_MAX)
        self.events_lost = 0  # of these: the engine did not take them in time
        self.collect_events = False
        self.detached = 0
        self.counts: Counter[str] = Counter()
        self._attacher = attacher
        self._clock = clock
        self._link: Wire | None = None
        self._welcomed = 0
        self._known: set[bytes] = set()
        self._known_before: set[bytes] = set()
        self._asked_ns: dict[int, int] = {}
        self._grants: dict[int, Grant] = {}
        self._lookups: list[p.Lookup] = []
        self._settle: list[int] = []
        self._release: list[int] = []
        self._handing: list[p.Handing] = []
        self._let_go: list[p.LetGo] = []
        self._shown: list[p.Shown] = []
        self._board: Board | None = None
        self._usage_tokens = 0
        self._usage_hits: Counter[str] = Counter()
        self._next_ask = 1
        attacher.start()

    # Attaching

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait for the session to be active; at start-up only. Raises what refused us."""
        end_ns = self._clock() + int(timeout_s * 1e9)
        while self._clock() < end_ns:
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
        log.warning("kvstore: detached: %s; answers are misses until it is back", reason)
        self._leave_board()
        self.counts["detached"] += 1
        self.detached += 1
        self._link.close()
        self._link, self.session = None, 0
        self.credits.clear()
        self._known, self._known_before = set(), set()
        self._asked_ns.clear()
        self._grants.clear()
        self._forget_news()
        self.side_channel = ""
        self._attacher.start()

    def close(self) -> None:
        """Close the connection and end the thread; safe to call twice."""
        self._attacher.close()
        self._leave_board()
        if self._link is not None:
            self._link.close()
            self._link, self.session = None, 0

    # What others read in the engine's memory

    def show(self, slots: Sequence[int], keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Have peers read engine blocks that are copied to slots, as many for each, if they can."""
        if self._board is not None and blocks and max(blocks) < self._board.blocks:
            generations = self._board.generations(blocks)
            self._shown.append(
                p.Shown(framing.u32(slots), tuple(keys), framing.u32(blocks), generations)
            )

    def overwritten(self, blocks: Iterable[int]) -> None:
        """These engine blocks get other content, at once: nobody uses what was in them."""
        if self._board is not None:
            self._board.add(blocks)

    def _leave_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None

    # Asking

    def ask(self, lookup: p.Lookup) -> int | None:
        """Queue a lookup; returns its number, which is ours to give, None while not attached."""
        if not self.session:
            return None
        number = self._next_ask
        self._next_ask += 1
        self._lookups.append(msgspec.structs.replace(lookup, ask=number))
        self._asked_ns[number] = self._clock()
        return number

    def hand(self, handing: p.Handing) -> None:
        """Tell the store of a request that another engine goes on with."""
        if self.session:
            self._handing.append(handing)

    def let_go(self, peer: str, request: str) -> None:
        """Have a peer let go of what it holds for a request of ours."""
        if self.session:
            self._let_go.append(p.LetGo(peer, request))

    def asked_ns(self, ask: int) -> int | None:
        """Return when a question was asked; None if it was lost with its session."""
        return self._asked_ns.get(ask)

    def unanswered_ns(self, ask: int | None) -> int:
        """Return for how long the store owes an answer to this question; 0 if it does not."""
        if ask is None or ask in self._grants:
            return 0
        now_ns = self._clock()
        return now_ns - self._asked_ns.get(ask, now_ns)

    def grant(self, ask: int) -> Grant | None:
        """Return the answer, if it is there; it stays until taken."""
        return self._grants.get(ask)

    def drop(self, ask: int) -> None:
        """Give a question or its answer up; a lease not used goes back."""
        self._asked_ns.pop(ask, None)
        self._lookups = [lookup for lookup in self._lookups if lookup.ask != ask]
        grant = self._grants.pop(ask, None)
        if grant is not None and grant.lease:
            self._release.append(grant.lease)

    def take(self, ask: int) -> None:
        """Use an answer: its lease now ends when every worker has reported the load."""
        self._asked_ns.pop(ask, None)
        self._grants.pop(ask, None)

    def settle(self, ask: int) -> None:
        """Ask for what is ready now."""
        self._settle.append(ask)

    def used(self, lookup_tokens: int, hits: dict[str, int]) -> None:
        """Count a request that was admitted."""
        self._usage_tokens += lookup_tokens
        self._usage_hits.update(hits)

    def known_ready(self, key: bytes) -> bool:
        """Tell whether the store said that a block is ready, and not that it left."""
        return key in self._known or key in self._known_before

    def none_known(self, keys: Sequence[bytes]) -> bool:
        """Tell whether known_ready is false for all of them."""
        return self._known.isdisjoint(keys) and self._known_before.isdisjoint(keys)

    def all_known(self, keys: Sequence[bytes]) -> bool:
        """Tell whether known_ready is true for all of them."""
        lacking = [key for key in keys if key not in self._known]
        return self._known_before.issuperset(lacking)

    # The wire

    def send_step(self) -> None:
        """Send what has gathered, as one message; nothing if nothing has.

        What does not fit in it waits for the next.
        """
        if self._link is None or not self.session:
            return
        usage = None
        if self._usage_tokens or self._usage_hits:
            usage = p.Usage(self._usage_tokens, dict(self._usage_hits))
        try:
            if (self._has_news or usage) and self._link.waiting_bytes < STEP_BYTES:
                step = p.Step(
                    _take(self._lookups, _fitting(self._lookups)),
                    _take(self._settle),
                    _take(self._release),
                    usage,
                    dict(self.counts),
                    _take(self._handing, _fitting(self._handing)),
                    _take(self._let_go),
                    _take(self._shown, _fitting(self._shown)),
                )
                self._usage_tokens = 0
                self._usage_hits.clear()
                self.counts.clear()
                self._link.send(step)
            else:
                self._link.flush()
        except LinkLost as exc:
            self.detach(str(exc))

    @property
    def hands_over(self) -> bool:
        """Tell whether the store has to be told of a request that two engines share."""
        return bool(self._handing or self._let_go)

    @property
    def _has_news(self) -> bool:
        hands = self._handing, self._let_go, self._shown
        return any((self._lookups, self._settle, self._release, self.counts, *hands))

    def _forget_news(self) -> None:
        self._lookups, self._settle, self._release = [], [], []
        self._handing, self._let_go, self._shown = [], [], []

    def receive(self, timeout_s: float = 0.0) -> None:
        """Take in what has arrived, waiting at most timeout_s for the first message."""
        attached = self._attacher.take() if self._link is None else None
        if attached is not None:
            self._link, self._welcomed = attached[0], attached[1].session
            self.side_channel = attached[1].side_channel
        if self._link is None:
            return
        try:
            for message in self._link.receive(timeout_s):
                self._handle(message)
                if self._link is None:
                    return
        except LinkLost as exc:
            self.detach(str(exc))

    def _handle(self, message: framing.Message) -> None:
        if isinstance(message, p.Answers):
            self._answers(message)
        elif isinstance(message, p.Active):
            self.session, self.defer_ms = self._welcomed, message.defer_ms
        elif isinstance(message, p.Board) and self._link is not None:
            self._leave_board()
            try:
                self._board = Board(self._link.take_fd(), message.blocks)
            except (OSError, ValueError) as exc:
                log.warning("kvstore: peers read nothing in this engine's memory: %s", exc)
        elif isinstance(message, p.Detach | p.Refused):
            self.detach(message.reason)

    def _answers(self, answers: p.Answers) -> None:
        for granted in answers.granted:
            asked_ns = self._asked_ns.get(granted.ask)
            if asked_ns is None:
                if granted.lease:
                    self._release.append(granted.lease)
                continue
            until_ns = asked_ns + granted.lease_ms * 1_000_000 * 3 // 4
            hits = tuple(_unpack(hit) for hit in granted.hits)
            kept = 1 << 62 if granted.kept is None else granted.kept
            answer = granted.lease, until_ns, hits, granted.sources, granted.capped, kept
            self._grants[granted.ask] = Grant(*answer)
        self.credits.extend(array(framing.U32, answers.credits))
        self._known.update(answers.added)
        self._known.difference_update(answers.removed)
        self._known_before.difference_update(answers.removed)
        if len(self._known) > KNOWN_KEYS_MAX:  # forgetting is safe: a block is copied once more
            self._known, self._known_before = set(), self._known
        if self.collect_events:
            self._happened(MEMORY, answers.added, answers.removed)
            self._happened(DISK, answers.disk_added, answers.disk_removed)

    def _happened(self, medium: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Note what became of each key in all; the two lists are of one turn, in no order."""
        change = Counter(added)
        change.subtract(removed)
        fresh = [Happened(medium, of > 0, key) for key, of in change.items() if of]
        self.events_lost += max(0, len(self.events) + len(fresh) - EVENTS_MAX)
        self.events.extend(fresh)


def _take(queue: list[T], count: int | None = None) -> tuple[T, ...]:
    """Take the first of what waits: as many as one message may have."""
    most = limits.STEP_ITEMS_MAX if count is None else min(count, limits.STEP_ITEMS_MAX)
    taken = tuple(queue[:most])
    del queue[:most]
    return taken


def _fitting(queue: Sequence[p.Lookup | p.Handing | p.Shown]) -> int:
    """Count the first of these that are STEP_BYTES together; one in any case."""
    size = 0
    for count, item in enumerate(queue):
        size += _bytes_of(item)
        if size > STEP_BYTES and count:
            return count
    return len(queue)


def _bytes_of(item: p.Lookup | p.Handing | p.Shown) -> int:
    if isinstance(item, p.Shown):
        return sum(map(len, item.keys)) + len(item.slots) + 2 * len(item.blocks)
    return len(item.hashes)


def _unpack(hit: p.Hit) -> Places:
    return Places(
        array(framing.U32, hit.indices),
        array(framing.U32, hit.slots),
        array(framing.U32, hit.generations),
    )
