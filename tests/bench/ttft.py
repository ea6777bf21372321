"""`tests.bench vllm`: time to first token of a long prompt, by where its KV comes from.

Three engines are alive at once: without a connector, with vLLM's own offloading, and with ours.
A round gives each of them, in turn, a prompt that none has seen: cold, again from the engine's
own prefix cache, and after that cache was emptied. At the end our store is restarted, and gives
its engine every prompt once more, from disk. The engines step only when told to, so two of them
are always quiet. What is compared is compared within a round, because the speed of a machine that
others share drifts by more than the systems differ.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvstore.core.errors import KVStoreError
from kvstore.store import admin
from tests.bench.engine import Engine, Request, tiered
from tests.bench.models import make_model, prompt
from tests.bench.native import native_config
from tests.bench.report import Result, compared, in_turn, measured, progress
from tests.bench.store import StoreProcess, numbers

PAIRS = 15
PROMPT_TOKENS = 8190  # no whole number of blocks: what of the last block can be reused differs
BLOCK_TOKENS = 32
CPU_BYTES = 512 << 20  # 30 rounds of 16 MiB each
DISK_BYTES = 1 << 30
KV_CACHE_BYTES = 64 << 20  # four prompts
MODEL = "llama_s"
SEED_FIRST = 10_000
COLD, GPU_HIT, CPU_HIT = "ttft_cold", "ttft_gpu_hit", "ttft_cpu_hit"
NVME_HIT = "ttft_nvme_restart"
REUSABLE = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
# Against what each time is measured: nothing to hit must cost nothing, a hit is a match for a peer,
# and one from disk is worth its while.
REFERENCES = {
    (COLD, "native"): (COLD, "none"),
    (COLD, "ours"): (COLD, "none"),
    (CPU_HIT, "ours"): (CPU_HIT, "native"),
    (NVME_HIT, "ours"): (COLD, "ours"),
}
WARM_UP_ROUNDS = 1
SETTLE_S = 10.0
ATTACH_S = 30.0

Times = dict[tuple[str, str], list[float]]
"""Seconds by (name, system), one value per round."""


def systems(address: str) -> dict[str, dict[str, Any] | None]:
    """Return the connector configuration of each system; address: our store's."""
    return {
        "none": None,
        "native": native_config(CPU_BYTES),
        "ours": tiered(store=address),
    }


def run(pairs: int | None) -> list[Result]:
    """Measure; pairs: rounds after the first, which warms up."""
    rounds = (pairs or PAIRS) + WARM_UP_ROUNDS
    times: Times = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name,
        StoreProcess(Path(name), str(CPU_BYTES), disk(Path(name))) as store,
        progress(len(systems("")) * (rounds + 1)) as tell,
        ExitStack() as stack,
    ):
        tell("making a model", 0)
        model = make_model(MODEL, Path(name))
        engines = {}
        for system, connector in systems(store.address).items():
            tell(f"starting engine: {system}")
            engine = Engine(model, connector=connector, kv_cache_bytes=KV_CACHE_BYTES)
            engines[system] = stack.enter_context(engine)
        for number in range(rounds):
            for system in in_turn(list(engines), number):
                tell(f"round {number} of {rounds - 1}: {system}")
                visit = Visit(engines[system], system, number, store)
                for what, seconds in visit.measure():
                    if number >= WARM_UP_ROUNDS:
                        times[what, system].append(seconds)
        tell("restarting our store", 0)
        times[NVME_HIT, "ours"] = list(_after_restart(engines["ours"], store, rounds))
    return results(times)


def disk(folder: Path) -> str:
    """Return the section of the store's file."""
    return f'[nvme]\npath = "{folder}/kv"\ncapacity = {DISK_BYTES}\n'


def _is_back(store: StoreProcess) -> bool:
    """Tell whether the engine is attached and the disk's index is read."""
    found = {tuple(s.labels.values()) for s in admin.stats(store.address) if s.value}
    return ("active",) in found and ("nvme", "ok") in found


def _after_restart(engine: Engine, store: StoreProcess, rounds: int) -> Iterator[float]:
    """Yield the seconds of each round's prompt when only the disk still has it."""
    store.stop()
    if not engine.reset_prefix_cache():
        raise KVStoreError("some engine blocks are still in use")
    store.__enter__()
    deadline_s = time.monotonic() + ATTACH_S
    while not _is_back(store):
        if time.monotonic() > deadline_s:
            raise KVStoreError(f"the engine did not find its store again in {ATTACH_S:.0f} s")
        engine.run([Request(id="tick", tokens=[3, 4, 5])], max_tokens=1)
    for number in range(WARM_UP_ROUNDS, rounds):
        yield Visit(engine, "ours", number, store).run(NVME_HIT, REUSABLE)[1]
        engine.go_idle()


class Visit:
    """One new prompt in one engine."""

    def __init__(self, engine: Engine, system: str, number: int, store: StoreProcess) -> None:
        self._engine = engine
        self._system = system
        self._number = number
        self._store = store

    def measure(self) -> Iterator[tuple[str, float]]:
        """Yield name and seconds: cold, from the engine's cache, from the connector's."""
        yield self.run(COLD, 0)
        self._settle()
        yield self.run(GPU_HIT, REUSABLE)
        if self._system != "none":
            self._settle()
            if not self._engine.reset_prefix_cache():
                raise KVStoreError(f"{self._system}: some engine blocks are still in use")
            yield self.run(CPU_HIT, REUSABLE)
        self._settle()

    def run(self, name: str, cached: int) -> tuple[str, float]:
        """Run the prompt once; return name and seconds."""
        request = Request(
            id=f"{self._system} {name} {self._number}",
            tokens=prompt(SEED_FIRST + self._number, PROMPT_TOKENS),
        )
        result = self._engine.run([request], max_tokens=1, logprobs=0)[0]
        if result.cached_tokens != cached or result.ttft_s is None:
            raise KVStoreError(
                f"{request.id}: {result.cached_tokens} tokens were cached, expected {cached}"
            )
        return name, result.ttft_s

    def _settle(self) -> None:
        """Let copies end: native ones start in the step after, ours run beside the engine."""
        self._engine.go_idle()
        expected = (self._number + 1) * PROMPT_BLOCKS
        deadline_s = time.monotonic() + SETTLE_S
        while self._system == "ours" and _stored(self._store) < expected:
            if time.monotonic() > deadline_s:
                raise KVStoreError(f"{_stored(self._store)} blocks stored, expected {expected}")
            time.sleep(0.01)


def _stored(store: StoreProcess) -> int:
    """Count the blocks that are both in memory and on disk by now."""
    found = numbers(store.address)
    names = "kvstore_stored_blocks{stored}", "kvstore_tier_blocks{nvme,stored}"
    return int(min(found.get(name, 0) for name in names))


def results(times: Times) -> list[Result]:
    """Turn the rounds into results: medians, and ratios within rounds."""
    found = []
    for (name, system), values in sorted(times.items()):
        reference = REFERENCES.get((name, system))
        how: dict[str, Any] = {
            "system": system,
            "prompt_tokens": PROMPT_TOKENS,
            "pairs": len(values),
        }
        if reference is None:
            found.append(measured(name, values, "ms", how))
            continue
        others = times[reference]
        against = " ".join(reference) if reference[0] != name else reference[1]
        difference = statistics.median(a - b for a, b in zip(values, others, strict=True))
        how["difference_ms"] = round(difference * 1000, 3)
        found.append(compared(name, values, others, "ms", against, how))
    return found
