"""Two to four stores that hand over to each other, each with an engine, from one seed.

Each store is a world, see world: the real store and halves, with its own faults. Here they get side
channels (see cables), exporters (see exporters), and a router, which loses requests, sends some
twice, and some before they were computed. Clocks show other times; bytes follow from the keys.

    request --> engine of a node, computes it --> router --> engine of another one, goes on
                       |                                          |
                    its store <=== cables, exporters ===> the other's store

Odd seeds have faults. `python -m tests.sim --fleet SEED` replays a fleet.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from connectors.kv_transfer_params import common_id
from tests.sim.cables import Cables, Clock
from tests.sim.fleet_faults import FAULTS, STATES, inject
from tests.sim.host import Host, make_shape
from tests.sim.node import Node, Tails
from tests.sim.store import MS
from tests.sim.world import TRACE_LINES, Cut, Params, make_documents

SETTLE_TURNS = 40_000
QUIET_MS = (*(1,) * 50, *(50,) * 40, *(1000,) * 150)  # for leases, graces and quarantines
CHECK_TURNS = 8
AIMED = 0.1  # chance of a fault in a turn in which the state that is aimed at holds
AIMED_MAX = 24
AIMS = tuple(STATES)


class Routed(msgspec.Struct, order=True):
    """A request on its way to the engine that goes on with it. due_ns: when it is there."""

    due_ns: int
    number: int
    node: int
    prompt: list[int]
    params: Params | None


class Fleet:
    """All that one seed makes."""

    def __init__(self, seed: int, cut: Cut | None = None) -> None:
        self.seed = seed
        self.cut = cut or Cut()
        self.node_cut = self.cut
        self.rng = rng = random.Random(seed ^ 0xF1EE7)
        self._fault_rng = random.Random(seed ^ 0xFA117)
        self._router_rng = random.Random(seed ^ 0x40073)
        self.faults = seed % 2 == 1
        self.clock = Clock()
        self.cables = Cables(rng, self.clock)
        self.cables.slow = self.faults and rng.random() < 0.4
        self.cables.sent = 0.9995 if self.faults else 1.0
        self.transfer_failures = rng.choice((0.0, 0.02, 0.3)) if self.faults else 0.0
        self.truth = Tails()
        self.shape = make_shape(rng)
        self.documents = make_documents(rng)
        self.trace: deque[str] = deque(maxlen=2 * TRACE_LINES)
        self.counts: Counter[str] = Counter()
        self.met: Counter[tuple[str, str]] = Counter()
        self.turns = 0
        self._own_faults = 0
        self._rate = rng.choice((0.01, 0.03, 0.08)) if self.faults else 0.0
        self._kinds = rng.sample(sorted(FAULTS), rng.choice((3, 6, len(FAULTS))))
        self._aim: Callable[[Fleet], bool] = STATES[AIMS[seed // 2 % len(AIMS)]]
        self._aimed_left = AIMED_MAX
        self._weights = 1
        self._routed: list[Routed] = []
        self._sent = 0
        self._share = rng.choice((0.5, 0.9))  # of requests, that are handed over
        self.nodes: list[Node] = [Node(self, number) for number in range(rng.choice((2, 2, 3, 4)))]
        self.steps_wanted = self.cut.steps * len(self.nodes) // 3

    @property
    def steps(self) -> int:
        return sum(node.steps for node in self.nodes)

    @property
    def fault_count(self) -> int:
        return max(self._own_faults, *(node.fault_count for node in self.nodes))

    def is_frozen(self, address: str) -> bool:
        return any(node.is_frozen for node in self.nodes if node.address == address)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.clock.ns / MS:9.1f} ms  {text}")

    def weights(self) -> int:
        """Name the weights that engines take now when theirs change."""
        self._weights += self.rng.random() < 0.1
        return self._weights

    # The router

    def begin(self, node: Node, host: Host, prompt: list[int]) -> None:
        """A request arrives, for one engine or for two of them."""
        rng = self._router_rng
        if rng.random() >= self._share:
            return
        name = node.begin_handed(host, prompt)
        self.counts["handed"] += 1
        if rng.random() < 0.2:  # to both at once
            early: Params = {
                "do_remote_prefill": True,
                "remote_engine_id": host.name,
                "remote_request_id": common_id(name),
                "remote_host": node.name,
                "remote_port": 1,
                "remote_block_ids": [[1]],
                "tp_size": self.shape.world,
            }
            self._send(node, prompt, early)

    def route(self, node: Node, name: str, prompt: list[int], params: Params | None) -> None:
        """A request was computed: its next engine goes on, or the user has gone."""
        if self._router_rng.random() < 0.1:
            self.counts["left alone"] += 1
            return
        self.note(f"{name}: handed over, {params and params['remote_num_tokens']} tokens")
        self._send(node, prompt, params)
        if self._router_rng.random() < 0.1:
            self.counts["sent twice"] += 1
            self._send(node, prompt, params)

    def _send(self, node: Node, prompt: list[int], params: Params | None) -> None:
        rng = self._router_rng
        others = [number for number, other in enumerate(self.nodes) if other is not node]
        number = self.nodes.index(node) if rng.random() < 0.03 else rng.choice(others)
        late_ms = rng.choice((0, 0, 0, 5, 60, 1_500))
        self._sent += 1
        sent = Routed(self.clock.ns + late_ms * MS, self._sent, number, prompt, params)
        self._routed = sorted([*self._routed, sent], key=lambda each: (each.due_ns, each.number))

    def _deliver(self) -> None:
        while self._routed and self._routed[0].due_ns <= self.clock.ns:
            sent = self._routed.pop(0)
            node = self.nodes[sent.node]
            new = self._router_rng.choice((1, 5, 20))
            node.begin(node.hosts[0], sent.prompt, new, sent.params)

    # Turns

    def turn(self) -> None:
        """One node's engine makes a step if it has work; the others' stores have their turns."""
        self._maybe_fault()
        self.cables.deliver()
        self._deliver()
        node = self.rng.choice(self.nodes)
        node.turn()
        node.check_peers()
        for other in self.nodes:
            if other is not node and self.rng.random() < 0.6:
                other.idle()
        self.turns += 1
        if self.turns % CHECK_TURNS == 0:
            self._check()

    def _check(self) -> None:
        for node in self.nodes:
            node.check_peers()

    def _maybe_fault(self) -> None:
        if not self._rate:
            return
        rng = self._fault_rng
        kinds = self._kinds if rng.random() < self._rate else ()
        if self._aimed_left and rng.random() < AIMED and self._aim(self):
            self._aimed_left -= 1
            kinds = sorted(FAULTS)
        if kinds:
            self._own_faults += 1
            kind, number = rng.choice(kinds), rng.getrandbits(32)
            if self._own_faults not in self.cut.skipped:
                inject(self, kind, random.Random(number))

    def pass_time(self, ms: int) -> None:
        """Let time pass in which every store has its turns, and no engine makes a step."""
        self.clock.ns += ms * MS
        for _ in range(3):
            self.cables.deliver()
            for node in self.nodes:
                node.idle()

    # The end

    def run(self) -> None:
        while self.steps < self.steps_wanted:
            self.turn()
            if self._is_over():
                break
        self.settle()

    def _is_over(self) -> bool:
        none_to_come = all(node._next_request > self.cut.requests for node in self.nodes)
        return none_to_come and not self._routed and self._idle()

    def _idle(self) -> bool:
        return all(host.engine.idle for node in self.nodes for host in node.hosts)

    def settle(self) -> None:
        """Faults stop: every request ends, and nothing stays behind."""
        self.note("settling")
        self._rate = self.transfer_failures = 0.0
        self.cables.end_faults()
        self.cables.sent = 1.0
        for node in self.nodes:
            node.end_faults()
        for _ in range(SETTLE_TURNS):
            if self._idle() and not self._routed:
                break
            self.turn()
        left = {
            name: request.state.value
            for node in self.nodes
            for host in node.hosts
            for name, request in host.engine.requests.items()
        }
        assert not left, f"requests never end: {left}"
        for ms in QUIET_MS:
            for node in self.nodes:
                node.step_all()
            self.pass_time(ms)
            self._check()
        for node in self.nodes:
            node.check_end()
