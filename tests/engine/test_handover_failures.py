"""Two real engines and their stores, some of which die, freeze or are asked nonsense.

Whatever happens, the tokens are those of an engine alone, in time, and nothing is held in the end.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from kvstore.store import admin
from tests.bench.engine import Engine, Request
from tests.bench.handover import HANDED
from tests.bench.models import prompt
from tests.bench.steal import Watch
from tests.bench.store import StoreProcess, free_port
from tests.engine.identity import assert_same
from tests.engine.served import Node
from tests.engine.support import (
    CAPACITY,
    ENGINE_BLOCK,
    Reference,
    attach,
    eventually,
    forget,
    meanwhile,
    numbers,
    only_long,
    since,
)
from tests.harness.handover_nodes import exporter_of, gone

pytestmark = pytest.mark.vllm

TOKENS_OUT = 16
IN_TIME_S = 20.0  # a run that computes all takes two; an answer may wait for two, a load for ten
STARTED_S = 3.0  # an exporter takes half a second, alone
LEASE = "3s"  # tests.harness.serve_brief has such leases between stores, too
HELD = (
    *("kvstore_hand_over_bytes{held}", "kvstore_hand_over_bytes{landing}"),
    *("kvstore_hand_over_open{fetches}", "kvstore_hand_over_open{jobs}"),
    *("kvstore_hand_over_open{requests}", "kvstore_leases", "kvstore_jobs_open"),
)


class Mortal(Node):
    """Its store gives up early, and can be killed."""

    def __init__(self, model: Path, folder: Path, ends: ExitStack, **extra: Any) -> None:
        """extra: of the connector."""
        folder.mkdir()
        peer = f'[peer]\nlisten = "127.0.0.1:{free_port()}"\n'
        store = StoreProcess(folder, CAPACITY, peer, module="tests.harness.serve_brief")
        super().__init__(model, store, ends, lease=LEASE, **extra)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.store.pid)

    @property
    def exporter(self) -> psutil.Process:
        """Its process, once that has started: UCX may have ended the one before just now."""

        def started() -> psutil.Process | None:
            found = exporter_of(self.process)
            young = found is None or time.time() - found.create_time() < STARTED_S
            return None if young else found

        found = eventually(started)
        assert found is not None
        return found

    def kill(self) -> None:
        """End the store at once."""
        exporter = exporter_of(self.process)
        self.process.kill()
        eventually(lambda: exporter is None or gone(exporter))

    def attached(self) -> None:
        """Wait until the engine is with its store, and that has an exporter."""
        super().attached()
        assert self.exporter

    def nothing_held(self) -> None:
        """Wait until nothing is held for hand-overs, or by an answer."""

        def held() -> list[str]:
            self.engine.idle_steps(1)
            return [name for name in numbers(self.address) if name in HELD]

        eventually(lambda: not held())


WAYS = ["pull", *map(only_long, ("push", "direct", "direct push"))]


@pytest.fixture(scope="module", params=WAYS)
def nodes(
    request: pytest.FixtureRequest,
    model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Mortal, Mortal]]:
    folder = tmp_path_factory.mktemp("failing")
    with ExitStack() as ends:
        prefill = Mortal(model("llama_s"), folder / "p", ends)
        direct, push = "direct" in request.param, "push" in request.param
        how = {"transfer": "push" if push else "pull", "direct": direct}
        decode = Mortal(model("llama_s"), folder / "d", ends, **how)
        first = [Request(id="first", tokens=prompt(5000, 200))]  # memory is made for the first one
        computed = prefill.run(first, [HANDED], 1)
        decode.run(first, [result.kv_transfer_params for result in computed], 1)
        yield prefill, decode


@pytest.fixture
def pushed(request: pytest.FixtureRequest) -> bool:
    return "push" in request.node.name.rpartition("[")[2]


@pytest.fixture
def direct(request: pytest.FixtureRequest) -> bool:
    return "direct" in request.node.name.rpartition("[")[2]


@pytest.fixture
def both(nodes: tuple[Mortal, Mortal]) -> Iterator[tuple[Mortal, Mortal]]:
    yield nodes
    for node in nodes:
        node.attached()
        node.nothing_held()


class Asked:
    """Prompts that one engine has computed for another, and what is expected of that."""

    def __init__(self, prefill: Mortal, reference: Reference, seed: int, count: int = 6) -> None:
        self.requests = [
            Request(id=f"f{seed}.{number}", tokens=prompt(seed * 100 + number, 200 + 97 * number))
            for number in range(count)
        ]
        self.expected = reference("llama_s", self.requests, TOKENS_OUT)
        computed = prefill.run(self.requests, [HANDED] * count, 1)
        self.params: list[Any] = [result.kv_transfer_params for result in computed]
        assert all(given and given["remote_num_tokens"] for given in self.params)
        forget(prefill.engine)

    def go_on(self, decode: Mortal, params: Sequence[Any] | None = None) -> dict[str, float]:
        """Have them gone on with: the same tokens, in time; returns what the store counted."""
        before = {} if not decode.process.is_running() else _numbers(decode)
        watch = Watch()
        got = decode.run(self.requests, params or self.params, TOKENS_OUT)
        assert watch.own_s() < IN_TIME_S
        assert_same(self.expected, got)
        forget(decode.engine)
        return since(decode.address, before) if before and _numbers(decode) else {}


def _numbers(node: Mortal) -> dict[str, float]:
    with contextlib.suppress(admin.StoreUnreachable):
        return numbers(node.address)
    return {}


def goes_on(both: tuple[Mortal, Mortal], reference: Reference, seed: int) -> None:
    """After it all blocks come from the peer again."""
    prefill, decode = both
    for node in both:
        node.attached()
    found = Asked(prefill, reference, seed, 2).go_on(decode)
    assert found.get("kvstore_hit_tokens{peer}"), found


# What comes too late


def test_P4_B16_a_decode_that_comes_after_the_lease_gives_the_same_tokens(
    both: tuple[Mortal, Mortal], reference: Reference
) -> None:
    """Its blocks were reused: vLLM's own connector goes on with whatever is there then."""
    prefill, decode = both
    asked = Asked(prefill, reference, 51)
    prefill.nothing_held()
    admin.clear(prefill.address)
    others = [Request(id=f"o{n}", tokens=prompt(5900 + n, 900)) for n in range(12)]
    prefill.run(others, [None] * len(others), 4)
    found = asked.go_on(decode)
    assert found.get("kvstore_hit_tokens{peer}", 0) == 0
    goes_on(both, reference, 52)


# Who dies


def test_B15_a_prefill_store_that_is_killed_before_it_is_asked(
    both: tuple[Mortal, Mortal], reference: Reference
) -> None:
    prefill, decode = both
    asked = Asked(prefill, reference, 53)
    prefill.kill()
    asked.go_on(decode)
    prefill.restart()
    goes_on(both, reference, 54)


@pytest.mark.parametrize(
    "what",
    ["prefill store", *map(only_long, ("decode store", "exporter", "other exporter"))],
)
def test_B15_who_is_killed_during_the_transfer(
    both: tuple[Mortal, Mortal], reference: Reference, what: str, pushed: bool, direct: bool
) -> None:
    """Who moves the bytes hangs; the prefill store does, where workers read them at once."""
    prefill, decode = both
    seed = 60 + 2 * ["prefill store", "decode store", "exporter", "other exporter"].index(what)
    asked = Asked(prefill, reference, seed)
    frozen, other = (prefill, decode) if pushed else (decode, prefill)
    exporter = frozen.exporter
    hangs = prefill.process if direct else exporter
    hangs.suspend()
    begun = "kvstore_hand_over_open{fetches}" if direct else "kvstore_hand_over_bytes{landing}"

    def act() -> None:
        eventually(lambda: numbers(decode.address).get(begun), within_s=120)
        if what == "exporter":
            exporter.kill()
        elif what == "other exporter":
            other.exporter.kill()
        else:
            (prefill if what == "prefill store" else decode).kill()
        if not gone(hangs):
            hangs.send_signal(signal.SIGCONT)

    with meanwhile(act):
        asked.go_on(decode)
    for node in both:
        if gone(node.process):
            node.restart()
    goes_on(both, reference, seed + 1)


def prefilled(node: Mortal, engine: Engine, requests: Sequence[Request]) -> list[Any]:
    """Compute prompts with another engine of a node's store, which has all of them then."""
    before = _numbers(node)
    made = [msgspec.structs.replace(r, kv_transfer_params=HANDED) for r in requests]
    params = [result.kv_transfer_params for result in engine.run(made, max_tokens=1)]
    engine.go_idle()
    blocks = sum(-(-len(request.tokens) // ENGINE_BLOCK) for request in requests)
    name = "kvstore_stored_blocks{stored}"  # an engine that is idle may still copy
    eventually(lambda: since(node.address, before).get(name, 0) >= blocks)
    return params


def test_a_prefill_engine_that_is_gone_leaves_its_blocks(
    both: tuple[Mortal, Mortal], reference: Reference, model: Callable[[str], Path]
) -> None:
    """They are its store's: which goes on without it."""
    prefill, decode = both
    requests = [Request(id=f"g{n}", tokens=prompt(7700 + n, 300 + 64 * n)) for n in range(4)]
    expected = reference("llama_s", requests, TOKENS_OUT)
    with Engine(model("llama_s"), connector=attach(prefill.store, lease="60s")) as extra:
        params = prefilled(prefill, extra, requests)
        extra.kill("driver")
    before = numbers(decode.address)
    got = decode.run(requests, params, TOKENS_OUT)
    assert_same(expected, got)
    assert since(decode.address, before)["kvstore_hit_tokens{peer}"] > 0
    forget(decode.engine)


@pytest.mark.parametrize("what", [*map(only_long, ("store", "exporter")), "both"])
def test_B15_B20_a_prefill_node_that_freezes_and_goes_on(
    both: tuple[Mortal, Mortal], reference: Reference, what: str
) -> None:
    prefill, decode = both
    seed = 80 + 2 * ["store", "exporter", "both"].index(what)
    asked = Asked(prefill, reference, seed)
    stopped = [prefill.process] if what != "exporter" else []
    stopped += [prefill.exporter] if what != "store" else []
    for process in stopped:
        process.suspend()
    try:
        asked.go_on(decode)
        time.sleep(4)
    finally:
        for process in reversed(stopped):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    decode.nothing_held()
    goes_on(both, reference, seed + 1)


# Who asks for nonsense


def test_hand_over_parameters_that_are_wrong_are_computed_here(
    both: tuple[Mortal, Mortal], reference: Reference
) -> None:
    prefill, decode = both
    asked = Asked(prefill, reference, 90, 2)
    good = asked.params[0]
    for change, refused in (({"remote_port": None}, 1), ({"remote_port": 9}, 0)):
        admin.clear(decode.address)
        found = asked.go_on(decode, [good | change, None])
        assert found.get("kvstore_engine_events{transfer_refused}", 0) == refused, change
        assert not found.get("kvstore_hit_tokens{peer}"), change
    forged = {**good, "remote_request_id": "somebody else's", "remote_block_ids": [[9999]]}
    admin.clear(decode.address)
    asked.go_on(decode, [forged, None])  # keys say what blocks are, nothing else does
    for node in both:
        node.nothing_held()


# Who does not want it any more


@pytest.mark.parametrize("step", [*map(only_long, (0, 1, 3, 5, 8)), 2])
def test_P8_requests_that_are_aborted_on_the_decode_side_at_any_step(
    both: tuple[Mortal, Mortal], reference: Reference, step: int
) -> None:
    prefill, decode = both
    asked = Asked(prefill, reference, 100 + step)
    aborted = [
        msgspec.structs.replace(request, abort_step=step if number % 2 else None)
        for number, request in enumerate(asked.requests)
    ]
    got = decode.run(aborted, asked.params, TOKENS_OUT)
    pairs = zip(asked.expected, got, strict=True)
    kept = [(a, b) for number, (a, b) in enumerate(pairs) if not number % 2]
    assert_same([a for a, _ in kept], [b for _, b in kept])
    forget(decode.engine)
    for node in both:
        node.nothing_held()


@pytest.mark.parametrize("step", [*map(only_long, (0, 2)), 1])
def test_requests_that_are_aborted_on_the_prefill_side_hold_nothing(
    both: tuple[Mortal, Mortal], step: int
) -> None:
    prefill, _ = both
    requests = [
        Request(id=f"a{step}.{n}", tokens=prompt(9300 + 10 * step + n, 2500), abort_step=step)
        for n in range(3)
    ]
    results = prefill.run(requests, [HANDED] * 3, 8)
    assert all(result.kv_transfer_params is None for result in results if result.aborted)
    forget(prefill.engine)
    prefill.nothing_held()
