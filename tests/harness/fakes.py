"""A Store without sockets, clock or shared memory: connections are lists, memory is a bytearray."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from kvstore.config import Config, TierConfig, parse
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.leases import Generations
from kvstore.core.lookup import Answer, Probe, prefix_hit
from kvstore.core.tier import SlotMemory, Tier, TierContext
from kvstore.core.types import BlockKey, GroupRule, make_key
from kvstore.metrics import LABELS, Numbers
from kvstore.store.session import Phase
from kvstore.store.store import Store
from kvstore.wire import engine as p
from kvstore.wire import framing
from tiers.cpu import CpuExtent, CpuMemory

SLOT_BYTES = 4096
OfPeers = p.Places | p.Passed | p.BlockVersions
M = TypeVar("M", bound=framing.Message)
u32, from_u32 = framing.u32, framing.from_u32


def hashes(count: int, name: str = "request") -> list[bytes]:
    """Chained block hashes, as an engine makes them."""
    found: list[bytes] = []
    last = name.encode()
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        found.append(last)
    return found


class Lower:
    """Lower tiers for which a function answers."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def prefix(self, group: int, first: int, limit: int) -> Answer:
        return prefix_hit(lambda g, index: self.probe(g, first + index), group, limit - first)


def geometry(
    identity: str = "model",
    rank: int = 0,
    world: int = 1,
    rules: Sequence[GroupRule] = (),
    page_bytes: int = SLOT_BYTES,
    unnamed: str = "",
) -> RankGeometry:
    """One rank of a model whose blocks take one page of these bytes, or one for each rule."""
    groups = tuple(
        GroupGeometry(rule, (LayerGeometry(f"layer.{at}", page_bytes // world, 1, rank, world),))
        for at, rule in enumerate(rules or (GroupRule(),))
    )
    return RankGeometry(identity, 16, (1,) * len(groups), groups, {"model": identity}, unnamed)


def settings(*, policy: object = "segmented", **engine: object) -> Config:
    """policy: of memory; all else is of [engine]."""
    cpu = {"capacity": "64MiB", "policy": policy}
    return parse({"cpu": cpu, "engine": engine, "server": {"metrics": ""}})


def generations_of(slots: int) -> Generations:
    """A counter for each slot, which no process maps."""
    found = Generations()
    found.add(memoryview(bytearray(4 * slots)).cast("I"))
    return found


class HeapExtent(CpuExtent):
    """An extent in this process only."""

    def __init__(self, extent_bytes: int, slot_bytes: int) -> None:
        self.fd = -1
        self.bytes = extent_bytes
        self.count = extent_bytes // (slot_bytes + 4)
        self.slot_bytes = slot_bytes
        self.generations_offset = self.count * slot_bytes
        self.generations = memoryview(bytearray(4 * self.count)).cast("I")
        self.data = memoryview(bytearray(extent_bytes))

    def slot(self, position: int) -> memoryview:
        start = position * self.slot_bytes
        return self.data[start : start + self.slot_bytes]

    def close(self) -> None:
        """Nothing is to be given back."""


class HeapPool(CpuMemory):
    """A pool of HeapExtents; `fail` makes the next extents errors."""

    used_bytes = 0

    def __init__(self, extents: int = 4, slots_per_extent: int = 8) -> None:
        self.extent_bytes = slots_per_extent * (SLOT_BYTES + 4)
        self.capacity_bytes = extents * self.extent_bytes
        self.extents_max = 1 << 30
        self.used_bytes_max = 0
        self.fail: Exception | None = None
        self.released: list[int] = []  # bytes of each; the extent kept would be a leak
        self._wanted: list[tuple[str, int]] = []

    def request(self, tag: str, slot_bytes: int) -> bool:
        if not self.has_room:
            return False
        self.used_bytes += self.extent_bytes
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
        self._wanted.append((tag, slot_bytes))
        return True

    def poll(self) -> Sequence[tuple[str, CpuExtent | Exception]]:
        wanted, self._wanted = self._wanted, []
        if self.fail is not None:
            self.used_bytes -= len(wanted) * self.extent_bytes
            return [(tag, self.fail) for tag, _ in wanted]
        return [(tag, HeapExtent(self.extent_bytes, size)) for tag, size in wanted]

    def release(self, extent: CpuExtent) -> None:
        self.released.append(extent.bytes)
        self.used_bytes -= self.extent_bytes

    def close(self) -> None:
        """Nothing to do."""


class Town:
    """A store and its engines; time stands still unless it is told to pass."""

    def __init__(
        self,
        config: Config | None = None,
        pool: CpuMemory | None = None,
        tiers: Sequence[tuple[str, Callable[[TierContext], Tier]]] = (),
    ) -> None:
        self.pool = pool or HeapPool()
        self.now_ns = 10**9
        self.inbox: dict[int, list[framing.Message]] = {}
        self.tiers: list[Tier] = []
        self._factories = tiers
        self._next = 1
        config = msgspec.structs.replace(
            config or settings(),
            tiers=tuple(TierConfig("a.b:C", name, {}, backlog_ns=10**10) for name, _ in tiers),
        )
        self.store = Store(config, self.pool, self._make_tiers, self._send)

    def _make_tiers(self, digest: str, slot_bytes: int, memory: SlotMemory) -> Sequence[Tier]:
        made = [
            make(TierContext(name, digest, slot_bytes, memory, {}))
            for name, make in self._factories
        ]
        self.tiers.extend(made)
        return made

    def _send(self, connection: int, message: framing.Message, _fd: int | None) -> None:
        if connection in self.inbox:
            self.inbox[connection].append(message)

    def connect(self) -> int:
        self._next += 1
        self.inbox[self._next] = []
        return self._next

    def say(self, connection: int, message: framing.Message) -> None:
        self.store.on_message(connection, message, self.now_ns)

    def close(self, connection: int) -> None:
        del self.inbox[connection]
        self.store.on_closed(connection, self.now_ns)

    def tick(self, ms: int = 0) -> None:
        self.now_ns += ms * 1_000_000
        self.store.on_tick(self.now_ns)

    def take(self, connection: int, kind: type[M]) -> list[M]:
        """Take the messages of one kind out of a connection's inbox."""
        found = [message for message in self.inbox[connection] if isinstance(message, kind)]
        self.inbox[connection] = [m for m in self.inbox[connection] if not isinstance(m, kind)]
        return found

    def attach(self, engine: str = "engine", **how: Any) -> Engine:  # noqa: ANN401 - see Engine
        """Attach an engine and let it settle."""
        made = Engine(self, engine, **how)
        made.join()
        self.settle(made)
        return made

    def settle(self, *engines: Engine, turns: int = 6) -> None:
        """Let messages and ticks go to and fro."""
        for _ in range(turns):
            self.tick()
            for engine in engines:
                engine.pump()


class Engine:
    """Both halves of an engine, reduced to their messages."""

    def __init__(
        self,
        town: Town,
        name: str,
        *,
        world: int = 1,
        credit_slots: int = 4,
        identity: str = "model",
        rules: Sequence[GroupRule] = (),
        maps: bool = True,
        direct: bool = False,
        **told: str,
    ) -> None:
        """told: what it says of its model."""
        self.town, self.name, self.world, self.maps = town, name, world, maps
        self.direct = direct
        self.places: list[p.Places] = []
        self.pushes: list[int] = []  # fetches whose peer writes
        self.boards: list[p.BlockVersions] = []
        self.passed: dict[tuple[int, int], bool] = {}  # fetch, position -> whether it is good
        self.credit_slots = credit_slots
        self.geometries = [geometry(identity, rank, world, rules) for rank in range(world)]
        self.geometries = [
            msgspec.structs.replace(each, traits=each.traits | told) for each in self.geometries
        ]
        self.scheduler = town.connect()
        self.workers = [town.connect() for _ in range(world)]
        self.active: p.Welcome | None = None  # as its scheduler half was told
        self.credits: list[int] = []
        self.granted: dict[int, p.Granted] = {}
        self.added: list[bytes] = []
        self.removed: list[bytes] = []
        self.extents: dict[int, p.Extent] = {}
        self.layouts: list[p.Welcome] = []
        self.detached: list[str] = []
        self._asks = 0

    def join(self) -> None:
        hello = p.Hello(p.VERSION, self.name, "scheduler", 0, self.world, self.credit_slots)
        self.town.say(self.scheduler, hello)
        for rank, worker in enumerate(self.workers):
            self.join_rank(rank, worker)

    def join_rank(self, rank: int, worker: int) -> None:
        shape = self.geometries[rank]
        who = p.VERSION, self.name, "worker", rank, self.world
        self.town.say(worker, p.Hello(*who, geometry=shape, direct=self.direct))

    def pump(self) -> None:
        """Read and answer everything that has arrived."""
        for connection in (self.scheduler, *self.workers):
            messages = self.town.inbox.get(connection, [])
            while messages:
                self._handle(connection, messages.pop(0))
                messages = self.town.inbox.get(connection, [])

    def _handle(self, connection: int, message: framing.Message) -> None:
        if isinstance(message, p.Extent):
            if message.count:
                self.extents[message.extent] = message
            else:
                self.extents.pop(message.extent, None)
            if self.maps:
                self.town.say(connection, p.Mapped(message.extent, gone=not message.count))
        elif isinstance(message, p.Answers):
            self.credits.extend(from_u32(message.credits))
            self.granted.update({granted.ask: granted for granted in message.granted})
            self.added.extend(message.added)
            self.removed.extend(message.removed)
        elif isinstance(message, OfPeers):
            self._of_peers(message)
        elif isinstance(message, p.Welcome) and connection == self.scheduler:
            self.active = message
        elif isinstance(message, p.Welcome):
            self.layouts.append(message)
        elif isinstance(message, p.Detach):
            self.detached.append(message.reason)

    def _of_peers(self, message: OfPeers) -> None:
        if isinstance(message, p.Places) and message.push:
            self.pushes.append(message.fetch)
        elif isinstance(message, p.Places):
            self.places.append(message)
        elif isinstance(message, p.BlockVersions):
            assert self.active is not None, "its session begins with that"
            self.boards.append(message)
        else:
            positions = from_u32(message.positions)
            self.passed |= {(message.fetch, position): message.ok for position in positions}

    def report(
        self,
        rank: int,
        slots: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        *,
        ok: bool = True,
    ) -> None:
        """Send one worker's report of slots it has written."""
        stored = p.Stored(u32(slots), tuple(keys), tuple(parents), ok, 0.001)
        self.town.say(self.workers[rank], stored)

    def put(self, chain: Sequence[bytes], first: int = 0, groups: int = 1) -> list[int]:
        """Store blocks first.. of a chain in all groups, with credits; return their slots."""
        slots, keys, parents = [], [], []
        for index in range(first, len(chain)):
            for group in range(groups):
                if not self.credits:
                    self.town.settle(self)
                slots.append(self.credits.pop(0))
                keys.append(make_key(chain[index], group))
                parents.append(make_key(chain[index - 1], group) if index else b"")
                for rank in range(self.world):
                    self.report(rank, slots[-1:], keys[-1:], parents[-1:])
        self.town.settle(self)
        return slots

    def step(self, **fields: Any) -> None:  # noqa: ANN401 - the fields of Step
        """Send a batch; answers go out with the next tick."""
        self.town.say(self.scheduler, p.Step(**fields))

    def ask(
        self, chain: Sequence[bytes], *, memory_only: bool = False, block_ns: int | None = None
    ) -> int:
        """Send a lookup and return its number."""
        self._asks += 1
        lookup = p.Lookup(
            self._asks,
            b"".join(chain),
            len(chain[0]),
            memory_only=memory_only,
            block_ns=block_ns,
        )
        self.step(lookups=(lookup,))
        self.pump()
        return self._asks

    def hit(self, chain: Sequence[bytes], *, block_ns: int | None = None) -> p.Granted:
        """Send a lookup and return its answer."""
        ask = self.ask(chain, block_ns=block_ns)
        if ask not in self.granted:
            self.town.settle(self)
        return self.granted[ask]

    def leave(self) -> None:
        for connection in (self.scheduler, *self.workers):
            if connection in self.town.inbox:
                self.town.close(connection)


def value_of(numbers: Numbers, name: str, *labels: str) -> float:
    """Read one number; of a counter of namespaces, without that label, all in sum."""
    found = numbers.values()
    if len(labels) == len(LABELS[name]):
        return found.get((name, *labels), 0)
    return sum(v for key, v in found.items() if key[0] == name and key[2:] == labels)


def keys_of(chain: Sequence[bytes]) -> list[BlockKey]:
    return [make_key(block, 0) for block in chain]


def blocks(granted: p.Granted, group: int = 0) -> list[int]:
    """Return the block indices that a lookup's answer has of a group."""
    return from_u32(granted.hits[group].indices) if granted.lease else []


def phase(town: Town, engine: Engine) -> Phase | None:
    session = town.store.sessions.get(engine.name)
    return None if session is None else session.phase


def pending_town() -> tuple[Town, Engine, list[bytes], int]:
    """An engine of two ranks, one of which has written a block."""
    town = Town(settings(defer="100ms"))
    engine, chain = town.attach(world=2), hashes(1)
    slot = engine.credits.pop(0)
    engine.report(0, [slot], [make_key(chain[0], 0)], [b""])
    return town, engine, chain, slot
