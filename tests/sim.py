"""The whole cache in one thread from one seed: real store, client and scheduler half.

The engines are the reference engine; wires, workers' threads, memory and lower tiers are simulated,
see sim_host, sim_store and sim_disk.
After every step the promises are checked; block bytes follow from the key, so wrong ones are
seen where they arise. `python -m tests.sim SEED` replays a world.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

from connectors.reference import VOCABULARY, Request
from kvstore.config import Config, CpuConfig, EngineConfig, ServerConfig, TierConfig
from kvstore.index import Entry, State
from kvstore.service.namespace import Namespace
from kvstore.service.store import Store
from kvstore.tier import SlotMemory, Tier, TierContext
from kvstore.types import BlockKey, make_key
from tests.sim_disk import SlowTier
from tests.sim_host import PRIORITIES, Host, make_shape
from tests.sim_store import MS, Net, Pool
from tiers.faulty import FaultyTier
from tiers.memory import MemoryTier

STEPS = 300
SETTLE_STEPS = 2_500
SLOT_BYTES = 4096
TRACE_LINES = 40
STALLS = ("stall", "freeze", "disk")
OUTAGES = ("kill", "down", "worker")


class World:
    """Everything that one seed makes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.faults = seed % 2 == 1
        self.tiered = seed // 2 % 2 == 1
        self.net = Net(rng)
        self.net.slow = self.faults and rng.random() < 0.4
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.counts: Counter[str] = Counter()
        self.tiers: list[FaultyTier] = []
        self.disks: list[SlowTier] = []
        self._truth: dict[bytes, bytes] = {}
        self._above: dict[bytes, bytes | None] = {}  # full-attention keys: the one before
        self._checked: dict[tuple[str, int], int] = {}
        self._learned: dict[str, int] = {}  # blocks of a request that are in _truth
        self._next_request = self._next_weights = 1
        self._arrivals = rng.choice((0.1, 0.3, 0.6))
        self.churn = seed % 5 == 0  # slots change hands while a slow engine still reads them
        self._fault_rate = rng.choice((0.002, 0.005, 0.02)) if self.faults else 0.0
        self._fault_kinds = rng.choice((STALLS, OUTAGES, STALLS + OUTAGES))
        self.read_errors = rng.choice((0.0, 0.03)) if self.faults else 0.0
        self._stall_ns = rng.choice((20, 200, 3_000)) * MS
        self._documents = [self._tokens(160) for _ in range(rng.choice((1, 3, 6)))]
        slots, extents = (8, 1) if self.churn else rng.choice(((8, 1), (16, 2), (60, 3)))
        self._pool_of = partial(Pool, self.net.fds, extents, slots, SLOT_BYTES)
        self._config = self._make_config()
        self._sessions = 0
        self._start_store()
        shape = make_shape(rng)
        hosts = 2 if self.churn else rng.choice((1, 2))
        self.hosts = [Host(self.net, rng, f"e{number}", shape) for number in range(hosts)]
        for worker in (worker for host in self.hosts for worker in host.workers):
            worker.errors = self.read_errors
            worker.slowness = rng.choice((0.0, 0.5, 0.9)) if self.faults else 0.1
        if self.churn:
            for worker in self.hosts[0].workers:
                worker.slowness = 0.97
        for worker in (worker for host in self.hosts for worker in host.workers):
            worker.meanwhile = self._meanwhile
        for host in self.hosts:
            for rank in host.ranks:
                rank.between = self._between
            host.engine.book.ending = partial(self._learn_request, host)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def _make_config(self) -> Config:
        rng = self.rng
        engine = EngineConfig(
            credit_bytes=rng.choice((4, 100)) * SLOT_BYTES,
            lease_ns=(15 if self.churn else rng.choice((15, 80, 2_000))) * MS,
            leased_bytes=rng.choice((4, 15, 100)) * SLOT_BYTES,
            defer_ns=rng.choice((0, 20, 100)) * MS,
            promote_ns=rng.choice((0, 5, 30, 2_000)) * MS,
        )
        tiers = (TierConfig("tiers.memory:MemoryTier", "nvme", {}, rng.choice((2, 640)) * MS),)
        return Config(
            ServerConfig("", None), CpuConfig(1, 1), engine, None, tiers if self.tiered else ()
        )  # fmt: skip

    # The store and its tiers

    def _start_store(self) -> None:
        self._sessions += 1_000
        self.tiers.clear()
        self.disks.clear()
        self._checked.clear()
        self.pool = self._pool_of()
        self.net.store = Store(
            self._config, self.pool, self._make_tiers, self.net.send, self._sessions
        )  # fmt: skip

    def _make_tiers(self, digest: str, slot_bytes: int, memory: SlotMemory) -> Sequence[Tier]:
        if not self.tiered:
            return []
        options = {"blocks": self.rng.choice((30, 1000))}
        tier = MemoryTier(TierContext("nvme", digest, slot_bytes, memory, options))
        self.tiers.append(FaultyTier(tier, self.rng, 0.2 if self.faults else 0.0))
        self.disks.append(SlowTier(self.tiers[-1], memory, self.rng, lambda: self.net.now))
        return [self.disks[-1]]

    def namespaces(self) -> list[Namespace]:
        return list(self.net.store.namespaces.values()) if self.net.store is not None else []

    # What happens in a step

    def _between(self) -> None:
        """Other threads and processes get their turn, at points in the engine's step."""
        rng = self.rng
        if rng.random() < 0.5:
            self._turn()
        if rng.random() < self._fault_rate:
            self._fault()
            for _ in range(rng.choice((0, 3, 20))):
                self.net.now += 10 * MS
                self._turn()

    def _meanwhile(self) -> None:
        """The store gets a turn while a worker is in the middle of a load."""
        self.net.now += MS
        self.net.pump()

    def _turn(self) -> None:
        self.net.pump()
        for host in self.hosts:
            for worker in host.workers:
                worker.talk()
                if self.rng.random() >= worker.slowness and self.net.now >= worker.stalled_until:
                    worker.copy(self.rng.choice((1, 4, 40)))

    def step(self) -> None:
        """Let every engine make one step, with faults and arrivals between."""
        rng = self.rng
        self.net.now += rng.choice((1, 1, 5, 20)) * MS
        if rng.random() < self._fault_rate:
            self._fault()
            if rng.random() < 0.1:
                rng.choice(self.hosts).client.detach("simulated")
        for host in self.hosts:
            self._arrive(host)
            self._turn()
            if not host.engine.idle:
                host.step()
            self._learn(host)
        self._turn()
        self.check()

    def _arrive(self, host: Host) -> None:
        rng, engine = self.rng, host.engine
        if rng.random() < self._arrivals and len(engine.requests) < 12:
            kept = rng.randrange(10, 90)
            tail = 0 if rng.random() < 0.3 else rng.randrange(1, 30)
            prompt = rng.choice(self._documents)[:kept] + self._tokens(tail)
            request = Request(
                f"{host.name}r{self._next_request}",
                prompt,
                rng.choice((1, 5, 20)),
                host.shape,
                rng.randrange(PRIORITIES),
            )
            self._next_request += 1
            self._note(f"{request.request_id}: {len(prompt)} tokens")
            engine.add(request)
        if engine.requests and rng.random() < 0.03:
            loading = [r for r, q in engine.requests.items() if q.state.value == "loading"]
            victim = rng.choice(loading or sorted(engine.requests))
            self._note(f"{victim}: aborted while {engine.requests[victim].state.value}")
            engine.abort(victim)
        if self._arrivals and rng.random() < 0.005:
            self._reset(host)

    def _reset(self, host: Host) -> None:
        nonce = self._next_weights.to_bytes(8, "big")
        try:
            host.engine.reset(self._next_weights, nonce)
        except RuntimeError:
            self.counts["resets_refused"] += 1
            return
        self._note(f"{host.name}: reset, weights {self._next_weights}")
        self.counts["resets"] += 1
        host.scope = nonce
        self._next_weights += 1
        for request in host.engine.requests:
            self._learned.pop(request, None)

    def _fault(self) -> None:
        host, kind = self.rng.choice(self.hosts), self.rng.choice(self._fault_kinds)
        self._note(f"fault: {kind} {host.name}")
        self.counts[kind] += 1
        if kind == "kill":
            self.net.kill()
            self._start_store()
        elif kind == "worker":
            self.rng.choice(host.workers).lose()
        elif kind == "stall":
            self.rng.choice(host.workers).stalled_until = self.net.now + self._stall_ns
        elif kind == "disk":
            for disk in self.disks:
                disk.frozen_until = self.net.now + self.rng.choice((100, 3_000)) * MS
        elif kind == "freeze":
            self.net.frozen_until = self.net.now + self.rng.choice((50, 1_000)) * MS
        elif self.net.store is not None:
            self.net.kill()
        else:
            self._start_store()

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.net.now / MS:9.1f} ms  {text}")

    def _learn(self, host: Host) -> None:
        """Write down what each block of each request must hold."""
        for request in host.engine.requests.values():
            self._learn_request(host, request)

    def _learn_request(self, host: Host, request: Request) -> None:
        size = host.shape.block_tokens
        blocks = len(request.block_hashes) * host.shape.hash_tokens // size
        for index in range(self._learned.get(request.request_id, 0), blocks):
            block_hash = request.hash_at((index + 1) * size)
            for group in range(len(host.shape.group_tokens)):
                key = make_key(block_hash, group, host.scope)
                if key not in self._truth:
                    self._truth[key] = host.content(request, group, index)
                    before = request.hash_at(index * size) if index else None
                    if host.geometry.rules[group].trailing is None:
                        self._above[key] = before and make_key(before, group, host.scope)
        self._learned[request.request_id] = blocks

    # The promises

    def check(self) -> None:
        for namespace in self.namespaces():
            self._check_slots(namespace)
            self._check_index(namespace)
            self._check_pins(namespace)
            self._check_bytes(namespace)
        self._check_caps()
        for host in self.hosts:
            self._check_host(host)

    def _check_slots(self, namespace: Namespace) -> None:
        """Every slot has exactly one owner."""
        manager = namespace.manager
        cleared = [entry for index in manager._cleared for entry in index]
        ready = [e.slot for e in (*manager.index, *cleared) if e.state is State.READY]
        owned = [*manager._free, *manager._granted, *ready, *manager._lingering]
        assert len(owned) == len(set(owned)), "a slot has two owners"
        live = [m for m in namespace.extents.values() if m.state in ("live", "retiring")]
        places = {slot for mapping in live for slot in namespace.slots_of(mapping)}
        missing = places - set(owned) - manager._retiring
        assert not missing, f"slots {missing} belong to nobody"
        assert set(owned) <= places, "a slot outside of the memory"
        granted: list[int] = []
        assert self.net.store is not None
        for session in self.net.store.sessions.values():
            if session.namespace is namespace:
                granted.extend(session.granted)
        works = {id(work): work for work in namespace.tiering._coming.values()}.values()
        promoting = [slot for work in works for slot in work.job.slots]
        assert sorted([*granted, *promoting]) == sorted(manager._granted), "grants do not add up"

    def _check_index(self, namespace: Namespace) -> None:
        """Children are counted right, and what is ready hangs below what is ready."""
        manager = namespace.manager
        children: Counter[int] = Counter()
        for entry in manager.index:
            if entry.parent is not None:
                children[id(entry.parent)] += 1
        for entry in manager.index:
            assert entry.children == children[id(entry)], "children are miscounted"
            above = self._above.get(entry.key)
            if above is not None and entry.state is not State.WRITING and not manager.index.holes:
                parent = manager.index.get(BlockKey(above))
                assert parent is not None, f"{entry.state.value} below what is not there"
                here = (State.READY,) if entry.state is State.READY else (State.READY, State.COMING)
                assert parent.state in here, f"{entry.state.value} below what is not"
        if not self.faults:
            assert not manager.index.holes, "a block was evicted before its children"

    def _check_pins(self, namespace: Namespace) -> None:
        """Pins are leases and transfers, and nothing else."""
        pins: Counter[int] = Counter()
        held: dict[int, Entry] = {id(entry): entry for entry in namespace.manager.index}
        for lease in namespace.manager.leases._leases.values():
            for entry in lease.entries:
                here = entry.state in (State.READY, State.COMING)
                assert self.faults or here, "leased, but neither there nor coming"
                pins[id(entry)] += 1
                held[id(entry)] = entry
        for work in namespace.tiering._open.values():
            for entry in work.pinned:
                pins[id(entry)] += 1
                held[id(entry)] = entry
        for number, entry in held.items():
            assert entry.pins == pins[number], f"{entry.pins} pins, {pins[number]} reasons"
        dropped = {entry.slot for entry in held.values() if entry.state is State.DROPPED}
        assert dropped == namespace.manager._lingering, "dropped blocks and lingering slots differ"

    def _check_bytes(self, namespace: Namespace, *, again: bool = False) -> None:
        """What is ready under a key is what the model computes for it."""
        digest = namespace.layout.digest
        for entry in namespace.manager.index:
            if entry.state is State.READY:
                generation = namespace.generations[entry.slot]
                if again or self._checked.get((digest, entry.slot)) != generation:
                    self._checked[digest, entry.slot] = generation
                    truth = self._truth[entry.key]
                    found = bytes(namespace.view(entry.slot)[: len(truth)])
                    assert found == truth, f"wrong bytes in slot {entry.slot}"

    def _check_caps(self) -> None:
        store = self.net.store
        assert self.pool.used_bytes <= self.pool.capacity_bytes
        if store is None:
            return
        for session in store.sessions.values():
            if session.namespace is None:
                continue
            manager = session.namespace.manager
            cap = self._config.engine.credit_bytes // SLOT_BYTES
            assert len(session.granted) <= max(1, min(cap, session.credit_slots)), "credits"
            leases = manager.leases.of_owner(session.number)
            blocks = [len(manager.leases._leases[lease].entries) for lease in leases]
            most = self._config.engine.leased_bytes // SLOT_BYTES
            assert sum(blocks) < most + max(blocks, default=1), "leases beyond their cap"
            assert len(session.writing) <= len(session.granted)
        for namespace in store.namespaces.values():
            for tier in namespace.tiering.tiers:
                pinned = namespace.tiering._storing[tier.name]
                most = max(1, namespace.manager.slots_total // 4) + 8  # memory may have shrunk
                assert pinned <= most, f"{pinned} blocks are being written to a tier"

    def _check_host(self, host: Host) -> None:
        half, client, requests = host.half, host.client, host.engine.requests
        assert set(half._requests) <= set(requests), "a request is tracked that has ended"
        asks = {t.ask for t in half._requests.values() if t.ask is not None}
        assert set(client._grants) <= asks, "an answer that nobody asked for is kept"
        assert set(client._asked_ns) <= asks, "a question that nobody waits for is kept"
        open_jobs = {job for worker in host.workers for job in worker.stores_open}
        assert open_jobs <= set(half._offers._sources), (
            "a store is under way that the fence does not know"
        )
        store = self.net.store
        if store is None or client._link is None or not client.session:
            return
        session = store.sessions.get(host.name)
        if session is not None and session.number == client.session:
            assert len(client.credits) == len(set(client.credits)), "a slot was granted twice"
            assert set(client.credits) <= session.granted, "a credit the store does not know"

    # The end

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        """Faults stop: every request ends, and nothing stays behind."""
        self._note("settling")
        self._arrivals = self._fault_rate = 0.0
        self._end_faults()
        for _ in range(SETTLE_STEPS):
            if all(host.engine.idle for host in self.hosts):
                break
            self.step()
        left = {r: q.state.value for h in self.hosts for r, q in h.engine.requests.items()}
        assert not left, f"requests never end: {left}"
        for number in range(SETTLE_STEPS):
            for host in self.hosts:
                host.step()
            self.step()
            if number > 30 and not any(n.tiering.busy for n in self.namespaces()):
                break
        self._check_nothing_left()
        promises = self._config.engine
        kept = not self.tiered or promises.promote_ns > 1_000 * MS
        for host in self.hosts:
            if kept and not self.faults and promises.lease_ns > 1_000 * MS:
                assert not host.engine.counts["loads_failed"], "a leased hit could not be loaded"
            for worker in host.workers:
                self.counts.update(worker.counts)
            self.counts.update(host.engine.counts)
            self.counts.update(host.counts)

    def _end_faults(self) -> None:
        self.net.slow, self.net.frozen_until = False, 0
        for worker in (worker for host in self.hosts for worker in host.workers):
            worker.stalled_until, worker.errors, worker.slowness = 0, 0.0, 0.0
        if self.net.store is None:
            self._start_store()
        for tier in self.tiers:
            tier._fail_ratio = 0.0
        for disk in self.disks:
            disk.thaw()

    def _check_nothing_left(self) -> None:
        for host in self.hosts:
            half = host.half
            for left in (
                half._requests,
                half._left,
                half._offers._sources,
                half._offers._ranks_over,
            ):
                assert not left, f"{host.name}: left behind: {left}"
            assert not half._loading_hashes
            assert not half._early
            assert host.engine.free_blocks == host.shape.blocks - 1, "engine blocks leaked"
            assert host.client.session, f"{host.name} is not attached again"
            assert not any(worker.busy for worker in host.workers)
        store = self.net.store
        assert store is not None
        for session in store.sessions.values():
            assert not session.asks
            assert not session.writing
            client = next(h.client for h in self.hosts if h.name == session.engine)
            assert set(client.credits) == session.granted, "granted slots beyond the stock"
        for namespace in self.namespaces():
            assert not namespace.tiering.busy
            assert not namespace.tiering._coming
            assert not any(namespace.manager._granted.values())
            assert not len(namespace.manager.leases), "a lease is left"
            self._check_bytes(namespace, again=True)


if __name__ == "__main__":
    from tests.sim_runs import main

    main()
