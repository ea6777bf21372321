"""Two real engines: one computes prompts, the other goes on with them, wherever blocks are."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore.core.types import GroupRule, window_rule
from kvstore.store import admin
from tests.bench.engine import Request
from tests.bench.handover import HANDED
from tests.bench.models import GEMMA_WINDOW, prompt
from tests.bench.store import StoreProcess, free_port
from tests.engine.identity import assert_same
from tests.engine.served import Node
from tests.engine.support import (
    BLOCK_BYTES,
    CAPACITY,
    ENGINE_BLOCK,
    GROUPS,
    Reference,
    eventually,
    forget,
    given,
    numbers,
    only_long,
    settled,
    since,
)

TOKENS_OUT = 16
PROMPTS = 20
RULES = {"llama_s": [GroupRule()]}
RULES["gemma3"] = [GroupRule(), *[window_rule(GEMMA_WINDOW, ENGINE_BLOCK)] * 3]
assert all(len(rules) == GROUPS[name] for name, rules in RULES.items())


class Patient(Node):
    """Its store waits for peers and disks, however slow the machine is."""

    def __init__(
        self, model: Path, folder: Path, ends: ExitStack, settings: str = "", **extra: Any
    ) -> None:
        """settings: more sections of the store's configuration; extra: the connector's."""
        folder.mkdir()
        self.direct = bool(extra.get("direct"))
        self.port = free_port()
        patient = '[engine]\npromote = "60s"\npromote_limit = "300s"\n'
        settings = f'{patient}[peer]\nlisten = "127.0.0.1:{self.port}"\n{settings}'
        store = StoreProcess(folder, CAPACITY, settings, module="tests.harness.serve_patient")
        super().__init__(model, store, ends, **extra)

    def compute(self, requests: Sequence[Request]) -> list[Any]:
        """Compute prompts for another engine, many more of them at once than there are slots.

        Returns what is handed over. The engine's blocks are its own no more then.
        """
        results = self.run(requests, [HANDED] * len(requests), 1)
        params = [result.kv_transfer_params for result in results]
        handed = [(back or {}).get("remote_num_tokens") for back in params]
        assert handed == [len(r.tokens) for r in requests]
        forget(self.engine)
        return params

    def empty_memory(self) -> None:
        """Start the store again: what its memory had is on its disk."""
        self.settle()
        self.restart()
        self.attached()

    def settle(self) -> None:
        """Wait until nothing is copied any more."""
        settled(lambda: numbers(self.address))

    def moved(self) -> float:
        """Bytes that its exporter has moved, or its engine's workers, as NIXL counts them."""
        found = numbers(self.address)
        ways = ("pulled", "pushed", "direct")
        return sum(found.get(f"kvstore_hand_over_moved_bytes{{{way}}}", 0) for way in ways)

    def read_bytes(self) -> int:
        """Bytes that the store process has read from disks."""
        found: int = psutil.Process(self.store.pid).io_counters().read_bytes
        return found


class Pair:
    """Both nodes, and what their hand-overs are expected to move."""

    def __init__(self, name: str, prefill: Patient, decode: Patient, reference: Reference) -> None:
        self.name, self.prefill, self.decode = name, prefill, decode
        self._reference = reference

    def needed(self, tokens: int) -> list[tuple[int, int]]:
        """The blocks, by group and index, that a prompt needs of which so many tokens come."""
        blocks, inside = -(-tokens // ENGINE_BLOCK), tokens % ENGINE_BLOCK
        return [
            (group, index)
            for group, rule in enumerate(RULES[self.name])
            for index in range(rule.first_of(blocks, inside=inside), blocks)
        ]

    def in_memory(self, tokens: Sequence[int]) -> dict[str, int]:
        """Count, by where they are read, the blocks of prompts of which so many tokens come.

        A partly filled last block is read from its slot: an engine shows whole ones only.
        """
        needed = [(index, count) for count in tokens for _, index in self.needed(count)]
        if not self.prefill.direct:
            return {"cpu": len(needed)}
        whole = sum(index < count // ENGINE_BLOCK for index, count in needed)
        return {"gpu": whole, "cpu": len(needed) - whole}

    def go_on(
        self,
        requests: Sequence[Request],
        params: Sequence[Any],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, float], float]:
        """Have the decode engine go on: the same tokens as those of an engine alone.

        Returns what its store has counted, and the bytes that NIXL has moved.
        """
        expected = self._reference(self.name, requests, TOKENS_OUT)
        before, moved = numbers(self.decode.address), self._moved()
        meanwhile()
        got = self.decode.run(requests, params, TOKENS_OUT)
        assert_same(expected, got)
        found = settled(lambda: since(self.decode.address, before))
        return found, self._moved() - moved

    def _moved(self) -> float:
        return self.prefill.moved() + self.decode.moved()


def fetched(found: dict[str, float]) -> dict[str, int]:
    """Blocks that came from the peer, by where it had them."""
    tiers = ("gpu", "cpu", "nvme", "prefill", "other")
    counts = {tier: int(found.get(f"kvstore_fetched_blocks{{{tier}}}", 0)) for tier in tiers}
    return {tier: count for tier, count in counts.items() if count}


SLOTS = ("pull", "push", "direct", "direct push")
ENGINES = ("direct from the engine",)
QUICK = {
    *("llama_s pull", "llama_s push", "llama_s direct", "llama_s direct from the engine"),
    *("gemma3 push", "gemma3 direct from the engine"),
}


def ways(*names: str) -> pytest.MarkDecorator:
    """Say how prompts are handed over; what is not QUICK is left to `make test-long`."""
    cases = [f"{model} {way}" for model in GROUPS for way in names]
    marked = [case if case in QUICK else only_long(case) for case in cases]
    return pytest.mark.parametrize("nodes", marked, indirect=True, scope="module")


@pytest.fixture(scope="module")
def prefill_of(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, bool], Patient]]:
    """The prefill node of a model, whose engine shows its memory or not: one at a time."""
    with ExitStack() as ends:

        @lru_cache(maxsize=1)
        def started(name: str, serving: bool) -> Patient:
            ends.close()
            folder = tmp_path_factory.mktemp("prefill")
            disk = f'[nvme]\npath = "{folder / "kv"}"\ncapacity = "1GiB"\n'
            return Patient(model(name), folder / "p", ends, disk, direct=serving)

        yield started


@pytest.fixture(scope="module")
def nodes(
    request: pytest.FixtureRequest,
    prefill_of: Callable[[str, bool], Patient],
    model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Patient, Patient]]:
    """A model, and two nodes with nothing in their stores."""
    name, _, way = request.param.partition(" ")
    direct, serving = way.startswith("direct"), "from" in way
    how = {"transfer": "push" if "push" in way else "pull", "direct": direct}
    prefill = prefill_of(name, serving)
    admin.clear(prefill.address)
    with ExitStack() as ends:
        decode = Patient(model(name), tmp_path_factory.mktemp("decode") / "d", ends, **how)
        if serving:
            seeds = iter(range(9000, 10000))
            eventually(lambda: from_engine(prefill, decode, next(seeds)))
        yield name, prefill, decode


def from_engine(prefill: Patient, decode: Patient, seed: int) -> bool:
    """Whether a prompt comes from engine memory: from slots until both engines' agents have met."""
    small = [Request(id=f"{seed}", tokens=prompt(seed, 40))]
    before = numbers(decode.address)
    decode.run(small, prefill.compute(small), 1)
    return "gpu" in fetched(settled(lambda: since(decode.address, before)))


@pytest.fixture
def pair(nodes: tuple[str, Patient, Patient], reference: Reference) -> Pair:
    return Pair(*nodes, reference)


def prompts(seed: int, shortest: int) -> list[Request]:
    return [
        Request(id=f"{seed}.{number}", tokens=prompt(seed + number, shortest + 37 * number))
        for number in range(PROMPTS)
    ]


@ways(*SLOTS, *ENGINES)
@pytest.mark.vllm
def test_L1_P3_prompts_that_the_prefill_node_has_in_memory(pair: Pair) -> None:
    requests = prompts(7000, 40)
    params = pair.prefill.compute(requests)
    found, moved = pair.go_on(requests, params)
    tokens = [given(pair.name, len(request.tokens)) for request in requests]
    assert found["kvstore_hit_tokens{peer}"] == sum(tokens)
    blocks = sum(len(pair.needed(count)) for count in tokens)
    assert fetched(found) == pair.in_memory(tokens)
    assert moved == blocks * BLOCK_BYTES[pair.name]
    if pair.decode.direct:
        whole = sum(len(request.tokens) // ENGINE_BLOCK for request in requests)
        stored = found["kvstore_stored_blocks{stored}"]
        declined = found.get("kvstore_engine_events{store_declined}", 0)  # a slow machine's
        assert stored + declined >= whole, "read into the engine, then stored"
        assert stored > whole / 2


@ways(*SLOTS)
@pytest.mark.vllm
@pytest.mark.long
def test_L1_P3_prompts_that_the_prefill_node_has_on_disk(pair: Pair) -> None:
    requests = prompts(7100, 40)
    params = pair.prefill.compute(requests)
    pair.prefill.empty_memory()
    read = pair.prefill.read_bytes()
    found, moved = pair.go_on(requests, params)
    read = pair.prefill.read_bytes() - read
    tokens = [given(pair.name, len(request.tokens)) for request in requests]
    assert found["kvstore_hit_tokens{peer}"] == sum(tokens)
    blocks = sum(len(pair.needed(count)) for count in tokens)
    assert fetched(found) == {"nvme": blocks}
    assert moved == blocks * BLOCK_BYTES[pair.name]
    assert blocks <= read / BLOCK_BYTES[pair.name] < 1.2 * blocks, "blocks, and their headers"


@ways(*SLOTS)
@pytest.mark.vllm
@pytest.mark.long
def test_L1_P3_prompts_of_which_both_nodes_and_all_tiers_have_a_part(pair: Pair) -> None:
    """The first third is the decode node's own, the second in memory, the last on disk."""
    requests = prompts(7200, 400)
    params = pair.prefill.compute(requests)
    pair.prefill.empty_memory()
    # A few tokens beyond a block's end: what is computed of them fills none.
    own = [len(r.tokens) // (3 * ENGINE_BLOCK) * ENGINE_BLOCK + 5 for r in requests]
    both = [2 * len(r.tokens) // (3 * ENGINE_BLOCK) * ENGINE_BLOCK + 5 for r in requests]
    for node, parts in ((pair.prefill, both), (pair.decode, own)):
        some = [
            Request(id=f"part of {request.id}", tokens=request.tokens[:part])
            for request, part in zip(requests, parts, strict=True)
        ]
        node.run(some, [None] * len(some), 1)
        node.settle()
        forget(node.engine)
    expected: Counter[str] = Counter()
    for request, mine, theirs in zip(requests, own, both, strict=True):
        here = set(pair.needed(mine // ENGINE_BLOCK * ENGINE_BLOCK))
        in_memory = set(pair.needed(theirs // ENGINE_BLOCK * ENGINE_BLOCK))
        for block in pair.needed(given(pair.name, len(request.tokens))):
            expected["own" if block in here else "cpu" if block in in_memory else "nvme"] += 1
    found, moved = pair.go_on(requests, params)
    tokens = sum(given(pair.name, len(request.tokens)) for request in requests)
    assert found["kvstore_hit_tokens{peer}"] + found["kvstore_hit_tokens{cpu}"] == tokens
    blocks = expected["cpu"] + expected["nvme"]
    assert fetched(found) == {"cpu": expected["cpu"], "nvme": expected["nvme"]}
    assert moved == blocks * BLOCK_BYTES[pair.name]


@ways(*SLOTS, *ENGINES)
@pytest.mark.vllm
@pytest.mark.long
def test_P7_L1_prompts_that_the_prefill_node_is_computing(pair: Pair) -> None:
    """Both engines get them at once; the decode engine does not know yet how many tokens come."""
    requests = prompts(7300, 300)
    where = {
        "do_remote_prefill": True,
        "remote_engine_id": "prefill",
        "remote_host": "127.0.0.1",
        "remote_port": pair.prefill.port,
        "remote_block_ids": [[1]],
        "tp_size": 1,
    }
    params = [{**where, "remote_request_id": request.id} for request in requests]
    computing = threading.Thread(
        target=pair.prefill.run, args=(requests, [HANDED] * len(requests), 1)
    )

    def begin() -> None:
        computing.start()
        address = pair.prefill.address
        eventually(lambda: numbers(address).get("kvstore_hand_over_open{requests}"))

    found, moved = pair.go_on(requests, params, begin)
    computing.join()
    forget(pair.prefill.engine)
    whole = [(len(request.tokens) - 1) // ENGINE_BLOCK * ENGINE_BLOCK for request in requests]
    assert found["kvstore_hit_tokens{peer}"] == sum(whole)
    counts = fetched(found)
    assert counts.pop("gpu" if pair.prefill.direct else "prefill") > 0
    blocks = sum(len(pair.needed(count)) for count in whole)
    assert sum(fetched(found).values()) == blocks, found
    assert counts.keys() <= {"cpu", "prefill"}
    assert moved == blocks * BLOCK_BYTES[pair.name]
