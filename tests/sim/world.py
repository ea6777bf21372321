"""The whole cache in one thread from one seed: real store, client and scheduler half.

The engines are the reference engine; wires, workers' threads, memory and lower tiers are simulated,
see host, store and disk. Two engines share the store; the worlds of odd seeds have faults, see
faults. The promises are checked all the time, see checks; block bytes follow from the key, so wrong
ones are seen where they arise.

A step is one scheduler step of one engine that has something to do: a world makes STEPS of them or
a few more, the last ones without faults, until its requests have ended. Turns in which both engines
sleep are not counted. `python -m tests.sim SEED` replays a world.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from connectors.compute_pace import ComputePace
from connectors.kv_transfer_params import NO_TRANSFER, Transfer, is_handed_over
from kvstore.config import Config, CpuConfig, EngineConfig, ServerConfig, TierConfig
from kvstore.core.eviction import LRU
from kvstore.core.index import State
from kvstore.core.segmented import SEGMENTED
from kvstore.core.tier import SlotMemory, Tier, TierContext
from kvstore.core.types import BlockKey
from kvstore.store import drain
from kvstore.store.namespace import Namespace
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.wire import engine as p
from tests.harness.fakes import SLOT_BYTES
from tests.reference import VOCABULARY, Request, Shape
from tests.reference.memory_tier import MemoryTier
from tests.sim.checks import Checks, Held, Truth, nothing_held
from tests.sim.disk import SlowTier
from tests.sim.faults import AIMED, AIMED_MAX, AIMS, BETWEEN_STEPS, KINDS, PROMOTION, STATES, inject
from tests.sim.host import PRIORITIES, Host, make_shape
from tests.sim.store import MS, Net, Pool
from tests.sim.worker import Worker

Params = Mapping[str, Any]  # of a hand-over

STEPS = 500
BUSY_STEPS = 450  # of these, with faults and without an end of requests
SETTLE_STEPS = 5_000
QUIET_TURNS = 3  # after the last request, before a world may be over
SIZES = ((8, 1), (16, 2), (60, 3))  # of memory: slots of an extent, and how many extents
SIZES_TO_SHARE = ((16, 2), (60, 3), (60, 3))
TWINS = 0.2  # share of requests with which another comes that begins alike
FORGETS = 0.1  # share of turns in which an engine's own cache is emptied: then it loads again
REQUESTS_MAX = 8  # of an engine at one time
CHECK_TURNS = 4  # from one look at the whole store to the next
TRACE_LINES = 40
FEATURES = (
    "tier",
    "models",
    "resets",
    "aborts",
    "errors",
    "slow",
    "sends",
    "priorities",
    "compares",
    "late",
    "in step",
)


class Cut(msgspec.Struct, frozen=True):
    """What is left out of a world, to make what it shows shorter.

    steps: before it settles. requests: that arrive. skipped: faults that do not happen, by number.
    off: some of FEATURES.
    """

    steps: int = BUSY_STEPS
    requests: int = 1_000_000
    skipped: tuple[int, ...] = ()
    off: tuple[str, ...] = ()


def make_documents(rng: random.Random) -> list[list[int]]:
    """Make the texts that prompts begin with."""
    return [rng.choices(range(VOCABULARY), k=160) for _ in range(rng.choice((1, 3, 6)))]


class Shared(msgspec.Struct):
    """What stores that hand over to each other have in common, each in a world with one engine.

    name: of the store; its engine's begins with it. transfer(engine): how it hands over. held: see
    Checks.
    """

    name: str
    net: Net
    truth: Truth
    shape: Shape
    documents: list[list[int]]
    transfer: Callable[[str], Transfer]
    held: Held


class World:
    """Everything that one seed makes."""

    def __init__(self, seed: int, cut: Cut | None = None, shared: Shared | None = None) -> None:
        """shared: it is one of several; see fleet."""
        self.seed = seed
        self.shared = shared
        self.cut = cut or Cut()
        self.rng = rng = random.Random(seed)
        self._fault_rng = random.Random(seed ^ 0xFA017)
        self._arrival_rng = random.Random(seed ^ 0xA881)
        self.faults = seed % 2 == 1
        aim = AIMS[seed // 2 % len(AIMS)]
        self._aim: Callable[[World], bool] = STATES[aim]
        self._promotes = aim == PROMOTION  # seldom under way unless all is made for it
        self.tiered = (seed // 2 % 4 != 0 or self._promotes) and self._has("tier")
        self.net: Net = Net(rng) if shared is None else shared.net
        self.net.slow = self.faults and rng.random() < 0.3 and self._has("slow")
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.counts: Counter[str] = Counter()
        self.met: Counter[tuple[str, str]] = Counter()  # fault and state
        self.steps = self.turns = 0
        self.fault_count = 0
        self.disks: list[SlowTier] = []
        self._digests: list[str] = []  # of the disks
        self._kept: dict[str, dict[BlockKey, bytes]] = {}  # what disks had when a store died
        self.truth = Truth() if shared is None else shared.truth
        self._next_request = self._next_weights = 1
        self._arrivals = rng.choice((0.1, 0.3, 0.6))
        self.churn = (
            seed % 5 == 0 and shared is None
        )  # slots change hands while a slow engine still reads them
        self._fault_rate = rng.choice((0.002, 0.005, 0.02)) if self.faults else 0.0
        self._kinds = rng.sample(KINDS, rng.choice((2, 5, len(KINDS))))
        self._aimed_left = AIMED_MAX
        errors = rng.choice((0.0, 0.03))
        self.read_errors = errors if self.faults and self._has("errors") else 0.0
        self.stall_ns = rng.choice((20, 200, 3_000)) * MS
        self._documents = make_documents(rng) if shared is None else shared.documents
        self._shape = make_shape(rng) if shared is None else shared.shape
        if not self._has("priorities"):
            self._shape = msgspec.structs.replace(self._shape, by_priority=False)
        sizes = SIZES if shared is None else SIZES_TO_SHARE
        slots, extents = (8, 1) if self.churn else rng.choice(sizes)
        slots = max(slots, 8 * (len(self._shape.groups) - 1))  # a hit takes one of each group
        self._pool_of = partial(Pool, self.net.fds, extents, slots)
        self.extents, self._memory_bytes = extents, extents * slots * (SLOT_BYTES + 4)
        self._config = self._make_config()
        self._sessions = 0
        self.start_store()
        self.models = 2 if extents == 3 and rng.random() < 0.4 and self._has("models") else 1
        self._slowness = [rng.choice((0.0, 0.5, 0.9)) if self.faults else 0.1 for _ in range(2)]
        engines = 2 if shared is None else 1
        self.hosts: list[Host] = [self._make_host(number) for number in range(engines)]
        self._workers = [worker for host in self.hosts for worker in host.workers]
        self.orphans: list[Worker] = []  # of engines that died

    def _has(self, feature: str) -> bool:
        return feature not in self.cut.off

    def _make_host(self, number: int) -> Host:
        model = f"model{number % self.models}"
        name, transfer, shared = f"e{number}", NO_TRANSFER, self.shared
        if shared is not None:
            name = f"{shared.name}{name}"
            transfer = shared.transfer(name)
        in_step = self._has("in step") and not (self.seed // 10 + number) % 2
        what = self.net, self.rng, name, self._shape, model
        host = Host(*what, in_step=in_step, transfer=transfer)
        if not self._has("sends"):
            host.half.delays = 0.0
        if (self.seed // 20 + number) % 2 and self._has("compares"):
            host.half.prefer_computing(ComputePace(lambda: self.net.now))
        if (self.seed // 10 + number) % 2 and self._has("late"):
            host.store_late()
        for worker in host.workers:
            worker.errors = self.read_errors
            worker.errors_in_step = 0.3 if self.faults and self._has("errors") else 0.0
            worker.slowness = 0.97 if self.churn and not number else self._slowness[number]
            worker.meanwhile = self._meanwhile
        for rank in host.ranks:
            rank.between = self._between
        host.engine.book.ending = partial(self.truth.learn_request, host)
        return host

    def _make_config(self) -> Config:
        rng = self.rng
        engine = EngineConfig(
            credit_bytes=rng.choice((4, 100)) * SLOT_BYTES,
            lease_ns=(15 if self.churn else rng.choice((15, 80, 2_000))) * MS,
            leased_bytes=rng.choice((4, 15, 100)) * SLOT_BYTES,
            pinned_bytes=8 * SLOT_BYTES,
            defer_ns=rng.choice((0, 20, 100)) * MS,
            promote_ns=rng.choice((30, 2_000) if self._promotes else (0, 5, 30, 2_000)) * MS,
            promote_limit_ns=rng.choice((60_000, 60_000, 100)) * MS,
            event_tokens_bytes=0,
        )
        tiers = (
            TierConfig(
                "tests.reference.memory_tier:MemoryTier", "nvme", {}, rng.choice((2, 640)) * MS
            ),
        )
        server = ServerConfig("", None, (), None, 0o600)
        policy = LRU if self.seed // 40 % 2 else SEGMENTED
        cpu = CpuConfig(self._memory_bytes, 1, None, policy)
        return Config(server, cpu, engine, None, tiers if self.tiered else ())

    # The store and its tiers

    def start_store(self) -> None:
        self._sessions += 1_000
        for digest, disk in zip(self._digests, self.disks, strict=True):
            kept = disk.kept
            lost = self.rng.sample(sorted(kept), len(kept) // self.rng.choice((2, 8, 100)))
            self._kept[digest] = {key: kept[key] for key in kept.keys() - set(lost)}
        self.disks.clear()
        self._digests.clear()
        self.pool = self._pool_of()
        self.net.store = store = self._make_store()
        shared, engine = self.shared, self._config.engine
        held = nothing_held if shared is None else shared.held
        holes = self.faults or shared is not None  # blocks may not come, without any fault
        self.checks = Checks(store, self.pool, self.truth, engine, faults=holes, held=held)

    def _make_store(self) -> Store:
        return Store(self._config, self.pool, self._make_tiers, self.net.send, self._sessions)

    def _make_tiers(self, digest: str, slot_bytes: int, memory: SlotMemory) -> Sequence[Tier]:
        if not self.tiered:
            return []
        options = {"blocks": self.rng.choice((12, 30, 1000))}
        blocks = MemoryTier(TierContext("nvme", digest, slot_bytes, memory, options))
        fail_ratio = 0.2 if self.faults else 0.0
        disk = SlowTier(blocks, memory, self.rng, fail_ratio, lambda: self.net.now)
        loading_ns = self.rng.choice((0, 50, 400)) * MS if self.faults else 0
        disk.open(self._kept.get(digest, {}), loading_ns)
        self.disks.append(disk)
        self._digests.append(digest)
        return [disk]

    def namespaces(self) -> list[Namespace]:
        return list(self.net.store.namespaces.values()) if self.net.store is not None else []

    def sessions(self) -> list[Session]:
        return list(self.net.store.sessions.values()) if self.net.store is not None else []

    # What happens in a turn

    def _between(self) -> None:
        """Another thread or process gets its turn, at points in the engine's step."""
        workers = self._workers
        number = int(self.rng.random() * 2 * (len(workers) + 1))  # half of the time none
        if number < len(workers):
            workers[number].turn()
        elif number == len(workers):
            self.net.pump()
        if self._maybe_fault(amid=True):
            for _ in range(self.rng.choice((0, 3, 20))):
                self.net.now += 10 * MS
                self._turn()

    def _meanwhile(self) -> None:
        """The store gets a turn while a worker is in the middle of a load."""
        self.net.now += MS
        self.net.pump()

    def _turn(self) -> None:
        self.net.pump()
        for worker in self._workers:
            worker.turn()
        for worker in self.orphans:
            worker.talk()
            worker.copy(1)
        if self.orphans:
            self.orphans = [worker for worker in self.orphans if not worker.dies()]

    def turn(self) -> None:
        """Let one engine make a step if it has work, with faults and arrivals between."""
        rng = self.rng
        self.net.now += rng.choice((1, 1, 5, 20)) * MS
        self._maybe_fault()
        host = rng.choice(self.hosts)
        self._arrive(host)
        self._turn()
        if host.engine.idle:
            host = next((other for other in self.hosts if not other.engine.idle), host)
        if not host.engine.idle:
            host.step()
            self.steps += 1
        self.truth.learn(host)
        self.turns += 1
        if self.net.store is not None:
            self.checks.after_turn(host)
            if self.turns % CHECK_TURNS == 0:
                self.checks.check_store()

    def _arrive(self, host: Host) -> None:
        rng, engine = self._arrival_rng, host.engine
        in_step = any(other.half._step_loads is not None for other in self.hosts)
        if rng.random() < self._arrivals and self._has_room(host):
            prompt = self._make_prompt()
            self.begin(host, prompt, rng.choice((1, 5, 20)))
            twin = in_step and rng.random() < TWINS  # one step may admit both
            if twin and self._has_room(host):
                self.begin(host, prompt + self._make_prompt()[:8], 5)
        if in_step and rng.random() < FORGETS:
            engine.book.tables.forget_all()
        if engine.requests and rng.random() < 0.03 and self._has("aborts"):
            loading = [r for r, q in engine.requests.items() if q.state.value == "loading"]
            victim = rng.choice(loading or sorted(engine.requests))
            self.note(f"{victim}: aborted while {engine.requests[victim].state.value}")
            engine.abort(victim)
        if self._arrivals and rng.random() < 0.005:
            self.reset(host)

    def _has_room(self, host: Host) -> bool:
        many = len(host.engine.requests) >= REQUESTS_MAX
        return not many and self._next_request <= self.cut.requests

    def _make_prompt(self) -> list[int]:
        rng = self._arrival_rng
        kept = rng.randrange(10, 70)
        tail = 0 if rng.random() < 0.3 else rng.randrange(1, 24)
        prompt = rng.choice(self._documents)[:kept]
        return prompt + rng.choices(range(VOCABULARY), k=tail)

    def begin(
        self, host: Host, prompt: Sequence[int], new: int, params: Params | None = None
    ) -> None:
        """Have a request arrive. params: of a hand-over."""
        name = f"{host.name}r{self._next_request}"
        request = Request(name, prompt, new, host.shape, self._arrival_rng.randrange(PRIORITIES))
        if host.shape.has_state and is_handed_over(params):
            request.leave_out_last()
        if params is not None:
            host.half.given[name] = params
        self._next_request += 1
        self.note(f"{name}: {len(prompt)} tokens")
        host.engine.add(request)
        self.truth.learn_request(host, request)

    def resize(self, extents: int) -> bool:
        """An operator gives memory a cap of so many extents."""
        return self.query("resize", "cpu", extents * self.pool.extent_bytes)

    def query(self, *what: str | int) -> bool:
        """An operator asks for something, if there is a store."""
        if self.net.store is None:
            return False
        self.checks.see_used()
        self.net.store.on_message(0, p.Query(*what), self.net.now)  # type: ignore[arg-type]
        return True

    def reset(self, host: Host) -> None:
        """The engine's weights change."""
        nonce = self._next_weights.to_bytes(8, "big")
        if not self._has("resets"):
            return
        try:
            host.engine.reset(self._next_weights, nonce)
        except RuntimeError:
            self.counts["resets_refused"] += 1
            return
        self.note(f"{host.name}: reset, weights {self._next_weights}")
        self.counts["resets"] += 1
        host.scope = nonce
        self._next_weights += 1
        self.truth.learn_anew(host)

    def replace(self, host: Host, lives_ns: int) -> None:
        """An engine dies; its workers live on for a while, and it is started again."""
        self._add_up(host)
        host.client.close()
        for worker in host.workers:
            worker.orphan(self.net.now + lives_ns)
        self.orphans.extend(host.workers)
        number = self.hosts.index(host)
        self.hosts[number] = self._make_host(number)
        self._workers = [worker for host in self.hosts for worker in host.workers]

    def _maybe_fault(self, *, amid: bool = False) -> bool:
        """Let something go wrong now and then, more often in the state that is aimed at.

        amid: an engine is in the middle of a step.
        """
        if not self._fault_rate:
            return False
        rng = self._fault_rng
        kinds: Sequence[str] = self._kinds if rng.random() < self._fault_rate else ()
        if self._aimed_left and rng.random() < AIMED and self._aim(self):
            self._aimed_left -= 1
            kinds = KINDS if amid or rng.random() < 0.5 else BETWEEN_STEPS
        if not kinds:
            return False
        self.fault_count += 1
        kind, number = rng.choice(kinds), rng.getrandbits(32)
        if self.fault_count in self.cut.skipped or (amid and kind in BETWEEN_STEPS):
            return False
        return inject(self, kind, random.Random(number))

    def note(self, text: str) -> None:
        self.trace.append(f"{self.net.now / MS:9.1f} ms  {text}")

    # The end

    def run(self) -> None:
        while self.steps < self.cut.steps:
            self.turn()
            ended = self._next_request > self.cut.requests
            if ended and all(host.engine.idle for host in self.hosts):
                break
        self.settle()

    def settle(self) -> None:
        """Faults stop: every request ends, and nothing stays behind."""
        self.note("settling")
        self._fault_rate = 0.0
        self._end_faults()
        least = STEPS if self.cut.steps == BUSY_STEPS else 0
        for _ in range(SETTLE_STEPS):
            idle = all(host.engine.idle for host in self.hosts)
            self._arrivals = float(idle)  # one more request, for a whole world's steps
            if idle and self.steps >= least:
                break
            self.turn()
        self._arrivals = 0.0
        left = {r: q.state.value for h in self.hosts for r, q in h.engine.requests.items()}
        assert not left, f"requests never end: {left}"
        for number in range(SETTLE_STEPS):
            for host in self.hosts:
                host.step()
            self.turn()
            if number > QUIET_TURNS and self._quiet():
                break
        self._check_nothing_left()
        for host in self.hosts:
            self._add_up(host)
        self.counts["hits_compared"] += self.checks.hits
        if not self.faults:
            self._check_nothing_failed()

    def _quiet(self) -> bool:
        attached = all(host.client.session for host in self.hosts)
        copied = all(worker.idle for worker in self._workers)
        told = not any(wire.up or wire.down for wire in self.net.wires.values())
        busy = any(session.asks for session in self.sessions())
        busy = busy or any(namespace.tiering.jobs_open for namespace in self.namespaces())
        return attached and copied and told and not busy

    def _add_up(self, host: Host) -> None:
        for worker in host.workers:
            self.counts.update(worker.counts)
        self.counts.update(host.engine.counts)
        self.counts.update(host.counts)

    def _end_faults(self) -> None:
        self.net.slow = False
        self.net.slow_until = self.net.frozen_until = 0
        for worker in (worker for host in self.hosts for worker in host.workers):
            worker.stalled_until, worker.errors, worker.slowness = 0, 0.0, 0.0
        if self.net.store is None:
            self.start_store()
        self.resize(self.extents)
        self.query(drain.DRAIN_CANCEL)
        for disk in self.disks:
            disk.thaw()

    def _check_nothing_left(self) -> None:
        for host in self.hosts:
            half = host.half
            for left in (
                half._requests,
                half._tokens_left,
                half._stores._sources,
                half._stores._ranks_ended,
            ):
                assert not left, f"{host.name}: left behind: {left}"
            assert not half._loads._loading
            assert not half._final_stores
            handed = half._hand_overs
            assert not handed._running
            assert not handed._holders
            assert not handed._unstored
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
            assert not namespace.tiering.jobs_open
            assert not namespace.tiering.coming
            assert not any(namespace.manager.slots.granted.values())
            assert not len(namespace.manager.leases), "a lease is left"
            ready = [e for e in namespace.manager.index if e.state is State.READY]
            self.checks.check_bytes(namespace, ready, again=True)

    def _check_nothing_failed(self) -> None:
        """Without faults nothing fails, and nothing is given up."""
        assert self.net.store is not None
        numbers, engine = self.net.store.numbers.counts, self._config.engine
        lost = [
            key for key, count in numbers.items() if key[0] == "kvstore_sessions_ended" and count
        ]
        assert not lost, f"sessions ended without a fault: {lost}"
        for event in ("timed_out", "detached"):
            assert not self.counts[event], f"{event} without a fault"
        failed = {
            event: count
            for namespace in self.namespaces()
            for (_, event), count in namespace.tiering.counts.items()
            if event in ("loaded_failed", "corrupt") and count
        }
        assert not failed, f"a tier failed without a fault: {failed}"
        waits_ns = min(engine.promote_ns, engine.promote_limit_ns)
        kept = not self.tiered or waits_ns > 1_000 * MS
        if kept and engine.lease_ns > 1_000 * MS:
            assert not self.counts["loads_failed"], "a leased hit could not be loaded"
