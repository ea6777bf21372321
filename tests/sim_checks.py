"""What must hold after every step of a simulated world, and what every block must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

from connectors.reference import Request
from kvstore import protocol as p
from kvstore.config import EngineConfig
from kvstore.index import Entry, State
from kvstore.service.namespace import Namespace
from kvstore.service.session import Ask, Session
from kvstore.service.store import Store
from kvstore.types import BlockKey, make_key
from tests.sim_host import Host
from tests.sim_store import Pool

_READY, _COMING = State.READY, State.COMING
_HERE = (_READY, _COMING)


class Truth:
    """What each block of each request must hold, by key: it follows from the tokens."""

    def __init__(self) -> None:
        self.bytes: dict[bytes, bytes] = {}
        self.above: dict[bytes, bytes | None] = {}  # full-attention keys: the one before
        self._learned: dict[str, int] = {}  # blocks of a request that are known

    def learn(self, host: Host) -> None:
        for request in host.engine.requests.values():
            self.learn_request(host, request)

    def learn_request(self, host: Host, request: Request) -> None:
        size = host.shape.block_tokens
        blocks = len(request.block_hashes) * host.shape.hash_tokens // size
        known = self._learned.get(request.request_id, 0)
        if blocks == known:
            return
        for index in range(known, blocks):
            block_hash = request.hash_at((index + 1) * size)
            before = request.hash_at(index * size) if index else None
            for group, rule in enumerate(host.geometry.rules):
                key = make_key(block_hash, group, host.scope)
                if key not in self.bytes:
                    self.bytes[key] = host.content(request, group, index)
                    if rule.trailing is None:
                        self.above[key] = before and make_key(before, group, host.scope)
        self._learned[request.request_id] = blocks

    def forget(self, host: Host) -> None:
        """Requests of this engine have other blocks from now on: its weights changed."""
        for request in host.engine.requests:
            self._learned.pop(request, None)


class Checks:
    """The promises about one store; made anew with each store process."""

    def __init__(
        self, store: Store, pool: Pool, truth: Truth, engine: EngineConfig, *, faults: bool
    ) -> None:
        """faults: blocks may be damaged and dropped, so that there are holes."""
        self._store = store
        self._pool = pool
        self._truth = truth
        self._engine = engine
        self._faults = faults
        self._checked: dict[tuple[str, int], int] = {}  # generation of a slot's bytes last seen
        self.hits = 0  # answers compared
        desk = store._desk
        answer = desk._answer
        desk._answer = self._answered(answer)  # type: ignore[method-assign]

    def _answered(self, answer: Callable[..., p.Granted | None]) -> Callable[..., p.Granted | None]:
        """Compare each answer with a search block by block: nothing that is here is missed."""

        def checked(session: Session, ask: Ask, *more: int | None) -> p.Granted | None:
            granted = answer(session, ask, *more)
            namespace = session.namespace
            if granted is not None and namespace is not None and not granted.capped:
                states = (_READY,) if ask.memory_only else _HERE
                wanted = _leading(namespace, ask, states)
                found = wanted if not granted.hits else _blocks(namespace, granted)
                assert found == wanted, f"answered {found} blocks, {wanted} are here"
                assert granted.hits or not wanted, f"answered none, {wanted} blocks are here"
                self.hits += bool(wanted)
            return granted

        return checked

    def after_step(self, hosts: Sequence[Host]) -> None:
        for namespace in self._store.namespaces.values():
            tables = namespace.manager.index._tables
            entries = list(chain.from_iterable(table.values() for table in tables if table))
            self._check_slots(namespace, entries)
            self._check_index(namespace, entries)
            self._check_pins(namespace, entries)
            self.check_bytes(namespace, entries)
        self._check_caps()
        for host in hosts:
            self._check_host(host)

    def _check_slots(self, namespace: Namespace, entries: Sequence[Entry]) -> None:
        """Every slot has exactly one owner."""
        manager = namespace.manager
        owned = [*manager._free, *manager._granted, *manager._lingering]
        cleared = chain.from_iterable(manager._cleared)
        owned += [entry.slot for entry in chain(entries, cleared) if entry.state is _READY]
        owners = set(owned)
        assert len(owned) == len(owners), "a slot has two owners"
        places: set[int] = set()
        for mapping in namespace.extents.values():
            if mapping.state in ("live", "retiring"):
                places.update(namespace.slots_of(mapping))
        missing = places - owners - manager._retiring
        assert not missing, f"slots {missing} belong to nobody"
        assert owners <= places, "a slot outside of the memory"
        granted: list[int] = []
        for session in self._store.sessions.values():
            if session.namespace is namespace:
                granted.extend(session.granted)
        works = {id(work): work for work in namespace.tiering._coming.values()}.values()
        granted += [slot for work in works for slot in work.job.slots]
        assert len(granted) == len(manager._granted), "grants do not add up"
        assert set(granted) == manager._granted.keys(), "grants do not add up"

    def _check_index(self, namespace: Namespace, entries: Sequence[Entry]) -> None:
        """Children are counted right, and what is ready hangs below what is ready."""
        index, above_of = namespace.manager.index, self._truth.above
        children = Counter([id(entry.parent) for entry in entries if entry.parent is not None])
        holes = index.holes
        for entry in entries:
            state = entry.state
            assert entry.children == children[id(entry)], "children are miscounted"
            if holes or (state is not _READY and state is not _COMING):
                continue
            above = above_of.get(entry.key)
            if above is not None:
                parent = index.get(BlockKey(above))
                assert parent is not None, f"{state.value} below what is not there"
                assert parent is entry.parent, f"{state.value} below another block"
                fits = parent.state is _READY or parent.state is state
                assert fits, f"{state.value} below what is not"
        assert self._faults or not holes, "a block was evicted before its children"

    def _check_pins(self, namespace: Namespace, entries: Sequence[Entry]) -> None:
        """Pins are leases and transfers, and nothing else."""
        pinned: list[Entry] = []
        for lease in namespace.manager.leases._leases.values():
            for entry in lease.entries:
                here = entry.state in _HERE
                assert self._faults or here, "leased, but neither there nor coming"
            pinned.extend(lease.entries)
        for work in namespace.tiering._open.values():
            pinned.extend(work.pinned)
        pins = Counter(map(id, pinned))
        for entry in chain(entries, pinned):
            reasons = pins[id(entry)]
            assert entry.pins == reasons, f"{entry.pins} pins, {reasons} reasons"
        dropped = {entry.slot for entry in pinned if entry.state is State.DROPPED}
        assert dropped == namespace.manager._lingering, "dropped blocks and lingering slots differ"

    def check_bytes(
        self, namespace: Namespace, entries: Sequence[Entry], *, again: bool = False
    ) -> None:
        """What is ready under a key is what the model computes for it."""
        digest, generations = namespace.layout.digest, namespace.generations._values
        checked = self._checked
        for entry in entries:
            if entry.state is _READY:
                place, generation = (digest, entry.slot), generations[entry.slot]
                if again or checked.get(place) != generation:
                    checked[place] = generation
                    truth = self._truth.bytes[entry.key]
                    found = namespace.view(entry.slot)[: len(truth)]
                    assert found == truth, f"wrong bytes in slot {entry.slot}"

    def _check_caps(self) -> None:
        store, engine = self._store, self._engine
        assert self._pool.used_bytes <= self._pool.capacity_bytes
        refused = store.numbers.counts.get(("kvstore_refused", "protocol"), 0)
        assert not refused, "a half broke the protocol"
        for session in store.sessions.values():
            if session.namespace is None:
                continue
            manager, slot_bytes = session.namespace.manager, session.namespace.layout.slot_bytes
            cap = engine.credit_bytes // slot_bytes
            assert len(session.granted) <= max(1, min(cap, session.credit_slots)), "credits"
            leases = manager.leases.of_owner(session.number)
            blocks = [len(manager.leases._leases[lease].entries) for lease in leases]
            assert sum(blocks) == manager.leases.blocks_of(session.number), "leased blocks"
            most = engine.leased_bytes // slot_bytes
            assert sum(blocks) < most + max(blocks, default=1), "leases beyond their cap"
            assert len(session.writing) <= len(session.granted)
        for namespace in store.namespaces.values():
            for tier in namespace.tiering.tiers:
                pinned = namespace.tiering._storing[tier.name]
                most = max(1, namespace.manager.slots_total // 4) + 8  # memory may have shrunk
                assert pinned <= most, f"{pinned} blocks are being written to a tier"

    def _check_host(self, host: Host) -> None:
        half, client, requests = host.half, host.client, host.engine.requests
        tracked = half._requests
        assert tracked.keys() <= requests.keys(), "a request is tracked that has ended"
        asks = {t.ask for t in tracked.values() if t.ask is not None}
        assert client._grants.keys() <= asks, "an answer that nobody asked for is kept"
        assert client._asked_ns.keys() <= asks, "a question that nobody waits for is kept"
        for worker in host.workers:
            under_way = worker.stores_open <= half._offers._sources.keys()
            assert under_way, "a store is under way that the fence does not know"
        if client._link is None or not client.session:
            return
        session = self._store.sessions.get(host.name)
        if session is not None and session.number == client.session:
            credits_ = set(client.credits)
            assert len(client.credits) == len(credits_), "a slot was granted twice"
            assert credits_ <= session.granted, "a credit the store does not know"


def _leading(namespace: Namespace, ask: Ask, states: tuple[State, ...]) -> int:
    """Count the blocks that all full-attention groups have, one by one."""
    manager, chain_, least = namespace.manager, ask.chain, ask.chain.blocks
    for group, rule in enumerate(manager.rules):
        if rule.trailing is not None:
            continue
        for index in range(least):
            entry = manager.index.get(chain_.key(group, index))
            if entry is None or entry.state not in states:
                least = index
                break
    return least


def _blocks(namespace: Namespace, granted: p.Granted) -> int:
    """Count what an answer names of the first full-attention group."""
    rules = namespace.manager.rules
    group = next(g for g, rule in enumerate(rules) if rule.trailing is None)
    return len(p.from_u32(granted.hits[group].indices))
