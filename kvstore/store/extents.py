"""Which namespace gets which memory: growth, and taking extents back when the cap is reached.

mapping --all workers whose sessions go on mapped it--> live --needed elsewhere--> retiring
retiring --no slot in use--> unmapping --all workers unmapped it--> given back
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable

from kvstore.core.types import Slot
from kvstore.store.namespace import Mapping, Namespace
from kvstore.store.session import Phase
from kvstore.units import sized
from kvstore.wire import engine as p
from kvstore.wire import framing
from tiers.cpu import CpuExtent, CpuMemory

log = logging.getLogger(__name__)

_MAP_LIMIT_NS = 60_000_000_000
_RETIRE_LIMIT_NS = 3_000_000_000
_RETRY_NS = 5_000_000_000  # after an extent could not be made
_LOOK_NS = 100_000_000  # between two looks at all namespaces, for one that lacks memory
_QUIET_NS = 60_000_000_000  # between two log lines that memory is short, and two extents taken
_HELD_LOOK_NS = 20_000_000  # between two looks at an extent whose blocks are held for long
_FIT_MAX = 4  # extents that are being emptied at one time
_MAPPED = ("mapping", "live")  # by all workers, also by those that come
_LEAVING = ("retiring", "unmapping")


class Memory:
    """Hands extents of the pool to namespaces; never more than the pool's cap."""

    def __init__(
        self,
        pool: CpuMemory,
        send: Callable[[int, framing.Message, int | None], None],
        readers: set[int],
        wake: Callable[[Namespace], None],
    ) -> None:
        """readers: connections that map all memory, besides workers that map their namespace's.

        wake(namespace): tick() has to be given it in every turn.
        """
        self.pool = pool
        self._send = send
        self._readers = readers
        self._wake = wake
        self._now_ns = 0
        self._next_extent = 1
        self._short = False  # as the log was told
        self._told_ns = self._taken_ns = -_QUIET_NS
        self._released = False
        self.emptying = False  # blocks are taken out of an extent, some in each turn
        self._fit_ns = 0  # when to look again whether more is there than the cap allows

    def resize(self, capacity_bytes: int) -> None:
        """Change the cap; while there is more than it allows, extents are given back."""
        if capacity_bytes != self.pool.capacity_bytes:
            log.info(
                "cpu: capacity is %s now, was %s; %s are in use",
                sized(capacity_bytes), sized(self.pool.capacity_bytes), sized(self.pool.used_bytes),
            )  # fmt: skip
            self.pool.capacity_bytes = capacity_bytes
            self._fit_ns = 0

    def announce(self, namespace: Namespace, worker: int, now_ns: int) -> None:
        """Hand all of a namespace's memory to a worker that has just joined."""
        for extent, mapping in namespace.extents.items():
            if mapping.state in _MAPPED:
                mapping.waiting[worker] = now_ns
                mapping.told.add(worker)
                self._send_extent(namespace, extent, mapping, worker)

    def _send_extent(self, namespace: Namespace, extent: int, mapping: Mapping, to: int) -> None:
        memory = mapping.memory
        message = p.Extent(
            extent=extent,
            first=mapping.first,
            count=memory.count,
            slot_bytes=namespace.layout.slot_bytes,
            generations_offset=memory.generations_offset,
            bytes=memory.bytes,
        )
        self._send(to, message, memory.fd)

    def excuse(self, namespace: Namespace, connections: Iterable[int]) -> None:
        """Do not wait for workers of a session that has ended to map memory: they may be frozen.

        What they have mapped, or may still map, is theirs until they are gone.
        """
        extents = [e for e, m in namespace.extents.items() if m.state in _MAPPED]
        for extent, connection in itertools.product(extents, connections):
            namespace.settle(extent, connection)

    def forget(self, namespace: Namespace, connection: int) -> None:
        """Stop waiting for a connection that is gone."""
        for extent, mapping in list(namespace.extents.items()):
            mapping.told.discard(connection)
            namespace.settle(extent, connection)

    def tick(
        self, namespaces: dict[str, Namespace], visited: Iterable[Namespace], now_ns: int
    ) -> set[int]:
        """Move extents along; return connections whose sessions hold that up for too long.

        visited: the namespaces of this turn, all of those among them where something is on its way.

        That is who was asked to map or unmap and does not, and who keeps credits in memory that
        is needed elsewhere: an idle engine takes no steps in which it could return them.
        """
        self._now_ns = now_ns
        for tag, made in self.pool.poll():
            self._made(namespaces.get(tag), made)
        late: set[int] = set()
        self._released = self.emptying = False
        if self.pool.used_bytes > self.pool.capacity_bytes and now_ns >= self._fit_ns:
            self._fit_ns = now_ns + _LOOK_NS
            self._fit(namespaces.values())
        for namespace in visited:
            self._grow(namespaces, namespace)
            for extent, mapping in list(namespace.extents.items()):
                if mapping.state == "live" and not mapping.waiting:
                    continue  # as nearly always
                if now_ns >= mapping.look_ns:
                    late |= self._late(namespace, mapping)
                    self._shrink(namespace, extent, mapping)
        if self._released:  # whoever waits for memory need wait no longer
            for namespace in namespaces.values():
                namespace.retry_ns = namespace.look_ns = 0
        return late

    def _late(self, namespace: Namespace, mapping: Mapping) -> set[int]:
        """Return connections that have not mapped or unmapped an extent, or keep its slots."""
        asked_ns = self._now_ns - _MAP_LIMIT_NS
        late = {worker for worker, since_ns in mapping.waiting.items() if since_ns < asked_ns}
        if mapping.state == "retiring" and self._now_ns - mapping.since_ns > _RETIRE_LIMIT_NS:
            slots = namespace.slots_of(mapping)
            for session in namespace.sessions.values():
                if any(slot in slots for slot in session.granted):
                    late.update(session.connections()[:1])
        return late

    def _made(self, namespace: Namespace | None, made: CpuExtent | Exception) -> None:
        if isinstance(made, Exception):
            self._tell_short(made)
            if namespace is not None:
                namespace.growing = False
                namespace.retry_ns = self._now_ns + _RETRY_NS
            return
        if self._short:
            self._short = False
            log.info("there is memory for another extent again")
        if namespace is None:
            self.pool.release(made)
            return
        going_on = [s for s in namespace.sessions.values() if s.phase is not Phase.ENDING]
        waiting = self._readers.union(*(session.workers.values() for session in going_on))
        extent = self._next_extent
        self._next_extent += 1
        mapping = namespace.add_extent(extent, made, set(waiting), self._now_ns)
        for worker in waiting:
            self._send_extent(namespace, extent, mapping, worker)
        if not waiting:
            namespace.go_live(mapping)

    @property
    def shortages(self) -> tuple[str, ...]:
        """Return what the log was told of memory that is not there, while more is allowed."""
        return ("no memory for another extent",) if self._short and self.pool.has_room else ()

    def _tell_short(self, why: Exception) -> None:
        """Say once that memory is short, until there was some again."""
        if not self._short and self._now_ns - self._told_ns >= _QUIET_NS:
            self._short, self._told_ns = True, self._now_ns
            log.warning(
                "no memory for another extent: %s; the store keeps its %s, and looks again"
                " every %d s",
                why, sized(self.pool.used_bytes), _RETRY_NS // 1_000_000_000,
            )  # fmt: skip

    def can_grow(self, namespace: Namespace) -> bool:
        """Tell whether more memory is coming or to be had, so that nothing need be evicted yet."""
        room = self.pool.has_room or namespace.coming
        return room and self._now_ns >= namespace.retry_ns

    def _grow(self, namespaces: dict[str, Namespace], namespace: Namespace) -> None:
        """Ask for another extent while free slots run low and somebody uses the namespace."""
        manager = namespace.manager
        low = len(manager.slots.free) < max(1, manager.slots.total // 4, namespace.slots_wanted)
        namespace.slots_wanted = 0
        if not low or not namespace.sessions:
            return
        if namespace.coming:
            return
        tag = namespace.layout.digest
        short = self._now_ns < namespace.retry_ns
        if not short and self.pool.request(tag, namespace.layout.slot_bytes):
            namespace.growing = True
        elif not short:
            self._take_from_another(namespaces, namespace)
        elif (  # what is given back may not be there for us: one now and then
            not namespace.extents
            and self._now_ns - self._taken_ns >= _QUIET_NS
            and self._take_from_another(namespaces, namespace)
        ):
            self._taken_ns = self._now_ns

    def _take_from_another(self, namespaces: dict[str, Namespace], needy: Namespace) -> bool:
        """Retire an extent of an unused namespace, else of one that holds more than its share."""
        if self._now_ns < needy.look_ns:
            return False
        needy.look_ns = self._now_ns + _LOOK_NS
        others = [n for n in namespaces.values() if n is not needy and n.live_extents]
        leaving = [(n, m) for n in others for m in n.extents.values() if m.state in _LEAVING]
        if any(self._now_ns - mapping.since_ns <= _RETIRE_LIMIT_NS for _, mapping in leaving):
            return False
        # By leases, or a frozen engine, which would keep more: one is enough of a model's.
        kept = {donor for donor, _ in leaving}
        others = [n for n in others if n not in kept]
        unused = sorted((n for n in others if not n.sessions), key=lambda n: n.used_ns)
        richer = sorted(
            (n for n in others if len(n.extents) > len(needy.extents) + 1),
            key=lambda n: -len(n.extents),
        )
        for donor in [*unused, *richer][:1]:
            mapping = donor.shrinkable()
            if mapping is not None:
                self._retire(donor, mapping)
                return True
        return False

    def _fit(self, namespaces: Collection[Namespace]) -> None:
        """Retire extents while there are more than the cap allows, which was lowered.

        Those of models that no engine has go first, then those of who has most. Blocks that are
        read or written stay until that ends; some at a time, as each look at one takes a while.
        """
        leaving = [m for n in namespaces for m in n.extents.values() if m.state in _LEAVING]
        too_much = self.pool.used_bytes - self.pool.capacity_bytes
        too_many = -(-too_much // self.pool.extent_bytes) - len(leaving)
        fresh = sum(self._now_ns - mapping.since_ns <= _RETIRE_LIMIT_NS for mapping in leaving)
        for _ in range(min(too_many, _FIT_MAX - fresh)):
            donors = [namespace for namespace in namespaces if namespace.live_extents]
            donor = max(donors, key=lambda n: (not n.sessions, n.live_extents), default=None)
            mapping = None if donor is None else donor.shrinkable()
            if donor is None or mapping is None:
                return
            self._retire(donor, mapping)

    def _retire(self, donor: Namespace, mapping: Mapping) -> None:
        mapping.state, mapping.since_ns = "retiring", self._now_ns
        self._wake(donor)

    def give_back(self, namespace: Namespace) -> None:
        """Retire all extents of a namespace that is not used."""
        for mapping in namespace.extents.values():
            if mapping.state == "live":
                self._retire(namespace, mapping)

    def _shrink(self, namespace: Namespace, extent: int, mapping: Mapping) -> None:
        if mapping.state == "retiring":
            fresh = self._now_ns - mapping.since_ns <= _RETIRE_LIMIT_NS
            self.emptying |= fresh
            if not fresh:  # a long load or hand-over may keep several
                mapping.look_ns = self._now_ns + _HELD_LOOK_NS
            slots = [Slot(slot) for slot in namespace.slots_of(mapping)]
            mapping.held = namespace.manager.retire_slots(slots)
            if mapping.held == 0:
                mapping.state = "unmapping"
                mapping.since_ns = self._now_ns
                mapping.waiting = dict.fromkeys(mapping.told, self._now_ns)
                for worker in mapping.waiting:
                    self._send(worker, p.Extent(extent), None)
        if mapping.state == "unmapping" and not mapping.waiting:
            del namespace.extents[extent]
            self.pool.release(mapping.memory)
            self._released = True
