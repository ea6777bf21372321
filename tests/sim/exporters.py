"""Exporters of a simulated fleet: they move bytes between stores, in simulated time, and may fail.

A transfer reads its source at one moment and ends at a later one. It cannot be called back: what
was given up is read and written all the same, unless it had not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import msgspec

from kvstore.handover import transfers as t
from kvstore.handover.runs import Part
from kvstore.store.store import Store
from tests.fuzz.site import LANDING_EXTENT, Mover
from tests.harness.handover_moves import LandingSlots
from tests.sim.cables import Cables
from tests.sim.store import MS
from tiers.nixl import messages as nixl
from tiers.nixl.supervisor import Down

STARTS_MS = (0, 20, 800)
FULL = 12  # pieces of work under way; beyond, no write is started


def _nothing() -> t.Event:
    return Down("")


def _fail(work: Callable[[], t.Event], failed: t.Event, *, moves: bool) -> t.Event:
    """Fail, though all may have been moved."""
    if moves:
        work()
    return failed


class Piece(msgspec.Struct, eq=False):
    """One piece of work: its bytes move at one time, and its event comes at another.

    peer: the exporter at the other end; empty: a thread's work. failed: its event if it fails.
    """

    moves_ns: int = 0
    ends_ns: int = 0
    work: Callable[[], t.Event] = _nothing
    peer: str = ""
    extent: int = -1  # of ours
    part: Part | None = None
    failed: t.Event | None = None
    event: t.Event | None = None
    abandoned: bool = False


class _Landing(LandingSlots):
    """None of its slots is read or written that is free."""

    def view(self, slot: int) -> memoryview:
        assert slot not in self._free, "a landing slot is used that is free"
        return super().view(slot)


class Exporter(Mover):
    """One store's exporter; it dies with the store's process, and at other times."""

    def __init__(self, net: Cables, name: str, host: str, landing: int) -> None:
        """host: where it runs. landing: its landing slots."""
        self._cables, self._host, self._landing_slots = net, host, landing
        self._pieces: list[Piece] = []
        self._next = Piece()  # what is known of the work to come
        self._wanted: dict[int, None] = {}  # extents to map
        self._leaving: dict[int, None] = {}
        self.mapped: set[int] = set()
        self.store: Store | None = None
        self.fails = 0.0  # share of transfers
        self.slowness_ms = 2
        self.frozen: Callable[[str], bool] = lambda _: False  # whether a host is
        self._ready_ns: int | None = None
        self.crashes = 0
        super().__init__(net, name)

    # Its process

    @property
    def up(self) -> bool:
        return self.agent in self._cables.movers

    def wake(self) -> None:
        if self._ready_ns is None and not self.up:
            self._ready_ns = self._cables.clock.ns + self._cables.rng.choice(STARTS_MS) * MS

    def _start(self) -> None:
        """Be another process, some time later."""
        self.agent = f"{self._name}-{next(self._starts)}"
        self._ready_ns = None

    def _begin(self) -> None:
        self._ready_ns = None
        self._cables.movers[self.agent] = self
        for extent in self._wanted:
            self._map(extent)
        self._events.append(nixl.Ready(self.agent, b"metadata"))
        for landing in self.landings.values():
            landing.base = 4096 * landing.extent

    def _map(self, extent: int) -> None:  # reached with the next Ready
        self.mapped.add(extent)
        self._events.append(nixl.Mapped(extent, 4096 * extent))

    def restart(self, why: str) -> None:
        """End: what it moved has failed, and what threads do goes on. Then start again."""
        self.restarts += 1
        self._pieces, ended = [p for p in self._pieces if not p.peer], self._pieces
        self._events += [piece.failed for piece in ended if piece.failed is not None]
        self.known.clear()
        self.mapped.clear()
        for landing in self.landings.values():
            landing.base = 0
        if self.up:
            del self._cables.movers[self.agent]
            self._events.append(Down(why))
        self._start()
        self.wake()

    def die(self) -> None:
        """End with the store: nothing of it moves any more."""
        self._cables.movers.pop(self.agent, None)
        self._pieces.clear()
        self.store = None

    # Memory

    def map(self, extent: int, _fd: int, _size: int, *, writable: bool) -> None:
        assert not writable
        self._wanted[extent] = None
        if self.up:
            self._map(extent)
            self._events.append(nixl.Ready(self.agent, b"metadata"))

    def unmap(self, extent: int) -> None:
        self._wanted.pop(extent)
        self._leaving[extent] = None

    def landing(self, namespace: str, slot_bytes: int) -> LandingSlots:
        if namespace not in self.landings:
            number = LANDING_EXTENT + len(self.landings)
            made = _Landing(number, self._landing_slots, slot_bytes)
            made.base = 4096 * number if self.up else 0
            self.landings[namespace] = made
        return self.landings[namespace]

    def slot(self, agent: str, extent: int, number: int) -> bytes | None:
        if agent and agent not in self.known:
            return None
        owner = cast("Exporter | None", self._cables.movers.get(agent) if agent else self)
        if owner is None or owner.store is None or (agent and extent not in owner.mapped):
            return None
        for namespace in owner.store.namespaces.values():
            mapping = namespace.extents.get(extent)
            if mapping is not None and number < mapping.memory.count:
                return bytes(mapping.memory.slot(number))
        return None

    def over_tcp(self, _host: str) -> bool:
        return self._cables.tcp

    # Work

    @property
    def has_room(self) -> bool:  # type: ignore[override]
        return len(self._pieces) < FULL

    @property
    def quarantined_bytes(self) -> int:
        return sum(piece.abandoned for piece in self._pieces)

    def start(self, part: Part, move: nixl.Transfer | nixl.Fill, digest: str | None = None) -> None:
        failed = t.Written(part, False) if digest is None else t.Arrived(digest, part, False)
        self._next = Piece(peer=move.peer, extent=move.extent, part=part, failed=failed)
        super().start(part, move, digest)

    def do(self, work: Callable[[], t.Event]) -> None:
        rng = self._cables.rng
        piece, self._next = self._next, Piece()
        piece.moves_ns = self._cables.clock.ns + rng.randint(0, self.slowness_ms * MS)
        piece.ends_ns = piece.moves_ns + rng.randint(0, self.slowness_ms * MS)
        piece.work = work
        if piece.failed is not None and rng.random() < self.fails:
            piece.work = partial(_fail, work, piece.failed, moves=rng.random() < 0.5)
        self._pieces.append(piece)

    def abandon(self, part: Part) -> None:
        """What has not begun does not begin, if none of it is wanted any more."""
        given_up = set(part.positions)
        for piece in self._pieces:
            of = piece.part
            if of is None or of[:2] != part[:2] or not given_up.issuperset(of.positions):
                continue
            piece.abandoned = True
            if piece.event is None and piece.failed is not None:
                event = piece.failed
                if isinstance(event, t.Written):
                    event = t.Written(of, False, stopped=True)
                piece.event = event

    def _stands(self, piece: Piece) -> bool:
        """Tell whether a transfer does not go on now: its other end does not."""
        other = self._cables.movers.get(piece.peer)
        host = cast("Exporter", other)._host if other is not None else ""
        return bool(host) and (self.frozen(host) or self._cables.are_apart(self._host, host))

    def poll(self, _now_ns: int) -> Sequence[t.Event]:
        if self._ready_ns is not None and self._cables.clock.ns >= self._ready_ns:
            self._begin()
        events, self._events = self._events, []
        left = []
        for piece in self._pieces:
            stands = bool(piece.peer) and self._stands(piece)
            if piece.event is None and piece.moves_ns <= self._cables.clock.ns and not stands:
                piece.event = piece.work()
            if piece.event is not None and piece.ends_ns <= self._cables.clock.ns and not stands:
                events.append(piece.event)
            else:
                left.append(piece)
        self._pieces = left
        used = {piece.extent for piece in left}
        for extent in [extent for extent in self._leaving if extent not in used]:
            del self._leaving[extent]
            self.mapped.discard(extent)
            events.append(nixl.Mapped(extent))
        return events
