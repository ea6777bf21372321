"""The bytes of hand-overs: the exporter process, landing slots, and threads that take checksums.

What consumer and producer have moved, copied or summed is a part of a fetch or a job; each piece
of work ends exactly once, as an event of poll(). A landing slot is memory that only the exporter
and this store touch: one sealed extent for each namespace, mapped read-write by the exporter. A
landed block is copied into its slot and summed by one thread, which releases the GIL.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from kvstore.core.errors import InvariantBroken, ProtocolError, TierFull
from kvstore.core.types import BlockKey, Slot
from kvstore.handover.checksums import block_sum, copied_sum
from kvstore.handover.runs import Part, numbers
from kvstore.wire import peer as m
from kvstore.wire.framing import U32
from tiers.cpu import GENERATION_BYTES, CpuExtent
from tiers.nixl import messages as nixl
from tiers.nixl import supervisor
from tiers.nixl.ucx import over_tcp
from tiers.runner import Runner
from tiers.wakeup import Wakeup

log = logging.getLogger(__name__)

BUSY_S = 0.02  # the loop looks at deadlines this often; all else wakes it through a descriptor
LANDING_FIRST = 1 << 30  # number of the first landing extent; extents of slots have lower ones
REGIONS_MAX = 1 << 16  # of all peers
LANDINGS_MAX = 8  # namespaces that have landing slots at one time
RETRY_NS = 1_000_000_000  # between two attempts to allocate landing slots
THREADS = 2
BATCH_BYTES_MIN, BATCH_BYTES_MAX = 4 << 20, 32 << 20
BATCHES = 4  # of a prompt: the first is checked while the next is read
AGENTS_MAX = 1024  # known to the exporter
NAMED_MAX = 256  # agents of one connection: an exporter, and workers that are written to
CROWDED_NS = 1_000_000_000  # half of a model's landing slots, or too much that was moving
QUIET_NS = 60_000_000_000  # anything is in quarantine, and no hand-over is open


# What is moved


def slot_move(
    peer: str,
    local: tuple[int, array[int]],
    remote: tuple[m.Region, array[int]],
    slot_bytes: int,
    *,
    write: bool,
) -> nixl.Transfer:
    """Move slots of one of our extents from or to those of a region of a peer's exporter.

    write: to the peer. On the side that is written to, they are landing slots.
    """
    (extent, ours), (region, theirs) = local, remote
    return nixl.Transfer(
        id=0,
        peer=peer,
        write=write,
        extent=extent,
        address=region.base,
        region_bytes=region.slots * slot_bytes,
        block_bytes=slot_bytes,
        local=ours.tobytes(),
        remote=theirs.tobytes(),
    )


class Slots(NamedTuple):
    """Slots, and how to get at the bytes of one; view() is called on threads, too."""

    view: Callable[[Slot], memoryview]
    numbers: Sequence[int]

    def cut(self, piece: slice) -> Slots:
        """Return some of them."""
        return self._replace(numbers=self.numbers[piece])

    def views(self) -> Iterator[memoryview]:
        """Go through their bytes."""
        return (self.view(Slot(number)) for number in self.numbers)


# What poll() returns


class Summed(msgspec.Struct, frozen=True):
    """Checksums of blocks that are handed over."""

    part: Part
    sums: array[int]


class Checked(msgspec.Struct, frozen=True):
    """Landed blocks of a namespace were copied to their slots; right: the sum is as expected."""

    digest: str
    part: Part
    right: list[bool]


class Written(msgspec.Struct, frozen=True):
    """A write to a peer has ended; stopped: it was cut short, and nothing of it still arrives."""

    part: Part
    ok: bool
    stopped: bool = False


class Arrived(msgspec.Struct, frozen=True):
    """A read into a namespace's landing slots has ended."""

    digest: str
    part: Part
    ok: bool


Event = nixl.Ready | nixl.Mapped | supervisor.Down | Summed | Checked | Written | Arrived


def batch_blocks(block_bytes: int, of: int) -> int:
    """Return how many of a prompt's `of` blocks go together: each batch costs a turn or two."""
    size = of * block_bytes // BATCHES
    return max(1, min(BATCH_BYTES_MAX, max(BATCH_BYTES_MIN, size)) // block_bytes)


def pieces(count: int, step: int) -> Iterator[slice]:
    """Cut `count` blocks into parts of `step`."""
    return (slice(first, first + step) for first in range(0, count, step))


class Landing:
    """Landing slots of one namespace; their memory is allocated on first use."""

    def __init__(self, slot_bytes: int, want: Callable[[Landing], None]) -> None:
        """want(landing): its memory is needed."""
        self.slot_bytes = slot_bytes
        self.memory: CpuExtent | None = None
        self.extent = 0  # its number
        self.address = 0  # in the exporter, which has not said yet how it is reached
        self.base = 0  # the same, once it has; 0: not mapped yet
        self.metadata = b""
        self.used_ns = 0
        self.retry_ns: int | None = 0  # when to allocate it; None: done, or under way
        self.failed = False  # the last attempt to allocate or map it has
        self._want = want
        self._free: array[int] = array(U32)

    @property
    def count(self) -> int:
        """Count the slots."""
        return 0 if self.memory is None else self.memory.count

    @property
    def used(self) -> int:
        """Count the slots in which something arrives, or may still arrive."""
        return self.count - len(self._free)

    def open(self) -> None:
        """Allocate memory where there is none; slots can be taken some time later."""
        self._want(self)

    def take(self, count: int) -> array[int]:
        """Take up to count free slots; none while the exporter has not mapped them."""
        if not self.base:
            self._want(self)
            return array(U32)
        left = max(0, len(self._free) - count)
        taken = self._free[left:]
        del self._free[left:]
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots."""
        self._free.extend(slots)

    def region(self) -> tuple[m.Region, bytes]:
        """Return the slots' place in the exporter, and its metadata since then."""
        return m.Region(self.extent, self.base, self.count), self.metadata

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes."""
        if self.memory is None:
            raise InvariantBroken("a landing slot without memory")
        return self.memory.slot(slot)

    def made(self, extent: int, memory: CpuExtent) -> None:
        """Use newly allocated memory."""
        self.extent, self.memory = extent, memory
        self._free = array(U32, range(memory.count))

    def unmade(self) -> CpuExtent | None:
        """Return the memory, which is used no more."""
        memory, self.memory = self.memory, None
        self.base, self.address, self.retry_ns, self._free = 0, 0, 0, array(U32)
        return memory

    def reach(self, metadata: bytes) -> None:
        """Use memory that was mapped before the exporter had this metadata."""
        if self.address:
            self.base, self.address, self.metadata = self.address, 0, metadata


class Regions:
    """Memory of peers' exporters, by peer and extent."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], m.Region] = {}

    def get(self, peer: int, extent: int) -> m.Region:
        """Return an extent's region. Raises ProtocolError for an unknown one."""
        found = self._known.get((peer, extent))
        if found is None:
            raise ProtocolError(f"extent {extent}, which is not known")
        return found

    def learn(self, peer: int, regions: Sequence[m.Region]) -> None:
        """Add a peer's regions; beyond the limit, that peer's oldest ones are dropped."""
        self._known |= {(peer, region.extent): region for region in regions}
        if len(self._known) > REGIONS_MAX:
            of_peer = [at for at in self._known if at[0] == peer]
            for at in of_peer[: len(self._known) - REGIONS_MAX]:
                del self._known[at]

    def forget(self, peer: int) -> None:
        """Drop a peer's regions."""
        self._known = {at: region for at, region in self._known.items() if at[0] != peer}


class _Transfer(msgspec.Struct, eq=False):
    """A transfer under way; digest: of the namespace that it reads for, None for a write.

    wanted: positions that were not abandoned; None: all of the part's.
    """

    digest: str | None
    part: Part
    wanted: set[int] | None = None


class _Allocated(msgspec.Struct):
    landing: Landing
    memory: CpuExtent | TierFull


class _Work(NamedTuple):
    """What a thread does, and its result if that raises."""

    do: Callable[[], Summed | Checked | _Allocated]
    failed: Summed | Checked | _Allocated


def _sums(part: Part, namespace: str, keys: Sequence[BlockKey], slots: Slots) -> Summed:
    named = zip(keys, slots.views(), strict=True)
    return Summed(part, array("Q", [block_sum(namespace, *each) for each in named]))


def _checks(
    part: Part,
    namespace: str,
    keys: Sequence[BlockKey],
    sums: Sequence[int],
    landed: Slots,
    slots: Slots,
) -> Checked:
    blocks = zip(keys, landed.views(), slots.views(), strict=True)
    found = [copied_sum(namespace, *block) for block in blocks]
    return Checked(namespace, part, [ours == its for ours, its in zip(found, sums, strict=True)])


def _allocate(landing: Landing, size: int) -> _Allocated:
    try:
        return _Allocated(landing, CpuExtent(size, landing.slot_bytes))
    except TierFull as exc:
        return _Allocated(landing, exc)


class Transfers:
    """Moves, copies and sums blocks. Called from the store's thread; no method blocks but close.

    devices: network devices of the exporter, as UCX names them. exporter: only poll() drives it.
    """

    def __init__(self, service: str, devices: str, landing_bytes: int) -> None:
        """service, devices: as of an Exporter. landing_bytes: of each namespace's slots.

        Until exporter.wake() there is no process.
        """
        self.exporter = supervisor.Exporter(service, devices, asleep=True)
        self.devices = devices
        self._landing_bytes = landing_bytes
        self._landings: dict[str, Landing] = {}
        self._leaving: dict[int, CpuExtent] = {}  # of landings, until they are unmapped
        self._next_landing = LANDING_FIRST
        self._now_ns = 0
        self.moved_bytes: Counter[str] = Counter()  # "pulled", "pushed", as NIXL counts them
        self._transfers: dict[int, _Transfer] = {}
        self._moving: dict[tuple[int, int], list[int]] = {}  # by peer and job: its transfers
        self._done = Wakeup()  # threads have results
        self._runner: Runner[_Work, Summed | Checked | _Allocated] = Runner(
            "kvstore-handover",
            lambda work: work.do(),
            lambda work, _: work.failed,
            THREADS,
            self._done.wake,
        )

    def fds(self) -> tuple[int, int]:
        """Return the descriptors that become readable when poll() has something to return."""
        return self.exporter.fileno(), self._done.fileno()

    def poll(self, now_ns: int) -> Sequence[Event]:
        """Return what has happened since the last call."""
        self._now_ns = now_ns
        events: list[Event] = []
        for event in self.exporter.poll(now_ns):
            events += self._on(event)
        self._done.heard()
        for done in self._runner.poll():
            if isinstance(done, _Allocated):
                self._allocated(done)
            else:
                events.append(done)
        return events

    def _on(self, event: supervisor.Event) -> Sequence[Event]:
        match event:
            case nixl.Ready(_, metadata):
                for landing in self._landings.values():
                    landing.reach(metadata)
            case nixl.Mapped(extent) if extent >= LANDING_FIRST:
                self._on_landing(event)
                return ()
            case nixl.Ended(number, moved, error):
                return [self._ended(number, moved, error)]
            case supervisor.Down():
                for landing in self._landings.values():
                    landing.base = landing.address = 0
        return [event]

    def _on_landing(self, event: nixl.Mapped) -> None:
        if event.extent in self._leaving:
            if event.address is None:
                self._leaving.pop(event.extent).close()
            return
        landing = next(found for found in self._landings.values() if found.extent == event.extent)
        landing.address, landing.failed = event.address or 0, event.address is None

    def _ended(self, number: int, moved: int, error: str | None) -> Event:
        found = self._transfers.pop(number)
        self.moved_bytes["pushed" if found.digest is None else "pulled"] += moved
        of = found.part[:2]
        moving = self._moving[of]
        moving.remove(number)
        if not moving:
            del self._moving[of]
        if found.digest is None:
            return Written(found.part, error is None, stopped=error == "stopped")
        return Arrived(found.digest, found.part, error is None)

    # Transfers

    def start(self, part: Part, move: nixl.Transfer | nixl.Fill, digest: str | None = None) -> None:
        """Move blocks. A read, for a namespace, ends as Arrived; a write as Written."""
        number = self.exporter.start(move)
        self._transfers[number] = _Transfer(digest, part)
        self._moving.setdefault(part[:2], []).append(number)

    def abandon(self, part: Part) -> None:
        """Stop waiting for blocks. A transfer of abandoned blocks alone starts no more chunks.

        Its event comes all the same.
        """
        for number in self._moving.get(part[:2], ()):
            found = self._transfers[number]
            if found.wanted is None:
                found.wanted = set(found.part.positions)
            if found.wanted:
                found.wanted.difference_update(part.positions)
                if not found.wanted:
                    self.exporter.abandon(number)

    def sum(
        self, part: Part, namespace: str, keys: Sequence[BlockKey], slots: Slots, slot_bytes: int
    ) -> None:
        """Take checksums, in batches; ends as Summed."""
        for piece in pieces(len(keys), batch_blocks(slot_bytes, len(keys))):
            cut, named_keys = part.cut(piece), keys[piece]
            work = partial(_sums, cut, namespace, named_keys, slots.cut(piece))
            self._runner.submit(_Work(work, Summed(cut, numbers(len(named_keys), "Q"))))

    def check(
        self,
        part: Part,
        namespace: str,
        keys: Sequence[BlockKey],
        sums: Sequence[int],
        landed: Slots,
        slots: Slots,
    ) -> None:
        """Copy landed blocks into their slots and take their checksums there; ends as Checked."""
        step = max(1, BATCH_BYTES_MAX // self._landings[namespace].slot_bytes)
        for piece in pieces(len(keys), step):
            cut, named_keys, named_sums = part.cut(piece), keys[piece], sums[piece]
            there, here = landed.cut(piece), slots.cut(piece)
            work = partial(_checks, cut, namespace, named_keys, named_sums, there, here)
            self._runner.submit(_Work(work, Checked(namespace, cut, [False] * len(named_keys))))

    # The exporter, and memory

    @property
    def has_room(self) -> bool:
        """Tell whether more writes may be started: the exporter has read most of what was sent."""
        return self.exporter.has_room

    @property
    def crowded(self) -> bool:
        """Tell whether abandoned transfers have as much memory as landing slots may have."""
        return self.exporter.quarantined_bytes > self._landing_bytes

    def over_tcp(self, host: str) -> bool:
        """Tell whether bytes from and to a host travel over TCP."""
        return over_tcp(host, self.devices)

    def landing(self, namespace: str, slot_bytes: int) -> Landing:
        """Return a namespace's landing slots."""
        if namespace not in self._landings:
            self._landings[namespace] = Landing(slot_bytes, self._want)
        return self._landings[namespace]

    def _want(self, landing: Landing) -> None:
        """Allocate a landing's memory, as soon as the cap has room for it."""
        landing.used_ns = self._now_ns
        if landing.retry_ns is None or self._now_ns < landing.retry_ns:
            return
        landing.retry_ns = self._now_ns + RETRY_NS
        there = [each for each in self._landings.values() if each.memory or each.retry_ns is None]
        if len(there) + len(self._leaving) >= LANDINGS_MAX:
            idle = [found for found in there if found.memory is not None and not found.used]
            if idle and not self._leaving:
                self._reclaim(min(idle, key=lambda found: found.used_ns))
            landing.retry_ns = self._now_ns
            return
        landing.retry_ns = None
        size = max(self._landing_bytes, 2 * (landing.slot_bytes + GENERATION_BYTES))
        failed = _Allocated(landing, TierFull("its memory could not be allocated"))
        self._runner.submit(_Work(partial(_allocate, landing, size), failed))

    def _allocated(self, made: _Allocated) -> None:
        landing, memory = made.landing, made.memory
        if isinstance(memory, TierFull):
            log.error("no landing memory: %s", memory)
            landing.retry_ns, landing.failed = self._now_ns + RETRY_NS, True
            return
        number, self._next_landing = self._next_landing, self._next_landing + 1
        landing.made(number, memory)
        size = memory.count * memory.slot_bytes
        self.exporter.map(number, memory.fd, size, writable=True)

    def _reclaim(self, landing: Landing) -> None:
        """Free the memory of a landing that is not used, for another namespace's."""
        memory = landing.unmade()
        if memory is not None:
            self._leaving[landing.extent] = memory
            self.exporter.unmap(landing.extent)

    def close(self) -> None:
        """End the process and the threads, and free the landing slots."""
        self.exporter.close()
        self._runner.close()
        self._done.close()
        memories: list[object] = [landing.unmade() for landing in self._landings.values()]
        memories += [done.memory for done in self._runner.poll() if isinstance(done, _Allocated)]
        for memory in (*memories, *self._leaving.values()):
            if isinstance(memory, CpuExtent):
                memory.close()
        self._landings.clear()
        self._leaving.clear()


class PeerAgents:
    """Agents of peers that our exporter knows, by the connections that named them.

    NIXL keeps a socket for each peer that is forgotten and met again while it lives, and nothing
    for one that has ended. So agents are kept beyond their connections, and those unused longest
    go first.
    """

    def __init__(self, exporter: supervisor.Exporter) -> None:
        """exporter: learns of each peer, and forgets them all when its process ends."""
        self._exporter = exporter
        self._named: dict[int, list[str]] = {}  # by connection; the first is its exporter
        self._users: dict[str, set[int]] = {}  # their connections; longest unused first

    def __len__(self) -> int:
        return len(self._users)

    def meet(self, connection: int, agent: str, metadata: bytes) -> None:
        """Learn of a peer's exporter, or a worker of its engine; no name: it has none."""
        if agent:
            named = self._named.setdefault(connection, [])
            if agent not in named:
                named.append(agent)
            if len(named) > NAMED_MAX:
                self._users[named.pop(1)].discard(connection)
            users = self._users.pop(agent, set())
            users.add(connection)
            self._users[agent] = users
            self._exporter.add_peer(agent, metadata)
            self._forget_some()

    def update(self, connection: int, metadata: bytes) -> None:
        """Learn how to reach a connection's exporter now; nothing if it named none."""
        named = self._named.get(connection)
        if named is not None:
            self._exporter.add_peer(named[0], metadata)

    def clear(self) -> None:
        """Forget all: our exporter has ended, and peers say Hello to the next one."""
        self._named.clear()
        self._users.clear()

    def leave(self, connection: int) -> None:
        """Drop a connection that has ended."""
        for agent in self._named.pop(connection, ()):
            self._users[agent].discard(connection)
            self._users[agent] = self._users.pop(agent)
        self._forget_some()

    def _forget_some(self) -> None:
        """Forget what is too many: unused agents, then the oldest of who named most."""
        while len(self._users) > AGENTS_MAX:
            unused = next((agent for agent, users in self._users.items() if not users), None)
            if unused is not None:
                del self._users[unused]
                self._exporter.remove_peer(unused)
                continue
            connection, named = max(self._named.items(), key=lambda item: len(item[1]))
            if len(named) == 1:
                return  # each connection has its own: there are no more than connections
            self._users[named.pop(1)].discard(connection)


class Quarantine:
    """Memory of abandoned transfers: for how long it is kept before the exporter is restarted.

    After a restart no earlier transfer writes to it.
    """

    def __init__(self) -> None:
        self._crowded_ns: int | None = None  # since when
        self._quiet_ns: int | None = None

    def stir(self) -> None:
        """A hand-over goes on."""
        self._quiet_ns = None

    def lasts(self, now_ns: int, *, crowded: bool, quiet: bool) -> bool:
        """True once the quarantine has lasted too long; called from time to time."""
        self._crowded_ns = (self._crowded_ns or now_ns) if crowded else None
        self._quiet_ns = (self._quiet_ns or now_ns) if quiet else None
        late = (self._crowded_ns is not None and now_ns - self._crowded_ns >= CROWDED_NS) or (
            self._quiet_ns is not None and now_ns - self._quiet_ns >= QUIET_NS
        )
        if late:
            self._crowded_ns = self._quiet_ns = None
        return late
