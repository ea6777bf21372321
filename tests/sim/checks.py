"""What must hold in a simulated world, and what every block must hold.

Each in its moment: a block's bytes when it becomes ready, an answer when it is given, attention's
reads in each rank. After every turn: caps, and the halves of the engine that made a step. Every few
turns, as it does not pass soon: slots, index and pins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from kvstore.config import EngineConfig
from kvstore.core.index import Entry, State
from kvstore.core.types import make_key
from kvstore.store.namespace import Namespace
from kvstore.store.session import Ask, Session
from kvstore.store.store import Store
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.reference import Request
from tests.reference.text import slot_bytes
from tests.sim.host import Host
from tests.sim.store import Pool

_READY, _COMING, _DROPPED = State.READY, State.COMING, State.DROPPED
_HERE = (_READY, _COMING)
Held = Callable[[Namespace], tuple[Iterable[int], Iterable[Entry]]]


def nothing_held(_: Namespace) -> tuple[Iterable[int], Iterable[Entry]]:
    """Return what other stores hold where there are none."""
    return (), ()


class Truth:
    """What each block of each request must hold, by key: it follows from the tokens."""

    def __init__(self) -> None:
        self.bytes: dict[bytes, bytes] = {}
        self.above: dict[bytes, bytes | None] = {}  # full-attention keys: the one before
        self._hashes: dict[str, int] = {}  # of a request, whose blocks are known

    def learn(self, host: Host) -> None:
        hashes = self._hashes
        for request_id, request in host.engine.requests.items():
            if hashes.get(request_id) != len(request.block_hashes):
                self.learn_request(host, request)

    def learn_request(self, host: Host, request: Request) -> None:
        hashes, every = request.block_hashes, host.shape.block_tokens // host.shape.hash_tokens
        known = self._hashes.get(request.request_id, 0) // every
        self._hashes[request.request_id] = len(hashes)
        for index in range(known, len(hashes) // every):
            block_hash = hashes[(index + 1) * every - 1]
            before = hashes[index * every - 1] if index else None
            for group, rule in enumerate(host.geometry.rules):
                key = make_key(block_hash, group, host.scope)
                if key not in self.bytes:
                    self.bytes[key] = slot_bytes(host.shape, request.text, group, index)
                    if rule.trailing is None:
                        self.above[key] = before and make_key(before, group, host.scope)

    def learn_anew(self, host: Host) -> None:
        """Requests of this engine have other blocks from now on: its weights changed."""
        for request in host.engine.requests:
            self._hashes.pop(request, None)
        self.learn(host)


class Checks:
    """The promises about one store; made anew with each store process."""

    def __init__(
        self,
        store: Store,
        pool: Pool,
        truth: Truth,
        engine: EngineConfig,
        *,
        faults: bool,
        held: Held = nothing_held,
    ) -> None:
        """faults: blocks may be damaged and dropped, so that there are holes.

        held(namespace): what other stores hold there: slots of their own, and pinned blocks.
        """
        self._held = held
        self._store = store
        self._pool = pool
        self._truth = truth
        self._engine = engine
        self._used_bytes = 0
        self._capacity_bytes = pool.capacity_bytes  # at the start, the most it ever has
        self._faults = faults
        self._checked: dict[str, dict[int, int]] = {}  # generation of a slot's bytes last seen
        self.hits = 0  # answers compared
        lookups = store._lookups
        answer = lookups._answer
        lookups._answer = self._answered(answer)  # type: ignore[method-assign]

    def _answered(self, answer: Callable[..., p.Granted]) -> Callable[..., p.Granted]:
        """Compare each answer with a search block by block: nothing that is here is missed.

        But for what is on its way, and comes later than the engine would have computed it.
        """

        def checked(session: Session, ask: Ask, *more: int | None) -> p.Granted:
            granted, namespace = answer(session, ask, *more), ask.namespace
            if not granted.capped:
                states = (_READY,) if ask.memory_only else _HERE
                wanted = _leading(namespace, ask, states)
                late = granted.missed[0] == "too_slow"
                least = wanted
                if late:  # a window that comes later may cost blocks that are ready
                    whole = all(rule.trailing is None for rule in namespace.layout.rules)
                    least = _leading(namespace, ask, (_READY,)) if whole else 0
                found = _blocks(namespace, granted) if granted.hits else 0
                here = f"{least} to {wanted} are here"
                assert least <= found <= wanted, f"answered {found} blocks, {here}"
                self.hits += bool(found)
            return granted

        return checked

    def after_turn(self, host: Host) -> None:
        """Check what may be over soon: caps, and the halves of the engine that made a step."""
        for namespace in self._store.namespaces.values():
            if namespace.layout.digest not in self._checked:
                self._checked[namespace.layout.digest] = {}
                self._watch(namespace)
        self._check_caps()
        self._check_host(host)

    def _watch(self, namespace: Namespace) -> None:
        """Compare the bytes of each block in the moment in which it becomes ready."""
        manager = namespace.manager
        became_ready = manager._became_ready

        def checked(entry: Entry) -> None:
            self.check_bytes(namespace, (entry,))
            became_ready(entry)

        manager._became_ready = checked  # type: ignore[method-assign]

    def check_store(self) -> None:
        """Check every slot, block and pin."""
        for namespace in self._store.namespaces.values():
            tables = filter(None, namespace.manager.index._tables)
            here = dict(chain.from_iterable(map(dict.items, tables)))
            ready = [entry for entry in here.values() if entry.state is _READY]
            self._check_slots(namespace, ready)
            self._check_index(namespace, here)
            self._check_pins(namespace, here.values())
            self.check_bytes(namespace, ready)

    def _check_slots(self, namespace: Namespace, ready: Sequence[Entry]) -> None:
        """Every slot has exactly one owner."""
        manager = namespace.manager
        owned = [*manager.slots.free, *manager.slots.granted, *manager.slots.lingering]
        owned += [entry.slot for entry in ready]
        cleared = chain.from_iterable(manager._cleared)
        owned += [entry.slot for entry in cleared if entry.state is _READY]
        owners = set(owned)
        assert len(owned) == len(owners), "a slot has two owners"
        places: set[int] = set()
        for mapping in namespace.extents.values():
            if mapping.state in ("live", "retiring"):
                places.update(namespace.slots_of(mapping))
        if owners != places:
            missing = places - owners - manager.slots.retiring
            assert not missing, f"slots {missing} belong to nobody"
            assert owners <= places, "a slot outside of the memory"
        granted: list[int] = []
        for session in self._store.sessions.values():
            if session.namespace is namespace:
                granted.extend(session.granted)
        works = {id(work): work for work in namespace.tiering.coming.values()}.values()
        granted += [slot for work in works for slot in work.job.slots]
        granted += self._held(namespace)[0]
        assert len(granted) == len(manager.slots.granted), "grants do not add up"
        assert set(granted) == manager.slots.granted.keys(), "grants do not add up"

    def _check_index(self, namespace: Namespace, here: Mapping[bytes, Entry]) -> None:
        """Children are counted right, and what is ready hangs below what is ready."""
        holes, above_of = namespace.manager.index.holes, self._truth.above
        parents = [entry.parent for entry in here.values() if entry.parent is not None]
        if holes:  # children of what is not here any more are nobody's
            parents = [parent for parent in parents if here.get(parent.key) is parent]
        counted = {id(entry): entry.children for entry in here.values() if entry.children}
        assert counted == Counter(map(id, parents)), "children are miscounted"
        if holes:
            cut = (e for e in here.values() if e.parent and here.get(e.parent.key) is not e.parent)
            written = all(entry.state is State.WRITING for entry in cut)  # above it one failed
            assert self._faults or written, "a block was evicted before its children"
            return
        for key, entry in here.items():
            state, above = entry.state, above_of.get(key)
            if above is None or (state is not _READY and state is not _COMING):
                continue
            parent = here.get(above)
            assert parent is not None, f"{state.value} below what is not there"
            assert parent is entry.parent, f"{state.value} below another block"
            fits = parent.state is _READY or parent.state is state
            assert fits, f"{state.value} below what is not"

    def _check_pins(self, namespace: Namespace, entries: Iterable[Entry]) -> None:
        """Pins are leases and transfers, and nothing else."""
        pinned: list[Entry] = []
        for lease in namespace.manager.leases._leases.values():
            pinned.extend(lease.pinned)
            here = self._faults or all(entry.state in _HERE for entry in lease.entries)
            assert here, "leased, but neither there nor coming"
            under = all(entry.pins or entry.children for entry in lease.entries)
            assert under, "leased, but neither pinned nor above a pin"
        for work in namespace.tiering._open.values():
            pinned.extend(work.pinned)
        pinned.extend(self._held(namespace)[1])
        held = {id(entry): entry.pins for entry in chain(entries, pinned) if entry.pins}
        assert held == Counter(map(id, pinned)), "pins, and reasons for them, differ"
        dropped = {entry.slot for entry in pinned if entry.state is _DROPPED}
        assert dropped == namespace.manager.slots.lingering, (
            "dropped blocks and lingering slots differ"
        )

    def check_bytes(
        self, namespace: Namespace, ready: Iterable[Entry], *, again: bool = False
    ) -> None:
        """What is ready under a key is what the model computes for it."""
        generations = namespace.generations
        checked = self._checked[namespace.layout.digest]
        for entry in ready:
            slot = entry.slot
            if checked.get(slot) != generations[slot] or again:
                checked[slot] = generations[slot]
                truth = self._truth.bytes[entry.key]
                found = namespace.view(slot)[: len(truth)]
                assert found == truth, f"wrong bytes in slot {slot}"

    def see_used(self) -> None:
        """Note what is used at the moment in which a cap may be lowered."""
        self._used_bytes = max(self._used_bytes, self._pool.used_bytes)

    def _check_caps(self) -> None:
        store, engine = self._store, self._engine
        # A cap that was lowered is reached by and by; meanwhile nothing is added.
        assert self._pool.used_bytes <= max(self._pool.capacity_bytes, self._used_bytes)
        self._used_bytes = self._pool.used_bytes
        refused = store.numbers.counts.get(("kvstore_refused", "protocol"), 0)
        assert not refused, "a half broke the protocol"
        for session in store.sessions.values():
            if session.namespace is None:
                continue
            manager, slot_bytes = session.namespace.manager, session.namespace.layout.slot_bytes
            cap = engine.credit_bytes // slot_bytes
            least = len(manager.rules)  # one block of each group can be stored at any time
            assert len(session.granted) <= max(least, min(cap, session.credit_slots)), "credits"
            leases = manager.leases.of_owner(session.number)
            blocks = [len(lease.entries) for lease in leases]
            assert sum(blocks) == manager.leases.blocks_of(session.number), "leased blocks"
            most = engine.leased_bytes // slot_bytes
            assert sum(blocks) < most + max(blocks, default=1), "leases beyond their cap"
            assert len(session.writing) <= len(session.granted)
        for namespace in store.namespaces.values():
            for tier in namespace.tiering.tiers:
                # All memory: it may have been one namespace's when it was looked at.
                most = max(1, self._capacity_bytes // namespace.layout.slot_bytes // 4)
                pinned = namespace.tiering._storing[tier.name]
                assert pinned <= most, f"{pinned} blocks are being written to a tier, not {most}"

    def _check_host(self, host: Host) -> None:
        """Check an engine's halves; only its own steps change what is checked."""
        half, client, requests = host.half, host.client, host.engine.requests
        tracked = half._requests
        assert tracked.keys() <= requests.keys(), "a request is tracked that has ended"
        asks = {t.ask for t in tracked.values() if t.ask}
        assert client._grants.keys() <= asks, "an answer that nobody asked for is kept"
        assert client._asked_ns.keys() <= asks, "a question that nobody waits for is kept"
        for worker in host.workers:
            under_way = worker.stores_open <= half._stores._sources.keys()
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
            retiring = manager.slots.retiring
            if entry is None or entry.state not in states or entry.slot in retiring:
                least = index
                break
    return least


def _blocks(namespace: Namespace, granted: p.Granted) -> int:
    """Count what an answer names of the first full-attention group."""
    rules = namespace.manager.rules
    group = next(g for g, rule in enumerate(rules) if rule.trailing is None)
    return len(framing.from_u32(granted.hits[group].indices))
