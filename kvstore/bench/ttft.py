"""`kvstore bench vllm`: time to first token of a long prompt, by where its KV comes from.

Three engines are alive at once: without a connector, with vLLM's own offloading, and with ours.
A round gives each of them, in turn, a prompt that none has seen: cold, again from the engine's
own prefix cache, and after that cache was emptied. The engines step only when told to, so two of
them are always quiet. What is compared is compared within a round, because the speed of a
machine that others share drifts by more than the systems differ.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvstore.bench.engine import Engine, Request
from kvstore.bench.models import make_model, prompt
from kvstore.bench.native import native_config
from kvstore.bench.report import Result, paired_ratio
from kvstore.errors import KVStoreError

PAIRS = 15
PROMPT_TOKENS = 8190  # no whole number of blocks: what of the last block can be reused differs
BLOCK_TOKENS = 32
CPU_BYTES = 512 << 20  # 30 rounds of 16 MiB each
KV_CACHE_BYTES = 64 << 20  # four prompts
MODEL = "llama_s"
SEED_FIRST = 10_000
COLD, GPU_HIT, CPU_HIT = "ttft_cold", "ttft_gpu_hit", "ttft_cpu_hit"
REUSABLE = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
# Against whom each time is measured: nothing to hit must cost nothing, a hit is a match for a peer.
REFERENCES = {COLD: ("none", ("native", "ours")), CPU_HIT: ("native", ("ours",))}
WARM_UP_ROUNDS = 1

Times = dict[tuple[str, str], list[float]]
"""Seconds, or steps, by (name, system), one value per round."""


def systems() -> dict[str, dict[str, Any] | None]:
    """Return the connector configuration of each system."""
    return {
        "none": None,
        "native": native_config(CPU_BYTES),
        "ours": {
            "kv_connector": "TieredConnector",
            "kv_connector_module_path": "connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cpu": CPU_BYTES},
        },
    }


def run(pairs: int | None) -> list[Result]:
    """Measure; pairs: rounds after the first, which warms up."""
    rounds = (pairs or PAIRS) + WARM_UP_ROUNDS
    times: Times = defaultdict(list)
    steps: Times = defaultdict(list)
    with (
        ExitStack() as stack,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("starting engines", total=len(systems()) * (rounds + 1))
        model = make_model(MODEL, Path(folder))
        engines = {}
        for system, connector in systems().items():
            progress.update(task, description=f"starting engine: {system}")
            engine = Engine(model, connector=connector, kv_cache_bytes=KV_CACHE_BYTES)
            engines[system] = stack.enter_context(engine)
            progress.advance(task)
        for number in range(rounds):
            for system in _order(list(engines), number):
                progress.update(task, description=f"round {number} of {rounds - 1}: {system}")
                measured = list(_visit(engines[system], system, SEED_FIRST + number))
                if number >= WARM_UP_ROUNDS:
                    for name, seconds, steps_taken in measured:
                        times[name, system].append(seconds)
                        steps[name, system].append(steps_taken)
                progress.advance(task)
    return results(times, steps)


def _order(names: list[str], number: int) -> list[str]:
    """Take turns at being first."""
    shift = number % len(names)
    return names[shift:] + names[:shift]


def _visit(engine: Engine, system: str, seed: int) -> Iterator[tuple[str, float, int]]:
    """One prompt in one engine: cold, from the engine's cache, from the connector's."""
    tokens = prompt(seed, PROMPT_TOKENS)
    for name, cached in ((COLD, 0), (GPU_HIT, REUSABLE), (CPU_HIT, REUSABLE)):
        if name == CPU_HIT:
            if system == "none":
                return
            _empty_prefix_cache(engine)
        request = Request(id=f"{system} {name} {seed}", tokens=tokens)
        result = engine.run([request], max_tokens=1, logprobs=0)[0]
        if result.cached_tokens != cached or result.ttft_s is None:
            raise KVStoreError(
                f"{system}, {name}: {result.cached_tokens} tokens were cached, expected {cached}"
            )
        yield name, result.ttft_s, result.steps_to_first_token or 0
        engine.idle_steps(3)  # native starts copying in the step after; nobody's work may linger


def _empty_prefix_cache(engine: Engine) -> None:
    if not engine.reset_prefix_cache():
        raise KVStoreError("some engine blocks are still in use")


def results(times: Times, steps: Times) -> list[Result]:
    """Turn the rounds into results: medians, and ratios within rounds."""
    found = []
    for (name, system), values in sorted(times.items()):
        reference, compared = REFERENCES.get(name, ("", ()))
        parameters: dict[str, Any] = {
            "system": system,
            "prompt_tokens": PROMPT_TOKENS,
            "pairs": len(values),
        }
        base = ratio = None
        if system in compared:
            others = times[name, reference]
            pair = paired_ratio(values, others)
            base, ratio = statistics.median(others) * 1000, pair.median
            difference = statistics.median(a - b for a, b in zip(values, others, strict=True))
            parameters |= {
                "against": reference,
                "ratio_low": pair.low,
                "ratio_high": pair.high,
                "difference_ms": round(difference * 1000, 3),
            }
        found.append(
            Result(
                name=name,
                value=statistics.median(values) * 1000,
                unit="ms",
                better="lower",
                reference=base,
                ratio=ratio,
                parameters=parameters,
            )
        )
    native = steps.get((CPU_HIT, "native"))
    for (name, system), counts in sorted(steps.items()):
        if name == CPU_HIT:
            base = statistics.mean(native) if native and system != "native" else None
            value = statistics.mean(counts)
            found.append(
                Result(
                    name="steps_per_hit",
                    value=value,
                    unit="steps",
                    better="lower",
                    reference=base,
                    ratio=value / base if base else None,
                    parameters={"system": system, "prompt_tokens": PROMPT_TOKENS},
                )
            )
    return found
