"""`tests.bench attach`: what attaching to a store costs an engine, without an engine.

A real store process, real sockets and both real halves of the connector. Time is a round trip's,
or CPU time of the thread that would be the engine's; bytes are counted.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.core.errors import KVStoreError
from kvstore.store import admin
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.bench.attach_engine import (
    BLOCK_TOKENS,
    HASH_BYTES,
    PAGE_BYTES,
    STEP_TOKENS,
    BenchEngine,
    Request,
)
from tests.bench.echo import Echo
from tests.bench.report import Result, percentile, progress
from tests.bench.store import StoreProcess

LOOKUP_KEYS = 256
RESIDENT_BLOCKS = 10_240
ROUND_TRIPS = 2000
ROUND_TRIPS_WARM_UP = 100
IN_FLIGHT = 256
STEPS = 2000
# Prompts arrive, and as many requests end, so that prompts of any length bring as many tokens;
# short ones arrive together, so that prompts of any length fill the steps that prefill.
ARRIVING_TOKENS_PER_STEP = 256
PROMPT_TOKENS = (1024, 8192, 65536)
CAPACITY = "256MiB"
ANSWER_S = 5.0
WAIT_STEPS = 10  # that a prompt stays for, so that all of it finds slots
_NAMES = [f"request {number}" for number in range(IN_FLIGHT)]
_BY_NAME = {name: [number] for number, name in enumerate(_NAMES)}


def run(pairs: int | None) -> list[Result]:
    """Measure everything; pairs: round trips, instead of the default."""
    with progress(1 + len(PROMPT_TOKENS)) as tell:
        tell("lookups", 0)
        with _store() as store:
            results = _lookups(store, pairs or ROUND_TRIPS)
        for prompt_tokens in PROMPT_TOKENS:
            tell(f"scheduler half, prompts of {prompt_tokens}")
            with _store() as store:
                results.append(_steps(store, prompt_tokens))
    return results


@contextmanager
def _store() -> Iterator[StoreProcess]:
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name,
        StoreProcess(Path(name), CAPACITY) as store,
    ):
        yield store


def _lookups(store: StoreProcess, rounds: int) -> list[Result]:
    """Fill the store with unique prompts, count the bytes of that, then look them up."""
    prompt_tokens = LOOKUP_KEYS * BLOCK_TOKENS
    count = RESIDENT_BLOCKS // LOOKUP_KEYS
    with BenchEngine(store.address, 2 * RESIDENT_BLOCKS, requests_max=8) as engine:
        prompts = [engine.new_hashes(prompt_tokens) for _ in range(count)]
        for number, hashes in enumerate(prompts):
            engine.add(Request(f"fill {number}", list(hashes), output_tokens=WAIT_STEPS))
        while engine.busy:
            engine.step()
        stored = _settled(engine, store, count * LOOKUP_KEYS)
        copied_bytes = engine.worker.take_stats()["store_bytes"]
        packed = [b"".join(hashes) for hashes in prompts]
        ours, bare = _round_trips(engine, packed, rounds)
    p50, bare_p50 = statistics.median(ours) * 1e3, statistics.median(bare) * 1e3
    how = {
        "keys": LOOKUP_KEYS,
        "resident_blocks": stored,
        "round_trips": len(ours),
        "p99_ms": round(percentile(ours, 0.99) * 1e3, 4),
        "against": "echo",
    }
    copied = {"copied_bytes": copied_bytes, "stored_blocks": stored}
    return [
        Result("lookup_256_p50", p50, "ms", reference=bare_p50, parameters=how),
        Result(
            "bytes_copied_over_new", copied_bytes / (stored * PAGE_BYTES), "", parameters=copied
        ),
    ]


def _settled(engine: BenchEngine, store: StoreProcess, expected: int) -> int:
    """Wait until every block offered is stored; return how many are."""
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:
        engine.step()
        found = Counter[str]()
        for stat in admin.stats(store.address):
            if stat.name == "kvstore_stored_blocks":
                found[stat.labels["outcome"]] += int(stat.value)
        if sum(found.values()) >= expected:
            return found["stored"]
    raise KVStoreError(f"stored {found}, expected {expected} blocks")


def _round_trips(
    engine: BenchEngine, packed: list[bytes], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of lookups and, in turn, of a bare exchange of as many bytes."""
    ours, bare = [], []
    hit = p.Hit(bytes(4 * LOOKUP_KEYS), bytes(4 * LOOKUP_KEYS), bytes(4 * LOOKUP_KEYS))
    answer = p.Answers(granted=(p.Granted(2000, 2000, 30000, (hit,)),))
    question = p.Step((p.Lookup(2000, packed[0], HASH_BYTES),), release=(2000,))
    with Echo(len(framing.encode(question)), len(framing.encode(answer))) as echo:
        for number in range(rounds + ROUND_TRIPS_WARM_UP):
            started_s = time.perf_counter()
            _lookup(engine, packed[number % len(packed)])
            middle_s = time.perf_counter()
            echo.round_trip()
            ended_s = time.perf_counter()
            if number >= ROUND_TRIPS_WARM_UP:
                ours.append(middle_s - started_s)
                bare.append(ended_s - middle_s)
    return ours, bare


def _lookup(engine: BenchEngine, hashes: bytes) -> None:
    client = engine.client
    ask = client.ask(p.Lookup(0, hashes, HASH_BYTES))
    if not ask:
        raise KVStoreError("detached from the store")
    client.send_step()
    deadline_s = time.monotonic() + ANSWER_S
    while (grant := client.grant(ask)) is None:
        client.receive(ANSWER_S)
        if time.monotonic() > deadline_s:
            raise KVStoreError(f"no answer in {ANSWER_S:.0f} s")
    if len(grant.hits) != 1 or len(grant.hits[0]) != LOOKUP_KEYS:
        raise KVStoreError(f"a lookup of {LOOKUP_KEYS} resident blocks found {grant}")
    client.drop(ask)


def _steps(store: StoreProcess, prompt_tokens: int) -> Result:
    """CPU time per step with many requests decoding, one ending and one arriving now and then."""
    # The first requests share a prompt and end in turn; then each new one has its own.
    together = max(1, STEP_TOKENS // prompt_tokens)
    every = together * prompt_tokens // ARRIVING_TOKENS_PER_STEP
    output_tokens = IN_FLIGHT // together * every
    blocks = (IN_FLIGHT + (STEPS // every + 1) * together) * (prompt_tokens + STEPS) // BLOCK_TOKENS
    # Unequal rests, or all of them would complete their blocks in the same steps.
    rng = random.Random(IN_FLIGHT)
    with BenchEngine(store.address, blocks, IN_FLIGHT) as engine:
        shared = engine.new_hashes(prompt_tokens)
        first = [
            Request(f"first {number}", list(shared), STEPS, rng.randrange(1, BLOCK_TOKENS))
            for number in range(IN_FLIGHT)
        ]
        for request in first:
            engine.add(request)
            while engine.waiting:
                engine.step()
        for number, request in enumerate(first):
            request.tokens_max = request.num_tokens + (number // together + 1) * every
        engine.arrival_ns.clear()
        gc.collect()
        gc.freeze()  # as engines do when they have started
        times_ns, loops_ns = [], []
        for number in range(STEPS):
            for arriving in range(together if number % every == 0 else 0):
                hashes, rest = engine.new_hashes(prompt_tokens), rng.randrange(1, BLOCK_TOKENS)
                engine.add(Request(f"next {number}/{arriving}", hashes, output_tokens, rest))
            times_ns.append(engine.step())
            loops_ns.append(_bare_loop_ns())
        declined = engine.half.take_stats().get("store_declined", 0)
        gc.unfreeze()
    p99_us, loop_p99_us = percentile(times_ns, 0.99) / 1e3, percentile(loops_ns, 0.99) / 1e3
    return Result(
        "scheduler_step_p99",
        p99_us,
        "us",
        reference=loop_p99_us,
        parameters={
            "prompt_tokens": prompt_tokens,
            "in_flight": IN_FLIGHT,
            "block_tokens": BLOCK_TOKENS,
            "steps": STEPS,
            "p50_us": round(percentile(times_ns, 0.5) / 1e3, 1),
            "max_us": round(max(times_ns) / 1e3, 1),
            "arrival_us": round(statistics.median(engine.arrival_ns) / 1e3, 1),
            "declined": declined,
            "against": "bare loop",
        },
    )


def _bare_loop_ns() -> int:
    """CPU time of looking every request up once: what visiting them cannot cost less than."""
    started_ns = time.thread_time_ns()
    for name in _NAMES:
        _BY_NAME.get(name)
    return time.thread_time_ns() - started_ns
