"""One engine in the store: its connections, its slot credits, its open questions.

    JOINING --all connections there, all extents mapped--> ACTIVE
    JOINING, ACTIVE --any connection closed, or a protocol error--> ENDING
    ENDING --last worker's connection closed--> gone: slots and leases are free again

Until then a worker may still write into a granted slot, so none of them is reused before. The
scheduler half writes none: it is not waited for.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankGeometry, RankLayout
from kvstore.core.types import BlockKey, Chain, Changes, LeaseId, LookupResult, Slot, StoreOutcome
from kvstore.logs import Subject
from kvstore.store.key_news import DISK, MEMORY, KeyNews
from kvstore.store.namespace import Namespace
from kvstore.store.snapshot import SnapshotPages
from kvstore.store.token_ids import TokenIds
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.credentials import Process


class Phase(enum.Enum):
    """Where a session is in its life."""

    JOINING = "joining"
    ACTIVE = "active"
    ENDING = "ending"


class Ask(msgspec.Struct, eq=False):
    """A lookup that has no answer yet."""

    ask: int
    namespace: Namespace
    chain: Chain
    blocks: int  # of these that may be loaded
    asked_ns: int
    deadline_ns: int
    memory_only: bool = False
    off_disk: bool = False  # what comes up for it
    block_ns: int | None = None  # as in Lookup
    look_ns: int = 0  # not before
    fetch: int | None = None  # what a peer was asked for it
    direct: dict[tuple[int, int], int] | None = None  # group, index -> position: workers read it
    offered: Mapping[int, str] | None = None  # of these positions: in which tier
    hint: str = ""  # the peer that a hint names, until it has answered
    hint_ns: int = 0  # until when it may

    @property
    def compute_ns(self) -> int | None:
        """Say how long computing a block takes, by another engine if need be; 0: not known.

        None: all that is here is used.
        """
        if self.block_ns != 0:
            return self.block_ns
        return self.namespace.block_ns or self.namespace.peer_block_ns

    def of_peer(self, group: int, index: int) -> LookupResult:
        """Tell whether workers can read a block from the peer that was asked."""
        position = None if self.direct is None else self.direct.get((group, index))
        if position is None:
            return LookupResult.MISS
        if self.offered is None:
            return LookupResult.RETRY
        return LookupResult.HIT if position in self.offered else LookupResult.MISS


class Writing(msgspec.Struct, eq=False):
    """A slot that some ranks have written, all of them with the same key."""

    key: bytes
    ranks: set[int] = set()
    ok: bool = True


class Reading(msgspec.Struct, eq=False):
    """What ranks have said of a lease that they read under: which of them, and slots."""

    ranks: set[int] = set()
    damaged: set[Slot] = set()
    late: bool = False  # one of them gave it up


class News(msgspec.Struct):
    """What gathered for a scheduler half since the last message to it: fields of Answers."""

    granted: list[p.Granted] = []
    credits: list[Slot] = []
    page: p.Page | None = None


class Session(msgspec.Struct, eq=False):
    """State of one engine's session; scheduler and workers are connection ids."""

    number: int
    engine: str
    world: int
    process: Process | None = None  # of the scheduler half, or of a worker before that has come
    model: str = ""
    warning: str = ""  # why it shares no blocks, as it began
    phase: Phase = Phase.JOINING
    scheduler: int | None = None
    workers: dict[int, int] = {}  # rank -> connection
    geometries: dict[int, RankGeometry] = {}
    layouts: tuple[RankLayout, ...] = ()  # by rank, once all geometries are known
    credit_slots: int = 0
    events: bool = False  # it wants to hear what is on disk
    namespace: Namespace | None = None
    granted: set[Slot] = set()
    writing: dict[Slot, Writing] = {}  # slots that some ranks have reported
    loading: dict[LeaseId, Reading] = {}
    fetches: dict[LeaseId, int] = {}  # lease -> what workers read of a peer for it
    readers: set[int] = set()  # ranks that can
    asks: dict[int, Ask] = {}
    asked_bytes: int = 0  # of the hashes of asks
    answered_ns: list[int] = []  # when what is answered with the next message was asked
    news: News = msgspec.field(default_factory=News)
    keys: KeyNews = msgspec.field(default_factory=KeyNews)
    snapshot: SnapshotPages | None = None
    page_due: bool = False  # it waits for the next one
    stirred: bool = True  # the next turn visits it

    @property
    def subject(self) -> Subject:
        """Name the engine for a line of the log."""
        pid, uid = self.process or (None, None)
        digest = None if self.namespace is None else self.namespace.layout.digest[:12]
        return Subject(
            engine=self.engine, model=self.model, pid=pid or None, uid=uid, namespace=digest
        )  # fmt: skip

    def part(self, connection: int) -> str:
        """Name the half of the engine that has a connection."""
        ranks = [rank for rank, worker in self.workers.items() if worker == connection]
        return f"worker {ranks[0]}" if ranks else "scheduler"

    def connections(self) -> list[int]:
        """List the connections that are open."""
        return [*([] if self.scheduler is None else [self.scheduler]), *self.workers.values()]

    def taken(self, role: str, rank: int) -> bool:
        """Tell whether this part of the engine is connected."""
        return self.scheduler is not None if role == "scheduler" else rank in self.workers

    def join(self, connection: int, hello: p.Hello, process: Process | None = None) -> None:
        """Take in a connection. Raises ProtocolError for one that does not fit."""
        if hello.world != self.world:
            raise ProtocolError(f"world of {hello.world}, the session has {self.world}")
        if hello.role == "scheduler":
            self.scheduler = connection
            self.credit_slots, self.events = hello.credit_slots, hello.events
        elif hello.role == "worker" and hello.geometry is not None:
            if not 0 <= hello.rank < hello.world:
                raise ProtocolError(f"rank {hello.rank}, expected 0..{hello.world - 1}")
            self.workers[hello.rank] = connection
            self.geometries[hello.rank] = hello.geometry
            self.readers = self.readers | {hello.rank} if hello.direct else self.readers
        else:
            raise ProtocolError(f"role {hello.role!r}, expected scheduler, or worker with geometry")
        traits = {} if hello.geometry is None else hello.geometry.traits
        self.model = hello.model or self.model or traits.get("model", "")
        if self.process is None or hello.role == "scheduler":
            self.process = process

    @property
    def complete(self) -> bool:
        """Tell whether every part of the engine is connected."""
        return self.scheduler is not None and len(self.workers) == self.world

    @property
    def direct(self) -> bool:
        """Tell whether all workers can read a peer's slots themselves."""
        return len(self.readers) == self.world

    def heard(self, changes: Changes, on_disk: Changes) -> None:
        """Note for the scheduler half what entered and left memory, and the disk: net changes."""
        self.stirred = True
        self.keys.entered(changes.added, MEMORY)
        self.keys.left(changes.removed, MEMORY)
        if self.events:
            self.keys.entered(on_disk.added, DISK)
            self.keys.left(on_disk.removed, DISK)

    def of_events(self, namespace: Namespace, step: p.Step, tokens: TokenIds) -> None:
        """Do what a step says for KV events: it heard some, knows token ids, or wants a page."""
        self.keys.heard(step.heard)
        if not tokens.bytes_max:
            return
        for told in step.tokens:
            tokens.add(told)
        if step.snapshot is not None:
            if self.snapshot is None:
                self.snapshot = SnapshotPages(namespace, self.keys, step.snapshot)
            self.page_due = True

    def turn_page(self) -> None:
        """Answer the scheduler half's question for the next page, if it is there."""
        if self.page_due and self.snapshot is not None:
            self.news.page = page = self.snapshot.next()
            self.page_due = page is None
            if page is not None and page.last:
                self.snapshot = None

    def take_news(self) -> p.Answers | None:
        """Return what has gathered for the scheduler half, as one message; None if nothing has."""
        news, told = self.news, self.keys.take()
        if told is None and not any(msgspec.structs.astuple(news)):
            return None
        self.news, lost, self.keys.lost = News(), self.keys.lost, 0
        added, removed, disk_added, disk_removed = map(tuple, told or ((),) * 4)
        return p.Answers(
            granted=tuple(news.granted),
            credits=framing.u32(news.credits),
            added=added,
            removed=removed,
            disk_added=disk_added,
            disk_removed=disk_removed,
            lost=lost,
            page=news.page,
        )

    def written(self, namespace: Namespace, slot: Slot, writing: Writing) -> StoreOutcome:
        """All ranks have written a slot, or could not."""
        key, manager = BlockKey(writing.key), namespace.manager
        outcome = manager.complete_store(slot, ok=writing.ok)
        namespace.engines.stored(self.number, slot, key, ok=writing.ok)
        if outcome is StoreOutcome.FAILED or outcome is StoreOutcome.ORPHAN:
            namespace.unstored.add((key,), manager.now_s)
            manager.unkept.add((key,), manager.now_s)
        elif outcome is StoreOutcome.DUPLICATE and manager.ready(key) is not None:
            self.keys.there(key)
        return outcome

    def rank_of(self, connection: int) -> int:
        """Return whose connection it is. Raises ProtocolError if it is no worker's."""
        for rank, worker in self.workers.items():
            if worker == connection:
                return rank
        raise ProtocolError("a worker's message from a scheduler")

    def loaded(
        self, lease: LeaseId, rank: int, damaged: Collection[int], *, late: bool = False
    ) -> Reading | None:
        """Note that a rank has read; what all of them have said once every rank has, None before.

        damaged: of these, slots of the lease count: a worker may name any, again and again.
        A lease that has ended, or is another session's, is not kept in mind.
        """
        if self.namespace is None or not self.namespace.manager.leases.owned_by(lease, self.number):
            self.loading.pop(lease, None)
            return None
        found = self.loading.setdefault(lease, Reading())
        found.ranks.add(rank)
        entries = self.namespace.manager.leases.entries_of(lease) if damaged else ()
        found.damaged.update({entry.slot for entry in entries}.intersection(map(Slot, damaged)))
        found.late = found.late or late
        if len(found.ranks) < self.world:
            return None
        del self.loading[lease]
        return found
