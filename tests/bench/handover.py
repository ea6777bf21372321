"""`tests.bench handover`: time to first token of a prompt that another engine has computed.

Two real vLLM engines with a store each: pulled and pushed, between stores and straight into engine
memory; and two with vLLM's own NixlConnector. An engine that is pushed to has networks only, so
these bytes go over TCP, all others through shared memory.
In a round each pair gets a new prompt: the first engine computes it, the second one goes on with
what the first handed back. Its time runs from the request to its first token. Then the second
engine computes another prompt as long, by itself.

The engines step only when told to. vLLM's agents keep a processor busy each even when there is
nothing to do, so their engines are stopped (SIGSTOP) while others are measured.

Results: ttft_handed_over, against computing a prompt as long in the same engine, and
ttft_against_native, each for pull, push, direct and direct_push. transport: "tcp" for direct_push,
"shared memory" for all others.
"""

from __future__ import annotations

import itertools
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvstore.core.errors import KVStoreError
from tests.bench.engine import Engine, Request, tiered
from tests.bench.models import make_model, prompt
from tests.bench.report import Result, compared, in_turn, measured, progress
from tests.bench.steal import undisturbed
from tests.bench.store import StoreProcess, free_port
from tests.bench.ttft import COLD, PROMPT_TOKENS, REUSABLE, WARM_UP_ROUNDS, Times

PAIRS = 15
CPU_BYTES = 1 << 30
KV_CACHE_BYTES = 256 << 20  # four prompts
MODEL = "llama"
SEED_FIRST = 50_000
HANDED = {"do_remote_decode": True, "do_remote_prefill": False}
NATIVE = "NixlConnector"
INTO_ENGINE = "direct_push"  # which has networks only
OURS = ("pull", "push", "direct", INTO_ENGINE)
SYSTEMS = (*OURS, NATIVE)
HANDED_OVER, AGAINST_NATIVE = "ttft_handed_over", "ttft_against_native"


class Side:
    """One engine; frozen: it runs only while it is measured."""

    def __init__(self, engine: Engine, *, frozen: bool) -> None:
        self._engine = engine
        self._frozen = frozen
        if frozen:
            engine.kill("driver", signal.SIGSTOP)

    def run(self, name: str, seed: int, params: dict[str, Any] | None) -> tuple[float, Any]:
        """Run a prompt for one token; return the seconds that took, and what it hands back."""
        tokens = prompt(seed, PROMPT_TOKENS)
        request = Request(id=f"{name} {seed}", tokens=tokens, kv_transfer_params=params)
        result = self._engine.run([request], max_tokens=1, logprobs=0)[0]
        if result.ttft_s is None:
            raise KVStoreError(f"{request.id}: no token, {result.finish_reason}")
        self._engine.go_idle()  # what others have to be told is in a step
        return result.ttft_s, result.kv_transfer_params

    def fetched(self) -> float:
        """Count the tokens that have come from elsewhere so far."""
        return self._engine.metrics().get("external_prefix_cache_hits", 0.0)

    def wake(self) -> None:
        """Let it run, if it does not."""
        if self._frozen:
            self._engine.kill("driver", signal.SIGCONT)

    def sleep(self) -> None:
        """Let it run no more, if it would be in the way."""
        if self._frozen:
            self._engine.kill("driver", signal.SIGSTOP)


class Pair:
    """Who computes a prompt, and who goes on with it."""

    def __init__(self, system: str, prefill: Side, decode: Side) -> None:
        self._system = system
        self._prefill = prefill
        self._decode = decode

    def measure(self, seed: int) -> dict[str, float]:
        """Return seconds by name. Raises KVStoreError if the prompt was not handed over."""
        for side in (self._prefill, self._decode):
            side.wake()
        _, params = self._prefill.run(f"{self._system} prefill", seed, HANDED)
        if not params:
            raise KVStoreError(f"{self._system}: the prompt is not handed over")
        before = self._decode.fetched()
        handed_s, _ = self._decode.run(f"{self._system} decode", seed, params)
        fetched = self._decode.fetched() - before
        cold_s, _ = self._decode.run(f"{self._system} cold", -seed, None)
        for side in (self._prefill, self._decode):
            side.sleep()
        if fetched < REUSABLE:
            raise KVStoreError(f"{self._system}: {fetched:.0f} tokens came, expected {REUSABLE}")
        return {HANDED_OVER: handed_s, COLD: cold_s}


def ours(store: StoreProcess, way: str) -> dict[str, Any]:
    """Return the kv_transfer_config of an engine with our connector."""
    transfer = "push" if way.endswith("push") else "pull"
    return tiered(store=store.address, transfer=transfer, direct=way.startswith("direct"))


def native(role: str) -> dict[str, Any]:
    """Return the kv_transfer_config of an engine with vLLM's connector."""
    return {"kv_connector": NATIVE, "kv_role": role, "kv_buffer_device": "cpu"}


def native_env() -> dict[str, str]:
    """Return the environment of such an engine, for peers on this machine."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_NET_DEVICES": "lo",
    }


def run(pairs: int | None) -> list[Result]:
    """Measure; pairs: rounds after the first, which warms up."""
    rounds = (pairs or PAIRS) + WARM_UP_ROUNDS
    times: Times = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name,
        progress(len(SYSTEMS) + 2 + rounds * len(SYSTEMS)) as tell,  # two more compute prompts
        ExitStack() as ends,
    ):
        tell("making a model", 0)
        model = make_model(MODEL, Path(name))
        measured = started(Path(name), model, ends, tell)
        seeds = itertools.count(SEED_FIRST + 1)
        for number in range(rounds):
            for system in in_turn(SYSTEMS, number):
                tell(f"round {number} of {rounds - 1}: {system}")
                pair = measured[system]
                found, _ = undisturbed(lambda: pair.measure(next(seeds)))  # noqa: B023 - at once
                for what, seconds in found.items():
                    times[what, system] += [seconds] if number >= WARM_UP_ROUNDS else []
    return results(times)


def started(
    folder: Path, model: Path, ends: ExitStack, tell: Callable[..., None]
) -> dict[str, Pair]:
    """Start all engines and stores."""

    def side(what: str, connector: dict[str, Any], env: dict[str, str] | None = None) -> Side:
        tell(f"starting engine: {what}")
        engine = Engine(model, connector=connector, kv_cache_bytes=KV_CACHE_BYTES, env=env)
        made = Side(ends.enter_context(engine), frozen=env is not None)
        ends.callback(made.wake)  # to end in order
        return made

    stores = {}
    for name in ("prefill", *OURS):
        (folder / name).mkdir()
        process = StoreProcess(folder / name, str(CPU_BYTES), "[peer]\n", scraped=False)
        stores[name] = ends.enter_context(process)
    prefill = side("prefill", ours(stores["prefill"], "direct"))  # its memory can be read, too
    measured = {way: Pair(way, prefill, side(way, ours(stores[way], way))) for way in OURS}
    natives = [
        side(f"{NATIVE}, {role}", native(role), native_env())
        for role in ("kv_producer", "kv_consumer")
    ]
    return {**measured, NATIVE: Pair(NATIVE, *natives)}


def results(times: Times) -> list[Result]:
    """Turn the rounds into results: medians, and ratios within rounds."""
    found = []
    for system in SYSTEMS:
        cold, handed = times[COLD, system], times[HANDED_OVER, system]
        found += [
            _result(COLD, system, cold, None, ""),
            _result(HANDED_OVER, system, handed, cold, "cold"),
        ]
    for system in OURS:
        handed, theirs = times[HANDED_OVER, system], times[HANDED_OVER, NATIVE]
        found.append(_result(AGAINST_NATIVE, system, handed, theirs, NATIVE))
    return found


def _result(
    name: str, system: str, values: list[float], others: list[float] | None, against: str
) -> Result:
    parameters: dict[str, Any] = {
        "system": system,
        "prompt_tokens": PROMPT_TOKENS,
        "pairs": len(values),
    }
    if others is None:
        return measured(name, values, "ms", parameters)
    parameters["transport"] = "tcp" if system == INTO_ENGINE else "shared memory"
    return compared(name, values, others, "ms", against, parameters)
