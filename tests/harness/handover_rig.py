"""Reference engines that hand prompts over: real halves, on real stores with real exporters."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

from connectors.engine_interface import BlockTable, EngineRequest
from connectors.kv_transfer_params import Transfer, is_handed_over
from connectors.partial_block import is_partial_block
from connectors.request_policy import NO_LIMITS, RequestPolicy
from connectors.scheduler import SchedulerHalf
from connectors.step_loads import StepLoads
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher
from kvstore.core.index import State
from kvstore.core.types import BlockKey
from kvstore.store.namespace import Namespace
from kvstore.wire import engine as p
from tests.harness.live import LiveStore, eventually
from tests.harness.patience import WAIT_S
from tests.reference import VOCABULARY, Engine, Rank, Request, Shape, TieredWorker
from tests.reference.connector import attached
from tests.reference.text import Text

HANDED = {"do_remote_decode": True}
CREDITS = 600  # for all that a test computes
STEP_S = 0.001  # as long as vLLM's core sleeps when no model ran

Params = Mapping[str, Any] | None


def prompt(seed: object, tokens: int) -> list[int]:
    """Tokens that no other seed has."""
    made = random.Random(str(seed))
    return [made.randrange(VOCABULARY) for _ in range(tokens)]


class Half(SchedulerHalf):
    """Knows requests' hand-over parameters, as vLLM does, and keeps what they hand back."""

    given: dict[str, Params]
    handed: dict[str, dict[str, Any] | None]
    requests: dict[str, Request]

    def on_new_request(
        self,
        request: EngineRequest,
        transfer: Params = None,
        cached: int = 0,
        *,
        reads: bool = True,
        repeatable: bool = True,
        policy: RequestPolicy = NO_LIMITS,
    ) -> None:
        assert policy == NO_LIMITS
        assert not transfer
        assert not cached
        assert reads
        assert repeatable
        super().on_new_request(request, self.given[request.request_id])

    def request_finished(self, request_id: str, table: BlockTable) -> bool:
        request = self.requests[request_id]
        if request.num_tokens >= request.tokens_max:
            self.handed[request_id] = self.hand_over(request_id, table)
        return super().request_finished(request_id, table)


class Node:
    """An engine with one rank, on a store."""

    def __init__(
        self,
        store: LiveStore,
        name: str,
        shape: Shape,
        *,
        push: bool = False,
        slots: int = CREDITS,
        step_loads: StepLoads | None = None,
    ) -> None:
        """push: what it asks for is to be written to its store. slots: its credits."""
        self.slots = slots
        self.store, self.name, self.shape = store, name, shape
        memory = bytearray(shape.blocks * shape.page_bytes)
        self.worker = attached(name, "model", shape, 0, memory, store.path)
        self.side = TieredWorker(self.worker)
        hello = p.Hello(p.VERSION, name, "scheduler", 0, 1, credit_slots=slots)
        client = StoreClient(Attacher(lambda: store.path, hello), monotonic_ns)
        self.half = Half(
            shape.geometry, client, transfer=Transfer(name, push), step_loads=step_loads
        )
        self.half.given, self.half.handed, self.half.requests = {}, {}, {}
        rank = Rank(shape, 0, self.side, memory)
        self.engine = Engine(shape, self.half, [rank], random.Random(0), stopped=0.0)
        self._client = client

    def attach(self) -> None:
        assert self._client.wait_attached(WAIT_S)
        eventually(lambda: self._heard() and len(self._client.credits) >= self.slots // 2)

    def _heard(self) -> bool:
        self._client.receive(STEP_S)
        return True

    def close(self) -> None:
        self.half.shutdown()
        self.worker.shutdown()

    def run(
        self, prompts: Mapping[str, Sequence[int]], new: int, params: Mapping[str, Params]
    ) -> dict[str, int]:
        """Run prompts to their ends; return how many tokens of each were loaded.

        The engine compares every byte that it reads; here the tokens are compared, too.
        """
        made = {name: Request(name, text, new, self.shape) for name, text in prompts.items()}
        for name, request in made.items():
            if self.shape.has_state and is_handed_over(params.get(name)):
                request.leave_out_last()
            self.half.given[name] = params.get(name)
            self.half.requests[name] = request
            self.engine.add(request)
        end_s = time.monotonic() + WAIT_S
        while not self.engine.idle:
            assert time.monotonic() < end_s, f"{len(made)} prompts have not ended"
            self._step()
        for name, request in made.items():
            length = min(len(prompts[name]), request.tokens_max - 1)
            expected = Text(prompts[name][:length], self.shape.hash_tokens)
            while len(expected) < request.tokens_max:
                expected.sample()
            assert request.text.tokens[: request.tokens_max] == expected.tokens, name
        return {name: request.hit.external for name, request in made.items()}

    def _step(self) -> None:
        self.engine.step()
        time.sleep(STEP_S)

    def compute(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, Params]:
        """Run prompts that another engine is to go on with; return what it is to be given."""
        self.run(prompts, 1, dict.fromkeys(prompts, HANDED))
        return {name: self.half.handed[name] for name in prompts}

    @property
    def namespace(self) -> Namespace:
        found = self.store.server.store.sessions[self.name].namespace
        assert found is not None
        return found

    def keys(self) -> list[BlockKey]:
        """Name the blocks that its store has ready in memory, of all prompts there are."""
        return [e.key for e in self.namespace.manager.index if e.state is State.READY]

    def blocks(self) -> list[int]:
        """Count them by group."""
        width = self.shape.geometry.hash_bytes
        groups = [key[width : width + 2] for key in self.keys()]
        return [groups.count(group.to_bytes(2, "big")) for group in range(len(self.shape.groups))]

    def tails(self) -> list[BlockKey]:
        return [key for key in self.keys() if is_partial_block(key)]

    def has_ended(self) -> bool:
        """Tell whether its store has heard of the end of all requests that it handed over."""
        peers = self.store.server._peers
        assert peers is not None
        return not any(lease.running for lease in [*peers.producer.request_leases._leases.values()])

    def held(self, request: str) -> tuple[int, int]:
        """Count the blocks that its store holds for a request that has ended, and awaits."""
        peers = self.store.server._peers
        assert peers is not None
        leases = peers.producer.request_leases._leases.values()
        hand = next((lease for lease in leases if lease.request == request), None)
        return (0, 0) if hand is None else (len(hand.pinned), len(hand.missing))

    def events(self) -> dict[str, float]:
        """What its store has counted of hand-overs, to be shown when something went wrong."""
        peers = self.store.server._peers
        assert peers is not None
        gauges = peers.gauges().items()
        return {labels[0]: value for (_, *labels), value in gauges if labels and value}

    def fetched(self) -> int:
        """Count the blocks that came from peers, in all groups."""
        return self.namespace.tiering.counts["peer", "loaded"]


@contextmanager
def node(
    store: LiveStore,
    name: str,
    shape: Shape,
    *,
    push: bool = False,
    slots: int = CREDITS,
    step_loads: StepLoads | None = None,
) -> Iterator[Node]:
    made = Node(store, name, shape, push=push, slots=slots, step_loads=step_loads)
    try:
        made.attach()
        yield made
    finally:
        made.close()
